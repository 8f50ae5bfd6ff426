"""Losses and dropout that are given what does not fit."""

import jax
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

I, KEY = np.arange(8), jax.random.key(0)


def loss(mesh, **options):
    dtype = options.pop("dtype", int)
    fn = lambda z, y: spmd.nn.cross_entropy(z, y, **options)
    body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, np.zeros(8, dtype))


bad(
    cross_entropy_with_an_unknown_reduction=lambda mesh: loss(mesh, tp="tp", dp="dp", reduction="avg"),
    cross_entropy_of_labels_that_are_floats=lambda mesh: loss(mesh, tp="tp", dp="dp", dtype=np.float32),
    cross_entropy_with_much_smoothing=lambda mesh: loss(mesh, tp="tp", dp="dp", label_smoothing=10),
    cross_entropy_with_a_cap_of_zero=lambda mesh: loss(mesh, tp="tp", dp="dp", softcap=0.0),
    cross_entropy_of_more_tokens_than_scores=lambda mesh: loss(mesh, tp="tp", dp="dp", vocabulary=50257),
    cross_entropy_of_a_vocabulary_by_name=lambda mesh: loss(mesh, tp="tp", dp="dp", vocabulary="v"),
    kl_divergence_of_other_shapes=lambda mesh: body(
        "b v/tp, n v/tp -> b", lambda x, y: spmd.nn.kl_divergence(x, y, tp="tp"), mesh, X, X[:4]
    ),
)


@bad
def cross_entropy_with_one_mask_for_all_rows(mesh):
    """Broadcast, the sum of losses would be divided by the tokens of one row."""
    fn = lambda z, y, mask: spmd.nn.cross_entropy(z, y, mask)
    body("b s v, b s, s -> scalar", fn, mesh, X.reshape(2, 4, 4), np.zeros((2, 4), int), np.ones(4, bool))


@fixed
def cross_entropy_with_one_mask_for_all_rows_fixed(mesh, fix):
    fn = lambda z, y, mask: spmd.nn.cross_entropy(z, y, fix(mask=mask, labels=y))
    z, y = X.reshape(2, 4, 4), np.arange(8).reshape(2, 4) % 4
    out = body("b s v, b s, s -> scalar", fn, mesh, z, y, np.arange(4) != 1)
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(z)), y[..., None], -1)[..., 0]
    np.testing.assert_allclose(out, each[:, [0, 2, 3]].mean(), rtol=1e-6)


@bad
def linear_cross_entropy_with_one_row_of_labels(mesh):
    fn = lambda x, table, y: spmd.nn.linear_cross_entropy(x, table, y)
    body("b s d, v d, s -> scalar", fn, mesh, X.reshape(2, 4, 4), X, np.zeros(4, int))


bad(
    cross_entropy_that_forgets_dp=(
        lambda mesh: loss(mesh, tp="tp"),
        lambda mesh: loss(mesh, tp="tp", dp="dp"),
    ),
)


@bad
def cross_entropy_of_gathered_scores(mesh):
    def fn(z, y):
        z = spmd.all_gather(z, "b/dp v/tp -> b/dp v")
        return spmd.nn.cross_entropy(z, y, tp="tp", dp="dp")

    body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, np.zeros(8, int))


@fixed
def cross_entropy_of_gathered_scores_fixed(mesh, fix):
    def fn(z, y):
        z = spmd.all_gather(z, "b/dp v/tp -> b/dp v")
        return spmd.nn.cross_entropy(fix(x=z), y, tp="tp", dp="dp")

    out = body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, np.arange(8) % 4)
    each = -np.take_along_axis(np.asarray(jax.nn.log_softmax(X)), np.arange(8)[:, None] % 4, -1)
    np.testing.assert_allclose(out, each.mean(), rtol=1e-6)


@bad
def linear_cross_entropy_in_no_chunks(mesh):
    fn = lambda x, table, y: spmd.nn.linear_cross_entropy(x, table, y, chunks=0)
    body("s d, v d, s -> scalar", fn, mesh, X, X, np.zeros(8, int))


@bad
def linear_cross_entropy_in_unequal_chunks(mesh):
    fn = lambda x, table, y: spmd.nn.linear_cross_entropy(x, table, y, chunks=3)
    body("s d, v d, s -> scalar", fn, mesh, X, X, np.zeros(8, int))


bad(
    dropout_of_everything=lambda mesh: body(
        "b/dp d, scalar -> b/dp d", lambda x, k: spmd.nn.dropout(x, k, "b/dp d", rate=1), mesh, X, KEY
    ),
    dropout_of_any_dimensions=lambda mesh: body(
        "b/dp d, scalar -> b/dp d", lambda x, k: spmd.nn.dropout(x, k, "... d", rate=0.1), mesh, X, KEY
    ),
    dropout_of_another_rank=lambda mesh: body(
        "b/dp d, scalar -> b/dp d", lambda x, k: spmd.nn.dropout(x, k, "scalar", rate=0.5), mesh, X, KEY
    ),
    cross_entropy_of_a_pattern=lambda mesh: body(
        "b/dp v/tp, b/dp -> scalar", lambda x, y: spmd.nn.cross_entropy(x, y, "b/dp v/tp"), mesh, X, np.zeros(8, int)
    ),
)


@fixed
def cross_entropy_of_a_pattern_fixed(mesh):
    y = np.arange(8) % 4
    fn = lambda x, y: spmd.nn.cross_entropy(x, y, tp="tp", dp="dp")
    wanted = -np.take_along_axis(np.asarray(jax.nn.log_softmax(X)), y[:, None], 1).mean()
    np.testing.assert_allclose(body("b/dp v/tp, b/dp -> scalar", fn, mesh, X, y), wanted, rtol=1e-6)
