"""Wrong loops, raw JAX, gradients, placement and meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import psum, reduce
from tests.errors.registry import V, X, bad, body, fixed

# --- loops, raw JAX, gradients -------------------------------------------------------------------------------


@bad
def carry_of_another_type(mesh):
    def fn(x):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(4), x)
        return psum(total, "d {U:dp} -> d")

    body("b/dp d -> d", fn, mesh)


@fixed
def carry_of_another_type_fixed(mesh):
    def fn(x):
        total, _ = jax.lax.scan(lambda c, row: (c + row, None), spmd.zeros("d {U:dp}"), x)
        return psum(total, "d {U:dp} -> d")

    np.testing.assert_allclose(body("b/dp d -> d", fn, mesh), X.sum(0))


@bad
def raw_collective_with_a_typo(mesh):
    body("b/dp d -> b/dp d", lambda x: x + jax.lax.psum(x, "typo"), mesh)


@bad
def raw_collective_in_auto_mode(mesh):
    spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x + jax.lax.psum(x.sum(), "dp")).auto(X)


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


@bad
def loss_mark_that_is_malformed(mesh):
    body("d -> d", lambda w: spmd.grad(lambda w: (w**2).sum(), loss="dp")(w), mesh, V)


@bad
def loss_that_is_no_scalar(mesh):
    body("d -> d", lambda w: spmd.grad(lambda w: w**2)(w), mesh, V)


@bad
def kernel_of_another_mode_inside(mesh):
    inner = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x)
    body("b/dp d -> b/dp d", lambda x: inner.auto(x), mesh)


@bad
def kernel_inside_with_another_layout(mesh):
    inner = spmd.kernel("b d/dp -> b d/dp", mesh=mesh)(lambda x: x)
    body("b/dp d -> b/dp d", lambda x: inner(x), mesh)


# --- placement, meshes, modes --------------------------------------------------------------------------------


@bad
def shard_without_a_mesh(mesh):
    spmd.shard(X, "b/dp d")


@bad
def shard_of_indivisible_arrays(mesh):
    spmd.shard({"w": X[:6], "b": V[:7]}, {"w": "b/tp d", "b": "d/dp"}, mesh=mesh)


@bad
def shard_of_another_structure(mesh):
    spmd.shard({"w": X}, {"v": "b/dp d"}, mesh=mesh)


@bad
def shard_under_a_mapping_without_the_name(mesh):
    with spmd.axis_mapping({"batch": "dp"}):
        spmd.shard(X, "bacth d", mesh=mesh)


@bad
def kernel_under_a_mapping_without_the_name(mesh):
    with spmd.axis_mapping({"batch": "dp", "embed": None}):
        body("bacth embed -> bacth embed", lambda x: x, mesh)


@fixed
def kernel_under_a_mapping_without_the_name_fixed(mesh):
    with spmd.axis_mapping({"batch": "dp", "embed": None}):
        assert (body("batch embed -> batch embed", lambda x: 2 * x, mesh) == 2 * X).all()
        assert (body("bacth/1 embed -> bacth/1 embed", lambda x: 2 * x, mesh) == 2 * X).all()
        with spmd.axis_mapping(None):
            assert (body("bacth embed -> bacth embed", lambda x: 2 * x, mesh) == 2 * X).all()


@bad
def rule_that_matches_nothing(mesh):
    spmd.layouts({"mlp": {"w_in": X}}, {"**/w_inn": "d/dp f/tp"})


@bad
def leaf_without_a_layout(mesh):
    spmd.layouts({"w": X, "b": V}, {"w": "d/dp f/tp"})


@bad
def parameters_of_another_rank(mesh):
    spmd.init(lambda: {"w": jnp.ones(8)}, {"w": "d/dp f/tp"}, mesh=mesh)()


@bad
def mesh_that_is_too_large(mesh):
    spmd.make_mesh(dp=4, tp=4)


@bad
def mesh_without_axes(mesh):
    spmd.make_mesh()


@bad
def mesh_with_a_size_of_zero(mesh):
    spmd.make_mesh(dp=0)


@bad
def more_cpu_devices_than_run(mesh):
    spmd.use_cpu_devices(64)


@bad
def unknown_mode(mesh):
    with spmd.mode("explict"):
        pass


@bad
def mapping_with_an_axis_twice(mesh):
    spmd.AxisMapping({"batch": ("dp", "dp")})


@bad
def layout_with_an_axis_in_dim_and_mark(mesh):
    spmd.Layout("b/dp d {U:dp}")


@bad
def layout_of_empty_parentheses(mesh):
    spmd.Layout("()")


@fixed
def layout_of_empty_parentheses_fixed(mesh, fix):
    assert spmd.Layout(fix()).is_scalar
