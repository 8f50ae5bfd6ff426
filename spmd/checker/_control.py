"""Control flow and calls: the primitives that hold a jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from spmd._jaxprs import Role, call_of, held, opened, shape_of
from spmd.checker._axes import Origin
from spmd.checker._collectives import COMMUNICATES, axes_of
from spmd.checker._report import divergent, returned_partial
from spmd.checker._state import UNKNOWN, ZERO, State, join, joined, normal

if TYPE_CHECKING:
    from spmd.checker._dataflow import Walk

States = list[State]


# --- calls --------------------------------------------------------------------------------------------------


def call(walk: Walk, eqn: Any, operands: Sequence[State]) -> States | None:
    """jit, remat, custom_jvp, custom_vjp, custom_linear_solve, ...; None if this is no call that we can read."""
    inner = call_of(eqn)
    return None if inner is None else walk.enter(eqn, inner.jaxpr, inner.of(operands))


# --- loops --------------------------------------------------------------------------------------------------


def _per_iteration(state: State, rank: int) -> State:
    return state._replace(uniform=normal(state.uniform >> 1, max(rank - 1, 0)))


def _stacked(state: State, rank: int) -> State:
    # Steps differ from one another, so the new leading dim is not constant.
    uniform = state.uniform if state.flags & ZERO else normal(state.uniform << 1, rank)
    return state._replace(uniform=uniform)


def _rank(atom: Any) -> int:
    return len(shape_of(atom))


def scan(walk: Walk, eqn: Any, operands: Sequence[State]) -> States:
    """A fixpoint over the carries. What is scanned or stacked has one dim more outside than inside."""
    [(closed, _, _, sliced, stacked)] = held(eqn)
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
    test, body = held(eqn)
    start = operands[len(operands) - len(eqn.outvars) :]
    for_test, for_body = (part.of(operands)[: len(part.operands) - len(start)] for part in (test, body))
    predicate = State()

    def step(carry: States) -> tuple[States, States]:
        nonlocal predicate
        [predicate] = walk.enter(eqn, test.jaxpr, [*for_test, *carry])
        outs = walk.enter(eqn, body.jaxpr, [*for_body, *carry])
        return [_coloured(s, predicate) for s in outs], []

    last, _ = fixpoint(walk, step, list(start))
    _check_divergence(walk, eqn, predicate)
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
    predicate = operands[0]
    _check_divergence(walk, eqn, predicate)
    results = [walk.enter(eqn, branch.jaxpr, branch.of(operands)) for branch in held(eqn)]
    return [_coloured(joined(states), predicate) for states in zip(*results, strict=True)]


def _check_divergence(walk: Walk, eqn: Any, predicate: State) -> None:
    if not predicate.different or predicate.flags & UNKNOWN or not walk.active:
        return
    found: dict[str, None] = {}
    axes = 0
    for name, mask in (pair for part in held(eqn) for pair in walk.collectives_in(part.jaxpr)):
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
        for part in held(eqn):
            if part.role != Role.DERIVATIVE:
                yield from walk.collectives_in(part.jaxpr)


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
    [part] = held(eqn)
    body, _ = opened(part.jaxpr)
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
        outs = walk.enter(eqn, part.jaxpr, inner)
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
