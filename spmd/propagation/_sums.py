"""Sums over devices that a loop only adds up: they may be done once, after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from spmd._compat import operation_name as name_of
from spmd.propagation._module import Axis, is_kept, operation, owner_of

# Operations that are linear in so many operands at once; of a product, in one of them.
_LINEAR = {
    "stablehlo.reshape": 1,
    "stablehlo.transpose": 1,
    "stablehlo.negate": 1,
    "stablehlo.broadcast_in_dim": 1,
    "stablehlo.divide": 1,
    "stablehlo.add": 2,
    "stablehlo.subtract": 2,
    "stablehlo.dynamic_update_slice": 2,
}


class Later(NamedTuple):
    """A value as a term of a sum over devices that nobody has done yet.

    Attributes:
      values: It, and those that it is made of, which are terms too.
      sums: The sums that are not done before it, and how often each is.
    """

    values: tuple[Any, ...] = ()
    sums: tuple[tuple[Any, int], ...] = ()


class Waiting:
    """Finds the results of loops whose sums may be done after them.

    Args:
      rounds: How often a loop runs, at least.
    """

    def __init__(self, rounds: Callable[[Any], int]) -> None:
        self._rounds = rounds

    def after(self, op: Any, i: int) -> Later | None:
        """Return what waits, if the sums of the i-th result of a loop are done after it; None if it may not."""
        test, body = (region.blocks[0] for region in op.regions)
        carry = body.arguments[i]
        unread = not any(test.arguments[i].uses) and len(list(carry.uses)) == 1
        if not unread or not is_zero(op.operands[i]):
            return None
        *_, last = body.operations
        found = self._linear(operation(last).operands[i], carry, body)
        if found is None:
            return None
        times = self._rounds(op)
        return Later((carry, *found.values), tuple((one, n * times) for one, n in found.sums))

    def _linear(self, value: Any, carry: Any, block: Any) -> Later | None:
        """Return how a value waits that nothing else uses; None where it is not linear in sums and in the carry."""
        if value == carry:
            return Later()
        op = owner_of(value)
        if op is None or op.block != block or len(list(value.uses)) != 1:
            return None
        name, operands = name_of(op), list(op.operands)
        if name == "sdy.all_reduce":
            return Later((value,), ((op, 1),)) if _adds(owner_of(operands[0])) else None
        if name == "stablehlo.while":
            found = self.after(op, value.result_number)
            return None if found is None else Later((value, *found.values), found.sums)
        parts = [self._linear(one, carry, block) for one in operands[: _LINEAR.get(name, 0)]]
        if name == "stablehlo.multiply":
            parts = [one for one in (self._linear(x, carry, block) for x in operands) if one is not None]
            parts = parts if len(parts) == 1 else []
        if not parts or None in parts:
            return None
        known = [one for one in parts if one is not None]
        values = (value, *(x for one in known for x in one.values))
        return Later(values, tuple(x for one in known for x in one.sums))


def axes_of_sums(later: Later, axes: Callable[[Any], tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The axes over which all these sums run; none where they differ."""
    every = {axes(op) for op, _ in later.sums}
    return every.pop() if len(every) == 1 else ()


def is_zero(value: Any) -> bool:
    """Return whether a value is zeros that nobody computes."""
    op = owner_of(value)
    if op is None:
        loop = operation(value.owner.owner)
        return name_of(loop) == "stablehlo.while" and is_kept(value) and is_zero(loop.operands[value.arg_number])
    if name_of(op) in ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"):
        return is_zero(op.operands[0])
    return (
        re.match(r"dense<-?0(\.0+e\+00)?> : ", str(op.attributes["value"])) is not None
        if "value" in op.attributes
        else False
    )


def _adds(op: Any) -> bool:
    """Return whether an operation's terms on the devices are added, and not compared."""
    if op is None or name_of(op) not in ("stablehlo.reduce", "stablehlo.dot_general", "stablehlo.scatter"):
        return False
    inside = [name_of(operation(one)) for region in op.regions for one in region.blocks[0].operations]
    return not inside or inside[0] == "stablehlo.add"
