"""Which layers a call comes from, and which of their keywords name mesh axes."""

import sys
from types import CodeType

import jax.numpy as jnp
import pytest

import spmd
import spmd.nn
import spmd.parallel  # rooms load when they are used, and here none is
from spmd._jaxprs.callers import layer_now, layers_of, rather_told


def test_the_users_layer_is_the_outermost_one() -> None:
    found: list[tuple[str | None, list[str]]] = []

    def activation(x: object) -> object:
        frame, codes = sys._getframe(), list[CodeType]()
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        found.append((layer_now(), layers_of(codes)))
        return x

    mesh = spmd.make_mesh(tp=2)
    kernel = spmd.kernel("b d, d f/tp, f/tp d -> b d", mesh=mesh)(
        lambda x, w, v: spmd.nn.mlp(x, w, v, activation=activation, tp="tp")
    )
    kernel(*[jnp.ones((4, 4))] * 3)
    assert found[0] == ("nn.mlp", ["nn.mlp"])
    assert layer_now() is None


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("nn.mlp", "tp= or sp= or cp= of nn.mlp, if one is for this axis; or else f(x) before it"),
        ("parallel.global_norm", '"a b/tp" where parallel.global_norm is told how it lies; or else f(x) before it'),
    ],
)
def test_a_layer_is_rather_told(layer: str, text: str) -> None:
    assert rather_told(layer, "a b/tp", "f(x)") == text
