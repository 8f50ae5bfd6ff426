"""An unrolled transformer of many layers (FSDP x tensor x sequence parallel, forward and backward): time to trace and lower.

    python tests/benchmarks/deep_transformer.py [--json FILE] [--layers 16] [--repeats 5] [--quick]

The layers are the blocks of llama_block.py, one after another without a scan: by hand in one `jax.shard_map`, jitted
as a kernel is, in `spmd` strings, and from the layers of `spmd.nn`. The gradient is taken outside, of a function that has one result; and inside,
where the results are a loss and the gradients of all weights.

The versions take turns, each with JAX's caches empty, and a ratio is the median over the turns. The programs by hand
have no check but JAX's own, of the types of values, which every version has and which no file of this project switches
off: `spmd` adds its strings, its checker and its messages.

Exits with 1 where the collectives or bytes of the compiled programs differ, or where the strings cost more than
1.3 times the program by hand.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd.inspect import collectives
from tests.benchmarks import llama_block
from tests.benchmarks.llama_block import LAYOUTS, RESIDUAL, MiB, Sizes, hand_body, layers_body, spmd_body

SIZES = Sizes(b=8, s=32, m=64, h=4, k=16, f=96)  # no size changes the time to trace; small ones compile sooner
MESH = {"dp": 4, "tp": 2}
MOST = 1.3  # the strings' time over that of the program by hand


def deep(block: Callable[..., Any]) -> Callable[..., Any]:
    """The same block for each set of weights."""

    def model(x: Any, layers: Any) -> Any:
        for weights in layers:
            x = block(x, weights)
        return x

    return model


def outside(mesh: Mesh, layers: int) -> dict[str, Callable[..., Any]]:
    """The gradient of the model on whole arrays, in each version, made anew: x, weights, cotangent -> x, gradients."""
    specs = [{name: spmd.Layout(layout).spec for name, layout in LAYOUTS.items()}] * layers
    stream = spmd.Layout(RESIDUAL).spec
    kernel = spmd.kernel(in_layouts=(RESIDUAL, [LAYOUTS] * layers), out_layouts=RESIDUAL, mesh=mesh)
    by_hand = jax.shard_map(deep(hand_body), mesh=mesh, in_specs=(stream, specs), out_specs=stream)
    versions = {"hand": jax.jit(by_hand), "spmd": kernel(deep(spmd_body)), "spmd.nn": kernel(deep(layers_body))}

    def step(model: Any, x: Any, weights: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(model, x, weights)
        return out, pull(cotangent)[1]

    return {name: functools.partial(step, model) for name, model in versions.items()}


def inside(mesh: Mesh, layers: int) -> dict[str, Callable[..., Any]]:
    """The same, but the gradient is taken on the shards, of a loss: x, weights, cotangent -> loss, gradients."""
    specs = [{name: spmd.Layout(layout).spec for name, layout in LAYOUTS.items()}] * layers
    stream = spmd.Layout(RESIDUAL).spec

    def by_hand(x: Any, weights: Any, cotangent: Any) -> Any:
        loss = lambda weights: lax.psum((deep(hand_body)(x, weights) * cotangent).sum(), ("dp", "tp"))
        return jax.value_and_grad(loss)(weights)

    def ours(block: Any) -> Any:
        def step(x: Any, weights: Any, cotangent: Any) -> Any:
            loss = lambda weights: spmd.reduce(deep(block)(x, weights) * cotangent, f"{RESIDUAL} -> scalar")
            return spmd.value_and_grad(loss)(weights)

        tree = [LAYOUTS] * layers
        return spmd.kernel(in_layouts=(RESIDUAL, tree, RESIDUAL), out_layouts=("scalar", tree), mesh=mesh)(step)

    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(stream, specs, stream), out_specs=(P(), specs))
    return {"hand, inside": jax.jit(mapped), "spmd, inside": ours(spmd_body), "spmd.nn, inside": ours(layers_body)}


def models(mesh: Mesh, layers: int) -> dict[str, Callable[..., Any]]:
    return outside(mesh, layers) | inside(mesh, layers)


def lowered(step: Callable[..., Any], mesh: Mesh, layers: int) -> Any:
    """One step, forward and backward, traced and lowered."""
    stream = spmd.Layout(RESIDUAL).sharding(mesh)
    weights = [{name: spmd.Layout(layout).sharding(mesh) for name, layout in LAYOUTS.items()}] * layers
    x, one, cotangent = llama_block.arguments(SIZES)
    jitted = jax.jit(step, in_shardings=(stream, weights, stream), out_shardings=(None, weights))
    return jitted.trace(x, [one] * layers, cotangent).lower()


def times(mesh: Mesh, layers: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of this process to trace and lower; each turn starts with another version."""
    found: dict[str, list[float]] = {name: [] for name in models(mesh, 1)}
    for turn in range(repeats):
        made = models(mesh, layers)
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            jax.clear_caches()
            gc.collect()
            start = time.process_time()
            lowered(made[name], mesh, layers)
            found[name].append(time.process_time() - start)
    return found


def by_hand(name: str) -> str:
    """The version that another is compared with."""
    return "hand, inside" if name.endswith("inside") else "hand"


def compare(layers: int, repeats: int) -> dict[str, Any]:
    """Everything that is measured."""
    mesh = spmd.make_mesh(**MESH)
    report = {
        name: collectives(lowered(model, mesh, layers).compile(), mesh=mesh)
        for name, model in models(mesh, layers).items()
    }
    kinds = {name: llama_block.kinds(one) for name, one in report.items()}
    times(mesh, 1, 1)  # imports, and caches of ours
    found = times(mesh, layers, repeats)
    return {
        "layers": layers,
        "mesh": MESH,
        "counts": {name: one.counts for name, one in report.items()},
        "bytes": {name: one.total_bytes for name, one in report.items()},
        "trace_lower_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(seconds, found[by_hand(name)], strict=True))
            for name, seconds in found.items()
        },
        "same": all(one == kinds[by_hand(name)] for name, one in kinds.items()),
    }


def show(result: dict[str, Any]) -> None:
    """One table."""
    mesh = " x ".join(f"{axis}{n}" for axis, n in result["mesh"].items())
    print(f"{result['layers']} layers, forward and backward, {mesh}, jax {jax.__version__}, {SIZES}")
    print(f"{'':17}{'trace+lower':>12}{'ratio':>7}{'MiB/device':>12}  collectives")
    for name, counts in result["counts"].items():
        sent = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        time_and_ratio = f"{result['trace_lower_ms'][name]:9.0f} ms{result['ratio'][name]:7.2f}"
        print(f"{name:17}{time_and_ratio}{result['bytes'][name] / MiB:12.3f}  {sent}")
    print("identical collectives and bytes" if result["same"] else "DIFFERENT collectives or bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="turns, each of all versions")
    parser.add_argument("--quick", action="store_true", help="4 layers, three turns")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    result = compare(*((4, 3) if options.quick else (options.layers, options.repeats)))
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 0 if result["same"] and max(result["ratio"]["spmd"], result["ratio"]["spmd, inside"]) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
