"""Halos and stencils that cannot be."""

import jax.numpy as jnp
import numpy as np

from spmd import all_gather, exchange, parallel, stencil
from tests.errors.registry import V, X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


bad(
    a_halo_without_margins=(
        lambda mesh: body(SAME, lambda x: stencil.halo(x, SAME), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body(SAME, lambda x: fix(x=x)[2:], mesh), np.roll(X, -1, 0)),
    ),
    a_halo_that_moves_more=(
        lambda mesh: body(SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b+1 d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body(SAME, lambda x: fix(x=x)[2:], mesh), np.roll(X, -1, 0)),
    ),
)


@bad
def a_halo_narrower_than_it_was(mesh):
    def fn(x):
        wide = stencil.halo(x, "b/dp d -> 2+b/dp+2 d")
        return stencil.halo(wide, "2+b/dp+2 d -> 2+b/dp+1 d")[2:-1]

    body(SAME, fn, mesh)


@bad
def a_halo_of_a_halo_that_adds_nothing(mesh):
    wide = lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d")
    body(SAME, lambda x: stencil.halo(wide(x), "1+b/dp+1 d -> 1+b/dp+1 d")[1:-1], mesh)


@fixed
def a_halo_of_a_halo_that_adds_nothing_fixed(mesh, fix):
    wide = lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d")
    np.testing.assert_array_equal(body(SAME, lambda x: fix(x=wide(x))[4:], mesh), np.roll(X, -2, 0))


bad(
    a_halo_of_a_composite=lambda mesh: body(SAME, lambda x: stencil.halo(x, "(n m)/dp d -> 1+(n m)/dp+1 d", m=2), mesh),
    an_unknown_edge=lambda mesh: body(SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge="wrap"), mesh),
)


@fixed
def an_unknown_edge_fixed(mesh):
    out = body(SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge="periodic")[2:], mesh)
    np.testing.assert_array_equal(out, np.roll(X, -1, 0))


bad(
    an_edge_misspelled=lambda mesh: body(
        SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge="symetric"), mesh
    ),
    an_edge_that_is_a_vector=lambda mesh: body(
        SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge={"b": jnp.ones(4)}), mesh
    ),
    an_edge_of_no_kind=lambda mesh: body(SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge=None), mesh),
)


@bad
def an_edge_of_an_unknown_dimension(mesh):
    step = stencil.stencil(lambda u: u[2:], "1+b/dp+1 d -> b/dp d", edge={"b": "periodic", "y": "symmetric"})
    body(SAME, step, mesh)


@bad
def an_edge_missing(mesh):
    step = stencil.stencil(lambda u: u[2:, 2:], "1+b/dp+1 1+d+1 -> b/dp d", edge={"b": "periodic"})
    body(SAME, step, mesh)


bad(
    an_edge_missing_of_a_difference=lambda mesh: body(
        SAME, lambda x: stencil.diff(x, "b/dp [d]", edge={"b": "periodic"}), mesh
    ),
    three_ends=lambda mesh: body(
        SAME, lambda x: stencil.convolve(x, np.ones(3, np.float32), "[b/dp] d", edge=("zero", "edge", "zero")), mesh
    ),
    half_periodic=lambda mesh: body(
        SAME, lambda x: stencil.diff(x, "[b/dp] d", edge={"b": ("periodic", "zero")}), mesh
    ),
    a_fraction_beyond_integers=lambda mesh: body(
        SAME, lambda x: stencil.halo(x, "b/dp d -> 1+b/dp+1 d", edge=0.5)[1:-1], mesh, X.astype(int)
    ),
    a_sign_for_unsigned_numbers=lambda mesh: body(
        SAME, lambda x: stencil.diff(x, "[b/dp] d", edge="antisymmetric"), mesh, X.astype(np.uint8)
    ),
    a_mirror_between_cells_wider_than_the_array=lambda mesh: body(
        SAME, lambda x: stencil.halo(x, "b/dp d -> b/dp d+5", edge={"d": "symmetric"}), mesh
    ),
    a_mirror_wider_than_the_array=lambda mesh: body(
        SAME, lambda x: stencil.halo(x, "b/dp d -> b/dp d+4", edge="reflect"), mesh
    ),
)


@bad
def a_halo_of_a_partial_sum(mesh):
    def fn(x):
        part = x.sum(0)
        return x + stencil.halo(part, "d {U:dp} -> 1+d+1 {U:dp}")[None, 2:]

    body(SAME, fn, mesh)


@fixed
def a_halo_of_a_partial_sum_fixed(mesh, fix):
    out = body(SAME, lambda x: x + fix(x=x.sum(0))[None, 2:], mesh)
    np.testing.assert_allclose(out, X + np.roll(X.sum(0), -1))


bad(
    a_stencil_that_keeps_its_margins=lambda mesh: body(
        SAME, stencil.stencil(lambda u: u, "1+b/dp+1 d -> b/dp d"), mesh
    ),
    a_stencil_without_a_function=lambda mesh: body(SAME, lambda x: stencil.stencil(x, "1+b/dp+1 d -> b/dp d"), mesh),
    weights_that_are_no_array=lambda mesh: body("x/dp -> x/dp", lambda x: stencil.convolve(x, {}, "[x/dp]"), mesh, V),
    weights_of_another_rank=lambda mesh: body(
        "x/dp -> x/dp", lambda x: stencil.convolve(x, jnp.ones((3, 3)), "[x/dp]"), mesh, V
    ),
    weights_of_another_dtype=lambda mesh: body(
        "x/dp -> x/dp", lambda x: stencil.convolve(x, jnp.arange(3), "[x/dp]"), mesh, V
    ),
)


@fixed
def weights_of_another_dtype_fixed(mesh, fix):
    fn = lambda x: stencil.convolve(x, fix(weights=jnp.arange(3), x=x), "[x/dp]")
    np.testing.assert_allclose(body("x/dp -> x/dp", fn, mesh, V), np.convolve(V, np.float32([0, 1, 2]), "same"))


bad(
    a_difference_along_nothing=lambda mesh: body(SAME, lambda x: stencil.diff(x, "b/dp d"), mesh),
)


@bad
def a_gather_of_margins(mesh):
    def fn(x):
        wide = stencil.halo(x, "b/dp d -> 4+b/dp+4 d")
        return all_gather(wide, "4+b/dp+4 d -> 8+b+8 d")[8:-8]  # the sizes would fit

    body("b/dp d -> b d", fn, mesh)


@bad
def a_norm_of_margins(mesh):
    fn = lambda x: x / parallel.global_norm(stencil.halo(x, "b/dp d -> 1+b/dp+1 d"), "1+b/dp+1 d")
    body(SAME, fn, mesh)


# --- deposits


def wide(x):
    return jnp.pad(x, ((1, 1), (0, 0)))


bad(
    a_deposit_without_margins=lambda mesh: body(SAME, lambda x: stencil.deposit(x, SAME), mesh),
    a_deposit_of_an_array_without_its_margin=lambda mesh: body(
        SAME, lambda x: stencil.deposit(x, "1+b/dp+1 d -> b/dp d"), mesh
    ),
    a_deposit_that_moves_more=(
        lambda mesh: body(SAME, lambda x: stencil.deposit(wide(x), "1+b/dp+1 d -> b d"), mesh),
        lambda mesh, fix: np.testing.assert_array_equal(body(SAME, lambda x: fix(x=wide(x)), mesh), X),
    ),
    a_deposit_that_makes_margins_wider=lambda mesh: body(
        SAME, lambda x: stencil.deposit(wide(x), "1+b/dp+1 d -> 2+b/dp+1 d"), mesh
    ),
    a_deposit_onto_a_number=lambda mesh: body(
        SAME, lambda x: stencil.deposit(wide(x), "1+b/dp+1 d -> b/dp d", edge=2.0), mesh
    ),
    a_deposit_of_booleans=lambda mesh: body(SAME, lambda x: stencil.deposit(wide(x > 0), "1+b/dp+1 d -> b/dp d"), mesh),
    a_deposit_of_a_partial_sum=lambda mesh: body(
        "b/dp d/tp -> b/dp", lambda x: stencil.deposit(jnp.pad(x.sum(1), 1), "1+b/dp+1 {U:tp} -> b/dp {U:tp}"), mesh
    ),
)


@fixed
def a_deposit_of_a_partial_sum_fixed(mesh, fix):
    total = body("b/dp d/tp -> b/dp", lambda x: fix(x=jnp.pad(x.sum(1), 1)), mesh)
    np.testing.assert_allclose(total, X.sum(1), rtol=1e-5)


bad(
    a_deposit_of_a_composite=lambda mesh: body(
        SAME, lambda x: stencil.deposit(wide(x), "1+(n m)/dp+1 d -> (n m)/dp d", m=2), mesh
    ),
)


# --- rows that go to their owners


def sent(rows="[b/dp] d", owner=jnp.int32, partial=False, **more):
    def run(x):
        given = (x @ jnp.ones((x.shape[1], 2), x.dtype)) if partial else x
        return exchange(given, jnp.zeros(x.shape[0], owner), rows, **{"capacity": 1, **more})[0]

    return run


bad(
    an_exchange_without_brackets=lambda mesh: body(SAME, sent("b/dp d"), mesh),
    owners_that_are_floats=lambda mesh: body(SAME, sent(owner=jnp.float32), mesh),
    an_exchange_without_room=lambda mesh: body(SAME, sent(capacity=0), mesh),
    a_hop_to_nowhere=lambda mesh: body(SAME, sent(hops=(1, 0)), mesh),
    an_exchange_by_two_ways=lambda mesh: body(SAME, sent(hops=(1,), ragged=True), mesh),
    an_exchange_of_partial_sums=lambda mesh: body("b/dp d/tp -> b/dp d", sent("[b/dp] d {U:tp}", partial=True), mesh),
)
