"""Findings as values, as an error and as a warning."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import spmd
from spmd.checker._findings import Findings, found, report
from spmd.errors import Fault, ReplicationError

ONE = found(Fault("A rule.", "f(x)", None, None, ("a value",)), "layout", "a.py:1 (f)")
TWO = found(Fault("Another rule.", "g(x)", None, None, ("a value",)), "partial", "a.py:2 (f)", certain=False)


def test_there_are_none() -> None:
    assert not Findings()
    assert str(Findings()) == "no findings"
    report("k", [])


def test_each_is_said_once_and_knows_its_line() -> None:
    with pytest.raises(ReplicationError) as caught:
        report("k", [ONE, TWO, ONE])
    assert caught.value.findings == (ONE, TWO)
    assert [one.kind for one in caught.value.findings] == ["layout", "partial"]
    assert [one.line for one in caught.value.findings] == ["a.py:1 (f)", "a.py:2 (f)"]
    assert "k: 2 values" in str(caught.value)
    assert f"(1) {ONE}" in str(caught.value) and f"(2) {TWO}" in str(caught.value)


def test_one_is_an_error_without_a_number() -> None:
    with pytest.raises(ReplicationError) as caught:
        report("k", [ONE])
    assert "(1)" not in str(caught.value) and "A rule." in str(caught.value)


def test_a_warning_says_the_same() -> None:
    with pytest.warns(UserWarning, match="Another rule"):
        report("k", [ONE, TWO], "warn")


@pytest.mark.parametrize("how", ["error", "warn"])
def test_a_kernel_says_what_becomes_of_them(how: str) -> None:
    mesh = spmd.make_mesh(dp=2)

    @spmd.kernel("a/dp b -> a/dp b", mesh=mesh, check=how)
    def wrong(x):
        return x + jnp.tanh(spmd.reduce(x, "a/dp b -> b {U:dp}"))[None]

    with pytest.raises(ReplicationError) if how == "error" else pytest.warns(UserWarning, match="tanh is not linear"):
        wrong(jnp.ones((4, 4)))
