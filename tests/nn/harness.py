"""What the tests of the layers share: a mesh, numbers, and a way to run a function."""

import jax
import numpy as np

import spmd

MESH = spmd.make_mesh(dp=2, tp=4)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def mapped(body, in_specs, out_specs, mesh=MESH):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
