"""The 405B example against the formulas of its parallelism, at full size."""

import importlib.util
import time
from pathlib import Path

import jax
import pytest

import spmd

PATH = Path(__file__).resolve().parents[2] / "examples" / "llama405b.py"
DP, FSDP, TP = 16, 128, 8
SIZES = {"l": 126, "m": 16384, "h": 128, "g": 8, "k": 128, "f": 53248, "v": 128256}
BATCH, LENGTH = 2048, 8192


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("llama405b", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def explained(example):
    start = time.perf_counter()
    mesh = spmd.make_mesh(dp=DP, fsdp=FSDP, tp=TP, abstract=True)
    args = example.arguments(mesh, SIZES, BATCH, LENGTH)
    found = spmd.explain(example.make_step(example.make_loss(mesh)), *args, mesh=mesh, hardware="h100")
    return found, args, time.perf_counter() - start


def sent(found, kind, axis, **wanted) -> int:
    return sum(
        c.total_bytes
        for c in found.collectives
        if (c.kind, c.axes) == (kind, (axis,)) and all(getattr(c, k) == v for k, v in wanted.items())
    )


def test_it_comes_out_on_a_laptop(explained):
    found, args, seconds = explained
    assert sum(x.size for x in jax.tree.leaves(args[0])) == 405_853_388_800
    assert seconds < 30
    assert found.compiled is None and found.unwritten == () and found.written.boundary == ()


def test_the_weights_move_as_zero_3_says(explained):
    """P(d-1)/d for the forward gathers, those of the layers once more for remat, once for the gradients."""
    found, args, _ = explained
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree) if x.ndim > 1 + (x.shape[0] == SIZES["l"]))
    layers = count(args[0]["layers"])
    every = layers + args[0]["embed"].size + args[0]["unembed"].size
    share = lambda parameters: 2 * parameters // TP * (FSDP - 1) // FSDP
    assert sent(found, "all_gather", "fsdp", phase="forward") == share(every)
    assert sent(found, "all_gather", "fsdp", recomputed=True) == share(layers)
    assert sent(found, "psum_scatter", "fsdp") == share(every)
    assert sent(found, "psum", "dp") == 2 * 2 * every // TP // FSDP * (DP - 1) // DP


def test_the_stream_moves_as_sequence_parallelism_says(explained):
    """Per layer 2 gathers and 2 scatters forward and the same backward, 8 A (t-1)/t, and 3 more for remat."""
    found, _, _ = explained
    once = 2 * BATCH // (DP * FSDP) * LENGTH * SIZES["m"] * (TP - 1) // TP
    gathers, scatters = (sent(found, kind, "tp") for kind in ("all_gather", "psum_scatter"))
    assert gathers == once * ((2 + 2 + 2) * SIZES["l"] + 2)  # two more: the last norm's, and backward the table's
    assert scatters == once * ((2 + 2 + 1) * SIZES["l"] + 2)


def test_the_work_is_six_flops_per_parameter_and_token(explained):
    """And two more for remat, and attention's own products: 12 m s per token and layer, 16 with remat."""
    found, args, _ = explained
    tokens = BATCH * LENGTH / (DP * FSDP * TP)
    matrices = sum(x.size for x in jax.tree.leaves(args[0]) if x.ndim > 2) + args[0]["unembed"].size
    layers = matrices - args[0]["unembed"].size
    attention = 4 * SIZES["m"] * LENGTH * SIZES["l"] * tokens
    [(dtype, flops)] = found.written.matmul_flops.items()
    assert dtype == "bfloat16"
    down = 2 * tokens * SIZES["l"] * SIZES["m"] * SIZES["f"]  # whose product remat need not compute again
    assert flops == pytest.approx(6 * matrices * tokens + 2 * layers * tokens - down + 4 * attention, rel=1e-3)


# -------------------- any mesh


@pytest.mark.parametrize(
    ("mesh", "ticks"), [({"fsdp": 128, "pp": 16, "tp": 8}, 143), ({"fsdp": 256, "cp": 8, "tp": 8}, 126)]
)
def test_the_bound_of_a_mesh_is_just_below_its_trace(example, mesh, ticks):
    """`search` refuses a bound that is above. One that is far below would not keep it from tracing."""
    same = lambda one: all(one[axis] == mesh.get(axis, 1) for axis in one)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        found = spmd.search(example.build, devices=16_384, axes=example.AXES, hardware="h100", where=same)
    plan = example.Plan(**{axis: mesh.get(axis, 1) for axis in example.AXES}, rows=BATCH, length=LENGTH)
    assert found.traced == 1 and plan.turns == ticks
    assert (
        0.9 < example.least(plan).seconds(found.best.mesh, spmd.accelerators.hardware("h100")) / found.best.seconds <= 1
    )
    assert found.best.peak < 0.9 * 80e9
    if "pp" in mesh:  # docs/pages/which-mesh.md has these figures
        assert found.best.seconds == pytest.approx(7.15, rel=0.005) and found.best.mfu == pytest.approx(
            0.365, rel=0.005
        )


def test_layers_are_rounds_of_the_pipeline(example):
    """126 layers and two slots that do nothing: 8 rounds of 16 micro-batches on 16 stages."""
    plan = example.Plan(1, 128, 1, 8, 16, BATCH, LENGTH)
    assert plan.turns == spmd.parallel.pipeline_schedule(16, 16, 8).ticks and plan.config().slots == 128
    assert example.Plan(1, 16, 1, 8, 128, BATCH, LENGTH).turns == 128 + 127


def test_a_mesh_that_does_not_divide_the_rows_is_impossible(example):
    with pytest.raises(spmd.errors.Impossible, match="divide 2,048 rows"):
        example.build(spmd.make_mesh(fsdp=512, pp=32, abstract=True))
