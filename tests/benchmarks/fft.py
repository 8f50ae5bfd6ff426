"""Three-dimensional Fourier transforms on 8 virtual CPU devices: `spmd.fft` beside jaxdecomp and `jnp.fft`.

    pip install "jaxdecomp>=0.3,<0.4" packaging     # the second is not among its own requirements
    python tests/benchmarks/fft.py [--json FILE] [--quick]

complex64 on meshes of 8 x 1, 1 x 8, 2 x 4 and 4 x 2 devices, all in one spelling: `"x/a y/b z"`, its spectrum
`"kx ky/a kz/b"`. The tasks:

    forward          the spectrum in the order of the array's dimensions, divided as is cheapest
    turned           the array of the same spectrum with its dimensions in the order ky kz kx
    natural          the spectrum in the layout of the array
    round trip       there and back; also with the spectrum turned, and natural
    gradient         forward, and the gradient of its result
    real             of a real array to a half spectrum, padded so that it divides; and there and back

jaxdecomp has a setting, `transpose_axis_contiguous`: by default its spectra are turned, without it they are in order.
Each task is given to the setting whose result it is, natural order and gradients to both. It has no real transforms.

Every spectrum is compared with NumPy's, element by element. Prints the bytes that a device sends, the temporary memory
of the compiled program, and times: all versions take turns, minimum and median of a call, and the minimum of what it
takes of the processors, which says more on a machine that is not idle. Without jaxdecomp its rows are left out. "parts"
is not a transform: three one-dimensional transforms of what a device holds and the exchanges, without any transpose
between them, which no program can do without.

Exits with 1 where a result is wrong; where `spmd` sends more than jaxdecomp, in more collectives, has temporaries larger by
more than a shard (XLA gives the pieces of an exchange a buffer of their own or not) or needs more time by the minimum; where a real transform sends more than the padded half of a complex one; or where
forward is less than 6 times faster than `jnp.fft.fftn` though the parts alone are more.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd.fft import fft, ifft, irfft, rfft
from spmd.inspect import collectives

MiB = 2**20
MESHES = {"8x1": (8, 1), "1x8": (1, 8), "2x4": (2, 4), "4x2": (4, 2)}
TASKS = ("forward", "turned", "natural", "round trip", "round trip, turned", "round trip, natural", "gradient")
REAL = ("real", "real, round trip")
ARRAY, SPECTRUM, NATURAL, TURNED = "x/a y/b z", "kx ky/a kz/b", "kx/a ky/b kz", "ky/a kz/b kx"
IN_ORDER = (0, 1, 2)
Order = tuple[int, ...]


@dataclass(frozen=True)
class Version:
    """A way to do a task.

    Attributes:
      run: What is called.
      order: How to transpose its result so that the dimensions of a spectrum are in the order kx ky kz.
      program: What `run` compiled to, where that must be known beforehand.
    """

    run: Callable[[Any], Any]
    order: Order = IN_ORDER
    program: Any = None

    def compiled(self, x: Any) -> Any:
        return self.program or self.run.lower(x).compile()


Versions = dict[str, Version]


def pulled(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradient of a transform along its own result: the transform of the transform."""

    def both(x: Any) -> Any:
        f, pull = jax.vjp(forward, x)
        return pull(f)[0]

    return both


def jnp_versions(sharding: Any) -> Versions:
    """XLA's own partitioning; the spectrum always lies as the array does."""
    jitted = lambda fn: Version(jax.jit(fn, in_shardings=sharding, out_shardings=sharding))
    there, both = jitted(jnp.fft.fftn), jitted(lambda x: jnp.fft.ifftn(jnp.fft.fftn(x)))
    real, back = jitted(jnp.fft.rfftn), jitted(lambda x: jnp.fft.irfftn(jnp.fft.rfftn(x), x.shape))
    found = {"forward": there, "natural": there, "round trip": both, "round trip, natural": both}
    return {**found, "gradient": jitted(pulled(jnp.fft.fftn)), "real": real, "real, round trip": back}


def spmd_versions(mesh: Any, n: int) -> Versions:
    def turned(x: Any) -> Any:
        return spmd.rearrange(fft(x, f"{ARRAY} -> {SPECTRUM}"), f"{SPECTRUM} -> {TURNED}")

    def untwisted(x: Any) -> Any:
        return ifft(spmd.rearrange(turned(x), f"{TURNED} -> {SPECTRUM}"), f"{SPECTRUM} -> {ARRAY}")

    go = lambda spectrum: lambda x: fft(x, f"{ARRAY} -> {spectrum}")
    back = lambda spectrum: lambda x: ifft(go(spectrum)(x), f"{spectrum} -> {ARRAY}")
    half = lambda x: rfft(x, f"{ARRAY} -> {SPECTRUM}", pad=True)
    whole = lambda x: irfft(half(x), f"{SPECTRUM} -> {ARRAY}", z=n, pad=True)
    made = lambda out, fn: spmd.kernel(f"{ARRAY} -> {out}", mesh=mesh)(fn)
    return {
        "forward": Version(made(SPECTRUM, go(SPECTRUM))),
        "turned": Version(made(TURNED, turned), (2, 0, 1)),
        "natural": Version(made(NATURAL, go(NATURAL))),
        "round trip": Version(made(ARRAY, back(SPECTRUM))),
        "round trip, turned": Version(made(ARRAY, untwisted)),
        "round trip, natural": Version(made(ARRAY, back(NATURAL))),
        "gradient": Version(jax.jit(pulled(made(SPECTRUM, go(SPECTRUM))))),
        "real": Version(made(SPECTRUM, half)),
        "real, round trip": Version(made(ARRAY, whole)),
    }


@contextlib.contextmanager
def jaxdecomp_setting(contiguous: bool) -> Iterator[None]:
    """It is read while a program is traced."""
    import jaxdecomp

    before = jaxdecomp.config.transpose_axis_contiguous
    jax.clear_caches()
    jaxdecomp.config.update("transpose_axis_contiguous", contiguous)
    try:
        yield
    finally:
        jaxdecomp.config.update("transpose_axis_contiguous", before)
        jax.clear_caches()


def jaxdecomp_versions(sharding: Any, x: Any, contiguous: bool) -> Versions:
    """Natural order is a transpose and XLA's change of layout."""
    from jaxdecomp.fft import pfft3d, pifft3d

    with jaxdecomp_setting(contiguous):
        order, placed = spectrum_order(jax.jit(lambda x: pfft3d(x), in_shardings=sharding), sharding)
        inverse = tuple(int(i) for i in np.argsort(order))
        at = jax.lax.with_sharding_constraint
        natural = lambda x: at(at(pfft3d(x), placed).transpose(order), sharding)
        away = lambda spectrum: at(spectrum.transpose(inverse), placed)
        both = ", turned" if contiguous else ""
        ways: dict[str, tuple[Callable[[Any], Any], Order]] = {
            "turned" if contiguous else "forward": (lambda x: pfft3d(x), order),
            "natural": (natural, IN_ORDER),
            f"round trip{both}": (lambda x: pifft3d(pfft3d(x)), IN_ORDER),
            "round trip, natural": (lambda x: pifft3d(away(natural(x))), IN_ORDER),
            "gradient": (pulled(pfft3d), IN_ORDER),
        }
        programs = {
            task: (jax.jit(fn, in_shardings=sharding).lower(x).compile(), turn) for task, (fn, turn) in ways.items()
        }
    return {task: Version(program, turn, program) for task, (program, turn) in programs.items()}


def parts_versions(mesh: Any, sharding: Any) -> Versions:
    """What every forward transform consists of: its time is a floor for this machine."""

    def parts(x: Any) -> Any:
        for _ in range(3):
            x = jnp.fft.fft(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        for axis in ("b", "a"):
            x = jax.lax.all_to_all(x, axis, 0, 0, tiled=True) if mesh.shape[axis] > 1 else x
        return x

    mapped = jax.shard_map(parts, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    return {"forward": Version(jax.jit(mapped))}


def spectrum_order(transform: Any, sharding: Any) -> tuple[Order, Any]:
    """The permutation that brings its spectrum's dimensions into the order of the array's, found by trying, and where
    it leaves the spectrum."""
    x = example(16, sharding)
    out = transform(x)
    wanted = np.fft.fftn(np.asarray(x))
    fits = lambda order: np.allclose(np.asarray(out).transpose(order), wanted, atol=1e-2)
    return next(order for order in itertools.permutations(range(3)) if fits(order)), out.sharding


def example(n: int, sharding: Any, real: bool = False) -> Any:
    parts = np.random.default_rng(0).normal(size=(2, n, n, n)).astype(np.float32)
    return jax.device_put(parts[0] if real else parts[0] + 1j * parts[1], sharding)


# -------------------- measuring


def error(task: str, version: Version, x: Any) -> float:
    """The largest error, relative to the largest number, element by element."""
    out, x = np.asarray(version.run(x)), np.asarray(x)
    if "round trip" in task:
        wanted = x
    elif task == "gradient":
        wanted = np.fft.fftn(np.fft.fftn(x))
    elif task == "real":
        wanted = np.fft.rfftn(x)
        out = out[..., : wanted.shape[-1]]
    else:
        wanted, out = np.fft.fftn(x), out.transpose(version.order)
    return float(np.abs(out - wanted).max() / np.abs(wanted).max())


def times(versions: Versions, x: Any, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a call, and of all processors together; the versions take turns, in another order each time, since
    the one before leaves its caches."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    for version in versions.values():
        for _ in range(2):
            jax.block_until_ready(version.run(x))
    order = np.random.default_rng(0)
    for _ in range(repeats):
        for name in order.permutation(list(versions)):
            run = versions[str(name)].run
            start, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(x))
            found[str(name)].append((time.perf_counter() - start, time.process_time() - used))
    return found


def compare(n: int, place: str, repeats: int, with_jaxdecomp: bool) -> list[dict[str, Any]]:
    """One size on one mesh: a row for each task and version."""
    a, b = MESHES[place]
    mesh = spmd.make_mesh(a=a, b=b)
    sharding = spmd.Layout(ARRAY).sharding(mesh)
    x, real = example(n, sharding), example(n, sharding, real=True)
    sets: dict[str, Versions] = {}
    for name, contiguous in (("jaxdecomp", True), ("jaxdecomp, in order", False)) if with_jaxdecomp else ():
        sets[name] = jaxdecomp_versions(jax.NamedSharding(mesh, jax.P("a", "b")), x, contiguous)
    sets = {"jnp": jnp_versions(sharding), "spmd": spmd_versions(mesh, n), **sets}
    sets["parts"] = parts_versions(mesh, sharding)
    rows = []
    for task in (*TASKS, *REAL):
        given = real if task in REAL else x
        versions = {name: found[task] for name, found in sets.items() if task in found}
        timed = times(versions, given, repeats)
        for name, version in versions.items():
            program = version.compiled(given)
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
                    "collectives": sum(report.counts.values()),
                    "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                    "error": 0.0 if name == "parts" else error(task, version, given),
                }
            )
    return rows


JUDGED = ("ms_min", "bytes", "collectives", "temp_bytes")


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    found = []
    for row in rows:
        who = f"{row['n']}^3 on {row['place']}, {row['task']}"
        if row["error"] > 1e-5:
            found.append(f"{who}: {row['version']} is wrong by {row['error']:.1e}")
        if row["version"] == "spmd":
            same = {r["version"]: r for r in rows if all(r[k] == row[k] for k in ("n", "place", "task"))}
            for name in (name for name in same if name.startswith("jaxdecomp")):
                for key in JUDGED:
                    spare = 8 * row["n"] ** 3 // 8 if key == "temp_bytes" else 0
                    if row[key] > same[name][key] + spare:
                        found.append(f"{who}: {key} is {row[key] / same[name][key]:.2f} of that of {name}")
            if row["task"] == "forward":
                slow, parts = same["jnp"]["ms_min"], same["parts"]["ms_min"]
                if slow / row["ms_min"] < 6 <= slow / parts:
                    why = f"only {slow / row['ms_min']:.1f} times faster than jnp, its parts {slow / parts:.1f} times"
                    found.append(f"{who}: {why}")
            found += halved(row, rows, who)
    return found


def halved(row: dict[str, Any], rows: list[dict[str, Any]], who: str) -> list[str]:
    """A real transform that sends more than the part of a complex one that its padded half spectrum is."""
    complex_task = {"real": "forward", "real, round trip": "round trip"}.get(row["task"])
    if complex_task is None:
        return []
    b, n = MESHES[row["place"]][1], row["n"]
    entries = -(-(n // 2 + 1) // b) * b
    alike = {"n": n, "place": row["place"], "task": complex_task, "version": "spmd"}
    whole = next(r["bytes"] for r in rows if alike.items() <= r.items())
    share = entries / n
    return [f"{who}: sends {row['bytes'] / whole:.3f} of the complex one"] if row["bytes"] > whole * share else []


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
            print(f"{'':42}{'ms min':>8} {'median':>8} {'cpu':>8}  {'MiB sent':>8}  {'temp MiB':>8}  collectives")
            found = compare(n, place, repeats, with_jaxdecomp)
            rows += found
            for row in found:
                kinds = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
                print(
                    f"{row['task']:20}  {row['version']:20}{row['ms_min']:8.1f} {row['ms_median']:8.1f} "
                    f"{row['ms_processors']:8.1f}  {row['bytes'] / MiB:8.2f}  {row['temp_bytes'] / MiB:8.2f}  {kinds}"
                )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    bad = [fault for fault in faults(rows) if not (options.quick and ("ms_min" in fault or "faster" in fault))]
    print("\n" + ("\n".join(bad) or "spmd is at most jaxdecomp's in all that is judged"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
