"""Light through a lens: a two-dimensional wave equation on a divided grid, by halo exchange.

    pip install -e ".[examples]"
    python examples/waves.py                                 # 512 x 256 points on 2 x 4 virtual CPU devices
    python examples/waves.py --a 8 --b 1 --ny 512            # strips
    python examples/waves.py --mode auto                     # the same, its communication left to the compiler
    python examples/waves.py --scaling                       # what a step sends on 1 to 8 devices

A pulse u(x, y, t) travels in x through a box 2 x 1 with conducting walls (u = 0), where a disc of glass has the index
of refraction n = 1.5:

    n^2 d2u/dt2 = laplace u

The Laplacian reads one neighbour on each side, as its string says: "1+x/a+1 1+y/b+1 -> x/a y/b". Only the halos are
sent.

The time integration is the leapfrog, with u at whole steps and v = du/dt halfway between. Except for rounding, it
conserves the energy (the sum of n^2 v^2 - u+ L u over 2, with u and u+ before and after the half step). The run prints
and checks this.
"""

# test: --nx 64 --ny 32 --time 0.3 --frames 3 --mode all --scaling

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import spmd
from spmd import from_function, reduce
from spmd.stencil import stencil

matplotlib.use("agg")
import matplotlib.pyplot as plt

MODES = ("explicit", "auto", "reference")
GRID = "x/a y/b"


def five_points(u):
    """The Laplacian inside a block, from the block with its margins, in units of the grid."""
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]


laplace = stencil(five_points, "1+x/a+1 1+y/b+1 -> x/a y/b", edge="zero", corners=False)


class Box:
    """The kernels of one grid on one mesh. The box has sides 2 and 1, the grid the spacing h."""

    def __init__(self, nx: int, ny: int, mesh: Any) -> None:
        h = 2 / (nx + 1)
        self.dt = dt = h / 2

        def glass():
            """The squared index of refraction: 1 outside the lens, with a border as wide as the spacing."""

            def at(i, j):
                r = jnp.hypot((i + 1) * h - 0.9, (j + 1) * h - (ny + 1) * h / 2)
                return 1 + 1.25 * jax.nn.sigmoid((0.3 - r) / h)

            return from_function(at, GRID)

        def pulse(i, j, t):
            """A short wave train at x = 0.3 + t that travels to the right, as high as the box except for its ends."""
            s = (i + 1) * h - 0.3 - t
            across = jnp.sin(jnp.pi * (j + 1) / (ny + 1)) ** 0.25
            return jnp.exp(-((s / 0.08) ** 2)) * jnp.cos(2 * jnp.pi * s / 0.08) * across

        def start():
            u, later = (from_function(lambda i, j, t=t: pulse(i, j, t), GRID) for t in (0.0, dt))
            return u, (later - u) / dt

        def advance(u, v, steps):
            """u at the whole steps, v half a step later."""
            factor = dt / (h * h * glass())

            def step(state, _):
                u, v = state
                u = u + dt * v
                return (u, v + factor * laplace(u)), None

            return jax.lax.scan(step, (u, v), None, length=steps)[0]

        def energy(u, v):
            moving = reduce(glass() * v**2, f"{GRID} -> scalar")
            bent = reduce((u + dt * v) * laplace(u), f"{GRID} -> scalar") / h**2
            return (moving - bent) * h**2 / 2

        self.start = spmd.kernel(f"-> {GRID}, {GRID}", mesh=mesh, x=nx, y=ny)(start)
        self.advance = spmd.kernel(f"{GRID}, {GRID} -> {GRID}, {GRID}", mesh=mesh, static="steps")(advance)
        self.energy = spmd.kernel(f"{GRID}, {GRID} -> scalar", mesh=mesh)(energy)


def simulate(box: Box, o: argparse.Namespace) -> list[tuple[float, np.ndarray]]:
    """The times and levels of the frames."""
    u, v = box.start()
    steps = round(o.time / box.dt / (o.frames - 1))
    found, energies = [], []
    print(f"{'t':>6} {'energy':>12} {'largest |u|':>12}")
    for i in range(o.frames):
        if i:
            u, v = box.advance(u, v, steps)
        energies.append(float(box.energy(u, v)))
        found.append((i * steps * box.dt, np.asarray(u)))
        print(f"{found[-1][0]:6.3f} {energies[-1]:12.6f} {np.abs(found[-1][1]).max():12.3f}")
    drift = np.abs(np.array(energies) / energies[0] - 1).max()
    print(f"energy is conserved to {drift:.1e} over {steps * (o.frames - 1)} steps")
    assert drift < 1e-4, "energy is not conserved"
    return found


def scaling(o: argparse.Namespace) -> None:
    """What a device sends in one step, for one problem on increasing numbers of devices."""
    print(f"\n{o.nx} x {o.ny} points, one step:\n{'devices':>8} {'block':>10} {'sent':>9} {'formula':>9}   collectives")
    for a, b in ((1, 1), (2, 1), (2, 2), (8, 1), (2, 4)):
        mesh = spmd.make_mesh(a=a, b=b)
        box = Box(o.nx, o.ny, mesh)
        report = spmd.inspect.collectives(box.advance.lower(*jax.eval_shape(box.start), 1), mesh=mesh)
        # two rows and two columns of a block
        formula = 4 * (2 * (o.ny // b) * (a > 1) + 2 * (o.nx // a) * (b > 1))
        counts = ", ".join(f"{n} {kind}" for kind, n in report.counts.items()) or "none"
        print(f"{f'{a} x {b}':>8} {4 * o.nx * o.ny // a // b:>8} B {report.total_bytes:>7} B {formula:>7} B   {counts}")
        assert report.total_bytes == formula


def draw(frames: list[tuple[float, np.ndarray]], path: Path) -> None:
    columns = (len(frames) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(4 * columns, 4.4), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (t, u) in zip(axes.flat, frames, strict=False):
        axis.imshow(u.T, origin="lower", extent=(0, 2, 0, 1), cmap="RdBu", vmin=-1, vmax=1)
        axis.add_patch(plt.Circle((0.9, 0.5), 0.3, fill=False, linestyle=":"))
        axis.set_title(f"t = {t:.2f}")
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nx", type=int, default=512, help="points along the box (512)")
    parser.add_argument("--ny", type=int, default=256, help="points across (256)")
    parser.add_argument("--time", type=float, default=1.5, help="end time; light needs 2 for the length (1.5)")
    parser.add_argument("--frames", type=int, default=6, help="pictures of it (6)")
    parser.add_argument("--a", type=int, default=2, help="devices that x is divided over (2)")
    parser.add_argument("--b", type=int, default=4, help="devices that y is divided over (4)")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="explicit", help="all: one after another, compared")
    parser.add_argument("--scaling", action="store_true", help="print what a step sends on 1 to 8 devices")
    parser.add_argument("--picture", type=Path, default=Path(tempfile.mkdtemp()) / "waves.png")
    o = parser.parse_args()
    spmd.use_cpu_devices(max(8, o.a * o.b))
    box = Box(o.nx, o.ny, spmd.make_mesh(a=o.a, b=o.b))
    results = []
    for mode in MODES if o.mode == "all" else (o.mode,):
        print(f"{o.nx} x {o.ny} points on {o.a} x {o.b} devices, {mode} mode")
        with spmd.mode(mode):
            results.append(simulate(box, o))
    for other in results[1:]:
        np.testing.assert_allclose(other[-1][1], results[0][-1][1], atol=1e-4)
    draw(results[0], o.picture)
    if o.scaling:
        scaling(o)


if __name__ == "__main__":
    main()
