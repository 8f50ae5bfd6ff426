"""The most memory that stands at one time on one device, from the jaxpr alone: how long each array is needed, summed.

Time is counted in equations, those of a loop once. A value is an array that stands in memory from the equation that
makes it to the last one that reads it, or a chain of elementwise work. A chain is fused into what reads it, unless that
needs it whole, as a product and a collective do. Which chains stand is therefore known when all readers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd._jaxprs import Held
from spmd._walker import Domain, walk
from spmd.inspect._values import ELEMENTWISE, RENAMES, WINDOWS
from spmd.inspect._work import size_bytes

_FUSED = ELEMENTWISE | WINDOWS | {"transpose", "iota", "pad", "concatenate", "rev", "dynamic_slice", "gather"}
# Too dear to be done again for each of several readers.
_DEAR = frozenset(str.split("exp exp2 log log1p expm1 tanh logistic sin cos sqrt rsqrt cbrt erf pow div rem"))


@dataclass(eq=False, slots=True)
class Node:
    """A value.

    Attributes:
      size: Bytes on one device.
      start: When it is made.
      sources: What a chain is made of; None of an array that stands in memory anyway.
      dear: Whether a chain with several readers stands.
      reuses: Whether it may lie where an operand lay that nothing reads any more.
      end: When it is read last.
      readers: How many equations read it.
      whole: Whether one of them needs it in memory.
      into: The carry of a loop that it becomes.
    """

    size: float
    start: int
    sources: tuple[Node, ...] | None = None
    dear: bool = False
    reuses: bool = False
    end: int = 0
    readers: int = 0
    whole: bool = False
    into: Node | None = None

    def read(self, time: int, *, whole: bool) -> None:
        self.end = max(self.end, time)
        self.readers += 1
        self.whole |= whole


class Peak(Domain):
    """When the values of a program are made and read.

    Args:
      outside: Bytes on one device of a variable outside kernels.
    """

    def __init__(self, outside: Callable[[Any], float]) -> None:
        super().__init__()
        self._outside = outside
        self._nodes: list[Node] = []
        self._stacks: dict[Any, Node] = {}  # of the loop that the walk is in, by what is stacked
        self._copies: dict[Any, Node] = {}  # of constants and of what is broadcast, in that loop
        self._now = 0
        self._inside = 0  # kernels around the walk

    def most(self, jaxpr: Any) -> tuple[int, int]:
        """The most bytes that stand at one time besides the arguments and results, and the same if nothing is fused."""
        outs = walk(jaxpr, [self._new(0) for _ in jaxpr.invars], self)
        self._read(outs)
        for out in outs:
            out.size = 0
        return _most(self._nodes, fused=True), _most(self._nodes, fused=False)

    # --- values -------------------------------------------------------------------------------------------

    def _new(self, size: float, sources: Sequence[Node] | None = None, *, dear: bool = False) -> Node:
        node = Node(size, self._now, None if sources is None else tuple(sources), dear)
        self._nodes.append(node)
        return node

    def _made(self, var: Any, sources: Sequence[Node] | None, *, dear: bool = False, reuses: bool = False) -> Node:
        node = self._new(size_bytes(var.aval) if self._inside else self._outside(var), sources, dear=dear)
        node.reuses = reuses
        return node

    def _read(self, nodes: Iterable[Node], *, whole: bool = True) -> None:
        self._now += 1
        for node in nodes:
            node.read(self._now, whole=whole)

    def constant(self, var: Any, value: Any) -> Node:
        return self._new(0, ())

    def literal(self, value: Any) -> Node:
        return self._once(("", repr(value)), lambda: self._new(0, ()))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        """The compiler makes equal constants and equal copies once."""
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def join(self, one: Node, other: Node) -> Node:
        return one

    def same(self, one: Node, other: Node) -> bool:
        """A loop is walked once: each round needs the memory of the one before."""
        return True

    def may_not_run(self, value: Node, start: Node) -> Node:
        return value

    # --- equations ----------------------------------------------------------------------------------------

    def step(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name in RENAMES and len(operands) == len(eqn.outvars):
            return operands
        if name == "broadcast_in_dim":
            self._now += 1
            [var], key = eqn.outvars, (operands[0], eqn.params["shape"], eqn.params["broadcast_dimensions"])
            return [self._once(key, lambda: self._made(var, operands))]
        if name in _FUSED:
            self._now += 1
            how = {"dear": name in _DEAR, "reuses": name in ELEMENTWISE}  # elements that move need another place
            return [self._made(var, operands, **how) for var in eqn.outvars]
        if name == "dot_general":
            operands = [self._laid(eqn, side, node) for side, node in enumerate(operands)]
        reduces = name.startswith(("reduce_", "arg"))
        self._read(operands, whole=not reduces)
        reuses = reduces or name.startswith(("scatter", "dynamic_update_slice"))
        return [self._made(var, None, reuses=reuses) for var in eqn.outvars]

    def _laid(self, eqn: Any, side: int, node: Node) -> Node:
        """An operand of a product: a copy, where its dimensions are not in the product's order."""
        return node if _in_order(eqn, side) else self._made(eqn.invars[side], (node,))

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Node]) -> Sequence[Node]:
        self._inside += 1
        outs = super().mapped(eqn, part, operands)
        self._inside -= 1
        return outs

    def branches(self, eqn: Any, parts: Sequence[Held], operands: Sequence[Node]) -> Sequence[Node]:
        self._read(operands)
        for part in parts:
            self._read(self.run(eqn, part, part.of(operands)))
        return [self._made(var, None, reuses=True) for var in eqn.outvars]

    # --- loops --------------------------------------------------------------------------------------------

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Node]) -> Sequence[Node]:
        """Each carry has one place, which a round writes anew. Stacks stand from the first round on."""
        self._read(operands)
        begin, outer = self._now, (self._stacks, self._copies)
        self._stacks, self._copies = {}, {}
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        places = [self._made(var, None, reuses=True) for var in eqn.outvars[:count]]
        carries = {number: self._new(0) for number in body.operands[first : first + count]}
        outs = super().loop(eqn, body, test, [carries.get(i, node) for i, node in enumerate(operands)])
        changed = [(carry, out) for carry, out in zip(carries.values(), outs, strict=False) if out is not carry]
        for carry, out in changed:
            out.into = carry
        given = (node for i, node in enumerate(operands) if i not in carries)
        self._read([*places, *(out for _, out in changed), *given])
        for stack in self._stacks.values():
            stack.start = begin
        self._stacks, self._copies = outer
        return [*places, *outs[count:]]

    def sliced(self, value: Node, operand: Any) -> Node:
        node = self._made(operand, (value,))
        node.size /= max(operand.aval.shape[0], 1)
        return node

    def stacked(self, value: Node, result: Any) -> Node:
        """The compiler keeps one stack of what a body returns twice."""
        value.read(self._now + 1, whole=False)
        if value not in self._stacks:
            self._stacks[value] = self._made(result, None)
        return self._stacks[value]


def _in_order(eqn: Any, side: int) -> bool:
    """Whether a product takes an operand as it lies: what it sums over comes last in the first, first in the second."""
    contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
    ndim = eqn.invars[side].aval.ndim
    free = [i for i in range(ndim) if i not in contracted and i not in batch]
    orders = [[*batch, *free, *contracted]] if side == 0 or not batch else []
    orders += [[*batch, *contracted, *free]] if side else []
    return list(range(ndim)) in orders


def _most(nodes: Sequence[Node], *, fused: bool) -> int:
    """The most bytes that stand at one time. Without `fused`, every chain stands."""
    end = {node: node.end for node in nodes}
    readers = {node: node.readers for node in nodes}
    events: list[tuple[tuple[int, int], float]] = []
    for node in reversed(nodes):  # readers come after what they read
        stands = node.sources is None or _stands(node, readers[node], fused)
        for source in node.sources or ():
            if readers[node]:
                end[source] = max(end[source], node.start if stands else end[node])
                readers[source] += 1 if stands else readers[node]
        written_in_place = node.into is not None and end[node.into] <= node.start
        if stands and readers[node] and not written_in_place:
            made = (node.start, 2 if node.reuses else 0)  # what ends at a time makes room at 1
            events += [(made, node.size), (max((end[node], 1), (node.start, 3)), -node.size)]
    total = most = 0.0
    for _, size in sorted(events):
        total += size
        most = max(most, total)
    return round(most)


def _stands(node: Node, readers: int, fused: bool) -> bool:
    if not fused:
        return any(source.sources != () for source in node.sources or ())  # of constants alone it is made in passing
    return node.whole or (node.dear and readers > 1)
