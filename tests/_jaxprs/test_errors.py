"""What JAX's own errors say. Each is raised by JAX itself, so that a version with other words is noticed."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd._jaxprs import errors as _jax_errors


def raised(body, mesh):
    """What the trace of a `shard_map` raises, caught inside of it, where JAX's frames are still there."""
    caught = []

    def inside(x):
        try:
            return body(x)
        except Exception as error:
            caught.append(error)
            return x

    jax.make_jaxpr(jax.shard_map(inside, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(jnp.ones(8))
    [error] = caught
    return error


def test_a_carry_that_changes_its_type(mesh):
    def unlike(x):
        start = jnp.zeros(x.shape, x.dtype)
        return lax.scan(lambda carry, _: (carry + x, None), start, length=2)[0]

    told = _jax_errors.told(raised(unlike, mesh))
    assert told is not None and told.kind == "carry"
    assert [one.varying for one in told.carries] == [{"dp"}]


def test_branches_of_different_types(mesh):
    def body(x):
        return lax.cond(True, lambda: x, lambda: jnp.zeros(x.shape, x.dtype))

    told = _jax_errors.told(raised(body, mesh))
    assert told is not None and told.kind == "branches"


def test_an_axis_that_is_not_bound(mesh):
    told = _jax_errors.told(raised(lambda x: x + lax.axis_index("ghost"), mesh))
    assert told == _jax_errors.Told("axis", "ghost")


def test_an_axis_that_jax_asserts_without_a_word_is_in_its_frames(mesh):
    error = raised(lambda x: lax.psum(x, "ghost"), mesh)
    told = _jax_errors.told(error)
    assert told is not None and told.kind == "axis"
    assert "ghost" in (told.axis, *_jax_errors.named_axes(error))


def test_errors_of_the_user_are_left_alone(mesh):
    def body(x):
        raise ValueError("the carry of my shopping bag")

    error = raised(body, mesh)
    assert _jax_errors.told(error) is None and not _jax_errors.raised_by_jax(error)
    assert _jax_errors.first_line(error) == "the carry of my shopping bag"
    assert _jax_errors.first_line(AssertionError()) == "AssertionError"


def test_a_mesh_without_devices_is_not_compiled_for():
    nowhere = jax.NamedSharding(jax.sharding.AbstractMesh((2,), ("dp",)), P("dp"))
    lowered = lambda: jax.jit(lambda x: x, in_shardings=nowhere).lower(jax.ShapeDtypeStruct((8,), "float32"))
    with pytest.raises(ValueError, match="AbstractMesh") as caught:
        lowered().compile()
    assert _jax_errors.lacks_devices(caught.value)


def test_what_the_system_refused_is_found_behind_what_it_led_to():
    full, tensorstore = OSError("full"), ValueError('write failed [os_error_code="28"]')
    for first in (full, tensorstore, TimeoutError("waited")):
        caused, followed = RuntimeError("a barrier"), RuntimeError("a barrier")
        caused.__cause__, followed.__context__ = first, first
        for error in (first, caused, followed):
            assert _jax_errors.refused_by_the_system(error) is first
    for other in (ValueError("another"), None):
        assert _jax_errors.refused_by_the_system(other) is None
