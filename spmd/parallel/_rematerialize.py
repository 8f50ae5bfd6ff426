"""A layer as a pair of functions, forward and backward, with a choice of what is kept between them.

`jax.checkpoint` chooses by operation what it saves. This module chooses by what a value is made of: whatever depends on
weights alone (the gathered weights, and all their casts, transposes and copies) is made again from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from spmd import Layout
from spmd._jaxprs.traces import FlatProgram
from spmd._jaxprs.walker import Domain, Equation, Variable, opened, plain_call, walk
from spmd._trees.leaves import has_room, is_array, kind_of
from spmd._trees.matching import match_prefix
from spmd.errors import LayoutError, MeshError
from spmd.language import axes_tuple

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
      body: Its body, a function of weights, x and shared, over its constants.
      save: "activations" keeps for the backward pass what depends on x; "inputs" keeps x alone.
    """

    body: FlatProgram
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
            found.append(Layer(FlatProgram.of(layer, gather(rest), *x, *shared), save))
            return ()

        jax.eval_shape(probe, rest, x, shared)
        return found[0], list(found[0].body.jaxpr.consts)

    def __call__(self, consts: Sequence[Any], weights: Any, shared: Any, x: Any) -> Any:
        return self.body.given(consts)(weights, x, shared)

    def forward(self, consts: Any, weights: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        """The result, and what is kept."""
        if self.save == "inputs":
            return self(consts, weights, shared, x), x
        given = (consts, weights, shared, x)
        jaxpr, (out, pull) = jax.make_jaxpr(lambda *args: jax.vjp(self, *args), return_shape=True)(*given)
        count = len(jax.tree.leaves(out))
        recipe = _Recipe(jaxpr, jax.tree.structure(pull), count, _saved(jaxpr.jaxpr, given, count))
        values = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(given))
        return jax.tree.unflatten(self.body.structure, values[:count]), (recipe, [values[i] for i in recipe.saved])

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
    """Return which results of the forward function are kept: one for each variable that can be made again neither from
    the weights alone nor from what all layers share alone."""
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

    def constant(self, var: Variable | None, value: Any) -> Any:
        return True

    def equation(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """An equation is one piece, whatever it holds, except a plain call: a part of it can be made again."""
        if not any(one is Known.UNKNOWN for one in operands):
            return self.replayed(eqn, operands)
        inner = plain_call(eqn)
        return [Known.UNKNOWN] * len(eqn.outvars) if inner is None else walk(inner, operands, self)

    def replayed(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return [True] * len(eqn.outvars)


class Values(Domain):
    """The arrays of an open jaxpr, which a walk computes."""

    def __init__(self, jaxpr: Any) -> None:
        super().__init__()
        self.jaxpr = opened(jaxpr)[0]

    def constant(self, var: Variable | None, value: Any) -> Any:
        return value

    def alone(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of one equation, as the jaxpr that has no other."""
        given = {v: one for v, one in zip(eqn.invars, operands, strict=True) if not isinstance(v, Literal)}
        results, effects = list(eqn.outvars), eqn.effects
        only = self.jaxpr.replace(constvars=[], invars=list(given), outvars=results, eqns=[eqn], effects=effects)
        return jaxpr_as_fun(ClosedJaxpr(only, ()))(*given.values())


class _Replay(Values, Known):
    """The values that can be made again."""

    def replayed(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return self.alone(eqn, operands)


# --- parameters at rest and in use, leaf by leaf: the axes to gather, and the axes over which gradients are summed ----


Axes = tuple[str, ...]


def checked_axes(axes: str | Iterable[str] | None, what: str, call: str) -> Axes:
    """One mesh axis, several, or None, as a tuple."""
    if axes is not None and not isinstance(axes, (str, tuple, list)):
        rule = f"{what} is a mesh axis, a tuple of them, or None, not {kind_of(axes)}."
        raise MeshError(rule, call=call, advice=f'as in {what}="dp"')
    return axes_tuple(axes)


def paths(tree: Any) -> list[str]:
    """The path of each leaf, keys joined with "/"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(the tree itself)" for path, _ in found]


def layout_leaves(tree: Any, layouts: Any, call: str, what: str = "tree") -> list[Layout | None]:
    """The layout of each leaf of a tree; None if the leaf is not an array.

    Args:
      tree: The arrays.
      layouts: A prefix tree of layouts, as in `spmd.shard`.
      call: The call, for messages.
      what: The name of the tree in messages.
    """
    found = match_prefix(layouts, tree, what, call)
    return [layout if is_array(leaf) else None for _, leaf, layout in found]


def axes_by_dim(layout: Layout) -> tuple[Axes, ...]:
    """The mesh axes of each dimension."""
    return tuple(dim.axes for dim in layout.dims)


def text_of(names: tuple[str, ...], axes: tuple[Axes, ...], unreduced: Axes = (), reduced: Axes = ()) -> str:
    """A layout of these parts, as a string."""
    parts = ["/".join((name, *own)) for name, own in zip(names, axes, strict=True)]
    parts += [f"{{{kind}:{','.join(own)}}}" for kind, own in (("U", unreduced), ("R", reduced)) if own]
    return " ".join(parts) or "scalar"


@dataclass(frozen=True)
class Move:
    """How one parameter goes from rest to use.

    Attributes:
      names: Its dimensions.
      rest: The mesh axes of each dimension at rest.
      use: The mesh axes of each dimension in use.
      copies: Axes along which it is equal at rest, and over which its gradient is summed.
    """

    names: tuple[str, ...]
    rest: tuple[Axes, ...]
    use: tuple[Axes, ...]
    copies: Axes

    @property
    def gathered(self) -> Axes:
        """Axes that divide it at rest but not in use."""
        used = {axis for axes in self.use for axis in axes}
        return tuple(axis for axes in self.rest for axis in axes if axis not in used)

    @property
    def tiled(self) -> bool:
        """Return whether all-gathers alone move it from rest to use."""
        return all(rest[: len(use)] == use for rest, use in zip(self.rest, self.use, strict=True))

    def inner(self) -> Move:
        """The same for one layer of a stack, without the first dimension."""
        return Move(self.names[1:], self.rest[1:], self.use[1:], self.copies)


def moves(tree: Any, at_rest: Any, compute: Any, data: Any, call: str, what: str = "params") -> list[Move | None]:
    """The move of each leaf; None if it is not an array.

    Args:
      tree: The parameters at rest.
      at_rest: Their layouts at rest.
      compute: Their layouts in use.
      data: The mesh axes that divide the data; None for those that the gathers remove.
      call: The call, for messages.
      what: The name of the tree in messages.
    """
    leaves = jax.tree.leaves(tree)
    resting, used = (layout_leaves(tree, layouts, call, what) for layouts in (at_rest, compute))
    pairs = zip(resting, used, strict=True)
    found: list[Move | None] = []
    faults: list[str] = []
    for path, leaf, (rest, use) in zip(paths(tree), leaves, pairs, strict=True):
        if rest is None or use is None:
            found.append(None)
            continue
        fault = _fault(leaf, rest, use)
        faults += [f"{path}: {fault}"] if fault else []
        if not fault:
            rest, use = rest.with_rank(len(leaf.shape)), use.with_rank(len(leaf.shape))
            found.append(Move(_names(rest), axes_by_dim(rest), axes_by_dim(use), ()))
    if faults:
        rule = "each parameter has the same dimensions at rest and in use, and no marks."
        raise LayoutError(rule, call=call, got=faults)
    gathered = dict.fromkeys(axis for move in found if move for axis in move.gathered)
    wanted = tuple(gathered) if data is None else checked_axes(data, "data", call)
    missing = [axis for axis in gathered if axis not in wanted]
    if missing:
        rule = f"parameters are gathered over {', '.join(missing)}, which must divide the data too."
        raise MeshError(rule, call=call, got=[f"data={data!r}"], fix=f"data={(*wanted, *missing)!r}")
    return [move and _with_copies(move, wanted) for move in found]


def _names(layout: Layout) -> Axes:
    """Names for the dimensions; their own, if each has one."""
    if len(layout.names) == len(layout.dims) == len(layout.atoms):
        return layout.names
    return tuple(f"d{i}" for i in range(len(layout.dims)))


def _fault(leaf: Any, rest: Layout, use: Layout) -> str:
    both = f'"{rest.short}" at rest, "{use.short}" in use'
    if rest.unreduced or rest.reduced or use.unreduced or use.reduced:
        return both
    rank = len(leaf.shape)
    if not has_room(rest, rank) or not has_room(use, rank):
        return f"{both}, rank {rank}"
    same = rest.has_ellipsis or use.has_ellipsis or rest.names == use.names
    return "" if same else both


def _with_copies(move: Move, data: Axes) -> Move:
    own = {axis for axes in (*move.rest, *move.use) for axis in axes}
    return Move(move.names, move.rest, move.use, tuple(axis for axis in data if axis not in own))
