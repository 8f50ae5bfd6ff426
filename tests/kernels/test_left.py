"""`kernel(..., auto="dp")`: explicit over some axes, while the others stay with the compiler, as `axis_names=` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd import Layout, all_gather, einsum, psum_scatter
from spmd.errors import ModeError, PlacementError
from spmd.inspect import collectives

SHAPES = {"x": ("b/dp s d", (8, 16, 32)), "w": ("d f/tp", (32, 64)), "v": ("f/tp d", (64, 32))}
PATTERN = "b s d, d f/tp, f/tp d -> b s d"


def body(x, w, v):
    h = jnp.tanh(einsum(x, w, "b s d, d f/tp -> b s f/tp"))
    return einsum(h, v, "b s f/tp, f/tp d -> b s d")


def by_hand(mesh, over=("tp",)):
    def shards(x, w, v):
        return jax.lax.psum(jnp.tanh(x @ w) @ v, "tp")

    specs = {"in_specs": (P(), P(None, "tp"), P("tp")), "out_specs": P()}
    return jax.shard_map(shards, mesh=mesh, axis_names=set(over), **specs)


@functools.cache
def arrays(mesh):
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape).astype(np.float32) for name, (_, shape) in SHAPES.items()}
    return tuple(jax.device_put(x, Layout(SHAPES[name][0]).sharding(mesh)) for name, x in made.items())


@pytest.fixture
def mlp(mesh):
    return spmd.kernel(PATTERN, mesh=mesh, auto="dp")(body)


def same(ours, hand, *args):
    """Equal numbers, placements and compiled collectives, to the byte."""
    for one, other in zip(jax.tree.leaves(jax.jit(ours)(*args)), jax.tree.leaves(jax.jit(hand)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    mine, theirs = collectives(jax.jit(ours), *args), collectives(jax.jit(hand), *args)
    assert (mine.counts, mine.total_bytes) == (theirs.counts, theirs.total_bytes)
    return mine


def test_it_sends_what_axis_names_by_hand_sends(mesh, mlp):
    sent = same(mlp, by_hand(mesh), *arrays(mesh))
    assert sent.counts == {"psum": 1} and sent.by_axis().keys() == {"tp"}


def test_without_it_the_batch_is_gathered_and_computed_twice(mesh, mlp):
    both = spmd.kernel(PATTERN, mesh=mesh)(body)
    args = arrays(mesh)
    assert collectives(both, *args).by_axis().keys() == {"dp", "tp"}
    assert collectives(mlp, *args).total_bytes < collectives(both, *args).total_bytes
    assert mlp(*args).sharding.spec == P("dp", None, None)


def squared(fn, argnums):
    return jax.grad(lambda *args: (fn(*args) ** 2).sum(), argnums=argnums)


def test_gradients(mesh, mlp):
    same(squared(mlp, (0, 1, 2)), squared(by_hand(mesh), (0, 1, 2)), *arrays(mesh))


def deep(fn):
    def run(x, w, v):
        step = jax.checkpoint(lambda x, wv: (x + fn(x, *wv), None))
        return jax.lax.scan(step, x, (jnp.stack([w] * 3), jnp.stack([v] * 3)))[0]

    return run


def test_scan_and_remat_with_gradients(mesh, mlp):
    same(deep(mlp), deep(by_hand(mesh)), *arrays(mesh))
    same(squared(deep(mlp), (1, 2)), squared(deep(by_hand(mesh)), (1, 2)), *arrays(mesh))


def test_vmap(mesh, mlp):
    x, w, v = arrays(mesh)
    rows = jax.device_put(jnp.stack([x] * 3), Layout("n b/dp s d").sharding(mesh))
    ours, hand = (jax.vmap(one, in_axes=(0, None, None)) for one in (mlp, by_hand(mesh)))
    same(ours, hand, rows, w, v)


def test_all_modes_agree(mesh, mlp):
    args = arrays(mesh)
    spmd.testing.assert_modes_agree(mlp, *args, rtol=1e-4, atol=1e-4)
    assert mlp.auto(*args).sharding.spec == P("dp", None, None)
    assert collectives(mlp.auto, *args).by_axis().keys() == {"tp"}  # the batch stays divided


def test_verbs_over_the_other_axis(mesh):
    @spmd.kernel("b s/tp d, d f/tp -> b s/tp f", mesh=mesh, auto=("dp",))
    def sequence(x, w):
        x, w = all_gather(x, "b s/tp d -> b s d"), all_gather(w, "d f/tp -> d f")
        y = einsum(x, w, "b s d, d f -> b s f")
        return spmd.split(y, "b s f -> b s/tp f")

    def shards(x, w):
        x, w = (jax.lax.all_gather(one, "tp", axis=1, tiled=True) for one in (x, w))
        return jax.lax.dynamic_slice_in_dim(x @ w, 4 * jax.lax.axis_index("tp"), 4, 1)

    along = P(None, "tp")
    hand = jax.shard_map(shards, mesh=mesh, in_specs=along, out_specs=along, axis_names={"tp"})
    x = jax.device_put(arrays(mesh)[0], Layout("b/dp s/tp d").sharding(mesh))
    w = arrays(mesh)[1]
    same(sequence, hand, x, w)  # the compiler gathers the batch for an all_gather of the other axis, in both
    np.testing.assert_allclose(sequence(x, w), sequence.reference(x, w), rtol=1e-4, atol=1e-4)


def test_sizes_are_those_of_the_whole_along_the_compilers_axes(mesh):
    seen = {}

    @spmd.kernel("b d/tp -> b d/tp", mesh=mesh, auto="dp")
    def look(x):
        seen.update(shape=x.shape, size=spmd.size("b"), local=spmd.local_size("d/tp"))
        return x

    look(arrays(mesh)[0][:, 0])
    assert seen == {"shape": (8, 8), "size": 8, "local": 8}


def test_inside_a_kernel_that_leaves_the_other_axis(mesh, mlp):
    @spmd.kernel("b/dp s d, d f, f d -> b/dp s d", mesh=mesh, auto="tp")
    def outer(x, w, v):
        return 2 * mlp(x, w, v)

    args = arrays(mesh)
    np.testing.assert_allclose(outer(*args), 2 * mlp(*args), rtol=1e-5)
    assert collectives(outer, *args).by_axis().keys() == {"tp"}


def test_inside_the_users_own_shard_map(mesh, mlp):
    inner = jax.shard_map(
        lambda x, w, v: mlp(x, w, v) + 0 * jax.lax.axis_index("dp").astype(x.dtype),
        mesh=mesh,
        in_specs=(P("dp"), P(), P()),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    args = arrays(mesh)
    np.testing.assert_allclose(jax.jit(inner)(*args), mlp(*args), rtol=1e-5, atol=1e-5)


def test_inside_a_kernel_where_every_axis_is_explicit(mesh, mlp):
    @spmd.kernel("b/dp s d, d f/tp, f/tp d -> b/dp s d", mesh=mesh)
    def outer(x, w, v):
        return mlp(x, w, v)

    args = arrays(mesh)
    with pytest.raises(ModeError, match="leaves dp to the compiler, and inside this one every axis is explicit"):
        outer(*args)
    np.testing.assert_allclose(outer.auto(*args), mlp(*args), rtol=1e-5, atol=1e-5)


def test_on_an_abstract_mesh_and_on_another(mesh, mlp):
    args = [jax.ShapeDtypeStruct(shape, "float32") for _, shape in SHAPES.values()]
    abstract = spmd.make_mesh(dp=64, tp=8, abstract=True)
    assert spmd.explain(mlp.on(abstract), *args).by_axis().keys() == {"tp"}
    narrow = spmd.make_mesh(dp=4, tp=2)
    np.testing.assert_allclose(mlp.on(narrow)(*arrays(narrow)), mlp(*arrays(mesh)), rtol=1e-4, atol=1e-5)


def test_boundary_error_looks_at_the_other_axes_only(mesh):
    strict = spmd.kernel(PATTERN, mesh=mesh, auto="dp", boundary="error")(body)
    x, w, v = arrays(mesh)
    assert strict(x, w, v).shape == x.shape
    with pytest.raises(PlacementError, match="w"):
        strict(x, jax.device_put(w, Layout("d/tp f").sharding(mesh)), v)


def test_explain_and_check_say_whose_the_axes_are(mesh, mlp):
    args = arrays(mesh)
    report = spmd.explain(mlp, *args)
    assert report.left == {"dp": ("body",)} and "dp is the compiler's in body" in str(report)
    assert report.unwritten == ()
    found = spmd.check(mlp, *args)
    assert found.verdict.kind == "proved" and "dp is the compiler's in body" in str(found)


def test_explain_plans_what_the_compiler_sends_along_its_axes(mesh):
    """A mean over the batch, in the body, is the compiler's: it is planned where nothing is compiled."""

    def centred(x):
        return spmd.reduce(x - x.mean(0, keepdims=True), "b d/tp -> b", "sum")

    abstract = spmd.make_mesh(dp=2, tp=4, abstract=True)
    kernel = spmd.kernel("b d/tp -> b", mesh=abstract, auto="dp")(centred)
    x = jax.ShapeDtypeStruct((8, 32), "float32", sharding=Layout("b/dp d/tp").sharding(abstract))
    report = spmd.explain(kernel, x)
    assert [(one.kind, one.axes, one.written) for one in report.collectives] == [
        ("psum", ("tp",), True),
        ("psum", ("dp",), False),
    ]
    real = spmd.kernel("b d/tp -> b", mesh=mesh, auto="dp")(centred)
    x = jax.device_put(np.ones((8, 32), np.float32), Layout("b/dp d/tp").sharding(mesh))
    [planned], [compiled] = report.unwritten, spmd.explain(real, x).unwritten
    assert (planned.kind, planned.axes, planned.bytes) == (compiled.kind, compiled.axes, compiled.bytes)


def test_a_missing_sum_is_still_found(mesh):
    @spmd.kernel("b d/tp -> b", mesh=mesh, auto="dp")
    def wrong(x):
        return x.sum(1)

    x = jax.ShapeDtypeStruct((8, 32), "float32")
    [finding] = spmd.check(wrong, x)
    assert finding.kind == "partial" and "tp" in str(finding.fix)


def test_inputs_and_results_on_the_sum_of_a_scatter(mesh):
    @spmd.kernel("b d, d/tp f -> b/tp f", mesh=mesh, auto="dp")
    def scattered(x, w):
        mine = spmd.split(x, "b d -> b d/tp")
        return psum_scatter(mine @ w, "b f {U:tp} -> b/tp f")

    x, w = np.ones((8, 32), np.float32), np.ones((32, 16), np.float32)
    np.testing.assert_allclose(scattered(x, w), x @ w)
