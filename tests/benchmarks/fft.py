"""Three-dimensional Fourier transforms on 8 virtual CPU devices: `spmd.fft` beside jaxdecomp and `jnp.fft.fftn`.

    pip install "jaxdecomp>=0.3,<0.4" packaging     # the second is not among its own requirements
    python tests/benchmarks/fft.py [--json FILE] [--quick]

complex64 in slabs (8 x 1) and pencils (2 x 4, 4 x 2): forward and there and back; each also with the spectrum in natural
order, that is in the layout of the array, where the others may leave it transposed. Prints the bytes that a device
sends, the temporary memory of the compiled program, and times: all versions take turns, minimum and median of a call,
and the minimum of what it takes of the processors, which says more on a machine that is not idle. Without jaxdecomp its
rows are left out. "parts" is not a transform: three one-dimensional transforms of what a device holds and the
exchanges, without any transpose between them, which no program can do without.

Exits with 1 where a result is wrong, where `spmd` sends more than jaxdecomp or needs more time by the minimum, or where
forward is less than 6 times faster than `jnp.fft.fftn` though the parts alone are more.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd.fft import fft, ifft
from spmd.inspect import collectives

MiB = 2**20
MESHES = {"slab 8x1": (8, 1), "pencil 2x4": (2, 4), "pencil 4x2": (4, 2)}
TASKS = ("forward", "forward, natural", "round trip", "round trip, natural")
# The layouts of the array and of its spectrum, where the spectrum may lie as it likes.
LAYOUTS = {"slab": ("x/a y z", "kx ky/a kz"), "pencil": ("x/a y/b z", "kx ky/a kz/b")}

Version = Any  # a jitted function, or a kernel


def jnp_versions(sharding: Any) -> dict[str, Version]:
    """XLA's own partitioning; the spectrum always lies as the array does."""
    forward = jax.jit(jnp.fft.fftn, in_shardings=sharding, out_shardings=sharding)
    both = jax.jit(lambda x: jnp.fft.ifftn(jnp.fft.fftn(x)), in_shardings=sharding, out_shardings=sharding)
    return dict(zip(TASKS, (forward, forward, both, both), strict=True))


def spmd_versions(kind: str, mesh: Any) -> dict[str, Version]:
    there, away = LAYOUTS[kind]
    dims = [word.split("/")[1:] for word in there.split()]
    natural = " ".join("/".join((f"k{n}", *axes)) for n, axes in zip("xyz", dims, strict=True))
    make = lambda pattern, fn: spmd.kernel(pattern, mesh=mesh)(fn)
    go = lambda spectrum: make(f"{there} -> {spectrum}", lambda x: fft(x, f"{there} -> {spectrum}"))
    back = lambda spectrum: make(
        f"{there} -> {there}", lambda x: ifft(fft(x, f"{there} -> {spectrum}"), f"{spectrum} -> {there}")
    )
    return dict(zip(TASKS, (go(away), go(natural), back(away), back(natural)), strict=True))


def jaxdecomp_versions(sharding: Any) -> dict[str, Version]:
    """Its spectrum has its dimensions in another order; natural order is a transpose and XLA's change of layout."""
    from jaxdecomp.fft import pfft3d, pifft3d

    jitted = lambda fn: jax.jit(fn, in_shardings=sharding)
    order, placed = spectrum_order(jitted(pfft3d), sharding)
    inverse = tuple(int(i) for i in np.argsort(order))
    at = jax.lax.with_sharding_constraint
    natural = lambda x: at(at(pfft3d(x), placed).transpose(order), sharding)
    away = lambda spectrum: at(spectrum.transpose(inverse), placed)
    both = jitted(lambda x: pifft3d(pfft3d(x)))
    ways = jitted(pfft3d), jitted(natural), both, jitted(lambda x: pifft3d(away(natural(x))))
    return dict(zip(TASKS, ways, strict=True))


def parts_versions(kind: str, mesh: Any, sharding: Any) -> dict[str, Version]:
    """What every forward transform consists of: its time is a floor for this machine."""

    def parts(x: Any) -> Any:
        for _ in range(3):
            x = jnp.fft.fft(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        for axis in ("a",) if kind == "slab" else ("b", "a"):
            x = jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
        return x

    return {"forward": jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec))}


def spectrum_order(transform: Any, sharding: Any) -> tuple[tuple[int, ...], Any]:
    """The permutation that brings its spectrum's dimensions into the order of the array's, found by trying, and where
    it leaves the spectrum."""
    x = example(16, sharding)
    out = transform(x)
    wanted = np.fft.fftn(np.asarray(x))
    fits = lambda order: np.allclose(np.asarray(out).transpose(order), wanted, atol=1e-2)
    return next(order for order in itertools.permutations(range(3)) if fits(order)), out.sharding


def example(n: int, sharding: Any) -> Any:
    parts = np.random.default_rng(0).normal(size=(2, n, n, n)).astype(np.float32)
    return jax.device_put(parts[0] + 1j * parts[1], sharding)


# -------------------- measuring


def error(task: str, out: Any, x: Any) -> float:
    """The largest error, relative to the largest number; a spectrum in an order of its own is compared by its sorted
    magnitudes."""
    if task.startswith("round"):
        return float(np.abs(np.asarray(out) - np.asarray(x)).max())
    wanted = np.fft.fftn(np.asarray(x))
    out, top = np.asarray(out), np.abs(wanted).max()
    if "natural" not in task:
        out, wanted = (np.sort(np.abs(y), axis=None) for y in (out, wanted))
    return float(np.abs(out - wanted).max() / top)


def times(versions: dict[str, Version], x: Any, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a call, and of all processors together; the versions take turns, in another order each time, since
    the one before leaves its caches."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for fn in versions.values():
        for _ in range(2):
            jax.block_until_ready(fn(x))
    order = np.random.default_rng(0)
    for _ in range(repeats):
        for name in order.permutation(list(versions)):
            fn = versions[str(name)]
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(fn(x))
            found[str(name)].append((time.perf_counter() - start, time.process_time() - used))
    return found


def compare(n: int, place: str, repeats: int, with_jaxdecomp: bool) -> list[dict[str, Any]]:
    """One size on one mesh: a row for each task and version."""
    a, b = MESHES[place]
    mesh = spmd.make_mesh(a=a, b=b)
    kind = place.split()[0]
    sharding = spmd.Layout(LAYOUTS[kind][0]).sharding(mesh)
    x = example(n, sharding)
    sets = {"jnp": jnp_versions(sharding), "spmd": spmd_versions(kind, mesh)}
    if with_jaxdecomp:
        sets["jaxdecomp"] = jaxdecomp_versions(jax.NamedSharding(mesh, jax.P("a", "b")))
    sets["parts"] = parts_versions(kind, mesh, sharding)
    rows = []
    for task in TASKS:
        versions = {name: found[task] for name, found in sets.items() if task in found}
        timed = times(versions, x, repeats)
        for name, fn in versions.items():
            program = fn.lower(x).compile()
            report = collectives(program, mesh=mesh)
            rows.append(
                {
                    "n": n,
                    "place": place,
                    "task": task,
                    "version": name,
                    "ms_min": 1e3 * min(wall for wall, _ in timed[name]),
                    "ms_median": 1e3 * statistics.median(wall for wall, _ in timed[name]),
                    "ms_processors": 1e3 * min(used for _, used in timed[name]),
                    "bytes": report.total_bytes,
                    "counts": report.counts,
                    "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                    "error": 0.0 if name == "parts" else error(task, fn(x), x),
                }
            )
    return rows


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    found = []
    for row in rows:
        who = f"{row['n']}^3 {row['place']}, {row['task']}"
        if row["error"] > 1e-5:
            found.append(f"{who}: {row['version']} is wrong by {row['error']:.1e}")
        if row["version"] == "spmd":
            same = {r["version"]: r for r in rows if all(r[k] == row[k] for k in ("n", "place", "task"))}
            for key in ("ms_min", "bytes") if "jaxdecomp" in same else ():
                if row[key] > same["jaxdecomp"][key]:
                    found.append(f"{who}: {key} is {row[key] / same['jaxdecomp'][key]:.2f} of jaxdecomp's")
            if row["task"] == "forward":
                slow, parts = same["jnp"]["ms_min"], same["parts"]["ms_min"]
                if slow / row["ms_min"] < 6 <= slow / parts:
                    why = f"only {slow / row['ms_min']:.1f} times faster than jnp, its parts {slow / parts:.1f} times"
                    found.append(f"{who}: {why}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--quick", action="store_true", help="64 cubed, three repeats; times are not judged")
    parser.add_argument("--repeats", type=int, default=None, help="repeats of each (31)")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    with_jaxdecomp = all(importlib.util.find_spec(name) for name in ("jaxdecomp", "packaging"))
    if not with_jaxdecomp:
        print('jaxdecomp is left out: pip install "jaxdecomp>=0.3,<0.4" packaging')
    repeats = options.repeats or (3 if options.quick else 31)
    rows: list[dict[str, Any]] = []
    print(f"jax {jax.__version__}, {jax.default_backend()}, complex64, {repeats} repeats")
    for n in (64,) if options.quick else (64, 128):
        for place in MESHES:
            print(f"\n{n}^3, {place}: shard {8 * n**3 // 8 / MiB:g} MiB")
            print(f"{'':32}{'ms min':>8} {'median':>8} {'cpu':>8}  {'MiB sent':>8}  {'temp MiB':>8}  collectives")
            found = compare(n, place, repeats, with_jaxdecomp)
            rows += found
            for row in found:
                kinds = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
                print(
                    f"{row['task']:20}  {row['version']:10}{row['ms_min']:8.1f} {row['ms_median']:8.1f} "
                    f"{row['ms_processors']:8.1f}  {row['bytes'] / MiB:8.2f}  {row['temp_bytes'] / MiB:8.2f}  {kinds}"
                )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    bad = [fault for fault in faults(rows) if not (options.quick and ("ms_min" in fault or "faster" in fault))]
    print("\n" + ("\n".join(bad) or "spmd is at most jaxdecomp's in all that is judged"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
