"""`rearrange` and `repeat`: einops on shards, and errors that name the verb."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.checker import line_of
from spmd.errors import CommunicationError, LayoutError, ReplicationError
from spmd.modes import MODES
from spmd.ops import einsum, iota, rearrange, repeat
from tests import simulator
from tests.checker.harness import suspicions
from tests.jaxprs import equations
from tests.ops.harness import backward_counts, close, communicates, counts, frame, pulled, run, tally
from tests.sampler import Sampler, share

MESH = {"dp": 2, "tp": 4}

REARRANGE = (
    ("b/dp s d", "d b/dp s", {}),
    ("b/dp s (h k)/tp", "b/dp h/tp s k", {"k": 3}),
    ("b/dp h/tp s k", "s (h k)/tp b/dp", {}),
    ("b (c l)/tp d", "b c/tp l d", {"c": 8}),
    ("(b s)/dp/tp d", "s d b/dp/tp", {"s": 5}),
    ("1 b/dp 1 d/tp", "d/tp 1 b/dp", {}),
    ("(a b)/dp (c d)/tp", "(a d b)/dp c/tp", None),
)
REPEAT = (
    ("b/dp d", "b/dp n d", {"n": 3}),
    ("b/dp d", "n/tp d b/dp", {"n": 8}),
    ("h/tp d", "(h g)/tp d", {"g": 2}),
    ("d", "b/dp d 3", {"b": 4}),
    ("scalar", "n/tp", {"n": 4}),
    ("b/dp 1 d", "b/dp (n d)", {"n": 2}),
)


def drawn_shape(layout: str, sampler: Sampler, known: dict[str, int]) -> tuple[tuple[int, ...], dict[str, int]]:
    names = [n for n in simulator.read(layout).names if not n.isdigit()]
    sizes = sampler.sizes([n for n in names if n not in known], MESH, [layout]) | known
    return tuple(
        int(np.prod([int(n) if n.isdigit() else sizes[n] for n, _ in dim])) for dim in simulator.read(layout).dims
    ), sizes


@pytest.mark.parametrize(("left", "right", "known"), REARRANGE)
def test_rearrange_equals_einops_in_every_mode(left: str, right: str, known: dict[str, int] | None) -> None:
    if known is None:
        with frame(MESH).enter(), pytest.raises(CommunicationError):
            rearrange(jnp.ones((4, 8)), "(a b)/dp (c d)/tp -> (b a)/dp c/tp d", b=2, d=2)
        return
    sampler = Sampler(len(left))
    shape, _ = drawn_shape(left, sampler, known)
    x = sampler.array(shape, whole=False)
    pattern = f"{left} -> {right}"
    expected = simulator.rearrange(x, pattern, **known)
    for mode in MODES:
        fn = run(lambda x: rearrange(x, pattern, **known), MESH, [left], right, mode)
        value, (gradient,) = pulled(fn, jnp.asarray(x))
        close(value, expected)
        close(gradient, x)
    assert not communicates(lambda x: rearrange(x, pattern, **known), MESH, [left], right, jnp.asarray(x))


@pytest.mark.parametrize(("left", "right", "known"), REPEAT)
def test_repeat_equals_einops_in_every_mode(left: str, right: str, known: dict[str, int]) -> None:
    sampler = Sampler(len(right))
    own = {n: size for n, size in known.items() if n in simulator.read(left).names}
    shape, _ = drawn_shape(left, sampler, own)
    x = sampler.array(shape)
    expected = _einops_repeat(x, left, right, known)
    weights = jnp.asarray(sampler.array(expected.shape))
    gradients = []
    for mode in MODES:
        fn = run(lambda x: repeat(x, f"{left} -> {right}", **known), MESH, [left], right, mode)
        value, (gradient,) = pulled(fn, jnp.asarray(x), by=weights)
        close(value, expected)
        gradients.append(gradient)
    close(gradients[0], gradients[1])
    close(gradients[0], gradients[2])
    assert not communicates(lambda x: repeat(x, f"{left} -> {right}", **known), MESH, [left], right, jnp.asarray(x))


def _einops_repeat(x: np.ndarray, left: str, right: str, known: dict[str, int]) -> np.ndarray:
    """einops has no empty left side and no literal sizes but 1."""
    if left == "scalar":
        return np.broadcast_to(x, (known["n"],))
    pattern, sizes = f"{left} -> {right}", dict(known)
    if right.endswith(" 3"):
        pattern, sizes = pattern.replace(" 3", " three"), sizes | {"three": 3}
    return simulator.repeat(x, pattern, **sizes)


def test_factors_that_are_each_divided() -> None:
    """`(b/dp s/tp)` is not a layout of a whole array, but fine between two operations."""
    body = lambda x: rearrange(
        rearrange(x, "b/dp s/tp d -> (b/dp s/tp) d") * 2, "(b/dp s/tp) d -> b/dp s/tp d", b=4, s=8
    )
    x = jnp.arange(96.0).reshape(4, 8, 3)
    for mode in MODES:
        close(run(body, MESH, ["b/dp s/tp d"], "b/dp s/tp d", mode)(x), 2 * x)


def test_ellipsis_and_vmap() -> None:
    x = jnp.arange(96.0).reshape(2, 3, 4, 4)
    body = lambda x: rearrange(x, "... s/tp d -> d ... s/tp")
    close(run(body, MESH, ["a b s/tp d"], "d a b s/tp")(x), jnp.transpose(x, (3, 0, 1, 2)))
    body = lambda x: jax.vmap(
        lambda y: repeat(rearrange(y, "... s/tp d -> d ... s/tp"), "d b s/tp -> n d b s/tp", n=2)
    )(x)
    found = run(body, MESH, ["a b s/tp d"], "a n d b s/tp")(x)
    close(found, jnp.stack([jnp.transpose(x, (0, 3, 1, 2))] * 2, axis=1))


@pytest.mark.parametrize(
    ("signature", "body"),
    share(
        [
            ("n -> (t n)/tp", lambda x: repeat(x, "n -> (t n)/tp", t=8)),
            ("n -> (t n)/tp/dp", lambda x: repeat(x, "n -> (t n)/tp/dp", t=8)),
            ("n -> (t n)/tp", lambda x: rearrange(repeat(x, "n -> t/tp n", t=8), "t/tp n -> (t n)/tp")),
            ("n -> (t n)/tp", lambda x: repeat(x, "n -> (t/tp n)", t=8) * iota("(t n)/tp", n=3, t=8).astype(x.dtype)),
            ("n -> (t n)/tp", lambda x: repeat(x, "n -> t/tp n", t=8).reshape(-1)),
            ("n -> (t n)/tp/dp", lambda x: repeat(x, "n -> t/tp/dp n", t=8).reshape(-1)),
            ("n -> (t n)/tp", lambda x: jnp.tanh(jnp.arctanh(repeat(x / 8, "n -> n t/tp", t=8))).T.ravel() * 8),
            ("n -> (t n)/tp", lambda x: repeat(x, "n -> t/tp n", t=8).reshape(-1).reshape(-1, 3).reshape(-1)),
            ("n -> (t n)/tp", lambda x: repeat(x[None], "z n -> t/tp z n", t=8).reshape(-1)),
        ]
    ),
)
def test_copies_as_blocks_of_a_kernels_result(signature: str, body: Any) -> None:
    """The devices' blocks are equal, and are blocks of the whole all the same: the check sees that repeat made them."""
    kernel = spmd.kernel(signature, mesh=spmd.make_mesh(**MESH), t=8)(body)
    x, weights = jnp.arange(3.0), jnp.cos(jnp.arange(24.0))
    scale = np.arange(24, dtype=np.float32) if "iota" in body.__code__.co_names else 1
    for mode in MODES:
        with spmd.mode(mode):
            value, (gradient,) = pulled(kernel, x, by=weights)
        close(value, np.tile(x, 8) * scale)
        close(gradient, (weights * scale).reshape(8, 3).sum(0))


def test_copies_of_another_block_are_still_found() -> None:
    mesh = spmd.make_mesh(**MESH)
    indexed = spmd.kernel("n -> m/tp", mesh=mesh)(lambda x: repeat(x, "n -> t/tp n", t=8)[0])
    claimed = spmd.kernel("n -> (m k)/tp", mesh=mesh, k=2, m=16)(
        lambda x: rearrange(x[:, None] + jnp.zeros((1, 2)), "m/tp k -> (m k)/tp")
    )
    for kernel in (indexed, claimed):
        with pytest.raises(
            ReplicationError, match="every device along tp holds the same block|on each device's own piece along tp"
        ):
            kernel(jnp.arange(4.0))


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("n -> m/tp", lambda x: repeat(x, "n -> n t/tp", t=8).reshape(-1)),
        ("n -> m/tp", lambda x: repeat(x, "n -> t/tp n", t=8).T.reshape(-1)),
        ("n -> m/dp", lambda x: repeat(x, "n -> t/tp n", t=8).reshape(-1)),
        ("n -> m/dp/tp", lambda x: repeat(x, "n -> t/tp n", t=8).reshape(-1)),
        ("n -> m/tp", lambda x: repeat(x, "n -> t/tp n", t=8).reshape(-1)[::-1]),
        ("n -> m/tp", lambda x: jnp.cumsum(repeat(x, "n -> t/tp n", t=8).reshape(-1))),
        ("n -> m/tp", lambda x: repeat(x.reshape(2, 2), "a b -> a t/tp b", t=8).reshape(-1)),
        ("n -> m/tp", lambda x: repeat(x, "n -> t/tp n", t=8)[:1].reshape(-1)),
        ("n -> m/tp", lambda x: x[None].reshape(-1)),
    ],
)
def test_copies_that_are_merged_in_another_order_are_still_found(signature: str, body: Any) -> None:
    """Only copies one after another are blocks of a whole: not those between the elements, nor what was cut from them."""
    kernel = spmd.kernel(signature, mesh=spmd.make_mesh(**MESH))(body)
    try:
        told: object = suspicions(kernel, jnp.arange(4.0))[0]
    except ReplicationError as error:  # the verb itself says so
        told = error
    assert re.search("holds the same block|the value lies as|on each device's own piece", str(told))


# -------------------- einops does the local part

ODD_NAMES = (("_x", "x_"), ("__x__", "if"), ("a1", "a0"), ("dp", "tp"))


@pytest.mark.parametrize(("first", "second"), ODD_NAMES)
def test_names_that_einops_refuses(first: str, second: str) -> None:
    """Names of a layout are not those that einops sees."""
    left, right = f"{first}/dp ({second} k)/tp 1 ...", f"... {second}/tp k 1 {first}/dp"
    x = np.arange(2 * 4 * 24.0, dtype=np.float32).reshape(4, 8, 1, 2, 3)
    wanted = x.reshape(4, 4, 2, 2, 3).transpose(3, 4, 1, 2, 0)[:, :, :, :, None, :]
    pattern = f"{left} -> {right}"
    kernel = spmd.kernel(pattern, mesh=spmd.make_mesh(**MESH), k=2)(lambda x: rearrange(x, pattern, k=2))
    for mode in MODES:
        value, (gradient,) = pulled(getattr(kernel, mode), jnp.asarray(x))
        close(value, wanted)
        close(gradient, x)


def test_lines_are_the_users() -> None:
    """Neither our frames nor those of einops are where something was written."""
    kernel = spmd.kernel("a/dp b -> b a/dp", mesh=spmd.make_mesh(dp=2))(lambda x: rearrange(x, "a/dp b -> b a/dp"))
    jaxpr = kernel.trace(jnp.ones((4, 2))).jaxpr
    [moved] = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "transpose"]
    assert line_of(moved).startswith("tests/ops/test_einops.py"), line_of(moved)


# --- einsum ------------------------------------------------------------------------------------------------------

# `einsum`: values and gradients in all modes, collectives, and errors.


SHAPES = (
    "b s d, d f -> b s f",
    "b f, f d -> b d",
    "b q h d, b k h d -> b h q k",
    "a b, b c, c d -> a d",
    "b d ->  d",
    "b d, d, b d -> b",
    "e c d, e d f -> e c f",
    "b (h k), h k d -> b d",
    "b s d, d h k -> b s (h k)",
    "a, b -> a b",
)


def random_call(sampler: Sampler, shape: str) -> tuple[dict[str, int], str, dict[str, int]]:
    """A mesh, `shape` with axes put on it, and sizes: every fate of a partial axis is among them."""
    mesh = sampler.mesh()
    inputs, (output,) = simulator.split_pattern(shape)
    leading = [n for i in (*inputs, output) for dim in simulator.read(i).dims for n, _ in dim[1:]]
    names = list(dict.fromkeys(n for i in inputs for n in simulator.read(i).names))
    axes: dict[str, list[str]] = {name: [] for name in names}
    right = {name: [] for name in simulator.read(output).names}
    gained: dict[str, list[str]] = {name: [] for name in right}
    marked, linear = [], []
    for axis in mesh:
        fate = sampler.choice(["name", "name", "name", "mark", "none"])
        if fate == "mark" and len(inputs) > 1:
            linear.append(axis)
        elif fate != "none":
            name = sampler.choice([n for n in names if n not in leading])
            axes[name].append(axis)
            if name in right:
                right[name].append(axis)
                continue
        if fate != "none" and (fate != "mark" or len(inputs) > 1):
            options = ["sum", "left", *(n for n in right if n not in leading)]
            land = sampler.choice(options)
            if land == "left":
                marked.append(axis)
            elif land != "sum":
                gained[land].append(axis)
    right = {name: [*kept, *gained[name]] for name, kept in right.items()}  # new axes are minor-most
    write = lambda layout, where: "scalar" if layout == "scalar" else " ".join(_words(layout, where))
    left = [write(i, axes) for i in inputs]
    if linear:
        left[0] += f" {{U:{','.join(linear)}}}"
    out = write(output, right)
    if marked:
        out = (out if out != "scalar" else "") + f" {{U:{','.join(marked)}}}"
    sizes = sampler.sizes(names, mesh, [*left, out])
    return mesh, f"{', '.join(left)} -> {out}", sizes


def _words(layout: str, axes: dict[str, list[str]]) -> list[str]:
    words = []
    for dim in simulator.read(layout).dims:
        inside = " ".join("/".join([name, *axes.get(name, [])]) for name, _ in dim)
        words.append(f"({inside})" if len(dim) > 1 else inside)
    return words


def shape_of(layout: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(np.prod([sizes[n] for n, _ in dim])) for dim in simulator.read(layout).dims)


# --- collectives --------------------------------------------------------------------------------------------


COUNTS = [
    ("b/dp f/tp, f/tp d -> b/dp d", {"psum tp": 1}, {"psum tp": 1, "psum dp": 1}),
    (
        "b/dp f/tp, f/tp d -> b/dp d/tp",
        {"psum_scatter tp": 1},
        {"psum_scatter tp": 1, "all_gather tp": 1, "psum dp": 1},
    ),
    (
        "b/dp f/tp, f/tp d -> b/dp/tp d",
        {"psum_scatter tp": 1},
        {"psum_scatter tp": 1, "all_gather tp": 1, "psum dp": 1},
    ),
    ("b f/dp/tp, f/dp/tp d -> b d/tp", {"psum_scatter tp": 1, "psum dp": 1}, None),
    ("b/dp d, d f/tp -> b/dp f/tp", {}, {"psum tp": 1, "psum dp": 1}),
    ("b f/dp/tp, f/dp/tp d -> b d", {"psum dp,tp": 1}, {"psum dp,tp": 1}),
]


@pytest.mark.parametrize(("pattern", "forward", "both"), share(COUNTS))
def test_the_collectives_are_exactly_those_of_the_string(pattern: str, forward: dict, both: dict | None) -> None:
    inputs, (output,) = simulator.split_pattern(pattern)
    x, w = jnp.ones((8, 16)), jnp.ones((16, 24))
    body = lambda x, w: einsum(x, w, pattern)
    assert counts(body, MESH, inputs, output, x, w) == forward
    if both is not None:
        assert backward_counts(body, MESH, inputs, output, x, w) == both


def test_what_is_left_partial_costs_nothing() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d {U:tp}")
    assert counts(body, MESH, ["b f/tp", "f/tp d"], "b d {U:tp}", jnp.ones((8, 16)), jnp.ones((16, 24))) == {}


def test_axes_of_size_one_behave_the_same() -> None:
    for mesh in ({"dp": 1, "tp": 1}, {"dp": 1, "tp": 4}):
        fn = run(
            lambda x, w: einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d/tp"), mesh, ["b/dp f/tp", "f/tp d"], "b/dp d/tp"
        )
        close(fn(jnp.ones((2, 4)), jnp.ones((4, 8))), jnp.full((2, 8), 4.0))
        with frame(mesh).enter(), pytest.raises(CommunicationError, match="never gathers"):
            einsum(jnp.ones((2, 4)), jnp.ones((4, 8)), "b/dp f/tp, f/tp d -> b d")


def test_a_scalar_result() -> None:
    x = jnp.arange(8.0)
    body = lambda x, y: einsum(x, y, "a/tp, a/tp -> scalar")
    for mode in MODES:
        close(run(body, MESH, ["a/tp", "a/tp"], "scalar", mode)(x, x), jnp.dot(x, x))
    assert counts(body, MESH, ["a/tp", "a/tp"], "scalar", x, x) == {"psum tp": 1}


# --- with the rest of JAX -----------------------------------------------------------------------------------


def test_under_vmap_scan_remat_and_jvp() -> None:
    pattern = "b f/tp, f/tp d -> b d/tp"
    one = lambda x, w: einsum(x, w, pattern)

    def body(x, w):  # x: t b f
        mapped = jax.vmap(one, in_axes=(0, None))(x, w)
        _, scanned = jax.lax.scan(jax.checkpoint(lambda c, row: (c, one(row, w))), 0, x)
        _, tangent = jax.jvp(lambda w: one(x[0], w), (w,), (w,))
        return mapped + scanned + tangent[None]

    x, w = jnp.arange(24.0).reshape(2, 3, 4), jnp.arange(32.0).reshape(4, 8)
    fn = run(body, MESH, ["t b f/tp", "f/tp d"], "t b d/tp")
    expected = lambda x, w: 2 * (x @ w) + (x[0] @ w)[None]
    jax.tree.map(lambda a, b: close(a, b, 1e-3), pulled(fn, x, w), pulled(expected, x, w))


def test_ellipsis_stands_for_the_same_dimensions_everywhere() -> None:
    x, y, w = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 4, 8)), jnp.ones((8, 5))
    with frame(MESH).enter():
        assert einsum(x, w, "... d, d f -> f ...").shape == (5, 2, 3, 4)
        assert einsum(x, y, "... d/tp, ... d/tp -> ...").shape == (2, 3, 4)
        with pytest.raises(LayoutError, match="same dimensions in every operand"):
            einsum(x, y[0], "... d/tp, ... d/tp -> ...")


def test_the_dtype_asked_for_is_the_one_that_travels() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d", preferred_element_type=jnp.float32)
    x, w = jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 3), jnp.bfloat16)
    fn = run(body, MESH, ["b f/tp", "f/tp d"], "b d")
    assert fn(x, w).dtype == jnp.float32
    assert "f32[2,3]" in fn.lower(x, w).compile().as_text()
    assert tally(fn.lower(x, w).compile(), MESH) == {"psum tp": 1}


def test_keywords_rename_axes_and_none_makes_it_local() -> None:
    body = lambda x, w: einsum(x, w, "b f/tp, f/tp d -> b d", tp=None)
    assert counts(body, MESH, ["b f", "f d"], "b d", jnp.ones((2, 8)), jnp.ones((8, 3))) == {}
    body = lambda x, w: einsum(x, w, "b f/a, f/a d -> b d", a=("dp", "tp"))
    assert counts(body, MESH, ["b f/dp/tp", "f/dp/tp d"], "b d", jnp.ones((2, 8)), jnp.ones((8, 3))) == {
        "psum dp,tp": 1
    }


# --- errors -------------------------------------------------------------------------------------------------


X, W = jnp.ones((4, 8)), jnp.ones((8, 12))


def test_the_comparison_can_fail() -> None:
    """A scatter in the wrong order of axes is noticed."""
    fn = run(lambda x: einsum(x, "b s/tp/dp -> b/tp/dp"), MESH, ["b s/tp/dp"], "b/dp/tp")
    x = jnp.arange(64.0).reshape(8, 8)
    with pytest.raises(AssertionError):
        close(fn(x), x.sum(1))
    right = run(lambda x: einsum(x, "b s/tp/dp -> b/tp/dp"), MESH, ["b s/tp/dp"], "b/tp/dp")
    close(right(x), x.sum(1))
