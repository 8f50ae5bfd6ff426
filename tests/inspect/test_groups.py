"""Groups of devices in compiled text, in each form that is printed, and the mesh axes that they stand for."""

import numpy as np
import pytest

from spmd.errors import SpmdError
from spmd.inspect._collectives import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs


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
