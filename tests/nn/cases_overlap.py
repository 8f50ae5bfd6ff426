"""Products that move their operand in rings: alone, and inside the linear layers by `overlap=True`."""

import functools
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from spmd import nn, parallel
from tests.layers import CASES, cases, placements, total
from tests.nn.cases_attention import layer_case
from tests.nn.cases_linear import STREAM, linear_cases, summed


def hops(times=1):
    """Every block of the residual stream passes all other devices, `times` times."""

    def formula(case):
        return case.traffic("ppermute", "sp", STREAM, times * (case.n("sp") - 1))

    return formula


def again(case):
    """The residual stream once more, as bits: the CPU compiler does not widen those."""
    width = np.dtype(case.dtype).itemsize
    return {key: (n, Fraction(size * width, max(4, width))) for key, (n, size) in hops()(case).items()}


def together(*formulas):
    return lambda case: total(*(formula(case) for formula in formulas))


def with_rings(name, body, ins, outs, reference, forward, backward):
    """The placements that gather a sequence, sp on the axes of tp; and rings so long that there is a loop."""
    found = [c for c in linear_cases(name, body, ins, outs, reference, forward, backward) if c.axes["sp"] is not None]
    yield from found
    for n in (5, 6, 7, 8):
        one = next(case for case in found if case.mesh == {"tp": 4})
        sizes = {dim: size // 4 * n if dim in "sfvhg" else size for dim, size in one.shapes.items()}
        yield replace(one, mesh={"tp": n}, shapes=sizes)


@cases("gather_einsum", draw=4)
def _():
    """Heads as two output dimensions, and a second weight that shares the ring."""
    return with_rings(
        "gather_einsum",
        lambda x, w, v, *, tp, sp, cp: tuple(parallel.gather_einsum(x, (w, v), tp=tp, cp=cp)),
        (STREAM, "d h/tp k", "d f/tp"),
        ("b/dp s/cp h/tp k", "b/dp s/cp f/tp"),
        lambda x, w, v: (jnp.tensordot(x, w, 1), x @ v),
        hops(),
        together(hops(), again, summed("d h/tp k", "d f/tp")),
    )


@cases("einsum_scatter", draw=4)
def _():
    return with_rings(
        "einsum_scatter",
        lambda x, w, *, tp, sp, cp: parallel.einsum_scatter(x, w, tp=tp, cp=cp),
        ("b/dp s/cp f/tp", "f/tp d"),
        STREAM,
        lambda x, w: x @ w,
        hops(),
        together(hops(), summed("f/tp d")),
    )


# -------------------- the linear layers


def rings_of(name, overlapped, backward, draw=2):
    """The cases of a layer of `spmd.nn` with `overlap=True`: the same values, and rings where collectives were."""

    @cases(f"{name} overlapped", draw=draw)
    def _():
        for case in CASES[name][0]():
            ringed = case.axes["sp"] is not None
            yield replace(
                case,
                name=f"{name} overlapped",
                fn=lambda axes: (
                    lambda *args: overlapped(*args, tp=axes["tp"], sp=axes["sp"], cp=axes["cp"], overlap=True)
                ),
                forward=in_rings(case.forward) if ringed else case.forward,
                backward=together(in_rings(case.backward), *backward) if ringed else case.backward,
            )


def in_rings(formula):
    """The same bytes, in n-1 permutes for each all-gather and each reduce-scatter."""

    def ringed(case):
        found = formula(case)
        moved = [count for key, (count, _) in found.items() if key.startswith(("all_gather", "psum_scatter"))]
        rest = {key: one for key, one in found.items() if not key.startswith(("all_gather", "psum_scatter"))}
        return total(rest, hops(sum(moved))(case))

    return ringed


rings_of("row_linear", nn.row_linear, [])
rings_of("qkv_linear", nn.qkv_linear, [again], draw=1)
rings_of("mlp", nn.mlp, [again])
rings_of("gated_mlp", lambda x, gate, up, down, **axes: nn.gated_mlp(x, (gate, up), down, **axes), [again])
rings_of("gated_mlp fused", functools.partial(nn.gated_mlp, activation=jnp.tanh), [again])


@cases("multi_head_attention overlapped", draw=1)
def _():
    for mesh, axes in placements("dp", "cp", "tp", shared=[("sp", "tp")]):
        if axes["sp"]:
            case = layer_case(mesh, axes, whole=False, overlap=True)
            yield replace(
                case,
                name="multi_head_attention overlapped",
                forward=in_rings(case.forward),
                backward=together(in_rings(case.backward), again),
            )
