"""Per-shard code inside a body: `local` for raw collectives, `opaque` for what no compiler can divide.

In explicit mode a body is per-shard code already. Where it sees whole arrays, such code is an island: a
`jax.shard_map` between constraints in auto mode, a nest of `jax.vmap(axis_name=...)` in reference mode.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.facts import CallName, DecisionName
from spmd._jaxprs.traces import run_apart, traced_apart
from spmd._jaxprs.walker import axes_of, equations
from spmd._trees.arguments import explained
from spmd._trees.leaves import kind_of
from spmd.comm import _lax
from spmd.comm._call import Call, Operand, open_call
from spmd.comm._keywords import check_array, misfit
from spmd.comm._marks import mark, rearranged
from spmd.errors import LayoutError, ModeError, SpmdError
from spmd.language import Dim, Layout
from spmd.mesh import no_mesh, resized
from spmd.modes import Frame, current_frame, interpreted

Args = ParamSpec("Args")
R = TypeVar("R")

Axes = tuple[str, ...]


def local(
    fn: Callable[Args, R], pattern: str, /, *, reference: Callable[..., Any] | None = None, **names: Any
) -> Callable[Args, R]:
    """Run per-shard code (raw `jax.lax` collectives, `axis_index`) inside a body, in all modes.

    In explicit mode `fn` runs as it is. Its arguments and results are checked against the pattern. In auto mode it
    runs in a `jax.shard_map` of its own. In reference mode `reference` runs on whole arrays; without it, `fn` under
    `jax.vmap(axis_name=...)` over the mesh axes. String operations work inside as they do in explicit mode.
    Differentiate around the island: `vmap` cannot do it inside.

    Communication: what `fn` does; in explicit mode nothing else, forward and backward. In auto mode the
    arguments are moved into their layouts, and a result that JAX types varying where its layout is whole (a
    gathered copy), or that is marked `{U:}`, costs one all-reduce.

    Args:
      fn: A function from one device's shards, one positional argument per layout, to one shard per layout on
        the right (a tuple if there are several).
      pattern: `"layout, ... -> layout, ..."`. An empty left side means no arguments.
      reference: The same on whole arrays, in plain JAX: what the operation means, against which tests compare `fn`.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      A function on arrays as the body sees them.

    Raises:
      ModeError: In reference mode without `reference`, if JAX cannot run `fn` under `vmap` (`pcast`, tiled collectives
        over several axes), or if `fn` takes a gradient.
      LayoutError: If an argument or result does not fit its layout.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> @spmd.kernel("n/x -> n/x", mesh=mesh)
      ... def neighbour(v):
      ...     swap = lambda v: jax.lax.ppermute(v, "x", [(0, 1), (1, 0), (2, 3), (3, 2)])
      ...     return spmd.local(swap, "n/x -> n/x")(v)
      >>> print(neighbour(jnp.arange(8)), neighbour.reference(jnp.arange(8)))
      [2 3 0 1 6 7 4 5] [2 3 0 1 6 7 4 5]
    """
    return _island(_Job("local", fn, pattern, names, reference=reference))


def opaque(
    fn: Callable[Args, R], pattern: str, /, *, reference: Callable[..., Any] | None = None, **names: Any
) -> Callable[Args, R]:
    """Give a Pallas, FFI or custom call its layouts: code that neither JAX nor a compiler can look into.

    `fn` sees shards without manual axis types, and is traced where JAX does not ask for them, backward too. So a call
    that knows nothing of mesh axes works with JAX's checker on, that of a library with its gradient. Its results are
    typed varying on the axes of their layouts and of the arguments. It communicates with nobody: for raw collectives
    there is `local`.

    `spmd.check` cannot look into such code. It takes `reference` on whole arrays for it, and says so.

    Communication: none forward; backward one all-reduce for each argument that is whole on an axis that
    another one varies on. In auto mode the arguments are moved into their layouts as well.

    Args:
      fn: A function from one device's shards to shards; differentiable if the call is. It may close over what is equal
        on all devices. It is traced in a thread of its own.
      pattern: `"layout, ... -> layout, ..."`.
      reference: The same on whole arrays, in plain JAX; reference mode runs it, and `spmd.check`.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      A function on arrays as the body sees them.

    Raises:
      ModeError: In reference mode, if there is no `reference`.
      CommunicationError: If `fn` names a mesh axis, or closes over a value that varies along one.
      LayoutError: If an argument or result does not fit its layout; by `spmd.check`, if `reference` gives other shapes.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> def host_sort(x):  # a call that JAX knows nothing about
      ...     return jax.pure_callback(lambda v: np.sort(v, -1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
      >>> @spmd.kernel("b/dp n -> b/dp n", mesh=mesh)
      ... def rows(x):
      ...     return spmd.opaque(host_sort, "b/dp n -> b/dp n", reference=jnp.sort)(x)
      >>> print(rows(jnp.array([[3, 1], [2, 0], [5, 4], [7, 6]])).tolist())
      [[1, 3], [0, 2], [4, 5], [6, 7]]
    """
    return _island(_Job("opaque", fn, pattern, names, typed=False, reference=reference))


def _island(job: _Job) -> Callable[..., Any]:
    """The function in the mode of the body that calls it."""

    def run(*args: Any) -> Any:
        frame = current_frame(f"spmd.{job.name}")
        whole = job.reference is not None or not job.typed
        modes = {"explicit": _explicit, "auto": _auto, "reference": _whole if whole else _reference}
        return modes[frame.mode](job, job.open(args, frame), args)

    run.__name__ = run.__qualname__ = getattr(job.fn, "__name__", "island")
    run.__doc__ = getattr(job.fn, "__doc__", None)
    return run


# --- what all modes share ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """A function on shards with its pattern."""

    name: str
    fn: Callable[..., Any]
    pattern: Any
    names: dict[str, Any] = field(default_factory=dict)
    typed: bool = True  # whether `fn` sees JAX's manual axis types
    reference: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for what, fn in (("fn", self.fn), ("reference", self.reference)):
            if not callable(fn) and not (fn is None and what == "reference"):
                rule = f"{what} is a function, not {kind_of(fn)}."
                raise LayoutError(rule, call=f"{self.name}(fn, ...)", advice=f'as in {self.name}(fn, "in -> out")(x)')

    def open(self, args: Sequence[Any], frame: Frame) -> Call:
        call = open_call(
            self.name,
            self.pattern,
            self.names,
            arrays=args,
            inputs=None if args else 1,
            outputs=None,
            frame=frame,
            example=f'{self.name}(fn, "b/dp d -> b/dp d")(x)',
        )
        shown = getattr(self.fn, "__name__", "fn")
        call.text = CallName(f'{self.name}({"fn" if shown == "<lambda>" else shown}, "{self.pattern}")', self.name)
        if not args and not call.pattern.empty_left:
            call.check_counts(0, None)
        return call


def _closed(call: Call, x: Any, layout: Layout, name: str | None = None, index: int = 0) -> Any:
    """An array checked against its layout, its composite dimensions closed."""
    operand = call.operand(x, index, layout=layout, name=name)
    shape = jnp.shape(x)
    return operand.x if operand.x.shape == shape else operand.x.reshape(shape)


def _results(call: Call, out: Any) -> tuple[Any, ...]:
    """Return what a function returned, one array per layout of the right side."""
    wanted = len(call.pattern.outputs)
    found = (out,) if wanted == 1 and not isinstance(out, (tuple, list)) else out
    if not isinstance(found, (tuple, list)) or len(found) != wanted:
        have = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"one {type(found).__name__}"
        rule = f"the function returns one array per layout on the right: {wanted}."
        call.fail(rule, got=[have])
    return tuple(found)


def _finish(call: Call, out: Any, role: str) -> Any:
    """The results checked and marked, in the structure that the caller gets."""
    outs, done = _results(call, out), []
    for i, (y, layout) in enumerate(zip(outs, call.pattern.outputs, strict=True)):
        y = _closed(call, y, layout, "the result" if len(outs) == 1 else f"result {i}")
        done.append(mark(y, layout, call.text, role=role, frame=call.frame))
    return done[0] if len(done) == 1 else tuple(done)


def _inputs(call: Call, args: Sequence[Any]) -> tuple[Layout, ...]:
    return call.pattern.inputs[: len(args)]


def _opened(call: Call, args: Sequence[Any]) -> list[Any]:
    """The arguments, checked against their layouts."""
    pairs = zip(args, _inputs(call, args), strict=True)
    return [_closed(call, x, layout, index=i) for i, (x, layout) in enumerate(pairs)]


# --- explicit ------------------------------------------------------------------------------------------------


def _explicit(job: _Job, call: Call, args: Sequence[Any]) -> Any:
    shards = _opened(call, args)
    if job.typed:
        return _finish(call, job.fn(*shards), "annotate")
    margins = any(any(dim.margin) for layout in (*call.pattern.inputs, *call.pattern.outputs) for dim in layout.dims)
    stands_in = job.reference is not None and interpreted.value and not margins
    with call.scope():
        out = _stood_in(job, call, shards) if stands_in else _untyped(call, job.fn, shards)
    return _finish(call, out, "annotate")


def _varying(call: Call, shards: Sequence[Any]) -> Axes:
    """The axes along which the results of opaque code are typed varying: those of the layouts and of the arguments."""
    layouts = call.pattern.outputs
    said = {a for layout in layouts for a in (*layout.axes, *layout.unreduced, *layout.reduced)}
    held = {a for x in shards for a in _compat.varying_axes(x)}
    return call.frame.in_mesh_order((said & set(_compat.manual_axes())) | held)


def _untyped(call: Call, fn: Callable[..., Any], shards: Sequence[Any]) -> Any:
    """Run a function on shards that JAX does not know to vary.

    Around it types and gradients are those of an elementwise operation: arguments are made varying on every
    axis that any of them varies on (whose transpose is a psum), and so are the results.
    """
    axes = _varying(call, shards)
    hide = functools.partial(_hidden, axes=axes)
    with _without_axes(call):
        out = run_apart(fn, [*map(hide, shards)], call.frame.enter, functools.partial(_check_alone, call), hide)
    return [_lax.retype(jnp.asarray(y), axes, "shown") for y in _results(call, out)]


def _hidden(x: Any, axes: Axes) -> Any:
    """A shard that JAX does not know to vary."""
    return _lax.retype(_compat.pvary(x, axes), axes, "hidden")


@contextlib.contextmanager
def _without_axes(call: Call) -> Iterator[None]:
    """Refuse collectives in code that is traced apart, where no mesh axis has a name."""
    try:
        yield
    except (AssertionError, NameError) as error:
        fact = jax_errors.told(error)
        if fact is not None and fact.kind == "axis":
            _refuse_collectives(call, {fact.axis, *jax_errors.named_axes(error)} & {*call.frame.axis_names})
        raise


def _check_alone(call: Call, traced: Any) -> None:
    """No collective and no varying value from outside: their transposes are wrong where types are hidden."""
    held = {a for x in traced.consts if isinstance(x, jax.Array) for a in _compat.varying_axes(x)}
    if held:
        rule = f"the function closes over a value that varies along {', '.join(call.frame.in_mesh_order(held))}."
        call.refuse(rule, advice="pass that value as an argument, with its layout")
    _refuse_collectives(call, {a for eqn in equations(traced) for a in axes_of(eqn) if a in call.frame.axis_names})


def _refuse_collectives(call: Call, axes: Collection[Any]) -> None:
    if axes:
        rule = f"opaque code communicates with nobody, and this names {', '.join(call.frame.in_mesh_order(axes))}."
        call.refuse(rule, advice="spmd.local, which tells the modes what its collectives do")


def _stood_in(job: _Job, call: Call, shards: Sequence[Any]) -> Any:
    """What the reference makes of whole arrays, cut into shards again: a trace for numbers has no opaque code."""
    frame, axes = call.frame, _varying(call, shards)
    pairs = zip(shards, _inputs(call, shards), strict=True)
    whole = [_join(call, _gathered(x, layout, frame), layout) for x, layout in pairs]
    on_whole = job.open(whole, frame.replace(mode="reference"))
    outs = _results(on_whole, job.reference(*whole) if job.reference else None)
    found: list[Any] = []
    for i, (y, layout) in enumerate(zip(outs, call.pattern.outputs, strict=True)):
        y = _cut(on_whole.operand(y, i, layout=layout, name="the result"), frame)
        for axis in frame.in_mesh_order(layout.axes):
            y = jax.lax.dynamic_index_in_dim(y, jax.lax.axis_index(axis), keepdims=False)
        y = _enter(y, layout, frame)
        equal = frame.in_mesh_order(_compat.varying_axes(y) - {*axes})
        found.append(_compat.pvary(_lax.retype(y, equal, "invarying"), axes))
    if not resized.value:  # elsewhere the sizes may be too small for the function
        with _without_axes(call):
            traced = traced_apart(job.fn, [_hidden(x, axes) for x in shards], frame.enter).jaxpr
        _check_alone(call, traced)
        types = [[f"{x.dtype}{list(x.shape)}" for x in some] for some in (traced.out_avals, found)]
        if types[0] != types[1]:
            got = [
                f"{who}: {', '.join(some)} on each device" for who, some in zip(("fn", "reference"), types, strict=True)
            ]
            call.fail("the function and its reference give other shapes or dtypes.", got=got)
    return [_lax.retype(_lax.retype(y, axes, "reference"), axes, "shown") for y in found]


def _gathered(x: Any, layout: Layout, frame: Frame) -> Any:
    """The blocks of all devices, one leading dimension per mesh axis. Of copies each device keeps its own."""
    for axis in reversed(frame.axis_names):
        x = x[None]
        if axis in (*layout.axes, *layout.unreduced):
            x = _lax.all_gather(x, (axis,), 0, "varying")
    return x


# --- auto ----------------------------------------------------------------------------------------------------


def _auto(job: _Job, call: Call, args: Sequence[Any]) -> Any:
    """The function in a `shard_map` of its own, between constraints."""
    frame, layouts = call.frame, _inputs(call, args)
    _check_blocks(call, (*layouts, *call.pattern.outputs))
    pairs = zip(_opened(call, args), layouts, strict=True)
    arrays = [mark(x, layout, call.text, role="operand", frame=frame) for x, layout in pairs]
    inside = frame.replace(mode="explicit", island=True)
    mesh = jax.sharding.get_abstract_mesh()
    free = frozenset(a for a in frame.axis_names if a not in _compat.manual_axes())
    extra = len(call.ellipsis_shape())
    ranks = [sum(not d.ellipsis for d in layout.dims) + extra * layout.has_ellipsis for layout in call.pattern.outputs]

    def body(*shards: Any) -> Any:
        with inside.enter():
            entered = [_enter(x, layout, frame) for x, layout in zip(shards, layouts, strict=True)]
            outs = _results(call, _explicit(job, job.open(entered, inside), entered))
            with call.scope():
                return tuple(_leave(y, o, frame) for y, o in zip(outs, call.pattern.outputs, strict=True))

    mapped = jax.shard_map(
        body,
        mesh=frame.mesh if mesh.empty else mesh,
        in_specs=tuple(_spec(layout, x.ndim) for layout, x in zip(layouts, arrays, strict=True)),
        out_specs=tuple(_spec(layout, n) for layout, n in zip(call.pattern.outputs, ranks, strict=True)),
        axis_names=free,
    )
    with contextlib.nullcontext() if _compat.manual_axes() else no_mesh():
        outs = mapped(*arrays)
    return _finish(call, outs, "result")


def _check_blocks(call: Call, layouts: Sequence[Layout]) -> None:
    for dim in (dim for layout in layouts for dim in layout.dims):
        fault = None
        if any(dim.margin):
            fault, advice = "has no margins", "add the margins inside the function"
        elif dim.scattered and call.frame.mode == "auto":
            fault, advice = "cannot be cut into scattered blocks", "two dimensions, and rearrange inside"
        if fault:
            rule = f"in {call.frame.mode} mode a body sees whole arrays, and a whole array {fault}."
            call.fail(rule, at=dim.span, advice=advice, error=ModeError)


def _spec(layout: Layout, rank: int) -> P:
    return Layout.from_dims(layout.with_rank(rank).dims).spec


def _enter(x: Any, layout: Layout, frame: Frame) -> Any:
    """A whole array is complete: of a partial sum, one device gets it and the others get zeros."""
    x = _compat.pvary(x, frame.in_mesh_order(layout.reduced))
    summed = frame.in_mesh_order(layout.unreduced)
    return jnp.where(_lax.is_first(summed), x, jnp.zeros_like(x)) if summed else x


def _leave(y: Any, layout: Layout, frame: Frame) -> Any:
    """The partial sums added up; of gathered copies, which JAX types varying, the first device's."""
    copies = frame.in_mesh_order(_compat.varying_axes(y) - {*layout.axes, *layout.unreduced})
    summed = frame.in_mesh_order({*copies, *layout.unreduced})
    y = _compat.pvary(y, frame.in_mesh_order(layout.axes))
    if not summed:
        return y
    number = y.astype(jnp.int32) if y.dtype == jnp.bool_ else y
    if copies:
        number = jnp.where(_lax.is_first(copies), number, jnp.zeros_like(number))
    return _lax.psum(number, summed).astype(y.dtype)


# --- reference -----------------------------------------------------------------------------------------------


def _whole(job: _Job, call: Call, args: Sequence[Any]) -> Any:
    if job.reference is None:
        call.fail(
            "reference mode runs on whole arrays, and nobody said what this call computes on them.",
            advice=f"{call.text[:-1]}, reference=global_fn), or the kernel's explicit mode",
            error=ModeError,
        )
    return _finish(call, job.reference(*_opened(call, args)), "result")


def _reference(job: _Job, call: Call, args: Sequence[Any]) -> Any:
    """The function on blocks, under a nest of `vmap`s whose axis names are the mesh's."""
    frame, layouts = call.frame, _inputs(call, args)
    _check_blocks(call, (*layouts, *call.pattern.outputs))
    inside = frame.replace(mode="explicit", island=True)
    blocks = [_cut(operand, frame) for operand in (call.operand(x, i) for i, x in enumerate(args))]

    def body(_: Any, *shards: Any) -> Any:
        with inside.enter():
            entered = [_enter(x, layout, frame) for x, layout in zip(shards, layouts, strict=True)]
            _check_undifferentiated(call, job.fn, entered)
            return _results(call, _explicit(job, job.open(entered, inside), entered))

    mapped = body
    for axis, size in reversed(frame.sizes):
        places = (None, *(0 if axis in layout.axes else None for layout in layouts))
        mapped = jax.vmap(mapped, in_axes=places, axis_name=axis, axis_size=size)
    try:
        outs = mapped(jnp.zeros(()), *blocks)
    except (AssertionError, NotImplementedError, ValueError) as error:
        if isinstance(error, SpmdError) or not jax_errors.lacks_batching(error):
            raise
        call.fail(
            "reference mode runs per-shard code under jax.vmap(axis_name=...), and JAX has no such collective there.",
            got=[f"JAX: {jax_errors.first_line(error)}"],
            advice="local(..., reference=global_fn); or the kernel's explicit mode, with "
            'spmd.mode("explicit"): around it',
            error=ModeError,
        )
    return _finish(call, [_join(call, y, o) for y, o in zip(outs, call.pattern.outputs, strict=True)], "result")


def _check_undifferentiated(call: Call, fn: Callable[..., Any], shards: Sequence[Any]) -> None:
    """No gradient taken inside: under vmap JAX sums cotangents over axes otherwise than on a mesh, in silence."""
    if any(_compat.is_backward(_compat.name_stack(e)) for e in equations(jax.make_jaxpr(fn)(*shards))):
        rule = "the function differentiates, and under jax.vmap(axis_name=...) JAX's collectives have other gradients."
        call.fail(rule, advice="jax.grad around the kernel, or the kernel's explicit mode", error=ModeError)


def _cut(operand: Operand, frame: Frame) -> Any:
    """A whole array as its blocks: one leading dimension per axis that divides it, in mesh order."""
    have = [(*factor.axes, i) for i, factor in enumerate(operand.factors)]  # a block goes by its number
    leading = frame.in_mesh_order([axis for factor in operand.factors for axis in factor.axes])
    want: list[list[Any]] = [[axis] for axis in leading]
    blocks, extra = iter(range(len(have))), len(have) - len(operand.layout.atoms)
    for dim in operand.layout.dims:
        want += [[next(blocks)] for _ in range(extra)] if dim.ellipsis else [[next(blocks) for _ in dim.atoms]]
    sizes: dict[Any, int] = {axis: frame.axis_size(axis) for axis in leading}
    return rearranged(operand.x, have, want, sizes)


def _join(call: Call, y: Any, layout: Layout) -> Any:
    """Blocks, one leading dimension per mesh axis, put together: partial sums added, of copies the first."""
    frame = call.frame
    for i, axis in reversed(list(enumerate(frame.axis_names))):
        if axis in layout.unreduced:
            y = y.sum(i, dtype=y.dtype)
        elif axis not in layout.axes:
            y = jax.lax.index_in_dim(y, 0, i, keepdims=False)
    leading = frame.in_mesh_order(layout.axes)
    dims = layout.with_rank(y.ndim - len(leading)).dims
    have: list[Any] = [[axis] for axis in leading]
    want: list[Any] = []
    sizes: dict[Any, int] = {}
    for dim, size in zip(dims, y.shape[len(leading) :], strict=True):
        parts = {len(sizes) + i: part for i, part in enumerate(_parts(call, dim, size))}
        sizes |= {number: block for number, (_, block) in parts.items()}
        have.append([*parts])
        want.append([name for number, (axes, _) in parts.items() for name in (*axes, number)])
    return rearranged(y, have, want, sizes)


def _parts(call: Call, dim: Dim, size: int) -> list[tuple[Axes, int]]:
    """Axes and block of each factor of a dimension that must be told apart to put its blocks together."""
    if not dim.scattered:
        return [(dim.axes, size)]
    parts = [(atom.axes or (), call.factor(atom).size) for atom in dim.atoms]
    return [(axes, whole // call.frame.axis_size(axes)) for axes, whole in parts]


# --- branches whose predicate may differ between devices --------------------------------------------------------------


@explained
def cond(predicate: Any, true_fn: Callable[..., R], false_fn: Callable[..., R], *operands: Any) -> R:
    """`jax.lax.cond` that neither hangs nor loses gradients when the predicate differs between devices.

    With a raw `lax.cond` whose predicate differs, devices take different branches. A collective in one of the branches
    then waits forever, and its gradient is wrong (jax#40823). Here a predicate that is equal by JAX's own type gives a
    `lax.cond`. Any other predicate runs both branches everywhere and selects, so the branch not taken must have finite
    derivatives too, as with `jnp.where`.

    Communication: that of the branch taken, or of both branches if the predicate is typed varying. Backward likewise.

    Args:
      predicate: A boolean scalar.
      true_fn: The branch for True; both return the same structure, shapes and dtypes.
      false_fn: The branch for False.
      *operands: Their arguments.

    Returns:
      The result of one branch.

    Raises:
      LayoutError: If the predicate is not a scalar.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> @spmd.kernel("n/x -> n/x", mesh=mesh)
      ... def relu_blocks(v):
      ...     with spmd.per_shard("each block decides for itself"):
      ...         return spmd.cond(v.sum() > 6, lambda v: v, lambda v: 0 * v, v)
      >>> print(relu_blocks(jnp.arange(8)))
      [0 0 0 0 4 5 6 7]
    """
    frame = current_frame("spmd.cond")
    for branch in (true_fn, false_fn):
        if not callable(branch):
            rule = f"the branches of cond are functions, and this one is {kind_of(branch)}."
            raise LayoutError(rule, call="cond(predicate, true_fn, false_fn, *operands)")
    for what, value in [("the predicate", predicate), *(("an operand", x) for x in jax.tree.leaves(operands))]:
        check_array(value, what, misfit("cond(predicate, true_fn, false_fn, *operands)"))
    shape = jnp.shape(predicate)
    if shape != ():
        rule = f"the predicate of cond is a scalar, and this one has shape {shape}."
        raise LayoutError(rule, call="cond(predicate, ...)")
    varying = frame.in_mesh_order(_compat.varying_axes(predicate)) if frame.explicit else ()

    def typed(fn: Callable[..., Any], other: Any) -> Callable[..., Any]:
        """A branch that is typed as the other one too, as `lax.cond` wants them."""
        alike = lambda a, b: _compat.pvary(a, frame.in_mesh_order(_compat.varying_axes(b)))
        return lambda *args: jax.tree.map(alike, fn(*args), other)

    if not varying:
        if frame.explicit:
            yes, no = (jax.eval_shape(fn, *operands) for fn in (true_fn, false_fn))
            true_fn, false_fn = typed(true_fn, no), typed(false_fn, yes)
        with jax.named_scope(DecisionName("cond")):
            return jax.lax.cond(predicate, true_fn, false_fn, *operands)
    yes, no = true_fn(*operands), false_fn(*operands)
    _check_alike(yes, no)
    with jax.named_scope(DecisionName("cond")):
        return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), yes, no)


def _check_alike(yes: Any, no: Any) -> None:
    """Both branches return the same structure, shapes and dtypes, as `lax.cond` demands. A selection would broadcast
    without a word."""
    if jax.tree.structure(yes) != jax.tree.structure(no):
        got = [f"true_fn: {jax.tree.structure(yes)}", f"false_fn: {jax.tree.structure(no)}"]
        raise LayoutError("the branches of cond return the same structure.", call="cond(predicate, ...)", got=got)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(yes)]
    wrong = []
    for path, a, b in zip(paths, jax.tree.leaves(yes), jax.tree.leaves(no), strict=True):
        weak = any(isinstance(x, (bool, int, float, complex)) or getattr(x, "weak_type", False) for x in (a, b))
        kinds = [f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]" for x in (a, b)]
        if jnp.shape(a) != jnp.shape(b) or (kinds[0] != kinds[1] and not weak):
            wrong.append(f"result{path}: {kinds[0]} from true_fn, {kinds[1]} from false_fn")
    if wrong:
        rule = "the branches of cond return the same shapes and dtypes."
        raise LayoutError(rule, call="cond(predicate, ...)", got=wrong)
