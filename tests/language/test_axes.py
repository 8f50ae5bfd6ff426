"""Mesh axes in calls, products and messages."""

import pytest

from spmd.errors import MeshError
from spmd.language import axes_product, axes_tuple, axis_span, check_axes, mesh_text

SIZES = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("given", "axes"), [(None, ()), ("dp", ("dp",)), (("dp", "tp"), ("dp", "tp")), (["tp"], ("tp",))]
)
def test_axes_are_one_name_several_or_none(given, axes):
    assert axes_tuple(given) == axes


def test_axes_divide_into_the_product_of_their_sizes():
    assert [axes_product(axes, SIZES) for axes in ((), ("tp",), ("dp", "tp"))] == [1, 4, 8]


@pytest.mark.parametrize(
    ("text", "axis", "found"), [("b/dp s/tp", "tp", "tp"), ("d {U:dp,tp}", "tp", "tp"), ("tp s/tpu", "tp", None)]
)
def test_an_axis_stands_behind_a_slash_or_in_a_mark(text, axis, found):
    span = axis_span(text, axis)
    assert (None if span is None else text[slice(*span)]) == found
    assert span is None or text[span[0] - 1] in "/:,"


def test_an_axis_that_the_mesh_lacks_is_shown_in_the_string():
    check_axes(("dp", "tp"), SIZES)
    with pytest.raises(MeshError) as caught:
        check_axes(("dp", "tq"), SIZES, call='f(x, "b/tq")', source="b/tq")
    shown = ['f(x, "b/tq")', "        ^^", "the mesh has no axis 'tq'; did you mean 'tp'?", "got: mesh dp=2, tp=4"]
    assert str(caught.value).strip("\n").splitlines() == shown


def test_a_mesh_without_axes_has_a_text():
    assert mesh_text({}) == "a mesh without axes"
