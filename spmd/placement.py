"""Placement: brings arrays and parameters into layouts, outside kernels, inside `jit` and outside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd import _compat
from spmd._processes.copies import put
from spmd._processes.facts import note_arguments
from spmd._python.named import ByName
from spmd._python.recent import Recent
from spmd._trees.leaves import Static, check_hashable, is_array, is_number, kind_of, unwrapped, wrapped
from spmd._trees.matching import match_prefix
from spmd.comm.planner import move
from spmd.errors import LayoutError, MeshError, ModeError, PlacementError, SizeError, is_int
from spmd.kernels import Kernel, kernel
from spmd.language import AxisMapping, Layout, WrongRank, axes_tuple, bind, check_axes
from spmd.mesh import check_alive, check_arguments_alive, made_whole, mesh_for, named_arguments, outside_trace
from spmd.modes import ambient_mapping, ambient_mode, try_frame
from spmd.ops import _sizes

__all__ = ["Init", "from_function", "from_process_local", "init", "shard"]

T = TypeVar("T")
Words = ParamSpec("Words")
R = TypeVar("R")


def shard(tree: T, layouts: Any, *, mesh: Any = None, mapping: Any = None) -> T:
    """Bring arrays into layouts, inside `jit` and outside alike.

    Outside `jit` the steps of `spmd.plan` move an array that lies on the mesh already, and a `device_put` moves any
    other. The backward pass runs the steps in reverse. Inside `jit`, `shard` is a `with_sharding_constraint` on Auto
    axes and a `reshard` on Explicit ones. In reference mode it keeps everything on one device. Inside a kernel it is an
    error: there `annotate` states a layout, and `split` and `relayout` change it.

    Communication: outside `jit` what `spmd.plan` says, inside `jit` what the compiler makes of it, and none if the
    arrays lie like this already.

    Args:
      tree: An array or a pytree. Leaves that are not arrays stay as they are. A number is placed if it has a layout of
        its own.
      layouts: A prefix tree of layouts: a string for all leaves below, a dict, a class or dataclass whose
        annotations are layouts, the result of `spmd.match_layouts`, or a function from the tree to one of these. Arrays
        without dimensions need no layout: it is `scalar`.
      mesh: The mesh. By default it is that of the arrays' shardings, or else that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`. A bare name that the
        mapping lacks is an error. Without a mapping it is whole.

    Returns:
      The tree, placed.

    Raises:
      LayoutError: If the layouts do not fit the tree, or the mapping lacks a name.
      SizeError: If dimensions do not divide. The message has all of them.
      MeshError: If there is no mesh, or an axis is unknown.
      ModeError: If it is called inside a kernel.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> w = spmd.shard({"w": jnp.ones((4, 8))}, {"w": "d/dp f/tp"}, mesh=mesh)
      >>> w["w"].sharding.spec
      P('dp', 'tp')
    """
    call = "shard(tree, layouts)"
    _check_outside("shard", call)
    leaves, structure = jax.tree.flatten(tree)
    mesh = mesh_for(mesh, leaves, call)
    placed = placements(tree, layouts, mesh, mapping, call)
    one = ambient_mode()[0] == "reference"
    place = lambda x, where: _on_one(x, mesh) if one else _place(x, where)
    pairs = zip(leaves, placed, strict=True)
    return jax.tree.unflatten(
        structure, [x if p is None else place(jnp.asarray(x) if is_number(x) else x, p) for x, p in pairs]
    )


def _check_outside(name: str, call: str) -> None:
    if try_frame() is not None:
        advice = "call it before the kernel, and pass the result"
        if name == "shard":
            advice = (
                'annotate(x, "b/dp d") to state a layout, split(x, "b -> b/dp") to keep a block, '
                'relayout(x, "b/dp d -> b d/dp") to change it'
            )
        rule = f"{name} places whole arrays, and inside a kernel arrays are shards."
        raise ModeError(rule, call=call, advice=advice)


def placements(
    tree: Any, layouts: Any, mesh: Any, mapping: Any, call: str, *, parts: bool = False
) -> list[NamedSharding | None]:
    """A sharding for each leaf, None where it is not an array. `parts`: the leaves are one process's parts, whose
    shapes do not tell the sizes of the whole."""
    rules = ambient_mapping() if mapping is None else AxisMapping.of(mapping)
    if rules is not None:
        rules.check(mesh.axis_names)
    matches = _matched(layouts, tree, call)
    out: list[NamedSharding | None] = []
    faults: list[str] = []
    check_alive(((path, leaf) for path, leaf, _ in matches), call)
    for path, leaf, declared in matches:
        if declared is None:
            out.append(None)
            continue
        layout = resolved(declared, rules, call, path)
        check_axes(layout.axis_names, mesh.shape, call=f'{path}: "{layout.short}"')
        _check_marks(layout, mesh, call, path)
        shape = np.shape(leaf)
        rank = len(shape)
        if layout.has_ellipsis and rank >= len(layout.dims) - 1:
            layout = layout.with_rank(rank)
        wrong = bind([(path, shape, layout)], mesh.shape).faults
        wrong = [one for one in wrong if isinstance(one, WrongRank) or not parts]
        if wrong:
            faults += [f'{path} of shape {shape} as "{layout.short}": {one.told}' for one in wrong]
            continue
        out.append(NamedSharding(mesh, layout.spec))
    if faults:
        raise SizeError("an array does not fit its layout.", call=call, got=faults)
    return out


def _matched(layouts: Any, tree: Any, call: str) -> list[tuple[str, Any, Layout | None]]:
    """Each leaf with its layout, and complaints that name the call."""
    if isinstance(tree, str) and not isinstance(layouts, (str, Layout)):
        advice = call.replace("tree, layouts", f'x, "{tree}", ...')
        raise LayoutError("arrays come first, then their layouts.", call=call, advice=f"as in {advice}")
    return match_prefix(layouts, tree, "tree", call)


def _check_marks(layout: Layout, mesh: Any, call: str, path: str) -> None:
    if (layout.unreduced or layout.reduced) and any(kind is not AxisType.Explicit for kind in mesh.axis_types):
        raise LayoutError(
            "an array outside a kernel is not a partial sum: the marks {U:} and {R:} are for values inside.",
            call=call,
            got=[f'{path}: "{layout.short}"'],
            fix=f'"{Layout.from_dims(layout.dims).short}"',
        )


def resolved(layout: Layout, mapping: AxisMapping | None, call: str, path: str) -> Layout:
    """A layout whose bare names the mapping has placed. The mapping must know each of them."""
    return layout.resolve(None) if mapping is None else mapping.place(layout, call, [f'{path}: "{layout.short}"'])


def _place(x: Any, sharding: NamedSharding) -> Any:
    mesh = sharding.mesh
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if not isinstance(x, jax.core.Tracer) and (isinstance(mesh, Mesh) or outside_trace()):  # inside: a constant
        if not isinstance(mesh, Mesh):
            raise MeshError(
                "an array outside jit is placed on devices, and an abstract mesh has none.",
                call="shard(tree, layouts)",
            )
        if _marked(sharding) or _marked(getattr(x, "sharding", None)):
            return _resummed(x, sharding)
        moved = move(x, sharding)
        return put(x, sharding) if moved is None else moved
    if outside_trace() and isinstance(mesh, Mesh) and (moved := move(x, sharding)) is not None:
        return moved
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {n for n, kind in kinds.items() if kind is AxisType.Explicit}
    if explicit:
        _check_order(sharding.spec, kinds, explicit)
        x = jax.sharding.reshard(x, NamedSharding(mesh, _part(sharding.spec, explicit)))
    ambient = jax.sharding.get_abstract_mesh()
    if len(explicit) == len(kinds) and not (isinstance(mesh, Mesh) and ambient.empty):
        return x
    # without an Auto axis it constrains nothing, and tells the compiler the devices, which a type does not name
    # (jax.set_mesh does; under it JAX takes the constraint for an assertion)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _part(sharding.spec, set(kinds) - explicit)))


def _marked(sharding: Any) -> bool:
    spec = getattr(sharding, "spec", None)
    return spec is not None and bool(spec.unreduced or spec.reduced)


def _resummed(x: Any, sharding: NamedSharding) -> Any:
    """To or from partial sums, of which JAX knows inside jit alone."""
    if getattr(getattr(x, "sharding", None), "mesh", None) != sharding.mesh:
        x = jax.device_put(x, NamedSharding(sharding.mesh, P(*_compat.partitions(sharding.spec))))
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.jit(jax.sharding.reshard, static_argnums=1, out_shardings=sharding)(x, sharding)


def _check_order(spec: P, kinds: dict[str, AxisType], explicit: set[str]) -> None:
    """Inside jit an array's type says its Explicit axes, and Auto axes can only divide what those leave."""
    for entry in _compat.partitions(spec):
        axes = entry if isinstance(entry, tuple) else ()
        sorted_axes = sorted(axes, key=lambda a: a not in explicit)
        if list(axes) != sorted_axes:
            raise PlacementError(
                f"inside jit, JAX cannot divide a dimension over {'/'.join(axes)}: on a mesh of mixed types the "
                "Explicit axes of a dimension stand before the Auto ones.",
                call="shard(tree, layouts)",
                got=["mesh " + ", ".join(f"{name} ({kind})" for name, kind in kinds.items())],
                advice=f"/{'/'.join(sorted_axes)}, or shard outside jit",
            )


def _part(spec: P, axes: set[str]) -> P:
    """The entries of a spec that name only `axes`; `reshard` and constraints each know one type of axis."""
    entries = []
    for entry in _compat.partitions(spec):
        kept = tuple(a for a in axes_tuple(entry) if a in axes)
        entries.append(kept if len(kept) > 1 else kept[0] if kept else None)
    return P(*entries, unreduced=spec.unreduced & axes, reduced=spec.reduced & axes)


def _on_one(x: Any, mesh: Any) -> Any:
    if isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) or not isinstance(mesh, Mesh):
        return x
    return made_whole(x, mesh)


class Init(ByName, Generic[Words, R]):
    """What `init` returns. Call it with the arguments of the function."""

    def __init__(self, fn: Callable[Words, R], layouts: Any, mesh: Any, mapping: Any):
        self._fn = fn
        self._layouts = layouts
        self._given = mesh
        self._mapping = mapping
        self._jitted = Recent(64)
        functools.update_wrapper(self, fn)

        def leaves(*args: Any, **kwargs: Any) -> Any:
            found, structure = jax.tree.flatten(self._whole(args, kwargs))
            still = Static(tuple(None if is_array(x) else x for x in found), structure)
            return [x for x in found if is_array(x)], still

        self._leaves = leaves  # one object, by which JAX knows what it has traced

    def __call__(self, *given: Words.args, **named: Words.kwargs) -> R:
        _check_outside("init", self._text)
        check_arguments_alive(given, named, self._text)
        args, kwargs = wrapped((given, named))
        tree, mesh, shardings = self._where(args, kwargs)
        if ambient_mode()[0] == "reference":
            out = jax.jit(_arrays_only(self._whole, shardings))(*args, **kwargs)
            return _filled(tree, shardings, jax.tree.leaves(out), lambda x, _: _on_one(x, mesh))
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            made = jax.tree.leaves(_arrays_only(self._whole, shardings)(*args, **kwargs))
            return _filled(tree, shardings, made, _place)
        run = self._compiled(tree, mesh, shardings)
        note_arguments(self._text, named_arguments(args, kwargs), mesh)
        # a key that lives on one device of another mesh must not decide where parameters are created
        args, kwargs = jax.tree.map(lambda x: _everywhere(x, mesh), (args, kwargs))
        return _filled(tree, shardings, jax.tree.leaves(run(*args, **kwargs)))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.jit(...).lower` of what a call runs; leaves that are not arrays are None in its results."""
        args, kwargs = wrapped((args, kwargs))
        return self._compiled(*self._where(args, kwargs)).lower(*args, **kwargs)

    def _whole(self, args: Any, kwargs: Any) -> R:
        args, kwargs = unwrapped((args, kwargs))
        fn: Callable[..., R] = self._fn
        return fn(*args, **kwargs)

    def _where(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[NamedSharding | None]]:
        """The tree that is created, with shapes for arrays; the mesh; the sharding of each leaf, None where it is
        not an array."""
        check_hashable((args, kwargs), self._text)
        shapes, still = jax.eval_shape(self._leaves, *args, **kwargs)
        rest, (found, structure) = iter(shapes), still.parts
        tree = jax.tree.unflatten(structure, [next(rest) if x is None else x for x in found])
        mesh = mesh_for(self._given, [], self._text)
        return tree, mesh, placements(tree, self._layouts, mesh, self._mapping, self._text)

    def _compiled(self, tree: Any, mesh: Any, shardings: list[NamedSharding | None]) -> Any:
        if not isinstance(mesh, Mesh):
            raise MeshError(
                "parameters are created on devices, and an abstract mesh has none.",
                call=self._text,
                advice=".abstract(...)",
            )
        key = (mesh, jax.tree.structure(tree), tuple(shardings))
        if key not in self._jitted:
            places = jax.tree.unflatten(key[1], shardings)
            self._jitted[key] = jax.jit(_arrays_only(self._whole, shardings), out_shardings=places)
        return self._jitted[key]

    def abstract(self, *args: Any, **kwargs: Any) -> Any:
        """The parameters as `jax.ShapeDtypeStruct`s with their shardings: nothing is computed or allocated."""
        tree, _, shardings = self._where(*wrapped((args, kwargs)))
        leaves = [x for x, s in zip(jax.tree.leaves(tree), shardings, strict=True) if s is not None]
        return _filled(tree, shardings, leaves, _struct)

    @property
    def _text(self) -> str:
        return f"init({getattr(self._fn, '__name__', 'fn')}, layouts)"


def _arrays_only(fn: Callable[..., Any], shardings: list[NamedSharding | None]) -> Callable[..., Any]:
    """`fn`, with None in its result for each leaf that is not placed."""

    def arrays(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten(fn(args, kwargs))
        kept = [None if s is None else x for x, s in zip(leaves, shardings, strict=True)]
        return jax.tree.unflatten(structure, kept)

    return arrays


def _filled(
    tree: Any, shardings: list[NamedSharding | None], arrays: list[Any], place: Callable[..., Any] = lambda x, _: x
) -> Any:
    """The tree with arrays, brought there by `place`, where there are shardings."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(arrays)
    filled = [x if s is None else place(next(rest), s) for x, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(structure, filled)


def _struct(x: Any, sharding: NamedSharding) -> Any:
    """A shape and where it lies; a number is a scalar."""
    return jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype if is_number(x) else x.dtype, sharding=sharding)


def _everywhere(x: Any, mesh: Mesh) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    return x if x.sharding.device_set == set(mesh.devices.flat) or not x.committed else put(x, NamedSharding(mesh, P()))


def init(fn: Callable[Words, R], layouts: Any, *, mesh: Any = None, mapping: Any = None) -> Init[Words, R]:
    """Create parameters sharded: `init(fn, layouts)(key)`. No device ever holds the whole.

    `fn` is ordinary JAX on whole arrays. It is compiled with the layouts as output shardings. JAX's random numbers are
    a function of a counter, so the values do not depend on the mesh.

    Communication: none for parameters made of random numbers and constants.

    Args:
      fn: A function to a pytree, usually of a key. Leaves of its result that are not arrays (functions, flags,
        numbers without a layout of their own) stay as they are, as in `shard`. An Equinox module is such a tree.
      layouts: A prefix tree of layouts for its result, as in `shard`.
      mesh: The mesh. By default it is that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`.

    Returns:
      A function with the parameters of `fn`. Its `.abstract(...)` gives `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      LayoutError: If the layouts do not fit the tree.
      SizeError: If dimensions do not divide.
      MeshError: If there is no mesh.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> make = spmd.init(lambda key: {"w": jax.random.normal(key, (8, 16))}, {"w": "d/dp f/tp"}, mesh=mesh)
      >>> make(jax.random.key(0))["w"].addressable_shards[0].data.shape
      (4, 4)
      >>> make.abstract(jax.random.key(0))["w"].sharding.spec
      P('dp', 'tp')
    """
    if not callable(fn):
        rule = f"init takes a function that makes the parameters, not {kind_of(fn)}."
        advice = "init(lambda key: ..., layouts)(key); shard(params, layouts) for arrays that exist"
        raise LayoutError(rule, call="init(fn, layouts)", advice=advice)
    return Init(fn, layouts, mesh, mapping)


def from_process_local(tree: T, layouts: Any, *, shape: Any = None, mesh: Any = None, mapping: Any = None) -> T:
    """Make global arrays of the rows that each process has read: `from_process_local(batch, "b/dp s")`.

    Every process gives its own part, in the order of its devices in the mesh. A single process gives the whole.

    Communication: none between devices. Each process sends its own part from the host to its devices. Blocks that
    several processes hold copies of are compared by `cluster.guard`.

    Args:
      tree: A NumPy array or a pytree of them, this process's part.
      layouts: A prefix tree of layouts for the global arrays.
      shape: The shape of the global array, or a tree of shapes. With it each part is checked. Without it JAX takes the
        global shape from the part, and processes whose parts have different sizes do not notice.
      mesh: The mesh. By default it is that of `jax.set_mesh`.
      mapping: Rules for bare names. By default they are those of the surrounding `axis_mapping`.

    Returns:
      The tree of global arrays.

    Raises:
      PlacementError: If an array is already a distributed one.
      SizeError: If dimensions do not divide, or a part is not what this process's devices hold of `shape`.

    Example:
      >>> import numpy as np, spmd
      >>> mesh = spmd.make_mesh(dp=8)
      >>> spmd.from_process_local(np.ones((16, 4)), "b/dp s", mesh=mesh).sharding.spec
      P('dp', None)

    References:
      https://docs.jax.dev/en/latest/multi_process.html
    """
    call = "from_process_local(tree, layouts)"
    _check_outside("from_process_local", call)
    leaves, structure = jax.tree.flatten(tree)
    advice = "as in shard(x, layouts)"
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise PlacementError("data comes from the host: call it outside jit.", call=call, advice=advice)
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves):
        raise PlacementError("an array that spans processes is global already.", call=call, advice=advice)
    mesh = mesh_for(mesh, [], call)
    one = ambient_mode()[0] == "reference"
    if one:
        make = lambda x, _, whole: _on_one(x, mesh)
    else:
        make = lambda x, s, whole: jax.make_array_from_process_local_data(s, np.asarray(x), whole)
    wholes = _wholes(shape, structure, call)
    known = [
        x if whole is None else jax.ShapeDtypeStruct(whole, np.float32) for x, whole in zip(leaves, wholes, strict=True)
    ]
    parts = shape is None and jax.process_count() > 1
    found = placements(jax.tree.unflatten(structure, known), layouts, mesh, mapping, call, parts=parts)
    _check_parts(leaves, found, wholes, call)
    made = [x if s is None else make(x, s, whole) for x, s, whole in zip(leaves, found, wholes, strict=True)]
    return jax.tree.unflatten(structure, made)


def _wholes(shape: Any, structure: Any, call: str) -> list[tuple[int, ...] | None]:
    """The global shape of each leaf; None where it is not given."""
    if shape is None:
        return [None] * structure.num_leaves
    is_shape = lambda x: isinstance(x, tuple | list) and all(is_int(n, 0) for n in x)
    found, given = jax.tree.flatten(shape, is_leaf=is_shape)
    if not all(map(is_shape, found)) or (given != structure and structure.num_leaves != 1):
        rule = "shape is the shape of the global array; of a tree, a tree of shapes like it."
        raise SizeError(rule, call=call, advice='as in shape={"x": (64, 128), "y": (64,)}')
    return [tuple(map(int, one)) for one in found]


def _check_parts(parts: Sequence[Any], shardings: Sequence[Any], wholes: Sequence[Any], call: str) -> None:
    wrong = []
    for x, sharding, whole in zip(parts, shardings, wholes, strict=True):
        if sharding is None or whole is None:
            continue
        if len(whole) != np.ndim(x):
            wrong.append(f"a part of shape {np.shape(x)}, and the global shape {whole}")
            continue
        blocks = sharding.addressable_devices_indices_map(whole).values()
        held = tuple(sum(b - a for a, b in {one[d].indices(n)[:2] for one in blocks}) for d, n in enumerate(whole))
        if np.shape(x) != held:
            wrong.append(f"a part of shape {np.shape(x)}; of {whole} the devices of this process hold {held}")
    if wrong:
        advice = "read the rows of spmd.cluster.my_rows(layout, shape)"
        raise SizeError("a part is not what this process's devices hold.", call=call, got=wrong, advice=advice)


def from_function(fn: Callable[..., Any], layout: str, /, *, mesh: Any = None, **names: Any) -> jax.Array:
    """Create an array sharded, from its positions: `from_function(lambda i, j: jnp.sin(i) * j, "x/a y", x=64, y=48)`.

    `fn` gets the global positions along each dimension, as int32 arrays that broadcast to the block of this device.
    (Along more than 2^31 elements they are int64, which needs `jax_enable_x64`.) It returns the elements. They are the
    same on every mesh, and no device ever holds the whole. This works inside a kernel and outside. Outside, the same
    function is compiled only once, so globals that it reads are read once, as under `jax.jit`.

    Communication: none. (Inside a kernel, what `fn` closes over has a psum over the axes of the layout, backward.)

    Args:
      fn: A function of one array of positions per dimension, element by element.
      layout: The layout of the result. Every dimension has a name or a literal size.
      mesh: The mesh, outside a kernel. By default it is that of `jax.set_mesh`.
      **names: Sizes of names (`x=64`; inside a kernel those of its signature are known), or mesh axes.

    Returns:
      The array. Inside a kernel in explicit mode it is this device's block.

    Raises:
      SizeError: If a size is not known or does not divide, positions do not fit int32, or `fn` gives another shape.
      LayoutError: On a malformed layout.
      MeshError: If there is no mesh, or one is given inside a kernel.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> table = spmd.from_function(lambda i, j: 10 * i + j, "x/a y", x=4, y=3, mesh=mesh)
      >>> print(table)
      [[ 0  1  2]
       [10 11 12]
       [20 21 22]
       [30 31 32]]
      >>> print(table.addressable_shards[1].data)
      [[10 11 12]]
    """
    if try_frame() is not None:
        if mesh is not None:
            rule = "inside a kernel the mesh is the kernel's."
            raise MeshError(rule, call="from_function(fn, layout)", advice="leave out mesh=")
        return _sizes.from_function(fn, layout, **names)
    call = "from_function(fn, layout)"
    if not callable(fn) or not isinstance(layout, (str, Layout)):
        rule = "a function of positions comes first, then the layout, a string."
        raise LayoutError(rule, call=call, advice='as in from_function(lambda i, j: i + j, "x/a y", x=8, y=6)')
    sizes: dict[str, Any] = {key: value for key, value in names.items() if type(value) is int}
    axes = {key: value for key, value in names.items() if key not in sizes}

    where, mapping = mesh_for(mesh, [], call), ambient_mapping()
    rest = (layout, where, mapping, tuple(axes.items()), tuple(sizes.items()))
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    try:  # equal numbers may differ in what they print: 1, 1.0 and True
        run = _kernel_of(fn, *rest, tuple((x, repr(x)) for x in cells)) if outside_trace() else None
    except TypeError:  # what is not hashable may change
        run = None
    return (run or _kernel_of.__wrapped__(fn, *rest))()


@functools.lru_cache(maxsize=256)
def _kernel_of(fn: Any, layout: Any, mesh: Any, mapping: Any, axes: Any, sizes: Any, cells: Any = ()) -> Kernel:
    """A kernel that makes the array of `fn`. The key has all that it depends on, but for globals."""
    del cells

    def from_function() -> Any:  # the name that messages show
        return _sizes.from_function(fn, layout, **dict(axes), **dict(sizes))

    return kernel(f"-> {layout}", mesh=mesh, mapping=mapping, axes=dict(axes) or None, **dict(sizes))(from_function)
