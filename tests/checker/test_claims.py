"""Layouts as claims: every pair of what is said and how the value lies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.language import Layout
from tests.checker.harness import assert_equal, mark, seen
from tests.sampler import share

X = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
LIE = ("a b", "a/dp b", "a b/tp", "a/dp b/tp", "a/tp b/dp", "a/tp/dp b", "a/dp/tp b")
SAID = (*LIE, "a b/dp", "a/tp b", "a b/dp/tp")


@pytest.mark.parametrize("lies", share(LIE))
def test_what_is_said_is_compared_with_what_is(lies):
    """A claim is a finding unless it is how the value lies."""
    found = seen(lambda x: [mark(x, said) for said in SAID], lies, args=(X,))
    assert found.kinds == ["layout"] * (len(SAID) - 1)
    for said, axes in zip(SAID, found.axes, strict=True):
        assert axes == [dim.axes for dim in Layout(said).dims], "believed from here on"
    assert seen(lambda x: mark(x, lies), lies, args=(X,)).kinds == []


MARKS = {
    "a part of a sum": (lambda x: mark(x.sum(1), "a {U:tp}"), "a b/tp", []),
    "a part that is called whole": (lambda x: mark(x.sum(1), "a"), "a b/tp", ["partial"]),
    "a count of a piece's rows": (lambda x: mark(jnp.ones_like(x).sum(1), "a {U:tp}"), "a b/tp", []),
    "a whole that is called a part": (lambda x: mark(x.sum(1), "a {U:tp}"), "a b", ["partial"]),
    "a part over another axis": (lambda x: mark(x.sum(1), "a {U:dp}"), "a b/tp", ["partial", "partial"]),
    "a sum that is complete": (lambda x: mark(lax.psum(x.sum(1), "tp"), "a"), "a b/tp", []),
    "a sort of pieces": (lambda x: mark(jnp.sort(x, 0), "a/dp b", "output"), "a/dp b", ["pending"]),
    "noise would be the same": (lambda x: mark(x * 0 + jnp.arange(16.0)[: x.shape[0], None], "a b"), "a b", []),
}


@pytest.mark.parametrize("name", MARKS)
def test_marks(name):
    body, lies, kinds = MARKS[name]
    assert seen(body, lies, args=(X,)).kinds == kinds


def test_an_axis_of_the_string_may_not_hide_behind_dots():
    hides = lambda x: mark(x, "... b", "operand", 'defer(x, "... b -> ... b {R:tp}")', named=("tp",))
    assert seen(hides, "a/tp b", args=(X,)).kinds == ["hidden"]
    assert seen(hides, "a/dp b", args=(X,)).kinds == []


def test_a_mistake_is_told_once():
    """What was claimed is believed, so the second claim of the same is silent, and one of something else is not."""
    twice = lambda x: mark(mark(x, "a b/dp"), "a b/dp")
    assert seen(twice, "a/dp b", args=(X,)).kinds == ["layout"]
    other = lambda x: mark(mark(x, "a b/dp"), "a/dp b")
    assert seen(other, "a/dp b", args=(X,)).kinds == ["layout", "layout"]


def test_the_users_word_is_taken():
    found = seen(lambda x: mark(assert_equal(x, "tp"), "a b"), "a b/tp", args=(X,))
    assert found.kinds == [] and not found.states[0].axes


def test_what_devices_leave_out_by_their_number_is_a_term_of_a_sum() -> None:
    """A broadcast from one device, by a choice and by a factor. Blocks of a whole are not terms of a sum."""
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    kernel = spmd.kernel("m/x k/y -> m/x", mesh=spmd.make_mesh(x=2, y=4))
    first = lambda: spmd.axis_index("y") == 0
    for chosen in (lambda a: jnp.where(first(), a, 0), lambda a: a * first().astype(a.dtype)):
        body = lambda a, chosen=chosen: spmd.psum(chosen(a), "m/x _ {U:y} -> m/x _").sum(1)
        np.testing.assert_allclose(kernel(body)(x), x[:, :2].sum(1), rtol=1e-5)
    with pytest.raises(spmd.errors.SpmdError, match="not a term|not terms|holds a block"):
        kernel(lambda a: spmd.psum(a * 1.0, "m/x _ {U:y} -> m/x _").max(1))(x)
