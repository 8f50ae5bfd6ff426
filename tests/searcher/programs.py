"""Small programs for the tests of the searcher: an MLP with FSDP and tensor parallelism, for any mesh."""

from typing import Any

import jax

import spmd
from spmd import all_gather, einsum
from spmd.searcher import Bound

SIZES = {"b": 64, "s": 8, "d": 32, "f": 64}
FLAT = spmd.accelerators.Hardware(
    "flat", {"bfloat16": 400e12}, hbm_bandwidth=1e30, hbm_bytes=80e9, default=spmd.accelerators.Link(50e9)
)
LAYOUTS = ("b/dp/fsdp s/tp d", "d/fsdp f/tp", "f/tp d/fsdp")


def mlp(mesh: Any, dtype: str = "float32", sizes: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """The forward pass on a mesh of the axes dp, fsdp and tp."""
    sizes = {**SIZES, **(sizes or {})}

    @spmd.kernel(f"{', '.join(LAYOUTS)} -> {LAYOUTS[0]}", mesh=mesh)
    def forward(x: Any, w_in: Any, w_out: Any) -> Any:
        x = all_gather(x, "b/dp/fsdp s/tp d -> b/dp/fsdp s d")
        h = einsum(x, all_gather(w_in, "d/fsdp f/tp -> d f/tp"), "b/dp/fsdp s d, d f/tp -> b/dp/fsdp s f/tp")
        w_out = all_gather(w_out, "f/tp d/fsdp -> f/tp d")
        return einsum(jax.nn.relu(h), w_out, "b/dp/fsdp s f/tp, f/tp d -> b/dp/fsdp s/tp d")

    def argument(text: str) -> jax.ShapeDtypeStruct:
        layout = spmd.Layout(text)
        shape = tuple(sizes[name] for name in layout.names)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(mesh))

    return forward, tuple(map(argument, LAYOUTS))


def attending(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A training step of the attention layers of a model of 70 billion parameters, as the book has it."""
    layouts = {"q": "l d/fsdp h/tp k", "k": "l d/fsdp g/tp k", "v": "l d/fsdp g/tp k", "o": "l h/tp k d/fsdp"}
    sizes = {"l": 80, "d": 8192, "h": 64, "g": 8, "k": 128, "b": 512, "s": 8192}
    gathers = {name: f"{text[2:]} -> {text[2:].replace('/fsdp', '')}" for name, text in layouts.items()}

    def argument(text: str) -> jax.ShapeDtypeStruct:
        layout = spmd.Layout(text)
        return jax.ShapeDtypeStruct([sizes[n] for n in layout.names], "bfloat16", sharding=layout.sharding(mesh))

    @jax.checkpoint
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        q, k, v, o = (all_gather(weights[name], gathers[name]) for name in "qkvo")
        return x + spmd.nn.multi_head_attention(x, q, k, v, o, causal=True, tp="tp", sp="tp"), None

    @spmd.kernel(in_layouts=(layouts, "b/fsdp s/tp d"), out_layouts=layouts, mesh=mesh)
    def step(weights: Any, x: Any) -> Any:
        last = lambda weights: jax.lax.scan(layer, x, weights)[0].astype("float32")
        return spmd.grad(lambda weights: spmd.reduce(last(weights), "b/fsdp s/tp d -> scalar", "mean"))(weights)

    return step, (jax.tree.map(argument, layouts), argument("b/fsdp s/tp d"))


def flops(mesh: Any) -> float:
    """What the MLP computes on one device."""
    return 4 * SIZES["b"] * SIZES["s"] * SIZES["d"] * SIZES["f"] / mesh.size


def bounded(mesh: Any, factor: float = 1.0) -> tuple[Any, ...]:
    """The MLP with the bound that its products and its gathers of weights are; `factor` makes it wrong."""
    n, tp = mesh.shape["fsdp"], mesh.shape["tp"]
    gathered = 2 * 4 * SIZES["d"] * SIZES["f"] // tp * (n - 1) / n
    bound = Bound({"float32": factor * flops(mesh)}, {("all_gather", ("fsdp",)): gathered})
    return (*mlp(mesh), bound)
