"""Accumulation over micro-batches: every token once, one reduction, and float32 where bfloat16 would stop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel
from spmd.inspect import collectives
from tests.sampler import share


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=2, ep=2, tp=2)


def token_loss(w, batch):
    """Sum of squared errors over real tokens, and their number."""
    x, mask = batch
    error = (spmd.einsum(x, w["w"], "b/dp/ep d, d f -> b/dp/ep f") + w["b"][None]) ** 2
    weighted = error.mean(-1) * mask
    return (spmd.reduce(one, "b/dp/ep -> {U:dp,ep}") for one in (weighted, mask))


def accumulating(mesh, loss, mean=True, dtype=None, layouts=None):
    rest = layouts or {"w": "d/ep f", "b": "f"}
    return spmd.kernel(in_layouts=(rest, ("n b/dp/ep d", "n b/dp/ep")), out_layouts=("scalar", rest), mesh=mesh)(
        lambda params, batches: parallel.accumulate(
            loss,
            params,
            batches,
            at_rest=rest,
            compute={"w": "d f", "b": "f"},
            data=("dp", "ep"),
            mean=mean,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("count", share([1, 5]))
def test_unequal_counts_and_one_reduction(count, mesh):
    """The mean over tokens where rows have few: not the mean of means; and no more is sent for five micro-batches."""
    rng = np.random.default_rng(1)
    params = {"w": np.asarray(rng.normal(size=(6, 3)), np.float32), "b": jnp.ones(3)}
    x = np.asarray(rng.normal(size=(count, 8, 6)), np.float32)
    mask = np.asarray(rng.random((count, 8)) < np.linspace(0.1, 0.9, 8), np.float32)
    run = accumulating(mesh, lambda w, batch: tuple(token_loss(w, batch)))

    def plain(p):
        error = ((x @ p["w"] + p["b"][None, None]) ** 2).mean(-1)
        return (error * mask).sum() / mask.sum()

    value, gradient = run(params, (x, mask))
    expected = jax.jit(jax.value_and_grad(plain))(params)
    for a, b in zip(jax.tree.leaves((value, gradient)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    report = collectives(run, params, (x, mask))
    sent = {(one.kind, "/".join(one.axes), one.count): one.bytes for one in report}
    assert sum(one.total_bytes for one in report if one.kind == "all_gather") == 4 * 18 // 2
    assert sent["psum_scatter", "ep", 1] == 4 * 18 // 2
    # over dp the shard of w; over both the bias, the loss and the number of tokens
    reduced = {
        axes: sum(b for (kind, a, _), b in sent.items() if kind == "psum" and a == axes) for axes in ("dp", "dp/ep")
    }
    assert reduced["dp"] == 2 * 4 * 9 // 2
    assert reduced["dp/ep"] in (2 * 4 * 5 * 3 // 4, 18 + 6 + 6)
    assert all(one.count == 1 for one in report)


def test_a_mean_of_means_is_another_number(mesh):
    """Meta-test: the trap is one on this data."""
    mask = np.zeros((1, 8), np.float32)
    mask[0, :5] = 1
    error = np.arange(8, dtype=np.float32)[None]
    halves = [(error[:, i : i + 4] * mask[:, i : i + 4]).sum() / mask[:, i : i + 4].sum() for i in (0, 4)]
    assert np.mean(halves) != (error * mask).sum() / mask.sum()


def test_accumulated_in_float32(mesh):
    """512 gradients of 1: a bfloat16 sum stops at 256. They are gathered in bfloat16 all the same."""
    params = {"w": jnp.zeros((6, 3)), "b": jnp.zeros(3)}
    batches = jnp.ones((512, 4, 6)), jnp.ones((512, 4))

    def loss(w, batch):
        x, _ = batch
        y = spmd.einsum(x.astype(jnp.bfloat16), w["w"], "b/dp/ep d, d f -> b/dp/ep f") + w["b"][None]
        return spmd.reduce(y.astype(jnp.float32), "b/dp/ep f -> {U:dp,ep}")

    run = accumulating(mesh, loss, mean=False, dtype=jnp.bfloat16)
    gradient = run(params, batches)[1]
    np.testing.assert_array_equal(gradient["w"], np.full((6, 3), 2048.0))
    np.testing.assert_array_equal(gradient["b"], np.full(3, 2048.0))
    report = collectives(run, params, batches)
    assert {one.dtype for one in report if one.kind == "all_gather"} == {"u16"}
    assert {one.dtype for one in report if one.kind != "all_gather"} == {"f32"}
