"""Which compiled collective belongs to which written one, and what nobody wrote."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd import _compat
from spmd._facts import CallName
from spmd._units import sent_bytes
from spmd.inspect._collectives import Collective
from spmd.inspect._hlo import shape_bytes
from spmd.inspect._placement import ONE_DEVICE
from spmd.inspect._records import PRIMITIVES, Boundary, Written, WrittenCollective

# The end of the names of what is moved to enter a kernel or to satisfy a constraint, not for an operation.
_PLACED = ("shard_map", "sharding_constraint", "reshard", "device_put")


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective of a program, as somebody wrote it and as the compiler made it.

    Attributes:
      kind: `all_gather`, `psum` (any all-reduce), `psum_scatter`, `all_to_all`, `ppermute`.
      axes: The mesh axes it runs over, in mesh order.
      bytes: Bytes that one device sends, one execution; as `spmd.inspect.Collective` counts them.
      count: How often one call runs it: as written, loops multiplied out; of what nobody wrote, as compiled.
      runs: How often the compiled program runs it; None where nothing was compiled.
      exact: Whether `count` is certain; see `spmd.inspect.Collective`.
      text: The user's call, or for what nobody wrote the likely cause.
      where: `file.py:12`, the user's line; empty where the compiler does not say.
      phase: "forward" or "backward".
      written: Whether the program says it. False is the compiler's own.
      implicit: Whether no verb says it: a reduction over a name that a string drops, or one that JAX adds to a
        gradient.
      recomputed: Whether a `jax.checkpoint` runs it again in the backward pass.
      branch: Of a collective in a branch, which.
      dtype: The operand's dtype.
      shape: The operand's local shape.
      group_size: Devices per group.
      compiled: The compiled collectives that do it.
      note: What the compiler changed.
      sent: Bytes that one device sends in one call.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    runs: int | None
    exact: bool
    text: str
    where: str
    phase: str
    written: bool
    implicit: bool
    recomputed: bool
    branch: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    compiled: tuple[Collective, ...] = field(default=(), repr=False)
    note: str = ""
    sent: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call of the program: none where the compiler removed it."""
        return self.sent

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = [name for name in self.__slots__ if name not in ("compiled", "sent")]
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "axes": list(self.axes), "shape": list(self.shape), "total_bytes": self.sent}


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one written collective became: an operand of a compiled one, because XLA combines several into one."""

    of: Collective
    operands: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.operands[0][1] if len(self.operands) == 1 else ()

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.operands)

    @property
    def bytes(self) -> int:
        return sent_bytes(self.of.kind, sum(shape_bytes(*operand) for operand in self.operands), self.of.group_size)


def _pieces(one: Collective) -> list[_Piece]:
    """The operands of an all_to_all are the blocks of a single array."""
    parts = [one.operands] if one.kind == "all_to_all" else [(operand,) for operand in one.operands]
    return [_Piece(one, part) for part in parts]


def communications(written: Written | None, compiled: Sequence[Collective] | None) -> tuple[Communication, ...]:
    """What a program sends: the written collectives in program order, then those that nobody wrote.

    A compiled collective belongs to a written one by the call's text, which JAX carries in the operation's name
    (or in that of the sum it applies), by line and primitive for raw `jax.lax` calls, and where the compiler has
    lost the name by kind, axes and size.
    """
    rows = () if written is None else written.collectives
    if compiled is None:
        return tuple(_joined(row, None) for row in rows)
    pieces = [piece for one in compiled for piece in _pieces(one)]
    taken: dict[int, list[_Piece]] = {}
    rest: list[_Piece] = []
    groups = _groups(rows, taken)
    for piece in pieces:
        candidates = [group for group in groups if _says(piece, group.row)]
        if len(piece.operands) < len(piece.of.operands):  # the name of what XLA combined is that of one of them
            candidates = [group for group in candidates if group.row.shape == piece.shape and group.wants]
        _claim(piece, candidates, rest)
    pieces, rest = rest, []
    for piece in pieces:  # what has lost its name goes to what is left of its kind, axes and size
        combined = any(one.of is piece.of for found in taken.values() for one in found)
        placed = _ends(piece.of.op_name) in _PLACED and not combined
        _claim(piece, [] if placed else [group for group in groups if group.wants and _alike(piece, group.row)], rest)
    joined = [_joined(row, taken.get(i) or _gone(i, rows, taken)) for i, row in enumerate(rows)]
    strangers: dict[int, list[_Piece]] = {}
    for piece in rest:
        strangers.setdefault(id(piece.of), []).append(piece)
    return (*joined, *(_unwritten(parts, written) for parts in strangers.values()))


@dataclass
class _Group:
    """Written collectives that only their place in the program tells apart, such as those of equal layers."""

    rows: Sequence[WrittenCollective]
    taken: dict[int, list[_Piece]]
    places: list[int] = field(default_factory=list)
    full: int = 0

    @property
    def row(self) -> WrittenCollective:
        return self.rows[self.places[0]]

    @property
    def wants(self) -> bool:
        """Whether one of them runs more often than what was found of it so far."""
        while self.full < len(self.places):
            place = self.places[self.full]
            if sum(piece.of.count for piece in self.taken.get(place, ())) < self.rows[place].count:
                return True
            self.full += 1
        return False

    def take(self, piece: _Piece) -> None:
        """Give the piece to the first that wants one, or to the first of all."""
        place = self.places[self.full if self.wants else 0]
        self.taken.setdefault(place, []).append(piece)


def _groups(rows: Sequence[WrittenCollective], taken: dict[int, list[_Piece]]) -> list[_Group]:
    found: dict[Any, _Group] = {}
    for place, row in enumerate(rows):
        key = (row.text, row.where, row.phase, row.kind, row.axes, row.shape, row.primitive)
        found.setdefault(key, _Group(rows, taken)).places.append(place)
    return list(found.values())


def _claim(piece: _Piece, candidates: Sequence[_Group], rest: list[_Piece]) -> None:
    """Give `piece` to the best of the candidates, one that has nothing yet if possible."""
    if not candidates:
        rest.append(piece)
        return
    backward = _compat.BACKWARD in piece.of.op_name

    def fits(group: _Group) -> tuple[int, bool]:
        row = group.row
        alike = sum(
            (
                row.where == piece.of.where,
                (row.phase == "backward") == backward,
                row.kind == piece.of.kind,
                math.prod(row.shape) == piece.elements,
                row.shape == piece.shape,
                group.wants,
            )
        )
        return alike, row.axes == piece.of.axes

    max(candidates, key=fits).take(piece)


def _says(piece: _Piece, row: WrittenCollective) -> bool:
    """Whether the name of a compiled collective says a written one."""
    if not _related(row, piece.of):
        return False
    names = (piece.of.op_name, piece.of.reducer)
    if isinstance(row.text, CallName):
        return any(row.text in name for name in names)
    # a raw call of jax.lax: its name is too common to go by alone
    last = {name.rpartition("/")[2].partition("[")[0] for name in names}
    return row.where == piece.of.where and not last.isdisjoint((row.primitive, row.kind, *PRIMITIVES.get(row.kind, ())))


def _alike(piece: _Piece, row: WrittenCollective) -> bool:
    return (row.kind, row.axes, math.prod(row.shape)) == (piece.of.kind, piece.of.axes, piece.elements)


def _related(row: WrittenCollective, one: Collective) -> bool:
    """Whether a compiled collective may be (a part of) a written one: over its axes and no others."""
    return not row.axes or not one.axes or set(one.axes) <= set(row.axes)


def _gone(at: int, rows: Sequence[WrittenCollective], taken: Mapping[int, Any]) -> str:
    """What to say of a written collective that the compiled program does not have. Another one of the same call and
    size may serve for this one too. If it is of another call, that is not known."""
    alike = lambda one: (one.kind, one.axes, one.shape, one.dtype) == (row.kind, row.axes, row.shape, row.dtype)
    row = rows[at]
    twins = [one.text for i, one in enumerate(rows) if i in taken and alike(one)]
    if row.text in twins:
        return "the compiler merged it with an equal one"
    return f"the compiler removed it{', or merged it with an equal one' if twins else ''}"


def _ends(name: str) -> str:
    return name.rpartition("/")[2]


# -------------------- one row


def _joined(row: WrittenCollective, found: Sequence[_Piece] | str | None) -> Communication:
    """A written collective with its compiled pieces, with a note if there are none, or with None if not compiled."""
    pieces = () if found is None or isinstance(found, str) else found
    known = row.branch and row.exact  # the compiled program counts each branch as taken
    runs = None if found is None else row.count if known and pieces else sum(piece.of.count for piece in pieces)
    note = found if isinstance(found, str) else _note(row, pieces, runs or 0) if pieces else ""
    if runs is None:
        sent = row.total_bytes
    elif all(_as_written(piece, row) for piece in pieces):
        sent = row.bytes * runs  # in the dtype that was written: a CPU sums bfloat16 in float32
    else:
        sent = sum(piece.bytes * piece.of.count for piece in pieces)
    return Communication(
        kind=row.kind,
        axes=row.axes,
        bytes=row.bytes,
        count=row.count,
        runs=runs,
        exact=row.exact,
        text=row.text,
        where=row.where,
        phase=row.phase,
        written=True,
        implicit=row.implicit,
        recomputed=row.recomputed,
        branch=row.branch,
        dtype=row.dtype,
        shape=row.shape,
        group_size=row.group_size,
        compiled=tuple({id(piece.of): piece.of for piece in pieces}.values()),
        note=note,
        sent=sent,
    )


def _as_written(piece: _Piece, row: WrittenCollective) -> bool:
    """Whether it is the same but for its dtype. In a `shard_map` over some axes the compiler divides what is sent."""
    same = piece.of.kind == row.kind and piece.of.axes in ((), row.axes)
    return same and piece.elements == math.prod(row.shape)


def _note(row: WrittenCollective, pieces: Sequence[_Piece], runs: int) -> str:
    kinds = sorted({piece.of.kind for piece in pieces} - {row.kind})
    if kinds:
        return f"compiled as {' and '.join(kinds)}"
    if row.exact and all(piece.of.exact for piece in pieces) and runs != row.count:
        return f"the compiled program runs it {runs} time{'s' * (runs > 1)}, not {row.count}"
    return ""


def _unwritten(pieces: Sequence[_Piece], written: Written | None) -> Communication:
    """What is left of a compiled collective, usually all of it."""
    one = pieces[0].of
    whole = len(pieces) == len(_pieces(one))
    nbytes = one.bytes if whole else sum(piece.bytes for piece in pieces)
    dtype, shape = max((o for piece in pieces for o in piece.operands), key=lambda operand: shape_bytes(*operand))
    return Communication(
        kind=one.kind,
        axes=one.axes,
        bytes=nbytes,
        count=one.count,
        runs=one.count,
        exact=one.exact,
        text=_cause(one, written) if whole else "the compiler's own, combined with one that is written",
        where=one.where,
        phase="backward" if _compat.BACKWARD in one.op_name else "forward",
        written=False,
        implicit=False,
        recomputed=False,
        branch="",
        dtype=dtype,
        shape=shape,
        group_size=one.group_size,
        compiled=(one,),
        note="" if one.whole else f"within groups of {one.group_size}",
        sent=nbytes * one.count,
    )


def _cause(one: Collective, written: Written | None) -> str:
    """Why the compiler added a collective, as far as its name and line tell."""
    constraints, boundary = (written.constraints, written.boundary) if written else ((), ())
    for constraint in constraints:
        if constraint.text in one.op_name or (constraint.where == one.where and _ends(one.op_name) in _PLACED):
            return f"auto mode, for {constraint.text}"
    last = _ends(one.op_name)
    boundary = [entry for entry in boundary if entry.source is not None and entry.bytes != 0]
    moved = [entry for entry in boundary if entry.where in ("", one.where)]
    if last in _PLACED and moved:
        return "moved to enter a kernel: " + "; ".join(dict.fromkeys(map(moved_text, _fitting(one, moved))))
    if last in _PLACED:
        return "moved to enter or leave a kernel" if last == "shard_map" else f"moved for a {last.replace('_', ' ')}"
    operation = re.sub(r"[^\w].*", "", last)
    if written is None:  # then who wrote it is not known
        return operation
    cause = f"the compiler's own, for {operation}" if operation else "the compiler's own; it does not say for what"
    likely = dict.fromkeys(moved_text(entry) for entry in boundary if _holds(one, entry))
    return f"{cause}; perhaps to move {' or '.join(list(likely)[:2])}" if likely else cause


def _fitting(one: Collective, moved: Sequence[Boundary]) -> Sequence[Boundary]:
    """The arguments that the moved data can be a part of; all of them if it fits none."""
    return [entry for entry in moved if _holds(one, entry)] or moved


def _holds(one: Collective, boundary: Boundary) -> bool:
    whole = math.prod(boundary.shape)
    return all(math.prod(shape) and whole % math.prod(shape) == 0 for _, shape in one.operands)


def moved_text(boundary: Boundary) -> str:
    """What is moved from where to where."""
    source = ONE_DEVICE if boundary.source == ONE_DEVICE else f'"{boundary.source}"'
    return f'{boundary.text} from {source} to "{boundary.target}"'
