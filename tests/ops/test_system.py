"""What the solvers share: a pytree is one vector, which may be empty, and gradients go to whatever a function reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import spmd
from spmd import einsum
from spmd.linalg import cg, gmres, qr
from spmd.modes import MODES
from tests.ops.harness import close, make_mesh, pulled, run
from tests.sampler import Sampler, mixed, seeds, share


@pytest.mark.parametrize("solver", [cg, gmres])
def test_the_functions_may_differ_along_an_axis_that_the_right_side_lacks(solver: Any) -> None:
    """For JAX both are then of one type."""
    w = np.arange(4.0, dtype=np.float32)
    body = lambda b, w: w * solver(lambda u: (1 + w.sum() ** 2) * u, b, "x")[0].sum()
    wanted = w * np.repeat(3 / (1 + w.reshape(2, 2).sum(1) ** 2), 2)
    close(run(body, {"a": 2}, ["x", "y/a"], "y/a")(jnp.ones(3), w), wanted)


SHAPES = [(8, 3), (8, 3), (4, 5)]  # sizes differ as on a staggered grid


def as_tree(u: Any, v: Any, w: Any) -> Any:
    return {"u": u, "v": [v, w]}


def coupled(turn: complex, against: complex, neighbours: Any, total: Any) -> Any:
    """Two fields that are coupled at each place, and a third one by its sum. Hermitian if the two are conjugates."""

    def apply(x: Any) -> Any:
        u, (v, w) = x["u"], x["v"]
        return as_tree(5 * u - neighbours(u) + turn * v, 4 * v + against * u, 3 * w + total(w) / 20)

    return apply


@pytest.mark.parametrize(("solver", "dtype"), share(mixed([cg, gmres], ["float32", "complex64"])))
def test_a_pytree_of_arrays_is_one_vector(solver: Any, dtype: str) -> None:
    """Against LAPACK, with gradients, a first guess and a preconditioner."""
    turn = 0.5 + 0.8j if "complex" in dtype else 0.5
    against = complex(turn).conjugate() if solver is cg else -1.5 * turn
    against = against if "complex" in dtype else complex(against).real
    given = [jnp.asarray(Sampler(i).array(shape), dtype) * jnp.asarray(turn, dtype) for i, shape in enumerate(SHAPES)]

    def body(*leaves: Any) -> Any:
        near = lambda u: spmd.roll(u, "[x/a] y", 1) + spmd.roll(u, "[x/a] y", -1)
        apply = coupled(turn, against, near, lambda w: spmd.reduce(w, "x/a y -> scalar", "sum"))
        half = lambda x: jax.tree.map(lambda x: x / 2, x)
        b = as_tree(*leaves)
        return tuple(jax.tree.leaves(solver(apply, b, "x/a y", x0=half(b), precondition=half, tol=1e-6)[0]))

    def solved(*leaves: Any) -> Any:
        near = lambda u: jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0)
        one, back = ravel_pytree(as_tree(*leaves))
        flat = lambda e: ravel_pytree(coupled(turn, against, near, jnp.sum)(back(e)))[0]
        return tuple(jax.tree.leaves(back(jnp.linalg.solve(jax.vmap(flat)(jnp.eye(one.size, dtype=dtype)).T, one))))

    expected = _squares(solved)(*given)
    for mode in MODES:
        layouts = ["x/a y"] * 3
        found = _squares(run(body, {"a": 4}, layouts, layouts, mode))(*given)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), found, expected)


def _squares(fn: Any) -> Any:
    """Each array of a result, and the gradients of a sum of their squares."""

    def both(*args: Any) -> Any:
        values, pull = jax.vjp(fn, *args)
        return values, pull(tuple(k * x.conj() for k, x in enumerate(values, 1)))

    return jax.jit(both)


@pytest.mark.parametrize("solver", [cg, gmres])
def test_more_arrays_send_no_more_numbers(solver: Any) -> None:
    """Each psum has the numbers of one array's, whatever their sizes are."""
    sent: list[Any] = []
    for like in ([(8, 3)], [(8, 3), (4, 5)]):
        b = [spmd.shard(np.ones(shape, np.float32), "x/a y", mesh=make_mesh({"a": 4})) for shape in like]
        kernel = spmd.kernel("_/a _ -> _/a _", mesh=make_mesh({"a": 4}))
        solve = kernel(lambda b: solver(lambda x: jax.tree.map(lambda x: 2 * x, x), b, "_/a _")[0])
        found = spmd.inspect.collectives(solve, b)
        sent.append((found.counts, found.total_bytes))
    assert sent[0] == sent[1] and sent[0][0].keys() == {"psum"}


def test_nothing_to_solve_or_decompose() -> None:
    """Empty vectors, no columns, and batches of no matrices, as in NumPy."""

    def body(b: Any, tall: Any, batch: Any) -> Any:
        twice = lambda u: 2 * u
        vectors = cg(twice, b, "x/a y")[0], gmres(twice, b, "x/a y")[0]
        return (*vectors, *qr(tall, "[m/a] [k]"), *qr(batch, "g [n/a] [n2]"))

    given = jnp.ones((8, 0)), jnp.ones((8, 0)), jnp.ones((0, 4, 4))
    ins, batch = ["x/a y", "m/a k", "g n/a n2"], "g n/a n2"
    outs = ["x/a y", "x/a y", "m/a k", "k2 k", batch, "g r n2"]
    for mode in MODES:
        found = run(body, {"a": 4}, ins, outs, mode)(*given)
        assert [x.shape for x in found] == [(8, 0), (8, 0), (8, 0), (0, 0), *[(0, 4, 4)] * 2]


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("solve", [cg, gmres], ids=lambda solve: solve.__name__)
def test_gradients_of_arrays_that_are_whole_or_divided_over_other_axes(solve: Any, seed: int) -> None:
    """Each row of b is a system of its own: a whole matrix, one over an axis that b does not have, and a whole list of
    places, which the preconditioner closes over too. JAX gives all of them one type."""
    sampler = Sampler(seed)
    whole, b, own = (np.asarray(sampler.array(shape)) / 4 for shape in ((6, 6), (4, 6), (8, 6)))
    places = np.asarray([1, 0, 3, 2, 4, 5], np.int32)

    def body(b: Any, whole: Any, own: Any, places: Any) -> Any:
        def apply(u: Any) -> Any:
            near = einsum(einsum(u, own, "r/a n, k/b n -> r/a k/b"), own, "r/a k/b, k/b n -> r/a n")
            return 2 * u + near + (u[:, places] @ whole @ whole.T)[:, jnp.argsort(places)]

        close_by = lambda r: r / (2 + jnp.diag(whole @ whole.T))[places][None]
        return solve(apply, b, "r/a n", precondition=close_by, x0=b * whole[0, 0], tol=1e-7)[0]

    def expected(b: Any, whole: Any, own: Any) -> Any:
        order = jnp.eye(6)[places]
        return jnp.linalg.solve(2 * jnp.eye(6) + own.T @ own + (order.T @ whole @ whole.T @ order), b.T).T

    wanted = pulled(expected, *map(jnp.asarray, (b, whole, own)))
    for mode in MODES:
        fn = run(body, {"a": 2, "b": 2}, ["r/a n", "m n", "k/b n", "n"], "r/a n", mode)
        found = pulled(lambda *args, fn=fn: fn(*args, places), *map(jnp.asarray, (b, whole, own)))
        jax.tree.map(lambda x, y: close(x, y, 1e-4), found, wanted)


@pytest.mark.parametrize("solve", share([cg, gmres]), ids=lambda solve: solve.__name__)
def test_second_derivatives_of_a_whole_array(solve: Any) -> None:
    b, scale = jnp.asarray(Sampler(1).array((4, 3))), jnp.float32(1.5)

    def norm(fn: Any) -> Any:
        return jax.grad(jax.grad(lambda scale: (fn(b, scale) ** 2).sum()))(scale)

    body = lambda b, scale: solve(lambda u: scale**2 * u, b, "r/a n", tol=1e-7)[0]
    close(norm(run(body, {"a": 2}, ["r/a n", "scalar"], "r/a n")), norm(lambda b, scale: b / scale**2), 1e-4)
