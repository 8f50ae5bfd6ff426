"""Collectives are traced and differentiated once for all arrays of one type, and their equations do not show it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd import _compat
from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import equations
from spmd.comm import _lax

MESH = spmd.make_mesh(x=4)
OURS = functools.partial(_lax.all_gather, axes=("x",), dim=0, to="varying")
BY_HAND = functools.partial(lax.all_gather, axis_name="x", axis=0, tiled=True)


def gradient(gather: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a sum of two gathers on two lines."""

    def shards(w: Any) -> Any:
        def total(w: Any) -> Any:
            once = gather(w) * 2
            twice = gather(w) * 3
            return lax.psum((once * twice).sum(), "x")

        return jax.grad(total)(w)

    return jax.shard_map(shards, mesh=MESH, in_specs=jax.P("x"), out_specs=jax.P("x"))


def test_a_gather_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    gather = lax.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        entered.append(args)
        return gather(*args, **kwargs)

    monkeypatch.setattr(lax, "all_gather", counted)
    jax.make_jaxpr(gradient(OURS))(jnp.ones((28, 3)))  # a shape that no other test has
    assert len(entered) == 1


def test_its_equations_are_those_of_jax() -> None:
    w = jnp.ones((8, 3))
    found, wanted = (list(equations(jax.make_jaxpr(gradient(gather))(w))) for gather in (OURS, BY_HAND))
    names = lambda eqns: sorted(str(eqn.primitive) for eqn in eqns)
    assert names(found) == names(wanted)
    gathers = [eqn for eqn in found if str(eqn.primitive) == "all_gather"]
    assert len({line_of(eqn) for eqn in gathers}) == 2, "each has the line of its caller"


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_the_places_of_a_sort(axis: int, descending: bool) -> None:
    """Those of `jnp.argsort`, with equal numbers in order and NaNs last."""
    x = np.random.default_rng(0).integers(0, 3, (8, 6)).astype(np.float32)
    x[2, 3], x[5, 1] = np.nan, -0.0
    ours = _lax.argsort(jnp.asarray(x), axis, descending=descending)
    wanted = jnp.argsort(x, axis=axis, stable=True, descending=descending)
    assert ours.dtype == wanted.dtype
    np.testing.assert_array_equal(ours, wanted)


def test_the_places_of_a_sort_differ_where_the_keys_do() -> None:
    """JAX types those of `jnp.argsort` as equal, because all devices count alike."""
    typed = []

    def shards(x: Any, y: Any) -> Any:
        typed.extend(_compat.varying_axes(fn(z)) for fn in (_lax.argsort, jnp.argsort) for z in (x, y))
        return x

    x = np.arange(8.0, dtype=np.float32)
    jax.make_jaxpr(jax.shard_map(shards, mesh=MESH, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x")))(x, x)
    assert typed[:2] == [frozenset({"x"}), frozenset()] and not typed[3]
