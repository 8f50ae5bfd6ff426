"""A layer as a pair of functions, forward and backward, with a choice of what is kept between them.

`jax.checkpoint` chooses by operation what it saves. This module chooses by what a value is made of: whatever depends on
weights alone (the gathered weights, and all their casts, transposes and copies) is made again from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from spmd._jaxprs import plain_call
from spmd._walker import Domain, walk

SAVE = ("activations", "inputs")


def differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def without_integers(cotangents: Any, primals: Any) -> Any:
    """Cotangents with None where the primal is not a floating-point array."""
    return jax.tree.map(lambda x, ct: ct if differentiable(jnp.asarray(x)) else None, primals, cotangents)


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How the backward function of one layer is put together again."""

    jaxpr: ClosedJaxpr
    structure: Any
    outputs: int
    saved: tuple[int, ...]


jax.tree_util.register_static(_Recipe)


@dataclass(frozen=True, eq=False)
class Layer:
    """A traced layer: `layer(consts, weights, shared, x) -> x`.

    Attributes:
      jaxpr: Its body, a function of the leaves of weights, x and shared, over its constants.
      structure: The structure of its result.
      save: "activations" keeps for the backward pass what depends on x; "inputs" keeps x alone.
    """

    jaxpr: ClosedJaxpr
    structure: Any
    save: str

    @staticmethod
    def trace(
        layer: Callable[..., Any],
        gather: Callable[[Any], Any],
        rest: Any,
        x: tuple[Any, ...],
        shared: tuple[Any, ...],
        save: str,
    ) -> tuple[Layer, list[Any]]:
        """Trace `layer(gather(rest), *x, *shared)`; returns it with the values that it closed over."""
        found: list[Layer] = []

        def probe(rest: Any, x: Any, shared: Any) -> tuple[()]:
            body, shape = jax.make_jaxpr(layer, return_shape=True)(gather(rest), *x, *shared)
            found.append(Layer(body, jax.tree.structure(shape), save))
            return ()

        jax.eval_shape(probe, rest, x, shared)
        return found[0], list(found[0].jaxpr.consts)

    def __call__(self, consts: Sequence[Any], weights: Any, shared: Any, x: Any) -> Any:
        run = jaxpr_as_fun(self.jaxpr.replace(consts=list(consts)))
        return jax.tree.unflatten(self.structure, run(*jax.tree.leaves((weights, x, shared))))

    def forward(self, consts: Any, weights: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        """The result, and what is kept."""
        if self.save == "inputs":
            return self(consts, weights, shared, x), x
        given = (consts, weights, shared, x)
        jaxpr, (out, pull) = jax.make_jaxpr(lambda *args: jax.vjp(self, *args), return_shape=True)(*given)
        count = len(jax.tree.leaves(out))
        recipe = _Recipe(jaxpr, jax.tree.structure(pull), count, _saved(jaxpr.jaxpr, given, count))
        values = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(given))
        return jax.tree.unflatten(self.structure, values[:count]), (recipe, [values[i] for i in recipe.saved])

    def backward(self, consts: Any, weights: Any, shared: Any, kept: Any, cotangent: Any) -> tuple[Any, ...]:
        """The cotangents of constants, weights, shared arguments and x."""
        if self.save == "inputs":
            return jax.vjp(self, consts, weights, shared, kept)[1](cotangent)
        recipe, values = kept
        jaxpr = recipe.jaxpr
        known = jax.tree.leaves((consts, weights, shared))
        unknown = [Known.UNKNOWN] * (len(jaxpr.jaxpr.invars) - len(known))
        leaves = walk(jaxpr, [*known, *unknown], _Replay(jaxpr.jaxpr))
        by_variable = dict(zip((jaxpr.jaxpr.outvars[i] for i in recipe.saved), values, strict=True))
        outvars = jaxpr.jaxpr.outvars
        merged = [
            leaf if isinstance(v, Literal) else by_variable.get(v, leaf)
            for v, leaf in zip(outvars, leaves, strict=True)
        ]
        return jax.tree.unflatten(recipe.structure, merged[recipe.outputs :])(cotangent)


def _saved(jaxpr: Any, given: tuple[Any, ...], outputs: int) -> tuple[int, ...]:
    """Which results of the forward function are kept: one for each variable that can be made again neither from the
    weights alone nor from what all layers share alone."""
    sizes = [len(jax.tree.leaves(part)) for part in given]

    def made_of(*parts: bool) -> list[Any]:
        flags = [True if part else Known.UNKNOWN for part, size in zip(parts, sizes, strict=True) for _ in range(size)]
        return walk(jaxpr, flags, Known())

    again = zip(made_of(False, True, False, False), made_of(True, False, True, False), strict=True)
    places: dict[Any, int] = {}
    for place, (variable, made) in enumerate(zip(jaxpr.outvars, again, strict=True)):
        if place >= outputs and made == (Known.UNKNOWN, Known.UNKNOWN):
            places.setdefault(variable, place)
    return tuple(places.values())


class Known(Domain):
    """Which values can be made again: the results of an equation whose operands can."""

    UNKNOWN: ClassVar[Any] = object()

    def constant(self, var: Any, value: Any) -> Any:
        return True

    def equation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation is one piece, whatever it holds, except a plain call: a part of it can be made again."""
        if not any(one is Known.UNKNOWN for one in operands):
            return self.replayed(eqn, operands)
        inner = plain_call(eqn)
        return [Known.UNKNOWN] * len(eqn.outvars) if inner is None else walk(inner, operands, self)

    def replayed(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return [True] * len(eqn.outvars)


class _Replay(Known):
    """The values that can be made again."""

    def __init__(self, jaxpr: Any) -> None:
        super().__init__()
        self.jaxpr = jaxpr

    def constant(self, var: Any, value: Any) -> Any:
        return value

    def replayed(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return alone(self.jaxpr, eqn, operands)


def alone(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation of an open jaxpr, as the jaxpr that has no other."""
    given = {v: one for v, one in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)}
    results = list(eqn.outvars)
    only = jaxpr.replace(constvars=[], invars=list(given), outvars=results, eqns=[eqn], effects=eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(only, ()))(*given.values())
