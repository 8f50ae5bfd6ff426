"""The words that messages share. A layout that is printed to be pasted says what was meant, with and without a mapping."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd.checker._history import Origin
from spmd.checker._mends import changed, describe, done_to_pieces, joined, listed, marked, named, shown_dims, text_of
from spmd.checker._state import HIDDEN, Pending, State
from spmd.language import Layout
from tests.sampler import Sampler, seeds


def test_lists() -> None:
    assert listed(["dp"]) == "dp" and listed(["dp", "tp", "pp"]) == "dp, tp and pp" and marked(["a", "b"]) == "{U:a,b}"
    assert joined("one", "two") == "one; two" and joined(None, "two", "\n") == "two" and joined(None, None) is None


def test_a_state_is_shown_as_a_layout_without_names() -> None:
    assert shown_dims(State()) == "scalar"
    dims = ((2, ("dp",)),), ((3, ()), (4, ("tp",))), ((5, HIDDEN),)
    assert shown_dims(State(dims, frozenset(("pp",)))) == "_/dp (_ _/tp) ? {U:pp}"


def test_primitives_have_the_names_that_users_know() -> None:
    assert [named(name) for name in ("psum_invariant", "dot_general", "sin")] == ["psum", "matmul", "sin"]
    assert describe(Origin("input", "tp", "argument x")) == "made from argument x"
    pending = [Pending("max", "tp", 0), Pending("sort", "dp", 1)]
    assert done_to_pieces(pending) == "a maximum and a sort were done on each device's own piece along tp and dp"


MESH = {"dp": 2, "tp": 2, "cp": 2}


@pytest.mark.parametrize("seed", seeds(times=3))
def test_a_changed_layout_says_what_was_changed(seed):
    sampler = Sampler(seed)
    layout = Layout(sampler.layout("a b c", MESH, unreduced=True))
    drop = {axis for axis in MESH if sampler.rng.random() < 0.4}
    other = changed(layout, drop=drop)
    axes = lambda one: [atom.axes or () for atom in one.atoms]
    assert axes(other) == [tuple(a for a in had if a not in drop) for had in axes(layout)]
    assert other.names == layout.names and other.unreduced == layout.unreduced
    [first, *rest] = axes(changed(layout, add="ep"))
    assert first == (*axes(layout)[0], "ep") and rest == axes(layout)[1:]
    assert changed(layout, drop=MESH, unreduced=["tp", "dp"]).unreduced == ("dp", "tp")
    assert Layout(text_of(layout, layout, str(layout))) == layout, "it reads back"


def test_a_factor_behind_a_whole_one_is_whole():
    assert changed(Layout("(a/dp b/tp) c/cp"), drop=["dp"]).short == "(a b) c/cp"
    assert changed(Layout("(a/dp b/tp) c/cp"), drop=["tp"]).short == "(a b)/dp c/cp"


def test_brackets_are_not_kept():
    assert changed(Layout("[a/tp] b")).short == "a/tp b"


def test_with_a_mapping_every_name_says_what_divides_it():
    """A bare name that is pasted would be divided by the mapping; without one the bare name is what people write."""
    given = Layout("b s").resolve({"b": ("dp",)})
    assert text_of(given, given, 'psum(x, "b s")') == str(given) != given.short
    plain = Layout("b/dp s")
    assert text_of(plain, plain, 'psum(x, "b/dp s")') == "b/dp s"


def test_an_identity_beside_data_does_not_count() -> None:
    """JAX makes `jnp.eye` of two aranges. What data went into does not count from 0."""

    def first_rows(x: Any) -> Any:
        whole = lax.all_gather(x, "dp", tiled=True)
        return ((jnp.outer(whole, whole) + jnp.eye(16)) @ whole)[:4]

    kernel = spmd.kernel("n/dp -> n/dp", mesh=spmd.make_mesh(dp=4))(first_rows)
    [finding] = spmd.check(kernel, jax.ShapeDtypeStruct((16,), "float32"))
    assert "holds the same block" in finding.rule and "arange" not in str(finding)
