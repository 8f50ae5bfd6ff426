"""What a search found: its rows as a table, and why a mesh is not the best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from spmd._text import Line, Report, Table, bytes_text, fields_of, html_page, seconds_text, wrapped
from spmd._text import Row as Texts
from spmd.accelerators import Hardware
from spmd.errors import MeshError
from spmd.inspect import Explanation, Memory, Time
from spmd.inspect._written import estimate, priced

# --- the meshes of a number of devices: how many lie along each axis, and which axes lie inside a node ----------------


Sizes = dict[str, int]
Sent = Iterable[tuple[str, tuple[str, ...], float, float]]
"""Collectives: the kind, the mesh axes, the bytes that one device sends in each, and how many there are."""


def factorisations(devices: int, axes: Sequence[str]) -> Iterator[Sizes]:
    """Every way to write a number as a product, a factor for each axis.

    >>> [tuple(sizes.values()) for sizes in factorisations(4, ("dp", "tp"))]
    [(1, 4), (2, 2), (4, 1)]
    """
    first, *others = axes
    if not others:
        yield {first: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ({first: size, **rest} for rest in factorisations(devices // size, others))


def orders(sizes: Mapping[str, int], hardware: Hardware) -> Iterator[Sizes]:
    """The orders of a mesh's axes that differ in what lies inside a node. The other axes stay as they are.

    >>> from spmd.accelerators import hardware
    >>> [tuple(order) for order in orders({"dp": 4, "tp": 8}, hardware("h100"))]
    [('tp', 'dp'), ('dp', 'tp')]
    """
    yield from _orders(dict(sizes), {}, hardware.node_size if hardware.node is not None else 1)


def _orders(outer: Sizes, inner: Sizes, room: int) -> Iterator[Sizes]:
    candidates = [axis for axis, size in outer.items() if size > 1 and axis not in inner]
    if room == 1 or len(candidates) <= 1:
        yield {**{axis: size for axis, size in outer.items() if axis not in inner}, **inner}
        return
    for axis in candidates:
        size = outer[axis]
        yield from _orders(outer, {axis: size, **inner}, room // size if size <= room else 1)


def laid(
    sent: Sent, sizes: Mapping[str, int], hardware: Hardware, beside: float = 0.0, overlap: Sequence[str] = ()
) -> tuple[Sizes, float]:
    """The order of the axes in which a step takes least, and its seconds; of equal orders the first.

    Args:
      sent: Its collectives.
      sizes: The mesh.
      hardware: The machine.
      beside: Seconds of all other work.
      overlap: Collectives over these axes alone take place beside the other work.
    """
    sent = list(sent)
    hidden = [one for one in sent if set(one[1]) <= set(overlap)]
    exposed = [one for one in sent if one not in hidden]

    def seconds(order: Sizes) -> float:
        return communication(exposed, order, hardware) + max(beside, communication(hidden, order, hardware))

    found = ((seconds(order), order) for order in orders(sizes, hardware))
    best, order = min(found, key=lambda pair: pair[0])
    return order, best


def communication(sent: Sent, sizes: Mapping[str, int], hardware: Hardware) -> float:
    """Seconds of these collectives, one after another."""
    return math.fsum(count * hardware.collective_seconds(kind, size, axes, sizes) for kind, axes, size, count in sent)


# --- what excludes a mesh before anything is traced: sizes, memory at rest, and what the program states of itself -----


@dataclass(frozen=True)
class Bound:
    """The least that a step takes on one device, stated without a trace: the third value of a `build`.

    `search` traces meshes in the order of the seconds that this takes, and stops where no other mesh can be better. A
    bound that exceeds what the trace says is an error.

    Attributes:
      flops: Floating-point operations of matrix products by dtype name, with what is computed again and what idle
        stages of a pipeline compute.
      sent: Bytes that one device sends, by kind of collective and mesh axes, as `explain` counts them:
        `{("all_gather", ("fsdp",)): 1e9}`.
      memory: Bytes of memory at the peak.
      needed: The part of `flops` that the model needs, for the share of the peak; None for all that the trace has.
      traffic: Bytes read from memory and written to it.

    >>> import spmd
    >>> bound = spmd.searcher.Bound({"bfloat16": 989.4e12}, {("psum", ("dp",)): 1e9})
    >>> round(bound.seconds({"dp": 16}, spmd.accelerators.hardware("h100")), 6)
    1.002074
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    memory: float = 0.0
    needed: Mapping[str, float] | None = None
    traffic: float = 0.0

    def seconds(self, mesh: Mapping[str, int], hardware: Hardware, *, overlap: Sequence[str] = ()) -> float:
        """Seconds of this work, with the axes of the mesh in the best order; without latencies.

        Args:
          mesh: The sizes of the axes.
          hardware: The machine.
          overlap: Mesh axes, as in `search`.
        """
        sent = [(kind, axes, size, 1) for (kind, axes), size in self.sent.items()]
        beside = compute_seconds(self.flops, hardware) + self.traffic / hardware.hbm_bandwidth
        return laid(sent, mesh, without_latency(hardware), beside, overlap)[1]


def compute_seconds(flops: Mapping[str, float], hardware: Hardware) -> float:
    """Seconds of floating-point work by dtype name, at the peaks."""
    return math.fsum(count / hardware.peak(dtype) for dtype, count in flops.items())


def without_latency(hardware: Hardware) -> Hardware:
    """The same machine with links that answer at once."""
    links = {axis: replace(link, latency=0.0) for axis, link in hardware.links.items()}
    node = None if hardware.node is None else replace(hardware.node, latency=0.0)
    return replace(hardware, default=replace(hardware.default, latency=0.0), links=links, node=node)


def undivided(args: Sequence[Any]) -> str | None:
    """The first argument that its sharding does not divide evenly."""
    for one in jax.tree.leaves(args):
        sharding = getattr(one, "sharding", None)
        if sharding is None:
            continue
        try:
            sharding.shard_shape(one.shape)
        except ValueError:
            return f"{tuple(one.shape)} as {sharding.spec}"
    return None


def bytes_at_rest(args: Sequence[Any]) -> int:
    """Bytes of the arguments on one device."""
    total = 0
    for one in jax.tree.leaves(args):
        sharding = getattr(one, "sharding", None)
        shape = one.shape if sharding is None else sharding.shard_shape(one.shape)
        total += math.prod(shape) * one.dtype.itemsize
    return total


# --- a row of a search: what one mesh costs, as the trace says it -----------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a step takes on one mesh.

    Attributes:
      mesh: The sizes of the axes, in the order in which they are best laid on the links: the last are inside a node.
      choice: The other coordinates.
      time: Estimated seconds, with the axes in this order.
      memory: Bytes on one device; `memory.peak` is what the filter looks at.
      bytes_by_axis: Bytes that one device sends, by mesh axes.
      seconds: What rows are ranked by: `time.serial`, but for the collectives that overlap.
      mfu: The most that the model's FLOPs can be of the peak in that time. Without a `Bound` that says what the model
        needs, all products of the trace count, also those that are computed again.
      pareto: Whether no other row is as quick and as small, and quicker or smaller.
    """

    mesh: Sizes
    choice: Mapping[str, Any]
    time: Time
    memory: Memory
    bytes_by_axis: Mapping[str, int]
    seconds: float
    mfu: float
    pareto: bool = False

    @property
    def peak(self) -> int:
        """Bytes of memory on one device, estimated from the trace."""
        return self.memory.peak

    @property
    def name(self) -> str:
        """The mesh and the choices as text: `dp=16 tp=8 micro=4`. Axes of size 1 are left out."""
        return name_of(self.mesh, self.choice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**fields_of(self), "choice": {name: _plain(value) for name, value in self.choice.items()}}


def row_of(
    found: Explanation, mesh: Sizes, choice: Mapping[str, Any], hardware: Hardware, bound: Bound, overlap: Sequence[str]
) -> Row:
    """The row of a program that `explain` has read."""
    assert found.written is not None and found.memory is not None  # the program was traced here
    price = priced(found.written, found.collectives, hardware, mesh)
    counted = ((one, price.times.get(i, 0.0)) for i, one in enumerate(found.collectives))
    sent = [(one.kind, one.axes, one.bytes, times) for one, times in counted]
    order, seconds = laid(sent, mesh, hardware, price.compute + price.memory, overlap)
    time = estimate(found.written, found.collectives, hardware, order)
    needed = found.written.matmul_flops if bound.needed is None else bound.needed
    by_axis = {axes: sum(one.total_bytes for one in ones) for axes, ones in found.by_axis().items()}
    share = compute_seconds(needed, hardware) / seconds if seconds else 0.0
    return Row(order, choice, time, found.memory, by_axis, seconds, share)


def name_of(mesh: Mapping[str, int], choice: Mapping[str, Any]) -> str:
    sizes = [f"{axis}={size}" for axis, size in mesh.items() if size > 1] or ["one device"]
    return " ".join([*sizes, *(f"{name}={_plain(value)}" for name, value in choice.items())])


def cells(row: Row, number: int) -> tuple[str, ...]:
    """The texts of a row of the table: see `HEAD`."""
    sent = sorted(row.bytes_by_axis.items(), key=lambda part: (-part[1], part[0]))
    return (
        f"{number}{'*' if row.pareto else ''}",
        row.name,
        seconds_text(row.seconds),
        seconds_text(row.time.overlapped),
        f"{row.mfu:.0%}",
        bytes_text(row.peak),
        row.time.bound,
        ", ".join(f"{axes} {bytes_text(size)}" for axes, size in sent if size),
    )


HEAD = ("", "mesh", "time", "at least", "MFU", "memory", "binds", "sent")


def marked(rows: Sequence[Row]) -> list[bool]:
    """Return which rows are not dominated, of a list in the order of time and memory."""
    found, least = [], (float("inf"), 0.0)
    for row in rows:
        found.append(row.peak < least[0] or (row.peak, row.seconds) == least)
        least = (row.peak, row.seconds) if row.peak < least[0] else least
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


_KINDS = {
    "where": "left out by where=",
    "impossible": "impossible, says build",
    "sizes": "with arguments that the mesh does not divide",
    "memory at rest": "with arguments that are too large",
    "memory stated": "too large by the stated bound",
    "refused": "refused by the trace",
    "memory": "with an estimated peak that is too large",
}


@dataclass(frozen=True)
class Untraced:
    """A candidate that nothing excluded and that was not traced.

    Attributes:
      mesh: The sizes of the axes.
      choice: The other coordinates.
      seconds: The lower bound on its time.
    """

    mesh: Mapping[str, int]
    choice: Mapping[str, Any]
    seconds: float


def key_of(mesh: Mapping[str, int], choice: Mapping[str, Any]) -> Any:
    """Return what two names of one candidate share: axes of size 1 and the order of the axes do not count."""
    sizes = frozenset((axis, size) for axis, size in mesh.items() if size > 1)
    return sizes, tuple((name, repr(choice[name])) for name in sorted(choice))


@dataclass
class Found:
    """A search while it runs."""

    devices: int
    axes: tuple[str, ...]
    hardware: Hardware
    top: int
    considered: int = 0
    traced: int = 0
    rows: list[Row] = field(default_factory=list)
    rest: list[Untraced] = field(default_factory=list)
    excluded: dict[Any, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def worst(self) -> float:
        """The time of the row `top`, from which on a bound excludes."""
        ahead = sorted(row.seconds for row in self.rows)
        return ahead[self.top - 1] if len(ahead) >= self.top else float("inf")

    def exclude(self, mesh: Mapping[str, int], choice: Mapping[str, Any], kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.excluded[key_of(mesh, choice)] = f"{_KINDS[kind]}: {text}"

    def reasons(self) -> list[str]:
        """Return how many candidates were excluded by what."""
        return [f"{self.counts[kind]:,} {text}" for kind, text in _KINDS.items() if self.counts[kind]]


class Search(Report):
    """The meshes of a search, best first. `search` makes it, and printing it shows `table()`.

    Attributes:
      devices: The number of devices.
      axes: The axes, as they were given.
      hardware: The machine.
      rows: The traced meshes that fit the memory, best first.
      untraced: What was neither excluded nor traced, lowest bound first.
      counts: How many candidates were excluded, by what: `{"sizes": 12, "memory at rest": 3}`.
      considered: How many candidates there were.
      traced: How many of them were traced.
      proven: Whether no candidate that was not traced can be among the first `top` rows.
    """

    def __init__(self, found: Found) -> None:
        rows = sorted(found.rows, key=lambda row: (row.seconds, row.peak))
        self.devices, self.axes, self.hardware = found.devices, found.axes, found.hardware
        marks = zip(rows, marked(rows), strict=True)
        self.rows: tuple[Row, ...] = tuple(replace(row, pareto=mark) for row, mark in marks)
        self.untraced: tuple[Untraced, ...] = tuple(sorted(found.rest, key=lambda one: one.seconds))
        self.counts: dict[str, int] = {kind: found.counts[kind] for kind in _KINDS if found.counts[kind]}
        self.considered, self.traced = found.considered, found.traced
        self.proven = not self.untraced or self.untraced[0].seconds >= found.worst
        self._found = found

    @property
    def best(self) -> Row:
        """The first row."""
        return self.rows[0]

    def row(self, mesh: Mapping[str, int], **choice: Any) -> Row | None:
        """The row of a mesh, whatever the order of its axes; None if it has none."""
        return next((row for row in self.rows if key_of(row.mesh, row.choice) == key_of(mesh, choice)), None)

    def why(self, mesh: Mapping[str, int], **choice: Any) -> str:
        """Return why a mesh is behind the best, in one paragraph.

        Args:
          mesh: The sizes of its axes; those of size 1 may be left out.
          **choice: Its other coordinates.

        Returns:
          The differences in numbers, or what excluded it, or that its bound was too high to trace it.

        Raises:
          MeshError: If the search did not consider it.
        """
        name, key, row = name_of(mesh, choice), key_of(mesh, choice), self.row(mesh, **choice)
        if row is not None:
            return _behind(row, self.best, self.rows.index(row) + 1, len(self.rows))
        if key in self._found.excluded:
            return f"{name} is excluded; it is {self._found.excluded[key]}."
        for one in self.untraced:
            if key_of(one.mesh, one.choice) == key:
                bound, best = seconds_text(one.seconds), seconds_text(self.best.seconds)
                return f"{name} was not traced: it takes at least {bound}, and the best takes {best}."
        advice = f"axes {', '.join(self.axes)} with the product {self.devices:,}"
        raise MeshError(f"the search did not consider {name}.", call=f"why({dict(mesh)!r})", advice=advice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found = fields_of(self, "devices", "axes", "considered", "traced", "proven", "rows")
        more = {"hardware": self.hardware.name, "excluded": self.counts, "untraced": len(self.untraced)}
        return {**found, **more}

    def table(self, width: int | None = None) -> str:
        """Return the search as text.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        return self._text(width)

    def _heading(self) -> str:
        return f"{self.devices:,} devices over {', '.join(self.axes)} on {self.hardware.name}"

    def _texts(self) -> Table:
        shown = self.rows[: self._found.top]
        return Table([Texts(cells(row, i)) for i, row in enumerate(shown, 1)], HEAD, (2, 3, 4, 5), (7,), 2)

    def _account(self) -> list[str]:
        """Return what became of all candidates, in sentences."""
        more = len(self.rows) - self._found.top
        kept = f"{self.considered:,} candidates, {self.traced:,} traced, {len(self.untraced):,} not traced"
        kept += f"; {more:,} more row{'s' * (more > 1)}" if more > 0 else ""
        first = min(self._found.top, len(self.rows))
        which = "the first row is" if first == 1 else f"the first {first} rows are"
        least = seconds_text(self.untraced[0].seconds) if self.untraced else ""
        rest = f"what was not traced takes at least {least}" if least else "all were traced"
        sure = f"{which} the best: {rest}" if self.proven else f"others may be better: {rest}"
        kernels = sorted({name for row in self.rows for name in row.time.kernels})
        assumed = [f"counted as one kernel: {', '.join(kernels)}{self._without()}"] if kernels else []
        notes = [*assumed, "* no row is quicker and smaller"]
        return [kept, *(f"  {reason}" for reason in self._found.reasons()), sure, *notes]

    def _without(self) -> str:
        """Return what the best row needs if what counts as a kernel is none."""
        memory = self.best.memory
        more = (memory.opened or 0) - (memory.estimated or 0)
        return f"; if it is none, row 1 needs {bytes_text(memory.peak + more)}" if more > 0 else ""

    def _lines(self, width: int) -> list[Line]:
        width = max(width, 40)
        text = [line for sentence in self._account() for line in wrapped(sentence, width)]
        heading: list[Line] = [[(line, "bold")] for line in wrapped(self._heading(), width)]
        return [*heading, *self._texts().lines(width), *([(line, "")] for line in text)]

    def __repr__(self) -> str:
        return f"Search({self._heading()}: best {self.best.name}, {self.traced} of {self.considered} traced)"

    def _repr_html_(self) -> str:
        return html_page(self._heading(), [self._texts()])


def _behind(row: Row, best: Row, place: int, count: int) -> str:
    """Return how a row compares with the best one."""
    if row is best:
        return f"{row.name} is the best of {count:,}: {seconds_text(row.seconds)}, {bytes_text(row.peak)}."
    parts = {
        "compute": (row.time.compute, best.time.compute),
        "memory traffic": (row.time.memory, best.time.memory),
        **{
            axes: (row.time.by_axis.get(axes, 0.0), best.time.by_axis.get(axes, 0.0))
            for axes in sorted({*row.time.by_axis, *best.time.by_axis})
        },
    }
    apart = sorted(parts.items(), key=lambda part: -abs(part[1][0] - part[1][1]))
    told = _compared(apart)
    return (
        f"{row.name} is number {place:,} of {count:,}. It takes {seconds_text(row.seconds)}, "
        f"{row.seconds / best.seconds:.2f} times the {seconds_text(best.seconds)} of {best.name}. {told} It needs "
        f"{bytes_text(row.peak)} of memory, where the best needs {bytes_text(best.peak)}."
    )


def _compared(parts: Sequence[tuple[str, tuple[float, float]]]) -> str:
    """The parts that differ most, those of the row against those of the best."""
    differing = [(name, pair) for name, pair in parts if pair[0] != pair[1]]
    texts = [f"{name} {seconds_text(mine)} against {seconds_text(other)}" for name, (mine, other) in differing[:4]]
    return f"The parts that differ most: {', '.join(texts)}." if texts else "All parts take as long."
