"""The mistake lies inside: of a loop, a branch, a solver, a transformed function, a function of one's own."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.sparse.linalg import cg

from spmd import all_gather, einsum, reduce, split
from tests.checker.twins.registry import wrong

ROWS = "b/dp d/tp, d/tp f -> b/dp f"


@jax.jit
def activated(y):
    return jnp.tanh(y)  # wrong: nonlinear


@wrong(ROWS, helper=activated, raw=True)
def in_a_helper(x, w):
    return lax.psum(activated(x @ w), "tp")


in_a_helper.right(lambda x, w: activated(lax.psum(x @ w, "tp")))
in_a_helper.whole(lambda x, w: jnp.tanh(x @ w))


@wrong("b/dp d/tp, l d/tp f, l f -> l b/dp f", raw=True)
def in_a_loop_over_layers(x, w, bias):
    def layer(_, weights):
        w, bias = weights
        return None, lax.psum(x @ w + bias[None], "tp")  # wrong: mixed

    return lax.scan(layer, None, (w, bias))[1]


in_a_loop_over_layers.right(
    lambda x, w, bias: lax.scan(lambda _, p: (None, lax.psum(x @ p[0], "tp") + p[1][None]), None, (w, bias))[1]
)
in_a_loop_over_layers.whole(lambda x, w, bias: jnp.einsum("bd,ldf->lbf", x, w) + bias[:, None])


@wrong("b/dp n/tp -> b/dp n/tp")
def in_a_vmap(x):
    return jax.vmap(lambda row: row / row.max())(x)  # wrong: pending


in_a_vmap.right(lambda x: jax.vmap(lambda row: row / reduce(row, "n/tp -> 1", "max"))(x))
in_a_vmap.whole(lambda x: x / x.max(1, keepdims=True))


@wrong("b/dp d, d v/tp -> b/dp v/tp")
def in_a_checkpoint(x, w):
    def scores(x, w):
        return jax.nn.softmax(x @ w)  # wrong: pending or nonlinear

    return jax.checkpoint(scores)(x, w)


@in_a_checkpoint.right
def _(x, w):
    def scores(x, w):
        y = x @ w
        return jnp.exp(y - reduce(y, "b/dp v/tp -> b/dp 1", "logsumexp"))

    return jax.checkpoint(scores)(x, w)


in_a_checkpoint.whole(lambda x, w: jax.nn.softmax(x @ w))


@jax.custom_jvp
def softened(y):
    return jnp.sqrt(1.0 + y**2)  # wrong: nonlinear


softened.defjvp(lambda p, t: (softened(p[0]), t[0] * p[0] / softened(p[0])))


@wrong(ROWS, helper=softened.fun)
def in_a_custom_jvp(x, w):
    return lax.psum(softened(x @ w), "tp")


in_a_custom_jvp.right(lambda x, w: softened(lax.psum(x @ w, "tp")))
in_a_custom_jvp.whole(lambda x, w: softened(x @ w))


@wrong("b/dp n/tp, scalar -> b/dp n/tp")
def in_a_branch(x, alpha):
    """All devices take the same branch, and it works on a piece."""
    return lax.cond(alpha < 10.0, lambda v: v.cumsum(1), lambda v: v, x)  # wrong: pending


@in_a_branch.right
def _(x, alpha):
    full = all_gather(x, "b/dp n/tp -> b/dp n")
    full = lax.cond(alpha < 10.0, lambda v: v.cumsum(1), lambda v: v, full)
    return split(full, "b/dp n -> b/dp n/tp")


in_a_branch.whole(lambda x, alpha: x.cumsum(1))


@wrong("b/dp n/tp -> b/dp n/tp")
def in_a_loop(x):
    """Three steps of diffusion."""
    step = lambda _, u: u + 0.1 * (jnp.roll(u, 1, 1) - 2 * u + jnp.roll(u, -1, 1))  # wrong: pending
    return lax.fori_loop(0, 3, step, x)


@in_a_loop.right
def _(x):
    n = lax.axis_size("tp")

    def step(_, u):
        before = lax.ppermute(u[:, -1:], "tp", [(i, (i + 1) % n) for i in range(n)])
        after = lax.ppermute(u[:, :1], "tp", [((i + 1) % n, i) for i in range(n)])
        v = jnp.concatenate([before, u, after], axis=1)
        return u + 0.1 * (v[:, :-2] - 2 * u + v[:, 2:])

    return lax.fori_loop(0, 3, step, x)


@in_a_loop.whole
def _(x):
    step = lambda _, u: u + 0.1 * (jnp.roll(u, 1, 1) - 2 * u + jnp.roll(u, -1, 1))
    return lax.fori_loop(0, 3, step, x)


@wrong("n/tp, n/tp -> n/tp")
def in_a_solver(a, y):
    """The method's own scalar products are those of blocks."""
    return cg(lambda v: v * (1.0 + jnp.abs(a)), y, maxiter=3)[0]  # wrong: nonlinear


@in_a_solver.right
def _(a, y):
    a, y = (all_gather(v, "n/tp -> n", to="invarying") for v in (a, y))
    return split(cg(lambda v: v * (1.0 + jnp.abs(a)), y, maxiter=3)[0], "n -> n/tp")


in_a_solver.whole(lambda a, y: cg(lambda v: v * (1.0 + jnp.abs(a)), y, maxiter=3)[0])


@wrong("d f, b/dp d -> b/dp f")
def in_a_carry(w, x):
    """What starts as the same on all devices takes up each block's own rows."""

    def step(v, row):
        new = v + 0.1 * jnp.outer(row, row @ v)
        return new, row @ new

    return lax.scan(step, lax.pcast(w, "dp", to="varying"), x)[1]  # wrong: pending


@in_a_carry.right
def _(w, x):
    def step(v, row):
        new = v + 0.1 * jnp.outer(row, row @ v)
        return new, row @ new

    full = lax.all_gather(x, "dp", tiled=True)
    done = lax.scan(step, lax.pcast(w, "dp", to="varying"), full)[1]
    return lax.dynamic_slice_in_dim(done, lax.axis_index("dp") * x.shape[0], x.shape[0])


@in_a_carry.whole
def _(w, x):
    def step(v, row):
        new = v + 0.1 * jnp.outer(row, row @ v)
        return new, row @ new

    return lax.scan(step, w, x)[1]


@jax.custom_vjp
def scaled_down(w, x):
    return x @ w


def back(kept, g):
    w, x = kept
    return x.T @ g / x.shape[0], g @ w.T  # wrong: numbers


scaled_down.defvjp(lambda w, x: (x @ w, (w, x)), back)


@jax.custom_vjp
def scaled_by_all(w, x):
    return x @ w


def back_by_all(kept, g):
    w, x = kept
    return x.T @ g / (x.shape[0] * lax.axis_size("dp")), g @ w.T


scaled_by_all.defvjp(lambda w, x: (x @ w, (w, x)), back_by_all)


@wrong("d f, b/dp d -> d f", helper=back)
def in_a_backward_rule(w, x):
    """A rule that is meant to give the mean of the rows' gradients divides by the number of its own rows."""
    w = lax.pcast(w, "dp", to="varying")
    return lax.psum(jax.grad(lambda w: jnp.sin(scaled_down(w, x)).sum())(w), "dp")


@in_a_backward_rule.right
def _(w, x):
    w = lax.pcast(w, "dp", to="varying")
    return lax.psum(jax.grad(lambda w: jnp.sin(scaled_by_all(w, x)).sum())(w), "dp")


@wrong("b/dp d/tp, d/tp f -> b/dp f")
def in_a_string_under_vmap(x, w):
    """The string leaves the partial sum, and the line outside forgets it."""
    y = jax.vmap(lambda row: einsum(row, w, "d/tp, d/tp f -> f {U:tp}"))(x)
    return lax.psum(jax.nn.gelu(y), "tp")  # wrong: nonlinear


@in_a_string_under_vmap.right
def _(x, w):
    y = jax.vmap(lambda row: einsum(row, w, "d/tp, d/tp f -> f"))(x)
    return jax.nn.gelu(y)


in_a_string_under_vmap.whole(lambda x, w: jax.nn.gelu(x @ w))
