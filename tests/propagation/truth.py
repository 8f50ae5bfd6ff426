"""Programs over all of JAX, on several layouts each: what the plan says that is sent, beside what XLA for CPUs sends.

python -m tests.propagation.truth            all of them, and where the two differ
python -m tests.propagation.truth jnp.roll   those with this in their names
"""

import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special  # noqa: F401 - the functions of jax.scipy have its names
from jax import lax
from jax.scipy import linalg, signal, special, stats

import spmd
from spmd import Layout
from spmd.inspect import collectives

SIZES = {"b": 16, "d": 32, "e": 32, "f": 16, "n": 16, "m": 16, "s": 8}
MATRIX = ("b/dp d", "b d/tp", "b/dp d/tp", "b/tp d/dp")
SQUARE = ("n/dp m", "n m/tp", "n/dp m/tp")
STACK = ("s/dp n m", "s n/tp m", "s n m/tp", "s/dp n m/tp")
VECTOR = ("d/dp", "d/tp", "d/dp/tp")
PAIR = ("b/dp d, d/dp f", "b/dp d, d f/tp", "b d/tp, d/tp f", "b/dp d/tp, d/tp f", "b/tp d, d/dp f")
ALIKE = ("b/dp d, b/dp d", "b/dp d, b d/tp", "b/dp d/tp, b d", "b/tp d, b d/tp")
ROWS = ("b/dp d, n", "b/dp d, n/dp", "b d/tp, n/dp", "b/dp d/tp, n")
TABLE: dict[tuple[tuple[str, ...], str], dict[str, Callable[..., Any]]] = {}


def enter(layouts: tuple[str, ...], dtypes: str = "", **functions: Callable[..., Any]) -> None:
    """Functions of arrays that lie in each of these ways."""
    TABLE.setdefault((layouts, dtypes), {}).update(functions)


def of(module: Any, names: str, *args: Any, **words: Any) -> dict[str, Callable[..., Any]]:
    """Functions of one module, called alike."""
    room = module.__name__.replace("jax.numpy", "jnp").replace("jax.", "")
    asked = "".join(f" {one}" for one in (*args, *(f"{k}={v}" for k, v in words.items())))
    calls = lambda fn: lambda *given: fn(*given, *args, **words)
    return {f"{room}.{one}{asked}": calls(getattr(module, one)) for one in names.split()}


def spd(x: Any) -> Any:
    """A matrix that has a Cholesky factor."""
    return x @ x.swapaxes(-1, -2) + 32 * jnp.eye(x.shape[-1])


# --- elementwise, and what only moves elements ------------------------------------------------------------------

enter(MATRIX, **of(jnp, "sin exp2 log1p tanh sqrt abs sign isnan round reciprocal conj"))
enter(MATRIX, **of(special, "erf erfc gammaln digamma expit logit i0e i1e ndtr entr"))
enter(MATRIX, **of(jnp, "arcsin arccosh arctanh sinh tan cbrt"))
enter(MATRIX, **of(stats.norm, "logpdf cdf"))
enter(ALIKE, **of(jnp, "add maximum hypot arctan2 logaddexp power"))
enter(ALIKE, **of(special, "xlogy betaln"))
enter(MATRIX, **of(jnp, "transpose ravel atleast_3d"), **of(jnp, "reshape", (16, 8, 4)), **of(jnp, "expand_dims", 0))
enter(MATRIX, **of(jnp, "flip", 0), **of(jnp, "flip", 1), **of(jnp, "rot90 flipud fliplr"))
enter(MATRIX, **of(jnp, "roll", 1, 0), **of(jnp, "roll", 3, 1), **of(jnp, "roll", 16, 1), **of(jnp, "roll", 5))
enter(MATRIX, **of(jnp, "pad", 1), **of(jnp, "pad", ((0, 0), (2, 2)), mode="edge"), **of(jnp, "pad", 1, mode="wrap"))
enter(MATRIX, **of(jnp, "tile", (2, 1)), **of(jnp, "repeat", 2, 0), **of(jnp, "tril triu"))
enter(
    MATRIX,
    slice_of_rows=lambda x: x[2:6],
    slice_of_columns=lambda x: x[:, :-1],
    strided=lambda x: x[::2, ::4],
    row=lambda x: x[3],
    column=lambda x: x[:, 5],
    dynamic_row=lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (1, 32)),
    dynamic_piece=lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (4, 16)),
    update=lambda x: x.at[3].set(1.0),
    update_piece=lambda x: x.at[2:5, 1:3].add(1.0),
    halves=lambda x: jnp.split(x, 2),
    quarters=lambda x: jnp.split(x, 4, axis=1),
    stacked=lambda x: jnp.stack([x, 2 * x]),
    beside_itself=lambda x: jnp.concatenate([x, x], 0),
    behind_itself=lambda x: jnp.concatenate([x, x], 1),
    neighbours=lambda x: x[1:] - x[:-1],
    fold=lambda x: x.reshape(8, 2, 32).sum(1),
    merged=lambda x: x.reshape(-1, 4).sum(0),
)
enter(ALIKE, one_behind_the_other=lambda x, y: jnp.concatenate([x, y], 0), chosen=lambda x, y: jnp.where(x > 0, x, y))

# --- reductions and scans ---------------------------------------------------------------------------------------

enter(MATRIX, **of(jnp, "sum prod max min mean any all var"), **of(special, "logsumexp"))
enter(MATRIX, **of(jnp, "sum max argmax argmin std ptp count_nonzero median nanmean", axis=0))
enter(MATRIX, **of(jnp, "sum max argmax argmin nansum", axis=1))
enter(MATRIX, **of(jnp, "cumsum cumprod", axis=0), **of(jnp, "cumsum cumprod diff", axis=1))
enter(MATRIX, **of(lax, "cummax cummin cumlogsumexp"), **of(lax, "cummax", axis=1))
enter(MATRIX, **of(jax.nn, "softmax log_softmax standardize", axis=0), **of(jax.nn, "softmax", axis=1))
enter(
    MATRIX,
    associative=lambda x: lax.associative_scan(jnp.add, x),
    scanned=lambda x: lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(32), x)[1],
    mapped=lambda x: lax.map(lambda row: row.sum(), x),
    reduced=lambda x: lax.reduce(x, 1.0, lax.mul, (1,)),
    norm=jnp.linalg.norm,
    trapezoid=lambda x: jnp.trapezoid(x, axis=1),
    gradient=lambda x: jax.grad(lambda x: jnp.cumsum(x, 0).sum())(x),
    gradient_of_roll=lambda x: jax.grad(lambda x: (jnp.roll(x, 1, 0) * x).sum())(x),
    gradient_of_pad=lambda x: jax.grad(lambda x: (jnp.pad(x, 1) ** 2).sum())(x),
)

# --- orders and lookups -----------------------------------------------------------------------------------------

enter(MATRIX, **of(jnp, "sort argsort", axis=0), **of(jnp, "sort argsort", axis=1), **of(jnp, "unique", size=8))
enter(MATRIX, **of(lax, "top_k", 3), **of(jnp, "quantile", 0.5, axis=0), **of(jnp, "percentile", 30.0))
enter(
    VECTOR, **of(jnp, "sort cumsum diff argmax flip diag nonzero") | {"jnp.nonzero": lambda x: jnp.nonzero(x, size=8)}
)
enter(VECTOR, histogram=lambda x: jnp.histogram(x, bins=4, range=(0.0, 1.0))[0], vander=lambda x: jnp.vander(x, 4))
enter(VECTOR, convolve=lambda x: jnp.convolve(x, jnp.ones(3), mode="same"), interp=lambda x: jnp.interp(x, x, x))
enter(VECTOR, searched=lambda x: jnp.searchsorted(x, jnp.linspace(0, 1, 8)), digitized=lambda x: jnp.digitize(x, x))
enter(
    ROWS,
    "float32 int32",
    taken=lambda x, i: x[i],
    taken_clipped=lambda x, i: jnp.take(x, i, 0, mode="clip"),
    taken_columns=lambda x, i: jnp.take(x, i, 1),
    added=lambda x, i: x.at[i].add(1.0),
    put=lambda x, i: x.at[i].set(1.0),
    largest=lambda x, i: x.at[i].max(0.0),
    segments=lambda x, i: jax.ops.segment_sum(x, i, 4),
    counted=lambda x, i: jnp.bincount(i, length=8),
    coded=lambda x, i: jax.nn.one_hot(i, 8),
    along=lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
)

# --- products ---------------------------------------------------------------------------------------------------

enter(PAIR, **of(jnp, "matmul dot"), gradient=lambda x, w: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))
enter(PAIR, einsum=lambda x, w: jnp.einsum("bd,df->fb", x, w), twice=lambda x, w: jnp.tanh(x @ w) @ w.T)
enter(ALIKE, **of(jnp, "inner vdot kron outer tensordot"), **of(jnp, "cross", axis=0) and {})
enter(
    ("s/dp b d", "s b/tp d", "s b d/tp"),
    conv=lambda x: lax.conv(x, jnp.ones((4, 16, 3)), (1,), "SAME"),
    conv_valid=lambda x: lax.conv(x, jnp.ones((4, 16, 3)), (1,), "VALID"),
    pooled=lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2), (1, 1, 2), "VALID"),
    pooled_same=lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME"),
)
enter(("b/dp d", "b d/tp"), convolved=lambda x: signal.convolve(x, jnp.ones((3, 3)), mode="same"))
enter(("b/dp d, s d f, s", "b d/tp, s d/tp f, s"), "float32 float32 int32", ragged=lax.ragged_dot)

# --- FFT --------------------------------------------------------------------------------------------------------

enter(STACK, **of(jnp.fft, "fft ifft rfft fftshift"), **of(jnp.fft, "fft", axis=1), **of(jnp.fft, "fft2 fftn rfft2"))
enter(STACK, back=lambda x: jnp.fft.irfft(x + 0j), there=lambda x: jax.grad(lambda x: abs(jnp.fft.rfft(x)).sum())(x))

# --- linear algebra ---------------------------------------------------------------------------------------------

enter(
    SQUARE,
    **of(jnp.linalg, "qr svd inv det slogdet pinv matrix_power", *())
    | {"linalg.power": lambda x: jnp.linalg.matrix_power(x, 3)},
)
TABLE[SQUARE, ""].pop("jnp.linalg.matrix_power")
enter(SQUARE, **of(jnp, "trace diag diagonal tril"), expm=linalg.expm, eigh=lambda x: jnp.linalg.eigh(x + x.T))
enter(SQUARE, cholesky=lambda x: jnp.linalg.cholesky(spd(x)), eigenvalues=lambda x: jnp.linalg.eigvalsh(x + x.T))
enter(STACK, **of(jnp.linalg, "qr svd inv det"), cholesky=lambda x: jnp.linalg.cholesky(spd(x)))
TRIANGLE = ("n m, m d/tp", "n m, m/dp d", "n/dp m, m d", "n/dp m, m d/tp")
enter(
    TRIANGLE,
    triangular=lambda a, b: linalg.solve_triangular(a, b, lower=True),
    triangular_turned=lambda a, b: linalg.solve_triangular(a, b, trans=1),
    solve=jnp.linalg.solve,
    lstsq=lambda a, b: jnp.linalg.lstsq(a, b)[0],
    cho_solve=lambda a, b: linalg.cho_solve((a, True), b),
    gradient=lambda a, b: jax.grad(lambda a: linalg.solve_triangular(a, b, lower=True).sum())(a),
)

# --- control flow, random numbers, callbacks, FFI -----------------------------------------------------------------

enter(
    MATRIX,
    branch=lambda x: lax.cond(x[0, 0] > 0, lambda x: x.sum(0), lambda x: x.max(0), x),
    loop=lambda x: lax.fori_loop(0, 3, lambda _, x: x - x.mean(0, keepdims=True), x),
    rolls=lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.roll(x, 1, 0) + x, x),
    drawn=lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    shuffled=lambda x: jax.random.permutation(jax.random.key(0), x),
    vmapped=lambda x: jax.vmap(jnp.cumsum)(x),
    remembered=lambda x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x).mean(0)))(x).sum())(x),
    callback=lambda x: jax.pure_callback(np.sin, jax.typeof(x), x),
    callback_of_rows=lambda x: jax.vmap(
        lambda row: jax.pure_callback(np.sin, jax.typeof(row), row, vmap_method="expand_dims")
    )(x),
    asked=lambda x: jax.experimental.io_callback(np.sin, jax.typeof(x), x),
    printed=lambda x: (jax.debug.print("{}", x.sum()), x)[1],
    foreign=lambda x: jax.ffi.ffi_call("lapack_sgetrf_ffi", _LU, vmap_method="broadcast_all")(x)[0],
)
_LU = [
    jax.ShapeDtypeStruct((16, 32), "float32"),
    jax.ShapeDtypeStruct((16,), "int32"),
    jax.ShapeDtypeStruct((), "int32"),
]


@dataclass(frozen=True)
class Case:
    """A program with its arguments."""

    name: str
    fn: Callable[..., Any]
    layouts: str
    dtypes: str

    def args(self, mesh: Any) -> list[jax.ShapeDtypeStruct]:
        given = [one.strip() for one in self.layouts.split(",")]
        kinds = self.dtypes.split() or ["float32"] * len(given)
        found = [(Layout(one), kind) for one, kind in zip(given, kinds, strict=True)]
        shape = lambda one: tuple(SIZES[name] for name in one.names)
        return [jax.ShapeDtypeStruct(shape(one), kind, sharding=one.sharding(mesh)) for one, kind in found]


CASES = {
    f"{name} | {layouts}": Case(name, fn, layouts, dtypes)
    for (every, dtypes), functions in TABLE.items()
    for name, fn in functions.items()
    for layouts in every
}


def verdict(case: Case, mesh: Any) -> tuple[str, str]:
    """In one word how the plan of a program and what XLA compiled differ, and both in figures."""
    args = case.args(mesh)
    plan, compiled = spmd.propagate(case.fn, *args), collectives(case.fn, *args, mesh=mesh)
    sent, least, most = compiled.total_bytes, plan.least_bytes, plan.most_bytes
    told = f"planned {plan.total_bytes}, compiled {sent}, {len(plan.open)} open: {least} to {most}"
    if not plan.open and sent == plan.total_bytes:
        return "equal", told
    if most is None or least <= sent <= most:
        return "open" if plan.open else "apart", told
    detail = [[(one.kind, one.axes, one.bytes, one.count) for one in found] for found in (plan.moves, compiled)]
    return "wrong", f"{told}\n    {detail[0]}\n    {detail[1]}"


def main(asked: list[str]) -> None:
    spmd.use_cpu_devices(8)
    mesh = spmd.make_mesh(dp=2, tp=4)
    words = collections.Counter()
    for name, case in CASES.items():
        if not asked or any(one in name for one in asked):
            word, told = verdict(case, mesh)
            words[word] += 1
            if asked or word == "wrong":
                print(f"{word}: {name}: {told}")
    print(dict(words), f"of {sum(words.values())}, {len({case.name for case in CASES.values()})} programs")


if __name__ == "__main__":
    main(sys.argv[1:])
