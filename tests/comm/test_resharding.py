"""`relayout` is right for every pair of layouts: all 2352 of a matrix on a 2x2x2 mesh, and on others.

By default a sample of the sources, each with all of its targets; SPMD_ALL_RELAYOUTS=1 takes every one.
"""

import itertools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.inspect import collectives
from tests import simulator as sim
from tests.comm.cases import assert_blocks, device_mesh, written
from tests.sampler import seeds, share

EVERY = os.environ.get("SPMD_ALL_RELAYOUTS") == "1"
CUBE = {"x": 2, "y": 2, "z": 2}
MESHES = [{"x": 2, "y": 3}, {"x": 3, "y": 2}, {"x": 4, "y": 2}, {"x": 1, "y": 4, "z": 2}]


def placements(axes, dims=2):
    """Every way to divide `dims` dimensions by some of the axes, each used once, in every order."""
    found = []
    for count in range(len(axes) + 1):
        for used in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), dims - 1):
                ends = (0, *cuts, count)
                found.append(tuple(used[a:b] for a, b in itertools.pairwise(ends)))
    return found


def some(items, count, seed=0):
    return list(items) if EVERY else random.Random(seed).sample(list(items), min(count, len(items)))


def moved(mesh, source, targets, x, *, mode="explicit", partial=()):
    """`x` from one layout to many, in one program; the targets' layouts are the boundary's own."""
    before = written(source, partial)

    def body(x):
        if partial:
            x = spmd.reduce(x, f"p/{'/'.join(partial)} {written(source)} -> {before}", "sum")
        return tuple(spmd.relayout(x, f"{before} -> {written(target)}", to="invarying") for target in targets)

    front = f"p/{'/'.join(partial)} " if partial else ""
    pattern = f"{front}{written(source)} -> {', '.join(map(written, targets))}"
    return getattr(spmd.kernel(pattern, mesh=device_mesh(mesh))(body), mode)


def check(mesh, source, targets, *, mode="explicit", partial=()):
    n = int(np.prod(list(mesh.values())))
    whole = np.arange(2 * n * n).reshape(n, 2 * n).astype(np.int32)
    x = whole if not partial else np.stack([whole + 7 * i for i in range(sim.count(mesh, partial))])
    outs = moved(mesh, source, targets, x, mode=mode, partial=partial)(x)
    wanted = x.sum(0, dtype=x.dtype) if partial else x
    for target, out in zip(targets, outs, strict=True):
        assert_blocks(out, sim.scatter(wanted, written(target), mesh), device_mesh(mesh))


def test_there_are_2352_pairs() -> None:
    found = placements("xyz")
    assert len(found) == len(set(found)) == 49
    assert 49 * 48 == 2352


@pytest.mark.parametrize("source", share(some(placements("xyz"), 6), always=[(("x",), ("y", "z"))]), ids=written)
def test_every_pair_on_a_cube(source) -> None:
    check(CUBE, source, [target for target in placements("xyz") if target != source])


@pytest.mark.parametrize("mesh", share(MESHES), ids=str)
def test_every_pair_on_other_meshes(mesh) -> None:
    everything = placements(tuple(mesh))
    for source in some(everything, 2, seed=len(str(mesh))):
        check(mesh, source, [target for target in everything if target != source])


def test_auto_mode() -> None:
    for mesh in (CUBE, {"x": 2, "y": 3}):
        everything = placements(tuple(mesh))
        for source in some(everything, 1, seed=5):
            check(mesh, source, [target for target in everything if target != source], mode="auto")


def test_auto_mode_where_the_compiler_aborts() -> None:
    """On axes of 3 and 2 XLA of jax 0.12 kills the process at this change, done in one constraint."""
    check({"x": 3, "y": 2}, (("x",), ("y",)), [(("y", "x"), ())], mode="auto")


@pytest.mark.parametrize("partial", share([("x",), ("y", "z"), ("x", "z")]), ids=",".join)
def test_from_partial_sums(partial) -> None:
    rest = tuple(axis for axis in CUBE if axis not in partial)
    for source in some(placements(rest), 1, seed=len(partial)):
        check(CUBE, source, placements("xyz"), partial=partial)


def test_from_a_partial_sum_along_an_axis_of_one_device() -> None:
    check({"x": 1, "y": 2}, ((), ("y",)), [(("y",), ()), ((), ())], partial=("x",))


@pytest.mark.parametrize("seed", seeds(3))
def test_three_dimensions(seed) -> None:
    everything = placements("xyz", dims=3)
    dice = random.Random(seed)
    source, *targets = dice.sample(everything, 9)
    x = np.arange(8 * 16 * 24).reshape(8, 16, 24)
    for target, out in zip(targets, moved(CUBE, source, targets, x)(x), strict=True):
        assert_blocks(out, sim.scatter(x.astype(np.int32), written(target), CUBE), device_mesh(CUBE))


@pytest.mark.parametrize("seed", seeds(3))
def test_gradients(seed) -> None:
    """The gradient of a move is the move back: each target with its own weights."""
    dice = random.Random(100 + seed)
    source, *targets = dice.sample(placements("xyz"), 7)
    x = np.zeros((8, 16), np.float32)
    weights = [np.random.default_rng(i).integers(-3, 4, x.shape).astype(np.float32) for i in range(len(targets))]
    run = moved(CUBE, source, targets, x)
    loss = lambda x: sum(jnp.sum(out * w) for out, w in zip(run(x), weights, strict=True))
    assert (np.asarray(jax.jit(jax.grad(loss))(x)) == sum(weights)).all()


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        ("a/x b -> a b/x", {"all_to_all": 1}),
        ("a/x b -> a b", {"all_gather": 1}),
        ("a b -> a/x b", {}),
        ("a/x/y b -> a/x b/y", {"all_to_all": 1}),
        ("a/x b/y -> a/x b/y/z", {}),
        ("a/x b {U:y} -> a/x b/y", {"psum_scatter": 1}),
        ("a/x b {U:y} -> a/x b", {"psum": 1}),
        ("a/x b {U:y,z} -> a/x/y b/z", {"psum_scatter": 1}),
        ("a/x b {U:y} -> a b/x", {"psum_scatter": 1, "all_to_all": 1}),
        ("a/x b {U:y} -> a b/x/y", {"psum_scatter": 1, "all_to_all": 1}),
        ("a/x/y b -> a/y/x b", {"ppermute": 1}),
    ],
)
def test_its_collectives(pattern, kinds) -> None:
    """What one verb could do takes that verb's one collective; the rest no more than one per axis."""
    left, right = pattern.split(" -> ")
    partial = sim.read(left).unreduced
    inside = left.split(" {")[0]
    front = f"p/{'/'.join(partial)} " if partial else ""

    def body(x):
        x = spmd.reduce(x, f"{front}{inside} -> {left}", "sum") if partial else x
        return spmd.relayout(x, pattern, to="invarying")

    kernel = spmd.kernel(f"{front}{inside} -> {right}", mesh=device_mesh(CUBE))(body)
    x = np.ones((*([sim.count(CUBE, partial)] if partial else []), 8, 16), np.float32)
    placed = jax.device_put(x, jax.NamedSharding(device_mesh(CUBE), spmd.Layout(front + inside).spec))
    assert collectives(kernel, placed).counts == kinds


@pytest.mark.parametrize(
    "pattern",
    [
        "n a/x b/y c -> n a b c/x/y",
        "n a/x b/y c -> n a/y b/x c",
        "n a/x/y b c -> n a b/y c/x",
        "n a/x b/y c -> n a b/x c",
        "n a/x b c {U:y} -> n a b/y c/x",
    ],
)
def test_a_batch_of_nothing(pattern) -> None:
    before, after = pattern.split(" -> ")
    front, rest = ("p/y ", before.replace(" {U:y}", "")) if "{U:y}" in before else ("", before)

    def body(x):
        x = spmd.reduce(x, f"p/y {rest} -> {before}", "sum") if front else x
        return spmd.relayout(x, pattern, to="invarying")

    x = np.zeros((*((2,) if front else ()), 0, 8, 8, 8), np.float32)
    run = spmd.kernel(f"{front}{rest} -> {after}", mesh=device_mesh(CUBE))(body)
    for mode in spmd.modes.MODES:
        assert getattr(run, mode)(x).shape == (0, 8, 8, 8)


def test_the_comparison_can_fail() -> None:
    """A relayout with its axes in another order holds the same numbers in other places."""
    x = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    [out] = moved(CUBE, (("x",), ()), [(("x", "y"), ())], x)(x)
    assert_blocks(out, sim.scatter(x, "a/x/y b", CUBE), device_mesh(CUBE))
    with pytest.raises(AssertionError):
        assert_blocks(out, sim.scatter(x, "a/y/x b", CUBE), device_mesh(CUBE))
