"""`search` against every mesh traced, against compiled programs, and against the book's closed formulas."""

import dataclasses
import itertools
import math

import jax
import pytest

import spmd
from spmd.inspect import collectives
from tests.searcher.programs import FLAT, SIZES, attending, bounded, mlp

AXES = ("dp", "fsdp", "tp")


@pytest.fixture(scope="module")
def every():
    return spmd.search(mlp, devices=8, axes=AXES, hardware="h100")


def test_every_mesh_of_eight_devices_sends_the_predicted_bytes(every):
    """Of every factorisation, each compiled for eight virtual devices: to the byte, on each axis."""
    assert len(every.rows) == every.considered == 10 and every.proven
    for row in every.rows:
        fn, args = mlp(spmd.make_mesh(**row.mesh))
        found: dict[str, int] = {}
        for one in collectives(fn, *args):
            found["/".join(one.axes)] = found.get("/".join(one.axes), 0) + one.total_bytes
        assert found == {axes: size for axes, size in row.bytes_by_axis.items() if size}, row.name


def test_scores_of_attention_exclude_no_mesh_that_a_kernel_of_it_fits():
    found = spmd.search(
        attending, devices=512, axes=("fsdp", "tp"), hardware="h100", where=lambda mesh: mesh["tp"] <= 8
    )
    assert len(found.rows) == 4 and found.best.peak < 40e9
    assert found.best.memory.opened > 2 * found.best.memory.estimated
    assert "counted as one kernel: attention; if it is none, row 1 needs" in " ".join(str(found).split())


def test_two_searches_are_the_same(every):
    again = spmd.search(mlp, devices=8, axes=AXES, hardware="h100")
    assert str(again) == str(every) and again.to_dict() == every.to_dict()


def test_bounds_change_how_much_is_traced_and_not_what_is_found():
    every = spmd.search(mlp, devices=8, axes=AXES, hardware=FLAT)
    found = spmd.search(bounded, devices=8, axes=AXES, hardware=FLAT, top=1)
    assert found.best.mesh == every.best.mesh and found.best.seconds == every.best.seconds
    assert found.proven and found.traced + len(found.untraced) == 10
    assert found.traced < 10
    assert all(one.seconds >= found.best.seconds for one in found.untraced)
    assert all(every.row(one.mesh).seconds >= one.seconds for one in found.untraced)


def test_a_search_that_ends_early_says_so():
    found = spmd.search(mlp, devices=8, axes=AXES, hardware="h100", most=3)
    assert (found.traced, len(found.untraced), found.proven) == (3, 7, False)
    assert "others may be better" in str(found)


def test_what_excludes_is_counted(every):
    def build(mesh):
        if mesh.shape["dp"] == 4:
            raise spmd.errors.Impossible("dp is not 4.")
        return mlp(mesh, sizes={"d": 12})

    found = spmd.search(build, devices=8, axes=AXES, hardware="h100", where=lambda mesh: mesh["tp"] <= 4)
    assert found.counts == {"where": 1, "impossible": 2, "sizes": 1}  # tp=8; dp=4; 12 over fsdp=8
    assert found.considered == 10 == sum(found.counts.values()) + len(found.rows)
    assert found.why({"tp": 8}) == "tp=8 is excluded; it is left out by where=: where= leaves it out."
    assert "impossible, says build: dp is not 4." in found.why({"tp": 2, "dp": 4})
    assert "does not divide the argument (12, 64)" in found.why({"fsdp": 8})


def test_build_is_called_once_for_each_candidate():
    """It may take long: it makes the parameters' types of a large model."""
    called = []

    def build(mesh):
        called.append(tuple(mesh.shape.items()))
        return mlp(mesh)

    found = spmd.search(build, devices=8, axes=AXES, hardware="h100")
    assert len(called) == len(set(called)) == found.traced == 10


def test_memory_is_a_filter(every):
    peaks = sorted(row.peak for row in every.rows)
    rest = sorted(row.memory.arguments for row in every.rows)
    room = dataclasses.replace(spmd.accelerators.hardware("h100"), hbm_bytes=peaks[4])
    found = spmd.search(mlp, devices=8, axes=AXES, hardware=room, memory=1.0)
    assert {row.peak for row in found.rows} == {size for size in peaks if size <= peaks[4]}
    assert found.counts.get("memory at rest", 0) == sum(size > peaks[4] for size in rest)
    assert sum(found.counts.values()) == 10 - len(found.rows)


def test_what_the_trace_refuses_is_counted():
    def build(mesh):
        fn, args = mlp(mesh, sizes={"s": 6})
        return fn, tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in args)

    found = spmd.search(build, devices=4, axes=AXES, hardware="h100")
    assert found.counts == {"refused": 1} and "size 6" in found.why({"tp": 4})


@pytest.mark.parametrize("where", ["build", "trace", "where"])
def test_an_error_of_the_program_says_on_which_mesh(where):
    def wrong(*args):
        raise KeyError("dq")

    def build(mesh):
        fn, args = wrong(mesh) if where == "build" else mlp(mesh)
        return wrong if where == "trace" else fn, args

    rule = (lambda mesh: mesh["dq"] < 3) if where == "where" else None
    with pytest.raises(KeyError, match="dq") as caught:
        spmd.search(build, devices=4, axes=AXES, hardware="h100", where=rule)
    note = caught.value.__notes__[-1]
    assert note in {f"So it is on the mesh {axis}=4, which search tries." for axis in AXES}


def test_choices_are_coordinates():
    def build(mesh, dtype, scale):
        return mlp(mesh, dtype, {"b": 64 * scale})

    choices = {"dtype": ["float32", "bfloat16"], "scale": [2, 1]}
    found = spmd.search(build, devices=4, axes=("dp", "fsdp", "tp"), hardware="h100", choices=choices)
    assert found.considered == 6 * 4 and len(found.rows) == 24
    assert dict(found.best.choice) == {"dtype": "bfloat16", "scale": 1}
    other = found.row({"dp": 4}, dtype="float32", scale=2)
    assert other is not None and "dp=4 dtype=float32 scale=2 is number" in found.why(
        {"dp": 4}, dtype="float32", scale=2
    )


def test_asked_meshes_are_traced_whatever_their_bound():
    worst = {"dp": 1, "fsdp": 8, "tp": 1}
    without = spmd.search(bounded, devices=8, axes=AXES, hardware="h100", top=1)
    given = spmd.search(bounded, devices=8, axes=AXES, hardware="h100", top=1, trace=[worst, {"tp": 8}])
    assert given.row(worst) is not None and given.row({"tp": 8}) is not None and given.best.mesh == without.best.mesh


def test_progress_is_told():
    seen = []
    spmd.search(mlp, devices=4, axes=AXES, hardware="h100", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]


# --- "How to Scale Your Model", part 5: when does communication bind? ---------------------------------------------------
# Forward pass of an MLP of B tokens, sizes D and F, in bfloat16, on links of W bytes per second each way and C FLOP/s;
# a = C/W. jax-ml.github.io/scaling-book/training. The book rounds (n-1)/n up to 1; here it is exact.

A = FLAT.peak("bfloat16") / FLAT.default.bandwidth
WIDE = {"b": 2**14, "s": 64, "d": 4096, "f": 16384}
TOKENS = WIDE["b"] * WIDE["s"]


@pytest.fixture(scope="module")
def wide():
    return spmd.search(
        lambda mesh: mlp(mesh, "bfloat16", WIDE), devices=64, axes=AXES, hardware=FLAT, memory=1.0, top=99
    )


def test_fsdp_binds_below_a_tokens_per_device(wide):
    for n in (2, 8, 64):
        row = spmd.search(
            lambda mesh: mlp(mesh, "bfloat16", WIDE), devices=n, axes=("dp", "fsdp", "tp"), hardware=FLAT, memory=1.0
        ).row({"fsdp": n})
        assert row.time.communication / row.time.compute == pytest.approx(A / (TOKENS / n) * (n - 1) / n)


def test_tensor_parallelism_binds_above_f_over_a_devices(wide):
    for row in wide.rows:
        if row.mesh["dp"] == 1:
            x, y = row.mesh["fsdp"], row.mesh["tp"]
            assert row.time.by_axis.get("tp", 0.0) / row.time.compute == pytest.approx(A * (y - 1) / WIDE["f"])
            assert row.time.by_axis.get("fsdp", 0.0) / row.time.compute == pytest.approx(A * (x - 1) / TOKENS)


def test_both_are_best_where_the_formula_says():
    """X = sqrt(B N / F), where both communicate as long; the search finds the nearest power of two or its neighbour."""
    sizes = {"b": 2048, "s": 64, "d": 4096, "f": 16384}
    tokens, devices = 2048 * 64, 1024
    found = spmd.search(
        lambda mesh: mlp(mesh, "bfloat16", sizes),
        devices=devices,
        axes=AXES,
        hardware=FLAT,
        where=lambda mesh: mesh["dp"] == 1 and mesh["tp"] <= 64,
        top=99,
    )
    best = math.sqrt(tokens * devices / sizes["f"])
    assert abs(math.log2(found.best.mesh["fsdp"] / best)) <= 1
    least = 2 * math.sqrt(A**2 * devices / (tokens * sizes["f"]))  # of communication over compute: 1 at B/N = 4a^2/F
    ratio = found.best.time.communication / found.best.time.compute
    assert least * 0.9 <= ratio <= least * 1.1


def test_a_mesh_that_the_search_has_is_a_factorisation(every):
    found = [tuple(row.mesh[axis] for axis in AXES) for row in every.rows]
    wanted = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(sizes) == 8]
    assert sorted(found) == wanted
    assert SIZES["b"] % 8 == 0


def test_what_fits_no_memory_asks_for_more_of_it():
    def build(mesh):
        scaled = spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: 2 * x)
        return scaled, (jax.ShapeDtypeStruct((2**20, 2**20), "float32"),)

    with pytest.raises(spmd.errors.MeshError, match="1 with arguments that are too large\nadvice: more devices, or"):
        spmd.search(build, devices=4, axes=("dp",), hardware="h100")
