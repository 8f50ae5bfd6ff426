"""One walk over jaxprs: a value for every variable, carried from the arguments to the results.

A `Domain` says what a value is and what an equation makes of it: the checker has states, `explain` has costs and
placements, a layer asks which values it can make again. The walk does the rest: it reads constants, enters calls and
branches, and repeats loops until they settle.

One table says which primitives hold jaxprs, and how their inputs and results correspond to an equation's operands and
results. A primitive that holds jaxprs is entered there once, and the checker, `explain` and the layers know it. A
primitive that is not entered counts as a call if one of its jaxprs fits its operands and results one to one. Otherwise
no walk looks into it, and `explain` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jax.extend.core import Literal, jaxprs_in_params

from spmd._jaxprs.primitives import COLLECTIVES


class Variable(Protocol):
    """A variable of a jaxpr, or a number that stands in one. Its type has a shape and a dtype, but for a token's."""

    @property
    def aval(self) -> Any: ...


class Equation(Protocol):
    """One equation of a jaxpr, as JAX has it."""

    primitive: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]
    params: dict[str, Any]
    source_info: Any

    def replace(self, **changes: Any) -> Equation: ...


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


def shape_of(atom: Variable) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return getattr(atom.aval, "shape", ())


# --- the table ----------------------------------------------------------------------------------------------


def _scan(eqn: Equation) -> tuple[Held, ...]:
    jaxpr = eqn.params["jaxpr"]
    body, _ = opened(jaxpr)
    sliced = [len(shape_of(o)) != len(shape_of(i)) for o, i in zip(eqn.invars, body.invars, strict=True)]
    stacked = [len(shape_of(o)) != len(shape_of(i)) for o, i in zip(eqn.outvars, body.outvars, strict=True)]
    return (Held(jaxpr, Role.LOOP, tuple(range(len(sliced))), tuple(sliced), tuple(stacked)),)


def _while(eqn: Equation) -> tuple[Held, ...]:
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carries = tuple(range(n_test + n_body, len(eqn.invars)))
    test = Held(eqn.params["cond_jaxpr"], Role.TEST, (*range(n_test), *carries))
    given = (*range(n_test, n_test + n_body), *carries)
    body = Held(eqn.params["body_jaxpr"], Role.LOOP, given, (False,) * len(given), (False,) * len(carries))
    return test, body


def _cond(eqn: Equation) -> tuple[Held, ...]:
    given = tuple(range(1, len(eqn.invars)))
    return tuple(Held(branch, Role.BRANCH, given, number=i) for i, branch in enumerate(eqn.params["branches"]))


def _linear_solve(eqn: Equation) -> tuple[Held, ...]:
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


def _mapped(eqn: Equation) -> tuple[Held, ...]:
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


def held(eqn: Equation) -> tuple[Held, ...]:
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


def _is_callee(jaxpr: Any, eqn: Equation) -> bool:
    inner, _ = opened(jaxpr)
    return _fits(inner.invars, eqn.invars) and _fits(inner.outvars, eqn.outvars)


def _fits(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Return whether these are the same values."""
    return len(inner) == len(outer) and all(shape_of(a) == shape_of(b) for a, b in zip(inner, outer, strict=True))


def call_of(eqn: Equation) -> Held | None:
    """The jaxpr that an equation runs once and whose results are its own, if there is one."""
    return next((one for one in held(eqn) if one.role == Role.CALL), None) if eqn.params else None


def plain_call(eqn: Equation) -> Any:
    """The jaxpr of an equation that means no more than its jaxpr: no derivative of its own, no rematerialisation."""
    inner = call_of(eqn) if eqn.primitive.name in _PLAIN else None
    return None if inner is None else inner.jaxpr


def is_unknown(eqn: Equation) -> bool:
    """Return whether an equation holds jaxprs and the table does not say what it does with them."""
    return bool(eqn.params) and any(one.role == Role.UNKNOWN for one in held(eqn))


# --- collectives ----------------------------------------------------------------------------------------------

COMMUNICATES = frozenset(COLLECTIVES)  # what the devices of an axis enter together


def axes_of(eqn: Equation) -> tuple[str, ...]:
    """The mesh axes of a collective, whichever parameter holds them."""
    found = eqn.params.get("axes", eqn.params.get("axis_name", eqn.params.get("axis", ())))
    if isinstance(found, str):
        return (found,)
    return tuple(a for a in found if isinstance(a, str)) if isinstance(found, tuple | list | frozenset | set) else ()


def vmapped_dims(eqn: Equation) -> tuple[int, ...]:
    """The dimensions that a collective reduces as well: those of a `vmap` whose name is its axis."""
    return tuple(axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int))


# --- the walk ---------------------------------------------------------------------------------------------------------


Rule = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]
_ROUNDS = 200  # a loop of a sound domain settles in a few


def walk(jaxpr: Any, values: Sequence[Any], domain: Domain) -> list[Any]:
    """Walk over a jaxpr, closed or open.

    Args:
      jaxpr: The jaxpr.
      values: One value for each of its inputs.
      domain: What is done with them.

    Returns:
      One value for each of its results.
    """
    body, consts = opened(jaxpr)
    rules, literal = domain.rules, domain.literal
    known, keep = domain.known, domain.keep
    known.update(zip(body.invars, values, strict=True))
    for i, var in enumerate(body.constvars):
        known[var] = domain.constant(var, consts[i] if consts else None)
    for eqn in body.eqns:
        operands = [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        rule = rules.get(eqn.primitive.name)
        outs = domain.equation(eqn, operands) if rule is None else rule(domain, eqn, operands)
        if keep is not None:
            outs = keep(eqn, operands, outs)
        for var, out in zip(eqn.outvars, outs, strict=True):
            known[var] = out
    return [literal(atom) if isinstance(atom, Literal) else known[atom] for atom in body.outvars]


def equations(jaxpr: Any, *, derivatives: bool = True) -> Iterator[Any]:
    """All equations of a jaxpr, at any depth, each before those of the jaxprs that it holds.

    Without `derivatives`, those that run: not the ones kept for the derivative of an equation.
    """
    for eqn in opened(jaxpr)[0].eqns:
        yield eqn
        for one in held(eqn):
            if derivatives or one.role != Role.DERIVATIVE:
                yield from equations(one.jaxpr, derivatives=derivatives)


class Domain:
    """What a walk carries. A subclass says what a constant is (`constant`) and what an equation gives (`step`).

    To follow loops and branches, it also says what is known where two paths meet (`join`). Everything else has a
    default: a call gives what its jaxpr gives, a loop is walked until its carries settle, branches are joined.
    A subclass that counts overrides `run`, because every jaxpr inside another one passes through it.

    Attributes:
      rules: For the name of a primitive, a function that gives its results: `rule(domain, eqn, operands)`. Rules come
        first: a primitive that has a rule is not entered, even if it holds a jaxpr.
      callers: The equations whose jaxprs the walk is inside of, outermost first.
      keep: Of a walk that remembers, a function of each equation, its operands and its results; it returns the results.
      known: The value of each variable, when the walk was there last.
      findings: What the walk reports. `of_rounds` says what it keeps of the rounds of a loop that had not settled yet.

    Example:
      Which arguments is each result made of?

      >>> import jax, jax.numpy as jnp
      >>> class MadeOf(Domain):
      ...     def constant(self, var, value):
      ...         return frozenset()
      ...     def step(self, eqn, operands):
      ...         return [frozenset().union(*operands)] * len(eqn.outvars)
      ...     def join(self, one, other):
      ...         return one | other
      >>> def power(x, w, b):
      ...     y, _ = jax.lax.scan(lambda y, _: (y @ w, None), x, length=5)
      ...     return jnp.sin(b), jax.lax.cond(b > 0, lambda: y, lambda: y + b)
      >>> jaxpr = jax.make_jaxpr(power)(jnp.ones((4, 4)), jnp.ones((4, 4)), 1.0)
      >>> print(*map(sorted, walk(jaxpr, [{"x"}, {"w"}, {"b"}], MadeOf())))
      ['b'] ['b', 'w', 'x']

      How many multiplications are in its products, loops multiplied out? Here no value matters, and so each loop
      settles at once.

      >>> class Products(MadeOf):
      ...     total, times = 0, 1
      ...     rules = {"dot_general": lambda self, eqn, operands: self.product(eqn, operands)}
      ...     def product(self, eqn, operands):
      ...         [contracted], _ = eqn.params["dimension_numbers"][0]
      ...         self.total += self.times * eqn.invars[0].aval.shape[contracted] * eqn.outvars[0].aval.size
      ...         return self.step(eqn, operands)
      ...     def run(self, eqn, part, operands):
      ...         before, self.times = self.times, self.times * eqn.params.get("length", 1)
      ...         outs = super().run(eqn, part, operands)
      ...         self.times = before
      ...         return outs
      >>> products = Products()
      >>> _ = walk(jaxpr, [frozenset()] * 3, products)
      >>> products.total == 5 * 4 * 4 * 4
      True
    """

    rules: ClassVar[Mapping[str, Rule]] = {}
    keep: Any = None

    def __init__(self) -> None:
        self.callers: list[Any] = []
        self.known: dict[Any, Any] = {}
        self.findings: list[Any] = []
        self._walked: dict[Any, tuple[Any, list[Any]]] = {}

    # --- values -------------------------------------------------------------------------------------------

    def constant(self, var: Variable | None, value: Any) -> Any:
        """A constant of a jaxpr; its value is None where the jaxpr does not hold it. By default nothing is known."""
        return None

    def literal(self, atom: Variable) -> Any:
        """A number that stands in an equation: a `Literal`."""
        return self.constant(None, atom.val)

    def step(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation that holds no jaxpr, or one that is part of its own work; by default unknown."""
        return [None] * len(eqn.outvars)

    def unread(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation whose jaxprs no walk can read."""
        return self.step(eqn, operands)

    # --- where paths meet ---------------------------------------------------------------------------------

    def join(self, one: Any, other: Any) -> Any:
        """Return what is known of a value that is one or the other."""
        raise NotImplementedError

    def same(self, one: Any, other: Any) -> bool:
        """Return whether a carry has settled. A domain that says so at once walks each loop once."""
        return one == other

    def unsettled(self, value: Any) -> Any:
        """Return what is known of a carry that does not settle."""
        return value

    def carried(self, value: Any) -> Any:
        """Return what a carry of one round of a loop is in the next."""
        return value

    def may_not_run(self, value: Any, start: Any) -> Any:
        """Return what is known of the result of a loop that may not run at all."""
        return self.join(value, start)

    def sliced(self, value: Any, operand: Any) -> Any:
        """One slice of an array over which a loop runs. `operand` is the variable of the array."""
        return value

    def stacked(self, value: Any, result: Any) -> Any:
        """The stack of the results of a loop's steps. `result` is the variable of the stack."""
        return value

    def decides(self, eqn: Equation, predicate: Any) -> None:
        """A branch is chosen, or a loop goes on, by a value like this one."""

    def decided(self, value: Any, predicate: Any) -> Any:
        """Return what is known of a result that depends on such a decision."""
        return value

    # --- equations that hold jaxprs -----------------------------------------------------------------------

    def equation(self, eqn: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation whose primitive has no rule."""
        parts = held(eqn) if eqn.params else ()
        if not parts or parts[0].role == Role.SCALARS:
            return self.step(eqn, operands)
        roles = {part.role: part for part in parts}
        if Role.CALL in roles:
            return self.call(eqn, roles[Role.CALL], operands)
        if Role.LOOP in roles:
            return self.loop(eqn, roles[Role.LOOP], roles.get(Role.TEST), operands)
        if Role.BRANCH in roles:
            return self.branches(eqn, parts, operands)
        if Role.MAP in roles:
            return self.mapped(eqn, roles[Role.MAP], operands)
        return self.unread(eqn, operands)

    def run(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> list[Any]:
        """The results of a jaxpr that an equation holds; `operands` are the values of the jaxpr's own inputs."""
        context = self.context()
        key = None if context is None else (id(opened(part.jaxpr)[0]), tuple(operands), context)
        if key in self._walked:
            return self._walked[key][1]
        found = len(self.findings)
        self.callers.append(eqn)
        outs = walk(part.jaxpr, operands, self)
        self.callers.pop()
        if key is not None and len(self.findings) == found:
            self._walked[key] = (part.jaxpr, outs)  # the jaxpr too, so that no other gets its id
        return outs

    def context(self) -> Hashable:
        """Return what the results of a jaxpr depend on besides its operands. None: each jaxpr is walked each time.

        Otherwise a jaxpr is walked once for equal operands, unless the walk found something in it: findings name their
        callers.
        """
        return None

    def call(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> Sequence[Any]:
        """A call: `jit`, `remat`, a custom rule, a solver."""
        return self.run(eqn, part, part.of(operands))

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> Sequence[Any]:
        """A `shard_map`."""
        return self.run(eqn, part, part.of(operands))

    def branches(self, eqn: Equation, parts: Sequence[Held], operands: Sequence[Any]) -> Sequence[Any]:
        """A `cond`, whose first operand decides."""
        predicate = operands[0]
        self.decides(eqn, predicate)
        outs = [self.run(eqn, part, part.of(operands)) for part in parts]
        return [self.decided(functools.reduce(self.join, found), predicate) for found in zip(*outs, strict=True)]

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[Any]) -> Sequence[Any]:
        """A `scan`, or a `while` with its test: round after round, until the carries are what they become."""
        count = len(body.stacked) - sum(body.stacked)
        whole = zip(body.of(operands), body.of(eqn.invars), body.sliced, strict=True)
        given = [self.sliced(value, atom) if sliced else value for value, atom, sliced in whole]
        first = len(given) - sum(body.sliced) - count
        start = given[first : first + count]

        def once(carry: Sequence[Any]) -> list[Any]:
            if test is None:
                return self.run(eqn, body, [*given[:first], *carry, *given[first + count :]])
            constants = test.of(operands)[: len(test.operands) - count]
            [goes_on] = self.run(eqn, test, [*constants, *carry])
            self.decides(eqn, goes_on)
            outs = self.run(eqn, body, [*given[:first], *carry])
            return [self.decided(out, goes_on) for out in outs]

        outs = self.settle(once, start)
        if test is not None or eqn.params.get("length") == 0:
            outs[:count] = map(self.may_not_run, outs, start)
        return [
            self.stacked(value, atom) if stacked else value
            for value, atom, stacked in zip(outs, eqn.outvars, body.stacked, strict=True)
        ]

    def settle(self, once: Callable[[Sequence[Any]], list[Any]], carry: Sequence[Any]) -> list[Any]:
        """The results of the first round that changes no carry."""
        found, earlier = len(self.findings), []
        for _ in range(_ROUNDS):
            outs = list(once(carry))
            merged = list(map(self.join, carry, map(self.carried, outs)))
            if all(map(self.same, merged, carry)):
                break
            earlier += self.findings[found:]
            del self.findings[found:]
            carry = merged
        else:
            outs = [*map(self.unsettled, carry), *outs[len(carry) :]]
        self.findings[found:] = self.of_rounds(earlier, self.findings[found:])
        return outs

    def of_rounds(self, earlier: list[Any], last: list[Any]) -> list[Any]:
        """Return what a loop reports, of what its last round found and those before, which knew too little."""
        return last
