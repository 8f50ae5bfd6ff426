"""A layer as a pair of functions, forward and backward, with a choice of what is kept between them.

`jax.checkpoint` chooses by operation what it saves. This module chooses by what a value is made of: whatever depends on
weights alone (the gathered weights, and all their casts, transposes and copies) is made again from the weights.

A stage of a pipeline is three functions: its backward pass is a jaxpr in two parts, what the gradient of the input
needs, and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from spmd import _compat
from spmd._jaxprs.traces import FlatProgram
from spmd._jaxprs.walker import Domain, Equation, Variable, held, opened, plain_call, walk

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


# --- a jaxpr in two parts: what some of its results need, and the rest, with the values that cross between the two ----
#
# A backward pass is cut so (`SplitStage`): the device before this one waits for the gradient of the input, and nobody
# waits for those of the weights. A scan over layers is cut into two scans, and what crosses is stacked.


_LATER = Known.UNKNOWN  # a value that this part does not have


class Cut:
    """A jaxpr cut in two. It has no calls, as `inlined` gives it, and no equation that no result needs.

    What is made of `again` alone, such as the gathered weights, does not cross: the second part makes it once more.

    Attributes:
      jaxpr: The jaxpr.
      results: Which of its results the first part makes.
      made: The variables that the first part makes or reads.
      read: The variables that the second part reads.
      again: The variables that are made of `again` alone.
      crossing: The variables that cross, without what scans stack.
      scans: For the id of each scan that is cut, its body cut, and which of its results the first part makes.
      count: How many arrays cross.
    """

    def __init__(self, jaxpr: Any, results: Sequence[bool], again: Sequence[bool], gone: Sequence[bool]) -> None:
        """Cut a jaxpr. `again` and `gone` say which of its inputs are weights, and which only the first part has."""
        self.jaxpr, self.results = jaxpr, list(results)
        self.scans: dict[int, tuple[Cut, list[bool]]] = {}
        body = opened(jaxpr)[0]
        known = Known()
        walk(body, [True if one else Known.UNKNOWN for one in again], known)
        self.again = {var for var, value in known.known.items() if value is True}
        ends = [(atom, mine) for atom, mine in zip(body.outvars, results, strict=True) if not isinstance(atom, Literal)]
        self.made = {atom for atom, mine in ends if mine}
        for eqn in reversed(body.eqns):  # from the results to what they need
            self._make(eqn)
        self.read = {atom for atom, mine in ends if not mine}
        for eqn in reversed(body.eqns):
            self._read(eqn)
        lost = {var for var, one in zip(body.invars, gone, strict=True) if one}
        lost |= {var for eqn in body.eqns for var in eqn.outvars if var in self.made}
        order = [*body.invars, *(var for eqn in body.eqns for var in eqn.outvars)]
        self.crossing = [var for var in order if var in lost and var in self.read and var not in self.again]
        self.count = len(self.crossing) + sum(inner.count for inner, _ in self.scans.values())

    def _make(self, eqn: Equation) -> None:
        mine = [var in self.made for var in eqn.outvars]
        if not any(mine):
            return
        if eqn.primitive.name != "scan" or all(mine):
            self.made.update(eqn.outvars, _variables(eqn.invars))
            return
        inner, mine = self.scans[id(eqn)] = self._of_scan(eqn, mine)
        loop = _Loop(eqn)
        used = [
            var in inner.made if (place := loop.carry(i)) is None else mine[place] for i, var in enumerate(loop.inputs)
        ]
        self.made.update(_variables(atom for atom, one in zip(eqn.invars, used, strict=True) if one))
        self.made.update(var for var, one in zip(eqn.outvars, mine, strict=True) if one)

    def _of_scan(self, eqn: Equation, mine: list[bool]) -> tuple[Cut, list[bool]]:
        """The cut body of a scan. A carry that the first part reads is its own too."""
        loop = _Loop(eqn)
        again = [
            loop.carry(i) is None and (isinstance(atom, Literal) or atom in self.again)
            for i, atom in enumerate(eqn.invars)
        ]
        while True:
            gone = [(place := loop.carry(i)) is not None and mine[place] for i in range(len(loop.inputs))]
            inner = Cut(loop.body.jaxpr, mine, again, gone)
            more = [
                one or (i < loop.carries and loop.inputs[loop.consts + i] in inner.made) for i, one in enumerate(mine)
            ]
            if more == mine:
                return inner, mine
            mine = more

    def _read(self, eqn: Equation) -> None:
        if id(eqn) in self.scans:
            inner, mine = self.scans[id(eqn)]
            loop = _Loop(eqn)
            for i, (atom, var) in enumerate(zip(eqn.invars, loop.inputs, strict=True)):
                place = loop.carry(i)
                if var in inner.read if place is None else not mine[place]:
                    self.read.update(_variables([atom]))
        elif self.second(eqn):
            self.read.update(_variables(eqn.invars))

    def second(self, eqn: Equation) -> bool:
        """Return whether the second part has an equation, even if the first one has it too."""
        if not any(var in self.made for var in eqn.outvars):
            return True
        return all(var in self.again for var in eqn.outvars) and any(var in self.read for var in eqn.outvars)

    # --- the two parts ----------------------------------------------------------------------------------------

    def run_first(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the first part, and what crosses."""
        part = _First(self)
        results = walk(self.jaxpr, values, part)
        crossing = [*(part.known[var] for var in self.crossing), *part.stacks]
        return [one for one, mine in zip(results, self.results, strict=True) if mine], crossing

    def run_second(self, values: Sequence[Any], crossing: Sequence[Any]) -> list[Any]:
        """The results of the second part. Of the inputs that only the first part has, any value will do."""
        part = _Second(self, crossing)
        given = [part.given.get(var, one) for var, one in zip(opened(self.jaxpr)[0].invars, values, strict=True)]
        results = walk(self.jaxpr, given, part)
        return [one for one, mine in zip(results, self.results, strict=True) if not mine]


def _variables(atoms: Any) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


class _Loop:
    """Where a scan has its constants, its carries and what it runs over."""

    def __init__(self, eqn: Equation) -> None:
        self.body = held(eqn)[0]
        self.inputs = opened(self.body.jaxpr)[0].invars
        self.carries = len(self.body.stacked) - sum(self.body.stacked)
        self.consts = len(self.inputs) - sum(self.body.sliced) - self.carries
        self._how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}

    def carry(self, i: int) -> int | None:
        """Return which carry the operand is, if it is one."""
        return i - self.consts if 0 <= i - self.consts < self.carries else None

    def run(self, body: Any, operands: Sequence[Any], mine: Sequence[bool], extra: Any = ()) -> tuple[list[Any], Any]:
        """The results that are `mine`, and what `body(values, extra)` gives beside its results, stacked."""
        start = [one for i, one in enumerate(operands) if (place := self.carry(i)) is not None and mine[place]]
        slices = {i: one for i, one in enumerate(operands) if i >= self.consts + self.carries and one is not _LATER}

        def once(carry: list[Any], now: Any) -> tuple[list[Any], Any]:
            sliced, more = now
            carries = iter(carry)
            values = [
                (next(carries) if mine[place] else _LATER)
                if (place := self.carry(i)) is not None
                else sliced.get(i, _LATER if i >= self.consts else one)
                for i, one in enumerate(operands)
            ]
            outs, beside = body(values, more)
            kept = [out for out, one in zip(outs, mine, strict=True) if one]
            return kept[: len(carry)], (kept[len(carry) :], beside)

        last, (stacked, beside) = lax.scan(once, start, (slices, extra), **self._how)
        found = iter([*last, *stacked])
        return [next(found) if one else _LATER for one in mine], beside


class _First(Values):
    """Arrays, or values that this part does not have."""

    def __init__(self, cut: Cut) -> None:
        super().__init__(cut.jaxpr)
        self.cut = cut
        self.stacks: list[Any] = []

    def equation(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if not any(var in self.cut.made for var in eqn.outvars):
            return [_LATER] * len(eqn.outvars)
        if id(eqn) not in self.cut.scans:
            return self.alone(eqn, operands)
        inner, mine = self.cut.scans[id(eqn)]

        def body(values: Sequence[Any], _: Any) -> tuple[list[Any], list[Any]]:
            results, crossing = inner.run_first(values)
            found = iter(results)
            return [next(found) if one else _LATER for one in mine], crossing

        outs, stacks = _Loop(eqn).run(body, _only(eqn, operands, inner.made), mine)
        self.stacks += stacks
        return outs


class _Second(Values):
    """Arrays, or values that this part does not have."""

    def __init__(self, cut: Cut, crossing: Sequence[Any]) -> None:
        super().__init__(cut.jaxpr)
        self.cut = cut
        self.given = dict(zip(cut.crossing, crossing, strict=False))
        self.stacks = list(crossing[len(cut.crossing) :])

    def equation(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        if id(eqn) in self.cut.scans:
            inner, mine = self.cut.scans[id(eqn)]
            stacks, self.stacks = self.stacks[: inner.count], self.stacks[inner.count :]
            rest = [not one for one in mine]

            def body(values: Sequence[Any], crossing: list[Any]) -> tuple[list[Any], tuple[()]]:
                found = iter(inner.run_second(values, crossing))
                return [next(found) if one else _LATER for one in rest], ()

            outs, _ = _Loop(eqn).run(body, _only(eqn, operands, inner.read), rest, stacks)
        elif self.cut.second(eqn):
            return self.alone(eqn, operands)
        else:
            outs = [_LATER] * len(eqn.outvars)
        return [self.given.get(var, out) for var, out in zip(eqn.outvars, outs, strict=True)]


def _only(eqn: Equation, operands: Sequence[Any], used: set[Any]) -> list[Any]:
    """The operands of a scan that its body uses, and its carries."""
    loop = _Loop(eqn)
    return [
        one if var in used or loop.carry(i) is not None else _LATER
        for i, (var, one) in enumerate(zip(loop.inputs, operands, strict=True))
    ]


# --- calls ----------------------------------------------------------------------------------------------------------


def inlined(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, of whose calls no equation is left, in the bodies of its scans too."""
    return walk(jaxpr, values, _Inlined(jaxpr))


class _Inlined(Values):
    def step(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        return self.alone(eqn, operands)

    def mapped(self, eqn: Equation, part: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return self.step(eqn, operands)

    def branches(self, eqn: Equation, parts: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return self.step(eqn, operands)

    def loop(self, eqn: Equation, body: Any, test: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if test is not None:
            return self.step(eqn, operands)
        once = lambda values, _: (inlined(body.jaxpr, values), ())
        return _Loop(eqn).run(once, operands, [True] * len(eqn.outvars))[0]


# --- a stage of a pipeline as three functions: forward, the gradient of its input, and the gradients of its weights ---


@dataclass(frozen=True, eq=False)
class SplitStage:
    """A traced stage, of leaves: `stage(weights, x) -> y`.

    Attributes:
      layer: The stage.
      consts: What it closes over. It has no gradient.
      cut: The backward pass of weights, what is kept, and cotangents, in two parts.
      kept: The types of what the forward pass keeps.
      crossing: The types of what the first part of the backward pass keeps for the second.
      cotangents: How many leaves of the result have a gradient.
    """

    layer: Layer
    consts: list[Any]
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
            found.append((cut, len(cotangent)))
            return kept, crossing

        traced, shapes = jax.make_jaxpr(probe, return_shape=True)(weights, x)
        count = len(shapes[0])
        [(cut, cotangents)] = found
        types = traced.out_avals
        return SplitStage(layer, consts, cut, types[:count], types[count:], cotangents)

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
