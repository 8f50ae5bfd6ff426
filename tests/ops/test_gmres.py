"""`linalg.gmres` of divided vectors, against LAPACK's solution of the whole system."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.linalg import gmres
from spmd.modes import MODES
from tests.ops.harness import close, make_mesh, pulled, run, sampled_vector, wide
from tests.sampler import Sampler, rare, seeds

TOLERANCES = {"float32": 1e-6, "float64": 1e-12, "complex64": 1e-6, "complex128": 1e-12}
HERE = {"a": 4}
SCALARS = ["x/a y", "scalar", "scalar"]


def applied(layout: str, w: Any, turn: Any = 0.7) -> Callable[[Any], Any]:
    """What blows along both dimensions, with weights; it is not symmetric."""
    first, second = layout.split()

    def apply(u: Any) -> Any:
        along = spmd.roll(u, f"[{first}] {second}", 1), spmd.roll(u, f"{first} [{second}]", -1)
        return jnp.asarray(3 + w**2, u.dtype) * u - 1.6 * along[0] - jnp.asarray(turn, u.dtype) * along[1]

    return apply


def matrix(shape: tuple[int, ...], w: Any, turn: Any = 0.7) -> Any:
    """The same as a matrix of the whole array."""
    n = shape[0] * shape[1]
    dtype = np.result_type(w.dtype, turn)
    one = jnp.eye(n, dtype=dtype).reshape(*shape, n)
    moved = 1.6 * jnp.roll(one, 1, 0) + jnp.asarray(turn, dtype) * jnp.roll(one, -1, 1)
    return (jnp.asarray(3 + w**2, dtype)[..., None] * one - moved).reshape(n, n)


def solved(b: Any, w: Any, turn: Any = 0.7) -> Any:
    return jnp.linalg.solve(matrix(b.shape, w, turn), b.ravel()).reshape(b.shape)


@pytest.mark.parametrize("seed", seeds(3))
def test_values_and_gradients_in_every_mode(seed: int) -> None:
    """With and without a first guess and a preconditioner; gradients of the right side and of the weights."""
    sampler = Sampler(seed)
    mesh, layout, shape = sampled_vector(sampler)
    dtype = list(TOLERANCES)[seed % 4]
    restart = int(sampler.choice([5, 20]))
    guess, conditioned = sampler.choice([True, False]), sampler.choice([True, False])
    turn = 0.5 + 0.4j if "complex" in dtype else 0.7
    with wide(dtype):
        b = jnp.asarray(sampler.array(shape), dtype) * jnp.asarray(turn, dtype)
        w = b.real / 4

        def body(b: Any, w: Any) -> Any:
            more: dict[str, Any] = {"x0": b / 2} if guess else {}
            if conditioned:  # not symmetric either
                more["precondition"] = lambda r: jnp.triu(r) / jnp.asarray(3 + w**2, r.dtype) + r / 9
            return gmres(applied(layout, w, turn), b, layout, tol=TOLERANCES[dtype], restart=restart, **more)[0]

        wanted = np.linalg.solve(np.asarray(matrix(shape, w, turn)), np.asarray(b).ravel()).reshape(shape)
        expected = pulled(lambda b, w: solved(b, w, turn), b, w)
        for mode in MODES if seed % 3 == 0 else ("explicit", "reference"):
            found = pulled(run(body, mesh, [layout, layout], layout, mode), b, w)
            close(found[0], jnp.asarray(wanted), 1e3 * TOLERANCES[dtype])
            jax.tree.map(lambda x, y: close(x, y, 5e3 * TOLERANCES[dtype]), found, expected)


def test_the_comparison_can_fail() -> None:
    """With inner products of shards the residual is another number; JAX's own `gmres` is refused by its types."""
    b = jnp.asarray(Sampler(0).array((8, 3)))
    whole = run(lambda b: gmres(applied("x/a y", 0.0), b, "x/a y", maxiter=1), HERE, ["x/a y"], SCALARS)(b)
    with pytest.raises(AssertionError):
        close(whole[0], solved(b, jnp.zeros((8, 3))), 1e-3)
    of_shards = run(lambda b: jax.scipy.sparse.linalg.gmres(applied("x/a y", 0.0), b)[0], HERE, ["x/a y"], "x/a y")
    with pytest.raises(TypeError, match="manual axis types do not match"):
        of_shards(b)


def test_steps_and_residual_are_those_of_one_device() -> None:
    """As many steps as the smallest residual of each Krylov space says, in NumPy; and where the steps end early."""
    b = jnp.asarray(Sampler(3).array((8, 6)))
    whole, right = np.asarray(matrix((8, 6), 0.1 * b), np.float64), np.asarray(b, np.float64).ravel()

    def best(n: int, restart: int) -> float:
        """The length of the residual after n steps."""
        x = np.zeros_like(right)
        for begin in range(0, n, restart):
            krylov = [right - whole @ x]
            for _ in range(min(restart, n - begin) - 1):
                krylov.append(whole @ krylov[-1] / np.linalg.norm(krylov[-1]))
            basis = np.linalg.qr(np.stack(krylov, 1))[0]
            x = x + basis @ np.linalg.lstsq(whole @ basis, krylov[0], rcond=None)[0]
        return float(np.linalg.norm(right - whole @ x))

    cases: list[dict[str, Any]] = [{"tol": 1e-2}, {"tol": 1e-4, "restart": 3}]
    for how in (*cases, {"tol": 0.0, "maxiter": 4}, {"tol": 1e-9, "atol": 2.0}):
        _, steps, residual = run(
            lambda b, how=how: gmres(applied("x/a y", 0.1 * b), b, "x/a y", **how), HERE, ["x/a y"], SCALARS
        )(b)
        n, every = int(steps), how.get("restart", 20)
        small = max(how["tol"] * np.linalg.norm(right), how.get("atol", 0.0))
        assert n == how.get("maxiter", n) > 0
        assert n == 4 or best(n, every) <= small < best(n - 1, every)
        np.testing.assert_allclose(residual, best(n, every), rtol=2e-2)


@rare
def test_it_ends_where_nothing_more_can_be_gained() -> None:
    """Nothing to solve; a system without a solution; and more digits than float32 has."""
    fn = lambda apply, b, **how: run(lambda b: gmres(apply, b, "x/a y", **how), HERE, ["x/a y"], SCALARS)(b)
    b = jnp.asarray(Sampler(0).array((8, 6)))
    assert list(map(float, fn(applied("x/a y", 0.0), 0 * b)[1:])) == [0, 0]
    x, steps, residual = fn(lambda u: u.at[:, 0].set(0), b, restart=5)
    assert int(steps) < 20 and np.isfinite(x).all()
    np.testing.assert_allclose(residual, np.linalg.norm(b[:, 0]), rtol=1e-4)
    _, steps, residual = fn(applied("x/a y", 0.0), b, tol=1e-12)
    assert int(steps) < 200 and 0 < float(residual) < 1e-4


def test_collectives_are_those_of_the_docstring() -> None:
    """A psum of a number first, one at a restart, and in a step two of 6 numbers; `apply` has two permutes of a row."""
    mesh = make_mesh(HERE)
    b = spmd.shard(np.ones((8, 6), np.float32), "x/a y", mesh=mesh)
    apply = lambda u: 4 * u - spmd.roll(u, "[x/a] y", 1) - 2 * spmd.roll(u, "[x/a] y", -1)
    both = 2 * 2 * 24  # permutes, in a step and at a restart
    numbers = lambda n: n * 2 * 4 * 3 // 4  # a psum of float32 over four devices

    def sent(fn: Any) -> Any:
        found = spmd.inspect.collectives(spmd.kernel("x/a y -> x/a y", mesh=mesh)(fn), b)
        return found.counts, found.total_bytes

    solve = lambda b, **options: gmres(apply, b, "x/a y", restart=5, **options)
    expected = {"psum": 4, "ppermute": 4}, numbers(2 + 2 * 6) + both
    assert sent(lambda b: solve(b)[0]) == expected
    assert sent(lambda b: solve(b, precondition=lambda r: r / 4)[0]) == expected
    found = sent(lambda b: solve(b, x0=b / 3)[0])  # XLA joins the two psums before the steps
    assert found == ({"psum": 4, "ppermute": 6}, numbers(3 + 2 * 6) + both + 48)


@rare
def test_under_vmap_and_remat() -> None:
    one = jax.checkpoint(lambda b: gmres(applied("x/a y", 0.0), b, "x/a y", tol=1e-6)[0])
    b = jnp.asarray(Sampler(1).array((3, 4, 3))) * jnp.asarray([1, 0.01, 0])[:, None, None]
    found = pulled(run(jax.vmap(one), HERE, ["g x/a y"], "g x/a y"), b)
    jax.tree.map(lambda x, y: close(x, y, 1e-3), found, pulled(jax.vmap(lambda b: solved(b, jnp.zeros((4, 3)))), b))
