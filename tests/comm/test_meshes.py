"""From one mesh to another: pieces against sets of elements, arrays against the whole, and how errors read."""

import itertools
import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import spmd
from tests import simulator as sim
from tests.comm.cases import written
from tests.comm.test_resharding import placements
from tests.sampler import seeds


def mesh_of(sizes, order):
    """A mesh of some devices, in this order."""
    devices = np.array(jax.devices())[np.array(order)[: math.prod(sizes.values())]]
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


CASES = [
    ({"x": 4}, {"p": 2, "q": 2}, [0, 1, 2, 3], [4, 5, 6, 7]),  # other devices
    ({"x": 2, "y": 2}, {"p": 4}, [0, 1, 2, 3], [3, 2, 1, 0]),  # the same in another order
    ({"x": 2, "y": 2}, {"p": 2, "q": 3}, [0, 1, 2, 3], [2, 3, 4, 5, 6, 7]),  # some of both
    ({"x": 8}, {"p": 2}, list(range(8)), [5, 1]),  # fewer
    ({"x": 2}, {"p": 2, "q": 2, "r": 2}, [3, 4], list(range(8))),  # more
    ({"x": 4}, {"x": 4}, [0, 1, 2, 3], [0, 1, 2, 3]),
]
SHAPE = (24, 48)


def drawn(seed):
    dice = random.Random(seed)
    first, second, a, b = CASES[seed % len(CASES)]
    ends = dice.choice(placements(tuple(first))), dice.choice(placements(tuple(second)))
    return mesh_of(first, a), mesh_of(second, b), *map(written, ends)


def held(layout, mesh):
    """The elements of each device, by its id."""
    blocks = sim.scatter(np.arange(math.prod(SHAPE)).reshape(SHAPE), layout, dict(mesh.shape))
    return {d.id: set(block.ravel().tolist()) for d, block in zip(mesh.devices.flat, blocks.values(), strict=True)}


@pytest.mark.parametrize("seed", seeds(24))
def test_every_device_gets_what_it_lacks_and_no_more(seed) -> None:
    mesh, to, source, target = drawn(seed)
    plan = spmd.plan(f"{source} -> {target}", a=SHAPE[0], b=SHAPE[1], mesh=mesh, to=to, dtype=np.uint8)
    have, want = held(source, mesh), held(target, to)
    numbers = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    got = {device: set() for device in want}
    for piece in plan.pieces:
        elements = set(numbers[tuple(slice(*span) for span in piece.box)].ravel().tolist())
        assert len(elements) == piece.bytes and elements <= have[piece.sender]
        assert not elements & got[piece.receiver], "no element comes twice"
        got[piece.receiver] |= elements
    assert got == want
    lacking = {device: len(want[device] - have.get(device, set())) for device in want}
    assert plan.received == lacking and plan.lower_bound == max(lacking.values()) <= plan.bytes
    assert sum(plan.links.values()) == sum(lacking.values()) == sum(plan.senders.values())
    assert str(plan) and plan.to_dict()["lower_bound"] == plan.lower_bound


@pytest.mark.parametrize("seed", seeds(24))
def test_arrays_are_moved(seed) -> None:
    mesh, to, source, target = drawn(seed)
    x = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    placed = spmd.shard(x, source, mesh=mesh)
    out = spmd.relayout(placed, f"{source} -> {target}", to=to)
    assert out.sharding == jax.NamedSharding(to, spmd.Layout(target).spec)
    np.testing.assert_array_equal(out, x)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])


def test_senders_take_turns() -> None:
    """Four copies of everything: each holder sends as much as the others, to four devices that have nothing."""
    mesh, to = mesh_of({"x": 4}, [0, 1, 2, 3]), mesh_of({"p": 4}, [4, 5, 6, 7])
    plan = spmd.plan("a b -> a b", a=8, b=8, mesh=mesh, to=to, dtype=np.uint8)
    assert plan.senders == dict.fromkeys(range(4), 64) and plan.bytes == plan.lower_bound == 64


def test_a_tree_of_weights_with_a_pattern_for_each() -> None:
    mesh, to = mesh_of({"dp": 4}, [0, 1, 2, 3]), mesh_of({"tp": 4}, [2, 3, 4, 5])
    weights = {"in": np.ones((8, 16), np.float32), "out": np.full((16, 8), 2.0, np.float32)}
    tree = {name: spmd.shard(x, "a/dp b", mesh=mesh) for name, x in weights.items()}
    patterns = {"in": "a/dp b -> a b/tp", "out": "a/dp b -> a/tp b"}
    moved = spmd.relayout(tree, patterns, to=to, donate=True)
    for name, x in weights.items():
        np.testing.assert_array_equal(moved[name], x)
        assert tree[name].is_deleted()
    assert moved["in"].sharding.spec == jax.P(None, "tp")


def test_the_array_that_leaves_most_room_is_moved_first(monkeypatch) -> None:
    """One that becomes smaller on each device goes before one that becomes larger."""
    mesh, to = mesh_of({"x": 2}, [0, 1]), mesh_of({"p": 2}, [1, 0])
    grows, shrinks = (spmd.shard(np.ones((8, 8), np.float32), one, mesh=mesh) for one in ("a/x b", "a b"))
    order = []
    real = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: order.append(x.sharding.spec) or real(x))
    spmd.relayout([grows, shrinks], ["a/x b -> a b", "a b -> a/p b"], to=to)
    assert [len([a for a in spec if a]) for spec in order] == [1, 0]


def test_keys_and_empty_arrays() -> None:
    mesh, to = mesh_of({"x": 2}, [0, 1]), mesh_of({"p": 2}, [3, 2])
    keys = spmd.shard(jax.random.split(jax.random.key(0), 4), "a/x", mesh=mesh)
    out = spmd.relayout(keys, "a/x -> a", to=to)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))
    none = spmd.relayout(spmd.shard(np.zeros((0, 4), np.float32), "a b/x", mesh=mesh), "a b/x -> a b/p", to=to)
    assert none.shape == (0, 4)
    one = spmd.relayout(spmd.shard(np.float32(3), "scalar", mesh=mesh), "scalar -> scalar", to=to)
    assert float(one) == 3


def test_names_are_those_of_their_mesh() -> None:
    mesh, to = mesh_of({"x": 2}, [0, 1]), mesh_of({"p": 2}, [3, 2])
    x = spmd.shard(np.ones((4, 4), np.float32), "a/x b", mesh=mesh)
    with pytest.raises(spmd.errors.MeshError, match="no axis 'x'"):
        spmd.relayout(x, "a/x b -> a b/x", to=to)
    with pytest.raises(spmd.errors.MeshError, match="no axis 'p'"):
        spmd.plan("a/p b -> a b/p", a=4, b=4, mesh=mesh, to=to)
    with pytest.raises(spmd.errors.LayoutError, match="lies otherwise"):
        spmd.relayout(x, "a b/x -> a b/p", to=to)
    with pytest.raises(spmd.errors.LayoutError, match="complete"):
        spmd.plan("a b {U:x} -> a b", a=4, b=4, mesh=mesh, to=to)
    with pytest.raises(spmd.errors.CommunicationError, match="outside of jit"):
        jax.jit(lambda v: spmd.relayout(v, "a/x b -> a b/p", to=to))(x)


def test_the_comparison_can_fail() -> None:
    """The same layout on devices in another order is other blocks."""
    mesh, to = mesh_of({"x": 4}, [0, 1, 2, 3]), mesh_of({"x": 4}, [3, 2, 1, 0])
    assert held("a/x b", mesh) != held("a/x b", to)
    assert any(a != b for a, b in itertools.pairwise(held("a/x b", mesh).values()))
