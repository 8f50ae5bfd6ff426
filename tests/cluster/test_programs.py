"""Operations, layers and placements in several processes equal NumPy."""

import os
import random
import subprocess
import sys

import pytest

from tests.cluster.harness import ROOT, Ended, exhaustive, launched
from tests.cluster.programs import CHECKS
from tests.sampler import first_seed, rare

SAMPLE = 3  # of the families, by default


def names() -> list[str]:
    """All families and layers; another process looks for them, because drawing them is slow."""
    code = "from tests.cluster import families; print(*families.names(), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def check_families(found: Ended, chosen: list[str]) -> None:
    said = [line for line in found.out.splitlines() if line.startswith(("[0] ok ", "[0] FAILED "))]
    assert found.code == 0, "\n".join([*said, found.err])
    assert len(said) == len(chosen)


def check_programs(found: Ended, count: int) -> None:
    assert found.code == 0, found.err
    wanted = [one.__name__ for one in CHECKS]
    for rank in range(count):
        mine = [line.removeprefix(f"[{rank}] ") for line in found.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert [line for line in mine if line in wanted] == wanted


@rare
def test_two_processes_compute_what_numpy_does():
    chosen = random.Random(first_seed()).sample(FAMILIES, SAMPLE)
    found = launched(2, "-m", "tests.cluster.programs", str(first_seed()), *chosen, devices=None)
    check_programs(found, 2)
    check_families(found, chosen)


@exhaustive
def test_four_processes_compute_what_numpy_does():
    check_programs(launched(4, "-m", "tests.cluster.programs", "0", devices=None), 4)


@exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_every_family_and_every_layer_on_eight_devices_of_several_processes(count):
    chosen = names()
    assert len(chosen) > 50 and set(FAMILIES) < set(chosen)
    found = launched(count, "-m", "tests.cluster.families", str(first_seed()), *chosen, devices=None, timeout=1200)
    check_families(found, chosen)


FAMILIES = [
    "verbs",
    "relayouts",
    "copies",
    "permutations",
    "transforms",
    "einsum",
    "reductions",
    "rearrangements",
    "along_a_dimension",
    "takes",
    "placement",
]
