"""Every assertion fails in one way, as an assertion: pytest shows it, and one `except` catches all."""

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import testing


def gather(mesh, *, to="invarying"):
    return spmd.kernel("b/dp d -> b d", mesh=mesh)(lambda x: spmd.all_gather(x, "b/dp d -> b d", to=to))


def wrong(mesh):
    @spmd.kernel("b/dp -> b/dp", mesh=mesh)
    def body(x):
        return x * spmd.axis_size("dp")

    return body


def added(mesh):
    """The compiler gathers what nobody wrote."""
    lies = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, lies))


CALLS = {
    "assert_collectives": lambda mesh, x: testing.assert_collectives(gather(mesh), (x,), {"psum": {"dp": 1}}),
    "assert_no_unwritten_collectives": lambda mesh, x: testing.assert_no_unwritten_collectives(added(mesh), (x,)),
    "assert_modes_agree": lambda mesh, x: testing.assert_modes_agree(disagrees(mesh), jnp.ones((4, 6))),
    "assert_same_on_any_mesh": lambda mesh, x: testing.assert_same_on_any_mesh(wrong(mesh), jnp.ones(4)),
    "assert_sharded": lambda mesh, x: testing.assert_sharded({"w": jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P()))}, layouts={"w": "a/dp b"}),
}  # fmt: skip


def disagrees(mesh):
    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        return x * x.shape[0]

    return body


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith("assert_")])
def test_each_assertion_raises_it(name, mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    with pytest.raises(testing.Mismatch) as caught:
        CALLS[name](mesh, x)
    assert isinstance(caught.value, AssertionError) and str(caught.value).strip()
