"""The reader of compiled text, on strings: each form in which groups, types and loops are printed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import SpmdError
from tests.inspect.harness import of_text, sent_bytes

ONE = """HloModule jit_f, num_partitions={devices}

ENTRY %main (x: {type}) -> {type} {{
  %x = {type} parameter(0)
  ROOT %one = {type} {kind}(%x), {how}
}}
"""


def one_sent(type_: str, kind: str, how: str, devices: int = 8, mesh=None):
    """The collective of a program that has one."""
    [found] = of_text(ONE.format(type=type_, kind=kind, how=how, devices=devices), mesh)
    return found


@pytest.mark.parametrize(
    ("type_", "size"),
    [("f32[8,16]{1,0:T(8,128)(2,1)}", 512), ("pred[3]{0}", 3), ("f8e4m3fn[5]", 5), ("s4[3]", 2), ("c64[2]", 16)],
)
def test_shapes_and_bytes(type_, size):
    assert one_sent(type_, "collective-permute", "source_target_pairs={{0,1}}").bytes == size


def test_a_type_that_nobody_knows_is_named():
    with pytest.raises(SpmdError, match="'quux'"):
        one_sent("quux[3]", "collective-permute", "source_target_pairs={{0,1}}")


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
    report = of_text(MODULE, mesh={"dp": 2, "tp": 4})
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
    assert of_text(MODULE).mesh == {"dp": 2, "tp": 4}
    bare = MODULE.replace("mesh['dp'=2,'tp'=4] {'tp'}", "[2,4]<=[8]")
    report = of_text(bare)
    assert report.mesh is None
    assert {c.axes for c in report} == {()}
    assert report.total_bytes == of_text(MODULE).total_bytes


def test_text_without_an_entry_is_an_error():
    with pytest.raises(SpmdError, match="no ENTRY computation"):
        of_text("stablehlo.module {}")


def test_an_undefined_operand_is_an_error():
    with pytest.raises(SpmdError, match="does not define it"):
        of_text(MODULE.replace("all-gather-start(%x)", "all-gather-start(%nowhere)"))


@pytest.mark.parametrize(
    ("kind", "opcode", "operand", "devices", "bytes_"),
    [
        ("all_gather", "all-gather", 10, 4, 30),
        ("psum", "all-reduce", 8, 8, 14),
        ("psum", "all-reduce", 4, 3, 5),  # 16/3, rounded
        ("psum_scatter", "reduce-scatter", 64, 4, 48),
        ("all_to_all", "all-to-all", 64, 4, 48),
    ],
)
def test_bytes_per_device(kind, opcode, operand, devices, bytes_):
    found = one_sent(f"u8[{operand}]", opcode, f"replica_groups=[1,{devices}]<=[{devices}]", devices)
    assert (found.kind, found.bytes) == (kind, bytes_) and sent_bytes(kind, operand, devices) == bytes_


def test_stack_frames_of_real_text_are_walked_outwards():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def innermost(x):
        return jax.lax.psum(x, "dp")

    def middle(x):
        return innermost(x)

    fn = jax.jit(jax.shard_map(middle, mesh=mesh, in_specs=P("dp"), out_specs=P()))
    text = fn.lower(jnp.ones((8, 2))).compile().as_text()
    (item,) = of_text(text, mesh=mesh)
    assert [frame.function.split(".")[-1] for frame in item.frames[:2]] == ["innermost", "middle"]
    assert item.where.startswith("test_hlo.py:")


# -------------------- groups of devices in compiled text, in each form that is printed, and the mesh axes that they stand for


PAIRS, FOURS = {"a": 4, "b": 2}, {"a": 2, "b": 4}
CUBE = {"a": 2, "b": 2, "c": 2}
SQUARE = {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("text", "mesh", "axes"),
    [
        ("{{0,1},{2,3}}, use_global_device_ids=true", SQUARE, "b"),
        ("{{0, 2}, {1, 3}}", SQUARE, "a"),
        ("{}, channel_id=1", SQUARE, "ab"),
        ("[4,2]<=[8], dimensions={0}", PAIRS, "b"),
        ("[2,4]<=[4,2]T(1,0)", PAIRS, "a"),
        ("[4,2]<=[2,2,2]T(0,2,1)", CUBE, "b"),
        ("[1,8]<=[8]", CUBE, "abc"),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}", FOURS, "a"),
        ("mesh['p'=2,'q'=2,'r'=2] {'p','r'}", CUBE, "ac"),
        ("mesh['p'=2,'q'=2,'r'=2] {'r','p'}", CUBE, "ac"),
        ("mesh['y'=4] {'y':(1)2}", SQUARE, "a"),
        ("mesh['y'=4] {'y':(2)2}", SQUARE, "b"),
        ("mesh['p'=8] {'p':(1)2,'p':(4)2}", CUBE, "ac"),
        ("mesh['x'=2,'y'=4] {'x','y':(2)2}", CUBE, "ac"),
        ("mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'x'}", SQUARE, "b"),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", SQUARE, "a"),
        ("mesh['x'=1,'y'=4] {'x','y'}", SQUARE, "ab"),
        ("@mesh<u=2,v=2> {u}", SQUARE, "a"),
        ("@mesh<o=4>, device_ids=(2,3,0,1) {o:(2)2}", SQUARE, "b"),
        ("[4,2]<=[8]", FOURS, None),  # a part of an axis
    ],
)
def test_groups_in_every_form(text, mesh, axes):
    found = one_sent("f32[8]", "all-gather", f"replica_groups={text}", math.prod(mesh.values()), mesh)
    assert (found.axes, found.whole) == ((("b",), False) if axes is None else (tuple(axes), True))


def test_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(SpmdError, match="a form that is not known here"):
        one_sent("f32[8]", "all-gather", "replica_groups=hypercube(3)")


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 3, "c": 1}, {"a": 2, "b": 2, "c": 2}])
def test_axes_are_found_from_the_groups_of_each_subset(sizes):
    names, shape = tuple(sizes), tuple(sizes.values())
    devices = np.arange(np.prod(shape)).reshape(shape)
    for chosen in range(1, 2 ** len(names)):
        picked = [i for i in range(len(names)) if chosen >> i & 1]
        expected = tuple(names[i] for i in picked if shape[i] > 1)
        if not expected:
            continue  # nothing is sent
        rest = [i for i in range(len(names)) if i not in picked]
        groups = devices.transpose(rest + picked).reshape(-1, np.prod([shape[i] for i in picked]))
        text = str(groups.tolist()).replace("[", "{").replace("]", "}")
        found = one_sent("f32[8]", "all-gather", f"replica_groups={text}", devices.size, sizes)
        assert (found.axes, found.whole) == (expected, True)


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("b",)), ("{{0,7},{7,0}}", ("a", "b"))],
)
def test_axes_of_pairs(pairs, axes):
    found = one_sent("f32[8]", "collective-permute", f"source_target_pairs={pairs}", mesh=FOURS)
    assert found.axes == axes


def test_a_mesh_that_is_too_small_is_named():
    with pytest.raises(SpmdError, match=r"a device 7, and the mesh x=2 has only 2 devices"):
        one_sent("f32[8]", "all-gather", "replica_groups={{0,7}}", mesh={"x": 2})


# -------------------- compiled text as the compilers for TPUs and GPUs print it, shortened: collectives are counted once, where they start

MESH = {"dp": 2, "tp": 4}
TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
NAME = r'op_name="jit(f)/shard_map/all_gather(x, \"f/tp d/dp -> f/tp d\")/all_gather"'

# A gather that runs beside a product: once in the fusion that starts it, once in the product's, once in the last.
TPU_BESIDE = rf"""HloModule jit_f, is_scheduled=true, num_partitions=8

%fused_computation.20 (p: bf16[64,16]) -> (bf16[64,16], bf16[64,32], u32[]) {{
  %p = bf16[64,16]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %all-gather.13 = bf16[64,32]{{1,0:T(8,128)(2,1)}} all-gather(%p), channel_id=1, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, dimensions={{1}}, use_global_device_ids=true, frontend_attributes={{chain_id="0"}}, metadata={{{NAME} stack_frame_id=6}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"-1","flag_end":"-1"}}}}
  ROOT %custom-call.1 = (bf16[64,16]{{1,0}}, bf16[64,32]{{1,0}}, u32[]{{:S(2)}}) custom-call(%all-gather.13), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.22 (q: bf16[64,16], r: bf16[8,64]) -> (bf16[8,64], bf16[64,32]) {{
  %q = bf16[64,16]{{1,0}} parameter(0)
  %r = bf16[8,64]{{1,0}} parameter(1)
  %all-gather.15 = bf16[64,32]{{1,0}} all-gather(%q), channel_id=1, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, dimensions={{1}}, metadata={{{NAME}}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2","flag_end":"8"}}}}
  %convolution.5 = bf16[8,64]{{1,0}} convolution(%r, %r), dim_labels=bf_io->bf
  ROOT %tuple.2 = (bf16[8,64]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%convolution.5, %all-gather.15)
}}

%fused_computation.22 (s: bf16[64,16], t: bf16[64,32]) -> bf16[64,32] {{
  %s = bf16[64,16]{{1,0}} parameter(0)
  %t = bf16[64,32]{{1,0}} parameter(1)
  %all-gather.17 = bf16[64,32]{{1,0}} all-gather(%s), channel_id=1, replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, dimensions={{1}}, metadata={{{NAME}}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"2","flag_end":"8"}}}}
  ROOT %custom-call.3 = bf16[64,32]{{1,0}} custom-call(%s, %t, %all-gather.17), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (a: bf16[64,16], b: bf16[8,64]) -> bf16[64,32] {{
  %a = bf16[64,16]{{1,0}} parameter(0)
  %b = bf16[8,64]{{1,0}} parameter(1)
  %async-collective-start = (bf16[64,16]{{1,0}}, bf16[64,32]{{1,0}}, u32[]{{:S(2)}}) fusion(%a), kind=kCustom, calls=%fused_computation.20
  %g = bf16[64,16]{{1,0}} get-tuple-element(%async-collective-start), index=0
  %fusion.22 = (bf16[8,64]{{1,0}}, bf16[64,32]{{1,0}}) fusion(%g, %b), kind=kOutput, calls=%async_collective_fusion.22
  %h = bf16[64,32]{{1,0}} get-tuple-element(%fusion.22), index=1
  ROOT %async-collective-done = bf16[64,32]{{1,0}} fusion(%g, %h), kind=kCustom, calls=%fused_computation.22, metadata={{{NAME}}}
}}
"""

TPU_SCATTER = rf"""HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[]{{:T(128)}} parameter(0)
  %y = f32[]{{:T(128)}} parameter(1)
  ROOT %sum = f32[]{{:T(128)}} add(%x, %y)
}}

%all-reduce-scatter (input: bf16[4,512]) -> bf16[4,128] {{
  %input = bf16[4,512]{{1,0}} parameter(0)
  %all-reduce.2 = bf16[4,512]{{1,0}} all-reduce(%input), channel_id=5, {TP}, use_global_device_ids=true, to_apply=%add
  %constant.39 = s32[]{{:T(128)}} constant(0)
  ROOT %dynamic-slice.16 = bf16[4,128]{{1,0}} dynamic-slice(%all-reduce.2, %constant.39, %constant.39), dynamic_slice_sizes={{4,128}}
}}

ENTRY %main (a: bf16[4,512]) -> bf16[4,128] {{
  %a = bf16[4,512]{{1,0}} parameter(0)
  ROOT %fusion = bf16[4,128]{{1,0}} fusion(%a), kind=kCustom, calls=%all-reduce-scatter, metadata={{op_name="jit(f)/einsum(x, y, \"b f/tp, f/tp d -> b d/tp\")/dot_general" source_file="m.py" source_line=7}}
}}
"""

# No trip count is printed: the counter starts at a constant, grows by one, and is compared with another.
TPU_LOOP = rf"""HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[]{{:T(128)}} parameter(0), metadata={{op_name="defer(x, \"d -> d {{R:dp}}\")/psum"}}
  %y = f32[]{{:T(128)}} parameter(1)
  ROOT %sum = f32[]{{:T(128)}} add(%x, %y)
}}

%body (in: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %one = s32[]{{:T(128)}} constant(STEP)
  %in = (s32[]{{:T(128)}}, f32[16]{{0}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%in), index=0
  %copy.66 = s32[]{{:T(128)S(6)}} copy(%i)
  %next = s32[]{{:T(128)}} add(%copy.66, %one)
  %v = f32[16]{{0}} get-tuple-element(%in), index=1
  %all-reduce.1 = f32[16]{{0}} all-reduce(%v), channel_id=1, {TP}, to_apply=%add, metadata={{op_name="jit(f)/while"}}
  ROOT %out = (s32[]{{:T(128)}}, f32[16]{{0}}) tuple(%next, %all-reduce.1)
}}

%condition (in.1: (s32[], f32[16])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(LIMIT)
  %in.1 = (s32[]{{:T(128)}}, f32[16]{{0}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%in.1), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%i.1, %limit), direction=LT, metadata={{op_name="jit(f)/while/cond/lt"}}
}}

ENTRY %main (a: f32[16]) -> f32[16] {{
  %a = f32[16]{{0}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(FIRST)
  %copy.57 = s32[]{{:T(128)}} copy(%zero)
  %start = (s32[]{{:T(128)}}, f32[16]{{0}}) tuple(%copy.57, %a)
  %while.45 = (s32[]{{:T(128)}}, f32[16]{{0}}) while(%start), condition=%condition, body=%body
  ROOT %r = f32[16]{{0}} get-tuple-element(%while.45), index=1
}}
"""

GPU = r"""HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%async_computation (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[16]{0} reduce-scatter(%p), channel_id=2, replica_groups=[2,4]<=[8], use_global_device_ids=true, dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/rs"}
}

ENTRY %main (a: f32[64], b: bf16[16,8], c: f32[8,4]) -> f32[16] {
  %a = f32[64]{0} parameter(0)
  %b = bf16[16,8]{1,0} parameter(1)
  %c = f32[8,4]{1,0} parameter(2)
  %all-gather-start = ((bf16[16,8]{1,0}, f32[8,4]{1,0}), (bf16[64,8]{1,0}, f32[32,4]{1,0})) all-gather-start(%b, %c), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/ag"}, backend_config={"collective_backend_config":{"is_sync":false}}
  %reduce-scatter-start = ((f32[64]{0}), f32[16]{0}) async-start(%a), calls=%async_computation
  %all-to-all-start = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%c), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, async_execution_thread="parallel"
  %collective-permute-start = (f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%c), channel_id=4, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %token = token[] after-all()
  %send = (f32[8,4]{1,0}, u32[], token[]) send(%c, %token), channel_id=5, frontend_attributes={_xla_send_recv_pipeline="0",_xla_send_recv_source_target_pairs={{0,4},{4,0}}}
  %recv = (f32[8,4]{1,0}, u32[], token[]) recv(%token), channel_id=5, frontend_attributes={_xla_send_recv_pipeline="0",_xla_send_recv_source_target_pairs={{0,4},{4,0}}}
  %all-reduce-start = f32[64]{0} all-reduce-start(%a), channel_id=6, replica_groups=mesh['dp'=2,'tp'=4] {'dp','tp'}, use_global_device_ids=true, to_apply=%add
  %all-reduce-done = f32[64]{0} all-reduce-done(%all-reduce-start)
  %collective-permute-done = f32[8,4]{1,0} collective-permute-done(%collective-permute-start)
  %all-to-all-done = f32[8,4]{1,0} all-to-all-done(%all-to-all-start)
  %all-gather-done = (bf16[64,8]{1,0}, f32[32,4]{1,0}) all-gather-done(%all-gather-start)
  ROOT %reduce-scatter-done = f32[16]{0} async-done(%reduce-scatter-start)
}
"""


# The operands are rows, the buffer that they go into, and sizes and places. Only the rows are counted.
GPU_RAGGED = r"""HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (a: f32[64,16], b: f32[32,16], s: s64[4]) -> f32[32,16] {
  %a = f32[64,16]{1,0:S(7)} parameter(0)
  %b = f32[32,16]{1,0:S(7)} parameter(1)
  %s = s64[4]{0} parameter(2)
  ROOT %ragged-all-to-all.6 = f32[32,16]{1,0:S(7)} ragged-all-to-all(%a, %b, %s, %s, %s, /*index=5*/%s), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""


def seen(text: str) -> list[tuple]:
    return [(one.kind, one.axes, one.bytes, one.count) for one in of_text(text, mesh=MESH)]


def test_a_gather_beside_other_work_on_a_tpu_is_one():
    (one,) = of_text(TPU_BESIDE, mesh=MESH)
    assert (one.kind, one.axes, one.bytes, one.count) == ("all_gather", ("dp",), 64 * 16 * 2, 1)
    assert one.op_name.endswith('all_gather(x, "f/tp d/dp -> f/tp d")/all_gather')


def test_without_its_start_it_would_be_counted_wherever_it_runs_on():
    """The fusions that go on with it are known by the missing start alone."""
    assert len(seen(TPU_BESIDE.replace("AsyncCollectiveDone", "AsyncCollectiveStart"))) == 2


def test_an_all_reduce_and_its_slice_on_a_tpu_is_a_scatter():
    (one,) = of_text(TPU_SCATTER, mesh=MESH)
    assert (one.kind, one.axes, one.bytes) == ("psum_scatter", ("tp",), 4 * 512 * 2 * 3 // 4)
    assert one.op_name == 'jit(f)/einsum(x, y, "b f/tp, f/tp d -> b d/tp")/dot_general'
    assert one.where == "m.py:7"  # the fusion says it; what is inside says nothing


def test_an_all_reduce_that_is_not_only_sliced_stays_one():
    text = TPU_SCATTER.replace("dynamic-slice(%all-reduce.2, ", "dynamic-slice(%input, ")
    assert [kind for kind, *_ in seen(text)] == ["psum"]


@pytest.mark.parametrize(
    ("first", "limit", "step", "count"), [(0, 6, 1, 6), (2, 7, 1, 5), (0, 7, 2, 4), (3, 3, 1, 0), (5, 2, 1, 0)]
)
def test_trips_are_read_off_the_condition(first, limit, step, count):
    text = TPU_LOOP.replace("FIRST", str(first)).replace("LIMIT", str(limit)).replace("STEP", str(step))
    (one,) = of_text(text, mesh=MESH)
    assert (one.count, one.exact) == (count, True)
    assert one.reducer == 'defer(x, "d -> d {R:dp}")/psum'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("%limit = s32[]{:T(128)} constant(6)", "%limit = s32[]{:T(128)} get-tuple-element(%in.1), index=0"),
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} convert(%a)"),
        ("add(%copy.66, %one)", "multiply(%copy.66, %one)"),
    ],
)
def test_a_loop_that_is_not_understood_counts_once_and_says_so(old, new):
    text = TPU_LOOP.replace("FIRST", "0").replace("LIMIT", "6").replace("STEP", "1")
    assert old in text
    (one,) = of_text(text.replace(old, new), mesh=MESH)
    assert (one.count, one.exact) == (1, False)


def test_asynchronous_pairs_and_sends_on_a_gpu():
    assert seen(GPU) == [
        ("all_gather", ("tp",), 3 * (16 * 8 * 2 + 8 * 4 * 4), 1),
        ("psum_scatter", ("tp",), 64 * 4 * 3 // 4, 1),
        ("all_to_all", ("dp",), 8 * 4 * 4 // 2, 1),
        ("ppermute", ("tp",), 8 * 4 * 4, 1),
        ("ppermute", ("dp",), 8 * 4 * 4, 1),
        ("psum", ("dp", "tp"), 2 * 64 * 4 * 7 // 8, 1),
    ]


def test_of_a_ragged_exchange_on_a_gpu_the_rows_are_counted():
    assert seen(GPU_RAGGED) == [("ragged_all_to_all", ("tp",), 64 * 16 * 4 * 3 // 4, 1)]
    (one,) = of_text(GPU_RAGGED, mesh=MESH)
    assert one.operands == (("f32", (64, 16)),)
