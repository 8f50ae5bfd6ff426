"""A kernel made ready for one mode, one mesh and one structure of arguments: `jit` of the body.

A warm call asks `fits` and runs `jitted`. Everything else here runs while JAX traces.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._jaxprs.facts import Apart, KernelName, Leaf
from spmd._jaxprs.walker import equations
from spmd._processes.facts import note_program
from spmd._trees.leaves import held_dtype, is_array
from spmd.checker import Trial, check_jaxpr, check_names, closed_rows, numbers_asked, tried
from spmd.checker._arbiter import collecting, for_numbers, is_traced
from spmd.checker._arguments import Names, smaller
from spmd.checker._numbers import BLOCKS
from spmd.checker._verdict import apart_text, counted_text
from spmd.comm._marks import mark, tag
from spmd.comm.planner import uneven
from spmd.errors import MeshError, ModeError, ReplicationError, SpmdError, did_you_mean
from spmd.kernels._copies import traced_again
from spmd.kernels._outputs import Outputs, Unequal
from spmd.kernels._signature import Signature, meant_by
from spmd.kernels._translate import Held, carried_axes, derived, translated
from spmd.language import AxisMapping, Layout, Size, bind, check_axes, mesh_text
from spmd.mesh import no_mesh, outside_trace, resized, with_sizes
from spmd.modes import Frame, Mode, ambient_mode, closings, counting, enter_body

_concrete: set[type] = set()  # classes of arrays with values, as they were met


def concrete(leaves: Sequence[Any]) -> bool:
    """Return whether all leaves are arrays with values. It is on the hot path, so it looks only at their classes."""
    if _concrete.issuperset(map(type, leaves)):
        return True
    for x in leaves:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return False
    _concrete.update(map(type, leaves))
    return True


def _places(jaxpr: Any) -> set[Any]:
    """The calls that close axes of which a trace has a note. What nobody uses has none, and does not matter."""
    return {eqn.params.get("place") for eqn in equations(jaxpr)}


class _Closes(Exception):
    """A body has calls at these places that close axes which their strings do not name. It may have been refused."""

    def __init__(self, places: frozenset[Any], refused: Unequal | ReplicationError | None = None) -> None:
        super().__init__()
        self.places, self.refused = places, refused


class _Running(threading.local):
    """The arguments of the call that a thread runs, which its trace does not see."""

    given: Sequence[Any] | None = None


@dataclass(eq=False)
class Plan:
    """One specialisation of a kernel.

    Args:
      signature: What the kernel declares.
      mode: "explicit", "auto" or "reference".
      constrain: What auto mode constrains.
      mesh: The mesh.
      mapping: The kernel's own mapping, else that of the surrounding `axis_mapping`, or None.
      leaves: Path and resolved layout of each array argument.
      rebuild: From the array leaves to the arguments in parameter order.
      donate: Positions of donated leaves.
      outputs: The declared results, resolved.

    Attributes:
      left: The mesh axes that are left to the compiler.
      sizes: The sizes of the others.
    """

    signature: Signature
    mode: str
    constrain: str
    mesh: Any
    mapping: AxisMapping | None
    leaves: Sequence[Leaf]
    rebuild: Any
    donate: tuple[int, ...]
    outputs: Outputs

    def __post_init__(self) -> None:
        mesh, mode = self.mesh, self.mode
        self.paths = [leaf.path for leaf in self.leaves]
        self.layouts = [leaf.layout for leaf in self.leaves]
        self.left = tuple(a for a in self.signature.auto if a in mesh.axis_names)
        self.sizes = {a: n for a, n in mesh.shape.items() if a not in self.left}
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        self.typed_axes = tuple(n for n, kind in kinds.items() if kind is AxisType.Explicit)
        self.free_axes = tuple(n for n in kinds if n not in self.typed_axes)
        self._deviceless = mode != "reference" and not isinstance(mesh, Mesh)
        self._sets_mesh = mode == "auto" and bool(self.typed_axes) and isinstance(mesh, Mesh)
        unmixed = mode == "explicit" or (mode == "auto" and not self.typed_axes)
        self.uneven = mode != "reference" and isinstance(mesh, Mesh) and uneven(self.sizes.values())
        # whether a warm call needs `jitted` alone
        self.simple = unmixed and not (self._deviceless or self.uneven)
        self._check_layouts()
        donated = self.donate if mode != "reference" else ()
        placed = tuple(self.leaves) if mode == "explicit" else ()
        self.name = KernelName(self.signature.name, placed, functools.partial(apart_of, self))
        explicit = self._explicit if self.check == "off" else self._checked
        entry = explicit if mode == "explicit" else self._on_whole_arrays
        self.jitted = self.jit(entry, donate_argnums=donated, out_shardings=self._lie())
        # Under grad a donated buffer may still be needed by the backward pass; under jit donation is the outer one's.
        self._traced = self.jit(self._explicit if mode == "explicit" else entry)
        self._seen: set[Any] = set()
        self._compared: set[Any] = set()  # shapes of arguments for which numbers were asked
        self._running = _Running()
        self._chosen: dict[Any, frozenset[Any]] = {}  # by types of arguments, the gathers that were made invarying
        self._frames: dict[Any, Frame] = {}
        self._counted: dict[str, None] = {}  # the lines that ask how many devices there are, of a body on whole arrays

    def again(self, mesh: Any, mode: str) -> Plan:
        """The same kernel on another mesh and in another mode, to be traced."""
        outputs = Outputs(self.signature.outputs, self.outputs.resolve)
        return Plan(self.signature, mode, self.constrain, mesh, self.mapping, self.leaves, self.rebuild, (), outputs)

    def traced(self, leaves: Sequence[Any]) -> Any:
        """The results, without a check of their layouts."""
        return (self._reference if self.mode == "reference" else self._explicit)(*leaves)

    def jit(self, fn: Any, **how: Any) -> Any:
        """`jax.jit` under the kernel's name, which profiles and HLO show, and by which a jaxpr tells whose body it
        holds."""

        def entry(*args: Any) -> Any:
            return fn(*args)

        entry.__name__ = entry.__qualname__ = self.name
        return jax.jit(entry, **how)

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Return whether all leaves are arrays with values that `jitted` takes as they lie. Every warm call asks it."""
        if not _concrete.issuperset(map(type, leaves)):
            return False
        for x in leaves:
            lies = x.sharding
            elsewhere = lies.mesh is not self.mesh if type(lies) is NamedSharding else x.committed
            if elsewhere or x.is_deleted():
                return False
        return True

    def call(self, leaves: Sequence[Any]) -> Any:
        """Run on arguments that `arrived`."""
        if self._deviceless and outside_trace():
            self.signature.fail(
                "an abstract mesh has no devices to run on.",
                got=[mesh_text(self.sizes)],
                advice=".trace(...), .lower(...) or .reference(...), or a mesh of devices",
                error=MeshError,
            )
        traced = not concrete(leaves) and any(isinstance(x, jax.core.Tracer) for x in leaves)
        if self.mode == "explicit" and traced:
            return self._within(leaves)
        run = self._traced if traced else self.jitted
        self._running.given = None if traced else leaves
        try:
            if self._sets_mesh and outside_trace():
                with jax.set_mesh(self.mesh):  # auto_axes has no other way to learn the devices
                    return run(*leaves)
            return run(*leaves)
        finally:
            self._running.given = None
            if (lines := counting.get()) is not None:
                lines.update(self._counted)

    def _lie(self) -> Any:
        """The shardings of the results, for `jit`. They are given only where JAX would lose them: where a dimension is
        divided over both Explicit and other axes."""
        typed, free = set(self.typed_axes), set(self.free_axes)
        if not typed:
            return None
        both = any(typed & {*d.axes} and free & {*d.axes} for layout in self.outputs.declared for d in layout.dims)
        mixed = both and isinstance(self.mesh, Mesh) and self.mode != "reference"
        return self.outputs.shardings(self.mesh) if mixed else None

    def _within(self, leaves: Sequence[Any]) -> Any:
        """A call that is being traced. Python sees each of these, so the pass needs no second `jit` around the
        first, which JAX would differentiate and lower once more."""
        types = tuple(map(jax.typeof, leaves))
        with self.frame(types).enter():  # what JAX derives from the body, its caches then know
            if types not in self._seen and not collecting.value:
                self._check(self._traced.trace(*leaves).jaxpr, leaves)
                self._seen.add(types)
            with derived(self.signature, self.frame(types)):
                return self._traced(*leaves)

    @property
    def check(self) -> str:
        """What a finding is; the environment may turn the check off for all kernels."""
        return "off" if numbers_asked() == "off" else self.signature.check

    def _check(self, jaxpr: Any, leaves: Sequence[Any]) -> None:
        note_program(self.signature.text, jaxpr, self.mesh)
        check_jaxpr(
            jaxpr,
            mesh_axes=tuple(self.sizes),
            kernel=self.signature.text,
            how=self.check,
            arg_names=self.paths,
            arg_layouts=self.layouts,
            apart=lambda: apart_of(self, leaves),
            ask=lambda **asked: trial_of(self, self._with_numbers(leaves), **asked),
            known=(shapes := tuple((np.shape(x), held_dtype(x)) for x in leaves)) in self._compared,
        )
        self._compared.add(shapes)

    def _with_numbers(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments of the call that is running, if they are those that are traced."""
        given, shapes = self._running.given, lambda some: [np.shape(x) for x in some]
        return given if given is not None and shapes(given) == shapes(leaves) else leaves

    # --- before any trace ---------------------------------------------------------------------------------

    def _check_layouts(self) -> None:
        for mapping in (self.signature.mapping, *self.signature.arg_mapping.values()):
            if mapping is not None:
                mapping.check(self.mesh.axis_names)
        marked = False
        for layout in (*self.layouts, *self.outputs.declared):
            check_axes(layout.axis_names, self.sizes, call=self.signature.text, source=self.signature.source)
            marked |= bool(layout.unreduced or layout.reduced)
            for dim in layout.dims:
                if dim.scattered:
                    self.signature.fail(
                        f'"{layout.short}" divides several factors of one dimension: that is legal '
                        f"inside a kernel, not at its boundary, "
                        "where a device holds one block of each dimension.",
                        advice="two dimensions, and rearrange inside",
                    )
                if dim.margin != (0, 0):
                    self.signature.fail(
                        f'"{layout.short}" has a margin: shards with margins overlap, so no array '
                        f"outside a kernel has them."
                    )
        if marked and any(kind is not AxisType.Explicit for kind in self.mesh.axis_types):
            self.signature.fail(
                "{U:} and {R:} in a kernel's own signature need a mesh whose axes are all "
                "AxisType.Explicit: elsewhere JAX cannot say "
                "that an array outside is a partial sum.",
                got=[
                    "mesh "
                    + ", ".join(f"{n} ({t})" for n, t in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
                ],
                advice="psum before the value leaves the kernel",
                error=ModeError,
            )

    def spec(self, layout: Layout, rank: int) -> P:
        return layout.with_rank(rank).spec

    # --- while tracing ------------------------------------------------------------------------------------

    def frame(self, leaves: Sequence[Any], *, local: bool = False, **changes: Any) -> Frame:
        """The frame of the body, with the sizes that the arguments bind: one for all calls of these shapes.

        Args:
          leaves: The arguments, or anything that has their shapes.
          local: Whether these are shards.
          **changes: What is otherwise than the plan says.
        """
        signature = self.signature
        shapes = tuple([x.shape for x in leaves])
        key = (shapes, local, *changes.items())
        if key not in self._frames:
            known = {name: Size(size, f"the keyword {name}={size}") for name, size in signature.sizes}
            arrays = list(zip(self.paths, shapes, self.layouts, strict=True))
            bound = signature.sized(arrays, self.sizes, local=local, known=known)
            own: dict[str, Any] = {
                "mode": self.mode,
                "mesh": self.mesh,
                "sizes": tuple(self.sizes.items()),
                "constrain": self.constrain,
                "left": self.left,
            }
            watched = frozenset(dict((*signature.sizes, *signature.axes))) - signature.named
            where = {"mapping": self.mapping, "renames": signature.axes, "bound": tuple(bound.items())}
            self._frames[key] = Frame(**own | where | changes, watched=watched)
        return self._frames[key]

    def run(self, frame: Frame, leaves: Sequence[Any], *, local: bool, role: str = "argument") -> list[Any]:
        """Run the body on leaves as they are here. Its results come flat, checked and marked."""

        def held() -> list[Held]:
            pairs = zip(self.leaves, leaves, strict=True)
            return [Held(spec.path, leaf.shape, spec.layout) for spec, leaf in pairs]

        with frame.enter(), translated(self.signature, frame, held):
            tagged = []
            for leaf, spec in zip(leaves, self.leaves, strict=True):
                origin = f"argument {spec.path}"
                if frame.explicit:  # where the body works with it, a reduced value is a copy like any other
                    value = _compat.pvary(leaf, spec.layout.reduced)
                    tagged.append(tag(value, spec.layout, origin, spec.path))
                else:
                    tagged.append(mark(leaf, spec.layout, origin, role=role, frame=frame, name=spec.path))
            out = enter_body(self.signature.call, (self.rebuild(tagged),))
            flat = self.outputs.collect(out, self.signature, frame, local=local)
        if unused := frame.unmet - self.signature.named:
            self._check_keywords(unused)
        return flat

    def _check_keywords(self, unused: frozenset[str]) -> None:
        """A keyword that neither the signature nor the body uses is a typo."""
        layouts = (*self.layouts, *self.outputs.declared)
        for what, given, names in (
            ("the keyword binds the size of", self.signature.sizes, {n for s in layouts for n in s.names}),
            ("axes= renames the mesh axis", self.signature.axes, {a for s in layouts for a in s.axis_names}),
        ):
            for name in (name for name, _ in given if name in unused):
                near = did_you_mean(name, sorted(names))
                rule = f"{what} {name}, which no string of the kernel names{near or '.'}"
                advice = (None if near else meant_by(name)) or "leave it out"
                self.signature.fail(rule, got=[f"{name}={dict(given)[name]!r}"], advice=advice)

    def _checked(self, *leaves: Any) -> Any:
        """`_explicit`, and the pass over its jaxpr, once per trace: a warm call runs neither."""
        inner = self.jit(self._explicit, inline=True)
        self._check(inner.trace(*leaves).jaxpr, leaves)
        return inner(*leaves)

    def _named(self, *leaves: Any) -> Any:
        """The body on whole arrays, after a look at the names of their dimensions, where some have one size."""
        run = self._auto if self.mode == "auto" else self._reference
        numbers = collecting.value and resized.value  # these say what is wrong by themselves
        if not self.frame(leaves).alike or numbers or self.check == "off":
            return run(*leaves)
        inner = self.jit(run, inline=True)
        check_names(inner.trace(*leaves).jaxpr, apart_of(self, leaves), self.check)
        return inner(*leaves)

    def _explicit(self, *leaves: Any) -> Any:
        frame = self.frame(leaves)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            leaves = self._typed(leaves)
            specs = tuple(self.spec(s.layout, x.ndim) for s, x in zip(self.leaves, leaves, strict=True))
            types = tuple(map(jax.typeof, leaves))
            chosen = self._chosen.get(types)
            frame = frame.replace(invarying=chosen) if chosen else frame
            refused: Unequal | ReplicationError | None = None
            outs: Any = None
            with no_mesh():
                try:
                    outs = self.mapped(frame, specs, settled=False)(*leaves)
                except _Closes as error:
                    run, refused = self._settled(frame, specs, leaves, error)
                    outs = run and run(*leaves)
                except (Unequal, ReplicationError) as error:
                    refused = error
            if refused is not None:  # out here, so that an error has no `Unequal` before it
                if not isinstance(refused, Unequal) and not carried_axes(refused):
                    raise refused
                again = traced_again(self, frame, specs, leaves, refused)
                self._chosen[types] = again.places
                with no_mesh():
                    outs = again.run(*leaves)
            return self.outputs.build(outs)

    def _settled(self, frame: Frame, specs: Sequence[P], leaves: Sequence[Any], met: _Closes) -> tuple[Any, Any]:
        """What runs a body with calls that close axes, or why it is refused. Where these divide the rows of a loop,
        they are left open, if the rest allows it: else rows of different devices would be mixed, which is an error.

        A gradient of a loop leaves out the notes that it does not need: where some are missing, the body is traced with
        lasting ones. One that was refused before it ended is traced with all of them open, which is right if all are
        rows."""

        def of(*, settled: bool = True, **changes: Any) -> Any:
            return self.jit(self.mapped(frame.replace(**changes), specs, settled=settled), inline=True)

        if met.refused is not None:
            rows = self._left_open(of, leaves, met.places)
            return (of(rows=rows), None) if rows else (None, met.refused)
        run = strict = of()
        jaxpr = run.trace(*leaves).jaxpr
        if not met.places <= _places(jaxpr):
            strict = of(keeping=True)
            jaxpr = strict.trace(*leaves).jaxpr
        if rows := closed_rows(jaxpr, tuple(self.sizes)):
            run = of(rows=rows)
            try:
                run.trace(*leaves)
            except (Unequal, SpmdError) as error:
                if carried_axes(error):  # which says how the carry starts, and mends the loop
                    raise
                run = strict
        return run, None

    def _left_open(self, of: Any, leaves: Sequence[Any], rows: frozenset[Any]) -> frozenset[Any]:
        """These calls and those that follow them, if all work on rows of a loop, and JAX takes what they leave open."""
        while True:
            try:
                jaxpr = of(rows=rows, keeping=True, settled=False).trace(*leaves).jaxpr
            except _Closes as more:
                if more.places <= rows:
                    return frozenset()
                rows |= more.places
            except (Unequal, SpmdError):
                return frozenset()
            else:
                return rows if closed_rows(jaxpr, tuple(self.sizes)) == rows & _places(jaxpr) else frozenset()

    def mapped(self, frame: Frame, specs: Sequence[P], *, settled: bool = True) -> Any:
        """The body in its `shard_map`. Until what it closes is settled, a call that closes axes ends the trace."""
        out_specs: list[P] = []

        def body(*shards: Any) -> Any:
            token = closings.set(closed := [])
            refused = None
            try:
                out = self.outputs.leaving(self.run(frame, shards, local=True), frame, out_specs)
            except (Unequal, ReplicationError) as error:
                if settled or not closed:
                    raise
                refused = error
            finally:
                closings.reset(token)
            if closed and not settled:
                raise _Closes(frozenset(closed), refused)
            return out

        body.__wrapped__ = self.signature.fn  # so that the jaxpr says where it was written
        return self.shard_map(body, specs, out_specs)

    def shard_map(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        """`jax.shard_map` over the axes that are not left to the compiler."""
        over: dict[str, Any] = {"axis_names": frozenset(self.sizes)} if self.left else {}
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, **over)

    def _typed(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """On Explicit axes the type of an argument says where it lies, and moving it is an operation."""
        if not self.typed_axes:
            return leaves
        pairs = zip(leaves, self.leaves, strict=True)
        return tuple(typed(x, s.layout.without(*self.free_axes), self.mesh) for x, s in pairs)

    def _on_whole_arrays(self, *leaves: Any) -> Any:
        """The body in auto or reference mode. If it counts devices, numbers tell whether it means the same there."""
        token = counting.set(self._counted)
        try:
            out = self._named(*leaves)
        finally:
            counting.reset(token)
        asked = self._counted and self.check != "off" and not collecting.value and counting.get() is None
        if asked and (wrong := apart_text(trial_of(self, self._with_numbers(leaves), gradients=False, modes=True))):
            rule = f"in {self.mode} mode this body computes something else than on devices."
            self.signature.fail(rule, got=[*wrong, counted_text(self._counted)], advice=BLOCKS, error=ModeError)
        return out

    def _auto(self, *leaves: Any) -> Any:
        frame = self.frame(leaves)

        def whole(*arrays: Any) -> Any:
            return self.run(frame, arrays, local=False)

        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            if not self.typed_axes:
                return self.outputs.build(whole(*leaves))
            leaves = self._typed(leaves)
            layouts = self._traced_layouts(frame, leaves)
            specs = [layout.without(*self.free_axes).spec for layout in layouts]
            lies = [NamedSharding(self.mesh, spec) for spec in specs]
            run: Any = jax.sharding.auto_axes(
                lambda *x: whole(*self._anchored(x)), axes=self.typed_axes, out_sharding=lies
            )
            return self.outputs.build(run(*leaves))

    def _anchored(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The same arrays, through a `shard_map` that does nothing. The arguments of an outer `jit` have no devices
        yet, and nothing else tells it those of an Explicit mesh."""
        if not leaves or not isinstance(self.mesh, Mesh):
            return leaves
        names = self.mesh.axis_names
        mesh = Mesh(self.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        if any(s.layout.unreduced or s.layout.reduced for s in self.leaves):  # marks, which Auto axes do not have
            anchor = jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(()))
            return jax.lax.optimization_barrier((*leaves, anchor))[:-1]
        specs = tuple(self.spec(s.layout, x.ndim) for s, x in zip(self.leaves, leaves, strict=True))
        return jax.shard_map(lambda *shards: shards, mesh=mesh, in_specs=specs, out_specs=specs)(*leaves)

    def _traced_layouts(self, frame: Frame, leaves: Sequence[Any]) -> list[Layout]:
        """The results' layouts; `auto_axes` wants them before it traces, so the body is traced for them once."""

        def probe(*arrays: Any) -> Any:
            self.run(frame, arrays, local=False)
            return ()

        jax.eval_shape(jax.sharding.auto_axes(probe, axes=self.typed_axes, out_sharding=()), *leaves)
        return self.outputs.ranked

    def _reference(self, *leaves: Any) -> Any:
        frame = self.frame(leaves)
        meshes = (
            jax.typeof(x).sharding.mesh for x in leaves
        )  # of Explicit types, even if another one surrounds the call
        mesh = next((one for one in meshes if not one.empty), None)
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
            return self.outputs.build(self.run(frame, [_gathered(x) for x in leaves], local=False))


def typed(x: Any, layout: Layout, mesh: Any) -> Any:
    """A traced argument with the type that its layout has on the Explicit axes of a mesh."""
    spec = layout.with_rank(x.ndim).spec
    known = getattr(jax.typeof(x).sharding, "spec", None)
    return x if known == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _gathered(x: Any) -> Any:
    """An array whose type says that it is divided (on Explicit axes), made whole: plain JAX may then do anything."""
    known = jax.typeof(x).sharding
    return jax.sharding.reshard(x, NamedSharding(known.mesh, P())) if any(known.spec) else x


# --- names -------------------------------------------------------------------------------------------------------


def apart_of(plan: Plan, leaves: Sequence[Any]) -> Apart:
    """What tells the names of a kernel apart that have one size: the body is traced where one of two is larger, and
    then where the other is. A size that a keyword says stays.

    Args:
      plan: The kernel.
      leaves: Its arguments, or what has their shapes.
    """
    how: Mode = "explicit" if plan.mode == "explicit" else "reference"
    types = [getattr(x, "aval", x) for x in leaves[len(leaves) - len(plan.leaves) :]]  # behind what a body closes over
    frame, structs = plan.frame(types), [jax.ShapeDtypeStruct(x.shape, held_dtype(x)) for x in types]

    @functools.cache
    def raised(one: str, other: str) -> Sequence[Exception | None]:
        names = names_in(plan, structs, [plan.mesh])
        found: list[Exception | None] = []
        for name in sorted({one, other} - dict(plan.signature.sizes).keys()):
            size, taken = frame.known[name].size, {known.size for known in frame.known.values()}
            larger = next(n for n in itertools.count(2 * size, size) if n not in taken)
            again, given = plan.again(with_sizes(plan.mesh, {}), how), names.resized(structs, {(name, size): larger})
            try:
                with for_numbers(plan.sizes, how):
                    jax.eval_shape(lambda *arrays, again=again: again.traced(arrays), *given)
                found.append(None)
            except Exception as error:  # of the body, which may raise anything
                found.append(error)
        return found

    return Apart(plan.signature.text, plan.leaves, frame.bound, frame.alike, raised)


# --- trial -------------------------------------------------------------------------------------------------------

# A kernel before the arbiter: what its numbers say, at its own sizes or at small ones.


def names_in(
    plan: Any, leaves: Sequence[Any], meshes: Sequence[Any], fixed: Callable[[Any], bool] = lambda _: False
) -> Names:
    """The names of a kernel's arguments, for other meshes. Those of arguments that are `fixed`, and those whose sizes
    the kernel says itself, keep their sizes.

    Raises:
      ValueError: If the arguments do not fit the signature.
    """
    known = {name: Size(size, "") for name, size in plan.signature.sizes}
    arrays = [(one.path, np.shape(x), one.layout) for one, x in zip(plan.leaves, leaves, strict=True)]
    bound = bind(arrays, plan.sizes, known=known)
    if bound.faults:
        raise ValueError(f"{bound.faults[0].where} does not fit")
    sizes = {name: one.size for name, one in bound.sizes.items()}
    kept = [dims for x, dims in zip(leaves, bound.dims, strict=True) if fixed(x)]
    names = Names(
        [mesh.shape for mesh in meshes], {*known, *(n for dims in kept for dim, _ in dims for n in dim.names)}
    )
    for at, dims in enumerate(bound.dims):
        names.add(at, dims, sizes)
    names.divide((dim for layout in plan.outputs.declared for dim in layout.dims), sizes)
    return names


_DEVICES = 64  # that are taken as they are
_SMALL = 2**14  # numbers in arguments that are taken as they are


def trial_of(plan: Any, leaves: Sequence[Any], **asked: Any) -> Trial:
    """Return what the numbers of a kernel say: forward and backward, on its mesh and where nothing is divided.

    An axis with one device has two here, because a program is right on all meshes or on none; and one of a large mesh
    has four.

    Args:
      plan: The kernel.
      leaves: Its arguments, or what has their shapes.
      **asked: What `tried` is asked.
    """
    leaves = [x if is_array(x) else np.asarray(x, jax.dtypes.canonicalize_dtype(type(x))) for x in leaves]
    most = 4 if math.prod(plan.sizes.values()) > _DEVICES else math.inf
    small = {axis: int(min(max(n, 2), most)) for axis, n in plan.sizes.items()}
    mesh = with_sizes(plan.mesh, {**small, **dict.fromkeys(plan.left, 1)})

    def run(*arrays: Any) -> Any:
        other = plan.again(with_sizes(mesh, dict(resized.value)), ambient_mode()[0])
        return other.outputs.returned(other.traced(arrays))

    found = Trial(dict(mesh.shape), why="its arguments do not fit the mesh")
    for arrays in _candidates(plan, leaves, mesh, run):
        found = tried(run, arrays, mesh, dict(mesh.shape), written=dict(plan.mesh.shape), **asked)
        if found.agrees_as_given or not found.why:
            break
    return found


def _candidates(plan: Any, leaves: Sequence[Any], mesh: Any, run: Callable[..., Any]) -> Iterator[list[Any]]:
    """The arguments as they are, if they are small, and with the smallest sizes of all names, or of some."""
    same = {**mesh.shape, **plan.sizes} == dict(mesh.shape)
    small = sum(math.prod(np.shape(x)) for x in leaves) <= _SMALL
    if same and small:
        yield list(leaves)
    with contextlib.suppress(ValueError):  # the trace says what does not fit
        names = names_in(plan, leaves, [mesh])
        yield names.resized(leaves, names.smallest())
        yield smaller(names, leaves, lambda given: is_traced(run, given, mesh, dict(mesh.shape)))[0]
    if same and not small:
        yield [jax.ShapeDtypeStruct(np.shape(x), held_dtype(x)) for x in leaves]
