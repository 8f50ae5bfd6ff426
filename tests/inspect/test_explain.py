"""`explain`: both views, what it accepts, what it prints, and that it traces and compiles once."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import all_gather, einsum, explain
from spmd.inspect import collectives
from tests.inspect.harness import DEVICES, compiled_gradient, f32
from tests.inspect.programs import MESH, arguments, make_loss, make_mlp

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
    assert (
        abstract.written.total_bytes
        == abstract.total_bytes
        == sum(one.total_bytes for one in with_devices.collectives if one.written)
    )
    assert any("needs devices" in line for line in abstract.missing)
    assert "needs devices" in str(abstract)


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
    assert one.text == 'psum("8 16 {U:tp} -> 8 16")' and one.note == "dot_general adds up what is divided over tp"


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


def test_collectives_alone_agree():
    mlp = make_mlp(DEVICES)
    args = arguments(DEVICES, "float32")
    assert collectives(mlp, *args) == explain(mlp, *args).compiled
