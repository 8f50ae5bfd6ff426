"""What the layouts in the jaxpr claim, against what the values are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import spmd.checker._report as report
from spmd.checker._axes import Origin
from spmd.checker._state import IOTA, UNKNOWN, ZERO, State
from spmd.checker._walk import Walk
from spmd.language import Layout

# Roles after which `{U:}` is a certainty. Operands of a verb are consumed by the verb's own collectives.
DECLARES = frozenset(("result", "annotate", "created", "copies", "argument"))


class Claim(NamedTuple):
    """A layout, taken apart: `(axis, dim)` pairs (dims behind `...` count from the end), and the marks."""

    divided: tuple[tuple[str, int], ...]
    unreduced: tuple[str, ...]
    rank: int
    ellipsis: bool


@lru_cache(maxsize=4096)
def claim_of(layout: Layout) -> Claim:
    """Read a layout once."""
    divided: list[tuple[str, int]] = []
    behind = False
    for index, dim in enumerate(layout.dims):
        if dim.ellipsis:
            behind = True
            continue
        place = index - len(layout.dims) if behind else index
        divided += [(axis, place) for atom in dim.atoms for axis in atom.axes or ()]
    return Claim(tuple(divided), tuple(layout.unreduced), len(layout.dims), behind)


def layout_marker(walk: Walk, eqn: Any, operands: Any) -> list[State]:
    """Check one layout and believe it from here on, so that one mistake is reported once."""
    [state] = operands
    if not walk.active:
        return [state]
    layout: Layout = eqn.params["layout"]
    claim = claim_of(layout)
    divided = 0
    for axis, _ in claim.divided:
        divided |= walk.axes.bit(axis)
    unreduced = walk.axes.mask(claim.unreduced)
    if not state.flags & UNKNOWN:
        state = _trust_unit_axes(walk, eqn, state, claim, divided | unreduced)
        _check_divided(walk, eqn, state, claim)
        _check_unreduced(walk, eqn, state, unreduced)
        if _complete(eqn, claim):
            _check_absent(walk, eqn, state, divided | unreduced)
    believed = _believe(walk, eqn, state, claim, divided, unreduced)
    if walk.trusting:
        return [believed]
    different = state.different | believed.different
    return [State(different, believed.partial, state.uniform, state.flags, state.origin | believed.origin)]


def assert_equal_marker(walk: Walk, eqn: Any, operands: Any) -> list[State]:
    """The user's word that the value is equal on these axes, or a plan's: then it is a gathered copy."""
    names = eqn.params["axes"]
    axes = walk.axes.mask(names)
    copied = 0
    for name in names if eqn.params.get("copies") else ():
        copied |= walk.origins.bit(id(eqn), Origin("gather", name, eqn=eqn, callers=tuple(walk.callers)))
    return [
        s._replace(
            different=s.different & ~axes,
            partial=s.partial & ~axes,
            origin=walk.origins.without(s.origin, names) | copied,
        )
        for s in operands
    ]


def _complete(eqn: Any, claim: Claim) -> bool:
    """Whether the layout speaks of all dims; with `...` and under vmap, axes may lie in others."""
    return not claim.ellipsis and claim.rank == len(getattr(eqn.invars[0].aval, "shape", ()))


def _trust_unit_axes(walk: Walk, eqn: Any, state: State, claim: Claim, mentioned: int) -> State:
    """On an axis of size 1 a verb may do nothing at all; then its result is what it says.

    What the layout does not speak of may lie on any axis but those that the verb took away.
    """
    unit = walk.axes.unit() if eqn.params["role"] in ("result", "copies") else 0
    if not unit:
        return state
    gone = unit if _complete(eqn, claim) else unit & walk.axes.mask(eqn.params.get("gone", ()))
    return state._replace(
        different=(state.different & ~gone) | (mentioned & unit),
        partial=state.partial & ~(gone & ~mentioned),
    )


def _check_divided(walk: Walk, eqn: Any, state: State, claim: Claim) -> None:
    rank = len(getattr(eqn.invars[0].aval, "shape", ()))
    created = eqn.params["role"] in ("created", "copies")
    same: dict[int, list[str]] = {}
    summed: dict[int, list[str]] = {}
    for axis, dim in claim.divided:
        bit = walk.axes.bit(axis)
        if state.partial & bit and not state.flags & ZERO:
            summed.setdefault(dim, []).append(axis)
        elif not state.different & bit and not created and not _constant_along(state, dim, rank, claim):
            same.setdefault(dim, []).append(axis)
    same = {dim: axes for dim, axes in same.items() if not _copies_along(walk, eqn, dim, claim)}
    for dim, axes in same.items():
        walk.findings.append(report.claimed_divided(walk, eqn, state, dim, axes, bool(state.flags & IOTA)))
    for dim, axes in summed.items():
        walk.findings.append(report.partial_claimed_divided(walk, eqn, dim, axes))


def _constant_along(state: State, dim: int, rank: int, claim: Claim) -> bool:
    """Whether equal blocks of this dim make a whole that is divided all the same."""
    if not claim.ellipsis and rank != claim.rank:  # under vmap the layout does not mention the mapped dim
        return state.uniform != 0
    return bool(state.uniform >> (dim % rank if rank else 0) & 1)


def _copies_along(walk: Walk, eqn: Any, dim: int, claim: Claim) -> bool:
    """Whether the equal blocks of this dim are copies that `repeat` made, one after another, and so make a whole."""
    place = walk.place(eqn)
    axes = tuple(axis for axis, at in claim.divided if at == dim)
    if place is None or place.made is not None or len(place.dims) < claim.rank:
        return False
    return place.dims[dim] == axes


def _check_unreduced(walk: Walk, eqn: Any, state: State, unreduced: int) -> None:
    wrong = unreduced & ~state.different & ~state.partial
    if wrong and not state.flags & ZERO and eqn.params["role"] != "created":
        walk.findings.append(report.claimed_partial(walk, eqn, walk.axes.names(wrong)))


def _check_absent(walk: Walk, eqn: Any, state: State, mentioned: int) -> None:
    scope = walk.checked
    if "axes" in eqn.params:  # a kernel of fewer axes, inlined: it knows nothing of the others
        scope = walk.axes.mask(eqn.params["axes"])
    absent = scope & ~mentioned
    summed = absent & state.partial if not state.flags & ZERO else 0
    if summed:
        walk.findings.append(report.unexpected_partial(walk, eqn, state, walk.axes.names(summed)))
    differs = absent & state.different & ~state.partial
    if differs:
        walk.findings.append(report.unexpected_difference(walk, eqn, state, walk.axes.names(differs)))


def _believe(walk: Walk, eqn: Any, state: State, claim: Claim, divided: int, unreduced: int) -> State:
    """The state as the layout says it. Constants claimed divided count as different: their sum is local.

    Copies stay equal: merged in another order, they are not blocks of a whole.
    """
    mentioned = divided | unreduced
    told = mentioned & (state.different | unreduced) if eqn.params["role"] == "copies" else mentioned
    scope = walk.checked if _complete(eqn, claim) else 0
    if "axes" in eqn.params:
        scope &= walk.axes.mask(eqn.params["axes"])
    new = told & ~state.different
    origin = walk.origins.without(state.origin, walk.axes.names(scope & ~mentioned & state.different))
    for name in walk.axes.names(new):
        origin |= walk.origins.bit(id(eqn), Origin("spmd_layout", name, eqn=eqn, callers=tuple(walk.callers)))
    partial = state.partial & ~divided & ~(scope & ~mentioned)
    if eqn.params["role"] in DECLARES:
        partial |= unreduced
    return State(
        (state.different | told) & ~(scope & ~mentioned),
        partial,
        state.uniform,
        state.flags & ~UNKNOWN,
        origin,
    )
