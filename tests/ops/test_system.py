"""What the solvers read of a call: which axes divide the vector, and how many elements it has."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd import _compat
from spmd.modes import MODES
from spmd.ops._system import System, system
from tests.ops.harness import run


def test_axes_and_size_of_a_vector_in_every_mode() -> None:
    """All dimensions are one vector; only in explicit mode do sums go over devices."""
    seen: dict[str, System] = {}

    def body(b: Any, mode: str) -> Any:
        seen[mode] = known = system("cg", "x/a y/b", b, {"apply(b)": lambda x: 2 * x}, None, {})
        return known.b

    for mode in MODES:
        run(lambda b, mode=mode: body(b, mode), {"a": 2, "b": 3}, ["x/a y/b"], "x/a y/b", mode)(jnp.ones((4, 3)))
    assert {mode: known.axes for mode, known in seen.items()} == {m: ("a", "b") * (m == "explicit") for m in MODES}
    assert {known.size for known in seen.values()} == {12}


def test_the_right_side_varies_wherever_the_functions_make_it_vary() -> None:
    def body(b: Any, w: Any) -> Any:
        known = system("cg", "x", b, {"apply(b)": lambda x: x * w.sum()}, None, {})
        assert set(_compat.varying_axes(known.b)) == {"a"}
        return w

    run(body, {"a": 2}, ["x", "y/a"], "y/a")(jnp.ones(3), jnp.ones(4))
