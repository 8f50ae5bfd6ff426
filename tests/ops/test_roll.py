"""`roll` by elements, along whole and divided dimensions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.inspect import collectives
from spmd.modes import MODES
from spmd.ops import roll
from tests import simulator
from tests.ops.harness import backward_counts, close, make_mesh, mapped_and_scanned, pulled, pulling, run
from tests.sampler import Sampler, share

MESH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize("by", [1, -5, 4, 16, 11])
@pytest.mark.parametrize("layout", share(["b/dp [s/tp]", "b [s/tp/dp]", "[s/tp] b/dp"]))
def test_values_and_gradients_in_every_mode(layout: str, by: int) -> None:
    plain = layout.replace("[", "").replace("]", "")
    (axis,) = simulator.bracketed(layout)
    x = Sampler(1).array((4, 16) if axis else (16, 4), whole=False)
    weights = Sampler(2).array(x.shape, whole=False)
    expected = pulled(lambda x: jnp.roll(x, by, axis=axis), x, by=weights)
    for mode in MODES if by == 11 else ("explicit", "reference"):
        fn = run(lambda x: roll(x, layout, by), MESH, [plain], plain, mode)
        jax.tree.map(close, pulled(fn, x, by=weights), expected)


# 4 blocks of 4 elements: what each device sends, in elements, and in how many permutes.
COSTS = [
    (1, 1, 1),
    (-1, 1, 1),
    (3, 1, 3),
    (4, 1, 4),
    (5, 2, 4),
    (13, 1, 3),
    (-3, 1, 3),
    (16, 0, 0),
    (0, 0, 0),
    (6, 2, 4),
]


@pytest.mark.parametrize(("by", "permutes", "elements"), share(COSTS))
def test_only_what_crosses_a_border_is_sent(by: int, permutes: int, elements: int) -> None:
    x = np.ones((6, 16), np.float32)
    body = lambda x: roll(x, "b/dp [s/tp]", by)
    report = collectives(run(body, MESH, ["b/dp s/tp"], "b/dp s/tp").lower(x).compile(), mesh=make_mesh(MESH))
    assert sum(one.count for one in report) == permutes
    assert sum(one.total_bytes for one in report) == 3 * elements * 4
    expected = {"ppermute tp": 2 * permutes} if permutes else {}
    assert backward_counts(body, MESH, ["b/dp s/tp"], "b/dp s/tp", x) == expected


# Layouts, meshes and shapes: by digits, by another dimension, two at once, not divided, a partial sum.
TRACED = [
    ("[s/a]", {"a": 4}, (20,), {"ppermute": 3}, 3),
    ("[s/b/a] 3", {"a": 4, "b": 2}, (24, 3), {"ppermute": 4}, 4),
    ("3 [s/a]", {"a": 5}, (3, 15), {"ppermute": 4}, 4),
    ("8 [s/a]", {"a": 4}, (8, 12), {"all_to_all": 2}, 1.5),
    ("[x/b] [s/a]", {"a": 4, "b": 2}, (6, 20), {"ppermute": 5}, 5),
    ("[s/a]", {"a": 1, "b": 2}, (5,), {}, 0),
    ("[s/a] {U:b}", {"a": 2, "b": 2}, (6,), {"ppermute": 2}, 2),
]


@pytest.mark.parametrize(("layout", "mesh", "shape", "kinds", "shards"), share(TRACED))
def test_a_traced_shift(layout: str, mesh: dict, shape: tuple, kinds: dict, shards: float) -> None:
    """One program for all shifts, whose collectives and bytes are the docstring's."""
    plain = layout.replace("[", "").replace("]", "")
    axes = simulator.bracketed(layout)
    x, by = (Sampler(seed).array(shape, whole=False) for seed in (1, 2))
    shard = x.nbytes / math.prod(mesh[axis] for axis in spmd.Layout(plain).axes)
    body = lambda x, shift: roll(x, layout, shift)
    report = collectives(
        run(body, mesh, [plain, "scalar"], plain).lower(x, np.int32(1)).compile(), mesh=make_mesh(mesh)
    )
    assert report.counts == kinds and report.total_bytes == shards * shard
    if "U" not in plain:
        unknown = lambda x: roll(x, layout, jax.lax.optimization_barrier(jnp.int32(3)))
        found = backward_counts(unknown, mesh, [plain], plain, x)
        assert {key.split()[0] for key in found} == {*kinds}
        assert kinds.keys() == {"all_to_all"} or sum(found.values()) == 2 * sum(kinds.values())
    wanted = pulling(lambda x, shift: jnp.roll(x, (shift,) * len(axes), axes), by)
    expected = {shift: wanted(x, shift) for shift in map(np.int32, (0, 1, -3, 57))}
    for mode in MODES if plain != "8 s/a" else ("explicit", "reference"):
        fn = run(body, mesh, [plain, "scalar"], plain, mode)
        found = jax.jit(fn) if "U" in plain else pulling(fn, by)
        for shift, (value, gradients) in expected.items():
            jax.tree.map(close, found(x, shift), value if "U" in plain else (value, gradients))


def test_a_traced_shift_under_vmap_scan_and_remat_and_of_any_integer_type() -> None:
    def one(row, shift):
        return roll(row, "[s/tp]", shift) + roll(row, "[s/tp]", shift.astype("int8"))

    def body(x, shifts):
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, both: (c, one(*both))), 0, (x, shifts))
        return jax.vmap(one)(x, shifts) + scanned

    x, shifts = Sampler(4).array((3, 600)), np.int32([5, -7, 100])
    whole = lambda x: 4 * jax.vmap(jnp.roll)(x, shifts)
    fn = run(body, MESH, ["t s/tp", "t"], "t s/tp")
    jax.tree.map(close, pulled(lambda x: fn(x, shifts), x), pulled(whole, x))


def test_of_no_elements() -> None:
    x = np.zeros((0, 3), np.float32)
    bodies = (lambda x: spmd.roll(x, "[s/a] [d]", 2), lambda x: spmd.roll(x, "[s/a] [d]", jnp.int32(2)))
    for body in bodies:
        for mode in ("explicit", "reference"):
            assert run(body, {"a": 4}, ["s/a d"], "s/a d", mode)(x).shape == (0, 3)


def test_several_dimensions_at_once() -> None:
    x = jnp.asarray(Sampler(3).array((4, 16, 5)))
    for mode in MODES:
        fn = run(lambda x: roll(x, "[b/dp] [s/tp] d", (1, -6)), MESH, ["b/dp s/tp d"], "b/dp s/tp d", mode)
        close(fn(x), np.roll(x, (1, -6), (0, 1)))
        fn = run(lambda x: roll(x, "[b/dp] s/tp [d]", 3), MESH, ["b/dp s/tp d"], "b/dp s/tp d", mode)
        close(fn(x), np.roll(x, 3, (0, 2)))


def test_under_vmap_scan_and_remat_and_of_partial_sums() -> None:
    one = lambda row: roll(row, "[s/tp] {U:dp}", 3)

    x = jnp.asarray(Sampler(4).array((3, 8)))
    fn = run(mapped_and_scanned(one), MESH, ["t s/tp {U:dp}"], "t s/tp {U:dp}")
    close(fn(x), 2 * np.roll(x, 3, 1))


def test_the_comparison_can_fail() -> None:
    """A roll of each block by itself is noticed."""
    x = jnp.arange(16.0).reshape(2, 8)
    wrong = run(lambda x: jnp.roll(x, 1, axis=1), MESH, ["b s/tp"], "b s/tp")
    with pytest.raises(AssertionError):
        close(wrong(x), jnp.roll(x, 1, axis=1))
