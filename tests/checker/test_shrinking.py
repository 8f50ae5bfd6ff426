"""A program whose arguments are too large for its numbers is tried at small ones, on a mesh of few devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import spmd

LARGE = spmd.make_mesh(dp=64, tp=8, abstract=True)


def struct(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(mean: bool = True, width: int = 1) -> Any:
    """A step of momentum: the moments are no argument of a kernel."""

    @spmd.kernel("d f/tp, f/tp d, b/dp d -> scalar", mesh=LARGE)
    def loss(v: Any, w: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ v).reshape(x.shape[0], -1, width).reshape(x.shape[0], -1)
        out = spmd.psum(hidden @ w, "b/dp d {U:tp} -> b/dp d")
        return spmd.reduce((out - x) ** 2, "b/dp d -> scalar", "mean" if mean else "sum") / (1 if mean else x.size)

    def run(params: Any, moments: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: loss(*params, x))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    return run


PARAMS = (struct(4096, 16384), struct(16384, 4096))
ROWS = struct(8192, 4096)


def test_a_step_is_tested_at_small_sizes() -> None:
    verdict = spmd.check(step(), PARAMS, PARAMS, ROWS).verdict
    assert verdict.kind in ("proved", "tested"), verdict
    assert "On dp=4 (given 64), tp=4 (given 8), d=2 (given 4,096)" in str(verdict), verdict


def test_its_mistake_is_found_there() -> None:
    [one] = spmd.check(step(mean=False), PARAMS, PARAMS, ROWS)
    assert one.kind == "numbers" and "it differs where dp has several devices, and nowhere else" in one.got


def test_a_name_that_is_a_multiple_of_a_constant() -> None:
    verdict = spmd.check(step(width=16), PARAMS, PARAMS, ROWS).verdict
    assert verdict.kind in ("proved", "tested"), verdict


def test_what_no_kernel_names_keeps_its_size() -> None:
    mesh = spmd.make_mesh(dp=4)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "dp"),
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("dp"),
        out_specs=jax.sharding.PartitionSpec(),
    )
    verdict = spmd.check(summed, struct(8192, 4096)).verdict
    assert verdict.kind == "not tested" and "smaller structs can be compared" in str(verdict)
