"""Mappings from names to mesh axes."""

import numpy as np
import pytest

from spmd.errors import LayoutError
from spmd.language import AxisMapping, Layout


def test_mappings():
    mapping = AxisMapping({"batch": ["dp", "fsdp"], "mlp": "tp", "seq": None})
    assert dict(mapping) == {"batch": ("dp", "fsdp"), "mlp": ("tp",), "seq": ()}
    assert mapping.get("other") is None
    assert "mlp" in mapping
    assert len(mapping) == 3
    assert mapping.names == ("batch", "mlp", "seq")
    assert mapping == AxisMapping({"seq": (), "mlp": ("tp",), "batch": ("dp", "fsdp")})
    assert hash(mapping) == hash(AxisMapping(reversed(list(mapping.items()))))
    assert mapping.merge({"mlp": None}) == AxisMapping({**mapping, "mlp": None})
    assert eval(repr(mapping)) == mapping
    assert mapping.resolve("batch mlp x") == mapping.resolve(Layout("batch mlp x"))
    assert mapping.lacks("batch x") == ("x",)
    with pytest.raises(LayoutError, match="A layout is a string"):
        mapping.resolve(3)
    assert AxisMapping.of(mapping) is mapping
    assert AxisMapping.of(None) == AxisMapping({})
    mapping.check(("tp", "fsdp", "dp"))


def test_a_mapping_holds_plain_strings():
    """NumPy's strings are strings, and print otherwise."""
    mapping = AxisMapping({np.str_("batch"): (np.str_("dp"), "tp")})
    assert mapping["batch"] == ("dp", "tp") and "np." not in repr(mapping)
