"""Mistakes that no rule about one primitive can know: `spmd.check` finds each by its numbers, and passes its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd

DP = spmd.make_mesh(dp=4)
BOTH = spmd.make_mesh(dp=2, tp=4)


def shifted(x: Any, by: int) -> Any:
    """The value of the device `by` places before this one, of as many as the mesh has."""
    n = lax.axis_size("dp")
    return lax.ppermute(x, "dp", [(i, (i + by) % n) for i in range(n)])


class Pair(NamedTuple):
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    args: tuple[Any, ...]


def struct(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel(pattern: str, fn: Callable[..., Any], mesh: Any = DP) -> Any:
    return spmd.kernel(pattern, mesh=mesh)(fn)


# --- halos by hand -----------------------------------------------------------------------------------------------


# --- rings -------------------------------------------------------------------------------------------------------


def ring_attention(rescaled: bool) -> Any:
    """Softmax over keys that arrive block by block. The sums so far must follow the largest score."""

    def body(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.T
        peak = scores.max(1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total, mixed = weights.sum(1, keepdims=True), weights @ v
        for _ in range(lax.axis_size("dp") - 1):
            k, v = shifted((k, v), 1)
            scores = q @ k.T
            largest = jnp.maximum(peak, scores.max(1, keepdims=True))
            weights, factor = jnp.exp(scores - largest), jnp.exp(peak - largest) if rescaled else 1.0
            total, mixed = total * factor + weights.sum(1, keepdims=True), mixed * factor + weights @ v
            peak = largest
        return mixed / total

    return kernel("q/dp d, k/dp d, k/dp d -> q/dp d", body)


# --- numbers that are a device's own -----------------------------------------------------------------------------


# --- caches ------------------------------------------------------------------------------------------------------


def appended(guarded: bool) -> Any:
    """A cache divided by position: JAX clamps a write past this device's block to its last place."""

    def body(cache: Any, row: Any, at: Any) -> Any:
        n = cache.shape[0]
        here = at - lax.axis_index("dp") * n
        written = lax.dynamic_update_slice(cache, row[None], (here, 0))
        return jnp.where((here >= 0) & (here < n), written, cache) if guarded else written

    return kernel("s/dp d, d, scalar -> s/dp d", body)


# --- gradients ---------------------------------------------------------------------------------------------------


def decayed(every: bool) -> Any:
    """A scan over a divided sequence, block by block in a ring: the state before a block is decayed by the block."""

    def body(x: Any) -> Any:
        own = lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.full_like(x, 0.5), x))
        last = spmd.all_gather(own[1][-1:], "c/dp -> c")
        n, here = x.shape[0], lax.axis_index("dp")
        before = sum(
            jnp.where(i < here, last[i] * (0.5 ** (n * (here - 1 - i).astype(x.dtype)) if every else 1.0), 0.0)
            for i in range(lax.axis_size("dp"))
        )
        return own[1] + own[0] * before

    return kernel("s/dp -> s/dp", body)


# --- numbers beside which others are small ------------------------------------------------------------------------


def masked(whole: bool, number: float) -> Any:
    """Scores with a bias, which no gradient shows. A mask puts a large number in place of some of them."""

    def body(x: Any) -> Any:
        scores = x + jnp.log(1.0 * (spmd.size("b") if whole else x.shape[0]))
        return jnp.where(jnp.arange(4) > 1, number, scores)

    return kernel("b/dp d -> b/dp d", body)


SQUARE = (struct(8, 4),)
MASKS = {"-1e9": -1e9, "the least float32": float(jnp.finfo(jnp.float32).min)}
PAIRS: dict[str, Pair] = {
    "sums of a ring not rescaled": Pair(ring_attention(True), ring_attention(False), (struct(8, 4),) * 3),
    "a cache written past its block": Pair(appended(True), appended(False), (struct(8, 4), struct(4), np.int32(5))),
    "a state without its decay": Pair(decayed(True), decayed(False), (struct(16),)),
    **{f"scores beside {name}": Pair(masked(True, x), masked(False, x), SQUARE) for name, x in MASKS.items()},
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_right_one_passes(name: str) -> None:
    found = spmd.check(PAIRS[name].right, *PAIRS[name].args)
    assert not found and found.verdict.kind in ("proved", "tested"), found


@pytest.mark.parametrize("name", PAIRS)
def test_the_wrong_one_is_wrong(name: str) -> None:
    found = spmd.check(PAIRS[name].wrong, *PAIRS[name].args)
    assert found and found.verdict.kind == "wrong", found.verdict


# --- a raw shard_map, which has a mesh of its own ------------------------------------------------------------------


def contrastive(shift: bool, pairs: bool = False):
    """A loss over pairs, whose labels begin anew on each device without `shift`."""

    def fn(a, b):
        scores = jax.nn.log_softmax(a @ lax.all_gather(b, "dp", tiled=True).T)
        labels = jnp.arange(len(a)) + (lax.axis_index("dp") * len(a) if shift else 0)
        told = scores[jnp.arange(len(a)), labels] if pairs else jnp.take_along_axis(scores, labels[:, None], 1)
        return -lax.pmean(told.mean(), "dp")

    mesh = spmd.make_mesh(dp=4)
    return jax.shard_map(fn, mesh=mesh, in_specs=(jax.P("dp"), jax.P("dp")), out_specs=jax.P())


def whole_loss(a, b):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(a @ b.T)))


EMBEDDED = jax.ShapeDtypeStruct((8, 3), "float32")


@pytest.mark.parametrize("shift", [True, False])
def test_a_reference_decides_about_a_raw_body(shift):
    untold = spmd.check(contrastive(shift), EMBEDDED, EMBEDDED)
    assert untold.verdict.kind == "not tested" and "reference= or build=" in str(untold.verdict)
    found = spmd.check(contrastive(shift), EMBEDDED, EMBEDDED, reference=whole_loss)
    assert found.verdict.kind == ("proved" if shift else "wrong"), found
    if not shift:
        assert [one.kind for one in found] == ["numbers"] and "- result: " in str(found)


def test_places_in_a_block_may_stand_beside_places_in_the_whole():
    """Each row of a block, and the label of it that goes on from block to block: both are only numbers."""
    assert not spmd.check(contrastive(True, pairs=True), EMBEDDED, EMBEDDED)
    told = spmd.check(contrastive(True, pairs=True), EMBEDDED, EMBEDDED, reference=whole_loss)
    assert not told and told.verdict.kind == "tested"


def test_a_reference_decides_about_a_kernel():
    kernel = spmd.kernel("b/dp d -> d", mesh=spmd.make_mesh(dp=4))(lambda x: spmd.reduce(x, "b/dp d -> d", "mean"))
    rows = jax.ShapeDtypeStruct((8, 3), "float32")
    assert spmd.check(kernel, rows, reference=lambda x: x.mean(0)).verdict.kind == "proved"
    assert spmd.check(kernel, rows, reference=lambda x: x.sum(0)).verdict.kind == "wrong"
    other = spmd.check(kernel, rows, reference=lambda x: x.mean())
    assert str(other.verdict) == "no findings: not tested. reference= has results of another structure or shape"


# --- what numbers cannot judge alone ---------------------------------------------------------------------------


def dropout(key, x):
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("dp")), 0.5, x.shape), x, 0.0)


def test_noise_of_each_device_depends_on_the_mesh_by_intent():
    """As the message about equal noise advises. Mistakes beside it are found with one number in place of all."""
    rows = jax.ShapeDtypeStruct((8, 3), "float32")
    body = kernel("k, b/dp d -> b/dp d", lambda key, x: dropout(jax.random.wrap_key_data(key), x))
    words = jax.ShapeDtypeStruct((2,), "uint32")
    told = spmd.check(body, words, rows)
    assert not told and told.verdict.kind == "tested"
    assert "with one number in place of all random ones, which depend on the mesh" in str(told.verdict)
    assert np.isfinite(body(jnp.array([0, 7], jnp.uint32), jnp.ones((8, 3)))).all()
    summed = kernel("k, b/dp d -> d", lambda key, x: dropout(jax.random.wrap_key_data(key), x).sum(0))
    [finding] = spmd.check(summed, words, rows)
    assert finding.kind == "layout" and finding.certain
    mean = lambda key, x: lax.psum(dropout(jax.random.wrap_key_data(key), x).mean(), "dp")
    [finding] = spmd.check(kernel("k, b/dp d -> scalar", mean), words, rows)
    assert finding.kind == "numbers" and "4 times too large" in str(finding)


OWN = lambda: jax.random.fold_in(jax.random.key(3), lax.axis_index("dp"))


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: jax.random.gamma(OWN(), 2.0, x.shape),
        lambda x: jax.random.normal(jax.random.split(OWN(), 3)[1], x.shape),
        lambda x: jax.random.categorical(OWN(), x)[:, None].astype(x.dtype),
        lambda x: jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(OWN(), x.shape[0])),
        lambda x: jax.random.randint(OWN(), x.shape, 2, 9).astype(x.dtype),
    ],
)
def test_any_noise_of_each_device_is_told_from_a_mistake(noise):
    rows = jax.ShapeDtypeStruct((8, 3), "float32")
    right = kernel("b/dp d -> b/dp d", lambda x: x * noise(x))
    wrong = kernel("b/dp d -> b/dp d", lambda x: x * noise(x) / x.shape[0])
    assert spmd.check(right, rows).verdict.kind == "tested"
    assert [one.kind for one in spmd.check(wrong, rows)] == ["numbers"]


def test_a_draw_that_waits_for_a_number_is_not_tested():
    """Poisson's loop draws until a number is accepted, and one number for all may never be."""

    def body(x):
        draw = lambda words, x: jax.random.poisson(jax.random.wrap_key_data(words[0]), 30.0, x.shape).astype(x.dtype)
        return x * spmd.opaque(draw, "n/dp w, b/dp d -> b/dp d")(jax.random.key_data(OWN())[None], x)

    told = spmd.check(kernel("b/dp d -> b/dp d", body), jax.ShapeDtypeStruct((8, 3), "float32"))
    assert not told and "its random numbers depend on the mesh" in str(told.verdict)


def test_types_that_are_hidden_are_not_a_mistake():
    """What a derivative keeps of opaque code differs, and JAX is not told."""
    rows = jax.ShapeDtypeStruct((8,), "float32")
    for fn in (jnp.exp, lambda x: jax.scipy.special.expi(x**2 + 0.1)):
        told = spmd.check(kernel("b/dp -> b/dp", lambda x, fn=fn: spmd.opaque(fn, "b/dp -> b/dp")(x)), rows)
        assert not told and "results and gradients are those of one device" in str(told.verdict)
    summed = kernel(
        "b/dp -> scalar",
        lambda x: lax.psum(spmd.opaque(lambda x: jnp.sin(x).mean()[None], "b/dp -> one/dp")(x)[0], "dp"),
    )
    assert [one.kind for one in spmd.check(summed, rows)] == ["numbers"]


def test_the_arguments_themselves_are_compared_too():
    """Random numbers have no ties: a draw is given some, because `argmax` decides by them."""

    def last(x):  # of equal maxima the last device's, and jnp.argmax takes the first
        most = lax.pmax(x.max(), "dp")
        here = jnp.where(x.max() == most, x.argmax() + lax.axis_index("dp") * len(x), -1)
        return lax.pmax(here, "dp")

    argmax, x = kernel("n/dp -> scalar", last), jnp.array([1.0, 5, 2, 3, 0, 1, 5, 2])
    assert argmax(x) == 6
    for given in (jax.ShapeDtypeStruct(x.shape, x.dtype), x):
        [finding] = spmd.check(argmax, given)
        assert finding.kind == "numbers"


def test_a_verdict_counts_the_findings_that_may_be_meant():
    raw = jax.shard_map(jnp.sort, mesh=DP, in_specs=jax.P("dp"), out_specs=jax.P("dp"))
    found = spmd.check(raw, jax.ShapeDtypeStruct((8,), "float32"))
    assert len(found) == 1 and str(found.verdict).startswith("meant per shard? 1 finding: not tested. ")
