"""What the simulator computes of each primitive, against JAX's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd._jaxprs.walker import equations
from spmd.checker import _primitives
from spmd.checker._primitives import NotSimulated, wide_dtype
from spmd.checker._simulator import held_number, simulate

RNG = np.random.default_rng(0)
X = RNG.uniform(0.2, 0.9, (3, 4, 6)).astype(np.float32)
Y = RNG.uniform(0.2, 0.9, (3, 4, 6)).astype(np.float32)
I = RNG.integers(-9, 9, (3, 4, 6)).astype(np.int32)
B = RNG.random((3, 4, 6)) > 0.5
C = (X + 1j * Y).astype(np.complex64)
ROWS = np.array([[2, 0], [-1, 5]], np.int32)

GROUPED_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def largest_of_windows(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 2), "VALID")


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "arithmetic": (lambda x, y: (x + y, x - y, x * y, x / y, -x, x % y, x**y, lax.rem(x, y), abs(x - y)), (X, Y)),
    "integers": (lambda i: (i // 4, lax.div(i, jnp.int32(4)), i % 4, lax.rem(i, jnp.int32(4)), i**3, abs(i), -i), (I,)),
    "curves": (
        lambda x: [
            getattr(lax, name)(x)
            for name in ["exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "atanh", "logistic", "erf", "erfc", "floor", "ceil", "sign", "is_finite"]
        ],
        (X,),
    ),
    "others": (lambda x, y: (lax.acosh(x + 1), lax.atan2(x, y), lax.integer_pow(x, -2), lax.round(3 * x)), (X, Y)),
    "to even": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), (np.array([0.5, 1.5, -0.5], "f4"),)),
    "extremes": (lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y), lax.clamp(0.3, x, y)), (X, Y)),
    "compared": (lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), (np.round(X, 1), np.round(Y, 1))),
    "logic": (lambda b, i: (b & b[::-1], b | ~b, b ^ b, i & 5, i | 5, i ^ 5, ~i, i << 2, i >> 1), (B, I)),
    "shifts": (lambda i: (lax.shift_right_logical(i, jnp.int32(3)), lax.shift_left(i, jnp.int32(40))), (I,)),
    "complex": (lambda c, x: (jnp.real(c), jnp.imag(c), jnp.conj(c), lax.complex(x, x), lax.sign(c), c * c), (C, X)),
    "chosen": (lambda b, x, y: (jnp.where(b, x, y), jnp.where(b[0, 0, 0], x, y)), (B, X, Y)),
    "converted": (lambda x, i, b: ((9 * x).astype(int), i.astype(jnp.float32), b.astype(jnp.float32), x.astype(jnp.bfloat16)), (X, I, B)),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (X,)),
    "reduced": (
        lambda x, b, i: (x.sum(1), x.max((0, 2)), x.min(), x.prod(2), b.all(0), b.any(1), lax.reduce_xor(i, (1,))),
        (X, B, I),
    ),
    "positions": (lambda x: (x.argmax(1), x.argmin(2)), (X,)),
    "accumulated": (
        lambda x: [fn(x, axis=1, reverse=r) for r in (False, True) for fn in
                   (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)],
        (X,),
    ),
    "shapes": (
        lambda x: (x[:, None], x.reshape(4, 18), lax.reshape(x, (8, 9), (2, 0, 1)), x[:, :1].squeeze(1), x.transpose(2, 0, 1), x[::-1, :, ::-1]),
        (X,),
    ),
    "joined": (lambda x, y: (jnp.concatenate([x, y[:, :2]], 1), jnp.stack([x, y], 2), jnp.tile(x, (1, 2, 1))), (X, Y)),
    "parted": (lambda x: (*jnp.split(x, [1, 3], 1), x[1:, ::2, 1:5:3]), (X,)),
    "padded": (lambda x: (lax.pad(x, 0.5, [(1, 2, 0), (-1, 0, 1), (0, -2, 2)]), jnp.pad(x, 1)), (X,)),
    "windows": (
        lambda x, y: (
            lax.dynamic_slice(x, (1, 2, 9), (2, 2, 3)),
            lax.dynamic_update_slice(x, y[:2, :2], (jnp.argmax(y[:, 0, 0]), 3, 0)),
        ),
        (X, Y),
    ),
    "numbers": (lambda x: jnp.arange(6)[None] + lax.broadcasted_iota(jnp.int32, (4, 6), 0), (X,)),
    "products": (
        lambda x, y: (jnp.einsum("abc,abd->acd", x, y), jnp.einsum("abc,dec->abde", x, y), jnp.vdot(x, y), x @ y[0].T),
        (X, Y),
    ),
    "products of integers": (lambda i: i[0] @ i[1].T, (I,)),
    "reduced bits": (lambda i: (lax.reduce(i + 6, -1, lax.bitwise_and, (1,)), lax.reduce(i, 0, lax.bitwise_or, (0,))), (I,)),
    "empty": (lambda x: (x[:, :0].max(1, initial=-1.0), x[:0].min(0, initial=2.0)), (X,)),
    "sorted": (lambda x, i: (jnp.sort(x, 1), lax.sort((i, x), 1, num_keys=2), jnp.argsort(x, 0)), (X, I)),
    "largest": (lambda x: lax.top_k(x, 3), (X,)),
    "picked": (
        lambda x, i: (x[i], x[:, i[0]], jnp.take(x, i + 9, 1, mode="clip"), jnp.take_along_axis(x, i[:, :, None] % 3, 1)),
        (X, np.array([[0, 2], [1, 1], [2, 0]], np.int32)),
    ),
    "filled": (lambda x, i: (x.at[:, i].get(mode="fill", fill_value=7.0), x.at[i].get(mode="fill")), (X, ROWS + 3)),
    "picked in batches": (lambda x, i: jax.vmap(lambda a, j: a[j])(x, i), (X, np.array([[0, 2], [1, 1], [3, 0]], np.int32))),
    "put": (
        lambda x, y, i: [getattr(x.at[:, i], how)(y) for how in ("add", "multiply", "min", "max", "set", "subtract")],
        (X, Y[:, None, :2], np.array([[2, 0]], np.int32)),
    ),
    "dropped": (lambda x, i: x.at[i].add(1.0, mode="drop"), (X, ROWS + 2)),
    "put in batches": (lambda x, i: jax.vmap(lambda a, j: a.at[j].add(2.0))(x, i), (X, np.array([[0, 2], [1, 1], [3, 0]], np.int32))),
    "transformed": (lambda c, x: (jnp.fft.fft2(c), jnp.fft.ifft(c), jnp.fft.rfft2(x), jnp.fft.irfft(c, 7)), (C, X)),
    "grouped products": (
        lambda x, w, n: jax.grad(lambda x, w: (lax.ragged_dot(x, w, n) ** 2).sum(), (0, 1))(x, w),
        (X[0], RNG.normal(size=(3, 6, 5)).astype("f4"), np.array([1, 0, 3], np.int32)),
    ),
    "products by groups": (
        lambda x, w, n: (
            lax.ragged_dot(x[0], w, n),
            lax.ragged_dot_general(x[0], x[1], n, GROUPED_ROWS),
        ),
        (X, RNG.normal(size=(3, 6, 5)).astype("f4"), np.array([1, 0, 3], np.int32)),
    ),
    "folded windows": (
        lambda x, y: (
            *lax.reduce_window((x, y), (np.float32(0), np.float32(-9)), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (2, 1, 3), (1, 2, 2), "SAME"),
            lax.reduce_window(x, np.float32(0), jnp.hypot, (1, 2, 2), (1, 1, 1), [(0, 0), (1, 2), (0, 1)], (1, 2, 1), (1, 1, 3)),
        ),
        (X, Y),
    ),
    "windows of a derivative": (
        lambda x, y: (jax.jvp(largest_of_windows, (x,), (y,)), jax.vjp(largest_of_windows, x)[1](y[:, :2, :3])),
        (X, Y),
    ),
    **({"products of halves": (lambda i: lax.mulhi(i << 20, i << 18), (I,))} if hasattr(lax, "mulhi") else {}),
    "threefry": (lambda key: jax.random.bits(jax.random.wrap_key_data(key), (5,)), (np.array([3, 4], np.uint32),)),
    "keys": (
        lambda key: [
            jax.random.uniform(k, (3, 2)) for k in (jax.random.split(key)[1], jax.random.fold_in(key, 7), jax.random.key(3))
        ],
        (jax.random.key(1),),
    ),
    "many keys": (lambda key: jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(key, 3)), (jax.random.key(1),)),
    "bits of unsigned numbers": (
        lambda u: [f(u, n) for f in (lax.shift_right_arithmetic, lax.shift_right_logical, lax.shift_left, lax.div, lax.rem) for n in (u % 8, u[::-1])],
        (np.arange(0, 250, 7, dtype=np.uint8),),
    ),
    "complex atan2": (jax.lax.atan2, ((X + 1j).astype(np.complex64), (X - 2j).astype(np.complex64))),
    "one key for many, and many for one": (
        lambda key, i: [
            jax.vmap(jax.random.key_data)(jax.vmap(jax.random.fold_in, axes)(a, b))
            for axes, a, b in (
                ((0, None), jax.random.split(key, 3), i.ravel()[0]),
                ((None, 0), key, i.ravel()[:3]),
                ((0, 0), jax.random.split(key, 3), i.ravel()[:3]),
            )
        ],
        (jax.random.key(1), I),
    ),
    "asked of JAX": (lambda x: (jnp.linalg.cholesky(x[0, :3, :3] @ x[0, :3, :3].T + jnp.eye(3)), lax.digamma(x)), (X,)),
}  # fmt: skip


def close(got: Any, wanted: Any) -> None:
    for one, two in zip(got, jax.tree.leaves(wanted), strict=True):
        rough = jnp.issubdtype(two.dtype, jnp.bfloat16)
        two = np.asarray(held_number(two))
        assert one.shape == two.shape
        np.testing.assert_allclose(one, two, rtol=1e-2 if rough else 3e-5, atol=3e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_computes(name: str) -> None:
    fn, args = PROGRAMS[name]
    outs, faults = simulate(jax.make_jaxpr(fn)(*args), [held_number(x) for x in args], 10**8)[:2]
    assert not faults
    close(outs, jax.jit(fn)(*args))


# A gradient inside of a body adds up what the devices have.
ON_DEVICES = [
    name
    for name in PROGRAMS
    if "key" not in name and name not in ("threefry", "grouped products", "windows of a derivative")
]


@pytest.mark.parametrize("name", ON_DEVICES)
def test_what_it_computes_on_two_devices(name: str) -> None:
    """Each has its own operands, or one has and they share the other."""
    fn, args = PROGRAMS[name]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    for shared in (0, len(args) - 1):
        stacked = [x if i == shared and len(args) > 1 else np.stack([x, x[::-1]]) for i, x in enumerate(args)]
        specs = tuple(jax.P() if x is args[i] else jax.P("d") for i, x in enumerate(stacked))

        def body(*given: Any, specs: Any = specs) -> Any:
            own = [x[0] if spec == jax.P("d") else x for x, spec in zip(given, specs, strict=True)]
            return [jax.lax.pcast(y, "d", to="varying")[None] if "d" not in jax.typeof(y).manual_axis_type.varying
                    else y[None] for y in jax.tree.leaves(fn(*own))]  # fmt: skip

        run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=jax.P("d"))
        outs = simulate(jax.make_jaxpr(run)(*stacked), [held_number(x) for x in stacked], 10**8).outs
        each = [[x if x is args[i] else x[d] for i, x in enumerate(stacked)] for d in range(2)]
        wanted = [jax.tree.leaves(jax.jit(fn)(*one)) for one in each]
        close(outs, [jnp.stack(pair) for pair in zip(*wanted, strict=True)])


def test_every_entry_is_compared_with_jax() -> None:
    jaxprs = (jax.make_jaxpr(fn)(*args) for fn, args in PROGRAMS.values())
    met = {eqn.primitive.name for jaxpr in jaxprs for eqn in equations(jaxpr)}
    spelled = {name.replace("-", "_") for name in met}
    aliases = {"eq_to", "lt_to", "le_to", "add_any"}  # of `jnp.sort` and of sums of gradients
    aliases |= {"threefry2x32"}  # which stands in what a generator does with a key
    older = {"stack", "unstack", "tile"}  # newer JAX has them
    assert {name.replace("-", "_") for name in _primitives.NUMPY} - spelled - aliases - older == set()


def test_a_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        close([X + 1.0], [jnp.asarray(X)])


def test_numbers_are_held_in_double_precision() -> None:
    assert wide_dtype(jnp.bfloat16) == np.float64 and wide_dtype(jnp.complex64) == np.complex128
    assert wide_dtype(np.int8) == np.int8 and wide_dtype(jax.random.key(0).dtype) == np.uint32


def test_what_jax_cannot_compute_at_once_is_said() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), "f4"), x))(1.0)
    with pytest.raises(NotSimulated, match="pure_callback"):
        simulate(jaxpr, [np.float64(1)], 10**6)


def test_what_moves_bits_is_computed_here() -> None:
    """JAX takes no records."""
    assert set(_primitives.NUMPY) >= _primitives.MOVES
