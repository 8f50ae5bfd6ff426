"""The reader of compiled text, on strings: each form in which groups, types and loops are printed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from spmd._text.units import sent_bytes
from spmd.errors import SpmdError
from spmd.inspect._collectives import collectives_of_text
from spmd.inspect._hlo import parse_module, parse_shapes, shape_bytes


def test_shapes_and_bytes():
    text = "(f32[8,16]{1,0:T(8,128)(2,1)}, /*index=1*/pred[3]{0}, f8e4m3fn[5], s4[3], c64[2], token[])"
    assert [shape_bytes(*shape) for shape in parse_shapes(text)] == [512, 3, 5, 2, 16, 0]
    with pytest.raises(SpmdError, match="'quux'"):
        shape_bytes("quux", (3,))


MODULE = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %r = f32[16]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="in {a} \\"loop" }
}

%test (q: f32[16]) -> pred[] {
  %q = f32[16]{0} parameter(0)
  %s = f32[16]{0} collective-permute(%q), source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  ROOT %yes = pred[] constant(true)
}

%outer (t: (s32[], f32[16])) -> (s32[], f32[16]) {
  %t = (s32[], f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%t), index=1
  ROOT %w = f32[16]{0} while(%x), condition=%test, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%left (l: f32[16]) -> f32[16] {
  %l = f32[16]{0} parameter(0)
  ROOT %m = f32[16]{0} all-reduce(%l), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}

%right (l: f32[16]) -> f32[16] {
  ROOT %l = f32[16]{0} parameter(0)
}

%wrapped (z: f32[16]) -> f32[4] {
  %z = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%z), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[16], y: bf16[2,2]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[2,2]{1,0} parameter(1)
  %two = (f32[16]{0}, bf16[2,2]{1,0}) all-reduce(f32[16]{0} %x, /*index=1*/bf16[2,2]{1,0} %y), replica_groups={}, to_apply=%add
  %ag = (f32[16]{0}, f32[64]{0}) all-gather-start(%x), replica_groups=mesh['dp'=2,'tp'=4] {'tp'}, dimensions={0}
  %agd = f32[64]{0} all-gather-done(%ag)
  %cp = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[16]{0} collective-permute-done(%cp)
  %rs = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%wrapped
  %rsd = f32[4]{0} async-done(%rs)
  %none = f32[16]{0} all-reduce(%x), replica_groups=[8,1]<=[8], to_apply=%add
  %still = f32[16]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}
  %br = f32[16]{0} conditional(%y, %x, %x), branch_computations={%left, %right}
  %u = f32[16]{0} while(%br), condition=%right, body=%left
  ROOT %o = (s32[], f32[16]{0}) while(%t), condition=%right, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_module_with_everything():
    report = collectives_of_text(MODULE, mesh={"dp": 2, "tp": 4})
    found = [(c.kind, c.axes, c.bytes, c.count, c.exact) for c in report]
    assert found == [
        ("psum", ("dp", "tp"), 126, 1, True),  # combined by XLA: 2 * (64 + 8) * 7/8
        ("all_gather", ("tp",), 192, 1, True),
        ("ppermute", ("tp",), 64, 1, True),
        ("psum_scatter", ("tp",), 48, 1, True),
        ("psum", ("dp",), 64, 1, False),  # in a branch
        ("psum", ("dp",), 64, 1, False),  # in a loop of unknown length
        ("psum", ("tp",), 96, 15, True),
        ("ppermute", ("dp",), 64, 20, True),  # the condition of the inner loop: 5 * (3 + 1)
    ]
    assert report[0].operands == (("f32", (16,)), ("bf16", (2, 2)))
    assert (report[0].dtype, report[0].shape) == ("f32", (16,))
    assert not report.exact
    assert report[:1].exact


def test_without_a_mesh_the_text_may_name_the_axes():
    assert collectives_of_text(MODULE).mesh == {"dp": 2, "tp": 4}
    bare = MODULE.replace("mesh['dp'=2,'tp'=4] {'tp'}", "[2,4]<=[8]")
    report = collectives_of_text(bare)
    assert report.mesh is None
    assert {c.axes for c in report} == {()}
    assert report.total_bytes == collectives_of_text(MODULE).total_bytes


def test_attributes_stop_at_their_own_comma():
    module = parse_module(MODULE)
    (reduce,) = (i for i in module.computations["inner"] if i.opcode == "all-reduce")
    assert reduce.attribute("replica_groups") == "[2,4]<=[8]"
    assert reduce.attribute("to_apply") == "%add"
    assert reduce.attribute("channel_id") is None


def test_text_without_an_entry_is_an_error():
    with pytest.raises(SpmdError, match="no ENTRY computation"):
        parse_module("stablehlo.module {}")


def test_an_undefined_operand_is_an_error():
    with pytest.raises(SpmdError, match="does not define it"):
        collectives_of_text(MODULE.replace("all-gather-start(%x)", "all-gather-start(%nowhere)"))


@pytest.mark.parametrize(
    ("kind", "operand", "devices", "bytes_"),
    [
        ("all_gather", 10, 4, 30),
        ("psum", 8, 8, 14),
        ("psum", 4, 3, 5),  # 16/3, rounded
        ("psum_scatter", 64, 4, 48),
        ("all_to_all", 64, 4, 48),
        ("ppermute", 64, 4, 64),
    ],
)
def test_bytes_per_device(kind, operand, devices, bytes_):
    assert sent_bytes(kind, operand, devices) == bytes_


def test_stack_frames_of_real_text_are_walked_outwards():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def innermost(x):
        return jax.lax.psum(x, "dp")

    def middle(x):
        return innermost(x)

    fn = jax.jit(jax.shard_map(middle, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    text = fn.lower(jnp.ones((8, 2))).compile().as_text()
    (item,) = collectives_of_text(text, mesh=mesh)
    assert [frame.function.split(".")[-1] for frame in item.frames[:2]] == ["innermost", "middle"]
    assert item.where.startswith("test_hlo.py:")
