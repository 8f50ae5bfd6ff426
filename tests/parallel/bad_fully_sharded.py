"""Wrong uses of what rests divided: layouts, gathers, stacks, norms, accumulation."""

import jax.numpy as jnp
import numpy as np

import spmd
from spmd import parallel
from tests.errors.registry import V, X, bad, body, fixed

W = {"w": X, "scale": V}


def gathering(mesh, at_rest, compute, **options):
    return spmd.kernel(in_layouts=({"w": "d/dp f", "scale": "d"},), out_layouts="scalar", mesh=mesh)(
        lambda w: parallel.gather(w, at_rest, compute, **options)["w"].sum()
    )(W)


def accumulating(mesh, loss, batches=X, **options):
    return spmd.kernel("d/dp, n b/dp -> scalar, d/dp", mesh=mesh)(
        lambda w, x: parallel.accumulate(
            loss, w, batches(x) if callable(batches) else x, at_rest="d/dp", compute="d", **{"data": "dp", **options}
        )
    )(V, jnp.asarray(X))


def square(w, x):
    return spmd.reduce(x**2, "b/dp -> {U:dp}") * w.sum()


bad(
    nothing_is_divided=lambda mesh: parallel.fsdp_layouts(W, {"w": "d f", "scale": "d"}, fsdp="dp", mesh=mesh),
)


@fixed
def nothing_is_divided_fixed(mesh):
    found = parallel.fsdp_layouts(W, {"w": "d f", "scale": "d"}, fsdp="dp", mesh=mesh, min_size=16)
    assert str(found.at_rest["w"]) == "d/dp f"


bad(
    fsdp_over_an_unknown_axis=lambda mesh: parallel.fsdp_layouts(W, fsdp="pd", mesh=mesh),
    fsdp_over_a_number=lambda mesh: parallel.fsdp_layouts(W, fsdp=2, mesh=mesh),
    fsdp_over_nothing=lambda mesh: parallel.fsdp_layouts(W, fsdp=(), mesh=mesh),
    fsdp_layout_of_another_rank=lambda mesh: parallel.fsdp_layouts(
        W, {"w": "l d f", "scale": "d"}, fsdp="dp", mesh=mesh
    ),
    zero_stage_four=lambda mesh: parallel.fsdp_layouts(W, fsdp="dp", mesh=mesh, min_size=0).zero(4),
    layout_for_a_leaf_that_is_not_there=lambda mesh: gathering(
        mesh, {"w": "d/dp f", "scal": "d"}, {"w": "d f", "scale": "d"}
    ),
    layouts_that_are_numbers=lambda mesh: gathering(mesh, {"w": 1, "scale": "d"}, "..."),
    gather_renames_a_dimension=lambda mesh: gathering(mesh, {"w": "d/dp f", "scale": "d"}, {"w": "e f", "scale": "d"}),
    gathered_axis_that_divides_no_data=lambda mesh: gathering(
        mesh, {"w": "d/dp f", "scale": "d"}, {"w": "d f", "scale": "d"}, data="tp"
    ),
)


@fixed
def gathered_axis_that_divides_no_data_fixed(mesh, fix):
    def fn(w):
        whole = parallel.gather(w, {"w": "d/dp f", "scale": "d"}, {"w": "d f", "scale": "d"}, **fix())
        return spmd.reduce(whole["w"], "d f -> scalar", "mean")

    out = spmd.kernel(in_layouts=({"w": "d/dp f", "scale": "d"},), out_layouts="scalar", mesh=mesh)(fn)(W)
    np.testing.assert_allclose(out, X.mean())


bad(
    mapping_without_a_name=lambda mesh: parallel.mapped_layouts({"w": X}, {"w": "embed mlp"}, {"embed": "dp"}),
    mapped_layout_of_another_rank=lambda mesh: parallel.mapped_layouts({"w": X}, {"w": "embed"}, {"embed": "dp"}),
    state_of_parameters_of_another_rank=lambda mesh: parallel.state_layouts({"m": {"w": X}}, {"w": X}, {"w": "d/dp"}),
    unknown_way_to_save=lambda mesh: parallel.fsdp(lambda w, x: x, "d/dp f", "d f", save="nothing"),
)


@fixed
def unknown_way_to_save_fixed(mesh, fix):
    layer = parallel.fsdp(lambda w, x: jnp.tanh(x @ w), "d/dp f", "d f", **fix())
    out = body("d/dp f, b/dp d -> b/dp f", layer, mesh, X.T, X)
    np.testing.assert_allclose(out, np.tanh(X @ X.T), rtol=1e-5)


bad(
    stack_divided_over_its_layers=lambda mesh: body(
        "l/dp f, b -> b",
        lambda w, x: parallel.scan_layers(lambda w, x: x, w, x, at_rest="l/dp f", compute="l f"),
        mesh,
        X,
        V,
    ),
    stacks_of_different_heights=lambda mesh: body(
        "l f, k f, b -> b",
        lambda w, v, x: parallel.scan_layers(lambda w, x: x, [w, v], x, at_rest="...", compute="..."),
        mesh,
        X,
        X[:6],
        V,
    ),
    norm_of_a_partial_sum=lambda mesh: body(
        "b/dp d -> scalar",
        lambda x: parallel.global_norm(spmd.reduce(x, "b/dp d -> d {U:dp}"), "d {U:dp}"),
        mesh,
    ),
)


@fixed
def norm_of_a_partial_sum_fixed(mesh):
    out = body(
        "b/dp d -> scalar",
        lambda x: parallel.global_norm(spmd.psum(spmd.reduce(x, "b/dp d -> d {U:dp}"), "d {U:dp} -> d"), "d"),
        mesh,
    )
    np.testing.assert_allclose(out, np.linalg.norm(X.sum(0)), rtol=1e-6)


bad(
    accumulation_over_no_axis=lambda mesh: accumulating(mesh, square, data=()),
    accumulation_without_batches=lambda mesh: accumulating(mesh, square, batches=lambda x: (x, x[0, 0])),
    accumulated_mean_without_a_count=lambda mesh: accumulating(mesh, square, mean=True),
)


@fixed
def accumulated_mean_without_a_count_fixed(mesh, fix):
    value, gradient = accumulating(mesh, square, **fix())
    np.testing.assert_allclose(value, (X**2).sum() * V.sum())
    np.testing.assert_allclose(gradient, np.full(8, (X**2).sum()))


bad(
    accumulated_loss_that_is_complete=(
        lambda mesh: accumulating(mesh, lambda w, x: spmd.reduce(x**2, "b/dp -> scalar")),
        lambda mesh: accumulating(mesh, lambda w, x: spmd.reduce(x**2, "b/dp -> {U:dp}")),
    ),
)
