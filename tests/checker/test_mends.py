"""What messages offer: each line `fix:` is run, and gives the right numbers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd
from tests.checker import wrong_programs
from tests.checker.harness import AXES, SHAPE, check, mark, mesh, message, rows, varying
from tests.checker.messages import GOLDEN
from tests.errors.registry import Pasted, facts_of, fixes_of

X = np.arange(64, dtype=np.float32).reshape(SHAPE)
W = np.sin(X)


def product(x, w):
    return mark(x @ rows(w), "a/dp b {U:tp}", "result")


def softmax(x, axis=-1):
    return np.exp(x) / np.exp(x).sum(axis, keepdims=True)


# Each wrong program as its message says: the mended body, and what the device (i, j) of dp and tp has, by NumPy.
MENDED = {
    "equal_claimed_divided": (
        lambda x, w, fix: mark(fix(w=w), "a b/tp", "operand"),
        lambda i, j: W[:, 2 * j : 2 * j + 2],
    ),
    "different_claimed_equal": (
        lambda x, w, fix: jax.nn.softmax(mark(fix(x=jnp.exp(x / 64)), "a/dp b", "operand")),
        lambda i, j: softmax(np.exp(X / 64))[4 * i : 4 * i + 4],
    ),
    "partial_claimed_complete": (
        lambda x, w, fix: mark(fix(x=product(x, w)), "a/dp b", "output"),
        lambda i, j: (X @ W)[4 * i : 4 * i + 4],
    ),
    "partial_claimed_divided": (
        lambda x, w, fix: mark(fix(x=product(x, w)), "a/dp b/tp", "operand"),
        lambda i, j: (X @ W)[4 * i : 4 * i + 4, 2 * j : 2 * j + 2],
    ),
    "under_a_mapping": (
        lambda x, w, fix: mark(fix(x=x), "batch/dp embed", "operand").sum(1),
        lambda i, j: X.sum(1)[4 * i : 4 * i + 4],
    ),
    "partial_sum_returned": (
        lambda x, w, fix: fix(result=product(x, w)),
        lambda i, j: (X @ W)[4 * i : 4 * i + 4],
    ),
    "rounding_of_a_partial_sum": (
        lambda x, w, fix: fix(x=x).astype(jnp.int32),
        lambda i, j: X.sum().astype(np.int32),
    ),
    "rounding_of_some_bits": (
        lambda x, w, fix: fix(x=x).astype(jnp.int8).astype(jnp.int32),
        lambda i, j: X.astype(np.int32).sum().astype(np.int8).astype(np.int32),
    ),
    "quotient_of_whole_numbers": (
        lambda x, w, fix: lax.div(fix(x=x), jnp.int32(3)),
        lambda i, j: X.astype(np.int32).sum() // 3,
    ),
    "divided_by_a_partial_sum": (lambda x, w, fix: w / fix(x=x), lambda i, j: W / X.sum()),
    "maximum_of_a_partial_sum": (lambda x, w, fix: fix(x=x), lambda i, j: X.sum()),
    "several": (
        lambda x, w, fix: (
            mark(fix(1, x=x), "a/dp b", "operand").sum(1)[:, None] * mark(fix(w=w), "a b/tp", "operand").sum(0)[None]
        ),
        lambda i, j: X[4 * i : 4 * i + 4].sum(1)[:, None] * W[:, 2 * j : 2 * j + 2].sum(0)[None],
    ),
}


@pytest.mark.parametrize("name", [name for name, text in GOLDEN.items() if fixes_of(text)])
def test_each_fix_is_run(name: str) -> None:
    """Inside the user's own `shard_map`, as in the wrong programs; there is one for each message with a line `fix:`."""
    fix = Pasted(message(getattr(wrong_programs, name)))
    mended, want = MENDED[name]
    in_specs = (P("dp", "tp"), P())
    body = lambda x, w: varying(mended(x, w, fix))[None]
    found = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=in_specs, out_specs=P(AXES)))(X, W)
    assert fix.used == set(range(len(fix.lines)))
    for i, j in np.ndindex(2, 4):
        np.testing.assert_allclose(found[4 * i + j], want(i, j), rtol=1e-5, atol=1e-4)
    check(lambda x, w: mended(x, w, fix))  # and the pass has nothing more to say


@pytest.mark.parametrize("name", GOLDEN)
def test_a_finding_is_told_where_every_advice_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong and what was got stay; of the advice at most a sentence that nothing has to be found out for."""

    def fails(make, *args, **kwargs):
        raise LookupError

    monkeypatch.setattr("spmd.errors._make", fails)
    said = message(getattr(wrong_programs, name))
    assert facts_of(said) == facts_of(GOLDEN[name])
    assert set(fixes_of(said)) <= {'spmd.psum(result, "... {U:tp} -> ...")'}


def test_an_identity_beside_data_does_not_count() -> None:
    """JAX makes `jnp.eye` of two aranges. What data went into does not count from 0."""

    def first_rows(x: Any) -> Any:
        whole = lax.all_gather(x, "dp", tiled=True)
        return ((jnp.outer(whole, whole) + jnp.eye(16)) @ whole)[:4]

    kernel = spmd.kernel("n/dp -> n/dp", mesh=spmd.make_mesh(dp=4))(first_rows)
    [finding] = spmd.check(kernel, jax.ShapeDtypeStruct((16,), "float32"))
    assert "holds the same block" in finding.rule and "arange" not in str(finding)


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


# --- what a value was made by -----------------------------------------------------------------------------------

MEAN = 'advice: a mean of each device\'s own block: reduce(<what is averaged>, "<its layout> -> b/tp", "mean")'
SUM = 'fix: spmd.psum(x, "b/tp {U:dp} -> b/tp")'
MADE = {
    "a maximum": (lambda x: x.max(0), 'fix: spmd.reduce(x, "a/dp b/tp -> b/tp", op="max")'),
    "a maximum of what is computed": (
        lambda x: jnp.sin(x).max(0),
        'fix: spmd.reduce(jnp.sin(x), "a/dp b/tp -> b/tp", op="max")',
    ),
    "a mean": (lambda x: jnp.mean(x, 0), 'fix: spmd.reduce(x, "a/dp b/tp -> b/tp", op="mean")'),
    "a mean of another type": (lambda x: jnp.mean(x.astype("bfloat16"), 0), MEAN),
    "a sum over its number": (lambda x: x.sum(0) / 4, f"{MEAN};\n        a sum that is divided by a number of all"),
    "a sum over another number": (lambda x: x.sum(0) / 3, SUM),
    "a sum of sums": (lambda x: x.sum(0) + jnp.sin(x).sum(0), SUM),
    "a mean less a sum": (lambda x: jnp.mean(x, 0) - x.sum(0), "advice: it depends on what each device holds:"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_value_was_made_by_decides_what_is_offered(name: str) -> None:
    body, told = MADE[name]
    kernel = spmd.kernel("a/dp b/tp -> b/tp", mesh=mesh())(lambda x: spmd.annotate(body(x), "b/tp"))
    with pytest.raises(spmd.errors.ReplicationError) as raised:
        kernel.trace(jax.ShapeDtypeStruct(SHAPE, "float32"))
    assert told in str(raised.value)


def test_a_maximum_that_dots_claim_of_the_whole() -> None:
    kernel = spmd.kernel("a/dp b/tp -> b/tp", mesh=mesh())(lambda x: spmd.annotate(x.max(0), "..."))
    with pytest.raises(spmd.errors.ReplicationError, match="the max of each device's own block: reduce"):
        kernel.trace(jax.ShapeDtypeStruct(SHAPE, "float32"))


def test_a_call_in_a_loop_keeps_the_rows_of_devices_apart() -> None:
    """The mean names no axis that divides the rows, and is that of one row."""

    @spmd.kernel("e/dp b -> e/dp b", mesh=mesh())
    def centred(x: Any) -> Any:
        return lax.map(lambda row: row * spmd.reduce(row, "b -> scalar", "mean"), x)

    assert not spmd.check(centred, X)
    np.testing.assert_allclose(centred(X), centred.reference(X), rtol=1e-6)


def test_a_keyword_that_a_layer_lacks_is_named() -> None:
    loss = spmd.kernel("b/dp s v, b/dp s -> scalar", mesh=mesh())(lambda z, y: spmd.nn.cross_entropy(z, y))
    structs = jax.ShapeDtypeStruct((4, 3, 8), "float32"), jax.ShapeDtypeStruct((4, 3), "int32")
    with pytest.raises(spmd.errors.ReplicationError, match=r'dp="dp", the keyword that says along which axes \{U:dp\}'):
        loss.trace(*structs)
