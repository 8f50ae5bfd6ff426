"""`ppermute` and `shift` against the simulator: values, derivatives, and places along several axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests import simulator as sim
from tests.comm.cases import assert_blocks, device_mesh
from tests.sampler import Sampler, seeds


class Move:
    """A random permutation or shift of the blocks of one dimension."""

    def __init__(self, seed: int) -> None:
        sampler = self.sampler = Sampler(seed)
        self.mesh = sampler.mesh()
        words = sampler.layout("a b c", self.mesh).split()
        along = int(sampler.rng.integers(3))
        self.layout = " ".join(words)
        words[along] = f"[{words[along]}]"
        self.bracketed = " ".join(words)
        sizes = sampler.sizes("a b c", self.mesh, [self.layout])
        self.shape = tuple(sizes.values())
        self.axes = sim.read(self.layout).axes(along)
        blocks = sim.count(self.mesh, self.axes)
        self.by, self.wrap = int(sampler.rng.integers(-blocks, blocks + 1)), bool(sampler.rng.random() < 0.6)
        whole = list(zip(range(blocks), map(int, sampler.rng.permutation(blocks)), strict=True))
        self.pairs = whole if sampler.rng.random() < 0.5 else whole[: int(sampler.rng.integers(1, blocks + 1))]
        self.back = [(j, i) for i, j in self.pairs]

    def kernel(self, verb: str, wrap=lambda run: run, lead: str = ""):
        def run(x):
            if verb == "shift":
                return spmd.shift(x, self.bracketed, self.by, wrap=self.wrap)
            return spmd.ppermute(x, self.bracketed, self.pairs)

        pattern = f"{lead}{self.layout} -> {lead}{self.layout}"
        return spmd.kernel(pattern, mesh=device_mesh(self.mesh))(wrap(run))

    def wanted(self, verb: str, x: np.ndarray, back: bool = False) -> np.ndarray:
        if verb == "shift":
            return sim.shift(x, self.bracketed, self.mesh, -self.by if back else self.by, self.wrap)
        return sim.permute(x, self.bracketed, self.mesh, self.back if back else self.pairs)


both = pytest.mark.parametrize("verb", ["shift", "ppermute"])
over_cases = pytest.mark.parametrize("seed", seeds(5))


@both
@over_cases
def test_values(verb, seed) -> None:
    move = Move(seed)
    x = move.sampler.array(move.shape, move.sampler.dtype())
    kernel = move.kernel(verb)
    wanted = move.wanted(verb, x)
    blocks = sim.scatter(wanted, move.layout, move.mesh)
    assert_blocks(kernel(x), blocks, device_mesh(move.mesh))
    assert_blocks(kernel.auto(x), blocks, device_mesh(move.mesh))
    assert sim.same(np.asarray(kernel.reference(x)), wanted)


@both
@over_cases
def test_the_simulator_agrees_with_itself(verb, seed) -> None:
    """Its collective, device by device, and its global meaning."""
    move = Move(seed)
    x = move.sampler.array(move.shape)
    blocks = sim.scatter(x, move.layout, move.mesh)
    places = sim.count(move.mesh, move.axes)
    pairs = move.pairs
    if verb == "shift":
        goes = lambda i: move.wrap or 0 <= i + move.by < places
        pairs = [(i, (i + move.by) % places) for i in range(places) if goes(i)]
    moved = sim.ppermute(blocks, move.mesh, move.axes, pairs)
    assert sim.same(sim.gather(moved, move.layout, move.mesh), move.wanted(verb, x))


@both
@over_cases
def test_derivatives(verb, seed) -> None:
    move = Move(100 + seed)
    x, tangent, weights = (move.sampler.array(move.shape) for _ in range(3))
    kernel = move.kernel(verb)
    moved = jax.jit(lambda x, t: jax.jvp(kernel, (x,), (t,)))(x, tangent)[1]
    assert sim.same(np.asarray(moved), move.wanted(verb, tangent))
    for run in (kernel, kernel.auto, kernel.reference):
        gradient = jax.jit(jax.grad(lambda x, run=run: jnp.sum(run(x) * weights)))(x)
        assert sim.same(np.asarray(gradient), move.wanted(verb, weights, back=True))


def test_blocks_are_numbered_by_the_layout_not_by_the_mesh() -> None:
    mesh = device_mesh({"x": 2, "y": 3})
    values = np.arange(6)
    for layout, wanted in {"[n/x/y]": [5, 0, 1, 2, 3, 4], "[n/y/x]": [5, 0, 1, 2, 3, 4]}.items():
        plain = layout.strip("[]")
        kernel = spmd.kernel(f"{plain} -> {plain}", mesh=mesh)(lambda x, at=layout: spmd.shift(x, at, 1))
        for run in (kernel, kernel.auto, kernel.reference):
            assert list(np.asarray(run(values))) == wanted


def test_a_scan_carries_a_ring() -> None:
    """The blocks go round once: each device has then seen all of them."""
    mesh = device_mesh({"x": 4})

    @spmd.kernel("n/x -> n/x", mesh=mesh)
    def totals(x):
        def step(carry, _):
            held, total = carry
            return (spmd.shift(held, "[n/x]", 1), total + held), None

        return jax.lax.scan(step, (x, spmd.zeros("n/x", x.dtype)), None, length=4)[0][1]

    x = np.arange(8, dtype=np.int32)
    for run in (totals, totals.auto, totals.reference):
        assert list(np.asarray(run(x))) == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7] * 4


@pytest.mark.parametrize(("wrap", "kept"), [(True, 1), (False, 0)])
def test_an_undivided_dimension_is_one_block(wrap, kept) -> None:
    """On an axis of size 1, or on none, there is one block: it stays, or is lost where nothing wraps."""
    values = np.arange(4, dtype=np.float32)
    unit = spmd.kernel("n/x -> n/x", mesh=device_mesh({"x": 1, "y": 4}))(lambda v: spmd.shift(v, "[n/x]", wrap=wrap))
    none = spmd.kernel("n -> n", mesh=device_mesh({"x": 4}))(lambda v: spmd.shift(v, "[n/on]", wrap=wrap, on=None))
    for kernel in (unit, none):
        for run in (kernel, kernel.auto, kernel.reference):
            assert list(np.asarray(run(values))) == list(kept * values)
