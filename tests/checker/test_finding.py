"""A finding is a fault with its class and its line."""

from __future__ import annotations

from dataclasses import fields

from spmd.checker._finding import found
from spmd.errors import Fault


def test_it_says_what_the_fault_says():
    fault = Fault("A rule.", "f(x)", None, (2, 3), ("a value",))
    finding = found(fault, "layout", "a.py:1 (f)")
    assert str(finding) == str(fault)
    assert all(getattr(finding, field.name) == getattr(fault, field.name) for field in fields(Fault))
    assert (finding.kind, finding.line, finding.certain) == ("layout", "a.py:1 (f)", True)
