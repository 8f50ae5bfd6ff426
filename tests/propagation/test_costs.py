"""What a program may do without: each cost with a constraint that was tried, which a user then writes."""

import jax
import jax.numpy as jnp

import spmd
from spmd import Layout, propagate
from tests.propagation.programs import struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


def shaped(layout, *shape):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=Layout(layout).sharding(MESH))


def test_a_weight_gathered_in_every_micro_batch():
    rows, weight = shaped("m b/dp d", 8, 16, 32), shaped("d/dp f", 32, 32)

    def loss(x, w):
        return jax.lax.scan(lambda total, x: (total + jnp.tanh(x @ w).sum(1), None), jnp.zeros(16), x)[0]

    plan = propagate(loss, rows, weight, layouts="m b d, d f")
    [cost] = [one for one in plan.costs if one.kind == "weight"]
    assert cost.move.count == 8 and cost.constraint is not None
    assert 'with_sharding_constraint(w, spmd.Layout("d f").sharding(mesh))' in cost.constraint.text
    assert "the argument w" in str(cost) and str(plan).index("costs") < str(plan).index("forward")

    def mended(x, w):
        return loss(x, jax.lax.with_sharding_constraint(w, Layout(cost.constraint.layout).sharding(MESH)))

    again = propagate(mended, rows, weight)
    assert again.total_bytes == cost.constraint.bytes < plan.total_bytes
    assert not [one for one in again.costs if one.kind == "weight"]


def test_an_activation_gathered_over_the_data_axes():
    """Each row is compared with all rows."""

    def program(x, w):
        y = jnp.tanh(x @ w)
        return jax.nn.softmax(y @ y.T, -1) @ y

    plan = propagate(program, shaped("b/dp d", 64, 32), shaped("d e", 32, 32), layouts="b d, d e")
    [_, cost] = plan.costs
    assert {one.kind for one in plan.costs} == {"activation"} and plan.total_bytes == 8192
    assert cost.move.text == 'all_gather("b/dp e -> b e")'
    assert (cost.constraint.layout, cost.constraint.bytes) == ("b e", 4096)  # once for both products
    assert "what was computed is gathered" in str(cost) and "on what tanh gives at test_costs.py:" in str(cost)


def test_a_sum_that_sends_more_than_a_gather_before_it():
    """The weight is whole everywhere: what is multiplied with it is gathered for half of what the sum sends."""
    program = lambda x, w: jnp.tanh(x) @ w
    args = [shaped("b d/dp", 16, 32), shaped("d f", 32, 64)]
    plan = propagate(program, *args, layouts="b d, d f")
    [cost] = plan.costs
    assert (cost.kind, cost.constraint.layout) == ("sum", "b d")
    assert str(cost).startswith("a sum over devices sends more than a gather before it: psum(")
    assert (plan.total_bytes, cost.constraint.bytes) == (16 * 64 * 4, 16 * 16 * 4)

    def mended(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), Layout(cost.constraint.layout).sharding(MESH)) @ w

    again = propagate(mended, *args)
    assert again.total_bytes == cost.constraint.bytes and not again.costs


def test_a_sum_that_is_the_cheapest_way_is_no_cost():
    """To gather one operand alone saves nothing where both are divided."""
    plan = propagate(lambda x, w: x.T @ w, shaped("b/dp d", 16, 32), shaped("b/dp f", 16, 64))
    assert plan.counts == {"psum": 1} and not plan.costs


def test_a_loop_that_gathers_what_does_not_change():
    def program(x):
        y = jnp.tanh(x)

        def step(total, row):
            return total + jnp.sort(y, axis=0) * row, None

        return jax.lax.scan(step, jnp.zeros_like(y), jnp.arange(6.0))[0]

    plan = propagate(program, shaped("b/dp d", 64, 32), layouts="b d")
    [cost] = [one for one in plan.costs if one.kind == "loop"]
    assert cost.move.count == 6 and cost.constraint is not None and cost.constraint.bytes < plan.total_bytes

    def mended(x):
        y = jax.lax.with_sharding_constraint(jnp.tanh(x), Layout(cost.constraint.layout).sharding(MESH))

        def step(total, row):
            return total + jnp.sort(y, axis=0) * row, None

        return jax.lax.scan(step, jnp.zeros_like(y), jnp.arange(6.0))[0]

    assert propagate(mended, shaped("b/dp d", 64, 32)).total_bytes == cost.constraint.bytes


def test_gathers_of_weights_layer_by_layer_are_no_costs():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    plan = propagate(layers, shaped("b/dp d", 16, 32), shaped("l d/dp e", 3, 32, 32))
    assert plan.counts.get("all_gather") and plan.costs == ()


def test_the_text_says_where_nothing_helps():
    def program(x):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), struct(MESH, "b d").sharding)

    assert propagate(program, shaped("b/dp d", 16, 32)).costs == ()  # the user asked for it


def test_what_is_moved_between_two_dimensions_is_tried_in_a_third():
    """No layout with one axis twice, which JAX refuses."""

    def program(x):
        y = x.reshape(4, 16, 32)
        return jax.lax.scan(lambda total, _: (total + jnp.sort(y, axis=0), None), jnp.zeros_like(y), length=3)[0]

    plan = propagate(program, shaped("b/dp d", 64, 32))
    assert plan.costs[0].constraint is not None and plan.costs[0].constraint.bytes < plan.total_bytes


def test_on_explicit_axes_no_constraint_is_tried():
    """There a constraint asserts what the type says."""
    typed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    of = lambda *spec: jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(typed, jax.P(*spec)))
    with jax.set_mesh(typed), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plan = propagate(jnp.allclose, of("dp"), of(None, "tp"))
        assert str(plan) and all(cost.constraint is None for cost in plan.costs)
