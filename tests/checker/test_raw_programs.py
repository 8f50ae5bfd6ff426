"""What `spmd.check` says of a raw `shard_map` with `build=`: the same with and without `jax.jit` around it."""

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd

ROWS = jax.ShapeDtypeStruct((16,), "float32")


def other_order(mesh):
    return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("b", "a")))


def of_devices(mesh):
    """It means the number of devices."""
    return jax.shard_map(lambda x: x / lax.axis_size("a"), mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))


def checked(build, jit):
    made = (lambda mesh: jax.jit(build(mesh))) if jit else build
    return spmd.check(made(spmd.make_mesh(a=2, b=4)), ROWS, build=made)


@pytest.mark.parametrize("jit", [True, False])
def test_a_suspected_order_whose_numbers_differ_is_not_proved(jit):
    found = checked(other_order, jit)
    assert [(one.kind, one.certain) for one in found] == [("layout", False)]
    assert found.verdict.kind == "not tested"
    assert str(found.verdict).startswith("meant per shard? 1 finding: not tested. its numbers depend on the sizes")


@pytest.mark.parametrize("jit", [True, False])
def test_a_raw_program_may_mean_the_number_of_devices(jit):
    found = checked(of_devices, jit)
    assert (list(found), found.verdict.kind) == ([], "not tested")
