"""The printed rules are those that the checker goes by: all of them, each in words that agree with its map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmd.checker._dataflow import Dataflow, rules
from spmd.checker._linear import LINEAR
from spmd.checker._table import TABLE


def test_every_rule_is_printed_once():
    found = rules()
    assert set(found.table) | set(found.own) == set(TABLE) | set(Dataflow.rules)
    assert set(found.table).isdisjoint(found.own)
    assert set(found.own) == set(Dataflow.rules)
    assert set(found.partial) == {linear for _, linear in found.table.values()} <= set(LINEAR)


def test_every_rule_has_words():
    found = rules()
    for name, text in {**found.partial, **found.own}.items():
        assert text.endswith(".") and len(text.split()) > 2, name


PROGRAMS = {
    "reduce_sum": lambda x: x.sum(0),
    "reduce_max": lambda x: x.max(0),
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "cumsum": lambda x: lax.cumsum(x),
    "sort": lambda x: lax.sort(x),
    "rev": lambda x: lax.rev(x, (0,)),
    "cummax": lambda x: lax.cummax(x),
    "dot_general": lambda x: x @ x,
    "exp": jnp.exp,
    "transpose": lambda x: x.T,
    "cholesky": lax.linalg.cholesky,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_words_agree_with_the_map(name):
    eqns = jax.make_jaxpr(PROGRAMS[name])(jnp.eye(4)).eqns
    [eqn] = [eqn for eqn in eqns if eqn.primitive.name == name]
    says, _ = rules().table[name]
    made = TABLE[name].map(eqn)
    assert set(made.reduced.values()) == ({says.removeprefix("reduced: ")} if "reduced" in says else set())
    assert set(made.whole.values()) == ({says.removeprefix("whole: ")} if "whole" in says else set())
