"""`softmax`, `argmax`, `cumsum` along divided dimensions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd.modes import MODES
from spmd.ops import argmax, argmin, argsort, cumsum, reduce, softmax
from tests.ops.harness import backward_counts, close, counts, mapped_and_scanned, pulled, run
from tests.sampler import Sampler, mixed, rare, seeds, share

MESH = {"dp": 2, "tp": 4}


def bracket(layout: str, *names: str) -> str:
    """The layout with brackets around some of its dimensions."""
    return " ".join(f"[{w}]" if w.split("/")[0] in names else w for w in layout.split())


# --- softmax ------------------------------------------------------------------------------------------------


def test_an_axis_of_one_device_that_leaves_is_left_invarying() -> None:
    """JAX types a block along an axis of size 1 varying; a result whose layout lacks the axis could not leave."""
    x = jnp.asarray([[1.0, 3.0, 2.0, 0.0], [5.0, 4.0, 6.0, 7.0]])
    close(run(lambda x: argmax(x, "a [b/r]"), {"r": 1}, ["a b/r"], "a")(x), jnp.argmax(x, 1))


@pytest.mark.parametrize("layout", share(["[b/dp] [k/tp]", "b/dp [k/tp]", "[(b k)/tp/dp]"]))
def test_softmax_has_the_gradient_of_the_whole(layout: str) -> None:
    plain = layout.replace("[", "").replace("]", "")
    x = jnp.asarray(Sampler(1).array((16,) if "(" in layout else (4, 8), whole=False))
    weights = jnp.asarray(Sampler(2).array(x.shape, whole=False))
    known = {"k": 2} if "(" in layout else {}
    found = []
    for mode in ("explicit", "reference"):
        fn = run(lambda x: softmax(x, layout, **known), MESH, [plain], plain, mode)
        tangent = jax.jit(lambda x, fn=fn: jax.jvp(fn, (x,), (weights,))[1])(x)
        found.append((pulled(fn, x, by=weights), tangent))
    jax.tree.map(lambda a, b: close(a, b, 1e-5), *found)


def test_softmax_costs_a_maximum_and_a_sum() -> None:
    x = jnp.ones((4, 8))
    body = lambda x: softmax(x, "b/dp [k/tp]")
    assert counts(body, MESH, ["b/dp k/tp"], "b/dp k/tp", x) == {"psum tp": 2}
    assert backward_counts(body, MESH, ["b/dp k/tp"], "b/dp k/tp", x) == {"psum tp": 3}
    assert counts(lambda x: softmax(x, "[b/dp] k", dp=None), MESH, ["b k/tp"], "b k/tp", x) == {}


@pytest.mark.parametrize("broadcast", [False, True])
def test_softmax_with_a_mask(broadcast: bool) -> None:
    """A row that is masked everywhere has probabilities and a gradient of zero, as in JAX."""
    x = jnp.asarray(Sampler(3).array((4, 8), whole=False))
    mask = jnp.asarray(Sampler(4).rng.random((4, 1 if broadcast else 8)) < 0.6).at[0].set(False)
    ins = ["b k/tp", "b 1" if broadcast else "b k/tp"]
    found = []
    for mode in ("explicit", "reference"):
        fn = run(lambda x, m: softmax(x, "b [k/tp]", where=m), MESH, ins, "b k/tp", mode)
        value, (gradient,) = pulled(fn, x, mask)
        found.append((value, gradient))
    jax.tree.map(close, *found)
    assert not np.isnan(found[0][1]).any()
    assert (found[0][0][0] == 0).all()


def test_softmax_of_large_values_and_in_all_modes() -> None:
    x = jnp.asarray([[1e4, 0, 1e4, 0, 0, 0, 0, 1e4], [-jnp.inf] * 7 + [1.0]])
    for mode in MODES:
        close(run(lambda x: softmax(x, "b [k/tp]"), MESH, ["b k/tp"], "b k/tp", mode)(x), jax.nn.softmax(x))


@pytest.mark.parametrize("seed", seeds(12))
def test_softmax_of_masked_rows_is_that_of_jax(seed: int) -> None:
    """Rows with -inf, of nothing else, and with NaN; with and without a mask, whose elements take no part."""
    sampler = Sampler(seed)
    layout = sampler.choice(["b [k]", "b [k/tp]", "b [k/tp/dp]", "[b] [k/dp]"])
    x, _ = sampler.scores(8)
    mask = sampler.choice([None, sampler.rng.random(x.shape) < 0.5])
    dtype = sampler.choice([jnp.float32, jnp.bfloat16])
    x, weights = x.astype(dtype), np.cos(np.arange(x.size)).reshape(x.shape).astype(dtype)
    if "[b]" in layout:  # all rows are one
        x, weights, mask = x[:1], weights[:1], None if mask is None else mask[:1]
    dims = (0, 1) if "[b]" in layout else 1
    wanted = pulled(lambda x: jax.nn.softmax(x, dims, where=mask), x, by=weights)
    plain = layout.replace("[", "").replace("]", "")
    given = [x] if mask is None else [x, mask]
    body = lambda x, *mask: softmax(x, layout, where=mask[0] if mask else None)
    for mode in MODES:
        found = pulled(run(body, MESH, [plain] * len(given), plain, mode), *given, by=weights)
        jax.tree.map(lambda a, b: close(a, b, 1e-5 if dtype == jnp.float32 else 2e-2), found, wanted)


# --- argmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", share(["float32", "bfloat16", "float16", "int8", "uint32", "bool"]))
def test_argmax_is_that_of_numpy_for_ties_nans_and_signed_zeros(dtype: str) -> None:
    rows = [
        [1, 3, 2, 3, 3, 0, 1, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [5, 1, 1, 1, 1, 1, 1, 5],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]
    if dtype.startswith(("float", "bfloat")):
        nan, inf = float("nan"), float("inf")
        rows += [
            [1, 2, inf, 3, nan, inf, nan, 1],
            [-1, -0.0, -2, 0.0, 0.0, -1, 0, -1],
            [-5, -1, -3, -1, -2, -8, -9, -1],
            [-inf] * 8,
        ]
    x = jnp.asarray(rows).astype(dtype)
    for ours, theirs in ((argmax, jnp.argmax), (argmin, jnp.argmin)):
        for mode, v in itertools.product(MODES, ("v/tp", "v/tp/dp")):
            found = run(lambda x, ours=ours, v=v: ours(x, f"b [{v}]"), MESH, [f"b {v}"], "b", mode)(x)
            close(found, theirs(x, axis=1).astype(jnp.int32))


def test_argmax_over_two_axes_with_the_result_spelled_out() -> None:
    x = jnp.asarray(Sampler(5).array((3, 2, 16), whole=False))
    for mode in MODES:
        fn = run(lambda x: argmax(x, "a b [v/tp/dp] -> b a"), MESH, ["a b v/tp/dp"], "b a", mode)
        close(fn(x), jnp.argmax(x, axis=2).astype(jnp.int32).T)
    assert counts(lambda x: argmax(x, "a b [v/tp/dp]"), MESH, ["a b v/tp/dp"], "a b", x) == {"psum dp,tp": 2}


def test_argmin_has_no_gradient_and_sends_what_argmax_does() -> None:
    x = jnp.asarray(Sampler(7).array((2, 8), whole=False))
    fn = run(lambda x: x * argmin(x, "b [v/tp]")[:, None].astype(x.dtype), MESH, ["b v/tp"], "b v/tp")
    close(jax.grad(lambda x: fn(x).sum())(x), jnp.broadcast_to(jnp.argmin(x, 1)[:, None], x.shape).astype(x.dtype))
    assert counts(lambda x: argmin(x, "b [v/tp]"), MESH, ["b v/tp"], "b", x) == {"psum tp": 2}
    mapped = run(jax.vmap(lambda x: argmin(x, "[v/tp]")), MESH, ["b v/tp"], "b")
    close(mapped(x), jnp.argmin(x, 1).astype(jnp.int32))


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
@rare
def test_numbers_have_the_types_of_jnp_under_x64(dtype: str) -> None:
    """Whole and divided."""
    with jax.enable_x64(True):
        x = jnp.asarray(Sampler(8).array((8,)), "float32").astype(dtype)
        calls = [
            (lambda x: argmax(x, "[v/tp]"), jnp.argmax, "scalar"),
            (lambda x: argmin(x, "[v/tp]"), jnp.argmin, "scalar"),
            (lambda x: argsort(x, "[v/tp]"), jnp.argsort, "v/tp"),
            (lambda x: cumsum(x, "[v/tp]"), jnp.cumsum, "v/tp"),
            (lambda x: reduce(x, "v/tp -> scalar", "mean"), jnp.mean, "scalar"),
            (lambda x: reduce(x, "v/tp -> scalar", "sum"), jnp.sum, "scalar"),
            (lambda x: reduce(x, "v/tp -> scalar", "logsumexp"), jax.nn.logsumexp, "scalar"),
            *([] if dtype == "bool" else [(lambda x: softmax(x, "[v/tp]"), jax.nn.softmax, "v/tp")]),
        ]
        for ours, theirs, out in calls:
            for mode in ("explicit", "reference"):
                found, wanted = run(ours, MESH, ["v/tp"], out, mode)(x), theirs(x)
                assert found.dtype == wanted.dtype
                np.testing.assert_allclose(found, wanted, 1e-5)


def test_softmax_and_logsumexp_of_complex_numbers() -> None:
    x = jnp.asarray(Sampler(9).array((3, 8)) + 1j * Sampler(10).array((3, 8)), jnp.complex64)
    total = lambda x: reduce(x, "b v/tp -> b", "logsumexp")
    for ours, theirs, out in (
        (lambda x: softmax(x, "b [v/tp]"), lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), "b v/tp"),
        (total, lambda x: jnp.log(jnp.exp(x).sum(1)), "b"),
    ):
        wanted, gradients = pulled(theirs, x)
        for mode in MODES:
            found, pulls = pulled(run(ours, MESH, ["b v/tp"], out, mode), x)
            close(jnp.exp(found), jnp.exp(wanted), 1e-4)  # a logarithm has many values
            close(pulls[0], gradients[0], 1e-4)


def test_argmax_within_a_differentiated_loss() -> None:
    fn = run(lambda x: x * argmax(x, "b [v/tp]")[:, None].astype(x.dtype), MESH, ["b v/tp"], "b v/tp")
    x = jnp.asarray(Sampler(6).array((2, 8), whole=False))
    close(jax.grad(lambda x: fn(x).sum())(x), jnp.broadcast_to(jnp.argmax(x, 1)[:, None], x.shape).astype(x.dtype))


# --- cumsum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", share(["b [s/tp/dp] d", "b/dp [s/tp] d", "b [s] d/tp"]))
def test_cumsum_and_its_gradient(layout: str, reverse: bool) -> None:
    plain = layout.replace("[", "").replace("]", "")
    x = jnp.asarray(Sampler(7).array((4, 16, 8), whole=False))
    weights = jnp.asarray(Sampler(8).array(x.shape))
    found = []
    for mode in ("explicit", "reference"):
        fn = run(lambda x: cumsum(x, layout, reverse=reverse), MESH, [plain], plain, mode)
        found.append(pulled(fn, x, by=weights))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), *found)


def test_cumsum_costs_the_totals_only() -> None:
    x = jnp.ones((4, 16))
    body = lambda x: cumsum(x, "b [s/tp]")
    assert counts(body, MESH, ["b s/tp"], "b s/tp", x) == {"all_gather tp": 1}
    assert backward_counts(body, MESH, ["b s/tp"], "b s/tp", x) == {"all_gather tp": 1, "psum_scatter tp": 1}


def test_cumsum_with_x64() -> None:
    """What tells the blocks before this one from the others has 32 bits there, too."""
    with jax.enable_x64(True):
        close(run(lambda x: cumsum(x, "[s/tp]"), MESH, ["s/tp"], "s/tp")(np.arange(8.0)), np.cumsum(np.arange(8.0)))


def test_cumsum_dtypes_and_partial_sums() -> None:
    for dtype in ("bool", "int8", "bfloat16", "complex64"):
        x = jnp.ones((2, 8), dtype)
        fn = run(lambda x: cumsum(x, "b [s/tp]"), MESH, ["b s/tp"], "b s/tp")
        close(fn(x), jnp.cumsum(x, axis=1))
    x = jnp.asarray(Sampler(9).array((2, 8)))
    fn = run(lambda x: cumsum(x, "b [s/tp] {U:dp}"), MESH, ["b s/tp {U:dp}"], "b s/tp {U:dp}")
    close(fn(x), jnp.cumsum(x, axis=1))


@pytest.mark.parametrize(("shape", "reverse"), share(mixed([(0, 3), (8, 0), (0, 0)], [False, True])))
def test_cumsum_of_no_elements(shape: tuple[int, int], reverse: bool) -> None:
    """In a kernel, so that the checker looks at it too."""
    for dtype, mode in itertools.product(("float32", "bool"), MODES):
        x = np.zeros(shape, dtype)
        fn = run(lambda x: cumsum(x, "[s/tp] d", reverse=reverse), MESH, ["s/tp d"], "s/tp d", mode)
        found, wanted = fn(x), jnp.cumsum(x, axis=0)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert jax.grad(lambda x, fn=fn: fn(x).sum())(np.zeros(shape, np.float32)).shape == shape


# --- together -----------------------------------------------------------------------------------------------


def test_under_vmap_scan_and_remat() -> None:
    def one(row):
        shares = softmax(row, "[s/tp]")
        return cumsum(shares, "[s/tp]") + argmax(row, "[s/tp]").astype(row.dtype)

    def plain(row):
        return jnp.cumsum(jax.nn.softmax(row)) + jnp.argmax(row).astype(row.dtype)

    x = jnp.asarray(Sampler(10).array((3, 8), whole=False))
    fn = run(mapped_and_scanned(one), MESH, ["t s/tp"], "t s/tp")
    expected = lambda x: 2 * jax.vmap(plain)(x)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), pulled(fn, x), pulled(expected, x))


def test_the_comparison_can_fail() -> None:
    """A softmax that forgets the other devices is noticed."""
    wrong = run(lambda x: jax.nn.softmax(x, axis=1), MESH, ["b k/tp"], "b k/tp")
    with pytest.raises(AssertionError):
        close(wrong(jnp.ones((2, 8))), jax.nn.softmax(jnp.ones((2, 8))))
