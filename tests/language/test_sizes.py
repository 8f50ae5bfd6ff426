"""The binder of sizes: what shapes say, where each size came from, and faults that are the same wherever they are met."""

import jax.numpy as jnp
import pytest

import spmd
from spmd.language import Layout, NotProduct, Size, Unequal, WrongRank, bind

MESH = {"dp": 2, "tp": 4}


def bound(*arrays, **how):
    return bind([(name, shape, Layout(text)) for name, shape, text in arrays], MESH, **how)


def test_sizes_come_with_where_they_came_from():
    found = bound(("x", (8, 12), "b/dp (h k)/tp"), ("y", (3, 5), "k _"))
    told = {"b": (8, "x, dimension 0"), "k": (3, "y, dimension 0"), "h": (4, "x, dimension 1")}
    assert {name: one[:2] for name, one in found.sizes.items()} == told
    assert not found.faults


def test_a_size_knows_the_axes_that_divide_its_name_in_some_array():
    found = bound(("x", (8, 4), "b d"), ("y", (8,), "b/dp"), ("z", (8,), "b/tp"))
    assert {name: one.axes for name, one in found.sizes.items()} == {"b": ("dp", "tp"), "d": ()}


def test_the_block_is_one_of_an_axis_that_divides_the_name_elsewhere():
    mesh = {"x": 2, "y": 2}
    sizes = bind([("a", (8,), Layout("k/y"))], mesh).sizes
    [fault] = bind([("b", (4,), Layout("k"))], mesh, known=sizes, local=True).faults
    assert fault.blocks == ("y", "x")


def test_shards_say_the_sizes_of_the_whole():
    found = bound(("x", (4, 3), "b/dp 1+x/tp+1"), local=True)
    assert {name: one.size for name, one in found.sizes.items()} == {"b": 8, "x": 4}
    assert [size for _, size in found.dims[0]] == [8, 4]


def test_what_is_known_is_not_changed():
    known = {"d": Size(4, "before")}
    assert bound(("x", (8, 4), "b d"), known=known).sizes.keys() == {"d", "b"}
    assert known == {"d": Size(4, "before")}


def test_a_size_may_be_unknown():
    found = bound(("", (None, 6), "(h k)/tp b"), known={"h": Size(3, "the sizes")})
    assert [size for _, size in found.dims[0]] == [None, 6]
    assert [fault.rule for fault in found.faults] == ["h of size 3 does not divide into the 4 blocks of tp"]
    assert [fault.span for fault in found.faults] == [(1, 2)]  # the factor, not the whole dimension


def test_dimensions_of_an_ellipsis_are_one_arrays_own_or_shared():
    x, y = ("x", (2, 3), "... d"), ("y", (5, 3), "... d")
    assert not bound(x, y).faults
    [fault] = bound(x, y, together=True).faults
    assert fault.rule == "...0 has two sizes: 5 here, and 2 from x, dimension 0"


def test_all_faults_are_found_and_are_facts():
    faults = bound(("x", (8, 8), "b/dp d"), ("y", (3,), "b/dp d"), ("z", (4, 6), "b (d n)")).faults
    assert [type(fault) for fault in faults] == [WrongRank, Unequal, NotProduct]
    assert (faults[1].name, faults[1].size, faults[1].first) == ("b", 4, Size(8, "x, dimension 0", ("dp",)))
    assert [fault.where for fault in faults] == ["y of shape (3,)", "z, dimension 0", "z, dimension 1"]
    assert faults[2].factors == (("d", 8), ("n", None))
    assert faults[2].rule == "the size 6 does not divide by d=8"


def test_a_block_is_recognised():
    [fault] = bound(("x", (4,), "b"), known={"b": Size(8, "before")}, local=True).faults
    assert fault.blocks == ("dp",)


INDIVISIBLE = "b of size 6 does not divide into the 4 blocks of tp"
RANK = '"b/tp" has 1 dimension, not 2'


@pytest.mark.parametrize(
    ("shape", "rule"), [pytest.param((6,), INDIVISIBLE, id="indivisible"), pytest.param((8, 2), RANK, id="rank")]
)
@pytest.mark.parametrize("where", ["layout", "kernel", "call", "picture", "shard"])
def test_one_wording_wherever_a_fault_is_met(shape, rule, where):
    """Of a layout, a signature, an operation, a picture and a placement."""
    mesh = spmd.make_mesh(**MESH)
    x = jnp.zeros(shape)
    whole = " ".join(f"d{i}" for i in range(len(shape)))
    meet = {
        "layout": lambda: Layout("b/tp").local_shape(shape, mesh),
        "kernel": lambda: spmd.kernel("b/tp -> b/tp", mesh=mesh)(lambda x: x)(x),
        "call": lambda: spmd.kernel(f"{whole} -> {whole}", mesh=mesh)(lambda x: spmd.annotate(x + 0, "b/tp")).auto(x),
        "picture": lambda: spmd.visualize("b/tp", shape, mesh=mesh),
        "shard": lambda: spmd.shard(x, "b/tp", mesh=mesh),
    }
    with pytest.raises(spmd.errors.SpmdError) as caught:
        meet[where]()
    assert rule in str(caught.value)
