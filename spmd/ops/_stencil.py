"""Stencils: functions of a neighbourhood, for arrays whose neighbours lie on other devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd._trees.arguments import explained
from spmd._trees.leaves import kind_of
from spmd.comm._call import Call, Operand, open_call
from spmd.comm._keywords import as_array
from spmd.errors import LayoutError, SizeError
from spmd.language import Layout
from spmd.modes import inner
from spmd.ops._along import along
from spmd.ops._halo import Edges, halo, read_edges, with_margins, without_margins
from spmd.ops._local import local

_halo, _local = inner(halo), inner(local)

R = TypeVar("R")


def stencil(
    fn: Callable[..., R],
    pattern: str,
    /,
    *,
    edge: Any = "periodic",
    corners: bool = True,
    **names: Any,
) -> Callable[..., R]:
    """Apply a function of a neighbourhood: `stencil(laplace, "1+x/a+1 1+y/b+1 -> x/a y/b")(u)`.

    The left side says what `fn` reads: each array with margins, which `halo` fills. From them `fn` computes the inner
    part, as it would from a whole padded array. The right side says what that is. Margins on the right are left for a
    second step.

    Communication: the halos, if two or more devices hold the dimension; see `halo`. Backward the same in reverse.

    Args:
      fn: A function from the padded arrays to one array. It must not depend on its place in the array.
      pattern: `"layout, ... -> layout"`, with margins on the left where `fn` reads neighbours.
      edge: As in `halo`, for all arrays. If they differ, call `halo` on each array.
      corners: As in `halo`: False if `fn` reads no diagonal neighbours.
      **names: Sizes or mesh axes of names in the pattern.

    Returns:
      A function of the arrays without margins.

    Raises:
      LayoutError: On a malformed pattern, or if no array on the left has a dimension of the right side.
      SizeError: If `fn` returns a shape other than that of the right side.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=2, b=2)
      >>> def laplace(u):
      ...     return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
      >>> @spmd.kernel("x/a y/b -> x/a y/b", mesh=mesh)
      ... def heat(u):
      ...     return u + spmd.stencil.stencil(laplace, "1+x/a+1 1+y/b+1 -> x/a y/b", edge="zero")(u) / 4
      >>> print(heat(jnp.zeros((4, 4)).at[1, 1].set(4.0)).round(1))
      [[0. 1. 0. 0.]
       [1. 0. 1. 0.]
       [0. 1. 0. 0.]
       [0. 0. 0. 0.]]
    """
    if not callable(fn):
        rule = f"fn is a function, not {kind_of(fn)}."
        raise LayoutError(rule, call="stencil(fn, ...)", advice='as in stencil(fn, "1+x/a+1 -> x/a")(u)')

    def run(*arrays: Any) -> Any:
        example = 'stencil.stencil(fn, "1+x/a+1 -> x/a")(u)'
        call = open_call("stencil.stencil", pattern, names, arrays=arrays, inputs=None, example=example)
        wide = [d for layout in call.pattern.inputs for d in layout.dims if any(d.margin)]
        return _applied(call, fn, read_edges(call, edge, call.pattern.inputs, wide), corners, arrays)

    return run


def diff(x: Any, layout: str, /, *, edge: Any = "periodic", **names: Any) -> jax.Array:
    """The difference to the next element along the dimension in brackets: `diff(u, "[x/a] y")`.

    It gives what `jnp.diff` gives, with one more element at the end: the difference to what lies beyond the end. So the
    size and the layout stay.

    Communication: one collective-permute of one slice if the dimension is divided. Backward the reverse.

    Args:
      x: The array.
      layout: Its layout, with one dimension in brackets.
      edge: What lies beyond the end, as in `halo`.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The differences, in the same layout.

    Raises:
      LayoutError: On a malformed layout, or not exactly one bracket.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> squares = jnp.arange(8) ** 2
      >>> @spmd.kernel("x/a -> x/a", mesh=mesh)
      ... def differences(u):
      ...     return spmd.stencil.diff(u, "[x/a]", edge="edge")
      >>> print(differences(squares))
      [ 1  3  5  7  9 11 13  0]
    """
    one = along("stencil.diff", x, layout, names, most=1)
    call, operand = one.call, one.operand
    src = operand.layout
    edges = read_edges(call, edge, (src,), [d for d in src.dims if d.bracket])
    i = next(i for i, d in enumerate(src.dims) if d.bracket)
    plain = src.without_brackets()
    wide = with_margins(plain, {i: (0, 1)})
    at = i - len(src.dims) if any(d.ellipsis for d in src.dims[:i]) else i
    padded = _padded(call, x, plain, wide, edge=edges)
    n = padded.shape[at]
    later, now = (lax.slice_in_dim(padded, k, n - 1 + k, axis=at) for k in (1, 0))
    return call.result(_opened(operand, later != now if later.dtype == bool else later - now), plain, due=True)


@explained
def convolve(x: Any, weights: Any, layout: str, /, *, edge: Any = "zero", **names: Any) -> jax.Array:
    """The convolution with a small array along the dimensions in brackets: `convolve(u, w, "[x/a] [y/b]")`.

    It is `scipy.signal.convolve(..., mode="same")` on divided dimensions: the result has the size and the layout of x.
    Dimensions without brackets are a batch.

    Communication: the halo, half the width of the weights on each side; see `halo`. Backward the same in reverse, and
    one psum for the weights over the axes that divide x, if they are equal by JAX's own type. In auto mode the same, in
    an island; see `local`.

    Args:
      x: The array, of floats or complex numbers.
      weights: An array with the dtype of x and one dimension per bracket, in their order, whole on each device.
      layout: The layout of x.
      edge: What lies beyond the ends, as in `halo`.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The convolution, in the layout of x.

    Raises:
      LayoutError: On a malformed layout, or if the weights have another dtype, or not one dimension per bracket.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> smooth = spmd.kernel("x/a, w -> x/a", mesh=mesh)(lambda u, w: spmd.stencil.convolve(u, w, "[x/a]"))
      >>> print(smooth(jnp.eye(8)[3], jnp.array([0.25, 0.5, 0.25])))
      [0.   0.   0.25 0.5  0.25 0.   0.   0.  ]
    """
    one = along("stencil.convolve", x, layout, names, example='stencil.convolve(x, weights, "b/dp [d]")')
    call, operand = one.call, one.operand
    src = operand.layout
    edges = read_edges(call, edge, (src,), [d for d in src.dims if d.bracket])
    weights = as_array(weights, "the array of weights", call.fail)
    marked = [i for i, d in enumerate(src.dims) if d.bracket]
    _check_weights(call, weights, marked, operand)
    plain = src.without_brackets()
    # "same" keeps the middle of the full result: entry (n - 1) // 2 of the weights meets the element itself
    widths = {i: (n - 1 - (n - 1) // 2, (n - 1) // 2) for i, n in zip(marked, weights.shape, strict=True)}
    wide = with_margins(plain, widths)
    first = next((i for i, d in enumerate(src.dims) if d.ellipsis), len(src.dims))
    places = [i - len(src.dims) if i > first else i for i in marked]
    run = lambda x, weights: _valid(_padded(call, x, plain, wide, edge=edges), weights, places)
    if call.frame.mode == "auto":
        # An island, because XLA's partitioner (jax 0.10 and 0.12, CPU) sums wide windows over axes that hold copies
        # too, and gives multiples of convolutions and of the gradients of weights.
        sides = f"{plain.short}, {' '.join(map(str, weights.shape))} -> {plain.short}"
        run = _local(run, sides, **_parts_of(call, plain))
    return call.result(_opened(operand, run(x, weights)), plain, due=True)


def _check_weights(call: Call, weights: Any, marked: list[int], operand: Operand) -> None:
    src = operand.layout
    if any(len(src.dims[i].atoms) > 1 for i in marked) or weights.ndim != len(marked) or not weights.size:
        rule = "the weights have a size of at least 1 for each dimension in brackets, and each of those has one name."
        call.fail(rule, got=[f"weights: shape {weights.shape}", f'"{src.short}"'])
    if weights.dtype != operand.x.dtype:
        rule = "the weights are numbers of the array's dtype."
        got = [f"weights: {weights.dtype}", f"x: {operand.x.dtype}"]
        call.fail(rule, got=got, fix="weights.astype(x.dtype)")


def _padded(call: Call, x: Any, bare: Layout, wide: Layout, **how: Any) -> Any:
    """An array with the margins of `wide`."""
    if not any(any(dim.margin) for dim in wide.dims):
        return x
    return _halo(x, f"{bare.short} -> {wide.short}", **how, **_parts_of(call, bare))


def _parts_of(call: Call, layout: Layout) -> dict[str, Any]:
    """The sizes that a call below must be given: those of the parts of composite dimensions."""
    names = [name for dim in layout.dims if dim.composite for name in dim.names]
    return {name: call.sizes[name][0] for name in names if name in call.sizes}


def _valid(x: Any, weights: Any, places: list[int]) -> Any:
    """The convolution where the weights lie inside x. The other dimensions are a batch."""
    last, batch = range(-len(places), 0), x.ndim - len(places)
    turned = jnp.moveaxis(x, places, last)
    flat = turned.reshape(-1, 1, *turned.shape[batch:])
    out = lax.conv_general_dilated(flat, jnp.flip(weights)[None, None], (1,) * len(places), "VALID")
    return jnp.moveaxis(out.reshape(*turned.shape[:batch], *out.shape[2:]), last, places)


def _opened(operand: Operand, x: Any) -> Any:
    """One axis per factor again, as results are handed back."""
    return x.reshape(operand.x.shape)


def _applied(call: Call, fn: Callable[..., Any], edge: Edges, corners: bool, arrays: tuple[Any, ...]) -> Any:
    """`fn` of the arrays with their margins, checked."""
    padded = []
    for x, layout in zip(arrays, call.pattern.inputs, strict=True):
        bare = without_margins(layout)
        call.operand(x, layout=bare)  # sizes, from the arrays
        padded.append(_padded(call, x, bare, layout, edge=edge, corners=corners))
    out, [output] = fn(*padded), call.pattern.outputs
    wanted = call.local_shape(output)
    if jnp.shape(out) != wanted:
        rule = f'fn returns what "{output.short}" says, of shape {wanted} here.'
        call.fail(rule, got=[f"fn returned shape {jnp.shape(out)}"], error=SizeError)
    return call.result(out, output, due=True)
