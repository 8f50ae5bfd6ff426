"""Norms and clipping of trees of shards: every element once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import parallel
from spmd.inspect import collectives
from tests.sampler import seeds, share

LAYOUTS = {"experts": "e/ep g f/tp", "dense": "d/dp f/tp", "router": "g e/1", "table": "v/tp c", "scale": "scalar"}
SHAPES = {"experts": (6, 5, 4), "dense": (10, 4), "router": (5, 6), "table": (8, 3), "scale": ()}


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def true_norm(gradients):
    return np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(gradients)))


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=2, ep=2, tp=2)


def norm_kernel(mesh, fn, layouts=LAYOUTS):
    return spmd.kernel(in_layouts=(layouts,), out_layouts="scalar", mesh=mesh)(fn)


# -------------------- the norm


@pytest.mark.parametrize("mode", ["explicit", "auto", "reference"])
def test_norm(mode, mesh):
    run = getattr(norm_kernel(mesh, lambda g: parallel.global_norm(g, LAYOUTS)), mode)
    np.testing.assert_allclose(run(tree()), true_norm(tree()), rtol=1e-6)


def test_one_all_reduce_for_each_set_of_axes(mesh):
    """Experts, dense weights, and the table: three sets; what is whole needs none."""
    run = norm_kernel(mesh, lambda g: parallel.global_norm(g, LAYOUTS))
    report = collectives(run, tree())
    sets = sorted("/".join(one.axes) for one in report for _ in range(one.count))
    assert sets == ["dp/tp", "ep/tp", "tp"]
    assert report.total_bytes == 6 + 6 + 4
    whole = dict.fromkeys(LAYOUTS, "...")
    assert not collectives(norm_kernel(mesh, lambda g: parallel.global_norm(g, whole), whole), tree())


@pytest.mark.parametrize("seed", seeds(3))
def test_norm_of_any_layouts(seed):
    """Random axes on random dimensions, several on one too."""
    rng = np.random.default_rng(seed)
    mesh = spmd.make_mesh(x=2, y=2, z=2)
    layouts, gradients = {}, {}
    for leaf in range(5):
        axes = [[] for _ in range(rng.integers(1, 4))]
        for axis in rng.permutation(["x", "y", "z"])[: rng.integers(0, 4)]:
            axes[rng.integers(len(axes))].append(str(axis))
        layouts[f"w{leaf}"] = " ".join("/".join((f"d{leaf}{i}", *own)) for i, own in enumerate(axes))
        shape = [int(rng.integers(1, 4)) * 2 ** len(own) for own in axes]
        gradients[f"w{leaf}"] = np.asarray(rng.normal(size=shape), np.float32)
    run = norm_kernel(mesh, lambda g: parallel.global_norm(g, layouts), layouts)
    np.testing.assert_allclose(run(gradients), true_norm(gradients), rtol=1e-6)
    distinct = {frozenset(spmd.Layout(text).axes) for text in layouts.values()} - {frozenset()}
    assert collectives(run, gradients).counts.get("psum", 0) == len(distinct)


def test_norm_of_bfloat16_is_summed_in_float32(mesh):
    """Squares of a small and many: bfloat16 would stop counting."""
    gradients = {"w": jnp.full((4096,), 1.0, jnp.bfloat16)}
    run = norm_kernel(mesh, lambda g: parallel.global_norm(g, "d/dp"), {"w": "d/dp"})
    assert run(gradients) == 64.0
    assert run(gradients).dtype == jnp.float32


# -------------------- its traps


def local_norm(gradients):
    """What one writes at first: experts and shards of the other devices are missing."""
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))


def sum_of_all(gradients):
    """What one writes then: summed over every axis, and what is replicated counts once for each device."""
    total = sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))
    return jnp.sqrt(jax.lax.psum(jax.lax.pcast(total, missing(total), to="varying"), ("dp", "ep", "tp")))


def missing(x):
    text = str(jax.typeof(x))
    return tuple(axis for axis in ("dp", "ep", "tp") if axis not in text)


def test_norm_that_misses_experts_is_found(mesh):
    """Megatron-LM PR 5916: without the sum over ep the kernel refuses to return it as equal everywhere."""
    with pytest.raises(spmd.errors.ReplicationError, match="partial sum {U:ep} and a value that is equal on ep"):
        norm_kernel(mesh, local_norm)(tree())
    without = {**LAYOUTS, "experts": "e g f/tp"}
    run = norm_kernel(mesh, lambda g: parallel.global_norm(g, without))
    with pytest.raises(spmd.errors.SpmdError, match='"e g f/tp"'):
        run(tree())


def test_norm_that_counts_copies_is_another(mesh):
    """torchtitan 2318, SkyRL PR 1420: the naive sum counts replicated leaves as often as there are devices."""
    with pytest.raises(spmd.errors.ReplicationError, match="psum over dp of a value that is equal there"):
        norm_kernel(mesh, sum_of_all)(tree())
    naive = norm_kernel(mesh, spmd.per_shard("to see by how much it is wrong")(sum_of_all))(tree())
    assert naive > 1.2 * true_norm(tree())


@pytest.mark.parametrize("layouts", [{"w": "d {U:dp}"}, {"w": "d {R:dp}"}])
def test_partial_sums_are_refused(layouts, mesh):
    def body(x):
        return parallel.global_norm({"w": spmd.reduce(x, "b/dp d -> d {U:dp}")}, layouts)

    with pytest.raises(spmd.errors.LayoutError, match=r"the norm is that of complete values"):
        spmd.kernel("b/dp d -> scalar", mesh=mesh)(body)(jnp.ones((4, 3)))


def test_partial_sums_that_are_not_declared_are_found(mesh):
    def body(x):
        return parallel.global_norm({"w": x.sum(0)}, {"w": "d"})

    with pytest.raises(spmd.errors.ReplicationError, match="dp"):
        spmd.kernel("b/dp d -> scalar", mesh=mesh)(body)(jnp.ones((4, 3)))


# -------------------- clipping


@pytest.mark.parametrize("limit", share([0.5, 1e6]))
def test_clipping_is_that_of_optax(limit, mesh):
    """Alone, and chained with optax's in a kernel: two steps of Adam on shards give those on whole arrays."""
    optax = pytest.importorskip("optax")
    params = jax.tree.map(np.ones_like, tree())

    def steps(optimizer, params, gradients):
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            state = optimizer.init(params)
            for scale in (1.0, 3.0):
                updates, state = optimizer.update(jax.tree.map(lambda g, s=scale: g * s, gradients), state, params)
                params = optax.apply_updates(params, updates)
        return params

    clip = parallel.clip_by_global_norm(limit, LAYOUTS)
    inside = optax.chain(clip, optax.adam(1e-1), optax.add_decayed_weights(1e-3))
    outside = optax.chain(optax.clip_by_global_norm(limit), optax.adam(1e-1), optax.add_decayed_weights(1e-3))
    run = spmd.kernel(in_layouts=(LAYOUTS, LAYOUTS), out_layouts=LAYOUTS, mesh=mesh)(
        lambda params, gradients: steps(inside, params, gradients)
    )
    alone = spmd.kernel(in_layouts=(LAYOUTS,), out_layouts=LAYOUTS, mesh=mesh)(
        lambda g: clip.update(g, clip.init(g))[0]
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, run(params, tree()), jax.jit(functools.partial(steps, outside))(params, tree()))
    expected = jax.jit(optax.clip_by_global_norm(limit).update)(tree(), optax.EmptyState())[0]
    jax.tree.map(close, alone(tree()), expected)


def test_clipping_zeros_gives_zeros(mesh):
    clip = parallel.clip_by_global_norm(1.0, "d/dp")
    run = spmd.kernel("d/dp -> d/dp", mesh=mesh)(lambda g: clip.update(g, ())[0])
    np.testing.assert_array_equal(run(np.zeros(4, np.float32)), np.zeros(4))


def test_what_is_no_number_is_heard_of(mesh):
    """As in optax: one leaf that is none spoils all, and no step is taken as if nothing were."""
    optax = pytest.importorskip("optax")
    gradients = {**tree(), "scale": np.float32(np.nan)}
    clip = parallel.clip_by_global_norm(1.0, LAYOUTS)
    run = spmd.kernel(in_layouts=(LAYOUTS,), out_layouts=LAYOUTS, mesh=mesh)(lambda g: clip.update(g, ())[0])
    wanted = jax.jit(optax.clip_by_global_norm(1.0).update)(gradients, optax.EmptyState())[0]
    jax.tree.map(np.testing.assert_array_equal, run(gradients), wanted)
    assert np.isnan(np.asarray(wanted["dense"])).all()


def test_global_norm_outside_is_right_on_sharded_arrays(mesh):
    """The documented way: optax on the arrays that a kernel returned."""
    optax = pytest.importorskip("optax")
    placed = spmd.shard(tree(), LAYOUTS, mesh=mesh)
    np.testing.assert_allclose(jax.jit(optax.global_norm)(placed), true_norm(tree()), rtol=1e-6)
