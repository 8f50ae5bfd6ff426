"""What a collective makes of a piece: the right mask beside one that two devices have, or none."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.checker import _scale
from spmd.checker._pieces import MAX, MIN, MINE, ONE, TAKEN, Piece
from spmd.checker._powers import ZERO

X = np.ones((8, 4), np.float32)
HERE = lambda x: lax.axis_index("dp")
SIZE = lambda x: lax.axis_size("dp")


def pieces(body: Any, monkeypatch: Any) -> list[Piece]:
    """The pieces along dp that a body of "a/dp b" makes."""
    found: list[Piece] = []
    rule = _scale.piece_of

    def kept(eqn: Any, given: Any, axis: str) -> Piece | None:
        piece = rule(eqn, given, axis)
        found.extend([piece] if piece is not None and axis == "dp" else [])
        return piece

    monkeypatch.setattr(_scale, "piece_of", kept)
    mesh = spmd.make_mesh(dp=4)
    spmd.check(spmd.kernel("a/dp b -> ...", mesh=mesh)(lambda x: lax.pmax(jnp.sum(body(x)), "dp")), X)
    return found


def whole(x: Any) -> Any:
    """The same row on all devices."""
    return lax.pmax(x.max(0), "dp")


def row_of(x: Any) -> Any:
    return whole(x)[0].astype(jnp.int32)


BODIES = {
    "a maximum": (lambda x: x.max(0), MAX, True),
    "a minimum": (lambda x: x.min(0), MIN, True),
    "a maximum of what is whole": (lambda x: x.max(1), MAX, False),
    "one device": (lambda x: jnp.where(HERE(x) == 1, whole(x), 0.0), ONE, True),
    "one device, by a factor": (lambda x: whole(x) * (HERE(x) == 1).astype(x.dtype), ONE, True),
    "all devices but one": (lambda x: jnp.where(HERE(x) != 1, whole(x), 0.0), ONE, False),
    "by a number": (lambda x: whole(x) * HERE(x).astype(x.dtype), ONE, False),
    "not zero elsewhere": (lambda x: jnp.where(HERE(x) == 1, whole(x), 1.0), ONE, False),
    "an element": (lambda x: x[row_of(x) - 2 * HERE(x)], TAKEN, True),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, kind, is_one = BODIES[name]
    assert (Piece(kind) in pieces(body, monkeypatch)) is is_one


# Blocks of two rows; low and high bounds of a row counted from the first one of a block.
BOUNDS = {(0, 2): True, (1, 2): True, (0, 1): True, (-1, 2): False, (0, 3): False}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_blocks_that_meet_have_a_row_twice(bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Any, per: int = 2) -> Any:
        row = row_of(x) - per * HERE(x)
        return ((row >= bounds[0]) & (row < bounds[1])).astype(x.dtype)

    assert (Piece(MINE) in pieces(body, monkeypatch)) is BOUNDS[bounds]
    assert Piece(MINE) not in pieces(lambda x: body(x, 0), monkeypatch)


def test_bounds_of_two_numbers_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Any) -> Any:
        one, other = row_of(x) - 2 * HERE(x), row_of(x) + 1 - 2 * HERE(x)
        return ((one >= 0) & (other < 2)).astype(x.dtype)

    assert Piece(MINE) not in pieces(body, monkeypatch)
    assert Piece(MINE).power == ZERO


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 0.5])
def test_a_number_that_is_no_count_is_no_bound(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with an infinity, as a softmax over masked rows makes it."""
    assert not pieces(lambda x: jnp.where(x >= number, x, 0), monkeypatch)
