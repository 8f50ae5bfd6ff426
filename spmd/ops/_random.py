"""Random arrays that are bit-equal to `jax.random` on the whole shape, though each device draws only its own shard.

JAX's partitionable threefry hashes the position of each element in the whole array. So a block can be drawn by itself
from the positions of its elements. A PRNG implementation of our own does that: its key is a threefry key with the
position of the block's first element, and JAX's own samplers run on it unchanged.

The random bits are always equal. Samplers compute from them by XLA's code. On some backends (CPUs with FMA under jaxlib
0.12) its rounding of `erf_inv`, and so of normal numbers, depends on the shape of the array. The numbers then differ in
the last place, as those of two shapes of `jax.random.normal` itself do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl, threefry2x32_p

from spmd import _compat
from spmd._trees.leaves import is_key
from spmd.comm import _lax
from spmd.comm._call import Call, Factor, open_call
from spmd.comm._keywords import as_array
from spmd.comm._marks import mark
from spmd.errors import ModeError, ReplicationError
from spmd.language import Layout

THREEFRY = "threefry2x32"
_WORD = 2**32

Words = tuple[Any, Any]  # a 64-bit number, or an array of them, as (high, low) uint32


# --- 64-bit positions in 32-bit words, since uint64 does not exist without x64 ------------------------------


def _words(number: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(number // _WORD % _WORD), np.uint32(number % _WORD)


def _multiply(a: Any, number: int) -> Words:
    """`a * number` for a uint32 array, in 16-bit limbs, because their products fit a word."""
    high, low = _words(number)
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    a0, a1, b0, b1 = a & mask, a >> half, low & mask, low >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (other >> half) + a * high, a * low


def _add(a: Words, b: Words) -> Words:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def _positions(first: Words, sizes: tuple[int, ...], strides: tuple[int, ...], wide: bool) -> Words:
    """The positions of a block's elements in the whole array."""
    place = (lax.full(sizes, first[0]), lax.full(sizes, first[1]))
    for dim, stride in enumerate(strides):
        count = lax.broadcasted_iota(jnp.uint32, sizes, dim)
        if wide:
            place = _add(place, _multiply(count, stride))
        else:
            place = place[0], place[1] + count * np.uint32(stride)
    return place


# --- the block as JAX's samplers see it ---------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _block_prng(block: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...], wide: bool) -> Hashable:
    """A PRNG for one block; its keys are `[threefry key, high and low word of the first position]`.

    Args:
      block: The block's shape, the only one that may be drawn.
      sizes: The same elements with a dimension per stride.
      strides: How far neighbours are apart in the whole array, in elements.
      wide: Whether positions need more than 32 bits.
    """

    def random_bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
        if tuple(shape) != block:
            raise NotImplementedError(f"spmd.random: a sampler drew shape {shape} for a block of {block}")
        place = (word.reshape(block) for word in _positions((key[2], key[3]), sizes, strides, wide))
        high, low = threefry2x32_p.bind(lax.full(block, key[0]), lax.full(block, key[1]), *place)
        if width == 64:
            return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
        return (high ^ low).astype(f"uint{width}")

    def split(key: Any, shape: tuple[int, ...]) -> Any:
        keys = jax.random.key_data(jax.random.split(_typed(key[:2]), shape))
        first = lax.broadcast_in_dim(key[2:], (*keys.shape[:-1], 2), (keys.ndim - 1,))
        return lax.concatenate([keys, first], keys.ndim - 1)

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("spmd.random: the key of a block is neither seeded nor folded into")

    return define_prng_impl(
        key_shape=(4,),
        seed=refuse,
        split=split,
        random_bits=random_bits,
        fold_in=refuse,
        name="spmd_block",
        tag="spmd",
    )


def _typed(data: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=THREEFRY)


def _strides(factors: Sequence[Factor]) -> list[int]:
    return [math.prod(f.size for f in factors[i + 1 :]) for i in range(len(factors))]


def _collapse(factors: Sequence[Factor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The block's sizes and strides in the whole array. Dimensions without gaps between them are joined."""
    joined: list[tuple[int, int]] = []
    for factor, stride in zip(factors, _strides(factors), strict=True):
        if factor.local == 1:
            continue
        if joined and joined[-1][1] == factor.local * stride and joined[-1][0] * factor.local < _WORD:
            joined[-1] = joined[-1][0] * factor.local, stride
        else:
            joined.append((factor.local, stride))
    joined = joined or [(1, 1)]
    return tuple(n for n, _ in joined), tuple(s for _, s in joined)


def _block_key(call: Call, data: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
    """The key with which this device draws its block, of this shape."""
    factors = [call.factor(atom) for atom in layout.atoms]
    sizes = dict(call.frame.sizes)
    first: Words = (jnp.uint32(0), jnp.uint32(0))
    for factor, stride in zip(factors, _strides(factors), strict=True):
        if factor.axes:
            index = _lax.axis_index(factor.axes, sizes).astype(jnp.uint32)
            first = _add(first, _multiply(index, factor.local * stride))
    wide = math.prod(f.size for f in factors) > _WORD
    place = _compat.pvary(jnp.stack(first), layout.axes)
    have = call.frame.in_mesh_order(_compat.varying_axes(place) | _compat.varying_axes(data))
    words = lax.concatenate([_compat.pvary(data, have), _compat.pvary(place, have)], 0)
    return jax.random.wrap_key_data(words, impl=_block_prng(shape, *_collapse(factors), wide))


# --- checks -------------------------------------------------------------------------------------------------


def _key_words(call: Call, key: Any) -> Any:
    """The two words of a threefry key, typed or raw. A key of any other generator is an error."""
    dtype, typed = getattr(key, "dtype", None), is_key(key)
    if not typed and dtype != np.uint32:
        got = [type(key).__name__ if dtype is None else f"{dtype}{list(key.shape)}"]
        rule = "the first argument is a random key."
        call.fail(rule, got=got, advice="as in jax.random.key(seed)")
    kind = str(jax.random.key_impl(key)) if typed else jax.config.jax_default_prng_impl
    if kind != THREEFRY:
        call.fail(
            f"the numbers of {kind} depend on the shape of the whole draw, so no shard can be drawn alone.",
            got=[f"a key of {kind}"],
            fix=f'jax.random.key(seed, impl="{THREEFRY}")',
            error=ModeError,
        )
    if not jax.config.jax_threefry_partitionable:
        call.fail(
            "the numbers of the older threefry scheme depend on the shape of the whole draw, so no shard can "
            "be drawn alone.",
            got=["jax_threefry_partitionable=False"],
            fix='jax.config.update("jax_threefry_partitionable", True)',
            error=ModeError,
        )
    if key.ndim != (0 if typed else 1):
        call.fail(
            "one key draws one array.",
            got=[f"keys of shape {key.shape if typed else key.shape[:-1]}"],
            advice="jax.vmap over the keys; the string does not mention the mapped dimension",
        )
    return jax.random.key_data(key) if typed else jnp.asarray(key)


def _check_equal(call: Call, data: Any, layout: Layout) -> None:
    different = call.frame.in_mesh_order(_compat.varying_axes(data) & set(layout.axes))
    if different:
        call.fail(
            f"the key must be the same on every device: it varies along {', '.join(different)}, which "
            "divides the array, and the shards would not be those of one array.",
            got=[f"key: {jax.typeof(data)}", call.frame.describe()],
            advice="pass one key, undivided; the shards differ by themselves",
            error=ReplicationError,
        )


def _check_layout(call: Call, layout: Layout) -> None:
    for dim in layout.dims:
        if any(dim.margin):
            rule = "random values have no margins: those are copies of the neighbours'."
            call.fail(rule, at=dim.span, advice="draw without, then add the margins")
        if dim.ellipsis or any(a.name == "_" for a in dim.atoms):
            rule = f"the size of {'...' if dim.ellipsis else '_'} is not known here."
            call.fail(rule, at=dim.span, advice="name every dimension")
    if layout.unreduced or layout.reduced:
        plain = Layout.from_dims(layout.dims)
        rule = "random values are complete, so the layout has no marks."
        call.fail(rule, advice=f'"{plain.short}"')


def _check_number(call: Call, **numbers: Any) -> None:
    for name, value in numbers.items():
        if np.ndim(value):
            call.fail(
                f"{name} is one number for the whole array, not an array.",
                got=[f"{name}: shape {np.shape(value)}"],
                advice="draw with the default and scale the result",
            )


# --- the samplers -------------------------------------------------------------------------------------------


def _draw(
    name: str,
    key: Any,
    layout: str,
    names: dict[str, Any],
    numbers: dict[str, Any],
    sample: Callable[..., Any],
) -> Any:
    call = open_call(name, layout, names, arrays=(key,), arrow=False, example=f'{name}(key, "b/dp", b=8)')
    _check_layout(call, call.src)
    _check_number(call, **numbers)
    data = _key_words(call, key)
    # A bound that the compiler sees is folded at compile time, and the rounding then differs from that at run time.
    bounds = [lax.optimization_barrier(as_array(value, name, call.fail)) for name, value in numbers.items()]
    shape = call.local_shape(call.src)
    if call.frame.explicit:
        _check_equal(call, data, call.src)
        own = _block_key(call, data, call.src, shape)
    else:
        own = _typed(data)
    return mark(sample(own, shape, *bounds), call.src, call.text, role="created", frame=call.frame)


def uniform(
    key: Any, layout: str, /, *, dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, **names: Any
) -> jax.Array:
    """Uniform random numbers in `[minval, maxval)`: `jax.random.uniform` of the global shape, shard by shard.

    Every mode and every mesh gives the same bits, those of
    `jax.random.uniform(key, global_shape, dtype, minval, maxval)`. Each device draws its own shard only.

    Communication: none, forward and backward.

    Args:
      key: One threefry key, the same on every device.
      layout: The layout of the array, `"b/dp s d"`.
      dtype: A floating-point dtype; `float` is float32, or float64 if `jax_enable_x64` is set.
      minval: The smallest value, one number.
      maxval: The bound above, one number.
      **names: Sizes of names that the kernel's signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      The array in that layout.

    Raises:
      ModeError: If the key is not a threefry key, or if JAX's older threefry scheme is on.
      ReplicationError: If the key differs along an axis that divides the array.
      SizeError: If a size is not known, or does not divide.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("scalar -> b/dp", mesh=mesh)
      ... def noise(key):
      ...     return spmd.random.uniform(key, "b/dp", b=8)
      >>> bool((noise(jax.random.key(0)) == jax.random.uniform(jax.random.key(0), (8,))).all())
      True

    References:
      https://docs.jax.dev/en/latest/jax.random.html
    """
    return _draw(
        "random.uniform", key, layout, names, {"minval": minval, "maxval": maxval},
        lambda k, shape, low, high: jax.random.uniform(k, shape, dtype, low, high),
    )  # fmt: skip


def normal(key: Any, layout: str, /, *, dtype: Any = float, **names: Any) -> jax.Array:
    """Standard normal random numbers: `jax.random.normal` of the global shape, shard by shard.

    Every mode and every mesh gives the numbers of `jax.random.normal(key, global_shape, dtype)`, bit for bit
    if the backend rounds `erf_inv` alike in all shapes. Each device draws its own shard only.

    Communication: none, forward and backward.

    Args:
      key: One threefry key, the same on every device.
      layout: The layout of the array, `"b/dp s d"`.
      dtype: A floating-point or complex dtype; `float` as in `jax.random`.
      **names: Sizes of names that the kernel's signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      The array in that layout.

    Raises:
      ModeError: If the key is not a threefry key, or if JAX's older threefry scheme is on.
      ReplicationError: If the key differs along an axis that divides the array.
      SizeError: If a size is not known, or does not divide.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("b/dp d/tp, scalar -> b/dp d/tp", mesh=mesh)
      ... def jitter(x, key):
      ...     return x + spmd.random.normal(key, "b/dp d/tp")
      >>> whole = jax.random.normal(jax.random.key(0), (4, 6))
      >>> bool(jnp.allclose(jitter(jnp.zeros((4, 6)), jax.random.key(0)), whole))
      True
    """
    return _draw("random.normal", key, layout, names, {}, lambda k, shape: jax.random.normal(k, shape, dtype))


def bernoulli(key: Any, layout: str, /, *, p: Any = 0.5, **names: Any) -> jax.Array:
    """Booleans, true with probability `p`: `jax.random.bernoulli` of the global shape, shard by shard.

    Every mode and every mesh gives the same bits, those of `jax.random.bernoulli(key, p, global_shape)`. Each
    device draws its own shard only. A dropout mask is one line.

    Communication: none, forward and backward.

    Args:
      key: One threefry key, the same on every device.
      layout: The layout of the array, `"b/dp s d"`.
      p: The probability, one number.
      **names: Sizes of names that the kernel's signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      The boolean array in that layout.

    Raises:
      ModeError: If the key is not a threefry key, or if JAX's older threefry scheme is on.
      ReplicationError: If the key differs along an axis that divides the array.
      SizeError: If a size is not known, or does not divide.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4)
      >>> @spmd.kernel("b/dp d, scalar -> b/dp d", mesh=mesh)
      ... def dropout(x, key):
      ...     return jnp.where(spmd.random.bernoulli(key, "b/dp d", p=0.9), x / 0.9, 0)
      >>> dropout(jnp.ones((8, 3)), jax.random.key(0)).shape
      (8, 3)
    """
    sample = lambda k, shape, p: jax.random.bernoulli(k, p, shape)
    return _draw("random.bernoulli", key, layout, names, {"p": p}, sample)


def truncated_normal(
    key: Any, layout: str, /, *, lower: Any = -2.0, upper: Any = 2.0, dtype: Any = float, **names: Any
) -> jax.Array:
    """Normal random numbers in `(lower, upper)`: `jax.random.truncated_normal` of the global shape, sharded.

    Every mode and every mesh gives the numbers of
    `jax.random.truncated_normal(key, lower, upper, global_shape, dtype)`, bit for bit if the backend rounds `erf_inv`
    alike in all shapes. Each device draws its own shard only.

    Communication: none, forward and backward.

    Args:
      key: One threefry key, the same on every device.
      layout: The layout of the array, `"d/dp f/tp"`.
      lower: The bound below, one number.
      upper: The bound above, one number.
      dtype: A floating-point dtype; `float` is float32, or float64 if `jax_enable_x64` is set.
      **names: Sizes of names that the kernel's signature does not bind, and mesh axes (`tp="model"`).

    Returns:
      The array in that layout.

    Raises:
      ModeError: If the key is not a threefry key, or if JAX's older threefry scheme is on.
      ReplicationError: If the key differs along an axis that divides the array.
      SizeError: If a size is not known, or does not divide.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=2)
      >>> @spmd.kernel("scalar -> d/dp f/tp", mesh=mesh)
      ... def weights(key):
      ...     return 0.02 * spmd.random.truncated_normal(key, "d/dp f/tp", d=4, f=8)
      >>> weights(jax.random.key(0)).shape
      (4, 8)
    """
    return _draw(
        "random.truncated_normal", key, layout, names, {"lower": lower, "upper": upper},
        lambda k, shape, low, high: jax.random.truncated_normal(k, low, high, shape, dtype),
    )  # fmt: skip
