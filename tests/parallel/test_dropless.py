"""Experts without a capacity: what finds no room, rows without gaps, and what is not made."""

import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Layout, parallel
from tests.checker.harness import suspicions
from tests.ops.harness import ragged_all_to_all
from tests.parallel.test_experts import B, E, K, S, arguments
from tests.sampler import rare, share

EXPERTS = ("d e", "e/ep d f/tp", "e/ep d f/tp", "e/ep f/tp d")
LAYERS = [
    ({"dp": 2, "ep": 2}, "b/dp/ep s d", {"dp": ("dp", "ep"), "ep": "ep"}),
    ({"ep": 2, "tp": 2}, "b/ep s/tp d", {"dp": "ep", "sp": "tp", "ep": "ep", "tp": "tp"}),
    ({"ep": 3, "tp": 2}, "b s/ep d", {"sp": "ep", "ep": "ep", "tp": "tp"}),
]


def dropless(mesh, tokens: str, axes, **options):
    """The layer without a capacity: its result, and what found no room."""
    bound = [Layout(text).bind(**{name: axes.get(name) for name in Layout(text).axis_names}) for text in EXPERTS]

    def body(x, w, *weights):
        routing = parallel.router(x, w, k=K)
        y, report = parallel.moe(x, routing, *weights, capacity_factor=None, **axes, **options)
        return y, report.drop_rate

    mesh = spmd.make_mesh(**mesh)
    return spmd.kernel(in_layouts=(tokens, *bound), out_layouts=(tokens, "scalar"), mesh=mesh)(body)


def one_after_another(args, blocks, devices: int, rows: int):
    """Blocks of tokens `(row, places)` send their choices in the order of their experts; each device takes `rows`.

    Args:
      args: Those of the layer.
      blocks: Groups of blocks that exchange, each a list of blocks, each a list of tokens (b, s).
      devices: Those along ep.
      rows: What one takes.
    """
    x, w, gate, up, down = (np.asarray(a, np.float64) for a in args)
    logits = x @ w
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    best = np.argsort(-logits, axis=-1, kind="stable")[..., :K]
    out, lost = np.zeros_like(x), 0
    for together in blocks:
        room = [rows] * devices
        for block in together:
            for expert in range(E):
                for turn in range(K):
                    for token in block:
                        if best[token][turn] != expert:
                            continue
                        owner = expert // (E // devices)
                        if not room[owner]:
                            lost += 1
                            continue
                        room[owner] -= 1
                        a = x[token] @ gate[expert]
                        result = (a / (1 + np.exp(-a)) * (x[token] @ up[expert])) @ down[expert]
                        out[token] += result * scores[token][expert] / scores[token][best[token]].sum()
    return out, lost / (B * S * K)


def blocks_of(mesh, axes):
    """Groups of blocks that exchange; device coordinates from the layout of the tokens."""
    parts = {"dp": joined_axes(axes.get("dp")), "sp": joined_axes(axes.get("sp"))}
    groups: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
    counts = {role: math.prod(mesh[a] for a in found) for role, found in parts.items()}
    for i in range(counts["dp"]):
        for j in range(counts["sp"]):
            at = {}
            for role, number in (("dp", i), ("sp", j)):
                for axis in reversed(parts[role]):
                    number, at[axis] = divmod(number, mesh[axis])
            tokens = [
                (b, s) for b in range(B) for s in range(S) if (b * counts["dp"] // B, s * counts["sp"] // S) == (i, j)
            ]
            key = tuple(value for axis, value in at.items() if axis != "ep")
            groups.setdefault(key, []).append(tokens)
    return list(groups.values())


def joined_axes(axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


@pytest.mark.parametrize(("mesh", "tokens", "axes"), share(LAYERS))
@pytest.mark.parametrize("rows", share([11, 40]))
def test_what_finds_no_room_is_counted(mesh, tokens, axes, rows) -> None:
    args = arguments()
    expected, lost = one_after_another(args, blocks_of(mesh, axes), mesh["ep"], rows)
    assert rows == 40 or lost > 0.1
    kernel = dropless(mesh, tokens, axes, rows=rows)
    for run in (kernel, kernel.auto, kernel.reference):
        found, rate = run(*args)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(rate, lost, atol=1e-6)


def test_the_default_bound_is_the_worst_case_and_less_may_do() -> None:
    """All tokens choose the experts of one device: no row too many, and not one less would do."""
    x, w, *weights = arguments()
    args = (x, np.zeros_like(w), *weights)  # experts 0 and 1
    mesh, tokens, axes = LAYERS[0]
    most = 2 * K * (B // 4 * S)  # two devices with two choices each
    whole = dropless(mesh, tokens, axes)(*args)
    np.testing.assert_array_equal(whole[0], dropless(mesh, tokens, axes, rows=most)(*args)[0])
    assert whole[1] == 0 == dropless(mesh, tokens, axes, rows=10 * most)(*args)[1]
    assert dropless(mesh, tokens, axes, rows=most - 1)(*args)[1] * B * S * K == pytest.approx(2)  # one in each group


@pytest.mark.parametrize(("mesh", "tokens", "axes"), share(LAYERS))
@pytest.mark.parametrize("rows", share([None, 30]))
@rare
def test_rows_without_gaps_give_the_same(mesh, tokens, axes, rows, monkeypatch) -> None:
    """CPUs have no ragged_all_to_all. What it is given is right, forward and backward, if an emulation agrees."""
    args = arguments()
    gradients = {}
    for ragged in (False, True):
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
        kernel = dropless(mesh, tokens, axes, rows=rows, ragged=ragged)
        loss = lambda *args, run=kernel: (run(*args)[0] ** 2).sum() * 1e-4
        gradients[ragged] = (*kernel(*args), *jax.jit(jax.grad(loss, range(5)))(*args))
    for a, b in zip(*gradients.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max() + 1e-7)


@pytest.mark.parametrize(("mesh", "tokens", "axes"), share(LAYERS))
@rare
def test_products_in_tiles_give_the_same(mesh, tokens, axes) -> None:
    """GPUs have no kernel for `ragged_dot`: there rows are multiplied in tiles. The types suspect nothing of it."""
    args, found = arguments(), {}
    for tiled in (False, True):
        jax.clear_caches()  # which do not know of the patch
        with mock.patch("spmd._compat.runs_on_gpu", return_value=tiled):
            kernel = dropless(mesh, tokens, axes, rows=30)
            loss = lambda *args, run=kernel: (run(*args)[0] ** 2).sum() * 1e-4
            traced = jax.jit(jax.value_and_grad(loss, range(5))).trace(*args)
            assert ("ragged_dot" in str(traced.jaxpr)) != tiled
            found[tiled] = traced.lower().compile()(*args)
            verdict = spmd.check(kernel, *args)
            kind, reasons = verdict.verdict.kind, str(verdict.verdict)
            assert not verdict, verdict
            # Rows find room on each device, so what is dropped depends on the mesh, in all modes alike.
            assert kind in ("proved", "tested") or "are those of whole arrays" in reasons, reasons
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max() + 1e-7)


def test_on_other_hardware_rows_have_no_gaps() -> None:
    """It traces, is accepted and lowers: two ragged_all_to_alls forward and two backward, and no other all_to_all."""
    mesh, tokens, axes = LAYERS[1]
    kernel = dropless(mesh, tokens, axes, rows=30, ragged=True)
    args = arguments()
    traced = jax.jit(jax.grad(lambda *args: kernel(*args)[0].sum(), range(5))).trace(*args)
    text = str(traced.jaxpr)
    assert text.count("= ragged_all_to_all[") == 4 and "= all_to_all[" not in text
    for platform in ("cuda", "tpu"):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("@ragged_all_to_all") == 4
    assert "ragged_all_to_all" not in str(jax.make_jaxpr(dropless(mesh, tokens, axes))(*args))  # not on CPUs


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("mesh", "tokens", "axes"), share(LAYERS))
def test_types_suspect_nothing(mesh, tokens, axes, ragged) -> None:
    """So no numbers are asked of a large model: the order of the choices differs where the choices do."""
    assert suspicions(dropless(mesh, tokens, axes, rows=30, ragged=ragged), *arguments()) == []


def test_without_a_capacity_no_expert_gets_every_token() -> None:
    """The largest array, over two devices, has the rows that they can get, or an entry for each and each expert."""
    e, t, d, f = 16, 64, 8, 4
    x, w = jnp.ones((2, t, d)), jnp.ones((d, e))
    weights = jnp.ones((e, d, f)), jnp.ones((e, d, f)), jnp.ones((e, f, d))
    kernel = dropless({"ep": 2}, "b/ep s d", {"dp": "ep", "ep": "ep"})
    text = str(jax.make_jaxpr(jax.grad(lambda *args: kernel(*args)[0].sum(), range(5)))(x, w, *weights))
    sizes = (math.prod(map(int, s.split(","))) for s in re.findall(r"[fiub]\w+\[([\d,]+)\]", text))
    rows = 2 * 2 * K * t
    assert max(sizes) <= max(rows * d, rows * e // 2) < e * 2 * t * d
