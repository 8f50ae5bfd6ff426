"""Right programs that look wrong: an alarm on one of them would be false. Each wrong one is a step beside it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import run_state

import spmd
from spmd import assert_equal, split
from tests.checker.twins.registry import wrong

ROWS = "b/dp d/tp, d/tp f, f -> b/dp f"


def varying(x, *axes):
    return lax.pcast(x, axes, to="varying")


@wrong(ROWS)
def linear_operations(x, w, scale):
    """All that is done to a partial sum is linear; here one number is put beside it."""
    y = (x @ w) * 2.0 - jnp.pad(x @ w, ((0, 0), (1, 0)))[:, 1:]
    y = jnp.concatenate([y, y * scale[None]], axis=1).cumsum(1)
    y = jnp.where(jnp.concatenate([scale, scale])[None] > 0, y, 1.0)  # wrong: mixed
    return lax.psum(y[:, ::2], "tp")


@linear_operations.right
def _(x, w, scale):
    y = (x @ w) * 2.0 - jnp.pad(x @ w, ((0, 0), (1, 0)))[:, 1:]
    y = jnp.concatenate([y, y * scale[None]], axis=1).cumsum(1)
    y = jnp.where(jnp.concatenate([scale, scale])[None] > 0, y, 0.0)
    y = jnp.zeros_like(y).at[:, 0].set(y[:, 0]) + jnp.take(y, jnp.arange(16), axis=1)
    return lax.psum(y[:, ::2], "tp") - lax.psum(jnp.zeros_like(y).at[:, 0].set(y[:, 0])[:, ::2], "tp")


@wrong("d f, b/dp d -> d f", unseen="in a loop over rows of its own, a device's sum is its own until a psum")
def one_reduction_after_the_loop(w, x):
    """Gradients are added up over rows, and over devices once; here they are limited row by row, which is meant for
    their sum."""

    def step(total, row):
        g = jax.grad(lambda v: jnp.sin(row[None] @ v).sum())(varying(w, "dp"))
        return jnp.clip(total + g, -1.0, 1.0), None  # wrong: nonlinear

    total, _ = lax.scan(step, varying(jnp.zeros_like(w), "dp"), x)
    return lax.psum(-0.5 * total, "dp")


@one_reduction_after_the_loop.right
def _(w, x):
    def step(total, row):
        g = jax.grad(lambda v: jnp.sin(row[None] @ v).sum())(varying(w, "dp"))
        return total + g, None

    total, _ = lax.scan(step, varying(jnp.zeros_like(w), "dp"), x)
    return jnp.clip(lax.psum(-0.5 * total, "dp"), -1.0, 1.0)


one_reduction_after_the_loop.whole(lambda w, x: jnp.clip(-0.5 * jax.grad(lambda w: jnp.sin(x @ w).sum())(w), -1.0, 1.0))


@wrong("b/dp s/tp d -> b/dp s/tp d")
def carry_beside_another(x):
    """JAX types both carries varying, and the counter is equal all the same; the total is not."""

    def step(carry, token):
        total, count = carry
        return (total + token.sum(), count + 1.0), None

    start = varying(jnp.zeros(()), "dp", "tp")
    (total, count), _ = lax.scan(step, (start, start), x.swapaxes(0, 1))  # wrong: partial or pending
    return x / count * spmd.annotate(total, "")


@carry_beside_another.right
def _(x):
    def step(carry, token):
        total, count = carry
        return (total + token.sum(), count + 1.0), None

    start = varying(jnp.zeros(()), "dp", "tp")
    (total, count), _ = lax.scan(step, (start, start), x.swapaxes(0, 1))
    count = spmd.annotate(count, "") * lax.axis_size("tp")
    return x / count * lax.psum(total, ("dp", "tp"))


@wrong("b/dp d -> b/dp d/tp")
def constants_fit_anywhere(x):
    """Zeros and ones are their own blocks; numbers that count are not."""
    ones = spmd.annotate(jnp.ones((3,)), "d/tp")
    return split(x, "b/dp d -> b/dp d/tp") * (ones + jnp.arange(3.0))[None]  # wrong: disagree


@constants_fit_anywhere.right
def _(x):
    part = split(x, "b/dp d -> b/dp d/tp")
    ones = spmd.annotate(jnp.ones(part.shape[1:]), "d/tp")
    return part * (ones + jnp.full(part.shape[1:], 2.0))[None]


constants_fit_anywhere.whole(lambda x: x * 3.0)


@wrong("b/dp d, scalar -> b/dp d", unseen="a key for each device is legal")
def one_key_for_copies(x, key):
    """What is equal may have equal noise; and a key for each device makes copies differ."""
    noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("dp")), (1, 12))
    return x + noise  # wrong: noise


one_key_for_copies.right(lambda x, key: x + jax.random.normal(jax.random.fold_in(key, 0), (1, 12)))


@wrong("n/tp d, m n -> m d", unseen="a mean of what differs may be meant")
def permuted_copies(x, w):
    """Copies may go round as they like; what each device took for itself may not."""
    rows = lax.all_gather(x, "tp", tiled=True)
    mine = rows * lax.axis_index("tp").astype(x.dtype)
    moved = lax.ppermute(mine, "tp", [(i, (i + 1) % lax.axis_size("tp")) for i in range(lax.axis_size("tp"))])
    return w @ lax.pmean(moved, "tp")  # wrong: pending or layout


@permuted_copies.right
def _(x, w):
    rows = lax.all_gather(x, "tp", tiled=True)
    moved = lax.ppermute(rows, "tp", [(i, (i + 1) % lax.axis_size("tp")) for i in range(lax.axis_size("tp"))])
    return w @ lax.pmean(moved, "tp")


permuted_copies.whole(lambda x, w: w @ x)


@wrong("b/dp n/tp -> b/dp n/tp", unseen="which blocks have come is arithmetic")
def ring_that_becomes_equal(x):
    """After n steps all devices have the same sum, which no type sees: `assert_equal` says so."""
    n = lax.axis_size("tp")

    def step(_, carry):
        total, block = carry
        return total + block, lax.ppermute(block, "tp", [(i, (i + 1) % n) for i in range(n)])

    total, _ = lax.fori_loop(0, n // 2, step, (jnp.zeros_like(x), x))
    return x * total  # wrong: disagree


@ring_that_becomes_equal.right
def _(x):
    n = lax.axis_size("tp")

    def step(_, carry):
        total, block = carry
        return total + block, lax.ppermute(block, "tp", [(i, (i + 1) % n) for i in range(n)])

    total, _ = lax.fori_loop(0, n, step, (jnp.zeros_like(x), x))
    return x * assert_equal(total, "tp", why="all blocks were added up").sum(1, keepdims=True)


ring_that_becomes_equal.whole(lambda x: x * x.sum(1, keepdims=True))


@wrong("b/dp n/tp -> b/dp n/tp", no_gradient="JAX has no reverse mode of run_state")
def state_that_nobody_reads(x):
    """What happens to a mutable array is not followed; its neighbour is."""

    def body(ref):
        ref[...] = ref[...] * 2.0

    return run_state(body)(x) * (x - x.mean(1, keepdims=True))  # wrong: mixed


@state_that_nobody_reads.right
def _(x):
    def body(ref):
        ref[...] = ref[...] * 2.0

    return run_state(body)(x) * (x - lax.pmean(x.mean(1, keepdims=True), "tp"))


@wrong("b/dp n/tp -> b/dp n/tp")
def online_softmax(x):
    """The running maximum of a ring is completed at its end; here each block's own is used."""
    top = lax.stop_gradient(x).max(1, keepdims=True)
    e = jnp.exp(x - top)
    return e / lax.psum(e.sum(1, keepdims=True), "tp")  # wrong: pending


@online_softmax.right
def _(x):
    """A block's maximum serves its own sum, and the sums are brought to one maximum before they are added up."""
    top = lax.stop_gradient(x).max(1, keepdims=True)
    e = jnp.exp(x - top)
    highest = lax.pmax(top, "tp")
    total = lax.psum(e.sum(1, keepdims=True) * jnp.exp(top - highest), "tp")
    return e * jnp.exp(top - highest) / total


online_softmax.whole(lambda x: jax.nn.softmax(x))
