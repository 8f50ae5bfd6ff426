"""The compiler's plan beside what it compiled: for each collective that nobody wrote, the line and the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spmd._text.units import bytes_text
from spmd.checker._source import short_line
from spmd.inspect._match import Communication

if TYPE_CHECKING:
    from spmd.propagation import Move, Propagation


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
    rest = list(plan.moves)
    joined: list[Communication] = []
    for exactly in (True, False):  # those of equal size first
        joined = []
        for one in found:
            moves = [] if one.written or one.note else _like(one, rest, exactly)
            if not moves:
                joined.append(one)
                continue
            move = moves[0]
            rest = [other for other in rest if other not in moves]
            where = short_line(move.where) or one.where
            asked = one.text.startswith("auto mode, for ")  # a call of the user's says more than its layouts
            other = "" if exactly else f"; the plan sends {bytes_text(move.bytes)}"
            note = (f"{move.text}: {move.why}" if asked else move.why) + other
            text = one.text if asked else move.text
            more = f"; and {len(moves) - 1} more, combined" if len(moves) > 1 else ""
            typed = all(one.typed for one in moves)
            joined.append(replace(one, text=text, where=where, note=note + more, phase=move.phase, written=typed))
        found = joined
    return tuple(joined)


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
    return Communication(
        kind=move.kind,
        axes=_axes(move),
        group_size=move.group_size,
        bytes=move.bytes,
        count=move.count,
        exact=move.exact,
        text=move.text,
        where=short_line(move.where),
        phase=move.phase,
        recomputed=move.recomputed,
        branch="a branch" if move.branch else "",
        dtype=move.dtype,
        shape=move.raw.type.local_shape(move.raw.source),
        written=move.typed,
        note=move.why,
        sent=move.total_bytes,
    )
