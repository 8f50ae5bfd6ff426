"""Layers given what does not fit, and what layers ask with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import spmd
from tests.errors.registry import X, bad, body, fixed

I = np.arange(8)
SAME = "b/dp d -> b/dp d"


@bad
def size_of_nothing(mesh):
    body(SAME, lambda x: x * spmd.size(), mesh)


@bad
def size_of_an_array_without_brackets(mesh):
    body(SAME, lambda x: x * spmd.size(x, "b/dp d"), mesh)


@fixed
def size_of_an_array_without_brackets_fixed(mesh):
    assert (body(SAME, lambda x: x * spmd.size(x, "... [d]"), mesh) == 4 * X).all()


# --- linear layers and embeddings ----------------------------------------------------------------------------


@bad
def column_linear_of_a_vector(mesh):
    body("b/dp d, d -> b/dp d", lambda x, w: spmd.nn.column_linear(x, w, tp="tp"), mesh, X, X[0])


@bad
def column_linear_of_a_whole_weight(mesh):
    """A weight that lies whole, said to be divided."""
    body("b/dp d, d f -> b/dp f/tp", lambda x, w: spmd.nn.column_linear(x, w, tp="tp"), mesh, X, X.T)


@bad
def row_linear_of_too_few_dimensions(mesh):
    body("d, h k d -> d", lambda x, w: spmd.nn.row_linear(x, w), mesh, X[0], X.reshape(2, 4, 4))


@bad
def qkv_linear_of_a_matrix(mesh):
    body("b/dp d, d f -> b/dp f", lambda x, w: spmd.nn.qkv_linear(x, w)[0], mesh, X, X.T)


@bad
def gated_mlp_of_one_matrix(mesh):
    body("b/dp d, d f, f d -> b/dp d", spmd.nn.gated_mlp, mesh, X, X.T, X)


@fixed
def gated_mlp_of_one_matrix_fixed(mesh):
    gated = lambda x, w, v: spmd.nn.gated_mlp(x, jnp.stack((w, w), 1), v)
    body("b/dp d, d f, f d -> b/dp d", gated, mesh, X, X.T, X)


@bad
def embedding_over_rows(mesh):
    body("s, v/tp d -> s d", lambda i, e: spmd.nn.embedding(i, e, over="rows", tp="tp"), mesh, I, X)


@bad
def embedding_of_divided_ids(mesh):
    """Ids divided over the axis of the vocabulary."""
    body("s/tp, v/tp d -> s/tp d", lambda i, e: spmd.nn.embedding(i, e, tp="tp", sp="tp"), mesh, I, X)
