"""Linear layers, with and without a bias; the sequence divided over tp too, or not."""

import functools

import jax
import jax.numpy as jnp

from spmd import nn
from tests.layers import LayerCase, cases, fit, placements, total

STREAM = "b/dp s/cp/sp d"  # the residual stream: tokens divided by dp, and the sequence by cp and sp
WHOLE = "b/dp s/cp d"
TOKENS = ("dp", "cp")  # what divides tokens within a block


def linear_cases(name, body, ins, outs, reference, forward, backward, **more):
    """Every placement; the sequence divided over tp too, or not."""
    for mesh, axes in placements("dp", "cp", "tp", shared=[("sp", "tp")]):
        yield LayerCase(
            name=name,
            fn=lambda axes: lambda *args: body(*args, tp=axes["tp"], sp=axes["sp"], cp=axes["cp"]),
            ins=ins,
            outs=outs,
            shapes=fit(
                mesh,
                axes,
                b=(3, "dp"),
                s=(1, "cp", "tp"),
                d=(5,),
                f=(7, "tp"),
                v=(11, "tp"),
                g=(1, "tp"),
                h=(2, "tp"),
                k=(3,),
                r=(3,),
                j=(5,),
            ),
            mesh=mesh,
            axes=axes,
            reference=reference,
            forward=forward,
            backward=backward,
            label="sp" if axes["sp"] else "whole" if axes["tp"] else "plain",
            **more,
        )


def gathered(case):
    """Into a block: the sequence gathered."""
    return case.traffic("all_gather", "sp", WHOLE)


def scattered(case):
    """Out of a block: partial sums scattered onto the sequence, or summed."""
    return case.traffic("psum_scatter", "sp", WHOLE) if case.axes["sp"] else case.traffic("psum", "tp", WHOLE)


def summed(*weights, out_bias=()):
    """The gradients of weights, each equal where tokens differ; of a bias at the end, also where sp divides them."""
    return lambda case: total(
        *(case.traffic("psum", TOKENS, w) for w in weights),
        *(case.traffic("psum", (*TOKENS, "sp"), b) for b in out_bias),
    )


@cases("column_linear", draw=3)
def _():
    """Heads as two output dimensions, a bias, and a second weight that shares the gather."""

    def body(x, w, b, v, **axes):
        y, z = nn.column_linear(x, (w, v), (b, None), **axes)
        return y, z

    return linear_cases(
        "column_linear",
        body,
        (STREAM, "d h/tp k", "h/tp k", "d f/tp"),
        ("b/dp s/cp h/tp k", "b/dp s/cp f/tp"),
        lambda x, w, b, v: (jnp.tensordot(x, w, 1) + b[None, None], x @ v),
        gathered,
        lambda c: total(scattered(c), summed("d h/tp k", "h/tp k", "d f/tp")(c)),
    )


@cases("row_linear", draw=2)
def _():
    return linear_cases(
        "row_linear",
        nn.row_linear,
        ("b/dp s/cp h/tp k", "h/tp k d", "d"),
        STREAM,
        lambda x, w, b: jnp.einsum("bshk,hkd->bsd", x, w) + b[None, None],
        scattered,
        lambda c: total(gathered(c), summed("h/tp k d", out_bias=["d"])(c)),
    )


@cases("qkv_linear", draw=2)
def _():
    def reference(x, w, b):
        y = jnp.einsum("bsd,dgjk->bsgjk", x, w) + b[None, None]
        q = y[..., :3, :]
        return q.reshape(*q.shape[:2], -1, q.shape[-1]), y[..., 3, :], y[..., 4, :]

    return linear_cases(
        "qkv_linear",
        nn.qkv_linear,
        (STREAM, "d g/tp j k", "g/tp j k"),
        ("b/dp s/cp (g r)/tp k", "b/dp s/cp g/tp k", "b/dp s/cp g/tp k"),
        reference,
        gathered,
        lambda c: total(scattered(c), summed("d g/tp j k", "g/tp j k")(c)),
    )


@cases("mlp", draw=2)
def _():
    return linear_cases(
        "mlp",
        nn.mlp,
        (STREAM, "d f/tp", "f/tp d", "f/tp", "d"),
        STREAM,
        lambda x, v, w, a, b: jax.nn.gelu(x @ v + a[None, None]) @ w + b[None, None],
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d f/tp", "f/tp", "f/tp d", out_bias=["d"])(c)),
    )


def plain_gated(x, gate, up, down):
    opened = x @ gate
    return (opened / (1 + jnp.exp(-opened)) * (x @ up)) @ down


@cases("gated_mlp", draw=2)
def _():
    return linear_cases(
        "gated_mlp",
        lambda x, gate, up, down, **axes: nn.gated_mlp(x, (gate, up), down, **axes),
        (STREAM, "d f/tp", "d f/tp", "f/tp d"),
        STREAM,
        plain_gated,
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d f/tp", "d f/tp", "f/tp d")(c)),
    )


@cases("gated_mlp fused", draw=2)
def _():
    def reference(x, w, down, b, c):
        gate, up = x @ w[:, 0] + b[None, None, 0], x @ w[:, 1] + b[None, None, 1]
        return (jnp.tanh(gate) * up) @ down + c[None, None]

    return linear_cases(
        "gated_mlp fused",
        functools.partial(nn.gated_mlp, activation=jnp.tanh),
        (STREAM, "d 2 f/tp", "f/tp d", "2 f/tp", "d"),
        STREAM,
        reference,
        lambda c: total(gathered(c), scattered(c)),
        lambda c: total(gathered(c), scattered(c), summed("d 2 f/tp", "2 f/tp", "f/tp d", out_bias=["d"])(c)),
    )
