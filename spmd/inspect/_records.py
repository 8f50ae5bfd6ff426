"""The written view of a program as plain values."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmd._text import fields_of
from spmd.accelerators import Hardware
from spmd.checker._tables import Table
from spmd.inspect._collectives import counts_by_kind

# --- what a program spends where devices take branches of their own: which of them run together, and who waits --------


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


def _amounts() -> dict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class Work:
    """What one device spends in a part of a program, the branches in it apart.

    Attributes:
      flops: Floating-point operations by dtype.
      matmul_flops: The part of `flops` that is dots and convolutions.
      again_flops: The part of `matmul_flops` in which a `jax.checkpoint` computes again.
      first_flops: That of the forward pass.
      traffic: Bytes read and written, by the name of the `spmd.fused` that they are inside of: "" for those in none.
      collectives: How often it runs each of the written collectives, by their numbers.
      switches: The branches, as if each ran whenever the `cond` does.
    """

    flops: dict[str, float] = field(default_factory=_amounts)
    matmul_flops: dict[str, float] = field(default_factory=_amounts)
    again_flops: dict[str, float] = field(default_factory=_amounts)
    first_flops: dict[str, float] = field(default_factory=_amounts)
    traffic: dict[str, float] = field(default_factory=_amounts)
    collectives: dict[int, int] = field(default_factory=dict)
    switches: list[Switch] = field(default_factory=list)

    def total(self, what: str) -> dict[str, float]:
        """A quantity by name, with that of the branches: the mean over devices where it is known which of them run, and
        else the most that one of them has."""
        found = _amounts()
        found.update(getattr(self, what))
        for switch in self.switches:
            each = [branch.total(what) for branch in switch.branches]
            for name in dict.fromkeys(itertools.chain(*each)):
                amounts = [one.get(name, 0.0) for one in each]
                found[name] += max(amounts) if switch.turns is None else float(np.dot(switch.turns.shares, amounts))
        return dict(found)


@dataclass(frozen=True, slots=True)
class Switch:
    """The branches of a `cond`.

    Attributes:
      branches: What each of them spends.
      turns: Which of them run; None if that is not known.
    """

    branches: Sequence[Work]
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
    """Return what work takes. Where devices take branches of their own, a round takes as long as the dearest that runs.

    Args:
      work: The work.
      hardware: The machine.
      each: Seconds of one execution of each collective.
    """
    compute = sum(flops / hardware.peak(dtype) for dtype, flops in work.matmul_flops.items())
    memory = work.traffic.get("", 0.0) / hardware.hbm_bandwidth
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


AGAIN = ("Scope", "rematted_computation")  # the name around what a `jax.checkpoint` runs again


@dataclass(frozen=True, slots=True)
class WrittenCollective:
    """One collective of a jaxpr.

    Attributes:
      kind: `all_gather`, `psum` (any all-reduce), `psum_scatter`, `all_to_all`, `ppermute`, as for compiled ones.
      axes: The mesh axes it runs over, in mesh order.
      group_size: Devices per group; for a ppermute, of the axes it moves along.
      bytes: Bytes that one device sends, one execution; the convention of `spmd.inspect.Collective`.
      count: How often one call runs it, scans multiplied out; where devices take branches of their own, on the device
        that runs it most often.
      exact: Whether `count` is certain. In a `while` it is counted once, in a branch as taken, unless it is known on
        each device which branch it takes.
      text: The user's call, `all_gather(x, "b/dp s/tp d -> b/dp s d")`; of a raw `jax.lax` call its name.
      where: `file.py:12`, the user's line.
      phase: "forward" or "backward".
      recomputed: Whether a `jax.checkpoint` runs it a second time, in the backward pass.
      implicit: Whether no verb says it: a reduction whose string merely drops a name, or one that JAX adds to the
        gradient of a value that is equal on the axes.
      branch: Of a collective in a branch, which: "branch 1 of 2".
      dtype: The dtype of the operand.
      shape: The local shape of the operand.
      primitive: JAX's primitive: a psum may be a `pmax`.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    count: int
    exact: bool
    text: str
    where: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    recomputed: bool = False
    implicit: bool = False
    branch: str = ""
    primitive: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call of the program."""
        return self.bytes * self.count


@dataclass(frozen=True, slots=True)
class Boundary:
    """An array that enters a kernel and lies elsewhere than the signature says, or at an unknown place.

    Attributes:
      text: The kernel and the argument, `mlp: x`.
      source: Where it lies, `b/dp d`, in the names of the kernel's signature, or `_/dp _` where they are not known;
        None where the shardings do not tell.
      target: Where the signature wants it.
      bytes: What one device sends in the cheapest plan; None where the source is not known, or there is no plan, as for
        sizes that do not divide.
      dtype: The dtype of the array.
      shape: The global shape.
      where: `file.py:12`, the line that calls the kernel.
      count: How often one call moves it, scans multiplied out.
      note: What would keep it where it lies, if that is known.
    """

    text: str
    source: str | None
    target: str
    bytes: int | None
    dtype: str
    shape: tuple[int, ...]
    where: str
    count: int = 1
    note: str = ""


@dataclass(frozen=True, slots=True)
class Island:
    """Code that this view cannot read (a custom call, a callback), or per-shard code where the rest is not per shard.

    Attributes:
      text: The user's call, or the primitive.
      where: `file.py:12`.
      opaque: Whether nothing is known of its inside.
    """

    text: str
    where: str
    opaque: bool


@dataclass(frozen=True, slots=True)
class PerShard:
    """Code that `spmd.per_shard` states to be meant per shard.

    Attributes:
      why: The user's reason.
      where: `file.py:12`, the line of `per_shard`.
      whole: Whether it runs on whole arrays only, as in auto and reference mode.
    """

    why: str
    where: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """A layout that auto mode asks the compiler for. The compiler decides what is sent for it.

    Attributes:
      text: The user's call.
      layout: The placement, `_/dp _`.
      shape: The global shape.
      count: How often one call runs it.
      where: `file.py:12`.
    """

    text: str
    layout: str
    shape: tuple[int, ...]
    count: int
    where: str


@dataclass(slots=True)
class Window:
    """What a call of `spmd.meanwhile` computes and sends at the same time, loops multiplied out.

    Attributes:
      where: The user's line.
      phase: "forward", "backward" or "recomputed".
      flops: Floating-point operations of dots and convolutions on one device, by dtype.
      collectives: The numbers of the written collectives that travel.
    """

    where: str
    phase: str
    flops: dict[str, float] = field(default_factory=_amounts)
    collectives: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Written:
    """The written view of one program.

    Attributes:
      collectives: In program order; one per operand.
      mesh: Axis sizes.
      flops: Floating-point operations of one device by dtype, dots and convolutions with their multiplications and
        additions both counted. Of branches, the most that one of them has; the mean over devices, if it is known which
        branch each of them takes. The same holds for what follows.
      matmul_flops: The part of `flops` that is dots and convolutions.
      hbm_bytes: Bytes that one device reads and writes, if elementwise chains are fused into what uses them, and one
        that ends in a result reads what it is made of and writes the result. Outside kernels the placement decides;
        where it is not known, the devices share the array.
      left_out: Bytes that it would read and write besides, if each `spmd.fused` were not one kernel, by their names.
      exact: False where a loop of unknown length was counted once, or it is not known which branch is taken.
      boundary: What is moved to enter a kernel.
      islands: What is not looked into.
      per_shard: What is meant per shard.
      constraints: Those of auto mode.
      arguments_bytes: Bytes of the arguments on one device; where their shardings do not tell, as the first kernel
        wants them, else whole.
      outputs_bytes: Bytes of the results on one device; whole where their placement is not known.
      donated_bytes: The part of them that can lie in donated arguments.
      standing_bytes: The most bytes of other arrays that stand at one time on one device, as far as the jaxpr tells:
        what loops keep for the backward pass, and what is being worked on.
      opened_bytes: The same if what `spmd.fused` says is one kernel is not.
      host_bytes: The most bytes that stand at one time in the memory of the host, of what one device puts there.
      constants_bytes: Bytes on one device of the arrays that functions close over.
      again_flops: The part of `matmul_flops` that a `jax.checkpoint` computes again.
      unfused_bytes: The same if no elementwise chain is fused either.
      work: What is spent, the branches apart.
      windows: What runs at the same time, by `spmd.meanwhile`.
    """

    collectives: tuple[WrittenCollective, ...]
    mesh: Mapping[str, int]
    flops: Mapping[str, float] = field(default_factory=dict)
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    hbm_bytes: int = 0
    left_out: Mapping[str, float] = field(default_factory=dict)
    exact: bool = True
    boundary: tuple[Boundary, ...] = ()
    islands: tuple[Island, ...] = ()
    per_shard: tuple[PerShard, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    arguments_bytes: int = 0
    outputs_bytes: int = 0
    donated_bytes: int = 0
    standing_bytes: int = 0
    opened_bytes: int = 0
    unfused_bytes: int = 0
    work: Work = field(default_factory=Work, repr=False)
    windows: tuple[Window, ...] = ()
    host_bytes: int = 0
    constants_bytes: int = 0
    again_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call, without what the boundary moves."""
        return sum(one.total_bytes for one in self.collectives)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many collectives of each kind one call runs, kinds in the order of their names."""
        return counts_by_kind((one.kind, one.count) for one in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return fields_of(self)
