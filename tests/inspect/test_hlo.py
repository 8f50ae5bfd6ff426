"""The reader of compiled text, on strings: each form in which groups, types and loops are printed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import SpmdError
from spmd.inspect._collectives import collectives_of_text, sent_bytes
from spmd.inspect._groups import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from spmd.inspect._hlo import parse_module, parse_shapes, shape_bytes


def sets(groups):
    return {frozenset(group) for group in groups}


@pytest.mark.parametrize(
    ("text", "partitions", "groups"),
    [
        ("{{0,1},{2,3}}, use_global_device_ids=true", 4, [(0, 1), (2, 3)]),
        ("{{0, 2}, {1, 3}}", 4, [(0, 2), (1, 3)]),
        ("{}, channel_id=1", 4, [(0, 1, 2, 3)]),
        ("[4,2]<=[8], dimensions={0}", 8, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("[2,4]<=[4,2]T(1,0)", 8, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("[4,2]<=[2,2,2]T(0,2,1)", 8, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("[1,8]<=[8]", 8, [tuple(range(8))]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}", 8, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", 8, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ("mesh['y'=4] {'y':(1)2}", 4, [(0, 2), (1, 3)]),
        ("mesh['y'=4] {'y':(2)2}", 4, [(0, 1), (2, 3)]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['x'=2,'y'=4] {'x','y':(2)2}", 8, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", 4, [(3, 0), (1, 2)]),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", 4, [(0, 2), (1, 3)]),
        ("mesh['x'=1,'y'=4] {'x','y'}", 4, [(0, 1, 2, 3)]),
        ("@mesh<u=2,v=2> {u}", 4, [(0, 2), (1, 3)]),
        ("@mesh<o=4>, device_ids=(2,3,0,1) {o:(2)2}", 4, [(2, 3), (0, 1)]),
    ],
)
def test_groups_in_every_form(text, partitions, groups):
    assert sets(parse_groups(text, partitions)) == sets(groups)


def test_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(SpmdError, match="a form that is not known here"):
        parse_groups("hypercube(3)", 8)


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 3, "c": 1}, {"a": 2, "b": 2, "c": 2}])
def test_axes_are_found_from_the_groups_of_each_subset(sizes):
    names, shape = tuple(sizes), tuple(sizes.values())
    devices = np.arange(np.prod(shape)).reshape(shape)
    for chosen in range(1, 2 ** len(names)):
        picked = [i for i in range(len(names)) if chosen >> i & 1]
        rest = [i for i in range(len(names)) if i not in picked]
        groups = devices.transpose(rest + picked).reshape(-1, np.prod([shape[i] for i in picked]))
        expected = tuple(names[i] for i in picked if shape[i] > 1)
        assert axes_of_groups(tuple(map(tuple, groups.tolist())), sizes) == (expected, True)


def test_parts_of_axes_are_told_apart():
    assert axes_of_groups(parse_groups("[4,2]<=[8]", 8), {"x": 2, "y": 4}) == (("y",), False)
    assert axes_of_groups(parse_groups("[2,4]<=[8]", 8), {"x": 2, "y": 4}) == (("y",), True)


def test_axes_of_pairs():
    ring = parse_pairs("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}")
    assert axes_of_pairs(ring, {"x": 2, "y": 4}) == ("y",)
    assert axes_of_pairs(((0, 7), (7, 0)), {"x": 2, "y": 4}) == ("x", "y")


def test_a_mesh_that_is_too_small_is_named():
    with pytest.raises(SpmdError, match=r"a device 7, and the mesh x=2 has only 2 devices"):
        axes_of_groups(((0, 7),), {"x": 2})


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
