"""Programs in strings compile to the collectives that a careful hand would write, and to no byte more."""

import cProfile
import pstats

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.inspect import collectives
from tests.benchmarks import llama_block
from tests.inspect.programs import make_mlp
from tests.sampler import rare

SMALL = llama_block.Sizes(b=4, s=16, m=16, h=4, k=8, f=32)


@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (2, 4)])
def test_the_block_moves_what_the_hand_written_one_moves(dp, tp):
    """Forward and backward: the same collectives, over the same axes, with the same bytes."""
    mesh = spmd.make_mesh(dp=dp, tp=tp)
    hand, ours = (llama_block.report(name, mesh, SMALL) for name in ("hand", "spmd"))
    assert llama_block.kinds(ours) == llama_block.kinds(hand)
    assert ours.counts == {"all_gather": 11, "psum": 1, "psum_scatter": 11}
    norms = 2 * 4 * SMALL.m * 2 * 7 / 8  # the all-reduce of the two norms' gradients, over all 8 devices
    assert ours.total_bytes == llama_block.ideal_bytes(SMALL, dp, tp) + norms


@rare
def test_the_block_computes_what_the_hand_written_one_computes():
    mesh = spmd.make_mesh(dp=4, tp=2)
    arguments = llama_block.arguments(SMALL, mesh)
    blocks = llama_block.blocks(mesh)
    hand, ours = (llama_block.step_of(blocks[name], mesh)(*arguments) for name in ("hand", "spmd"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), ours, hand)


# -------------------- the first program of the documentation


SHAPES = [(4, 8, 16), (16, 32), (32, 16)]
STRUCTS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]


def test_the_mlp_forward():
    mesh = spmd.make_mesh(dp=2, tp=4)
    report = collectives(make_mlp(mesh), *STRUCTS)
    assert report.counts == {"all_gather": 3, "psum_scatter": 1}
    assert {axes: one.counts for axes, one in report.by_axis().items()} == {
        "dp": {"all_gather": 2},
        "tp": {"all_gather": 1, "psum_scatter": 1},
    }


@pytest.mark.parametrize(("dp", "tp"), [(2, 4), (4, 2)])
def test_the_mlp_forward_and_backward(dp, tp):
    """Four gathers and four scatters, and no all-reduce, with a cotangent in the layout of the result."""
    mesh = spmd.make_mesh(dp=dp, tp=tp)
    mlp = make_mlp(mesh)

    def step(cotangent, *arguments):
        out, pull = jax.vjp(mlp, *arguments)
        return out, pull(cotangent)

    at = lambda layout: spmd.Layout(layout).sharding(mesh)
    stream, w_in, w_out = at("b/dp s/tp d"), at("d/dp f/tp"), at("f/tp d/dp")
    jitted = jax.jit(step, in_shardings=(stream, stream, w_in, w_out), out_shardings=(stream, (stream, w_in, w_out)))
    report = collectives(jitted, STRUCTS[0], *STRUCTS, mesh=mesh)
    assert report.counts == {"all_gather": 4, "psum_scatter": 4}
    b, s, d = SHAPES[0]
    f = SHAPES[1][1]
    weights, residual = 2 * 4 * d * f // tp, 4 * b // dp * s * d
    assert report.total_bytes == 2 * weights * (dp - 1) / dp + 4 * residual * (tp - 1) / tp


def test_a_vmapped_kernel_moves_the_same_collectives_once():
    """A batch in front of everything makes the collectives larger, not more."""
    mesh = spmd.make_mesh(dp=2, tp=4)
    batched = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in STRUCTS]
    report = collectives(jax.jit(jax.vmap(make_mlp(mesh))), *batched, mesh=mesh)
    assert report.counts == {"all_gather": 3, "psum_scatter": 1}


def test_a_kernel_called_in_a_scan_over_layers():
    """One body, as often as there are layers; nothing is added at the boundary of each call."""
    mesh = spmd.make_mesh(dp=2, tp=4)
    mlp = make_mlp(mesh)

    def layers(x, w_in, w_out):
        return jax.lax.scan(lambda x, w: (x + mlp(x, *w), None), x, (w_in, w_out))[0]

    at = lambda layout: spmd.Layout(layout).sharding(mesh)
    stream, w_in, w_out = at("b/dp s/tp d"), at("l d/dp f/tp"), at("l f/tp d/dp")
    jitted = jax.jit(layers, in_shardings=(stream, w_in, w_out), out_shardings=stream)
    stacked = [STRUCTS[0], *(jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in STRUCTS[1:])]
    assert collectives(jitted, *stacked, mesh=mesh).counts == {"all_gather": 15, "psum_scatter": 5}


# -------------------- what it costs to write it so


def python_calls(fn):
    """How many functions Python calls meanwhile: the same on every machine, unlike time."""
    profile = cProfile.Profile()
    profile.runcall(fn)
    return pstats.Stats(profile).total_calls


@rare
def test_tracing_costs_at_most_a_tenth_more():
    mesh = spmd.make_mesh(dp=4, tp=2)
    counts = {}
    for name in ("hand", "spmd", "hand", "spmd"):  # the second time, imports and our own caches are warm
        step = llama_block.step_of(llama_block.blocks(mesh)[name], mesh)
        jax.clear_caches()
        counts[name] = python_calls(lambda step=step: step.trace(*llama_block.arguments(SMALL)).lower())
    assert counts["spmd"] <= 1.1 * counts["hand"]


def test_a_warm_call_runs_hardly_any_python():
    """About a microsecond; a wall-clock test would be as noisy as the machine."""
    mesh = spmd.make_mesh(dp=4, tp=2)
    kernel = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: x + 1)
    x = spmd.shard(np.ones((8, 8), np.float32), "b/dp d/tp", mesh=mesh)
    for _ in range(3):
        kernel(x)
    assert python_calls(lambda: kernel(x)) <= 16
