"""Attention with latents: a whole sequence, expanded; and a prompt and further tokens over a cache, absorbed."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from spmd import nn
from tests.layers import LayerCase, cases, fit, placements, total

INS = ("b/dp s/sp d", "d h/tp q", "d z", "c h/tp n", "c h/tp v", "h/tp v d", "c")
LATENT, ROTARY, PLAIN, VALUE = 5, 4, 3, 2
TURN = {"frequencies": nn.rotary_frequencies(ROTARY)}


def weights_of(query, latent, key, value, out, scale):
    return nn.LatentWeights(query, latent, key, value, out, scale)


def dense_latent(x, query, latent, key, value, out, scale):
    """The paper's formulas, with complex numbers in the place of rotations."""

    def turn(y):
        half = ROTARY // 2
        at = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), 10_000.0 ** (-jnp.arange(half) / half))
        at = jax.lax.complex(jnp.cos(at), jnp.sin(at)).reshape(1, x.shape[1], *[1] * (y.ndim - 3), half)
        turned = jax.lax.complex(y[..., :half], y[..., half:]) * at
        return jnp.concatenate([turned.real, turned.imag], -1)

    z = jnp.einsum("bsd,dz->bsz", x, latent)
    c = z[..., :LATENT]
    c = c / jnp.sqrt((c**2).mean(-1, keepdims=True) + 1e-6) * scale[None, None]
    q = jnp.einsum("bsd,dhq->bshq", x, query)
    scores = jnp.einsum("bshn,bthn->bhst", q[..., :PLAIN], jnp.einsum("btc,chn->bthn", c, key))
    scores = scores + jnp.einsum("bshr,btr->bhst", turn(q[..., PLAIN:]), turn(z[..., LATENT:]))
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
    shares = jax.nn.softmax(jnp.where(seen, scores / (PLAIN + ROTARY) ** 0.5, -jnp.inf), -1)
    mixed = jnp.einsum("bhst,bthv->bshv", shares, jnp.einsum("btc,chv->bthv", c, value))
    return jnp.einsum("bshv,hvd->bsd", mixed, out)


def sizes_of(mesh, axes, **more):
    sizes = fit(mesh, axes, b=(2, "dp"), h=(2, "tp"), **more)
    return sizes | {"d": 6, "q": PLAIN + ROTARY, "z": LATENT + ROTARY, "c": LATENT, "n": PLAIN, "v": VALUE}


def summed(c, tokens=("dp",), beside=()):
    """Gradients of weights that are equal where tokens are divided."""
    whole = [c.traffic("psum", (*tokens, *beside), layout) for layout in ("d z", "c")]
    return [c.traffic("psum", tokens, layout) for layout in INS[1:2] + INS[3:6]] + whole


@cases("latent_attention", draw=2)
def _():
    for mesh, axes in placements("dp", "tp", shared=[("sp", "tp")]):

        def fn(axes):
            where = {"tp": axes["tp"], "sp": axes["sp"]}
            return lambda x, *weights: nn.latent_attention(x, weights_of(*weights), **TURN, **where)

        def forward(c):
            if not c.axes["sp"]:
                return c.traffic("psum", "tp", "b/dp s d")
            gathers = [c.traffic("all_gather", "tp", layout) for layout in ("b/dp s d", "b/dp s z")]
            return total(*gathers, c.traffic("psum_scatter", "tp", "b/dp s d"))

        def backward(c):
            if not c.axes["sp"]:
                sums = [c.traffic("psum", "tp", layout) for layout in ("b/dp s d", "b/dp s z")]
                return total(*sums, *summed(c))
            scatters = [c.traffic("psum_scatter", "tp", layout) for layout in ("b/dp s d", "b/dp s z")]
            return total(*scatters, c.traffic("all_gather", "tp", "b/dp s d"), *summed(c, beside=("sp",)))

        yield LayerCase(
            name="latent_attention",
            fn=fn,
            ins=INS,
            outs="b/dp s/sp d",
            shapes=sizes_of(mesh, axes, s=(3, "sp")),
            mesh=mesh,
            axes=axes,
            reference=dense_latent,
            forward=forward,
            backward=backward,
        )


@cases("cached_latent_attention", draw=2)
def _():
    """A prompt of 3 tokens, then 2 and then 1 more; the reference sees all 6 at once."""
    for mesh, axes in placements("tp", "cp"):
        sizes = sizes_of(mesh, axes | {"dp": None}, t=(6, "cp")) | {"s": 6}

        def fn(axes, slots=sizes["t"]):
            def run(x, *weights):
                cache = nn.kv_cache(len(x), slots, 1, LATENT + ROTARY, x.dtype, values=False, cp=axes["cp"])
                out, held = [], weights_of(*weights)
                for start, stop in ((0, 3), (3, 5), (5, 6)):
                    at = jnp.broadcast_to(jnp.arange(start, stop)[None], (x.shape[0], stop - start))
                    options = {**TURN, "cp": axes["cp"], "tp": axes["tp"]}
                    y, cache = nn.cached_latent_attention(x[:, start:stop], held, cache, at, **options)
                    out.append(y)
                return jnp.concatenate(out, axis=1)

            return run

        def each(c, over, layout, times=1, dtype=None):
            """Per call: 3, 2 and 1 tokens."""
            parts = [{**c.shapes, "s": n} for n in (3, 2, 1)]
            return total(*(replace(c, shapes=one).traffic("psum", over, layout, times, dtype) for one in parts))

        def forward(c, each=each):
            scores = each(c, "cp", "b s h/tp", 2, "float32")
            return total(scores, each(c, "cp", "b s h/tp c", 1, "float32"), each(c, "tp", "b s d"))

        def backward(c, each=each):
            """The cache is equal along tp, and is used twice in a call; queries and tokens are equal along cp."""
            caches = [c.traffic("psum", "tp", f"b t/cp {features}", 3) for features in "zc"]
            tokens = [each(c, "cp", layout) for layout in ("b s h/tp z", "b s z")]
            return total(each(c, "cp", "b s h/tp", 1, "float32"), *tokens, each(c, "tp", "b s d"), *caches)

        yield LayerCase(
            name="cached_latent_attention",
            fn=fn,
            ins=tuple(text.replace("/sp", "").replace("/dp", "") for text in INS),
            outs="b s d",
            shapes=sizes,
            mesh=mesh,
            axes=axes,
            reference=dense_latent,
            forward=forward,
            backward=backward,
        )
