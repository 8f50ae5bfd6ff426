"""Fourier transforms, transposes and halos."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.foreign.registry import draw, foreign


@foreign("DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/fft.py:50", lambda x: jnp.fft.fftn(x), px=4)
def slab_fft(mesh):
    def slab(x):
        x = jnp.fft.fft(jnp.fft.fft(x, axis=2), axis=1)
        x = lax.all_to_all(x, "px", 2, 0, tiled=True)
        return jnp.fft.fft(x, axis=0)

    fn = jax.shard_map(slab, mesh=mesh, in_specs=P("px"), out_specs=P(None, None, "px"), check_vma=False)
    return jax.jit(fn), (draw(8, 4, 8).astype(jnp.complex64),)


@foreign(
    "DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/fft.py:119",
    lambda x: jnp.fft.fftn(x).transpose([1, 2, 0]),
    px=2,
    py=4,
)
def pencil_fft(mesh):
    """The dimensions turn with each exchange, so that the one that is transformed is the last."""

    def pencil(x):
        x = jnp.fft.fft(x, axis=2)
        x = lax.all_to_all(x, "py", 2, 1, tiled=True).transpose([2, 0, 1])
        x = jnp.fft.fft(x, axis=2)
        x = lax.all_to_all(x, "px", 2, 1, tiled=True).transpose([2, 0, 1])
        return jnp.fft.fft(x, axis=2)

    fn = jax.shard_map(pencil, mesh=mesh, in_specs=P("px", "py"), out_specs=P("px", "py"), check_vma=False)
    return jax.jit(fn), (draw(8, 8, 8).astype(jnp.complex64),)


@foreign(
    "DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/fft.py:257",
    lambda x: jnp.fft.ifftn(x),
    px=4,
)
def slab_inverse_fft(mesh):
    def slab(x):
        x = jnp.fft.ifft(x, axis=0)
        x = lax.all_to_all(x, "px", 0, 1, tiled=True)
        return jnp.fft.ifft(jnp.fft.ifft(x, axis=1), axis=2)

    fn = jax.shard_map(slab, mesh=mesh, in_specs=P(None, "px"), out_specs=P("px"), check_vma=False)
    return jax.jit(fn), (draw(8, 8, 4).astype(jnp.complex64),)


@foreign("DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/transpose.py:96", lambda x: x, px=2, py=4)
def transpose(mesh):
    def x_to_y(a):
        return lax.all_to_all(a, "py", 2, 1, tiled=True)

    fn = jax.shard_map(x_to_y, mesh=mesh, in_specs=P("px", "py"), out_specs=P("px", None, "py"))
    return jax.jit(fn), (draw(4, 8, 8),)


def _padded(x):
    """Blocks of a periodic array, each with one element of its neighbours in place of its margin."""
    blocks = x.reshape(4, -1, x.shape[1])
    before, after = jnp.roll(blocks[:, -2:-1], 1, 0), jnp.roll(blocks[:, 1:2], -1, 0)
    return blocks.at[:, :1].set(before).at[:, -1:].set(after).reshape(x.shape)


@foreign(
    "DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/halo.py:54", _padded, stays=2, own=True, px=4
)
def halo_exchange(mesh):
    def exchange(operand):
        size, extent = lax.psum(1, "px"), 1
        upper = operand[extent : extent + extent]
        lower = operand[-(extent + extent) : -extent]
        forward = [(j, (j + 1) % size) for j in range(size)]
        reverse = [((j + 1) % size, j) for j in range(size)]
        upper = lax.ppermute(upper, axis_name="px", perm=reverse)
        lower = lax.ppermute(lower, axis_name="px", perm=forward)
        operand = operand.at[:extent].set(lower)
        return operand.at[-extent:].set(upper)

    fn = jax.shard_map(exchange, mesh=mesh, in_specs=P("px"), out_specs=P("px"), check_vma=False)
    return jax.jit(fn), (draw(16, 5),)


def _diffused(x):
    return x + 0.1 * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) - 2 * x)


@foreign("jax-ml/jax tests/shard_map_test.py:360", _diffused, x=4)
def periodic_stencil(mesh):
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def step(u):
        size = lax.axis_size("x")
        left = lax.ppermute(u[-1:], "x", [(i, (i + 1) % size) for i in range(size)])
        right = lax.ppermute(u[:1], "x", [(i, (i - 1) % size) for i in range(size)])
        wide = jnp.concatenate([left, u, right])
        return u + 0.1 * (wide[2:] + wide[:-2] - 2 * u)

    return jax.jit(step), (draw(16, 3),)


def _walls(u):
    wide = jnp.pad(u, (1, 1))
    return wide[2:] - wide[:-2]


@foreign("DifferentiableUniverseInitiative/jaxDecomp src/jaxdecomp/_src/jax/halo.py:50", _walls, x=4)
def stencil_between_walls(mesh):
    def step(u):
        size = lax.axis_size("x")
        left = lax.ppermute(u[-1:], "x", [(i, i + 1) for i in range(size - 1)])
        right = lax.ppermute(u[:1], "x", [(i + 1, i) for i in range(size - 1)])
        wide = jnp.concatenate([left, u, right])
        return wide[2:] - wide[:-2]

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))), (draw(16),)
