"""What is looked at: anything callable with its arguments, traced once, and compiled once if at all."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from spmd import _compat
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.walker import equations, opened
from spmd._trees.leaves import is_array, is_number
from spmd.comm.plans import plan
from spmd.errors import MeshError, SpmdError
from spmd.kernels import Kernel
from spmd.language import Layout, axes_product, axes_tuple, mesh_text
from spmd.mesh import ambient_mesh, outside_trace


@dataclass
class Program:
    """A program with its arguments.

    Attributes:
      name: The function's name.
      jaxpr: The closed jaxpr, traced once; None of a program that came lowered or compiled.
      mesh: The first mesh that the program names, a Mesh rather than an AbstractMesh if it has both. None if it has
        none, or if none is known before it is compiled.
      arguments: The leaves of its arguments, as given.
      donated: Which inputs of the jaxpr are donated; empty where that is not known.
      called: The jaxpr of a caller, if the function is jitted: only there a jaxpr says where `in_shardings` want
        arguments. Else `jaxpr`.
    """

    name: str
    jaxpr: Any
    mesh: Any
    arguments: tuple[Any, ...]
    _compile: Callable[[], Any] = field(repr=False)
    donated: tuple[bool, ...] = ()
    _call: Callable[[], Any] | None = field(default=None, repr=False)

    @functools.cached_property
    def called(self) -> Any:
        return self.jaxpr if self._call is None else self._call()

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled program. It is compiled when it is first asked for."""
        compiled = self._compile()
        if self.mesh is None:
            shardings = [getattr(compiled, name, None) for name in ("output_shardings", "input_shardings")]
            self.mesh = _first(getattr(sharding, "mesh", None) for sharding in jax.tree.leaves(shardings))
        return compiled

    @property
    def has_devices(self) -> bool:
        """Return whether it can be compiled: an abstract mesh has names and sizes only."""
        return not isinstance(self.mesh, AbstractMesh)


def stage(verb: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any = None) -> Program:
    """Trace `fn`, or accept what is traced, lowered or compiled already.

    Args:
      verb: The function that asks, for messages.
      fn: A kernel, a function, or what `.trace`, `.lower` or `.compile` returned.
      args: Its arguments; leaves of plain functions that are not arrays are constants.
      kwargs: Its keyword arguments.
      mesh: A mesh for kernels that have none and take it from their surroundings.

    Raises:
      SpmdError: `fn` is none of these, or has its arguments already.
    """
    staged = hasattr(fn, "as_text") or (hasattr(fn, "jaxpr") and hasattr(fn, "lower"))
    if staged and (args or kwargs):
        rule = "a traced, lowered or compiled program has its arguments already: pass it alone."
        raise SpmdError(rule, call=f"{verb}({type(fn).__name__}, ...)", advice=f"{verb}(program)")
    if not staged and not callable(fn):
        rule = f"{verb} takes a kernel, a function, or a traced, lowered or compiled program."
        advice = f"{verb}(fn, x) with the function itself, not what it returns"
        raise SpmdError(rule, call=f"{verb}(...)", got=[type(fn).__name__], advice=advice)
    with under(mesh):
        traced = fn if staged else _traceable(fn, args, kwargs)
        jaxpr = getattr(traced, "jaxpr", None)
    leaves = tuple(jax.tree.leaves((args, kwargs)))
    held = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves)
    meshes = (mesh, getattr(fn, "mesh", None), *meshes_of_jaxpr(jaxpr), *held)
    name = getattr(fn, "fun_name", "") if staged else _name(fn)
    donated = (bool(getattr(one, "donated", False)) for one in jax.tree.leaves(getattr(traced, "args_info", ())))

    def compiled() -> Any:
        made = traced
        with under(mesh):
            for step in ("lower", "compile"):
                made = getattr(made, step)() if hasattr(made, step) else made
        return made

    def called() -> Any:
        inner, given, named = of_arrays(fn, args, kwargs, is_array)
        with under(mesh):
            return jax.jit(inner).trace(*given, **named).jaxpr

    own = hasattr(fn, "trace") and not isinstance(fn, Kernel)
    # what has sizes by axis name: a Mesh, an AbstractMesh, or a mapping of sizes
    sized = (one for one in meshes if isinstance(one, Mapping) or isinstance(getattr(one, "shape", None), Mapping))
    return Program(name, jaxpr, _first(sized), leaves, compiled, tuple(donated), called if own else None)


def _name(fn: Any) -> str:
    """Return what to call a program: the function in a `functools.partial`, and the kernel before its `.auto`."""
    fn = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(fn, "__name__", None) or type(fn).__name__
    owner = getattr(fn, "__self__", None)
    return f"{_name(owner)}.{name}" if isinstance(owner, Kernel) else name


def _traceable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn` traced; of what has `.lower` alone (other libraries' jit), lowered."""
    if hasattr(fn, "trace"):
        return fn.trace(*args, **kwargs)
    if hasattr(fn, "lower"):
        return fn.lower(*args, **kwargs)
    if all(map(is_input, jax.tree.leaves((args, kwargs)))):
        return jax.jit(fn).trace(*args, **kwargs)
    inner, args, kwargs = of_arrays(fn, args, kwargs, is_input)
    return jax.jit(inner).trace(*args, **kwargs)


def is_input(leaf: Any) -> bool:
    """Return whether JAX traces an argument."""
    return is_array(leaf) or is_number(leaf)


def of_arrays(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: Callable[[Any], bool]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """`fn` as a function of its inputs alone, and its arguments with None for the other leaves, which are fixed."""
    is_none = lambda leaf: leaf is None
    leaves, structure = jax.tree.flatten((args, dict(kwargs)), is_leaf=is_none)

    def inner(*args: Any, **kwargs: Any) -> Any:
        given = jax.tree.leaves((args, kwargs), is_leaf=is_none)
        filled = [leaf if one is None else one for one, leaf in zip(given, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fn(*args, **kwargs)

    owner = getattr(fn, "__self__", None)
    inner = functools.update_wrapper(inner, fn)
    inner.__wrapped__ = owner if isinstance(owner, Kernel) else fn  # which names the arguments
    return inner, *jax.tree.unflatten(structure, [leaf if kind(leaf) else None for leaf in leaves])


def names_of_inputs(jaxpr: Any) -> Sequence[str]:
    """Return what JAX calls the inputs of a program: as the function calls its arguments, `params['w']`."""
    return getattr(opened(jaxpr)[0].debug_info, "arg_names", None) or ()


@contextlib.contextmanager
def building(call: str, mesh: Any, more: str = "") -> Iterator[None]:
    """What a user's function makes for a mesh. An abstract one holds no arrays, which JAX says in other words. `more`
    is what else the function may do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SpmdError) or not isinstance(mesh, AbstractMesh) or not jax_errors.lacks_devices(error):
            raise
        rule = "the function makes arrays on the mesh, which has no devices here: shapes are enough."
        advice = "jax.eval_shape(make), or spmd.init(make, layouts).abstract(key), in place of make()"
        raise MeshError(rule, call=call, advice=advice + more) from error


@contextlib.contextmanager
def under(mesh: Any) -> Iterator[None]:
    """`mesh` as the ambient one, unless there is one already."""
    if not isinstance(mesh, Mesh | AbstractMesh) or ambient_mesh() is not None or not outside_trace():
        yield
        return
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        yield


# -------------------- meshes


def _first(meshes: Iterable[Any]) -> Any:
    found = [mesh for mesh in meshes if mesh is not None and getattr(mesh, "axis_names", mesh)]
    return next((mesh for mesh in found if isinstance(mesh, Mesh)), found[0] if found else None)


def meshes_of_jaxpr(jaxpr: Any) -> Iterator[Any]:
    """Meshes of the shard_maps and sharding constraints in a jaxpr, outermost first."""
    for equation in () if jaxpr is None else equations(jaxpr):
        for name, value in equation.params.items():
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh | AbstractMesh) and mesh.axis_names and name != "ctx_mesh":  # around the call
                yield mesh


def check_mesh(verb: str, meshes: Iterable[Any], given: Mapping[str, int] | None) -> None:
    """Refuse a mesh that is not the program's own: that of the first of these.

    Raises:
      MeshError: It is another one.
    """
    own = next(iter(meshes), None)
    if own is not None and given is not None and dict(own.shape) != given:
        rule = "mesh= is another mesh than that of the program."
        got = [f"the program: {mesh_text(own.shape)}", f"the call: {mesh_text(given)}"]
        advice = "without mesh=, or a program made for that mesh"
        raise MeshError(rule, call=f"{verb}(..., mesh=...)", got=got, advice=advice)


# --- where arrays outside kernels lie, as far as a jaxpr tells, and the least that a change of place must move --------


# The axes of each dimension, major first. None: nobody knows.
Placement = tuple[tuple[str, ...], ...] | str | None
ONE_DEVICE = "one device"
ANYWHERE = "anywhere"  # made of constants, so made where it is wanted


def of_spec(spec: Any, rank: int, sizes: Mapping[str, int]) -> Placement:
    """The placement that a PartitionSpec says. Axes of size 1 do not divide anything."""
    dims: list[tuple[str, ...]] = []
    for entry in _compat.partitions(spec, rank):
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            return None
        dims.append(tuple(a for a in axes_tuple(entry) if sizes.get(a, 1) > 1))
    return tuple(dims)


def with_others(place: Placement, before: Placement, known: Iterable[str], sizes: Mapping[str, int]) -> Placement:
    """Return what a `shard_map` over some axes of a mesh says of a placement: the compiler leaves the others as they
    were."""
    others = {a for a, n in sizes.items() if n > 1 and a not in known}
    if not others or isinstance(place, str) or place is None:
        return place
    if not isinstance(before, tuple):
        return None
    kept = (tuple(a for a in axes if a in others) for axes in before)
    return tuple((*axes, *rest) for axes, rest in zip(place, kept, strict=True))


def of_sharding(sharding: Any, rank: int, sizes: Mapping[str, int]) -> Placement:
    """The placement that the sharding of an argument says, on the program's mesh."""
    if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
        known = {a for a, n in sharding.mesh.shape.items() if n == 1 or sizes.get(a) == n}
        used = of_spec(sharding.spec, rank, sharding.mesh.shape)
        fits = used is not None and all(a in known for axes in used for a in axes)
        return used if fits else None
    if isinstance(sharding, SingleDeviceSharding) and math.prod(sizes.values()) > 1:
        return ONE_DEVICE
    return None


def text_of(placement: Placement, names: Sequence[str] = ()) -> str | None:
    """As a layout, of unnamed dimensions where there are no names: `_/dp _`."""
    if placement is None or isinstance(placement, str):
        return placement
    names = names or ("_",) * len(placement)
    return " ".join("/".join((name, *axes)) for name, axes in zip(names, placement, strict=True)) or "scalar"


def names_of(layout: Layout, rank: int) -> tuple[str, ...]:
    """Return what a layout calls the dimensions of an array: `("b", "(h k)")`."""
    dims = layout.with_rank(rank).dims
    return tuple(replace(d, atoms=tuple(replace(a, axes=None) for a in d.atoms)).short for d in dims)


def local_count(shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]) -> int:
    """Return how many elements one device holds. All of them, if the placement is not known."""
    if placement is None or isinstance(placement, str):
        return math.prod(shape)
    return math.prod(-(-n // axes_product(axes, sizes)) for n, axes in zip(shape, placement, strict=True))


def moved_bytes(
    shape: Sequence[int], dtype: Any, source: Placement, target: Placement, sizes: Mapping[str, int]
) -> int | None:
    """Return what one device sends in the cheapest plan from one placement to another; None where there is none, as for
    sizes that do not divide."""
    if source is None or target is None or isinstance(target, str):
        return None
    if source == target:
        return 0
    if isinstance(source, str):  # on one device: the others have nothing
        return local_count(shape, target, sizes) * dtype.itemsize
    names = [f"d{i}" for i in range(len(shape))]
    pattern = f"{text_of(source, names)} -> {text_of(target, names)}"
    try:
        return plan(pattern, sizes=dict(zip(names, shape, strict=True)), mesh=sizes, dtype=dtype).bytes
    except SpmdError:
        return None
