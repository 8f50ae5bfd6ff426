"""The table of primitives: its rows are read by every room, so each column has to mean something there."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd._jaxprs import primitives
from spmd._jaxprs.primitives import COLLECTIVES, PRIMITIVES, Primitive
from spmd._jaxprs.walker import equations
from spmd.checker._linear import LINEAR
from spmd.checker._table import TABLE
from tests.checker.test_primitives import PROGRAMS


def test_no_primitive_stands_twice():
    rows = [line.split("|")[-1].split() for line in primitives._TABLE.strip().splitlines()]
    names = [name for row in rows for name in row]
    assert len(names) == len(set(names)) > 150
    assert set(COLLECTIVES).isdisjoint(names)


def test_each_column_is_known_where_it_is_read():
    costs = set(re.findall(r"`(\w+)`", inspect.getdoc(Primitive).partition("| cost |")[2]))
    assert {one.cost for one in PRIMITIVES.values()} == costs
    assert {one.sums for one in PRIMITIVES.values()} - {""} <= set(LINEAR)
    assert set(TABLE) == {name for name, one in PRIMITIVES.items() if one.dims}


class Read(dict):
    """Parameters that remember which of them were read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def read_by(fn: Any, eqn: Any) -> set[str]:
    params = Read(eqn.params)
    fn(type("Equation", (), {"invars": eqn.invars, "outvars": eqn.outvars, "params": params}))
    return params.names


def test_a_map_is_remembered_by_all_that_it_reads():
    """Else two equations of one shape would share the map of the first."""
    met = set()
    for fn, args in PROGRAMS.values():
        for eqn in equations(jax.make_jaxpr(fn)(*args)):
            if (entry := TABLE.get(eqn.primitive.name)) is not None:
                read = read_by(entry.map, eqn)
                assert read <= (read_by(entry.told, eqn) if entry.told else set()), eqn.primitive.name
                met |= {eqn.primitive.name} if read else set()
    assert len(met) > 25


CURVES = ("tan", "arctan", "arcsinh", "sinh")


@pytest.mark.parametrize("name", CURVES)
def test_any_curve_is_fused(name):
    """One that is not as frequent as tanh computes as much, and needs no more memory."""
    mesh = spmd.make_mesh(dp=4, abstract=True)
    x = jax.ShapeDtypeStruct((1 << 14,), np.float32)
    make = lambda curve: spmd.kernel("n/dp -> n/dp", mesh=mesh)(lambda x: curve(curve(x) + 1) * x)
    one, other = (spmd.explain(make(getattr(jnp, which)), x) for which in (name, "tanh"))
    assert one.memory == other.memory and one.memory.estimated is not None
    assert one.written.flops == other.written.flops
