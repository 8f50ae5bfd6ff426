"""Plans as kernels: what runs their text, and what it is compared with."""

from __future__ import annotations

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


def compare(plain, mesh, plan=True):
    fn, args = plain.make(mesh)
    planned = propagate(fn, *args)
    kernel = run(planned.freeze("frozen"), mesh)
    rng = np.random.default_rng(0)
    draw = lambda x: 0.3 * rng.normal(size=x.shape) if x.dtype == "float32" else rng.integers(0, 5, size=x.shape)
    values = jax.tree.map(lambda x: jax.device_put(draw(x).astype(x.dtype), x.sharding), args)
    wanted, got = (jax.tree.leaves(out) for out in (jax.jit(fn)(*values), kernel(*jax.tree.leaves(values))))
    for want, have in zip(wanted, got, strict=True):
        want, have = np.asarray(want), np.asarray(have)
        np.testing.assert_allclose(want, have, rtol=1e-4, atol=1e-5 * max(np.abs(want).max(), 1))
    sent, auto = collectives(kernel, *jax.tree.leaves(args)).total_bytes, collectives(jax.jit(fn), *args).total_bytes
    assert not plan or sent <= planned.total_bytes
    return sent, auto


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
