"""What a training step of a 405B-parameter transformer sends on 16,384 devices, computed on a laptop.

The model is Llama 3.1 405B (https://arxiv.org/abs/2407.21783, table 3). Weights are divided over `fsdp` and `tp`, the
sequence between blocks over `tp`, and 2048 sequences over `dp` and `fsdp`. The mesh is abstract: the step is traced but
never compiled or run, and `explain` reads the trace.

    python examples/llama405b.py --layers 126 --hardware h100

`build` makes the same step of `transformer.py` for any mesh of the axes dp, fsdp, cp, tp and pp, with a lower bound on
its time, to search among all of them:

    python -m spmd search examples/llama405b.py:build --devices 16384 --hardware h100
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import spmd
from spmd import all_gather, defer, einsum, reduce, take
from spmd.searcher import Bound

sys.path.append(str(Path(__file__).resolve().parent))
import transformer

SIZES = {"l": 126, "m": 16384, "h": 128, "g": 8, "k": 128, "f": 53248, "v": 128256}
STREAM, WHOLE = "b/dp/fsdp s/tp m", "b/dp/fsdp s m"
LAYER = {  # one layer's weights; at rest they are stacked in a dimension l in front
    "norm1": "m",
    "q": "m/fsdp h/tp k",
    "k": "m/fsdp g/tp k",
    "v": "m/fsdp g/tp k",
    "o": "h/tp k m/fsdp",
    "norm2": "m",
    "gate": "m/fsdp f/tp",
    "up": "m/fsdp f/tp",
    "down": "f/tp m/fsdp",
}
LAYOUTS = {
    "embed": "v/tp m/fsdp",
    "layers": {name: f"l {layout}" for name, layout in LAYER.items()},
    "norm": "m",
    "unembed": "m/fsdp v/tp",
}


def gathered(w: Any, layout: str) -> Any:
    """A weight in use: bfloat16, whole along m. Its gradient is scattered over fsdp, then summed over dp."""
    w = defer(w.astype(jnp.bfloat16), f"{layout} -> {layout} {{R:dp}}")
    return all_gather(w, f"{layout} {{R:dp}} -> {layout.replace('/fsdp', '')} {{R:dp}}")


def norm(x: Any, scale: Any) -> Any:
    """RMSNorm, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale.astype(jnp.float32)[None, None]).astype(x.dtype)


def rotated(x: Any) -> Any:
    """The rotary position embedding of `b s h k`."""
    half = x.shape[-1] // 2
    angle = spmd.iota("s").astype(jnp.float32)[:, None] * (5e5 ** (-jnp.arange(half) / half))[None]
    cos, sin = (f(angle).astype(x.dtype)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@spmd.fused("attention")
def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, for which accelerators have a kernel."""
    scores = einsum(q, k, "b/dp/fsdp s g/tp r k, b/dp/fsdp t g/tp k -> b/dp/fsdp g/tp r s t")
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return einsum(weights, v, "b/dp/fsdp g/tp r s t, b/dp/fsdp t g/tp k -> b/dp/fsdp s g/tp r k")


def layer(x: Any, w: Any) -> Any:
    """Grouped-query attention and a gated MLP, both tensor parallel, with a sequence-parallel stream."""
    w = {name: gathered(w[name], layout) if "/" in layout else w[name] for name, layout in LAYER.items()}

    y = all_gather(norm(x, w["norm1"]), f"{STREAM} -> {WHOLE}")
    q = einsum(y, w["q"], f"{WHOLE}, m h/tp k -> b/dp/fsdp s h/tp k")
    k, v = (einsum(y, w[n], f"{WHOLE}, m g/tp k -> b/dp/fsdp s g/tp k") for n in "kv")
    q = spmd.rearrange(rotated(q), "b/dp/fsdp s (g/tp r) k -> b/dp/fsdp s g/tp r k", g=spmd.size("g"))
    y = attention(q, rotated(k), v)
    y = spmd.rearrange(y, "b/dp/fsdp s g/tp r k -> b/dp/fsdp s (g/tp r) k")
    x = x + einsum(y, w["o"], f"b/dp/fsdp s h/tp k, h/tp k m -> {STREAM}")

    y = all_gather(norm(x, w["norm2"]), f"{STREAM} -> {WHOLE}")
    gate, up = (einsum(y, w[n], f"{WHOLE}, m f/tp -> b/dp/fsdp s f/tp") for n in ("gate", "up"))
    return x + einsum(jax.nn.silu(gate) * up, w["down"], f"b/dp/fsdp s f/tp, f/tp m -> {STREAM}")


def make_loss(mesh: Any) -> spmd.Kernel:
    """The mean cross-entropy of the next token."""

    @spmd.kernel(in_layouts=(LAYOUTS, "b/dp/fsdp s", "b/dp/fsdp s"), out_layouts="scalar", mesh=mesh)
    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        table = gathered(params["embed"], LAYOUTS["embed"])
        x = take(table, tokens, f"[v/tp] m, b/dp/fsdp s -> {STREAM}")
        x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, params["layers"])
        x = all_gather(norm(x, params["norm"]), f"{STREAM} -> {WHOLE}")
        unembed = gathered(params["unembed"], LAYOUTS["unembed"])
        logits = einsum(x, unembed, f"{WHOLE}, m v/tp -> b/dp/fsdp s v/tp").astype(jnp.float32)
        total = reduce(logits, "b/dp/fsdp s v/tp -> b/dp/fsdp s", "logsumexp")
        mine = jnp.where(spmd.iota("v/tp")[None, None] == labels[..., None], logits, 0.0)
        return reduce(total - reduce(mine, "b/dp/fsdp s v/tp -> b/dp/fsdp s"), "b/dp/fsdp s -> scalar", "mean")

    return loss


def make_step(loss: spmd.Kernel) -> Any:
    """One step of Adam, without its warm-up."""

    def step(params: Any, mean: Any, square: Any, tokens: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, labels)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, grads)
        params = jax.tree.map(lambda p, m, s: p - 8e-5 * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
        return value, params, mean, square

    return jax.jit(step, donate_argnums=(0, 1, 2))


def arguments(mesh: Any, sizes: dict[str, int], batch: int, length: int) -> tuple[Any, ...]:
    """Shapes and shardings of all arguments of a step, without any array."""

    def of(layout: str, dtype: Any) -> jax.ShapeDtypeStruct:
        found = spmd.Layout(layout)
        shape = [{**sizes, "b": batch, "s": length}[name] for name in found.names]
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=found.sharding(mesh))

    params = jax.tree.map(lambda layout: of(layout, jnp.float32), LAYOUTS)
    tokens = of("b/dp/fsdp s", jnp.int32)
    return params, params, params, tokens, tokens


# --- any mesh, for a search -------------------------------------------------------------------------------------------

AXES = ("dp", "fsdp", "cp", "tp", "pp")
OPTIMIZER = optax.adam(8e-5)


class Plan(NamedTuple):
    """How a mesh divides a step of the same model as a `transformer.Config`.

    Before and after the layers, rows of tokens are divided over dp, fsdp and pp, so that no stage has more of the
    embedding and of the head than another. In a pipeline a micro-batch is one row, and each layer of a device is a
    round of its own, so that the bubble is the smallest. 126 layers on 16 stages take 128 slots, of which two do
    nothing.
    """

    dp: int
    fsdp: int
    cp: int
    tp: int
    pp: int
    rows: int
    length: int

    @property
    def micro(self) -> int:
        return self.rows // (self.dp * self.fsdp) if self.pp > 1 else 1

    @property
    def each(self) -> int:
        """Slots for layers on one device."""
        return -(-SIZES["l"] // self.pp)

    @property
    def turns(self) -> int:
        """How often a device computes a layer: in a pipeline also in idle ticks."""
        return self.each if self.pp == 1 else (self.each - 1) * max(self.micro, self.pp) + self.micro + self.pp - 1

    @property
    def tokens(self) -> float:
        """Tokens of one device in one layer."""
        return self.rows / (self.dp * self.fsdp * self.micro) * self.length / self.cp

    def config(self) -> transformer.Config:
        at = SIZES
        stages: dict[str, Any] = (
            {"slots": self.pp * self.each, "rounds": self.each, "micro": self.micro} if self.pp > 1 else {}
        )
        sizes: dict[str, Any] = {
            "d": at["m"],
            "heads": at["h"],
            "kv_heads": at["g"],
            "head": at["k"],
            "hidden": at["f"],
        }
        more: dict[str, Any] = {"theta": 5e5, "chunks": 8, "dtype": "bfloat16", "save": "inputs"}
        return transformer.Config(vocabulary=at["v"], layers=at["l"], **sizes, **more, **stages)


def least(plan: Plan) -> Bound:
    """What a step takes at least, without a trace: the products, what is read and written for them, and what is sent
    for weights and for the stream. Small things are left out."""
    m, f, v, wide = (SIZES[name] for name in "mfvg")
    t, n, tp, pp = plan.tokens, plan.turns, plan.tp, plan.pp
    layer, table = 2 * m * m + 2 * m * wide * SIZES["k"] + 3 * m * f, m * v
    masked = 1.0 if plan.cp == 1 else (2 * plan.cp + 1) / (4 * plan.cp)  # of the parts of blocks that meet in a ring
    scores = masked * plan.length * t * SIZES["h"] / tp  # of all heads of a device
    every = plan.rows * plan.length / (plan.dp * plan.fsdp * plan.cp * pp)  # tokens outside of the layers
    flops = n * (t * (8 * layer - 2 * m * f) / tp + 16 * SIZES["k"] * scores) + 6 * every * table / tp

    # Attention is one kernel. In a ring each hop is one, which reads and writes what was found so far, in float32.
    moved = 7 * m + (4 * m + 4 * wide * SIZES["k"] + 3 * f) / tp - (m + f / tp) / 4  # what is done again ends before it
    moved += 5.5 * plan.cp * (plan.cp > 1) * m / tp
    stream = 2 * t * m
    # A pipeline takes the weights of a round, and adds their gradients to those of all rounds.
    traffic = n * 4 * 2 * (layer / tp + t * moved) - n * 2 * m * f / tp
    traffic += n * 11 * stream * (1 + 1 / tp) * (tp > 1) + n * (pp > 1) * 2 * layer / tp * (2.9 * plan.each + 6)

    layers = 2 * plan.each * layer / tp  # in bfloat16, of one device; gradients have twice as many bytes
    weights = layers + 2 * 2 * table / tp
    share = lambda size: (size - 1) / size
    gathers = 1 if pp > 1 else 2
    sums = tuple(axis for axis, size in (("dp", plan.dp), ("cp", plan.cp)) if size > 1)
    pair = 2 * 2 * t * max(wide // tp, 1) * SIZES["k"]  # keys and values
    sent = {
        ("all_gather", ("tp",)): 6 * n * stream * share(tp),
        ("psum_scatter", ("tp",)): 5 * n * stream * share(tp),
        ("all_gather", ("fsdp",)): (weights + (gathers - 1) * layers) * share(plan.fsdp),
        ("psum_scatter", ("fsdp",)): 2 * weights * share(plan.fsdp),
        ("psum", sums): 2 * 2 * layers / plan.fsdp * share(plan.dp * plan.cp),
        **{(kind, ("pp",)): 2 * plan.micro * stream / tp * share(pp) for kind in ("all_gather", "psum_scatter")},
        ("ppermute", ("pp",)): 2 * n * stream / tp * (pp > 1),
        ("ppermute", ("cp",)): 4 * (plan.cp - 1) * n * pair,
    }
    total = plan.rows * plan.length / (plan.dp * plan.fsdp * plan.cp * tp * pp)
    needed = total * (6 * (SIZES["l"] * layer + table) + 6 * m * plan.length * SIZES["l"])  # half of the scores
    kept = n * stream / tp + (weights if pp > 1 else 0)
    rest = 12 * (plan.each * layer + 2 * table) / tp / plan.fsdp  # weights and the moments of Adam, in float32
    used = {key: size for key, size in sent.items() if size}
    return Bound({"bfloat16": flops}, used, rest + kept, {"bfloat16": needed}, traffic)


@functools.cache
def state_shapes(slots: int | None) -> Any:
    """The arrays of weights and optimizer. Of the mesh they depend on the number of slots for layers alone."""
    whole = Plan(1, 1, 1, 1, 1, rows=1, length=1).config()

    def state(key: Any) -> Any:
        params = transformer.new_weights(dataclasses.replace(whole, slots=slots), key)
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    return jax.eval_shape(state, jax.random.key(0))


def build(mesh: Any, rows: int = 2048, length: int = 8192) -> tuple[Any, tuple[Any, ...], Bound]:
    """A training step, its arguments and a bound, for any mesh of some of the axes dp, fsdp, cp, tp and pp."""
    plan = Plan(*(mesh.shape.get(axis, 1) for axis in AXES), rows=rows, length=length)
    if rows % (plan.dp * plan.fsdp * plan.pp):
        raise spmd.errors.Impossible(f"dp, fsdp and pp divide {rows:,} rows of tokens.")
    if SIZES["h"] % plan.tp:
        raise spmd.errors.Impossible("tp divides 128 heads.")
    if length % (2 * plan.cp * plan.tp):
        raise spmd.errors.Impossible(f"cp and tp divide {length:,} tokens of a row.")
    model = transformer.Transformer(plan.config(), mesh)
    shapes = state_shapes(model.c.slots)

    def of(shape: Any, layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.sharding(mesh))

    tokens = of(jax.ShapeDtypeStruct((rows, length), jnp.int32), model.tokens)
    args = jax.tree.map(of, shapes, model.state_layouts(shapes)), tokens, tokens
    return model.train_step(OPTIMIZER), args, least(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=SIZES["l"])
    parser.add_argument("--hardware", default="h100")
    options = parser.parse_args()
    start = time.perf_counter()
    mesh = spmd.make_mesh(dp=16, fsdp=128, tp=8, abstract=True)
    sizes = {**SIZES, "l": options.layers}
    step, args = make_step(make_loss(mesh)), arguments(mesh, sizes, batch=2048, length=8192)
    count = sum(x.size for x in jax.tree.leaves(args[0]))
    print(f"{count / 1e9:.1f}B parameters on {mesh.size:,} devices")
    print(spmd.explain(step, *args, mesh=mesh, hardware=options.hardware))
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
