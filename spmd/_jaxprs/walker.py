"""One walk over jaxprs: a value for every variable, carried from the arguments to the results.

A `Domain` says what a value is and what an equation makes of it: the checker has states, `explain` has costs and
placements, a layer asks which values it can make again. The walk does the rest: it reads constants, enters calls and
branches, and repeats loops until they settle. The table of `equations.py` says which primitive holds which jaxprs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from jax.extend.core import Literal

from spmd._jaxprs.equations import Held, Role, held, opened

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
    known = domain.known
    known.update(zip(body.invars, values, strict=True))
    for i, var in enumerate(body.constvars):
        known[var] = domain.constant(var, consts[i] if consts else None)
    for eqn in body.eqns:
        operands = [literal(atom.val) if isinstance(atom, Literal) else known[atom] for atom in eqn.invars]
        rule = rules.get(eqn.primitive.name)
        outs = domain.equation(eqn, operands) if rule is None else rule(domain, eqn, operands)
        for var, out in zip(eqn.outvars, outs, strict=True):
            known[var] = out
    return [literal(atom.val) if isinstance(atom, Literal) else known[atom] for atom in body.outvars]


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

    def __init__(self) -> None:
        self.callers: list[Any] = []
        self.known: dict[Any, Any] = {}
        self.findings: list[Any] = []
        self._walked: dict[Any, tuple[Any, list[Any]]] = {}

    # --- values -------------------------------------------------------------------------------------------

    def constant(self, var: Any, value: Any) -> Any:
        """A constant of a jaxpr; its value is None where the jaxpr does not hold it."""
        raise NotImplementedError

    def literal(self, value: Any) -> Any:
        """A number that stands in an equation."""
        return self.constant(None, value)

    def step(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation that holds no jaxpr, or one that is part of its own work."""
        raise NotImplementedError

    def unread(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation whose jaxprs no walk can read."""
        return self.step(eqn, operands)

    # --- where paths meet ---------------------------------------------------------------------------------

    def join(self, one: Any, other: Any) -> Any:
        """What is known of a value that is one or the other."""
        raise NotImplementedError

    def same(self, one: Any, other: Any) -> bool:
        """Whether a carry has settled. A domain that says so at once walks each loop once."""
        return one == other

    def unsettled(self, value: Any) -> Any:
        """What is known of a carry that does not settle."""
        return value

    def carried(self, value: Any) -> Any:
        """What a carry of one round of a loop is in the next."""
        return value

    def may_not_run(self, value: Any, start: Any) -> Any:
        """What is known of the result of a loop that may not run at all."""
        return self.join(value, start)

    def sliced(self, value: Any, operand: Any) -> Any:
        """One slice of an array over which a loop runs. `operand` is the variable of the array."""
        return value

    def stacked(self, value: Any, result: Any) -> Any:
        """The stack of the results of a loop's steps. `result` is the variable of the stack."""
        return value

    def decides(self, eqn: Any, predicate: Any) -> None:
        """A branch is chosen, or a loop goes on, by a value like this one."""

    def decided(self, value: Any, predicate: Any) -> Any:
        """What is known of a result that depends on such a decision."""
        return value

    # --- equations that hold jaxprs -----------------------------------------------------------------------

    def equation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
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

    def run(self, eqn: Any, part: Held, operands: Sequence[Any]) -> list[Any]:
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
        """What the results of a jaxpr depend on besides its operands. None: each jaxpr is walked each time.

        Otherwise a jaxpr is walked once for equal operands, unless the walk found something in it: findings name their
        callers.
        """
        return None

    def call(self, eqn: Any, part: Held, operands: Sequence[Any]) -> Sequence[Any]:
        """A call: `jit`, `remat`, a custom rule, a solver."""
        return self.run(eqn, part, part.of(operands))

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Any]) -> Sequence[Any]:
        """A `shard_map`."""
        return self.run(eqn, part, part.of(operands))

    def branches(self, eqn: Any, parts: Sequence[Held], operands: Sequence[Any]) -> Sequence[Any]:
        """A `cond`, whose first operand decides."""
        predicate = operands[0]
        self.decides(eqn, predicate)
        outs = [self.run(eqn, part, part.of(operands)) for part in parts]
        return [self.decided(functools.reduce(self.join, found), predicate) for found in zip(*outs, strict=True)]

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Any]) -> Sequence[Any]:
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
        """What a loop reports, of what its last round found and those before, which knew too little."""
        return last
