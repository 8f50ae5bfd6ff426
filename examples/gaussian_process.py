"""A Gaussian process whose covariance fits on no device: a Cholesky factorization of divided rows, and its solve.

    python examples/gaussian_process.py
    python examples/gaussian_process.py --devices 4 --points 1024

The likelihood of observations needs the triangle l of the covariance, l @ l.T, and the solution of one system with it.
Rows of the matrix are divided over the devices, in blocks; columns are whole, in as many blocks. There is a step for
each block of columns. The device that has the square of it on the diagonal sends that to all. Each device solves for
its own rows, gathers those of all devices, and takes what they explain from the columns that are left. No device ever
has the whole matrix, forward or backward: a gradient keeps each device's rows, and gathers them once more.

    I. Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527, 2016.
"""

# test: --points 64

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import all_gather, einsum, rearrange

GRID = "n/a, n/a, scalar -> scalar"


def cholesky(x, n: int):
    """The lower triangle of a positive definite matrix "r/a i c j" in n blocks of rows r and of columns c.

    Forward it sends n times one square of i x j, by psum, and the rows of a block of columns, by all_gather.
    """
    row = spmd.iota("r/a", r=n)
    columns = rearrange(x, "r/a i c j -> c r/a i j")

    @jax.checkpoint  # the gradient keeps a device's own rows, and not those of all
    def explained(own):
        return einsum(own, all_gather(own, "r/a i j -> r i j"), "r/a i j, c k j -> c r/a i k")

    def step(left, c):
        here, below = ((row == c)[:, None, None], (row > c)[:, None, None])
        square = spmd.reduce(jnp.where(here, left[c], 0), "r/a i j -> i j", "sum")
        top = jnp.linalg.cholesky(square)
        solved = jax.scipy.linalg.solve_triangular(top, jnp.swapaxes(left[c], -1, -2), lower=True)
        own = jnp.where(below, jnp.swapaxes(solved, -1, -2), jnp.where(here, top, 0))
        return left - explained(own), own

    lower = jax.lax.scan(step, columns, jnp.arange(n))[1]
    return rearrange(lower, "c r/a i j -> r/a i c j")


def cho_solve(lower, b, n: int):
    """Solve l @ l.T @ x = b for a triangle of `cholesky` and a vector "r/a i": each block of rows in its turn.

    It sends 2n blocks of the vector, by psum: first from the first to the last, then back.
    """
    row = spmd.iota("r/a", r=n)
    columns = rearrange(lower, "r/a i c j -> c r/a i j")
    diagonal = jnp.where((row == jnp.arange(n)[:, None])[..., None, None], columns, 0).sum(0)  # r/a i j

    def down(b, at):
        c, column = at
        solved = jax.scipy.linalg.solve_triangular(diagonal, b[..., None], lower=True)[..., 0]
        found = spmd.reduce(jnp.where((row == c)[:, None], solved, 0), "r/a j -> j", "sum")
        rest = b - einsum(column, found, "r/a i j, j -> r/a i")
        return jnp.where((row > c)[:, None], rest, jnp.where((row == c)[:, None], solved, b)), None

    def up(x, at):
        c, column = at
        known = jnp.where((row > c)[:, None], x, 0)
        rest = x - einsum(column, known, "r/a i j, r/a i -> j")
        solved = jax.scipy.linalg.solve_triangular(diagonal, rest[..., None], lower=True, trans=1)[..., 0]
        return jnp.where((row == c)[:, None], solved, x), None

    steps = jnp.arange(n), columns
    return jax.lax.scan(up, jax.lax.scan(down, b, steps)[0], steps, reverse=True)[0]


def likelihood(t, y, width):
    """The logarithm of the likelihood of y at the times t, but for a constant: -y @ K^-1 @ y / 2 - log(det(K)) / 2."""
    n = spmd.axis_size("a")
    every = all_gather(t, "n/a -> n", to="invarying")
    same = spmd.iota("n/a", n=len(every))[:, None] == jnp.arange(len(every))[None]
    covariance = jnp.exp(-(((t[:, None] - every[None]) / width) ** 2)) + 0.1 * same
    lower = cholesky(rearrange(covariance, "(r i)/a (c j) -> r/a i c j", r=n, c=n), n)
    solved = cho_solve(lower, rearrange(y, "(r i)/a -> r/a i", r=n), n)
    explained = einsum(y, rearrange(solved, "r/a i -> (r i)/a"), "n/a, n/a -> scalar")
    on_diagonal = jnp.where(same, rearrange(lower, "r/a i c j -> (r i)/a (c j)"), 0).sum(1)
    return -explained / 2 - spmd.reduce(jnp.log(on_diagonal), "n/a -> scalar", "sum")


def whole_likelihood(t, y, width):
    """The same in plain JAX, on one device."""
    covariance = jnp.exp(-(((t[:, None] - t[None]) / width) ** 2)) + 0.1 * jnp.eye(len(t))
    lower = jnp.linalg.cholesky(covariance)
    return -y @ jax.scipy.linalg.cho_solve((lower, True), y) / 2 - jnp.log(jnp.diagonal(lower)).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=4, help="devices, and blocks of rows (4)")
    parser.add_argument("--points", type=int, default=256, help="observations, a multiple of the devices (256)")
    parser.add_argument("--steps", type=int, default=10, help="steps uphill for the width (10)")
    o = parser.parse_args()
    spmd.use_cpu_devices(o.devices)
    mesh = spmd.make_mesh(a=o.devices)
    kernel = spmd.kernel(GRID, mesh=mesh)(likelihood)

    t = np.linspace(0, 4, o.points, dtype=np.float32)
    y = np.sin(3 * t) + 0.3 * np.random.default_rng(0).normal(size=o.points).astype(np.float32)
    width = np.float32(0.7)
    wanted = jax.value_and_grad(whole_likelihood, argnums=2)(t, y, width)
    for run in (kernel, kernel.auto, kernel.reference):
        np.testing.assert_allclose(jax.jit(jax.value_and_grad(run, argnums=2))(t, y, width), wanted, rtol=1e-2)
    print("equal to plain JAX on one device in all three modes, and so is the gradient")

    n, k = o.devices, o.points // o.devices
    summed = lambda size: 2 * size * (n - 1) // n  # what a device sends for a psum
    formula = 4 * n * (summed(k * k) + (n - 1) * k * k) + 4 * (n - 1) * k  # the triangle, and the times
    formula += 4 * 2 * n * summed(k) + 2 * summed(4)  # two solves, and two sums
    sent = spmd.inspect.collectives(kernel, t, y, width).total_bytes
    print(f"{o.points} points on {n} devices: {sent / 1024:.1f} KiB per device, as the formula says")
    assert sent == formula, (sent, formula)
    print(spmd.explain(kernel, t, y, width))

    slope = jax.jit(jax.grad(kernel, argnums=2))
    for _ in range(o.steps):
        width += np.float32(1e-3) * slope(t, y, width)
    print(f"the width after {o.steps} steps uphill: {width:.3f}; likelihood {kernel(t, y, width):.1f}")


if __name__ == "__main__":
    main()
