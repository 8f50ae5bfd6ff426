"""`explain`: both views, what it accepts, what it prints, and that it traces and compiles once.

`SPMD_UPDATE_GOLDEN=1 python -m pytest tests/inspect/test_explain.py -k golden` writes the printed tables anew.
"""

from __future__ import annotations

import functools
import html.parser
import io
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import all_gather, einsum, explain
from spmd.inspect import Explanation, collectives
from spmd.inspect._collectives import collectives_of_text
from tests.inspect.programs import MESH, arguments, make_loss, make_mlp

GOLDEN = Path(__file__).with_name("explanations.txt")
DEVICES = spmd.make_mesh(dp=2, tp=4)
WIDTHS = (60, 100, 140)


def f32(*shape, spec=None, mesh=DEVICES):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=None if spec is None else NamedSharding(mesh, spec))


@functools.cache
def compiled_gradient() -> Explanation:
    return explain(make_loss(DEVICES), *arguments(DEVICES, "float32"), hardware="h100")


# -------------------- both views


def test_each_compiled_collective_is_found_in_the_program():
    """Loops, a checkpoint, forward and backward; x alone lies elsewhere."""
    report = compiled_gradient()
    assert {one.kind for one in report.unwritten} == {"ppermute"}
    for one in report.collectives:
        assert one.note == "", one
        if one.written:
            assert one.runs == one.count
            assert all(c.kind == one.kind and c.axes == one.axes for c in one.compiled)
            assert sum(c.total_bytes for c in one.compiled) == one.total_bytes
    assert report.total_bytes == report.compiled.total_bytes
    assert report.counts == report.compiled.counts
    seen = [(one.kind, one.axes, one.count, one.phase, one.recomputed) for one in report.collectives if one.written]
    assert seen.count(("all_gather", ("tp",), 6, "forward", False)) == 1
    assert seen.count(("all_gather", ("tp",), 6, "backward", True)) == 1
    assert seen.count(("psum_scatter", ("dp",), 6, "backward", False)) == 2


def test_without_devices_the_written_view_is_the_same():
    abstract = explain(make_loss(MESH), *arguments(MESH, "float32"), hardware="h100")
    with_devices = compiled_gradient()
    assert abstract.written.collectives == with_devices.written.collectives
    assert abstract.compiled is None and abstract.unwritten == ()
    assert abstract.memory.temporaries is None and abstract.memory.arguments == with_devices.memory.arguments
    assert abstract.total_bytes == sum(one.total_bytes for one in with_devices.collectives if one.written)
    assert any("need devices" in line for line in abstract.missing)
    assert "need devices" in str(abstract)


def test_a_boundary_that_moves_an_argument_is_flagged_with_its_name():
    mlp = make_mlp(DEVICES)
    x, w_in, w_out = arguments(DEVICES, "float32")
    report = explain(mlp, x, w_in, w_out)
    (moved,) = report.unwritten
    assert moved.text == 'moved to enter a kernel: mlp: x from "b s/dp d" to "b/dp s/tp d"'
    assert not moved.written and moved.total_bytes > 0
    assert "NOBODY WROTE" in str(report)
    at_home = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spmd.Layout("b/dp s/tp d").sharding(DEVICES))
    quiet = explain(mlp, at_home, w_in, w_out)
    assert quiet.unwritten == ()
    assert "NOBODY WROTE" not in str(quiet)
    assert "nothing: every compiled collective belongs to a written one" in str(quiet)


def test_a_shard_map_over_some_axes_leaves_the_others_to_the_compiler():
    partly = jax.shard_map(
        lambda x: jax.lax.psum(x, "dp"), mesh=DEVICES, in_specs=P("dp"), out_specs=P(), axis_names={"dp"}
    )
    report = explain(jax.jit(partly), f32(8, 16, spec=P("dp", "tp")))
    assert report.written.boundary == () and report.unwritten == ()
    assert report.total_bytes == report.compiled.total_bytes == 4 * 4 * 4  # a quarter of the 16 columns


def test_what_is_only_cut_on_its_way_into_a_kernel_is_no_cause_of_what_is_sent():
    both = spmd.kernel("b/dp d/tp, b/dp d/tp -> b/dp d/tp", mesh=DEVICES)(lambda x, y: x * y)
    report = explain(both, f32(8, 16, spec=P("tp", "dp")), f32(8, 16, spec=P()))
    assert report.unwritten and all("kernel: y" not in one.text for one in report.unwritten)
    assert '    "b/dp d/tp", 64 B' in report.table(width=40).splitlines()  # broken between layouts, not in them
    assert 'y from "b d" to "b/dp d/tp", nothing is sent' in str(report)


def test_auto_mode_is_the_compilers_and_says_for_which_call():
    report = explain(make_mlp(DEVICES).auto, *arguments(DEVICES, "float32"))
    assert report.written.collectives == () and len(report.unwritten) == len(report.collectives) > 0
    # JAX 0.12 names a gather after the array that is gathered, 0.10 after the call.
    assert all(one.text.startswith("auto mode, for ") for one in report.unwritten)
    assert any("einsum(" in one.text for one in report.unwritten)


def test_what_the_compiler_adds_outside_kernels_is_flagged():
    fn = jax.jit(lambda a, b: jnp.sum(a @ b), in_shardings=(P(None, "tp"), P("tp")), out_shardings=P())
    with jax.set_mesh(DEVICES):
        report = explain(fn, f32(8, 64), f32(64, 16))
    (one,) = report.unwritten
    assert (one.kind, one.axes, one.written) == ("psum", ("tp",), False)
    assert one.text.startswith("the compiler's own, for ")


def test_what_the_compiler_removes_is_said_and_not_counted():
    """The cotangent of a sum is the same number everywhere, so nobody needs to gather it."""

    @spmd.kernel("b/dp f/tp, f/tp d -> b/dp d/tp", mesh=DEVICES)
    def product(x, w):
        return einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d/tp")

    at_home = (f32(8, 16, spec=P("dp", "tp")), f32(16, 24, spec=P("tp")))
    report = explain(jax.grad(lambda x, w: product(x, w).sum()), *at_home)
    (one,) = report.collectives
    assert (one.kind, one.phase, one.count, one.runs, one.note) == (
        "all_gather",
        "backward",
        1,
        0,
        "the compiler removed it",
    )
    assert one.total_bytes == report.total_bytes == 0 and report.counts == {} and len(report.compiled) == 0
    assert "the compiler removed it" in str(report)


def test_a_raw_collective_is_matched_by_its_line():
    body = lambda x: jax.lax.psum(x, "tp")
    fn = jax.jit(jax.shard_map(body, mesh=DEVICES, in_specs=P("dp", "tp"), out_specs=P("dp")))
    (one,) = explain(fn, f32(16, 32)).collectives
    assert (one.written, one.kind, one.axes, one.runs) == (True, "psum", ("tp",), 1)


def test_one_trace_and_one_compilation(monkeypatch):
    traced, compiled = [], []

    @spmd.kernel("b/dp d/tp -> b/dp d", mesh=DEVICES)
    def body(x):
        traced.append(1)
        return all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a, **k: compiled.append(1) or compile_(self, *a, **k)
    )
    for fn in (body, jax.jit(lambda x: body(x) * 2), lambda x: body(x) * 3):
        traced.clear(), compiled.clear()
        explain(fn, f32(8, 16))
        assert (len(traced), len(compiled)) <= (1, 1)
        assert len(compiled) == 1
    explain(body, f32(8, 16), compiled=False)
    assert len(compiled) == 1
    program = body.lower(f32(8, 16)).compile()
    assert explain(body, f32(8, 16), compiled=program).counts == {"all_gather": 1}
    assert len(compiled) == 2


@pytest.mark.parametrize("fn", [lambda x: x + 1, spmd.kernel("b/dp d -> b/dp d", mesh=DEVICES)(lambda x: x + 1)])
def test_nothing_sent_is_said_once(fn):
    report = explain(fn, f32(8, 16))
    for text in (str(report), report._repr_html_()):
        assert text.count("no collectives") == 1 and "nobody wrote" not in text


# -------------------- what it takes


def test_whatever_can_be_called_is_taken():
    @spmd.kernel("b/dp d/tp, d/tp -> b/dp", mesh=DEVICES)
    def dot(x, w):
        return einsum(x, w, "b/dp d/tp, d/tp -> b/dp")

    x, w = f32(8, 16), f32(16)
    jitted = jax.jit(lambda x, w: dot(x, w).sum())
    arrays = (jnp.ones((8, 16)), np.ones(16, np.float32))
    for fn, args in [
        (dot, (x, w)),
        (dot, arrays),
        (lambda x, w: dot(x, w), (x, w)),
        (jitted, (x, w)),
        (functools.partial(jitted, arrays[0]), arrays[1:]),
        (dot.trace(x, w), ()),
        (jitted.trace(x, w), ()),
    ]:
        report = explain(fn, *args)
        assert [(one.kind, one.axes) for one in report.collectives if one.written] == [("psum", ("tp",))], fn
        assert report.compiled is not None
    for fn in (dot.lower(x, w), dot.lower(x, w).compile(), jitted.lower(x, w).compile()):
        report = explain(fn, hardware="h100")
        assert report.written is None and report.time is None
        assert "psum" in report.counts and "written view" in str(report)
        assert "NOBODY WROTE" not in str(report) and "compiler's own" not in str(report)  # who wrote it is not known
    assert explain(dot, x, w, compiled=dot.lower(x, w).compile()).compiled.counts == {"psum": 1}
    assert explain(jax.grad(lambda x, w: dot(x, w).sum()), x, w).by_phase().keys() <= {"forward", "backward"}


def test_partial_sums_between_kernels():
    """JAX's unreduced type stands on a boundary, on axes of type Explicit."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    part = spmd.kernel("b/dp d/tp, d/tp f -> b/dp f {U:tp}", mesh=mesh)(
        lambda x, w: einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")
    )
    whole = spmd.kernel("b/dp f {U:tp} -> b/dp f", mesh=mesh)(lambda x: spmd.psum(x, "b/dp f {U:tp} -> b/dp f"))
    args = f32(8, 16, spec=P("dp", "tp"), mesh=mesh), f32(16, 6, spec=P("tp"), mesh=mesh)
    report = explain(lambda x, w: whole(part(x, w)), *args)
    assert [(one.kind, one.axes, one.runs, one.total_bytes) for one in report.collectives] == [
        ("psum", ("tp",), 1, 2 * 3 * (4 * 6 * 4) // 4)
    ]
    assert report.written.boundary == ()
    assert "sum(0-3)" in str(spmd.visualize(f32(8, 6, spec=P("dp", unreduced={"tp"}), mesh=mesh)))
    with pytest.raises(spmd.testing.Mismatch, match="not over"):
        spmd.testing.assert_sharded({"w": f32(8, 16, spec=P("dp", unreduced={"tp"}), mesh=mesh)})


def test_what_a_program_is_called():
    double = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: 2 * x)
    double.__name__ = "double"
    assert explain(double, f32(8, 16)).name == "double"
    assert explain(double.auto, f32(8, 16)).name == "double.auto"
    assert explain(functools.partial(double), f32(8, 16)).name == "double"


def test_arguments_that_are_no_arrays_are_constants():
    @spmd.kernel("b/dp d/tp -> b/dp d", mesh=DEVICES)
    def body(x):
        return all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    def step(config, x, *, scale):
        return body(x) * scale if config["on"] == "yes" else x

    report = explain(step, {"on": "yes"}, f32(8, 16), scale=2.0)
    assert report.counts == {"all_gather": 1}
    assert explain(step, {"on": "no"}, f32(8, 16), scale=2.0).collectives == ()


def test_the_mesh_may_come_from_outside():
    @spmd.kernel("b/dp d/tp -> b/dp d")
    def body(x):
        return all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    for mesh in (MESH, DEVICES):
        report = explain(body, f32(8, 16), mesh=mesh)
        assert report.mesh == {"dp": 2, "tp": 4}
        assert [one.axes for one in report.collectives] == [("tp",)]
        assert (report.compiled is None) == (mesh is MESH)
    own = spmd.kernel("b/dp -> b/dp", mesh=DEVICES)(lambda x: x)
    with pytest.raises(spmd.MeshError, match="mesh of its own"):
        explain(own, f32(8), mesh=spmd.make_mesh(dp=4, tp=2))


def test_donated_memory_is_counted_once():
    fn = lambda x: x + 1
    plain = explain(jax.jit(fn), f32(64, 64)).memory
    donated = explain(jax.jit(fn, donate_argnums=0), f32(64, 64)).memory
    assert plain.aliased == 0 and donated.aliased == 64 * 64 * 4
    assert donated.total == plain.total - 64 * 64 * 4


def test_donated_memory_is_known_without_devices():
    step = jax.jit(lambda state, x: (state + x, (x * x).sum()), donate_argnums=0)
    twice = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=MESH, donate="x")(lambda x: 2 * x)
    x = f32(8, 16, spec=P("dp", "tp"), mesh=MESH)
    for report in (explain(step, x, x), explain(step.trace(x, x)), explain(twice, x)):
        memory = report.memory
        assert memory.temporaries is None and 0 < memory.aliased == memory.outputs - memory.outputs % 64
        assert "donated" in str(report) and report.compiled is None
    assert explain(lambda *args: step(*args), x, x).memory.aliased == 0  # inside a program nothing is donated


# -------------------- cost


def test_time_is_the_models():
    report = compiled_gradient()
    time, h100 = report.time, spmd.hardware("h100")
    assert time.compute == pytest.approx(sum(n / h100.peak(d) for d, n in report.written.matmul_flops.items()))
    assert time.memory == pytest.approx(report.written.hbm_bytes / h100.hbm_bandwidth)
    by_hand = sum(
        one.runs * h100.collective_seconds(one.kind, one.bytes, one.axes, report.mesh) for one in report.collectives
    )
    assert time.communication == pytest.approx(by_hand) == pytest.approx(sum(time.by_axis.values()))
    assert time.serial == pytest.approx(time.compute + time.memory + time.communication)
    assert time.overlapped == getattr(time, time.bound) == max(time.compute, time.memory, time.communication)


def test_a_faster_link_shortens_its_axis_alone():
    machine = spmd.Hardware("lab", {"float32": 1e12}, 1e11, 1e9, spmd.Link(1e9), links={"tp": spmd.Link(4e9)})
    slow = spmd.Hardware("slow", {"float32": 1e12}, 1e11, 1e9, spmd.Link(1e9))
    times = [explain(make_mlp(), *arguments(), hardware=one).time.by_axis for one in (machine, slow)]
    assert times[0]["tp"] == pytest.approx(times[1]["tp"] / 4)
    assert times[0]["dp"] == pytest.approx(times[1]["dp"])


# -------------------- what it prints


HLO = r"""HloModule jit_mlp, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[8,256,512], w: bf16[256,768]) -> bf16[8,1024,512] {
  %x = bf16[8,256,512]{2,1,0} parameter(0)
  %w = bf16[256,768]{1,0} parameter(1)
  %all-gather.1 = bf16[8,1024,512]{2,1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}, metadata={op_name="jit(mlp)/shard_map/all_gather(x, \"b/dp s/tp d -> b/dp s d\")/all_gather"}
  %all-gather.2 = bf16[512,768]{1,0} all-gather(%w), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, metadata={op_name="jit(mlp)/shard_map/all_gather(x, \"d/dp f/tp -> d f/tp\")/all_gather"}
  %all-reduce.3 = bf16[8,1024,512]{2,1,0} all-reduce(%all-gather.1), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(mlp)/shard_map/einsum(x, y, \"b/dp s f/tp, f/tp d -> b/dp s/tp d\")/reduce_scatter"}
  %all-to-all.4 = bf16[8,256,512]{2,1,0} all-to-all(%x), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(mlp)/transpose" source_file="train.py" source_line=41}
  ROOT %all-gather.5 = bf16[8,1024,512]{2,1,0} all-gather(%all-to-all.4), channel_id=5, replica_groups=[2,4]<=[8], dimensions={1}, metadata={op_name=""}
}
"""


@functools.cache
def printed(name: str) -> Explanation:
    if name == "gradient":
        return explain(make_loss(), *arguments(MESH), hardware="h100")
    if name == "forward":
        return explain(make_mlp(), *arguments())
    if name == "nothing":
        return explain(jax.jit(lambda x: x + 1), f32(4), compiled=False)
    program = explain(make_mlp(), *arguments(MESH))
    report = collectives_of_text(HLO, mesh=program.mesh)
    machine = spmd.hardware("tpu-v5p")
    return Explanation("mlp", program.mesh, program.written, report, machine=machine, platform="gpu")


NAMES = ("gradient", "forward", "changed", "nothing")


def goldens() -> str:
    parts = [f"=== {name} {width}\n{printed(name).table(width)}\n" for name in NAMES for width in WIDTHS]
    return "\n".join(parts)


def test_golden_tables():
    if os.environ.get("SPMD_UPDATE_GOLDEN"):
        GOLDEN.write_text(goldens())
    assert goldens() == GOLDEN.read_text()


@pytest.mark.parametrize("width", [40, 60, 77, 100, 140])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_wider_than_the_terminal(name, width):
    lines = printed(name).table(width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    kinds = {one.kind for one in printed(name).collectives}
    assert all(any(kind in line for line in lines) for kind in kinds)


def test_what_the_compiler_changed_is_flagged():
    report = printed("changed")
    notes = {one.text.partition("(")[0] + one.axes[0]: one.note for one in report.collectives if one.written}
    assert notes["einsumtp"] == "compiled as psum"
    assert [one.note for one in report.collectives if one.runs == 0] == ["the compiler removed it"]
    assert [one.kind for one in report.unwritten] == ["all_to_all", "all_gather"]
    assert [one.where for one in report.unwritten] == ["train.py:41", ""]
    text = " ".join(report.table(100).split())
    assert "! all_to_all" in text and "it does not say for what" in text


def test_the_flag_goes_with_what_is_flagged():
    """The same text without the strangers has none."""
    program = explain(make_mlp(), *arguments(MESH))
    text = "\n".join(line for line in HLO.splitlines() if "all-to-all.4 =" not in line and "all-gather.5" not in line)
    report = Explanation("mlp", program.mesh, program.written, collectives_of_text(text, mesh=program.mesh))
    assert report.unwritten == ()
    assert "NOBODY WROTE" not in str(report)


class Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.cells.append(0)
        if tag in ("td", "th"):
            self.cells[-1] += int(dict(attrs).get("colspan", 1))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_html_is_well_formed_and_says_the_same(name):
    report = printed(name)
    page = Balanced()
    page.feed(report._repr_html_())
    assert page.open == []
    assert set(page.cells) <= {7, 3}
    text = " ".join(page.text)
    for one in report.collectives:
        assert one.kind in text and one.where in text
    if report.unwritten:
        assert 'class="loud"' in report._repr_html_()
    assert "<script" not in report._repr_html_()


@pytest.mark.parametrize("width", WIDTHS)
def test_rich_prints_the_same_in_colours(width):
    console = pytest.importorskip("rich.console")
    for name in NAMES:
        out = console.Console(file=io.StringIO(), width=width, force_terminal=False)
        out.print(printed(name))
        lines = [line.rstrip() for line in out.file.getvalue().rstrip("\n").split("\n")]
        assert "\n".join(lines) == printed(name).table(width)
    colours = console.Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    colours.print(printed("changed"))
    loud = [line for line in colours.file.getvalue().split("\n") if "\x1b[1;31m" in line]
    assert any("NOBODY WROTE" in line for line in loud) and any("! all_to_all" in line for line in loud)


def test_rich_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    report = printed("gradient")
    assert str(report) and report._repr_html_() and repr(report)


@pytest.mark.parametrize("name", NAMES)
def test_plain_values_are_json(name):
    report = printed(name)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["total_bytes"] == report.total_bytes == sum(one["total_bytes"] for one in plain["collectives"])
    assert [one["where"] for one in plain["collectives"]] == [one.where for one in report.collectives]
    assert plain["mesh"] == report.mesh


def test_collectives_alone_agree():
    mlp = make_mlp(DEVICES)
    args = arguments(DEVICES, "float32")
    assert collectives(mlp, *args) == explain(mlp, *args).compiled
