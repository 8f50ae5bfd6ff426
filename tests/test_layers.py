"""Every registered layer: values, gradients, collectives and bytes; and proof that each of these can fail."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

import spmd
from tests.conftest import case_count
from tests.layers import (
    CASES,
    LayerCase,
    check,
    check_any_mesh,
    check_nested,
    drawn,
    fit,
    placements,
    register_all,
    total,
)
from tests.sampler import first_seed

register_all()


def some(count):
    """The first case of each of a few layers, which the seed chooses."""
    names = np.random.default_rng(first_seed()).permutation(sorted(CASES))[: max(count, 1)]
    return [next(case for case in drawn([name])) for name in names]


@pytest.mark.parametrize("case", drawn(), ids=lambda case: f"{case.name}-{case}")
def test_layer(case):
    check(case)


@pytest.mark.parametrize("case", some(case_count() // 3), ids=lambda case: f"{case.name}-{case}")
def test_layer_under_vmap_scan_and_remat(case):
    """A few of all layers; each of them once if SPMD_TEST_CASES is large."""
    check_nested(case)


@pytest.mark.parametrize("case", some(case_count() // 2), ids=lambda case: f"{case.name}-{case}")
def test_layer_is_the_same_on_any_mesh(case):
    """A few of all layers; each of them once if SPMD_TEST_CASES is large."""
    check_any_mesh(case)


# -------------------- the checks can fail

GOOD = LayerCase(
    name="square",
    fn=lambda axes: lambda x, w: spmd.einsum(x, x * w[None], "b/dp d/tp, b/dp d/tp -> b/dp", **axes),
    ins=("b/dp d/tp", "d/tp"),
    outs="b/dp",
    shapes={"b": 6, "d": 10},
    mesh={"dp": 2, "tp": 2},
    axes={"dp": "dp", "tp": "tp"},
    reference=lambda x, w: (x * x * w[None]).sum(-1),
    forward=lambda c: c.traffic("psum", "tp", "b/dp"),
    backward=lambda c: c.traffic("psum", "dp", "d/tp"),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes(dtype):
    check(replace(GOOD, dtype=dtype))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"reference": lambda x, w: (x * x * w[None]).sum(-1) * 1.001}, "explicit: result 0"),
        ({"reference": lambda x, w: (x * jax.lax.stop_gradient(x) * w[None]).sum(-1)}, "explicit: gradient 0"),
        ({"fn": lambda axes: lambda x, w: right_in("explicit", x, w)}, "auto: result 0"),
        ({"fn": lambda axes: lambda x, w: right_in("auto", x, w)}, "explicit: result 0"),
        ({"forward": lambda c: c.traffic("psum", "tp", "b/dp", 2)}, "^forward: compiled"),
        ({"forward": lambda c: c.traffic("psum", "tp", "b d/tp")}, "^forward: compiled"),
        ({"forward": lambda c: c.traffic("psum", "dp", "b/dp")}, "^forward: compiled"),
        ({"backward": lambda c: {}}, "forward and backward: compiled"),
        ({"out_dtype": "bfloat16"}, "result 0 is float32"),
    ],
)
def test_what_is_wrong_is_noticed(change, fault):
    with pytest.raises(AssertionError, match=fault):
        check(replace(GOOD, **change))


def right_in(mode, x, w):
    """A layer that is right in one mode only: it takes the local size of a divided dimension for the whole."""
    whole = {"explicit": 3, "auto": 6}[mode]
    return spmd.einsum(x, x * w[None], "b/dp d/tp, b/dp d/tp -> b/dp") * (x.shape[0] / whole)


def test_formulas():
    """Bytes of every kind, by hand: blocks of 3 x 5 float32."""
    block = 3 * 5 * 4
    assert GOOD.block("b/dp d/tp") == block == replace(GOOD, dtype="bfloat16").block("b/dp d/tp")
    assert GOOD.traffic("all_gather", "tp", "b/dp d") == {"all_gather tp": (1, block)}
    assert GOOD.traffic("psum", "tp", "b/dp d/tp", 3) == {"psum tp": (3, 3 * block)}
    assert GOOD.traffic("ppermute", "dp", "b/dp d/tp") == {"ppermute dp": (1, block)}
    assert GOOD.traffic("psum", ("tp", "dp"), "d") == {"psum dp,tp": (1, 60)}
    assert replace(GOOD, mesh={"dp": 2, "tp": 1}).traffic("psum", "tp", "b/dp") == {}
    assert total({"a": (1, 2)}, {"b": (1, 1)}, {"a": (2, 3)}) == {"a": (3, 5), "b": (1, 1)}


def test_placements():
    """Each role divided and not, by one axis and by two; shared ones only where the other is there."""
    found = list(placements("dp", "tp", shared=[("sp", "tp")]))
    assert all(1 < math.prod(mesh.values()) <= 8 for mesh, _ in found)
    assert {axes["tp"] for _, axes in found} == {None, "tp", ("x", "y")}
    assert {axes["sp"] == axes["tp"] for _, axes in found if axes["tp"]} == {True, False}
    assert {axes["sp"] for _, axes in found if axes["tp"] is None} == {None}
    assert {n for mesh, _ in found for n in mesh.values()} == {1, 2, 3, 4}
    mesh, axes = {"dp": 2, "x": 2, "y": 2}, {"dp": "dp", "tp": ("x", "y"), "sp": None}
    assert (mesh, axes) in found
    assert fit(mesh, axes, b=(3, "dp"), s=(5, "sp"), d=(7, "tp"), k=(2,)) == {"b": 6, "s": 5, "d": 28, "k": 2}
