"""Stages one after another, and tokens of the next device."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import draw, foreign


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/pipeline.py:390", lambda x: jnp.roll(x, 1, 0), stage=4)
def rotate_right(mesh):
    @jax.shard_map(mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=True)
    def rotate(arr):
        size = jax.lax.axis_size("stage")
        perm = [(i, (i + 1) % size) for i in range(size)]
        return jax.lax.ppermute(arr, axis_name="stage", perm=perm)

    return jax.jit(rotate), (draw(4, 3, 5),)


@foreign(
    "AI-Hypercomputer/maxtext src/maxtext/layers/pipeline.py:397",
    lambda x: jnp.roll(x, 1, 0).at[0].set(0),
    own=True,
    stage=4,
)
def shift_right(mesh):
    @jax.shard_map(mesh=mesh, in_specs=P("stage"), out_specs=P("stage"), check_vma=True)
    def shift(arr):
        index, size = jax.lax.axis_index("stage"), jax.lax.axis_size("stage")
        perm = [(i, (i + 1) % size) for i in range(size)]
        arr = jax.lax.ppermute(arr, axis_name="stage", perm=perm)
        return jnp.where(index == 0, jnp.zeros_like(arr), arr)

    return jax.jit(shift), (draw(4, 3, 5),)


def _next(x):
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:]


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/multi_token_prediction.py:86", _next, cp=4)
def next_token(mesh):
    def shift_left(x):
        local = jnp.roll(x, -1, axis=1)
        last = (jnp.arange(local.shape[1]) == local.shape[1] - 1).reshape(1, -1, 1)
        size, rank = jax.lax.axis_size("cp"), jax.lax.axis_index("cp")
        first = jax.lax.dynamic_slice_in_dim(x, 0, 1, axis=1)
        perm = [(r, (r - 1) % size) for r in range(size)]
        following = jax.lax.ppermute(first, axis_name="cp", perm=perm)
        following = jnp.where(rank == size - 1, jnp.zeros_like(following), following)
        return jnp.where(last, following, local)

    fn = jax.shard_map(shift_left, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"), check_vma=False)
    return jax.jit(fn), (draw(2, 12, 3),)


def _layers(w, x):
    for one in w:
        x = jnp.tanh(x @ one)
    return x


@foreign("jax-ml/jax docs/notebooks/shard_map.md:1618", _layers, own=True, stages=4)
def gpipe(mesh):
    """Micro-batches go through the stages; the results are those of the last one."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("stages"), P()), out_specs=P(), check_vma=False)
    def pipelined(w, x):
        stage, size = lax.axis_index("stages"), lax.axis_size("stages")
        state, out = jnp.zeros_like(x[0]), jnp.zeros_like(x)
        for i in range(x.shape[0] + size - 1):
            state = jnp.where(stage == 0, x[min(i, x.shape[0] - 1)], state)
            state = jnp.tanh(state @ w[0])
            done = i - size + 1
            if done >= 0:
                out = out.at[done].set(jnp.where(stage == size - 1, state, 0))
            state = lax.ppermute(state, "stages", [(j, (j + 1) % size) for j in range(size)])
        return lax.psum(out, "stages")

    return jax.jit(pipelined), (draw(4, 6, 6), draw(3, 2, 6))


@foreign("AI-Hypercomputer/maxtext src/maxtext/layers/pipeline.py:444", lambda x: jnp.roll(x, -1, 0), data=2, stage=4)
def rotate_left(mesh):
    spec = P("stage", "data")

    def rotate(arr, stage_size):
        perm = [(i, (i - 1) % stage_size) for i in range(stage_size)]
        return jax.lax.ppermute(arr, axis_name="stage", perm=perm)

    fn = jax.shard_map(lambda arr: rotate(arr, lax.axis_size("stage")), mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(fn), (draw(4, 4, 3),)
