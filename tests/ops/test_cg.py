"""`linalg.cg` of divided vectors, against LAPACK's solution of the whole system."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.linalg import cg
from spmd.modes import MODES
from tests.ops.harness import close, make_mesh, pulled, run, sampled_vector, wide
from tests.sampler import Sampler, seeds

TIGHT = {"tol": 1e-6}
TOLERANCES = {"float32": 1e-6, "float64": 1e-12, "complex64": 1e-6, "complex128": 1e-12}


def applied(layout: str, w: Any, turn: complex = 1) -> Callable[[Any], Any]:
    """Differences to neighbours in both dimensions, with weights; if `turn` is complex it is Hermitian."""
    dims = layout.split()
    marked = [" ".join(f"[{d}]" if i == j else d for j, d in enumerate(dims)) for i in range(2)]

    def apply(u: Any) -> Any:
        near = [spmd.roll(u, at, 1) * turn + spmd.roll(u, at, -1) * turn.conjugate() for at in marked]
        return jnp.asarray(4.5 + w**2, u.dtype) * u - near[0] - near[1]

    return apply


def matrix(shape: tuple[int, int], w: Any, turn: complex = 1) -> Any:
    """The same as a matrix of the whole array."""

    def apply(u: Any) -> Any:
        near = [jnp.roll(u, 1, i) * turn + jnp.roll(u, -1, i) * turn.conjugate() for i in (0, 1)]
        return jnp.asarray(4.5 + w**2, u.dtype) * u - near[0] - near[1]

    n = shape[0] * shape[1]
    columns = jax.vmap(lambda e: apply(e.reshape(shape)).ravel())(jnp.eye(n, dtype=np.result_type(w.dtype, turn)))
    return columns.T


def solved(b: Any, w: Any, turn: complex = 1) -> Any:
    return jnp.linalg.solve(matrix(b.shape, w, turn), b.ravel()).reshape(b.shape)


@pytest.mark.parametrize("seed", seeds(3))
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    """With and without a first guess and a preconditioner; gradients of the right side and of the weights."""
    sampler = Sampler(seed)
    mesh, layout, shape = sampled_vector(sampler)
    dtype = list(TOLERANCES)[seed % 4]
    guess, conditioned = sampler.choice([True, False]), sampler.choice([True, False])
    modes = MODES if seed % 3 == 0 else ("explicit", "reference")
    turn = complex(np.exp(0.3j)) if "complex" in dtype else 1
    with wide(dtype):
        b = jnp.asarray(sampler.array(shape), dtype) * turn
        w = jnp.asarray(sampler.array(shape), b.real.dtype) / 4
        against_lapack(mesh, layout, b, w, turn, guess, conditioned, modes)


def against_lapack(
    mesh: Any, layout: str, b: Any, w: Any, turn: complex, guess: bool, conditioned: bool, modes: Any
) -> None:
    shape, tolerance = b.shape, TOLERANCES[b.dtype.name]
    more: dict[str, Any] = {"tol": tolerance}

    def body(b: Any, w: Any) -> Any:
        if guess:
            more["x0"] = b / 2
        if conditioned:
            more["precondition"] = lambda r: r / (4.5 + w**2).astype(r.dtype)
        return cg(applied(layout, w, turn), b, layout, **more)[0]

    wanted = np.linalg.solve(np.asarray(matrix(shape, w, turn)), np.asarray(b).ravel()).reshape(shape)
    expected = pulled(lambda b, w: solved(b, w, turn), b, w)
    for mode in modes:
        found = pulled(run(body, mesh, [layout, layout], layout, mode), b, w)
        close(found[0], jnp.asarray(wanted), 1e3 * tolerance)
        jax.tree.map(lambda x, y: close(x, y, 5e3 * tolerance), found, expected)


def test_the_comparison_can_fail() -> None:
    assert np.allclose(matrix((3, 3), jnp.zeros((3, 3))) @ jnp.ones(9), 0.5)
    inner_products_of_shards = lambda b: jax.scipy.sparse.linalg.cg(applied("x/a y", 0.0), b, maxiter=9)[0]
    b = jnp.asarray(Sampler(0).array((8, 3)))
    own = run(inner_products_of_shards, {"a": 4}, ["x/a y"], "x/a y")(b)
    with pytest.raises(AssertionError):
        close(own, run(lambda b: cg(applied("x/a y", 0.0), b, "x/a y")[0], {"a": 4}, ["x/a y"], "x/a y")(b), 1e-3)


@pytest.mark.parametrize("tol", [1e-2, 1e-6])
def test_the_residual_is_as_small_as_asked_for(tol: float) -> None:
    b = jnp.asarray(Sampler(3).array((8, 8)))
    fn = run(
        lambda b: cg(applied("x/a y/b", 0.1 * b), b, "x/a y/b", tol=tol),
        {"a": 2, "b": 4},
        ["x/a y/b"],
        ["x/a y/b", "scalar"],
    )
    x, steps = fn(b)
    residual = np.asarray(b).ravel() - np.asarray(matrix((8, 8), 0.1 * b)) @ np.asarray(x).ravel()
    assert np.linalg.norm(residual) <= 1.5 * tol * np.linalg.norm(b) and 0 < int(steps) < 40


def test_it_stops_at_most_there_and_at_once_for_nothing() -> None:
    solve = lambda **how: lambda b: cg(applied("x/a y", 0.0), b, "x/a y", **how)[1]
    b = jnp.asarray(Sampler(0).array((8, 6)))
    count = lambda b, **how: int(run(solve(**how), {"a": 4}, ["x/a y"], "scalar")(b))
    assert count(b, maxiter=3) == 3
    assert count(0 * b) == 0
    assert count(b, atol=1e3) == 0


def test_collectives_are_those_of_the_docstring() -> None:
    """Before the steps a psum of a number; in a step two, and what `apply` sends: two permutes of two rows or columns."""
    mesh = make_mesh({"a": 4})
    b = spmd.shard(np.ones((8, 6), np.float32), "x/a y", mesh=mesh)

    def sent(pattern: str, fn: Any) -> Any:
        found = spmd.inspect.collectives(spmd.kernel(pattern, mesh=mesh)(fn), b)
        return found.counts, found.total_bytes

    apply = applied("x/a y", 0.0)
    numbers = 3 * 2 * 4 * 3 // 4  # three psums of a float32 over four devices
    assert sent("x/a y -> x/a y", lambda b: cg(apply, b, "x/a y")[0]) == ({"psum": 3, "ppermute": 2}, numbers + 2 * 24)
    conditioned = lambda b: cg(apply, b, "x/a y", precondition=lambda r: r / 4)[0]
    assert sent("x/a y -> x/a y", conditioned) == ({"psum": 3, "ppermute": 2}, numbers + 2 * 6 + 2 * 24)
    guessed = lambda b: cg(apply, b, "x/a y", x0=b / 3)[0]  # XLA joins the two psums before the steps
    assert sent("x/a y -> x/a y", guessed) == ({"psum": 3, "ppermute": 4}, numbers + 6 + 4 * 24)


def test_under_vmap_and_remat() -> None:
    one = jax.checkpoint(lambda b: cg(applied("x/a y", 0.0), b, "x/a y", **TIGHT)[0])
    b = jnp.asarray(Sampler(1).array((3, 4, 3)))
    found = pulled(run(jax.vmap(one), {"a": 4}, ["g x/a y"], "g x/a y"), b)
    solve = lambda b: jnp.linalg.solve(matrix((4, 3), jnp.zeros((4, 3))), b.ravel()).reshape(4, 3)
    jax.tree.map(lambda x, y: close(x, y, 1e-3), found, pulled(jax.vmap(solve), b))
