"""The most memory that stands at one time on one device, from the jaxpr alone: how long each array is needed, summed.

Time is counted in equations, those of a loop once. A value is an array that stands in memory from the equation that
makes it to the last one that reads it, or a chain of elementwise work. A chain is fused into what reads it, unless that
needs it whole, as a product, a collective and the kernel of a reduction do. Which chains stand is therefore known when
all readers are. The compiler makes equal values once, and a chain that stands as early as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd._compat import REDUCTIONS_REPEAT
from spmd._jaxprs import Held
from spmd._walker import Domain, walk
from spmd.inspect._values import ELEMENTWISE, RENAMES, WINDOWS
from spmd.inspect._work import size_bytes

_FUSED = ELEMENTWISE | WINDOWS
_FUSED |= {"broadcast_in_dim", "concatenate", "dynamic_slice", "gather", "iota", "pad", "rev", "transpose"}
# What the compiler's kernel of a reduction takes in: arithmetic that leads to it or follows it, and no choice.
_ARITHMETIC = frozenset(
    str.split(
        """
        abs add add_any broadcast_in_dim cbrt ceil convert_element_type copy cos div erf exp expm1 floor integer_pow
        log log1p logistic max min mul neg pow round rsqrt sign sin sqrt square sub tanh
        """
    )
)
_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min"))
_PURE = _FUSED | _REDUCTIONS | {"axis_index", "dot_general"}
# Too dear to be done again for each of several readers.
_DEAR = frozenset(str.split("exp exp2 log log1p expm1 tanh logistic sin cos sqrt rsqrt cbrt erf pow div rem"))


@dataclass(eq=False, slots=True)
class Node:
    """A value.

    Attributes:
      size: Bytes on one device.
      start: When it is made at the latest.
      since: When the round of the loop that it is in begins.
      sources: What a chain is made of; None of an array that stands in memory anyway.
      dear: Whether a chain with several readers stands.
      constant: Whether it is made of constants alone.
      reuses: Whether it may lie where an operand lay that nothing reads any more.
      end: When it is read last.
      readers: How many equations read it.
      whole: Whether one of them needs it in memory.
      into: The carry of a loop that it becomes.
      operands: What a reduction reads; None of other values.
      arithmetic: Whether the kernel of a reduction takes it in.
      transposed: Whether it is a transposition of what it is made of.
      spread: Whether it repeats what it is made of.
      joined: How a concatenation is cut into what it is made of, and that.
      again: Whether each chain that reads it computes it again, though it stands for another reader.
    """

    size: float
    start: int
    since: int
    sources: tuple[Node, ...] | None = None
    dear: bool = False
    constant: bool = False
    reuses: bool = False
    end: int = 0
    readers: int = 0
    whole: bool = False
    into: Node | None = None
    operands: tuple[Node, ...] | None = None
    arithmetic: bool = False
    transposed: bool = False
    spread: bool = False
    again: bool = False
    joined: tuple[Any, ...] = ()

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
        self._now = self._since = 0
        self._inside = 0  # kernels around the walk

    def most(self, jaxpr: Any) -> tuple[int, int]:
        """The most bytes that stand at one time besides the arguments and results, and the same if nothing is fused."""
        outs = walk(jaxpr, [self._new(0) for _ in jaxpr.invars], self)
        self._read(outs)
        for out in outs:
            out.size = 0
        _grow_kernels(self._nodes)
        fused, unfused = (_most(self._nodes, fused=fused) for fused in (True, False))
        return fused, max(fused, unfused)

    # --- values -------------------------------------------------------------------------------------------

    def _new(self, size: float, sources: Sequence[Node] | None = None, *, dear: bool = False) -> Node:
        node = Node(size, self._now, self._since, None if sources is None else tuple(sources), dear)
        node.constant = bool(sources) and all(source.constant for source in sources)
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
        node = self._new(0, ())
        node.constant = True
        return node

    def literal(self, value: Any) -> Node:
        return self._once(("", repr(value)), lambda: self.constant(None, value))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The compiler makes equal values once."""
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
        if name in RENAMES:
            return operands[: len(eqn.outvars)]
        if name in _PURE:
            return self._once(_key(eqn, operands), lambda: self._computed(eqn, operands))
        return self._computed(eqn, operands)

    def _computed(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name in _FUSED:
            return self._chained(eqn, operands)
        if name == "ragged_dot_general":
            operands = self._in_groups(eqn, operands)
        if name == "dot_general":
            operands = [self._laid(eqn, side, node) for side, node in enumerate(operands)]
        reduces = name.startswith(("reduce_", "arg"))
        self._read(operands, whole=not reduces)
        reuses = reduces or name.startswith(("scatter", "dynamic_update_slice"))
        made = [self._made(var, None, reuses=reuses) for var in eqn.outvars]
        if name in _REDUCTIONS and _is_float(eqn.invars[0]):
            made[0].operands = tuple(operands)
        return made

    def _chained(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name == "split" and operands[0].joined[:1] == (_cut(eqn, eqn.invars[0], "axis", eqn.outvars),):
            return operands[0].joined[1]  # a part of what was put together is what it was
        self._now += 1
        how = {"dear": name in _DEAR, "reuses": name in ELEMENTWISE}  # elements that move need another place
        made = [self._made(var, operands, **how) for var in eqn.outvars]
        again = name not in _DEAR and _is_of_one(eqn, operands)
        arithmetic = name in _ARITHMETIC and all(map(_is_float, (*eqn.invars, *eqn.outvars)))
        for node in made:
            node.again, node.arithmetic = again, arithmetic
            node.transposed, node.spread = name == "transpose", name == "broadcast_in_dim"
        if name == "concatenate":
            made[0].joined = (_cut(eqn, eqn.outvars[0], "dimension", eqn.invars), operands)
        return made

    def _laid(self, eqn: Any, side: int, node: Node) -> Node:
        """An operand of a product: a copy, where its dimensions are not in the product's order.

        A copy of a transposed array is one transposition of what that is made of.
        """
        if _in_order(eqn, side):
            return node
        return self._made(eqn.invars[side], node.sources if node.transposed else (node,))

    def _in_groups(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        """Operands of a product whose rows belong to groups: a copy for each group, which is zero outside its rows."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracted, batch = (dims[0] for dims in numbers.dot_dimension_numbers)
        [rows] = numbers.lhs_ragged_dimensions
        copied = 0 if rows in batch else 2 if rows in contracted else 1
        count = eqn.invars[2].aval.shape[-1]

        def copies(side: int) -> Node:
            made = self._made(eqn.invars[side], operands[side : side + 1])
            made.size *= count
            return made

        found = [self._once((copied, operands[side]), lambda side=side: copies(side)) for side in range(copied)]
        return [*found, *operands[copied:]]

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Node]) -> Sequence[Node]:
        self._inside += 1
        outs = super().mapped(eqn, part, operands)
        self._inside -= 1
        return outs

    def branches(self, eqn: Any, parts: Sequence[Held], operands: Sequence[Node]) -> Sequence[Node]:
        self._read(operands)
        outer = self._copies
        for part in parts:
            self._copies = {}
            self._read(self.run(eqn, part, part.of(operands)))
        self._copies = outer
        return [self._made(var, None, reuses=True) for var in eqn.outvars]

    # --- loops --------------------------------------------------------------------------------------------

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Node]) -> Sequence[Node]:
        """Each carry has one place, which a round writes anew. Stacks stand from the first round on.

        What repeats a constant is not given to a loop: each round makes it in passing.
        """
        self._read(node for node in operands if not node.constant)
        begin, outer = self._now, (self._stacks, self._copies, self._since)
        self._stacks, self._copies, self._since = {}, {}, begin
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        places = [self._made(var, None, reuses=True) for var in eqn.outvars[:count]]
        carries = {number: self._new(0) for number in body.operands[first : first + count]}
        outs = super().loop(eqn, body, test, [carries.get(i, node) for i, node in enumerate(operands)])
        changed = [(carry, out) for carry, out in zip(carries.values(), outs, strict=False) if out is not carry]
        for carry, out in changed:
            out.into = carry
        given = (node for i, node in enumerate(operands) if i not in carries and not node.constant)
        self._read([*places, *(out for _, out in changed), *given])
        for stack in self._stacks.values():
            stack.start = begin
        self._stacks, self._copies, self._since = outer
        return [*places, *outs[count:]]

    def sliced(self, value: Node, operand: Any) -> Node:
        node = self._made(operand, (value,))
        node.size /= max(operand.aval.shape[0], 1)
        node.again = True
        return node

    def stacked(self, value: Node, result: Any) -> Node:
        """The compiler keeps one stack of what a body returns twice."""
        value.read(value.start + 1, whole=False)
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


def _is_float(atom: Any) -> bool:
    return atom.aval.dtype.kind == "f" or atom.aval.dtype.name == "bfloat16"


def _key(eqn: Any, operands: Sequence[Node]) -> Any:
    """The same for two equations that compute the same."""
    return (
        eqn.primitive,
        str(sorted(eqn.params.items())),
        *operands,
        *(atom.aval for atom in (*eqn.invars, *eqn.outvars)),
    )


def _cut(eqn: Any, whole: Any, name: str, parts: Sequence[Any]) -> tuple[Any, ...]:
    """A shape, the dimension along which it is cut, and the sizes of the parts."""
    axis = eqn.params[name]
    return whole.aval.shape, axis, [part.aval.shape[axis] for part in parts]


def _is_of_one(eqn: Any, operands: Sequence[Node]) -> bool:
    """Whether at most one operand has the size of the result: to compute that again reads no more than to read it."""
    size = eqn.outvars[0].aval.size
    large = (atom.aval.size >= size for atom, node in zip(eqn.invars, operands, strict=True) if not node.spread)
    return sum(large) <= 1


def _grow_kernels(nodes: Sequence[Node]) -> None:
    """Marks what stands because a reduction is a kernel of its own: what it reads, and what it returns.

    From the last reduction to the first, each takes in arithmetic of which nothing else reads a part, before it and
    behind it, as long as one value leaves it. What it cannot take in, a choice for example, stands.
    """
    readers: dict[Node, dict[Node, None]] = {node: {} for node in nodes}
    others = {node: node.readers for node in nodes}  # how many equations read it that no kernel takes in
    for node in nodes:
        for source in {*(node.sources or ()), *(node.operands or ())}:
            readers[source][node] = None
        for operand in node.operands or ():
            others[operand] -= 1
    taken: set[Node] = set()
    for node in reversed(nodes):
        if node.operands is not None and node not in taken:
            _grow(node, readers, others, taken)


def _grow(last: Node, readers: Mapping[Node, Iterable[Node]], others: Mapping[Node, int], taken: set[Node]) -> None:
    """The kernel around one reduction."""
    kernel = [last]
    taken.add(last)
    for one in kernel:
        found = [
            source
            for source in one.operands or one.sources or ()
            if source.arithmetic and source not in taken and not others[source] and taken.issuperset(readers[source])
        ]
        follows = [] if others[last] else [reader for reader in readers[last] if REDUCTIONS_REPEAT or not reader.spread]
        if one is kernel[-1] and not found and len(follows) == 1 and follows[0].arithmetic and follows[0] not in taken:
            [last] = found = follows
        kernel += dict.fromkeys(found)
        taken.update(found)
    last.whole, last.again = True, False
    for one in kernel:
        for source in one.operands or one.sources or ():
            source.whole |= source not in taken and not source.spread


def _most(nodes: Sequence[Node], *, fused: bool) -> int:
    """The most bytes that stand at one time. Without `fused`, every chain stands."""
    standing = _standing(nodes, fused)
    made = _made_at(nodes, standing)
    end = {node: node.end for node in nodes}
    chained = dict.fromkeys(nodes, 0)  # when the last chain that computes it again is made
    events: list[tuple[tuple[int, int], float]] = []
    for node in reversed(nodes):
        stands = node in standing
        last = max(made[node] if stands else end[node], chained[node])
        for source in node.sources or ():
            known = chained if fused and source.again and source in standing else end
            known[source] = max(known[source], last)
        written_in_place = node.into is not None and end[node.into] <= node.start
        if stands and not written_in_place:
            start = (made[node], 2 if node.reuses else 0)  # what ends at a time makes room at 1
            events += [(start, node.size), (max((end[node], 1), (made[node], 3)), -node.size)]
    total = most = 0.0
    for _, size in sorted(events):
        total += size
        most = max(most, total)
    return round(most)


def _standing(nodes: Sequence[Node], fused: bool) -> set[Node]:
    """The values that stand, of those that are read."""
    found = set()
    readers = {node: node.readers for node in nodes}
    for node in reversed(nodes):  # readers come after what they read
        if not readers[node]:
            continue
        stands = node.sources is None or _stands(node, readers[node], fused)
        if stands:
            found.add(node)
        count = readers[node]
        if stands:
            count = 1 + (count - node.readers) * (fused and node.again)
        for source in node.sources or ():
            readers[source] += count
    return found


def _made_at(nodes: Sequence[Node], standing: Container[Node]) -> dict[Node, int]:
    """When each value is made: a chain that stands, as soon as what it is made of is there, in a round of its loop."""
    made: dict[Node, int] = {}
    for node in nodes:
        ready = max((made[source] for source in node.sources or ()), default=node.start)
        made[node] = min(node.start, max(ready + (node in standing), node.since)) if node.sources else node.start
    return made


def _stands(node: Node, readers: int, fused: bool) -> bool:
    if not fused:
        return bool(node.sources) and not node.constant
    return node.whole or (node.dear and readers > 1)
