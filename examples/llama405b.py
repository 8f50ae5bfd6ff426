"""What a training step of a 405B-parameter transformer sends on 16,384 devices, computed on a laptop.

The model is Llama 3.1 405B (https://arxiv.org/abs/2407.21783, table 3). Weights are divided over `fsdp` and `tp`, the
sequence between blocks over `tp`, and 2048 sequences over `dp` and `fsdp`. The mesh is abstract: the step is traced but
never compiled or run, and `explain` reads the trace.

    python examples/llama405b.py --layers 126 --hardware h100
    python -m spmd explain examples/llama405b.py:build --mesh dp=16,fsdp=128,tp=8 --hardware h100
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

import spmd
from spmd import all_gather, defer, einsum, reduce, take

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


def layer(x: Any, w: Any) -> Any:
    """Grouped-query attention and a gated MLP, both tensor parallel, with a sequence-parallel stream."""
    w = {name: gathered(w[name], layout) if "/" in layout else w[name] for name, layout in LAYER.items()}

    y = all_gather(norm(x, w["norm1"]), f"{STREAM} -> {WHOLE}")
    q = einsum(y, w["q"], f"{WHOLE}, m h/tp k -> b/dp/fsdp s h/tp k")
    k, v = (einsum(y, w[n], f"{WHOLE}, m g/tp k -> b/dp/fsdp s g/tp k") for n in "kv")
    q = spmd.rearrange(rotated(q), "b/dp/fsdp s (g/tp r) k -> b/dp/fsdp s g/tp r k", g=spmd.size("g"))
    scores = einsum(q, rotated(k), "b/dp/fsdp s g/tp r k, b/dp/fsdp t g/tp k -> b/dp/fsdp g/tp r s t")
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool)[None, None, None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
    y = einsum(weights, v, "b/dp/fsdp g/tp r s t, b/dp/fsdp t g/tp k -> b/dp/fsdp s g/tp r k")
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


def build(mesh: Any, layers: int = SIZES["l"]) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments, for any mesh with the axes dp, fsdp and tp."""
    return make_step(make_loss(mesh)), arguments(mesh, {**SIZES, "l": layers}, batch=2048, length=8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=SIZES["l"])
    parser.add_argument("--hardware", default="h100")
    options = parser.parse_args()
    start = time.perf_counter()
    mesh = spmd.make_mesh(dp=16, fsdp=128, tp=8, abstract=True)
    step, args = build(mesh, options.layers)
    count = sum(x.size for x in jax.tree.leaves(args[0]))
    print(f"{count / 1e9:.1f}B parameters on {mesh.size:,} devices")
    print(spmd.explain(step, *args, mesh=mesh, hardware=options.hardware))
    print(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
