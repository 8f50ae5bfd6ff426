"""Collectives are traced and differentiated once for all arrays of one type, and their equations do not show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.checker import line_of
from tests.jaxprs import equations

MESH = spmd.make_mesh(x=4)


def ours(w: Any) -> Any:
    return spmd.all_gather(w, "n/x d -> n d", to="varying")


def again(w: Any) -> Any:
    return spmd.all_gather(w, "n/x d -> n d", to="varying")


def by_hand(w: Any) -> Any:
    return lax.all_gather(w, "x", axis=0, tiled=True)


def gradient(one: Callable[[Any], Any], other: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a sum of two gathers on two lines."""

    def shards(w: Any) -> Any:
        def total(w: Any) -> Any:
            once = one(w) * 2
            twice = other(w) * 3
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
    jax.make_jaxpr(gradient(ours, again))(jnp.ones((28, 3)))  # a shape that no other test has
    assert len(entered) == 1


def test_its_equations_are_those_of_jax() -> None:
    w = jnp.ones((8, 3))
    found, wanted = (list(equations(jax.make_jaxpr(gradient(*two))(w))) for two in ((ours, again), (by_hand, by_hand)))
    names = lambda eqns: sorted(one for eqn in eqns if (one := str(eqn.primitive)) != "spmd_layout")
    assert names(found) == names(wanted)
    gathers = [eqn for eqn in found if str(eqn.primitive) == "all_gather"]
    assert len({line_of(eqn) for eqn in gathers}) == 2, "each has the line of its caller"


def test_the_places_of_a_sort_differ_where_the_keys_do() -> None:
    """JAX types those of `jnp.argsort` as equal, because all devices count alike."""
    typed = []

    def shards(x: Any, y: Any) -> Any:
        ours = lambda z: spmd.argsort(z, "[n]")
        typed.extend(jax.typeof(fn(z)).manual_axis_type.varying for fn in (ours, jnp.argsort) for z in (x, y))
        return x

    x = np.arange(8.0, dtype=np.float32)
    jax.make_jaxpr(jax.shard_map(shards, mesh=MESH, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x")))(x, x)
    assert typed[:2] == [frozenset({"x"}), frozenset()] and not typed[3]
