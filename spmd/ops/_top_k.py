"""`top_k`: the largest elements along a dimension in brackets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _lax
from spmd._leaves import not_int
from spmd.comm._call import Call, Factor
from spmd.errors import LayoutError, SizeError
from spmd.language import Atom, Dim, Layout
from spmd.ops._along import along


def top_k(x: Any, layout: str, /, k: int, **names: Any) -> tuple[jax.Array, jax.Array]:
    """The k largest elements along the dimension in brackets, and where they are: `top_k(x, "b s [e]", 2)`.

    The largest comes first. The first of equals wins, whichever device it lies on, as in `jax.lax.top_k`. The gradient
    of a value goes to the element that it came from. Positions have no gradient.

    Communication: none if the dimension is whole. If it is divided over n devices, forward one all-gather of values and
    one of positions. Each device contributes its own m = min(k, local size) candidates, so the gathers receive
    m (n - 1) elements and as many int32 for each row. Backward nothing.

    Args:
      x: The array.
      layout: Its layout, with one dimension in brackets.
      k: How many, a Python int from 1 to the global size of that dimension.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      `(values, positions)`. In both that dimension has size k and is whole, equal on its former axes; the other
      dimensions stay. Positions are int32 and count in the whole dimension.

    Raises:
      LayoutError: On a malformed layout, one without brackets, or a k that is not an int.
      SizeError: If k is larger than the dimension.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(tp=4)
      >>> best = spmd.kernel("v/tp -> k, k", mesh=mesh)(lambda x: spmd.top_k(x, "[v/tp]", 3))
      >>> values, positions = best(jnp.array([1.0, 5, 0, 2, 5, 3, 4, 1]))
      >>> print(values, positions)
      [5. 5. 4.] [1 4 6]
    """
    one = along("top_k", x, layout, names, most=1, ordered=True, example='top_k(x, "b/dp [d]", 2)')
    dim, factor = one.dim, one.factor
    _check(one.call, k, factor)

    def divided() -> Any:
        values, positions = _last(one.x, min(k, factor.local), dim)
        start = one.call.start(factor)
        positions = positions.astype(start.dtype) + start
        # Blocks arrive in the order of their positions, so of equals the earlier candidate is the earlier element.
        values, positions = (_lax.all_gather(y, factor.axes, dim, "invarying") for y in (values, positions))
        values, chosen = _last(values, k, dim)
        return values, jnp.take_along_axis(positions, chosen, axis=dim)

    return one.result(lambda: _last(one.x, k, dim), divided, _result_layout(one.operand.layout))


def _last(x: Any, k: int, dim: int) -> tuple[Any, Any]:
    """`lax.top_k` along any dimension."""
    values, positions = lax.top_k(jnp.moveaxis(x, dim, -1), k)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(positions, -1, dim)


def _result_layout(layout: Layout) -> Layout:
    """The layout with an unnamed whole dimension in the place of the one in brackets."""
    chosen = Dim((Atom("_"),))
    return Layout.from_dims([chosen if d.bracket else replace(d, bracket=False) for d in layout.dims])


def _check(call: Call, k: Any, factor: Factor) -> None:
    if fault := not_int("k, the number of elements,", k):
        call.fail(fault, error=LayoutError)
    if not 1 <= k <= factor.size:
        rule = f"k is from 1 to the size of {factor.name}, {factor.size}, not {k}."
        call.fail(rule, at=factor.span, got=[call.frame.describe()], error=SizeError)
