"""Factorisations and solvers: of a block, or of a product that is not complete."""

import jax.numpy as jnp
import jax.scipy.linalg
from jax import lax

from spmd import all_gather, split
from tests.checker.twins.registry import wrong

TALL = "n/tp d -> n/tp d"
SQUARE = {"p": 2, "q": 2}


def whole_rows(a):
    return all_gather(a, "n/tp d -> n d")


def my_rows(a):
    return split(a, "n d -> n/tp d")


def ridge(gram):
    return gram + 5.0 * jnp.eye(gram.shape[0])


@wrong(TALL, d=6)
def orthogonal_columns_of_a_block(a):
    return jnp.linalg.qr(a)[0] * jnp.sign(a[:, :1])  # wrong: pending or disagree


orthogonal_columns_of_a_block.right(lambda a: my_rows(jnp.linalg.qr(whole_rows(a))[0]) * jnp.sign(a[:, :1]))
orthogonal_columns_of_a_block.whole(lambda a: jnp.linalg.qr(a)[0] * jnp.sign(a[:, :1]))


@wrong(TALL)
def cholesky_of_a_partial_gram_matrix(a):
    """Each device factors the products of its own rows."""
    gram = a.T @ a + 5.0 * jnp.eye(a.shape[1])  # wrong: mixed or nonlinear
    upper = jnp.linalg.cholesky(gram).T
    return jax.scipy.linalg.solve_triangular(upper, a.T, trans=1).T


@cholesky_of_a_partial_gram_matrix.right
def _(a):
    upper = jnp.linalg.cholesky(ridge(lax.psum(a.T @ a, "tp"))).T
    return jax.scipy.linalg.solve_triangular(upper, a.T, trans=1).T


@cholesky_of_a_partial_gram_matrix.whole
def _(a):
    upper = jnp.linalg.cholesky(ridge(a.T @ a)).T
    return jax.scipy.linalg.solve_triangular(upper, a.T, trans=1).T


@wrong("n/tp d, n/tp -> d")
def least_squares_of_blocks(a, y):
    """A mean of the solutions of parts."""
    solution = jnp.linalg.solve(a.T @ a + jnp.eye(a.shape[1]), a.T @ y)  # wrong: mixed or nonlinear
    return lax.pmean(solution, "tp")


@least_squares_of_blocks.right
def _(a, y):
    gram, moment = lax.psum((a.T @ a, a.T @ y), "tp")
    return jnp.linalg.solve(gram + jnp.eye(a.shape[1]), moment)


least_squares_of_blocks.whole(lambda a, y: jnp.linalg.solve(a.T @ a + jnp.eye(a.shape[1]), a.T @ y))


@wrong("n/p m/q -> n/p m/q", mesh=SQUARE, n=8, m=8)
def inverse_of_a_block(spd):
    return jnp.linalg.inv(spd + 9.0 * jnp.eye(spd.shape[0]))  # wrong: disagree or pending


@inverse_of_a_block.right
def _(spd):
    full = all_gather(spd, "n/p m/q -> n m")
    return split(jnp.linalg.inv(full + 9.0 * jnp.eye(8)), "n m -> n/p m/q")


inverse_of_a_block.whole(lambda spd: jnp.linalg.inv(spd + 9.0 * jnp.eye(8)))


@wrong("n/p m/q, m/q -> n/p", mesh=SQUARE, n=8, m=8)
def block_diagonal_solve(spd, y):
    """Solved with the block that a device happens to hold."""
    return lax.pmean(jnp.linalg.solve(spd, y), "q")  # wrong: pending


@block_diagonal_solve.right
def _(spd, y):
    full, rhs = all_gather(spd, "n/p m/q -> n m"), all_gather(y, "m/q -> m")
    return lax.pmean(split(jnp.linalg.solve(full, rhs), "n -> n/p"), "q")


block_diagonal_solve.whole(lambda spd, y: jnp.linalg.solve(spd, y))


@wrong("n/tp d -> n/tp d")
def scaled_by_singular_values(a):
    return a / jnp.linalg.svd(a, compute_uv=False)[0]  # wrong: pending


scaled_by_singular_values.right(lambda a: a / jnp.linalg.svd(whole_rows(a), compute_uv=False)[0])
scaled_by_singular_values.whole(lambda a: a / jnp.linalg.svd(a, compute_uv=False)[0])


@wrong("n/p m/q -> n/p m/q", mesh=SQUARE, n=8, m=8)
def power_of_a_block(a):
    return a @ a  # wrong: disagree


@power_of_a_block.right
def _(a):
    """Rows of the one, columns of the other (Cannon, with gathers)."""
    rows = all_gather(a, "n/p m/q -> n/p m")
    columns = all_gather(a, "n/p m/q -> n m/q")
    return rows @ columns


power_of_a_block.whole(lambda a: a @ a)


@wrong("n/p m/q -> scalar", mesh=SQUARE, n=8, m=8)
def product_of_determinants(spd):
    logs = jnp.linalg.slogdet(spd)[1]
    return lax.psum(logs, ("p", "q"))  # wrong: pending


product_of_determinants.right(lambda spd: jnp.linalg.slogdet(all_gather(spd, "n/p m/q -> n m", to="invarying"))[1])
product_of_determinants.whole(lambda spd: jnp.linalg.slogdet(spd)[1])


@wrong("d e, d/tp n -> d/tp n", e=12)
def triangular_solve_of_blocks(spd, y):
    """Each device solves with its diagonal block; what the rows above contribute is missing."""
    start = lax.axis_index("tp") * y.shape[0]
    block = lax.dynamic_slice(jnp.tril(spd), (start, start), (y.shape[0], y.shape[0]))
    return jax.scipy.linalg.solve_triangular(block, y, lower=True)  # wrong: pending


@triangular_solve_of_blocks.right
def _(spd, y):
    full = all_gather(y, "d/tp n -> d n")
    return split(jax.scipy.linalg.solve_triangular(jnp.tril(spd), full, lower=True), "d n -> d/tp n")


triangular_solve_of_blocks.whole(lambda spd, y: jax.scipy.linalg.solve_triangular(jnp.tril(spd), y, lower=True))
