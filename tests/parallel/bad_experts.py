"""Layers of experts that cannot be."""

import numpy as np

import spmd
from spmd import parallel
from tests.errors.registry import X, bad, body, fixed

TOKENS = np.ones((8, 8, 3), np.float32)


ROUTER, IN, OUT = np.ones((3, 8), np.float32), np.ones((8, 3, 4), np.float32), np.ones((8, 4, 3), np.float32)


def experts(tokens: str, weights: str, mesh, k=2, shared=False, **options):
    """One layer of experts on tokens and weights of these layouts."""
    into, out_of = f"{weights.format('d')} f", f"{weights.format('f')} d"

    def fn(x, w, gate, up, down):
        routing = parallel.router(x, w, k=k)
        extra = (gate[0], up[0], down[0]) if shared else None
        return parallel.moe(x, routing, gate, up, down, shared=extra, **options)[0]

    pattern = f"{tokens}, d e, {into}, {into}, {out_of} -> {tokens}"
    return body(pattern, fn, mesh, TOKENS, ROUTER, IN, IN, OUT)


bad(
    experts_divided_where_no_tokens_are=(
        lambda mesh: experts("b/dp s d", "e/tp {}", mesh, dp="dp", ep="tp"),
        lambda mesh: experts("b/dp/tp s d", "e/tp {}", mesh, dp=("dp", "tp"), ep="tp"),
    ),
    experts_before_the_last_axis_of_the_batch=lambda mesh: experts(
        "b/dp/tp s d", "e/dp {}", mesh, dp=("dp", "tp"), ep="dp"
    ),
    hidden_units_divided_like_the_batch=lambda mesh: experts(
        "b/dp/tp s d", "e/tp {}", mesh, dp=("tp", "dp"), ep="dp", tp="tp"
    ),
    shared_expert_across_two_axes_of_the_sequence=lambda mesh: experts(
        "b s/dp/tp d", "e/tp {}", mesh, sp=("dp", "tp"), ep="tp", tp="dp", shared=True
    ),
    groups_that_cut_blocks=lambda mesh: experts(
        "b/dp s/tp d", "e/tp {}", mesh, dp="dp", sp="tp", ep="tp", groups=(2, 2)
    ),
)


@fixed
def groups_that_cut_blocks_fixed(mesh, fix):
    out = experts("b/dp s/tp d", "e/tp {}", mesh, dp="dp", sp="tp", ep="tp", **fix())
    with spmd.mode("reference"):
        np.testing.assert_allclose(
            out, experts("b/dp s/tp d", "e/tp {}", mesh, dp="dp", sp="tp", ep="tp", **fix()), rtol=1e-5
        )


bad(
    groups_as_one_number=lambda mesh: experts("b/dp s d", "e {}", mesh, dp="dp", groups=4),
)


@fixed
def groups_as_one_number_fixed(mesh, fix):
    out = experts("b/dp s d", "e {}", mesh, dp="dp", **fix())
    with spmd.mode("reference"):
        np.testing.assert_allclose(out, experts("b/dp s d", "e {}", mesh, dp="dp", **fix()), rtol=1e-5)


bad(
    groups_that_do_not_divide_the_batch=lambda mesh: experts("b/dp s d", "e {}", mesh, dp="dp", groups=(6, 1)),
)


@fixed
def groups_that_do_not_divide_the_batch_fixed(mesh, fix):
    out = experts("b/dp s d", "e {}", mesh, dp="dp", **fix())
    with spmd.mode("reference"):
        np.testing.assert_allclose(out, experts("b/dp s d", "e {}", mesh, dp="dp", **fix()), rtol=1e-5)


bad(
    experts_without_places=lambda mesh: experts("b/dp s d", "e {}", mesh, dp="dp", capacity_factor=0),
    experts_with_a_bound_on_rows_and_a_capacity=lambda mesh: experts("b/dp s d", "e {}", mesh, dp="dp", rows=12),
)


@fixed
def experts_with_a_bound_on_rows_and_a_capacity_fixed(mesh, fix):
    out = experts("b/dp s d", "e {}", mesh, dp="dp", rows=12, **fix())
    with spmd.mode("reference"):
        np.testing.assert_allclose(out, experts("b/dp s d", "e {}", mesh, dp="dp", rows=12, **fix()), rtol=1e-5)


bad(
    experts_with_room_for_no_row=lambda mesh: experts("b/dp s d", "e {}", mesh, dp="dp", capacity_factor=None, rows=0),
    more_choices_than_experts=lambda mesh: experts("b/dp s d", "e {}", mesh, k=9, dp="dp"),
    scores_of_an_unknown_kind=lambda mesh: body(
        "b/dp d, d e -> b/dp k", lambda x, w: parallel.router(x, w, k=2, scores="relu").weights, mesh, X, ROUTER.T[:4]
    ),
)


def among_groups(mesh, among, k=2):
    body("b/dp d, d e -> b/dp k", lambda x, w: parallel.router(x, w, k=k, among=among).weights, mesh, X, ROUTER.T[:4])


bad(
    groups_of_experts_as_one_number=lambda mesh: among_groups(mesh, 3),
    groups_of_experts_of_different_sizes=lambda mesh: among_groups(mesh, (2, 1)),
    more_choices_than_experts_in_the_groups=lambda mesh: among_groups(mesh, (3, 1)),
)


def router_gradient(mesh, finish=lambda result: result):
    def fn(x, w):
        def loss(w):
            return spmd.reduce(parallel.router(x, w, k=2).weights ** 2, "b/dp k -> scalar", "mean")

        return finish(spmd.grad(loss)(spmd.defer(w, "d e -> d e {R:dp}")))

    return body("b/dp d, d e -> d e", fn, mesh, X, ROUTER.T[:4] * np.arange(1, 4, dtype=np.float32))


bad(
    router_gradient_left_partial=lambda mesh: router_gradient(mesh),
)


@fixed
def router_gradient_left_partial_fixed(mesh, fix):
    found = router_gradient(mesh, lambda result: fix(result=result))
    with spmd.mode("reference"):
        np.testing.assert_allclose(
            found, router_gradient(mesh, lambda result: fix(result=result)), rtol=1e-4, atol=1e-6
        )
