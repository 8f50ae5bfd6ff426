"""Errors in a body: the user's own stay as they are, and ours name the layer that was called."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import errors, nn
from tests.kernels.test_messages import ROWS, identity, mesh, on, run

# --- layers of the library ------------------------------------------------------------------------------------


def divided_scale(layer):
    """The error of a layer that gets features divided where it wants them whole."""
    with pytest.raises(spmd.SpmdError) as caught:
        spmd.kernel("b d, d/dp -> b d", mesh=mesh(dp=2))(layer)(jnp.ones((4, 8)), jnp.ones(8))
    return str(caught.value)


def test_errors_of_the_body_are_the_users_own():
    """What JAX or the body says is not dressed up."""
    with pytest.raises(ZeroDivisionError):
        run(ROWS, lambda x: x / (1 // 0), (4, 6))
    with pytest.raises(TypeError, match="dot_general requires"):
        run(ROWS, lambda x: x @ np.ones((3, 3), np.float32), (4, 6))


def test_an_error_leaves_nothing_behind():
    """The same kernel works afterwards."""
    kernel = spmd.kernel(ROWS, mesh=mesh())(identity)
    for _ in range(2):
        with pytest.raises(errors.SizeError):
            kernel(*on((5, 6)))
        assert kernel(*on((4, 6))).sharding.is_equivalent_to(jax.NamedSharding(mesh(), P("dp")), 2)
    with pytest.raises(errors.ModeError):
        spmd.psum(np.ones(3), "n {U:dp} -> n")


def test_an_error_names_the_layer_that_was_called() -> None:
    for norm in (nn.rms_norm, nn.layer_norm):
        text = divided_scale(norm)
        assert text.startswith('\nannotate(x, "d/tp")') and text.count(f"called by nn.{norm.__name__}\n") == 1, text
    inner = spmd.kernel("b d, d/dp -> b d", mesh=mesh(dp=2))(nn.rms_norm)
    assert divided_scale(lambda x, scale: inner(x, scale)).count("called by") == 1
    assert "called by" not in divided_scale(lambda x, scale: spmd.annotate(scale, "d"))


def test_an_error_names_each_layer_on_the_way() -> None:
    text = divided_scale(lambda x, w: nn.mlp(x, w[:, None], w[None]))
    assert "called by nn.column_linear, called by nn.mlp" in text, text
    own = divided_scale(lambda x, w: nn.mlp(x, w, w))
    assert (
        own.strip().startswith("column_linear(x, w)") and own.endswith("called by nn.mlp") and "nn.column" not in own
    ), own


def test_an_error_of_shapes_says_which_shards_the_body_holds(mesh):
    @spmd.kernel("b/dp d/tp, d -> b/dp d/tp", mesh=mesh)
    def scaled(x, scale):
        return x * scale

    with pytest.raises(ValueError, match="shapes") as caught:
        scaled(jnp.ones((4, 8)), jnp.ones(8))
    [note] = [note for note in caught.value.__notes__ if "scaled" in note]
    assert 'x has shape (2, 2): a shard of "b/dp d/tp"' in note
    assert 'scale has shape (8,): a shard of "d"' in note
