"""The names of a signature bound to global sizes; tests/language/test_sizes.py has the rules of binding."""

import pytest

from spmd.errors import LayoutError, SizeError
from spmd.kernels._signature import bind_sizes
from spmd.language import Layout, Size

MESH = {"dp": 2, "tp": 4}


def bound(*leaves, **options):
    given = [(path, shape, Layout(layout)) for path, shape, layout in leaves]
    return {n: one.size for n, one in bind_sizes("f: kernel(...)", None, given, MESH, **options).items()}


def test_sizes_are_those_of_the_whole_arrays():
    assert bound(("x", (8, 6), "b/dp d"), ("w", (6, 12), "d f/tp")) == {"b": 8, "d": 6, "f": 12}
    assert bound(("x", (4, 6), "b/dp d"), local=True) == {"b": 8, "d": 6}


def test_a_keyword_says_what_shapes_do_not():
    assert bound(("x", (8,), "(h k)"), known={"h": Size(2, "the keyword h=2")}) == {"h": 2, "k": 4}


def test_all_that_does_not_fit_is_said_at_once():
    with pytest.raises(SizeError) as caught:
        bound(("x", (7, 6), "b/dp d"), ("w", (5, 10), "d f/tp"))
    got = "\n".join(caught.value.fault.got)
    assert all(one in got for one in ("x, dimension 0: b of size 7", "two sizes: 5 here, and 6", "f of size 10"))


def test_a_wrong_rank_is_a_fault_of_the_layout():
    with pytest.raises(LayoutError, match='"b/dp d" has 2 dimensions, not 1'):
        bound(("x", (8,), "b/dp d"))
