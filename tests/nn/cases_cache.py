"""The cache: a prompt of several tokens, then one after another."""

import itertools
from dataclasses import replace

import jax.numpy as jnp

import spmd
from spmd import nn
from tests.layers import LayerCase, cases, fit, placements, total
from tests.nn.dense import dense_attention


def cached_case(label, options, mesh, axes):
    """A prompt of 3 tokens, then 2 and then 1 more; the reference sees all 6 at once."""
    sizes = fit(
        mesh, axes, b=(2, "dp"), s=(6,), h=(4, "tp"), g=(2, "tp"), k=(3,), t=(5 if "window" in options else 6, "cp")
    )
    slots = sizes["t"]

    def body(axes):
        where = {"cp": axes["cp"], "tp": axes["tp"]}

        def run(q, k, v):
            rows, groups = spmd.size(q, "[b/dp] s h/tp k", dp=axes["dp"], tp=axes["tp"]), sizes["g"]
            cache = nn.kv_cache(rows, slots, groups, 3, k.dtype, dp=axes["dp"], **where)
            out = []
            for start, stop in ((0, 3), (3, 5), (5, 6)):
                at = jnp.broadcast_to(jnp.arange(start, stop)[None], (q.shape[0], stop - start))
                cache = nn.kv_cache_append(cache, k[:, start:stop], v[:, start:stop], at, **where)
                out.append(nn.cached_attention(q[:, start:stop], cache, at, **where, **options))
            return jnp.concatenate(out, axis=1)

        return run

    def each(c, layout, times=1, dtype=None):
        """Per call: 3, 2 and 1 tokens."""
        parts = [{**c.shapes, "s": n} for n in (3, 2, 1)]
        return total(*(replace(c, shapes=one).traffic("psum", "cp", layout, times, dtype) for one in parts))

    def forward(c):
        return total(each(c, "b/dp s h/tp", 2, "float32"), each(c, "b/dp s h/tp k", 1, "float32"))

    def backward(c):
        """Queries, keys and values are equal over cp: their gradients are summed there."""
        sums = [each(c, layout) for layout in ("b/dp s h/tp k", "b/dp s g/tp k", "b/dp s g/tp k")]
        return total(each(c, "b/dp s h/tp", 1, "float32"), *sums)

    return LayerCase(
        name="cached_attention",
        fn=body,
        ins=("b/dp s h/tp k", "b/dp s g/tp k", "b/dp s g/tp k"),
        outs="b/dp s h/tp k",
        shapes=sizes,
        mesh=mesh,
        axes=axes,
        reference=lambda q, k, v: dense_attention(q, k, v, causal=True, **options),
        forward=forward,
        backward=backward,
        label=label,
    )


@cases("cached_attention", draw=2)
def _():
    kinds = {"plain": {}, "window": {"window": 4, "softcap": 3.0}}
    for (label, options), (mesh, axes) in itertools.product(kinds.items(), placements("dp", "tp", "cp")):
        yield cached_case(label, options, mesh, axes)
