"""Small programs of several operations, through `kernel` with its checks on, in all modes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.sampler import Sampler


def in_all_modes(kernel, *args, grads: tuple[int, ...] = (), tolerance: float = 1e-4):
    """Results, and gradients of the results' sum of squares, equal in all modes; those of the reference."""
    found = {}
    for mode in MODES:
        with spmd.mode(mode):
            found[mode] = jax.jit(functools.partial(_pulled, kernel, grads))(*args)
    for mode in ("explicit", "auto"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
            found[mode],
            found["reference"],
        )
    return found["reference"]


def _pulled(kernel, grads: tuple[int, ...], *args):
    """The results, and their gradients along themselves."""
    if not grads:
        return kernel(*args), None
    given = lambda moving: [dict(zip(grads, moving, strict=True)).get(i, x) for i, x in enumerate(args)]
    value, pull = jax.vjp(lambda *moving: kernel(*given(moving)), *(args[i] for i in grads))
    return value, pull(value)


def test_cross_entropy_over_a_divided_vocabulary(mesh) -> None:
    @spmd.kernel("b/dp s d, v/tp d, b/dp s -> scalar", mesh=mesh)
    def loss(x, table, labels):
        logits = spmd.einsum(x, table, "b/dp s d, v/tp d -> b/dp s v/tp")
        norm = spmd.reduce(logits, "b/dp s v/tp -> b/dp s", "logsumexp")
        hit = labels[:, :, None] == spmd.iota("v/tp")[None, None, :]
        label = spmd.reduce(jnp.where(hit, logits, 0.0), "b/dp s v/tp -> b/dp s")
        return spmd.reduce(norm - label, "b/dp s -> scalar", "mean")

    sampler = Sampler(0)
    x, table = (jnp.asarray(sampler.array(s, whole=False)) for s in ((4, 3, 6), (16, 6)))
    labels = np.asarray(sampler.rng.integers(0, 16, (4, 3)), np.int32)
    value, _ = in_all_modes(loss, x, table, labels, grads=(0, 1))
    logp = jax.nn.log_softmax(x @ table.T)
    np.testing.assert_allclose(value, -jnp.take_along_axis(logp, labels[..., None], 2).mean(), rtol=1e-5)


def test_a_layer_with_gathers_and_scatters(mesh) -> None:
    @spmd.kernel("v/tp d, b/dp s, d/dp h/tp k, h/tp k d/dp -> b/dp s/tp d", mesh=mesh)
    def layer(table, ids, w_in, w_out):
        x = spmd.take(table, ids, "[v/tp] d, b/dp s -> b/dp s/tp d")
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        w_in = spmd.all_gather(w_in, "d/dp h/tp k -> d h/tp k")
        h = spmd.einsum(x, w_in, "b/dp s d, d h/tp k -> b/dp s (h k)/tp")
        h = spmd.rearrange(h, "b/dp s (h k)/tp -> b/dp h/tp s k", h=4)
        probs = spmd.softmax(h, "b/dp h/tp [s] k")
        w_out = spmd.all_gather(w_out, "h/tp k d/dp -> h/tp k d")
        return spmd.einsum(probs, w_out, "b/dp h/tp s k, h/tp k d -> b/dp s/tp d")

    sampler = Sampler(1)
    table, w_in, w_out = (jnp.asarray(sampler.array(s, whole=False)) for s in ((16, 6), (6, 4, 3), (4, 3, 6)))
    ids = np.asarray(sampler.rng.integers(0, 16, (4, 8)), np.int32)
    in_all_modes(layer, table, ids, w_in, w_out, grads=(0, 2, 3))


def test_positions_and_running_sums_in_a_loop(mesh) -> None:
    @spmd.kernel("t s/tp, s/tp -> s/tp, t", mesh=mesh)
    def loop(x, w):
        late = spmd.iota("s/tp") >= 3

        def step(total, row):
            total = total + spmd.cumsum(row * w, "[s/tp]")
            return total, spmd.reduce(jnp.where(late, total, 0.0), "s/tp -> scalar", "max")

        return jax.lax.scan(step, spmd.zeros("s/tp"), x)

    sampler = Sampler(2)
    x, w = jnp.asarray(sampler.array((3, 8), whole=False)), jnp.asarray(sampler.array(8, whole=False))
    in_all_modes(loop, x, w, grads=(0, 1))


def test_a_mapping_places_the_bare_names(mesh) -> None:
    for mapping in ({"batch": "dp", "mlp": "tp", "embed": None}, {"batch": ("dp", "tp"), "mlp": None, "embed": None}):

        @spmd.kernel("batch embed, embed mlp -> batch", mesh=mesh, mapping=spmd.AxisMapping(mapping))
        def body(x, w):
            h = spmd.einsum(x, w, "batch embed, embed mlp -> batch mlp")
            return spmd.argmax(spmd.softmax(h, "batch [mlp]"), "batch [mlp]").astype(x.dtype) + spmd.reduce(
                h, "batch mlp -> batch", "max"
            )

        sampler = Sampler(3)
        x, w = jnp.asarray(sampler.array((8, 6), whole=False)), jnp.asarray(sampler.array((6, 8), whole=False))
        value, _ = in_all_modes(body, x, w, grads=(0, 1))
        h = x @ w
        np.testing.assert_allclose(value, h.argmax(1).astype(h.dtype) + h.max(1), rtol=1e-5)


def test_a_loss_inside_has_its_gradient_inside(mesh) -> None:
    @spmd.kernel("d, b/dp d -> d, scalar", mesh=mesh)
    def step(w, x):
        def loss(w):
            y = spmd.einsum(x, w, "b/dp d, d -> b/dp")
            return spmd.reduce(y**2, "b/dp -> scalar", "mean")

        value, grad = spmd.value_and_grad(loss)(w)
        return grad, value

    sampler = Sampler(4)
    w, x = jnp.asarray(sampler.array(6, whole=False)), jnp.asarray(sampler.array((8, 6), whole=False))
    (grad, value), _ = in_all_modes(step, w, x)
    expected = jax.jit(jax.value_and_grad(lambda w: ((x @ w) ** 2).mean()))(w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), (value, grad), expected)


def test_a_missing_reduction_is_seen(mesh) -> None:
    """The checks see through operations: a partial sum that is returned as complete is an error."""

    @spmd.kernel("b f/tp, f/tp d -> b d", mesh=mesh)
    def forgotten(x, w):
        return x @ w

    with pytest.raises(spmd.errors.SpmdError):
        forgotten(jnp.ones((2, 8)), jnp.ones((8, 3)))


def test_a_carry_that_becomes_a_gathered_copy(mesh) -> None:
    """`{R:tp}` types the zeros varying along tp only, so that the sum is still equal on dp by JAX's type."""

    @spmd.kernel("t s/tp -> s/tp", mesh=mesh)
    def total(x):
        def step(so_far, row):
            return so_far + spmd.all_gather(row, "s/tp -> s"), None

        return spmd.split(jax.lax.scan(step, spmd.zeros("s {R:tp}"), x)[0], "s -> s/tp")

    x = jnp.asarray(Sampler(5).array((3, 8), whole=False))
    value, _ = in_all_modes(total, x, grads=(0,))
    np.testing.assert_allclose(value, x.sum(0), rtol=1e-5)
