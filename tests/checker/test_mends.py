"""What messages offer: each line `fix:` is run, and gives the right numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

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
