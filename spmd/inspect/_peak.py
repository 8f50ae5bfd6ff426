"""The most memory that stands at one time on one device, from the jaxpr alone: how long each array is needed, summed.

A value is an array that stands in memory from the equation that makes it to the last one that reads it, or a chain of
elementwise work. A chain is fused into what reads it, unless that needs it whole, as a product, a reduction and a
collective do. Which chains stand is therefore known when all readers are. Before a result is made, other values stand
in its place.

What stands is a kernel, and kernels run in the order of XLA's compiler for CPUs: those that are ready first, first. So
all readers of a value run before what reads their results, and more stands than in the order of the trace. A compiler
that looks for the order with the least memory, as those for GPUs and TPUs do, needs less.

What `spmd.fused` says is one kernel is one here too, if asked for: nothing of what is inside stands. Its backward pass
makes that again, from the arguments and the results, which it keeps in place of what the program keeps from inside.
"""

from __future__ import annotations

import contextlib
import graphlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd._compat import BRANCHES_WRITE_IN_PLACE, is_backward, name_stack
from spmd._jaxprs.facts import FusedName
from spmd._jaxprs.primitives import primitive_of
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, walk
from spmd.inspect._values import size_bytes

_FUSED = ("moves", "chain", "dear", "part", "asked")


@dataclass(eq=False, slots=True)
class Tick:
    """An equation.

    Attributes:
      reads: The values that it reads.
      makes: The values that it makes.
      inside: The ticks of a round of the loop that it is, or of each of its branches; of the first tick, all others.
    """

    reads: tuple[Node, ...] = ()
    makes: list[Node] = field(default_factory=list)
    inside: list[list[Tick]] = field(default_factory=list)

    @property
    def needs(self) -> Iterator[Node]:
        """The values that must be there before it runs: those that it reads, or that are read inside of it."""
        yield from self.reads
        for one in itertools.chain.from_iterable(self.inside):
            yield from one.needs


@dataclass(eq=False, slots=True)
class Node:
    """A value.

    Attributes:
      size: Bytes on one device.
      tick: The equation that makes it.
      sources: What a chain is made of, () if of constants alone; None of an array that stands in memory anyway.
      dear: Whether a chain with several readers stands.
      late: Whether it is made when its equation ends, as the result of a branch is.
      read_in: The equations that read it, and what is stacked is read where it is made.
      whole: Whether one of them needs it in memory.
      returned: Whether the program returns it.
      hosts: Whether it has a place of its own, so that others may lie there before it is made.
      results: Of what is inside a kernel: the results of the kernel, which its backward pass reads in place of this.
    """

    size: float
    tick: Tick
    sources: tuple[Node, ...] | None = None
    dear: bool = False
    late: bool = False
    read_in: list[Tick] = field(default_factory=list)
    whole: bool = False
    returned: bool = False
    hosts: bool = False
    results: list[Node] | None = None

    @property
    def again(self) -> bool:
        """Return whether each chain that reads it computes it again, though it stands for another reader."""
        return self.sources is not None and not self.dear


class Peak(Domain):
    """When the values of a program are made and read.

    Args:
      outside: Bytes on one device of a variable outside kernels.
      kernels: Whether what `spmd.fused` says is one kernel is one.
      host: Whether the memory is that of the host.
    """

    def __init__(self, outside: Callable[..., float], *, kernels: bool = False, host: bool = False) -> None:
        super().__init__()
        self._host = host
        self._outside = outside
        self._kernels = kernels
        self._names: tuple[tuple[str, str], ...] = ()  # around the equation that the walk is at
        self._entered: list[Node] = []  # the results of the kernel that the walk has entered last
        self._enters = False  # whether the walk is where arrays enter one
        self._hidden: list[Node] | None = None  # the same where the walk is inside of one
        self._nodes: list[Node] = []
        self._root = self._now = self._begin = Tick(inside=[[]])  # the last: the loop or branch that the walk is in
        self._in_group: dict[Any, Node] = {}  # copies for groups of rows, made there
        self._stacks: dict[Any, Node] = {}  # those of that loop, by what is stacked

    def most(self, jaxpr: Any, in_arguments: Sequence[bool] = ()) -> tuple[int, int]:
        """The most bytes that stand at one time besides the arguments and results, and the same if nothing is fused.

        Args:
          jaxpr: The program.
          in_arguments: Which results lie in donated arguments.
        """
        outs = walk(jaxpr, [self._new(0) for _ in jaxpr.invars], self)
        self._read(outs)
        for out, donated in itertools.zip_longest(outs, in_arguments):
            out.returned = True
            out.hosts |= not donated
        fused, unfused = (_most(self._nodes, self._root, fused=fused) for fused in (True, False))
        return fused, max(fused, unfused)

    # --- values -------------------------------------------------------------------------------------------

    def _new(self, size: float, tick: Tick | None = None, **how: Any) -> Node:
        node = Node(size, tick or self._now, **how)
        node.tick.makes.append(node)
        self._nodes.append(node)
        return node

    def _made(self, var: Variable, **how: Any) -> Node:
        if self._hidden is not None:
            return self._new(0, results=self._hidden, **how)
        inside = any(one.primitive.name == "shard_map" for one in self.callers)
        size = size_bytes(var.aval, host=self._host) if inside else self._outside(var, host=self._host)
        return self._new(size, **how)

    def _next(self, reads: Iterable[Node]) -> None:
        self._now = Tick(tuple(reads))
        self._begin.inside[-1].append(self._now)

    def _read(self, nodes: Iterable[Node]) -> None:
        self._next(nodes)
        for node in self._now.reads:
            node.read_in.append(self._now)
            node.whole = True

    @contextlib.contextmanager
    def _part(self, tick: Tick) -> Iterator[None]:
        """Make what is walked inside belong to a round of a loop, or to a branch."""
        outer = self._begin, self._in_group, self._stacks
        self._begin, self._in_group, self._stacks = tick, {}, {}
        tick.inside.append([])
        yield
        (self._begin, self._in_group, self._stacks), self._now = outer, tick

    def constant(self, var: Variable | None, value: Any) -> Node:
        node = Node(0, self._root, ())  # no equation waits for it
        self._nodes.append(node)
        return node

    def join(self, one: Node, other: Node) -> Node:
        return one

    def same(self, one: Node, other: Node) -> bool:
        """A loop is walked once: each round needs the memory of the one before."""
        return True

    # --- kernels of `spmd.fused` --------------------------------------------------------------------------

    def equation(self, eqn: Equation, operands: Sequence[Node]) -> Sequence[Node]:
        if not self._kernels:
            return super().equation(eqn, operands)
        before = self._names, self._hidden
        self._names = (*self._names, *name_stack(eqn))
        inside = any(isinstance(name, FusedName) for _, name in self._names)
        self._hidden = self._entered if inside else None
        outs = super().equation(eqn, operands)
        if inside and is_backward(self._names):
            for result in (result for node in operands for result in node.results or ()):
                result.read_in.append(self._now)
        self._names, self._hidden = before
        self._enters &= eqn.primitive.name == "spmd_fused"
        return outs

    def _marked(self, eqn: Equation, operands: Sequence[Node]) -> Sequence[Node]:
        """An array that enters or leaves a kernel. A kernel inside of one is a part of it."""
        if not self._kernels or self._hidden is not None:
            return operands
        self._read(operands)
        if eqn.params["role"].startswith("enter"):
            if not self._enters:
                self._entered, self._enters = [], True
            return operands
        node = self._made(eqn.outvars[0])
        if operands[0].results is not None:
            operands[0].results.append(node)
        return [node]

    # --- equations ----------------------------------------------------------------------------------------

    def step(self, eqn: Equation, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name == "spmd_fused":
            return self._marked(eqn, operands)
        cost = primitive_of(eqn).cost
        if cost == "alias" or _only_reshapes(eqn):
            return operands[: len(eqn.outvars)]
        if cost in _FUSED:
            self._next(operands)
            sources = () if all(node.sources == () for node in operands) else tuple(operands)
            return [self._made(var, sources=sources, dear=cost == "dear") for var in eqn.outvars]
        dims = primitive_of(eqn).dims
        if dims == "contracted in groups":
            operands = self._in_groups(eqn, operands)
        if dims == "contracted":  # it reads a copy of an operand whose dimensions are not in its order
            sides = enumerate(operands)
            operands = [node if _in_order(eqn, side) else self._copied(eqn, side, node) for side, node in sides]
        self._read(operands)
        return [self._made(var) for var in eqn.outvars]

    def _copied(self, eqn: Equation, side: int, node: Node) -> Node:
        self._next([node])
        return self._made(eqn.invars[side], sources=(node,))

    def _in_groups(self, eqn: Equation, operands: Sequence[Node]) -> Sequence[Node]:
        """Operands of a product whose rows belong to groups: a copy for each group, which is zero outside its rows."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracted, batch = (dims[0] for dims in numbers.dot_dimension_numbers)
        [rows] = numbers.lhs_ragged_dimensions
        copied = 0 if rows in batch else 2 if rows in contracted else 1
        count = eqn.invars[2].aval.shape[-1]
        order = copied if count > 1 else 1  # groups come first in a product, and behind the rows where rows are summed
        for side, node in enumerate(operands[:copied]):
            if (order, node) not in self._in_group:
                self._in_group[order, node] = made = self._copied(eqn, side, node)
                made.size *= count
        return [*(self._in_group[order, node] for node in operands[:copied]), *operands[copied:]]

    def branches(self, eqn: Equation, parts: Sequence[Held], operands: Sequence[Node]) -> Sequence[Node]:
        self._read(operands)
        begin = self._now
        for part in parts:
            with self._part(begin):
                self._read(self.run(eqn, part, part.of(operands)))
        return [self._made(var, late=BRANCHES_WRITE_IN_PLACE) for var in eqn.outvars]

    # --- loops --------------------------------------------------------------------------------------------

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[Node]) -> Sequence[Node]:
        """Each carry has one place, which a round writes anew. Stacks stand from the first round on."""
        if eqn.params.get("length") == 1:
            return self.run(eqn, body, body.of(operands))  # the compiler leaves no loop of it
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        carried = body.operands[first : first + count]
        self._read(operands[i] for i in carried)
        given = [node for i, node in enumerate(operands) if i not in carried]
        self._read([self._new(0), *given])  # behind the first carries, whose places it takes
        begin = self._now
        places = [self._made(var) for var in eqn.outvars[:count]]
        carries = {i: self._new(0) for i in carried}
        with self._part(begin):
            outs = super().loop(eqn, body, test, [carries.get(i, node) for i, node in enumerate(operands)])
            self._read(out for carry, out in zip(carries.values(), outs, strict=False) if out is not carry)
            stacks = self._stacks.values()
        for place in (*places, *stacks):
            place.read_in.append(begin)
        return [*places, *outs[count:]]

    def sliced(self, value: Node, operand: Any) -> Node:
        node = self._made(operand, sources=(value,))
        node.size = 0 if value.results is not None else node.size / max(operand.aval.shape[0], 1)
        node.results = value.results
        return node

    def stacked(self, value: Node, result: Any) -> Node:
        """The compiler keeps one stack of what a body returns twice, and of what is inside a kernel, one of the
        kernel's results."""
        value.read_in.append(value.tick)
        hidden = value.results is not None and self._hidden is None
        key: Any = id(value.results) if hidden else value
        if key not in self._stacks:
            self._stacks[key] = stack = self._made(result, tick=self._begin)
            if hidden:
                stack.size, stack.results = sum(one.size for one in value.results or ()) * result.aval.shape[0], [stack]
        return self._stacks[key]


def _in_order(eqn: Equation, side: int) -> bool:
    """Return whether a product takes an operand as it lies: what it sums over comes last in the first, first in the
    second."""
    contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
    ndim = eqn.invars[side].aval.ndim
    free = [i for i in range(ndim) if i not in contracted and i not in batch]
    orders = [[*batch, *free, *contracted]] if side == 0 or not batch else []
    orders += [[*batch, *contracted, *free]] if side else []
    return list(range(ndim)) in orders


def _only_reshapes(eqn: Equation) -> bool:
    """Return whether an equation moves, adds or sums over dimensions of one element alone."""
    dims = primitive_of(eqn).dims
    if dims == "permuted":
        shape = eqn.invars[0].aval.shape
        kept = [i for i in eqn.params["permutation"] if shape[i] != 1]
        return kept == sorted(kept)
    same = dims in ("reduced: sum", "reduced: max", "reduced: min", "some are new")
    return same and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


# --- what stands at one time ------------------------------------------------------------------------------


def _most(nodes: Sequence[Node], root: Tick, *, fused: bool) -> int:
    """The most bytes that stand at one time. Without `fused` every chain stands, and nothing where an operand lay."""
    standing = _standing(nodes, fused)
    begins, ends = _times(root, standing)
    made = {node: (ends if node.late else begins)[node.tick] for node in nodes}
    reads = {node: [ends[tick] for tick in node.read_in] for node in nodes}
    chained = dict.fromkeys(nodes, 0)  # when the last chain that computes it again is made
    events: list[tuple[float, int, float]] = []
    for node in reversed(nodes):
        end = max(reads[node], default=0)
        last = max(made[node] if node in standing else end, chained[node])
        for source in node.sources or ():
            if fused and source.again and source in standing:
                chained[source] = max(chained[source], last)
            else:
                reads[source].append(last)
        if node.hosts and node in standing:  # until it is made, others may stand in its place
            events += [(-1, 0, -node.size), (made[node], 0, node.size)]
        elif node in standing and not node.returned:
            events += [(made[node], 0, node.size), (max(end, made[node]), 1, -node.size)]
    return round(max(itertools.accumulate((size for *_, size in sorted(events)), initial=0.0)))


def _times(root: Tick, standing: set[Node]) -> tuple[dict[Tick, int], dict[Tick, int]]:
    """When each equation begins, and when it ends, if kernels run one after another, those first that were ready first.

    Args:
      root: Where the arguments are made, with the equations of the program.
      standing: The values that stand.
    """
    begins, ends, now = {root: 0}, {root: 0}, 0

    def run(ticks: Sequence[Tick]) -> None:
        """The equations of the program, or of a round of a loop or a branch, each of which is a whole."""
        nonlocal now
        here = set(ticks)
        waits = {tick: {node.tick for node in tick.needs if node.tick in here} - {tick} for tick in ticks}
        order = graphlib.TopologicalSorter(waits)
        order.prepare()
        ready = deque(order.get_ready())
        while ready:
            tick = ready.popleft()
            stands = (node.sources is None or node in standing for node in tick.makes)
            kernel = not tick.makes or bool(tick.inside) or any(stands)
            now += kernel
            begins[tick] = now
            for part in tick.inside:
                run(part)
                now += 1
            ends[tick] = now
            order.done(tick)
            if kernel:
                ready.extend(order.get_ready())
            else:  # it is a part of those that read it
                ready.extendleft(reversed(order.get_ready()))

    run(root.inside[0])
    return begins, ends


def _standing(nodes: Sequence[Node], fused: bool) -> set[Node]:
    """The values that stand, of those that are read."""
    found = set()
    readers = {node: len(node.read_in) for node in nodes}
    for node in reversed(nodes):  # readers come after what they read
        count = readers[node]
        chain = node.whole or (node.dear and count > 1) if fused else bool(node.sources)
        if count and (node.sources is None or chain):
            found.add(node)
            count = 1 + (count - len(node.read_in)) * (fused and node.again)
        for source in node.sources or ():
            readers[source] += count
    return found
