"""Linear algebra that cannot be."""

import jax.numpy as jnp
import numpy as np

import spmd
from spmd.linalg import cg, gmres, qr
from tests.errors.registry import V, X, bad, body, fixed

FACTORS = "m/dp n -> m/dp n, k n"


bad(
    a_qr_without_columns=lambda mesh: body(FACTORS, lambda x: qr(x, "[m/dp] n"), mesh),
    a_qr_of_divided_columns=lambda mesh: body("m/dp n/tp -> m/dp n/tp, k n/tp", lambda x: qr(x, "[m/dp] [n/tp]"), mesh),
)


@fixed
def a_qr_of_divided_columns_fixed(mesh):
    def fn(x):
        return qr(spmd.all_gather(x, "m/dp n/tp -> m/dp n", to="invarying"), "[m/dp] [n]")

    x = X + 9 * np.eye(8, 4, dtype=np.float32)
    q, r = body("m/dp n/tp -> m/dp n, k n", fn, mesh, x)
    np.testing.assert_allclose(q @ r, x, atol=1e-4)


GROUP = np.arange(32, dtype=np.float32).reshape(8, 4) ** 2 + np.eye(8, 4, dtype=np.float32)


def grouped(mesh, fn, x):
    """A body of a matrix whose rows are merged of two dimensions."""
    return spmd.kernel("(x y)/dp n -> (x y)/dp n", mesh=mesh, x=2)(fn)(x)


bad(
    a_qr_of_merged_rows=lambda mesh: grouped(mesh, lambda x: qr(x, "[(x y)/dp] [n]")[0], GROUP),
    a_qr_of_rows_that_lie_apart=lambda mesh: body(
        "x/dp y/tp n -> k n",
        lambda x: qr(spmd.rearrange(x, "x/dp y/tp n -> (x/dp y/tp) n"), "[(x/dp y/tp)] [n]")[1],
        mesh,
        GROUP.reshape(2, 4, 4),
    ),
)


@fixed
def a_qr_of_merged_rows_fixed(mesh, fix):
    q = grouped(mesh, lambda x: qr(x, fix())[0], GROUP)
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=1e-4)


bad(
    a_qr_of_a_wide_matrix=lambda mesh: body("m n -> m n, k n", lambda x: qr(x, "[m] [n]"), mesh, X.T),
    a_qr_of_integers=lambda mesh: body(FACTORS, lambda x: qr(x, "[m/dp] [n]"), mesh, X.astype(np.int32)),
    a_system_of_integers=lambda mesh: body(
        "n/dp -> n/dp", lambda b: cg(lambda x: 2 * x, b, "n/dp")[0], mesh, V.astype(np.int32)
    ),
    a_system_that_changes_the_shape=lambda mesh: body(
        "n/dp -> n/dp", lambda b: cg(lambda x: x[:2], b, "n/dp")[0], mesh, V
    ),
    a_first_guess_of_another_type=lambda mesh: body(
        "n/dp -> n/dp", lambda b: cg(lambda x: 2 * x, b, "n/dp", x0=b.astype(jnp.bfloat16))[0], mesh, V
    ),
)


@bad
def a_system_with_a_partial_sum(mesh):
    def fn(x):
        b = spmd.einsum(x, x, "b/dp d, b/dp d -> d {U:dp}")
        return cg(lambda x: 2 * x, b, "d {U:dp}")[0]

    body("b/dp d -> d", fn, mesh)


@fixed
def a_system_with_a_partial_sum_fixed(mesh, fix):
    def fn(x):
        b = spmd.einsum(x, x, "b/dp d, b/dp d -> d {U:dp}")
        return cg(lambda x: 2 * x, fix(b=b), fix(1))[0]

    np.testing.assert_allclose(body("b/dp d -> d", fn, mesh), (X * X).sum(0) / 2, rtol=1e-5)


bad(
    a_system_of_no_arrays=lambda mesh: body("n/dp -> n/dp", lambda b: cg(lambda x: x, {}, "n/dp")[0], mesh, V),
    a_system_of_two_types=lambda mesh: body(
        "n/dp -> n/dp", lambda b: gmres(lambda x: x, (b, b.astype(jnp.bfloat16)), "n/dp")[0][0], mesh, V
    ),
    a_system_that_changes_the_structure=lambda mesh: body(
        "n/dp -> n/dp", lambda b: cg(lambda x: [x["u"], x["v"]], {"u": b, "v": b}, "n/dp")[0]["u"], mesh, V
    ),
    a_gmres_of_integers=lambda mesh: body(
        "n/dp -> n/dp", lambda b: gmres(lambda x: 2 * x, b, "n/dp")[0], mesh, V.astype(np.int32)
    ),
    a_gmres_that_never_steps=lambda mesh: body(
        "n/dp -> n/dp", lambda b: gmres(lambda x: 2 * x, b, "n/dp", restart=0)[0], mesh, V
    ),
)


@bad
def a_gmres_with_a_partial_sum(mesh):
    def fn(x):
        b = spmd.einsum(x, x, "b/dp d, b/dp d -> d {U:dp}")
        return gmres(lambda x: 2 * x, b, "d {U:dp}")[0]

    body("b/dp d -> d", fn, mesh)


@fixed
def a_gmres_with_a_partial_sum_fixed(mesh, fix):
    def fn(x):
        b = spmd.einsum(x, x, "b/dp d, b/dp d -> d {U:dp}")
        return gmres(lambda x: 2 * x, fix(b=b), fix(1))[0]

    np.testing.assert_allclose(body("b/dp d -> d", fn, mesh), (X * X).sum(0) / 2, rtol=1e-5)
