"""Rotary positions, of tokens in their order and in zig-zag."""

import itertools

import numpy as np

from spmd import nn, parallel
from tests.layers import LayerCase, cases, fit, in_order, placements
from tests.nn.dense import plain_rotary


@cases("rotary_embedding", draw=2)
def _():
    for placement, (mesh, axes) in itertools.product(("contiguous", "zigzag"), placements("dp", "tp", "cp")):
        sizes = fit(mesh, axes, b=(3, "dp"), s=(2, "cp"), h=(5, "tp"), k=(6,))
        n = sizes["s"] // 2

        def body(axes, placement=placement, length=sizes["s"]):
            turn = nn.rotary_frequencies(6)
            at = lambda: parallel.sequence_positions(length, placement, cp=axes["cp"])
            return lambda x: nn.rotary_embedding(x, at(), turn)

        chunks = np.arange(2 * n)
        order = np.stack([chunks[:n], chunks[::-1][:n]], 1).reshape(-1) if placement == "zigzag" else chunks
        yield LayerCase(
            name="rotary_embedding",
            fn=body,
            ins=("b/dp s/cp h/tp k",),
            outs="b/dp s/cp h/tp k",
            shapes=sizes,
            mesh=mesh,
            axes=axes,
            reference=lambda x, order=order: plain_rotary(x, order),
            forward=lambda c: {},
            backward=lambda c: {},
            build=in_order(placement, "cp"),
            label=placement,
        )
