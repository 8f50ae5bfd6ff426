"""Collectives that some devices do not reach. The wrong ones never run: they would wait for ever."""

import jax.numpy as jnp
from jax import lax

from tests.checker.twins.registry import wrong

BLOCKS = "b/dp d/tp -> b/dp d/tp"


@wrong(BLOCKS, raw=True)
def psum_in_one_branch(x):
    total = lambda v: v / lax.psum(v.sum(), "tp")
    return lax.cond(x[0, 0] > 0, total, lambda v: v * 1.0, x)  # wrong: divergent


psum_in_one_branch.decides(lambda x: x[0, 0] > 0)


@psum_in_one_branch.right
def _(x):
    """Devices that add up together decide alike: along dp they may differ."""
    divided = lambda v: v / (9.0 + lax.psum((v**2).sum(1, keepdims=True), "tp"))
    multiplied = lambda v: v * (1.0 / (9.0 + lax.psum((v**2).sum(1, keepdims=True), "tp")))
    return lax.cond(lax.axis_index("dp") == 0, divided, multiplied, x)


@wrong(BLOCKS, raw=True, no_gradient="JAX has no reverse mode of while_loop")
def psum_in_a_loop_of_different_length(x):
    def step(carry):
        v, n = carry
        return v * 0.5 + 0.01 * lax.psum(v.sum(), "tp"), n + 1

    def more(carry):
        return jnp.abs(carry[0]).max() > 0.2

    start = lax.pcast(jnp.int32(0), ("dp", "tp"), to="varying")
    return lax.while_loop(more, step, (x, start))[0]  # wrong: divergent


psum_in_a_loop_of_different_length.decides(lambda x: jnp.ceil(jnp.log2(jnp.abs(x).max() / 0.2)))


@psum_in_a_loop_of_different_length.right
def _(x):
    def step(carry):
        v, _ = carry
        v = v * 0.5
        return v + 0.0 * lax.psum(v.sum(), "tp"), lax.pmax(jnp.abs(v).max(), ("dp", "tp"))

    start = lax.pmax(jnp.abs(x).max(), ("dp", "tp"))
    return lax.while_loop(lambda carry: carry[1] > 0.2, step, (x, start))[0]


@wrong(BLOCKS, raw=True)
def permutation_in_one_branch(x):
    """Only the first device is meant to send; the others do not listen."""
    ring = lambda v: lax.ppermute(v, "tp", [(i, (i + 1) % 4) for i in range(4)])
    return lax.cond(lax.axis_index("tp") == 0, ring, lambda v: v, x)  # wrong: divergent


permutation_in_one_branch.decides(lambda x: lax.axis_index("tp") == 0)


@permutation_in_one_branch.right
def _(x):
    n = lax.axis_size("tp")
    moved = lax.ppermute(x, "tp", [(i, (i + 1) % n) for i in range(n)])
    back = lax.ppermute(moved, "tp", [((i + 1) % n, i) for i in range(n)])
    return lax.cond(lax.axis_index("tp") == 0, lambda v, w: w, lambda v, w: v, x, back)


@wrong(BLOCKS, raw=True)
def different_collectives_in_branches(x):
    """All devices add up, but along other axes."""
    columns = lambda v: v - lax.pcast(lax.pmean(v, "dp"), "dp", to="varying")
    rows = lambda v: v - lax.pcast(lax.pmean(v, "tp"), "tp", to="varying")
    return lax.cond(x.sum() > 0, columns, rows, x)  # wrong: divergent


different_collectives_in_branches.decides(lambda x: x.sum() > 0)


@different_collectives_in_branches.right
def _(x):
    columns = lambda v: v * 1.0
    rows = lambda v: v * 2.0
    return lax.cond(lax.psum(x.sum(), ("dp", "tp")) > 0, columns, rows, x)


@wrong("b/dp d/tp, d/tp f -> b/dp f", raw=True)
def psum_of_a_chosen_half(x, w):
    """The rows of one half are multiplied; the other half of the devices returns at once."""
    busy = lax.axis_index("tp") >= 2
    product = lambda: lax.pcast(lax.psum(x @ w, "tp"), "tp", to="varying")
    nothing = lambda: 0.0 * (x @ w)
    return lax.pmean(lax.cond(busy, product, nothing), "tp")  # wrong: divergent


psum_of_a_chosen_half.decides(lambda x, w: lax.axis_index("tp") >= 2)
psum_of_a_chosen_half.right(lambda x, w: lax.psum(x @ w, "tp"))
