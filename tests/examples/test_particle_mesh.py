"""The simulation of particles: its parts against NumPy, its modes against each other, its gradient."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.modes import MODES
from tests.conftest import FULL_CASES, case_count
from tests.sampler import rare

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIDE = 16
exhaustive = pytest.mark.skipif(case_count() <= FULL_CASES, reason="one of the exhaustive tests: it compiles for long")


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        with jax.numpy_dtype_promotion("standard"):  # examples are written for JAX as users have it
            yield importlib.import_module("particle_mesh")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def universe(module: Any) -> Any:
    return module.Universe(SIDE, spmd.make_mesh(a=2, b=4), sigma=0.3)


@pytest.fixture(scope="module")
def white() -> Any:
    return jax.random.normal(jax.random.key(0), (SIDE,) * 3)


def shared(x: np.ndarray) -> np.ndarray:
    """Particles shared among the points around them, one corner after the other, less the mean."""
    grid, cell = np.zeros((SIDE,) * 3), np.floor(x).astype(int)
    for corner in np.ndindex(2, 2, 2):
        part = np.prod(np.where(corner, x - cell, 1 - x + cell), 1)
        np.add.at(grid, tuple(((cell + corner) % SIDE).T), part)
    return grid - 1


@rare
def test_the_density_and_its_spectrum_are_numpys(universe: Any, white: Any) -> None:
    x, p, owner = universe.begin(white)
    assert int((owner >= 0).sum()) == SIDE**3
    delta, away, momentum = universe.measured(x, p, owner)
    wanted = shared(np.asarray(x, np.float64)[np.asarray(owner) >= 0])
    np.testing.assert_allclose(delta, wanted, atol=2e-5)
    assert int(away) == 0 and abs(momentum).max() < 1e-5
    k = np.fft.fftfreq(SIDE, 1 / SIDE)
    shell = np.round(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).astype(int)
    power = abs(np.fft.fftn(wanted, norm="ortho")) ** 2
    means = [power[shell == r].mean() for r in range(1, SIDE // 2)]
    np.testing.assert_allclose(universe.spectrum(delta)[1:], means, rtol=1e-3)


@exhaustive
@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_the_modes_agree_and_long_waves_grow_as_in_linear_theory(module: Any, white: Any, sigma: float) -> None:
    u, times = module.Universe(SIDE, spmd.make_mesh(a=4, b=2), sigma=sigma), np.linspace(0.1, 0.5, 4)
    found = {}
    for mode in MODES:
        with spmd.mode(mode):
            found[mode] = module.simulate(u, white, times)
    for one in found.values():
        np.testing.assert_allclose(one["after"][1:], found["reference"]["after"][1:], rtol=2e-3)
    assert abs(module.growth(found["explicit"], times) - 1) < 0.05


@exhaustive
def test_the_gradient_is_that_of_a_difference(module: Any, universe: Any, white: Any) -> None:
    assert module.gradient_error(universe, white, np.array([0.1, 0.3, 0.6])) < 0.02


@exhaustive
def test_what_a_step_sends(universe: Any, white: Any) -> None:
    args = (*universe.begin(white), jnp.float32(0.1), jnp.float32(0.2))
    kinds = spmd.inspect.collectives(universe.step, *args, mesh=spmd.make_mesh(a=2, b=4)).counts
    # the counts of rows; four transforms of two exchanges; rows to five blocks, the margins of a density and of forces
    assert kinds == {"all_gather": 1, "all_to_all": 4 * 2, "ppermute": 5 + 2 + 2}


def test_the_blocks_that_touch_one(module: Any) -> None:
    near = {(1, 1): None, (2, 1): (1,), (8, 1): (1, 7), (2, 4): (1, 3, 4, 5, 7), (3, 3): tuple(range(1, 9))}
    assert {sides: module.neighbours(*sides) for sides in near} == near
    assert len(module.neighbours(8, 8)) == 10  # of 63: eight blocks, some of them round an end
