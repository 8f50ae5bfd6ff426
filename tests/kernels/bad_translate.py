"""Wrong loops, branches and raw JAX in a kernel, whose errors are told again."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

import spmd
from spmd import psum
from tests.errors.registry import X, bad, body, fixed

SAME = "b/dp d -> b/dp d"


def pallas_call(x, out_shape=None):
    def twice(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    out_shape = out_shape or jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(twice, out_shape=out_shape, interpret=True)(x)


def typed(x):
    kind = jax.typeof(x).manual_axis_type
    return pallas_call(x, jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind))


bad(
    pallas_call_without_a_type=lambda mesh: body(SAME, pallas_call, mesh),
)


bad(
    pallas_call_that_is_interpreted=lambda mesh: spmd.kernel(SAME, mesh=mesh)(typed).trace(X),
    raw_branches_of_two_types=lambda mesh: body(
        SAME, lambda x: jax.lax.cond(True, lambda: x, lambda: jnp.zeros((4, 4))), mesh
    ),
)


@fixed
def raw_branches_of_two_types_fixed(mesh, fix):
    other = lambda: jnp.zeros((4, 4))
    out = body(SAME, lambda x: fix(predicate=True, true_fn=lambda: x, false_fn=other, operands=()), mesh)
    np.testing.assert_array_equal(out, X)


@bad
def two_carries_of_another_type(mesh):
    def fn(x):
        step = lambda c, row: ({"sum": c["sum"] + row, "count": c["count"] + row.sum()}, None)
        last, _ = jax.lax.scan(step, {"sum": jnp.zeros(4), "count": jnp.zeros(())}, x)
        return psum(last["sum"], "d {U:dp} -> d")

    body("b/dp d -> d", fn, mesh)


@bad
def raw_constraint_in_a_kernel(mesh):
    where = jax.NamedSharding(mesh, jax.P("dp"))
    body(SAME, lambda x: jax.lax.with_sharding_constraint(x, where), mesh)


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


def in_steps(term, mesh):
    def fn(x):
        return jax.lax.scan(lambda c, _: (c + term(x), None), spmd.zeros("b/dp"), length=2)[0]

    return body("b/dp d/tp -> b/dp", fn, mesh)


@bad
def carry_that_varies_on_one_axis_more(mesh):
    in_steps(lambda x: x.sum(1), mesh)


@fixed
def carry_that_varies_on_one_axis_more_fixed(mesh):
    np.testing.assert_allclose(in_steps(lambda x: spmd.reduce(x, "b/dp d/tp -> b/dp"), mesh), 2 * X.sum(1))


# JAX's own loops and branches are mended around them, and not inside.
OWN_LOOP = lambda x: jax.scipy.special.expi(x + 1)
OWN_BRANCHES = lambda x: jax.scipy.special.spence(x + 1)


def hidden(fn, mesh):
    np.testing.assert_allclose(body(SAME, lambda x: spmd.opaque(fn, SAME)(x), mesh), fn(X), rtol=1e-5)


bad(
    loop_of_a_library=(lambda mesh: body(SAME, OWN_LOOP, mesh), lambda mesh: hidden(OWN_LOOP, mesh)),
    branches_of_a_library=(lambda mesh: body(SAME, OWN_BRANCHES, mesh), lambda mesh: hidden(OWN_BRANCHES, mesh)),
    raw_collective_with_a_typo=lambda mesh: body("b/dp d -> b/dp d", lambda x: x + jax.lax.psum(x, "typo"), mesh),
    raw_collective_in_auto_mode=lambda mesh: spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(
        lambda x: x + jax.lax.psum(x.sum(), "dp")
    ).auto(X),
    sum_over_an_axis_along_which_a_value_is_equal=(
        lambda mesh: body("b/dp d -> scalar", lambda x: jax.lax.psum(x.sum(), ("dp", "tp")), mesh),
        lambda mesh: np.testing.assert_allclose(
            body("b/dp d -> scalar", lambda x: jax.lax.psum(x.sum(), "dp"), mesh), X.sum(), rtol=1e-5
        ),
    ),
)


bad(
    numpy_of_a_shard=lambda mesh: body(SAME, lambda x: x + np.sin(x), mesh),
    a_python_number_of_a_shard=lambda mesh: body(SAME, lambda x: x * float(x.sum()), mesh),
    elements_that_a_mask_selects=lambda mesh: body(SAME, lambda x: x[x > 0], mesh),
)


def in_two_memories(mesh, fn):
    where = spmd.Layout("b/dp d").sharding(mesh)
    host = jax.device_put(X, where.with_memory_kind("pinned_host"))
    return spmd.kernel(f"b/dp d, {SAME}", mesh=mesh)(fn)(host, jax.device_put(X, where))


@bad
def arguments_in_two_memories(mesh):
    in_two_memories(mesh, lambda x, y: x + y)


bad(
    a_kernel_of_its_function=lambda mesh: spmd.kernel(pallas_call, SAME),
    a_kernel_with_its_mesh_by_position=lambda mesh: spmd.kernel(SAME, mesh),
)
