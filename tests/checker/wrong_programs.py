"""Wrong programs, one per way to be wrong. Their messages are in test_messages.py."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.checker.harness import AXES, mark, rows, varying


def equal_claimed_divided(x, w):
    return mark(w, "a b/tp", "operand", 'einsum(x, y, "a b/tp, b/tp -> a")')


def arange_claimed_divided(x, w):
    positions = jnp.arange(8, dtype=jnp.float32) * 0.5
    return mark(jnp.sin(positions), "s/tp", "operand", 'take(x, y, "v d, s/tp -> s/tp d")')


def equal_claimed_partial(x, w):
    return lax.psum(mark(varying(w), "a b {U:tp}", "operand", 'psum(x, "a b {U:tp} -> a b")'), "tp")


def different_claimed_equal(x, w):
    return mark(jnp.exp(x), "a/dp b", "operand", 'softmax(x, "a/dp [b]")')


def different_scalar_claimed_equal(x, w):
    return mark(lax.axis_index("tp") + 1, "", "annotate")


def partial_claimed_complete(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return mark(y, "a/dp b", "output", "a/dp k/tp, k b -> a/dp b")


def partial_claimed_divided(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return mark(y, "a/dp b/tp", "operand")


def under_a_mapping(x, w):
    return mark(x, "batch/dp embed/1", "operand", 'reduce(x, "batch embed -> batch", "sum")')


def exp_of_a_partial_sum(x, w):
    return lax.psum(jnp.exp(mark(x @ rows(w), "a/dp b {U:tp}", "result")), "tp")


def bessel_of_a_partial_sum(x, w):
    return lax.psum(lax.bessel_i0e(mark(x @ rows(w), "a/dp b {U:tp}", "result")), "tp")


def square_of_a_partial_sum(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return lax.psum((y * y).sum(), AXES)


def bias_on_a_partial_sum(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return lax.psum(y + w[:1], "tp")


def mask_of_a_partial_sum(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return lax.psum(y[:, :, None] * x[:, None, :], "tp")


def rounding_of_a_partial_sum(x, w):
    return lax.psum(mark(x.sum(), "{U:dp,tp}", "result").astype(jnp.int32), AXES)


def divided_by_a_partial_sum(x, w):
    return w / mark(x.sum(), "{U:dp,tp}", "result")


def maximum_of_a_partial_sum(x, w):
    return lax.pmax(mark(x.sum(), "{U:dp,tp}", "result"), AXES)


def partial_sum_returned(x, w):
    return mark(x @ rows(w), "a/dp b {U:tp}", "result")


def cond_with_a_collective(x, w):
    return lax.cond(x.max() > 0, lambda v: lax.psum(v.sum(1), "tp"), lambda v: lax.pmax(v.max(1), "tp"), x)


def loop_with_a_collective(x, w):
    def body(carry):
        total, _ = carry
        return total + varying(lax.psum(total, "tp")), lax.axis_index("tp")

    return lax.while_loop(lambda c: c[1] < 1, body, (x, lax.axis_index("tp")))[0]


def solver_with_a_collective(x, w):
    return jax.scipy.sparse.linalg.cg(lambda v: 2.0 * v + varying(lax.psum(v, "tp"), "tp"), x)[0]


def transposed_solver_with_a_collective(x, w):
    def loss(b):
        return jax.scipy.sparse.linalg.cg(lambda v: v + varying(lax.pmean(v, "tp"), "tp"), b, tol=1.0)[0].sum()

    return jax.vjp(loss, varying(w))[1](x.sum())[0]


def solver_spoils_the_result(x, w):
    y = lax.custom_linear_solve(lambda v: v * 2.0, varying(w), lambda _, b: b * lax.axis_index("tp").astype(b.dtype))
    return mark(y, "a b")


def carry_that_becomes_different(x, w):
    def step(carry, _):
        return mark(carry, "a b", "operand") * lax.axis_index("tp").astype(jnp.float32), None

    return lax.scan(step, varying(w), None, length=2)[0]


def predicate_spoils_the_result(x, w):
    y = lax.cond(lax.axis_index("tp") > 0, lambda v: v + 1.0, lambda v: v, varying(w))
    return mark(y, "a b")


def loop_spoils_the_result(x, w):
    y = lax.while_loop(lambda c: c[0].max() < 9.0, lambda c: (c[0] * 2.0, c[1] + 1), (x, varying(jnp.zeros(()))))[1]
    return mark(y, "")


def inside_a_library_function(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return lax.psum(jnp.where(w.sum() > 0, y, 1.0), "tp")


@jax.jit
def helper(y):
    return jnp.tanh(y)


def inside_a_function_of_the_user(x, w):
    return lax.psum(helper(mark(x @ rows(w), "a/dp b {U:tp}", "result")), "tp")


def several(x, w):
    y = mark(w, "a b/tp", "operand")
    return mark(x, "a/dp b", "operand").sum(1)[:, None] * y.sum(0)[None]


def made_of_many(x, w):
    y = x * lax.axis_index("tp").astype(jnp.float32)
    y = lax.ppermute(y, "tp", [(0, 1)]) + lax.psum_scatter(x @ rows(w), "tp", scatter_dimension=1, tiled=True)
    return mark(y, "a/dp b")


def permutation_that_leaves_some_out(x, w):
    return mark(lax.ppermute(varying(w), "tp", [(0, 1)]), "a b")


def number_beside_a_partial_sum(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}", "result")
    return lax.psum(jnp.take(y, jnp.arange(9), axis=1, mode="fill", fill_value=7.0), "tp")


def rounding_of_some_bits(x, w):
    return lax.psum(mark(x.astype(jnp.int32).sum(), "{U:dp,tp}", "result").astype(jnp.int8).astype(jnp.int32), AXES)


def quotient_of_whole_numbers(x, w):
    return lax.psum(lax.div(mark(x.astype(jnp.int32).sum(), "{U:dp,tp}", "result"), jnp.int32(3)), AXES)
