"""Which compiled collective belongs to which written one, what nobody wrote, and which line of the compiler's plan that
is."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from spmd import _compat
from spmd._jaxprs.facts import CallName
from spmd._jaxprs.lines import short_line
from spmd._jaxprs.primitives import kind_of
from spmd._text import bytes_text, fields_of, sent_bytes
from spmd.inspect._collectives import Collective, grouped
from spmd.inspect._hlo import names_of_parts, shape_bytes
from spmd.inspect._program import ONE_DEVICE
from spmd.inspect._records import Boundary, Written, WrittenCollective

if TYPE_CHECKING:
    from spmd.propagation import Move, Propagation

# The end of the names of what is moved to enter a kernel or to satisfy a constraint, not for an operation.
_PLACED = ("shard_map", "sharding_constraint", "reshard", "device_put")
_WRITTEN = tuple(one.name for one in fields(WrittenCollective))
_NOT_PLAIN = ("compiled", "sent", "primitive")  # of a communication


@dataclass(frozen=True, slots=True)
class Communication(WrittenCollective):
    """One collective of a program, as somebody wrote it and as the compiler made it.

    Its attributes are those of `WrittenCollective`, and these. Of what nobody wrote, `count` is as compiled, `text` is
    the likely cause, and `where` is empty where the compiler does not say.

    Attributes:
      runs: How often the compiled program runs it; None where nothing was compiled.
      written: Whether the program says it. False is the compiler's own.
      compiled: The compiled collectives that do it.
      note: What the compiler changed.
      sent: Bytes that one device sends in one call.
    """

    runs: int | None = None
    written: bool = True
    compiled: tuple[Collective, ...] = field(default=(), repr=False)
    note: str = ""
    sent: int = 0

    @property
    def ran(self) -> int:
        """How often it runs: as compiled, or else as written."""
        return self.count if self.runs is None else self.runs

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call of the program: none where the compiler removed it."""
        return self.sent

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = (one.name for one in fields(self) if one.name not in _NOT_PLAIN)
        return fields_of(self, *names, "total_bytes")


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one written collective became: an operand of a compiled one, because XLA combines several into one.

    Attributes:
      of: The compiled one.
      operands: Dtype and local shape of each operand; several where they are the blocks of one array.
      names: The names that JAX gave it, or what it is put together from, and the sum that it applies.
      named: Whether the names are its own. Of a combined one that does not name its parts, the name is that of one.
      where: The user's line; empty where it may be that of another part.
    """

    of: Collective
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[str, ...]
    named: bool = True
    where: str = ""

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
    names = names_of_parts(one.op_name)
    of_all = (*names, one.reducer)
    if one.kind == "all_to_all" or len(one.operands) == 1:
        return [_Piece(one, one.operands, of_all, where=one.where)]
    if len(names) != len(one.operands):
        return [_Piece(one, (operand,), of_all, False, one.where) for operand in one.operands]
    return [_Piece(one, (operand,), (name,)) for operand, name in zip(one.operands, names, strict=True)]


def _laid_out(piece: _Piece, said: Sequence[_Wanted]) -> list[_Piece]:
    """The parts of an operand that XLA put together from several arrays, end to end; else the piece itself.

    XLA for GPUs does so with all-reduces. The names are those of the parts, or all have the same one.

    Args:
      piece: The operand.
      said: The written collectives that its names say.
    """
    same = [one for one in said if (one.row.kind, one.row.axes) == (piece.of.kind, piece.of.axes)]
    if piece.of.kind == "all_to_all" or any(one.elements == piece.elements for one in same):
        return [piece]
    dtype = piece.operands[0][0]
    missing = {id(one): one.missing // piece.of.count for one in same}
    parts: list[_Piece] = []
    strange, left = [], piece.elements
    names = names_of_parts(piece.of.op_name)
    for name in names if len(names) > 1 else names * sum(missing.values()):
        part = _Piece(piece.of, (), (name,))
        wanting = [one for one in same if missing[id(one)] > 0 and _says(part, one.row)]
        # The text of a call says more than the primitive and the line of a raw one.
        taken = min(wanting, key=lambda one: not isinstance(one.row.text, CallName), default=None)
        if taken is None:
            strange.append(name)
        elif left >= taken.elements:
            missing[id(taken)] -= 1
            left -= taken.elements
            parts.append(replace(part, operands=((dtype, taken.row.shape),)))
    if left and strange and parts:  # the compiler's own among them
        return [*parts, _Piece(piece.of, ((dtype, (left,)),), tuple(strange))]
    return [piece] if left else parts


def communications(
    written: Written | None, compiled: Sequence[Collective] | None, *, planned: bool = False
) -> tuple[Communication, ...]:
    """Return what a program sends: the written collectives in program order, then those that nobody wrote.

    A compiled collective belongs to a written one by the call's text, which JAX carries in the operation's name
    (or in that of the sum it applies), by line and primitive for raw `jax.lax` calls, and where the compiler has
    lost the name by kind, axes and size. `planned` says that a plan of the compiler's will say more.
    """
    rows = () if written is None else written.collectives
    if compiled is None:
        return tuple(Communication(**_alike_fields(row), sent=row.total_bytes) for row in rows)
    wanted = [_Wanted(row, row.count) for row in rows]
    alike = grouped(wanted, _same).values()  # those that only their place tells apart, as of equal layers
    rest: list[_Piece] = []
    pieces = [piece for one in compiled for piece in _pieces(one)]
    # First those that know their line. Those that run most often fit in the fewest places.
    for whole in sorted(pieces, key=lambda piece: (not piece.where, -piece.of.count)):
        said = [group for group in alike if _says(whole, group[0].row)]
        for piece in _laid_out(whole, [one for group in said for one in group]):
            candidates = said if piece is whole else [group for group in said if _says(piece, group[0].row)]
            if not piece.named:  # the name of what XLA combined is that of one of them
                candidates = [group for group in candidates if group[0].row.shape == piece.shape and _is_open(group)]
            _claim(piece, candidates, rest)
    pieces, rest = rest, []
    written_in = {id(piece.of) for one in wanted for piece in one.pieces}
    for piece in pieces:  # what has lost its name goes to what is left of its kind, axes and size
        placed = _ends(piece.of.op_name) in _PLACED and id(piece.of) not in written_in
        _claim(piece, [one for one in alike if not placed and _is_open(one) and _alike(piece, one[0].row)], rest)
    joined = [_joined(one.row, one.pieces, wanted) for one in wanted]
    strangers = grouped(rest, lambda piece: id(piece.of)).values()
    return (*joined, *(_unwritten(parts, written, planned) for parts in strangers))


@dataclass(eq=False)
class _Wanted:
    """A written collective, how many of its runs were not found so far, and the pieces that were."""

    row: WrittenCollective
    missing: int
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def elements(self) -> int:
        return math.prod(self.row.shape)


def _same(one: _Wanted) -> Any:
    row = one.row
    return row.text, row.where, row.phase, row.kind, row.axes, row.shape, row.primitive


def _is_open(alike: Sequence[_Wanted]) -> bool:
    return any(one.missing > 0 for one in alike)


def _claim(piece: _Piece, groups: Sequence[Sequence[_Wanted]], rest: list[_Piece]) -> None:
    """Give `piece` to the best of the candidates: of each group the first that wants all its runs, else the first that
    wants any, else the first."""
    count = piece.of.count
    candidates = [next((one for n in (count, 1) for one in alike if one.missing >= n), alike[0]) for alike in groups]
    if not candidates:
        rest.append(piece)
        return
    backward = any(_compat.BACKWARD in name for name in piece.names)

    def fits(one: _Wanted) -> tuple[int, bool, bool]:
        row = one.row
        alike = sum(
            (
                row.where == piece.where,
                (row.phase == "backward") == backward,
                row.kind == piece.of.kind,
                one.elements == piece.elements,
                row.shape == piece.shape,
                one.missing > 0,
            )
        )
        return alike, row.axes == piece.of.axes, one.missing >= count

    best = max(candidates, key=fits)
    best.pieces.append(piece)
    best.missing -= count


def _says(piece: _Piece, row: WrittenCollective) -> bool:
    """Return whether the name of a compiled collective, or of a part of it, says a written one."""
    if row.axes and piece.of.axes and not set(piece.of.axes) <= set(row.axes):
        return False  # it is not part of a move over its axes alone
    if isinstance(row.text, CallName):
        return any(row.text in name for name in piece.names)
    # a raw call of jax.lax: its name is too common to go by alone
    return row.where == piece.of.where and row.kind in (kind_of(_ends(name).partition("[")[0]) for name in piece.names)


def _alike(piece: _Piece, row: WrittenCollective) -> bool:
    """Return whether a compiled collective without a name may be a written one; XLA for TPUs may sum and slice to
    scatter."""
    kind = "psum_scatter" if (row.kind, piece.of.kind) == ("psum_scatter", "psum") else piece.of.kind
    return (row.kind, row.axes, math.prod(row.shape)) == (kind, piece.of.axes, piece.elements)


def _gone(row: WrittenCollective, wanted: Sequence[_Wanted]) -> str:
    """Return what to say of a written collective that the compiled program does not have. Another one of the same call
    and size may serve for this one too. If it is of another call, that is not known."""
    alike = lambda one: (one.kind, one.axes, one.shape, one.dtype) == (row.kind, row.axes, row.shape, row.dtype)
    twins = [one.row.text for one in wanted if one.pieces and alike(one.row)]
    if row.text in twins:
        return "the compiler merged it with an equal one"
    return f"the compiler removed it{', or merged it with an equal one' if twins else ''}"


def _ends(name: str) -> str:
    return name.rpartition("/")[2]


# -------------------- one row


def _joined(row: WrittenCollective, pieces: Sequence[_Piece], wanted: Sequence[_Wanted]) -> Communication:
    """A written collective with its compiled pieces."""
    if not pieces:
        return Communication(**_alike_fields(row), runs=0, note=_gone(row, wanted))
    known = row.branch and row.exact  # the compiled program counts each branch as taken
    runs = row.count if known else sum(piece.of.count for piece in pieces)
    sent = sum(piece.bytes * piece.of.count for piece in pieces)
    if all(_as_written(piece, row) for piece in pieces):
        sent = row.bytes * runs  # in the dtype that was written: a CPU sums bfloat16 in float32
    done = tuple({id(piece.of): piece.of for piece in pieces}.values())
    return Communication(**_alike_fields(row), runs=runs, compiled=done, note=_note(row, pieces, runs), sent=sent)


def _alike_fields(one: Any) -> dict[str, Any]:
    """What a collective of any view has of a written one, by the names of the fields."""
    return {name: getattr(one, name) for name in _WRITTEN if hasattr(one, name)}


def _as_written(piece: _Piece, row: WrittenCollective) -> bool:
    """Return whether it is the same but for its dtype. In a `shard_map` over some axes the compiler divides what is
    sent."""
    same = piece.of.kind == row.kind and piece.of.axes in ((), row.axes)
    return same and piece.elements == math.prod(row.shape)


def _note(row: WrittenCollective, pieces: Sequence[_Piece], runs: int) -> str:
    kinds = sorted({piece.of.kind for piece in pieces} - {row.kind})
    if kinds:
        return f"compiled as {' and '.join(kinds)}"
    if row.exact and all(piece.of.exact for piece in pieces) and runs != row.count:
        return f"the compiled program runs it {runs} time{'s' * (runs > 1)}, not {row.count}"
    return ""


def _unwritten(pieces: Sequence[_Piece], written: Written | None, planned: bool) -> Communication:
    """Return what is left of a compiled collective, usually all of it."""
    one = pieces[0].of
    whole = sum(piece.elements for piece in pieces) == sum(math.prod(shape) for _, shape in one.operands)
    nbytes = one.bytes if whole else sum(piece.bytes for piece in pieces)
    dtype, shape = max((o for piece in pieces for o in piece.operands), key=lambda operand: shape_bytes(*operand))
    own = _ends(one.op_name) == "custom_partitioning"  # its user's rule wrote this, and no jaxpr has it
    cause = "the partition rule of a custom_partitioning" if own else _cause(one, written)
    if not planned and (asked := _reshard_of(one, written)) is not None:  # a plan says more of it
        own, cause = True, moved_text(asked)
    found = {
        **_alike_fields(one),
        "bytes": nbytes,
        "text": cause if whole else "the compiler's own, combined with one that is written",
        "phase": "backward" if _compat.BACKWARD in one.op_name else "forward",
        "dtype": dtype,
        "shape": shape,
    }
    note, sent = "" if one.whole else f"within groups of {one.group_size}", nbytes * one.count
    return Communication(**found, runs=one.count, written=own and whole, compiled=(one,), note=note, sent=sent)


def _cause(one: Collective, written: Written | None) -> str:
    """Return why the compiler added a collective, as far as its name and line tell."""
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


def _reshard_of(one: Collective, written: Written | None) -> Boundary | None:
    """The `reshard` on Explicit axes that asks for a collective: by its name, or by its line and its bytes."""
    asking = [entry for entry in (written.boundary if written else ()) if entry.text.startswith("reshard: ")]
    named = _ends(one.op_name) == "reshard"
    return next((e for e in asking if e.where == one.where and (named or e.bytes == one.bytes)), None)


def _fitting(one: Collective, moved: Sequence[Boundary]) -> Sequence[Boundary]:
    """The arguments that the moved data can be a part of; all of them if it fits none."""
    return [entry for entry in moved if _holds(one, entry)] or moved


def _holds(one: Collective, boundary: Boundary) -> bool:
    whole = math.prod(boundary.shape)
    return all(math.prod(shape) and whole % math.prod(shape) == 0 for _, shape in one.operands)


def moved_text(boundary: Boundary) -> str:
    """Return what is moved from where to where."""
    source = ONE_DEVICE if boundary.source == ONE_DEVICE else f'"{boundary.source}"'
    return f'{boundary.text} from {source} to "{boundary.target}"'


# -------------------- the compiler's plan beside what it compiled


def with_plan(
    found: Sequence[Communication], plan: Propagation, compiled: bool, left: Collection[str] | None
) -> tuple[Communication, ...]:
    """The collectives of a program with those of its plan.

    Where nothing was compiled, those of the plan follow. Else they say where a compiled one comes from: one of the same
    kind, axes and bytes, or at least of the same kind and axes if there is one alone.

    Args:
      found: The written and the compiled collectives.
      plan: The plan.
      compiled: Whether there is a compiled program.
      left: In a program with kernels, the axes that these leave to the compiler; None in one without.
    """
    if not compiled:
        own = (move for move in plan.moves if left is None or set(left).issuperset(_axes(move)))
        return (*found, *map(_planned, own))
    rest, joined = list(plan.moves), list(found)
    for exactly in (True, False):  # those of equal size first
        for i, one in enumerate(joined):
            moves = [] if one.written or one.note else _like(one, rest, exactly)
            if moves:
                rest = [other for other in rest if other not in moves]
                joined[i] = _reasoned(one, moves, exactly)
    return tuple(_wider(one, rest) for one in joined)


def _wider(one: Communication, rest: Sequence[Move]) -> Communication:
    """A compiled sum that nobody wrote, with the only one that the plan has on its line, if that is over fewer axes."""
    here = [move for move in rest if move.kind == "psum" == one.kind and short_line(move.where) == one.where]
    if one.written or one.note or len(here) != 1 or not set(_axes(here[0])) < set(one.axes):
        return one
    return replace(
        one, note=f"the plan sums over {', '.join(_axes(here[0]))} alone: compare the numbers with one device"
    )


def _reasoned(one: Communication, moves: Sequence[Move], exactly: bool) -> Communication:
    """A compiled collective with the line and the reason of the moves that it is."""
    move = moves[0]
    asked = one.text.startswith("auto mode, for ")  # a call of the user's says more than its layouts
    note = f"{move.text}: {move.why}" if asked else move.why
    note += "" if exactly else f"; the plan sends {bytes_text(move.bytes)}"
    note += f"; and {len(moves) - 1} more, combined" if len(moves) > 1 else ""
    text, where = one.text if asked else move.text, short_line(move.where) or one.where
    return replace(one, text=text, where=where, note=note, phase=move.phase, written=all(m.typed for m in moves))


def _like(one: Communication, moves: Sequence[Move], exactly: bool) -> list[Move]:
    """The move that a compiled collective is, or the several that the compiler combined into it."""
    same = [move for move in moves if move.kind == one.kind and set(_axes(move)) == set(one.axes)]
    if exactly:
        equal = [move for move in same if move.bytes == one.bytes]
        here = [move for move in equal if short_line(move.where) == one.where]
        together = [move for move in same if move.count == one.count and len(one.compiled[0].operands) > 1]
        combined = together if sum(move.bytes for move in together) == one.bytes else []
        return (here or equal)[:1] or combined
    return same if len(same) == 1 else []


def _axes(move: Move) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis.name for axis in move.raw.axes))


def _planned(move: Move) -> Communication:
    found = {
        **_alike_fields(move),
        "axes": _axes(move),
        "where": short_line(move.where),
        "branch": "a branch" if move.branch else "",
        "shape": move.raw.type.local_shape(move.raw.source),
    }
    return Communication(**found, written=move.typed, note=move.why, sent=move.total_bytes)
