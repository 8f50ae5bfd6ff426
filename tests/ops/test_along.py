"""What every operation along brackets relies on: one operation, written here, in two ways that must agree."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd.comm import _lax
from spmd.errors import CommunicationError, LayoutError, SpmdError
from spmd.language import Layout
from spmd.modes import MODES
from spmd.ops._along import along
from tests import simulator as sim
from tests.ops.harness import close, frame, run
from tests.sampler import Sampler, seeds


def centred(x, pattern, ways=None, **names):
    """The array less its mean along the brackets. `ways` notes which of the two ways was taken, and over which axes."""
    one = along("centred", x, pattern, names, linear=True)
    count = np.prod([factor.size for factor in one.factors])

    def way(name, total):
        if ways is not None:
            ways.append((name, one.axes))
        return one.x - total / np.asarray(count, one.x.dtype)

    total = one.x.sum(one.dims, keepdims=True)
    return one.result(lambda: way("whole", total), lambda: way("divided", _lax.psum(total, one.axes)))


def bracketed(layout: str, marked: set[int]) -> str:
    return " ".join(f"[{word}]" if i in marked else word for i, word in enumerate(layout.split()))


@pytest.mark.parametrize("seed", seeds())
def test_both_ways_agree_with_numpy(seed):
    draw = Sampler(seed)
    sizes = draw.mesh()
    layout = draw.layout("a b c", sizes)
    marked = {int(i) for i in draw.rng.permutation(3)[: draw.rng.integers(1, 4)]}
    pattern = bracketed(layout, marked)
    x = draw.rng.normal(size=tuple(draw.sizes("a b c", sizes, [layout]).values())).astype(np.float32)
    dims = sim.bracketed(pattern)
    for mode in MODES:
        ways = []
        out = run(lambda x, ways=ways: centred(x, pattern, ways), sizes, [layout], layout, mode)(x)
        close(np.asarray(out), x - x.mean(dims, keepdims=True))
        marked_axes = [sim.read(layout).dims[i][0][1] for i in marked]
        wide = {axis for axes in marked_axes if sim.count(sizes, axes) > 1 for axis in axes}
        axes = tuple(axis for axis in sizes if axis in wide) if mode == "explicit" else ()
        assert set(ways) == {("divided" if axes else "whole", axes)}, "in mesh order, and only where something divides"


def test_brackets_around_two_factors():
    """One dimension of the array, two factors in brackets, and `...` before them; one of the factors is divided."""
    x = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
    ways = []

    def body(x):
        return centred(x, "... [(h/tp k)]", ways, h=4)

    for mode in MODES:
        close(np.asarray(run(body, {"tp": 2}, ["a b c/tp"], "a b c/tp", mode)(x)), x - x.mean(-1, keepdims=True))
    assert ("divided", ("tp",)) in ways


def test_an_axis_of_one_device_that_leaves_is_left_invarying():
    """JAX types a block along an axis of size 1 varying; a result whose layout lacks the axis could not leave."""

    def total(x):
        one = along("total", x, "a [b/r]", {})
        return one.result(lambda: one.x.sum(one.dims), lambda: pytest.fail("one device divides nothing"), Layout("a"))

    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    close(np.asarray(run(total, {"r": 1}, ["a b/r"], "a")(x)), x.sum(1))


REFUSED = {
    "no brackets": ({}, "a b", np.float32, LayoutError, "no brackets"),
    "two where one is meant": ({"most": 1}, "[a] [b]", np.float32, LayoutError, "2 in brackets"),
    "complex numbers in order": ({"ordered": True}, "[a] b", np.complex64, LayoutError, "ordered"),
    "parts of a sum": ({}, "[a] b {U:tp}", np.float32, CommunicationError, "psum first"),
    "a margin": ({}, "[a/tp+1] b", np.float32, SpmdError, "margin"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_what_is_allowed_beside_it(name):
    options, pattern, dtype, error, words = REFUSED[name]
    with frame({"tp": 2}, "explicit").enter(), pytest.raises(error, match=words):
        along("centred", jnp.zeros((4, 4), dtype), pattern, {}, **options)


def test_what_those_options_allow():
    with frame({"tp": 2}, "reference").enter():
        assert along("centred", jnp.zeros((4, 4)), "[a] [b]", {}, most=2).dims == (0, 1)
        assert along("centred", jnp.zeros((4, 4)), "a [b]", {}, most=1, ordered=True).dim == 1
        assert along("centred", jnp.zeros((4, 4)), "[a] b {U:tp}", {}, linear=True).factor.name == "a"
