"""einops on one device, for names that are not strings."""

import numpy as np

from spmd.comm._marks import rearranged

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
