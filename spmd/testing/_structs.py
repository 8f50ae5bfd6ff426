"""Arguments without values. They are made small where a kernel allows it, and filled with random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.checker._shrinking import distinct, halved, resized_array
from spmd.errors import SizeError
from spmd.kernels._kernel import Kernel
from spmd.kernels._trial import blocks_of, read_sizes

_CALL = "assert_same_on_any_mesh(kernel, ...)"
_NUMBERS = 2**26  # numbers that are drawn


def lacks_values(tree: Any) -> bool:
    """Whether an array of a tree is a `jax.ShapeDtypeStruct`."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


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
    read = read_sizes(plan, leaves)
    sizes = {name: one.size for name, one in read.sizes.items()}
    if read.faults:
        return plan.rebuild(leaves), {}  # the run says what is wrong
    given = [dims for x, dims in zip(leaves, read.dims, strict=True) if not isinstance(x, jax.ShapeDtypeStruct)]
    fixed = {name for dims in given for dim, _ in dims for name in dim.names} | dict(kernel.signature.sizes).keys()
    blocks = {name: n for name, n in blocks_of(plan, read, meshes).items() if name not in fixed}
    least = max((_largest(x) + 1 for x in leaves), default=0)

    def values(sizes: Mapping[str, int]) -> list[Any]:
        pairs = zip(leaves, read.dims, strict=True)
        lacking = jax.ShapeDtypeStruct
        return plan.rebuild([resized_array(x, d, sizes) if isinstance(x, lacking) else x for x, d in pairs])

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
    small = {name: n for name, n in distinct(free, blocks, used, least).items() if n < free[name]}
    found = halved(sizes, small, allowed)
    # What is divided in the body only, or is a multiple of another name, or has two halves: more of them fit together.
    for start in (every, 2 * every):
        kept = {name: size for name, size in free.items() if found[name] == size}
        steps = {name: start << i for i, name in enumerate(sorted(kept, key=kept.__getitem__))}
        targets = {name: max(n, -(-least // n) * n) for name, n in steps.items()}
        found = halved(found, {name: n for name, n in targets.items() if n < kept[name]}, allowed)
    return found


def _largest(x: Any) -> int:
    """The largest number of an array of signed integers, which may be an index."""
    indices = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.signedinteger) and x.size
    return int(np.max(x)) if indices else -1


def _check_drawable(kernel: Kernel, values: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Refuse arguments that are too large to be filled, unless the kernel itself refuses them."""
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(values) if isinstance(x, jax.ShapeDtypeStruct))
    if count > _NUMBERS:
        kernel.trace(*values)
        rule = "the body fails where the names have smaller sizes, and with these there are too many numbers to draw."
        got = [", ".join(f"{name}={size}" for name, size in sizes.items()), f"{count:,} numbers in the arguments"]
        raise SizeError(rule, call=_CALL, got=got, advice="structs of small sizes that fit together, or arrays")
