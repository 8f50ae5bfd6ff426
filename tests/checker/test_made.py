"""What a fix is chosen by: how a value lies, against blocks that are laid together again, and what it was made by."""

from __future__ import annotations

import math
import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd._jaxprs.walker import equations
from spmd.checker._dataflow import Dataflow, walk_closed
from spmd.checker._made import Place, lying, place_of
from spmd.checker._state import FREE, State, plain
from tests.checker.harness import AXES, layouts_of, mark, mesh

SHAPES = [(6,), (1, 6), (6, 1), (2, 3), (3, 2), (1, 2, 3), (2, 1, 3), (2, 3, 1), (1, 6, 1), (1, 1, 6), (3, 1, 2)]
DEVICES = 4


def reshaped(old: tuple[int, ...], new: tuple[int, ...], dims: tuple) -> Place:
    """What the engine's state says of a block after a reshape."""
    walk = Dataflow("", ("tp",), {"tp": DEVICES})
    walk.active = True
    jaxpr = jax.make_jaxpr(lambda x: lax.reshape(x, new))(jnp.ones(old))
    blocks = (((n, axes),) if axes else plain(n) for n, axes in zip(old, dims, strict=True))
    [out] = walk_closed(walk, jaxpr, [State(tuple(blocks))])
    return lying(out) if not out.different else Place((None,) * len(new))


@pytest.mark.parametrize("old", SHAPES)
def test_a_reshape_says_where_the_blocks_are(old: tuple[int, ...]) -> None:
    known = 0
    for new, at in product([shape for shape in SHAPES if shape != old], range(len(old))):
        found = reshaped(old, new, tuple(("tp",) if d == at else () for d in range(len(old))))
        if None in found.dims:
            continue
        assert [axes for axes in found.dims if axes] == [("tp",)]
        whole = np.arange(math.prod(old) * DEVICES).reshape(
            [n * (DEVICES if d == at else 1) for d, n in enumerate(old)]
        )
        blocks = [block.reshape(new) for block in np.split(whole, DEVICES, at)]
        together = np.concatenate(blocks, found.dims.index(("tp",)))
        np.testing.assert_array_equal(together.ravel(), whole.ravel(), f"{old} to {new}, divided at {at}")
        known += 1
    assert known


def test_what_a_reshape_does_not_say() -> None:
    assert reshaped((2, 3), (6,), ((), ())).dims == ((),)
    assert reshaped((2, 3), (6,), ((), ("tp",))).dims == (None,)  # each device has pieces of every block
    assert reshaped((2, 3), (6,), (FREE, FREE)).dims == ((),)


# --- what it was made by -------------------------------------------------------------------------------------


def made(body) -> Place | None:
    """What is known of the operand of the annotation in a body on x, "a/dp b/tp", and w, "a b/tp"."""
    specs = P("dp", "tp"), P(None, "tp")

    def marked(x, w):
        mark(body(x, w), "...")
        return x

    run = jax.shard_map(marked, mesh=mesh(), in_specs=specs, out_specs=specs[0])
    jaxpr = jax.make_jaxpr(run)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    walk = Dataflow("", AXES)
    walk.arg_names, walk.arg_layouts = ("x", "w"), tuple(layouts_of(specs))
    walk_closed(walk, jaxpr)
    [eqn] = [one for one in equations(jaxpr) if one.primitive.name == "spmd_layout"]
    return place_of(walk, eqn.invars[0], walk.known[eqn.invars[0]])


def said(place: Place | None) -> tuple:
    """How it lies, which argument it is, and which reduction of what."""
    if place is None:
        return ()
    made = place.made and (place.made.op, sorted(place.made.axes), place.made.name)
    return place.dims, place.name, made


TP = (("tp",),)
BODIES = {
    "an argument": (lambda x, w: lax.pcast(w, "dp", to="varying"), (((), ("tp",)), "w", None)),
    "something like it": (lambda x, w: jnp.sin(x), ((("dp",), ("tp",)), None, None)),
    "a product": (lambda x, w: x @ w.T, ((("dp",), ()), None, ("sum", ["tp"], None))),
    "a sum": (lambda x, w: x.sum(0), (TP, None, ("sum", ["dp"], "x"))),
    "twice a sum": (lambda x, w: 2 * x.sum(0), (TP, None, ("sum", ["dp"], None))),
    "a mean": (lambda x, w: jnp.mean(x, 0), (TP, None, ("mean", ["dp"], "x"))),
    "a mean of another type": (
        lambda x, w: jnp.mean(x.astype("bfloat16"), 0),
        (TP, None, ("mean", ["dp"], None)),
    ),
    "a sum over its number": (lambda x, w: x.sum(0) / 4, (TP, None, ("scaled", ["dp"], "x"))),
    "twice a sum over its number": (lambda x, w: 2 * x.sum(0) / 4, (TP, None, ("scaled", ["dp"], None))),
    "a sum over another number": (lambda x, w: x.sum(0) / 3, (TP, None, ("sum", ["dp"], None))),
    "a product over its number": (
        lambda x, w: x.T @ jnp.ones((4, 3)) / 4,
        ((("tp",), None), None, ("scaled", ["dp"], None)),
    ),
    "a product over another": (lambda x, w: x.T @ jnp.ones((4, 3)) / 8, ((("tp",), None), None, ("sum", ["dp"], None))),
    "a sum of sums": (lambda x, w: x.sum(0) + jnp.sin(x).sum(0), (TP, None, ("sum", ["dp"], None))),
    "a mean less a sum": (lambda x, w: jnp.mean(x, 0) - x.sum(0), ()),
    "a maximum": (lambda x, w: x.max(0), (TP, None, ("max", ["dp"], "x"))),
    "a curved maximum": (lambda x, w: jnp.exp(x.max(0)), ()),
    "a gathered one": (lambda x, w: lax.all_gather(w, "tp", axis=1, tiled=True), (((), ()), None, None)),
    "noise": (lambda x, w: jax.random.normal(jax.random.key(0), (4,)), ((None,), None, None)),
    "nobody knows": (lambda x, w: x * lax.axis_index("dp").astype(x.dtype), ()),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_it_was_made_by(name: str) -> None:
    body, wanted = BODIES[name]
    assert said(made(body)) == wanted


def test_what_counts() -> None:
    for body, counts in ((lambda x, w: jnp.arange(4), True), (lambda x, w: jnp.arange(4) + 1, False)):
        found = made(body)
        assert found is not None and found.counts is counts


def test_a_function_that_is_called_twice() -> None:
    """JAX traces `jnp.mean` once for both calls, and the calls tell which argument is meant."""
    body = lambda x, w: (jnp.mean(x, 0), jnp.mean(lax.pcast(w[:4], "dp", to="varying"), 0))[0]
    found = made(body)
    assert found is not None and found.made is not None and found.made.name == "x"


MEANS = {
    "nonlinear": (lambda x: x * lax.rsqrt(jnp.mean(x**2, axis=1, keepdims=True)), lambda x, m: x * lax.rsqrt(m(x**2))),
    "blocks": (lambda x: x - jnp.mean(x, axis=1)[:, None], lambda x, m: x - m(x)),
    "equal": (lambda x: x / (jnp.mean(x, axis=1, keepdims=True) + 2.0), lambda x, m: x / (m(x) + 2.0)),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_blocks_is_not_to_be_summed(name: str) -> None:
    """The sum of the means of blocks is not a mean. What the advice says gives the numbers of whole arrays."""
    wrong, right = MEANS[name]
    kernel = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=spmd.make_mesh(dp=2, tp=4))
    x = jnp.arange(64.0).reshape(4, 16) + 1
    with pytest.raises(spmd.errors.ReplicationError) as raised:
        kernel(wrong)(x)
    assert re.search(r'reduce\(.*, "b/dp d/tp -> b/dp( 1)?", op="mean"\)', str(raised.value))
    assert "psum" not in str(raised.value)
    mended = kernel(lambda x: right(x, lambda y: spmd.reduce(y, "b/dp d/tp -> b/dp 1", "mean")))
    np.testing.assert_allclose(mended(x), right(x, lambda y: y.mean(1, keepdims=True)), rtol=1e-6)


def test_a_sum_is_to_be_summed() -> None:
    kernel = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=spmd.make_mesh(dp=2, tp=4))
    with pytest.raises(spmd.errors.ReplicationError) as raised:
        kernel(lambda x: x * lax.rsqrt(jnp.sum(x**2, axis=1, keepdims=True)))(jnp.ones((4, 16)))
    assert str(raised.value).endswith('\nfix: spmd.reduce(x**2, "b/dp d/tp -> b/dp 1")')
