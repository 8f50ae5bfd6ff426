"""`reduce`: values, gradients (ties too), collectives, scalars closed on every axis, errors."""

import functools
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import LayoutError
from spmd.modes import MODES
from spmd.ops import reduce
from tests import simulator
from tests import simulator as sim
from tests.ops.harness import (
    backward_counts,
    close,
    communicates,
    counts,
    frame,
    make_mesh,
    mapped_and_scanned,
    pulled,
    run,
)
from tests.sampler import Sampler, seeds, share

MESH = {"dp": 2, "tp": 4}
OPS = ("sum", "mean", "max", "min", "prod", "any", "all", "logsumexp")


def random_call(sampler: Sampler, op: str) -> tuple[dict[str, int], str]:
    """A mesh, and axes on `b s d -> a subset`, with every fate of a reduced axis."""
    mesh = sampler.mesh()
    kept = [n for n in ("b", "s", "d") if sampler.rng.random() < 0.5]
    sampler.rng.shuffle(kept)
    left: dict[str, list[str]] = {n: [] for n in ("b", "s", "d")}
    right: dict[str, list[str]] = {n: [] for n in kept}
    gained: dict[str, list[str]] = {n: [] for n in kept}
    marked_left, marked_right = [], []
    for axis in mesh:
        place = sampler.choice(["b", "s", "d", "b", "s", "d", "mark", "none"])
        if place == "none" or (place == "mark" and op not in ("sum", "mean")):
            continue
        if place == "mark":
            marked_left.append(axis)
        else:
            left[place].append(axis)
        if place in right:
            right[place].append(axis)
            continue
        fate = sampler.choice(["sum", "left", *kept])
        if fate in right:
            gained[fate].append(axis)
        elif fate == "left" and op in ("sum", "mean"):
            marked_right.append(axis)
    write = lambda parts, marks: (
        " ".join([*("/".join([n, *a]) for n, a in parts.items()), *([f"{{U:{','.join(marks)}}}"] if marks else [])])
        or "scalar"
    )
    whole = {n: [*a, *gained[n]] for n, a in right.items()}
    return mesh, f"{write(left, marked_left)} -> {write(whole, marked_right)}"


def draw(sampler: Sampler, op: str, shape: tuple[int, ...], *, whole: bool = True) -> np.ndarray:
    if op in ("any", "all"):
        return sampler.rng.random(shape) < (0.1 if op == "any" else 0.9)
    if op == "prod":
        return sampler.rng.choice([1.0, -1.0, 2.0, 0.5], size=shape).astype("float32")
    dtype = sampler.dtype(kinds="fi" if op in ("sum", "max", "min") else "f") if whole else "float32"
    return sampler.array(shape, dtype, whole=whole)


def _order(inputs: str, output: str) -> list[int]:
    """The kept dimensions in the order of the right side, then the rest."""
    names, kept = simulator.read(inputs).names, simulator.read(output).names
    return [names.index(n) for n in kept] + [i for i, n in enumerate(names) if n not in kept]


def _gone(inputs: str, output: str) -> tuple[int, ...]:
    return tuple(range(len(simulator.read(output).names), len(simulator.read(inputs).names)))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod", "logsumexp"])
@pytest.mark.parametrize("seed", seeds(6))
def test_rows_with_infinities_and_nans_are_those_of_jnp(seed: int, op: str) -> None:
    """But a NaN among devices is an infinity in a maximum, because a compiled maximum of devices drops it."""
    sampler = Sampler(seed)
    left = sampler.choice(["b s", "b s/tp", "b/dp s/tp", "b s/tp/dp"])
    right = left.split()[0]
    x, _ = sampler.scores(8)
    x, weights = x.astype(sampler.dtype(kinds="f")), 1 + np.arange(len(x))
    plain = lambda x: jax.nn.logsumexp(x, axis=1) if op == "logsumexp" else getattr(jnp, op)(x, axis=1)
    value, (gradient,) = pulled(plain, x, by=weights)
    for mode in MODES:
        fn = run(lambda x: reduce(x, f"{left} -> {right}", op), MESH, [left], right, mode)
        found, (moved,) = pulled(fn, x, by=weights)
        told = np.ones(len(x), bool)
        if op in ("max", "min") and mode != "reference" and "s/" in left:
            told = ~np.isnan(x.astype(np.float32)).any(1)
            assert not np.isfinite(found.astype(np.float32)[~told]).any() and not (moved[~told] > 0).any()
        for a, b in ((found, value), (moved, gradient)):
            close(np.asarray(a)[told], np.asarray(b)[told], 1e-5 if x.dtype == np.float32 else 5e-2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["max", "min"])
def test_a_nan_on_one_device_is_heard_in_every_mode(op: str, mode: str) -> None:
    """XLA's own maximum of devices drops it on CPU: that of a body in auto mode too, which calls jnp.max."""
    x = np.array([[1.0, np.nan], [3.0, 4.0], [np.nan, np.nan]], np.float32)
    said = spmd.kernel("b s/tp -> b", mesh=spmd.make_mesh(tp=2))(lambda x: reduce(x, "b s/tp -> b", op))
    plain = spmd.kernel("b s/tp -> b", mesh=spmd.make_mesh(tp=2))(lambda x: getattr(jnp, op)(x, axis=1))
    with spmd.mode(mode):
        found = np.asarray(jax.jit(said)(x))
    assert (np.isfinite(found) == [False, True, False]).all()
    if mode == "auto":  # once this fails, JAX keeps NaN, and what we say of it can go
        assert np.isfinite(np.asarray(jax.jit(plain.auto)(x))[0])


# --- maxima -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_share_the_gradient_over_the_whole_array_in_both_directions(op: str) -> None:
    x = jnp.asarray([[3.0, 1, 3, 3, 0, 3, 1, 0], [0.0, 0, 0, 0, 3, 1, 0, 2]])
    fn = run(lambda x: reduce(x, "b s/tp -> b", op), MESH, ["b s/tp"], "b")
    plain = lambda x: getattr(jnp, op)(x, axis=1)
    weights = jnp.asarray([2.0, 5.0])
    jax.tree.map(close, pulled(fn, x, by=weights), pulled(plain, x, by=weights))
    tangent = jnp.arange(16.0).reshape(2, 8)
    moved = lambda fn: jax.jit(lambda x: jax.jvp(fn, (x,), (tangent,))[1])(x)
    close(moved(fn), moved(plain))


@pytest.mark.parametrize("op", share(["max", "mean", "logsumexp", "prod"]))
def test_gradients_in_low_precision(op: str) -> None:
    x = jnp.asarray([[3, 1, 3, 2, 0, 3, 1, 1], [1, 1, 1, 1, 2, 1, 1, 2]], jnp.bfloat16)
    found = []
    for mode in ("explicit", "reference"):
        fn = run(lambda x: reduce(x, "b s/tp -> b", op), MESH, ["b s/tp"], "b", mode)
        found.append(pulled(fn, x, by=[1, 1])[1][0])
    close(*found, 0.02)


def test_logsumexp_is_stable_and_takes_infinities() -> None:
    fn = run(lambda x: reduce(x, "b s/tp -> b", "logsumexp"), MESH, ["b s/tp"], "b")
    x = jnp.asarray([[1e4] * 8, [-1e4] * 8, [-jnp.inf] * 8, [0, jnp.inf, 0, 0, 0, 0, 0, 0.0], [-jnp.inf] * 7 + [2.0]])
    close(fn(x), jax.scipy.special.logsumexp(x, axis=1))


def test_products_with_zeros_have_the_right_gradient() -> None:
    fn = run(lambda x: reduce(x, "b s/tp -> b", "prod"), MESH, ["b s/tp"], "b")
    x = jnp.asarray([[2.0, 0, 3, 1, 1, 5, 1, 1], [0.0, 0, 3, 1, 1, 5, 1, 1]])
    jax.tree.map(close, pulled(fn, x, by=[1, 2]), pulled(lambda x: jnp.prod(x, axis=1), x, by=[1, 2]))


def test_the_mean_of_low_precision_does_not_overflow() -> None:
    fn = run(lambda x: reduce(x, "s/tp -> scalar", "mean"), MESH, ["s/tp"], "scalar")
    close(fn(jnp.full(64, 3e4, jnp.float16)), jnp.asarray(3e4, jnp.float16))


@pytest.mark.parametrize("dtype", share(["int8", "uint32", "bool", "float16", "bfloat16", "complex64"]))
@pytest.mark.parametrize("op", OPS)
def test_dtypes_are_those_of_jnp(op: str, dtype: str) -> None:
    if dtype == "complex64" and op in ("max", "min"):
        with frame(MESH).enter(), pytest.raises(LayoutError, match="needs numbers that are ordered"):
            reduce(jnp.ones((2, 8), dtype), "b s/tp -> b", op)
        return
    if op == "logsumexp" and not jnp.issubdtype(dtype, jnp.inexact):
        expected = jnp.float32
    else:
        expected = (jax.scipy.special.logsumexp if op == "logsumexp" else getattr(jnp, op))(jnp.ones(8, dtype)).dtype
    x = jax.ShapeDtypeStruct((2, 8), jnp.dtype(dtype))
    for mode in ("explicit", "reference"):
        fn = run(lambda x: reduce(x, "b s/tp -> b", op), MESH, ["b s/tp"], "b", mode)
        assert jax.eval_shape(fn, x).dtype == expected


# --- scalars ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "whole"), share([*((op, True) for op in OPS), ("mean", False), ("max", False)]))
def test_a_scalar_is_closed_on_every_axis(op: str, whole: bool) -> None:
    """Also where the operand is a gathered copy, by JAX's type different on each device; gradients too."""
    kind = "bool" if op in ("any", "all") else "float32"

    def body(x):
        copy = jax.lax.all_gather(x, "dp", tiled=True) if whole else x
        return reduce(copy, "b s/tp -> scalar" if whole else "b/dp s/tp -> scalar", op)

    x = (jnp.arange(32).reshape(4, 8) % 7 + 1).astype(kind)
    fn = run(body, MESH, ["b/dp s/tp"], "scalar")
    plain = jax.scipy.special.logsumexp if op == "logsumexp" else getattr(jnp, op)
    if kind == "bool":
        close(fn(x), plain(x))
    else:
        compare = lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4)
        jax.tree.map(compare, pulled(fn, x, by=1.0), pulled(plain, x, by=1.0))


def test_a_scalar_costs_one_small_all_reduce() -> None:
    def body(x):
        return reduce(jax.lax.all_gather(x, "dp", tiled=True), "b s/tp -> scalar", "mean")

    assert counts(body, MESH, ["b/dp s/tp"], "scalar", jnp.ones((4, 8))) == {"all_gather dp": 1, "psum dp,tp": 1}


def test_integers_are_closed_without_overflow() -> None:
    body = lambda x: reduce(jax.lax.all_gather(x, "dp", tiled=True), "b s/tp -> scalar")
    x = jnp.zeros((2, 4), jnp.int32).at[0, 0].set(2**31 - 1)
    close(run(body, MESH, ["b/dp s/tp"], "scalar")(x), jnp.asarray(2**31 - 1, jnp.int32))


def test_a_marked_axis_is_left_open() -> None:
    fn = run(lambda x: reduce(x, "b/dp s/tp -> {U:dp}", "mean"), MESH, ["b/dp s/tp"], "{U:dp}")
    x = jnp.arange(32.0).reshape(4, 8)
    close(fn(x), x.mean())


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "right", "forward", "both"),
    [
        ("sum", "d", {"psum dp": 1}, {"psum dp": 1}),
        ("mean", "d/dp", {"psum_scatter dp": 1}, {"psum_scatter dp": 1, "all_gather dp": 1}),
        ("max", "d", {"psum dp": 1}, {"psum dp": 2}),
        ("max", "d/dp", {"psum dp": 1}, {"psum dp": 2, "all_gather dp": 1}),
        ("logsumexp", "d", {"psum dp": 2}, None),
        ("prod", "d", {"all_gather dp": 1}, {"all_gather dp": 1}),
    ],
)
def test_the_collectives_are_exactly_those_of_the_string(op: str, right: str, forward: dict, both: dict | None) -> None:
    x = jnp.arange(64.0).reshape(8, 8)
    body = lambda x: reduce(x, f"b/dp d -> {right}", op)
    assert counts(body, MESH, ["b/dp d"], right, x) == forward
    if both is not None:
        assert backward_counts(body, MESH, ["b/dp d"], right, x) == both


def test_nothing_divided_costs_nothing() -> None:
    for op in OPS:
        x = jnp.ones((8, 8), bool if op in ("any", "all") else jnp.float32)
        assert not communicates(lambda x, op=op: reduce(x, "b/dp d -> b/dp", op), MESH, ["b/dp d"], "b/dp", x)
    assert communicates(lambda x: reduce(x, "b/dp d -> d"), MESH, ["b/dp d"], "d", jnp.ones((8, 8)))


# --- with the rest of JAX -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["mean", "max", "prod"])
def test_under_vmap_scan_and_remat(op: str) -> None:
    one = lambda row: reduce(row, "b s/tp -> b", op)

    plain = functools.partial(jax.scipy.special.logsumexp if op == "logsumexp" else getattr(jnp, op), axis=2)
    x = jnp.asarray(Sampler(3).array((3, 2, 8), whole=False))
    fn = run(mapped_and_scanned(one), MESH, ["t b s/tp"], "t b")
    jax.tree.map(lambda a, b: close(a, b, 1e-3), pulled(fn, x), pulled(lambda x: 2 * plain(x), x))


def test_literals_and_unnamed_dimensions() -> None:
    with frame(MESH).enter():
        assert reduce(jnp.ones((4, 3, 8)), "b _ s -> b s").shape == (4, 8)
        assert reduce(jnp.ones((4, 3, 8)), "b 3 s -> b 1 s").shape == (4, 1, 8)
        assert reduce(jnp.ones((4, 3, 8)), "... s -> ...").shape == (4, 3)
        assert reduce(jnp.ones((4, 6)), "b (h k) -> k b", h=2).shape == (3, 4)


def test_the_result_is_typed_equal_on_the_reduced_axes() -> None:
    seen = []

    def body(x):
        y = reduce(x, "b/dp s/tp -> s/tp", "max")
        seen.append(jax.typeof(y).manual_axis_type.varying)
        return y

    jax.shard_map(body, mesh=make_mesh(MESH), in_specs=P("dp", "tp"), out_specs=P("tp"))(jnp.ones((4, 8)))
    assert seen[0] == {"tp"}


# --- errors -------------------------------------------------------------------------------------------------


def test_the_comparison_can_fail() -> None:
    """A mean of local means is the global mean only by luck of equal blocks; a local sum is never the sum."""
    wrong = run(lambda x: jax.lax.psum(jnp.max(x, 1), "tp"), MESH, ["b s/tp"], "b")
    x = jnp.arange(16.0).reshape(2, 8)
    with pytest.raises(AssertionError):
        close(wrong(x), x.max(1))


def test_type_checkers_know_the_operations_that_there_are():
    assert get_args(get_type_hints(reduce)["op"]) == OPS


# -------------------- what the right side makes of partial sums: read off again by other means, and the numbers of NumPy

SIZES = {"dp": 2, "cp": 2, "tp": 2}


def drawn(seed: int) -> tuple[str, dict[str, int]]:
    """A pattern, and the collectives that bring its partial axes where it says."""
    sampler = Sampler(seed)
    rng = sampler.rng
    source = sampler.layout("a b c d", SIZES)
    dims = {name: list(axes) for ((name, axes),) in sim.read(source).dims}
    kept = [str(name) for name in rng.permutation(list(dims))[: rng.integers(0, 4)]]
    after, left, sums = {name: dims[name].copy() for name in kept}, [], []
    for axis in (axis for name in dims if name not in kept for axis in dims[name]):
        where = sampler.choice(["sum", "scatter", "leave"])
        if where == "scatter" and kept:
            after[str(sampler.choice(kept))].append(axis)
        else:
            (left if where == "leave" else sums).append(axis)
    mark = f" {{U:{','.join(axis for axis in SIZES if axis in left)}}}" if left else ""
    target = (" ".join("/".join((name, *after[name])) for name in kept) + mark).strip() or "scalar"
    # The compiled program names devices by the mesh, in whichever order they get their blocks: numbers tell the order.
    scattered = [sorted(after[name][len(dims[name]) :], key=list(SIZES).index) for name in kept]
    sums = [axis for axis in SIZES if axis in sums]
    sent = [f"psum_scatter {','.join(axes)}" for axes in scattered if axes] + [f"psum {','.join(sums)}"] * bool(sums)
    return f"{source} -> {target}", dict.fromkeys(sent, 1)


@pytest.mark.parametrize("seed", seeds())
def test_each_partial_axis_goes_where_the_right_side_says(seed):
    pattern, wanted = drawn(seed)
    source, target = pattern.split(" -> ")
    x = Sampler(seed).array((8, 8, 8, 8), "int32")
    keep = [name.partition("/")[0] for name in target.partition("{")[0].replace("scalar", "").split()]
    whole = np.einsum(x, [0, 1, 2, 3], ["abcd".index(name) for name in keep])
    for mode in ("explicit", "reference"):
        np.testing.assert_array_equal(run(lambda x: reduce(x, pattern), SIZES, [source], target, mode)(x), whole)
    assert counts(lambda x: reduce(x, pattern), SIZES, [source], target, x) == wanted
