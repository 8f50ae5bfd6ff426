"""Which values belong to which line."""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
from jax import lax

import spmd

MESH = spmd.make_mesh(dp=2, tp=4)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def shown(fn, *args) -> dict[str, tuple[str, ...]]:
    """The layouts of each name of a program in which no name is given twice."""
    blocks = spmd.check(fn, *args).source().blocks
    return {value.name: value.layouts for block in blocks for line in block.lines for value in line.values}


def kernel(body, pattern="b/dp d/tp -> b/dp d/tp"):
    return spmd.kernel(pattern, mesh=MESH, check="off")(body)


def test_a_jitted_helper_is_traced_once_and_shown_for_each_caller():
    """Its second trace is the first one's, whose callers are others."""

    @jax.jit
    def helper(v):
        doubled = v * 2
        return jnp.sin(doubled)

    def body(x):
        one = helper(x)
        other = helper(lax.psum(x, "dp"))
        return one + other

    found = shown(kernel(body), X)
    assert found["one"] == ("b/dp d/tp",)
    assert found["other"] == ("b/? d/tp",)
    assert found["doubled"] == ("b/dp d/tp", "b/? d/tp")


def test_a_helper_without_a_trace_of_its_own_shows_all_its_layouts():
    """Also beside its `return`, where no equation is."""

    def helper(v):
        doubled = v * 2
        del v
        return doubled

    def body(x):
        return helper(x) + helper(x.sum(1, keepdims=True))

    [block] = [one for one in spmd.check(kernel(body), X).source().blocks if one.name == "helper"]
    layouts = [value.layouts for line in block.lines for value in line.values]
    assert layouts == [("b/dp d/tp", "b/dp 1 {U:tp}")] * 2


def test_what_jax_does_inside_of_an_expression_is_not_its_value():
    def body(x):
        mean = jnp.where(x > 0, x, 0.0).mean(0, keepdims=True)
        soft = jax.nn.softmax(x, axis=0)
        return soft + 0 * mean

    found = shown(kernel(body, "b d/tp -> b d/tp"), X)
    assert found["mean"] == ("1 d/tp",)
    assert found["soft"] == ("b d/tp",)


def test_residuals_are_not_values():
    """JAX keeps 1 - tanh(x)**2 for the backward pass. It is made on the same line, after the value."""

    def body(x):
        y = jnp.tanh(x)
        largest = y.max(1, keepdims=True)
        return y * lax.pmax(lax.stop_gradient(largest), "tp")

    run = kernel(body)
    plain, found = shown(run, X), shown(jax.grad(lambda x: run(x).sum()), X)
    assert plain["largest"] == ("b/dp 1 ? pending max over tp",)
    assert found["y"] == plain["y"] == ("b/dp d/tp",)
    assert "largest" not in found or found["largest"] == plain["largest"]


def test_an_alias_has_the_layout_of_its_value():
    def body(x):
        y = x * 2
        alias = y
        return alias * x

    assert shown(kernel(body), X)["alias"] == ("b/dp d/tp",)


def pair(x):
    return x * 2, x * 3


def test_every_statement_that_gives_a_name_shows_it():
    held, out = types.SimpleNamespace(), {}

    def body(x):
        a = b = jnp.sin(x)
        c, d = jnp.cos(a), jnp.tanh(b)
        e, k = pair(c)
        d += 1
        held.y: object = jnp.exp(e)
        if (n := jnp.abs(k)).ndim:
            for p, q in zip([n * 2], [d * 3], strict=True):
                out["p"] = p + q
        with contextlib.nullcontext(out["p"] * 4) as z:
            pass
        for one in (z, jnp.sinh(z)):
            two = one * held.y

        def inner(y):
            turned = -y
            return turned * 2

        return inner(two)

    found = shown(kernel(body), X)
    assert {*"abcdeknxz", "held.y", "out['p']", "two", "turned"} <= {*found}, found
    assert set(found.values()) == {("b/dp d/tp",)}
