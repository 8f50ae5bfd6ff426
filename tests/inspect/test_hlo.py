"""The reader of compiled text, on that of hlo.txt: each form in which groups, types and loops are printed."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd.errors import SpmdError
from tests.goldens import Golden
from tests.inspect.harness import of_text
from tests.simulator import sent_bytes

TEXTS = Golden(Path(__file__).with_name("hlo.txt")).read()
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


def test_a_module_with_everything():
    report = of_text(TEXTS["everything"], mesh={"dp": 2, "tp": 4})
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
    assert of_text(TEXTS["everything"]).mesh == {"dp": 2, "tp": 4}
    bare = TEXTS["everything"].replace("mesh['dp'=2,'tp'=4] {'tp'}", "[2,4]<=[8]")
    report = of_text(bare)
    assert report.mesh is None
    assert {c.axes for c in report} == {()}
    assert report.total_bytes == of_text(TEXTS["everything"]).total_bytes


def test_text_without_an_entry_is_an_error():
    with pytest.raises(SpmdError, match="no ENTRY computation"):
        of_text("stablehlo.module {}")


def test_an_undefined_operand_is_an_error():
    with pytest.raises(SpmdError, match="does not define it"):
        of_text(TEXTS["everything"].replace("all-gather-start(%x)", "all-gather-start(%nowhere)"))


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


# -------------------- as the compilers for TPUs and GPUs print it, shortened: collectives are counted once, where they start

MESH = {"dp": 2, "tp": 4}


def seen(text: str) -> list[tuple]:
    return [(one.kind, one.axes, one.bytes, one.count) for one in of_text(text, mesh=MESH)]


def test_a_gather_beside_other_work_on_a_tpu_is_one():
    """It is in the fusion that starts it, in the product's, and in the last."""
    (one,) = of_text(TEXTS["a gather beside other work on a TPU"], mesh=MESH)
    assert (one.kind, one.axes, one.bytes, one.count) == ("all_gather", ("dp",), 64 * 16 * 2, 1)
    assert one.op_name.endswith('all_gather(x, "f/tp d/dp -> f/tp d")/all_gather')


def test_without_its_start_it_would_be_counted_wherever_it_runs_on():
    """The fusions that go on with it are known by the missing start alone."""
    assert (
        len(seen(TEXTS["a gather beside other work on a TPU"].replace("AsyncCollectiveDone", "AsyncCollectiveStart")))
        == 2
    )


def test_an_all_reduce_and_its_slice_on_a_tpu_is_a_scatter():
    (one,) = of_text(TEXTS["a scatter on a TPU"], mesh=MESH)
    assert (one.kind, one.axes, one.bytes) == ("psum_scatter", ("tp",), 4 * 512 * 2 * 3 // 4)
    assert one.op_name == 'jit(f)/einsum(x, y, "b f/tp, f/tp d -> b d/tp")/dot_general'
    assert one.where == "m.py:7"  # the fusion says it; what is inside says nothing


def test_an_all_reduce_that_is_not_only_sliced_stays_one():
    text = TEXTS["a scatter on a TPU"].replace("dynamic-slice(%all-reduce.2, ", "dynamic-slice(%input, ")
    assert [kind for kind, *_ in seen(text)] == ["psum"]


@pytest.mark.parametrize(
    ("first", "limit", "step", "count"), [(0, 6, 1, 6), (2, 7, 1, 5), (0, 7, 2, 4), (3, 3, 1, 0), (5, 2, 1, 0)]
)
def test_trips_are_read_off_the_condition(first, limit, step, count):
    """No count is printed: the counter starts at a constant, grows by one, and is compared with another."""
    text = TEXTS["a loop on a TPU"].replace("FIRST", str(first)).replace("LIMIT", str(limit)).replace("STEP", str(step))
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
    text = TEXTS["a loop on a TPU"].replace("FIRST", "0").replace("LIMIT", "6").replace("STEP", "1")
    assert old in text
    (one,) = of_text(text.replace(old, new), mesh=MESH)
    assert (one.count, one.exact) == (1, False)


def test_asynchronous_pairs_and_sends_on_a_gpu():
    assert seen(TEXTS["a GPU"]) == [
        ("all_gather", ("tp",), 3 * (16 * 8 * 2 + 8 * 4 * 4), 1),
        ("psum_scatter", ("tp",), 64 * 4 * 3 // 4, 1),
        ("all_to_all", ("dp",), 8 * 4 * 4 // 2, 1),
        ("ppermute", ("tp",), 8 * 4 * 4, 1),
        ("ppermute", ("dp",), 8 * 4 * 4, 1),
        ("psum", ("dp", "tp"), 2 * 64 * 4 * 7 // 8, 1),
    ]


def test_of_a_ragged_exchange_on_a_gpu_the_rows_are_counted():
    """The operands are rows, the buffer that they go into, and sizes and places."""
    assert seen(TEXTS["a ragged exchange on a GPU"]) == [("ragged_all_to_all", ("tp",), 64 * 16 * 4 * 3 // 4, 1)]
    (one,) = of_text(TEXTS["a ragged exchange on a GPU"], mesh=MESH)
    assert one.operands == (("f32", (64, 16)),)
