"""Layers whose weights are gathered before use: a stack with and without prefetch, and without a scan."""

import jax

from spmd import einsum, parallel
from tests.layers import LayerCase, cases, placements, total
from tests.parallel.cases_weights import X, bound, data_of, sizes

# rp: groups that hold copies (hybrid sharding), fs: parameters rest divided, tp: tensor parallel
AT_REST = ("l d/fs f/tp", "l f/tp d/fs", "l d")
IN_USE = ("l d f/tp", "l f/tp d", "l d")


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
