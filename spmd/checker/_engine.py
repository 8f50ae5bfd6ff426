"""The engine: a state for every value, and what each equation makes of it, from one entry of the table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax.core
import numpy as np

import spmd.checker._reports as report
import spmd.checker._tables as tables
from spmd import _compat
from spmd._jaxprs.facts import CallName, GradientName, PerShardName, one_line
from spmd._jaxprs.lines import called_at, is_transposed, line_of
from spmd._jaxprs.walker import Domain, Equation, Rule, Variable, is_unknown, shape_of
from spmd.checker._finding import Finding, found
from spmd.checker._history import History
from spmd.checker._linear import LINEAR
from spmd.checker._state import (
    FREE,
    HIDDEN,
    NONE,
    OWN,
    QUIET,
    UNREAD,
    Axes,
    Dim,
    Pending,
    State,
    axes_of_dim,
    differing_orders,
    emptied,
    free,
    hidden,
    hide,
    is_empty,
    join,
    kept_order,
    normal,
    order_pair,
    plain,
    remade,
    size_of,
    still_pending,
    unify,
)
from spmd.checker._table import TABLE, Entry, Map, elementwise
from spmd.errors import Fault
from spmd.language import Layout

Where = tuple[Any, tuple[Any, ...]]  # an equation, and those around it

RANDOM = ("random_bits", "threefry2x32", "random_gamma", "rng_bit_generator")

# Larger constants are not looked at: reading them would cost more than the trace.
LARGEST_CONSTANT = 1_000_000

# A single element of which nobody knows which dimension it is of fits any layout.
ONE = hidden(1)

# Operations along a dimension that keep a constant constant.
KEEP_CONSTANTS = frozenset(("flip", "sort", "slice"))


class Engine(Domain):
    """One walk. `_dataflow` adds the primitives that have code of their own.

    Attributes:
      kernel: Its name, for messages.
      sizes: The sizes of the mesh axes. Along axes of size 1 nothing differs, and they are left out of states.
      wanted: The axes that the caller asked about.
      checked: Those that claims are checked on where the walk is: the axes of the kernel's own shard_map.
      active: Whether the walk is inside a body. Outside, values are global.
      arg_names: What the kernel calls the inputs of its body.
      arg_layouts: Their layouts, where they are told.
      varying: The axes on which the inputs of a body vary that is not inside of a `shard_map` of its jaxpr.
      root: The jaxpr that is walked, for those who look again.
      trusting: Whether a layout is believed once it was checked; not where the question is what a value is.
      outputs: The output states of each body, with its shard_map equation.
      about: The equation that each finding is about.
      weaker: Findings that others explain, if those are right.
      rows: The calls that close axes which divide the rows of a loop or of `vmap`.
    """

    rules: Mapping[str, Rule] = {}

    def __init__(
        self,
        kernel: str,
        axes: Iterable[str],
        sizes: Mapping[str, int] | None = None,
        *,
        arg_names: Sequence[str] = (),
        arg_layouts: Sequence[Layout] = (),
        trusting: bool = True,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.sizes = dict(sizes or {})
        self.wanted = self.checked = frozenset(axes)
        self.active = False
        self.trusting = trusting
        self.arg_names, self.arg_layouts = arg_names, arg_layouts
        self.varying: Sequence[Axes] = ()
        self.root: Any = None
        self.findings: list[Finding] = []
        self.outputs: list[tuple[Any, list[State]]] = []
        self._numbers: dict[int, int] = {}
        self.made_pending: list[tuple[Any, tuple[Any, ...]]] = []
        self._states: dict[State, State] = {}
        self._literals: dict[Any, State] = {}
        self._memo: dict[Any, tuple[Sequence[State], list[State]]] = {}
        self._stacks: dict[int, tuple[Any, tuple[frozenset[str], bool]]] = {}
        self._history: History | None = None
        self._blamed: dict[Any, Finding] = {}
        self.about: dict[Finding, Equation] = {}
        self.weaker: list[Finding] = []
        self.rows: set[Any] = set()

    # --- what messages ask -----------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Where values come from. The first question walks over the whole jaxpr again."""
        if self._history is None:
            self._history = History(self.root, self.arg_names, self.varying, self.arg_layouts)
        return self._history

    def fault(self, eqn: Equation, axes: Iterable[str], kind: str, describe: Callable[..., Fault]) -> None:
        """Keep a fault of the user's. Faults in what JAX wrote, and inside our own verbs, are not the user's."""
        axes = [a for a in self.sizes if a in self.checked.intersection(axes)]
        if self.active and axes and not self.silent(eqn):
            self.note(eqn, kind, describe(self, eqn, axes))

    def note(
        self,
        eqn: Equation,
        kind: str,
        fault: Fault,
        *,
        where: Where | None = None,
        certain: bool = True,
        line: str = "",
    ) -> None:
        """Keep a finding, with its class and the user's line to blame."""
        line = line or self._line(*(where or (eqn, tuple(self.callers))))
        self.findings.append(found(fault, kind, line, certain))
        self.about[self.findings[-1]] = where[0] if where else eqn

    def _line(self, eqn: Equation, callers: tuple[Equation, ...]) -> str:
        """The line of an equation, or of a call around it. What this package or JAX wrote has none, and then it is the
        line that made the operand, or what the user calls now."""
        made = map(self.history.line, eqn.invars[:1])
        return line_of(eqn, callers) or next(made, "") or called_at()

    def inside_verb(self, eqn: Equation) -> bool:
        """Return whether a layout is claimed by a call that another one of our own makes, or where shards are meant."""
        scopes, _ = self._around(eqn)
        return not scopes <= {one_line(eqn.params["call"])}

    def silent(self, eqn: Equation) -> bool:
        """Return whether JAX or this package wrote the equation, or it is meant per shard."""
        for one in (eqn, *self.callers):
            scopes, transposed = self._around(one)
            if scopes or transposed:
                return True
        return False

    def adds_up_gradients(self, eqn: Equation) -> bool:
        """Return whether a gradient that is taken inside a body made a sum that nobody wrote: neither `spmd.grad` nor
        another call of ours is around it."""
        inside = [eqn]
        for caller in reversed(self.callers):
            if caller.primitive.name == "shard_map":
                if is_transposed(caller):
                    return False
                break
            inside.append(caller)
        written = any(isinstance(name, GradientName) for one in inside for _, name in _compat.name_stack(one))
        around = list(map(self._around, inside))
        return not written and any(made for _, made in around) and not any(scopes for scopes, _ in around)

    def _around(self, eqn: Equation) -> tuple[frozenset[str], bool]:
        """The scopes of ours that an equation is in, and whether it belongs to a backward pass."""
        stack = eqn.source_info.name_stack
        if id(stack) not in self._stacks:
            names = [getattr(one, "name", None) for one in getattr(stack, "stack", ())]
            scopes = frozenset([name for name in names if isinstance(name, CallName | PerShardName)])
            self._stacks[id(stack)] = (stack, (scopes, is_transposed(eqn)))
        return self._stacks[id(stack)][1]

    def number(self, eqn: Equation) -> int:
        """The number of an equation that did something to a piece."""
        found = self._numbers.get(id(eqn))
        if found is None:
            found = self._numbers[id(eqn)] = len(self.made_pending)
            self.made_pending.append((eqn, tuple(self.callers)))
        return found

    # --- values ----------------------------------------------------------------------------------------------

    def kept(self, state: State) -> State:
        """The one state that is equal to this one. What is known of an array without elements is that it is empty."""
        found = self._states.get(state)
        if found is None:
            one = emptied(state) if is_empty(state.dims) else state
            found = self._states[state] = self._states.setdefault(one, one)
        return found

    def tracked(self, axes: Iterable[str]) -> Axes:
        """Those of these mesh axes that have several devices. Along the others a piece is the whole."""
        sizes = self.sizes
        return tuple([a for a in axes if a not in sizes or sizes[a] > 1])

    def wide(self, axis: str) -> bool:
        """Return whether a piece along the axis is not the whole."""
        return self.sizes.get(axis, 2) > 1

    def context(self) -> Hashable:
        return self.active, self.checked

    def constant(self, var: Variable | None, value: Any) -> State:
        """A value that the jaxpr closed over: an array, or a value of the trace around it."""
        if value is None and var is not None:
            return self.kept(State(tuple(hidden(n) for n in shape_of(var))))
        if not isinstance(value, jax.core.Tracer):
            return self.kept(constant_state(value))
        partial = frozenset(self.tracked(_compat.unreduced_axes(value)))
        different = frozenset(self.tracked(_compat.varying_axes(value))) - partial
        return self.kept(State(tuple(map(hidden if different else plain, value.shape)), partial, different))

    def literal(self, atom: Variable) -> State:
        value = atom.val
        if not hasattr(value, "dtype") or np.ndim(value):
            return self.kept(constant_state(value))
        key = value.dtype, np.asarray(value).item()  # a program has few of them, many times
        found = self._literals.get(key)
        if found is None:
            found = self._literals[key] = self.kept(constant_state(np.asarray(key[1], key[0])))
        return found

    def join(self, one: State, other: State) -> State:
        return self.kept(join(one, other))

    def unsettled(self, value: State) -> State:
        return self.unknown_like(value)

    def unknown_like(self, value: State) -> State:
        return self.kept(State(tuple(hidden(size_of(d)) for d in value.dims), different=value.axes))

    def unknown(self, eqn: Equation, operands: Sequence[State]) -> list[State]:
        """The results of an equation that no rule knows. They may differ wherever an operand does. A term of a sum may
        be one still, and what was done to a piece is done."""
        given = _together([o for o in operands if not o.zero])
        pending = still_pending(given.pending, operands)
        partial = given.partial.difference(given.different, *(o.divided for o in operands))
        known = {"partial": partial, "pending": pending}
        return self.hidden(eqn, operands, NONE.union(partial, (p.axis for p in pending)), **known)

    def hidden(self, eqn: Equation, operands: Sequence[State], known: Iterable[str] = (), **facts: Any) -> list[State]:
        """The results of an equation that has no rule: they may differ wherever an operand does, but for the axes that
        are `known` otherwise."""
        different = NONE.union(*(o.axes for o in operands)).difference(known)
        return [self.kept(State(tuple(map(hidden, shape_of(v))), different=different, **facts)) for v in eqn.outvars]

    # --- equations -------------------------------------------------------------------------------------------

    def equation(self, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
        """Most equations are in the table. Those do not hold a jaxpr, so the walk need not look for one."""
        entry = TABLE.get(eqn.primitive.name)
        return super().equation(eqn, operands) if entry is None else self._by_table(entry, eqn, operands)

    def step(self, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
        return self.unknown(eqn, operands)  # the table does not have it

    def _by_table(self, entry: Entry, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
        name = eqn.primitive.name
        same = _unchanged(operands) if entry.map is elementwise else None
        if same is not None:
            return [same]
        counted = bool(operands) and None not in [o.table for o in operands]
        told = tuple(eqn.params.values()) if counted else entry.told and entry.told(eqn)
        key: Any = name, tuple(map(id, operands)), told, told is not None and shape_of(eqn.outvars[0])
        try:
            known = self._memo.get(key)
        except TypeError:  # a parameter has no hash
            key, known = None, None
        if known is not None:
            return known[1]
        found = len(self.findings)
        outs = self._apply(entry, eqn, operands)
        outs = self.counted(eqn, operands, outs) if counted else outs
        if (
            key
            and len(self.findings) == found
            and not any(o.partial for o in operands)
            and not any(o.pending for o in outs)
        ):
            self._memo[key] = operands, outs
        return outs

    def counted(self, eqn: Equation, operands: Sequence[State], outs: list[State]) -> list[State]:
        """The results, with the integers that each device holds where shapes and `axis_index` decide them."""
        if any(o.table is None for o in operands):
            return outs
        found = tables.evaluate(eqn, [o.table for o in operands], self.sizes)
        pairs = zip(outs, found, strict=True)
        return [out if table is None else self._placed(out, table) for out, table in pairs]

    def _placed(self, state: State, table: Any) -> State:
        """A state with the integers that each device holds, which tell how the dimensions lie."""
        clear = bool(table.axes) and ONE not in state.dims  # else it may be this dimension that they divide
        blocks = (tables.blocks_of(table, self.sizes) if clear else None) or ()
        dims, divided = list(state.dims), state.divided
        for i, (dim, axes) in enumerate(zip(state.dims, blocks, strict=False)):
            if axes and divided.isdisjoint(axes):  # else the numbers go on from block to block of another dimension
                dims[i] = normal([(size_of(dim), tuple(axes))])
        if not table.axes:  # equal blocks, and equal elements along some dimensions
            constant = lambda i, dim: not axes_of_dim(dim) and tables.is_constant(table, i)
            dims = [free(size_of(dim)) if constant(i, dim) else dim for i, dim in enumerate(dims)]
        different = frozenset(table.axes).difference(*map(axes_of_dim, dims))
        pending = frozenset(p for p in state.pending if p.axis in table.axes and p.axis not in different)
        known = {"zero": state.zero, "table": table, "order": state.order}
        return self.kept(State(tuple(dims), different=different, pending=pending, **known))

    def _apply(self, entry: Entry, eqn: Equation, operands: Sequence[State]) -> list[State]:
        m, known = entry.map(eqn), len(self.findings)
        labels, lost = self._labels(m, eqn, operands)
        partial, unknown, zero = NONE, NONE, False
        given, beside = _together(operands[: len(m.operands)]), operands[len(m.operands) :]
        if given.partial or given.zero or any(one.partial for one in beside):
            partial, unknown, zero = LINEAR[entry.linear](self, eqn, operands)
        quiet = {p.axis for p in given.pending if p.kind == UNREAD}
        if len(self.findings) > known:  # what comes of a mistake that was reported is not reported again
            quiet |= unknown.union(lost)
            pieces = sorted(p for p in given.pending if p.axis in quiet and p.kind not in QUIET)
            last = self.findings.pop()
            fault = report.on_pieces_too(self, eqn, last, pieces)
            self.findings.append(found(fault, last.kind, last.line, last.certain))
            self.about[self.findings[-1]] = eqn
            self._said_once(eqn, operands, known)
            lost = set()
        told = {Pending(UNREAD, axis, -1) for axis in quiet} | {Pending(OWN, axis, -1) for axis in lost}
        if quiet:
            unknown -= quiet
            given = given._replace(pending=frozenset(p for p in given.pending if p.axis not in quiet))
        different = given.different.union(lost, unknown)
        summed, pending = self._reduced(m, eqn, labels)
        # What only says where to look is of this device's own piece, if it differs.
        own = NONE.union(*(one.axes - one.divided for one in beside))
        pending = frozenset([p for p in pending if p.axis not in own])
        result = [self._result_dims(m, labels, var) for var in eqn.outvars]
        held: Axes = ()
        for dim in result[0]:
            held += axes_of_dim(dim)
        if len(set(held)) < len(held):
            twice = {axis for axis in held if held.count(axis) > 1 and self.wide(axis)}
            pending |= {Pending("pairs", axis, self.number(eqn)) for axis in twice}
        if pending and (self.silent(eqn) or not self.active):
            different |= {p.axis for p in pending}
            pending = NONE
        partial = (partial | summed) - different - set(held)
        different |= own.difference(partial, held, {p.axis for p in pending})
        if pending or given.pending or told:
            pending = still_pending(pending | given.pending | told, operands, unknown)
        if (chosen := _left_out(eqn, operands)) and not chosen.isdisjoint(held):  # a block, or a term of a sum
            result = [hide(dims, chosen) for dims in result]
            different |= chosen.difference(partial, *map(axes_of_dim, result[0]))
        rest = partial, different, pending, zero
        order = self._ordered(m, eqn, operands, result[0]) if any(o.order for o in operands) else NONE
        return [self.kept(State(dims, *rest, order=order)) for dims in result]

    def _ordered(self, m: Map, eqn: Equation, operands: Sequence[State], dims: Sequence[Dim]) -> frozenset[Any]:
        """In which order the elements of the result lie. Those that are combined should lie in one order."""
        differ = differing_orders(operands)
        if differ is not None:
            describe = lambda walk, eqn, axes: report.orders_differ(walk, eqn, axes, *differ)
            self.once(order_pair(*differ), lambda: self.fault(eqn, differ[0].axes, "order", describe))
        passed = [dim for dim, label in zip(dims, m.result, strict=False) if label not in {*m.whole, *m.made}]
        return kept_order(operands, passed)

    def _labels(self, m: Map, eqn: Equation, operands: Sequence[State]) -> tuple[dict[int, Dim], set[str]]:
        """The factors of each label, on which all operands must agree."""
        labels: dict[int, Dim] = {}
        free_of: dict[int, frozenset[str]] = {}
        lost: set[str] = set()
        wrong: list[tuple[Dim, Dim]] = []
        for operand, given in zip(operands, m.operands, strict=False):
            for dim, label in zip(operand.dims, given, strict=False):
                if label is None:
                    lost.update(axes_of_dim(dim))
                    continue
                have = labels.get(label)
                if have is None:
                    labels[label], free_of[label] = dim, operand.different
                    continue
                if dim == ONE:
                    dim = have
                elif have == ONE:
                    have = dim
                both = have if have is dim else unify(have, dim, free_of[label], operand.different)
                if both is None and m.whole.get(label) == "sort":
                    both = have if axes_of_dim(have) else dim  # places in a piece that is sorted
                if both is None:
                    wrong.append((have, dim))
                    both = hidden(size_of(have))
                if both is not have:  # what nobody can place any more differs all the same
                    lost.update({*axes_of_dim(have), *axes_of_dim(dim)}.difference(axes_of_dim(both)))
                labels[label], free_of[label] = both, free_of[label] | operand.different
        if wrong:
            self.disagree(eqn, operands, wrong)
        return labels, lost

    def disagree(self, eqn: Equation, operands: Sequence[State], dims: Sequence[tuple[Dim, Dim]]) -> None:
        """Two operands lie differently along these dimensions. Numbers known on each device are only numbers."""
        if not self.active or self.silent(eqn) or all(o.table is not None for o in operands):
            return
        noise = any(self.random(atom, o) for atom, o in zip(eqn.invars, operands, strict=True))
        axes = {axis for pair in dims for dim in pair for axis in axes_of_dim(dim)}
        describe = lambda walk, eqn, axes: report.operands_disagree(walk, eqn, axes, dims, noise)
        self.fault(eqn, axes, "noise" if noise else "disagree", describe)

    def once(self, mistake: Hashable, tell: Callable[[], None]) -> None:
        """Tell of a mistake, unless that was done. What comes of it meets it again."""
        if self._blamed.get(mistake) not in self.findings:
            known = len(self.findings)
            tell()
            if len(self.findings) > known:
                self._blamed[mistake] = self.findings[-1]

    def _said_once(self, eqn: Equation, operands: Sequence[State], known: int) -> None:
        """A sum that is never completed is one mistake, however often it is used in one way, or on one line."""
        sums = [self.history.sum_behind(atom) for atom, o in zip(eqn.invars, operands, strict=True) if o.partial]
        for one in self.findings[known:]:
            for key in ((*sums, one.kind), (*sums, one.line)) if sums else ():
                first = self._blamed.setdefault(key, one)
                if first != one and first in self.findings[:known] and one in self.findings:
                    self.findings.remove(one)

    def random(self, atom: Variable, state: State) -> bool:
        """Return whether a value is noise of one key that every device has."""
        return not state.axes and any(self.history.made_by(atom, name) for name in RANDOM)

    def _reduced(self, m: Map, eqn: Equation, labels: Mapping[int, Dim]) -> tuple[frozenset[str], frozenset[Pending]]:
        """The axes that a sum runs over, and what else was done to a piece."""
        summed: set[str] = set()
        pending: set[Pending] = set()
        for label, kind in (*m.reduced.items(), *m.whole.items()):
            dim = labels.get(label)
            axes = axes_of_dim(dim) if dim is not None else ()
            if not axes:
                continue
            if kind == "sum":
                summed.update(axes)
            else:
                pending.update(Pending(kind, axis, self.number(eqn)) for axis in axes if self.wide(axis))
        return frozenset(summed), frozenset(pending)

    def _result_dims(self, m: Map, labels: Mapping[int, Dim], var: Variable) -> tuple[Dim, ...]:
        shape = shape_of(var)
        out = [self._result_dim(m, label, labels, size) for label, size in zip(m.result, shape, strict=False)]
        return (*out, *map(plain, shape[len(out) :]))

    def _result_dim(self, m: Map, label: int | None, labels: Mapping[int, Dim], size: int) -> Dim:
        if label is None or label not in labels:
            return plain(size) if label in m.made else free(size)
        dim = labels[label]
        if not m.whole and not m.made and size_of(dim) == size:
            return dim
        if label in m.joined:
            return max(remade(labels[one], size) for one in m.joined)  # hidden if one of them is
        constant = [axes is FREE for _, axes in dim]
        if any(constant) and label in m.whole and not (all(constant) and m.whole[label] in KEEP_CONSTANTS):
            return remade(dim, size)
        if label in m.made and dim[0][1] is not FREE and (size_of(dim) != size or self._cut(dim)):
            return hidden(size) if axes_of_dim(dim) or dim[0][1] is HIDDEN else plain(size)
        return dim if size_of(dim) == size else free(size) if dim[0][1] is FREE else _fewer(dim, size)

    def _cut(self, dim: Dim) -> bool:
        """Return whether something was done to each piece of the dimension, and not to the whole."""
        axes = axes_of_dim(dim)
        return not axes or any(map(self.wide, axes))

    def unread(self, eqn: Equation, operands: Sequence[State]) -> Sequence[State]:
        axes = NONE.union(*(o.axes for o in operands))
        if not is_unknown(eqn):
            return self.hidden(eqn, operands)
        return self.hidden(eqn, operands, axes, pending=frozenset(Pending(UNREAD, axis, -1) for axis in axes))


def _fewer(dim: Dim, size: int) -> Dim:
    """Evenly spaced elements of each block."""
    *outer, (last, axes) = dim
    times = size_of(dim) // max(size, 1)
    return hidden(size) if size * times != size_of(dim) or last % times else normal([*outer, (last // times, axes)])


# All that a state holds besides its dimensions and the axes along which it differs, where nothing more is known.
_PLAIN = State()[1:2] + State()[3:]


def _unchanged(operands: Sequence[State]) -> State | None:
    """The result of an elementwise operation on values in one state, where numbers do not matter. It is the most
    frequent equation of a program, so this calls nothing."""
    found = None
    for one in operands:
        if not one.dims and not (one.zero or one.different or one.partial or one.pending):
            continue
        if one is not found and (found is not None or one[1:2] + one[3:] != _PLAIN):
            return None
        found = one
    return found


def _together(operands: Sequence[State]) -> State:
    """Return what all operands are besides their dimensions; `zero` says whether any is."""
    partial = different = pending = NONE
    zero = False
    for one in operands:
        if one.partial:
            partial |= one.partial
        if one.different:
            different |= one.different
        if one.pending:
            pending |= one.pending
        zero = zero or one.zero
    return State((), partial, different, pending, zero)


def _left_out(eqn: Equation, operands: Sequence[State]) -> frozenset[str]:
    """The axes along which some devices, by their number, leave out all that others have: it is zero there."""
    name = eqn.primitive.name
    chooses = name == "select_n" and any(case.zero for case in operands[1:])
    masks = operands[:1] if chooses else operands if name == "mul" else ()
    whole = [one.table for one in masks if one.table is not None and one.table.axes and tables.is_alike(one.table)]
    return NONE.union(*(table.axes for table in whole if chooses or not table.values.all()))


def constant_state(value: Any) -> State:
    """A number or an array that is the same everywhere. Its elements show along which dimensions it is constant."""
    shape = getattr(value, "shape", ())
    if not all(isinstance(n, int) for n in shape):
        return State(tuple(hidden(1) for _ in shape))  # a size that nobody knows is not zero
    size = int(np.prod(shape))
    if size > LARGEST_CONSTANT or not getattr(value, "is_fully_addressable", True):
        return State(tuple(map(plain, shape)))
    try:
        elements = np.asarray(value)
        zero = not elements.any()
        dims = tuple(
            free(n) if n == 1 or not size or (elements == elements.take([0], axis=d)).all() else plain(n)
            for d, n in enumerate(shape)
        )
        return State(dims, zero=zero, table=tables.constant(elements))
    except (TypeError, ValueError, RuntimeError):  # keys, deleted buffers
        return State(tuple(map(plain, shape)))
