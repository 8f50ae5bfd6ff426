"""The rules of powers, one equation at a time: what is known of a result, and what nobody knows."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd.checker._powers import NEAR, RULES, ZERO, Grown, Operand, power_of
from spmd.checker._state import State, free, plain

X = np.ones((4, 4), np.float32)
ONE, TWO = Fraction(1), Fraction(2)
DATA = State((plain(4), plain(4)))
ROW = State((plain(4), free(4)))  # the same in each row: a shift
NUMBER = State((free(4), free(4)), number=True)
ZEROS = State((free(4), free(4)), number=True, zero=True)
FIRM = Grown()
LIKE = Grown(factor=True, term=True, varies=False, like=ONE)
FACTOR, TERM = Grown(factor=True), Grown(term=True, varies=False)


def said(fn: Any, *operands: tuple[Any, State]) -> Any:
    eqn = jax.make_jaxpr(fn)(*[X] * len(operands)).eqns[-1]
    return power_of(eqn, [Operand(*one) for one in operands])


def kind(power: Any) -> Any:
    return (power.factor, power.term) if isinstance(power, Grown) else power


add, sub, mul, div = lax.add, lax.sub, lax.mul, lax.div
JOIN = lambda x, y: lax.concatenate([x, y], 0)
SOLVE = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True)
CASES = {
    "a norm": (mul, [(ONE, DATA), (LIKE._replace(like=-ONE), ROW)], NEAR),
    "a norm by division": (div, [(ONE, DATA), (LIKE, ROW)], NEAR),
    "another norm": (div, [(TWO, DATA), (LIKE, ROW)], None),
    "behind a norm": (add, [(NEAR, DATA), (ZERO, DATA)], NEAR),
    "a stream and its norm": (add, [(ONE, DATA), (NEAR, DATA)], (False, False)),
    "too large a norm": (mul, [(ONE, DATA), (NEAR, DATA)], None),
    "a matrix as a divisor": (SOLVE, [(ONE, DATA), (TWO, DATA)], ONE),
    "a stream as a divisor": (SOLVE, [(FIRM, DATA), (ZERO, DATA)], (False, False)),
    "solved for a stream": (SOLVE, [(ZERO, DATA), (FACTOR, DATA)], (True, False)),
    "a stream by what is too large": (SOLVE, [(FIRM, DATA), (ONE, DATA)], None),
    "equal powers": (add, [(ONE, DATA), (ONE, DATA)], ONE),
    "a zero": (add, [(ONE, DATA), (ZERO, ZEROS)], ONE),
    "two data": (add, [(ONE, DATA), (ZERO, DATA)], (False, False)),
    "data and a shift": (add, [(ZERO, DATA), (ONE, ROW)], (False, True)),
    "a shift that is not too large": (add, [(ONE, DATA), (ZERO, ROW)], (True, True)),
    "eps": (add, [(ONE, DATA), (ZERO, NUMBER)], (True, True)),
    "a stream": (add, [(FIRM, DATA), (ZERO, DATA)], (False, False)),
    "what may be taken away again": (sub, [(FIRM, DATA), (ONE, DATA)], None),
    "a value and itself": (lambda x, y: x - x, [(ONE, DATA), (ONE, DATA)], ZERO),
    "two of one path": (sub, [(FIRM, DATA), (FIRM, DATA)], None),
    "two of unlike paths": (sub, [(FIRM, DATA), (FIRM._replace(path=1), DATA)], (False, False)),
    "with a term": (sub, [(TERM, DATA), (TERM._replace(path=1), DATA)], None),
    "the same term twice": (add, [(TERM, DATA), (TERM, DATA)], (False, True)),
    "nobody knows": (add, [(FIRM, DATA), (None, DATA)], None),
    "a product": (mul, [(ONE, DATA), (TWO, DATA)], Fraction(3)),
    "a quotient": (div, [(ONE, DATA), (TWO, DATA)], Fraction(-1)),
    "a factor that may undo it": (mul, [(FACTOR, DATA), (ONE, DATA)], None),
    "a factor that may not": (mul, [(FIRM, DATA), (ONE, DATA)], (False, False)),
    "a factor that is right": (mul, [(FACTOR, DATA), (ZERO, DATA)], (True, False)),
    "two that grow": (mul, [(FACTOR, DATA), (FIRM, DATA)], None),
    "a norm of a stream": (mul, [(FIRM, DATA), (FIRM._replace(path=3), DATA)], (False, False)),
    "something by itself": (div, [(FIRM, DATA), (FIRM, DATA)], None),
    "times zero": (mul, [(FIRM, DATA), (ZERO, ZEROS)], ZERO),
    "a root": (lax.sqrt, [(TWO, DATA)], ONE),
    "a root of what grows": (lax.rsqrt, [(FACTOR, DATA)], (True, False)),
    "bounded": (lax.tanh, [(ONE, DATA)], (False, False)),
    "bounded, of a number": (lax.tanh, [(ONE, NUMBER)], (True, False)),
    "a logarithm": (lax.log, [(ONE, DATA)], (False, True)),
    "an exponential of a term": (lax.exp, [(TERM, DATA)], (True, False)),
    "not scaled": (lax.exp, [(ZERO, DATA)], ZERO),
    "larger": (lax.gt, [(ONE, DATA), (ONE, DATA)], ZERO),
    "positive": (lax.gt, [(ONE, DATA), (ZERO, ZEROS)], ZERO),
    "larger than another": (lax.gt, [(ONE, DATA), (ZERO, DATA)], None),
    "a sign": (lax.sign, [(ONE, DATA)], ZERO),
    "a sign of what grows": (lax.sign, [(FIRM, DATA)], None),
    "finite": (lax.is_finite, [(FIRM, DATA)], ZERO),
    "rounded": (lax.floor, [(ONE, DATA)], None),
    "cut at zero": (lax.max, [(ONE, DATA), (ZERO, ZEROS)], ONE),
    "cut at a number": (lax.max, [(ONE, DATA), (ZERO, NUMBER)], (True, True)),
    "the larger of two": (lax.max, [(ONE, DATA), (ZERO, DATA)], None),
    "unlike side by side": (JOIN, [(ONE, DATA), (ZERO, DATA)], None),
    "two that grow side by side": (JOIN, [(FACTOR, DATA), (FIRM._replace(path=1), DATA)], (True, False)),
    "a value and its negative side by side": (JOIN, [(FIRM, DATA), (FIRM._replace(turned=True), DATA)], None),
    "what grows beside what does not": (JOIN, [(FIRM, DATA), (ZERO, DATA)], None),
    "repeated": (lambda x: lax.broadcast_in_dim(x, (2, 4, 4), (1, 2)), [(FIRM, DATA)], (True, True)),
    "of all elements": (lambda x: x.sum(), [(FACTOR, DATA)], (True, False)),
    "a product of all": (lambda x: x.prod(), [(ONE, DATA)], None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule(name: str) -> None:
    fn, operands, wanted = CASES[name]
    assert kind(said(fn, *operands)) == wanted


def test_masks_take_elements_of_each_case() -> None:
    select = lambda *powers: said(
        lambda m, x, y: lax.select_n(m > 0, x, y), *zip(powers, (DATA, DATA, DATA), strict=True)
    )
    assert select(ZERO, ONE, ONE) == ONE and kind(select(ZERO, ONE, ZERO)) == (True, True)
    assert select(None, ONE, ONE) is None and select(ZERO, FIRM, ZERO) is None


def test_a_difference_turns_the_sign() -> None:
    [turned] = {said(sub, (ZERO, DATA), (FIRM, DATA)), said(lambda x: -x, (FIRM, DATA))}
    assert turned == FIRM._replace(turned=True)
    assert said(add, (FIRM, DATA), (turned, DATA)) is None


def test_places_that_depend_on_the_size() -> None:
    """An element at another place is another element."""
    take = lambda x, i: lax.dynamic_slice(x, (i.astype(jnp.int32)[0, 0], jnp.int32(0)), (1, 4))
    eqn = jax.make_jaxpr(take)(X, X).eqns[-1]
    index = State((), number=True)
    for power, wanted in ((ZERO, ONE), (ONE, None), (None, None)):
        given = [Operand(ONE, DATA), Operand(power, index), Operand(ZERO, index)]
        assert power_of(eqn, given) == wanted


def test_a_factor_of_a_matrix() -> None:
    [eqn, *_] = jax.make_jaxpr(lambda x: lax.linalg.cholesky(x, symmetrize_input=False))(X).eqns
    assert power_of(eqn, [Operand(ONE, DATA)]) == Fraction(1, 2)
    assert kind(power_of(eqn, [Operand(FIRM, DATA)])) == (False, False)


def test_primitives_without_a_rule_keep_what_has_no_power() -> None:
    assert "erf_inv" in RULES and "rem" not in RULES
    assert said(lax.rem, (ZERO, DATA), (ZERO, DATA)) == ZERO
    assert said(lax.rem, (ONE, DATA), (ZERO, DATA)) is None
