"""Changes of layout: the planner beside XLA's own resharding, on all pairs of layouts of a 2x2x2 mesh.

    python tests/benchmarks/relayout.py [--quick] [--alike] [--json FILE] [--dims 2 3] [--mesh 3 4]
    python tests/benchmarks/relayout.py --mesh 2 4 --sums      partial sums: a program that adds up, and XLA's
    python tests/benchmarks/relayout.py --table    meshes of 1 to 5 axes, equal and unequal, without and with sums
    python tests/benchmarks/relayout.py --target h100_sxm.txtpb --pairs 300    as `spmd explain --target`: nothing is run

For every pair (2352 of 512 x 512 float32, 11130 of 64 x 64 x 64; with `--quick` a sample of each, with `--alike` one of
those that differ only in the names of axes and the order of dimensions; other meshes by `--mesh`) both programs are
compiled: `spmd.shard`'s planned one, and the identity with XLA's own resharding. A table compares bytes per device,
read from the compiled programs, with the lower bound, temporary memory and collectives; the pairs where XLA is worst and
a random sample are then timed in turns. Exits with 1 where a pair sends more than XLA, or other than its plan says.

Times of a model are those of H100s, whose nodes hold the last axis. "planned for it" is the plan that
`prefer="latency"` makes for this hardware.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns at each pair that it replicates

import jax
import numpy as np

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd.comm.planner import program
from spmd.inspect import collectives

AXES = "xyzwv"
MESH = {"x": 2, "y": 2, "z": 2}
SHAPES = {2: (512, 512), 3: (64, 64, 64)}
DIVISIBLE = {2: (240, 240), 3: (120, 120, 120)}  # by axes of 2 to 5 together
NAMES = "abc"
TABLE = [(4,), (6,), (2, 2), (2, 3), (4, 2), (3, 4), (2, 2, 2), (2, 4, 3), (2, 2, 2, 2), (2, 3, 2, 2), (2, 2, 2, 2, 2)]
LARGE = {2: (7680, 7680)}  # 225 MiB; only compiled


@dataclass(frozen=True)
class Row:
    """One pair: bytes per device, collectives and temporary bytes, ours and XLA's."""

    source: str
    target: str
    bound: int
    rounds: int
    ours: int
    xla: int
    planned: int
    count: int
    xla_count: int
    temp: int
    xla_temp: int
    ends: int
    seconds: float = 0.0
    xla_seconds: float = 0.0
    fastest: float = 0.0


def layouts(dims: int, axes: Iterable[str] = MESH) -> list[str]:
    """Every layout that uses each axis at most once, in any order."""
    axes = tuple(axes)
    found = []
    for count in range(len(axes) + 1):
        for used in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), dims - 1):
                runs = [used[i:j] for i, j in itertools.pairwise((0, *cuts, count))]
                found.append(" ".join("/".join([name, *run]) for name, run in zip(NAMES, runs, strict=False)))
    return found


def one_of_each_kind(pairs: list[tuple[str, str]], sizes: dict[str, int]) -> list[tuple[str, str]]:
    """One of the pairs that become each other when axes of one size change names and dimensions change places."""
    found: dict[Any, tuple[str, str]] = {}
    for pair in pairs:
        ends = [[word.split("/")[1:] for word in layout.split()] for layout in pair]
        forms = []
        for order in itertools.permutations(range(len(ends[0]))):
            names: dict[str, str] = {}
            for end in ends:
                for i in order:
                    for axis in end[i]:
                        names.setdefault(axis, f"{len(names)}:{sizes[axis]}")
            forms.append(tuple(tuple(tuple(names[axis] for axis in end[i]) for i in order) for end in ends))
        found.setdefault(min(forms), pair)
    return list(found.values())


def programs(source: str, target: str, shape: tuple[int, ...], mesh: Any) -> tuple[Any, Any]:
    """The planned program and XLA's, not yet compiled."""
    before, after = (spmd.Layout(layout).sharding(mesh) for layout in (source, target))
    identity = jax.jit(lambda x: x, in_shardings=before, out_shardings=after)
    return program(before, after, shape, 4) or identity, identity


def sums(source: str, axis: str, target: str, shape: tuple[int, ...], mesh: Any) -> tuple[Any, Any, Any]:
    """Terms along an axis, in front: the program that adds them up by a plan, XLA's, and the terms."""
    before = f"{source} {{U:{axis}}}"

    def body(x: Any) -> Any:
        return spmd.relayout(
            spmd.reduce(x, f"p/{axis} {source} -> {before}", "sum"), f"{before} -> {target}", to="invarying"
        )

    kernel = spmd.kernel(f"p/{axis} {source} -> {target}", mesh=mesh)(body)
    ends = [spmd.Layout(layout).sharding(mesh) for layout in (f"p/{axis} {source}", target)]
    xla = jax.jit(lambda x: x.sum(0), in_shardings=ends[0], out_shardings=ends[1])
    return kernel, xla, jax.ShapeDtypeStruct((mesh.shape[axis], *shape), np.float32, sharding=ends[0])


def two_levels(mesh: Any) -> spmd.accelerators.Hardware:
    """H100s whose nodes hold the last axis of the mesh."""
    return replace(spmd.accelerators.hardware("h100"), node_size=list(mesh.shape.values())[-1])


def estimated(found: Any, mesh: Any) -> float:
    """The time of collectives by the model of a machine with two levels."""
    links, sizes = two_levels(mesh), dict(mesh.shape)
    return sum(one.count * links.collective_seconds(one.kind, one.bytes, one.axes, sizes) for one in found)


def measure(source: str, target: str, shape: tuple[int, ...], mesh: Any, summed: str = "") -> Row:
    """Both programs of one pair, compiled."""
    if summed:
        *both, x = sums(source, summed, target, shape, mesh)
    else:
        x = jax.ShapeDtypeStruct(shape, np.float32, sharding=spmd.Layout(source).sharding(mesh))
        both = programs(source, target, shape, mesh)
    compiled = [one.lower(x).compile() for one in both]
    sent = [collectives(one, mesh=mesh) for one in compiled]
    source = f"{source} {{U:{summed}}}" if summed else source
    temp = [one.memory_analysis().temp_size_in_bytes for one in compiled]
    sizes = dict(zip(NAMES, shape, strict=False))
    plan = spmd.plan(f"{source} -> {target}", sizes=sizes, mesh=mesh)
    rounds = spmd.plan(f"{source} -> {target}", sizes=sizes, mesh=mesh, prefer="bytes")
    ends = 4 * max(math.prod(spmd.Layout(one).local_shape(shape, mesh)) for one in (source, target))
    ours, xla = (one.total_bytes for one in sent)
    count, xla_count = (sum(one.counts.values()) for one in sent)
    times = [estimated(one, mesh) for one in sent]
    hardware = {"prefer": "latency", "hardware": two_levels(mesh)}
    fastest = spmd.plan(f"{source} -> {target}", sizes=sizes, mesh=mesh, **hardware).seconds
    sides = ours, xla, plan.bytes, count, xla_count, *temp, ends, *times, fastest
    return Row(source, target, plan.lower_bound, rounds.bytes, *sides)


def seconds(
    source: str, target: str, shape: tuple[int, ...], mesh: Any, repeats: int
) -> tuple[list[float], list[float]]:
    """Times of both programs, in turns."""
    x = spmd.shard(np.arange(math.prod(shape), dtype=np.float32).reshape(shape), source, mesh=mesh)
    both = programs(source, target, shape, mesh)
    found: tuple[list[float], list[float]] = ([], [])
    for one in both:
        one(x).block_until_ready()
    for _ in range(repeats):
        for one, times in zip(both, found, strict=True):
            start = time.perf_counter()
            one(x).block_until_ready()
            times.append(time.perf_counter() - start)
    return found


def spread(values: list[float]) -> str:
    """Geometric mean, median, 90th and 99th percentile, maximum."""
    values = sorted(values)
    at = lambda share: values[min(len(values) - 1, int(share * len(values)))]
    mean = math.exp(statistics.fmean(math.log(v) for v in values))
    return f"{mean:7.3f} {statistics.median(values):7.3f} {at(0.9):7.2f} {at(0.99):7.2f} {values[-1]:7.2f}"


def show(dims: int, rows: list[Row], shape: tuple[int, ...]) -> None:
    """The table of one rank."""
    total = sum(row.bound for row in rows)
    some = [row for row in rows if row.bound]
    sizes = "x".join(map(str, shape))
    print(f"\n{dims}-D, {sizes} float32: {len(rows)} pairs, {len(rows) - len(some)} move nothing")
    print(f"{'bytes / lower bound':22}{'sum':>8}{'geomean':>8}{'median':>8}{'p90':>8}{'p99':>8}{'max':>8}  collectives")
    for name, sent, count in (
        ("XLA", lambda row: row.xla, lambda row: row.xla_count),
        ("planned", lambda row: row.ours, lambda row: row.count),
        ('prefer="bytes"', lambda row: row.rounds, None),
    ):
        counts = {n: sum(count(row) == n for row in rows) for n in range(5)} if count else {}
        shown = ", ".join(f"{k} x {n}" for n, k in counts.items() if k)
        print(f"{name:22}{sum(map(sent, rows)) / total:8.4f}{spread([sent(r) / r.bound for r in some])}  {shown}")
    for name, temp in (("XLA", lambda row: row.xla_temp), ("planned", lambda row: row.temp)):
        over = [temp(row) / row.ends for row in some]
        print(f"temporary memory / larger end, {name:8} median {statistics.median(over):.2f}, max {max(over):.2f}")
    saved = [row.xla / row.ours for row in some]
    fewer = sum(row.ours < row.xla for row in rows)
    print(
        f"XLA / planned         {'':8}{spread(saved)}  fewer bytes on {fewer} pairs, more on {sum(map(is_worse, rows))}"
    )
    levels = [row.xla_seconds / row.seconds for row in some if row.seconds]
    print(f"XLA / planned, by the time of a model with two levels{spread(levels)}")
    levels = [row.xla_seconds / row.fastest for row in some if row.fastest]
    print(f"XLA / planned for it, by the same                    {spread(levels)}")
    print("worst pairs of XLA, and what is left above the bound:")
    for row in [*sorted(some, key=lambda r: -r.xla / r.bound)[:3], *sorted(some, key=lambda r: -r.ours / r.bound)[:3]]:
        print(
            f"  {row.source + ' -> ' + row.target:32} XLA {row.xla / row.bound:6.2f}   planned {row.ours / row.bound:5.2f}"
        )


def drawn(dims: int, axes: dict[str, int], count: int | None, *, alike: bool = False) -> list[tuple[str, str]]:
    """Pairs of layouts: all, one of each kind, or so many of them by the seed 0."""
    found = layouts(dims, axes)
    if alike:
        pairs = one_of_each_kind(list(itertools.permutations(found, 2)), axes)
        return pairs if count is None or count >= len(pairs) else random.Random(0).sample(pairs, count)
    most = len(found) * (len(found) - 1)
    numbers = range(most) if count is None or count >= most else random.Random(0).sample(range(most), count)
    places = (divmod(number, len(found) - 1) for number in numbers)
    return [(found[i], found[j + (j >= i)]) for i, j in places]


def free_axes(layout: str, axes: Iterable[str]) -> list[str]:
    return [axis for axis in axes if f"/{axis}" not in layout]


def rows_of(
    pairs: list[tuple[str, str]], axes: dict[str, int], shape: tuple[int, ...], mesh: Any, *, summed: bool
) -> list[Row]:
    """The pairs, measured; with `summed` those whose source has an axis to add up along."""
    dice, rows = random.Random(2), []
    for source, target in pairs:
        free = free_axes(source, axes) if summed else [""]
        if free:
            rows.append(measure(source, target, shape, mesh, dice.choice(free)))
    return rows


def table(count: int) -> list[Row]:
    """A row for each mesh, without and with partial sums, as the pages have it. Returns the rows that are wrong."""
    print(
        "| mesh | sums | pairs | XLA / bound | planned / bound | planned / XLA, bytes | time | planned for it | worse |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    wrong: list[Row] = []
    for sizes, summed in itertools.product(TABLE, (False, True)):
        axes = dict(zip(AXES, sizes, strict=False))
        mesh = spmd.make_mesh(**axes)
        pairs = drawn(2, axes, 8 * count if summed else count)
        pairs = [pair for pair in pairs if not summed or free_axes(pair[0], axes)][:count]
        rows = rows_of(pairs, axes, LARGE[2], mesh, summed=summed)
        moving = [row for row in rows if row.bound]
        bound, ours, xla = (sum(getattr(row, name) for row in moving) for name in ("bound", "ours", "xla"))
        mean = lambda name, some=moving: math.exp(
            statistics.fmean(math.log(getattr(row, name) / row.xla_seconds) for row in some if row.xla_seconds)
        )
        wrong += (worse := [row for row in rows if is_worse(row) or row.ours != row.planned])
        said = [" x ".join(map(str, sizes)), "yes" if summed else "no", str(len(rows))]
        said += [f"{xla / bound:.2f}", f"{ours / bound:.3f}", f"{ours / xla:.2f}"]
        said += [f"{mean(name):.2f}" for name in ("seconds", "fastest")]
        print("|", " | ".join([*said, str(len(worse))]), "|", flush=True)
    return wrong


def is_worse(row: Row) -> bool:
    return row.ours > row.xla


def show_times(name: str, pairs: list[tuple[str, str]], shape: tuple[int, ...], mesh: Any, repeats: int) -> list[Any]:
    """Times of some pairs, and their geometric mean."""
    print(f"\n{name}, {'x'.join(map(str, shape))} float32, {repeats} repeats in turns: ms min (median)")
    found, ratios = [], []
    for source, target in pairs:
        ours, xla = seconds(source, target, shape, mesh, repeats)
        ratios.append(min(xla) / min(ours))
        found.append({"source": source, "target": target, "ours": ours, "xla": xla})
        shown = [f"{1e3 * min(t):7.2f} ({1e3 * statistics.median(t):7.2f})" for t in (xla, ours)]
        print(f"  {source + ' -> ' + target:32} XLA {shown[0]}   planned {shown[1]}   {ratios[-1]:5.1f}x")
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"  XLA / planned, by minima: geometric mean {mean:.2f}, worst {min(ratios):.2f}, best {max(ratios):.2f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a sample of the pairs, fewer repeats")
    parser.add_argument("--dims", type=int, nargs="*", default=[2, 3], choices=[2, 3], help="which ranks (2 3)")
    parser.add_argument("--pairs", type=int, help="how many pairs of each rank (all; with --quick 60)")
    parser.add_argument("--alike", action="store_true", help="one of the pairs that differ in names and order only")
    parser.add_argument("--mesh", type=int, nargs="+", help="the sizes of other axes (2 2 2)")
    parser.add_argument("--sums", action="store_true", help="sources that are partial sums along an axis")
    parser.add_argument(
        "--table", action="store_true", help="a row for each of many meshes, 30 pairs of two dimensions"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--target", metavar="WHAT", help="devices that are not here: h100_sxm.txtpb, v5p:2x2x2")
    options = parser.parse_args()
    axes = dict(zip(AXES, options.mesh, strict=False)) if options.mesh else MESH
    shapes = DIVISIBLE if options.mesh else SHAPES
    count = math.prod(axes.values())
    spmd.use_cpu_devices(max(map(math.prod, TABLE)) if options.table else count)
    if options.table:
        print(f"jax {jax.__version__}, cpu, {'x'.join(map(str, LARGE[2]))} float32, nothing is run")
        for row in (wrong := table(options.pairs or 30)):
            print(f"WRONG: {row}")
        return 1 if wrong else 0
    mesh = spmd.make_mesh(devices=options.target and spmd.topology_devices(options.target, count), **axes)
    repeats, size = (5, 512) if options.quick else (15, 2048)
    print(f"jax {jax.__version__}, {options.target or 'cpu'}, mesh {', '.join(f'{a}={n}' for a, n in axes.items())}")
    report: dict[str, Any] = {"jax": jax.__version__}
    wrong = []
    for dims in options.dims:
        pairs = drawn(dims, axes, options.pairs or (60 if options.quick else None), alike=options.alike)
        rows = rows_of(pairs, axes, shapes[dims], mesh, summed=options.sums)
        show(dims, rows, shapes[dims])
        report[f"{dims}-D"] = [asdict(row) for row in rows]
        wrong += [row for row in rows if is_worse(row) or row.ours != row.planned]
        if dims == 2 and not options.mesh and not options.target and not options.sums:
            some = [row for row in rows if row.bound]
            worst = sorted(some, key=lambda r: -r.xla / r.ours)[: 4 if options.quick else 8]
            dice = random.Random(1).sample(some, min(len(some), 4 if options.quick else 24))
            for name, chosen in (("where XLA sends most", worst), ("a random sample", dice)):
                ends = [(row.source, row.target) for row in chosen]
                report[name] = show_times(name, ends, (size, size), mesh, repeats)
    for row in wrong:
        print(f"WRONG: {row}")
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
