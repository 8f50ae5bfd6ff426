"""Dropout with the mask of the whole array."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from spmd import Layout, annotate, random, size
from spmd.errors import LayoutError

__all__ = ["dropout"]


def dropout(x: Any, key: Any, layout: str, /, *, rate: float, **names: Any) -> jax.Array:
    """Set a random part of the numbers to zero, and scale the rest to keep the expectation.

    The mask is the one that `jax.random.bernoulli` draws for the key and the shape of the whole array. Each device
    makes its own part of it. Devices that hold the same numbers drop the same ones, devices that hold different parts
    have different masks, and a run repeats bit for bit on any mesh. Pass one key that is equal on all devices, and a
    new key for each layer and each step.

    Layouts: x and the result have the given layout, in which all dimensions are named. The string is the caller's: its
    names and mapping are those of the kernel. Sizes that the kernel does not know come from x.

    Communication: none, forward and backward.

    Memory: the mask is kept for the backward pass, one byte per number.

    Args:
      x: An array.
      key: A key of `jax.random`, threefry, undivided.
      layout: The layout of x.
      rate: The share that is dropped, at least 0 and below 1; 0 returns x.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      An array like x.

    Raises:
      LayoutError: If rate is out of range, or the layout has `...`, an unnamed dimension, or another rank than x.
      SizeError: If a size does not fit.
      SpmdError: If x does not have this layout, or the key differs between devices.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp d/tp, scalar -> b/dp d/tp", mesh=mesh)
      ... def drop(x, key):
      ...     return spmd.nn.dropout(x, key, "b/dp d/tp", rate=0.5)
      >>> key, x = jax.random.key(0), jnp.ones((4, 6))
      >>> print(jnp.array_equal(drop(x, key) > 0, jax.random.bernoulli(key, 0.5, x.shape)))
      True

    References:
      Srivastava et al., "Dropout", https://jmlr.org/papers/v15/srivastava14a.html
    """
    if not 0 <= rate < 1:
        rule = f"rate is the share that is dropped, at least 0 and below 1, not {rate!r}."
        raise LayoutError(rule, call=f'dropout(x, key, "{layout}")')
    x = annotate(x, layout, **names)  # a mask of another rank would broadcast
    if rate == 0:
        return x
    kept = random.bernoulli(key, layout, p=1 - rate, **{**_sizes(x, layout, names), **names})
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _sizes(x: Any, layout: str, names: dict[str, Any]) -> dict[str, int]:
    """The sizes of the dimensions that are not composites, from the array."""
    dims = Layout(layout).dims
    single = {dim.atoms[0].name: i for i, dim in enumerate(dims) if len(dim.atoms) == 1}
    found = {}
    for name, at in single.items():
        if name.isidentifier() and name != "_" and name not in names:
            asked = Layout.from_dims([replace(dim, bracket=i == at) for i, dim in enumerate(dims)])
            found[name] = size(x, str(asked), **names)
    return found
