"""Keywords of a call: an int binds a size, a str, a tuple or None a mesh axis; and what cannot be an array."""

import numpy as np
import pytest

from spmd.comm._keywords import as_array, split_keywords
from spmd.errors import LayoutError, SizeError
from spmd.language import Pattern

PATTERN = Pattern("b/dp s/tp -> b/dp s")


def test_sizes_and_axes_are_told_apart():
    given = {"b": np.int64(4), "s": 6, "tp": ("tk", "tr"), "dp": None}
    assert split_keywords("f", PATTERN, given) == ({"b": 4, "s": 6}, {"tp": ("tk", "tr"), "dp": None})


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"b": 0}, SizeError, "the size of b is an int of at least 1, not 0."),
        ({"b": True}, LayoutError, "not a bool."),
        ({"b": 2.0}, LayoutError, "not a float."),
        ({"tq": "x"}, LayoutError, "did you mean 'tp'?"),
        ({"dp": 4}, LayoutError, "the keyword dp=4 binds a dimension that the pattern does not have"),
    ],
)
def test_other_keywords_are_errors(given, error, said):
    with pytest.raises(error) as caught:
        split_keywords("f", PATTERN, given)
    assert said in str(caught.value)


def test_what_is_not_an_array_is_named():
    said = []
    for value in ("text", None, np.array(["a"]), [1, None]):
        as_array(value, "x", said.append)
    assert said[:2] == ["x is a str, not an array.", "x is None, not an array."]
    assert said[2].startswith("x is a NumPy array of dtype <U1") and said[3] == "x is a list, not an array."
