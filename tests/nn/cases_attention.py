"""Attention over whole sequences, with heads divided: the function and the layer."""

import itertools
import math

import jax.numpy as jnp
import numpy as np

from spmd import nn, parallel
from tests.layers import LayerCase, cases, fit, placements, total
from tests.nn.dense import dense_attention, plain_rotary

# -------------------- the function

# Few, since each is compiled many times, and full: what is together here goes wrong together.
KINDS = {
    "window-segments-bias": {"causal": True, "window": 3, "segments": True, "bias": True},
    "mask-softcap": {"mask": True, "softcap": 2.0},
    "xla-window": {"causal": True, "window": 4, "implementation": "xla"},
    "xla-both-ways": {"window": 3, "mask": True, "bias": True, "implementation": "xla"},
}


def made(rng, shapes):
    """Queries, keys, values of four dimensions; segments of two; a bias of three; a mask of four that ends in 7 x 7."""
    out = []
    for shape in shapes:
        if len(shape) == 2:
            out.append(rng.integers(0, 3, size=shape).astype(np.int32))
        elif len(shape) == 4 and shape[-2:] == (7, 7):
            out.append(rng.random(shape) < 0.4)
        else:
            out.append(rng.normal(size=shape).astype(np.float32))
    return out


def function_case(label, options, mesh, axes, whole):
    options = dict(options)
    extra = [name for name in ("segments", "mask", "bias") if options.pop(name, False)]
    known = {name: x for name, x in options.items() if name != "implementation"}
    keys = "b/dp t g k" if whole else "b/dp t g/tp k"
    g = (2,) if whole else (2, "tp")
    layouts = {"segments": "b/dp s", "mask": "b/dp h/tp s t", "bias": "h/tp s t"}

    def body(axes):
        where = {"tp": axes["tp"], "kv_heads": "whole" if whole else "divided", **options}
        return lambda q, k, v, *more: nn.dot_product_attention(q, k, v, **dict(zip(extra, more, strict=True)), **where)

    return LayerCase(
        name="dot_product_attention",
        fn=body,
        ins=("b/dp s h/tp k", keys, keys, *(layouts[name] for name in extra)),
        outs="b/dp s h/tp k",
        shapes=fit(mesh, axes, b=(3, "dp"), s=(7,), t=(7,), h=(4, "tp"), g=g, k=(5,)),
        mesh=mesh,
        axes=axes,
        reference=lambda q, k, v, *more: dense_attention(q, k, v, **dict(zip(extra, more, strict=True)), **known),
        forward=lambda c: {},
        backward=lambda c: total(
            c.traffic("psum", "tp", keys, 2) if whole else {},
            c.traffic("psum", "dp", layouts["bias"]) if "bias" in extra else {},
        ),
        make=made,
        # JAX's own code promotes bfloat16 in silence, which the strict settings of these tests forbid
        dtypes=("float32",) if "implementation" in options else ("float32", "bfloat16"),
        label=label,
    )


@cases("dot_product_attention", draw=4)
def _():
    kinds = enumerate(KINDS.items())
    for (i, (label, options)), (mesh, axes) in itertools.product(kinds, placements("dp", "tp")):
        yield function_case(label, options, mesh, axes, whole=i % 2 == 1)


# -------------------- the layer

WHOLE = "b/dp s/cp d"


def plain_layer(x, wq, wk, wv, wo, bq, bk, bv):
    at = np.arange(x.shape[1])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) + b[None, None] for w, b in ((wq, bq), (wk, bk), (wv, bv)))
    mixed = dense_attention(plain_rotary(q, at), plain_rotary(k, at), v, causal=True)
    return jnp.einsum("bshk,hkd->bsd", mixed, wo)


def layer_case(mesh, axes, whole, **options):
    heads = "g" if whole else "g/tp"
    weights = ("d h/tp k", f"d {heads} k", f"d {heads} k", "h/tp k d", "h/tp k", f"{heads} k", f"{heads} k")

    def body(axes):
        named = {name: axes[name] for name in ("tp", "sp", "cp")} | options
        named["kv_heads"] = "whole" if whole else "divided"
        if axes["cp"]:
            ring = lambda q, k, v: parallel.ring_attention(q, k, v, cp=axes["cp"], tp=axes["tp"], causal=True)
            named["attend"] = ring
        else:
            named["causal"] = True
        turn = nn.rotary_frequencies(4)
        return lambda x, wq, wk, wv, wo, *b: nn.multi_head_attention(
            x, wq, wk, wv, wo, biases=b, frequencies=turn, **named
        )

    def n(c):
        return c.n("cp") if c.axes["cp"] else 1

    def forward(c):
        into = c.traffic("all_gather", "sp", WHOLE)
        out = c.traffic("psum_scatter", "sp", WHOLE) if c.axes["sp"] else c.traffic("psum", "tp", WHOLE)
        return total(into, out, c.traffic("ppermute", "cp", "b/dp s/cp g/tp k", 2 * (n(c) - 1)))

    def backward(c):
        into = c.traffic("psum_scatter", "sp", WHOLE) if c.axes["sp"] else c.traffic("psum", "tp", WHOLE)
        out = c.traffic("all_gather", "sp", WHOLE)
        keys = "b/dp s/cp g/tp k"
        ring = [c.traffic("ppermute", "cp", keys, 2 * (n(c) - 1), dtype=dtype) for dtype in (None, "float32")]
        home = c.traffic("ppermute", "cp", keys, 2 * min(n(c) - 1, 1))
        joined = {key: (count // 2, size) for key, (count, size) in total(*ring, home).items()}
        # Whole weights of keys and values: each device's heads are summed where tokens differ, then all over tp.
        sums = [c.traffic("psum", ("dp", "cp"), w.replace("g", "n/tp") if whole else w) for w in weights]
        sums += [c.traffic("psum", "tp", w) for w in weights if whole and "g" in w]
        return total(into, out, joined, *sums)

    sizes = fit(mesh, axes, b=(3, "dp"), s=(1, "cp", "tp"), d=(5,), h=(4, "tp"), g=(2,) if whole else (2, "tp"), k=(4,))
    sizes["n"] = math.lcm(2, sizes["h"] // 4)  # heads spread over tp
    return LayerCase(
        name="multi_head_attention",
        fn=body,
        ins=("b/dp s/cp/sp d", *weights),
        outs="b/dp s/cp/sp d",
        shapes=sizes,
        mesh=mesh,
        axes=axes,
        reference=plain_layer,
        forward=forward,
        backward=backward,
        label="whole" if whole else "",
    )


@cases("multi_head_attention", draw=2)
def _():
    """Sequence and context parallel, in every product; key heads fewer than devices."""
    for mesh, axes in placements("dp", "cp", "tp", shared=[("sp", "tp")]):
        yield layer_case(mesh, axes, whole=False)
        if axes["tp"] and not axes["cp"]:
            yield layer_case(mesh, axes, whole=True)
