"""What is remembered of a value: a tag that goes with it, a note in the jaxpr, and when two layouts are alike."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd._jaxprs.walker import equations
from spmd.checker import line_of
from spmd.comm._marks import Known, mark, rearranged, same_axes, tag, tag_of
from spmd.language import Layout
from tests.ops.harness import frame


def test_a_tag_belongs_to_one_value_and_goes_with_it():
    x = jnp.ones(4)
    assert tag(x, Layout("b"), "f(x)", "x") is x
    known = tag_of(x)
    assert known == Known(Layout("b"), "f(x)", "x", known.source_info)
    assert "test_marks.py" in line_of(known)
    assert tag_of(x + 1) is None
    tag(2.5, Layout("scalar"), "f(2.5)")  # takes no weak reference
    number = id(x)
    del x
    gc.collect()
    assert all(tag_of(y) is None for y in [jnp.ones(4) for _ in range(8)] if id(y) == number)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("b/dp d", "x/dp y", True),
        ("b/dp d", "b d/dp", False),
        ("(b/dp s) d", "b/dp d", True),
        ("b {U:tp}", "b", False),
        ("b d", "b", None),
        ("... d", "b d", None),
        ("1+b/dp", "b/dp", None),
    ],
)
def test_layouts_are_alike_by_their_axes(one, other, alike):
    assert same_axes(Layout(one), Layout(other)) is alike


def notes(layout, role, mode):
    where = frame({"dp": 2, "tp": 4}, mode)
    traced = jax.make_jaxpr(lambda x: mark(x, Layout(layout), "f(x)", role=role, frame=where))(jnp.ones(4))
    return [eqn.params["role"] for eqn in equations(traced.jaxpr) if eqn.primitive.name == "spmd_layout"]


def test_a_note_is_left_where_the_collectives_do_not_say_as_much():
    assert notes("b", "result", "explicit") == []
    assert notes("b {U:tp}", "result", "explicit") == ["result"]
    assert notes("b", "created", "explicit") == ["created"]
    assert notes("b", "result", "reference") == ["result"]


# -------------------- einops on one device, for names that are not strings

X = np.arange(24).reshape(2, 3, 4)


def test_names_may_be_anything_hashable():
    found = rearranged(X, [["a"], [("b", 1)], [7]], [[7, "a"], [("b", 1)]])
    np.testing.assert_array_equal(found, X.transpose(2, 0, 1).reshape(8, 3))


def test_a_composed_axis_is_taken_apart():
    found = rearranged(X, [["a"], ["b"], ["c", "d"]], [["c"], ["a", "b"], ["d"]], {"d": 2})
    np.testing.assert_array_equal(found, X.reshape(2, 3, 2, 2).transpose(2, 0, 1, 3).reshape(2, 6, 2))


def test_an_axis_without_names_has_size_one():
    np.testing.assert_array_equal(
        rearranged(X[:, None], [["a"], [], ["b"], ["c"]], [["a", "b"], ["c"], []]), X.reshape(6, 4, 1)
    )
