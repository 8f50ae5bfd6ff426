"""What a kernel declares and takes: patterns, trees of layouts, keywords, statics, results."""

# ruff: noqa: F722, F821, UP037 - annotations that are layouts
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import LayoutError, SizeError
from spmd.modes import MODES

equinox = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")

X = np.arange(24, dtype=np.float32).reshape(4, 6)
W = np.arange(48, dtype=np.float32).reshape(6, 8) / 7


def linear(x, p):
    return spmd.einsum(x, p["w"], "b/dp d, d f/tp -> b/dp f/tp") + p["bias"][None]


def in_modes(kernel, *args, **kwargs):
    """The result, after a look that all modes agree."""
    results = []
    for mode in MODES:
        with spmd.mode(mode):
            results.append(kernel(*args, **kwargs))
    jax.tree.map(lambda *v: [np.testing.assert_allclose(v[0], other, rtol=1e-5) for other in v[1:]], *results)
    return results[0]


# -------------------- trees


def test_a_dict(mesh):
    layouts = {"w": "d f/tp", "bias": "f/tp"}
    kernel = spmd.kernel(in_layouts=("b/dp d", layouts), out_layouts="b/dp f/tp", mesh=mesh)(linear)
    p = {"w": W, "bias": W[0]}
    np.testing.assert_allclose(in_modes(kernel, X, p), X @ W + W[0], rtol=1e-5)


def test_a_dict_by_argument_name(mesh):
    kernel = spmd.kernel(
        in_layouts={"p": {"w": "d f/tp", "bias": "f/tp"}, "x": "b/dp d"}, out_layouts="b/dp f/tp", mesh=mesh
    )(linear)
    np.testing.assert_allclose(kernel(X, {"w": W, "bias": W[0]}), X @ W + W[0], rtol=1e-5)


def test_a_prefix(mesh):
    """One string for all leaves below."""

    @spmd.kernel(in_layouts=({"a": "n/dp", "rest": "n/tp"},), out_layouts="n/dp", mesh=mesh)
    def first(tree):
        assert [leaf.shape for leaf in tree["rest"]["deep"]] == [(2,), (2,)]
        return tree["a"]

    eight = np.arange(8)
    assert first({"a": eight, "rest": {"deep": [eight, eight]}}).tolist() == eight.tolist()


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    w: "d f/tp"
    bias: "f/tp"
    scale: "scalar" = 1.0


@pytest.mark.parametrize("layouts", [Weights, Weights("d f/tp", "f/tp", "scalar")], ids=["class", "instance"])
def test_a_dataclass_whose_annotations_are_layouts(mesh, layouts):
    @spmd.kernel(in_layouts=("b/dp d", layouts), out_layouts="b/dp f/tp", mesh=mesh)
    def body(x, p):
        assert p.w.shape in ((6, 2), W.shape) and p.bias.shape == p.w.shape[1:]
        return p.scale * linear(x, {"w": p.w, "bias": p.bias})

    np.testing.assert_allclose(in_modes(body, X, Weights(W, W[0], 2.0)), 2 * (X @ W + W[0]), rtol=1e-5)


def test_gradients_come_back_as_the_dataclass(mesh):
    @spmd.kernel(in_layouts=("b/dp d", Weights), out_layouts=Weights, mesh=mesh)
    def gradient(x, p):
        def loss(p):
            y = p.scale * linear(x, {"w": p.w, "bias": p.bias})
            return spmd.reduce(y**2, "b/dp f/tp -> scalar", "mean")

        return spmd.grad(loss)(p)

    p = Weights(W, W[0], jnp.float32(2.0))
    found = in_modes(gradient, X, p)
    wanted = jax.jit(jax.grad(lambda p: ((p.scale * (X @ p.w + p.bias[None])) ** 2).mean()))(p)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)
    assert isinstance(found, Weights) and found.w.sharding.spec == jax.P(None, "tp")


def test_an_equinox_module(mesh):
    class Linear(equinox.Module):
        w: "d f/tp"
        bias: "f/tp"
        activation: Any = equinox.field(static=True, default=jnp.tanh)

        def __call__(self, x):
            return self.activation(linear(x, {"w": self.w, "bias": self.bias}))

    body = spmd.kernel(in_layouts=(Linear, "b/dp d"), out_layouts="b/dp f/tp", mesh=mesh)(lambda m, x: m(x))
    np.testing.assert_allclose(in_modes(body, Linear(W, W[0]), X), np.tanh(X @ W + W[0]), rtol=1e-5)
    other = body(Linear(W, W[0], jnp.sin), X)  # a static field is part of what was compiled
    np.testing.assert_allclose(other, np.sin(X @ W + W[0]), atol=1e-4)


def test_an_equinox_module_of_its_own_kind(mesh):
    """A module that knows nothing of layouts, with functions among its leaves."""
    module = equinox.nn.MLP(6, 8, 16, 1, key=jax.random.key(0))
    layouts = spmd.match_layouts(equinox.filter(module, equinox.is_array), {"**/weight": "_ _", "**/bias": "_"})
    body = spmd.kernel(in_layouts=(layouts, "b/dp d"), out_layouts="b/dp f", mesh=mesh)(lambda m, x: jax.vmap(m)(x))
    np.testing.assert_allclose(body(module, X), jax.vmap(module)(X), rtol=1e-5)


def test_a_flax_state(mesh):
    module = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    layouts = spmd.match_layouts(state, {"**/kernel": "d f/tp", "**/bias": "f/tp"})
    body = spmd.kernel(in_layouts=(layouts, "b/dp d"), out_layouts="b/dp f/tp", mesh=mesh)(
        lambda state, x: nnx.merge(graph, state)(x)
    )
    np.testing.assert_allclose(body(state, X), module(X), rtol=1e-5)


def test_none_and_static_leaves(mesh):
    """None is not a leaf; what is not an array goes through as it is, and is part of the cache key."""
    seen = []

    @spmd.kernel(in_layouts=({"w": "n/dp", "bias": None, "how": None},), out_layouts="n/dp", mesh=mesh)
    def body(p):
        seen.append(p["how"])
        assert p["bias"] is None
        return 2 * p["w"] if p["how"] == "twice" else p["w"]

    eight = np.arange(8)
    assert body({"w": eight, "bias": None, "how": "twice"}).tolist() == (2 * eight).tolist()
    assert body({"w": eight, "bias": None, "how": "once"}).tolist() == eight.tolist()
    assert body({"w": eight, "bias": None, "how": "twice"}).tolist() == (2 * eight).tolist()
    assert seen == ["twice", "once"]


def test_a_function_from_the_argument_to_its_layouts(mesh):
    by_rank = lambda tree: {name: "n/dp" if leaf.ndim == 1 else "n/dp m" for name, leaf in tree.items()}
    body = spmd.kernel(in_layouts=(by_rank,), out_layouts=by_rank, mesh=mesh)(lambda tree: tree)
    found = in_modes(body, {"a": np.arange(4.0, dtype=np.float32), "b": X})
    assert found["b"].sharding.spec == jax.P("dp")


# -------------------- arguments


def test_a_transformed_body_keeps_its_own_defaults(mesh):
    """The default of UPLO is a string, over which `jax.vmap` cannot map. What the caller gives is handed on."""
    matrices = np.random.default_rng(0).standard_normal((4, 3, 3), np.float32)
    both = matrices + matrices.transpose(0, 2, 1)
    values = spmd.kernel("b/dp n m -> b/dp n", mesh=mesh)(jax.vmap(jnp.linalg.eigvalsh))
    np.testing.assert_allclose(values(both), np.linalg.eigvalsh(both), rtol=1e-5, atol=1e-5)

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh, static=("power", "sign"))
    def body(x, power=2, *, sign=1):
        return sign * x**power

    x = np.ones((4, 3), np.float32) * 3
    np.testing.assert_array_equal(body(x), x**2)
    np.testing.assert_array_equal(body(x, 3), x**3)
    np.testing.assert_array_equal(body(x, sign=-1), -(x**2))


def test_keywords_and_defaults(mesh):
    @spmd.kernel("n/dp, n/dp -> n/dp", mesh=mesh)
    def body(x, y, power=1, *, negate=False):
        out = x + y**power
        return -out if negate else out

    four = np.arange(4)
    assert body(four, y=four).tolist() == [0, 2, 4, 6]
    assert body(y=four, x=four).tolist() == [0, 2, 4, 6]
    assert body(four, four, 2).tolist() == [0, 2, 6, 12]
    assert body(four, four, negate=True, power=2).tolist() == [0, -2, -6, -12]
    with pytest.raises(LayoutError, match="missing a required argument: 'y'"):
        body(four)
    with pytest.raises(LayoutError, match="unexpected keyword argument 'z'"):
        body(four, four, z=1)


def test_a_keyword_only_array(mesh):
    body = spmd.kernel("n/dp, n/dp -> n/dp", mesh=mesh)(_subtract)
    four = np.arange(4)
    assert body(four, y=2 * four).tolist() == [0, -1, -2, -3]


def _subtract(x, *, y):
    return x - y


def test_any_number_of_arguments(mesh):
    body = spmd.kernel("n/dp, n/dp, n/dp -> n/dp", mesh=mesh)(lambda *xs: sum(xs))
    assert body(*[np.arange(4)] * 3).tolist() == [0, 3, 6, 9]


def test_static_arguments_trace_once_per_value(mesh):
    traced = []

    @spmd.kernel("n/dp -> n/dp", mesh=mesh, static="kind")
    def body(x, kind):
        traced.append(kind)
        return {"a": x, "b": 2 * x}.get(kind, 3 * x)

    four = np.arange(4)
    for kind, factor in (("a", 1), ("b", 2), ("a", 1), ("b", 2)):
        assert body(four, kind).tolist() == (factor * four).tolist()
    assert traced == ["a", "b"]
    with pytest.raises(LayoutError, match="hashable"):
        body(four, ["a"])


def test_static_values_of_other_types_are_other_values(mesh):
    """1, 1.0 and True are equal in Python, and no array of one is an array of another."""
    seen = spmd.kernel("n/dp -> n/dp", mesh=mesh, static="by")(lambda x, by: x * 0 + len(type(by).__name__))
    four = np.arange(4)
    types = (1, 1.0, True, np.float32(1), np.float64(1))
    assert [int(seen(four, by)[0]) for by in types] == [3, 5, 4, 7, 7]
    signed = spmd.kernel("n/dp -> n/dp", mesh=mesh, static="by")(lambda x, by: x * int(math.copysign(1, by)))
    assert [int(signed(four, by)[1]) for by in (0.0, -0.0)] == [1, -1]


def test_a_default_need_not_be_hashable(mesh):
    """A loop binds its names by defaults: `lambda x, table=table: ...`."""
    four = np.arange(4)
    for table in ({"times": 2}, {"times": 3}):
        body = spmd.kernel("n/dp -> n/dp", mesh=mesh)(lambda x, table=table, and_more=0: x * table["times"] + and_more)
        for run in (body, body.auto, body.reference):
            assert run(four).tolist() == (four * table["times"]).tolist()
        assert body(four, and_more=1).tolist() == (four * table["times"] + 1).tolist()
        with pytest.raises(LayoutError, match="unhashable type: 'dict'"):
            body(four, dict(table))


def test_no_inputs(mesh):
    body = spmd.kernel("-> n/tp", mesh=mesh, n=8)(lambda: spmd.iota("n/tp"))
    assert in_modes(body).tolist() == list(range(8))
    assert jax.jit(body)().tolist() == list(range(8))


def test_dots(mesh):
    body = spmd.kernel("b/dp ... -> ... ", mesh=mesh)(lambda x: spmd.reduce(x, "b/dp ... -> ..."))
    for shape in ((4,), (4, 3), (4, 3, 2)):
        x = np.ones(shape, np.float32)
        assert body(x).tolist() == x.sum(0).tolist()
    behind = spmd.kernel("... n/tp -> ... n/tp", mesh=mesh)(lambda x: 2 * x)
    np.testing.assert_array_equal(in_modes(behind, W), 2 * W)


def test_sizes_by_keyword(mesh):
    @spmd.kernel("b/dp (h k)/tp -> b/dp (h k)/tp", mesh=mesh, h=4)
    def body(x):
        assert spmd.size("h") == 4 and spmd.size("k") == 2
        return spmd.rearrange(spmd.rearrange(x, "b/dp (h k)/tp -> b/dp h/tp k"), "b/dp h/tp k -> b/dp (h k)/tp")

    np.testing.assert_array_equal(in_modes(body, W[:4]), W[:4])
    with pytest.raises(SizeError, match="does not divide by h=4"):
        body(np.ones((4, 6), np.float32))


def test_sizes_of_numpy(mesh):
    made = spmd.kernel("-> a/dp b", mesh=mesh, a=np.int64(8), b=np.uint8(3))(lambda: spmd.zeros("a/dp b"))
    assert made().shape == (8, 3)


def test_a_method_and_a_callable_object(mesh):
    class Layer:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return self.factor * x

        def twice(self, x):
            return 2 * self.factor * x

    layer = Layer(3)
    four = np.arange(4)
    assert spmd.kernel("n/dp -> n/dp", mesh=mesh)(layer)(four).tolist() == [0, 3, 6, 9]
    assert spmd.kernel("n/dp -> n/dp", mesh=mesh)(layer.twice)(four).tolist() == [0, 6, 12, 18]


def test_methods(mesh):
    """The instance is the first argument: static, or with layouts of its own."""

    class Layer(equinox.Module):
        w: "d f/tp"
        scale: float = equinox.field(static=True, default=1.0)

        @spmd.kernel(in_layouts=(lambda self: Layer, "b/dp d"), out_layouts="b/dp f/tp", mesh=mesh)
        def apply(self, x):
            return self.scale * spmd.einsum(x, self.w, "b/dp d, d f/tp -> b/dp f/tp")

    np.testing.assert_allclose(Layer(W, 2.0).apply(X), 2 * X @ W, rtol=1e-5)

    class Plain:
        factor = 3

        @spmd.kernel("n/dp -> n/dp", mesh=mesh, static="self")
        def times(self, x):
            return self.factor * x

    assert Plain().times(np.arange(4)).tolist() == [0, 3, 6, 9]
    assert Plain.times(Plain(), np.arange(4)).tolist() == [0, 3, 6, 9]


def test_a_builtin_without_a_signature(mesh):
    assert spmd.kernel("n/dp, n/dp -> n/dp", mesh=mesh)(jnp.add)(np.arange(4), np.arange(4)).tolist() == [0, 2, 4, 6]


def test_a_kernel_keeps_the_name_and_doc_of_its_body(mesh):
    @spmd.kernel("n/dp -> n/dp", mesh=mesh)
    def documented(x):
        """What it does."""
        return x

    assert documented.__name__ == "documented" and documented.__doc__ == "What it does."
    assert repr(documented) == '<documented: kernel("n/dp -> n/dp")>'
    assert "jit_documented" in documented.lower(np.arange(4)).as_text()


# -------------------- leaves that are not arrays, and arrays without dimensions


def test_an_ordinary_module_goes_in_and_comes_out(mesh):
    """Functions, flags and numbers are static, and stay what they are: a train step is such a kernel."""
    key = jax.random.key(0)
    parts = [equinox.nn.Linear(6, 6, key=key), equinox.nn.Lambda(jax.nn.relu), equinox.nn.Dropout(0.5, inference=True)]
    model = equinox.nn.Sequential(parts)

    def stepped(grad, loss):
        def step(model, x):
            weights, rest = equinox.partition(model, equinox.is_array)
            gradient = grad(lambda w: loss(jax.vmap(equinox.combine(w, rest))(x)))(weights)
            return equinox.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

        return step

    wanted = stepped(jax.grad, lambda y: jnp.sum(y**2))(model, X)
    body = stepped(spmd.grad, lambda y: spmd.reduce(y**2, "b/dp d -> scalar"))
    kernel = spmd.kernel(in_layouts=("...", "b/dp d"), out_layouts="...", mesh=mesh)(body)
    outer = spmd.kernel(in_layouts=("...", "b/dp d"), out_layouts="...", mesh=mesh)(lambda m, x: kernel(m, x))
    for run in (*(getattr(kernel, mode) for mode in MODES), kernel, outer):
        found = run(model, X)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        assert type(found.layers[2].p) is float and found.layers[2].inference is True
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a is b or np.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_numbers_without_a_layout_of_their_own_are_static(mesh):
    """A number that is an argument, or has a layout, is an array; 1, 1.0 and True are not one another."""
    seen = []

    def body(p, x):
        seen.append(type(p["n"]))
        return x * jnp.asarray(p["n"], x.dtype)

    static = spmd.kernel(in_layouts=({"w": "d"}, "b/dp"), out_layouts="b/dp", mesh=mesh)(body)
    for n in (2, 2.0, True):
        np.testing.assert_allclose(static({"n": n, "w": W[0]}, X[:, 0]), n * X[:, 0])
    assert {int, float, bool} <= set(seen)
    seen.clear()
    traced = spmd.kernel(in_layouts=({"w": "d", "n": "scalar"}, "b/dp"), out_layouts="b/dp", mesh=mesh)(body)
    for n in (2.0, 3.0):
        np.testing.assert_allclose(in_modes(traced, {"n": n, "w": W[0]}, X[:, 0]), n * X[:, 0])
    assert not {int, float} & set(seen)
