"""Who gives a donated buffer away: a call from Python, and nobody who is being traced."""

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import haliax
from spmd.errors import PlacementError


def placed(mesh):
    return spmd.shard(jnp.ones((4, 8)), "b/dp d", mesh=mesh)


@pytest.fixture
def mesh():
    return spmd.make_mesh(dp=2)


@pytest.fixture
def square(mesh):
    return spmd.kernel("b/dp d -> b/dp d", mesh=mesh, donate="x")(lambda x: x * x)


@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_a_call_from_python_donates(mesh, square, mode):
    x = placed(mesh)
    with spmd.mode(mode):
        square(x)
    assert x.is_deleted()


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
@pytest.mark.parametrize(
    "traced",
    [
        lambda f, x: jax.jit(lambda x: f(x))(x),
        lambda f, x: jax.grad(lambda x: f(x).sum())(x),  # the square's backward pass needs x
        lambda f, x: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
        lambda f, x: jax.vmap(f)(x[None]),
    ],
    ids=["jit", "grad", "jit of grad", "vmap"],
)
def test_a_traced_call_keeps_the_buffer(mesh, square, mode, traced):
    x = placed(mesh)
    with spmd.mode(mode):
        jax.block_until_ready(traced(square, x))
    assert not x.is_deleted()


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_a_donated_array_used_again(mesh, square, mode):
    """JAX 0.10 ends the process where a compiled function meets one for the second time."""
    double = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: x + x)
    named = haliax.named_jit(lambda tree: tree["x"] + 1, axis_resources={"b": "dp"})
    make = spmd.init(lambda x: x * 2, "b/dp d", mesh=mesh)
    move = lambda x: spmd.shard({"x": x}, "b d/dp", mesh=mesh)
    x = placed(mesh)
    with spmd.mode(mode):
        uses = {
            'kernel("b/dp d -> b/dp d")': square,
            '<lambda>: kernel("b/dp d -> b/dp d")': double,
            "<lambda>(...)": lambda x: named({"x": x}),
            "init(": make,
            "shard(": move,
        }
        for use in uses.values():
            use(placed(mesh))
        square.explicit(x)
        for call, use in uses.items():
            with pytest.raises(PlacementError, match=r"donated to an earlier call(.|\n)*float32\[4, 8\]") as caught:
                use(x)
            assert call in str(caught.value)


def test_a_donated_array_in_a_comparison_of_modes(mesh, square):
    x = placed(mesh)
    x.delete()
    with pytest.raises(PlacementError, match=r"assert_modes_agree\(...\)(.|\n)*argument\[0\]: float32\[4, 8\]"):
        spmd.testing.assert_modes_agree(square, x)
