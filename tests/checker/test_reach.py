"""Which sides of choices draws take, which draws are made for those that are left, and what a verdict says of the rest."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.errors import ReplicationError

ROWS = jax.ShapeDtypeStruct((8, 4), "float32")
COUNT = jax.ShapeDtypeStruct((), "int32")


def verdict(body: Any, *args: Any, pattern: str = "n/dp d -> n/dp d", **how: Any) -> Any:
    return spmd.check(spmd.kernel(pattern, mesh=spmd.make_mesh(dp=4))(body), *args, **how).verdict


@pytest.mark.parametrize(
    ("name", "choice"),
    {
        "select": lambda x: jnp.where(x > 100.0, x, -x),
        "cond": lambda x: lax.cond(lax.psum(x.sum(), "dp") > 1e3, jnp.sin, jnp.cos, x),
        "bounds": lambda x: jnp.clip(x, -50.0, 50.0),
        "largest": lambda x: jnp.maximum(x, 30.0),
        "whole numbers": lambda x: jnp.floor(x / 1e3),
        "remainder": lambda x: jnp.remainder(x, 1e3),
        "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
        "sign of squares": lambda x: x * jnp.sign(x * x),
        "ties": lambda x: x * jnp.argmax(x, 1)[:, None].astype(x.dtype),
        "conversion": lambda x: (1e3 * x).astype(jnp.int32).astype(jnp.int8).astype(x.dtype),
        "a relu with its gradient": lambda x: jax.nn.relu(x - 1e2),
        "softmax": lambda x: jax.nn.softmax(x, axis=1),
        "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
    }.items(),
)
def test_each_kind_of_choice_is_driven_to_all_its_sides(name: str, choice: Any) -> None:
    found = verdict(choice, ROWS)
    assert found.kind == "proved", f"{name}: {found}"


@pytest.mark.parametrize(
    "choice",
    [
        lambda x: jnp.where(jnp.argmax(x, 1) < 0, 0.0, 1.0)[:, None] * x,
        lambda x: jnp.where(jnp.exp(x) < 0, 0.0, x),
        lambda x: jnp.where(jnp.arange(4) > 100, 0.0, x),
        lambda x: jnp.maximum(lax.stop_gradient(x), -jnp.inf) + x,
    ],
)
def test_a_side_that_no_number_takes_is_not_asked_for(choice: Any) -> None:
    assert verdict(choice, ROWS).kind == "proved"


def test_a_side_that_stays_open_is_named() -> None:
    found = verdict(
        lambda x, step: jnp.where(step * step == 77, 0 * x, x), ROWS, COUNT, pattern="n/dp d, scalar -> n/dp d"
    )
    assert found.kind == "tested"
    assert found.unreached[0].startswith("the other side of eq at tests/checker/test_reach.py:")
    assert str(found).startswith("no findings: tested, but for the other side of eq at ")
    assert found.to_dict()["unreached"] == list(found.unreached)


def hidden(x: Any, step: Any) -> Any:
    """Each device looks at its own block, and does so at a step that no draw comes to."""
    return jnp.where((step * step == 77) & (x.sum() > 0), -x, x)


def test_a_suspicion_that_hangs_on_such_a_side_is_loud() -> None:
    kernel = spmd.kernel("n/dp d, scalar -> n/dp d", mesh=spmd.make_mesh(dp=4))(hidden)
    findings = spmd.check(kernel, ROWS, COUNT)
    assert findings and not any(one.certain for one in findings) and findings.verdict.kind == "tested"
    assert str(findings.verdict).startswith("meant per shard? 1 finding: tested, but for ")
    with pytest.raises(ReplicationError):
        spmd.check(kernel, ROWS, COUNT, strict=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kernel(np.ones((8, 4), np.float32), np.int32(3))
    assert any("no draw shows" in str(one.message) for one in warned)


@pytest.mark.parametrize(
    "decides",
    [
        lambda x: x * (x.sum() > 0).astype(x.dtype),
        lambda x: jnp.where(x.sum() > 0, x, 0),
        lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: x / 2, x),
    ],
)
def test_a_shard_of_zeros_does_not_show_that_devices_may_decide_differently(decides: Any) -> None:
    """Of zeros every decision makes zeros. Positive numbers do not tell, and the call is not silent."""
    x = np.abs(np.random.default_rng(0).normal(size=(8, 4))).astype(np.float32)
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2, tp=4))(decides)
    with pytest.raises((ReplicationError, UserWarning), match="take gt after the sum is complete"):
        kernel(x)
    whole = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2, tp=4))(
        lambda x: x * (spmd.reduce(x, "b/dp d -> scalar") > 0).astype(x.dtype)
    )
    assert spmd.check(whole, x).verdict.kind in ("proved", "tested")
    np.testing.assert_array_equal(whole(x), x)


def test_scores_of_minus_infinity_stay_so_in_draws(recwarn: pytest.WarningsRecorder) -> None:
    """Given numbers are changed for a draw, and NumPy warns of nothing."""
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    x[:, 6:] = -np.inf
    kernel = spmd.kernel("b/dp v -> b/dp", mesh=spmd.make_mesh(dp=2))(lambda x: jax.nn.logsumexp(x, 1))
    assert spmd.check(kernel, x).verdict.kind in ("proved", "tested") and not recwarn.list


def test_a_branch_may_have_no_results() -> None:
    def body(x: Any) -> Any:
        lax.cond(lax.psum(x.sum(), "dp") > 0, lambda: None, lambda: None)
        return x

    assert verdict(body, ROWS).kind == "proved"


def test_what_is_meant_per_shard_is_not_asked_for() -> None:
    def body(x: Any, step: Any) -> Any:
        with spmd.per_shard("each block decides for itself"):
            return hidden(x, step)

    found = verdict(body, ROWS, COUNT, pattern="n/dp d, scalar -> n/dp d")
    assert found.kind in ("tested", "proved") and not found.uncertain


@pytest.mark.parametrize("wrong", [False, True])
def test_a_mesh_of_unequal_axes_tells_the_size_of_one_from_that_of_another(wrong: bool) -> None:
    def mean(x: Any) -> Any:
        return lax.psum(x.sum(0), "dp") / (x.shape[0] * lax.axis_size("tp" if wrong else "dp"))

    kernel = spmd.kernel("b/dp d/tp -> d/tp", mesh=spmd.make_mesh(dp=2, tp=2))(mean)
    findings = spmd.check(kernel, jax.ShapeDtypeStruct((12, 12), "float32"))
    assert bool(findings) == wrong, str(findings)


def test_a_result_that_is_always_the_same_is_no_evidence() -> None:
    found = verdict(lambda x: 0.0 * jnp.tanh(x), ROWS)
    assert found.kind == "tested" and "numbers of result, which are" in " ".join(found.unreached)


def test_a_captured_array_of_zeros_is_named() -> None:
    bias = jnp.zeros(4)
    found = verdict(lambda x: x + bias[None], ROWS)
    assert found.kind == "tested" and "a captured array, which is one number: float32[4]" in found.unreached[0]


def test_a_tolerance_is_that_of_the_caller() -> None:
    kernel = spmd.kernel("n/dp d -> n/dp d", mesh=spmd.make_mesh(dp=4))(lambda x: x * (1 + 1e-4))
    assert spmd.check(kernel, ROWS, reference=lambda x: x).verdict.kind == "wrong"
    assert spmd.check(kernel, ROWS, reference=lambda x: x, rtol=1e-3).verdict.kind == "proved"


def test_a_test_of_all_meshes_fails_on_it_too() -> None:
    """All meshes agree on the draws, and after an overflow training differs."""
    mesh = spmd.make_mesh(dp=4)
    made = spmd.kernel("n/dp d, scalar -> n/dp d", mesh=mesh)
    with pytest.raises(spmd.testing.Mismatch, match="(?s)a mistake may hide.*no draw shows"):
        spmd.testing.assert_same_on_any_mesh(made(hidden), ROWS, COUNT)
    spmd.testing.assert_same_on_any_mesh(made(lambda x, count: jnp.where(count > 3, x, 2 * x)), ROWS, COUNT)


def places_of_the_largest(x: Any) -> Any:
    """In two phases: the largest of each block, and of these."""
    values, at = lax.top_k(x, 2)
    at = at + spmd.axis_index("dp") * x.shape[-1]
    values, at = spmd.all_gather(values, "b k/dp -> b k"), spmd.all_gather(at, "b k/dp -> b k")
    return jnp.take_along_axis(at, lax.top_k(values, 2)[1], axis=1)


def test_places_of_a_top_k_are_not_negative() -> None:
    """So no draw has to show what a negative place gives, and no suspicion hangs on that."""
    made = spmd.kernel("b v/dp -> b k", mesh=spmd.make_mesh(dp=2))(places_of_the_largest)
    assert not spmd.check(made, ROWS)
    made.trace(ROWS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_number_that_is_driven_beyond_its_type_warns_of_nothing(dtype: str) -> None:
    body = lambda x: jnp.where(x.astype(jnp.float32) > 1e30, 0 * x, x)
    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=4))(body)
    assert spmd.check(kernel, jax.ShapeDtypeStruct((8, 4), dtype)).verdict.kind == "proved"


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("length", [3, 5, 40])
def test_a_verdict_says_how_many_rounds_were_compared(length: int, ring: bool) -> None:
    """As many as blocks need to go round, and three more."""

    def body(x):
        before = lambda x: jnp.concatenate([spmd.shift(x[-1:], "[k/dp] d", 1), x[:-1]]) if ring else x
        return lax.scan(lambda x, _: (0.9 * x + 0.1 * before(x), None), x, None, length=length)[0]

    kernel = spmd.kernel("b/dp d -> b/dp d", mesh=spmd.make_mesh(dp=2))(body)
    verdict = str(spmd.check(kernel, jax.ShapeDtypeStruct((8, 4), "float32")).verdict)
    rounds = 3 + 2 + 4 if ring else 3  # of two devices, and of a block of four rows, in which rows move
    assert (f" in {rounds} of {length} rounds of its loops" in verdict) == (rounds < length), verdict
