"""Functions that random bodies are made of: one for each primitive that works on elements, or along one dimension.

All take floats and give floats, of moderate size and with no tie that a sum in another order would decide otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd

One = Callable[[Any], Any]
Two = Callable[[Any, Any], Any]
Along = Callable[[Any, int], Any]


def whole_numbers(x: Any) -> Any:
    return (lax.sin(x) * 9.0).astype(jnp.int32)


def floats(x: Any) -> Any:
    return x.astype(jnp.float32) * 0.25


def truth(x: Any) -> Any:
    return x > 0.1


def positive(x: Any) -> Any:
    return lax.sin(x) + 1.5


CURVED: list[One] = [
    jnp.tanh,
    lambda x: lax.abs(x),
    lambda x: lax.sign(x),
    lambda x: lax.exp(lax.sin(x)),
    lambda x: lax.exp2(lax.sin(x)),
    lambda x: lax.expm1(lax.sin(x)),
    lambda x: lax.log(positive(x)),
    lambda x: lax.log1p(positive(x)),
    lambda x: jnp.log2(positive(x)),
    lambda x: lax.sqrt(positive(x)),
    lambda x: lax.rsqrt(positive(x)),
    lambda x: lax.cbrt(positive(x)),
    lambda x: lax.square(x) * 0.2,
    lambda x: lax.integer_pow(lax.sin(x), 3),
    lambda x: lax.pow(positive(x), 0.3),
    lambda x: lax.sin(x),
    lambda x: lax.cos(x),
    lambda x: lax.tan(0.5 * lax.sin(x)),
    lambda x: lax.asin(0.9 * lax.sin(x)),
    lambda x: lax.acos(0.9 * lax.sin(x)),
    lambda x: lax.atan(x),
    lambda x: lax.sinh(lax.sin(x)),
    lambda x: lax.cosh(lax.sin(x)),
    lambda x: lax.asinh(x),
    lambda x: lax.acosh(positive(x) + 1.0),
    lambda x: lax.atanh(0.9 * lax.sin(x)),
    lambda x: lax.logistic(x),
    lambda x: lax.erf(x),
    lambda x: lax.erfc(x),
    lambda x: lax.erf_inv(0.9 * lax.sin(x)),
    lambda x: lax.lgamma(positive(x)),
    lambda x: lax.digamma(positive(x)),
    lambda x: lax.polygamma(jnp.ones_like(x), positive(x)),
    lambda x: lax.zeta(positive(x) + 1.0, jnp.ones_like(x)),
    lambda x: lax.igamma(positive(x), positive(0.5 * x)),
    lambda x: lax.igammac(positive(x), positive(0.5 * x)),
    lambda x: lax.igamma_grad_a(positive(x), positive(0.5 * x)),
    lambda x: lax.random_gamma_grad(positive(x), positive(0.5 * x)),
    lambda x: lax.betainc(positive(x), positive(0.5 * x), 0.3 + 0.2 * lax.sin(x)),
    lambda x: lax.bessel_i0e(x),
    lambda x: lax.bessel_i1e(x),
    lambda x: lax.max(x, jnp.full_like(x, 0.1)),
    lambda x: lax.min(x, jnp.full_like(x, 0.1)),
    lambda x: lax.clamp(-0.5, x, 0.5),
    lambda x: lax.floor(3.0 * x) * 0.3,
    lambda x: lax.ceil(3.0 * x) * 0.3,
    lambda x: lax.round(3.0 * x) * 0.3,
    lambda x: lax.is_finite(x).astype(jnp.float32) * x,
    lambda x: floats(lax.population_count(whole_numbers(x))),
    lambda x: floats(lax.clz(whole_numbers(x))),
    lambda x: floats(lax.bitwise_not(whole_numbers(x))),
    lambda x: floats(lax.shift_left(whole_numbers(x), jnp.full(x.shape, 1, jnp.int32))),
    lambda x: floats(lax.shift_right_arithmetic(whole_numbers(x), jnp.full(x.shape, 1, jnp.int32))),
    lambda x: floats(lax.shift_right_logical(whole_numbers(x), jnp.full(x.shape, 28, jnp.int32))),
    lambda x: floats(lax.bitcast_convert_type(x, jnp.int32) >> 23),
    lambda x: floats(whole_numbers(x) // 4 + whole_numbers(x) % 3),
    lambda x: jnp.where(truth(x) & ~truth(-x) | truth(x - 1.0), x, 0.3),
    lambda x: floats(truth(x) ^ truth(2.0 * x - 0.7)),
    lambda x: 1.0 / positive(x),
    lambda x: jnp.linalg.norm(jnp.stack([x, jnp.ones_like(x)]), axis=0),
    lambda x: jax.nn.gelu(x),
    lambda x: jax.nn.relu(x) + 1.0,
    lambda x: jax.nn.silu(x),
    lambda x: lax.abs(lax.complex(x, 0.3 * x)),
    lambda x: (x.astype(jnp.bfloat16) * jnp.bfloat16(1.0)).astype(jnp.float32),
    lambda x: jax.vmap(jnp.sin)(x) if x.ndim else jnp.sin(x),
]

LINEAR: list[One] = [
    lambda x: spmd.fused("a kernel")(lax.neg)(x),
    lambda x: 0.5 * x,
    lambda x: x / 3.0,
    lambda x: x + 2.0 * x,
    lambda x: x - 3.0 * x,
    lambda x: lax.real(lax.complex(x, -x)) + lax.imag(lax.complex(x, -x)) * 0.5,
    lambda x: lax.real(lax.conj(lax.complex(x, x))),
    lambda x: lax.stop_gradient(x),
    lambda x: lax.reduce_precision(x, 8, 23),
    lambda x: jnp.copy(x),
    lambda x: lax.optimization_barrier(x),
    lambda x: x * jnp.full_like(x, 0.7),
    lambda x: x + jnp.zeros_like(x),
    lambda x: jnp.where(jnp.bool_(True), x, 0.0),
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 0.5,
    lambda x: jnp.sum(jnp.stack([x, 0.5 * x]), axis=0),
    lambda x: x[None][0],
    lambda x: x.reshape(-1).reshape(x.shape),
    lambda x: x * 0.0 + x,
]

LINEAR_PAIRS: list[Two] = [
    lambda x, y: x + y,
    lambda x, y: x - 2.0 * y,
    lambda x, y: jnp.where(jnp.bool_(False), x, y),
    lambda x, y: lax.real(lax.complex(x, y)) + lax.imag(lax.complex(x, y)),
    lambda x, y: jnp.stack([x, y])[1] + x,
    lambda x, y: jnp.concatenate([x[None], y[None]]).sum(0),
    lambda x, y: sum(lax.optimization_barrier((x, y))),
]

CURVED_PAIRS: list[Two] = [
    lambda x, y: x * y * 0.3,
    lambda x, y: x / positive(y),
    lambda x, y: lax.max(x, y),
    lambda x, y: lax.min(x, y),
    lambda x, y: lax.atan2(x, positive(y)),
    lambda x, y: lax.rem(x, positive(y)),
    lambda x, y: lax.pow(positive(x), lax.sin(y)),
    lambda x, y: lax.nextafter(x, y),
    lambda x, y: lax.clamp(jnp.minimum(x, y), 0.5 * (x + y), y + 1.0),
    lambda x, y: jnp.where(lax.eq(x, y), x, -y),
    lambda x, y: jnp.where(lax.ne(x, y), x, -y),
    lambda x, y: jnp.where(lax.lt(x, y), x, 2.0 * y),
    lambda x, y: jnp.where(lax.le(x, y), x, 2.0 * y),
    lambda x, y: jnp.where(lax.gt(x, y), x, 2.0 * y),
    lambda x, y: jnp.where(lax.ge(x, y), x, 2.0 * y),
    lambda x, y: floats(lax.bitwise_and(whole_numbers(x), whole_numbers(y))),
    lambda x, y: floats(lax.bitwise_or(whole_numbers(x), whole_numbers(y))),
    lambda x, y: floats(lax.bitwise_xor(whole_numbers(x), whole_numbers(y))),
    lambda x, y: jnp.hypot(positive(x), y),
    lambda x, y: jnp.logaddexp(lax.sin(x), lax.sin(y)),
    lambda x, y: lax.select_n((jnp.abs(lax.sin(x)) * 3.0).astype(jnp.int32), x, y, x + y),
]


def window(x: Any, d: int, n: int) -> dict[str, Any]:
    return {"window_dimensions": tuple(n if i == d else 1 for i in range(x.ndim)), "window_strides": (1,) * x.ndim}


def at(d: int, cut: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * d, cut)


def joined_again(x: Any, d: int) -> Any:
    n = x.shape[d]
    one, two = lax.split(x, [n // 2, n - n // 2], d)
    return lax.concatenate([two, one], d)


def padded_and_cut(x: Any, d: int) -> Any:
    widths = [(2, 1) if i == d else (0, 0) for i in range(x.ndim)]
    return lax.slice_in_dim(jnp.pad(x, widths), 1, 1 + x.shape[d], axis=d)


def in_pieces(x: Any, d: int) -> Any:
    """The second half, and then the first, by slices that start at a number."""
    n = x.shape[d] // 2
    half = lax.dynamic_slice_in_dim(x, jnp.int32(n), n, d)
    return lax.dynamic_update_slice_in_dim(x, 2.0 * half, jnp.int32(0), d)


def filtered(x: Any, d: int) -> Any:
    """A convolution along one dimension, the others being a batch."""
    moved = jnp.moveaxis(x, d, -1)
    rows = moved.reshape(-1, 1, moved.shape[-1])
    kernel = jnp.asarray([[[0.5, 1.0, -0.5]]], jnp.float32)
    out = lax.conv_general_dilated(rows, kernel, (1,), "SAME")
    return jnp.moveaxis(out.reshape(moved.shape), -1, d)


def times_a_matrix(x: Any, d: int) -> Any:
    n = x.shape[d]
    numbers = jnp.asarray(np.cos(np.arange(n)[:, None] * 0.7 + np.arange(n)), jnp.float32)
    return jnp.moveaxis(jnp.tensordot(x, numbers, ((d,), (0,))), -1, d) / n


ALONG_LINEAR: list[Along] = [
    lambda x, d: lax.rev(x, (d,)),
    lambda x, d: lax.cumsum(x, d) / x.shape[d],
    lambda x, d: lax.cumsum(x, d, reverse=True) / x.shape[d],
    lambda x, d: jnp.roll(x, 1, d),
    lambda x, d: jnp.take(x, jnp.arange(x.shape[d])[::-1], axis=d),
    lambda x, d: jnp.fft.fft(x, axis=d).real / x.shape[d],
    lambda x, d: jnp.fft.irfft(
        lax.complex(jnp.fft.rfft(x, axis=d).imag, jnp.fft.rfft(x, axis=d).imag), n=x.shape[d], axis=d
    ),
    joined_again,
    padded_and_cut,
    in_pieces,
    filtered,
    times_a_matrix,
    lambda x, d: lax.reduce_window(x, np.float32(0), lax.add, padding="SAME", **window(x, d, 3)),
    lambda x, d: x - x.mean(d, keepdims=True),
    lambda x, d: x.at[at(d, 0)].add(1.5 * x[at(d, -1)]),
    lambda x, d: x.at[at(d, slice(1, None))].multiply(2.0),
    lambda x, d: x.at[at(d, 0)].subtract(0.5 * x[at(d, -1)]),
    lambda x, d: lax.associative_scan(jnp.add, x, axis=d) / x.shape[d],
    lambda x, d: jnp.diff(x, axis=d, prepend=x[at(d, slice(0, 1))]),
    lambda x, d: jnp.repeat(x, 2, axis=d)[at(d, slice(1, x.shape[d] + 1))],
]

ALONG: list[Along] = [
    lambda x, d: lax.sort(x, dimension=d),
    lambda x, d: lax.sort((x, lax.sin(3.0 * x)), dimension=d, num_keys=1)[1],
    lambda x, d: lax.cumprod(lax.sin(x), d),
    lambda x, d: lax.cummax(x, d),
    lambda x, d: lax.cummin(x, d),
    lambda x, d: lax.cumlogsumexp(lax.sin(x), d),
    lambda x, d: lax.reduce_window(x, np.float32(-np.inf), lax.max, padding="SAME", **window(x, d, 3)),
    lambda x, d: lax.reduce_window(x, np.float32(np.inf), lax.min, padding="SAME", **window(x, d, 3)),
    lambda x, d: jnp.moveaxis(lax.top_k(jnp.moveaxis(x, d, -1), x.shape[d])[0], -1, d),
    lambda x, d: lax.approx_max_k(x, x.shape[d], reduction_dimension=d, aggregate_to_topk=True)[0],
    lambda x, d: jax.nn.softmax(x, d),
    lambda x, d: (x - x.mean(d, keepdims=True)) / jnp.sqrt(x.var(d, keepdims=True) + 1.0),
    lambda x, d: floats(jnp.argsort(x, d)),
    lambda x, d: jnp.take_along_axis(x, jnp.argsort(lax.sin(5.0 * x), axis=d), axis=d),
    lambda x, d: x.at[at(d, 0)].set(0.3),
    lambda x, d: x.at[at(d, slice(0, 1))].min(x[at(d, slice(0, 1))] - 0.5),
    lambda x, d: x.at[at(d, slice(0, 1))].max(x[at(d, slice(0, 1))] + 0.5),
    lambda x, d: x + 0.1 * lax.broadcasted_iota(jnp.float32, x.shape, d),
]

REDUCERS: list[Along] = [
    lambda x, d: x.max(d),
    lambda x, d: x.min(d),
    lambda x, d: jnp.sin(x).prod(d),
    lambda x, d: truth(x).all(d),
    lambda x, d: truth(x).any(d),
    lambda x, d: lax.reduce_xor(whole_numbers(x), (d,)),
    lambda x, d: lax.argmax(x, d, jnp.int32),
    lambda x, d: lax.argmin(x, d, jnp.int32),
    lambda x, d: jax.nn.logsumexp(x, axis=d),
    lambda x, d: x.sum(d) / x.shape[d],
    lambda x, d: x[at(d, 0)],
    lambda x, d: lax.index_in_dim(x, x.shape[d] - 1, d, keepdims=False),
    lambda x, d: jnp.moveaxis(lax.top_k(jnp.moveaxis(x, d, -1), 1)[1], -1, d)[at(d, 0)],
    lambda x, d: jnp.median(x, axis=d),
    lambda x, d: jnp.linalg.norm(x, axis=d),
]


def solved(a: Any, x: Any) -> Any:
    return lax.linalg.triangular_solve(a, x, left_side=True, lower=True)


MATRICES: list[Callable[[Any, Any], Any]] = [
    lambda a, x: jnp.tril(a).sum(-1),
    lambda a, x: lax.linalg.cholesky(a).sum(-1),
    lambda a, x: lax.linalg.lu(a)[0].sum(-1),
    lambda a, x: floats(lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], a.shape[-1])),
    lambda a, x: lax.linalg.qr(a, full_matrices=False)[0].sum(-1),
    lambda a, x: lax.linalg.householder_product(*jnp_geqrf(a)).sum(-1),
    lambda a, x: lax.linalg.eigh(a)[1],
    lambda a, x: jnp.abs(lax.linalg.eig(a)[0]),
    lambda a, x: lax.linalg.svd(a)[1],
    lambda a, x: lax.linalg.schur(a)[0].sum(-1),
    lambda a, x: lax.linalg.hessenberg(a)[0].sum(-1),
    lambda a, x: lax.linalg.tridiagonal(a)[1],
    lambda a, x: solved(a, x).sum(-1),
    lambda a, x: lax.linalg.triangular_solve(a, jnp.swapaxes(x, -1, -2), left_side=False, lower=True).sum(-2),
    lambda a, x: lax.linalg.tridiagonal_solve(a[..., 0], a[..., 1], a[..., 2], x).sum(-1) if a.shape[-1] > 2 else None,
]


def jnp_geqrf(a: Any) -> Any:
    """The reflectors of a QR decomposition, and their factors."""
    return lax.linalg.geqrf(a) if hasattr(lax.linalg, "geqrf") else (a, a[..., 0])
