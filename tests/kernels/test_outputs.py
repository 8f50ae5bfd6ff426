"""The results of a kernel: one, several, trees, numbers, and dataclasses whose layouts go by name."""

# ruff: noqa: F722, F821, UP037 - annotations that are layouts
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.kernels.test_signature import X, in_modes
from tests.sampler import share


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Named:
    y: "b/dp d"
    a: "d"


def test_several_outputs(mesh):
    @spmd.kernel("b/dp d -> b/dp d, scalar, b/dp", mesh=mesh)
    def body(x):
        return x, spmd.reduce(x, "b/dp d -> scalar"), x.sum(1)

    same, total, rows = in_modes(body, X)
    np.testing.assert_allclose(same, X)
    assert total == X.sum() and rows.tolist() == X.sum(1).tolist()


def test_outputs_in_a_tree(mesh):
    @spmd.kernel(in_layouts=("b/dp d",), out_layouts=({"x": "b/dp d"}, Pair("b/dp", "scalar")), mesh=mesh)
    def body(x):
        return {"x": x}, Pair(x.sum(1), spmd.reduce(x, "b/dp d -> scalar"))

    tree, pair = in_modes(body, X)
    assert set(tree) == {"x"} and isinstance(pair, Pair) and pair.right == X.sum()


def test_python_numbers_as_results(mesh):
    body = spmd.kernel("n/dp -> n/dp, scalar", mesh=mesh)(lambda x: (x, 3))
    assert in_modes(body, np.arange(4))[1] == 3


@pytest.mark.parametrize(
    "results",
    [{"y": "b/dp d"}, {"y": "... d/dp"}, lambda tree: {"y": "b/dp d"}],
    ids=["a layout", "dots before a slash", "a function"],
)
def test_the_body_is_traced_once(mesh, results):
    """Also where only the results tell how many layouts there are, and of what rank."""
    calls = []

    def body(x):
        calls.append(x.shape)
        return {"y": x}

    pattern = "... d/dp" if "... d/dp" in str(results) else "b/dp d"
    found = spmd.kernel(in_layouts=(pattern,), out_layouts=results, mesh=mesh)(body)(X)
    np.testing.assert_array_equal(found["y"], X)
    assert len(calls) == 1


@pytest.mark.parametrize("kinds", share(["Auto Auto", "Explicit Explicit", "Auto Explicit"]))
def test_layouts_of_results_go_by_name(kinds):
    """A dict of layouts for a class; scalars unmentioned, or below one layout for all."""
    kinds = tuple(getattr(jax.sharding.AxisType, kind) for kind in kinds.split())
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=kinds)
    by_dict = spmd.kernel(in_layouts=("b/dp d",), out_layouts={"a": "d", "y": "b/dp d"}, mesh=mesh)
    found = in_modes(by_dict(lambda x: Named(2 * x, jnp.ones(6))), X)
    np.testing.assert_allclose(found.y, 2 * X)
    assert found.a.shape == (6,)
    body = lambda x: {"n": jnp.float32(3), "x": x, "z": -x, "f": "text"}
    for layouts in ("b/dp ...", {"x": "b/dp d", "z": "b/dp d"}, {"x": "b/dp d", "z": "b/dp d", "n": "scalar"}):
        result = spmd.kernel(in_layouts=("b/dp d",), out_layouts=layouts, mesh=mesh)(body)
        for mode in MODES:
            found = getattr(result, mode)(X)
            assert found["n"] == 3 and found["f"] == "text"
            np.testing.assert_allclose(found["x"] - found["z"], 2 * X)
