"""Random values for arguments that have none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._trees.leaves import is_array, is_key


def drawn(tree: Any, seed: int, *, bold: bool = False) -> Any:
    """The same tree with random values for each `jax.ShapeDtypeStruct`.

    Floating-point and complex numbers are normal. Integers may be indices, of tokens or rows, so they are at least 0
    and below the smallest dimension of a floating-point array. With `bold` they are below the largest one for seed 1,
    the second largest for seed 2, and so on: an index of another dimension may then leave its array.
    """
    draws = np.random.default_rng((seed, 1))  # not those of the cotangents
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x) and not is_key(x)]
    rows = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)] or arrays
    sizes = sorted({n for x in rows for n in x.shape if n > 1}) or [2]
    below = sizes[max(len(sizes) - seed, 0) if bold else 0]
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
