"""Control flow and calls: the primitives that hold a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import jaxprs_in_params

from spmd.check._axes import Origin
from spmd.check._collectives import COMMUNICATES, axes_of
from spmd.check._report import divergent, returned_partial
from spmd.check._state import UNKNOWN, ZERO, State, join, joined, normal

if TYPE_CHECKING:
    from spmd.check._dataflow import Walk

States = list[State]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and the values of its constants; newer JAX has one class where older has two."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return inner, consts if len(consts) == len(inner.constvars) else ()


# --- calls --------------------------------------------------------------------------------------------------


def callee(eqn: Any) -> Any:
    """The jaxpr of a call, if one fits its operands and results one to one."""
    for value in eqn.params.values():
        if not hasattr(value, "eqns"):
            continue
        inner, _ = opened(value)
        if _fits(inner.invars, eqn.invars) and _fits(inner.outvars, eqn.outvars):
            return value
    return None


def _fits(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether these are the same values; the combiner of a reduction is a jaxpr too, but one of scalars."""
    return len(inner) == len(outer) and all(map(_same_shape, inner, outer))


def _same_shape(inner: Any, outer: Any) -> bool:
    return getattr(inner.aval, "shape", None) == getattr(outer.aval, "shape", None)


def call(walk: Walk, eqn: Any, operands: Sequence[State]) -> States | None:
    """jit, remat, custom_jvp, custom_vjp, closed_call, ...; None if this is no call that we can read."""
    inner = callee(eqn)
    return None if inner is None else walk.enter(eqn, inner, operands)


# --- loops --------------------------------------------------------------------------------------------------


def _per_iteration(state: State, rank: int) -> State:
    return state._replace(uniform=normal(state.uniform >> 1, max(rank - 1, 0)))


def _stacked(state: State, rank: int) -> State:
    # Steps differ from one another, so the new leading dim is not constant.
    uniform = state.uniform if state.flags & ZERO else normal(state.uniform << 1, rank)
    return state._replace(uniform=uniform)


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def scan(walk: Walk, eqn: Any, operands: Sequence[State]) -> States:
    """A fixpoint over the carries. What is scanned or stacked has one dim more outside than inside."""
    closed = eqn.params["jaxpr"]
    body, _ = opened(closed)
    sliced = [_rank(outer) != _rank(inner) for outer, inner in zip(eqn.invars, body.invars, strict=True)]
    stacked = [_rank(outer) != _rank(inner) for outer, inner in zip(eqn.outvars, body.outvars, strict=True)]
    carries = len(stacked) - sum(stacked)
    first = len(sliced) - sum(sliced) - carries
    fixed = [_per_iteration(s, _rank(v)) if x else s for s, v, x in zip(operands, eqn.invars, sliced, strict=True)]

    def step(carry: States) -> tuple[States, States]:
        outs = walk.enter(eqn, closed, [*fixed[:first], *carry, *fixed[first + carries :]])
        return outs[:carries], outs[carries:]

    last, ys = fixpoint(walk, step, fixed[first : first + carries])
    if eqn.params.get("length", 1) == 0:
        last = [join(a, b) for a, b in zip(last, operands[first:], strict=False)]
    return [*last, *(_stacked(y, _rank(v)) for y, v in zip(ys, eqn.outvars[carries:], strict=True))]


def while_loop(walk: Walk, eqn: Any, operands: Sequence[State]) -> States:
    """A fixpoint in which the condition colours every carry: devices that stop earlier hold older values."""
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    for_test, for_body = operands[:n_test], operands[n_test : n_test + n_body]
    predicate = State()

    def step(carry: States) -> tuple[States, States]:
        nonlocal predicate
        [predicate] = walk.enter(eqn, test, [*for_test, *carry])
        outs = walk.enter(eqn, body, [*for_body, *carry])
        return [_coloured(s, predicate) for s in outs], []

    last, _ = fixpoint(walk, step, list(operands[n_test + n_body :]))
    _check_divergence(walk, eqn, predicate, [test, body])
    start = operands[n_test + n_body :]
    return [_coloured(join(a, b), predicate) for a, b in zip(last, start, strict=True)]


def fixpoint(walk: Walk, step: Callable[[States], tuple[States, States]], carry: States) -> tuple[States, States]:
    """Repeat until the carries are what they become. Findings of earlier rounds were about too little."""
    # Each round adds a bit to some carry or removes one, so it ends; the bound is against our own mistakes.
    for _ in range(200):
        mark = walk.mark()
        outs, rest = step(carry)
        merged = [join(a, b) for a, b in zip(carry, outs, strict=True)]
        if _settled(merged, carry):
            return outs, rest
        walk.rewind(mark)
        carry = merged
    return [s._replace(flags=s.flags | UNKNOWN) for s in carry], rest


def _settled(new: States, old: States) -> bool:
    return all(
        a.different == b.different and a.partial == b.partial and a.uniform == b.uniform and a.flags == b.flags
        for a, b in zip(new, old, strict=True)
    )


def _coloured(state: State, predicate: State) -> State:
    if not predicate.different & ~state.different:
        return state
    return state._replace(different=state.different | predicate.different, origin=state.origin | predicate.origin)


# --- cond ---------------------------------------------------------------------------------------------------


def cond(walk: Walk, eqn: Any, operands: Sequence[State]) -> States:
    """The join of the branches, coloured by the predicate."""
    predicate, rest = operands[0], operands[1:]
    branches = eqn.params["branches"]
    _check_divergence(walk, eqn, predicate, branches)
    results = [walk.enter(eqn, branch, rest) for branch in branches]
    return [_coloured(joined(states), predicate) for states in zip(*results, strict=True)]


def _check_divergence(walk: Walk, eqn: Any, predicate: State, jaxprs: Sequence[Any]) -> None:
    if not predicate.different or predicate.flags & UNKNOWN or not walk.active:
        return
    found: dict[str, None] = {}
    axes = 0
    for name, mask in (pair for jaxpr in jaxprs for pair in walk.collectives_in(jaxpr)):
        if mask & predicate.different:
            found[name] = None
            axes |= mask & predicate.different
    if axes:
        names = walk.axes.names(axes)
        walk.report(eqn, divergent(walk, eqn, list(found), names, predicate))


def collectives_of(walk: Walk, jaxpr: Any) -> Iterator[tuple[str, int]]:
    """The collectives in a jaxpr, at any depth, with their axes."""
    inner, _ = opened(jaxpr)
    for eqn in inner.eqns:
        if eqn.primitive.name in COMMUNICATES:
            yield eqn.primitive.name, walk.axes.mask(axes_of(eqn))
        for sub in jaxprs_in_params(eqn.params):
            yield from walk.collectives_in(sub)


# --- shard_map ----------------------------------------------------------------------------------------------


def _spec_axes(spec: Any) -> list[tuple[str, int]]:
    """`(axis, dim)` pairs of a PartitionSpec."""
    pairs: list[tuple[str, int]] = []
    for dim, entry in enumerate(getattr(spec, "partitions", None) or ()):
        names = (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        pairs += [(name, dim) for name in names]
    return pairs


def shard_map(walk: Walk, eqn: Any, operands: Sequence[State]) -> States:
    """The body of a kernel: its inputs are what the specs say. Outer axes, if any, stay as they are."""
    closed = eqn.params["jaxpr"]
    body, _ = opened(closed)
    mesh = eqn.params["mesh"]
    manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes")) or frozenset(mesh.axis_names)
    walk.axes.sizes.update((name, size) for name, size in mesh.shape.items() if name in manual)
    own = walk.axes.mask(manual)
    specs = eqn.params["in_specs"]
    labels = _labels(walk, body, len(specs))
    inner = [_seed(walk, o, s, v, label) for o, s, v, label in zip(operands, specs, body.invars, labels, strict=True)]
    before = walk.active, walk.checked
    walk.active, walk.checked = True, (walk.wanted & own) or own
    try:
        outs = walk.enter(eqn, closed, inner)
        walk.outputs.append(outs)
        _check_returned(walk, eqn, outs)
    finally:
        walk.active, walk.checked = before
    return [State(s.different & ~own, s.partial & ~own, 0, s.flags & ~ZERO, s.origin) for s in outs]


def _labels(walk: Walk, body: Any, count: int) -> list[str]:
    """What messages call the inputs. Constants that JAX hoisted out of the body come before the arguments."""
    names = walk.arg_names if not walk.active else ()
    if not names:
        names = getattr(getattr(body, "debug_info", None), "arg_names", None) or ()
    hoisted = count - len(names)
    if hoisted < 0:
        return [f"input {i}" for i in range(count)]
    named = [f"argument {name}" if name else f"input {i + hoisted}" for i, name in enumerate(names)]
    return [*(f"input {i}" for i in range(hoisted)), *named]


def _seed(walk: Walk, state: State, spec: Any, var: Any, label: str) -> State:
    different, uniform, origin = state.different, state.uniform, state.origin
    for axis, _ in _spec_axes(spec):
        different |= walk.axes.bit(axis)
        origin |= walk.origins.bit(id(var), Origin("input", axis, f"{label}, which is divided by {_shown(spec)}"))
    partial = walk.axes.mask(getattr(spec, "unreduced", ()) or ())
    return State(different | partial, state.partial | partial, uniform, state.flags, origin)


def _shown(spec: Any) -> str:
    """A spec without the extras that differ from one JAX to the next."""
    return "P(" + ", ".join(repr(entry) for entry in spec.partitions) + ")"


def _check_returned(walk: Walk, eqn: Any, outs: States) -> None:
    for index, (state, spec) in enumerate(zip(outs, eqn.params["out_specs"], strict=True)):
        left = state.partial & walk.checked & ~walk.axes.mask(getattr(spec, "unreduced", ()) or ())
        if left and not state.flags & (ZERO | UNKNOWN):
            walk.report(eqn, returned_partial(walk, eqn, index, walk.axes.names(left), _shown(spec)))


CONTROL: dict[str, Callable[[Walk, Any, Sequence[State]], States]] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    "shard_map": shard_map,
}
