"""The rules of partial sums against numbers: what passes may be done to the parts, and what is a fault may not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd.checker._linear import LINEAR
from spmd.checker._state import State, plain
from spmd.checker._table import TABLE

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
PARTS = [RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(3)]
TP = frozenset(("tp",))


class Walk:
    """What a rule tells of faults."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def fault(self, eqn: Any, axes: Any, kind: str, describe: Any) -> None:
        assert axes
        self.kinds.append(kind)


def said(fn, *states: State, args: Any) -> tuple[bool | None, str]:
    """Whether the result is a partial sum (None: nobody knows), and the fault that is told."""
    eqn = jax.make_jaxpr(fn)(*args).eqns[-1]
    walk = Walk()
    partial, lost, _ = LINEAR[TABLE[eqn.primitive.name].linear](walk, eqn, states)
    return (None if lost else bool(partial)), "".join(walk.kinds)


def state(*, partial: bool = False, **more: Any) -> State:
    return State((plain(4), plain(4)), TP if partial else frozenset(), **more)


def distributes(fn, *operands, partial) -> bool:
    """Whether the results of the parts add up to the result of the sums."""
    each = [fn(*(p[i] if is_part else p for p, is_part in zip(operands, partial, strict=True))) for i in range(3)]
    whole = fn(*(sum(p) if is_part else p for p, is_part in zip(operands, partial, strict=True)))
    return np.allclose(sum(each), whole, rtol=1e-4, atol=1e-4)


ONE = {
    "neg": jnp.negative,
    "transpose": jnp.transpose,
    "sum": lambda x: lax.reduce_sum(x, (0,)),
    "cumsum": lax.cumsum,
    "reverse": lambda x: lax.rev(x, (0,)),
    "to integers": lambda x: lax.convert_element_type(x * 3, "int32"),
    "sqrt": lambda x: lax.sqrt(x),
    "exp": lax.exp,
    "abs": lax.abs,
    "square": lax.square,
    "max": lambda x: lax.reduce_max(x, (0,)),
    "sort": lax.sort,
    "floor": lax.floor,
}


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_partial_sum(name):
    fn = ONE[name]
    parts = [abs(p) for p in PARTS] if name == "sqrt" else PARTS
    passes, kind = said(fn, state(partial=True), args=(X,))
    assert bool(passes) == distributes(fn, parts, partial=[True])
    assert kind == ("" if passes else "nonlinear")
    assert said(fn, state(), args=(X,)) == (False, ""), "of a complete value nothing is told"


TWO = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "div": lax.div,
    "dot": lambda x, y: lax.dot(x, y),
    "max": lax.max,
}


@pytest.mark.parametrize("partial", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "dot", "max"])
def test_functions_of_two_values(name, partial):
    """A complete value is equal on the axis. What the rule lets pass adds up, and what adds up it lets pass."""
    operands = [PARTS if part else Y for part in partial]
    if all(partial):
        operands[1] = [p * 2 + 1 for p in PARTS]
    passes, kind = said(TWO[name], *(state(partial=part) for part in partial), args=(X, Y))
    assert bool(passes) == distributes(TWO[name], *operands, partial=partial)
    assert (kind in ("mixed", "nonlinear")) == (not passes)


@pytest.mark.parametrize("partial", [(True, False), (True, True)], ids=str)
def test_zeros_are_neutral(partial):
    """Zero is a part of any sum: it may be added to parts, and multiplied by them."""
    zero = state(partial=partial[1], zero=True)
    assert said(lax.add, state(partial=True), zero, args=(X, Y)) == (True, "")
    assert said(lax.mul, state(partial=True), zero, args=(X, Y)) == (False, "")
    assert distributes(lax.add, PARTS, [0 * Y] * 3, partial=[True, True])


def test_a_choice_by_an_equal_predicate_is_linear():
    choose = lambda p, x, y: lax.select(p, x, y)
    args = X > 0, X, Y
    bit = state()
    assert said(choose, bit, state(partial=True), state(partial=True), args=args) == (True, "")
    assert distributes(lambda x, y: choose(X > 0, x, y), PARTS, PARTS, partial=[True, True])
    assert not distributes(lambda x, y: choose(X > 0, x, y), PARTS, Y, partial=[True, False])
    assert said(choose, bit, state(partial=True), state(), args=args)[1] == "mixed"
    assert said(choose, state(partial=True), state(), state(), args=args)[1] == "nonlinear"


def test_what_is_unknown_is_no_fault():
    """A value that differs, nobody knows how, may be part of that very sum."""
    other = state(different=TP)
    assert said(lax.add, state(partial=True), other, args=(X, Y)) == (None, "")
    assert said(lax.mul, state(partial=True), other, args=(X, Y)) == (None, "")
    block = State((((4, ("tp",)),), plain(4)))
    assert said(lax.mul, state(partial=True), block, args=(X, Y))[1] == "nonlinear", "each part by another number"


def test_quotients_of_whole_numbers_round():
    whole = X.astype("int32")
    assert said(lax.div, state(partial=True), state(), args=(whole, whole))[1] == "nonlinear"
    assert said(lax.div, state(partial=True), state(), args=(X, Y)) == (True, "")
    assert said(lax.div, state(), state(partial=True), args=(X, Y))[1] == "nonlinear"
