"""Halos, rolls and convolutions on 8 virtual CPU devices: `spmd.stencil` beside XLA's own partitioning.

    python tests/benchmarks/halo.py [--json FILE] [--quick]

Each computation twice: in `spmd` strings, and in plain `jnp` on whole arrays whose inputs and outputs are divided alike,
where XLA's partitioner finds the communication. Prints how many collectives a device takes part in, the bytes that it
sends, the temporary memory of the compiled programs, and times (minimum and median; both take turns). Exits with 1 where
the results differ, or where `spmd` sends more bytes or more collectives than XLA does.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd.inspect import collectives
from spmd.stencil import convolve, diff, stencil


@dataclass(frozen=True)
class Case:
    """One computation: its layout and mesh, and the two ways to write it."""

    name: str
    layout: str
    mesh: dict[str, int]
    ours: Callable[[Any], Any]
    plain: Callable[[Any], Any]


LINE, PLANE = {"a": 8}, {"a": 2, "b": 4}
STRIP, BLOCK = "x/a y", "x/a y/b"


def three_points(u: Any) -> Any:
    return u[2:] + u[:-2] - 2 * u[1:-1]


def five_points(u: Any) -> Any:
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


def rolled(u: Any, axes: tuple[int, ...]) -> Any:
    return sum(jnp.roll(u, shift, axis) for axis in axes for shift in (1, -1)) - 2 * len(axes) * u


def padded(u: Any, widths: Any, mode: str, fn: Callable[[Any], Any]) -> Any:
    return fn(jnp.pad(u, widths, mode=mode))


def convolved(u: Any, weights: Any) -> Any:
    """`lax.conv` of the whole array, zeros outside, the weights turned as a convolution has them."""
    pads = [(n // 2, (n - 1) // 2) for n in weights.shape]
    return lax.conv_general_dilated(u[None, None], jnp.flip(weights)[None, None], (1, 1), pads)[0, 0]


def cases() -> list[Case]:
    blur = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    of = lambda fn, pattern, **how: stencil(fn, pattern, **how)
    strip, block = f"1+x/a+1 y -> {STRIP}", f"1+x/a+1 1+y/b+1 -> {BLOCK}"
    return [
        Case("roll by 1", STRIP, LINE, lambda u: spmd.roll(u, "[x/a] y", 1), lambda u: jnp.roll(u, 1, 0)),
        Case("roll by 2.5 blocks", STRIP, LINE, lambda u: spmd.roll(u, "[x/a] y", 160), lambda u: jnp.roll(u, 160, 0)),
        Case("flip", STRIP, LINE, lambda u: spmd.flip(u, "[x/a] y"), lambda u: jnp.flip(u, 0)),
        Case("3 points, periodic", STRIP, LINE, of(three_points, strip), lambda u: rolled(u, (0,))),
        Case(
            "3 points, zero",
            STRIP,
            LINE,
            of(three_points, strip, edge="zero"),
            lambda u: padded(u, ((1, 1), (0, 0)), "constant", three_points),
        ),
        Case("5 points, periodic", BLOCK, PLANE, of(five_points, block, corners=False), lambda u: rolled(u, (0, 1))),
        Case(
            "5 points, edge",
            BLOCK,
            PLANE,
            of(five_points, block, edge="edge", corners=False),
            lambda u: padded(u, 1, "edge", five_points),
        ),
        Case("diff, periodic", STRIP, LINE, lambda u: diff(u, "[x/a] y"), lambda u: jnp.roll(u, -1, 0) - u),
        Case("convolution 5 x 3", STRIP, LINE, lambda u: convolve(u, blur, "[x/a] [y]"), lambda u: convolved(u, blur)),
        Case(
            "convolution 5 x 3", BLOCK, PLANE, lambda u: convolve(u, blur, "[x/a] [y/b]"), lambda u: convolved(u, blur)
        ),
    ]


def compare(case: Case, repeats: int) -> dict[str, dict[str, Any]]:
    """Both versions of a computation."""
    mesh = spmd.make_mesh(**case.mesh)
    x = spmd.shard(np.random.default_rng(1).normal(size=(512, 512)).astype(np.float32), case.layout, mesh=mesh)
    versions = {
        "spmd": spmd.kernel(f"{case.layout} -> {case.layout}", mesh=mesh)(case.ours),
        "XLA": jax.jit(case.plain, in_shardings=x.sharding, out_shardings=x.sharding),
    }
    out: dict[str, dict[str, Any]] = {}
    for name, fn in versions.items():
        program = fn.lower(x).compile()
        report = collectives(program, mesh=mesh)
        out[name] = {
            "counts": report.counts,
            "bytes": report.total_bytes,
            "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            "seconds": [],
        }
        jax.block_until_ready(fn(x))
    np.testing.assert_allclose(versions["spmd"](x), versions["XLA"](x), rtol=1e-4, atol=1e-4)
    for i in range(repeats):
        for name, fn in list(versions.items())[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(fn(x))
            out[name]["seconds"].append(time.perf_counter() - start)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="three repeats")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    results, worse = [], []
    print(f"jax {jax.__version__}, {jax.default_backend()}, 512 x 512 float32 on 8 devices")
    print(f"{'':20} {'':8} {'':5} {'sent B':>8} {'temp KiB':>9} {'us min':>8} {'median':>8}  collectives")
    for case in cases():
        found = compare(case, 3 if options.quick else 51)
        for name, row in found.items():
            counts = ", ".join(f"{n} {kind}" for kind, n in row["counts"].items()) or "none"
            low, middle = (1e6 * f(row["seconds"]) for f in (min, statistics.median))
            print(
                f"{case.name:20} {case.layout:8} {name:5} {row['bytes']:8} {row['temp_bytes'] / 1024:9.1f} "
                f"{low:8.0f} {middle:8.0f}  {counts}"
            )
        ours, theirs = found["spmd"], found["XLA"]
        if ours["bytes"] > theirs["bytes"] or sum(ours["counts"].values()) > sum(theirs["counts"].values()):
            worse.append(f"{case.name}, {case.layout}")
        results.append({"case": case.name, "layout": case.layout, **found})
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    print("spmd sends more: " + "; ".join(worse) if worse else "spmd never sends more, in bytes or in collectives")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
