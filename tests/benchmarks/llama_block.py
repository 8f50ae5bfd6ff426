"""A transformer block (FSDP x tensor x sequence parallel, forward and backward): `spmd` beside hand-written JAX.

    python tests/benchmarks/llama_block.py [--json FILE] [--quick]
    python tests/benchmarks/llama_block.py --target h100_sxm.txtpb     as `spmd explain --target`: nothing is run

Compares the same block written with `jax.shard_map` by hand, in `spmd` strings, from the layers of `spmd.nn`, in
`spmd`'s auto mode, and by plain GSPMD constraints: the collectives of the compiled programs and their bytes, their
temporary memory and kernels, the time to trace and lower, and the cost of a warm call. Exits with 1 where the
collectives or bytes of the first three differ.
"""

import argparse
import gc
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd import all_gather, einsum, nn
from spmd.inspect import CollectiveReport, collectives

MiB = 2**20


@dataclass(frozen=True)
class Sizes:
    """Batch, sequence, model, heads, head dimension, feed-forward dimension."""

    b: int = 8
    s: int = 256
    m: int = 512
    h: int = 8
    k: int = 64
    f: int = 1536


RESIDUAL = "b/dp s/tp m"
LAYOUTS = {
    "attention_norm": "m",
    "q": "m/dp h/tp k",
    "k": "m/dp h/tp k",
    "v": "m/dp h/tp k",
    "o": "h/tp k m/dp",
    "mlp_norm": "m",
    "gate": "m/dp f/tp",
    "up": "m/dp f/tp",
    "down": "f/tp m/dp",
}


def ideal_bytes(sizes: Sizes, dp: int, tp: int) -> float:
    """Bytes a device must send: weights gathered and their gradients scattered over dp, the residual stream
    gathered and scattered over tp four times each; the norms' gradients are left out."""
    weights = 4 * (4 * sizes.m * sizes.h * sizes.k + 3 * sizes.m * sizes.f)
    stream = 4 * sizes.b // dp * sizes.s * sizes.m
    return 2 * weights / tp * (dp - 1) / dp + 8 * stream * (tp - 1) / tp


# -------------------- what is local in every version


def norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def rotate(x: Any) -> Any:
    """Rotary embedding of `b s h k`."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=x.dtype), 1e4 ** (-jnp.arange(half, dtype=x.dtype) / half))
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention over the heads that are here."""
    scores = jnp.einsum("bqhk,bthk->bhqt", rotate(q), rotate(k)) / math.sqrt(q.shape[-1])
    length = q.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhqt,bthk->bqhk", weights, v)


# -------------------- the block, five times


def hand_body(x: Any, p: dict[str, Any]) -> Any:
    """One device's shards, collectives written out."""
    gather = lambda w, dim: lax.all_gather(w, "dp", axis=dim, tiled=True)
    whole = lax.all_gather(norm(x, p["attention_norm"]), "tp", axis=1, tiled=True)
    q = jnp.einsum("bsm,mhk->bshk", whole, gather(p["q"], 0))
    k = jnp.einsum("bsm,mhk->bshk", whole, gather(p["k"], 0))
    v = jnp.einsum("bsm,mhk->bshk", whole, gather(p["v"], 0))
    out = jnp.einsum("bshk,hkm->bsm", attend(q, k, v), gather(p["o"], 2))
    x = x + lax.psum_scatter(out, "tp", scatter_dimension=1, tiled=True)
    whole = lax.all_gather(norm(x, p["mlp_norm"]), "tp", axis=1, tiled=True)
    gate = jnp.einsum("bsm,mf->bsf", whole, gather(p["gate"], 0))
    up = jnp.einsum("bsm,mf->bsf", whole, gather(p["up"], 0))
    out = jnp.einsum("bsf,fm->bsm", jax.nn.silu(gate) * up, gather(p["down"], 1))
    return x + lax.psum_scatter(out, "tp", scatter_dimension=1, tiled=True)


def spmd_body(x: Any, p: dict[str, Any]) -> Any:
    """The same in strings."""
    whole = all_gather(norm(x, p["attention_norm"]), "b/dp s/tp m -> b/dp s m")
    q, k, v = (
        einsum(whole, all_gather(p[n], "m/dp h/tp k -> m h/tp k"), "b/dp s m, m h/tp k -> b/dp s h/tp k") for n in "qkv"
    )
    o = all_gather(p["o"], "h/tp k m/dp -> h/tp k m")
    x = x + einsum(attend(q, k, v), o, "b/dp s h/tp k, h/tp k m -> b/dp s/tp m")
    whole = all_gather(norm(x, p["mlp_norm"]), "b/dp s/tp m -> b/dp s m")
    gate, up = (
        einsum(whole, all_gather(p[n], "m/dp f/tp -> m f/tp"), "b/dp s m, m f/tp -> b/dp s f/tp")
        for n in ("gate", "up")
    )
    down = all_gather(p["down"], "f/tp m/dp -> f/tp m")
    return x + einsum(jax.nn.silu(gate) * up, down, "b/dp s f/tp, f/tp m -> b/dp s/tp m")


def layers_body(x: Any, p: dict[str, Any]) -> Any:
    """The same from ready-made layers, the weights gathered in strings."""
    qkv = all_gather((p["q"], p["k"], p["v"]), "m/dp h/tp k -> m h/tp k")
    q, k, v = nn.column_linear(nn.rms_norm(x, p["attention_norm"]), qkv, tp="tp", sp="tp")
    x = x + nn.row_linear(attend(q, k, v), all_gather(p["o"], "h/tp k m/dp -> h/tp k m"), tp="tp", sp="tp")
    gates = all_gather((p["gate"], p["up"]), "m/dp f/tp -> m f/tp")
    down = all_gather(p["down"], "f/tp m/dp -> f/tp m")
    return x + nn.gated_mlp(nn.rms_norm(x, p["mlp_norm"]), gates, down, tp="tp", sp="tp")


def plain_body(mesh: Mesh, x: Any, p: dict[str, Any]) -> Any:
    """Whole arrays, with a constraint on every activation and every gathered weight."""

    def at(value: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))

    whole = at(norm(x, p["attention_norm"]), "dp", None, None)
    q, k, v = (
        at(jnp.einsum("bsm,mhk->bshk", whole, at(p[n], None, "tp", None)), "dp", None, "tp", None) for n in "qkv"
    )
    mixed = at(attend(q, k, v), "dp", None, "tp", None)
    x = at(x + jnp.einsum("bshk,hkm->bsm", mixed, at(p["o"], "tp", None, None)), "dp", "tp", None)
    whole = at(norm(x, p["mlp_norm"]), "dp", None, None)
    gate, up = (at(jnp.einsum("bsm,mf->bsf", whole, at(p[n], None, "tp")), "dp", None, "tp") for n in ("gate", "up"))
    return at(x + jnp.einsum("bsf,fm->bsm", jax.nn.silu(gate) * up, at(p["down"], "tp", None)), "dp", "tp", None)


# -------------------- as jitted steps: value and gradients


def _sharding(mesh: Mesh, layout: str) -> NamedSharding:
    return spmd.Layout(layout).sharding(mesh)


def step_of(block: Callable[..., Any], mesh: Mesh) -> Any:
    """The jitted vjp of a block, with its cotangent in the layout of its result."""

    def step(x: Any, p: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(block, x, p)
        return out, pull(cotangent)

    stream = _sharding(mesh, RESIDUAL)
    weights = {name: _sharding(mesh, layout) for name, layout in LAYOUTS.items()}
    return jax.jit(step, in_shardings=(stream, weights, stream), out_shardings=(stream, (stream, weights)))


def blocks(mesh: Mesh) -> dict[str, Callable[..., Any]]:
    """The block on whole arrays, in each version."""
    specs = {name: spmd.Layout(layout).spec for name, layout in LAYOUTS.items()}
    stream = spmd.Layout(RESIDUAL).spec
    kernel = spmd.kernel(in_layouts=(RESIDUAL, LAYOUTS), out_layouts=RESIDUAL, mesh=mesh)
    ours = kernel(spmd_body)
    return {
        "hand": jax.jit(jax.shard_map(hand_body, mesh=mesh, in_specs=(stream, specs), out_specs=stream)),
        "spmd": ours,
        "spmd.nn": kernel(layers_body),
        "spmd auto": ours.auto,
        "GSPMD": lambda x, p: plain_body(mesh, x, p),
    }


def arguments(sizes: Sizes, mesh: Mesh | None = None) -> tuple[Any, Any, Any]:
    """Shapes of the stream, the weights and the cotangent; with random values where a mesh is given."""
    shape = lambda layout: tuple(getattr(sizes, name) for name in spmd.Layout(layout).names)
    shapes = (shape(RESIDUAL), {name: shape(layout) for name, layout in LAYOUTS.items()}, shape(RESIDUAL))
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int))
    if mesh is None:
        return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(n, jnp.float32) for n in leaves])
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [jax.random.normal(key, n) / math.sqrt(n[0]) for key, n in zip(keys, leaves, strict=True)]
    stream, weights, cotangent = jax.tree.unflatten(structure, values)
    return (
        spmd.shard(stream, RESIDUAL, mesh=mesh),
        spmd.shard(weights, LAYOUTS, mesh=mesh),
        spmd.shard(cotangent, RESIDUAL, mesh=mesh),
    )


def compiled(name: str, mesh: Mesh, sizes: Sizes) -> Any:
    """One version, forward and backward."""
    return step_of(blocks(mesh)[name], mesh).lower(*arguments(sizes)).compile()


def report(name: str, mesh: Mesh, sizes: Sizes) -> CollectiveReport:
    """The collectives of one version, forward and backward."""
    return collectives(compiled(name, mesh, sizes), mesh=mesh)


def kinds(found: CollectiveReport) -> dict[str, tuple[int, int]]:
    """Per kind and axes: how many arrays travel (whatever the compiler combined), and their bytes."""
    out: dict[str, tuple[int, int]] = {}
    for one in found:
        key = f"{one.kind} {','.join(one.axes)}"
        count, size = out.get(key, (0, 0))
        out[key] = (count + one.count * len(one.operands), size + one.total_bytes)
    return dict(sorted(out.items()))


# -------------------- times


def trace_times(names: list[str], mesh: Mesh, sizes: Sizes, repeats: int) -> dict[str, list[float]]:
    """Seconds of this process to trace and lower, each time with JAX's caches empty and the functions made anew;
    the versions take turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        made = blocks(mesh)
        for name in names:
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            step_of(made[name], mesh).trace(*arguments(sizes)).lower()
            found[name].append(time.process_time() - start)
    return found


def call_times(mesh: Mesh, repeats: int = 60, calls: int = 50) -> dict[str, list[float]]:
    """Seconds per warm call of a kernel that does next to nothing, from Python until its result is there; the
    versions take turns."""
    body = lambda x, y: x + y
    layout = "b/dp d/tp"
    spec = spmd.Layout(layout).spec
    versions = {
        "hand": jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec)),
        "spmd": spmd.kernel(f"{layout}, {layout} -> {layout}", mesh=mesh)(body),
    }
    x = spmd.shard(jnp.ones((8, 8)), layout, mesh=mesh)
    found: dict[str, list[float]] = {name: [] for name in versions}
    for fn in versions.values():
        jax.block_until_ready(fn(x, x))
    for _ in range(repeats):
        for name, fn in versions.items():
            start = time.perf_counter()
            for _ in range(calls):
                fn(x, x).block_until_ready()
            found[name].append((time.perf_counter() - start) / calls)
    return found


# -------------------- the table


def kernels(program: Any) -> int:
    """How many fusions, products and calls of libraries a compiled program has."""
    return len(re.findall(r" (?:fusion|dot|custom-call)\(", program.as_text()))


def compare(dp: int, tp: int, sizes: Sizes, repeats: int, devices: Any = None) -> dict[str, Any]:
    """Everything that is measured on one mesh. On devices that are given nothing is run."""
    mesh = spmd.make_mesh(dp=dp, tp=tp, devices=devices)
    names = list(blocks(mesh))
    programs = {name: compiled(name, mesh, sizes) for name in names}
    found = {name: collectives(program, mesh=mesh) for name, program in programs.items()}
    trace_times(names, mesh, sizes, 1)  # imports, and caches of ours
    traced = trace_times(names, mesh, sizes, repeats)
    calls = call_times(mesh) if devices is None else {}
    median = statistics.median
    return {
        "mesh": {"dp": dp, "tp": tp},
        "ideal_bytes": ideal_bytes(sizes, dp, tp),
        "counts": {name: found[name].counts for name in names},
        "bytes": {name: found[name].total_bytes for name in names},
        "kinds": {name: kinds(found[name]) for name in names},
        "temp_bytes": {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()},
        "kernels": {name: kernels(program) for name, program in programs.items()},
        "trace_lower_ms": {name: 1e3 * median(times) for name, times in traced.items()},
        "trace_lower_ratio": median(a / b for a, b in zip(traced["spmd"], traced["hand"], strict=True)),
        "call_us": {name: 1e6 * median(times) for name, times in calls.items()},
        "call_ratio": median(a / b for a, b in zip(calls["spmd"], calls["hand"], strict=True)) if calls else None,
        "same": kinds(found["hand"]) == kinds(found["spmd"]) == kinds(found["spmd.nn"]),
    }


def show(result: dict[str, Any]) -> None:
    """One table."""
    mesh = " x ".join(f"{axis}{n}" for axis, n in result["mesh"].items())
    print(f"\n{mesh}: ideal {result['ideal_bytes'] / MiB:.2f} MiB sent per device (without the norms' gradients)")
    print(f"{'':12}{'MiB/device':>11}  {'temp MiB':>8}  {'kernels':>7}  {'trace+lower':>11}  collectives")
    for name, size in result["bytes"].items():
        counts = ", ".join(f"{n} {kind}" for kind, n in result["counts"][name].items())
        temp, ours = result["temp_bytes"][name] / MiB, result["kernels"][name]
        took = result["trace_lower_ms"][name]
        print(f"{name:12}{size / MiB:11.2f}  {temp:8.1f}  {ours:7}  {took:8.0f} ms  {counts}")
    print(f"trace + lower, spmd / hand: {result['trace_lower_ratio']:.2f}")
    calls = result["call_us"]
    if calls:
        print(f"warm call: hand {calls['hand']:.0f} us, spmd {calls['spmd']:.0f} us, ratio {result['call_ratio']:.2f}")
    print(
        "hand, spmd and spmd.nn:",
        "identical collectives and bytes" if result["same"] else "DIFFERENT collectives or bytes",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="one mesh, three repeats")
    parser.add_argument("--repeats", type=int, default=None, help="repeats of trace and lower (5)")
    parser.add_argument("--target", metavar="WHAT", help="devices that are not here: h100_sxm.txtpb, v5p:2x2x2")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    devices = options.target and spmd.topology_devices(options.target, 8)
    repeats = options.repeats or (3 if options.quick else 5)
    meshes = [(4, 2)] if options.quick else [(4, 2), (2, 4)]
    results = [compare(dp, tp, Sizes(), repeats, devices) for dp, tp in meshes]
    print(f"jax {jax.__version__}, {jax.default_backend()}, {Sizes()}")
    for result in results:
        show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    return 0 if all(result["same"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
