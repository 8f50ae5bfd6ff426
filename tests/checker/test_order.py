"""In which order the tokens of a divided sequence lie: said by `parallel`, and followed from value to value."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn, parallel
from spmd.parallel.sequence import PLACEMENTS
from tests.sampler import mixed, rare, share

TURN = nn.rotary_frequencies(8)


# --- from value to value ----------------------------------------------------------------------------------------


# --- whole programs ---------------------------------------------------------------------------------------------


# What is around a layer, and whether a scan is around that.
WRAPS = {"plain": (lambda layer: layer, False), "remat": (jax.checkpoint, True), "jit": (jax.jit, True)}


def model(positions, placement, *, wrap="plain"):
    """Layers over tokens in zig-zag, which are told the order of positions and of attention."""
    around, loop = WRAPS[wrap]

    def layer(x, w):
        q, k, v = jnp.split(spmd.einsum(x, w, "b s/cp d, d h/tp j -> b s/cp h/tp j"), 3, axis=-1)
        at = parallel.sequence_positions(spmd.size("s"), positions, cp="cp")
        q, k = nn.rotary_embedding(q, at, TURN), nn.rotary_embedding(k, at, TURN)
        y = parallel.ring_attention(q, k, v, cp="cp", tp="tp", causal=True, placement=placement)
        return x + spmd.reduce(y, "b s/cp h/tp k -> b s/cp", "sum")[..., None], None

    def body(x, w):
        x = parallel.place_sequence(x, "zigzag", cp="cp", axis=1)
        if loop:
            x, _ = jax.lax.scan(around(layer), x, w)
        else:
            for one in w:
                x, _ = around(layer)(x, one)
        return parallel.restore_sequence(x, "zigzag", cp="cp", axis=1)

    return spmd.kernel("b s/cp d, l d h/tp j -> b s/cp d", mesh=spmd.make_mesh(cp=2, tp=2), check="off")(body)


RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((2, 16, 8), (2, 8, 2, 24)))


def found(fn, wrap="plain"):
    """The findings in two layers that a loop goes through, or in one."""
    return spmd.check(fn, X, W if WRAPS[wrap][1] else W[:1])


@pytest.mark.parametrize("wrap", share(WRAPS))
def test_one_order_everywhere_raises_no_alarm(wrap) -> None:
    one = model("zigzag", "zigzag", wrap=wrap)
    assert not found(one, wrap)
    assert not found(jax.grad(lambda x, w: (one(x, w) ** 2).sum(), argnums=(0, 1)), wrap)


SAYS = {
    ("contiguous", "zigzag"): "mul of two arrays whose elements lie in different orders along cp",
    ("striped", "zigzag"): "mul of two arrays",
    ("zigzag", "contiguous"): "lie in zigzag order, and are read in contiguous order",
    ("zigzag", "striped"): "are read in striped order",
}


@pytest.mark.parametrize(("told", "wrap"), share(mixed(SAYS, WRAPS)))
def test_another_order_is_one_finding(told, wrap) -> None:
    findings = found(model(*told, wrap=wrap), wrap)
    [one] = findings
    assert str(findings.verdict).endswith("are those of whole arrays, which depend on the sizes of axes too")
    assert one.kind == "order" and SAYS[told] in str(one)
    assert "- zigzag, as said at " in str(one) and "test_order.py" in str(one)


@functools.cache
def in_order():
    return model("zigzag", "zigzag")(X, W[:1])


@pytest.mark.parametrize("told", share(itertools.product(PLACEMENTS, repeat=2), always=[("zigzag", "zigzag")]))
def test_the_numbers_differ_where_there_is_a_finding(told) -> None:
    one = model(*told)
    same = np.allclose(one(X, W[:1]), in_order(), atol=1e-5)
    assert same is not bool(found(one))


@rare
def test_vmap_keeps_the_order() -> None:
    batch = jnp.stack([X, X + 1])
    for placement, kinds in (("zigzag", []), ("contiguous", ["order"])):
        fn = jax.vmap(model("zigzag", placement), in_axes=(0, None))
        assert [one.kind for one in spmd.check(fn, batch, W)] == kinds


def kernel(body, layout="s/cp h k -> s/cp h k", **sizes):
    return spmd.kernel(layout, mesh=spmd.make_mesh(**(sizes or {"cp": 4})), check="off")(body)


HEADS = jnp.ones((16, 4, 8))


def kinds(body, **sizes):
    return [one.kind for one in spmd.check(kernel(body, **sizes), HEADS)]


def placed(x, placement="zigzag"):
    return parallel.place_sequence(x, placement, cp="cp", axis=0)


def test_a_sequence_is_restored_from_the_order_that_it_has() -> None:
    restored = lambda x, placement: parallel.restore_sequence(placed(x), placement, cp="cp", axis=0)
    assert kinds(lambda x: restored(x, "zigzag")) == []
    assert kinds(lambda x: restored(x, "striped")) == ["order"]
    assert kinds(lambda x: placed(placed(x), "striped")) == ["order"]
    assert kinds(lambda x: placed(restored(x, "zigzag"), "striped")) == []


@rare
def test_attention_that_compares_no_positions_takes_any_order() -> None:
    ring = lambda x, **options: parallel.ring_attention(x, x, x, cp="cp", **options)
    assert kinds(lambda x: ring(placed(x))) == []
    assert kinds(lambda x: ring(placed(x), causal=True)) == ["order"]
    assert kinds(lambda x: ring(placed(x), window=3)) == ["order"]
    ulysses = lambda x, **options: parallel.ulysses_attention(x, x, x, cp="cp", **options)
    assert kinds(lambda x: ulysses(placed(x))) == []
    assert kinds(lambda x: ulysses(placed(x), causal=True)) == ["order"]
    assert kinds(lambda x: ulysses(x, causal=True)) == []


def test_an_argument_may_be_in_any_order() -> None:
    """The host may have placed it. But what was attended to in order is in order."""
    ring = lambda x: parallel.ring_attention(x, x, x, cp="cp", causal=True, placement="zigzag")
    assert kinds(lambda x: ring(x) + x) == []
    assert kinds(lambda x: parallel.restore_sequence(ring(x) + x, "striped", cp="cp", axis=0)) == ["order"]


def test_what_lies_otherwise_has_no_order() -> None:
    """Whole sequences, other axes, and blocks that were cut or brought from elsewhere."""
    add = lambda x, y: parallel.restore_sequence(x + y, "striped", cp="cp", axis=0)
    swap = [(i, (i + 1) % 4) for i in range(4)]
    moved = [
        lambda x: jax.lax.ppermute(x, "cp", swap),
        lambda x: jnp.flip(x, 0),
        lambda x: jnp.concatenate([x[2:], x[:2]]),
    ]
    for move in moved:
        per_shard = spmd.per_shard("each block is moved as it is")(move)
        assert kinds(lambda x, move=per_shard: add(move(placed(x)), 0)) == []
    assert kinds(lambda x: add(x, 0)) == []
    assert kinds(lambda x: add(placed(x), 0)) == ["order"]


def test_who_means_it_says_so() -> None:
    at = lambda: parallel.sequence_positions(16, cp="cp")[:, None, None].astype(jnp.float32)
    assert kinds(lambda x: placed(x) + at()) == ["order"]
    slots = spmd.per_shard("the slots of the buffer, and not the tokens in it")(lambda x: x + at())
    assert kinds(lambda x: slots(placed(x))) == []


def test_along_one_device_every_order_is_the_same() -> None:
    ring = lambda x: parallel.ring_attention(placed(x), x, x, cp="cp", causal=True)
    assert kinds(ring, cp=1, tp=2) == []
