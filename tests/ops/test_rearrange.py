"""`rearrange` and `repeat`: einops on shards, and errors that name the verb."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd._jaxprs.lines import line_of
from spmd._jaxprs.walker import equations
from spmd.errors import CommunicationError, ReplicationError
from spmd.modes import MODES
from spmd.ops import iota, rearrange, repeat
from tests import simulator
from tests.checker.harness import suspicions
from tests.ops.harness import close, communicates, frame, pulled, run
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


def shape_of(layout: str, sampler: Sampler, known: dict[str, int]) -> tuple[tuple[int, ...], dict[str, int]]:
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
    shape, _ = shape_of(left, sampler, known)
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
    shape, _ = shape_of(left, sampler, own)
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
    assert line_of(moved).startswith("tests/ops/test_rearrange.py"), line_of(moved)
