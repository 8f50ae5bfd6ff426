"""A distributed matrix product: SUMMA, panel by panel, compared with `einsum` of gathered rows and columns.

    python examples/summa.py
    python examples/summa.py --rows 4 --columns 2 --panels 8 --i 1024 --j 1024 --k 2048

The devices are a grid of r rows and c columns, and A, B and C are divided over both. Device (p, q) computes the block
(p, q) of C, for which it needs the p-th rows of A and the q-th columns of B. Gathered at once they take c + r blocks of
memory. SUMMA gathers them in panels of k, one after the other, and holds two panels at a time:

    R. van de Geijn, J. Watts, SUMMA: scalable universal matrix multiplication algorithm, Concurrency 1997.

In that paper a panel is a slice of k that one column of devices broadcasts. Here panel t is every T-th element of k.
All columns have an equal share of it, so the broadcast is an all-gather, which sends the same bytes and uses all links.
"""

# test: --i 48 --j 40 --k 64 --panels 4

from __future__ import annotations

import argparse

import jax
import numpy as np

import spmd
from spmd import all_gather, einsum, rearrange

GRID = "i/r k/c, k/r j/c -> i/r j/c"


def summa(a, b, panels: int):
    """C = A B in `panels` steps."""
    # m numbers the elements of a panel, t the panels. The scan runs over t, which comes first and is not in its
    # strings.
    a = rearrange(a, "i/r (m t)/c -> t i/r m/c", t=panels)
    b = rearrange(b, "(m t)/r j/c -> t m/r j/c", t=panels)

    def step(c, panel):
        rows = all_gather(panel[0], "i/r m/c -> i/r m")
        columns = all_gather(panel[1], "m/r j/c -> m j/c")
        return c + einsum(rows, columns, "i/r m, m j/c -> i/r j/c"), None

    return jax.lax.scan(step, spmd.zeros("i/r j/c"), (a, b))[0]


def at_once(a, b):
    """The same with all rows and columns in memory."""
    rows = all_gather(a, "i/r k/c -> i/r k")
    columns = all_gather(b, "k/r j/c -> k j/c")
    return einsum(rows, columns, "i/r k, k j/c -> i/r j/c")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=2, help="rows of the grid of devices (2)")
    parser.add_argument("--columns", type=int, default=4, help="columns (4)")
    parser.add_argument("--panels", type=int, default=8, help="steps (8); rows and columns times it divide k")
    for name in "ijk":
        parser.add_argument(f"--{name}", type=int, default=512, help=f"size of {name} (512)")
    o = parser.parse_args()
    spmd.use_cpu_devices(o.rows * o.columns)
    mesh = spmd.make_mesh(r=o.rows, c=o.columns)

    def operand(seed, layout, **sizes):  # created in its layout; no device holds more than its block
        make = spmd.kernel(f"-> {layout}", mesh=mesh, **sizes)
        return make(lambda: spmd.random.normal(jax.random.key(seed), layout))()

    a, b = operand(0, "i/r k/c", i=o.i, k=o.k), operand(1, "k/r j/c", k=o.k, j=o.j)
    kernels = {
        f"SUMMA, {o.panels} panels": spmd.kernel(GRID, mesh=mesh)(lambda a, b: summa(a, b, o.panels)),
        "gathered at once": spmd.kernel(GRID, mesh=mesh)(at_once),
    }

    # Each device receives the missing (c - 1)/c of its rows of A, and (r - 1)/r of its columns of B.
    r, c = o.rows, o.columns
    formula = 4 * (o.i // r * o.k * (c - 1) // c + o.k * o.j // c * (r - 1) // r)
    wanted = np.asarray(a) @ np.asarray(b)
    print(f"({o.i} x {o.k}) ({o.k} x {o.j}) on {r} x {c} devices; the formula says {formula / 1024:.1f} KiB per device")
    for name, kernel in kernels.items():
        sent = spmd.inspect.collectives(kernel, a, b, mesh=mesh).total_bytes
        memory = kernel.lower(a, b).compile().memory_analysis().temp_size_in_bytes
        print(f"{name:20} sends {sent / 1024:8.1f} KiB, temporary memory {memory / 1024:8.1f} KiB")
        assert sent == formula
        for run in (kernel, kernel.auto, kernel.reference):
            np.testing.assert_allclose(run(a, b), wanted, rtol=1e-4, atol=1e-4 * np.sqrt(o.k))
    gradient = jax.grad(lambda a: (kernels[f"SUMMA, {o.panels} panels"](a, b) ** 2).sum())(a)
    np.testing.assert_allclose(gradient, 2 * wanted @ np.asarray(b).T, rtol=1e-3, atol=1e-3 * o.k)
    print("equal to NumPy's product in all three modes, and so is the gradient")


if __name__ == "__main__":
    main()
