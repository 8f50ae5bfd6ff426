"""Rings say which block each device holds, and the checker follows these numbers as blocks move."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd import _compat, iota, nn, shift
from spmd.checker import _engine
from spmd.comm._marks import numbered
from tests.checker.harness import suspicions

X = jnp.arange(16.0)


def ring(hops=0, by=1, wrong=0, zero=False):
    """A ring by hand: each device adds up what it and those `hops + 2` places behind hold."""

    def body(x):
        here = iota("c/a") * int(not zero)
        x = numbered(x, here, "a")
        total, x = x, shift(x, "[s/a]", by)

        def turn(carry, hop):
            total, x = carry
            total = total + numbered(x, (here - hop + wrong) % 4, "a")
            return (total, shift(x, "[s/a]", by)), None

        (total, x), _ = lax.scan(turn, (total, x), jnp.arange(1, hops + 1))
        return total + numbered(x, (here - hops - 1) % 4, "a")

    mesh = spmd.make_mesh(a=4)
    return spmd.kernel("s/a -> s/a", mesh=mesh, c=4, check="off")(body)


def kinds(fn, *args):
    return [one.kind for one in suspicions(fn, *args)]


@pytest.mark.parametrize("hops", [0, 1, 2, 5])
def test_a_ring_that_knows_its_blocks(hops):
    assert kinds(ring(hops), X) == []
    assert kinds(jax.grad(lambda x: (ring(hops)(x) ** 2).sum()), X) == []
    assert kinds(jax.vmap(ring(hops)), X.reshape(1, 16)) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"by": -1}, "order"),
        ({"by": 0}, "order"),
        ({"by": 2, "hops": 1}, "order"),
        ({"zero": True}, "layout"),
        ({"hops": 1, "wrong": 1}, "order"),
        ({"hops": 3, "wrong": 2}, "order"),
    ],
)
def test_a_ring_that_takes_a_block_for_another(change, kind):
    found = suspicions(ring(**change), X)
    assert {one.kind for one in found} == {kind}
    assert all("test_blocks.py" in one.line for one in found)


def test_a_loop_that_is_too_long_is_not_walked_round_by_round(monkeypatch):
    monkeypatch.setattr(_engine, "MOST_IN_TURN", 0)
    assert kinds(ring(hops=3), X) == []
    assert kinds(ring(hops=3, wrong=2), X) == []  # its counter is another number in each round
    assert kinds(ring(hops=3, zero=True), X) != []


def test_the_numbers_change_no_result():
    for hops in (0, 2):
        wanted = sum(jnp.roll(X, 4 * k) for k in range(hops + 2))
        assert jnp.array_equal(ring(hops)(X), wanted)
        assert "spmd_block" not in ring(hops).lower(X).as_text()


def test_an_array_on_which_other_axes_matter_too():
    """The numbers are different along the ring's own axis, for each device of another one."""
    mesh = spmd.make_mesh(a=2, b=2)

    def body(x, number):
        return numbered(x, number(lax.axis_index("a"), lax.axis_index("b")), "a")

    for number, found in (
        (lambda a, b: a + 10 * b, []),
        (lambda a, b: a ^ b, []),
        (lambda a, b: a * b, ["layout"]),
        (lambda a, b: b, ["layout"]),
    ):
        run = spmd.kernel("s/a/b -> s/a/b", mesh=mesh)(lambda x, number=number: body(x, number))
        assert kinds(run, X) == found


def cached(x):
    """Tokens in a cache whose slots are dealt in turn."""
    cache = nn.kv_cache(1, 8, 1, 2, cp="a", values=False)
    new = jnp.broadcast_to(x.sum(), (1, 4, 1, 2))
    return nn.kv_cache_append(cache, new, None, jnp.arange(4)[None], cp="a")["positions"]


def exchanged(x, hops=None):
    """Rows to the next device but one, or to the next."""
    owner = (iota("s/a") // 4 + (1 if hops else 2)) % 4
    return spmd.exchange(x, owner, "[s/a]", capacity=4, hops=hops)[0]


BODIES = {
    "cached": ("s/a -> b t/a", cached),
    "exchanged": ("s/a -> s/a", exchanged),
    "exchanged with neighbours": ("s/a -> s/a", lambda x: exchanged(x, (1,))),
}


@pytest.mark.parametrize("name", BODIES)
def test_operations_on_rows_number_the_devices(name, monkeypatch):
    pattern, body = BODIES[name]
    found = lambda: kinds(spmd.kernel(pattern, mesh=spmd.make_mesh(a=4), check="off")(body), X)
    assert found() == []
    with monkeypatch.context() as patch:
        patch.setattr(
            lax, "axis_index", lambda axes: _compat.pvary(jnp.int32(0), (axes,) if isinstance(axes, str) else axes)
        )
        assert "layout" in found()
    if "neighbours" in name:
        true = lax.ppermute
        monkeypatch.setattr(lax, "ppermute", lambda x, axes, perm: true(x, axes, [(j, i) for i, j in perm]))
        assert found() == ["order"]
