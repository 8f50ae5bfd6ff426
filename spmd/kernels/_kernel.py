"""`@kernel`: a per-shard body with layout strings, made into a function on whole arrays."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, Literal, Never, ParamSpec, TypeVar, get_args, overload

import jax

from spmd import _compat
from spmd._jaxprs.facts import Leaf
from spmd._python.named import ByName
from spmd._python.recent import Recent
from spmd._text import Table, html_page
from spmd._trees.leaves import Static, is_array, is_number, kind_of, wrapped
from spmd._trees.matching import matched
from spmd.checker._arbiter import collecting
from spmd.errors import LayoutError, ModeError, PlacementError, SpmdError, did_you_mean, not_one_of
from spmd.kernels._boundary import (
    arrived,
    check_boundary,
    check_mapped,
    inlined,
    mapped_axes,
    nested,
    unseen_axes,
    warn_unseen,
)
from spmd.kernels._mapped import divided
from spmd.kernels._outputs import Outputs
from spmd.kernels._plan import Plan, concrete
from spmd.kernels._signature import Signature, check_left, read
from spmd.kernels._translate import hint_at, shorten
from spmd.language import AxisMapping, Layout, Pattern, mesh_text
from spmd.mesh import check_mesh, mesh_for
from spmd.modes import ambient_mapping, ambient_mode, outermost, try_frame

# Each one is a compiled program with its static values. Only static arguments that never recur would need more.
_KEPT = 256
_NO_STATICS = Static(())

P = ParamSpec("P")  # the parameters of a body,
R = TypeVar("R")  # what it returns,
S = TypeVar("S")  # and, of a method, whose it is
Q = ParamSpec("Q")

Boundary = Literal["move", "error"]
Check = Literal["error", "warn", "off"]


@dataclass(frozen=True, eq=False)
class Default:
    """The default of a static argument that nobody gave. It is the same in all calls, and need not be hashable."""

    value: Any


class Kernel(ByName, Generic[P, R]):
    """A function on whole arrays whose body sees one device's shards. Made by `kernel`.

    Call it like the body. `kernel.auto(...)` and `kernel.reference(...)` run one call in another mode, and
    `kernel.trace(...)` and `kernel.lower(...)` are those of `jax.jit`.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> double = spmd.kernel("n/x -> n/x", mesh=spmd.make_mesh(x=4))(lambda v: 2 * v)
      >>> print(double(jnp.arange(4)), double.reference(jnp.arange(4)))
      [0 2 4 6] [0 2 4 6]
    """

    def __init__(self, signature: Signature, mesh: Any, boundary: str):
        self.signature = signature
        self.mesh = mesh
        self.boundary = boundary
        self._plans = Recent(_KEPT)
        self._numbers = Recent(_KEPT)  # which numbers have layouts, by structure and their positions
        self._warm = Recent(_KEPT)  # the same by mode and structure, for calls that need nothing else
        self._static = tuple(i for i, n in enumerate(signature.params) if n in signature.static)
        self._arrays = tuple(n for n in signature.params if n not in signature.static)
        self._defaults = {i: Default(signature.default(signature.params[i])) for i in self._static}
        closes = bool(getattr(signature.fn, "__closure__", None))
        self._repeats = not (closes or self._static or mesh is None)
        functools.update_wrapper(self, signature.fn)

    def __repr__(self) -> str:
        return f"<{self.signature.text}>"

    def _repr_html_(self) -> str:
        sizes = None if self.mesh is None else mesh_text(dict(self.mesh.shape)).removeprefix("mesh ")
        layouts = [(name, str(layout)) for name, layout in self.signature.layouts.items()]
        rows = [
            ("mesh", sizes or "the one in force where it is called"),
            *layouts,
            ("result", str(self.signature.outputs)),
        ]
        return html_page(self.signature.text, [Table(rows, ("argument", "layout"))])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        around = outermost()
        if self._warm and around is not None and not kwargs:
            leaves, structure = jax.tree_util.tree_flatten(args)
            plan = self._warm.get((around, structure))
            if plan is not None and plan.fits(leaves):
                return plan.outputs.returned(plan.jitted(*leaves))
        return self._run(ambient_mode(), args, kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Kernel[P, R]: ...

    @overload
    def __get__(self: Kernel[Concatenate[S, Q], R], instance: S, owner: Any = None) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument, static or with a layout of its own."""
        return self if instance is None else functools.partial(self, instance)

    def explicit(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one call in explicit mode, a `jax.shard_map` with the collectives of the strings. Return its results."""
        return self._run(("explicit", "all"), args, kwargs, asked=True)

    def auto(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one call in auto mode, where each layout is a `with_sharding_constraint`. Return its results."""
        return self._run(("auto", ambient_mode()[1]), args, kwargs, asked=True)

    def reference(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one call in reference mode, on whole arrays on one device. Return its results."""
        return self._run(("reference", "all"), args, kwargs, asked=True)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return `jax.jit(...).trace` in the current mode. Arguments may be `jax.ShapeDtypeStruct`s."""
        jitted, args, kwargs = self._staged(args, kwargs)
        return jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return `jax.jit(...).lower` in the current mode. Arguments may be `jax.ShapeDtypeStruct`s.

        Call the result of `.compile()` like the kernel, without its static arguments.
        """
        jitted, args, kwargs = self._staged(args, kwargs)
        return jitted.lower(*args, **kwargs)

    def on(self, mesh: Any) -> Kernel[P, R]:
        """Return the same kernel on another mesh. It moves arguments that lie elsewhere."""
        return Kernel(self.signature, mesh, "move")

    def prepared(self, args: Any, kwargs: Any) -> tuple[Plan, list[Any]]:
        """Return how a call in the current mode will run, and its array leaves. Nothing is traced."""
        return self._prepare(ambient_mode(), args, kwargs)

    def _staged(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A `jax.jit` and its arguments: the kernel's own, or flat leaves where some leaves are not arrays."""
        plan, leaves = self.prepared(args, kwargs)
        signature = self.signature
        given = {k: v for k, v in kwargs.items() if k not in signature.static}
        dynamic = [x for i, x in enumerate(args) if i not in self._static]
        if signature.python is None or len(jax.tree.leaves((dynamic, given))) != len(leaves):
            return plan.jitted, leaves, {}

        @functools.wraps(signature.fn)
        def whole(*args: Any, **kwargs: Any) -> Any:
            return wrapped(self(*args, **kwargs))

        donate = signature.donate if plan.mode != "reference" else ()
        return jax.jit(whole, static_argnames=signature.static, donate_argnames=donate), args, kwargs

    # --- one call -----------------------------------------------------------------------------------------

    def _run(self, mode: tuple[str, str], args: Any, kwargs: Any, asked: bool = False) -> Any:
        around = outermost()
        frame = None if around else try_frame()
        if frame is not None:
            return self._inside(mode, frame, _compat.manual_axes(), args, kwargs, asked)
        try:
            return self._outside(mode, args, kwargs, around)
        except Exception as error:
            hint_at(error)
            shorten(error)
            raise

    def _outside(self, mode: tuple[str, str], args: Any, kwargs: Any, around: Any) -> Any:
        """A call that no other kernel makes."""
        plan, leaves = self._prepare(mode, args, kwargs)
        if self.boundary == "error":
            check_boundary(plan, leaves)
        elif self._repeats and plan.simple and not kwargs and len(args) == len(self.signature.params):
            flat, structure = jax.tree.flatten(args)
            if concrete(flat) and around == (mode, ambient_mapping()):
                self._warm[around, structure] = plan
        if concrete(leaves) or not any(isinstance(x, jax.core.Tracer) for x in leaves):
            return plan.outputs.returned(plan.call(arrived(plan, leaves)))
        axes, run = mapped_axes(plan, leaves), lambda leaves: plan.call(arrived(plan, leaves))
        made = divided(run, leaves, axes, plan.sizes) if axes else self._unseen(mode, args, kwargs, plan, leaves)
        out = plan.outputs.returned(run(leaves) if made is None else made)
        check_mapped(plan, leaves, out, strict=self.boundary == "error")
        return out

    def _unseen(self, mode: tuple[str, str], args: Any, kwargs: Any, plan: Plan, leaves: Sequence[Any]) -> Any:
        """The results under a `vmap` inside `jit`, with those axes left to the compiler that may divide what it maps:
        it knows how that lies. None if there are none. If the body names one, what it divides is gathered."""
        if not (axes := unseen_axes(plan, leaves)) or collecting.value:
            return None
        try:
            open_, given = Kernel(replace(self.signature, auto=axes), self.mesh, "move")._prepare(mode, args, kwargs)
            return open_.call(arrived(open_, given))
        except SpmdError:  # if the call is wrong, it says so once more
            out = plan.call(arrived(plan, leaves))
            warn_unseen(plan, axes)
            return out

    def _inside(
        self, mode: tuple[str, str], frame: Any, manual: tuple[str, ...], args: Any, kwargs: Any, asked: bool
    ) -> Any:
        """A call inside another kernel, or inside the user's own `shard_map`."""
        chosen = mode[0] if asked or ambient_mode()[0] != "explicit" else frame.mode
        if chosen != frame.mode and not frame.island:
            rule = (
                f"the body that calls this kernel runs in {frame.mode} mode, so the kernel "
                f"cannot run in {chosen} mode there."
            )
            raise ModeError(rule, call=self.signature.text, advice="with spmd.mode(...) around the outer call")
        mesh = self.mesh if self.mesh is not None else frame.mesh
        plan, leaves = self._prepare((frame.mode, frame.constrain), args, kwargs, mesh=mesh)
        if not frame.explicit or all(a in manual for a in plan.sizes):
            return inlined(plan, leaves)
        return nested(plan, tuple(a for a in plan.sizes if a in manual), leaves)

    def _prepare(self, mode: tuple[str, str], args: Any, kwargs: Any, mesh: Any = None) -> tuple[Plan, list[Any]]:
        signature = self.signature
        values: Any = args if not kwargs and len(args) == len(signature.params) else signature.bind(args, kwargs)
        statics = _NO_STATICS
        if self._static:
            own = self._defaults
            given = tuple(own[i] if values[i] is own[i].value else values[i] for i in self._static)
            statics = Static(given, tuple(map(type, given)))
            values = [v for i, v in enumerate(values) if i not in self._static]
        leaves, structure = jax.tree.flatten(tuple(values))
        fixed: Any = None
        if not concrete(leaves):
            leaves, fixed = self._partition(leaves, structure, tuple(values))
        mesh = mesh_for(self.mesh if mesh is None else mesh, leaves, signature.text)
        mapping = ambient_mapping() if signature.mapping is None else signature.mapping
        key = (mode, mesh, mapping, structure, statics, fixed)
        closed = _closes_over_tracer(signature.fn)
        try:
            plan = None if closed else self._plans.used(key)
        except TypeError as error:
            for name, value in zip(self._arrays, values, strict=True):
                self._matched(name, value)  # what is not hashable may be meant as an array
            return signature.fail(
                "static arguments and the non-array leaves of arguments are hashable.",
                got=[f"{error}"],
                advice="static=(...) only for hashable values; an array is an argument with a layout",
            )
        if plan is None:
            plan = self._plan(mode, mesh, mapping, tuple(values), statics, structure, fixed)
            if not closed:
                self._plans[key] = plan
        return plan, leaves

    def _partition(self, leaves: list[Any], structure: Any, values: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """The leaves that layouts place, and all other leaves as static values in their positions.

        A number is placed where it is an argument or has a layout of its own; the settings of a module are not."""
        numbers = tuple(i for i, x in enumerate(leaves) if is_number(x) and not is_array(x))
        key = (structure, numbers)
        if numbers and key not in self._numbers:
            pairs = [
                pair for name, value in zip(self._arrays, values, strict=True) for pair in self._matched(name, value)
            ]
            self._numbers[key] = frozenset(i for i in numbers if pairs[i][2] is not None)
        placed = self._numbers.get(key, ())
        split = [(is_array(x) or i in placed, i, x) for i, x in enumerate(leaves)]
        fixed = None if all(own for own, *_ in split) else Static(tuple(None if own else x for own, _, x in split))
        return [x for own, _, x in split if own], fixed

    # --- a specialisation ---------------------------------------------------------------------------------

    def _plan(
        self, mode: Any, mesh: Any, mapping: Any, values: tuple[Any, ...], statics: Any, structure: Any, fixed: Any
    ) -> Plan:
        signature = self.signature
        leaves: list[Leaf] = []
        donate: list[int] = []
        positions: list[int] = []
        pairs = [(name, *one) for name, v in zip(self._arrays, values, strict=True) for one in self._matched(name, v)]
        for i, (name, path, _, layout) in enumerate(pairs):
            if layout is None:
                continue
            if name in signature.donate:
                donate.append(len(leaves))
            leaves.append(Leaf(path, self._resolve(layout, signature.arg_mapping.get(name, mapping))))
            positions.append(i)

        def rebuild(dynamic: Sequence[Any]) -> list[Any]:
            whole: list[Any] = [None] * structure.num_leaves if fixed is None else list(fixed.parts[0])
            for i, x in zip(positions, dynamic, strict=True):
                whole[i] = x
            rest = list(jax.tree.unflatten(structure, whole))
            for i, x in zip(self._static, statics.parts[0], strict=True):
                rest.insert(i, x.value if isinstance(x, Default) else x)
            return rest

        resolve = functools.partial(self._resolve, mapping=mapping)
        outputs = Outputs(signature.outputs, resolve)
        if signature.mapping is not None and not signature.shared_mapping:
            self._check_mapping(signature.mapping)
        if signature.auto:
            check_left(signature, mesh, [*(leaf.layout for leaf in leaves), *outputs.declared])
        return Plan(signature, mode[0], mode[1], mesh, mapping, leaves, rebuild, tuple(donate), outputs)

    def _matched(self, name: str, value: Any) -> list[tuple[str, Any, Layout | None]]:
        found, faults = matched(self.signature.layouts[name], value, name)
        if faults:
            chain = isinstance(value, tuple) and any(isinstance(one, tuple) for one in value)  # of optax
            advice = f"of an optimizer's state: spmd.parallel.state_layouts({name}, params, <the layouts of params>)"
            rule = f"{name} does not have the structure of its layouts."
            if isinstance(value, list) and all(map(is_number, jax.tree.leaves(value))):
                self.signature.fail(rule, got=["a list of numbers"], advice=f"numpy.asarray({name}) makes it an array")
            self.signature.fail(rule, got=faults, advice=advice if chain else None)
        return found

    def _resolve(self, layout: Layout, mapping: AxisMapping | None) -> Layout:
        """Axes renamed, bare names placed by the mapping; a name that the mapping lacks is an error."""
        signature = self.signature
        signature.named.update(layout.names, layout.axis_names)
        if signature.axes:
            layout = layout.bind(**{k: v for k, v in signature.axes if k in layout.axis_names})
        missing = () if mapping is None else mapping.lacks(layout)
        if mapping is not None and missing:
            own = signature.mapping is not None or mapping in signature.arg_mapping.values()
            advice = f'"{missing[0]}": None for a whole dimension, or "{missing[0]}/1" in the string'
            signature.fail(
                f"the {'' if own else 'surrounding '}mapping has no rule for {', '.join(missing)}, a bare name of the "
                f"signature{did_you_mean(missing[0], mapping)}{'' if did_you_mean(missing[0], mapping) else '.'}",
                got=[f"mapping: {', '.join(mapping)}"],
                advice=advice if own else f"{advice};\nwith spmd.axis_mapping(None): around a call that it is not for",
            )
        return layout.resolve(mapping)

    def _check_mapping(self, mapping: AxisMapping) -> None:
        """A rule given only to this kernel, and used nowhere in its signature, is a typo."""
        signature = self.signature
        trees = [*signature.layouts.values(), signature.outputs]
        flat = jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, Layout) or callable(x))
        if not all(isinstance(x, Layout) for x in flat):
            return
        used = {n for x in flat for n in x.names}
        unused = [n for n in mapping if n not in used]
        if unused:
            signature.fail(
                f"the mapping has a rule for {', '.join(unused)}, which no layout of the signature uses.",
                advice="leave it out; a mapping shared by several kernels is an spmd.AxisMapping, which may hold more",
            )


def _closes_over_tracer(fn: Any) -> bool:
    """Return whether a closure cell holds a tracer: its trace must not outlive this call."""
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a name not assigned yet
            continue
        if isinstance(content, jax.core.Tracer) or any(
            isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(content)
        ):
            return True
    return False


def kernel(
    pattern: str | Pattern | None = None,
    *misplaced: Never,
    in_layouts: Any = None,
    out_layouts: Any = None,
    mesh: Any = None,
    mapping: Any = None,
    arg_mapping: Mapping[str, Any] | None = None,
    axes: Mapping[str, Any] | None = None,
    static: str | Sequence[str] = (),
    donate: str | Sequence[str] = (),
    auto: str | Sequence[str] = (),
    boundary: Boundary = "move",
    check: Check = "error",
    **sizes: int,
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a per-shard body into a function on whole arrays: `jit(shard_map(body))`, cached.

    The pattern has one layout for each array argument left of the arrow, and those of the results right of it. The body
    sees one device's shards, and only `spmd`'s verbs move anything in it. The names of the signature are bound to their
    global sizes in the body.

    Communication: what the body's strings say, and at the boundary the moves of arguments that lie elsewhere
    (`boundary="error"` forbids these). Backward, if the kernel is differentiated from outside: the transposes of the
    body's collectives, and one all-reduce for each argument that is whole and is used by divided data.

    Args:
      pattern: `"layout, ... -> layout, ..."`. An empty left side means no arguments. `scalar` is a scalar.
      *misplaced: Nothing. The function comes behind, and all else is given by keyword.
      in_layouts: Instead of a pattern, a tuple with one prefix tree of layouts for each array argument, or a dict by
        argument name. A tree may be a string for all leaves below, a dict, a dataclass or class whose
        annotations are layouts, a module, or a function from the argument to one of these. Arrays without
        dimensions need no layout: it is `scalar`. Other leaves of an argument (functions, flags, numbers without a
        layout of their own) are static, and must be hashable.
      out_layouts: The same for the result, or a tuple for several results.
      mesh: A `jax.sharding.Mesh` with Auto or Explicit axes, or an `AbstractMesh` for `trace`. By default it is that of
        the arguments' shardings, or else that of `jax.set_mesh`, or else that of a `with mesh:`.
      mapping: Rules for bare names: an `AxisMapping`, or a dict, of which each rule must be used. By default they are
        those of the surrounding `axis_mapping` at the call. Without a mapping a bare name is whole.
      arg_mapping: Another mapping for single arguments, by name.
      axes: New names of mesh axes for the signature and the whole body: `{"tp": "model"}`, a tuple of names, or None
        for no division. Each must be used.
      static: The names of arguments that are not arrays. Their values are hashable, and part of the cache key.
      donate: The names of arguments whose buffers the results may take over, in a call from Python with arrays. A call
        that is being traced (under `jit`, `grad`, `vmap`) and reference mode keep them: let the outer `jit` donate.
      auto: Mesh axes that are left to the compiler, by name: the kernel is explicit over the others. Its strings do not
        mention them, its body sees arrays whole along them, and arguments stay as they lie along them. They are
        `AxisType.Auto`.
      boundary: "move" brings arguments into their layouts. "error" raises an error instead, if JAX shows where the
        arguments lie. Outside `jit` it always does. Inside, it does on Explicit axes, which are in an array's type.
        On Auto axes nothing is known before the program is compiled; there `explain` lists what is moved.
      check: What becomes of a finding of the checker, which looks at each first trace in explicit mode: "error" raises,
        "warn" warns, and "off" does not look. JAX's own checks of types stay on. The environment variable SPMD_CHECK
        says how much it asks: "types", "quick", which also compares the results of one draw where a body is small,
        "full", or "off".
      **sizes: Sizes of names that no argument's shape gives: `h=8` for `"b (h k)/tp -> ..."`. Each must be used.

    Returns:
      A decorator that gives a `Kernel`.

    Raises:
      LayoutError: If the pattern is malformed or does not fit the parameters or arguments.
      SizeError: If sizes contradict each other or do not divide. The message has all of them.
      MeshError: If there is no mesh, or an axis is unknown.
      ReplicationError: If the body holds different values where a layout says equal, or the reverse.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)
      ... def linear(x, w):
      ...     return spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")
      >>> x, w = jnp.ones((4, 6)), jnp.ones((6, 8))
      >>> linear(x, w).sharding.spec
      P('dp', 'tp')
      >>> bool((linear(x, w) == linear.reference(x, w)).all())
      True

    References:
      https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    if boundary not in ("move", "error"):
        raise PlacementError(not_one_of("boundary", boundary, get_args(Boundary)), call="kernel(...)")
    if check not in ("error", "warn", "off"):
        raise ModeError(not_one_of("check", check, get_args(Check)), call="kernel(...)")
    check_mesh(mesh, "kernel(...)")
    if misplaced:
        given = (pattern, *misplaced)
        text = next((f'"{one}"' for one in given if isinstance(one, str | Pattern)), '"b/dp d -> b/dp d"')
        body = next((one.__name__ for one in given if isinstance(one, types.FunctionType)), "fn")
        rule = "kernel takes its pattern alone, all else by keyword, and the function behind it."
        raise LayoutError(
            rule,
            call="kernel(...)",
            got=[", ".join(map(kind_of, given))],
            advice=f"spmd.kernel({text}, mesh=mesh)({'fn' if body == '<lambda>' else body})",
        )
    if callable(pattern) and not isinstance(pattern, (str, Pattern)):
        raise LayoutError(
            "a kernel needs its pattern before the function.",
            call="kernel(fn)",
            advice='as in @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)',
        )

    rules = {"mapping": mapping, "arg_mapping": arg_mapping, "axes": axes, "sizes": sizes}
    names = {"static": static, "donate": donate, "auto": auto, "check": check}

    def decorate(fn: Callable[P, R]) -> Kernel[P, R]:
        if not callable(fn):
            raise LayoutError(f"a kernel's body is a function, not {kind_of(fn)}.", call=f'kernel("{pattern}")')
        try:
            signature = read(fn, pattern, in_layouts, out_layouts, **rules, **names)
        except LayoutError as error:
            shorten(error)
            raise
        return Kernel(signature, mesh, boundary)

    return decorate
