"""The texts: one function per way to be wrong. Each returns the message without its place in the code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.callers import layers_of, rather_told
from spmd._jaxprs.equations import opened, shape_of
from spmd.checker._history import Origin, shown_spec
from spmd.checker._instead import ARRAY, lines_in_place, reduced
from spmd.checker._made import Place, lying, operation_of, place_of
from spmd.checker._rounding import rounds
from spmd.checker._source import called_in_jax, line_of
from spmd.checker._state import HIDDEN, STEP, Dim, Pending, State, axes_of_dim
from spmd.checker._text import changed, text_of
from spmd.comm._keywords import axes_in, keyword_for, works_along
from spmd.errors import Fault, Fix, if_possible
from spmd.language import Layout, Pattern, verb_for

_MEANT = 'spmd.per_shard("why") if each shard is meant'
_SHOWN = 3  # reasons listed per value; a value of a deep network has hundreds


# The names that users know, for the variants that JAX picks by type.
_KNOWN_AS = {
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "psum_scatter",
    "reduce_scatter_start": "psum_scatter_start",
    "unreduced_reduce_scatter": "psum_scatter",
    "add_any": "add",
    "select_n": "where",
    "dot_general": "matmul",
}


def _name(of: Any) -> str:
    name: str = of if isinstance(of, str) else of.primitive.name
    return _KNOWN_AS.get(name, name)


# --- markers ------------------------------------------------------------------------------------------------


def claimed_divided(walk: Any, eqn: Any, state: State, dim: int, axes: Sequence[str]) -> Fault:
    """Equal, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), _and(axes)
    name = " ".join(a.name for a in layout.dims[dim].atoms)
    says = f'"{shown}" says that {name} is divided over {along}'
    span, place = layout.dims[dim].span, _place(walk, eqn)
    if state.number and walk.history.made_by(eqn.invars[0], "iota"):
        rule = f"{says}, but this arange counts from 0 on every device along {along}."
        fix = _iota(walk, eqn, dim) if place is not None and place.counts else None
        return _at_marker(walk, eqn, rule, span, (), fix, None if fix else f'spmd.iota("{shown}") in its place')
    if walk.random(eqn.invars[0], state):
        rule = f"{says}, but these random numbers are the same on every device along {along}."
        return _at_marker(walk, eqn, rule, span, (), None, _OWN_NOISE)
    have = None if place is None or place.made else place.like(layout)
    if have is not None and verb_for(have, layout) != "split":
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f"{says}, but every device along {along} holds the same block."
    if any(one.kind == "layout" for one in walk.findings) and not walk.history.gathers(eqn.invars[0], axes[0]):
        first = "a string before it says that it is whole: mend that one first"
        return _at_marker(walk, eqn, rule, span, (), None, first)
    fix = None if place is None else _as_it_says(walk, eqn, place)
    return _at_marker(walk, eqn, rule, span, (), fix, None if fix else _block_of_what(walk, eqn, state, axes))


def partial_claimed_divided(walk: Any, eqn: Any, dim: int, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), _and(axes)
    rule = f'"{shown}" says that each device along {along} holds a block, but each holds a partial sum.'
    before = changed(layout, drop=axes, unreduced={*layout.unreduced, *axes})
    return _at_marker(walk, eqn, rule, layout.dims[dim].span, (), _between(eqn, before, layout))


def claimed_partial(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """Equal, and claimed to be a partial sum."""
    layout = eqn.params["layout"]
    along, mark = _and(axes), _mark(axes)
    count = 1
    for axis in axes:
        count *= walk.sizes.get(axis, 0)
    n = str(count) if count > 1 else "n"
    rule = (
        f'"{mark}" says that each device along {along} holds one term of a sum, '
        f"but the value is equal on {along}: summing {n} copies multiplies it by {n}."
    )
    whole = changed(layout, unreduced=[a for a in layout.unreduced if a not in axes])
    advice = f'it is complete, "{_text(eqn, whole)}": leave out {mark} and the psum'
    return _at_marker(walk, eqn, rule, _mark_span(layout), (), advice=advice)


def unexpected_partial(walk: Any, eqn: Any, state: State, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed complete."""
    layout = eqn.params["layout"]
    along, shown = _and(axes), _text(eqn, layout)
    rule = f'"{shown}" says that the value is equal on {along}, but it is a partial sum {_mark(axes)}.'
    whole = layout.without_brackets()
    place = _place(walk, eqn)
    summed = place is not None and place.made is not None and place.made.op == "sum"
    if summed or walk.history.declared(eqn.invars[0], axes):
        fix = _between(eqn, changed(whole, unreduced={*whole.unreduced, *axes}), whole)
    else:
        fix = None if place is None else _as_it_says(walk, eqn, place)
    advice = None if fix else _what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), reasons(walk, eqn.invars[0], axes), fix, advice)


def unexpected_difference(walk: Any, eqn: Any, state: State, axes: Sequence[str]) -> Fault:
    """Different, and claimed equal."""
    layout = eqn.params["layout"]
    along, shown = _and(axes), _text(eqn, layout)
    place = _place(walk, eqn)
    have = None if place is None or place.made else place.like(layout.without_brackets())
    if have is not None and verb_for(have, layout.without_brackets()) not in ("all_gather", "nothing"):
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f'"{shown}" says that the value is equal on {along}, but it differs along {along}.'
    fix = None if place is None else _as_it_says(walk, eqn, place)
    advice = None if fix else _reshaped(state, axes) or _what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), reasons(walk, eqn.invars[0], axes), fix, advice)


def closed_while_different(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A call makes its result equal along axes that its string does not name, and its operand differs there."""
    along = _and(axes)
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


def _is_row(walk: Any, eqn: Any, axis: str) -> bool:
    """Whether a value is a row of a divided dimension: of a loop, or of vmap."""
    state = walk.known.get(eqn.invars[0])
    mapped = [state.dims[d] for d in eqn.params.get("mapped", ())] if state else []
    return state is not None and (
        any(p.axis == axis and p.kind == STEP for p in state.pending) or any(axis in axes_of_dim(d) for d in mapped)
    )


def _reshaped(state: State, axes: Sequence[str]) -> str | None:
    """Advice for dimensions of a block that a reshape made one."""
    merged = [dim for dim in state.dims if len(dim) > 1 and {*axes_of_dim(dim)} & {*axes}]
    told = f"a reshape made one dimension of blocks along {_and(axes)}: gather the inner ones before it"
    return f'{told}; or spmd.rearrange, which names what it joins, "(b d)"' if merged else None


def lies_otherwise(walk: Any, eqn: Any, state: State) -> Fault:
    """It is known how each dimension lies, and that is not as the layout says."""
    place = _place(walk, eqn)
    layout = eqn.params["layout"].without_brackets()
    have = None if place is None or place.made else place.like(layout)
    if have is None:
        have = None if layout.has_ellipsis else lying(state).like(layout)
    return _lies_otherwise(walk, eqn, state, have, place)


def hidden_in_ellipsis(walk: Any, eqn: Any, state: State, axes: Sequence[str]) -> Fault:
    """An axis that the pattern uses divides a dimension that `...` stands for."""
    layout = eqn.params["layout"]
    along = _and(list(dict.fromkeys(axes)))
    at = next((dim.span for dim in layout.dims if dim.ellipsis), None)
    rule = f'"..." stands for a dimension that is divided over {along}, and the string uses {along} elsewhere.'
    got = [f'the value lies as "{shown_dims(state)}"', *reasons(walk, eqn.invars[0], axes)]
    advice = (
        f"the keyword of a ready-made layer for {along}; in a string of yours name the dimension, or gather it first"
    )
    return _at_marker(walk, eqn, rule, at, got, None, advice)


def blocks_claimed_partial(walk: Any, eqn: Any, state: State, axes: Sequence[str]) -> Fault:
    """Divided, and claimed to be a partial sum."""
    along, mark = _and(axes), _mark(axes)
    rule = f'"{mark}" says that each device along {along} holds one term of a sum, but each holds a block.'
    got = [f'the value lies as "{shown_dims(state)}"', *reasons(walk, eqn.invars[0], axes)]
    advice = f"leave out {mark}: gather the blocks, or sum over the divided dimension first"
    return _at_marker(walk, eqn, rule, _mark_span(eqn.params["layout"]), got, None, advice)


def pending_claimed(walk: Any, eqn: Any, pending: Sequence[Pending]) -> Fault:
    """Something was done to a piece, and the result is claimed to be that of the whole."""
    layout = eqn.params["layout"]
    rule = f'"{_text(eqn, layout)}" is claimed of the whole array, and {_done_to_pieces(pending)}.'
    fix, place = _made_whole(walk, eqn), _place(walk, eqn)
    advice = _completed(walk, pending)
    if place is not None and place.made is not None and {place.made.op} == {p.kind for p in pending}:
        advice = _joined(_what_it_may_be(eqn, [pending[0].axis], place), _MEANT)
    return _at_marker(walk, eqn, rule, _span(layout), _pieces(walk, pending), fix, None if fix else advice)


def pending_returned(walk: Any, eqn: Any, index: int, pending: Sequence[Pending], spec: Any) -> Fault:
    """What was done to pieces leaves a raw `shard_map`."""
    rule = f"{_done_to_pieces(pending)}, and the results are put together."
    rule = rule[0].upper() + rule[1:]
    got = (f"output {index}, {shown_spec(spec)}", *_pieces(walk, pending))
    return Fault(rule, walk.kernel, None, None, got, advice=_completed(walk, pending))


def returned_otherwise(walk: Any, eqn: Any, index: int, state: State, spec: Any) -> Fault:
    """A result of a raw `shard_map` lies otherwise than its spec puts it together."""
    rule = "A result is put together along other dimensions, or in another order, than it is divided."
    got = (f"output {index}, {shown_spec(spec)}", f'the value lies as "{shown_dims(state)}"')
    return Fault(rule, walk.kernel, None, None, got, advice="an out_spec with the axes where the value has them")


@if_possible
def _made_whole(walk: Any, eqn: Any) -> Fix | None:
    place = _place(walk, eqn)
    return None if place is None else _as_it_says(walk, eqn, place)


def _done_to_pieces(pending: Sequence[Pending]) -> str:
    kinds = list(dict.fromkeys(KINDS.get(p.kind, p.kind) for p in pending))
    verb, along = "was" if len(kinds) == 1 else "were", _and(list(dict.fromkeys(p.axis for p in pending)))
    return f"{_and(kinds)} {verb} done on each device's own piece along {along}"


def _pieces(walk: Any, pending: Sequence[Pending]) -> list[str]:
    """Where it was done."""
    lines: dict[str, None] = {}
    for p in pending:
        eqn, callers = walk.made_pending[p.at]
        place = line_of(eqn, callers)
        lines[f"{_name(eqn)} over {p.axis}" + (f", at {place}" if place else "")] = None
    return list(lines)


@if_possible
def _completed(walk: Any, pending: Sequence[Pending]) -> str:
    kinds = {p.kind for p in pending}
    along = _and(list(dict.fromkeys(p.axis for p in pending)))
    told = [COMPLETED[kind] for kind in COMPLETED if kind in kinds]
    named = [text for p in pending if (text := _instead(walk.made_pending[p.at][0]))]
    otherwise = "gather the dimension first, or use the operation of spmd that takes a divided one"
    [how, *_] = [*named, *told, otherwise]
    return f"{how.format(along=along)}; {_MEANT}"


KINDS = {
    "max": "a maximum", "min": "a minimum", "product": "a product",
    "all": "a test of all elements", "any": "a test of any element",
    "position": "an argmax or argmin", "scan": "a cumulative operation", "sort": "a sort", "flip": "a flip",
    "fft": "a transform", "stencil": "a stencil", "slice": "a slice", "pad": "a pad", "index": "an index",
    "concatenate": "a concatenation", "top_k": "a top_k", "linear algebra": "a factorisation",
    "recurrence": "a loop", "pairs": "a product of one piece with another", "update": "an update",
    "gather": "a gather along another dimension", "xor": "an xor",
    "term": "a slice of a partial sum, this device's block of its own term,",
}  # fmt: skip

COMPLETED = {
    "max": 'reduce(x, "...", "max"), or lax.pmax over {along}',
    "min": 'reduce(x, "...", "min"), or lax.pmin over {along}',
    "scan": "spmd.cumsum, which adds what the devices before hold",
    "sort": "spmd.sort, which takes a divided dimension",
    "position": "spmd.argmax or spmd.argmin, which take a divided dimension",
    "top_k": "spmd.top_k, which takes a divided dimension",
    "flip": "spmd.flip, which takes a divided dimension",
    "fft": "spmd.fft, which takes divided dimensions",
    "stencil": "spmd.stencil.halo, which brings what the neighbours hold",
    "recurrence": "gather the sequence over {along}, or divide another dimension",
    "pairs": "gather one of the two over {along}, or pass its blocks around",
    "term": "lax.psum_scatter over {along} in place of the slice",
    "slice": "this slices each device's own block: gather it over {along} first, or spmd.take the rows of the whole",
    "concatenate": "this joins each device's own blocks: gather them over {along} first, or stack on a new dimension",
    "index": 'spmd.take; or subtract where this block starts from the index, spmd.offset("<name>/<axis>")',
}


def not_completed(walk: Any, eqn: Any, axes: Sequence[str], pending: Sequence[Pending]) -> Fault:
    """A reduction of what was done to pieces, that does not complete it."""
    rule = f"{_done_to_pieces(pending)}, and {_name(eqn)} does not complete that."
    rule = rule[0].upper() + rule[1:]
    got = (*_where(walk, eqn), *_pieces(walk, pending))
    return Fault(rule, walk.kernel, None, None, got, advice=_completed(walk, pending))


def summed_by_gradient(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A sum that a gradient adds inside a body."""
    along, marks = _and(axes), ",".join(axes)
    rule = f"the gradient of a value that is equal on {along} is summed over {along} here, and nobody wrote this sum."
    shape = ",".join(str(n) for n in getattr(eqn.outvars[0].aval, "shape", ()))
    got = (f"the sum: {eqn.outvars[0].aval.dtype}[{shape}], of what each device along {along} computes",)
    advice = (
        f'spmd.value_and_grad(fn, loss="{{U:{marks}}}") in place of jax.grad, if each device has a term of the loss;\n'
        f'x = spmd.defer(x, "... -> ... {{R:{marks}}}") before it, if each device keeps its own gradient'
    )
    return Fault(rule, walk.kernel, None, None, got, advice=advice)


def mistyped(eqn: Any, callers: Sequence[Any], axes: Sequence[str]) -> Fault:
    """A value that JAX's type calls equal, and that differs."""
    along = _and(axes)
    rule = f"JAX types the result of {_name(eqn)} equal on {along}, and it differs there: gradients follow JAX's type."
    names = f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes))
    advice = f'jax.lax.pcast(<the result>, {names}, to="varying")'
    place = line_of(eqn, callers)
    return Fault(rule, None, None, None, (f"{_name(eqn)} at {place}",) if place else (), advice=advice)


def copies_reduced(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A sum of equal values."""
    along = _and(axes)
    n = 1
    for axis in axes:
        n *= walk.sizes[axis]
    rule = f"{_name(eqn)} over {along} of a value that is equal there: it becomes {n} times as large."
    got = (*_where(walk, eqn), *[f"gathered at {line_of(o.eqn, o.callers)}" for a in axes
                                for o in walk.history.gathers(eqn.invars[0], a)])  # fmt: skip
    return Fault(rule, walk.kernel, None, None, tuple(dict.fromkeys(got)), advice=f"leave out {along}, or lax.pmean")


def gathered_out_of_order(walk: Any, eqn: Any, state: State, dim: int, axes: Sequence[str]) -> Fault:
    """Blocks joined in another order than they were cut."""
    have = axes_of_dim(state.dims[dim])
    rule = (
        f"dimension {dim} is divided over {'/'.join(have)}, the first of them outermost, and gathering "
        f"{'/'.join(axes)} joins its blocks in another order."
    )
    if have == tuple(axes):  # an outer axis is gone already, and its blocks lie around these
        rule = (
            f"dimension {dim} was gathered over an outer axis before {'/'.join(axes)}, "
            "and now its blocks are joined in another order."
        )
    got = (*_where(walk, eqn), *reasons(walk, eqn.invars[0], axes))
    return Fault(rule, walk.kernel, None, None, got, advice=f"gather {'/'.join(have[::-1][:1])} first, the innermost")


def orders_differ(walk: Any, eqn: Any, axes: Sequence[str], one: Any, other: Any) -> Fault:
    """Elements in one order are combined with elements in another one."""
    rule = f"{_name(eqn)} of two arrays whose elements lie in different orders along {_and(axes)}."
    got = (*_where(walk, eqn), *(_in_order(walk, each) for each in (one, other)))
    return Fault(rule, walk.kernel, None, None, got, advice=_ONE_ORDER)


def ordered_otherwise(walk: Any, said: Any, have: Any) -> Fault:
    """A value is taken for one in another order."""
    one, other = have.placement, said.placement
    rule = f"The elements along {_and(have.axes)} lie in {one} order, and are read in {other} order."
    got = (_in_order(walk, have), _in_order(walk, said))
    return Fault(rule, walk.kernel, None, None, got, advice=_ONE_ORDER)


def _in_order(walk: Any, order: Any) -> str:
    line = line_of(*walk.made_pending[order.at])
    return f"{order.placement}, as said at {line}" if line else f"{order.placement}, as said in {walk.kernel}"


_ONE_ORDER = "give the same placement= in place_sequence, sequence_positions and attention"


def operands_disagree(walk: Any, eqn: Any, axes: Sequence[str], dims: Sequence[tuple[Dim, Dim]], noise: bool) -> Fault:
    """Two operands lie differently along some dimensions."""
    lies = [[f"divided over {'/'.join(a)}" if (a := axes_of_dim(dim)) else "not divided" for dim in d] for d in dims]
    along = [f"along one dimension one is {one}, the other {other}" for one, other in lies]
    rule = f"{_name(eqn)} of two arrays that lie differently: {_and(along)}."
    advice = f"split, gather or relayout one of them; spmd.iota and spmd.random make blocks along {_and(axes)}"
    if noise:
        numbers = f"random numbers, which are the same on every device along {_and(axes)}"
        rule = f"{_name(eqn)} with {numbers}: the other array is divided there, and its blocks get the same numbers."
        advice = _OWN_NOISE
    got = [*_where(walk, eqn)]
    for number, atom in enumerate(eqn.invars[:3]):
        why = [f"operand {number}: {line}" for axis in axes for line in reasons(walk, atom, [axis])]
        got += why
        if not why and not noise and _counts(walk, atom):
            got.append(f"operand {number}: made from numbers that begin at 0 on each device, as those of jnp.arange")
            advice = f'spmd.iota("<name>/{axes[0]}"), which goes on from block to block; or split the other array'
        if not why and _is_constant(walk, atom):
            got.append(f"operand {number}: an array of the program itself, as NumPy's random numbers: equal everywhere")
            advice = f"{_OWN_NOISE}; or an argument of the kernel, which is divided"
        if (rank := _rank_before_broadcasting(walk, atom)) is not None:
            got.append(f"operand {number}: rank {rank}, and broadcasting gives it rank {len(shape_of(atom))}")
            advice = f'keep a reduced dimension as 1, "b d/tp -> b 1" or keepdims=True; or else {advice}'
    return Fault(rule, walk.kernel, None, None, tuple(dict.fromkeys(got)), advice=advice)


def _is_constant(walk: Any, atom: Any) -> bool:
    """Whether a value is made of arrays that the program closed over, and of nothing else."""
    ends = [var for var in walk.history.behind(atom, lambda _: False) if not walk.history.operands(var)]
    return bool(ends) and all(var not in walk.history.made and var not in walk.history.arguments for var in ends)


def _counts(walk: Any, atom: Any) -> bool:
    """Whether a value is made from the numbers of `jnp.arange` or the columns of a one-hot."""
    made = walk.history.made
    return any(
        var in made and made[var][0].primitive.name == "iota" for var in walk.history.behind(atom, lambda _: False)
    )


def _rank_before_broadcasting(walk: Any, atom: Any) -> int | None:
    """How many dimensions a computed array had before broadcasting put others in front. None if it did not."""
    made = walk.history.producer(atom)
    while made is not None and made[0].primitive.name in ("pvary", "pcast"):
        made = walk.history.producer(made[0].invars[0])
    if made is None or made[0].primitive.name not in ("broadcast_in_dim", "reshape"):
        return None
    if walk.history.producer(made[0].invars[0]) is None:
        return None  # an argument, such as a bias, of which nothing was reduced
    before, after = (shape_of(one) for one in (made[0].invars[0], atom))
    return len(before) if before and after == (1,) * (len(after) - len(before)) + before != before else None


_OWN_NOISE = (
    'spmd.random.normal(key, "<layout>") and the like, of which each device draws its own block; '
    "or jax.random.fold_in(key, lax.axis_index(...)), if the numbers may depend on the mesh"
)


def shown_dims(state: State) -> str:
    """A state as a layout without names."""
    dims = []
    for dim in state.dims:
        axes = axes_of_dim(dim)
        unknown = any(a is HIDDEN for _, a in dim)
        parts = ["/".join(("_", *axes_of_dim((factor,)))) for factor in dim] if axes else ["_"]
        dims.append("?" if unknown else parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    marks = f" {_mark(sorted(state.partial))}" if state.partial else ""
    return (" ".join(dims) or "scalar") + marks


def _lies_otherwise(walk: Any, eqn: Any, state: State, have: Layout | None, place: Place | None) -> Fault:
    """It is known how the value lies, and that is not as the layout says: one finding, however many axes are wrong."""
    layout = eqn.params["layout"].without_brackets()
    if have is None:
        rule = f'"{_text(eqn, layout)}" is what the layout says, and the value lies as "{shown_dims(state)}".'
        axes = sorted(state.divided ^ set(layout.axes)) or sorted(state.divided)
        why, span = reasons(walk, eqn.invars[0], axes), _span(eqn.params["layout"])
        return _at_marker(walk, eqn, rule, span, why, advice=_reshaped(state, axes))
    rule = f'"{_text(eqn, layout)}" is what the layout says, and the value lies as "{_text(eqn, have)}".'
    wrong = sorted(set(have.axes) ^ set(layout.axes))
    gathers = [line_of(o.eqn, o.callers) for axis in wrong for o in walk.history.gathers(eqn.invars[0], axis)]
    got = [*reasons(walk, eqn.invars[0], [a for a in wrong if a in have.axes])]
    got += [f"gathered at {line}" for line in dict.fromkeys(gathers) if line]
    fix = _between(eqn, have, layout, place and place.name)
    return _at_marker(walk, eqn, rule, _span(eqn.params["layout"]), got, fix)


@if_possible
def _place(walk: Any, eqn: Any) -> Place | None:
    """How the operand of a layout's marker lies, and what it was made by."""
    atom = eqn.invars[0]
    state = None if isinstance(atom, Literal) else walk.known.get(atom)  # unknown where another domain does the walk
    return None if state is None else place_of(walk, atom, state)


# --- what mends a value ---------------------------------------------------------------------------------------


@if_possible
def _as_it_says(walk: Any, eqn: Any, place: Place) -> Fix | None:
    """The call that makes a value whose place is known lie as its layout says; None where no call is sure to."""
    layout = eqn.params["layout"].without_brackets()
    made = place.made
    if made is None or made.op == "sum":
        have = place.like(layout)
        return None if have is None else _between(eqn, have, layout, place.name)
    [*kept] = () if made.layout is None else [d for i, d in enumerate(made.layout.dims) if i not in made.dims]
    if made.name is None or made.layout is None or made.op == "scaled" or len(kept) != len(layout.dims):
        return None
    if made.layout.has_ellipsis or any(dim.composite for dim in made.layout.dims) or made.axes & set(layout.axes):
        return None
    result = made.layout.from_dims(tuple(kept))
    if [dim.axes for dim in kept] != [dim.axes for dim in layout.dims]:
        return None
    return Fix("reduce", (made.name,), f"{_text(eqn, made.layout)} -> {_text(eqn, result)}", {"op": made.op})


@if_possible
def _between(eqn: Any, have: Layout, wanted: Layout, name: str | None = None) -> Fix | None:
    """The verb from one layout to another, on the value of a marker."""
    verb = verb_for(have, wanted)
    if verb == "nothing":
        return None
    shown = name or eqn.params.get("value", "x")
    return Fix(verb, (shown,), f"{_text(eqn, have)} -> {_text(eqn, wanted)}")


@if_possible
def _iota(walk: Any, eqn: Any, dim: int) -> Fix | None:
    """The positions of the whole array, where the arange is as long as a block."""
    aval, layout = eqn.invars[0].aval, eqn.params["layout"]
    atoms = layout.dims[dim].atoms
    if aval.dtype != "int32" or len(layout.dims) != 1 or len(atoms) != 1:
        return None
    bound = {name for one in walk.arg_layouts for name in one.names}
    parts = 1
    for axis in atoms[0].axes or ():
        parts *= walk.sizes.get(axis, 0)
    size = {} if atoms[0].name in bound else {atoms[0].name: aval.shape[0] * parts}
    return Fix("iota", (), layout.without_brackets().short, size)


@if_possible
def _block_of_what(walk: Any, eqn: Any, state: State, axes: Sequence[str]) -> str:
    """Advice for equal values that stand where blocks are meant: where they became equal, or how blocks are made."""
    gathers = [line_of(o.eqn, o.callers) for axis in axes for o in walk.history.gathers(eqn.invars[0], axis)]
    if any(gathers):
        return f"it was gathered over {_and(axes)} at {_and(list(dict.fromkeys(gathers)))}; before that it is divided"
    layout = eqn.params["layout"].without_brackets()
    whole = _text(eqn, changed(layout, drop=axes))
    return (
        f'split(<the whole array>, "{whole} -> {_text(eqn, layout)}") gives each device its block; '
        "spmd.random, spmd.iota and the like make blocks of one whole"
    )


@if_possible
def _what_it_may_be(eqn: Any, axes: Sequence[str], place: Place | None) -> str:
    """Advice for a value that differs: what can be ruled out is not offered."""
    layout = eqn.params["layout"].without_brackets()
    plain = _text(eqn, layout)
    axes = [a for a in axes if a not in (*layout.axes, *layout.unreduced, *layout.reduced)]
    if not axes:
        return "the axis divides another dimension than the layout says"
    total = f'psum(x, "{_text(eqn, changed(layout, unreduced={*layout.unreduced, *axes}))} -> {plain}")'
    made = None if place is None else place.made
    mean = f'a mean of each device\'s own block: reduce(<what is averaged>, "<its layout> -> {plain}", "mean")'
    if made is not None and made.op in ("mean", "scaled"):
        scaled = (
            [] if made.op == "mean" else [f"a sum that is divided by a number of all devices, as spmd.size is: {total}"]
        )
        return ";\n".join([mean, *scaled])
    if made is not None and made.op != "sum":
        return f'the {made.op} of each device\'s own block: reduce(<the array>, "<its layout> -> {plain}", "{made.op}")'
    lines = []
    if layout.dims:
        where = f", with /{axes[0]} on the dimension that is divided" if len(layout.dims) > 1 else ""
        lines = [f'a block: all_gather(x, "{_text(eqn, changed(layout, add=axes[0]))} -> {plain}"){where}']
    return ";\n".join(["it depends on what each device holds;", *lines, f"a term of a sum: {total}", mean]).replace(
        ";;", ":"
    )


def _text(eqn: Any, layout: Layout) -> str:
    return text_of(layout, eqn.params["layout"], eqn.params["call"])


def _dim(eqn: Any, dim: int) -> str:
    """One dimension of the marker's layout, as it is written."""
    layout = eqn.params["layout"]
    return layout.from_dims((layout.dims[dim],)).short


def _mark(axes: Sequence[str]) -> str:
    return f"{{U:{','.join(axes)}}}"


Span = tuple[int, int]


def _span(layout: Layout) -> Span | None:
    """Where a whole layout stands in the string that it was read from."""
    if layout.dims:
        return layout.dims[0].span[0], layout.dims[-1].span[1]
    source = layout.source or ""
    at = source.find("scalar")
    return (at, at + len("scalar")) if source.count("scalar") == 1 else None


def _mark_span(layout: Layout) -> Span | None:
    """Where its mark of partial sums stands: behind its dimensions."""
    start = (layout.source or "").find("{U:", layout.dims[-1].span[1] if layout.dims else 0)
    return None if start < 0 else (start, (layout.source or "").find("}", start) + 1)


def _at_marker(
    walk: Any,
    eqn: Any,
    rule: str,
    span: Span | None,
    got: Sequence[str],
    fix: Fix | None = None,
    advice: str | None = None,
) -> Fault:
    source = eqn.params["layout"].source
    if (told := _rather(walk, eqn, fix)) is not None:
        fix, advice = None, told
    written = source is not None and source in eqn.params["call"] and span is not None and span[1] > span[0]
    shown = (source, span) if written else (None, None)
    return Fault(rule, eqn.params["call"], *shown, (*_value(walk, eqn), *got), fix, advice)


@if_possible
def _rather(walk: Any, eqn: Any, fix: Fix | None) -> str | None:
    """Advice in place of a fix that sends more than is needed, or that nobody can write into a layer."""
    layout = eqn.params["layout"]
    have = lying(walk.known[eqn.invars[0]]).like(layout)
    if have is not None and (told := _in_the_string(eqn, layout, have, fix)) is not None:
        return told
    place, layers = _place(walk, eqn), layers_of(code for code, _ in _compat.call_stack(eqn))
    sends = fix is not None and fix.verb in ("all_gather", "all_to_all", "relayout")
    if fix is None or not layers or (not sends and place is not None and place.name is not None):
        return None
    shown = "one" if have is None else _text(eqn, have.without_brackets())
    return rather_told(layers[-1], shown, str(fix)) if sends else f"{fix} of the array that {layers[-1]} is given"


def _in_the_string(eqn: Any, layout: Layout, have: Layout, fix: Fix | None) -> str | None:
    """What the string of a call, or a keyword of it, should say of a value that lies otherwise."""
    wrong = [(d, h) for d, h in zip(layout.dims, have.dims, strict=True) if d.axes != h.axes]
    for dim, lies in wrong:
        if lies.axes and dim.short == "_":
            return f'names for what is divided, as "{_text(eqn, have)}" says; or "..." for all dimensions'
        text = (layout.source or "")[slice(*dim.span)]
        keyword = None if dim.axes else keyword_for(text, axes_in(text), (), lies.axes)
        if keyword is not None and not {*lies.axes} & {*layout.axes}:
            return f"{keyword}, the keyword that says how {text} is divided"
    call = eqn.params["call"]
    after = Pattern(call.pattern).outputs if "->" in call.pattern else None
    if fix is not None and after and call.verb in ("all_gather", "all_to_all", "relayout", "split"):
        same = [dim.axes for dim in have.dims] == [dim.axes for dim in after[0].dims]
        return f"leave {call.verb} out: the value lies as its right side says" if same else None
    kept = None if after is None else {name for one in after for name in one.names}
    if fix is not None and fix.verb == "all_gather" and all(works_along(dim, kept) for dim, _ in wrong):
        return f'"{_text(eqn, have)}" in this string: {call.verb} works along a divided dimension'
    return None


def _value(walk: Any, eqn: Any) -> list[str]:
    """What it is about: the type of the value, its role, and the user's line."""
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


# --- equations ----------------------------------------------------------------------------------------------


def nonlinear_use(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """Something that is not linear, of a partial sum."""
    name = _name(eqn)
    done = f"take {name} after the sum is complete"
    if name in ("mul", "matmul", "conv_general_dilated"):
        done = "multiply two such sums after one of them is complete"
    if name == "div":
        done = f"divide {'whole numbers' if rounds(eqn) else 'by it'} after the sum is complete"
    if name == "convert_element_type":
        done = f"round to {eqn.params['new_dtype']} after the sum is complete"
    rule = f"each device along {_and(axes)} has only its term of a sum {_mark(axes)}; {done}."
    return _mended(walk, eqn, axes, rule)


def _mended(walk: Any, eqn: Any, axes: Sequence[str], rule: str) -> Fault:
    """A fault of an equation that uses a partial sum: with the lines in place of it, where they are known."""
    first = _completed_first(walk, eqn, axes)
    if _sent_in_a_byte(walk, eqn, axes):
        bits = 'a sum that is sent in few bits: spmd.per_shard("each device rounds its own term") around it'
        return Fault(rule, walk.kernel, None, None, _where(walk, eqn), advice=_joined(bits, first, "\n"))
    lines = lines_in_place(walk, eqn, walk.callers) or (() if _instead(eqn) else _reduced(walk, eqn, axes)) or ()
    if lines and not any(ARRAY in str(line) for line in lines):
        return Fault(rule, walk.kernel, None, None, _where(walk, eqn), fix=lines)
    told = ";\n".join(map(str, lines)) or _instead(eqn) or first
    return Fault(rule, walk.kernel, None, None, _where(walk, eqn), advice=told)


@if_possible
def _sent_in_a_byte(walk: Any, eqn: Any, axes: Sequence[str]) -> bool:
    """Whether a partial sum is rounded to one byte: to sum first would send what the rounding spares."""
    parts = {atom for atom in eqn.invars if not isinstance(atom, Literal) and walk.known[atom].partial & {*axes}}
    made = (one for one, _, _ in walk.history.made.values() if one.primitive.name == "convert_element_type")
    bytes_ = (one for one in made if rounds(one) and one.params["new_dtype"].itemsize == 1)
    return any(not parts.isdisjoint(walk.history.behind(one.invars[0], lambda _: False)) for one in bytes_)


@if_possible
def _reduced(walk: Any, eqn: Any, axes: Sequence[str]) -> tuple[Fix, ...]:
    """The mean or the sum over the whole dimension, in place of that of each device's own block."""
    ops = _parts(walk, eqn, axes)
    if ops not in ({"mean"}, {"sum"}) or called_in_jax(eqn, "norm"):  # the sum of a norm is not the user's
        return ()
    [op] = ops
    found = reduced(walk, eqn, walk.callers, op)
    return () if found is None else (found.reduce(op),)


def _parts(walk: Any, eqn: Any, axes: Sequence[str]) -> set[Any]:
    """Whether the partial sums of an equation are sums or means; None where that is not known."""
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in walk.known]
    return {operation_of(walk, atom) for atom in operands if walk.known[atom].partial & set(axes)}


@if_possible
def _completed_first(walk: Any, eqn: Any, axes: Sequence[str]) -> str:
    """Advice for a partial sum that is used before it is complete. To psum a mean of pieces would add up the means."""
    total = f'psum(<the partial sum>, "... {_mark(axes)} -> ...") before it, and not after'
    ops = _parts(walk, eqn, axes)
    mean = 'reduce(<what is averaged>, "<its layout> -> ...", "mean") in place of the mean of each device\'s own block'
    if ops == {"mean"}:
        return mean
    return total if ops == {"sum"} else f"of a sum: {total};\nof a mean: {mean}"


def on_pieces_too(walk: Any, fault: Fault, pending: Sequence[Pending]) -> Fault:
    """A fault in a value that also comes of what was done to pieces: both need a collective."""
    if not pending or any(_instead(walk.made_pending[p.at][0]) for p in pending):
        return fault
    fixes = (fault.fix,) if isinstance(fault.fix, str | Fix) else fault.fix or ()
    told = fault.advice or ";\n".join(map(str, fixes))
    advice = _joined(told, _completed(walk, pending), " and ")
    return replace(fault, got=(*fault.got, *_pieces(walk, pending)), fix=None, advice=advice)


# What JAX's own functions would need inside, where nobody can write it.
_INSTEAD = {
    "softmax": "spmd.softmax, which takes a divided dimension",
    "log_softmax": 'x - reduce(x, "...", "logsumexp"), which takes a divided dimension',
    "logsumexp": 'reduce(x, "...", "logsumexp"), which takes a divided dimension',
    "standardize": "nn.layer_norm with tp=, which takes divided features",
    "_var": 'two means over the whole dimension, reduce(x, "...", "mean") and that of the squared distances from it',
    "norm": 'reduce(x * x, "...", "sum"), and the square root of that',
    "_roll_static": "spmd.roll, which takes a divided dimension",
    "_roll_dynamic": "spmd.roll, which takes a divided dimension",
}


@if_possible
def _instead(eqn: Any) -> str | None:
    """What to call in place of the function of JAX that made an equation."""
    names = (name for name in _INSTEAD if name != "norm" or eqn.primitive.name == "sqrt")  # other orders than 2
    return next((_INSTEAD[name] for name in names if called_in_jax(eqn, name)), None)


def mixed_sum(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A partial sum and an equal value in one sum."""
    along = _and(axes)
    return _met(walk, eqn, axes, f"is equal on {along}: the sum over {along} would count that value once per device")


def mixed_blocks(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A partial sum and a divided value in one sum."""
    harm = "each block would meet only its device's term of the sum"
    return _met(walk, eqn, axes, f"is divided over {_and(axes)}: {harm}")


def scaled_by_different(walk: Any, eqn: Any, axes: Sequence[str]) -> Fault:
    """A partial sum times a value that is not the same for all its parts."""
    return _met(walk, eqn, axes, f"differs along {_and(axes)}: each term would be scaled differently")


def _met(walk: Any, eqn: Any, axes: Sequence[str], other: str) -> Fault:
    """A partial sum that meets another value: how that one lies, and what is wrong with it."""
    return _mended(walk, eqn, axes, f"{_name(eqn)} of a partial sum {_mark(axes)} and a value that {other}.")


def returned_partial(walk: Any, eqn: Any, index: int, axes: Sequence[str], spec: Any) -> Fault:
    """A partial sum leaves the kernel as if it were complete."""
    mark, along = _mark(axes), _and(axes)
    rule = f"The body returned a partial sum over {along}, and the signature does not say {mark}."
    got = (f"output {index}, {spec}",)
    return Fault(rule, walk.kernel, None, None, got, Fix("psum", ("result",), f"... {mark} -> ..."))


def divergent(walk: Any, eqn: Any, inner: Sequence[str], axes: Sequence[str]) -> Fault:
    """Collectives that only some of their devices would enter."""
    along, names = _and(axes), _and(sorted({_name(one) for one in inner}))
    if eqn.primitive.name == "while":
        what, doing = "a while whose condition", "leave the loop at different times"
        advice = f"make the condition equal on {along}, e.g. pmax of the flag that goes on"
        if any(caller.primitive.name == "custom_linear_solve" for caller in walk.callers):  # the loop is JAX's own
            advice = "call the solver outside of the kernel, on whole arrays, with a kernel as its product"
    else:
        what, doing = "a cond whose predicate", "take different branches"
        advice = f"make the predicate equal on {along} (pmax or all_gather it), or compute both and use jnp.where"
    rule = (
        f"{names} over {along} inside {what} differs along {along}: "
        f"the devices would {doing} and wait for each other for ever."
    )
    test = opened(eqn.params["cond_jaxpr"])[0].outvars[0] if eqn.primitive.name == "while" else eqn.invars[0]
    got = (*_where(walk, eqn), *reasons(walk, test, axes))
    return Fault(rule, walk.kernel, None, None, got, advice=advice)


def interpreted(walk: Any, eqn: Any) -> Fault:
    """A Pallas call with `interpret=True`, on values that vary."""
    rule = "JAX interprets Pallas calls without the mesh axes on which values vary, and fails where a kernel has them."
    advice = 'spmd.opaque(fn, "in -> out") around the Pallas call, which hides those axes from it'
    return Fault(rule, walk.kernel, None, None, _where(walk, eqn), advice=advice)


def _where(walk: Any, eqn: Any) -> tuple[str, ...]:
    place = line_of(eqn, walk.callers)
    return (f"{_name(eqn)} at {place}" if place else f"{_name(eqn)} in {walk.kernel}",)


def reasons(walk: Any, atom: Any, axes: Sequence[str]) -> list[str]:
    """Why the value differs along these axes: the inputs and the primitives that it was made from."""
    lines: dict[str, None] = {}
    for axis in axes:
        for origin in walk.history.sources(atom, axis):
            lines[describe(origin)] = None
    found = list(lines)
    if len(found) > _SHOWN:
        found = [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
    return found


def describe(origin: Origin) -> str:
    """One reason, as a line."""
    if origin.kind == "input":
        return f"made from {origin.label}"
    place = line_of(origin.eqn, origin.callers)
    at = f", at {place}" if place else ""
    if origin.kind == "spmd_layout":
        return f'made from a value divided by "{origin.eqn.params["layout"]}"{at}'
    return f"made from {_name(origin.kind)} over {origin.axis}{at}"


def _joined(one: str | None, other: str | None, between: str = " ") -> str | None:
    """Two pieces of advice, of which some could not be made."""
    return f";{between}".join(filter(None, (one, other))) or None


def _and(names: Sequence[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
