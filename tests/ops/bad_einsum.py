"""Wrong calls of `einsum`."""

import numpy as np

import spmd
from spmd import einsum
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


bad(
    # The gather goes before the call: in place of it the product would be gone.
    product_of_what_lies_as_the_result=lambda mesh: body(
        "b/dp d, d e -> b/dp e", lambda x, w: einsum(x, w, "b d, d e -> b/dp e"), mesh, X, X.T
    ),
)


@fixed
def product_of_what_lies_as_the_result_fixed(mesh, fix):
    fn = lambda x, w: spmd.split(einsum(fix(x=x), w, "b d, d e -> b e"), "b e -> b/dp e")
    np.testing.assert_allclose(body("b/dp d, d e -> b/dp e", fn, mesh, X, X.T), X @ X.T)


@bad
def einsum_of_two_placements(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d/tp f -> b/dp f")
    body("b/dp d, d/tp f -> b/dp f", fn, mesh, X, np.ones((4, 6), np.float32))


@fixed
def einsum_of_two_placements_fixed(mesh, fix):
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    out = body("b/dp d, d/tp f -> b/dp f", lambda x, w: fix(x=x, y=w), mesh, X, w)
    np.testing.assert_allclose(out, X @ w)


@bad
def einsum_that_would_gather(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d f -> b f")
    body("b/dp d, d f -> b f", fn, mesh, X, np.ones((4, 6), np.float32))


@fixed
def einsum_that_would_gather_fixed(mesh, fix):
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_allclose(body("b/dp d, d f -> b f", lambda x, w: fix(x=x, y=w), mesh, X, w), X @ w)


@bad
def einsum_with_nothing_to_scatter(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, d f -> b/dp f/tp")
    body("b/dp d, d f -> b/dp f/tp", fn, mesh, X, np.ones((4, 8), np.float32))


@fixed
def einsum_with_nothing_to_scatter_fixed(mesh, fix):
    out = body("b/dp d, d f -> b/dp f/tp", lambda x, w: fix(x=x, y=w), mesh, X, X.T)
    np.testing.assert_allclose(out, X @ X.T)


@bad
def einsum_with_one_axis_on_two_names(mesh):
    fn = lambda x, w: einsum(x, w, "b/dp d, e/dp d -> b/dp e")
    body("b/dp d, e/dp d -> b/dp e", fn, mesh, X, X)


bad(
    einsum_with_an_unknown_name=lambda mesh: body("b/dp d -> b/dp", lambda x: einsum(x, "b/dp d -> b/dp e"), mesh),
    einsum_without_spaces=lambda mesh: body(
        "b/dp d, d f -> b/dp f", lambda x, w: einsum(x, w, "bd,df->bf"), mesh, X, X.T
    ),
)


@fixed
def einsum_without_spaces_fixed(mesh, fix):
    out = body("b/dp d, d f -> b/dp f", lambda x, w: fix(x=x, y=w), mesh, X, X.T)
    np.testing.assert_allclose(out, X @ X.T)


bad(
    name_of_the_signature_for_another_dimension=lambda mesh: body(
        "b/dp d -> b/dp d", lambda x: x + einsum(x[:, :2], x[:, :2], "n d, m d -> n m").sum(), mesh
    ),
    operand_that_is_no_array=lambda mesh: body(SAME, lambda x: spmd.einsum(x, object(), "b/dp d, d -> b/dp d"), mesh),
    # The slashes are those of the arrays: a gather would be a cost that nobody asked for.
    einsum_without_slashes=lambda mesh: body(
        "b/dp d, d f/tp -> b/dp f/tp", lambda x, w: einsum(x, w, "b d, d f -> b f"), mesh, X, np.ones((4, 8))
    ),
)


@fixed
def einsum_without_slashes_fixed(mesh, fix):
    w = np.arange(32, dtype=np.float32).reshape(4, 8)
    out = body("b/dp d, d f/tp -> b/dp f/tp", lambda x, w: fix(x=x, y=w), mesh, X, w)
    np.testing.assert_allclose(out, X @ w)


bad(
    reduce_without_slashes=lambda mesh: body(
        "b/dp d/tp -> b/dp 1", lambda x: spmd.reduce(x, "b d -> b 1", "mean"), mesh
    ),
)


@fixed
def reduce_without_slashes_fixed(mesh, fix):
    out = body("b/dp d/tp -> b/dp 1", lambda x: fix(x=x), mesh)
    np.testing.assert_allclose(out, X.mean(1, keepdims=True))
