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
    ({"x": 2, "y": 1, "z": 2}, {"p": 1, "q": 3}, [1, 3, 5, 7], [7, 0, 1]),  # axes of size 1
]
SHAPE = (24, 48)
DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "int4", "uint32", "float16"]


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
    dtype = jax.numpy.dtype(DTYPES[seed % len(DTYPES)])
    x = (np.arange(math.prod(SHAPE)) % (2 if dtype.name == "bool" else 7)).reshape(SHAPE).astype(dtype)
    placed = spmd.shard(x, source, mesh=mesh)
    out = spmd.relayout(placed, f"{source} -> {target}", to=to)
    assert out.sharding == jax.NamedSharding(to, spmd.Layout(target).spec) and out.dtype == dtype
    np.testing.assert_array_equal(out, x)
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])


@pytest.mark.parametrize("seed", seeds(24))
def test_the_program_sends_what_the_plan_says(seed, monkeypatch) -> None:
    """Compiled: no device sends or receives more than the one that the plan names with the most."""
    mesh, to, source, target = drawn(seed)
    shape = (24, 48 * (seed % 97 + 2))  # which no other test has, so that the program is made here
    placed = spmd.shard(np.zeros(shape, np.float32), source, mesh=mesh)
    sent, real = [], jax.jit

    def jit(fn):
        def run(x):
            sent.append(spmd.inspect.collectives(real(fn), x, mesh=x.sharding.mesh).total_bytes)
            return real(fn)(x)

        return run

    plan = spmd.plan(f"{source} -> {target}", a=shape[0], b=shape[1], mesh=mesh, to=to)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        spmd.relayout(placed, f"{source} -> {target}", to=to)
    assert sent == [plan.bytes] or (not sent and not plan.bytes)


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


def blocks(layout, mesh, shape):
    return 4 * math.prod(jax.NamedSharding(mesh, spmd.Layout(layout).spec).shard_shape(shape))


def most(order, needs, donate):
    """The most bytes that a device has beside what it starts with. `needs`: those of an array before and after."""
    now = high = 0
    for before, after in (needs[i] for i in order):
        high = max(high, now + after)
        now += after - before * donate
    return high


def live():
    """The bytes of all arrays on device 0, of which several may share a buffer."""
    shards = [one.data for y in jax.live_arrays() for one in y.addressable_shards if one.device.id == 0]
    return sum({one.unsafe_buffer_pointer(): one.nbytes for one in shards}.values())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("seed", seeds(24))
def test_the_order_of_a_tree_needs_the_least_memory(seed, donate, monkeypatch) -> None:
    """Of all orders; and no device has more, counted in the arrays that there are."""
    dice = random.Random(seed)
    mesh, to = mesh_of({"x": 2, "y": 2}, [0, 1, 2, 3]), mesh_of({"p": 2, "q": 2}, [3, 1, 0, 2])
    tree, patterns, needs = [], [], []
    for i in range(4):
        shape = (4 * dice.randint(1, 5), 32)
        source, target = (written(dice.choice(placements(axes))) for axes in ("xy", "pq"))
        tree.append(spmd.shard(np.full(shape, i, np.float32), source, mesh=mesh))
        patterns.append(f"{source} -> {target}")
        needs.append((blocks(source, mesh, shape), blocks(target, to, shape)))
    order, real, found = [], jax.block_until_ready, []

    def ready(x):
        order.append(next(i for i, one in enumerate(tree) if i not in order and held_as(one, x, patterns[i])))
        found.append(live())
        return real(x)

    def held_as(one, x, pattern):
        return (
            not one.is_deleted() and one.shape == x.shape and x.sharding.spec == spmd.Pattern(pattern).outputs[0].spec
        )

    start = live()
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", ready)
        moved = spmd.relayout(tree, patterns, to=to, donate=donate)
    for i, x in enumerate(moved):
        np.testing.assert_array_equal(x, np.full(x.shape, i, np.float32))
    least = min(most(every, needs, donate) for every in itertools.permutations(range(4)))
    assert most(order, needs, donate) == least
    assert max(found) - start <= least


def test_keys_and_empty_arrays() -> None:
    mesh, to = mesh_of({"x": 2}, [0, 1]), mesh_of({"p": 2}, [3, 2])
    keys = spmd.shard(jax.random.split(jax.random.key(0), 4), "a/x", mesh=mesh)
    out = spmd.relayout(keys, "a/x -> a", to=to)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))
    none = spmd.relayout(spmd.shard(np.zeros((0, 4), np.float32), "a b/x", mesh=mesh), "a b/x -> a b/p", to=to)
    assert none.shape == (0, 4)
    one = spmd.relayout(spmd.shard(np.float32(3), "scalar", mesh=mesh), "scalar -> scalar", to=to)
    assert float(one) == 3


def test_two_names_in_one_dimension() -> None:
    mesh, to = mesh_of({"x": 2, "y": 2}, [0, 1, 2, 3]), mesh_of({"p": 4}, [2, 3, 4, 5])
    x = np.arange(8 * 3 * 4 * 5, dtype=np.int32).reshape(24, 4, 5)
    placed = spmd.shard(x, "(a/x c) b/y d", mesh=mesh)
    out = spmd.relayout(placed, "(a/x c) b/y d -> (a/p c) b d", to=to, c=3)
    assert out.sharding.spec[0] == "p"
    np.testing.assert_array_equal(out, x)


def test_the_mesh_around_a_call_has_devices_too() -> None:
    mesh, to = mesh_of({"x": 2}, [4, 5]), mesh_of({"p": 2}, [5, 4])
    with jax.set_mesh(mesh):
        plan = spmd.plan("a/k b -> a b/m", a=4, b=4, to=to, k="x", m="p")
    assert plan.links == {(4, 5): 16, (5, 4): 16}


def test_the_comparison_can_fail() -> None:
    """The same layout on devices in another order is other blocks."""
    mesh, to = mesh_of({"x": 4}, [0, 1, 2, 3]), mesh_of({"x": 4}, [3, 2, 1, 0])
    assert held("a/x b", mesh) != held("a/x b", to)
    assert any(a != b for a, b in itertools.pairwise(held("a/x b", mesh).values()))
