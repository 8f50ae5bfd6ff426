"""The layout language: strings that say shape, placement and communication. Pure Python."""

from spmd.language._layout import AxisMapping, Layout, with_axes_of
from spmd.language._pattern import Pattern, factors_of, verb_for, verb_of
from spmd.language._sizes import (
    Bound,
    Misfit,
    NotProduct,
    Size,
    Unequal,
    WrongRank,
    another_name,
    as_fault,
    axes_code,
    axes_product,
    axes_tuple,
    axis_span,
    bind,
    check_axes,
    indivisible,
    mesh_text,
    with_axis,
)
from spmd.language._syntax import Atom, Axes, Dim

__all__ = [
    "Atom",
    "Axes",
    "AxisMapping",
    "Bound",
    "Dim",
    "Layout",
    "Misfit",
    "NotProduct",
    "Pattern",
    "Size",
    "Unequal",
    "WrongRank",
    "another_name",
    "as_fault",
    "axes_code",
    "axes_product",
    "axes_tuple",
    "axis_span",
    "bind",
    "check_axes",
    "factors_of",
    "indivisible",
    "mesh_text",
    "verb_for",
    "verb_of",
    "with_axes_of",
    "with_axis",
]
