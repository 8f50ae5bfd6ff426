"""A mesh axis of size 1 costs nothing: the same program as on the mesh without it, and the same errors as on others."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import nn, stencil
from tests.sampler import share

# What is counted of a compiled program: all that moves or copies an array, between devices or on one.
COUNTED = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute|collective-broadcast"
COUNTED += "|copy|transpose|concatenate|sort|fusion|custom-call|while|dot|conditional|partition-id|reduce|broadcast"

PROGRAMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "all_gather": ("x/b y/a -> x y/a", lambda x: spmd.all_gather(x, "x/b y/a -> x y/a", to="invarying")),
    "psum": ("x/b y/a z -> y/a z", lambda x: spmd.psum(x.sum(0), "y/a z {U:b} -> y/a z")),
    "psum_scatter": ("x/b y/a z -> y/a z/b", lambda x: spmd.psum_scatter(x.sum(0), "y/a z {U:b} -> y/a z/b")),
    "relayout": ("x/b y/a z -> x y/b/a z", lambda x: spmd.relayout(x, "x/b y/a z -> x y/b/a z")),
    "relayout of a sum": ("x/b y/a z -> y z/a", lambda x: spmd.relayout(x.sum(0), "y/a z {U:b} -> y z/a")),
    "einsum, summed": ("x/a k/b, k/b y -> x/a y", lambda x, w: spmd.einsum(x, w, "x/a k/b, k/b y -> x/a y")),
    "einsum, scattered": ("x/a k/b, k/b y -> x/a y/b", lambda x, w: spmd.einsum(x, w, "x/a k/b, k/b y -> x/a y/b")),
    "mean": ("x/b y/a -> y/a", lambda x: spmd.reduce(x, "x/b y/a -> y/a", "mean")),
    "max": ("x/b y/a -> y/a", lambda x: spmd.reduce(x, "x/b y/a -> y/a", "max")),
    "softmax": ("x/b y/a -> x/b y/a", lambda x: spmd.softmax(x, "[x/b] y/a")),
    "argmax": ("x/b y/a -> y/a", lambda x: spmd.argmax(x, "[x/b] y/a")),
    "cumsum": ("x/b y/a -> x/b y/a", lambda x: spmd.cumsum(x, "[x/b] y/a")),
    "top_k": ("x/b y/a -> k y/a", lambda x: spmd.top_k(x, "[x/b] y/a", 2)[0]),
    "sort": ("x/b y/a -> x/b y/a", lambda x: spmd.sort(x, "[x/b] y/a")),
    "roll": ("x/b y/a -> x/b y/a", lambda x: spmd.roll(x, "[x/b] y/a", 3)),
    "shift": ("x/b y/a -> x/b y/a", lambda x: spmd.shift(x, "[x/b] y/a", 1)),
    "halo": ("x/b y/a -> x/b y/a", lambda x: stencil.halo(x, "x/b y/a -> 1+x/b+1 y/a", edge="periodic")[2:]),
    "scatter_add": (
        "x/b y/a -> v/b y/a",
        lambda x: spmd.scatter_add(x, jnp.arange(x.shape[0]), "x/b y/a, x/b -> [v/b] y/a", v=8, outside="drop"),
    ),
    "exchange": (
        "x/b y/a -> x/b y/a",
        lambda x: spmd.exchange(x, jnp.arange(x.shape[0]) % 2, "[x/b] y/a", capacity=2)[0],
    ),
    "exchange, neighbours": (
        "x/b y/a -> x/b y/a",
        lambda x: spmd.exchange(x, jnp.arange(x.shape[0]) % 2, "[x/b] y/a", capacity=2, hops=(1,))[0],
    ),
    "deposit": (
        "x/b y/a -> x/b y/a",
        lambda x: stencil.deposit(jnp.pad(x, ((2, 0), (0, 0))), "1+x/b+1 y/a -> x/b y/a"),
    ),
    "defer": ("y/a, x/b y/a -> x/b y/a", lambda w, x: spmd.defer(w, "y/a -> y/a {R:b}")[None] * x),
    "overlapped products": (
        "n s/b d, d f/b, f/b d -> n s/b d",
        lambda x, w, v: nn.mlp(x, w, v, tp="b", sp="b", overlap=True),
    ),
}


def program(name: str, sizes: dict[str, int], axes: dict[str, Any]) -> Counter[str]:
    """The compiled program of values and gradients, as how often it has which instruction."""
    pattern, body = PROGRAMS[name]
    given = [jax.ShapeDtypeStruct((8,) * len(one.dims), jnp.float32) for one in spmd.Pattern(pattern).inputs]
    run = spmd.kernel(pattern, mesh=spmd.make_mesh(**sizes), axes=axes)(body)

    def both(*given: Any) -> Any:
        value, pull = jax.vjp(run, *given)
        exact = not jnp.issubdtype(value.dtype, jnp.inexact)
        return value, pull(np.zeros(value.shape, jax.dtypes.float0) if exact else jnp.ones_like(value))

    text = jax.jit(both).lower(*given).compile().as_text()
    return Counter(re.findall(rf"= (?:\([^=]*?\)|\S+) ({COUNTED})(?:-start)?\(", text))


@pytest.mark.parametrize("name", share(PROGRAMS))
def test_an_axis_of_size_1_costs_nothing(name: str) -> None:
    with_axis = program(name, {"a": 4, "b": 1}, {})
    assert with_axis == program(name, {"a": 4}, {"b": None})
    assert with_axis or name == "softmax", "what is counted is there"


def test_what_is_counted_is_seen() -> None:
    """Meta-test: of two devices the same programs have collectives."""
    assert program("psum", {"a": 4, "b": 2}, {})["all-reduce"] == 1
    assert program("top_k", {"a": 4, "b": 2}, {})["all-gather"] >= 1


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "a sum that nobody made": ("x/b -> scalar", jnp.sum),
    "an exponential of a partial sum": (
        "x/b k -> k",
        lambda x: spmd.psum(jnp.exp(spmd.einsum(x, x, "x/b k, x/b k -> k {U:b}")), "k {U:b} -> k"),
    ),
    "a largest of partial sums": (
        "x/b k -> k",
        lambda x: spmd.reduce(spmd.einsum(x, x, "x/b k, x/b k -> k {U:b}"), "k -> scalar", "max"),
    ),
    "a gathered copy, doubled": ("x/b -> x", lambda x: jnp.sin(spmd.all_gather(x, "x/b -> x")) + x),
    "a gathered copy that another use pays for": (
        "x/b y -> x y, x/b z",
        lambda x: (whole := spmd.all_gather(x, "x/b y -> x y"), x @ whole.T),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_do_not_depend_on_the_size(name: str) -> None:
    pattern, body = WRONG[name]
    found = []
    for size in (1, 2):
        run = spmd.kernel(pattern, mesh=spmd.make_mesh(a=2, b=size))(body)
        with pytest.raises(spmd.errors.SpmdError) as error:
            run(jnp.ones((2,) * len(spmd.Pattern(pattern).inputs[0].dims)))
        found.append(type(error.value))
    assert found[0] is found[1]
