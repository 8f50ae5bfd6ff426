"""The growth of structure: a small cosmological simulation by the particle-mesh method.

    pip install -e ".[examples]"
    python examples/particle_mesh.py                       # 64 cubed particles in pencils on 2 x 4 CPU devices
    python examples/particle_mesh.py --a 8 --b 1 --n 128     # slabs, more particles
    python examples/particle_mesh.py --mode all            # also with the compiler's communication and on one device
    python examples/particle_mesh.py --gradient --explain  # with respect to the initial field; what a step sends

Particles start near a regular grid, displaced by a random field with the power spectrum of cold dark matter (Bardeen,
Bond, Kaiser and Szalay 1986). They attract each other in an expanding, flat universe of matter alone. With the scale
factor a as the time, x in units of the grid and p = a^(3/2) dx/da,

    dx/da = p / a^(3/2),    dp/da = -3/2 a^(-1/2) grad psi,    laplace psi = delta.

Each step drifts, kicks and drifts. The factors are those that make a step exact where structure grows linearly, as in
Y. Feng et al., FastPM, MNRAS 463, 2016. The density delta is that of particles that are shared among the eight points
around them (cloud in cell), and the Poisson equation is solved by Fourier transforms.

Fields have the layout `x/a y/b z`, and particles are rows `n/a/b` on the device whose block they are in. `exchange`
sends them there after a drift, to blocks that touch the one they leave. `deposit` adds what they give to points of
other blocks, and `halo` fetches the forces at such points. Spectra stay transposed, `kx ky/a kz/b`. No device ever
holds more than its own.

The run compares the growth of the largest waves with linear theory, and checks that no particle is lost and that the
total momentum stays zero.
"""

# test: --n 16 --steps 2 --sigma 0.3 --explain

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import track

import spmd
from spmd import axis_size, local_size, meshgrid, offset, rearrange, reduce
from spmd.fft import fftfreq, irfft, rfft, rfftfreq
from spmd.stencil import deposit, halo

matplotlib.use("agg")
import matplotlib.pyplot as plt

GRID, SPECTRUM = "x/a y/b z", "kx ky/a kz/b"
ROWS, OWNERS = "n/a/b v", "n/a/b"  # n: slots for particles, v: the three components
MODES = ("explicit", "auto", "reference")
BOX = 200.0  # the side of the box in Mpc / h
console = Console()

# --- Fourier space ------------------------------------------------------------------------------------------


def to_spectrum(u):
    return rfft(u, f"{GRID} -> {SPECTRUM}", norm="ortho", pad=True)


def to_grid(f):
    return irfft(f, f"{SPECTRUM} -> {GRID}", norm="ortho", pad=True)


def wave_numbers(n: int):
    """kx, ky, kz of this device's modes, in waves per box: three arrays that broadcast to the modes."""
    along = fftfreq("kx", 1 / n), fftfreq("ky/a", 1 / n), rfftfreq("kz/b", n, 1 / n, pad=True)
    return meshgrid(*along, "kx, ky/a, kz/b -> kx ky/a kz/b", sparse=True)


def length(k):
    return jnp.sqrt(k[0] ** 2 + k[1] ** 2 + k[2] ** 2)


def uphill(f, n: int):
    """The field whose divergence is f, three components on the grid."""
    k = wave_numbers(n)
    squared = length(k) ** 2
    potential = jnp.where(squared > 0, -f / jnp.where(squared > 0, squared, 1), 0) * (n / (2 * math.pi))
    odd = [jnp.where(abs(ki) < n / 2, ki, 0) for ki in k]  # the shortest wave has no slope on the grid
    return jnp.stack([to_grid(1j * ki * potential) for ki in odd])


def shifted(n: int):
    """What moves a field by half a cell: its value at the centre of a cell then is at its first point."""
    odd = [jnp.where(abs(ki) < n / 2, ki, 0) for ki in wave_numbers(n)]
    return jnp.exp(1j * math.pi / n * sum(odd))


def cold_dark_matter(waves):
    """The power spectrum of the linear density, up to a factor, at this many waves per box."""
    k = 2 * math.pi * waves / BOX
    q = jnp.maximum(k, 1e-6) / 0.25
    series = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    return k * (jnp.log(1 + 2.34 * q) / (2.34 * q)) ** 2 / jnp.sqrt(series)


def unit_power(n: int) -> float:
    """The factor that gives the linear density a variance of 1 on the grid."""
    k = np.fft.fftfreq(n, 1 / n)
    return 1 / float(cold_dark_matter(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).mean())


# --- particles and the grid ---------------------------------------------------------------------------------


def cells(x, n: int):
    """The cell of each particle in the whole grid, and where it is in the cell."""
    cell = jnp.minimum(jnp.floor(x), n - 1)
    return cell.astype(jnp.int32), x - cell


def margins(n: int) -> tuple[int, int, int]:
    """The sides of this device's block with a margin."""
    return local_size("x/a") + 1, local_size("y/b") + 1, n + 1


def corners(x, n: int) -> Iterator[tuple[Any, Any]]:
    """The eight grid points around each particle, one after another: its number in this device's block with a margin,
    and its share of the particle. One number, not three, and one corner at a time: XLA on CPUs then is several times
    as fast."""
    cell, inside = cells(x, n)
    sides = margins(n)
    first = offset("x/a"), offset("y/b"), 0
    here = [jnp.clip(cell[:, i] - first[i], 0, sides[i] - 2) for i in range(3)]
    for up in np.ndindex(2, 2, 2):
        i, j, k = (place + one for place, one in zip(here, up, strict=True))
        share = math.prod(inside[:, i] if one else 1 - inside[:, i] for i, one in enumerate(up))
        yield (i * sides[1] + j) * sides[2] + k, share


def density(x, owner, n: int):
    """The density less its mean, of particles that are where their owner says."""
    block = jnp.zeros(math.prod(margins(n)), x.dtype)
    for at, share in corners(x, n):  # an empty slot adds to a point beyond the last, which is nothing
        block = block.at[jnp.where(owner >= 0, at, block.size)].add(share)
    return deposit(block.reshape(margins(n)), "x/a+1 y/b+1 z+1 -> x/a y/b z") - 1


def forces(x, owner, n: int):
    """-grad psi where the particles are. Sharing and fetching smooth it, which is undone."""
    angles = [math.pi / n * ki for ki in wave_numbers(n)]
    smooth = math.prod(jnp.where(a == 0, 1, jnp.sin(a) / jnp.where(a == 0, 1, a)) ** 2 for a in angles)
    field = -uphill(to_spectrum(density(x, owner, n)) / smooth**2, n)
    field = halo(field, "v x/a y/b z -> v x/a+1 y/b+1 z+1").reshape(3, -1)
    found = jnp.zeros((3, 1), field.dtype)
    for at, share in corners(x, n):
        found += share[None] * field[:, at]
    return found.T


def neighbours(a: int, b: int) -> tuple[int, ...] | None:
    """How many blocks further in the order of blocks those lie that touch a block."""
    here = np.arange(a * b).reshape(a, b)
    near = [(np.roll(here, (-i, -j), (0, 1)) - here) % (a * b) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    return tuple(map(int, np.setdiff1d(near, 0))) or None


def at_home(x, p, owner, n: int, room: int):
    """Particles on the device of the block that they are in, and how many could not go there: no more than `room` go
    from one device to another, and only to blocks that touch its own."""
    x, near = jnp.mod(x, n), neighbours(axis_size("a"), axis_size("b"))
    (i, j, _), _ = (part.T for part in cells(x, n))
    block = i // (n // axis_size("a")) * axis_size("b") + j // (n // axis_size("b"))
    owner = jnp.where(owner >= 0, block, -1)
    (x, p), owner, away = spmd.exchange((x, p), owner, f"[{OWNERS}] v", capacity=room, hops=near)
    return x, p, owner, away


def step(x, p, owner, start, stop, n: int, room: int):
    """Drift, kick, drift, from one scale factor to another."""
    middle = (start + stop) / 2
    x, p, owner, away = at_home(x + p * (middle - start) / start**1.5, p, owner, n, room)
    p = p + forces(x, owner, n) * (stop**1.5 - start**1.5) / middle
    return x + p * (stop - middle) / stop**1.5, p, owner, away


def measured(x, p, owner, n: int, room: int):
    """The density, how many particles it lacks, and the total momentum beside the sum of sizes."""
    x, p, owner, away = at_home(x, p, owner, n, room)
    total, sizes = (reduce(y, "n/a/b v -> v") for y in (p, abs(p)))
    return density(x, owner, n), away, total / sizes


def spectrum(delta, n: int):
    """The mean power of the waves of each length."""
    k, f = wave_numbers(n), to_spectrum(delta)
    twice = jnp.where((k[2] == 0) | (k[2] == n / 2), 1, 2) * (k[2] <= n / 2)  # the waves that rfft leaves out
    terms = jnp.stack([twice * abs(f) ** 2, twice * jnp.ones_like(f.real)])
    shell = jnp.round(length(k)).astype(jnp.int32)
    pattern = f"c {SPECTRUM}, {SPECTRUM} -> c [r]"
    power, count = spmd.scatter_add(terms, shell, pattern, r=n // 2, outside="drop")
    return power / count


# --- kernels ------------------------------------------------------------------------------------------------


class Universe:
    """The kernels of one grid on one mesh."""

    def __init__(self, n: int, mesh: Any, *, sigma: float = 1.0, first: float = 0.1) -> None:
        blocks = mesh.shape["a"] * mesh.shape["b"]
        mine = n**3 // blocks
        slots, room = mine + mine // 2, max(mine // 8, 1)
        power = sigma**2 * unit_power(n)

        def linear(white):
            """The spectrum of the density that linear theory has at a = 1."""
            return to_spectrum(white) * jnp.sqrt(power * cold_dark_matter(length(wave_numbers(n))))

        def begin(white):
            """Particles, displaced from the centres of cells: at a point a share has a kink."""
            moved = -uphill(linear(white) * shifted(n), n)
            along = (spmd.iota(side).astype(moved.dtype) + 0.5 for side in GRID.split())
            points = jnp.stack(meshgrid(*along, f"x/a, y/b, z -> {GRID}"))

            def rows(u):
                u = rearrange(u, "v (i/a l) (j/b m) z -> i/a j/b (l m z) v", i=mesh.shape["a"], j=mesh.shape["b"])
                u = jnp.pad(u, ((0, 0), (0, 0), (0, slots - mine), (0, 0)))
                return rearrange(u, "i/a j/b s v -> (i/a j/b s) v")

            there = rows(jnp.ones_like(points[:1]))[:, 0] > 0
            x, p = rows(points + first * moved), rows(first**1.5 * moved)
            return x, p, jnp.where(there, 0, -1)

        def evolve(white, times):
            """The density after all steps, as one function of the random field."""

            def one(state, span):
                *state, away = step(*state, *span, n=n, room=room)
                return tuple(state), away

            state, _ = jax.lax.scan(jax.checkpoint(one), begin(white), (times[:-1], times[1:]))
            return measured(*state, n=n, room=room)[0]

        def advance(x, p, owner, start, stop):
            return step(x, p, owner, start, stop, n, room)

        state, sides = f"{ROWS}, {ROWS}, {OWNERS}", dict.fromkeys(("x", "y", "z", "kx", "ky"), n)
        kernel = lambda pattern, fn: spmd.kernel(pattern, mesh=mesh, **sides)(fn)
        self.begin = kernel(f"{GRID} -> {state}", begin)
        self.linear = kernel(f"{GRID} -> {GRID}", lambda white: to_grid(linear(white)))
        self.step = kernel(f"{state}, scalar, scalar -> {state}, scalar", advance)
        self.measured = kernel(f"{state} -> {GRID}, scalar, v", lambda *state: measured(*state, n=n, room=room))
        self.spectrum = kernel(f"{GRID} -> r", lambda delta: spectrum(delta, n))
        self.evolve = kernel(f"{GRID}, t -> {GRID}", evolve)
        self.flat = kernel(f"{GRID} -> x/a y/b", lambda delta: delta.mean(2))


def simulate(u: Universe, white: Any, times: np.ndarray) -> dict[str, Any]:
    """The whole run: power spectra and pictures before and after, and what must stay zero."""
    state = u.begin(white)
    found: dict[str, Any] = {"linear": np.asarray(u.spectrum(u.linear(white)))}
    lost = 0
    for i in track(range(len(times)), "steps", console=console):
        if i:
            *state, away = u.step(*state, jnp.float32(times[i - 1]), jnp.float32(times[i]))
            lost = max(lost, int(away))
        if i in (0, len(times) - 1):
            delta, away, momentum = u.measured(*state)
            lost = max(lost, int(away))
            name = "after" if i else "before"
            found[name], found[f"{name} picture"] = np.asarray(u.spectrum(delta)), np.asarray(u.flat(delta))
    found |= {"away": lost, "momentum": float(abs(momentum).max())}
    assert not lost, f"{lost} particles had no room where they went"
    assert found["momentum"] < 1e-4, "momentum is not conserved"
    return found


def growth(found: dict[str, Any], times: np.ndarray, waves: int = 2) -> float:
    """How much the longest waves have grown, as a part of what linear theory says."""
    longest = slice(1, waves + 1)
    return float(np.sqrt(found["after"][longest].sum() / found["before"][longest].sum()) * times[0] / times[-1])


def gradient_error(u: Universe, white: Any, times: np.ndarray) -> float:
    """The gradient of the final clustering with respect to the initial field, beside a difference in one direction."""
    when = jnp.asarray(times, jnp.float32)
    loss = jax.jit(lambda white: jnp.mean(u.evolve(white, when) ** 2))
    way = jnp.cos(jnp.arange(white.size, dtype=jnp.float32) ** 2).reshape(white.shape)
    slope = float(jnp.vdot(jax.jit(jax.grad(loss))(white), way))
    width = 0.02  # shares are linear in the place, so differences are exact but for the cells that a particle leaves
    between = (float(loss(white + width * way)) - float(loss(white - width * way))) / (2 * width)
    console.print(f"gradient along one direction {slope:.5f}, by a difference {between:.5f}")
    return abs(slope / between - 1)


def draw(found: dict[str, Any], times: np.ndarray, o: argparse.Namespace) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, when, a in ((left, "before", times[0]), (middle, "after", times[-1])):
        axis.imshow(found[f"{when} picture"].T, origin="lower", extent=(0, BOX, 0, BOX), cmap="magma")
        axis.set(title=f"density along z, a = {a:g}", xlabel="x in Mpc / h", ylabel="y")
    waves = np.arange(1, o.n // 2)
    k = 2 * math.pi * waves / BOX
    for when, a in (("before", times[0]), ("after", times[-1])):
        line = right.loglog(k, found[when][1:], label=f"{when}, a = {a:g}")[0]
        right.loglog(k, a**2 * found["linear"][1:], ":", color=line.get_color(), label="linear theory")
    right.set(title=f"power spectrum, {o.n} cubed particles", xlabel="k in h / Mpc")
    right.xaxis.set_minor_formatter("")  # on a small grid these labels overlap
    right.legend()
    figure.savefig(o.picture, dpi=120)
    console.print(f"picture: {o.picture}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--n", type=int, default=64, help="grid points and particles in each direction (64)")
    parser.add_argument("--steps", type=int, default=10, help="steps (10)")
    parser.add_argument("--first", type=float, default=0.1, help="the scale factor at the start (0.1)")
    parser.add_argument("--sigma", type=float, default=1.0, help="the linear density contrast at a = 1 (1)")
    parser.add_argument("--a", type=int, default=2, help="devices that x is divided over (2)")
    parser.add_argument("--b", type=int, default=4, help="devices that y is divided over (4); 1 for slabs")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="explicit", help="all: one after another, compared")
    parser.add_argument("--gradient", action="store_true", help="compare the gradient with a difference")
    parser.add_argument("--explain", action="store_true", help="print what a step sends")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--picture", type=Path, default=Path(tempfile.mkdtemp()) / "particle_mesh.png")
    o = parser.parse_args()
    spmd.use_cpu_devices(max(8, o.a * o.b))
    mesh = spmd.make_mesh(a=o.a, b=o.b)
    u = Universe(o.n, mesh, sigma=o.sigma, first=o.first)
    times = np.linspace(o.first, 1, o.steps + 1)
    white = spmd.shard(jax.random.normal(jax.random.key(0), (o.n,) * 3), GRID, mesh=mesh)
    results = {}
    for mode in MODES if o.mode == "all" else (o.mode,):
        console.print(f"{o.n} cubed particles on {o.a} x {o.b} devices, {mode} mode")
        with spmd.mode(mode):
            results[mode] = simulate(u, white, times)
    first, *others = results.values()
    for other in others:
        for name in ("before", "after"):
            np.testing.assert_allclose(other[name][1:], first[name][1:], rtol=2e-3)
    report: dict[str, Any] = {"growth": growth(first, times), "momentum": first["momentum"]}
    console.print(f"the longest waves grow {report['growth']:.4f} times as much as in linear theory")
    console.print(f"total momentum {report['momentum']:.1e} of the sum of sizes; no particle lost")
    assert abs(report["growth"] - 1) < 0.05, "long waves do not grow as in linear theory"
    if o.gradient:
        report["gradient error"] = gradient_error(u, white, times)
        assert report["gradient error"] < 0.02, "the gradient is not that of a difference"
    if o.explain:
        print(spmd.explain(u.step, *u.begin(white), jnp.float32(o.first), jnp.float32(times[1])))
    draw(first, times, o)
    if o.json:
        spectra = {name: first[name][1:].tolist() for name in ("linear", "before", "after")}
        o.json.write_text(json.dumps({**vars(o), **report, **spectra}, default=str))


if __name__ == "__main__":
    main()
