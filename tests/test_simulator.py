"""The simulator against itself: a reference that were wrong, or could not fail, would prove nothing."""

import numpy as np
import pytest

import tests.simulator as sim
from tests.sampler import Sampler, seeds

MESH = {"dp": 2, "tp": 3}


def equal(a, b):
    return set(a) == set(b) and all(a[d].shape == b[d].shape and sim.same(a[d], b[d]) for d in a)


def test_layouts_are_read():
    seen = sim.read("b/dp/tp (h k)/cp [v/ep w] d/1 _ 3 {U:x,y} {R:z}")
    assert seen.dims == (
        (("b", ("dp", "tp")),),
        (("h", ("cp",)), ("k", ())),
        (("v", ("ep",)),),
        (("w", ()),),
        (("d", ()),),
        (("unnamed0", ()),),
        (("3", ()),),
    )
    assert seen.bracketed == (False, False, True, True, False, False, False)
    assert (seen.unreduced, seen.reduced) == (("x", "y"), ("z",))
    assert sim.read("(h/tp k)") == sim.read("(h k)/tp")
    assert sim.read("scalar").dims == sim.read("").dims == ()


def test_patterns_are_split():
    assert sim.split_pattern("a/dp b {U:x,y}, b -> a, {R:z}") == (["a/dp b {U:x,y}", "b"], ["a", "{R:z}"])
    assert sim.split_pattern("-> a,") == ([""], ["a"])


def test_a_small_case_by_hand():
    x = np.arange(12).reshape(4, 3)
    blocks = sim.scatter(x, "b/dp s/tp", MESH)
    assert blocks[0, 0].tolist() == [[0], [3]]
    assert blocks[1, 2].tolist() == [[8], [11]]
    blocks = sim.scatter(np.arange(12), "b/tp/dp", MESH)  # tp major
    assert blocks[0, 1].tolist() == [4, 5]
    assert blocks[1, 1].tolist() == [6, 7]


def test_both_factors_of_a_dimension_may_be_divided():
    x = np.arange(24)
    blocks = sim.scatter(x, "(b/dp s/tp)", MESH, {"b": 4})
    assert blocks[1, 0].tolist() == [12, 13, 18, 19]
    assert sim.gather(blocks, "(b/dp s/tp)", MESH, {"b": 4}).tolist() == x.tolist()


@pytest.mark.parametrize("seed", seeds(20))
def test_gather_undoes_scatter(seed):
    pick = Sampler(seed)
    mesh = pick.mesh()
    layout = pick.layout("a b c", mesh, unreduced=True)
    x = pick.array(tuple(pick.sizes("a b c", mesh, [layout]).values()), pick.dtype())
    assert sim.same(sim.gather(sim.scatter(x, layout, mesh, seed=seed), layout, mesh), x)


@pytest.mark.parametrize("seed", seeds(10))
def test_collectives_do_what_the_layouts_say(seed):
    pick = Sampler(seed)
    mesh = pick.mesh(axes=3)
    x, y, z = (str(axis) for axis in pick.rng.permutation(list(mesh)))
    array = pick.array((mesh[x] * mesh[y] * mesh[z], 2 * mesh[x] * mesh[y], mesh[z] * mesh[x] * 3))
    on = lambda layout: sim.scatter(array, layout, mesh)
    assert equal(sim.all_gather(on(f"a/{x}/{y} b c"), mesh, [y], 0), on(f"a/{x} b c"))
    assert equal(sim.all_gather(on(f"a/{x}/{y} b c"), mesh, [x, y], 0), on("a b c"))
    assert equal(sim.split(on(f"a/{x} b c"), mesh, [y], 0), on(f"a/{x}/{y} b c"))
    assert equal(sim.all_to_all(on(f"a/{x}/{y} b c"), mesh, [y], 1, 0), on(f"a/{x} b/{y} c"))
    assert equal(sim.psum(on(f"a/{x} b c {{U:{y}}}"), mesh, [y]), on(f"a/{x} b c"))
    assert equal(sim.psum_scatter(on(f"a/{x} b c {{U:{y}}}"), mesh, [y], 0), on(f"a/{x}/{y} b c"))
    assert equal(sim.psum_scatter(on(f"a b c {{U:{z}}}"), mesh, [z], 2), on(f"a b c/{z}"))


@pytest.mark.parametrize("seed", seeds(6))
def test_shift_is_a_ppermute_of_blocks(seed):
    pick = Sampler(seed)
    mesh = pick.mesh()
    axes = list(mesh)[: int(pick.rng.integers(1, len(mesh) + 1))]
    layout = f"a [b/{'/'.join(axes)}] c"
    n = sim.count(mesh, axes)
    x = pick.array((3, 2 * n, 5))
    for by, wrap in ((1, True), (-1, True), (1, False), (2, True)):
        pairs = [(i, (i + by) % n) for i in range(n) if wrap or 0 <= i + by < n]
        moved = sim.ppermute(sim.scatter(x, layout, mesh), mesh, axes, pairs)
        assert sim.same(sim.gather(moved, layout, mesh), sim.shift(x, layout, mesh, by, wrap))
        if wrap:
            assert sim.same(sim.shift(x, layout, mesh, by), np.roll(x, by * 2, axis=1))


def test_global_meanings():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 8)), rng.normal(size=(8, 5))
    np.testing.assert_allclose(sim.einsum(x, w, pattern="b/dp s d/tp, d/tp f -> b/dp s f"), x @ w)
    heads = sim.einsum(x, w, pattern="b s (h k)/tp, (h k)/tp f -> b (s h) f", sizes={"h": 2})
    by_hand = np.einsum("bshk,hkf->bshf", x.reshape(2, 3, 2, 4), w.reshape(2, 4, 5))
    np.testing.assert_allclose(heads, by_hand.reshape(2, 6, 5))
    for kind, fn in (("sum", np.sum), ("mean", np.mean), ("max", np.max), ("prod", np.prod)):
        np.testing.assert_allclose(sim.reduce(x, "b/dp s d -> d/tp b", kind), fn(x, axis=1).T)
    np.testing.assert_allclose(sim.reduce(x, "b s d -> b s", "logsumexp"), np.log(np.exp(x).sum(-1)))
    heads = sim.reduce(x, "b s (h k)/tp -> h", "sum", {"h": 2})
    np.testing.assert_allclose(heads, x.sum((0, 1)).reshape(2, 4).sum(1))
    assert sim.reduce(x > 0, "b s d -> scalar", "any")
    np.testing.assert_allclose(sim.softmax(x, "b [s] d").sum(1), np.ones((2, 8)))
    assert sim.argmax(x, "b s [d/tp]").shape == (2, 3)
    assert sim.rearrange(x, "b/dp s (h k)/tp -> (b s) k h", h=2).shape == (6, 4, 2)
    assert sim.repeat(x, "b s d -> b s (d r)", r=3).shape == (2, 3, 24)
    np.testing.assert_array_equal(sim.cumsum(x, "[b] s d")[-1], x.sum(0))
    np.testing.assert_array_equal(sim.roll(x, "b [s] d", 1)[:, 0], x[:, -1])
    ids = np.array([[1, 7], [0, 2]])
    np.testing.assert_array_equal(sim.take(w, ids, "[v/tp] d, b/dp s -> d b/dp s"), w[ids].transpose(2, 0, 1))
    values, places = sim.top_k(x, "b s [d]", 2)
    np.testing.assert_array_equal(values, -np.sort(-x, axis=-1)[..., :2])
    np.testing.assert_array_equal(np.take_along_axis(x, places, -1), values)


def test_a_sharded_matmul_step_by_step():
    """Contracting a divided dim leaves partial sums; psum_scatter onto another dim is the einsum."""
    pick = Sampler(1)
    x, w = pick.array((4, 6)), pick.array((6, 9))
    partial = sim.map_blocks(np.matmul, sim.scatter(x, "b/dp d/tp", MESH), sim.scatter(w, "d/tp f", MESH))
    assert sim.same(sim.gather(partial, "b/dp f {U:tp}", MESH), x @ w)
    done = sim.psum_scatter(partial, MESH, ["tp"], 1)
    assert sim.same(sim.gather(done, "b/dp f/tp", MESH), sim.einsum(x, w, pattern="b d, d f -> b f"))


def test_iota():
    assert sim.iota("c/tp", {"dp": 2, "tp": 2}, 6)[1, 1].tolist() == [3, 4, 5]


# -------------------- what must be noticed


def test_copies_that_differ_are_noticed():
    blocks = sim.scatter(np.arange(6), "b/tp", MESH)
    blocks[1, 2] = blocks[1, 2] + 1
    with pytest.raises(AssertionError, match=r"device \(1, 2\) holds another copy"):
        sim.gather(blocks, "b/tp", MESH)
    missing = {device: block for device, block in blocks.items() if device != (0, 0)}
    with pytest.raises(AssertionError, match="no block"):
        sim.gather(missing, "b/tp", MESH)


def test_sizes_that_do_not_divide_are_noticed():
    with pytest.raises(AssertionError, match="b of size 4 does not divide by 3"):
        sim.scatter(np.arange(4), "b/tp", MESH)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda blocks: sim.all_gather(blocks, MESH, ["dp"], 0),  # the major axis first: permuted rows
        lambda blocks: sim.all_gather(blocks, MESH, ["tp"], 1),  # along another dim
        lambda blocks: sim.psum(blocks, MESH, ["tp"]),
        lambda blocks: blocks,
    ],
)
def test_a_wrong_rule_is_noticed(wrong):
    """Meta-test: rules that are not `b/dp/tp d -> b/dp d` give other values, shapes or differing copies."""
    x = np.arange(36).reshape(12, 3)
    found = wrong(sim.scatter(x, "b/dp/tp d", MESH))
    try:
        value = sim.gather(found, "b/dp d", MESH)
    except AssertionError:
        return
    assert value.shape != x.shape or not sim.same(value, x)


def test_sampler_keeps_its_promises():
    for seed in range(40):
        pick = Sampler(seed)
        mesh = pick.mesh()
        assert len(mesh) in (2, 3)
        assert 2 <= np.prod(list(mesh.values())) <= 8
        layout = pick.layout("a b c d", mesh)
        used = [axis for i in range(4) for axis in sim.read(layout).axes(i)]
        assert len(set(used)) == len(used)
        sizes = pick.sizes("a b c d", mesh, [layout])
        assert len(set(sizes.values())) == 4
        assert min(sizes.values()) > 1
        sim.scatter(pick.array(tuple(sizes.values())), layout, mesh)
    layouts = {Sampler(seed).layout("a b", {"x": 2, "y": 2}) for seed in range(60)}
    assert {"a/x/y b", "a/y/x b", "a/x b/y", "a b"} <= layouts
