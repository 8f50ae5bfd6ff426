"""Placements of the tokens of a divided sequence, there and back."""

import itertools
from dataclasses import replace

import numpy as np

from spmd import parallel
from tests.layers import LayerCase, cases, fit, in_order, placements
from tests.nn.dense import placed_order


def placed_case(name, placement, mesh, axes):
    """There or back, along the last dimension but one."""
    sizes = fit(mesh, axes, b=(2, "dp"), s=(2, "cp", "cp"), d=(3, "tp"))
    n = fit(mesh, axes, n=(1, "cp"))["n"]
    order = placed_order(sizes["s"], n, placement)
    order = order if name == "place_sequence" else np.argsort(order)
    layout = "b/dp s/cp d/tp"

    def moved(c):
        if placement == "striped":
            return c.traffic("all_to_all", "cp", layout)
        return c.traffic("ppermute", "cp", layout, 1 if n == 2 else 2)

    halves = {**sizes, "s": sizes["s"] // 2}

    def formula(c):
        return moved(c if placement == "striped" else replace(c, shapes=halves))

    return LayerCase(
        name=name,
        fn=lambda axes: lambda x: getattr(parallel, name)(x, placement, cp=axes["cp"]),
        ins=(layout,),
        outs=layout,
        shapes=sizes,
        mesh=mesh,
        axes=axes,
        reference=lambda x: x[:, order],
        forward=formula,
        backward=formula,
        build=in_order(placement, "cp", into=name == "restore_sequence", out=name == "place_sequence"),
        label=placement,
    )


@cases("place_sequence", draw=2)
def _():
    for placement, (mesh, axes) in itertools.product(("zigzag", "striped"), placements("dp", "tp", "cp")):
        yield placed_case("place_sequence", placement, mesh, axes)


@cases("restore_sequence", draw=2)
def _():
    for placement, (mesh, axes) in itertools.product(("zigzag", "striped"), placements("dp", "tp", "cp")):
        yield placed_case("restore_sequence", placement, mesh, axes)
