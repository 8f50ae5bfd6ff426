"""Neighbours' elements beside a block: where they belong, and what programs with them raise no alarm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd import _compat
from spmd.checker import _places as places
from spmd.checker._state import State, free, hidden, normal, plain
from tests.checker.harness import suspicions

LINE = jax.ShapeDtypeStruct((40, 3), "float32")


def ring(by: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + by) % 4) for i in range(4)]


def sent(edge: Any, perm: list[tuple[int, int]]) -> Any:
    return lax.ppermute(edge, "tp", perm)


def beside(before: Any, u: Any, after: Any) -> Any:
    v = jnp.concatenate([before, u, after])
    return v[:-2] - 2.0 * u + v[2:]


def among_all(u: Any) -> Any:
    """Keys of another block, in any order: a softmax does not ask where they lie."""
    keys = jnp.concatenate([sent(u[-2:], ring(-1)), u])
    return jax.nn.softmax(u @ keys.T) @ keys


def odd_chunks(u: Any) -> Any:
    """Two chunks to a block, and the second ones go two chunks on."""
    return jnp.concatenate([u[:5], sent(u[5:], ring())])


def mirrored(u: Any) -> Any:
    place = lax.axis_index("tp")
    before = jnp.where(place == 0, u[:1], sent(u[-1:], ring()))
    after = jnp.where(place == 3, u[-1:], sent(u[:1], ring(-1)))
    return beside(before, u, after)


def relaxed(u: Any) -> Any:
    step = lambda _, v: v + 0.1 * beside(sent(v[-1:], ring()), v, sent(v[:1], ring(-1)))
    return lax.fori_loop(0, 3, step, u)


def relaxed_wrongly(u: Any) -> Any:
    step = lambda _, v: v + 0.1 * beside(sent(v[-1:], ring(-1)), v, sent(v[:1], ring(-1)))
    return lax.fori_loop(0, 3, step, u)


def turned(u: Any) -> Any:
    """Blocks go round, whole ones."""
    step = lambda carry, _: ((carry[0] + carry[1], sent(carry[1], ring())), carry[1][:1] * 1.0)
    return lax.scan(step, (u, u), None, length=3)[0][0]


def queued(u: Any) -> Any:
    """On each device a queue: its first row goes to the end of the next one, and all devices see all rows."""

    def step(carry: Any, _: Any) -> Any:
        total, queue = carry
        return (total + queue[0] ** 2, jnp.concatenate([queue[1:], sent(queue[:1], ring())])), None

    return u + lax.scan(step, (0.0 * u[0], u), None, length=40)[0][0][None]


def meant(u: Any) -> Any:
    with spmd.per_shard("for a test"):
        edge = sent(u[-1:], ring(-1))
    return jnp.concatenate([edge, u[:-1]])


RIGHT = {
    "both sides": lambda u: beside(sent(u[-1:], ring()), u, sent(u[:1], ring(-1))),
    "beyond the ends zeros": lambda u: beside(
        sent(u[-1:], [(i, i + 1) for i in range(3)]), u, sent(u[:1], [(i + 1, i) for i in range(3)])
    ),
    "mirrored at the ends": mirrored,
    "shifted by two": lambda u: jnp.concatenate([sent(u[-2:], ring()), u[:-2]]),
    "shifted by a block and two": lambda u: jnp.concatenate([sent(u[-2:], ring(2)), sent(u[:-2], ring())]),
    "the whole block": lambda u: u + jnp.tanh(sent(u, ring())) * sent(u, ring(-1)),
    "a margin as wide as a block": lambda u: jnp.concatenate([sent(u, ring()), u])[3:13],
    "among all": among_all,
    "odd chunks": odd_chunks,
    "in a loop": relaxed,
    "around a ring": turned,
    "a queue": queued,
    "meant per shard": meant,
    "one row, along the other dimension": lambda u: u + sent(u[:1], ring(-1)) * 0.0 + u.sum(1, keepdims=True),
}
WRONG = {
    "the wrong side": lambda u: beside(sent(u[-1:], ring(-1)), u, sent(u[:1], ring(-1))),
    "the wrong end": lambda u: beside(sent(u[:1], ring()), u, sent(u[:1], ring(-1))),
    "the wrong side, zeros beyond": lambda u: beside(
        sent(u[-1:], [(i + 1, i) for i in range(3)]), u, sent(u[:1], [(i + 1, i) for i in range(3)])
    ),
    "one too far": lambda u: jnp.concatenate([sent(u[-1:], ring(2)), u[:-1]]),
    "the own end": lambda u: beside(u[-1:], u, sent(u[:1], ring(-1))),
    "an update": lambda u: u + 0.1 * beside(sent(u[-1:], ring(-1)), u, sent(u[:1], ring(-1))),
    "in a loop": relaxed_wrongly,
    "of a function": lambda u: jnp.concatenate([sent(jnp.tanh(u)[-1:], ring(-1)), jnp.sin(u[:-1])]),
    "padded": lambda u: jnp.pad(sent(u[-1:], ring(-1)), ((0, 9), (0, 0))) + jnp.pad(u[:-1], ((1, 0), (0, 0))),
}


def found(body: Any) -> list[str]:
    kernel = spmd.kernel("n/tp k -> n/tp k", mesh=spmd.make_mesh(tp=4), check="off")(body)
    return [one.kind for one in suspicions(kernel, LINE)]


@pytest.mark.parametrize("name", RIGHT)
def test_neighbours_where_they_belong_or_may_be_meant(name: str) -> None:
    assert found(RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_neighbours_that_do_not_belong_there(name: str) -> None:
    assert found(WRONG[name]) == ["order"]


OPERATIONS = {
    "roll": lambda u: spmd.roll(u, "[n/tp] k", 3),
    "roll by blocks": lambda u: spmd.roll(u, "[n/tp] k", 10),
    "roll by more": lambda u: spmd.roll(u, "[n/tp] k", -17),
    "shift": lambda u: spmd.shift(u, "[n/tp] k", 1),
    "shift without the ends": lambda u: spmd.shift(u, "[n/tp] k", -1, wrap=False),
    "permute": lambda u: spmd.ppermute(u, "[n/tp] k", ring(1)),
    "halo": lambda u: spmd.stencil.halo(u, "n/tp k -> 1+n/tp+2 k")[1:-2],
    "wide halo": lambda u: spmd.stencil.halo(u, "n/tp k -> 13+n/tp k", edge="zero")[:10],
    "wider halo": lambda u: spmd.stencil.halo(
        spmd.stencil.halo(u, "n/tp k -> 1+n/tp+1 k"), "1+n/tp+1 k -> 2+n/tp+1 1+k"
    )[2:-1, 1:],
    "all around": lambda u: spmd.stencil.halo(u, "n/tp k -> 41+n/tp+40 k")[41:-40],
    "deposit": lambda u: spmd.stencil.deposit(jnp.pad(u, ((1, 1), (0, 0))), "1+n/tp+1 k -> n/tp k"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_say_where_they_bring_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = OPERATIONS[name]
    assert found(body) == []
    assert found(lambda u: jax.vmap(body, in_axes=2, out_axes=2)(u[..., None])[..., 0]) == []
    true = lax.ppermute
    for wrong in (
        lambda x, axes, perm: true(x, axes, [(j, i) for i, j in perm]),
        lambda x, axes, perm: _compat.pvary(x, (axes,) if isinstance(axes, str) else axes),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(lax, "ppermute", wrong)
            assert "order" in found(body)


# --- the places themselves


def lying(size: int, *axes: str) -> State:
    return State((normal([(size, axes)]),))


def test_a_block_is_where_it_is_and_a_constant_has_no_place() -> None:
    assert places.of(lying(5, "tp"), 0) == places.from_place(("tp",), 5, 5, 0)
    for dim in (plain(5), free(5), hidden(5)):
        assert places.of(State((dim,)), 0) is None
    assert places.of(lying(5, "tp")._replace(different=frozenset(("tp",))), 0) is None
    assert places.union([(lying(5, "tp"), 0), (State((plain(5),)), 0)]) == places.of(lying(5, "tp"), 0)
    assert places.union([(lying(5, "tp"), 0), (State((hidden(5),)), 0)]) is None


def test_a_slice_moves_what_it_takes() -> None:
    assert places.sliced(lying(5, "tp"), [0], [5]) == ()
    [one] = places.sliced(lying(5, "tp"), [3], [2])
    assert one is not None and one.runs == ((2, frozenset(((3, places.OWN),))),)
    [again] = places.sliced(State((hidden(2),), places=(one,)), [1], [1])
    assert again is not None and again.runs == ((1, frozenset(((4, places.OWN),))),)


@pytest.mark.parametrize(("first", "around", "wrong"), [(0, 0, 7), (7, 0, None), (-13, 20, None), (-13, 0, 7)])
def test_distances_around_a_ring_are_alike(first: int, around: int, wrong: int | None) -> None:
    one = places.from_place(("tp",), 5, 5, 7)
    assert places.differs(one, first, around) == wrong
