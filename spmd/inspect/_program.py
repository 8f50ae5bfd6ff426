"""What is looked at: anything callable with its arguments, traced once, and compiled once if at all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from spmd._leaves import is_array, is_number
from spmd._walker import equations
from spmd.errors import SpmdError
from spmd.kernels import Kernel
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
    """

    name: str
    jaxpr: Any
    mesh: Any
    arguments: tuple[Any, ...]
    _compile: Callable[[], Any] = field(repr=False)
    donated: tuple[bool, ...] = ()

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
        """Whether it can be compiled: an abstract mesh has names and sizes only."""
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
    if staged:
        return _staged(fn)
    if not callable(fn):
        rule = f"{verb} takes a kernel, a function, or a traced, lowered or compiled program."
        advice = f"{verb}(fn, x) with the function itself, not what it returns"
        raise SpmdError(rule, call=f"{verb}(...)", got=[type(fn).__name__], advice=advice)
    with _under(mesh):
        traced = _traceable(fn, args, kwargs)
        jaxpr = getattr(traced, "jaxpr", None)
    leaves = tuple(jax.tree.leaves((args, kwargs)))
    named = (_shaped(mesh), _shaped(getattr(fn, "mesh", None)), *meshes_of_jaxpr(jaxpr), *_meshes_of(leaves))
    name = _name(fn)

    def lowered() -> Any:
        with _under(mesh):
            return traced.lower().compile() if hasattr(traced, "lower") else traced.compile()

    return Program(name, jaxpr, _first(named), leaves, lowered, _donated(traced))


def _name(fn: Any) -> str:
    """What to call a program: the function in a `functools.partial`, and the kernel before its `.auto`."""
    fn = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(fn, "__name__", None) or type(fn).__name__
    owner = getattr(fn, "__self__", None)
    return f"{_name(owner)}.{name}" if isinstance(owner, Kernel) else name


def _staged(fn: Any) -> Program:
    jaxpr = getattr(fn, "jaxpr", None)
    if jaxpr is not None:
        return Program(
            fn.fun_name, jaxpr, _first(meshes_of_jaxpr(jaxpr)), (), lambda: fn.lower().compile(), _donated(fn)
        )
    return Program("", None, None, (), fn.compile if hasattr(fn, "compile") else lambda: fn)


def _donated(traced: Any) -> tuple[bool, ...]:
    """Which arguments of a traced program are donated."""
    return tuple(bool(getattr(one, "donated", False)) for one in jax.tree.leaves(getattr(traced, "args_info", ())))


def _traceable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn` traced; of what has `.lower` alone (other libraries' jit), lowered."""
    if hasattr(fn, "trace"):
        return fn.trace(*args, **kwargs)
    if hasattr(fn, "lower"):
        return fn.lower(*args, **kwargs)
    is_input = lambda leaf: is_array(leaf) or is_number(leaf)
    if all(map(is_input, jax.tree.leaves((args, kwargs)))):
        return jax.jit(fn).trace(*args, **kwargs)
    inner, arrays = of_arrays(fn, args, kwargs, is_input)
    return jax.jit(inner).trace(*arrays)


def of_arrays(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_input: Callable[[Any], bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`fn` as a function of its inputs alone, and these; the other leaves of its arguments are fixed."""
    leaves, structure = jax.tree.flatten((args, dict(kwargs)))
    inputs = [i for i, leaf in enumerate(leaves) if is_input(leaf)]

    @functools.wraps(fn)
    def inner(*given: Any) -> Any:
        filled = dict(zip(inputs, given, strict=True))
        args, kwargs = jax.tree.unflatten(structure, [filled.get(i, leaf) for i, leaf in enumerate(leaves)])
        return fn(*args, **kwargs)

    return inner, tuple(leaves[i] for i in inputs)


@contextlib.contextmanager
def _under(mesh: Any) -> Iterator[None]:
    """`mesh` as the ambient one, unless there is one already."""
    if not isinstance(mesh, Mesh | AbstractMesh) or ambient_mesh() is not None or not outside_trace():
        yield
        return
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
        yield


# -------------------- meshes


def _shaped(mesh: Any) -> Any:
    """What has sizes by axis name: a Mesh, an AbstractMesh, or a mapping of sizes."""
    return mesh if isinstance(mesh, Mapping) or isinstance(getattr(mesh, "shape", None), Mapping) else None


def _first(meshes: Iterable[Any]) -> Any:
    found = [mesh for mesh in meshes if mesh is not None and getattr(mesh, "axis_names", mesh)]
    return next((mesh for mesh in found if isinstance(mesh, Mesh)), found[0] if found else None)


def _meshes_of(leaves: Iterable[Any]) -> Iterator[Any]:
    for leaf in leaves:
        yield _shaped(getattr(getattr(leaf, "sharding", None), "mesh", None))


def meshes_of_jaxpr(jaxpr: Any) -> Iterator[Any]:
    """Meshes of the shard_maps and sharding constraints in a jaxpr, outermost first."""
    for equation in () if jaxpr is None else equations(jaxpr):
        for name, value in equation.params.items():
            if name == "ctx_mesh":  # what surrounded the call
                continue
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, Mesh | AbstractMesh) and mesh.axis_names:
                yield mesh
