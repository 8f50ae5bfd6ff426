"""Powers of axis sizes against numbers: what is called n times too large is that, on the mesh and on one device."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

SIZES = {"dp": 2, "tp": 4}
X = np.abs(np.random.default_rng(0).normal(size=(8, 16))).astype(np.float32) + 1

# Bodies of blocks "a/dp b", and the factor on a mesh of ones by which the result is too large.
BODIES = {
    "mean of means": (lambda x: lax.pmean(x.mean(), "dp"), 1),
    "sum of means": (lambda x: lax.psum(x.mean(), "dp"), 2),
    "sum of sums": (lambda x: lax.psum(x.sum(), "dp"), 1),
    "mean of sums": (lambda x: lax.pmean(x.sum(), "dp"), 1 / 2),
    "root of a sum of means": (lambda x: jnp.sqrt(lax.psum(x.mean(), "dp")), 2**0.5),
    "square of a sum of means": (lambda x: lax.psum(x.mean(), "dp") ** 2, 4),
    "one over a sum of means": (lambda x: 1.0 / lax.psum(x.mean(), "dp"), 1 / 2),
    "product of two": (lambda x: lax.psum(x.mean(), "dp") * lax.psum(x.mean(), "dp"), 4),
    "quotient of two": (lambda x: lax.psum(x.mean(), "dp") / lax.psum(x.mean(), "dp"), 1),
    "sum of two": (lambda x: lax.psum(x.mean(), "dp") + lax.psum(x.mean(), "dp"), 2),
    "divided by the number of devices": (lambda x: lax.psum(x.mean(), "dp") / lax.axis_size("dp"), 1),
    "a step of a loop": (lambda x: lax.fori_loop(0, 2, lambda i, c: c * 1.5, lax.psum(x.mean(), "dp")), 2),
    "in a jit": (lambda x: jax.jit(lambda y: y * 3.0)(lax.psum(x.mean(), "dp")), 2),
    "a sum of unlike powers": (lambda x: lax.psum(x.mean(), "dp") + lax.pmean(x.mean(), "dp"), None),
    "the largest": (lambda x: lax.pmax(x.max(), "dp"), 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_factors_are_those_of_the_numbers(name):
    body, factor = BODIES[name]
    values = [
        float(spmd.kernel("a/dp b -> scalar", mesh=spmd.make_mesh(**sizes))(body)(X))
        for sizes in (SIZES, {"dp": 1, "tp": 1})
    ]
    found = spmd.check(spmd.kernel("a/dp b -> scalar", mesh=spmd.make_mesh(**SIZES))(body), X)
    if factor is None:  # wrong, and by no one factor
        assert not found and not np.isclose(*values)
        return
    np.testing.assert_allclose(values[0] / values[1], factor, rtol=1e-4)
    assert [one.kind for one in found] == ([] if factor == 1 else ["scale"])
    if factor != 1:
        told = re.search(r"([\d.]+(?:/\d+)?) times too (large|small)", found[0].rule)
        times = float(told[1]) if told[2] == "large" else 1 / float(told[1])
        np.testing.assert_allclose(times, factor, rtol=1e-2)


def test_the_line_is_that_of_the_number():
    """The mean is to blame, not the sum behind it."""

    def body(x):
        local = x.mean()
        return lax.psum(local, "dp") * 1.0

    [finding] = spmd.check(spmd.kernel("a/dp b -> scalar", mesh=spmd.make_mesh(**SIZES))(body), X)
    line = body.__code__.co_firstlineno + 1
    assert f":{line} " in finding.line


def test_along_each_axis_by_itself():
    body = lambda x: lax.psum(lax.psum(x.mean(), "dp"), "tp")
    kernel = spmd.kernel("a/dp b/tp -> scalar", mesh=spmd.make_mesh(**SIZES))(body)
    rules = [one.rule for one in spmd.check(kernel, X)]
    assert len(rules) == 2 and "along dp" in rules[0] and "along tp" in rules[1]
