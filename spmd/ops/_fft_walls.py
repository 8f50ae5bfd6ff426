"""Cosine and sine transforms on one device: Fourier transforms of arrays between two walls.

Each is made of Fourier transforms of real numbers, of the array reordered (types II and III) or reflected (types I and
IV). A sine transform is a cosine transform of the array with alternating signs, or reversed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from spmd import _compat
from spmd._trees.arguments import explained
from spmd._trees.leaves import not_int
from spmd.comm._call import Call
from spmd.comm.collectives import all_to_all
from spmd.errors import SizeError
from spmd.language import Atom
from spmd.modes import scope
from spmd.ops._einops import rearrange
from spmd.ops._reduce import plain_dims
from spmd.ops._sizes import axis_size, iota, one_dimension

TYPES = (1, 2, 3, 4)
_INVERSE = {1: 1, 2: 3, 3: 2, 4: 4}


class Wall(NamedTuple):
    """A transform between walls.

    Attributes:
      sine: Whether it is one of sines.
      type: 1 to 4.
      inverse: Whether it is the inverse of the transform of this type.
    """

    sine: bool
    type: int
    inverse: bool

    @property
    def least(self) -> int:
        """The least number of elements: a cosine transform of type I has one at each wall."""
        return 2 if self.type == 1 and not self.sine else 1

    def along_last(self, x: Any, norm: str | None) -> Any:
        """The transform of the last dimension of a real or complex array."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.complex(self.along_last(x.real, norm), self.along_last(x.imag, norm))
        kind = _INVERSE[self.type] if self.inverse else self.type
        period = 2 * (x.shape[-1] + (0 if kind > 1 else 1 if self.sine else -1))
        ortho = norm == "ortho"
        ends = _ends(self.sine, kind) if ortho else ((), ())
        x = _scaled(x, ends[0], math.sqrt(2))
        x = _scaled((_sines if self.sine else _cosines)(x, kind), ends[1], math.sqrt(0.5))
        power = 0.5 if ortho else 1.0 if (norm is None) == self.inverse else 0.0
        return x * period**-power if power else x


def _ends(sine: bool, kind: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The elements whose weight an orthonormal transform changes, before it and after it."""
    if sine:
        return {2: ((), (-1,)), 3: ((-1,), ())}.get(kind, ((), ()))
    return {1: ((0, -1), (0, -1)), 2: ((), (0,)), 3: ((0,), ())}.get(kind, ((), ()))


def _scaled(x: Any, places: tuple[int, ...], factor: float) -> Any:
    for place in places:
        x = x.at[..., place].multiply(factor)
    return x


def _cosines(x: Any, kind: int) -> Any:
    """The sums of `2 x[n] cos(...)`, without a norm."""
    n = x.shape[-1]
    if kind == 1:  # even about both of its ends
        return jnp.fft.rfft(jnp.concatenate([x, x[..., -2:0:-1]], -1)).real
    if kind == 2:  # J. Makhoul, A fast cosine transform in one and two dimensions, IEEE Trans. ASSP 28 (1980)
        half = jnp.fft.rfft(jnp.concatenate([x[..., ::2], x[..., 1::2][..., ::-1]], -1))
        half = 2 * half * _turns(jnp.arange(n // 2 + 1, dtype=jnp.int32), 4 * n, x)
        return jnp.concatenate([half.real, -half.imag[..., 1 : (n + 1) // 2][..., ::-1]], -1)
    if kind == 3:  # the transpose of type II, where the first element counts once
        [out] = jax.linear_transpose(functools.partial(_cosines, kind=2), x)(_scaled(x, (0,), 0.5))
        return out
    odd = 2 * jnp.arange(n, dtype=jnp.int32) + 1
    turned = lax.complex(x, jnp.zeros_like(x)) * _turns(odd - 1, 8 * n, x)
    return 2 * (jnp.fft.fft(turned, 2 * n)[..., :n] * _turns(odd, 8 * n, x)).real


def _sines(x: Any, kind: int) -> Any:
    """The sums of `2 x[n] sin(...)`, without a norm."""
    if kind == 1:  # odd about the zeros beyond both of its ends
        zero = jnp.zeros_like(x[..., :1])
        return -jnp.fft.rfft(jnp.concatenate([zero, x, zero, -x[..., ::-1]], -1)).imag[..., 1:-1]
    signs = _row(1 - 2 * (jnp.arange(x.shape[-1], dtype=jnp.int32) % 2), x)
    return _cosines(x * signs, 2)[..., ::-1] if kind == 2 else signs * _cosines(x[..., ::-1], kind)


def _turns(steps: Any, period: int, x: Any) -> Any:
    """`exp(-2 pi i steps / period)` along the last dimension of x."""
    angle = _row(steps, x) * (-math.tau / period)
    return lax.complex(jnp.cos(angle), jnp.sin(angle))


def _row(values: Any, x: Any) -> Any:
    """Numbers for the last dimension of x."""
    return lax.expand_dims(values.astype(x.dtype), range(x.ndim - 1))


# --- fourier transforms on one device, and of a divided dimension if no other dimension can take its axes -------------
#
# The latter is a transform in two factors, with three exchanges.


def transformed(fn: Callable[..., Any], x: Any, dims: list[int]) -> Any:
    """A transform of the dimensions `dims`. XLA transforms the last ones, so they become last, in memory too."""
    last = range(-len(dims), 0)
    return jnp.moveaxis(_compat.row_major(fn(_compat.row_major(jnp.moveaxis(x, dims, last)), axes=last)), last, dims)


def factors(n: int, parts: int) -> tuple[int, int]:
    """Write n, a multiple of `parts`, as a product. The first factor is a multiple of `parts`. If the second can be one
    too, it is, and the two are as equal as possible."""
    rest, remainder = divmod(n, parts * parts)
    if remainder:
        return parts, n // parts
    first = max(d for d in range(1, math.isqrt(rest) + 1) if rest % d == 0)
    return parts * first, parts * (rest // first)


@scope(mapping=None)
def in_two_factors(x: Any, sizes: tuple[int, int], axes: tuple[str, ...], *, inverse: bool, norm: str | None) -> Any:
    """The transform of the last dimension, `"... (m n)/a"` to `"... (q k)/a"`, complex.

    With the sample `m N + n` and the frequency `q M + k`: transforms of length M along m, a factor for each k and n,
    transforms of length N along n. (W. M. Gentleman, G. Sande, Fast Fourier Transforms, AFIPS 1966.)
    """
    m, n = sizes
    wide = -(-n // axis_size(axes)) * axis_size(axes)  # as many columns as can be divided
    many = functools.partial(jnp.fft.ifftn if inverse else jnp.fft.fftn, norm=norm)
    x = rearrange(x, "... (m n)/a -> ... m/a n", n=n, a=axes)
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, wide - n)]) if wide > n else x
    x = transformed(many, all_to_all(x, "... m/a n -> ... m n/a", a=axes), [x.ndim - 2])
    turns = jnp.arange(m, dtype=jnp.int32)[:, None] * iota("n/a", n=wide, a=axes)[None, :]
    angle = turns.astype(x.real.dtype) * (math.tau / (m * n) * (1 if inverse else -1))
    x = x * lax.expand_dims(lax.complex(jnp.cos(angle), jnp.sin(angle)), range(x.ndim - 2))
    x = all_to_all(x, "... k n/a -> ... k/a n", a=axes)
    x = transformed(many, x[..., :n] if wide > n else x, [x.ndim - 1])
    if wide > n:
        return _in_blocks(x, axes)
    x = all_to_all(x, "... k/a q -> ... k q/a", a=axes)
    return rearrange(x, "... k q/a -> ... (q k)/a", a=axes)


def _in_blocks(x: Any, axes: tuple[str, ...]) -> Any:
    """`"... k/a q"` to `"... (q k)/a"` with one k on each device, though a does not divide q.

    Row k has for block d the frequencies `q K + k` from `d N` on. Their number is `N / K`, rounded up or down. Each
    pair of devices exchanges the larger number, and each device puts its block in order.
    """
    parts, n = axis_size(axes), x.shape[-1]
    places = -(-n // parts)
    start = lambda row, block: (block * n - row + parts - 1) // parts  # the first q of a row that is in a block
    row, block = iota("k/a", k=parts, a=axes), jnp.arange(parts, dtype=jnp.int32)
    there = start(row[:, None, None], block[None, :, None]) + jnp.arange(places, dtype=jnp.int32)[None, None, :]
    x = _taken(x, jnp.minimum(there, n - 1).reshape(row.size, parts * places))
    x = all_to_all(x.reshape(*x.shape[:-1], parts, places), "... k/a d c -> ... k d/a c", a=axes)
    x = jnp.moveaxis(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], parts * places)
    block = iota("d/a", d=parts, a=axes)[:, None]
    wanted = block * n + jnp.arange(n, dtype=jnp.int32)[None, :]
    here = wanted % parts * places + wanted // parts - start(wanted % parts, block)
    return rearrange(_taken(x, here), "... d/a r -> ... (d r)/a", a=axes)


def _taken(x: Any, at: Any) -> Any:
    """Elements of the last dimension, chosen row by row."""
    return jnp.take_along_axis(x, lax.expand_dims(at, range(x.ndim - 2)), axis=-1)


# --- the frequencies that belong to the dimensions of a spectrum ------------------------------------------------------


@explained
def fftfreq(layout: str, /, d: float | jax.Array = 1.0, **names: Any) -> jax.Array:
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
    n = call.factor(call.src.dims[0].atoms[0]).size
    i = iota(layout, **names)
    i = jnp.where(i < (n + 1) // 2, i, i - n)
    return i.astype(float) / (jnp.asarray(d, float) * n)


@explained
def rfftfreq(layout: str, /, n: int, d: float | jax.Array = 1.0, *, pad: bool = False, **names: Any) -> jax.Array:
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
    [atom] = call.src.dims[0].atoms
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
    plain_dims(call, call.src)
    if dim.composite:
        call.fail(f"{who} asks for a dimension with one name.", advice=f'as in {who}("kx")')
    return call
