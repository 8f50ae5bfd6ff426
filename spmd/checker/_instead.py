"""What to write in place of a function of JAX that reduces a divided dimension: lines with the layout of its array.

Inside of `jnp.var` or `jax.nn.softmax` nobody can write a collective. So the whole call is replaced, and the layout
that the new call needs is that of the array which the function was given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.equations import call_of, opened, shape_of
from spmd.checker._made import lying
from spmd.checker._rounding import rounds
from spmd.checker._source import called_in_jax
from spmd.errors import Fix, if_possible
from spmd.language import axes_product

Lines = tuple[str | Fix, ...]
ARRAY = "<the array>"
_SAME = ("copy", "copy_p", "pvary", "pcast", "spmd_layout", "name")


# Functions of optax that sum over whole arrays: how their names begin, and what takes divided ones.
_OF_OPTAX = {
    ("clip_by_global_norm", "global_norm", "tree_norm", "norm"): (
        "spmd.parallel.clip_by_global_norm(max_norm, layouts), a transformation of optax for divided trees; "
        "spmd.parallel.global_norm(tree, layouts) is the norm"
    ),
    ("softmax_cross_entropy",): 'spmd.nn.cross_entropy(logits, labels, tp="tp", dp="dp"), of a divided vocabulary',
}


@if_possible
def in_place_of_optax(eqn: Any) -> str | None:
    """What to call in place of a function of optax that made an equation, if there is one. Nobody can write a
    collective inside of it."""
    within = os.sep + "optax" + os.sep
    called = [code.co_qualname for code, _ in _compat.call_stack(eqn) if within in code.co_filename]
    return next((text for names, text in _OF_OPTAX.items() if any(name.startswith(names) for name in called)), None)


@dataclass(frozen=True)
class Reduced:
    """An array that a function of JAX reduces.

    Attributes:
      text: The array as the user may write it; with `ARRAY` where it is neither an argument nor the square of one.
      dims: Its dimensions, as a layout has them.
      gone: Those that are reduced.
      count: How many numbers of the whole array make one of the result.
      keeps: Whether the result keeps them, with size 1.
      less: By how much the divisor of a variance is less than that number.
    """

    text: str
    dims: tuple[str, ...]
    gone: frozenset[int]
    count: int
    keeps: bool = False
    less: int = 0

    def reduce(self, op: str, text: str | None = None, *, keeps: bool | None = None) -> Fix:
        keeps = self.keeps if keeps is None else keeps
        right = ["1" if i in self.gone else dim for i, dim in enumerate(self.dims) if keeps or i not in self.gone]
        pattern = f"{' '.join(self.dims)} -> {' '.join(right) or 'scalar'}"
        return Fix("reduce", (text or self.text,), pattern, {} if op == "sum" else {"op": op})

    def var(self) -> Lines:
        squares = f"({self.text} - m) ** 2"
        spread: str | Fix = self.reduce("mean", squares)
        if self.less:
            spread = f"{self.reduce('sum', squares)} / {self.count - self.less}"
        return f"m = {self.reduce('mean', keeps=True)}", spread

    def std(self) -> Lines:
        mean, spread = self.var()
        return mean, Fix("jnp.sqrt", (spread,))

    def norm(self) -> Lines:
        return (Fix("jnp.sqrt", (self.reduce("sum"),)),)

    def softmax(self) -> Lines:
        return (Fix("softmax", (self.text,), " ".join(self._bracketed())),)

    def log_softmax(self) -> Lines:
        return (f"{self.text} - {self.reduce('logsumexp', keeps=True)}",)

    def logsumexp(self) -> Lines:
        return (self.reduce("logsumexp"),)

    def _bracketed(self) -> list[str]:
        return [f"[{dim}]" if i in self.gone else dim for i, dim in enumerate(self.dims)]


_LINES: dict[str, Callable[[Reduced], Lines]] = {
    "log_softmax": Reduced.log_softmax,
    "logsumexp": Reduced.logsumexp,
    "softmax": Reduced.softmax,
    "_std": Reduced.std,
    "_var": Reduced.var,
    "norm": Reduced.norm,
}


@if_possible
def lines_in_place(walk: Any, eqn: Any, callers: Sequence[Any]) -> Lines:
    """The lines that mean what the user's call of a function of JAX means, whose equation this is; none if unsure."""
    inside = {one.params.get("name") for one in callers}  # a cached jit was traced at another call
    function = next((name for name in _LINES if name in inside or called_in_jax(eqn, name)), None)
    if function is None or called_in_jax(eqn, "standardize"):
        return ()
    if function == "norm" and eqn.primitive.name != "sqrt":
        return ()  # of another order than 2
    found = reduced(walk, eqn, callers, "_var" if function == "_std" else function)
    if found is None or (function == "norm" and not found.text.endswith(" ** 2")):
        return ()
    if function in ("_var", "_std"):
        less = _less(walk, callers)
        if less is None:
            return ()
        found = replace(found, less=less)
    call = next((one for one in callers if one.params.get("name") == function), None)
    result = shape_of(eqn.invars[0] if call is None else call.outvars[0])
    return _LINES[function](replace(found, keeps=len(result) == len(found.dims)))


def reduced(walk: Any, eqn: Any, callers: Sequence[Any], function: str) -> Reduced | None:
    """The array whose reduction by this function is behind an equation; None where it is not the only one."""
    wanted = "reduce_max" if function.endswith(("softmax", "logsumexp")) else "reduce_sum"
    chain: dict[int, Any] = {}
    for atom in eqn.invars:
        for var in walk.history.behind(atom, lambda one: one.primitive.name == wanted):
            if (made := walk.history.producer(var)) is not None and called_in_jax(made[0], function):
                chain[id(made[0])] = made[0]
    reductions = [one for one in chain.values() if one.primitive.name == wanted]
    state = walk.known.get(reductions[0].invars[0]) if reductions else None
    if state is None or state.partial or state.different or len(reductions) > 1:
        return None
    array, gone = reductions[0].invars[0], frozenset(reductions[0].params["axes"])
    axes, shape = lying(state).dims, shape_of(array)
    known = [tuple(one) for one in axes if one is not None]
    if len(known) != len(axes):
        return None
    count = math.prod(shape[i] * axes_product(known[i], walk.sizes) for i in gone)
    text, dims = _written(walk, array, callers), _dims(walk, known, shape)
    return Reduced(text, dims, gone, count, any(one.primitive.name == "broadcast_in_dim" for one in chain.values()))


def _less(walk: Any, callers: Sequence[Any]) -> int | None:
    """By how much the divisor of a variance is less than the number of its terms; None where that is not known."""
    rest = list(callers)
    while rest and rest[-1].params.get("name") != "_var":
        rest.pop()
    if not rest or len(rest[-1].invars) != 2:
        return None
    atom, _ = _origin(walk, rest[-1].invars[1], rest[:-1])
    return int(atom.val) if isinstance(atom, Literal) else None


def _dims(walk: Any, axes: Sequence[Any], shape: Sequence[int]) -> tuple[str, ...]:
    """Dimensions with these axes as a layout has them: with the names of an argument that lies so, or with new ones."""
    for var, (_, layout) in walk.history.arguments.items():
        if tuple(shape_of(var)) == tuple(shape) and [dim.axes for dim in layout.dims] == list(axes):
            whole = all("/".join((atom.name, *atom.axes)) in walk.kernel for atom in layout.atoms if atom.axes)
            return tuple(dim.short if whole else dim.text for dim in layout.without_brackets().dims)
    used = {name for one in walk.arg_layouts for name in one.names}
    free = (name for name in "abcdefghijklmnopqrstuvwxyz" if name not in used and name not in walk.sizes)
    return tuple("/".join((next(free), *one)) for one in axes)


def _written(walk: Any, atom: Any, callers: Sequence[Any]) -> str:
    """How the user may write a value."""
    atom, rest = _origin(walk, atom, callers)
    made = None if isinstance(atom, Literal) else walk.history.producer(atom)
    square = made is not None and _is_square(made[0])
    if made is not None and square:
        atom, _ = _origin(walk, made[0].invars[0], rest)
    name, _ = walk.history.arguments.get(atom, (ARRAY, None)) if not isinstance(atom, Literal) else (ARRAY, None)
    return f"{name} ** 2" if square else name


def _origin(walk: Any, atom: Any, callers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The variable that a value was before it was passed into calls, or moved; and the calls around that."""
    rest = list(callers)
    while not isinstance(atom, Literal):
        made = walk.history.producer(atom)
        inner = call_of(rest[-1]) if rest and made is None else None
        inputs = [] if inner is None else opened(inner.jaxpr)[0].invars
        if made is not None and _is_same(made[0]):
            atom = made[0].invars[0]
        elif inner is not None and atom in inputs:
            atom = inner.of(rest.pop().invars)[inputs.index(atom)]
        else:
            break
    return atom, rest


def _is_same(eqn: Any) -> bool:
    return eqn.primitive.name in _SAME or (eqn.primitive.name == "convert_element_type" and not rounds(eqn))


def _is_square(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return eqn.invars[0] is eqn.invars[1]
    return name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
