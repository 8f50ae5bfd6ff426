"""`meanwhile`: both results are what the functions give, in every mode, with their collectives and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import all_gather, einsum, meanwhile, psum
from spmd.inspect import collectives
from spmd.modes import MODES
from tests import simulator
from tests.ops.harness import close, make_mesh, pulled, run
from tests.sampler import Sampler, rare, seeds

MESH = {"dp": 2, "tp": 4}
W = "d/dp f/tp"


def gather(w, **to):
    return all_gather(w, f"{W} -> d f/tp", **to)


def one(x, w, **to):
    """A layer, and the weight of the next."""
    return meanwhile(lambda x: jnp.tanh(x) * 2, x, lambda w: gather(w, **to), w)


@pytest.mark.parametrize("seed", seeds(6))
def test_random_calls_equal_numpy(seed: int) -> None:
    sampler = Sampler(seed)
    mesh = sampler.mesh()
    layout, moved = sampler.layout("b s", mesh, used=0.7), sampler.layout("k n", mesh, used=0.9)
    sizes = sampler.sizes("b s k n", mesh, [layout, moved])
    x, w = (sampler.array([sizes[n] for n in simulator.read(one).names], sampler.dtype()) for one in (layout, moved))
    names = " ".join(simulator.read(moved).names)
    body = lambda x, w: meanwhile(lambda x: x + x, x, lambda w: all_gather(w, f"{moved} -> {names}", to="invarying"), w)
    for mode in MODES:
        found = run(body, mesh, [layout, moved], [layout, names], mode)(x, w)
        close(found[0], x + x)
        close(found[1], w)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_values_and_gradients(mode: str, wrap) -> None:
    x, w = Sampler(1).array((4, 8), whole=False), Sampler(2).array((8, 16), whole=False)
    body = lambda x, w: wrap(lambda x, w: einsum(*one(x, w), "b/dp d, d f/tp -> b/dp f/tp"))(x, w)
    fn = run(body, MESH, ["b/dp d", W], "b/dp f/tp", mode)
    by = Sampler(3).array((4, 16), whole=False)
    jax.tree.map(close, pulled(fn, x, w, by=by), pulled(lambda x, w: jnp.tanh(x) * 2 @ w, x, w, by=by))


def kernel(mesh):
    @spmd.kernel(f"b/dp d, l {W}, l f/tp d -> b/dp d", mesh=mesh)
    def layers(x, w, v):
        def layer(carry, one):
            x, now = carry
            h = lambda x: jnp.tanh(einsum(x, now, "b/dp d, d f/tp -> b/dp f/tp"))
            h, then = meanwhile(h, x, gather, one[0])
            return (x + einsum(h, one[1], "b/dp f/tp, f/tp d -> b/dp d"), then), None

        return jax.lax.scan(layer, (x, gather(w[0])), (jnp.roll(w, -1, 0), v))[0][0]

    return layers


def plain(x, w, v):
    return jax.lax.scan(lambda x, one: (x + jnp.tanh(x @ one[0]) @ one[1], None), x, (w, v))[0]


def arrays():
    return [0.3 * Sampler(i).array(shape, whole=False) for i, shape in enumerate([(4, 8), (3, 8, 16), (3, 16, 8)])]


@rare
def test_a_scan_over_layers_and_its_gradient(mesh) -> None:
    layers, args = kernel(mesh), arrays()
    loss = lambda fn: lambda *args: (fn(*args) ** 2).sum()
    expected = jax.value_and_grad(loss(plain), argnums=(0, 1, 2))(*args)
    for fn in (layers, layers.auto, layers.reference):
        jax.tree.map(close, jax.value_and_grad(loss(fn), argnums=(0, 1, 2))(*args), expected)
    assert spmd.check(layers, *args).verdict.kind == "proved"
    spmd.testing.assert_collectives(layers, args, {"all_gather": {"dp": 4}, "psum": {"tp": 3}})


def test_under_vmap(mesh) -> None:
    layers, (x, w, v) = kernel(mesh), arrays()
    found = jax.vmap(layers, in_axes=(0, None, None))(np.stack([x, 2 * x]), w, v)
    close(found, np.stack([plain(x, w, v), plain(2 * x, w, v)]))


def test_trees_keys_and_what_is_no_array() -> None:
    key = jax.random.key(0)
    y, w = meanwhile(
        lambda t: {**t, "n": t["n"] + 1}, {"n": np.int32(1), "key": key, "name": "a"}, lambda w: w, [np.ones(3), None]
    )
    assert y["n"] == 2 and y["name"] == "a" and (y["key"] == key).all() and w[1] is None


def test_the_order_is_in_the_program(mesh) -> None:
    """What travels takes what the first barrier gives, and the results are those of the second."""
    args = arrays()[0], arrays()[1][0]
    fn = run(lambda x, w: one(x, w, to="invarying"), MESH, ["b/dp d", W], ["b/dp d", "d f/tp"])
    text = str(jax.make_jaxpr(fn)(*args))
    order = [text.index(f" {name}") for name in ("optimization_barrier", "all_gather")]
    assert order == sorted(order) and text.rindex("optimization_barrier") > order[1]


def test_arrays_whose_types_a_barrier_would_change_are_as_they_were(mesh) -> None:
    """JAX 0.10 types all results of a barrier as differing along the axes of any."""
    types = []

    def body(x, w):
        types.append([jax.typeof(one) for one in (x, w)])
        found = meanwhile(lambda x: x, x, lambda w: w, w)
        types.append([jax.typeof(one) for one in found])
        return found

    args = arrays()[0], arrays()[1][0]
    close(run(body, MESH, ["b/dp d", W], ["b/dp d", W])(*args)[0], args[0])
    assert types[0] == types[1]


def test_explain_says_what_is_covered(mesh) -> None:
    layers, args = kernel(mesh), arrays()
    loss = jax.grad(lambda *args: (layers(*args) ** 2).sum(), argnums=(0, 1, 2))
    found = spmd.explain(loss, *args, hardware="h100", compiled=False)
    forward, backward = sorted(found.written.windows, key=lambda one: one.phase != "forward")
    products = 3 * 2 * (2 * 8 * 4)  # of 3 layers: 2 rows, 8 features, 4 columns of a device
    assert (forward.phase, forward.flops) == ("forward", {"float32": products})
    assert (backward.phase, backward.flops) == ("backward", {"float32": 2 * products})
    kinds = [[found.written.collectives[i].kind for i in one.collectives] for one in (forward, backward)]
    assert kinds == [["all_gather"], ["psum_scatter"]]
    lines = str(found).partition("\nmeanwhile\n")[2]
    assert lines.count("test_meanwhile.py:") == 2 and "all_gather dp 192 B" in lines
    again = spmd.explain(jax.grad(lambda *args: jax.checkpoint(layers)(*args).sum()), *args, compiled=False)
    assert {one.phase for one in again.written.windows} >= {"recomputed", "backward"}


def test_its_collectives_and_no_others(mesh) -> None:
    args = arrays()[0], arrays()[1][0]
    body = lambda x, w: one(psum(x.sum(0), "d {U:dp} -> d"), w, to="invarying")
    fn = jax.jit(run(body, MESH, ["b/dp d", W], ["d", "d f/tp"]))
    assert collectives(fn, *args, mesh=make_mesh(MESH)).counts == {"all_gather": 1, "psum": 1}
