"""A stage of a pipeline as three functions: forward, the gradient of its input, and the gradients of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmd import _compat
from spmd.parallel._cut import Cut, inlined
from spmd.parallel._rematerialize import Known, Layer, differentiable


@dataclass(frozen=True, eq=False)
class SplitStage:
    """A traced stage, of leaves: `stage(weights, x) -> y`.

    Attributes:
      layer: The stage.
      consts: What it closes over. It has no gradient.
      recipe: How its backward pass is put together again from what is kept.
      cut: The backward pass of weights, what is kept, and cotangents, in two parts.
      kept: The types of what the forward pass keeps.
      crossing: The types of what the first part of the backward pass keeps for the second.
      cotangents: How many leaves of the result have a gradient.
    """

    layer: Layer
    consts: list[Any]
    recipe: Any
    cut: Cut
    kept: list[Any]
    crossing: list[Any]
    cotangents: int

    @staticmethod
    def trace(stage: Callable[[list[Any], list[Any]], list[Any]], weights: list[Any], x: list[Any]) -> SplitStage:
        """Trace a stage for weights and an input like these."""
        layer, consts = Layer.trace(stage, lambda given: given, weights, (x,), (), "activations")
        found: list[Any] = []

        def probe(weights: list[Any], x: list[Any]) -> tuple[Any, Any]:
            y, (recipe, kept) = layer.forward(consts, weights, (), (x,))
            cotangent = [one for one in y if differentiable(one)]

            def pull(weights: list[Any], kept: list[Any], cotangent: list[Any]) -> tuple[list[Any], list[Any]]:
                given = iter(cotangent)
                whole = [next(given) if differentiable(one) else np.zeros(one.shape, jax.dtypes.float0) for one in y]
                _, dw, _, (dx,) = layer.backward(consts, weights, (), (recipe, kept), whole)
                floats = lambda those, like: [a for a, b in zip(those, like, strict=True) if differentiable(b)]
                return floats(dw, weights), floats(dx, x)

            cut = _cut(pull, weights, kept, cotangent)
            crossing = cut.run_first([*weights, *kept, *cotangent])[1]
            found.append((recipe, cut, len(cotangent)))
            return kept, crossing

        traced, shapes = jax.make_jaxpr(probe, return_shape=True)(weights, x)
        count = len(shapes[0])
        [(recipe, cut, cotangents)] = found
        types = traced.out_avals
        return SplitStage(layer, consts, recipe, cut, types[:count], types[count:], cotangents)

    def forward(self, weights: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        """The result, and what is kept."""
        y, (_, kept) = self.layer.forward(self.consts, weights, (), (x,))
        return y, kept

    def of_input(self, weights: list[Any], kept: list[Any], cotangent: list[Any]) -> tuple[list[Any], list[Any]]:
        """The gradient of the input, and what is kept for the weights."""
        return self.cut.run_first([*weights, *kept, *cotangent])

    def of_weights(self, weights: list[Any], kept: list[Any], crossing: list[Any]) -> list[Any]:
        """The gradients of the weights."""
        without = [Known.UNKNOWN] * self.cotangents
        return self.cut.run_second([*weights, *kept, *without], crossing)


def _cut(pull: Any, weights: Sequence[Any], kept: Sequence[Any], cotangent: Sequence[Any]) -> Cut:
    """A backward pass, cut into the gradient of the input and those of the weights."""
    plain, shapes = jax.make_jaxpr(pull, return_shape=True)(weights, kept, cotangent)
    live = plain.replace(jaxpr=_compat.live_jaxpr(plain.jaxpr))
    flat = jax.make_jaxpr(lambda *given: inlined(live, given))(*weights, *kept, *cotangent)
    flat = flat.replace(jaxpr=_compat.live_jaxpr(flat.jaxpr))
    results = [False] * len(shapes[0]) + [True] * len(shapes[1])
    sizes = len(weights), len(kept), len(cotangent)
    again = [True] * sizes[0] + [False] * (sizes[1] + sizes[2])
    gone = [False] * (sizes[0] + sizes[1]) + [True] * sizes[2]
    return Cut(flat, results, again, gone)
