"""The Taylor-Green vortex: a three-dimensional flow computed by distributed Fourier transforms.

    pip install -e ".[examples]"
    python examples/spectral_flow.py                                # 64 cubed in pencils on 2 x 4 virtual CPU devices
    python examples/spectral_flow.py --a 8 --b 1 --n 128 --re 800    # slabs, more turbulent
    python examples/spectral_flow.py --mode auto                    # the same, its communication left to the compiler
    python examples/spectral_flow.py --scaling                      # what a step sends on 1 to 8 devices

The program solves the incompressible Navier-Stokes equations in a periodic box of side 2 pi, in rotational form,

    du/dt = u x w - grad P - curl w / Re,    div u = 0,    w = curl u,

for the Fourier coefficients of u. There derivatives are products with the wave number k, and the pressure is a
projection. u x w is computed on the grid: the method is pseudo-spectral, with the 2/3 rule against aliasing and
fourth-order Runge-Kutta steps. u and w are real, and one complex transform carries both. Only `fft` and `ifft`
communicate. Fields have the layout `x/a y/b z`, and their spectra stay transposed, `kx ky/a kz/b`. No device ever holds
more than its block.

The energy E falls by the dissipation, dE/dt = -eps = -2 Z / Re with the enstrophy Z. The dissipated energy D is
integrated too, and E + D must stay constant. The vortex is that of M. E. Brachet et al., J. Fluid Mech. 130, 1983.
"""

# test: --n 16 --time 0.16 --every 2 --mode all --scaling

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import spmd
from spmd import linspace, meshgrid, reduce
from spmd.fft import fft, fftfreq, ifft

matplotlib.use("agg")
import matplotlib.pyplot as plt

GRID, SPECTRUM = "v x/a y/b z", "v kx ky/a kz/b"  # v: the three components
MODES = ("explicit", "auto", "reference")

# --- the equations, on this device's part of the spectrum --------------------------------------------------------


def to_grid(u):
    return ifft(u, f"{SPECTRUM} -> {GRID}", norm="forward")


def to_spectrum(u):
    return fft(u, f"{GRID} -> {SPECTRUM}", norm="forward")


def wave_numbers(n: int):
    """kx, ky, kz of this device's modes: three arrays that broadcast to the modes."""
    along = (fftfreq(layout, 1 / n) for layout in ("kx", "ky/a", "kz/b"))
    return meshgrid(*along, "kx, ky/a, kz/b -> kx ky/a kz/b", sparse=True)


def dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def cross(a, b):
    return jnp.stack([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def rate(u, n: int, re: float):
    """du/dt, and the dissipation eps."""
    k = wave_numbers(n)
    squared = dot(k, k)
    w = 1j * cross(k, u)
    fields = to_grid(u + 1j * w)
    force = to_spectrum(cross(fields.real, fields.imag).astype(u.dtype))
    kept = (abs(k[0]) < n / 3) & (abs(k[1]) < n / 3) & (abs(k[2]) < n / 3)
    force = jnp.where(kept[None], force, 0)
    pressure = dot(k, force) / jnp.where(squared > 0, squared, 1)
    force = force - jnp.stack([ki * pressure for ki in k])
    eps = reduce(abs(w) ** 2, f"{SPECTRUM} -> scalar") / re
    return force - squared[None] * u / re, eps


def step(u, dissipated, dt: float, n: int, re: float):
    """A fourth-order Runge-Kutta step of u and of the dissipated energy, as a loop over stages that compiles once."""

    def stage(state, weights):
        k, u_after, dissipated_after = state
        before, after = weights
        k, eps = rate(u + before * dt * k, n, re)
        return (k, u_after + after * dt * k, dissipated_after + after * dt * eps), None

    weights = jnp.array([0, 1 / 2, 1 / 2, 1]), jnp.array([1 / 6, 1 / 3, 1 / 3, 1 / 6])
    return jax.lax.scan(stage, (0 * u, u, dissipated), weights)[0][1:]


# --- kernels -----------------------------------------------------------------------------------------------------


class Flow:
    """The kernels of one grid on one mesh."""

    def __init__(self, n: int, re: float, dt: float, mesh: Any) -> None:
        def start():
            sides = (linspace(0, 2 * math.pi, side, endpoint=False) for side in ("x/a", "y/b", "z"))
            x, y, z = meshgrid(*sides, "x/a, y/b, z -> x/a y/b z")
            u = jnp.sin(x) * jnp.cos(y) * jnp.cos(z), -jnp.cos(x) * jnp.sin(y) * jnp.cos(z), jnp.zeros_like(x)
            return to_spectrum(jnp.stack(u))

        def advance(u, dissipated, steps):
            one = lambda state, _: (step(*state, dt, n, re), None)
            return jax.lax.scan(one, (u, dissipated), None, length=steps)[0]

        def measured(u):
            """Energy, dissipation, and the largest divergence beside the largest gradient."""
            k = wave_numbers(n)
            energy = reduce(abs(u) ** 2, f"{SPECTRUM} -> scalar") / 2
            divergence = reduce(abs(dot(k, u)), "kx ky/a kz/b -> scalar", "max")
            gradient = reduce(jnp.sqrt(dot(k, k))[None] * abs(u), f"{SPECTRUM} -> scalar", "max")
            return energy, rate(u, n, re)[1], divergence / gradient

        def vorticity(u):
            """|w| in the plane z = pi / 4."""
            w = to_grid(1j * cross(wave_numbers(n), u)).real
            return jnp.sqrt(dot(w, w))[:, :, n // 8]

        self.start = spmd.kernel(f"-> {SPECTRUM}", mesh=mesh, x=n, y=n, z=n)(start)
        self.advance = spmd.kernel(f"{SPECTRUM}, scalar -> {SPECTRUM}, scalar", mesh=mesh, static="steps")(advance)
        self.measured = spmd.kernel(f"{SPECTRUM} -> scalar, scalar, scalar", mesh=mesh)(measured)
        self.vorticity = spmd.kernel(f"{SPECTRUM} -> x/a y/b", mesh=mesh)(vorticity)


def simulate(flow: Flow, o: argparse.Namespace) -> dict[str, Any]:
    """The whole run: its history of (t, E, D, eps) and a slice of the final state."""
    u, dissipated = flow.start(), jnp.zeros(())
    history = []
    print(f"{'t':>6} {'E':>10} {'eps':>10} {'E + D':>10} {'max div u':>10}")
    for i in range(round(o.time / o.dt) // o.every + 1):
        if i:
            u, dissipated = flow.advance(u, dissipated, o.every)
        energy, eps, divergence = (float(x) for x in flow.measured(u))
        history.append((i * o.every * o.dt, energy, float(dissipated), eps))
        print(f"{history[-1][0]:6.2f} {energy:10.6f} {eps:10.6f} {energy + history[-1][2]:10.6f} {divergence:10.1e}")
        assert divergence < 1e-5, "the flow is not free of divergence"
    t, energy, gone, _ = (np.array(x) for x in zip(*history, strict=True))
    fault = np.abs(energy + gone - energy[0]).max() / energy[0]
    print(f"E(0) = {energy[0]:.6f} (1/8 exactly); the balance dE/dt = -eps holds to {fault:.1e} of E(0)")
    assert abs(energy[0] - 1 / 8) < 1e-6 and fault < 1e-4, "energy is not balanced"
    return {"t": t, "E": energy, "eps": np.array([h[3] for h in history]), "slice": np.asarray(flow.vorticity(u))}


def scaling(o: argparse.Namespace) -> None:
    """What a device sends in one step, for one problem on increasing numbers of devices."""
    print(f"\n{o.n} cubed, one step:\n{'devices':>10} {'block':>10} {'sent':>10} {'formula':>10}   collectives")
    for a, b in ((1, 1), (2, 1), (2, 2), (8, 1), (2, 4)):
        flow = Flow(o.n, o.re, o.dt, spmd.make_mesh(a=a, b=b))
        compiled = flow.advance.lower(jax.eval_shape(flow.start), jnp.zeros(()), 1)
        kinds = spmd.inspect.collectives(compiled, mesh=spmd.make_mesh(a=a, b=b)).by_kind()
        block = 8 * o.n**3 // (a * b)  # bytes of one complex field
        # 4 stages of 6 transforms; in each a block is exchanged among b devices, and among a
        formula = 4 * 6 * (block * (b - 1) // b + block * (a - 1) // a)
        sent = kinds["all_to_all"].total_bytes if "all_to_all" in kinds else 0
        counts = ", ".join(f"{sum(c.count for c in found)} {kind}" for kind, found in kinds.items())
        print(f"{f'{a} x {b}':>10} {MB(block):>10} {MB(sent):>10} {MB(formula):>10}   {counts or 'none'}")
        assert sent == formula


def MB(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def draw(found: dict[str, Any], o: argparse.Namespace) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    side = [0, 2 * math.pi]
    image = left.imshow(
        found["slice"].T, origin="lower", extent=(*side, *side), cmap="inferno", interpolation="bicubic"
    )
    left.set(title=f"|w| at z = pi / 4, t = {found['t'][-1]:g}", xlabel="x", ylabel="y")
    figure.colorbar(image, ax=left)
    right.plot(found["t"], found["E"] / found["E"][0], label="E / E(0)")
    right.plot(found["t"], found["eps"] / found["eps"].max(), label="eps / max eps")
    right.set(title=f"Taylor-Green vortex, Re = {o.re:g}, {o.n} cubed", xlabel="t")
    right.legend()
    figure.savefig(o.picture, dpi=120)
    print(f"picture: {o.picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=64, help="points in each direction (64)")
    parser.add_argument("--re", type=float, default=200.0, help="Reynolds number (200)")
    parser.add_argument("--time", type=float, default=8.0, help="until when (8)")
    parser.add_argument("--dt", type=float, default=0.04, help="time step (0.04)")
    parser.add_argument("--every", type=int, default=25, help="steps between two lines (25)")
    parser.add_argument("--a", type=int, default=2, help="devices that x is divided over (2)")
    parser.add_argument("--b", type=int, default=4, help="devices that y is divided over (4); 1 for slabs")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="explicit", help="all: one after another, compared")
    parser.add_argument("--scaling", action="store_true", help="print what a step sends on 1 to 8 devices")
    parser.add_argument("--picture", type=Path, default=Path(tempfile.mkdtemp()) / "spectral_flow.png")
    o = parser.parse_args()
    spmd.use_cpu_devices(max(8, o.a * o.b))
    flow = Flow(o.n, o.re, o.dt, spmd.make_mesh(a=o.a, b=o.b))
    results = {}
    for mode in MODES if o.mode == "all" else (o.mode,):
        print(f"{o.n} cubed on {o.a} x {o.b} devices, Re = {o.re:g}, {mode} mode")
        with spmd.mode(mode):
            results[mode] = simulate(flow, o)
    first, *others = results.values()
    for other in others:
        np.testing.assert_allclose(other["slice"], first["slice"], rtol=1e-3, atol=1e-3)
    draw(first, o)
    if o.scaling:
        scaling(o)


if __name__ == "__main__":
    main()
