"""Permutations and rings: another direction, a step too few, another's block."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd import shift
from tests.checker.twins.registry import wrong

MATRIX = "b/dp d/tp, d n/tp -> b/dp n/tp"


def ring(n, step=1):
    return [(i, (i + step) % n) for i in range(n)]


def rows_of(w, place, size):
    return lax.dynamic_slice_in_dim(w, place * size, size)


@wrong("b/dp n/tp -> b/dp n/tp", unseen="what a permutation brings is unknown: each ring adds up what it receives")
def blocks_shifted_and_kept(x):
    """Added to the neighbour's block as if it were the own."""
    return x + lax.ppermute(x, "tp", ring(lax.axis_size("tp")))  # wrong: disagree or layout


@blocks_shifted_and_kept.right
def _(x):
    moved = lax.ppermute(x, "tp", ring(lax.axis_size("tp")))
    return x + lax.ppermute(moved, "tp", ring(lax.axis_size("tp"), -1))


@wrong("c/tp m d -> c/tp m d", mesh={"tp": 4}, c=8, unseen="both directions have the same layout")
def shifted_the_other_way(x):
    """Stages hand their results on to the one before."""
    stage = jnp.tanh(x)
    return shift(stage, "[c/tp] m d", -1)  # wrong: layout


shifted_the_other_way.right(lambda x: shift(jnp.tanh(x), "[c/tp] m d", 1))
shifted_the_other_way.whole(lambda x: jnp.roll(jnp.tanh(x), 2, axis=0))


@wrong(MATRIX, unseen="which block has come after k steps is arithmetic")
def ring_in_the_wrong_direction(x, w):
    """After k steps the block is that of device i + k, and the rows taken are those of i - k."""
    n, place = lax.axis_size("tp"), lax.axis_index("tp")
    total, block = lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), ("dp", "tp"), to="varying"), x
    for k in range(n):
        total = total + block @ rows_of(w, (place - k) % n, x.shape[1])  # wrong: disagree
        block = lax.ppermute(block, "tp", ring(n, -1))
    return total


@ring_in_the_wrong_direction.right
def _(x, w):
    n, place = lax.axis_size("tp"), lax.axis_index("tp")
    total, block = lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), ("dp", "tp"), to="varying"), x
    for k in range(n):
        total = total + block @ rows_of(w, (place - k) % n, x.shape[1])
        block = lax.ppermute(block, "tp", ring(n))
    return total


ring_in_the_wrong_direction.whole(lambda x, w: x @ w)


@wrong(MATRIX, unseen="how many blocks have come is arithmetic")
def ring_one_step_short(x, w):
    n, place = lax.axis_size("tp"), lax.axis_index("tp")
    total, block = lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), ("dp", "tp"), to="varying"), x
    for k in range(n - 1 if n > 1 else 1):
        total = total + block @ rows_of(w, (place - k) % n, x.shape[1])  # wrong: partial
        block = lax.ppermute(block, "tp", ring(n))
    return total


@ring_one_step_short.right
def _(x, w):
    n, place = lax.axis_size("tp"), lax.axis_index("tp")
    total, block = lax.pcast(jnp.zeros((x.shape[0], w.shape[1])), ("dp", "tp"), to="varying"), x
    for k in range(n):
        total = total + block @ rows_of(w, (place - k) % n, x.shape[1])
        block = lax.ppermute(block, "tp", ring(n))
    return total


ring_one_step_short.whole(lambda x, w: x @ w)


@wrong("b/dp n/tp -> b/dp", unseen="which blocks have come is arithmetic")
def ring_sum_that_skips_a_block(x):
    """Every second block, twice."""
    n = lax.axis_size("tp")
    total, block = x.sum(-1), x.sum(-1)
    for _ in range(n - 1):
        block = lax.ppermute(block, "tp", ring(n, 2))
        total = total + block
    return lax.pmean(total, "tp") + 0.1 * lax.pmax(lax.stop_gradient(total), "tp")  # wrong: nonlinear or partial


@ring_sum_that_skips_a_block.right
def _(x):
    n = lax.axis_size("tp")
    total, block = x.sum(-1), x.sum(-1)
    for _ in range(n - 1):
        block = lax.ppermute(block, "tp", ring(n))
        total = total + block
    return lax.pmean(total, "tp") + 0.1 * lax.pmax(lax.stop_gradient(total), "tp")


ring_sum_that_skips_a_block.whole(lambda x: x.sum(-1) + 0.1 * lax.stop_gradient(x.sum(-1)))


@wrong("b/dp n/tp -> b/dp n/tp", unseen="which blocks have come is arithmetic")
def not_everybody_receives(x):
    """The list leaves the last device out, which gets zeros."""
    n = lax.axis_size("tp")
    there = lax.ppermute(x, "tp", [(i, i + 1) for i in range(n - 1)])
    return lax.ppermute(there, "tp", ring(n, -1))  # wrong: layout


@not_everybody_receives.right
def _(x):
    n = lax.axis_size("tp")
    there = lax.ppermute(x, "tp", ring(n))
    return lax.ppermute(there, "tp", ring(n, -1))


not_everybody_receives.whole(lambda x: x)


@wrong("b/dp s/tp k, b/dp s/tp k, b/dp s/tp k -> b/dp s/tp k", unseen="which blocks have come is arithmetic")
def keys_without_their_values(q, k, v):
    """Around a ring go the keys, and the values stay."""
    n = lax.axis_size("tp")
    total, norm = jnp.zeros_like(q), jnp.zeros_like(q[..., :1])
    for _ in range(n):
        p = jnp.exp(jnp.einsum("bsk,btk->bst", q, k))
        total, norm = total + p @ v, norm + p.sum(-1, keepdims=True)  # wrong: disagree
        k = lax.ppermute(k, "tp", ring(n))
    return total / norm


@keys_without_their_values.right
def _(q, k, v):
    n = lax.axis_size("tp")
    total, norm = jnp.zeros_like(q), jnp.zeros_like(q[..., :1])
    for _ in range(n):
        p = jnp.exp(jnp.einsum("bsk,btk->bst", q, k))
        total, norm = total + p @ v, norm + p.sum(-1, keepdims=True)
        k, v = lax.ppermute((k, v), "tp", ring(n))
    return total / norm


keys_without_their_values.whole(lambda q, k, v: jax.nn.softmax(jnp.einsum("bsk,btk->bst", q, k)) @ v)


@wrong("n/dp/tp d -> n/tp/dp d", unseen="which blocks have come is arithmetic")
def blocks_sent_to_the_wrong_places(x):
    """From (i, j) to its place in the other order; here the places are exchanged with themselves."""
    a, b = lax.axis_size("dp"), lax.axis_size("tp")
    pairs = [(i * b + j, j * a + i) for i in range(a) for j in range(b)]
    return lax.ppermute(x, ("dp", "tp"), pairs)  # wrong: layout


@blocks_sent_to_the_wrong_places.right
def _(x):
    a, b = lax.axis_size("dp"), lax.axis_size("tp")
    where = lambda number: (number % a) * b + number // a
    return lax.ppermute(x, ("dp", "tp"), [(number, where(number)) for number in range(a * b)])


blocks_sent_to_the_wrong_places.whole(lambda x: x)
