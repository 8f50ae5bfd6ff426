"""The processes of a program, as the environment tells each of them: launchers and schedulers set variables."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd.errors import MeshError


class Task(NamedTuple):
    """What one source says of this process.

    Attributes:
      source: Who says it, as a message names it.
      rank: Which of the processes this is, from 0.
      count: How many processes there are; None where the source does not say.
      coordinator: `host:port` of process 0; None where JAX finds it, or nobody says.
      detected: Whether JAX finds the rest from the same variables.
    """

    source: str
    rank: int
    count: int | None
    coordinator: str | None = None
    detected: bool = False

    def __str__(self) -> str:
        return f"{self.source}: rank {self.rank}{f' of {self.count}' if self.count is not None else ''}"


LAUNCHER = "python -m spmd launch"
REMADE = "SPMD_REMADE"  # what a process that `cluster.remake` has started anew is told


def tasks(environment: Mapping[str, str] = os.environ) -> list[Task]:
    """Return what the environment says, the most certain source first.

    A step of a scheduler counts, its allocation does not: a shell inside an allocation has one process.

    Raises:
      MeshError: A variable is not a number.
    """
    remade = json.loads(environment.get(REMADE, "{}"))
    if "rank" in remade:  # all others say how it was at first
        return [Task("cluster.remake", remade["rank"], remade["count"], remade["coordinator"])]
    found = [
        _launched(environment),
        _pair(environment, "SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        _pair(environment, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        _kubernetes(environment),
        _torch(environment),
    ]
    return [one for one in found if one is not None]


def forgotten() -> Task | None:
    """The source that says there are several processes, for a program that did not join them."""
    found = agreed(None, tasks())
    return found if found is not None and found.count is not None else None


def agreed(given: Task | None, found: Sequence[Task]) -> Task | None:
    """The source to go by; None for a program that is alone.

    Args:
      given: What the program's own arguments say, which come first.
      found: What the environment says.

    Who says that there is one process contradicts nobody: a step of one task can start processes of its own.

    Raises:
      MeshError: Two sources disagree.
    """
    given = None if REMADE in os.environ else given
    if given is not None and given.count == 1:
        return None
    several = [one for one in (given, *found) if one is not None and one.count != 1]
    if not several:
        return Task("JAX (TPU)", 0, None, detected=True) if _on_a_tpu() else None
    first = several[0]
    for one in several[1:]:
        if first.rank != one.rank or (first.count != one.count and None not in (first.count, one.count)):
            rule = "two sources disagree on which process this is."
            advice = "leave the arguments out; or unset the variables of the one that is wrong"
            raise MeshError(rule, call="initialize(...)", got=[str(first), str(one)], advice=advice)
    return first


def _on_a_tpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "") or "tpu"
    return "tpu" in platforms and importlib.util.find_spec("libtpu") is not None


def _launched(environment: Mapping[str, str]) -> Task | None:
    if "SPMD_RANK" not in environment:
        return None
    rank, count = _number(environment, "SPMD_RANK"), _number(environment, "SPMD_PROCESSES")
    return Task(LAUNCHER, rank, count, environment.get("SPMD_COORDINATOR"))


def _pair(environment: Mapping[str, str], source: str, rank: str, count: str) -> Task | None:
    if rank not in environment or count not in environment:
        return None
    return Task(f"{source} ({rank}, {count})", _number(environment, rank), _number(environment, count), detected=True)


def _kubernetes(environment: Mapping[str, str]) -> Task | None:
    """An indexed job of Kubernetes, which tells each pod its index only."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    return Task("Kubernetes (JOB_COMPLETION_INDEX)", rank, None, detected=True)


def _torch(environment: Mapping[str, str]) -> Task | None:
    """The variables of torchrun, which many clusters' scripts set."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    where = f"{host}:{port}" if host and port else None
    return Task("RANK, WORLD_SIZE", _number(environment, "RANK"), _number(environment, "WORLD_SIZE"), where)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise MeshError(f"the variable {name} is a number, not {text!r}.", advice=f"unset {name}, or set it right")
    return int(text)
