"""One matcher of trees with layouts: what `shard` and `kernel` take, every function of `parallel` takes."""

# ruff: noqa: F722, F821 - annotations that are layouts
import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout, parallel
from tests.sampler import share


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    w: "l d/dp f"
    b: typing.Annotated[jax.Array, "l f/dp"]
    count: jax.Array
    act: typing.Callable = dataclasses.field(default=jnp.tanh, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class InUse:
    w: "l d f"
    b: "l f"
    count: "scalar"


REST = {
    "class": Weights,
    "dict": {"w": "l d/dp f", "b": "l f/dp"},
    "instance": Weights("l d/dp f", Layout("l f/dp"), "scalar"),
    "function": lambda tree: spmd.match_layouts(tree, {"w": "l d/dp f", "b": "l f/dp"}),
    "function of a class": lambda tree: Weights,
}
USE = {
    "class": InUse,
    "dict": {"w": "l d f", "b": "l f"},
    "instance": Weights("l d f", Layout("l f"), "scalar"),
    "function": lambda tree: spmd.match_layouts(tree, {"w": "l d f", "b": "l f"}),
    "function of a class": lambda tree: InUse,
}
L, D = 2, 4
X = np.arange(8 * D, dtype=np.float32).reshape(8, D) / 40


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=2)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    w, b = (np.asarray(rng.normal(size=shape) / 3, np.float32) for shape in ((L, D, D), (L, D)))
    return Weights(w, b, jnp.float32(1.5))


def plain(params, x):
    for i in range(L):
        x = jnp.tanh(x @ params.w[i] + params.b[i][None])
    return jnp.sum(x**2) * params.count


def loss(x, count):
    return spmd.reduce(x**2, "b/dp d -> scalar") * count


def gathered(rest, use):
    def body(params, x):
        inner = parallel.gather(params, rest, use)
        for i in range(L):
            x = jnp.tanh(x @ inner.w[i] + inner.b[i][None])
        return loss(x, params.count)

    return body


def rested(rest, use):
    def body(params, x):
        return loss(parallel.fsdp(layers, rest, use)(params, x), params.count)

    def layers(w, x):
        for i in range(L):
            x = jnp.tanh(x @ w.w[i] + w.b[i][None])
        return x

    return body


@pytest.mark.parametrize("form", share(REST))
@pytest.mark.parametrize("make", share([gathered, rested]))
def test_all_forms_mean_the_same(make, form, mesh, params) -> None:
    """In all modes, values and gradients."""
    run = spmd.kernel(in_layouts=(REST[form], "b/dp d"), out_layouts="scalar", mesh=mesh)(make(REST[form], USE[form]))
    expected = jax.jit(jax.value_and_grad(plain))(params, X)
    for mode in ("explicit", "auto", "reference"):
        found = jax.value_and_grad(getattr(run, mode))(params, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Stack:
    w: "l d/dp f"
    b: "l f/dp"


def test_scan_layers_takes_a_class(mesh, params) -> None:
    stack = Stack(params.w, params.b)
    layer = lambda w, x: jnp.tanh(x @ w.w + w.b[None])

    @spmd.kernel(in_layouts=(Stack, "b/dp d"), out_layouts="scalar", mesh=mesh)
    def run(stack, x):
        use = {"w": "l d f", "b": "l f"}
        return loss(parallel.scan_layers(layer, stack, x, at_rest=Stack, compute=use), 1.5)

    expected = jax.jit(jax.value_and_grad(lambda s: plain(Weights(s.w, s.b, 1.5), X)))(stack)
    found = jax.value_and_grad(run)(stack, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found)


@pytest.mark.parametrize("form", share(REST))
def test_norms_and_layouts(form, mesh, params) -> None:
    rest, use = REST[form], USE[form]
    norm = spmd.kernel(in_layouts=(rest,), out_layouts="scalar", mesh=mesh)(lambda p: parallel.global_norm(p, rest))
    expected = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(params)))
    for mode in ("explicit", "auto", "reference"):
        np.testing.assert_allclose(getattr(norm, mode)(params), expected, rtol=1e-6)
    found = parallel.fsdp_layouts(params, use, fsdp="dp", mesh=mesh, min_size=2, keep="l")
    assert jax.tree.leaves(found.at_rest) == [Layout("l d/dp f"), Layout("l f/dp"), Layout("scalar")]
    state = {"m": params, "step": jnp.zeros(())}
    assert jax.tree.leaves(parallel.state_layouts(state, params, rest)) == [
        *map(Layout, ("l d/dp f", "l f/dp", "scalar", "scalar"))
    ]
    assert jax.tree.leaves(parallel.mapped_layouts(params, use, {"l": None, "d": "dp", "f": None})) == [
        *map(Layout, ("l/1 d/dp f/1", "l/1 f/1", "scalar"))
    ]


def test_what_does_not_fit_is_told_the_same_way_everywhere(mesh, params) -> None:
    """One wording, with the call and the place in the tree."""
    wrong = {"bb": "l f", "w": "l d f"}
    told = [
        "params.b: an array float32[2,4] has no layout; there are layouts for 'bb', 'w'; did you mean 'bb'?",
        "params: a layout for 'bb', but here is a Weights with 'w', 'b', 'count'; did you mean 'b'?",
    ]
    calls = {
        "tree": [
            lambda: spmd.shard(params, wrong, mesh=mesh),
            lambda: spmd.init(lambda: params, wrong, mesh=mesh)(),
            lambda: parallel.fsdp_layouts(params, wrong, fsdp="dp", mesh=mesh),
            lambda: parallel.mapped_layouts(params, wrong, {"l": None}),
        ],
        "params": [
            lambda: parallel.state_layouts(params, params, wrong),
            lambda: spmd.kernel(in_layouts=(wrong,), out_layouts="...", mesh=mesh)(lambda params: params)(params),
            lambda: spmd.kernel(in_layouts=("...",), out_layouts="...", mesh=mesh)(
                lambda params: parallel.gather(params, wrong, wrong)
            )(params),
        ],
    }
    for what, group in calls.items():
        for call in group:
            with pytest.raises(spmd.errors.LayoutError) as caught:
                call()
            lines = str(caught.value).split("\n")
            assert [line.removeprefix("- ") for line in lines[-2:]] == [t.replace("params", what, 1) for t in told]
            assert lines[0] and not lines[0].startswith("The layouts")
