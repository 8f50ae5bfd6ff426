"""Grids of coordinates, of which each device makes its own part: `linspace`, `meshgrid`, `from_function`."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd import _compat
from spmd._trees.leaves import kind_of
from spmd.comm._call import Call, open_call
from spmd.comm._keywords import as_array, check_array
from spmd.errors import LayoutError, SizeError
from spmd.language import Atom, Dim, Layout
from spmd.ops._reduce import placed, plain_dims
from spmd.ops._sizes import counted, index_dtype, iota, open_made, positions

_EXAMPLE = 'meshgrid(x, y, "x/a, y/b -> x/a y/b")'


def linspace(
    start: Any, stop: Any, layout: str, /, *, endpoint: bool = True, dtype: Any = None, **names: Any
) -> jax.Array:
    """Evenly spaced numbers along a dimension: `linspace(0, 1, "x/a")`. Each device has those of its own block.

    Element i of n is `start + (stop - start) i / (n - 1)`, or with `i / n` if the end point is left out, as in
    `jnp.linspace`. The numbers are the same on every mesh, and both ends are exact.

    Communication: none forward. Backward the gradients of `start` and `stop` are a psum over the axes of the layout.

    Args:
      start: The first number, a scalar. It may be traced.
      stop: The last number, or with `endpoint=False` the one after it.
      layout: One dimension, or several with one in brackets, along which the numbers run.
      endpoint: Whether `stop` is one of the numbers.
      dtype: A floating-point dtype. The default is what `jnp.linspace` gives for start and stop.
      **names: Sizes of names (`x=64`), or mesh axes (`a="data"`).

    Returns:
      The numbers: this device's block in explicit mode.

    Raises:
      LayoutError: On a malformed layout, a start or stop that is not a scalar, or a dtype of integers.
      SizeError: If the size of a name is not known, or does not divide.

    Example:
      >>> import spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> print(spmd.kernel("-> x/a", mesh=mesh, x=8)(lambda: spmd.linspace(0, 2, "x/a", endpoint=False))())
      [0.   0.25 0.5  0.75 1.   1.25 1.5  1.75]
    """
    call = open_made("linspace", layout, names)
    [made] = call.pattern.inputs
    for what, value in (("start", start), ("stop", stop)):
        check_array(value, what, functools.partial(call.fail, error=LayoutError))
        if np.ndim(value) != 0:
            call.fail(f"{what} is a scalar, not an array of shape {np.shape(value)}.", error=LayoutError)
    dtype = _dtype_between(start, stop) if dtype is None else dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        advice = 'iota("x/a") counts in integers'
        call.fail(f"linspace makes floating-point numbers, not {jnp.dtype(dtype)}.", advice=advice, error=LayoutError)
    along = made.dims[counted(call, made)]
    steps = math.prod(call.factor(atom).size for atom in along.atoms) - endpoint
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    first, last = (jnp.asarray(value, wide) for value in (start, stop))
    out = _between(iota(layout, index_dtype(call, along), **names), first, last, steps).astype(dtype)
    return call.result(out, made.without_brackets(), role="created")


def _dtype_between(start: Any, stop: Any) -> Any:
    """The dtype that `jnp.linspace` gives: it depends on both ends and on `jax_enable_x64`."""
    kinds = map(jax.typeof, (start, stop))
    ends = (jax.ShapeDtypeStruct((), kind.dtype, weak_type=kind.weak_type) for kind in kinds)
    return jax.eval_shape(lambda a, b: jnp.linspace(a, b, 2), *ends).dtype


@functools.partial(jax.jit, static_argnums=3)  # compiled even if the caller is not, so that all round alike
def _between(i: Any, first: Any, last: Any, steps: int) -> Any:
    """The numbers, rounded alike in every program. A compiler may round a product and a sum at once, so the products
    here are clipped. It may multiply by the inverse of a constant, so the divisor here is a sum of counts."""
    steps = max(steps, 1)
    most = jnp.finfo(first.dtype).max
    largest = jnp.maximum(abs(first), abs(last))
    scale = jnp.where(largest > most / (2 * steps), 0.5 ** (steps.bit_length() + 1), 1).astype(first.dtype)  # exact
    counts = [k.astype(first.dtype) for k in (steps - i, i)]
    parts = (jnp.clip(end * scale * k, -most, most) for end, k in zip((first, last), counts, strict=True))
    between = jnp.where(largest <= most, sum(parts) / sum(counts) / scale, jnp.nan)
    return jnp.where(i == 0, first, jnp.where(i == steps, last, between))


def meshgrid(*arrays: Any, sparse: bool = False, **names: Any) -> tuple[jax.Array, ...]:
    """Coordinates of a grid from those of its sides: `meshgrid(x, y, z, "x/a, y/b, z -> x/a y/b z")`.

    Result i is array i, repeated along the dimensions of the others. The right side says their order, which is what
    `indexing` does in `jnp.meshgrid`. With `sparse` the other dimensions have size 1, and the results broadcast.

    Communication: none forward. Backward the gradient of an array is the sum over the other dimensions: a psum over
    their axes if the array is equal on them by JAX's own type, and nothing with `sparse`.

    Args:
      *arrays: One array of one dimension for each dimension of the grid, then the pattern.
      sparse: Whether results keep size 1 along the other dimensions.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      A tuple of arrays, one for each of those given.

    Raises:
      LayoutError: If the pattern does not name one dimension per array on the left, and all of them on the right.
      CommunicationError: If the right side places a dimension otherwise.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=2, b=2)
      >>> @spmd.kernel("x/a, y/b -> x/a y/b", mesh=mesh)
      ... def radius(x, y):
      ...     xs, ys = spmd.meshgrid(x, y, "x/a, y/b -> x/a y/b")
      ...     return jnp.sqrt(xs**2 + ys**2)
      >>> print(radius(jnp.array([0.0, 3.0]), jnp.array([0.0, 4.0])))
      [[0. 4.]
       [3. 5.]]
    """
    *given, pattern = arrays or (None,)
    call = open_call("meshgrid", pattern, names, arrays=tuple(given), inputs=None, example=_EXAMPLE, also={})
    [grid] = call.pattern.outputs
    _check_sides(call, grid)
    order = [dim.atoms[0].name for dim in grid.dims]
    operands = [call.operand(x, i) for i, x in enumerate(given)]
    out = []
    for operand in operands:
        at = order.index(operand.names[0])
        x = lax.expand_dims(operand.x, [i for i in range(len(order)) if i != at])
        if sparse:
            dims = [dim if i == at else Dim((Atom("1", (), 1),)) for i, dim in enumerate(grid.dims)]
            out.append(call.result(x, Layout.from_dims(dims)))
            continue
        x = _compat.pvary(x, call.frame.in_mesh_order(grid.axis_names)) if call.frame.explicit else x
        out.append(call.result(jnp.broadcast_to(x, call.local_shape(grid)), grid, role="created"))
    return tuple(out)


def _check_sides(call: Call, grid: Layout) -> None:
    axes: dict[str, Any] = {}
    for layout in (*call.pattern.inputs, grid):
        plain_dims(call, layout)
        single = all(len(dim.atoms) == 1 and not dim.ellipsis for dim in layout.dims)
        if not single or layout.unreduced or layout.reduced or (layout is not grid and len(layout.dims) != 1):
            rule = "each array has one dimension with one name, and the grid has all of them."
            call.fail(rule, advice=f"as in {_EXAMPLE}", error=LayoutError)
        if layout is not grid:
            axes[layout.dims[0].atoms[0].name] = layout.dims[0].axes
    wanted = [dim.atoms[0].name for dim in grid.dims]
    if sorted(wanted) != sorted(axes) or len(axes) != len(call.pattern.inputs):
        rule = "the grid has the dimensions of the arrays, each once."
        call.fail(rule, got=[f"left: {', '.join(axes)}", f"right: {', '.join(wanted)}"], error=LayoutError)
    for dim in grid.dims:
        [name] = dim.names
        if dim.axes != axes[name]:
            one, two = placed(name, axes[name]), placed(name, dim.axes)
            rule = f"meshgrid moves nothing: {one} on the left is {two} on the right."
            call.fail(rule, at=dim.span, advice=f'relayout(x, "{one} -> {two}") in a line of its own')


def from_function(fn: Callable[..., Any], layout: str, /, **names: Any) -> Any:
    """`from_function` inside a kernel."""
    call = open_made("from_function", layout, names)
    [made] = call.pattern.inputs
    if made.unreduced or made.reduced:
        call.fail("from_function makes complete values, without marks.", error=LayoutError)
    if not callable(fn):
        rule = f"fn is a function of positions, not {kind_of(fn)}."
        call.fail(rule, advice='as in from_function(lambda i, j: i + j, "x/a y")', error=LayoutError)
    shape = call.local_shape(made)
    places = [
        lax.expand_dims(positions(call, dim, index_dtype(call, dim)), [k for k in range(len(shape)) if k != i])
        for i, dim in enumerate(made.dims)
    ]
    try:
        inspect.signature(fn).bind(*places)
    except TypeError:
        rule = f"fn takes one array of positions for each dimension, {len(places)} here."
        call.fail(rule, got=[f"fn{inspect.signature(fn)}"], advice='lambda i, j: ... for "x/a y"', error=LayoutError)
    except ValueError:  # a builtin has no signature
        pass
    out = as_array(fn(*places), "what fn gives", functools.partial(call.fail, error=LayoutError))
    try:
        whole = jnp.broadcast_to(out, shape)
    except ValueError:
        rule = f"fn gives what broadcasts to {shape}, the shape here."
        call.fail(rule, got=[f"fn returned shape {out.shape}"], error=SizeError)
    axes = call.frame.in_mesh_order(made.axis_names)
    return call.result(_compat.pvary(whole, axes) if call.frame.explicit else whole, made, role="created")
