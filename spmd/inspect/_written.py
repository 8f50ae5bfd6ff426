"""What a program's own text says it communicates, read off its jaxpr: no device, no compiler."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd import _compat
from spmd._jaxprs.walker import opened
from spmd._trees.leaves import is_array
from spmd.errors import SpmdError
from spmd.inspect._peak import Peak
from spmd.inspect._program import ANYWHERE, local_count, meshes_of_jaxpr, of_arrays, of_sharding, stage
from spmd.inspect._records import Written
from spmd.inspect._values import Value, size_bytes
from spmd.inspect._walk import Walk
from spmd.kernels import Kernel


def written(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Any = None,
    *,
    jaxpr: Any = None,
    donated: Sequence[bool] = (),
) -> Written:
    """The written view of `fn` for these arguments; see `Written`.

    `fn` is traced as `jax.jit` would trace it. No device is used and nothing is compiled. Equations that no result
    needs are left out first, as the compiler does. The compiled program may still differ: XLA merges equal collectives
    of equal operands, combines several into one, moves some out of loops and knows the length of some `while` loops.

    Args:
      fn: A kernel, or any function that calls kernels, jitted, differentiated or vmapped or not; or what `.trace`
        returned, without arguments.
      args: Arrays or `jax.ShapeDtypeStruct`s, with or without shardings.
      kwargs: Keyword arguments.
      mesh: The mesh, where neither `fn` nor the arguments tell it: a Mesh or an AbstractMesh.
      jaxpr: Its jaxpr, where it was traced for these arguments already.
      donated: Which of the arrays among the arguments are donated.
    """
    if jaxpr is None:
        asked: tuple[Any, Any, Any] = (fn, args, dict(kwargs))
        if hasattr(fn, "trace") and not isinstance(fn, Kernel):
            # Inside another trace, because only there a jaxpr says where `in_shardings` wants arguments.
            inner, given = of_arrays(fn, args, kwargs, is_array)
            asked = (inner, given, {})
        jaxpr = stage("explain", *asked, mesh).jaxpr
    if jaxpr is None:
        rule = "the written view is read from the trace, which a lowered or compiled program does not have."
        raise SpmdError(rule, call="explain(fn, ...)", advice="the function itself, or fn.trace(...)")
    consts = opened(jaxpr)[1]
    jaxpr = _compat.live_jaxpr(getattr(jaxpr, "jaxpr", jaxpr))
    leaves = _leaves(fn, args, kwargs, len(jaxpr.invars))
    sizes = _sizes(fn, jaxpr, [leaf for _, leaf in leaves], mesh)
    walk = Walk(sizes)
    values = [Value(_lies(leaf, sizes), label) for label, leaf in leaves]
    outs = walk.read(jaxpr, values, dict(zip(jaxpr.constvars, consts, strict=False)))
    held = [v.place if isinstance(v.place, tuple) else walk.wanted.get(v.label) for v in values]
    given = [(v.aval, _bytes(v.aval, place, sizes)) for v, place in zip(jaxpr.invars, held, strict=True)]
    made = [(v.aval, _bytes(v.aval, out.place, sizes)) for v, out in zip(jaxpr.outvars, outs, strict=True)]
    kept = [one for one, taken in zip(given, donated, strict=True) if taken] if len(donated) == len(given) else []
    shared = _shared(kept, made)
    in_arguments = [size > 0 for size in shared]
    apart, unfused = together, _ = Peak(walk.local_bytes).most(jaxpr, in_arguments)
    if walk.has_kernels:  # what `spmd.fused` says is one
        together, _ = Peak(walk.local_bytes, kernels=True).most(jaxpr, in_arguments)
    return walk.written(
        arguments_bytes=sum(size for _, size in given),
        outputs_bytes=sum(size for _, size in made),
        donated_bytes=sum(shared),
        standing_bytes=together,
        opened_bytes=apart,
        unfused_bytes=unfused,
    )


def _shared(donated: Sequence[tuple[Any, int]], made: Sequence[tuple[Any, int]]) -> list[int]:
    """Return how many bytes of each result can lie in a donated argument: in one of the same shape and dtype each."""
    free: dict[Any, list[int]] = {}
    for aval, size in donated:
        free.setdefault((aval.shape, aval.dtype), []).append(size)
    keys = [(aval.shape, aval.dtype) for aval, _ in made]
    return [min(free[key].pop(), size) if free.get(key) else 0 for key, (_, size) in zip(keys, made, strict=True)]


def _sizes(fn: Any, jaxpr: Any, leaves: list[Any], mesh: Any) -> dict[str, int]:
    """The axes of the mesh: the caller's, the kernel's, the program's or the arguments'."""
    meshes = [mesh, getattr(fn, "mesh", None), *meshes_of_jaxpr(jaxpr)]
    meshes += [getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves]
    shapes = (mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None) for mesh in meshes)
    return next((dict(shape) for shape in shapes if isinstance(shape, Mapping) and shape), {})


def _leaves(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[tuple[str, Any]]:
    """Return what each input of the jaxpr is called, with the argument; static arguments are not inputs."""
    labelled = list(zip(_paths(fn, args, kwargs), jax.tree.leaves((args, dict(kwargs))), strict=True))
    arrays = [(label, leaf) for label, leaf in labelled if is_array(leaf)]
    for found in (labelled, arrays):
        if len(found) == count:
            return found
    return [(f"argument {i}", None) for i in range(count)]


def _paths(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return what to call each leaf of the arguments: `params['w']`."""
    try:
        known = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        known = ()
    plain = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in known if p.kind is p.VAR_POSITIONAL), "args")
    names = [*plain, *(f"{rest}[{i}]" for i in range(len(args)))][: len(args)]
    named = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    return [
        f"{name}{jax.tree_util.keystr(path)}" for name, tree in named for path, _ in jax.tree.leaves_with_path(tree)
    ]


def _lies(array: Any, sizes: Mapping[str, int]) -> Any:
    """Return where an argument lies. A NumPy array or a number does not move between devices."""
    if isinstance(array, np.ndarray | np.generic | bool | int | float | complex):
        return ANYWHERE
    return of_sharding(getattr(array, "sharding", None), len(getattr(array, "shape", ())), sizes)


def _bytes(aval: Any, place: Any, sizes: Mapping[str, int]) -> int:
    shape = tuple(getattr(aval, "shape", ()))
    whole = size_bytes(aval)
    return whole * local_count(shape, place, sizes) // max(math.prod(shape), 1)
