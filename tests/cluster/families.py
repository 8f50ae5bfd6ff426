"""Random programs of every family of `tests/programs.py`, and every layer, on eight devices of several processes.

`python -m spmd launch -n 2 -m tests.cluster.families SEED NAME ...` runs one program of each family, and of each layer
that is named `layer:NAME`; the processes have eight devices together. Each compares whole results with plain JAX and
the simulator, which it computes by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import spmd
from tests import conftest

if TYPE_CHECKING:
    from tests.programs import Program

CONFIGURED = conftest  # it asks for eight devices in each process; who joins others asks for fewer
DEVICES = 8
TRIES = 200  # programs that are drawn until one has a mesh of all devices


def names() -> list[str]:
    """All families, and all layers one by one."""
    from tests import layers, programs

    layers.register_all()
    return [*(name for name in programs.FAMILIES if name != "layer"), *(f"layer:{name}" for name in layers.CASES)]


def drawn(name: str, seed: int) -> Program:
    """The first program from `seed` on whose mesh has all devices."""
    from tests import layers, programs
    from tests.sampler import Choices

    family, _, layer = name.partition(":")
    if layer:
        every = [case for case in layers.CASES[layer][0]() if programs.devices(case.mesh) == DEVICES]
        return programs.of_layer(every[seed % len(every)])
    make, _ = programs.FAMILIES[family]
    for i in range(TRIES):
        with contextlib.suppress(spmd.errors.MeshError):  # a mesh that lacks a process
            if (found := make(Choices(seed + i))).devices == DEVICES:
                return found
    raise ValueError(f"no program of {TRIES} has a mesh of {DEVICES} devices")


def run(seed: int, chosen: Sequence[str]) -> list[str]:
    """Run them one by one, in all processes in the same order. Those that fail."""
    from tests import layers, programs

    assert jax.device_count() == DEVICES
    layers.register_all()
    failed = []
    for name in chosen:
        since = time.monotonic()
        program = drawn(name, seed)
        [fault] = programs.attempt([program])
        print("FAILED" if fault else "ok", name, program.text, f"{time.monotonic() - since:.1f} s", flush=True)
        if fault is not None:
            failed.append(name)
            traceback.print_exception(fault)
    return failed


def main(seed: int, chosen: Sequence[str]) -> None:
    """Join the others, which have eight devices together."""
    jax.config.update("jax_num_cpu_devices", DEVICES // int(os.environ["SPMD_PROCESSES"]))
    spmd.cluster.initialize()
    sys.exit(int(bool(run(seed, chosen))))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
