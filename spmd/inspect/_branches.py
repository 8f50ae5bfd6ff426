"""What a program spends where devices take branches of their own: which of them run together, and who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd.accelerators import Hardware
from spmd.checker._tables import Table


@dataclass(frozen=True, slots=True)
class Turns:
    """Which branches of a `cond` run, where its index is a known integer on each device and in each round of the loops
    around it.

    Attributes:
      together: The branches that run on some device in the same round, each set with the part of the rounds in which it
        does.
      shares: For each branch the part of the rounds in which a device is in it, as the mean over the devices.
      most: The same for the device that is in it most often.
    """

    together: tuple[tuple[tuple[int, ...], float], ...]
    shares: tuple[float, ...]
    most: tuple[float, ...]


def turns_of(index: Table | None, mesh: Collection[str], count: int) -> Turns | None:
    """The turns of a `cond` of so many branches, if its index is known.

    Args:
      index: The index on each device of the axes of the mesh; its other axes are the rounds of loops.
      mesh: The axes of the mesh.
      count: The number of branches.
    """
    values = None if index is None else index.values
    if index is None or index.shape:
        return None
    values = index.values
    rounds = [i for i, axis in enumerate(index.axes) if axis not in mesh]
    devices = [i for i, axis in enumerate(index.axes) if axis in mesh]
    sizes = [values.shape[i] for i in rounds]
    table = np.clip(values.transpose(*rounds, *devices).reshape(int(np.prod(sizes)), -1), 0, count - 1)
    sets = Counter(tuple(sorted({int(one) for one in row})) for row in table)
    shares = np.stack([(table == branch).mean(0) for branch in range(count)])
    together = tuple((running, n / len(table)) for running, n in sets.items())
    return Turns(together, tuple(map(float, shares.mean(1))), tuple(map(float, shares.max(1))))


@dataclass(slots=True)
class Work:
    """What one device spends in a part of a program, the branches in it apart.

    Attributes:
      flops: Floating-point operations by dtype.
      matmul_flops: The part of `flops` that is dots and convolutions.
      hbm_bytes: Bytes read and written.
      left_out: Bytes that it would read and write besides, if each `spmd.fused` were not one kernel, by their names.
      collectives: How often it runs each of the written collectives, by their numbers.
      switches: The branches, as if each ran whenever the `cond` does.
    """

    flops: dict[str, float] = field(default_factory=dict)
    matmul_flops: dict[str, float] = field(default_factory=dict)
    hbm_bytes: float = 0.0
    left_out: dict[str, float] = field(default_factory=dict)
    collectives: dict[int, int] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)

    def count(self, dtype: str, flops: float, *, matmul: bool) -> None:
        """Add floating-point operations."""
        for counts in (self.flops, self.matmul_flops) if matmul else (self.flops,):
            counts[dtype] = counts.get(dtype, 0.0) + flops

    def moved(self, nbytes: float, inside: str = "") -> None:
        """Add bytes that are read or written, or would be if what they are inside of were not one kernel."""
        if inside:
            self.left_out[inside] = self.left_out.get(inside, 0.0) + nbytes
        else:
            self.hbm_bytes += nbytes

    def total(self, of: Callable[[Work], Mapping[str, float]]) -> dict[str, float]:
        """A quantity by name, with that of the branches: the mean over devices where it is known which of them run, and
        else the most that one of them has."""
        found = dict(of(self))
        for switch in self.switches:
            each = [branch.total(of) for branch in switch.branches]
            for name in dict.fromkeys(name for one in each for name in one):
                amounts = [one.get(name, 0.0) for one in each]
                turns = switch.turns
                mean = max(amounts) if turns is None else float(np.dot(turns.shares, amounts))
                found[name] = found.get(name, 0.0) + mean
        return found


@dataclass(frozen=True, slots=True)
class Switch:
    """The branches of a `cond`.

    Attributes:
      branches: What each of them spends.
      turns: Which of them run; None if that is not known.
    """

    branches: tuple[Work, ...]
    turns: Turns | None


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of some work.

    Attributes:
      compute: Of matrix products and convolutions.
      memory: Of reading and writing memory.
      communication: Of collectives.
      times: How often each collective counts, by its number.
      busy: How long a device works, as the mean over the devices.
    """

    compute: float
    memory: float
    communication: float
    times: Mapping[int, float]
    busy: float

    @property
    def seconds(self) -> float:
        """Seconds that it takes, one after another."""
        return self.compute + self.memory + self.communication


def price(work: Work, hardware: Hardware, each: Sequence[float]) -> Price:
    """What work takes. Where devices take branches of their own, a round takes as long as the dearest that runs.

    Args:
      work: The work.
      hardware: The machine.
      each: Seconds of one execution of each collective.
    """
    compute = sum(flops / hardware.peak(dtype) for dtype, flops in work.matmul_flops.items())
    memory = work.hbm_bytes / hardware.hbm_bandwidth
    times: dict[int, float] = dict(work.collectives)
    communication = sum(each[i] * n for i, n in times.items())
    busy = compute + memory + communication
    for switch in work.switches:
        prices = [price(branch, hardware, each) for branch in switch.branches]
        turns = switch.turns or Turns(((tuple(range(len(prices))), 1.0),), (), ())
        for running, share in turns.together:
            dearest = max((prices[i] for i in running), key=lambda one: one.seconds)
            compute += share * dearest.compute
            memory += share * dearest.memory
            communication += share * dearest.communication
            busy += 0.0 if turns.shares else share * dearest.busy
            for i, n in dearest.times.items():
                times[i] = times.get(i, 0.0) + share * n
        busy += sum(share * one.busy for share, one in zip(turns.shares, prices, strict=False))
    return Price(compute, memory, communication, times, busy)
