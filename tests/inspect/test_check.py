"""The public call: what `strict=True` asks for, and that the findings can show their program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import SpmdError

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def kernel(pattern: str, body: Any) -> Any:
    return spmd.kernel(pattern, mesh=spmd.make_mesh(dp=2, tp=4))(body)


def test_strict_asks_for_proof_or_test() -> None:
    def twice(x):
        return x * x.shape[0]

    assert spmd.check(kernel("b/dp d -> b/dp d", jnp.sin), X, strict=True).verdict.kind == "proved"
    with pytest.raises(spmd.errors.ReplicationError, match="computes something else"):
        spmd.check(kernel("b/dp d -> b/dp d", twice), X, strict=True)
    with pytest.raises(SpmdError, match=r"strict=True asks for proof or test[\s\S]*nothing to check"):
        spmd.check(jnp.sin, X, strict=True)
    called = kernel("b/dp d -> b/dp d", lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    assert spmd.check(called, X).verdict.kind == "not tested"
    with pytest.raises(SpmdError, match="pure_callback"):
        spmd.check(called, X, strict=True)


def test_findings_show_their_program() -> None:
    def sines(x):
        y = jnp.sin(x)
        return y * 2

    [block] = spmd.check(kernel("b/dp d -> b/dp d", sines), X).source().blocks
    assert "y  b/dp d" in [str(value) for line in block.lines for value in line.values]
