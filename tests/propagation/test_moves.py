"""What a move says of itself: its phase, its reason, its names, and whether the user asked for it."""

import jax
import jax.numpy as jnp

import spmd
from spmd import Layout, propagate
from spmd.inspect import collectives
from tests.propagation.frozen import run
from tests.propagation.programs import struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)


def test_forward_backward_and_again():
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w.T))(w))

    plan = propagate(jax.value_and_grad(loss), struct(MESH, "d f/tp"), struct(MESH, "b/dp d"), layouts="d f, b d")
    phases = [(one.phase, one.recomputed) for one in plan.moves]
    assert ("forward", False) in phases and ("backward", False) in phases
    assert any(one.kind == "psum" and one.axes == ("dp",) and one.phase == "backward" for one in plan.moves)
    assert all(one.where for one in plan.moves)


def test_a_constraint_and_the_specs_of_a_kernel_are_asked_for():
    body = spmd.kernel("b d/tp -> b d/tp", mesh=MESH)(lambda x: x * 2)

    def program(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), struct(MESH, "b d").sharding)
        return body(jax.lax.with_sharding_constraint(jnp.cos(y), struct(MESH, "b/dp d").sharding))

    plan = propagate(program, struct(MESH, "b/dp d"), layouts="b d")
    asked = [(one.text, one.asked, one.why) for one in plan.moves]
    assert ('all_gather("b/dp d -> b d")', True, "a sharding_constraint asks for it") in asked
    assert any(why == "the specs of a shard_map ask for it" for _, _, why in asked)


def test_what_lies_beside_it_is_a_reason():
    def program(x, y):
        return x + y

    plan = propagate(program, struct(MESH, "b/dp d"), struct(MESH, "b d/dp"), layouts="b d, b d")
    [move] = plan.moves
    assert move.why == "add takes it so, as it lies beside it"


def test_plain_values():
    def program(x):
        return jnp.sum(x, 0)

    [one] = propagate(program, struct(MESH, "b/dp d"), layouts="b d").to_dict()["moves"]
    assert one["text"] == 'psum("d {U:dp} -> d")' and one["axes"] == ["dp"] and one["total_bytes"] == 128
    assert "raw" not in one


def test_what_moves_back_to_where_it_was_made_sends_nothing(mesh):
    """A sort takes its dimension whole, and the next one too: what was sorted stays until something else needs it."""
    x, put = struct(mesh, "b/tp d/dp"), Layout("b/tp d/dp").sharding(mesh)
    sort = lambda x: jnp.sort(x, axis=0)

    def read_twice(x):
        y = sort(x)
        return y + 1, sort(y)

    for program, moves in [(lambda x: sort(sort(sort(x))), 2), (read_twice, 3), (lambda x: sort(jnp.tanh(sort(x))), 4)]:
        sent = collectives(jax.jit(program), x)
        plan = propagate(program, x)
        assert plan.counts == sent.counts == {"all_to_all": moves} and plan.total_bytes == sent.total_bytes
        kernel = run(plan.freeze("frozen"), mesh)
        assert collectives(kernel, x).total_bytes == sent.total_bytes
    # a constraint asks that it lies there
    asked = lambda x: sort(jax.lax.with_sharding_constraint(sort(x), put))
    assert propagate(asked, x).counts == collectives(jax.jit(asked), x).counts == {"all_to_all": 4}
