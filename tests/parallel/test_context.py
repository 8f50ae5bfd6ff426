"""What rings may not do: be silently wrong, hold a whole sequence, or work on what nobody sees."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel
from spmd.parallel import _ring
from tests.nn.dense import dense_attention, placed_order

CP, LENGTH = 4, 16
SIGNATURE = "b s/cp h k, b s/cp g k, b s/cp g k -> b s/cp h k"


def arrays(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def inputs(length=LENGTH, head=6, rows=2, dtype=jnp.float32):
    return arrays((rows, length, 4, head), (rows, length, 2, head), (rows, length, 2, head), dtype=dtype)


def ring(n=CP, **options):
    return spmd.kernel(SIGNATURE, mesh=spmd.make_mesh(cp=n))(
        lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", **options)
    )


def close(a, b, tolerance=1e-4):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


# -------------------- silent faults, each beside its wrong formula


def test_the_backward_ring_meets_each_block_again(monkeypatch):
    """Keys that stay where they are in the backward pass (diffusers#14265): the forward pass is right all the same."""
    q, k, v = inputs(dtype=jnp.bfloat16)
    [cotangent] = arrays(q.shape)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    truth, pull = jax.vjp(functools.partial(dense_attention, causal=True), *wide)
    gradients = pull(cotangent)

    def found():
        out, pull = jax.vjp(ring(causal=True), q, k, v)
        return [
            close(a, b, 0.05)
            for a, b in zip((out, *pull(cotangent.astype(out.dtype))), (truth, *gradients), strict=True)
        ]

    assert found() == [True] * 4
    send = _ring._send

    def stale(ring, moving, **by):
        """Joined keys, the one bfloat16 array that goes a single hop, are not sent."""
        joined = getattr(moving, "dtype", None) == jnp.bfloat16
        return moving if joined and not by else send(ring, moving, **by)

    monkeypatch.setattr(_ring, "_send", stale)
    assert found() == [True, False, False, False]


@pytest.mark.parametrize("causal", [True, False])
def test_balanced_tokens_stand_where_they_are_said_to(causal):
    """Load balance without a causal mask (pytorch#141429), and tokens that are taken to be in order."""
    q, k, v = (x[:, placed_order(LENGTH, CP, "zigzag")] for x in inputs())
    order = placed_order(LENGTH, CP, "zigzag")
    truth = dense_attention(q, k, v, positions=order, causal=causal, window=6)
    assert close(ring(causal=causal, window=6, placement="zigzag")(q, k, v), truth)
    assert not close(ring(causal=causal, window=6)(q, k, v), truth)
    truth = dense_attention(q, k, v, positions=order, causal=causal)
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

    truth = (dense_attention(q, k, v, causal=True)[:, :6] ** 2).sum((-2, -1)).mean()
    assert close(run(tokens), truth)
    assert not close(run(devices), truth, 0.1)


def test_fewer_keys_than_queries():
    q, k, v = (x[:, :n] for x, n in zip(inputs(), (16, 12, 12), strict=True))
    kernel = spmd.kernel(SIGNATURE.replace("s/cp g", "t/cp g"), mesh=spmd.make_mesh(cp=CP))(
        lambda q, k, v: parallel.ring_attention(q, k, v, cp="cp", chunk=2)
    )
    gradient = lambda fn: jax.jit(jax.grad(lambda *x: (fn(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
    assert all(close(a, b) for a, b in zip(gradient(kernel), gradient(dense_attention), strict=True))


# -------------------- what is held, and what is worked on


def both(kernel):
    def run(q, k, v, cotangent):
        out, pull = jax.vjp(kernel, q, k, v)
        return out, pull(cotangent)

    return run


def compiled(kernel, args, mesh):
    placed = [spmd.shard(x, "b s/cp h k", mesh=mesh) for x in args]
    return jax.jit(both(kernel)).lower(*placed, placed[0]).compile()


def largest(program):
    """The dimensions of the largest array in a program's text, and all dimensions that occur."""
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"(?:f32|s32|pred)\[(\d+(?:,\d+)*)\]", program)]
    return max(np.prod(shape) for shape in shapes), {n for shape in shapes for n in shape}


def test_no_device_holds_a_whole_sequence():
    """Forward and backward: no dimension as long as the sequence, no scores larger than block by block."""
    length, mesh = 416, spmd.make_mesh(cp=CP)
    args = inputs(length)
    block = length // CP
    program = compiled(ring(causal=True, placement="zigzag"), args, mesh)
    size, dims = largest(program.as_text())
    assert length not in dims
    assert size <= 2 * 4 * block * block  # rows and heads
    chunked = compiled(ring(causal=True, placement="zigzag", chunk=13), args, mesh)
    assert chunked.memory_analysis().temp_size_in_bytes < program.memory_analysis().temp_size_in_bytes / 2
    gathered = spmd.kernel(SIGNATURE, mesh=mesh)(
        lambda q, k, v: dense_attention(q, *spmd.all_gather((k, v), "b s/cp g k -> b s g k"))
    )
    assert length in largest(compiled(gathered, args, mesh).as_text())[1]  # the test can fail


def test_what_is_kept_for_the_backward_pass_is_divided():
    """q, k, v, the result, and one float32 per query and head."""
    args = inputs()
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(ring(causal=True), *args)[1], *args))
    q, k, v = (x.nbytes for x in args)
    assert sum(x.size * x.dtype.itemsize for x in kept) <= q + k + v + q + q // args[0].shape[-1]


@pytest.mark.parametrize(("placement", "products"), [("contiguous", 8), ("zigzag", 5), ("striped", 6)])
def test_what_nobody_sees_is_not_worked_on(placement, products):
    """On two devices, products of halves out of 8: 2n + 1 and 3n. (Of a loop the compiler counts one turn.)"""
    length, head = 256, 64
    args = inputs(length, head, rows=1)
    program = ring(2, causal=True, placement=placement).lower(*args).compile()
    flops = program.cost_analysis()["flops"]
    half = 2 * 2 * 4 * (length // 4) ** 2 * head
    assert products <= flops / half < products * 1.12


def test_a_window_needs_the_near_blocks_only():
    """And the far ones are not sent."""
    args = inputs()
    for window, hops in ((5, 1), (6, 2), (99, 3)):
        report = spmd.inspect.collectives(ring(causal=True, window=window), *args)
        assert report.counts == {"ppermute": 2 * hops}, window


def test_grouped_heads_travel_once():
    """Bytes are those of the key heads, however many query heads there are."""
    q, k, v = inputs()
    sent = [spmd.inspect.collectives(ring(), x, k, v).total_bytes for x in (q, q[:, :, :2])]
    assert sent[0] == sent[1] == 3 * (k.nbytes + v.nbytes) // CP


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
        jax.grad(lambda *x: (kernel(*x) ** 2).sum(), (0, 1, 2))(q, k, v),
        jax.grad(lambda *x: (plain(*x) ** 2).sum(), (0, 1, 2))(q, k, v),
        strict=True,
    ):
        assert close(a, b)
