"""What rings may not do: be silently wrong, hold a whole sequence, or work on what nobody sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel
from tests.nn.dense import dense_attention, dense_result, placed_order
from tests.sampler import share

CP, LENGTH = 4, 16
SIGNATURE = "b s/cp h k, b s/cp g k, b s/cp g k -> b s/cp h k"


def arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def inputs(length=LENGTH, head=6, rows=2, dtype=jnp.float32):
    return arrays((rows, length, 4, head), (rows, length, 2, head), (rows, length, 2, head), dtype=dtype)


def ring(n=CP, **options):
    return spmd.kernel(SIGNATURE, mesh=spmd.make_mesh(cp=n))(
        lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", **options)
    )


def close(a, b, tolerance=1e-4):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


@pytest.mark.parametrize("causal", share([True, False]))
def test_balanced_tokens_stand_where_they_are_said_to(causal):
    """Load balance without a causal mask (pytorch#141429), and tokens that are taken to be in order."""
    q, k, v = (x[:, placed_order(LENGTH, CP, "zigzag")] for x in inputs())
    order = placed_order(LENGTH, CP, "zigzag")
    truth = dense_result(q, k, v, positions=order, causal=causal, window=6)
    assert close(ring(causal=causal, window=6, placement="zigzag")(q, k, v), truth)
    assert not close(ring(causal=causal, window=6)(q, k, v), truth)
    truth = dense_result(q, k, v, positions=order, causal=causal)
    assert close(ring(causal=causal, placement="zigzag")(q, k, v), truth)


def test_the_loss_counts_tokens_not_devices():
    """A mean over the tokens of each device, then over the devices: wrong where padding is at the end."""
    q, k, v = inputs(rows=1)
    weights = jnp.asarray(np.arange(LENGTH) < 6, jnp.float32)[None]

    def losses(q, k, v, weights, count):
        out = parallel.ring_attention(q, k, v, cp="cp", causal=True)
        return count((out**2).sum((-2, -1)) * weights, weights)

    def tokens(loss, weights):
        return spmd.reduce(loss, "b s/cp -> scalar") / spmd.reduce(weights, "b s/cp -> scalar")

    def devices(loss, weights):
        parts = [spmd.rearrange(x, "b (c l)/cp -> c/cp b l", c=CP).sum((1, 2)) for x in (loss, weights)]
        return spmd.reduce(parts[0] / jnp.maximum(parts[1], 1), "c/cp -> scalar", "mean")

    def run(count):
        signature = SIGNATURE.replace("->", ", b s/cp ->").partition("->")[0] + "-> scalar"
        kernel = spmd.kernel(signature, mesh=spmd.make_mesh(cp=CP))(functools.partial(losses, count=count))
        return kernel(q, k, v, weights)

    truth = (dense_result(q, k, v, causal=True)[:, :6] ** 2).sum((-2, -1)).mean()
    assert close(run(tokens), truth)
    assert not close(run(devices), truth, 0.1)


def test_fewer_keys_than_queries():
    q, k, v = (x[:, :n] for x, n in zip(inputs(), (16, 12, 12), strict=True))
    kernel = spmd.kernel(SIGNATURE.replace("s/cp g", "t/cp g"), mesh=spmd.make_mesh(cp=CP))(
        lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", chunk=2)
    )
    gradient = lambda fn: jax.jit(jax.grad(lambda *x: (fn(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
    assert all(close(a, b) for a, b in zip(gradient(kernel), gradient(dense_attention), strict=True))


def test_a_layer_under_any_mapping_and_remat():
    """Names of the caller's rules are not those of the ring; a rematerialised layer in a scan has the same gradient."""
    q, k, v = inputs()

    def body(q, k, v):
        def layer(q, _):
            return q + parallel.ring_attention(q, k, v, cp="cp", causal=True), None

        return jax.lax.scan(jax.checkpoint(layer), q, None, length=2)[0]

    def plain(q, k, v):
        for _ in range(2):
            q = q + dense_attention(q, k, v, causal=True)
        return q

    rules = {"b": None, "s": "cp", "h": None, "k": None, "g": None}
    pattern = "b s h k, b s g k, b s g k -> b s h k"
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(cp=CP), mapping=rules)(body)
    for a, b in zip(
        jax.jit(jax.grad(lambda *x: (kernel(*x) ** 2).sum(), (0, 1, 2)))(q, k, v),
        jax.jit(jax.grad(lambda *x: (plain(*x) ** 2).sum(), (0, 1, 2)))(q, k, v),
        strict=True,
    ):
        assert close(a, b)
