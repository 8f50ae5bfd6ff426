"""The written view of a program as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spmd.inspect._branches import Work
from spmd.inspect._collectives import counts_by_kind

# The names of each kind of collective, in jaxprs and in what XLA makes of them. Any reduction is a psum.
PRIMITIVES: dict[str, tuple[str, ...]] = {
    "all_gather": ("all_gather", "all_gather_invariant", "all_gather_reduced"),
    "psum": ("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin", "all_reduce", "reduce_and"),
    "psum_scatter": ("reduce_scatter", "psum_scatter", "unreduced_reduce_scatter"),
}


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
      bytes: What one device sends in the cheapest plan; where sizes do not divide, the least that some device receives;
        None where the source is not known.
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
      unfused_bytes: The same if no elementwise chain is fused either.
      work: What is spent, the branches apart.
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

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call, without what the boundary moves."""
        return sum(one.total_bytes for one in self.collectives)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind one call runs, kinds in the order of their names."""
        return counts_by_kind((one.kind, one.count) for one in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = asdict(self)
        del plain["work"]
        return plain
