"""Arguments without values. They are made small where a kernel allows it, and filled with random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._leaves import is_array, is_key
from spmd.errors import SizeError
from spmd.kernels._kernel import Kernel
from spmd.language import Dim, Size, bind

_CALL = "assert_same_on_any_mesh(kernel, ...)"
_NUMBERS = 2**26  # numbers that are drawn


def lacks_values(tree: Any) -> bool:
    """Whether an array of a tree is a `jax.ShapeDtypeStruct`."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def drawn(tree: Any, seed: int) -> Any:
    """The same tree with random values for each `jax.ShapeDtypeStruct`.

    Floating-point and complex numbers are normal. Integers may be indices, of tokens or rows, so they are at least 0
    and below the smallest dimension of a floating-point array.
    """
    draws = np.random.default_rng((seed, 1))  # not those of the cotangents
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x) and not is_key(x)]
    rows = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)] or arrays
    below = min((n for x in rows for n in x.shape if n > 1), default=2)
    return jax.tree.map(lambda x: _drawn(x, below, draws) if isinstance(x, jax.ShapeDtypeStruct) else x, tree)


def _drawn(x: jax.ShapeDtypeStruct, below: int, draws: np.random.Generator) -> Any:
    if is_key(x):
        return _keys(x, int(draws.integers(2**31)))
    if x.dtype == np.bool_:
        return jnp.asarray(draws.random(x.shape) < 0.5)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(draws.integers(0, below, x.shape).astype(x.dtype), x.dtype)
    values = draws.normal(size=x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        values = values + 1j * draws.normal(size=x.shape)
    return jnp.asarray(values.astype(x.dtype), x.dtype)  # converted in NumPy, which compiles nothing


def _keys(x: jax.ShapeDtypeStruct, seed: int) -> Any:
    made = (jax.random.key(seed, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg"))
    key = next(key for key in made if key.dtype == x.dtype)
    return jax.random.split(key, x.shape) if x.shape else key


def shrunk(
    build: Callable[[Any], Kernel], meshes: Sequence[Any], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, tuple[int, int]]]:
    """The arguments of a kernel with its names at their smallest sizes.

    A name gets the smallest size that no other name has, of which each device has at least two rows on each mesh. It
    keeps its size if the body fails with a smaller one, if an array with values has it, or a keyword of the kernel.

    Args:
      build: From a mesh to the kernel for it.
      meshes: The meshes on which it is going to run.
      args: Its positional arguments, some of them `jax.ShapeDtypeStruct`s.
      kwargs: Its keyword arguments.

    Returns:
      One argument for each parameter, and the sizes before and after of the names that have become smaller.
    """
    kernel = build(meshes[0])
    plan, leaves = kernel.prepared(args, kwargs)
    known = {name: Size(size, "") for name, size in kernel.signature.sizes}
    arrays = [(one.path, np.shape(x), one.layout) for one, x in zip(plan.leaves, leaves, strict=True)]
    read = bind(arrays, plan.sizes, known=known)
    sizes = {name: one.size for name, one in read.sizes.items()}
    if read.faults:
        return plan.rebuild(leaves), {}  # the run says what is wrong
    given = [dims for x, dims in zip(leaves, read.dims, strict=True) if not isinstance(x, jax.ShapeDtypeStruct)]
    fixed = {name for dims in given for dim, _ in dims for name in dim.names} | known.keys()
    written = [dim for dims in read.dims for dim, _ in dims]
    written += [dim for layout in plan.outputs.declared for dim in layout.dims]
    blocks = {name: _blocks(name, written, meshes) for name in sizes if name not in fixed}
    least = max((_largest(x) + 1 for x in leaves), default=0)

    def values(sizes: Mapping[str, int]) -> list[Any]:
        return plan.rebuild([_resized(x, dims, sizes) for x, dims in zip(leaves, read.dims, strict=True)])

    def allowed(sizes: Mapping[str, int]) -> bool:
        try:
            for mesh in meshes:
                build(mesh).trace(*values(sizes))
        except Exception:  # of the body, which may raise anything
            return False
        return True

    every = math.lcm(*(math.prod(mesh.shape.values()) for mesh in meshes))
    found = _smallest(sizes, blocks, least, every, allowed)
    _check_drawable(kernel, values(found), found)
    return values(found), {name: (sizes[name], found[name]) for name in blocks if found[name] != sizes[name]}


def _smallest(
    sizes: Mapping[str, int],
    blocks: Mapping[str, int],
    least: int,
    every: int,
    allowed: Callable[[Mapping[str, int]], bool],
) -> Mapping[str, int]:
    """The sizes, those of the names in `blocks` as small as is allowed; `every` is a size that all meshes divide."""
    free = {name: sizes[name] for name in blocks}
    used = {size for name, size in sizes.items() if name not in free}
    found = _smaller(sizes, _distinct(free, blocks, used, least), allowed)
    # What is divided in the body only, or is a multiple of another name, or has two halves: more of them fit together.
    for start in (every, 2 * every):
        kept = {name: size for name, size in free.items() if found[name] == size}
        steps = {name: start << i for i, name in enumerate(sorted(kept, key=kept.__getitem__))}
        targets = {name: max(n, -(-least // n) * n) for name, n in steps.items()}
        found = _smaller(found, {name: n for name, n in targets.items() if n < kept[name]}, allowed)
    return found


def _distinct(free: Mapping[str, int], blocks: Mapping[str, int], used: set[int], least: int) -> dict[str, int]:
    """The smallest size of each name, where that is less than it has: at least `least`, a multiple of its blocks, two
    in each of these, and none that another name has."""
    found, taken = {}, set(used)
    for name, size in free.items():
        step = blocks[name]
        small = max(2 * step, -(-least // step) * step)
        while small in taken:
            small += step
        taken.add(min(small, size))
        if small < size:
            found[name] = small
    return found


def _blocks(name: str, written: Sequence[Dim], meshes: Sequence[Any]) -> int:
    """Into how many blocks a name is divided wherever it is written, on all meshes."""
    axes = {atom.axes or () for dim in written for atom in dim.atoms if atom.name == name}
    return math.lcm(*(math.prod(mesh.shape[a] for a in one) for one in axes for mesh in meshes))


def _largest(x: Any) -> int:
    """The largest number of an array of signed integers, which may be an index."""
    indices = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.signedinteger) and x.size
    return int(np.max(x)) if indices else -1


def _resized(x: Any, dims: Sequence[tuple[Dim, int | None]], sizes: Mapping[str, int]) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    shape = []
    for (dim, _), now in zip(dims, x.shape, strict=True):
        parts = [atom.size or sizes.get(atom.name) for atom in dim.atoms]
        known = [n for n in parts if n is not None]
        shape.append(math.prod(known) if len(known) == len(parts) > 0 else now)
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=x.sharding)


def _smaller(sizes: Mapping[str, int], targets: Mapping[str, int], allowed: Callable[[Any], bool]) -> dict[str, int]:
    """The sizes, as many as possible of them at their targets: all, else one half and then the other."""
    found = dict(sizes)

    def take(names: Sequence[str]) -> None:
        trial = found | {name: targets[name] for name in names}
        if allowed(trial):
            found.update(trial)
        elif len(names) > 1:
            take(names[: len(names) // 2])
            take(names[len(names) // 2 :])

    if targets:
        take(list(targets))
    return found


def _check_drawable(kernel: Kernel, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Refuse arguments that are too large to be filled, unless the kernel itself refuses them."""
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(values) if isinstance(x, jax.ShapeDtypeStruct))
    if count > _NUMBERS:
        kernel.trace(*values)
        rule = "the body fails where the names have smaller sizes, and with these there are too many numbers to draw."
        got = [", ".join(f"{name}={size}" for name, size in sizes.items()), f"{count:,} numbers in the arguments"]
        raise SizeError(rule, call=_CALL, got=got, advice="structs of small sizes that fit together, or arrays")
