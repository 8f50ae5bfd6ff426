"""FSDP where the registry of layers does not reach: what is kept, what is compiled, which layouts are chosen."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout, einsum, parallel
from spmd.inspect import collectives
from spmd.inspect._hlo import parse_module

REST = {"a": "d/dp f", "b": "f d/dp", "n": "d"}
USE = {"a": "d f", "b": "f d", "n": "d"}
X = "b/dp d"
D, F, L = 12, 40, 3


def stacked(layouts):
    return {name: f"l {text}" for name, text in layouts.items()}


def layer(w, x):
    """With what makes naive policies keep copies of weights: a cast, a transpose, a jitted part."""
    up = jax.jit(lambda v, x: x @ (v * jnp.float32(1.5)))
    h = jax.nn.gelu(up(w["a"].astype(x.dtype), x * w["n"][None].astype(x.dtype)))
    return x + h @ w["b"].T.T.astype(x.dtype)


def plain_stack(params, x):
    for i in range(L):
        x = layer(jax.tree.map(lambda w, i=i: w[i], params), x)
    return x


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=4)


@pytest.fixture(scope="module")
def given(mesh):
    rng = np.random.default_rng(0)
    shapes = {"a": (L, D, F), "b": (L, F, D), "n": (L, D)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(20, D)), jnp.float32)
    return spmd.shard(params, stacked(REST), mesh=mesh), spmd.shard(x, X, mesh=mesh)


def unrolled(save):
    one = parallel.fsdp(layer, REST, USE, save=save)

    def body(params, x):
        for i in range(L):
            x = one(jax.tree.map(lambda w, i=i: w[i], params), x)
        return x

    return body


def scanned(save, prefetch):
    return lambda params, x: parallel.scan_layers(
        layer, params, x, at_rest=stacked(REST), compute=stacked(USE), save=save, prefetch=prefetch
    )


def gathered_at_start(params, x):
    """What FSDP must not be: gathered once, and kept."""
    weights = parallel.gather(params, stacked(REST), stacked(USE))
    return plain_stack(weights, x)


def kernel(body, mesh):
    return spmd.kernel(in_layouts=(stacked(REST), X), out_layouts=X, mesh=mesh)(body)


def step(run):
    """Value and pullback: what a training step compiles."""

    def both(params, x, cotangent):
        out, pull = jax.vjp(run, params, x)
        return out, pull(cotangent)

    return both


# -------------------- what is kept for the backward pass


def kept_bytes(body, mesh, params, x):
    """Bytes per device of the residuals, and the shapes per device."""
    leaves = jax.tree.leaves(jax.vjp(kernel(body, mesh), params, x)[1])
    shards = [leaf.addressable_shards[0].data for leaf in leaves if hasattr(leaf, "addressable_shards")]
    return sum(s.nbytes for s in shards), [s.shape for s in shards]


WAYS = {
    "unrolled": (unrolled("activations"), unrolled("inputs")),
    "scan": (scanned("activations", False), scanned("inputs", False)),
    "prefetch": (scanned("activations", True), scanned("inputs", True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_gathered_weight_is_kept(way, mesh, given):
    params, x = given
    activations, inputs = (kept_bytes(body, mesh, params, x) for body in WAYS[way])
    weights, rows = 4 * D * F, 20 // 4
    shards = L * (2 * weights // 4 + 4 * D)
    for _, shapes in (activations, inputs):
        wide = [shape for shape in shapes if shape[-2:] in ((D, F), (F, D))]
        assert not wide
    assert inputs[0] == shards + L * rows * D * 4
    # x, x n, and at most eight arrays of hidden units (JAX keeps the pieces of gelu)
    assert inputs[0] < activations[0] <= shards + L * rows * 4 * (4 * D + 8 * F)


def test_what_is_gathered_at_the_start_is_kept(mesh, given):
    """Meta-test: the measure sees gathered weights where they are kept."""
    _, shapes = kept_bytes(gathered_at_start, mesh, *given)
    assert [shape for shape in shapes if shape[-2:] in ((D, F), (F, D))]


@pytest.mark.parametrize(("way", "edge"), [("unrolled", 0), ("scan", 0), ("prefetch", 1)])
@pytest.mark.parametrize("save", [0, 1], ids=["activations", "inputs"])
def test_each_weight_is_gathered_again(way, edge, save, mesh, given):
    """In the compiled program, on every version: without a scan too, where equal gathers are merged."""
    params, x = given
    run = kernel(WAYS[way][save], mesh)
    compiled = jax.jit(step(run)).lower(params, x, x).compile()
    report = collectives(compiled, mesh=mesh)
    one = 4 * D * F * 3 // 4
    assert report.counts == {"all_gather": 4 * (L + edge), "psum": report.counts["psum"], "psum_scatter": 2 * L}
    kinds = report.by_kind()
    assert kinds["all_gather"].total_bytes == 4 * (L + edge) * one
    assert kinds["psum_scatter"].total_bytes == 2 * L * one
    scales = L * 2 * 4 * D * 3 // 4
    assert kinds["psum"].total_bytes == scales
    found, right = compiled(params, x, x), step(plain_stack)(params, x, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_temporary_memory(mesh):
    """Six layers, mostly weights: in the compiled program a scan holds one or two of them gathered, not six."""
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {"a": struct(6, 48, 192), "b": struct(6, 192, 48), "n": struct(6, 48)}
    args = spmd.shard(params, stacked(REST), mesh=mesh), spmd.shard(struct(8, 48), X, mesh=mesh)

    def temporary(body):
        return jax.jit(step(kernel(body, mesh))).lower(*args, args[1]).compile().memory_analysis().temp_size_in_bytes

    layer_bytes = 4 * 2 * 48 * 192
    kept = temporary(lambda params, x: six_layers(parallel.gather(params, stacked(REST), stacked(USE)), x))
    assert kept > 6 * layer_bytes
    for save in ("activations", "inputs"):
        one, two = (temporary(scanned(save, prefetch)) for prefetch in (False, True))
        assert one < two < 0.5 * kept
        assert two - one < 2 * layer_bytes


def six_layers(weights, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, weights)[0]


# -------------------- prefetch


def waits(text):
    """For each loop body with gathers: whether a product needs one of its gathers, and a gather one of its products."""
    module = parse_module(text)

    def multiplies(one):
        inner = (other for name in one.called("calls") for other in module.computations[name])
        return one.opcode == "dot" or "matmul" in one.attributes or any(multiplies(other) for other in inner)

    found = []
    for instructions in module.computations.values():
        needs = {}
        for one in instructions:  # operands come before their users
            needs[one.name] = {one.name}.union(*(needs[other] for other in one.operands if other in needs))
        gathers = {one.name for one in instructions if one.opcode == "all-gather"}
        products = {one.name for one in instructions if multiplies(one)}
        if gathers and products:
            found.append((any(needs[p] & gathers for p in products), any(needs[g] & products for g in gathers)))
    return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_gather_waits_for_nothing(prefetch, mesh, given):
    """In both loops no product needs a gather of its own turn, and no gather needs a product: they may overlap."""
    params, x = given
    run = kernel(scanned("activations", prefetch), mesh)
    found = waits(jax.jit(step(run)).lower(params, x, x).compile().as_text())
    assert found == [(not prefetch, False)] * 2


# -------------------- what a layer closes over, and integers


def test_closed_over_values_have_gradients_and_integers_none(mesh):
    """A value made in the kernel, closed over by the layer; an integer among the weights and one among the arguments."""

    def run(w, x, gain, way):
        offset = jnp.sin(gain)

        def one(w, x, shift):
            y = jnp.tanh(einsum(x, w["a"], "b/dp d, d f -> b/dp f") * offset)
            return y * w["k"].astype(y.dtype) + shift.astype(y.dtype)

        at_rest, compute = {"a": "d/dp f", "k": "scalar"}, {"a": "d f", "k": "scalar"}
        if way == "one":
            return parallel.fsdp(one, at_rest, compute)(w, x, jnp.int32(2))
        stack = jax.tree.map(lambda leaf: leaf[None], w)
        rest, use = ({k: f"l {v}" if k == "a" else "l" for k, v in t.items()} for t in (at_rest, compute))
        return parallel.scan_layers(one, stack, x, jnp.int32(2), at_rest=rest, compute=use, prefetch=way == "ahead")

    w = {"a": jnp.arange(64.0).reshape(8, 8) / 64, "k": jnp.int32(3)}
    x = jnp.arange(64.0).reshape(8, 8) / 9
    right = jax.grad(lambda a, g: jnp.sum(jnp.tanh(x @ a * jnp.sin(g)) * 3 + 2), (0, 1))(w["a"], 0.3)
    for way in ("one", "stack", "ahead"):
        k = spmd.kernel(
            in_layouts=({"a": "d/dp f", "k": "scalar"}, "b/dp d", "scalar"), out_layouts="b/dp f", mesh=mesh
        )(lambda w, x, g, way=way: run(w, x, g, way))
        found = jax.grad(lambda a, g, k=k: k({"a": a, "k": w["k"]}, x, g).sum(), (0, 1))(w["a"], 0.3)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=way)


# -------------------- mixed precision, groups, mappings


@pytest.mark.parametrize("way", ["gather", "fsdp", "scan"])
def test_gathered_in_bfloat16_and_reduced_in_float32(way):
    """Compiled dtypes and bytes of hybrid sharding: bits of two bytes travel, gradients are summed in four."""
    mesh = spmd.make_mesh(rp=2, fs=4)
    data = ("rp", "fs")
    options = {"dtype": jnp.bfloat16, "data": data}

    def use(w, x):
        return einsum(x.astype(w.dtype), w, "b/rp/fs d, d f -> b/rp/fs f").astype(jnp.float32)

    def body(w, x):
        if way == "gather":
            return use(parallel.gather(w, "d/fs f", "d f", **options), x)
        if way == "fsdp":
            return parallel.fsdp(use, "d/fs f", "d f", **options)(w, x)
        one = lambda w, x: use(w, x)[:, :8] + x
        return parallel.scan_layers(one, w[None], x, at_rest="l d/fs f", compute="l d f", **options)

    run = spmd.kernel("d/fs f, b/rp/fs d -> b/rp/fs _", mesh=mesh)(body)
    w = spmd.shard(jnp.asarray(np.random.default_rng(0).normal(size=(8, 24)), jnp.float32), "d/fs f", mesh=mesh)
    x = spmd.shard(jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32), "b/rp/fs d", mesh=mesh)
    out = run(w, x)
    cotangent = spmd.shard(jnp.ones(out.shape), "b/rp/fs f", mesh=mesh)
    report = collectives(step(run), w, x, cotangent, mesh=mesh)
    found = {(one.kind, "/".join(one.axes)): (one.dtype, one.bytes) for one in report}
    size = 8 * 24
    gathers = {one.dtype for one in report if one.kind == "all_gather"}
    assert gathers <= {"u16", "s16"}
    assert found["all_gather", "fs"][1] == 2 * size * 3 // 4
    assert found["psum_scatter", "fs"] == ("f32", 4 * size * 3 // 4)
    assert found["psum", "rp"] == ("f32", 2 * 4 * size // 4 // 2)
    order = [one.kind for one in report if one.kind != "all_gather"]
    assert order == ["psum_scatter", "psum"]
    gradient = jax.vjp(run, w, x)[1](cotangent)[0]
    # a rank's own product is rounded to bfloat16, their sum over eight ranks is not
    parts = np.asarray(x, jnp.bfloat16).astype(np.float32).reshape(8, 2, 8).transpose(0, 2, 1) @ np.asarray(
        cotangent
    ).reshape(8, 2, -1)
    exact = np.asarray(parts, jnp.bfloat16).astype(np.float32).sum(0)
    if way != "scan":
        np.testing.assert_allclose(gradient, exact, rtol=1e-6, atol=1e-6)
        assert gradient.dtype == jnp.float32


def test_gathered_weights_are_the_cast_ones_to_the_last_bit():
    """Not-a-numbers too; no compiler may take the cast away."""
    mesh = spmd.make_mesh(fs=4)
    w = jnp.asarray([1 + 2**-9, jnp.nan, -0.0, 1e-40, 3e38, -jnp.inf, 1 / 3, 7], jnp.float32)

    def body(w):
        gathered = parallel.gather(w, "d/fs", "d", dtype=jnp.bfloat16)
        return spmd.split(jax.lax.bitcast_convert_type(gathered, jnp.uint16), "d -> d/fs")

    found = spmd.kernel("d/fs -> d/fs", mesh=mesh)(body)(w)
    np.testing.assert_array_equal(found, jax.lax.bitcast_convert_type(w.astype(jnp.bfloat16), jnp.uint16))


@pytest.mark.parametrize(
    ("rest", "kinds"),
    [
        ({"embed": "dp", "mlp": "tp"}, {"all_gather": 2}),
        ({"embed": "tp", "mlp": None}, {"all_to_all": 2}),
    ],
)
def test_from_one_mapping_to_another(rest, kinds):
    """Names once; a mapping for the resting place and one for use. Beyond gathers, relayout moves."""
    mesh = spmd.make_mesh(dp=2, tp=4)
    names = {"w": "embed mlp", "v": "mlp embed"}
    w = {"w": jnp.arange(96.0).reshape(8, 12), "v": jnp.ones((12, 8))}
    at_rest = parallel.mapped_layouts(w, names, rest)
    compute = parallel.mapped_layouts(w, names, {"embed": None, "mlp": "tp"})

    @spmd.kernel(in_layouts=(at_rest,), out_layouts="scalar", mesh=mesh)
    def run(w):
        moved = parallel.gather(w, at_rest, compute, data="dp")
        return spmd.reduce(einsum(moved["w"], moved["v"], "e m/tp, m/tp g -> e g") ** 2, "e g -> scalar")

    placed = spmd.shard(w, at_rest, mesh=mesh)
    assert collectives(run, placed).counts.items() >= kinds.items()
    right = jax.value_and_grad(lambda w: jnp.sum((w["w"] @ w["v"]) ** 2))(w)
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode):
            found = jax.value_and_grad(run)(placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, right)


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
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 12)), jnp.float32)
    plan = parallel.fsdp_layouts(params, "...", fsdp="dp", mesh=mesh, min_size=100)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def updated(gradients, state, params):
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    def plain(w):
        y = jnp.tanh(x @ w["w"]) @ w["v"]
        return jnp.mean(y**2) + jnp.mean(w["s"] ** 2)

    right, state = params, optimizer.init(params)
    for _ in range(2):
        gradients = jax.grad(plain)(right)
        assert optax.global_norm(gradients) > 0.2  # is clipped
        right, state = updated(gradients, state, right)

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


def containers():
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((8, 24), (24, 8)))
    yield "dict", {"a": a, "b": b, "n": jnp.ones(8)}, lambda p: (p["a"], p["b"])
    yield "dataclass", Block(a, b, jnp.ones(8)), lambda p: (p.a, p.b)
    yield "list", [a, (b, None), "a label"], lambda p: (p[0], p[1][0])
    equinox = pytest.importorskip("equinox")
    module = equinox.nn.MLP(8, 8, 24, 1, use_bias=False, key=jax.random.key(0))  # its activation is a leaf
    yield "equinox", module, lambda p: (p.layers[0].weight.T, p.layers[1].weight.T)
    nnx = pytest.importorskip("flax.nnx")
    one, two = nnx.Linear(8, 24, rngs=nnx.Rngs(0)), nnx.Linear(24, 8, rngs=nnx.Rngs(1))
    state = nnx.state([one, two])
    yield "nnx", state, lambda p: (p[0]["kernel"][...], p[1]["kernel"][...])


@pytest.mark.parametrize(("params", "weights"), [pytest.param(p, w, id=name) for name, p, w in containers()])
def test_any_container(params, weights, mesh):
    """Layouts, gather, the wrapper, norms and accumulation take whatever holds arrays; other leaves pass through."""
    plan = parallel.fsdp_layouts(params, fsdp="dp", mesh=mesh, min_size=30)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)), jnp.float32)

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
    value, right = jax.value_and_grad(plain)([leaves[i] for i in places])

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
    np.testing.assert_allclose(found[2], np.sqrt(sum(float(jnp.sum(g**2)) for g in right)), rtol=1e-5)
    for a, b in zip(found[1], right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
