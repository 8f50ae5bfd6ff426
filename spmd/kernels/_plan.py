"""A kernel made ready for one mode, one mesh and one structure of arguments: `jit` of the body.

Everything here runs while JAX traces; a warm call runs none of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._facts import KernelName, Leaf
from spmd.checker import check_body, check_jaxpr, in_states_of
from spmd.comm._marks import mark, same_axes, tag, tag_of
from spmd.comm.planner import move, uneven
from spmd.errors import LayoutError, MeshError, ModeError, SpmdError, did_you_mean
from spmd.kernels._outputs import Outputs, diagnose
from spmd.kernels._signature import Signature
from spmd.kernels._sizes import bind_sizes
from spmd.kernels._translate import translated
from spmd.language import AxisMapping, Layout, Size
from spmd.mesh import abstract_of, check_alive, check_axes, lies_whole, made_whole, mesh_sizes, no_mesh, outside_trace
from spmd.modes import Frame, inside_kernel, no_frame, try_frame

__all__ = ["Plan", "concrete"]


_concrete: set[type] = set()  # classes of arrays with values, as they were met


def concrete(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are arrays with values; on the way of every warm call, hence by class."""
    if _concrete.issuperset(map(type, leaves)):
        return True
    if not all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in leaves):
        return False
    _concrete.update(map(type, leaves))
    return True


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
    """

    def __init__(
        self,
        signature: Signature,
        mode: str,
        constrain: str,
        mesh: Any,
        mapping: AxisMapping | None,
        leaves: Sequence[Leaf],
        rebuild: Any,
        donate: tuple[int, ...],
        outputs: Outputs,
    ):
        self.signature = signature
        self.mode = mode
        self.constrain = constrain
        self.mesh = mesh
        self.mapping = mapping
        self.leaves = tuple(leaves)
        self.rebuild = rebuild
        self.outputs = outputs
        self.sizes = dict(mesh_sizes(mesh))
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        self.typed_axes = tuple(n for n, kind in kinds.items() if kind is AxisType.Explicit)
        self.free_axes = tuple(n for n in kinds if n not in self.typed_axes)
        self._deviceless = mode != "reference" and not isinstance(mesh, Mesh)
        self._sets_mesh = mode == "auto" and bool(self.typed_axes) and isinstance(mesh, Mesh)
        self.simple = mode == "explicit" or (mode == "auto" and not self.typed_axes)
        self.simple &= not self._deviceless
        self._uneven = mode != "reference" and isinstance(mesh, Mesh) and uneven(self.sizes.values())
        self._check_layouts()
        donated = donate if mode != "reference" else ()
        self.name = KernelName(signature.name, self.leaves if mode == "explicit" else ())
        entry = {"explicit": self._checked, "auto": self._auto, "reference": self._reference}[mode]
        self.jitted = jax.jit(_named(entry, self.name), donate_argnums=donated, out_shardings=self._lie())
        # Under grad a donated buffer may still be needed by the backward pass; under jit donation is the outer one's.
        self._traced = jax.jit(_named(self._explicit if mode == "explicit" else entry, self.name))
        self._seen: set[Any] = set()

    def call(self, leaves: Sequence[Any], *, warm: bool = False) -> Any:
        """Run; what lives on other devices or on another mesh is moved first. `warm`: leaves are arrays with values,
        and the plan is `simple`."""
        for x in leaves if _compat.DELETED_ARRAYS_CRASH else ():
            if x.is_deleted() if warm else _compat.deleted(x):
                self._check_alive(leaves)
        if self._uneven:
            leaves = [self._brought(x, s.layout) for x, s in zip(leaves, self.leaves, strict=True)]
        try:
            leaves = self._moved(leaves) if self.mode == "reference" else leaves
            return self.outputs.returned(self.jitted(*leaves) if warm else self._call(leaves))
        except SpmdError:
            raise
        except Exception:  # of many kinds, since arrays on another mesh may have types of that mesh
            self._check_alive(leaves)
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                self.signature.fail(
                    "a jax.ShapeDtypeStruct has no values to run on.", advice=".trace(...) or .lower(...)"
                )
            moved = self._moved(leaves)
            if all(a is b for a, b in zip(moved, leaves, strict=True)):
                raise
        return self.outputs.returned(self._call(moved))

    def _check_alive(self, leaves: Sequence[Any]) -> None:
        named = ((spec.path, x) for spec, x in zip(self.leaves, leaves, strict=True))
        check_alive(named, self.signature.text)

    def _moved(self, leaves: Sequence[Any]) -> list[Any]:
        return [self.place(x, s.layout) if self.foreign(x) else x for x, s in zip(leaves, self.leaves, strict=True)]

    def _brought(self, leaf: Any, layout: Layout) -> Any:
        """An argument that lies otherwise on this mesh, moved by the planned steps: the compiler may not survive it."""
        held = getattr(_compat.concrete(leaf), "sharding", None)
        ranked = any(d.ellipsis for d in layout.dims) or len(layout.dims) == leaf.ndim
        if not (isinstance(held, NamedSharding) and held.mesh == self.mesh and ranked):
            return leaf
        wanted = NamedSharding(self.mesh, self.spec(layout, leaf.ndim))
        parts = [math.prod(self.sizes[a] for a in ((e,) if isinstance(e, str) else e or ())) for e in wanted.spec]
        fits = all(n % k == 0 for n, k in zip(leaf.shape, parts, strict=False))
        moved = move(leaf, wanted) if fits and not held.is_equivalent_to(wanted, leaf.ndim) else None
        return leaf if moved is None else moved

    def _call(self, leaves: Sequence[Any]) -> Any:
        if self._deviceless and outside_trace():
            self.signature.fail(
                "an abstract mesh has no devices to run on.",
                got=[self.frame({}).describe()],
                advice=".trace(...), .lower(...) or .reference(...), or a mesh of devices",
                error=MeshError,
            )
        traced = not concrete(leaves) and any(isinstance(x, jax.core.Tracer) for x in leaves)
        if self.mode == "explicit" and traced:
            return self._within(leaves)
        run = self._traced if traced else self.jitted
        with self._around():
            return run(*leaves)

    def _around(self) -> contextlib.AbstractContextManager[Any]:
        """The context mesh of a call outside any trace, where it must be another than the caller's."""
        # auto_axes has no other way to learn the devices
        return jax.set_mesh(self.mesh) if self._sets_mesh and outside_trace() else contextlib.nullcontext()

    def _lie(self) -> Any:
        """Where results lie, for `jit`: said where JAX would lose it, of a dimension that is divided over axes both
        Explicit and not."""
        typed, free = set(self.typed_axes), set(self.free_axes)
        both = any(typed & {*d.axes} and free & {*d.axes} for layout in self.outputs.declared() for d in layout.dims)
        mixed = both and isinstance(self.mesh, Mesh) and self.mode != "reference"
        return self.outputs.shardings(self.mesh) if mixed else None

    def _within(self, leaves: Sequence[Any]) -> Any:
        """A call that is being traced. Python sees each of these, so the pass needs no second `jit` around the
        first, which JAX would differentiate and lower once more."""
        types = tuple(map(jax.typeof, leaves))
        if types not in self._seen:
            self._check(self._traced.trace(*leaves).jaxpr)
            self._seen.add(types)
        return self._traced(*leaves)

    def _check(self, jaxpr: Any) -> None:
        check_jaxpr(jaxpr, mesh_axes=tuple(self.sizes), kernel=self.signature.text, **self.arguments())

    def arguments(self) -> dict[str, Any]:
        """What the pass is told of the arguments: how messages call them, and their layouts."""
        return {"arg_names": [x.path for x in self.leaves], "arg_layouts": [x.layout for x in self.leaves]}

    # --- before any trace ---------------------------------------------------------------------------------

    def _check_layouts(self) -> None:
        for mapping in (self.signature.mapping, *self.signature.arg_mapping.values()):
            if mapping is not None:
                mapping.check(self.mesh.axis_names)
        marked = False
        for layout in (*(leaf.layout for leaf in self.leaves), *self.outputs.declared()):
            check_axes(layout.axis_names, self.mesh, call=self.signature.text, source=self.signature.source)
            marked |= bool(layout.unreduced or layout.reduced)
            if any(sum(bool(a.axes) for a in d.atoms) > 1 for d in layout.dims):
                self.signature.fail(
                    f'"{layout.short}" divides several factors of one dimension: that is legal '
                    f"inside a kernel, not at its boundary, "
                    "where a device holds one block of each dimension.",
                    advice="two dimensions, and rearrange inside",
                )
            if any(d.margin != (0, 0) for d in layout.dims):
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

    def place(self, leaf: Any, layout: Layout) -> Any:
        """An argument that lives on other devices, or on another mesh, moved into its layout."""
        if self.mode == "reference":
            return made_whole(leaf, self.mesh)
        return jax.device_put(leaf, NamedSharding(self.mesh, self.spec(layout, leaf.ndim)))

    def foreign(self, leaf: Any) -> bool:
        """Whether a concrete array lives where this plan cannot use it in place."""
        if self.mode == "reference":
            return not lies_whole(leaf, self.mesh)
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not isinstance(self.mesh, Mesh):
            return False
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            return sharding.mesh != self.mesh
        return sharding.device_set != set(self.mesh.devices.flat)

    # --- while tracing ------------------------------------------------------------------------------------

    def bind(self, leaves: Sequence[Any], *, local: bool) -> dict[str, Size]:
        shapes = [(s.path, x.shape, s.layout) for s, x in zip(self.leaves, leaves, strict=True)]
        known = {name: Size(size, f"the keyword {name}={size}") for name, size in self.signature.sizes}
        source = self.signature.source if self.signature.written else None
        return bind_sizes(self.signature.text, source, shapes, self.sizes, local=local, known=known)

    def frame(self, bound: dict[str, Size], mode: str | None = None) -> Frame:
        return Frame(
            mode or self.mode,
            self.mesh,
            tuple(self.sizes.items()),
            self.mapping,
            self.signature.axes,
            tuple((name, size, origin) for name, (size, origin) in bound.items()),
            self.constrain,
            watched=frozenset(name for name, _ in (*self.signature.sizes, *self.signature.axes)) - self.signature.named,
        )

    def run(self, frame: Frame, leaves: Sequence[Any], *, local: bool, role: str = "argument") -> list[Any]:
        """The body on leaves as they are here; its results flat, checked and marked."""
        with frame.enter(), translated(self.signature, frame):
            tagged = []
            for leaf, spec in zip(leaves, self.leaves, strict=True):
                origin = f"argument {spec.path}"
                if frame.explicit:  # where the body works with it, a reduced value is a copy like any other
                    value = _compat.pvary(leaf, spec.layout.reduced)
                    tagged.append(tag(value, spec.layout, origin, spec.path))
                else:
                    tagged.append(mark(leaf, spec.layout, origin, role=role, frame=frame, name=spec.path))
            out = self.signature.call(self.rebuild(tagged))
            flat = self.outputs.collect(out, self.signature, frame, local=local)
        self._check_keywords(frame.unmet - self.signature.named)
        return flat

    def _check_keywords(self, unused: frozenset[str]) -> None:
        """A keyword that neither the signature nor the body means is a typo."""
        for what, given, names in (
            ("the keyword binds the size of", self.signature.sizes, {n for s in self._layouts() for n in s.names}),
            ("axes= renames the mesh axis", self.signature.axes, {a for s in self._layouts() for a in s.axis_names}),
        ):
            for name in (name for name, _ in given if name in unused):
                rule = f"{what} {name}, which no string of the kernel names{did_you_mean(name, sorted(names)) or '.'}"
                self.signature.fail(rule, got=[f"{name}={dict(given)[name]!r}"], advice="leave it out")

    def _layouts(self) -> list[Layout]:
        return [*(leaf.layout for leaf in self.leaves), *self.outputs.declared()]

    def _checked(self, *leaves: Any) -> Any:
        """`_explicit`, and the pass over its jaxpr, once per trace: a warm call runs neither."""
        inner = jax.jit(_named(self._explicit, self.name), inline=True)
        self._check(inner.trace(*leaves).jaxpr)
        return inner(*leaves)

    def _explicit(self, *leaves: Any) -> Any:
        frame = self.frame(self.bind(leaves, local=False))
        with _mesh_context(self.mesh):
            leaves = tuple(self._reshard(x, s.layout) for x, s in zip(leaves, self.leaves, strict=True))
            specs = tuple(self.spec(s.layout, x.ndim) for s, x in zip(self.leaves, leaves, strict=True))

            out_specs: list[P] = []

            def body(*shards: Any) -> Any:
                return self._leaving(self.run(frame, shards, local=True), frame, out_specs)

            body.__wrapped__ = self.signature.fn  # so that the jaxpr says where it was written
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs)
            try:
                with no_mesh():
                    outs = mapped(*leaves)
                return self.outputs.build(outs)
            except self.outputs.Unequal as unequal:
                raise diagnose(self, frame, specs, leaves, unequal) from None

    def _leaving(self, flat: Sequence[Any], frame: Frame, specs: list[P], without: tuple[str, ...] = ()) -> list[Any]:
        """The results of a `shard_map`'s body, whose specs are put into the list that it was given as `out_specs`: JAX
        reads that list after the body has run, so one trace is enough to learn how many results there are, and of what
        rank."""
        self.outputs.check_types(flat, frame)
        specs[:] = self.outputs.specs(without)
        return self.outputs.leaving(flat, without)

    def _reshard(self, x: Any, layout: Layout) -> Any:
        """On Explicit axes the type of an argument says where it lies, and moving it is an operation."""
        return _typed(x, layout.without(*self.free_axes), self.mesh) if self.typed_axes else x

    def _auto(self, *leaves: Any) -> Any:
        frame = self.frame(self.bind(leaves, local=False))

        def whole(*arrays: Any) -> Any:
            return self.run(frame, arrays, local=False)

        with _mesh_context(self.mesh):
            if not self.typed_axes:
                return self.outputs.build(whole(*leaves))
            leaves = tuple(self._reshard(x, s.layout) for x, s in zip(leaves, self.leaves, strict=True))
            layouts = self._traced_layouts(frame, leaves)
            specs = [layout.without(*self.free_axes).spec for layout in layouts]
            lies = [NamedSharding(self.mesh, spec) for spec in specs]
            run: Any = jax.sharding.auto_axes(
                lambda *x: whole(*self._anchored(x)), axes=self.typed_axes, out_sharding=lies
            )
            return self.outputs.build(run(*leaves))

    def _anchored(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The same arrays through a `shard_map` that does nothing: it alone tells a `jit` around us, whose arguments
        lie nowhere yet, on which devices an Explicit mesh is."""
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
        return self.outputs.ranked()

    def _reference(self, *leaves: Any) -> Any:
        frame = self.frame(self.bind(leaves, local=False))
        with _context_of(leaves):
            return self.outputs.build(self.run(frame, [_gathered(x) for x in leaves], local=False))

    # --- inside other axes --------------------------------------------------------------------------------

    def inline(self, leaves: Sequence[Any]) -> Any:
        """The body where all of the kernel's axes are manual already: arguments are shards, nothing moves."""
        outer = try_frame()
        if outer is None:
            raise ModeError("a kernel is inlined only where its axes are manual")
        here = dict(outer.sizes)
        if any(here.get(a) != n for a, n in self.sizes.items()):
            self.signature.fail(
                "this kernel runs inside another one (or inside your shard_map), on another mesh.",
                got=[outer.describe(), self.frame({}).describe()],
                error=MeshError,
            )
        self._check_tags(leaves)
        explicit = outer.explicit
        frame = self.frame(self.bind(leaves, local=explicit), outer.mode).replace(
            mesh=outer.mesh, sizes=outer.sizes, constrain=outer.constrain, island=outer.island
        )

        if explicit and not inside_kernel():
            out = self._inlined(frame, leaves)
        else:
            out = self.run(frame, leaves, local=explicit, role="operand")
        return self.outputs.returned(self.outputs.build(out))

    def _inlined(self, frame: Frame, shards: Sequence[Any]) -> Any:
        """The flat results of the body on the shards of somebody else's `shard_map`, after the pass."""

        def body(*shards: Any) -> Any:
            return self.run(frame, shards, local=True, role="operand")

        with no_frame():
            inner = jax.jit(_named(body, self.name), inline=True)
            check_body(
                inner.trace(*shards).jaxpr,
                in_states_of(shards),
                mesh_axes=frame.axis_names,
                kernel=self.signature.text,
                axis_sizes=dict(frame.sizes),
            )
            return inner(*shards)

    def _check_tags(self, leaves: Sequence[Any]) -> None:
        wrong = []
        for leaf, spec in zip(leaves, self.leaves, strict=True):
            known = tag_of(leaf)
            if known is not None and same_axes(known[0], spec.layout) is False:
                wrong.append(f'{spec.path} holds "{known[0].short}" ({known[1]}); wanted "{spec.layout.short}"')
        if wrong:
            self.signature.fail(
                "inside a kernel the arguments of another kernel are shards as they are: nothing is moved.",
                got=wrong,
                advice="all_gather, split or relayout before the call",
                error=LayoutError,
            )

    def nested(self, manual: Sequence[str], leaves: Sequence[Any]) -> Any:
        """The body where only some of its axes are manual: a `shard_map` over the rest."""
        here = jax.sharding.get_abstract_mesh()
        rest = tuple(a for a in self.sizes if a not in manual)
        missing = [a for a, n in self.sizes.items() if here.shape.get(a) != n]
        if missing:
            self.signature.fail(
                f"the surrounding shard_map's mesh lacks the kernel's axis {', '.join(missing)}, or "
                f"has another size there.",
                got=[
                    "mesh " + ", ".join(f"{a}={n}" for a, n in here.shape.items()),
                    self.frame({}).describe(),
                ],
                error=MeshError,
            )
        frame = self.frame(
            self.bind(
                [_grown(x, s.layout, manual, self.sizes) for x, s in zip(leaves, self.leaves, strict=True)],
                local=False,
            )
        )
        specs = tuple(self.spec(s.layout.without(*manual), x.ndim) for s, x in zip(self.leaves, leaves, strict=True))
        kinds = dict(zip(here.axis_names, here.axis_types, strict=True))
        typed = {a for a in rest if kinds[a] is AxisType.Explicit}
        if typed:
            free = [a for a in self.sizes if a not in typed]
            leaves = [_typed(x, s.layout.without(*free), here) for x, s in zip(leaves, self.leaves, strict=True)]

        out_specs: list[P] = []

        def body(*shards: Any) -> Any:
            return self._leaving(self._inlined(frame, shards), frame, out_specs, without=tuple(manual))

        mapped = jax.shard_map(
            body,
            mesh=here,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=frozenset(rest),
        )
        try:
            return self.outputs.returned(self.outputs.build(mapped(*leaves)))
        except self.outputs.Unequal as unequal:
            raise self.outputs.explained(unequal, self.signature, frame) from None


def _typed(x: Any, layout: Layout, mesh: Any) -> Any:
    spec = layout.with_rank(x.ndim).spec
    known = getattr(jax.typeof(x).sharding, "spec", None)
    return x if known == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _context_of(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mesh that arrays of Explicit types are typed with, whatever mesh surrounds the call."""
    meshes = (jax.typeof(x).sharding.mesh for x in leaves)
    mesh = next((m for m in meshes if not m.empty), None)
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def _gathered(x: Any) -> Any:
    """An array whose type says that it is divided (on Explicit axes), made whole: plain JAX may then do anything."""
    known = jax.typeof(x).sharding
    return jax.sharding.reshard(x, NamedSharding(known.mesh, P())) if any(known.spec) else x


def _grown(x: Any, layout: Layout, manual: Sequence[str], sizes: dict[str, int]) -> Any:
    """The shape that a shard over `manual` has when those axes are put together again."""
    only = layout.without(*(a for a in layout.axes if a not in manual))
    return jax.ShapeDtypeStruct(only.with_rank(x.ndim).global_shape(x.shape, sizes), x.dtype)


def _named(fn: Any, name: KernelName) -> Any:
    """`fn` under the kernel's own name, which profiles and HLO show, and by which a jaxpr tells whose body it holds."""

    def entry(*args: Any) -> Any:
        return fn(*args)

    entry.__name__ = entry.__qualname__ = name
    return entry


@contextlib.contextmanager
def _mesh_context(mesh: Any) -> Iterator[None]:
    with jax.sharding.use_abstract_mesh(abstract_of(mesh)):
        yield
