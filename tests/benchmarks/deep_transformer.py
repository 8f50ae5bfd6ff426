"""An unrolled transformer of many layers (FSDP x tensor x sequence parallel, forward and backward): time to trace and lower.

    python tests/benchmarks/deep_transformer.py [--json FILE] [--layers 16] [--repeats 5] [--quick] [--collect]

The layers are the blocks of llama_block.py, one after another without a scan: by hand in one `jax.shard_map`, jitted
as a kernel is, in `spmd` strings, and from the layers of `spmd.nn`. The gradient is taken outside, of a function that
has one result; and inside, where the results are a loss and the gradients of all weights.

There are two programs by hand. JAX checks the types of the values of the first, as it does those of `spmd`. For the
second, `unchecked`, JAX's check is switched off (`check_vma=False`), and whoever writes it sums the gradients of the
norms. It is here as an opponent only. `spmd` itself never switches the check off.

The versions take turns, each with JAX's caches empty, and a ratio is the median over the turns. Python's garbage
collector waits, as in `timeit`: whether one of its rare full passes falls into a version is chance. `--collect` lets it
run.

Two lines below the table say what the checker costs: its part of the time to trace (each version is traced with it and
with `check="off"`), and the largest ratio to the program by hand that nobody checks.

Exits with 1 where the collectives or bytes of the compiled programs differ, or where a version of `spmd` costs more
than 1.3 times the program by hand that JAX checks, or 1.5 times the other one, or where the checker takes more than
30 % of the trace.
"""

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
MOST = 1.3  # the time of `spmd` over that of a program by hand that JAX checks
MOST_CHECKED = 1.5  # the same, with our checker, over that of the program by hand that nobody checks
MOST_CHECKER = 0.3  # the checker's part of the time to trace
INSIDE = ", inside"


def deep(block: Callable[..., Any]) -> Callable[..., Any]:
    """The same block for each set of weights."""

    def model(x: Any, layers: Any) -> Any:
        for weights in layers:
            x = block(x, weights)
        return x

    return model


def outside(mesh: Mesh, layers: int, check: str = "error") -> dict[str, Callable[..., Any]]:
    """The gradient of the model on whole arrays, in each version, made anew: x, weights, cotangent -> x, gradients."""
    specs = [{name: spmd.Layout(layout).spec for name, layout in LAYOUTS.items()}] * layers
    stream = spmd.Layout(RESIDUAL).spec
    kernel = spmd.kernel(in_layouts=(RESIDUAL, [LAYOUTS] * layers), out_layouts=RESIDUAL, mesh=mesh, check=check)
    mapped = functools.partial(jax.shard_map, deep(hand_body), mesh=mesh, in_specs=(stream, specs), out_specs=stream)
    versions = {
        "hand": jax.jit(mapped()),
        "unchecked": jax.jit(mapped(check_vma=False)),
        "spmd": kernel(deep(spmd_body)),
        "spmd.nn": kernel(deep(layers_body)),
    }

    def step(model: Any, x: Any, weights: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(model, x, weights)
        return out, pull(cotangent)[1]

    return {name: functools.partial(step, model) for name, model in versions.items()}


def inside(mesh: Mesh, layers: int, check: str = "error") -> dict[str, Callable[..., Any]]:
    """The same, but the gradient is taken on the shards, of a loss: x, weights, cotangent -> loss, gradients."""
    specs = [{name: spmd.Layout(layout).spec for name, layout in LAYOUTS.items()}] * layers
    stream = spmd.Layout(RESIDUAL).spec

    def by_hand(x: Any, weights: Any, cotangent: Any) -> Any:
        loss = lambda weights: lax.psum((deep(hand_body)(x, weights) * cotangent).sum(), ("dp", "tp"))
        return jax.value_and_grad(loss)(weights)

    def unchecked(x: Any, weights: Any, cotangent: Any) -> Any:
        """Without JAX's types a psum would be transposed to a psum, so it comes after the gradient."""
        loss, gradients = jax.value_and_grad(lambda weights: (deep(hand_body)(x, weights) * cotangent).sum())(weights)
        for layer in gradients:
            layer.update({name: lax.psum(g, ("dp", "tp")) for name, g in layer.items() if name.endswith("norm")})
        return lax.psum(loss, ("dp", "tp")), gradients

    def ours(block: Any) -> Any:
        def step(x: Any, weights: Any, cotangent: Any) -> Any:
            loss = lambda weights: spmd.reduce(deep(block)(x, weights) * cotangent, f"{RESIDUAL} -> scalar")
            return spmd.value_and_grad(loss)(weights)

        tree = [LAYOUTS] * layers
        layouts = {"in_layouts": (RESIDUAL, tree, RESIDUAL), "out_layouts": ("scalar", tree)}
        return spmd.kernel(**layouts, mesh=mesh, check=check)(step)

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(stream, specs, stream), out_specs=(P(), specs))
    versions = {
        "hand": jax.jit(mapped(by_hand)),
        "unchecked": jax.jit(mapped(unchecked, check_vma=False)),
        "spmd": ours(spmd_body),
        "spmd.nn": ours(layers_body),
    }
    return {f"{name}{INSIDE}": version for name, version in versions.items()}


def models(mesh: Mesh, layers: int, check: str = "error") -> dict[str, Callable[..., Any]]:
    return outside(mesh, layers, check) | inside(mesh, layers, check)


def lowered(step: Callable[..., Any], mesh: Mesh, layers: int) -> Any:
    """One step, forward and backward, traced and lowered."""
    return traced(step, mesh, layers).lower()


def traced(step: Callable[..., Any], mesh: Mesh, layers: int) -> Any:
    """One step, forward and backward, traced."""
    stream = spmd.Layout(RESIDUAL).sharding(mesh)
    weights = [{name: spmd.Layout(layout).sharding(mesh) for name, layout in LAYOUTS.items()}] * layers
    x, one, cotangent = llama_block.arguments(SIZES)
    jitted = jax.jit(step, in_shardings=(stream, weights, stream), out_shardings=(None, weights))
    return jitted.trace(x, [one] * layers, cotangent)


def times(mesh: Mesh, layers: int, repeats: int, collect: bool = False) -> dict[str, list[float]]:
    """Seconds of this process to trace and lower; each turn starts with another version."""
    found: dict[str, list[float]] = {name: [] for name in models(mesh, 1)}
    for turn in range(repeats):
        made = models(mesh, layers)
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(seconds(functools.partial(lowered, made[name], mesh, layers), collect))
    return found


def seconds(run: Callable[[], Any], collect: bool) -> float:
    """How long this process takes, with JAX's caches empty."""
    jax.clear_caches()
    gc.collect()
    if not collect:
        gc.disable()
    start = time.process_time()
    run()
    found = time.process_time() - start
    gc.enable()
    return found


def shares(mesh: Mesh, layers: int, repeats: int, collect: bool = False) -> dict[str, float]:
    """The part of the time to trace that is the checker's, for each version of `spmd`: traced with the checker and
    without it in turns, and the median over the turns."""
    found: dict[str, list[float]] = {name: [] for name in models(mesh, 1) if name.startswith("spmd")}
    for turn in range(repeats):
        for name, parts in found.items():
            spent = {}
            for check in ("error", "off") if turn % 2 else ("off", "error"):
                step = models(mesh, layers, check)[name]
                spent[check] = seconds(functools.partial(traced, step, mesh, layers), collect)
            parts.append(1 - spent["off"] / spent["error"])
    return {name: statistics.median(parts) for name, parts in found.items()}


def ratios(found: dict[str, list[float]], opponent: str) -> dict[str, float]:
    """How often as long each version takes as a program by hand that takes its gradient where this one does."""
    where = lambda name: INSIDE if name.endswith(INSIDE) else ""
    pairs = {name: zip(seconds, found[opponent + where(name)], strict=True) for name, seconds in found.items()}
    return {name: statistics.median(ours / theirs for ours, theirs in pair) for name, pair in pairs.items()}


def compare(layers: int, repeats: int, collect: bool) -> dict[str, Any]:
    """Everything that is measured."""
    mesh = spmd.make_mesh(**MESH)
    report = {
        name: collectives(lowered(model, mesh, layers).compile(), mesh=mesh)
        for name, model in models(mesh, layers).items()
    }
    kinds = {name: llama_block.kinds(one) for name, one in report.items()}
    times(mesh, 1, 1)  # imports, and caches of ours
    found = times(mesh, layers, repeats, collect)
    return {
        "layers": layers,
        "mesh": MESH,
        "counts": {name: one.counts for name, one in report.items()},
        "bytes": {name: one.total_bytes for name, one in report.items()},
        "trace_lower_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in found.items()},
        "ratio": {opponent: ratios(found, opponent) for opponent in ("hand", "unchecked")},
        "checker": shares(mesh, layers, repeats, collect),
        "same": all(one == kinds["hand" + (INSIDE if name.endswith(INSIDE) else "")] for name, one in kinds.items()),
    }


def show(result: dict[str, Any]) -> None:
    """One table."""
    mesh = " x ".join(f"{axis}{n}" for axis, n in result["mesh"].items())
    print(f"{result['layers']} layers, forward and backward, {mesh}, jax {jax.__version__}, {SIZES}")
    print(f"{'':19}{'trace+lower':>12}{'/ hand':>8}{'/ unchecked':>13}{'MiB/device':>12}  collectives")
    for name, counts in result["counts"].items():
        sent = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        checked, unchecked = (result["ratio"][opponent][name] for opponent in ("hand", "unchecked"))
        times_and_bytes = f"{result['trace_lower_ms'][name]:9.0f} ms{checked:8.2f}{unchecked:13.2f}"
        print(f"{name:19}{times_and_bytes}{result['bytes'][name] / MiB:12.3f}  {sent}")
    worst = max(ratio for name, ratio in result["ratio"]["unchecked"].items() if name.startswith("spmd"))
    parts = "; ".join(f"{name} {part:.0%}" for name, part in result["checker"].items())
    print(f"checker's part of the trace, at most {MOST_CHECKER:.0%}: {parts}")
    print(f"trace + lower / unchecked hand, at most {MOST_CHECKED}: {worst:.2f}")
    print("identical collectives and bytes" if result["same"] else "DIFFERENT collectives or bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="turns, each of all versions")
    parser.add_argument("--quick", action="store_true", help="4 layers, three turns")
    parser.add_argument("--collect", action="store_true", help="let the garbage collector run meanwhile")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    result = compare(*((4, 3) if options.quick else (options.layers, options.repeats)), options.collect)
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    limits = {"hand": MOST, "unchecked": MOST_CHECKED}
    slow = [name for opponent, most in limits.items() for name, ratio in result["ratio"][opponent].items()
            if name.startswith("spmd") and ratio > most]  # fmt: skip
    return 0 if result["same"] and not slow and max(result["checker"].values()) <= MOST_CHECKER else 1


if __name__ == "__main__":
    sys.exit(main())
