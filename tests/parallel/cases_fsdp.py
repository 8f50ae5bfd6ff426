"""Parameters gathered before use: one leaf, one layer, a stack of layers with and without prefetch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import spmd
from spmd import Layout, einsum, parallel
from tests.layers import LayerCase, cases, fit, placements, total

# rp: groups that hold copies (hybrid sharding), fs: parameters rest divided, tp: tensor parallel
AT_REST = ("l d/fs f/tp", "l f/tp d/fs", "l d")
IN_USE = ("l d f/tp", "l f/tp d", "l d")
X = "b/rp/fs d"


def bound(axes, *layouts):
    return tuple(Layout(text).bind(**{a: axes[a] for a in Layout(text).axis_names}) for text in layouts)


def data_of(axes):
    groups = (axes["rp"], axes["fs"])
    return tuple(axis for group in groups for axis in ((group,) if isinstance(group, str) else group or ()))


def layer(axes):
    """x + gelu(x n W) V; the names of the axes are bound by keyword."""

    def run(weights, x):
        w, v, n = weights
        h = jax.nn.gelu(einsum(x * n[None], w, "... d, d f/tp -> ... f/tp", tp=axes["tp"]))
        return x + einsum(h, v, "... f/tp, f/tp d -> ... d", tp=axes["tp"])

    return run


def plain(x, w, v, n):
    for i in range(w.shape[0]):
        x = x + jax.nn.gelu((x * n[i][None]) @ w[i]) @ v[i]
    return x


def sizes(mesh, axes):
    return fit(mesh, axes, b=(3, "rp", "fs"), d=(5, "fs"), f=(7, "tp"), l=(3,))


@cases("gather", draw=2)
def _():
    """One weight: gathered, its gradient scattered within the group and summed over groups."""
    for mesh, axes in placements("rp", "fs", "tp"):
        yield LayerCase(
            name="gather",
            fn=lambda axes: (
                lambda x, w: einsum(
                    x,
                    parallel.gather(w, *bound(axes, "d/fs f/tp", "d f/tp"), data=data_of(axes)),
                    "... d, d f/tp -> ... f/tp",
                    tp=axes["tp"],
                )
            ),
            ins=(X, "d/fs f/tp"),
            outs="b/rp/fs f/tp",
            shapes=sizes(mesh, axes),
            mesh=mesh,
            axes=axes,
            reference=lambda x, w: x @ w,
            forward=lambda c: c.traffic("all_gather", "fs", "d f/tp"),
            backward=lambda c: total(
                c.traffic("psum_scatter", "fs", "d f/tp"),
                c.traffic("psum", "rp", "d/fs f/tp"),
                c.traffic("psum", "tp", X),
            ),
            dtypes=("float32",),
        )


def stack(axes, save, prefetch):
    def body(x, *params):
        return parallel.scan_layers(
            layer(axes),
            params,
            x,
            at_rest=bound(axes, *AT_REST),
            compute=bound(axes, *IN_USE),
            data=data_of(axes),
            save=save,
            prefetch=prefetch,
        )

    return body


@cases("scan_layers", draw=3)
def _():
    """Three layers. Prefetch gathers one more at each edge; what is summed over copies is summed for all at once."""
    for k, (mesh, axes) in enumerate(placements("rp", "fs", "tp")):
        save, prefetch = ("activations", "inputs")[k // 2 % 2], k % 2 == 0
        gathers = 3 + prefetch
        yield LayerCase(
            name="scan_layers",
            label=f"{save}{'-prefetch' if prefetch else ''}",
            fn=lambda axes, save=save, prefetch=prefetch: stack(axes, save, prefetch),
            ins=(X, *AT_REST),
            outs=X,
            shapes=sizes(mesh, axes),
            mesh=mesh,
            axes=axes,
            reference=plain,
            forward=lambda c, gathers=gathers: total(
                c.traffic("all_gather", "fs", "d f/tp", 2 * gathers), c.traffic("psum", "tp", X, 3)
            ),
            backward=lambda c, gathers=gathers, save=save: total(
                c.traffic("all_gather", "fs", "d f/tp", 2 * gathers),
                c.traffic("psum_scatter", "fs", "d f/tp", 6),
                c.traffic("psum", "tp", X, 3),
                c.traffic("psum", "rp", "l d/fs f/tp", 2),
                c.traffic("psum", ("rp", "fs"), "l d"),
            ),
            dtypes=("float32",),
            tolerance=1e-4,
        )


@cases("fsdp", draw=2)
def _():
    """Two layers without a scan, where compilers merge equal gathers: each weight is gathered again all the same."""

    def unrolled(axes, save):
        one = parallel.fsdp(
            layer(axes),
            bound(axes, *(text[2:] for text in AT_REST)),
            bound(axes, *(text[2:] for text in IN_USE)),
            data=data_of(axes),
            save=save,
        )
        return lambda x, *params: one([p[1] for p in params], one([p[0] for p in params], x))

    for k, (mesh, axes) in enumerate(placements("rp", "fs", "tp")):
        save = ("activations", "inputs")[k % 2]
        yield LayerCase(
            name="fsdp",
            label=save,
            fn=lambda axes, save=save: unrolled(axes, save),
            ins=(X, *AT_REST),
            outs=X,
            shapes=sizes(mesh, axes) | {"l": 2},
            mesh=mesh,
            axes=axes,
            reference=plain,
            forward=lambda c: total(c.traffic("all_gather", "fs", "d f/tp", 4), c.traffic("psum", "tp", X, 2)),
            backward=lambda c: total(
                c.traffic("all_gather", "fs", "d f/tp", 4),
                c.traffic("psum_scatter", "fs", "d f/tp", 4),
                c.traffic("psum", "tp", X, 2),
                c.traffic("psum", "rp", "d/fs f/tp", 4),
                c.traffic("psum", ("rp", "fs"), "d", 2),
            ),
            dtypes=("float32",),
            tolerance=1e-4,
        )


@cases("accumulate", draw=1)
def _():
    """The gradient is the result here; differentiated once more it would move what its own transposes move."""
    for mesh, axes in placements("rp", "fs"):
        if not data_of(axes):
            continue
        yield LayerCase(
            name="accumulate",
            fn=lambda axes: lambda x, w: jax.lax.stop_gradient(accumulated(axes, x, w)),
            ins=("m b/rp/fs d", "d/fs f"),
            outs="d/fs f",
            shapes=fit(mesh, axes, b=(3, "rp", "fs"), d=(5, "fs"), f=(7,), m=(4,)),
            mesh=mesh,
            axes=axes,
            reference=lambda x, w: jax.lax.stop_gradient(
                jax.grad(lambda w: (jnp.tanh(x.reshape(-1, w.shape[0]) @ w) ** 2).mean())(w)
            ),
            forward=lambda c: total(
                c.traffic("all_gather", "fs", "d f"),
                c.traffic("psum_scatter", "fs", "d f"),
                c.traffic("psum", "rp", "d/fs f"),
                c.traffic("psum", ("rp", "fs"), "1"),
            ),
            backward=lambda c: {},
            dtypes=("float32",),
        )


def accumulated(axes, x, w):
    data = data_of(axes)
    left = f"{{U:{','.join(data)}}}"

    def loss(w, x):
        y = jnp.tanh(einsum(x, w, "... d, d f -> ... f")) ** 2
        count = spmd.reduce(jnp.ones_like(y), f"{bound(axes, 'b/rp/fs')[0]} f -> {left}")
        return spmd.reduce(y, f"{bound(axes, 'b/rp/fs')[0]} f -> {left}"), count

    rest, use = bound(axes, "d/fs f", "d f")
    return parallel.accumulate(loss, w, x, at_rest=rest, compute=use, data=data, mean=True)[1]
