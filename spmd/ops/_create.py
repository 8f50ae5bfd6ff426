"""Arrays made from a layout alone: `zeros`, `ones`, `full`, `iota`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat
from spmd.comm._call import Call, Factor, To, open_call
from spmd.comm._keywords import check_array
from spmd.errors import LayoutError, SizeError
from spmd.language import Dim, Layout


def zeros(layout: str, /, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """Zeros of this layout: `zeros("b/dp d")`, for accumulators and for carries of loops.

    Sizes come from the kernel's signature or from keywords. JAX types the value varying along the axes that the layout
    mentions. A loop's new carry has that type too, which is why JAX rejects a plain `jnp.zeros` as the first one.

    Communication: none, forward and backward.

    Args:
      layout: The layout of the result. `{U:axis}` makes the start of a partial sum, `{R:axis}` the start of a carry
        that becomes a gathered copy over this axis.
      dtype: Its dtype. The default is that of `jnp.zeros`: float32, or float64 if `jax_enable_x64` is set.
      to: "varying" types it varying along every mesh axis. It must then be reduced before it leaves the kernel.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("t b/dp -> b/dp", mesh=mesh)
      ... def totals(x):
      ...     return jax.lax.scan(lambda sum, row: (sum + row, None), spmd.zeros("b/dp"), x)[0]
      >>> print(totals(jnp.ones((3, 8))))
      [3. 3. 3. 3. 3. 3. 3. 3.]
    """
    return _filled("zeros", layout, 0, float if dtype is None else dtype, to, names)


def ones(layout: str, /, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """Ones of this layout: `ones("b/dp d")`.

    Works as `zeros`, but a `{U:}` mark is an error, because the sum of n ones is n.

    Communication: none, forward and backward.

    Args:
      layout: The layout of the result.
      dtype: Its dtype. The default is that of `jnp.ones`.
      to: "varying" types it varying along every mesh axis.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> print(spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: v + spmd.ones("n/x"))(jnp.zeros(8)))
      [1. 1. 1. 1. 1. 1. 1. 1.]
    """
    return _filled("ones", layout, 1, float if dtype is None else dtype, to, names)


def full(layout: str, /, value: Any, dtype: Any = None, *, to: To | None = None, **names: Any) -> jax.Array:
    """An array of this layout with one value everywhere: `full("b/dp q", -jnp.inf)`.

    Communication: none forward. Backward the gradient of `value` is a psum over the axes of the layout.

    Args:
      layout: The layout of the result.
      value: A scalar: a number or an array of rank 0. It may be traced.
      dtype: Its dtype. The default is that of `value`.
      to: "varying" types it varying along every mesh axis.
      **names: Sizes of names (`d=64`), or mesh axes (`tp="model"`).

    Returns:
      The array: this device's block of it in explicit mode.

    Raises:
      SizeError: If the size of a name is not known, or does not divide.
      LayoutError: On a malformed layout, or a value that is not a scalar.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(x=4)
      >>> print(spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: v + spmd.full("n/x", 0.5))(jnp.zeros(4)))
      [0.5 0.5 0.5 0.5]
    """
    return _filled("full", layout, value, dtype, to, names)


def iota(layout: str, /, dtype: Any = jnp.int32, **names: Any) -> jax.Array:
    """Global positions along a dimension. Each device has those of its own block.

    `iota("s/cp")` counts 0, 1, ... over the whole of s. If there are several dimensions, brackets choose one:
    `iota("b/dp [s/cp]")`. A `jnp.arange` of the local length would start at 0 on every device.

    Communication: none, forward and backward.

    Args:
      layout: One dimension, or several with one in brackets.
      dtype: The dtype of the positions. The default is int32 even if `jax_enable_x64` is set, as for `offset` and JAX's
        `axis_index`.
      **names: Sizes of names (`s=1024`), or mesh axes (`cp="context"`).

    Returns:
      The positions.

    Raises:
      SizeError: If the size of a name is not known, or does not divide, or positions do not fit the dtype.
      LayoutError: If it is not clear which dimension is meant.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(cp=4)
      >>> print(spmd.kernel("s/cp -> s/cp", mesh=mesh)(lambda x: x + spmd.iota("s/cp"))(jnp.zeros(8, int)))
      [0 1 2 3 4 5 6 7]
    """
    call = open_made("iota", layout, names)
    [made] = call.pattern.inputs
    at = counted(call, made)
    if any(made.dims[at].margin):
        call.fail("iota has no meaning for a margin.", at=made.dims[at].span, error=LayoutError)
    shape = call.local_shape(made)
    x = jax.lax.broadcast_in_dim(positions(call, made.dims[at], dtype), shape, (at,))
    x = _compat.pvary(x, call.frame.in_mesh_order(made.axis_names)) if call.frame.explicit else x
    return call.result(x, made.without_brackets(), role="created")


def counted(call: Call, made: Layout) -> int:
    """The dimension along which positions are counted: the only one, or the one in brackets."""
    found = [i for i, dim in enumerate(made.dims) if dim.bracket] or list(range(len(made.dims)))
    if len(found) != 1:
        rule = f'{call.name} counts along one dimension: put it in brackets, as in "b/dp [s/cp]".'
        call.fail(rule, got=[f"{len(made.dims)} dimensions"], error=LayoutError)
    return found[0]


def positions(call: Call, dim: Dim, dtype: Any) -> Any:
    """Global positions along one dimension, built factor by factor, since each factor's block has its own start."""
    whole = math.prod(call.factor(atom).size for atom in dim.atoms)
    if jnp.issubdtype(dtype, jnp.integer) and whole - 1 > jnp.iinfo(dtype).max:
        wide = index_dtype(call, dim)
        rule = f"positions up to {whole - 1} do not fit {jnp.dtype(dtype).name}."
        call.fail(rule, at=dim.span, fix=f"dtype=jnp.{jnp.dtype(wide).name}", error=SizeError)
    total: Any = None
    for atom in dim.atoms:
        factor: Factor = call.factor(atom)
        here = jnp.arange(factor.local, dtype=dtype)
        if call.frame.explicit and factor.axes:
            here = here + call.start(factor).astype(dtype)
        total = here if total is None else (total[:, None] * np.asarray(factor.size, dtype) + here[None, :]).reshape(-1)
    return total


def index_dtype(call: Call, dim: Dim) -> Any:
    """The dtype of positions along a dimension."""
    whole = math.prod(call.factor(atom).size for atom in dim.atoms)
    return call.index_dtype(whole, Layout.from_dims((dim,)).short, dim.span)


def open_made(who: str, layout: Any, names: Mapping[str, Any]) -> Call:
    if not isinstance(layout, str) and hasattr(layout, "shape"):
        raise LayoutError(f'{who} makes an array, so its first argument is a layout: {who}("b/dp d").')
    call = open_call(who, layout, names, inputs=1, arrow=False, example=f'{who}("b/dp", b=8)')
    [made] = call.pattern.inputs
    for dim in made.dims:
        if dim.ellipsis or any(atom.name == "_" for atom in dim.atoms):
            call.fail(f"{who} needs to know every size, so every dimension has a name.", at=dim.span, error=LayoutError)
    return call


def _filled(who: str, layout: Any, value: Any, dtype: Any, to: str | None, names: Mapping[str, Any]) -> Any:
    call = open_made(who, layout, names)
    [made] = call.pattern.inputs
    if np.ndim(value) != 0:
        call.fail(f"the value is a scalar, not an array of shape {np.shape(value)}.", error=LayoutError)
    check_array(value, "the value", functools.partial(call.fail, error=LayoutError), dtype)
    if to not in (None, "varying"):
        call.fail(f'to is "varying" or absent, not {to!r}.', error=LayoutError)
    if made.unreduced and not (isinstance(value, (int, float)) and value == 0):
        n = call.frame.axis_size(made.unreduced)
        rule = f"a partial sum starts from zeros: {n} equal parts would add up to {n} times the value."
        call.fail(rule, at=call.mark_span("{"), advice=f'as in zeros("{made.short}")')
    x = jnp.full(call.local_shape(made), value, dtype)
    if call.frame.explicit:
        axes = call.frame.axis_names if to == "varying" else call.frame.in_mesh_order(made.axis_names)
        x = _compat.pvary(x, axes)
    return call.result(x, made.without_brackets(), role="created")
