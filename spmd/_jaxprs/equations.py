"""Which primitives hold jaxprs, and how their inputs and results correspond to an equation's operands and results.

One table for every walk over jaxprs (`walker.py`): a primitive that holds jaxprs is entered here once, and the checker,
`explain` and the layers know it. A primitive that is not entered counts as a call if one of its jaxprs fits its
operands and results one to one. Otherwise no walk looks into it, and `explain` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params


class Role:
    """What an equation does with a jaxpr that it holds."""

    CALL = "call"  # runs it once, and its results are the equation's
    LOOP = "loop"  # runs it again and again, on carries that it makes itself
    TEST = "test"  # asks it whether a loop goes on
    BRANCH = "branch"  # runs it, or another one
    MAP = "map"  # runs it on the shards
    SCALARS = "scalars"  # combines two scalars by it: part of the equation's own work
    DERIVATIVE = "derivative"  # does not run it: the derivative of the equation does
    OPAQUE = "opaque"  # runs it in a language of its own, on blocks or on references
    UNKNOWN = "unknown"  # the table does not say


class Held(NamedTuple):
    """A jaxpr that an equation holds.

    Attributes:
      jaxpr: The jaxpr, closed or open.
      role: What the equation does with it, one of `Role`.
      operands: For each of its inputs, the number of the operand that it is (in a loop: in the first round); empty
        where its inputs are not operands.
      sliced: For each input, whether it is one slice of the operand.
      stacked: For each result, whether the equation's is a stack of them.
      number: Which of the branches it is.
    """

    jaxpr: Any
    role: str
    operands: tuple[int, ...] = ()
    sliced: tuple[bool, ...] = ()
    stacked: tuple[bool, ...] = ()
    number: int = 0

    def of(self, values: Sequence[Any]) -> list[Any]:
        """The values of its inputs, from one value per operand of the equation."""
        return [values[i] for i in self.operands]


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr and the values of its constants; newer JAX has one class where older has two."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return inner, consts if len(consts) == len(inner.constvars) else ()


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return getattr(atom.aval, "shape", ())


# --- the table ----------------------------------------------------------------------------------------------


def _scan(eqn: Any) -> tuple[Held, ...]:
    jaxpr = eqn.params["jaxpr"]
    body, _ = opened(jaxpr)
    sliced = [len(shape_of(o)) != len(shape_of(i)) for o, i in zip(eqn.invars, body.invars, strict=True)]
    stacked = [len(shape_of(o)) != len(shape_of(i)) for o, i in zip(eqn.outvars, body.outvars, strict=True)]
    return (Held(jaxpr, Role.LOOP, tuple(range(len(sliced))), tuple(sliced), tuple(stacked)),)


def _while(eqn: Any) -> tuple[Held, ...]:
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carries = tuple(range(n_test + n_body, len(eqn.invars)))
    test = Held(eqn.params["cond_jaxpr"], Role.TEST, (*range(n_test), *carries))
    given = (*range(n_test, n_test + n_body), *carries)
    body = Held(eqn.params["body_jaxpr"], Role.LOOP, given, (False,) * len(given), (False,) * len(carries))
    return test, body


def _cond(eqn: Any) -> tuple[Held, ...]:
    given = tuple(range(1, len(eqn.invars)))
    return tuple(Held(branch, Role.BRANCH, given, number=i) for i, branch in enumerate(eqn.params["branches"]))


def _linear_solve(eqn: Any) -> tuple[Held, ...]:
    """Only the solver runs. The product that it inverts, and the transposes of both, serve derivatives."""
    found, first = [], 0
    jaxprs, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    rest = tuple(range(sum(lengths), len(eqn.invars)))
    for name, jaxpr, n in zip(jaxprs._fields, jaxprs, lengths, strict=True):
        if jaxpr is not None:
            role = Role.CALL if name == "solve" else Role.DERIVATIVE
            found.append(Held(jaxpr, role, (*range(first, first + n), *rest)))
        first += n
    return tuple(found)


def _all(role: str) -> Callable[[Any], tuple[Held, ...]]:
    """All of its jaxprs have one role, and inputs that are not operands."""
    return lambda eqn: tuple(Held(jaxpr, role) for jaxpr in jaxprs_in_params(eqn.params))


def _mapped(eqn: Any) -> tuple[Held, ...]:
    return (Held(eqn.params["jaxpr"], Role.MAP, tuple(range(len(eqn.invars)))),)


_TABLE: dict[str, Callable[[Any], tuple[Held, ...]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _mapped,
    "custom_linear_solve": _linear_solve,
    **dict.fromkeys(("reduce", "reduce_window", "select_and_scatter", "select_and_scatter_add"), _all(Role.SCALARS)),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"), _all(Role.SCALARS)),
    **dict.fromkeys(("scatter-mul", "scatter_mul", "scatter-min", "scatter_min"), _all(Role.SCALARS)),
    **dict.fromkeys(("scatter-max", "scatter_max", "sort"), _all(Role.SCALARS)),
    **dict.fromkeys(("pallas_call", "core_map", "mpmd_map", "tpu_custom_call"), _all(Role.OPAQUE)),
}
_PLAIN = frozenset(("jit", "pjit", "closed_call", "core_call"))


def held(eqn: Any) -> tuple[Held, ...]:
    """The jaxprs that an equation holds, each with its role."""
    known = _TABLE.get(eqn.primitive.name)
    if known is not None:
        return known(eqn)
    jaxprs = list(_in_params(eqn.params))
    fitting = next((jaxpr for jaxpr in jaxprs if _is_callee(jaxpr, eqn)), None)
    if fitting is None:
        return tuple(Held(jaxpr, Role.UNKNOWN) for jaxpr in jaxprs)
    return (Held(fitting, Role.CALL, tuple(range(len(eqn.invars)))),)


def _in_params(params: Any) -> Iterator[Any]:
    """The jaxprs among parameters, as they are held: closed ones with their constants."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                yield part


def _is_callee(jaxpr: Any, eqn: Any) -> bool:
    inner, _ = opened(jaxpr)
    return _fits(inner.invars, eqn.invars) and _fits(inner.outvars, eqn.outvars)


def _fits(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether these are the same values."""
    return len(inner) == len(outer) and all(shape_of(a) == shape_of(b) for a, b in zip(inner, outer, strict=True))


def call_of(eqn: Any) -> Held | None:
    """The jaxpr that an equation runs once and whose results are its own, if there is one."""
    return next((one for one in held(eqn) if one.role == Role.CALL), None) if eqn.params else None


def plain_call(eqn: Any) -> Any:
    """The jaxpr of an equation that means no more than its jaxpr: no derivative of its own, no rematerialisation."""
    inner = call_of(eqn) if eqn.primitive.name in _PLAIN else None
    return None if inner is None else inner.jaxpr


def is_unknown(eqn: Any) -> bool:
    """Whether an equation holds jaxprs and the table does not say what it does with them."""
    return bool(eqn.params) and any(one.role == Role.UNKNOWN for one in held(eqn))


# --- collectives ----------------------------------------------------------------------------------------------

_COLLECTIVES = """psum psum_invariant unreduced_psum pmax pmin all_gather all_gather_invariant
    all_gather_reduced reduce_scatter reduce_scatter_start unreduced_reduce_scatter psum_scatter all_to_all
    ragged_all_to_all ppermute pgather psend precv"""
COMMUNICATES = frozenset(_COLLECTIVES.split())  # what the devices of an axis enter together


def axes_of(eqn: Any) -> tuple[str, ...]:
    """The mesh axes of a collective, whichever parameter holds them."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", eqn.params.get("axis", ())))
    if isinstance(found, str):
        return (found,)
    return tuple(a for a in found if isinstance(a, str)) if isinstance(found, tuple | list | frozenset | set) else ()
