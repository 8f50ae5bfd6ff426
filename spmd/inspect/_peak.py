"""The most memory that stands at one time on one device, from the jaxpr alone: how long each array is needed, summed.

A value is an array that stands in memory from the equation that makes it to the last one that reads it, or a chain of
elementwise work. A chain is fused into what reads it, unless that needs it whole, as a product, a collective and the
kernel of a reduction do. Which chains stand is therefore known when all readers are. The compiler makes equal values
once. A result has a place of its own, where other values stand before it is made, one after another.

What stands is a kernel, and kernels run in the order of XLA's compiler for CPUs: those that are ready first, first. So
all readers of a value run before what reads their results, and more stands than in the order of the trace. A compiler
that looks for the order with the least memory, as those for GPUs and TPUs do, needs less.

What `spmd.fused` says is one kernel is one here too, if asked for: nothing of what is inside stands. Its backward pass
makes that again, from the arguments and the results, which it keeps in place of what the program keeps from inside.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd._compat import BRANCHES_WRITE_IN_PLACE, REDUCTIONS_REPEAT, is_backward, name_stack
from spmd._facts import FusedName
from spmd._jaxprs import Held, shape_of
from spmd._walker import Domain, walk
from spmd.inspect._records import PRIMITIVES
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
_SAME_ELEMENTS = _REDUCTIONS | {"broadcast_in_dim"}
_PURE = _FUSED | _REDUCTIONS | {"axis_index", "dot_general"}
# Too dear to be done again for each of several readers.
_DEAR = frozenset(str.split("exp exp2 log log1p expm1 tanh logistic sin cos sqrt rsqrt cbrt erf pow div rem"))


@dataclass(eq=False, slots=True)
class Tick:
    """An equation.

    Attributes:
      reads: The values that it reads.
      makes: The values that it makes.
      inside: The ticks of a round of the loop that it is, or of each of its branches.
      around: The loops and branches that it is in, from the outermost, each with its number in `inside`.
      loops: Whether it is a loop.
    """

    reads: tuple[Node, ...] = ()
    makes: list[Node] = field(default_factory=list)
    inside: list[list[Tick]] = field(default_factory=list)
    around: tuple[tuple[Tick, int], ...] = ()
    loops: bool = False

    def runs_with(self, other: Tick) -> bool:
        """Whether it may run in the same round as `other`, which is not in it: they are in the same branch of each
        `cond` that both are in."""
        inside = any(self is outer for outer, _ in other.around)
        mine = dict(self.around)
        return not inside and all(mine.get(outer, number) == number for outer, number in other.around)


@dataclass(eq=False, slots=True)
class Node:
    """A value.

    Attributes:
      size: Bytes on one device.
      tick: The equation that makes it.
      sources: What a chain is made of; None of an array that stands in memory anyway.
      dear: Whether a chain with several readers stands.
      constant: Whether it is made of constants alone.
      number: The number that it is, if the program says it.
      reuses: Whether it may lie where an operand lay that nothing reads any more.
      read_in: The equations that read it, and what is stacked is read where it is made.
      whole: Whether one of them needs it in memory.
      into: The carry of a loop that it becomes.
      ends_as: Of the result of a `cond`: what it is in each of its branches that make it.
      returned: Whether the program returns it.
      hosts: Whether it has a place of its own, so that others may lie there before it is made.
      summed: Of a sum over devices, the axes. The compiler sums all that is returned over the same axes at once.
      operands: What a reduction reads; None of other values.
      arithmetic: Whether the kernel of a reduction takes it in.
      transposed: Whether it is a transposition of what it is made of.
      spread: Whether it repeats what it is made of.
      joined: How a concatenation is cut into what it is made of, and that.
      results: Of what is inside a kernel: the results of the kernel, which its backward pass reads in place of this.
      again: Whether each chain that reads it computes it again, though it stands for another reader.
      stuck: Whether some reader that needs it whole takes it in this shape. If none does, all readers compute it again.
    """

    size: float
    tick: Tick
    sources: tuple[Node, ...] | None = None
    dear: bool = False
    constant: bool = False
    number: np.ndarray | None = None
    reuses: bool = False
    read_in: list[Tick] = field(default_factory=list)
    whole: bool = False
    into: Node | None = None
    ends_as: tuple[Node, ...] = ()
    returned: bool = False
    hosts: bool = False
    summed: Any = None
    operands: tuple[Node, ...] | None = None
    arithmetic: bool = False
    transposed: bool = False
    spread: bool = False
    again: bool = False
    stuck: bool = False
    joined: tuple[Any, ...] = ()
    results: list[Node] | None = None

    def read(self, tick: Tick, *, whole: bool) -> None:
        self.read_in.append(tick)
        self.whole |= whole

    def goes_into(self, carry: Node) -> None:
        self.into = carry
        for node in self.ends_as:
            node.goes_into(carry)


class Peak(Domain):
    """When the values of a program are made and read.

    Args:
      outside: Bytes on one device of a variable outside kernels.
      kernels: Whether what `spmd.fused` says is one kernel is one.
    """

    def __init__(self, outside: Callable[[Any], float], *, kernels: bool = False) -> None:
        super().__init__()
        self._outside = outside
        self._kernels = kernels
        self._names: tuple[tuple[str, str], ...] = ()  # around the equation that the walk is at
        self._entered: list[Node] = []  # the results of the kernel that the walk has entered last
        self._enters = False  # whether the walk is where arrays enter one
        self._hidden: list[Node] | None = None  # the same where the walk is inside of one
        self._nodes: list[Node] = []
        self._stacks: dict[Any, Node] = {}  # of the loop that the walk is in, by what is stacked
        self._copies: dict[Any, Node] = {}  # of constants and of what is broadcast, in that loop
        self._root = self._now = Tick()
        self._frame: list[Tick] = []  # of the loop or branch that the walk is in
        self._around: tuple[tuple[Tick, int], ...] = ()  # the walk
        self._inside = 0  # kernels around the walk

    def most(self, jaxpr: Any, in_arguments: Sequence[bool] = ()) -> tuple[int, int]:
        """The most bytes that stand at one time besides the arguments and results, and the same if nothing is fused.

        Args:
          jaxpr: The program.
          in_arguments: Which results lie in donated arguments.
        """
        outs = walk(jaxpr, [self._new(0) for _ in jaxpr.invars], self)
        self._read(outs)
        for node in self._nodes:
            node.again |= node.sources is not None and not node.dear and not node.stuck
        for out, donated in itertools.zip_longest(outs, in_arguments):
            out.returned = True
            out.hosts |= not donated
        _grow_kernels(self._nodes)
        order = _Order(self._root, self._frame)
        fused, unfused = (_most(self._nodes, order, fused=fused) for fused in (True, False))
        return fused, max(fused, unfused)

    # --- values -------------------------------------------------------------------------------------------

    def _new(self, size: float, sources: Sequence[Node] | None = None, *, dear: bool = False) -> Node:
        node = Node(size, self._now, None if sources is None else tuple(sources), dear)
        node.constant = bool(sources) and all(source.constant for source in sources)
        self._now.makes.append(node)
        self._nodes.append(node)
        return node

    def _made(self, var: Any, sources: Sequence[Node] | None, *, dear: bool = False, reuses: bool = False) -> Node:
        node = self._new(size_bytes(var.aval) if self._inside else self._outside(var), sources, dear=dear)
        node.reuses = reuses
        if self._hidden is not None:
            node.size, node.results = 0, self._hidden
        return node

    def _read(self, nodes: Iterable[Node], *, whole: bool = True) -> None:
        self._next(nodes)
        for node in self._now.reads:
            node.read(self._now, whole=whole)
            node.stuck |= whole

    def _next(self, reads: Iterable[Node]) -> None:
        self._now = Tick(tuple(reads), around=self._around)
        self._frame.append(self._now)

    @contextlib.contextmanager
    def _part(self, tick: Tick) -> Iterator[None]:
        """What is walked inside belongs to a round of a loop, or to a branch."""
        outer, self._frame = self._frame, []
        around, self._around = self._around, (*self._around, (tick, len(tick.inside)))
        tick.inside.append(self._frame)
        yield
        self._frame, self._around, self._now = outer, around, tick

    def constant(self, var: Any, value: Any) -> Node:
        node = Node(0, self._root, (), constant=True)  # no equation waits for it
        self._nodes.append(node)
        return node

    def literal(self, value: Any) -> Node:
        number = np.asarray(value, jax.dtypes.result_type(value))
        node: Node = self._once(("", number.dtype, number.tobytes()), lambda: self.constant(None, value))
        node.number = number
        return node

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

    # --- kernels of `spmd.fused` --------------------------------------------------------------------------

    def equation(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        if not self._kernels:
            return super().equation(eqn, operands)
        before = self._names, self._hidden
        self._names = (*self._names, *name_stack(eqn))
        inside = any(isinstance(name, FusedName) for _, name in self._names)
        self._hidden = self._entered if inside else None
        outs = super().equation(eqn, operands)
        if inside and is_backward(self._names):
            for result in (result for node in operands for result in node.results or ()):
                result.read(self._now, whole=False)
        self._names, self._hidden = before
        self._enters &= eqn.primitive.name == "spmd_fused"
        return outs

    def _marked(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        """An array that enters or leaves a kernel. A kernel inside of one is a part of it."""
        if not self._kernels or self._hidden is not None:
            return operands
        self._read(operands)
        if eqn.params["role"].startswith("enter"):
            if not self._enters:
                self._entered, self._enters = [], True
            return operands
        node = self._made(eqn.outvars[0], None)
        if operands[0].results is not None:
            operands[0].results.append(node)
        return [node]

    # --- equations ----------------------------------------------------------------------------------------

    def step(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name == "spmd_fused":
            return self._marked(eqn, operands)
        if name in RENAMES or _only_reshapes(eqn):
            return operands[: len(eqn.outvars)]
        if name == "convert_element_type" and operands[0].number is not None:
            return [self.literal(operands[0].number.astype(eqn.params["new_dtype"]))]
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
            return self._product(eqn, [self._laid(eqn, side, node) for side, node in enumerate(operands)])
        reduces = name.startswith(("reduce_", "arg"))
        self._read(operands, whole=not reduces)
        reuses = reduces or name.startswith(("scatter", "dynamic_update_slice"))
        made = [self._made(var, None, reuses=reuses) for var in eqn.outvars]
        if name in _REDUCTIONS and _is_float(eqn.invars[0]):
            made[0].operands = tuple(operands)
        if name in PRIMITIVES["psum"]:
            for node in made:
                node.summed = eqn.params["axes"]
        return made

    def _product(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        self._next(operands)
        for side, node in enumerate(operands):
            node.read(self._now, whole=True)
            node.stuck |= not _is_reshaped(eqn, side)
        return [self._made(eqn.outvars[0], None)]

    def _chained(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        name = eqn.primitive.name
        if name == "split" and operands[0].joined[:1] == (_cut(eqn, eqn.invars[0], "axis", eqn.outvars),):
            return operands[0].joined[1]  # a part of what was put together is what it was
        if _joins_rows(eqn):
            self._read(operands)
            made = [self._made(eqn.outvars[0], None)]
        else:
            made = self._chain(eqn, operands)
        if name == "concatenate":
            made[0].joined = (_cut(eqn, eqn.outvars[0], "dimension", eqn.invars), operands)
        return made

    def _chain(self, eqn: Any, operands: Sequence[Node]) -> list[Node]:
        name = eqn.primitive.name
        self._next(operands)
        how = {"dear": name in _DEAR, "reuses": name in ELEMENTWISE}  # elements that move need another place
        made = [self._made(var, operands, **how) for var in eqn.outvars]
        arithmetic = name in _ARITHMETIC and all(map(_is_float, (*eqn.invars, *eqn.outvars)))
        for node in made:
            node.again, node.arithmetic = not node.dear and _is_of_one(eqn, operands), arithmetic
            node.transposed, node.spread = name == "transpose", name == "broadcast_in_dim"
        return made

    def _laid(self, eqn: Any, side: int, node: Node) -> Node:
        """An operand of a product: a copy, where its dimensions are not in the product's order.

        A copy of a transposed array is one transposition of what that is made of.
        """
        if _in_order(eqn, side):
            return node
        return self._copied(eqn.invars[side], (node.sources or ()) if node.transposed else (node,))

    def _copied(self, var: Any, sources: Sequence[Node]) -> Node:
        self._next(sources)
        return self._made(var, sources)

    def _in_groups(self, eqn: Any, operands: Sequence[Node]) -> Sequence[Node]:
        """Operands of a product whose rows belong to groups: a copy for each group, which is zero outside its rows."""
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracted, batch = (dims[0] for dims in numbers.dot_dimension_numbers)
        [rows] = numbers.lhs_ragged_dimensions
        copied = 0 if rows in batch else 2 if rows in contracted else 1
        count = eqn.invars[2].aval.shape[-1]

        def copies(side: int) -> Node:
            made = self._copied(eqn.invars[side], operands[side : side + 1])
            made.size *= count
            return made

        order = copied if count > 1 else 1  # groups come first in a product, and behind the rows where rows are summed
        found = [self._once((order, operands[side]), lambda side=side: copies(side)) for side in range(copied)]
        return [*found, *operands[copied:]]

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Node]) -> Sequence[Node]:
        self._inside += 1
        outs = super().mapped(eqn, part, operands)
        self._inside -= 1
        return outs

    def branches(self, eqn: Any, parts: Sequence[Held], operands: Sequence[Node]) -> Sequence[Node]:
        self._read(operands)
        begin, outer = self._now, self._copies
        ends = []
        for part in parts:
            self._copies = {}
            with self._part(begin):
                ends.append(self.run(eqn, part, part.of(operands)))
                self._read(ends[-1])
        self._copies = outer
        made = [self._made(var, None, reuses=True) for var in eqn.outvars]
        for node, *same in zip(made, *ends, strict=True) if BRANCHES_WRITE_IN_PLACE else ():
            node.ends_as = tuple(one for one in same if begin in dict(one.tick.around))
        return made

    # --- loops --------------------------------------------------------------------------------------------

    @property
    def _loops(self) -> int:
        """How many loops the walk is in."""
        return sum(outer.loops for outer, _ in self._around)

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Node]) -> Sequence[Node]:
        """Each carry has one place, which a round writes anew. Stacks stand from the first round on.

        What repeats a constant is not given to a loop: each round makes it in passing. To a loop in a loop it is,
        as the compiler does in pipelines.
        """
        if eqn.params.get("length") == 1:
            return self.run(eqn, body, body.of(operands))  # the compiler leaves no loop of it
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        carried = body.operands[first : first + count]
        self._read(operands[i] for i in carried if not operands[i].constant)
        nested = self._loops > 0
        given = [node for i, node in enumerate(operands) if i not in carried and (nested or not node.constant)]
        self._read([self._new(0), *given])  # behind the first carries, whose places it takes
        begin, outer = self._now, (self._stacks, self._copies)
        begin.loops = True
        places = [self._made(var, None) for var in eqn.outvars[:count]]
        carries = {i: self._new(0) for i in carried}
        self._stacks, self._copies = {}, {}
        with self._part(begin):
            outs = super().loop(eqn, body, test, [carries.get(i, node) for i, node in enumerate(operands)])
            changed = [(carry, out) for carry, out in zip(carries.values(), outs, strict=False) if out is not carry]
            for carry, out in changed:
                out.goes_into(carry)
            self._read(out for _, out in changed)
        for stack in self._stacks.values():
            stack.tick.makes.remove(stack)
            stack.tick = begin
            begin.makes.append(stack)
        for place in (*places, *self._stacks.values()):
            place.read(begin, whole=False)
        self._stacks, self._copies = outer
        return [*places, *outs[count:]]

    def sliced(self, value: Node, operand: Any) -> Node:
        node = self._made(operand, (value,))
        node.size = 0 if value.results is not None else node.size / max(operand.aval.shape[0], 1)
        node.again, node.results = True, value.results
        return node

    def stacked(self, value: Node, result: Any) -> Node:
        """The compiler keeps one stack of what a body returns twice, but not in a loop in a loop. Of what is inside a
        kernel it keeps one of the kernel's results."""
        value.read(value.tick, whole=False)
        hidden = value.results is not None and self._hidden is None
        key: Any = id(value.results) if hidden else (value, result) if self._loops > 1 else value
        if key not in self._stacks:
            self._stacks[key] = stack = self._made(result, None)
            if hidden:
                stack.size, stack.results = sum(one.size for one in value.results or ()) * result.aval.shape[0], [stack]
        return self._stacks[key]


def _in_order(eqn: Any, side: int) -> bool:
    """Whether a product takes an operand as it lies: what it sums over comes last in the first, first in the second."""
    contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
    ndim = eqn.invars[side].aval.ndim
    free = [i for i in range(ndim) if i not in contracted and i not in batch]
    orders = [[*batch, *free, *contracted]] if side == 0 or not batch else []
    orders += [[*batch, *contracted, *free]] if side else []
    return list(range(ndim)) in orders


def _is_reshaped(eqn: Any, side: int) -> bool:
    """Whether the compiler gives a product another shape of an operand: one dimension each of batch, rows and sums."""
    contracted, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
    free = eqn.invars[side].aval.ndim - len(contracted) - len(batch)
    return max(len(contracted), len(batch), free) > 1


def _joins_rows(eqn: Any) -> bool:
    """Whether an equation joins arrays along their last dimension, which no kernel does in passing."""
    return eqn.primitive.name == "concatenate" and eqn.params["dimension"] == eqn.outvars[0].aval.ndim - 1 > 0


def _only_reshapes(eqn: Any) -> bool:
    """Whether an equation moves, adds or sums over dimensions of one element alone."""
    name = eqn.primitive.name
    if name == "transpose":
        shape = eqn.invars[0].aval.shape
        kept = [i for i in eqn.params["permutation"] if shape[i] != 1]
        return kept == sorted(kept)
    return name in _SAME_ELEMENTS and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def _is_float(atom: Any) -> bool:
    return atom.aval.dtype.kind == "f" or atom.aval.dtype.name == "bfloat16"


def _key(eqn: Any, operands: Sequence[Node]) -> Any:
    """The same for two equations that compute the same."""
    return (
        eqn.primitive,
        str(sorted(eqn.params.items())),
        *operands,
        *((shape_of(atom), atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars)),
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
    others = {node: len(node.read_in) for node in nodes}  # how many equations read it that no kernel takes in
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


def _most(nodes: Sequence[Node], order: _Order, *, fused: bool) -> int:
    """The most bytes that stand at one time. Without `fused` every chain stands, and nothing where an operand lay."""
    standing = _standing(nodes, fused)
    begins, ends = order.of(standing)
    _sum_at_once(nodes, begins, ends)
    made = {node: (ends if node.ends_as else begins)[node.tick] for node in nodes}  # of a branch, when it has run
    reads = {node: [(ends[tick] + (tick is node.tick), tick) for tick in node.read_in] for node in nodes}
    chained = dict.fromkeys(nodes, 0)  # when the last chain that computes it again is made
    found: list[_Standing] = []
    for node in reversed(nodes):
        stands = node in standing
        end = max((time for time, _ in reads[node]), default=0)
        last = max(made[node] if stands else end, chained[node])
        for source in node.sources or ():
            if fused and source.again and source in standing:
                chained[source] = max(chained[source], last)
            else:
                reads[source].append((last, node.tick))
        into = reads[node.into] if fused and node.into is not None else None
        in_place = into is not None and all(time <= made[node] for time, tick in into if tick.runs_with(node.tick))
        if stands and not in_place:
            start = (made[node], 2 if node.reuses and fused else 0)  # what ends at a time makes room at 1
            end_ = (math.inf, 3) if node.returned else max((end, 1), (made[node], 3))
            found.append(_Standing(node.size, node.hosts, start, end_))
    return _highest(_besides_results(one for one in found if one.hosts or one.end[0] < math.inf))


def _sum_at_once(nodes: Iterable[Node], *times: dict[Tick, int]) -> None:
    """Moves the sums of what is returned to the last one of those over the same axes."""
    groups: dict[Any, list[Tick]] = {}
    for node in nodes:
        if node.returned and node.summed is not None:
            groups.setdefault((node.summed, node.tick.around), []).append(node.tick)
    for ticks in groups.values():
        for time in times:
            time.update(dict.fromkeys(ticks, max(time[tick] for tick in ticks)))


class _Standing(NamedTuple):
    """From when to when a value stands, and whether it is a result with a place of its own."""

    size: float
    hosts: bool
    start: tuple[float, int]
    end: tuple[float, int]


def _besides_results(found: Iterable[_Standing]) -> list[_Standing]:
    """What does not find room in the place of a result: before a result is made, others may stand there in turn."""
    places: list[list[_Standing]] = []
    rest = []
    for one in sorted(found, key=lambda one: (-one.size, not one.hosts, one.start)):
        if one.hosts:
            places.append([one])
            continue
        free = (
            place
            for place in reversed(places)
            if all(one.end < other.start or other.end < one.start for other in place)
        )
        if (place := next(free, None)) is not None:
            place.append(one)
        else:
            rest.append(one)
    return rest


def _highest(found: Iterable[_Standing]) -> int:
    events = [event for one in found for event in ((one.start, one.size), (one.end, -one.size))]
    total = most = 0.0
    for _, size in sorted(events):
        total += size
        most = max(most, total)
    return round(most)


class _Order:
    """When each equation begins and ends, if kernels run one after another, those first that were ready first.

    Args:
      root: Where the arguments are made.
      ticks: The equations of the program.
    """

    def __init__(self, root: Tick, ticks: Sequence[Tick]) -> None:
        self._root = root
        self._ticks = ticks

    def of(self, standing: Container[Node]) -> tuple[dict[Tick, int], dict[Tick, int]]:
        """When each begins, and when it ends, if these values stand."""
        self._standing, self._now = standing, 0
        self._begins, self._ends = {self._root: 0}, {self._root: 0}
        self._run(self._ticks)
        return self._begins, self._ends

    def _run(self, ticks: Sequence[Tick]) -> None:
        """The equations of the program, or of a round of a loop or a branch, each of which is a whole."""
        here = set(ticks)
        waits = {tick: {node.tick for node in _given(tick) if node.tick in here} - {tick} for tick in ticks}
        users: dict[Tick, list[Tick]] = {tick: [] for tick in ticks}
        for tick, before in waits.items():
            for one in before:
                users[one].append(tick)
        missing = {tick: len(before) for tick, before in waits.items()}
        ready = deque(tick for tick in ticks if not missing[tick])
        while ready:
            tick = ready.popleft()
            kernel = self._is_kernel(tick)
            self._take(tick, kernel)
            for user in users[tick]:
                missing[user] -= 1
            found = [user for user in users[tick] if not missing[user]]
            if kernel:
                ready.extend(found)
            else:  # it is a part of those that read it
                ready.extendleft(reversed(found))

    def _take(self, tick: Tick, kernel: bool) -> None:
        self._now += kernel
        self._begins[tick] = self._now
        for part in tick.inside:
            self._run(part)
            self._now += 1
        self._ends[tick] = self._now

    def _is_kernel(self, tick: Tick) -> bool:
        """Whether it is more than chains that do not stand."""
        stands = (node.sources is None or node in self._standing for node in tick.makes)
        return not tick.makes or bool(tick.inside) or any(stands)


def _given(tick: Tick) -> Iterable[Node]:
    """What must be there before an equation runs: what it reads, or what is read inside of it."""
    yield from tick.reads
    for part in tick.inside:
        for one in part:
            yield from _given(one)


def _standing(nodes: Sequence[Node], fused: bool) -> set[Node]:
    """The values that stand, of those that are read."""
    found = set()
    readers = {node: len(node.read_in) for node in nodes}
    for node in reversed(nodes):  # readers come after what they read
        if not readers[node]:
            continue
        stands = node.sources is None or _stands(node, readers[node], fused)
        if stands:
            found.add(node)
        count = readers[node]
        if stands:
            count = 1 + (count - len(node.read_in)) * (fused and node.again)
        for source in node.sources or ():
            readers[source] += count
    return found


def _stands(node: Node, readers: int, fused: bool) -> bool:
    if not fused:
        return bool(node.sources) and not node.constant
    return node.whole or (node.dear and readers > 1)
