"""Plans as kernels: what runs their text, and what it is compared with."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import propagate
from spmd.inspect import collectives
from tests.propagation.programs import Plain, struct


def run(text, mesh, name="frozen"):
    """The kernel that a text defines."""
    names = {"spmd": spmd, "jax": jax, "jnp": jnp, "mesh": mesh}
    exec(text, names)
    return names[name]


def compare(plain, mesh, gradient=True, rtol=1e-4):
    """What a frozen program sends, and what XLA's own does. The numbers are equal, and those of gradients."""
    fn, args = plain.make(mesh)
    kernel = run(propagate(fn, *args).freeze("frozen"), mesh)
    rng = np.random.default_rng(0)
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    draw = lambda x: 0.3 * rng.normal(size=x.shape) if is_real(x) else rng.integers(0, 5, size=x.shape)
    values = jax.tree.map(lambda x: jax.device_put(draw(x).astype(x.dtype), x.sharding), args)
    frozen = lambda *values: kernel(*jax.tree.leaves(values))
    same(jax.jit(fn)(*values), frozen(*values), rtol)
    if gradient:
        same(jax.jit(_gradient(fn))(values), jax.jit(_gradient(frozen))(values), rtol)
    return collectives(kernel, *jax.tree.leaves(args)).total_bytes, collectives(jax.jit(fn), *args).total_bytes


def same(wanted, got, rtol):
    for want, have in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        if want.dtype != jax.dtypes.float0:
            want, have = np.asarray(want, "float32"), np.asarray(have, "float32")
            np.testing.assert_allclose(want, have, rtol=rtol, atol=0.1 * rtol * max(np.abs(want).max(initial=0), 1))


def _gradient(fn):
    """The gradient of a sum of squares, which weighs each result differently."""

    def loss(values):
        return sum((jnp.asarray(x, "float32") ** 2).sum() for x in jax.tree.leaves(fn(*values)))

    return jax.grad(loss, allow_int=True)


def whole(layouts, dtypes=""):
    """A program as `compare` takes it."""

    def enter(fn):
        kinds = dtypes.split() or ["float32"] * len(layouts.split(","))

        def make(mesh):
            return fn, [struct(mesh, x, kind) for x, kind in zip(layouts.split(", "), kinds, strict=True)]

        return Plain(fn.__name__, "whole", make)

    return enter


def enter(programs, *layouts):
    """Enter the function below among these programs, under its own name."""

    def entered(fn):
        programs[fn.__name__] = whole(*layouts)(fn)
        return fn

    return entered
