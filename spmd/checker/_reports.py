"""What is wrong with an equation, or with what a string says: one function for each way returns the message."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import spmd.checker._mends as mend
from spmd._jaxprs.errors import first_line
from spmd._jaxprs.lines import gradient_line, line_of
from spmd._jaxprs.walker import Equation, Variable, opened, shape_of
from spmd.checker._history import call_around, shown_spec
from spmd.checker._made import Place, lying
from spmd.checker._state import STEP, Dim, Pending, State, axes_of_dim
from spmd.checker._table import rounds
from spmd.errors import Fault, Fix
from spmd.language import Layout, verb_for


def not_completed(walk: Any, eqn: Equation, axes: Sequence[str], pending: Sequence[Pending]) -> Fault:
    """A reduction of what was done to pieces, that does not complete it."""
    rule = f"{mend.done_to_pieces(pending)}, and {mend.named(eqn)} does not complete that."
    rule = rule[0].upper() + rule[1:]
    got = (*mend.where(walk, eqn), *mend.pieces_of(walk, pending))
    return Fault(rule, walk.kernel, None, None, got, advice=mend.completed(walk, pending))


def summed_by_gradient(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A sum that a gradient adds inside a body."""
    along, marks = mend.listed(axes), ",".join(axes)
    rule = f"the gradient of a value that is equal on {along} is summed over {along} here, and nobody wrote this sum."
    shape = ",".join(str(n) for n in getattr(eqn.outvars[0].aval, "shape", ()))
    at = f", at {line}" if (line := gradient_line(eqn)) else ""
    got = (f"the sum: {eqn.outvars[0].aval.dtype}[{shape}], of what each device along {along} computes{at}",)
    advice = (
        'of a mean: spmd.value_and_grad(fn), where fn ends in spmd.reduce(x, "<its layout> -> scalar", "mean");\n'
        f'of a sum with a term on each device: spmd.value_and_grad(fn, loss="{{U:{marks}}}");\n'
        f'x = spmd.defer(x, "... -> ... {{R:{marks}}}") before it, if each device keeps its own gradient'
    )
    return Fault(rule, walk.kernel, None, None, got, advice=advice)


def mistyped(eqn: Equation, callers: Sequence[Equation], axes: Sequence[str]) -> Fault:
    """A value that JAX's type calls equal, and that differs."""
    along, name = mend.listed(axes), mend.named(eqn)
    rule = f"JAX types the result of {name} equal on {along}, and it differs there: gradients follow JAX's type."
    names = f'"{axes[0]}"' if len(axes) == 1 else str(tuple(axes))
    advice = f'jax.lax.pcast(<the result>, {names}, to="varying")'
    place = line_of(eqn, callers)
    return Fault(rule, None, None, None, (f"{name} at {place}",) if place else (), advice=advice)


def copies_reduced(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A sum of equal values."""
    along = mend.listed(axes)
    n = math.prod(walk.sizes[axis] for axis in axes)
    rule = f"{mend.named(eqn)} over {along} of a value that is equal there: it becomes {n} times as large."
    got = (*mend.where(walk, eqn), *[f"gathered at {line_of(o.eqn, o.callers)}" for a in axes
                                for o in walk.history.gathers(eqn.invars[0], a)])  # fmt: skip
    return Fault(rule, walk.kernel, None, None, tuple(dict.fromkeys(got)), advice=f"leave out {along}, or lax.pmean")


def gathered_out_of_order(walk: Any, eqn: Equation, state: State, dim: int, axes: Sequence[str]) -> Fault:
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
    got = (*mend.where(walk, eqn), *mend.reasons(walk, eqn.invars[0], axes))
    return Fault(rule, walk.kernel, None, None, got, advice=f"gather {'/'.join(have[::-1][:1])} first, the innermost")


def orders_differ(walk: Any, eqn: Equation, axes: Sequence[str], one: Any, other: Any) -> Fault:
    """Elements in one order are combined with elements in another one."""
    rule = f"{mend.named(eqn)} of two arrays whose elements lie in different orders along {mend.listed(axes)}."
    got = (*mend.where(walk, eqn), *(_in_order(walk, each) for each in (one, other)))
    return Fault(rule, walk.kernel, None, None, got, advice=_ONE_ORDER)


def ordered_otherwise(walk: Any, said: Any, have: Any) -> Fault:
    """A value is taken for one in another order."""
    one, other = have.placement, said.placement
    rule = f"The elements along {mend.listed(have.axes)} lie in {one} order, and are read in {other} order."
    got = (_in_order(walk, have), _in_order(walk, said))
    return Fault(rule, walk.kernel, None, None, got, advice=_ONE_ORDER)


def _in_order(walk: Any, order: Any) -> str:
    line = line_of(*walk.made_pending[order.at])
    return f"{order.placement}, as said at {line}" if line else f"{order.placement}, as said in {walk.kernel}"


_ONE_ORDER = "give the same placement= in place_sequence, sequence_positions and attention"


def operands_disagree(
    walk: Any, eqn: Equation, axes: Sequence[str], dims: Sequence[tuple[Dim, Dim]], noise: bool
) -> Fault:
    """Two operands lie differently along some dimensions."""
    lies = [[f"divided over {'/'.join(a)}" if (a := axes_of_dim(dim)) else "not divided" for dim in d] for d in dims]
    along = [
        f"along {'one dimension' if n == 1 else f'{n} dimensions'} one is {one}, the other {other}"
        for (one, other), n in Counter(map(tuple, lies)).items()
    ]
    rule = f"{mend.named(eqn)} of two arrays that lie differently: {mend.listed(along)}."
    advice = f"split, gather or relayout one of them; spmd.iota and spmd.random make blocks along {mend.listed(axes)}"
    if noise:
        numbers = f"random numbers, which are the same on every device along {mend.listed(axes)}"
        rule = (
            f"{mend.named(eqn)} with {numbers}: the other array is divided there, and its blocks get the same numbers."
        )
        advice = mend.OWN_NOISE
    got = [*mend.where(walk, eqn)]
    for number, atom in enumerate(eqn.invars[:3]):
        why = [f"operand {number}: {line}" for axis in axes for line in mend.reasons(walk, atom, [axis])]
        got += why
        if not why and not noise and _counts(walk, atom):
            got.append(f"operand {number}: made from numbers that begin at 0 on each device, as those of jnp.arange")
            advice = f'spmd.iota("<name>/{axes[0]}"), which goes on from block to block; or split the other array'
        elif not why and _is_constant(walk, atom):
            got.append(f"operand {number}: an array of the program itself, which is equal everywhere")
            own = f'spmd.split(<the whole array>, "<name> -> <name>/{axes[0]}"), or an argument of the kernel'
            advice = f"{own}, which is divided; for random numbers {mend.OWN_NOISE}"
        if (rank := _rank_before_broadcasting(walk, atom)) is not None:
            got.append(f"operand {number}: rank {rank}, and broadcasting gives it rank {len(shape_of(atom))}")
            advice = f'keep a reduced dimension as 1, "b d/tp -> b 1" or keepdims=True; or else {advice}'
    return Fault(rule, walk.kernel, None, None, tuple(dict.fromkeys(got)), advice=advice)


def _is_constant(walk: Any, atom: Variable) -> bool:
    """Return whether a value is made of arrays that the program closed over, and of nothing else."""
    ends = [var for var in walk.history.behind(atom) if not walk.history.operands(var)]
    closed = lambda var: var not in walk.history.made and var not in walk.history.arguments
    return any(shape_of(var) for var in ends) and all(map(closed, ends))


def _counts(walk: Any, atom: Variable) -> bool:
    """Return whether a value is made from the numbers of `jnp.arange` or the columns of a one-hot."""
    made = walk.history.made
    return any(var in made and made[var][0].primitive.name == "iota" for var in walk.history.behind(atom))


def _rank_before_broadcasting(walk: Any, atom: Variable) -> int | None:
    """Return how many dimensions a computed array had before broadcasting put others in front. None if it did not."""
    made = walk.history.producer(atom)
    while made is not None and made[0].primitive.name in ("pvary", "pcast"):
        made = walk.history.producer(made[0].invars[0])
    if made is None or made[0].primitive.name not in ("broadcast_in_dim", "reshape"):
        return None
    if walk.history.producer(made[0].invars[0]) is None:
        return None  # an argument, such as a bias, of which nothing was reduced
    before, after = (shape_of(one) for one in (made[0].invars[0], atom))
    return len(before) if before and after == (1,) * (len(after) - len(before)) + before != before else None


def nonlinear_use(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """Something that is not linear, of a partial sum."""
    name = mend.named(eqn)
    done = f"take {name} after the sum is complete"
    if name in ("mul", "matmul", "conv_general_dilated"):
        done = "multiply two such sums after one of them is complete"
    if name == "div":
        done = f"divide {'whole numbers' if rounds(eqn) else 'by it'} after the sum is complete"
    if name == "convert_element_type":
        done = f"round to {eqn.params['new_dtype']} after the sum is complete"
    rule = f"each device along {mend.listed(axes)} has only its term of a sum {mend.marked(axes)}; {done}."
    return _mended(walk, eqn, axes, rule)


def _mended(walk: Any, eqn: Equation, axes: Sequence[str], rule: str) -> Fault:
    """A fault of an equation that uses a partial sum: with the lines in place of it, where they are known."""
    first = mend.completed_first(walk, eqn, axes)
    call, operands = call_around(eqn, walk.callers), mend.partial_operands(walk, eqn, axes)
    others = [walk.known[v].different & {*axes} for v in eqn.invars if not hasattr(v, "val") and v in walk.known]
    if any(others):  # of which it is not known what completes them
        advice = mend.joined(
            first, f"the other operand differs along {mend.listed(axes)}, and may be a term of a sum too", "\n"
        )
        return Fault(rule, walk.kernel, None, None, mend.where(walk, eqn), None, mend.joined(advice, mend.MEANT, "\n"))
    if any(mend.summed_in(walk, atom, call) for atom in operands):
        fix, advice = None, mend.of_the_whole(walk, operands, call, axes)
    else:
        told = mend.reduced(walk, operands[0], call) if len(operands) == 1 else None
        fix, advice = (told, None) if isinstance(told, Fix) else (None, mend.joined(told or first, mend.MEANT, "\n"))
    return Fault(rule, walk.kernel, None, None, mend.where(walk, eqn), fix, advice)


def on_pieces_too(walk: Any, eqn: Equation, fault: Fault, pending: Sequence[Pending]) -> Fault:
    """A fault in a value that also comes of what was done to pieces: both need a collective."""
    call = call_around(eqn, walk.callers)
    others = [p for p in pending if not call.is_of(call_around(*walk.made_pending[p.at]))]
    if not others:
        return fault
    told = fault.advice or ";\n".join(map(str, fault.fixes))
    advice = mend.joined(told, mend.completed(walk, others), " and ")
    return replace(fault, got=(*fault.got, *mend.pieces_of(walk, others)), fix=None, advice=advice)


def mixed_sum(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A partial sum and an equal value in one sum."""
    along = mend.listed(axes)
    return _met(walk, eqn, axes, f"is equal on {along}: the sum over {along} would count that value once per device")


def mixed_blocks(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A partial sum and a divided value in one sum."""
    harm = "each block would meet only its device's term of the sum"
    return _met(walk, eqn, axes, f"is divided over {mend.listed(axes)}: {harm}")


def scaled_by_different(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A partial sum times a value that is not the same for all its parts."""
    return _met(walk, eqn, axes, f"differs along {mend.listed(axes)}: each term would be scaled differently")


def _met(walk: Any, eqn: Equation, axes: Sequence[str], other: str) -> Fault:
    """A partial sum that meets another value: how that one lies, and what is wrong with it."""
    return _mended(walk, eqn, axes, f"{mend.named(eqn)} of a partial sum {mend.marked(axes)} and a value that {other}.")


def divergent(walk: Any, eqn: Equation, inner: Sequence[str], axes: Sequence[str]) -> Fault:
    """Collectives that only some of their devices would enter."""
    along, names = mend.listed(axes), mend.listed(sorted({mend.named(one) for one in inner}))
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
    got = (*mend.where(walk, eqn), *mend.reasons(walk, test, axes))
    return Fault(rule, walk.kernel, None, None, got, advice=advice)


def interpreted(walk: Any, eqn: Equation) -> Fault:
    """A Pallas call with `interpret=True`, on values that vary."""
    rule = "JAX interprets Pallas calls without the mesh axes on which values vary, and fails where a kernel has them."
    advice = 'spmd.opaque(fn, "in -> out") around the Pallas call, which hides those axes from it'
    return Fault(rule, walk.kernel, None, None, mend.where(walk, eqn), advice=advice)


# --- what a string says ----------------------------------------------------------------------------------------------

# What is wrong with what a string says: one function for each way, which returns the message.


def claimed_divided(walk: Any, eqn: Equation, state: State, dim: int, axes: Sequence[str]) -> Fault:
    """Equal, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), mend.listed(axes)
    name = " ".join(a.name for a in layout.dims[dim].atoms)
    says = f'"{shown}" says that {name} is divided over {along}'
    span, place = layout.dims[dim].span, mend.place_at(walk, eqn)
    given = not walk.history.arguments.keys().isdisjoint(walk.history.behind(eqn.invars[0]))
    if not given and walk.history.made_by(eqn.invars[0], "iota"):
        rule = f"{says}, but this arange counts from 0 on every device along {along}."
        fix = mend.iota(walk, eqn, dim) if place is not None and place.counts else None
        return _at_marker(walk, eqn, rule, span, (), fix, None if fix else f'spmd.iota("{shown}") in its place')
    if walk.random(eqn.invars[0], state):
        rule = f"{says}, but these random numbers are the same on every device along {along}."
        return _at_marker(walk, eqn, rule, span, (), None, mend.OWN_NOISE)
    have = None if place is None or place.made else place.like(layout)
    if have is not None and verb_for(have, layout) != "split":
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f"{says}, but every device along {along} holds the same block."
    known = {one.kind for one in walk.findings} & {"layout", "closed"}
    if known and not walk.history.gathers(eqn.invars[0], axes[0]):
        before = "a string before it says that it is whole" if "layout" in known else "a call before it makes it equal"
        first = f"{before}: mend that one first"
        return _at_marker(walk, eqn, rule, span, (), None, first)
    fix = mend.as_it_says(walk, eqn, place)
    return _at_marker(walk, eqn, rule, span, (), fix, None if fix else mend.block_of_what(walk, eqn, state, axes))


def partial_claimed_divided(walk: Any, eqn: Equation, dim: int, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), mend.listed(axes)
    rule = f'"{shown}" says that each device along {along} holds a block, but each holds a partial sum.'
    before = mend.changed(layout, drop=axes, unreduced={*layout.unreduced, *axes})
    return _at_marker(walk, eqn, rule, layout.dims[dim].span, (), mend.between(walk, eqn, before, layout))


def claimed_partial(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """Equal, and claimed to be a partial sum."""
    layout = eqn.params["layout"]
    along, mark = mend.listed(axes), mend.marked(axes)
    count = math.prod(walk.sizes.get(axis, 0) for axis in axes)
    n = str(count) if count > 1 else "n"
    rule = (
        f'"{mark}" says that each device along {along} holds one term of a sum, '
        f"but the value is equal on {along}: summing {n} copies multiplies it by {n}."
    )
    whole = mend.changed(layout, unreduced=[a for a in layout.unreduced if a not in axes])
    advice = f'it is complete, "{mend.written(eqn, whole)}": leave out {mark} and the psum'
    return _at_marker(walk, eqn, rule, _mark_span(layout), (), advice=advice)


def unexpected_partial(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """A partial sum, and claimed complete."""
    layout = eqn.params["layout"]
    along, shown = mend.listed(axes), mend.written(eqn, layout)
    rule = f'"{shown}" says that the value is equal on {along}, but it is a partial sum {mend.marked(axes)}.'
    whole = layout.without_brackets()
    place = mend.place_at(walk, eqn)
    summed = place is not None and place.made is not None and place.made.op == "sum"
    if summed or walk.history.declared(eqn.invars[0], axes):
        fix = mend.between(walk, eqn, mend.changed(whole, unreduced={*whole.unreduced, *axes}), whole)
    else:
        fix = mend.as_it_says(walk, eqn, place)
    advice = None if fix else mend.what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), mend.reasons(walk, eqn.invars[0], axes), fix, advice)


def unexpected_difference(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """Different, and claimed equal."""
    layout = eqn.params["layout"]
    along, shown = mend.listed(axes), mend.written(eqn, layout)
    place = mend.place_at(walk, eqn)
    have = None if place is None or place.made else place.like(layout.without_brackets())
    if have is not None and verb_for(have, layout.without_brackets()) not in ("all_gather", "nothing"):
        return _lies_otherwise(walk, eqn, state, have, place)
    rule = f'"{shown}" says that the value is equal on {along}, but it differs along {along}.'
    fix = mend.as_it_says(walk, eqn, place)
    advice = None if fix else mend.reshaped(state, axes) or mend.what_it_may_be(eqn, axes, place)
    return _at_marker(walk, eqn, rule, _span(layout), mend.reasons(walk, eqn.invars[0], axes), fix, advice)


def closed_while_different(walk: Any, eqn: Equation, axes: Sequence[str]) -> Fault:
    """A call makes its result equal along axes that its string does not name, and its operand differs there."""
    along = mend.listed(axes)
    rule = (
        f"the result of this call is equal on {along}, which its string does not name, and its operand differs there: "
        "rows of different devices would be mixed."
    )
    where = tuple(f"made in a loop or vmap over a dimension that {a} divides" for a in axes if is_row(walk, eqn, a))
    divided = "/".join(("e", *axes))
    advice = (
        f"reduce the whole array before the loop, with the dimension that {along} divides in the string: "
        f'reduce(x, "{divided} {eqn.params["layout"].short} -> {divided}", ...)'
    )
    return _at_marker(
        walk, eqn, rule, _span(eqn.params["layout"]), (*where, *mend.reasons(walk, eqn.invars[-1], axes)), None, advice
    )


def is_row(walk: Any, eqn: Equation, axis: str) -> bool:
    """Return whether a value is a row of a divided dimension: of a loop, or of vmap."""
    state = walk.known.get(eqn.invars[-1])
    mapped = [state.dims[d] for d in eqn.params.get("mapped", ())] if state else []
    return state is not None and (
        any(p.axis == axis and p.kind == STEP for p in state.pending) or any(axis in axes_of_dim(d) for d in mapped)
    )


def lies_otherwise(walk: Any, eqn: Equation, state: State) -> Fault:
    """It is known how each dimension lies, and that is not as the layout says."""
    place = mend.place_at(walk, eqn)
    layout = eqn.params["layout"].without_brackets()
    have = None if place is None or place.made else place.like(layout)
    if have is None:
        have = None if layout.has_ellipsis else lying(state).like(layout)
    return _lies_otherwise(walk, eqn, state, have, place)


def _lies_otherwise(walk: Any, eqn: Equation, state: State, have: Layout | None, place: Place | None) -> Fault:
    """It is known how the value lies, and that is not as the layout says: one finding, however many axes are wrong."""
    layout = eqn.params["layout"].without_brackets()
    if have is None:
        rule = (
            f'"{mend.written(eqn, layout)}" is what the layout says, and the value lies as "{mend.shown_dims(state)}".'
        )
        axes = sorted(state.divided ^ set(layout.axes)) or sorted(state.divided)
        why, span = mend.reasons(walk, eqn.invars[0], axes), _span(eqn.params["layout"])
        return _at_marker(walk, eqn, rule, span, why, advice=mend.reshaped(state, axes))
    rule = f'"{mend.written(eqn, layout)}" is what the layout says, and the value lies as "{mend.written(eqn, have)}".'
    wrong = sorted(set(have.axes) ^ set(layout.axes))
    gathers = [line_of(o.eqn, o.callers) for axis in wrong for o in walk.history.gathers(eqn.invars[0], axis)]
    got = [*mend.reasons(walk, eqn.invars[0], [a for a in wrong if a in have.axes])]
    got += [f"gathered at {line}" for line in dict.fromkeys(gathers) if line]
    fix = mend.between(walk, eqn, have, layout, place and place.name)
    return _at_marker(walk, eqn, rule, _span(eqn.params["layout"]), got, fix)


def hidden_in_ellipsis(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """An axis that the pattern uses divides a dimension that `...` stands for."""
    layout = eqn.params["layout"]
    along = mend.listed(list(dict.fromkeys(axes)))
    at = next((dim.span for dim in layout.dims if dim.ellipsis), None)
    rule = f'"..." stands for a dimension that is divided over {along}, and the string uses {along} elsewhere.'
    got = [f'the value lies as "{mend.shown_dims(state)}"', *mend.reasons(walk, eqn.invars[0], axes)]
    advice = (
        f"the keyword of a ready-made layer for {along}; in a string of yours name the dimension, or gather it first"
    )
    return _at_marker(walk, eqn, rule, at, got, None, advice)


def blocks_claimed_partial(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> Fault:
    """Divided, and claimed to be a partial sum."""
    along, mark = mend.listed(axes), mend.marked(axes)
    rule = f'"{mark}" says that each device along {along} holds one term of a sum, but each holds a block.'
    got = [f'the value lies as "{mend.shown_dims(state)}"', *mend.reasons(walk, eqn.invars[0], axes)]
    advice = f"leave out {mark}: gather the blocks, or sum over the divided dimension first"
    return _at_marker(walk, eqn, rule, _mark_span(eqn.params["layout"]), got, None, advice)


def pending_claimed(walk: Any, eqn: Equation, pending: Sequence[Pending]) -> Fault:
    """Something was done to a piece, and the result is claimed to be that of the whole."""
    layout = eqn.params["layout"]
    rule = f'"{mend.written(eqn, layout)}" is claimed of the whole array, and {mend.done_to_pieces(pending)}.'
    place = mend.place_at(walk, eqn)
    fix = mend.as_it_says(walk, eqn, place)
    advice = mend.completed(walk, pending)
    if place is not None and place.made is not None and {place.made.op} == {p.kind for p in pending}:
        advice = mend.joined(mend.what_it_may_be(eqn, [pending[0].axis], place), mend.MEANT)
    return _at_marker(walk, eqn, rule, _span(layout), mend.pieces_of(walk, pending), fix, None if fix else advice)


def returned_partial(walk: Any, eqn: Equation, index: int, axes: Sequence[str], spec: Any) -> Fault:
    """A partial sum leaves the kernel as if it were complete."""
    mark, along = mend.marked(axes), mend.listed(axes)
    rule = f"The body returned a partial sum over {along}, and the signature does not say {mark}."
    got = (f"output {index}, {spec}",)
    return Fault(rule, walk.kernel, None, None, got, Fix("psum", ("result",), f"... {mark} -> ..."))


def pending_returned(walk: Any, eqn: Equation, index: int, pending: Sequence[Pending], spec: Any) -> Fault:
    """Describe what was done to pieces and leaves a raw `shard_map`."""
    rule = f"{mend.done_to_pieces(pending)}, and the results are put together."
    rule = rule[0].upper() + rule[1:]
    got = (f"output {index}, {shown_spec(spec)}", *mend.pieces_of(walk, pending))
    return Fault(rule, walk.kernel, None, None, got, advice=mend.completed(walk, pending))


def returned_otherwise(walk: Any, eqn: Equation, index: int, state: State, spec: Any) -> Fault:
    """A result of a raw `shard_map` lies otherwise than its spec puts it together."""
    rule = "A result is put together along other dimensions, or in another order, than it is divided."
    got = (f"output {index}, {shown_spec(spec)}", f'the value lies as "{mend.shown_dims(state)}"')
    return Fault(rule, walk.kernel, None, None, got, advice="an out_spec with the axes where the value has them")


def called_otherwise(
    walk: Any, eqn: Equation, kernel: str, wrong: Mapping[int, Any], raised: Sequence[Exception]
) -> Fault:
    """Dimensions that a string calls otherwise than they came."""
    layout = eqn.params["layout"].without_brackets()
    renamed = lambda dim, name: replace(dim, atoms=(replace(dim.atoms[0], name=name),))
    dims = [renamed(dim, wrong[i].name) if i in wrong else dim for i, dim in enumerate(layout.dims)]
    said, have = (" ".join(dim.short for dim in some) for some in (layout.dims, dims))
    rule = f'"{said}" is what the string calls the dimensions, and they came as "{have}": only the sizes are equal.'
    given = {one.name: _given(kernel, *one.origin) for one in wrong.values()}
    got = [f"{', '.join(name for name in given if given[name] == of)}: {of}" for of in dict.fromkeys(given.values())]
    got += [f"where their sizes differ, the body fails: {first_line(error)}" for error in raised]
    turned = sorted(dim.names for dim in dims) == sorted(dim.names for dim in layout.dims) and not layout.axes
    fix = Fix("rearrange", (eqn.params["value"],), f"{have} -> {said}") if turned else None
    if eqn.params["role"] == "output":
        return _at_marker(walk, eqn, rule, _span(layout), got, fix, f'{"or " if fix else ""}"{have}" in the signature')
    advice = f'"{have}" in this string{f", or {fix} before it" if fix else ""}'
    return _at_marker(walk, eqn, rule, _span(layout), got, None, advice)


def _given(kernel: str, what: str, where: Any) -> str:
    """Return what gave a dimension its name, and where."""
    return f"{what} of {kernel}" if where is None else f"{what}, at {line_of(*where)}"


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
    if (told := mend.rather(walk, eqn, fix)) is not None:
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
    at, made = line_of(eqn, walk.callers), walk.history.line(eqn.invars[0])
    place = f", at {at}" if at else f", made at {made}" if made else ""
    return [f"{what}: {getattr(aval, 'dtype', aval)}[{shape}]{place}"]
