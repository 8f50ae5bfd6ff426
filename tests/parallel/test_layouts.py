"""Layouts chosen from shapes, the stages of ZeRO, and every kind of container."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout, einsum, parallel
from spmd.inspect import collectives
from tests.sampler import share


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=4)


# -------------------- layouts chosen from shapes


def test_layouts_of_odd_shapes():
    """The largest whole dimension that divides; then one that an axis divides already; else whole, with the reason."""
    shape = lambda *n: jax.ShapeDtypeStruct(n, jnp.float32)
    tree = {
        "w": shape(6, 20),
        "taken": shape(8, 3),
        "odd": shape(5, 7),
        "experts": shape(4, 6, 10),
        "stack": shape(4, 9, 12),
        "heads": shape(10, 12),
        "scale": shape(6),
        "step": shape(),
    }
    base = {
        "w": "d f",
        "taken": "f/tp k",
        "odd": "a b",
        "experts": "e/dp d f",
        "stack": "l d f",
        "heads": "d (h k)/tp",
        "scale": "d",
        "step": "scalar",
    }
    found = parallel.fsdp_layouts(tree, base, fsdp="dp", mesh={"dp": 2, "tp": 2}, min_size=10, keep="l")
    assert {name: str(layout) for name, layout in found.at_rest.items()} == {
        "w": "d f/dp",
        "taken": "f/tp/dp k",
        "odd": "a b",
        "experts": "e/dp d f",
        "stack": "l d f/dp",
        "heads": "d/dp (h k)/tp",
        "scale": "d",
        "step": "scalar",
    }
    why = {row.path: row.why for row in found.rows if row.why}
    assert why == {
        "odd": "whole: no dimension divides by dp=2",
        "scale": "whole: fewer than 10 elements",
        "step": "whole: fewer than 10 elements",
    }
    whole = 4 * (35 + 6 + 1)
    assert found.bytes == whole + 4 * (60 + 6 + 120 + 216 + 30)
    assert found.whole == whole / found.bytes
    assert found.compute == {name: Layout(text) for name, text in base.items()}
    text = str(found)
    assert all(name in text for name in tree)
    assert f"{found.bytes} bytes per device" in text


def test_layouts_over_several_axes():
    """Two axes divide one dimension; where one is taken, the other alone."""
    tree = {"w": np.ones((8, 12), np.float32), "e": np.ones((4, 6, 3), np.float32), "s": np.ones(5)}
    base = {"w": "d f/tp", "e": "e/a d k", "s": "..."}
    found = parallel.fsdp_layouts(tree, base, fsdp=("a", "b"), mesh=spmd.make_mesh(a=2, b=2, tp=2), min_size=6)
    assert [str(found.at_rest[k]) for k in "wes"] == ["d/a/b f/tp", "e/a d/b k", "_"]


def zero_loss(w, x):
    """Mean squares of a small network, and of the scales; a partial sum on dp."""
    h = jnp.tanh(einsum(x, w["w"], "b/dp d, d f -> b/dp f"))
    y = einsum(h, w["v"], "b/dp f, f o -> b/dp o")
    return spmd.reduce(y**2 + jnp.mean(w["s"] ** 2), "b/dp o -> {U:dp}") / (spmd.size("b") * 8)


def zero_gradients(stage, plan, mesh):
    """The kernel of one stage: what comes in and goes out, and when it moves."""
    lay = plan.zero(stage)

    @spmd.kernel(in_layouts=(lay.parameters, "b/dp d"), out_layouts=lay.gradients, mesh=mesh)
    def gradients(params, x):
        if stage == 3:
            return spmd.grad(parallel.fsdp(zero_loss, plan.at_rest, plan.compute), loss="{U:dp}")(params, x)
        weights = parallel.gather(params, plan.compute, plan.compute, data="dp")
        found = spmd.grad(zero_loss, loss="{U:dp}")(weights, x)
        # whole gradients at stage 1, divided ones at stage 2
        return parallel.reduce_gradients(found, lay.gradients, plan.compute, data="dp")

    return gradients


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages(stage, mesh):
    """Bytes of one data-parallel step, exactly, optax with its global norm included; the parameters of one device."""
    optax = pytest.importorskip("optax")
    params = {"w": jnp.arange(480.0).reshape(12, 40) / 480, "v": jnp.ones((40, 8)) / 40, "s": jnp.ones(7)}
    x = np.asarray(np.random.default_rng(0).normal(size=(16, 12)), np.float32)
    plan = parallel.fsdp_layouts(params, "...", fsdp="dp", mesh=mesh, min_size=100)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def updated(gradients, state, params):
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    def plain(w):
        y = jnp.tanh(x @ w["w"]) @ w["v"]
        return jnp.mean(y**2) + jnp.mean(w["s"] ** 2)

    right, state, gradients_of = params, jax.jit(optimizer.init)(params), jax.jit(jax.grad(plain))
    for _ in range(2):
        gradients = gradients_of(right)
        assert jax.jit(optax.global_norm)(gradients) > 0.2  # is clipped
        right, state = jax.jit(updated)(gradients, state, right)

    lay = plan.zero(stage)
    run = zero_gradients(stage, plan, mesh)

    def train(params, state, x):
        gradients, params = (spmd.shard(tree, lay.state, mesh=mesh) for tree in (run(params, x), params))
        params, state = updated(gradients, state, params)
        return spmd.shard(params, lay.parameters, mesh=mesh), state

    current = spmd.shard(params, lay.parameters, mesh=mesh)
    placed = spmd.shard(x, "b/dp d", mesh=mesh)
    state = spmd.init(optimizer.init, lambda state: parallel.state_layouts(state, params, lay.state), mesh=mesh)(
        current
    )
    assert state[1][0].mu["w"].addressable_shards[0].data.size == 480 // 4
    jitted = jax.jit(train).lower(current, state, placed).compile()
    part, scales = 4 * (480 + 320) * 3 // 4, 4 * 7 * 3 // 4
    expected = {
        1: {"psum": 2 * (part + scales), "all_gather": part},
        2: {"psum_scatter": part, "psum": 2 * scales, "all_gather": part},
        # x has no gradient, so that the first weight is not needed again
        3: {"psum_scatter": part, "psum": 2 * scales, "all_gather": part + 4 * 320 * 3 // 4},
    }
    found = {}
    for one in collectives(jitted, mesh=mesh):
        scalars = sum(math.prod(shape) == 1 for _, shape in one.operands)  # the sums of the norm aside
        rest = one.total_bytes - scalars * 2 * 4 * 3 // 4
        found |= {one.kind: found.get(one.kind, 0) + rest} if rest else {}
    assert found == expected[stage]
    for _ in range(2):
        current, state = jitted(current, state, placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), current, right)


# -------------------- containers


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    a: jax.Array
    b: jax.Array
    n: jax.Array


def in_equinox(a, b, n):
    equinox = pytest.importorskip("equinox")
    return equinox.nn.MLP(8, 8, 24, 1, use_bias=False, key=jax.random.key(0))  # its activation is a leaf


def in_nnx(a, b, n):
    nnx = pytest.importorskip("flax.nnx")
    return nnx.state([nnx.Linear(8, 24, rngs=nnx.Rngs(0)), nnx.Linear(24, 8, rngs=nnx.Rngs(1))])


CONTAINERS = {  # how each is made, and where its weights are
    "dict": (lambda a, b, n: {"a": a, "b": b, "n": n}, lambda p: (p["a"], p["b"])),
    "dataclass": (Block, lambda p: (p.a, p.b)),
    "list": (lambda a, b, n: [a, (b, None), "a label"], lambda p: (p[0], p[1][0])),
    "equinox": (in_equinox, lambda p: (p.layers[0].weight.T, p.layers[1].weight.T)),
    "nnx": (in_nnx, lambda p: (p[0]["kernel"][...], p[1]["kernel"][...])),
}


@pytest.mark.parametrize(("make", "weights"), share(CONTAINERS.values()), ids=share(CONTAINERS))
def test_any_container(make, weights, mesh):
    """Layouts, gather, the wrapper, norms and accumulation take whatever holds arrays; other leaves pass through."""
    rng = np.random.default_rng(3)
    a, b = (np.asarray(rng.normal(size=n), np.float32) for n in ((8, 24), (24, 8)))
    params = make(a, b, jnp.ones(8))
    plan = parallel.fsdp_layouts(params, fsdp="dp", mesh=mesh, min_size=30)
    x = np.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), np.float32)

    def loss(p, x):
        a, b = weights(p)
        h = jnp.tanh(einsum(x, a, "b/dp d, d f -> b/dp f"))
        return spmd.reduce(einsum(h, b, "b/dp f, f d -> b/dp d") ** 2, "b/dp d -> {U:dp}")

    def plain(arrays):
        a, b = weights(jax.tree.unflatten(structure, put(arrays)))
        return sum(jnp.sum((jnp.tanh(one @ a) @ b) ** 2) for one in x)

    leaves, structure = jax.tree.flatten(params)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    put = lambda arrays: [dict(zip(places, arrays, strict=True)).get(i, leaf) for i, leaf in enumerate(leaves)]
    value, right = jax.jit(jax.value_and_grad(plain))([leaves[i] for i in places])

    def body(p, x):
        options = {"at_rest": plan.at_rest, "compute": plan.compute, "data": "dp"}
        value, gradient = parallel.accumulate(loss, p, x, **options)
        again = spmd.grad(parallel.fsdp(loss, plan.at_rest, plan.compute, data="dp"), loss="{U:dp}", argnums=1)
        norm = parallel.global_norm(gradient, plan.at_rest)
        return value, arrays_of(gradient), norm, again(p, x[0])

    arrays_of = lambda tree: [structure.flatten_up_to(tree)[i] for i in places]
    layouts = arrays_of(plan.at_rest)
    run = spmd.kernel(
        in_layouts=(plan.at_rest, "m b/dp d"), out_layouts=("scalar", layouts, "scalar", "b/dp d"), mesh=mesh
    )(body)
    found = run(params, x)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    np.testing.assert_allclose(found[2], np.sqrt(sum(np.sum(np.asarray(g) ** 2) for g in right)), rtol=1e-5)
    for a, b in zip(found[1], right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
