"""FSDP where the registry of layers does not reach: what is kept, what is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import einsum, parallel
from spmd.inspect import collectives
from tests.sampler import mixed, rare, share

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
    params = {name: np.asarray(rng.normal(size=shape) / 4, np.float32) for name, shape in shapes.items()}
    x = np.asarray(rng.normal(size=(20, D)), np.float32)
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
    leaves = jax.tree.leaves(jax.jit(lambda *args: jax.vjp(kernel(body, mesh), *args)[1])(params, x))
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


AT_THE_END = {"unrolled": 0, "scan": 0, "prefetch": 1}  # what the last layer gathers for one that is not there


@pytest.mark.parametrize(("way", "save"), share(mixed(AT_THE_END, [0, 1])))
def test_each_weight_is_gathered_again(way, save, mesh, given):
    """In the compiled program, on every version: without a scan too, where equal gathers are merged."""
    params, x = given
    run = kernel(WAYS[way][save], mesh)
    compiled = jax.jit(step(run)).lower(params, x, x).compile()
    report = collectives(compiled, mesh=mesh)
    one, gathers = 4 * D * F * 3 // 4, 4 * (L + AT_THE_END[way])
    assert report.counts == {"all_gather": gathers, "psum": report.counts["psum"], "psum_scatter": 2 * L}
    kinds = report.by_kind()
    assert kinds["all_gather"].total_bytes == gathers * one
    assert kinds["psum_scatter"].total_bytes == 2 * L * one
    scales = L * 2 * 4 * D * 3 // 4
    assert kinds["psum"].total_bytes == scales
    found, right = compiled(params, x, x), jax.jit(step(plain_stack))(params, x, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@rare
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
    bodies = {found[1]: found[2] for found in re.finditer(r"^(?:ENTRY )?%(\S+) .*\{\n((?:  .*\n)+)\}", text, re.M)}

    def multiplies(line):
        inner = (other for name in re.findall(r"calls=%?([\w.-]+)", line) for other in bodies[name].splitlines())
        return " dot(" in line or "matmul" in line or any(multiplies(other) for other in inner)

    found = []
    for body in bodies.values():
        needs, gathers, products = {}, set(), set()
        for line in body.splitlines():  # operands come before their users
            name, _, made = line.strip().removeprefix("ROOT ").partition(" = ")
            needs[name] = {name}.union(*(needs[other] for other in re.findall(r"%[\w.-]+", made) if other in needs))
            gathers |= {name} if " all-gather(" in made else set()
            products |= {name} if multiplies(made) else set()
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

    w = {"a": np.arange(64, dtype=np.float32).reshape(8, 8) / 64, "k": np.int32(3)}
    x = np.arange(64, dtype=np.float32).reshape(8, 8) / 9
    right = jax.jit(jax.grad(lambda a, g: jnp.sum(jnp.tanh(x @ a * jnp.sin(g)) * 3 + 2), (0, 1)))(w["a"], 0.3)
    for way in ("one", "stack", "ahead"):
        k = spmd.kernel(
            in_layouts=({"a": "d/dp f", "k": "scalar"}, "b/dp d", "scalar"), out_layouts="b/dp f", mesh=mesh
        )(lambda w, x, g, way=way: run(w, x, g, way))
        found = jax.jit(jax.grad(lambda a, g, k=k: k({"a": a, "k": w["k"]}, x, g).sum(), (0, 1)))(w["a"], 0.3)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=way)


def test_what_all_layers_share_is_summed_once_if_deferred(mesh):
    """A bias of all layers: a sum in each of them, or one."""

    def sums(early):
        def body(w, x, bias):
            bias = spmd.defer(bias, "f -> f {R:dp}") if early else bias
            one = lambda w, x, bias: jnp.tanh(einsum(x, w, "b/dp d, d f -> b/dp f") + bias[None])
            return parallel.scan_layers(one, w, x, bias, at_rest="l d/dp f", compute="l d f")

        run = spmd.kernel("l d/dp f, b/dp d, f -> b/dp f", mesh=mesh)(body)
        ones = lambda *shape: np.ones(shape, np.float32)
        args = ones(L, 8, 8), spmd.shard(ones(8, 8), "b/dp d", mesh=mesh), ones(8)
        return collectives(lambda *args: jax.vjp(run, *args)[1](args[1]), *args, mesh=mesh).counts["psum"]

    assert (sums(False), sums(True)) == (L, 1)


@pytest.mark.parametrize("where", share(["shared", "carried", "stacked"]))
@rare
def test_keys_of_dropout_go_through_a_stack(where, mesh):
    """The same in each layer, split from layer to layer, or one among the parameters of each."""
    keys = jax.random.split(jax.random.key(1), L)

    def drop(x, w, key):
        return x + einsum(spmd.nn.dropout(x, key, "b/dp d", rate=0.5), w, "b/dp d, d f -> b/dp f")

    layers = {
        "shared": lambda w, x, key: (drop(x[0], w["w"], key), x[1], x[2] + 1),
        "carried": lambda w, x: (drop(x[0], w["w"], x[1]), jax.random.fold_in(x[1], x[2]), x[2] + 1),
        "stacked": lambda w, x: (drop(x[0], w["w"], w["key"]), x[1], x[2] + 1),
    }

    @spmd.kernel("l d/dp f, b/dp d, l -> b/dp d", mesh=mesh)
    def run(w, x, keys):
        params = {"w": w, "key": keys} if where == "stacked" else {"w": w}
        rest, use = ({"w": text, "key": "l"} for text in ("l d/dp f", "l d f"))
        layouts = {"at_rest": {name: rest[name] for name in params}, "compute": {name: use[name] for name in params}}
        start, shared = (x, keys[0], jnp.int32(0)), (keys[0],) if where == "shared" else ()
        return parallel.scan_layers(layers[where], params, start, *shared, **layouts)[0]

    def plain(w, x):
        key = keys[0]
        for i in range(L):
            now = {"shared": keys[0], "carried": key, "stacked": keys[i]}[where]
            x = x + jnp.where(jax.random.bernoulli(now, 0.5, x.shape), 2 * x, 0) @ w[i]
            key = jax.random.fold_in(key, i)
        return x

    w, x = (np.asarray(np.random.default_rng(2).normal(size=n), np.float32) for n in ((L, 8, 8), (20, 8)))
    found, right = (
        jax.jit(jax.grad(lambda w, f=f: (f(w) ** 2).sum()))(w)
        for f in (lambda w: run(w, x, keys), lambda w: plain(w, x))
    )
    np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-2)


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
    w = spmd.shard(np.asarray(np.random.default_rng(0).normal(size=(8, 24)), np.float32), "d/fs f", mesh=mesh)
    x = spmd.shard(np.asarray(np.random.default_rng(1).normal(size=(16, 8)), np.float32), "b/rp/fs d", mesh=mesh)
    out = run(w, x)
    cotangent = spmd.shard(np.ones(out.shape, np.float32), "b/rp/fs f", mesh=mesh)
    report = collectives(step(run), w, x, cotangent, mesh=mesh)
    found = {(one.kind, "/".join(one.axes)): (one.dtype, one.bytes) for one in report}
    size = 8 * 24
    gathers = {one.dtype for one in report if one.kind == "all_gather"}
    assert gathers == ({"u16"} if way == "gather" else {"u16", "s16"})  # forward, and again
    assert found["all_gather", "fs"][1] == 2 * size * 3 // 4
    assert found["psum_scatter", "fs"] == ("f32", 4 * size * 3 // 4)
    assert found["psum", "rp"] == ("f32", 2 * 4 * size // 4 // 2)
    order = [one.kind for one in report if one.kind != "all_gather"]
    assert order == ["psum_scatter", "psum"]
    gradient = jax.jit(step(run))(w, x, cotangent)[1][0]
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
    share(
        [
            ({"embed": "dp", "mlp": "tp"}, {"all_gather": 2}),
            ({"embed": "tp", "mlp": None}, {"all_to_all": 2}),
        ]
    ),
)
def test_from_one_mapping_to_another(rest, kinds):
    """Names once; a mapping for the resting place and one for use. Beyond gathers, relayout moves."""
    mesh = spmd.make_mesh(dp=2, tp=4)
    names = {"w": "embed mlp", "v": "mlp embed"}
    w = {"w": np.arange(96, dtype=np.float32).reshape(8, 12), "v": np.ones((12, 8), np.float32)}
    at_rest = parallel.mapped_layouts(w, names, rest)
    compute = parallel.mapped_layouts(w, names, {"embed": None, "mlp": "tp"})

    @spmd.kernel(in_layouts=(at_rest,), out_layouts="scalar", mesh=mesh)
    def run(w):
        moved = parallel.gather(w, at_rest, compute, data="dp")
        return spmd.reduce(einsum(moved["w"], moved["v"], "e m/tp, m/tp g -> e g") ** 2, "e g -> scalar")

    placed = spmd.shard(w, at_rest, mesh=mesh)
    assert collectives(run, placed).counts.items() >= kinds.items()
    right = jax.jit(jax.value_and_grad(lambda w: jnp.sum((w["w"] @ w["v"]) ** 2)))(w)
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode):
            found = jax.jit(jax.value_and_grad(run))(placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, right)
