"""What kernels say of wrong trees, sizes, statics and results, in messages.txt under the call; `bad_*.py` has the rest."""

from pathlib import Path

import jax
import numpy as np
import pytest

import spmd
from spmd import errors
from tests.goldens import pinned, raised

LIES = "b/dp d/tp"


def identity(x):
    return x


def two(x, kind="a"):
    return x


def linear(x, w):
    return spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")


def tree(x, p):
    return x


def told(call: str) -> str:
    """Return the error of a call; `run(pattern, body, *args)` calls a kernel, and `inside(body)` one of 8 x 8 numbers."""
    mesh = spmd.make_mesh(dp=2, tp=4)

    def run(pattern, body, *args, mode="explicit", **options):
        patterns = {"in_layouts": pattern[0], "out_layouts": pattern[1]} if isinstance(pattern, tuple) else {}
        given = () if patterns else (pattern,)
        return getattr(spmd.kernel(*given, **patterns, mesh=mesh, **options)(body), mode)(*args)

    ones = lambda *shape: np.ones(shape, np.float32)
    inside = lambda body, **how: run(f"{LIES} -> {LIES}", body, ones(8, 8), **how)
    own = {"jax": jax, "inside": inside, "lies": f"{LIES} -> {LIES}"}
    return raised(
        call,
        {
            **own,
            "spmd": spmd,
            "run": run,
            "ones": ones,
            "identity": identity,
            "two": two,
            "linear": linear,
            "tree": tree,
        },
    )


_, test_write, test_message = pinned(Path(__file__).with_name("messages.txt"), told)


def test_values_are_never_shown():
    secret = 31415926.0
    x = np.full((5, 6), secret, np.float32)
    with pytest.raises(errors.SizeError) as caught:
        spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2, tp=4))(identity)(x)
    assert "31415" not in str(caught.value)
