"""Overlapped products: nothing gathered exists, no gather is left, and a block from the wrong place is noticed."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import nn
from spmd.nn import overlap
from tests.layers import CASES, check, register_all
from tests.sampler import share

register_all()


def compiled(n, ringed):
    """An MLP on n devices, forward, and backward; the bytes of its gathered sequence, no other array being as large."""
    mesh = spmd.make_mesh(tp=n)
    s, d, f = 24 * n, 96, 8 * n

    @spmd.kernel("b s/tp d, d f/tp, f/tp d -> b s/tp d", mesh=mesh)
    def mlp(x, v, w):
        return nn.mlp(x, v, w, tp="tp", sp="tp", overlap=ringed)

    layouts = ("b s/tp d", "d f/tp", "f/tp d")
    x, v, w = (
        spmd.shard(jnp.ones(shape), lay, mesh=mesh)
        for shape, lay in zip([(1, s, d), (d, f), (f, d)], layouts, strict=True)
    )
    forward = jax.jit(mlp).lower(x, v, w).compile()
    both = jax.jit(lambda x, v, w, c: jax.vjp(mlp, x, v, w)[1](c)).lower(x, v, w, x).compile()
    return (forward, both), s * d, mesh


def arrays(program):
    """The sizes of all arrays in a compiled program."""
    return [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", program.as_text())]


@pytest.mark.parametrize("n", [2, 7])
def test_nothing_gathered_exists(n):
    """Not in the shapes of the compiled program, forward or backward, nor in its memory."""
    ringed, whole, mesh = compiled(n, True)
    plain, _, _ = compiled(n, False)
    for program, other in zip(ringed, plain, strict=True):
        assert max(arrays(program)) < whole <= max(arrays(other))
        assert set(spmd.inspect.collectives(program, mesh=mesh).counts) == {"ppermute"}
        saved = other.memory_analysis().temp_size_in_bytes - program.memory_analysis().temp_size_in_bytes
        assert saved > 4 * whole * (n - 1) // n // 2


@pytest.mark.parametrize("name", ["gather_einsum", "einsum_scatter"])
@pytest.mark.parametrize("n", share([2, 7]))
def test_a_block_from_the_wrong_place_is_noticed(name, n, monkeypatch):
    """One off in the direction of a hop, or in the number of a block."""
    case = next(case for case in CASES[name][0]() if case.axes["tp"] == "tp" and case.mesh.get("tp") == n)
    send, iota = overlap._send, overlap.iota
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "_send", lambda tp, x, by: send(tp, x, 2 * by))
        with pytest.raises(AssertionError, match="explicit"):
            check(replace(case))
    monkeypatch.setattr(overlap, "iota", lambda *args, **names: (iota(*args, **names) + 1) % n)
    with pytest.raises(AssertionError, match="explicit"):
        check(replace(case))


def test_without_a_divided_sequence_there_is_nothing_to_overlap():
    mesh = spmd.make_mesh(tp=4)
    kernels = [
        spmd.kernel("s d, d f/tp, f/tp d -> s d", mesh=mesh)(
            lambda x, v, w, ringed=ringed: nn.mlp(x, v, w, tp="tp", overlap=ringed)
        )
        for ringed in (True, False)
    ]
    args = jnp.ones((3, 5)), jnp.ones((5, 8)), jnp.ones((8, 5))
    plain, same = (spmd.inspect.collectives(kernel, *args) for kernel in kernels)
    assert plain.counts == same.counts == {"psum": 1}
