"""Compares what the layouts in the jaxpr claim with how the values lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import spmd.checker._reports as report
from spmd import _compat
from spmd._jaxprs.facts import KernelName, per_shard_reason
from spmd._jaxprs.walker import Equation, shape_of
from spmd.checker._engine import Engine
from spmd.checker._state import (
    FREE,
    HIDDEN,
    NONE,
    QUIET,
    STEP,
    UNREAD,
    Axes,
    Dim,
    Order,
    State,
    axes_of_dim,
    claimed_order,
    equal_along,
    free,
    hidden,
    is_divided,
    kept_order,
    normal,
    order_pair,
    size_of,
    with_order,
)
from spmd.language import Layout, axes_tuple

# Roles after which equal values may lie along a divided dimension: the operation made blocks of a whole.
MAKES = frozenset(("created", "copies"))


OVERLAP: tuple[Axes, ...] = ()  # a dimension with margins


class Claim(NamedTuple):
    """A layout taken apart.

    Attributes:
      before: For each dimension before `...` (or of all, if there is none), the axes of each of its factors.
      behind: The same behind `...`.
      ellipsis: Whether there is one.
      named: All its axes that divide a dimension.
      unreduced: Its marks.
    """

    before: tuple[tuple[Axes, ...], ...]
    behind: tuple[tuple[Axes, ...], ...]
    ellipsis: bool
    named: frozenset[str]
    unreduced: frozenset[str]

    def at(self, rank: int, mapped: Sequence[int]) -> list[int] | None:
        """The position of each dimension of the layout in an array, to which vmap added some; None where they do not
        correspond."""
        own = [d for d in range(rank) if d not in mapped]
        count = len(self.before) + len(self.behind)
        if len(own) < count or (len(own) > count and not self.ellipsis):
            return None
        return [*own[: len(self.before)], *own[len(own) - len(self.behind) :]]


@lru_cache(maxsize=4096)
def claim_of(layout: Layout) -> Claim:
    """Read a layout once."""
    sides: tuple[list[Any], list[Any]] = ([], [])
    behind = 0
    for dim in layout.dims:
        if dim.ellipsis:
            behind = 1
            continue
        sides[behind].append(OVERLAP if any(dim.margin) else tuple(tuple(atom.axes or ()) for atom in dim.atoms))
    unreduced = frozenset(layout.unreduced)
    return Claim(tuple(sides[0]), tuple(sides[1]), bool(behind), frozenset(layout.axes), unreduced)


def layout_marker(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Check one layout, and believe it from here on, so that a mistake is reported once."""
    state, layout = operands[0], eqn.params["layout"]
    if not walk.active:
        return [state]
    if closes := eqn.params.get("closes"):
        differs = [axis for axis in walk.tracked(closes) if axis in operands[-1].axes and axis in walk.checked]
        if differs and not walk.silent(eqn):
            walk.note(eqn, "closed", report.closed_while_different(walk, eqn, differs))
            walk.rows |= {eqn.params["place"]} if any(report.is_row(walk, eqn, axis) for axis in differs) else set()
        return [state]
    claim = claim_of(layout)
    places = claim.at(len(state.dims), eqn.params.get("mapped", ()))
    scope = walk.checked
    if "axes" in eqn.params:  # a kernel of fewer axes, inlined: it knows nothing of the others
        scope = scope & frozenset(eqn.params["axes"])
    # A device may have added to its own block with margins what a deposit brings to others.
    scope = scope - {axis for dim in layout.dims if any(dim.margin) for axis in dim.axes}
    if not walk.inside_verb(eqn):
        known = len(walk.findings)
        _check(walk, eqn, state, claim, places, scope)
        if len(walk.findings) > known and claim.ellipsis and places is not None:  # said once
            rest = [hidden(size_of(d)) if i not in places else d for i, d in enumerate(state.dims)]
            state = walk.kept(State(tuple(rest), different=state.axes))
    return [_believed(walk, eqn, state, claim, places, scope)]


def _check(
    walk: Engine, eqn: Equation, state: State, claim: Claim, places: list[int] | None, scope: frozenset[str]
) -> None:
    role = eqn.params["role"]
    # A loop that adds in its carry leaves a term of a sum. Types do not see that it adds: a claimed {U:} is believed.
    sums = {("recurrence", axis) for axis in claim.unreduced}
    found = (p for p in state.pending if p.axis in scope and p.kind not in QUIET and (p.kind, p.axis) not in sums)
    pending = sorted(found)
    if pending and role != "result":
        first = walk.made_pending[min(p.at for p in pending)]
        kind = "partial" if all(p.kind == "term" for p in pending) else "pending"
        walk.note(eqn, kind, report.pending_claimed(walk, eqn, pending), where=first)
        return
    if places is not None:
        wrong = _wrong_dims(walk, state, claim, places, scope, role)
        if wrong:
            kind = "noise" if walk.random(eqn.invars[0], state) else "layout"
            walk.note(eqn, kind, _about_dims(walk, eqn, state, wrong))
            return
        if claim.ellipsis and _hidden_axes(walk, eqn, state, claim, places, scope):
            return
    _check_marks(walk, eqn, state, claim, places, scope)


def _wrong_dims(
    walk: Engine, state: State, claim: Claim, places: list[int], scope: frozenset[str], role: str
) -> list[tuple[int, Axes, Axes]]:
    """The dimensions that do not lie as claimed, each as (place in the layout, axes claimed, axes found)."""
    wrong = []
    claims = [*claim.before, *claim.behind]
    unknown = state.different
    if state.pending:
        unknown = unknown | {p.axis for p in state.pending if p.kind == UNREAD}
    for i, (place, factors) in enumerate(zip(places, claims, strict=True)):
        if factors is OVERLAP:
            continue
        dim = state.dims[place]
        said = walk.tracked(sum(factors, ()))
        have = axes_of_dim(dim)
        if have == said and (len(dim) == 1 or _in_order(dim, factors, walk)):
            continue
        if len(dim) == 1 and dim[0][1] is FREE:
            continue
        if any(axes is HIDDEN for _, axes in dim):
            # What is hidden may be what is claimed, along the axes on which the value differs.
            equal = [a for a in said if a not in state.axes and a in scope]
            if equal and role not in MAKES and not have:
                wrong.append((i, tuple(equal), ()))
            continue
        if have == said and len(factors) > 1:
            continue
        extra = [a for a in have if a not in said and a in scope]
        lacking = [a for a in said if a not in have and a in scope]
        if role in ("result", "copies") and not any(map(walk.wide, (*extra, *lacking))) and len(dim) == 1:
            continue
        free = set(lacking) <= unknown or role in MAKES
        if lacking and not extra and free:
            continue
        if (extra or lacking or have != said or len(dim) > 1) and any(a in scope for a in (*have, *said)):
            wrong.append((i, said, have))
    return wrong


def _in_order(dim: Dim, factors: tuple[Axes, ...], walk: Engine) -> bool:
    """Return whether a dimension of several factors is what a layout with these factors says."""
    if not axes_of_dim(dim):
        return True
    divided = [axes for _, axes in dim]
    if len(factors) == 1:
        return len([a for a in divided if is_divided(a)]) == 1 and is_divided(divided[0])
    said = [walk.tracked(axes) for axes in factors]
    leading = bool(said[0])
    return leading == is_divided(divided[0])


def _about_dims(walk: Engine, eqn: Equation, state: State, wrong: list[tuple[int, Axes, Axes]]) -> Any:
    """One finding for all dimensions that do not lie as claimed."""
    i, said, have = wrong[0]
    index = [d for d, dim in enumerate(eqn.params["layout"].dims) if not dim.ellipsis][i]
    summed = [a for a in said if a in state.partial]
    if summed and not state.zero and not have:
        return report.partial_claimed_divided(walk, eqn, index, summed)
    if not have and not any(h for _, _, h in wrong):
        return report.claimed_divided(walk, eqn, state, index, said)
    gone = [a for _, s, h in wrong for a in h if a not in s]
    gained = [a for _, s, h in wrong for a in s if a not in h]
    if gone and not gained and {*gone} <= {*eqn.params["layout"].unreduced}:
        return report.blocks_claimed_partial(walk, eqn, state, gone)
    if gone and not gained and len(wrong) == 1:
        return report.unexpected_difference(walk, eqn, state, list(dict.fromkeys(gone)))
    return report.lies_otherwise(walk, eqn, state)


def _hidden_axes(
    walk: Engine, eqn: Equation, state: State, claim: Claim, places: list[int], scope: frozenset[str]
) -> bool:
    """An axis of the pattern must not hide in `...`."""
    named = frozenset(eqn.params.get("named", ())) | claim.named | claim.unreduced
    rest = [d for i, d in enumerate(state.dims) if i not in (*places, *eqn.params.get("mapped", ()))]
    inside = [a for dim in rest for a in axes_of_dim(dim) if a in named and a in scope]
    if inside:
        walk.note(eqn, "hidden", report.hidden_in_ellipsis(walk, eqn, state, inside))
    return bool(inside)


def _check_marks(
    walk: Engine, eqn: Equation, state: State, claim: Claim, places: list[int] | None, scope: frozenset[str]
) -> None:
    """Check what a layout says of the axes that do not divide any of its dimensions."""
    role = eqn.params["role"]
    marks = frozenset(walk.tracked(claim.unreduced))
    order = lambda axes: [a for a in walk.sizes if a in axes]
    blocks = order(marks & state.divided - state.different & scope)
    if blocks and places is not None:
        walk.note(eqn, "partial", report.blocks_claimed_partial(walk, eqn, state, blocks))
        return
    wrong = order(marks - state.axes)
    # A sum of literals over a piece is a term: it counts the piece's rows.
    counted = state.zero or state.table is not None
    if wrong and not counted and role not in MAKES:
        walk.note(eqn, "partial", report.claimed_partial(walk, eqn, wrong))
    mentioned = claim.unreduced | claim.named
    summed = order((state.partial & scope) - mentioned)
    if summed and not state.zero and places is not None:
        walk.note(eqn, "partial", report.unexpected_partial(walk, eqn, state, summed))
    if claim.ellipsis or places is None or role == "result" or eqn.params.get("mapped"):
        return
    differs = order((state.different & scope) - mentioned)
    if differs:
        walk.note(eqn, "layout", report.unexpected_difference(walk, eqn, state, differs))


def _believed(
    walk: Engine, eqn: Equation, state: State, claim: Claim, places: list[int] | None, scope: frozenset[str]
) -> State:
    """The state as the layout says it."""
    if not walk.trusting:
        return _noted(walk, state, claim)
    marks = claim.unreduced
    dims = list(state.dims)
    for place, factors in zip(places or (), [*claim.before, *claim.behind], strict=bool(places)):
        dims[place] = _said(walk, dims[place], factors)
    held = {a for dim in dims for a in axes_of_dim(dim)}
    overlapping = claim.named - held
    gone = frozenset(a for a in scope if a not in held | marks | overlapping)
    if claim.ellipsis or places is None or eqn.params.get("mapped"):
        gone = gone & frozenset(eqn.params.get("gone", ()))
    lost = state.divided - held - gone
    different = (state.different - held - marks - gone) | (lost - marks) | frozenset(walk.tracked(overlapping))
    pending = NONE if eqn.params["role"] != "argument" else state.pending
    table = state.table
    if table is not None and tuple(dims) != state.dims and held | different != {*table.axes}:
        table = None
    return walk.kept(
        State(
            tuple(dims),
            ((state.partial | marks) - held - gone - different) | marks,
            different,
            frozenset(p for p in state.pending if p.kind == STEP and p.axis not in held) | pending,
            state.zero,
            table,
            order=kept_order([state], dims),
        )
    )


def _said(walk: Engine, dim: Dim, factors: tuple[Axes, ...]) -> Dim:
    """One dimension as a layout says it lies. How shards with margins lie is not known: they overlap."""
    if factors is OVERLAP:
        return hidden(size_of(dim))
    said = walk.tracked(sum(factors, ()))
    if axes_of_dim(dim) == said and not any(axes is HIDDEN for _, axes in dim):
        return dim
    n = size_of(dim)
    leading = walk.tracked(factors[0])
    if len(factors) > 1 and said != leading:
        return hidden(n)
    if not said:
        return free(n) if n == 1 else ((n, ()),)
    return normal([(n, said)])


def _noted(walk: Engine, state: State, claim: Claim) -> State:
    """Return what a layout adds if it is not believed: an equal value that it calls divided differs from here on."""
    said = frozenset(walk.tracked((*claim.named, *claim.unreduced))) - state.axes
    if not said:
        return state
    return walk.kept(state._replace(different=state.different | said, table=None))


def assert_equal_marker(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """The user's word that the value is equal on these axes, or a plan's: then it is a gathered copy."""
    axes = frozenset(walk.tracked(eqn.params["axes"]))
    return [walk.kept(equal_along(o, axes)._replace(left=None)) for o in operands]


def order_marker(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """In which order a value is, against the order that it came in. What is said here is believed."""
    [state] = operands
    axes = walk.tracked(eqn.params["axes"])
    if not axes or not walk.active:
        return [state]
    said = Order(eqn.params["order"], axes, walk.number(eqn))
    have = None if eqn.params["anew"] else claimed_order(state, said)
    if have is not None and walk.checked.issuperset(axes) and not per_shard_reason(eqn, walk.callers):
        walk.once(
            order_pair(said, have),
            lambda: walk.note(eqn, "order", report.ordered_otherwise(walk, said, have)),
        )
    return [walk.kept(state._replace(order=with_order(state, said)))]


def arguments_of(eqn: Equation, kernel: KernelName | None) -> dict[int, Any]:
    """The arguments of a kernel by their number among the operands of its `shard_map`, as far as these lie like them.
    Constants that JAX hoisted out of the body come first; what it keeps for a gradient is not an argument."""
    if kernel is None:
        return {}
    specs = eqn.params["in_specs"]
    first = len(specs) - len(kernel.arguments)
    found = {i: leaf for i, leaf in enumerate(kernel.arguments, first) if first >= 0}
    return {i: leaf for i, leaf in found.items() if _lies_so(leaf.layout, shape_of(eqn.invars[i]), specs[i])}


def _lies_so(layout: Layout, shape: Sequence[int], spec: Any) -> bool:
    fits = claim_of(layout).at(len(shape), ()) is not None
    return fits and _axes(layout.with_rank(len(shape)).spec) == _axes(spec)


def _axes(spec: Any) -> list[tuple[str, ...]]:
    found = [axes_tuple(entry) for entry in _compat.partitions(spec)]
    while found and not found[-1]:
        found.pop()
    return found
