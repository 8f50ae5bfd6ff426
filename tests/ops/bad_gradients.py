"""Losses whose gradient cannot be taken inside, and aux that is not declared."""

import jax
import numpy as np

import spmd
from spmd import grad, reduce
from tests.errors.registry import V, X, bad, body, fixed

bad(
    gradient_of_a_number=lambda mesh: body("d -> d", lambda w: grad(3.0)(w), mesh, V),
    loss_with_aux_undeclared=lambda mesh: body("d -> d", lambda w: grad(lambda w: (w.sum(), w))(w), mesh, V),
)


@fixed
def loss_with_aux_undeclared_fixed(mesh, fix):
    out = body("d -> d", lambda w: grad(lambda w: (w.sum(), w), **fix())(w)[0], mesh, V)
    np.testing.assert_array_equal(out, np.ones(8))


bad(
    aux_that_is_missing=lambda mesh: body("d -> d", lambda w: grad(lambda w: w.sum(), has_aux=True)(w)[0], mesh, V),
    gradient_over_an_unknown_axis=lambda mesh: body(
        "d -> d", lambda w: grad(lambda w: w.sum(), loss="{U:dpp}")(w), mesh, V
    ),
)


@bad
def loss_that_is_a_local_mean(mesh):
    fn = lambda w, x: spmd.grad(lambda w: ((x * w[None]) ** 2).mean())(w)
    body("d, b/dp d -> d", fn, mesh, V[:4], X)


@fixed
def loss_that_is_a_local_mean_fixed(mesh):
    def fn(w, x):
        return spmd.grad(lambda w: reduce((x * w[None]) ** 2, "b/dp d -> scalar", "mean"))(w)

    out = body("d, b/dp d -> d", fn, mesh, V[:4], X)
    np.testing.assert_allclose(out, 2 * (X**2 * V[:4]).sum(0) / 32, rtol=1e-5)


@bad
def loss_declared_partial_and_equal(mesh):
    fn = lambda w: spmd.grad(lambda w: (w**2).sum(), loss="{U:dp}")(w)
    body("d -> d", fn, mesh, V)


@fixed
def loss_declared_partial_and_equal_fixed(mesh, fix):
    fn = lambda w: spmd.grad(lambda w: (w**2).sum(), **fix())(w)
    np.testing.assert_array_equal(body("d -> d", fn, mesh, V), 2 * V)


bad(
    loss_mark_that_is_malformed=lambda mesh: body(
        "d -> d", lambda w: spmd.grad(lambda w: (w**2).sum(), loss="dp")(w), mesh, V
    ),
    loss_that_is_no_scalar=lambda mesh: body("d -> d", lambda w: spmd.grad(lambda w: w**2)(w), mesh, V),
)


def rule_of_a_copy(to, mesh):
    """The gradient of a sum of squares that a rule of its own gives, of a copy that is whole on each device."""
    gathered = lambda x: spmd.all_gather(x, "d/tp -> d", to=to)
    squares = spmd.custom_vjp(lambda x: (gathered(x) ** 2).sum())
    squares.defvjp(lambda x: ((gathered(x) ** 2).sum(), x), lambda x, g: (2 * g * x,))
    kernel = spmd.kernel("d/tp -> scalar", mesh=mesh)(squares)
    np.testing.assert_allclose(jax.grad(kernel)(V), 2 * V)


bad(
    rule_that_takes_a_part_for_the_whole=(
        lambda mesh: rule_of_a_copy(None, mesh),
        lambda mesh: rule_of_a_copy("invarying", mesh),
    )
)
