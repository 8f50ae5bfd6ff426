"""`top_k` along whole and divided dimensions."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from spmd.inspect import collectives
from spmd.modes import MODES
from spmd.ops import top_k
from tests import simulator
from tests.ops.harness import backward_counts, close, make_mesh, mapped_and_scanned, pulled, run, spec
from tests.ops.harness import tally as compiled_counts
from tests.sampler import Sampler, share

MESH = {"dp": 2, "tp": 4}


def without(layout: str, name: str) -> str:
    """The layout of the results: the dimension is whole."""
    return " ".join("k" if w.split("/")[0] == name else w for w in layout.split())


@pytest.mark.parametrize("layout", share(["b/dp [e/tp]", "b [e/tp/dp]", "[e/tp] b/dp", "b/dp [e]"]))
@pytest.mark.parametrize("k", share([1, 3, 7]))
def test_values_positions_and_gradients_in_every_mode(layout: str, k: int) -> None:
    plain = layout.replace("[", "").replace("]", "")
    (axis,) = simulator.bracketed(layout)
    x = jnp.asarray(Sampler(k).array((4, 16) if axis else (16, 4), whole=False))
    out = without(plain, "e")
    expected = jnp.moveaxis(jax.lax.top_k(jnp.moveaxis(x, axis, -1), k)[0], -1, axis)
    weights = jnp.asarray(Sampler(9).array(expected.shape, whole=False))

    def plainly(x):
        values, places = jax.lax.top_k(jnp.moveaxis(x, axis, -1), k)
        return jnp.moveaxis(values * (1 + places).astype(x.dtype), -1, axis)

    for mode in MODES if k == 3 else ("explicit", "reference"):

        def body(x):
            values, places = top_k(x, layout, k)
            return values * (1 + places).astype(values.dtype)

        fn = run(body, MESH, [plain], out, mode)
        jax.tree.map(close, pulled(fn, x, by=weights), pulled(plainly, x, by=weights))


@pytest.mark.parametrize("dtype", share(["float32", "bfloat16", "int8", "uint32", "bool"]))
def test_ties_infinities_and_dtypes_are_those_of_lax(dtype: str) -> None:
    rows = [[1, 3, 2, 3, 3, 0, 1, 2], [0] * 8, [5, 1, 1, 1, 1, 1, 1, 5], [0, 0, 0, 0, 0, 1, 1, 1]]
    if dtype.startswith(("float", "bfloat")):
        nan, inf = float("nan"), float("inf")
        rows += [[1, 2, inf, 3, nan, inf, nan, 1], [-1, -0.0, -2, 0.0, 0.0, -1, 0, -1], [-inf] * 8]
    x = jnp.asarray(rows).astype(dtype)
    expected = jax.lax.top_k(x, 5)
    for mode, v in itertools.product(("explicit", "reference"), ("v/tp", "v/tp/dp")):  # ties over two axes, too
        fn = run(lambda x, v=v: top_k(x, f"b [{v}]", 5), MESH, [f"b {v}"], ["b k", "b k"], mode)
        jax.tree.map(close, tuple(fn(x)), tuple(expected))


@pytest.mark.parametrize(("k", "candidates"), share([(1, 1), (3, 3), (7, 4)]))
def test_it_costs_the_candidates_of_the_others(k: int, candidates: int) -> None:
    """Each device sends its min(k, local) best: their values and their positions. Backward costs nothing."""
    x = jnp.ones((6, 16))
    body = lambda x: tuple(top_k(x, "b/dp [v/tp]", k))
    fn = run(body, MESH, ["b/dp v/tp"], ["b/dp k"] * 2)
    found = collectives(fn.lower(x).compile(), mesh=make_mesh(MESH))
    assert compiled_counts(fn.lower(x).compile(), MESH) == {"all_gather tp": 2}
    assert sum(one.total_bytes for one in found) == 3 * candidates * (4 - 1) * (4 + 4)
    values_only = lambda x: top_k(x, "b/dp [v/tp]", k)[0]  # positions that nobody asks for are not gathered
    assert backward_counts(values_only, MESH, ["b/dp v/tp"], "b/dp k", x) == {"all_gather tp": 1}
    whole = run(lambda x: top_k(x, "b/dp [v]", k)[0], MESH, ["b/dp v"], "b/dp k")
    assert compiled_counts(whole.lower(x).compile(), MESH) == {}


def test_under_vmap_scan_and_remat() -> None:
    def one(row):
        values, places = top_k(row, "[s/tp]", 2)
        return values * places.astype(values.dtype)

    def plain(x):
        values, places = jax.lax.top_k(x, 2)
        return 2 * values * places.astype(x.dtype)

    x = jnp.asarray(Sampler(10).array((3, 8), whole=False))
    fn = run(mapped_and_scanned(one), MESH, ["t s/tp"], "t k")
    jax.tree.map(close, pulled(fn, x), pulled(plain, x))


def test_the_comparison_can_fail() -> None:
    """The k best of each device's own block, taken for those of all, are noticed."""

    def wrong(x):
        values, _ = jax.lax.top_k(x, 2)
        return values

    mapped = jax.shard_map(wrong, mesh=make_mesh(MESH), in_specs=spec("b v/tp"), out_specs=spec("b k/tp"))
    x = jnp.arange(16.0).reshape(2, 8)
    with pytest.raises(AssertionError):
        close(mapped(x)[:, :2], jax.lax.top_k(x, 2)[0])
