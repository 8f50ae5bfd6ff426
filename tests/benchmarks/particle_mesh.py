"""A step of `examples/particle_mesh.py` on 8 virtual CPU devices, beside the same step by JaxPM on jaxDecomp.

    pip install "jaxpm==0.1.6" "jaxdecomp>=0.3,<0.4" packaging "setuptools<81"
    python tests/benchmarks/particle_mesh.py [--n 128] [--json FILE]

Drift, kick, drift, with the same factors, of as many particles as grid points, from the same random field. JaxPM keeps
each particle on the device where it began, and gives blocks a margin as wide as particles have moved: `halo_size` is
twice that, the smallest that is right here, which is the quickest for it. The example sends particles to the block that
they are in, if it touches the one that they leave, and its margin is one cell however far they go in the end. JaxPM
takes slopes by differences and does not undo the smoothing of a grid, so the forces differ a little on the scale of a
cell.

Prints the bytes that a device sends, the temporary memory of the compiled program, and times: both take turns, minimum
and median of a step, and the minimum of what it takes of the processors. Exits with 1 where the densities after a step
are not alike, where a step of the example takes more than 1.1 of the time of JaxPM's, or where it sends more bytes. At
128 cubed a step of the example takes less than half of JaxPM's time, though it also moves particles between devices and
works on room for half as many again. Nearly all of JaxPM's time goes to the eight points around each particle, which it
finds by three numbers each: this is slow on CPUs, and the figures say nothing about GPUs. Without JaxPM it says what is
missing, and exits with 0. It was run with jax 0.10; JaxPM was not tried with jax 0.12.
"""

import argparse
import functools
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from examples.particle_mesh import GRID, Universe
from spmd.inspect import collectives

MiB = 2**20
MESHES = {"2x4": (2, 4), "8x1": (8, 1)}
FIRST, SECOND = 0.1, 0.19  # the first of ten steps
NEEDED = ("jaxpm", "jaxdecomp", "jax_cosmo", "packaging", "pkg_resources")
INSTALL = '"jaxpm==0.1.6" "jaxdecomp>=0.3,<0.4" packaging "setuptools<81"'


def jaxpm() -> Any:
    """JaxPM 0.1.6 calls `shard_map` as JAX before 0.8 has it, with a last argument that is empty here."""
    from jax.experimental.shard_map import shard_map
    from jaxpm import distributed, painting

    called = lambda f, mesh, in_specs, out_specs, check=False, auto=frozenset(): shard_map(
        f, mesh, in_specs, out_specs, check
    )
    distributed.shard_map = called
    return painting


def jaxpm_step(n: int, margin: int, sharding: Any) -> Callable[..., Any]:
    """The step of the example with the forces of JaxPM, of displacements from where particles began."""
    from jaxpm.pm import pm_forces

    @jax.jit
    def step(x: Any, p: Any, start: Any, stop: Any) -> Any:
        middle = (start + stop) / 2
        x = x + p * (middle - start) / start**1.5
        how = {"paint_absolute_pos": False, "halo_size": 2 * margin, "sharding": sharding}
        p = p + pm_forces(x, mesh_shape=(n,) * 3, **how) * (stop**1.5 - start**1.5) / middle
        return x + p * (stop - middle) / stop**1.5, p

    return step


def displacements(u: Universe, white: Any, sharding: Any) -> tuple[Any, Any]:
    """The particles of the example as JaxPM has them: in the order of the points where they began."""
    x, p, owner = (np.asarray(y) for y in u.begin(white))
    n = round(x[owner >= 0].shape[0] ** (1 / 3))
    a, b = sharding.mesh.devices.shape
    rows = (y[owner >= 0].reshape(a, b, n // a, n // b, n, 3) for y in (x, p))
    x, p = (y.transpose(0, 2, 1, 3, 4, 5).reshape(n, n, n, 3) for y in rows)
    points = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1)
    return tuple(jax.device_put(y.astype(np.float32), sharding) for y in (x - points, p))


def density(painting: Any, x: Any, margin: int, sharding: Any) -> Any:
    return np.asarray(painting.cic_paint_dx(x, halo_size=2 * margin, sharding=sharding)) - 1


def times(versions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step, and of all processors together; the versions take turns, in another order each time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for run in versions.values():
        jax.block_until_ready(run())
    order = np.random.default_rng(0)
    for _ in range(repeats):
        for name in map(str, order.permutation(list(versions))):
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(versions[name]())
            found[name].append((time.perf_counter() - start, time.process_time() - used))
    return found


def compare(n: int, place: str, repeats: int) -> dict[str, Any]:
    """A step of both on one mesh."""
    painting = jaxpm()
    mesh = spmd.make_mesh(**dict(zip("ab", MESHES[place], strict=True)))
    u, sharding = Universe(n, mesh), jax.NamedSharding(mesh, jax.P("a", "b"))
    white = spmd.shard(jax.random.normal(jax.random.key(0), (n,) * 3), GRID, mesh=mesh)
    span = jnp.float32(FIRST), jnp.float32(SECOND)
    ours, theirs = u.begin(white), displacements(u, white, sharding)
    far = float(jnp.abs(theirs[0]).max()) * SECOND / FIRST
    margin = math.ceil(far) + 1
    step = jaxpm_step(n, margin, sharding)
    given = {"spmd": (u.step, ours), "JaxPM": (step, theirs)}
    programs = {name: fn.lower(*state, *span).compile() for name, (fn, state) in given.items()}
    runs = {name: functools.partial(programs[name], *state, *span) for name, (_, state) in given.items()}
    timed = times(runs, repeats)
    after, away, _ = u.measured(*runs["spmd"]()[:3])
    assert not int(away), "particles had no room where they went"
    wanted = density(painting, runs["JaxPM"]()[0], margin, sharding)
    found: dict[str, Any] = {"n": n, "place": place, "margin": margin, "farthest": far}
    found["difference"] = float(np.linalg.norm(np.asarray(after) - wanted) / np.linalg.norm(wanted))
    for name, compiled in programs.items():
        report = collectives(compiled, mesh=mesh)
        found[name] = {
            "ms_min": 1e3 * min(wall for wall, _ in timed[name]),
            "ms_median": 1e3 * statistics.median(wall for wall, _ in timed[name]),
            "ms_processors": 1e3 * min(used for _, used in timed[name]),
            "bytes": report.total_bytes,
            "counts": report.counts,
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        }
    return found


def faults(row: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    who, ours, theirs = f"{row['n']}^3 on {row['place']}", row["spmd"], row["JaxPM"]
    found = [f"{who}: the densities differ by {row['difference']:.2f}"] if row["difference"] > 0.1 else []
    for key, most in {"ms_min": 1.1, "bytes": 1.0}.items():
        if ours[key] > most * theirs[key]:
            found.append(f"{who}: {key} is {ours[key] / theirs[key]:.2f} of that of JaxPM")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=128, help="grid points and particles in each direction (128)")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="only this mesh")
    parser.add_argument("--repeats", type=int, default=11, help="repeats of each (11)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    o = parser.parse_args()
    spmd.use_cpu_devices(8)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"nothing is compared: {', '.join(missing)} not installed. pip install {INSTALL}")
        return 0
    print(f"jax {jax.__version__}, {jax.default_backend()}, float32, {o.repeats} repeats")
    rows = [compare(o.n, place, o.repeats) for place in o.mesh or MESHES]
    for row in rows:
        print(
            f"\n{o.n}^3, {row['place']}: particles move {row['farthest']:.1f} cells, JaxPM has a margin of {row['margin']}"
        )
        print(f"{'':8}{'ms min':>8} {'median':>8} {'cpu':>8}  {'MiB sent':>8}  {'temp MiB':>8}  collectives")
        for name in ("spmd", "JaxPM"):
            one = row[name]
            kinds = ", ".join(f"{count} {kind}" for kind, count in one["counts"].items())
            print(
                f"{name:8}{one['ms_min']:8.0f} {one['ms_median']:8.0f} {one['ms_processors']:8.0f}  "
                f"{one['bytes'] / MiB:8.2f}  {one['temp_bytes'] / MiB:8.1f}  {kinds}"
            )
        print(f"the densities after it differ by {row['difference']:.3f}")
    if o.json:
        Path(o.json).write_text(json.dumps(rows, indent=1))
    bad = [fault for row in rows for fault in faults(row)]
    print("\n" + ("\n".join(bad) or "a step of the example is at most JaxPM's in all that is judged"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
