"""`named_jit` and `fsdp`: where arguments and results lie, what is donated, what is compiled anew."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import spmd
from spmd import haliax as hax

RULES = {"batch": "data", "embed": None, "mlp": "tp"}
X = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(12, 20)).astype(np.float32)


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(data=2, tp=4)


@pytest.fixture(autouse=True)
def ambient(mesh):
    with jax.set_mesh(mesh):
        yield


def spec(x: Any) -> tuple[Any, ...]:
    entries = [*x.sharding.spec]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def product(x, w):
    return hax.auto_sharded(x @ w, "batch mlp")


# -------------------- where things lie


def test_as_a_function_and_as_a_decorator():
    options: dict[str, Any] = {"in_names": ("batch embed", "embed mlp"), "out_names": "batch mlp"}
    direct = hax.named_jit(product, RULES, **options)
    decorated = hax.named_jit(axis_resources=RULES, **options)(product)
    assert direct.__name__ == decorated.__name__ == "product" and direct.__wrapped__ is product
    for fn in (direct, decorated):
        out = fn(X, W)
        assert spec(out) == ("data", "tp")
        close(out, X @ W)


def test_the_mapping_is_in_force_inside_and_not_after():
    seen = []

    @hax.named_jit(axis_resources=RULES)
    def fn(x):
        seen.append(hax.physical_axis_name("mlp"))
        return x

    fn(X)
    assert seen == ["tp"]
    assert hax.auto_sharded(X, "no such names") is X


def test_arguments_keep_their_own_shardings_where_nothing_names_them():
    seen = {}

    def fn(x, w, *, scale):
        for name, value in {"x": x, "w": w}.items():
            jax.debug.inspect_array_sharding(value, callback=lambda s, name=name: seen.update({name: s}))
        return scale * (x @ w)

    x, w = spmd.shard(X, "a/tp b"), spmd.shard(W, "a b")
    hax.named_jit(fn, RULES, in_names=(None, "embed mlp"))(x, w, scale=jnp.float32(2))
    rows, columns = seen["x"].shard_shape(X.shape), seen["w"].shard_shape(W.shape)
    assert (rows, columns) == ((2, 12), (12, 5))


OTHER = {"batch": "tp", "embed": None, "mlp": "data"}


@pytest.mark.parametrize(
    ("mappings", "columns", "result"),
    [
        ({"axis_resources": RULES}, 5, ("data", "tp")),
        ({}, 5, ("data", "tp")),  # the surrounding mapping
        ({"axis_resources": OTHER}, 10, ("tp", "data")),
        ({"axis_resources": RULES, "in_axis_resources": OTHER}, 10, ("data", "tp")),
        ({"axis_resources": RULES, "out_axis_resources": OTHER}, 5, ("tp", "data")),
        ({"in_axis_resources": OTHER}, 10, ("data", "tp")),
        ({"out_axis_resources": OTHER}, 5, ("tp", "data")),
    ],
)
def test_which_mapping_places_arguments_and_results(mappings, columns, result):
    """in_ and out_axis_resources, each axis_resources if absent, and that the surrounding mapping."""
    seen = {}

    def fn(x, w):
        jax.debug.inspect_array_sharding(w, callback=lambda s: seen.update(w=s))
        return x @ w

    fn = hax.named_jit(fn, in_names=("batch embed", "embed mlp"), out_names="batch mlp", **mappings)
    with hax.axis_mapping(RULES):
        out = fn(X, W)
    assert seen["w"].shard_shape(W.shape) == (12, columns)
    assert spec(out) == result
    close(out, X @ W)


@pytest.mark.parametrize(
    ("in_names", "call"),
    [
        (("batch embed", "embed mlp"), lambda fn: fn(X, w=W)),
        (("batch embed", "embed mlp"), lambda fn: fn(w=W, x=X)),
        ({"w": "embed mlp", "x": "batch embed"}, lambda fn: fn(X, W)),
        ({"w": "embed mlp"}, lambda fn: fn(spmd.shard(X, "a/data b"), w=W, scale=3)),
        (("batch embed", "embed mlp", None, "mlp"), lambda fn: fn(X, w=W, scale=2, bias=W[0])),
        (
            {"x": "batch embed", "w": "embed mlp", "bias": "mlp"},
            lambda fn: fn(X, W, np.zeros((8, 20), np.float32), bias=W[0]),
        ),
    ],
)
def test_arguments_are_placed_however_they_are_passed(in_names, call):
    seen = {}

    def fn(x, w, *rest, scale=None, bias=None):
        for name, value in {"x": x, "w": w, **({} if bias is None else {"bias": bias})}.items():
            jax.debug.inspect_array_sharding(value, callback=lambda s, name=name: seen.update({name: s}))
        return x @ w + sum(rest)

    for _ in range(2):  # placed, and found in place
        close(call(hax.named_jit(fn, RULES, in_names=in_names)), X @ W)
    assert (seen["x"].shard_shape(X.shape), seen["w"].shard_shape(W.shape)) == ((4, 12), (12, 5))
    assert "bias" not in seen or seen["bias"].shard_shape((20,)) == (5,)


def test_arguments_that_lie_right_are_left_and_others_are_moved_again(mesh, monkeypatch):
    """In whatever order they come: the last placement is remembered, not the first."""
    fn = hax.named_jit(lambda x, n: x, RULES, in_names=("batch mlp", None), out_names=None)
    right, wrong = spmd.shard(X, "a/data b/tp"), spmd.shard(X, "a/tp b/data")
    looked = []
    place = spmd.shard
    monkeypatch.setattr(spmd, "shard", lambda *a, **k: looked.append(1) or place(*a, **k))
    for x, looks in ((right, True), (right, False), (wrong, True), (right, False), (X, True), (right[:4], True)):
        looked.clear()
        assert spec(fn(x, 3)) == ("data", "tp")
        assert bool(looked) == looks
    looked.clear()
    with hax.axis_mapping({"batch": "tp", "mlp": "data"}):
        again = hax.named_jit(lambda x: x, in_names=("batch mlp",))
        assert spec(again(right)) == ("tp", "data")
    with hax.axis_mapping(RULES):
        assert spec(again(right)) == spec(again(right)) == ("data", "tp")
    with hax.axis_mapping({"batch": "tp", "mlp": "data"}):
        assert spec(again(right)) == ("tp", "data")


def test_a_function_is_traced_again_under_another_mapping():
    traces = []

    @hax.named_jit(out_names="batch mlp")
    def fn(x):
        traces.append(1)
        return x + 1

    for rules, wanted, count in (
        (RULES, ("data", "tp"), 1),
        ({"batch": "tp", "mlp": None}, ("tp",), 2),
        (RULES, ("data", "tp"), 2),
    ):
        with hax.axis_mapping(rules):
            assert spec(fn(X)) == wanted
        assert len(traces) == count


def test_lower_compiles_what_a_call_runs():
    fn = hax.named_jit(product, RULES, in_names=("batch embed", "embed mlp"), out_names="batch mlp", keep_unused=True)
    lowered = fn.lower(X, W)
    assert "jit_product" in lowered.as_text()
    assert "all-" not in lowered.compile().as_text()  # the layouts fit: nothing moves
    abstract = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    assert fn.lower(*abstract).as_text() == lowered.as_text()


def test_gradients_and_jit_around_it():
    fn = hax.named_jit(product, RULES, in_names=("batch embed", "embed mlp"), out_names="batch mlp")
    loss = lambda w: (fn(X, w) ** 2).sum()
    wanted = 2 * X.T @ (X @ W)
    close(jax.grad(loss)(jnp.asarray(W)), wanted)
    close(jax.jit(jax.grad(loss))(W), wanted)


# -------------------- what is not an array


def test_what_is_no_array_is_static_also_in_results():
    traces = []

    @hax.named_jit(axis_resources=RULES)
    def fn(x, times, activation, label=None):
        traces.append((times, label))
        return {"out": activation(x * times), "label": label, "times": times}

    for times in (2, 2, 3):
        out = fn(X, times, jnp.tanh, label="a")
        close(out["out"], np.tanh(X * times))
        assert (out["label"], out["times"]) == ("a", times) and isinstance(out["times"], int)
    assert traces == [(2, "a"), (3, "a")]


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), (1, 1 + 0j)])
def test_numbers_that_are_equal_are_not_the_same(values):
    fn = hax.named_jit(lambda x, flag: (x, flag))
    for value in values:
        assert repr(fn(X, value)[1]) == repr(value)


def test_equinox_modules():
    module = eqx.nn.MLP(12, 12, 8, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    names = {
        "layers/0/weight": "mlp embed",
        "layers/0/bias": "mlp",
        "layers/1/weight": "embed mlp",
        "layers/1/bias": "embed",
    }

    def step(module, x):
        value, gradient = eqx.filter_value_and_grad(lambda module: (jax.vmap(module)(x) ** 2).mean())(module)
        return eqx.apply_updates(module, jax.tree.map(lambda g: -0.1 * g, gradient)), value

    placed_step = hax.named_jit(
        step, RULES, in_names=(names.get, "batch embed"), out_names=(names.get, "scalar"), donate_args=(eqx.is_array,)
    )
    alone, alone_step = module, eqx.filter_jit(step)
    placed = hax.shard(jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, module), names.get, RULES)
    for _ in range(3):
        given = placed
        placed, found = placed_step(placed, X)
        alone, wanted = alone_step(alone, X)
        close(found, wanted)
        assert given.layers[0].weight.is_deleted()
    assert placed.activation is module.activation
    assert [spec(layer.weight) for layer in placed.layers] == [("tp",), (None, "tp")]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(12, 20, rngs=rngs)
        self.name = "model"

    def __call__(self, x):
        return self.linear(x)


@pytest.mark.parametrize("as_state", [False, True])
def test_nnx_modules_and_their_states(as_state):
    names = lambda path: "embed mlp" if path.endswith("kernel") else "mlp"
    model = NnxModel(nnx.Rngs(0))
    graph = nnx.graphdef(model)

    @hax.named_jit(axis_resources=RULES, in_names=(names, "batch embed"), out_names=("batch mlp", names))
    def fn(weights, x):
        module = nnx.merge(graph, weights) if as_state else weights
        return module(x), weights

    out, back = fn(nnx.state(model) if as_state else model, X)
    close(out, model(X))
    module = nnx.merge(graph, back) if as_state else back
    assert spec(module.linear.kernel[...]) == (None, "tp") and module.name == "model"


# -------------------- donation


@pytest.mark.parametrize(
    ("donate_args", "deleted"),
    [
        (None, "    "),
        (True, "abc "),
        (False, "    "),
        ((True, False), "a   "),
        ((True,), "a   "),
        ([False, True], " bc "),
        ((False, {"b": True, "c": False}), " b  "),
        (lambda leaf: leaf.ndim == 2, "ab  "),
        ((True, lambda leaf: leaf.ndim == 1), "a c "),
    ],
)
def test_donated_arguments_are_deleted(donate_args, deleted):
    fn = hax.named_jit(
        lambda a, rest, d: (a + 1, jax.tree.map(lambda x: 2 * x, rest), d),
        RULES,
        donate_args=donate_args,
        keep_unused=True,
    )
    arrays = {"a": spmd.shard(X, "a/data b"), "b": spmd.shard(W, "a b/tp"), "c": jnp.ones(4), "d": jnp.ones(3)}
    out = fn(arrays["a"], {"b": arrays["b"], "c": arrays["c"]}, d=arrays["d"])
    np.testing.assert_array_equal(out[0], X + 1)
    assert "".join(name if arrays[name].is_deleted() else " " for name in "abcd") == deleted


def test_donated_keywords_are_deleted():
    x, y, z = (jnp.asarray(X) for _ in range(3))
    fn = hax.named_jit(lambda x, y, z: (x + 1, y + 1, z + 1), donate_kwargs={"y": True, "absent": True})
    fn(x, y=y, z=z)
    assert [one.is_deleted() for one in (x, y, z)] == [False, True, False]


def test_donation_with_placement_and_static_leaves():
    fn = hax.named_jit(lambda m: {**m, "w": m["w"] + 1}, RULES, donate_args=True, in_names=({"w": "embed mlp"},))
    w = spmd.shard(W, "a b/tp")
    out = fn({"w": w, "size": 3})
    assert w.is_deleted() and out["size"] == 3
    np.testing.assert_array_equal(out["w"], W + 1)


# -------------------- fsdp


def loss_of(params, x):
    params = hax.auto_sharded(params, {"w_in": "embed mlp", "w_out": "mlp embed"})
    h = hax.auto_sharded(jax.nn.gelu(x @ params["w_in"]), "batch mlp")
    return ((h @ params["w_out"]) ** 2).mean()


COMPUTE = {"batch": "data", "embed": None, "mlp": "tp"}
NAMES = {"w_in": "embed mlp", "w_out": "mlp embed"}


def sgd(params, x):
    value, gradient = jax.value_and_grad(loss_of)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def steps(fn: Any, params: Any) -> tuple[list[float], Any]:
    found = []
    for _ in range(3):
        value, params = fn(params, X)
        found.append(float(value))
    return found, params


@pytest.mark.parametrize("form", ["function", "positional", "decorator"])
def test_fsdp_in_each_of_its_forms(form):
    names: dict[str, Any] = {"in_names": (NAMES, "batch embed"), "out_names": ("scalar", NAMES)}
    rest = {**COMPUTE, "embed": "data", "batch": None}  # embed and batch would meet on one axis
    if form == "function":
        step = hax.fsdp(sgd, rest, COMPUTE, **names)
    elif form == "positional":
        step = hax.fsdp(rest, COMPUTE, **names)(sgd)
    else:
        step = hax.fsdp(parameter_mapping=rest, compute_mapping=COMPUTE, **names)(sgd)
    params = {"w_in": W, "w_out": W.T.copy()}
    found, after = steps(step, params)
    with jax.set_mesh(spmd.make_mesh(data=1)):
        wanted, alone = steps(jax.jit(sgd), params)
    close(found, wanted)
    assert (spec(after["w_in"]), spec(after["w_out"])) == (("data", "tp"), ("tp", "data"))  # at rest
    for name in params:
        close(after[name], alone[name])


def test_fsdp_gathers_weights_and_the_gradient_goes_through_it():
    rest = {"embed": "data", "mlp": "tp", "batch": None}
    loss = hax.fsdp(loss_of, rest, COMPUTE, in_names=(NAMES, "batch embed"), out_names="scalar")
    params = {"w_in": jnp.asarray(W), "w_out": jnp.asarray(W.T)}
    gradient = jax.grad(loss)(params, X)
    wanted = jax.jit(jax.grad(loss_of))(params, X)
    for name in params:
        close(gradient[name], wanted[name])
    gathers = spmd.inspect.collectives(loss.lower(params, X).compile()).counts
    assert gathers["all_gather"] >= 2


def test_fsdp_donates():
    names: dict[str, Any] = {"in_names": ("embed mlp",), "out_names": "embed mlp"}
    step = hax.fsdp(
        lambda w: 2 * w, {"embed": "data", "mlp": None}, {"embed": None, "mlp": None}, donate_args=True, **names
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = spmd.shard(W, "a/data b")
        step(w)
    assert w.is_deleted()
