"""A kernel is as cheap to call as a function, mapped, looped and warm. Layers by formula: `tests/layers.py`."""

import cProfile
import pstats

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.inspect import collectives
from tests.benchmarks import llama_block
from tests.inspect.programs import make_mlp
from tests.sampler import rare

SMALL = llama_block.Sizes(b=4, s=16, m=16, h=4, k=8, f=32)


SHAPES = [(4, 8, 16), (16, 32), (32, 16)]
STRUCTS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]


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
