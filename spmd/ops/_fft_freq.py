"""The frequencies that belong to the dimensions of a spectrum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd._leaves import not_int
from spmd.comm._call import Call
from spmd.errors import LayoutError, SizeError
from spmd.language import Atom
from spmd.ops._partial_sums import plain_dims
from spmd.ops._sizes import iota, one_dimension


def fftfreq(layout: str, /, d: Any = 1.0, **names: Any) -> jax.Array:
    """The sample frequencies of a transformed dimension. Each device has those of its own block: `fftfreq("ky/a")`.

    Communication: none.

    Args:
      layout: One dimension, `"ky/a"`. The kernel's signature or a keyword binds its size.
      d: The distance of the samples.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The block of `jnp.fft.fftfreq(n, d)` that is held here, in cycles per unit of d.

    Raises:
      LayoutError: If the string is not one dimension.
      SizeError: If its size is not known, or does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> print(spmd.kernel("-> k/a", mesh=mesh)(lambda: spmd.fft.fftfreq("k/a", k=8))() * 8)
      [ 0.  1.  2.  3. -4. -3. -2. -1.]
    """
    call = _one_dimension("fft.fftfreq", layout, names)
    n = call.factor(call.pattern.inputs[0].dims[0].atoms[0]).size
    i = iota(layout, **names)
    i = jnp.where(i < (n + 1) // 2, i, i - n)
    return i.astype(float) / (jnp.asarray(d, float) * n)


def rfftfreq(layout: str, /, n: int, d: Any = 1.0, *, pad: bool = False, **names: Any) -> jax.Array:
    """The frequencies that `rfft` keeps of a dimension of n samples: `rfftfreq("kz", 64)`.

    Communication: none.

    Args:
      layout: One dimension, `"kz"`.
      n: How many samples were transformed.
      d: Their distance.
      pad: As given to `rfft`. The sequence of frequencies goes on behind them, where the spectrum is zero.
      **names: Sizes or mesh axes of names in the layout.

    Returns:
      The block of `jnp.fft.rfftfreq(n, d)` that is held here.

    Raises:
      LayoutError: If the string is not one dimension.
      SizeError: If the dimension is known to have another size than n // 2 + 1, or does not divide.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(a=4)
      >>> print(spmd.kernel("-> k", mesh=mesh)(lambda: spmd.fft.rfftfreq("k", 8))() * 8)
      [0. 1. 2. 3. 4.]
    """
    call = _one_dimension("fft.rfftfreq", layout, names)
    [atom] = call.pattern.inputs[0].dims[0].atoms
    if fault := not_int("n, the number of samples,", n, 1):
        call.fail(fault, error=SizeError)
    size = frequencies(call, atom, n, pad)
    call.bind(atom.name, size, f"the frequencies of n={n} samples", atom.span)
    i = iota(layout, **{**names, atom.name: size})
    return i.astype(float) / (jnp.asarray(d, float) * n)


def frequencies(call: Call, atom: Atom, n: int, pad: bool) -> int:
    """The size of the half spectrum of n samples: its frequencies, and the zeros behind them."""
    count = n // 2 + 1
    known = call.sizes.get(atom.name)
    least = count + -count % call.frame.axis_size(atom.axes or ()) if pad else count
    if known is None:
        return least
    if known[0] < count or (known[0] > count and not pad):
        rule = f"{n} samples have {count} frequencies, and {atom.name} is of size {known[0]}."
        advice = f"{atom.name}={least}" + (", or pad=True for zeros behind them" if known[0] > count else "")
        call.fail(rule, at=atom.span, got=[f"{atom.name} = {known[0]}: {known[1]}"], advice=advice, error=SizeError)
    return known[0]


def _one_dimension(who: str, layout: Any, names: dict[str, Any]) -> Call:
    call, dim = one_dimension(who, layout, names)
    plain_dims(call, call.pattern.inputs[0])
    if dim.composite:
        call.fail(f"{who} asks for a dimension with one name.", advice=f'as in {who}("kx")', error=LayoutError)
    return call
