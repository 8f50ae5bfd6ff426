"""More than 2^31 elements, and positions beyond them: nothing is allocated here, and nothing wraps around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import SizeError

MESH = spmd.make_mesh(a=2**16, abstract=True)
EDGE, BEYOND = 2**31, 2**34


def shape_of(fn, *args):
    out = jax.eval_shape(fn, *args)
    return out.shape, out.dtype


def in_kernel(body, size):
    return lambda: spmd.kernel("-> x/a", mesh=MESH, x=size)(body)()


def vector(size):
    return jax.ShapeDtypeStruct((size,), jnp.float32)


MAKERS = {
    "from_function": lambda n: lambda: spmd.from_function(lambda i: i, "x/a", mesh=MESH, x=n),
    "from_function in a kernel": lambda n: in_kernel(lambda: spmd.from_function(lambda i: i, "x/a"), n),
    "from_function of factors": lambda n: (
        lambda: spmd.from_function(lambda i: i, "(x/a y)", mesh=MESH, x=2**16, y=n // 2**16)
    ),
    "iota": lambda n: in_kernel(lambda: spmd.iota("x/a", jnp.int64 if n > EDGE else jnp.int32), n),
}


@pytest.mark.parametrize("make", MAKERS)
def test_positions(make) -> None:
    """int32 as far as it goes, then int64; where JAX has none, an error that says so."""
    assert shape_of(MAKERS[make](EDGE)) == ((EDGE,), jnp.int32)
    if make != "iota":
        with pytest.raises(SizeError, match="do not fit int32") as caught:
            shape_of(MAKERS[make](BEYOND))
        assert "jax_enable_x64" in str(caught.value) and str(BEYOND) in str(caught.value)
    with jax.enable_x64(True):
        assert shape_of(MAKERS[make](BEYOND)) == ((BEYOND,), jnp.int64)


def test_only_positions_are_limited() -> None:
    """An array may be as large as it likes in all, if each dimension can be counted."""
    both = lambda: spmd.from_function(lambda i, j: i + j, "x/a y", mesh=MESH, x=2**20, y=2**20)
    assert shape_of(both) == ((2**20, 2**20), jnp.int32)
    for make in (lambda: spmd.zeros("x/a"), lambda: spmd.full("x/a", 1.0)):
        assert shape_of(in_kernel(make, BEYOND)) == ((BEYOND,), jnp.float32)
    placed = spmd.shard(jax.ShapeDtypeStruct((BEYOND,), jnp.int8), "x/a", mesh=MESH)
    assert placed.shape == (BEYOND,)


def test_iota_of_a_dtype_that_is_too_small() -> None:
    with pytest.raises(SizeError, match="positions up to 299 do not fit int8"):
        spmd.kernel("-> x", mesh=MESH, x=300)(lambda: spmd.iota("x", jnp.int8)).trace()
    with jax.enable_x64(True), pytest.raises(SizeError, match="do not fit int32") as caught:
        shape_of(in_kernel(lambda: spmd.iota("x/a"), BEYOND))
    assert "dtype=jnp.int64" in str(caught.value)


CALLS = {
    "offset": lambda x: spmd.offset("x/a")[None],
    "argmax": lambda x: spmd.repeat(spmd.argmax(x, "[x/a] -> scalar"), "-> n/a", n=2**16),
    "top_k": lambda x: spmd.repeat(spmd.top_k(x, "[x/a]", 1)[1][0], "-> n/a", n=2**16),
}


@pytest.mark.parametrize("name", CALLS)
def test_positions_of_elements(name) -> None:
    run = spmd.kernel("x/a -> n/a", mesh=MESH)(CALLS[name])
    assert shape_of(run, vector(EDGE))[1] == jnp.int32
    with pytest.raises(SizeError, match="do not fit int32"):
        shape_of(run, vector(BEYOND))
    with jax.enable_x64(True):
        assert shape_of(run, vector(BEYOND))[1] == jnp.int64


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_means_of_many(dtype) -> None:
    run = spmd.kernel("x/a -> scalar", mesh=MESH)(lambda x: spmd.reduce(x, "x/a -> scalar", "mean"))
    for size in (EDGE, BEYOND):
        expected = jnp.float32 if dtype == jnp.int32 else dtype
        assert shape_of(run, jax.ShapeDtypeStruct((size,), dtype)) == ((), expected)


def test_where_blocks_start() -> None:
    mesh = spmd.make_mesh(a=8)
    with jax.enable_x64(True):
        starts = spmd.kernel("-> n/a", mesh=mesh, n=8)(lambda: spmd.full("n/a", 0) + spmd.offset("x/a", x=2**40))
        np.testing.assert_array_equal(starts(), np.arange(8) * 2**37)
        assert starts().dtype == jnp.int64
    small = spmd.kernel("-> n/a", mesh=mesh, n=8)(lambda: spmd.full("n/a", 0) + spmd.offset("x/a", x=2**31))
    np.testing.assert_array_equal(small(), np.arange(8) * 2**28)
