"""Findings as values, as an error and as a warning."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker import Findings
from spmd.errors import ReplicationError

MESH = spmd.make_mesh(dp=2, tp=4)
X = jnp.ones((8, 8))


def raw(fn, spec):
    return jax.shard_map(fn, mesh=MESH, in_specs=P("dp", "tp"), out_specs=spec)


def kernel(pattern, fn):
    return spmd.kernel(pattern, mesh=MESH)(fn)


def wrong_twice(x):
    sums = jnp.sqrt((x * x).sum(1, keepdims=True)) * x
    return sums + jnp.exp(x.sum(1, keepdims=True))


def test_there_are_none() -> None:
    assert not Findings()
    assert str(Findings()) == "no findings"


def test_each_is_said_once_and_knows_its_line() -> None:
    with pytest.raises(ReplicationError) as caught:
        kernel("b/dp d/tp -> b/dp d/tp", wrong_twice)(X)
    one, two = caught.value.findings
    assert one.line != two.line and all(line.endswith(" (wrong_twice)") for line in (one.line, two.line))
    assert "wrong_twice: " in str(caught.value) and "2 values" in str(caught.value)
    assert f"(1) {one}" in str(caught.value) and f"(2) {two}" in str(caught.value)


def test_one_is_an_error_without_a_number() -> None:
    with pytest.raises(ReplicationError) as caught:
        kernel("b/dp d/tp -> b/dp d/tp", jax.nn.softmax)(X)
    assert "(1)" not in str(caught.value) and caught.value.findings[0].rule in str(caught.value)


@pytest.mark.parametrize("how", ["error", "warn"])
def test_a_kernel_says_what_becomes_of_them(how: str) -> None:
    mesh = spmd.make_mesh(dp=2)

    @spmd.kernel("a/dp b -> a/dp b", mesh=mesh, check=how)
    def wrong(x):
        return x + jnp.tanh(spmd.reduce(x, "a/dp b -> b {U:dp}"))[None]

    with (
        pytest.raises(ReplicationError)
        if how == "error"
        else pytest.warns(UserWarning, match="take tanh after the sum is complete")
    ):
        wrong(jnp.ones((4, 4)))


# Bodies that hold no line of the user's, or whose finding is at none.
WITHOUT_LINES = {
    "a function of JAX": lambda: kernel("b/dp d/tp -> b/dp d/tp", functools.partial(jnp.sort, axis=1)),
    "its operand": lambda: kernel("b/dp d/tp -> b/dp d/tp", jax.nn.softmax),
    "tag against signature": lambda: kernel("b/dp d/tp -> d/tp b/dp", lambda x: x),
    "JAX's tag": lambda: kernel("b/dp d/tp -> b/dp d", jnp.asarray),
    "a partial sum": lambda: kernel("b/dp d/tp -> b/dp", functools.partial(jnp.sum, axis=1)),
    "a raw map": lambda: raw(functools.partial(jnp.sort, axis=1), P("dp", "tp")),
    "a raw map's result": lambda: raw(jnp.tanh, P("tp", "dp")),
    "under jit": lambda: jax.jit(kernel("b/dp d/tp -> b/dp d/tp", jax.nn.softmax)),
    "under vmap": lambda: jax.vmap(kernel("d/tp -> d/tp", jnp.sort)),
    "under grad": lambda: jax.grad(lambda x: (kernel("b/dp d/tp -> b/dp d/tp", jax.nn.softmax)(x) ** 2).sum()),
    "a scale": lambda: kernel("b/dp d/tp -> scalar", lambda x: lax.psum(jnp.mean(x), ("dp", "tp"))),
}


@pytest.mark.parametrize("name", WITHOUT_LINES)
def test_each_finding_names_a_line_of_the_user(name: str) -> None:
    found = spmd.check(WITHOUT_LINES[name](), X)
    assert found
    for one in found:
        assert "test_findings.py" in one.line


# A raw map has no first check, and only `check` looks for scales.
@pytest.mark.parametrize("name", [n for n in WITHOUT_LINES if not any(word in n for word in ("raw", "scale"))])
def test_a_first_call_names_it_too(name: str) -> None:
    with pytest.raises(ReplicationError) as caught:
        WITHOUT_LINES[name]()(X)
    for one in caught.value.findings:
        assert "test_findings.py" in one.line


def test_the_line_is_the_nearest_one() -> None:
    """What made the value that the kernel returns, before the kernel's call."""

    def made(x):
        return jnp.cumsum(x, axis=1)

    def step(x):
        return kernel("b/dp d/tp -> b/dp d/tp", made)(x) * 2

    [finding] = spmd.check(step, X)
    assert finding.line.endswith("(test_the_line_is_the_nearest_one.<locals>.made)")
    softmax = lambda x: spmd.softmax(x * 2.0, "b/dp [e]")
    [finding] = spmd.check(kernel("b/dp d/tp -> b/dp d/tp", softmax), X)
    assert finding.line.endswith("<lambda>)")


def test_an_error_of_the_trace_is_a_finding_too() -> None:
    """What a result's own layout says against the signature, and what JAX types varying."""

    def summed(x):
        return spmd.reduce(x, "b/dp d/tp -> b/dp {U:tp}")

    def gathered(x):
        whole = spmd.all_gather(x, "b/dp d/tp -> b/dp d", to="varying")
        return jnp.tanh(whole)

    for pattern, body in (("b/dp d/tp -> b/dp", summed), ("b/dp d/tp -> b/dp d", gathered)):
        with pytest.raises(ReplicationError) as caught:
            kernel(pattern, body)(X)
        [finding] = caught.value.findings
        assert str(finding) in str(caught.value)
        assert finding.kind == "layout"
        assert finding.line.endswith(f"(test_an_error_of_the_trace_is_a_finding_too.<locals>.{body.__name__})")


def one(fn, *also):
    [finding] = spmd.check(kernel(f"b/dp d/tp{', scalar' * len(also)} -> b/dp d/tp", fn), X, *also)
    return finding


def test_one_mistake_is_one_finding() -> None:
    """A maximum and a sum of pieces, a sum that is used twice, noise beside two divided dimensions."""
    assert str(one(jax.nn.softmax)).endswith("advice: spmd.softmax, which takes a divided dimension")
    assert one(lambda x: x + jax.nn.logsumexp(x, axis=1, keepdims=True)).kind == "nonlinear"
    assert "divided over tp" in one(lambda x: x - jnp.var(x, axis=1, keepdims=True)).rule

    def by_hand(x):
        shifted = jnp.exp(x - x.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)

    finding = one(by_hand)
    assert 'psum(<the partial sum>, "... {U:tp} -> ...")' in str(finding) and "lax.pmax" in str(finding)
    noise = one(lambda x, key: x + jax.random.normal(key, x.shape), jax.random.key(0))
    assert noise.kind == "noise"
    assert "random numbers, which are the same on every device along dp and tp" in noise.rule


def test_two_mistakes_are_two_findings() -> None:
    """Two sums that nobody completed, on one line."""

    def body(x):
        return jnp.sqrt((x * x).sum(1, keepdims=True)) * x + jnp.exp(x.sum(1, keepdims=True))

    assert [one.kind for one in spmd.check(kernel("b/dp d/tp -> b/dp d/tp", body), X)] == ["nonlinear"] * 2


def test_noise_in_an_output_says_so() -> None:
    body = lambda key: jax.random.normal(key, (4, 2))
    [finding] = spmd.check(kernel("scalar -> b/dp d/tp", body), jax.random.key(0))
    assert finding.kind == "noise"
    assert "these random numbers are the same on every device" in finding.rule


def test_a_notebook_shows_a_row_for_each() -> None:
    found = spmd.check(kernel("b/dp d/tp -> b/dp d/tp", wrong_twice), X)
    html = found._repr_html_()
    assert "2 findings" in html and html.count("<tr") == 3 and all(one.line in html for one in found)
    assert "no findings" in Findings()._repr_html_()


def test_a_function_without_a_kernel_has_nothing_to_check():
    """No findings would read as if it were right."""

    def doubled(x):
        return 2 * x

    found = spmd.check(doubled, jnp.ones(4))
    assert not found and str(found) == "nothing to check: doubled calls no kernel, and has no jax.shard_map"
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    mesh = spmd.make_mesh(dp=2)
    assert str(spmd.check(spmd.kernel("b/dp -> b/dp", mesh=mesh)(doubled), jnp.ones(4))) == (
        "no findings: proved. On dp=2 the results and gradients are those of one device; "
        "on dp=3, b=6 (given 4) the results are, too"
    )


def test_the_line_of_an_error_in_a_block_of_jax() -> None:
    """JAX raises it anew where a `with` ends, and the user's line is in the error behind it."""
    run = lambda x: jax.lax.scan(lambda carry, row: (carry + row, carry), jnp.zeros(4), x)[1]
    findings = spmd.check(spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=4))(run), jnp.ones((8, 4)))
    assert "test_findings.py" in findings[0].line and "contextlib" not in str(findings.source())
