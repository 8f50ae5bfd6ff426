"""What is wrong with what a string says: one function for each way, which returns the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import Equation
from spmd.checker._history import shown_spec
from spmd.checker._made import Place, lying
from spmd.checker._mends import (
    MEANT,
    OWN_NOISE,
    as_it_says,
    between,
    block_of_what,
    completed,
    iota,
    place_at,
    rather,
    reshaped,
    what_it_may_be,
)
from spmd.checker._state import STEP, Pending, State, axes_of_dim
from spmd.checker._words import changed, done_to_pieces, joined, listed, marked, pieces_of, reasons, shown_dims, written
from spmd.errors import Fault, Fix
from spmd.language import Layout, verb_for


def claimed_divided(walk: Any, eqn: Equation, state: State, dim: int, axes: Sequence[str]) -> Fault:
    """Equal, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), listed(axes)
    name = " ".join(a.name for a in layout.dims[dim].atoms)
    says = f'"{shown}" says that {name} is divided over {along}'
    span, place = layout.dims[dim].span, place_at(walk, eqn)
    if walk.history.made_by(eqn.invars[0], "iota"):
        rule = f"{says}, but this arange counts from 0 on every device along {along}."
        fix = iota(walk, eqn, dim) if place is not None and place.counts else None
        return _at_marker(walk, eqn, rule, span, (), fix, None if fix else f'spmd.iota("{shown}") in its place')
    if walk.random(eqn.invars[0], state):
        rule = f"{says}, but these random numbers are the same on every device along {along}."
        return _at_marker(walk, eqn, rule, span, (), None, OWN_NOISE)
    have = None if place is None or place.made else place.like(layout)
    if have is not None and verb_for(have, layout) != "split":
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f"{says}, but every device along {along} holds the same block."
    if any(one.kind == "layout" for one in walk.findings) and not walk.history.gathers(eqn.invars[0], axes[0]):
        first = "a string before it says that it is whole: mend that one first"
        return _at_marker(walk, eqn, rule, span, (), None, first)
    fix = as_it_says(walk, eqn, place)
    return _at_marker(walk, eqn, rule, span, (), fix, None if fix else block_of_what(walk, eqn, state, axes))


def partial_claimed_divided(walk: Any, eqn: Equation, dim: int, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), listed(axes)
    rule = f'"{shown}" says that each device along {along} holds a block, but each holds a partial sum.'
    before = changed(layout, drop=axes, unreduced={*layout.unreduced, *axes})
    return _at_marker(walk, eqn, rule, layout.dims[dim].span, (), between(eqn, before, layout))


def claimed_partial(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """Equal, and claimed to be a partial sum."""
    layout = eqn.params["layout"]
    along, mark = listed(axes), marked(axes)
    count = 1
    for axis in axes:
        count *= walk.sizes.get(axis, 0)
    n = str(count) if count > 1 else "n"
    rule = (
        f'"{mark}" says that each device along {along} holds one term of a sum, '
        f"but the value is equal on {along}: summing {n} copies multiplies it by {n}."
    )
    whole = changed(layout, unreduced=[a for a in layout.unreduced if a not in axes])
    advice = f'it is complete, "{written(eqn, whole)}": leave out {mark} and the psum'
    return _at_marker(walk, eqn, rule, _mark_span(layout), (), advice=advice)


def unexpected_partial(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed complete."""
    layout = eqn.params["layout"]
    along, shown = listed(axes), written(eqn, layout)
    rule = f'"{shown}" says that the value is equal on {along}, but it is a partial sum {marked(axes)}.'
    whole = layout.without_brackets()
    place = place_at(walk, eqn)
    summed = place is not None and place.made is not None and place.made.op == "sum"
    if summed or walk.history.declared(eqn.invars[0], axes):
        fix = between(eqn, changed(whole, unreduced={*whole.unreduced, *axes}), whole)
    else:
        fix = as_it_says(walk, eqn, place)
    advice = None if fix else what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), reasons(walk, eqn.invars[0], axes), fix, advice)


def unexpected_difference(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """Different, and claimed equal."""
    layout = eqn.params["layout"]
    along, shown = listed(axes), written(eqn, layout)
    place = place_at(walk, eqn)
    have = None if place is None or place.made else place.like(layout.without_brackets())
    if have is not None and verb_for(have, layout.without_brackets()) not in ("all_gather", "nothing"):
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f'"{shown}" says that the value is equal on {along}, but it differs along {along}.'
    fix = as_it_says(walk, eqn, place)
    advice = None if fix else reshaped(state, axes) or what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), reasons(walk, eqn.invars[0], axes), fix, advice)


def closed_while_different(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A call makes its result equal along axes that its string does not name, and its operand differs there."""
    along = listed(axes)
    rule = (
        f"the result of this call is equal on {along}, which its string does not name, and its operand differs there: "
        "rows of different devices would be mixed."
    )
    where = tuple(f"made in a loop or vmap over a dimension that {a} divides" for a in axes if _is_row(walk, eqn, a))
    divided = "/".join(("e", *axes))
    advice = (
        f"reduce the whole array before the loop, with the dimension that {along} divides in the string: "
        f'reduce(x, "{divided} {eqn.params["layout"].short} -> {divided}", ...)'
    )
    return _at_marker(
        walk, eqn, rule, _span(eqn.params["layout"]), (*where, *reasons(walk, eqn.invars[0], axes)), None, advice
    )


def _is_row(walk: Any, eqn: Equation, axis: str) -> bool:
    """Return whether a value is a row of a divided dimension: of a loop, or of vmap."""
    state = walk.known.get(eqn.invars[0])
    mapped = [state.dims[d] for d in eqn.params.get("mapped", ())] if state else []
    return state is not None and (
        any(p.axis == axis and p.kind == STEP for p in state.pending) or any(axis in axes_of_dim(d) for d in mapped)
    )


def lies_otherwise(walk: Any, eqn: Equation, state: State) -> Fault:
    """It is known how each dimension lies, and that is not as the layout says."""
    place = place_at(walk, eqn)
    layout = eqn.params["layout"].without_brackets()
    have = None if place is None or place.made else place.like(layout)
    if have is None:
        have = None if layout.has_ellipsis else lying(state).like(layout)
    return _lies_otherwise(walk, eqn, state, have, place)


def _lies_otherwise(walk: Any, eqn: Equation, state: State, have: Layout | None, place: Place | None) -> Fault:
    """It is known how the value lies, and that is not as the layout says: one finding, however many axes are wrong."""
    layout = eqn.params["layout"].without_brackets()
    if have is None:
        rule = f'"{written(eqn, layout)}" is what the layout says, and the value lies as "{shown_dims(state)}".'
        axes = sorted(state.divided ^ set(layout.axes)) or sorted(state.divided)
        why, span = reasons(walk, eqn.invars[0], axes), _span(eqn.params["layout"])
        return _at_marker(walk, eqn, rule, span, why, advice=reshaped(state, axes))
    rule = f'"{written(eqn, layout)}" is what the layout says, and the value lies as "{written(eqn, have)}".'
    wrong = sorted(set(have.axes) ^ set(layout.axes))
    gathers = [line_of(o.eqn, o.callers) for axis in wrong for o in walk.history.gathers(eqn.invars[0], axis)]
    got = [*reasons(walk, eqn.invars[0], [a for a in wrong if a in have.axes])]
    got += [f"gathered at {line}" for line in dict.fromkeys(gathers) if line]
    fix = between(eqn, have, layout, place and place.name)
    return _at_marker(walk, eqn, rule, _span(eqn.params["layout"]), got, fix)


def hidden_in_ellipsis(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """An axis that the pattern uses divides a dimension that `...` stands for."""
    layout = eqn.params["layout"]
    along = listed(list(dict.fromkeys(axes)))
    at = next((dim.span for dim in layout.dims if dim.ellipsis), None)
    rule = f'"..." stands for a dimension that is divided over {along}, and the string uses {along} elsewhere.'
    got = [f'the value lies as "{shown_dims(state)}"', *reasons(walk, eqn.invars[0], axes)]
    advice = (
        f"the keyword of a ready-made layer for {along}; in a string of yours name the dimension, or gather it first"
    )
    return _at_marker(walk, eqn, rule, at, got, None, advice)


def blocks_claimed_partial(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """Divided, and claimed to be a partial sum."""
    along, mark = listed(axes), marked(axes)
    rule = f'"{mark}" says that each device along {along} holds one term of a sum, but each holds a block.'
    got = [f'the value lies as "{shown_dims(state)}"', *reasons(walk, eqn.invars[0], axes)]
    advice = f"leave out {mark}: gather the blocks, or sum over the divided dimension first"
    return _at_marker(walk, eqn, rule, _mark_span(eqn.params["layout"]), got, None, advice)


def pending_claimed(walk: Any, eqn: Equation, pending: Sequence[Pending]) -> Fault:
    """Something was done to a piece, and the result is claimed to be that of the whole."""
    layout = eqn.params["layout"]
    rule = f'"{written(eqn, layout)}" is claimed of the whole array, and {done_to_pieces(pending)}.'
    place = place_at(walk, eqn)
    fix = as_it_says(walk, eqn, place)
    advice = completed(walk, pending)
    if place is not None and place.made is not None and {place.made.op} == {p.kind for p in pending}:
        advice = joined(what_it_may_be(eqn, [pending[0].axis], place), MEANT)
    return _at_marker(walk, eqn, rule, _span(layout), pieces_of(walk, pending), fix, None if fix else advice)


def returned_partial(walk: Any, eqn: Equation, index: int, axes: Sequence[str], spec: Any) -> Fault:
    """A partial sum leaves the kernel as if it were complete."""
    mark, along = marked(axes), listed(axes)
    rule = f"The body returned a partial sum over {along}, and the signature does not say {mark}."
    got = (f"output {index}, {spec}",)
    return Fault(rule, walk.kernel, None, None, got, Fix("psum", ("result",), f"... {mark} -> ..."))


def pending_returned(walk: Any, eqn: Equation, index: int, pending: Sequence[Pending], spec: Any) -> Fault:
    """Describe what was done to pieces and leaves a raw `shard_map`."""
    rule = f"{done_to_pieces(pending)}, and the results are put together."
    rule = rule[0].upper() + rule[1:]
    got = (f"output {index}, {shown_spec(spec)}", *pieces_of(walk, pending))
    return Fault(rule, walk.kernel, None, None, got, advice=completed(walk, pending))


def returned_otherwise(walk: Any, eqn: Equation, index: int, state: State, spec: Any) -> Fault:
    """A result of a raw `shard_map` lies otherwise than its spec puts it together."""
    rule = "A result is put together along other dimensions, or in another order, than it is divided."
    got = (f"output {index}, {shown_spec(spec)}", f'the value lies as "{shown_dims(state)}"')
    return Fault(rule, walk.kernel, None, None, got, advice="an out_spec with the axes where the value has them")


Span = tuple[int, int]


def _span(layout: Layout) -> Span | None:
    """Return where a whole layout stands in the string that it was read from."""
    if layout.dims:
        return layout.dims[0].span[0], layout.dims[-1].span[1]
    source = layout.source or ""
    at = source.find("scalar")
    return (at, at + len("scalar")) if source.count("scalar") == 1 else None


def _mark_span(layout: Layout) -> Span | None:
    """Return where its mark of partial sums stands: behind its dimensions."""
    start = (layout.source or "").find("{U:", layout.dims[-1].span[1] if layout.dims else 0)
    return None if start < 0 else (start, (layout.source or "").find("}", start) + 1)


def _dim(eqn: Equation, dim: int) -> str:
    """One dimension of the marker's layout, as it is written."""
    layout = eqn.params["layout"]
    return layout.from_dims((layout.dims[dim],)).short


def _at_marker(
    walk: Any,
    eqn: Equation,
    rule: str,
    span: Span | None,
    got: Sequence[str],
    fix: Fix | None = None,
    advice: str | None = None,
) -> Fault:
    source = eqn.params["layout"].source
    if (told := rather(walk, eqn, fix)) is not None:
        fix, advice = None, told
    written = source is not None and source in eqn.params["call"] and span is not None and span[1] > span[0]
    shown = (source, span) if written else (None, None)
    return Fault(rule, eqn.params["call"], *shown, (*_value(walk, eqn), *got), fix, advice)


def _value(walk: Any, eqn: Equation) -> list[str]:
    """Return what it is about: the type of the value, its role, and the user's line."""
    aval = eqn.invars[0].aval
    shape = ",".join(str(n) for n in getattr(aval, "shape", ()))
    role = eqn.params.get("role", "")
    what = {
        "argument": "an argument",
        "operand": "an operand",
        "output": "an output",
        "annotate": "annotated",
    }.get(role, "a result")
    place = line_of(eqn, walk.callers)
    return [f"{what}: {getattr(aval, 'dtype', aval)}[{shape}]" + (f", at {place}" if place else "")]
