"""What a ring may not do: keep old blocks on the way back, hold a whole sequence, or work on what nobody sees."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.parallel import context
from tests.nn.dense import dense_attention
from tests.parallel.test_context import CP, SIGNATURE, arrays, close, inputs, ring

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


# -------------------- silent faults, each beside its wrong formula


def test_the_backward_ring_meets_each_block_again(monkeypatch):
    """Keys that stay where they are in the backward pass (diffusers#14265): the forward pass is right all the same."""
    q, k, v = inputs(dtype=jnp.bfloat16)
    [cotangent] = arrays(q.shape)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    truth, gradients = jax.jit(both(functools.partial(dense_attention, causal=True)))(*wide, cotangent)

    def found():
        out, pull = jax.vjp(ring(causal=True), q, k, v)
        return [
            close(a, b, 0.05)
            for a, b in zip((out, *pull(cotangent.astype(out.dtype))), (truth, *gradients), strict=True)
        ]

    assert found() == [True] * 4
    send = context._send

    def stale(ring, moving, **by):
        """Joined keys, the one bfloat16 array that goes a single hop, are not sent."""
        joined = getattr(moving, "dtype", None) == jnp.bfloat16
        return moving if joined and not by else send(ring, moving, **by)

    monkeypatch.setattr(context, "_send", stale)
    assert found() == [True, False, False, False]


def test_a_device_does_not_work_on_blocks_that_are_hidden_from_it():
    """A NaN in the last block would reach every query whose device multiplies it, also by a weight of zero."""
    q, k, v = inputs()
    length, block = v.shape[1], v.shape[1] // CP
    v[:, -1] = np.nan

    def rows_of_numbers(kernel):
        out, (dq, _, _) = both(kernel)(q, k, v, jnp.ones_like(q))
        return [np.isfinite(x).all((0, 2, 3)).tolist() for x in (out, dq)]

    seen = [True] * (length - block) + [False] * block
    assert rows_of_numbers(ring(causal=True)) == [seen] * 2
    assert rows_of_numbers(ring(causal=True).auto) != [seen] * 2


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
