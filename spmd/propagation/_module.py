"""A module of Shardy's dialect as plain values: where each value lies, and each change of layout."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from spmd._compat import READS_ALL, location_name, operations, relaid
from spmd._compat import operation_name as name_of
from spmd._text import sent_bytes

KINDS = {
    "sdy.all_gather": "all_gather",
    "sdy.all_reduce": "psum",
    "sdy.reduce_scatter": "psum_scatter",
    "sdy.all_to_all": "all_to_all",
    "sdy.collective_permute": "ppermute",
}
# Changes of layout that send nothing.
_QUIET = ("sdy.all_slice", "sdy.replicated_to_unreduced", "sdy.sharded_to_unreduced", "sdy.reshard")
_MOVES = (*KINDS, *_QUIET)
SUMS = ("sdy.all_reduce", "sdy.reduce_scatter")
_NUMBER = re.compile(r"#(\d+)(?=[/)]|$)")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_SHARDING = re.compile(r"<(?:@[\w.$-]+|mesh<[^>]*>), \[([^\]]*)\]([^<>]*)>")
_PLACES = ("out_sharding", "sharding", "sdy.sharding", "out_shardings")
_MESH = re.compile(r"<(@[\w.$-]+|mesh<[^>]*>), \[")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(.+)>$")
_UNREDUCED = re.compile(r"unreduced=(?:\w+)?\{([^}]*)\}")

Number = tuple[int, ...]  # of an equation: the numbers of those around it, outermost first, and its own


class Axis(NamedTuple):
    """A mesh axis, or a part of one: `tp`, `tp:(1)2`.

    Attributes:
      name: The axis.
      size: How many devices there are along the part.
      before: The product of the sizes of the parts before it.
      whole: How many devices there are along the axis.
    """

    name: str
    size: int
    before: int
    whole: int

    @property
    def said(self) -> str:
        """The axis as the module has it."""
        return f'"{self.name}"' + ("" if self.size == self.whole else f":({self.before}){self.size}")

    @property
    def text(self) -> str:
        return self.name if self.size == self.whole else f"{self.name}:({self.before}){self.size}"


def _plus(axes: Sequence[Axis], more: Sequence[Axis]) -> tuple[Axis, ...]:
    """These axes and more behind them, the parts of one axis put together."""
    found = list(axes)
    for axis in more:
        last = found[-1] if found else None
        if last is not None and last.name == axis.name and last.before * last.size == axis.before:
            found[-1] = last._replace(size=last.size * axis.size)
        else:
            found.append(axis)
    return tuple(found)


def _minus(axes: Sequence[Axis], gone: Sequence[Axis]) -> tuple[Axis, ...]:
    """These axes without those at their end."""
    found = list(axes)
    for axis in reversed(gone):
        last = found.pop()
        if last.size > axis.size:
            found.append(last._replace(size=last.size // axis.size))
    return tuple(found)


Dims = tuple[tuple[Axis, ...], ...]


class Place(NamedTuple):
    """How a value lies: the axes of each dimension, and those along which it is a term of a sum."""

    dims: Dims
    partial: tuple[Axis, ...] = ()


class Typed(NamedTuple):
    """The type of a value: its whole shape and how many bytes an element has."""

    shape: tuple[int, ...]
    width: int
    dtype: str

    def local_shape(self, place: Place) -> tuple[int, ...]:
        """The shape of one device's block."""
        parts = (math.prod(axis.size for axis in axes) for axes in place.dims)
        return tuple(-(-n // part) for n, part in zip(self.shape, parts, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return self.width * math.prod(self.shape)

    def local_bytes(self, place: Place) -> int:
        """Bytes of one device's block."""
        return self.width * math.prod(self.local_shape(place))


class Beside(NamedTuple):
    """An operand that could be moved in place of something else: of an operation in a loop that another operand is
    moved for, if no round changes it; of an operation whose results are summed over devices.

    Attributes:
      argument: The number of the program's input that it is; None for what was computed.
      maker: The equation that gives it.
      dims: How it would lie, were it whole where the other is moved.
      shape: Its whole shape.
      bytes: What one device sends then.
    """

    argument: int | None
    maker: Number
    dims: Dims
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class RawMove:
    """A change of layout as it stands in the module.

    Attributes:
      kind: Which collective it is.
      axes: Along which mesh axes.
      type: The type of what is moved.
      source: How it lies before.
      target: How it lies behind.
      count: How often it runs.
      exact: Whether that is certain.
      branch: Whether it stands in a branch.
      maker: The equation that gives what is moved; empty where it is an input.
      user: The equation that needs it so; empty where it is a result.
      unchanging: Whether it stands in a loop that gives it the same value each time.
      argument: The number of the program's input that is moved, through nothing but copies; None for other values.
      part: Whether it is a slice of an input, such as the weights of one layer.
      scatters: Whether all that uses a sum keeps a slice along the same axes.
      beside: The operands that could be moved in its place.
      sure: Whether the compiler is known to do this, and nothing else in its place.
      alike: For how many operations it moves the value, each of which may get a move of its own.
    """

    kind: str
    axes: tuple[Axis, ...]
    type: Typed
    source: Place
    target: Place
    count: int
    exact: bool
    branch: bool
    maker: Number
    user: Number
    unchanging: bool = False
    argument: int | None = None
    part: bool = False
    scatters: bool = False
    beside: tuple[Beside, ...] = ()
    sure: bool = True
    alike: int = 1

    @property
    def group_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one execution."""
        return sent_bytes(self.kind, self.type.local_bytes(self.source), self.group_size)

    @property
    def least(self) -> int:
        """The least that it may send in one call: a loop may do once what no round changes, a sum may be scattered."""
        return self.bytes * (1 if self.unchanging else self.count) // (2 if self.scatters else 1) if self.sure else 0

    @property
    def most(self) -> int | None:
        """The most that it may send in one call: some compilers sum along one mesh axis after the other. None in a loop
        of unknown length."""
        if not self.exact and not self.branch:
            return None
        apart = [sent_bytes(self.kind, self.type.local_bytes(self.source), axis.size) for axis in self.axes]
        return self.alike * self.count * (sum(apart) if self.kind == "psum" else self.bytes)


class RawOpen(NamedTuple):
    """An operation of which the plan does not say what the compiler sends for it.

    Attributes:
      number: The equation.
      axes: The mesh axes that divide what it takes and gives.
      most: The most that one device may send for it in one call; None where nothing bounds it.
    """

    number: Number
    axes: tuple[Axis, ...]
    most: int | None


class _Site(NamedTuple):
    """Where the walk is: how often that runs."""

    count: int = 1
    exact: bool = True
    branch: bool = False


@dataclass
class Reading:
    """What a module says.

    Attributes:
      moves: The changes of layout that send something, in the order of the program.
      open: The operations of which it does not say what they send.
      places: For the number of an equation, the types and places of what it makes, in order.
      inputs: How the program's inputs lie.
      results: How its results lie.
    """

    sizes: Mapping[str, int]
    lengths: Mapping[int, int]  # how often the loop runs that an equation is
    moves: list[RawMove] = field(default_factory=list)
    open: list[RawOpen] = field(default_factory=list)
    places: dict[Number, list[tuple[Typed, Place]]] = field(default_factory=dict)
    inputs: list[Place] = field(default_factory=list)
    results: list[Place] = field(default_factory=list)
    block: Any = None  # of the program
    first: int = 0
    module: Any = None
    _merged: list[tuple[Any, bool]] = field(default_factory=list)
    _known: dict[str, list[Place]] = field(default_factory=dict)

    def axes(self, text: str) -> tuple[Axis, ...]:
        """`"dp", "tp":(1)2` as axes."""
        found = []
        for one in _AXIS.finditer(text):
            whole = self.sizes.get(one[1], 1)
            found.append(Axis(one[1], int(one[3] or whole), int(one[2] or 1), whole))
        return tuple(found)

    def lists(self, text: str) -> Dims:
        """`[{"dp"}, {}]` as the axes of each dimension."""
        return tuple(self.axes(one) for one in re.findall(r"\{([^}]*)\}", text))

    def shardings(self, text: str) -> list[Place]:
        if text in self._known:
            return self._known[text]
        places = self._known[text] = []
        for dims, rest in _SHARDING.findall(text):
            partial = _UNREDUCED.search(rest)
            places.append(Place(self.lists(dims), self.axes(partial[1]) if partial else ()))
        return places

    # --- values -------------------------------------------------------------------------------------------

    def place(self, value: Any) -> Place:
        """Return how a value lies."""
        whole = Place(((),) * len(typed(value).shape))
        owner = value.owner
        if hasattr(owner, "operations"):  # a block, whose argument the value is
            return self._of_argument(_parent(value), value.arg_number) or whole
        return self._of_result(operation(owner), value.result_number) or whole

    def _of_result(self, op: Any, number: int) -> Place | None:
        attributes = op.attributes
        for name in _PLACES:
            if name in attributes:
                found = self.shardings(str(attributes[name]))
                return found[number] if number < len(found) else None
        return None

    def _of_argument(self, op: Any, number: int) -> Place | None:
        name = name_of(op)
        if name == "stablehlo.while":
            return self._of_result(op, number)
        if name == "func.func" and "arg_attrs" in op.attributes:
            found = self.shardings(str(op.attributes["arg_attrs"][number]))
            return found[0] if found else None
        return None

    # --- the walk -----------------------------------------------------------------------------------------

    def read(self, module: Any, count: int) -> Reading:
        """Walk over the module from its main function, which has so many inputs."""
        self.module = module  # older bindings let its operations outlive it
        [main] = [one.operation for one in module.body.operations if name_of(one.operation) == "func.func"]
        [self.block] = [block] = main.regions[0].blocks
        self.first = len(block.arguments) - count  # constants that JAX hoisted out of the program come first
        self.inputs = [self.place(value) for value in block.arguments][self.first :]
        self._cancel(module)
        self._block(block, _Site())
        *_, last = block.operations
        self.results = [self.place(value) for value in last.operation.operands]
        return self

    def _cancel(self, module: Any) -> None:
        """Erase moves that take a result away from where it was made and back, as XLA does. A move stays that comes
        after a constraint: it has the number of that equation, not of the one that made the result."""
        moves = [one for one in operations(module.operation) if name_of(one) in _MOVES]
        for op in moves:
            value = op.operands[0]
            own = numbers(op) == _maker(value)
            while own and (owner := owner_of(value)) and name_of(owner) in _MOVES:
                value = owner.operands[0]
                if self.place(value) == self.place(op.results[0]):
                    op.results[0].replace_all_uses_with(value)
                    break
        for op in [one for one in moves if name_of(one) in SUMS]:
            first = owner_of(op.operands[0])
            if first is not None and name_of(first) == "sdy.all_reduce" and self._sums(first) == self._sums(op):
                op.operands[0] = first.operands[
                    0
                ]  # Shardy sums the terms of a sum that types leave open, and their sum
        self._gather(module)
        self._merged += _merge(module.operation)
        for op in reversed([one for one in operations(module.operation) if name_of(one) in _MOVES]):
            if not list(op.results[0].uses):
                op.erase()

    def _sums(self, op: Any) -> set[Axis]:
        """The axes along which a collective sums."""
        return set(self.before(op, name_of(op))[1])

    def _block(self, block: Any, site: _Site, skip: Number | None = None) -> None:
        for one in block.operations:
            op = one.operation
            name, number = name_of(op), numbers(op)
            if name in KINDS:
                self._move(op, name, site)
            elif name not in _MOVES:
                self._own(op, name, number, site)
            if name in _ENTERED:
                self._enter(op, name, number, site)
            if number != skip:
                self._keep(op, number)

    def _enter(self, op: Any, name: str, number: Number, site: _Site) -> None:
        """Read what is inside of a loop, a branch or a `shard_map`."""
        inner = site
        if name == "stablehlo.while":
            length = self.lengths.get(number[-1]) if number else None
            inner = site._replace(
                count=site.count * (1 if length is None else length), exact=site.exact and length is not None
            )
        elif name in ("stablehlo.case", "stablehlo.if"):
            inner = site._replace(exact=False, branch=True)
        for region in op.regions:
            for block in region.blocks:
                self._block(block, inner, skip=number)

    def _keep(self, op: Any, number: Number) -> None:
        name = name_of(op)
        if not number or (name in _MOVES and name not in SUMS and number in self.places):
            return  # what a later operation asks for
        made = [(typed(value), self.place(value)) for value in op.results if _TENSOR.search(str(value.type))]
        found = self.places.setdefault(number, [])
        if name in _ENTERED:  # these have the results of the equation, and nothing else
            found.clear()
        found += made

    def _move(self, op: Any, name: str, site: _Site) -> None:
        value, target = op.operands[0], self.place(op.results[0])
        source, axes = self.before(op, name)
        maker, sums = owner_of(value), name in SUMS
        if sums and maker is not None and _compares(maker):
            return
        user = None if sums else self._user(op.results[0])
        around = maker if sums else user if site.count > 1 else None
        self._note(
            KINDS[name],
            axes,
            value,
            (source, target),
            site,
            () if user is None else numbers(user),
            scatters=sums and self._is_sliced(op.results[0], axes),
            beside=tuple(self._beside(around, axes, sums)),
            sure=sums or not (self._is_open(value, op.results[0]) or (op, True) in self._merged),
            alike=1 + self._merged.count((op, False)),
        )

    def _note(
        self,
        kind: str,
        axes: tuple[Axis, ...],
        value: Any,
        between: tuple[Place, Place],
        site: _Site,
        user: Number,
        **more: Any,
    ) -> None:
        """Note that a value is moved, unless it stays on its device."""
        if math.prod(axis.size for axis in axes) < 2:
            return
        origin = self._origin(value, site.count > 1)
        where = (None if origin.sliced else origin.argument, origin.argument is not None)
        ends = (_maker(value), user, origin.unchanging, *where)
        self.moves.append(RawMove(kind, axes, typed(value), *between, *site, *ends, **more))

    # --- what no collective of the module says ------------------------------------------------------------

    def _own(self, op: Any, name: str, number: Number, site: _Site) -> None:
        """Note what the compiler sends for an operation by rules of its own, or may send."""
        rule = factors_of(op)
        if rule and _compares(op):  # each device gets what every other found
            axes = self._divided(op, rule, rule.reduced)
            for value in op.results:
                place = self.place(value)
                self._note("all_gather", axes, value, (Place(place.dims, axes), place), site, number)
        elif name == _CALL and "CustomSPMDPartitioning" in str(op.attributes["call_target_name"]):
            if axes := self._axes_of(op.operands):
                self.open.append(RawOpen(number, axes, None))
        elif found := [value for i, value in enumerate(op.operands) if self._loose(op, i)]:
            most = sum(map(self._most, found))
            self.open.append(RawOpen(number, self._axes_of(found), most * site.count))

    def _is_open(self, before: Any, behind: Any) -> bool:
        """Return whether it is open what makes or takes a value that is moved."""
        root = self._chain(before)[0]
        owner = owner_of(root)
        made = [] if owner is None or name_of(owner) in _CARRIES else [(owner, i) for i in range(len(owner.operands))]
        return any(self._loose(*one) for one in itertools.chain(_readers(behind), made[:1]))

    def _gather(self, module: Any) -> None:
        """Gather what XLA gathers for operations that it cannot divide: for a call with a rule, all that the rule does
        not pass on; for others all, and a slice is kept of what they give."""
        for op in list(operations(module.operation)):
            name, rule = name_of(op), factors_of(op)
            lie = [self.place(value) for value in (*op.operands, *op.results)]
            alike = name != _CALL and len({place.dims for place in lie}) == 1 and len(op.results) == 1
            if (name != _CALL and not name.startswith("chlo.")) or alike:  # it lies as others ask of the result
                continue
            for i, place in enumerate(lie):
                behind = i - len(op.operands)
                if rule and behind >= 0:
                    continue
                labels = rule.operands[i] if rule else [None] * len(place.dims)
                named = zip(place.dims, labels, strict=True)
                kept = [bool(rule and label is not None and label <= rule.passed) for _, label in named]
                gone, left = (
                    ", ".join(
                        "{" + ", ".join(axis.said for axis in axes if keep is which) + "}"
                        for axes, keep in zip(place.dims, kept, strict=True)
                    )
                    for which in (False, True)
                )
                if '"' in gone and behind < 0:
                    relaid(op, i, gone, f"{self._mesh_of(op.operands[i])}, [{left}]")
                elif '"' in gone:
                    relaid(op, behind, gone, f"{self._mesh_of(op.results[behind])}, [{gone}]", behind=True)
            if rule is None and "sdy.sharding" in op.attributes:
                del op.attributes["sdy.sharding"]

    def _mesh_of(self, value: Any) -> str:
        """How the module calls the mesh that divides a value."""
        owner = value.owner
        said = _parent(value) if hasattr(owner, "operations") else operation(owner)
        texts = [str(said.attributes[key]) for key in (*_PLACES, "arg_attrs") if key in said.attributes]
        return next(found[1] for found in map(_MESH.search, texts) if found)

    def _loose(self, op: Any, number: int) -> bool:
        """Return whether the compiler may send something else for this operand of an operation than the plan says.

        It does so along dimensions whose elements change places, where the plan moves a value in several steps, for
        lookups and pieces, and for products that leave mesh axes without work."""
        name = name_of(op)
        _, sent, sliced = self._chain(op.operands[number])
        if name in _CARRIES:
            return len(sent) > 1 or bool(sent and sliced)
        rule = factors_of(op)
        if (rule and self._divided(op, rule, rule.permuted)) or (name in READS_ALL and self._axes_of(op.operands)):
            return True
        chains = [self._chain(value) for value in op.operands]
        if not any(sent for _, sent, _ in chains):
            return False
        if any(len(sent) > 1 or (sent and sliced) for _, sent, sliced in chains):
            return True
        lie = [self.place(root).dims for root, _, _ in chains if typed(root).shape]
        if len(lie) > 2 and len(set(lie)) > 1:
            return True  # of two arrays that lie differently one is moved, of more it may be any
        if name == "stablehlo.reshape":
            return name_of(chains[0][1][0]) == "sdy.all_to_all"
        if name == _PRODUCT:
            return self._is_idle(op)
        return any(0 in typed(value).shape for value in op.operands) or name in _OWN_WAYS

    def _chain(self, value: Any) -> tuple[Any, list[Any], bool]:
        """Return what a value was before it was moved, the collectives that moved it, and whether it was cut, too."""
        sent: list[Any] = []
        sliced = False
        while (owner := owner_of(value)) is not None and (name := name_of(owner)) in _MOVES and name not in SUMS:
            sent += [owner] if name in KINDS else []
            sliced = sliced or name == "sdy.all_slice"
            value = owner.operands[0]
        return value, sent, sliced

    def _axes_of(self, values: Sequence[Any]) -> tuple[Axis, ...]:
        """The axes that divide values before they are moved."""
        places = [self.place(self._chain(value)[0]) for value in values]
        return tuple(dict.fromkeys(itertools.chain(*(axes for place in places for axes in place.dims))))

    def _is_idle(self, op: Any) -> bool:
        """Return whether some mesh axis divides neither what an operation takes nor what it gives."""
        places = [self.place(op.results[0])]
        used = {axis.name for axis in (*self._axes_of(op.operands), *itertools.chain(*places[0].dims))}
        return any(size > 1 and name not in used for name, size in self.sizes.items())

    def _divided(self, op: Any, rule: Factors, factors: frozenset[str]) -> tuple[Axis, ...]:
        """The axes that divide an operation along these factors."""
        sides = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
        found = [zip(labels, self.place(value).dims, strict=True) for labels, value in sides] if factors else []
        return tuple(dict.fromkeys(axis for dims in found for label, axes in dims if label & factors for axis in axes))

    def _most(self, value: Any) -> int:
        """The most that one device may send for an operand: all of it is gathered. What the plan moves may first be
        laid over all devices."""
        root, sent, _ = self._chain(value)
        place = self.place(root)
        block = typed(root).local_bytes(place)
        gathered = sent_bytes("all_gather", block, math.prod(axis.size for axes in place.dims for axis in axes))
        return block + typed(root).bytes if sent else gathered

    def _user(self, value: Any) -> Any:
        """Return what first uses a value, behind the changes of its layout, and the slices that a loop takes."""
        for use in value.uses:
            op = operation(use.owner)
            name, number = name_of(op), numbers(op)
            if name in _MOVES or (name in _SLICES and (not number or number[-1] in self.lengths)):
                op = self._user(op.results[0])
            elif name in ("stablehlo.return", "sdy.return"):  # the loop carries it so
                op = operation(op.parent)
            if op is not None and numbers(op):
                return op
        return None

    def _beside(self, user: Any, axes: Sequence[Axis], changing: bool) -> Iterator[Beside]:
        """The operands of an operation that these axes divide; but for `changing`, those that no round changes."""
        for value in () if user is None else user.operands:
            origin, place = self._origin(value, True), self.place(value)
            whole = tuple(tuple(axis for axis in one if axis not in axes) for one in place.dims)
            if (changing or origin.unchanging) and not origin.sliced and whole != place.dims:
                sent = sent_bytes("all_gather", typed(value).local_bytes(place), math.prod(axis.size for axis in axes))
                yield Beside(origin.argument, _maker(value), whole, typed(value).shape, sent)

    def _origin(self, value: Any, repeats: bool) -> _Origin:
        """Return where a value comes from, through copies, slices, and loops that keep it."""
        here = sliced = unchanging = False  # here: sliced inside of this loop
        while True:
            while (owner := owner_of(value)) is not None:
                name = name_of(owner)
                if name not in _COPIES and name not in _SLICES:
                    return _Origin(None, sliced, unchanging)
                here = here or name in ("stablehlo.dynamic_slice", "stablehlo.slice")
                value = owner.operands[value.result_number if name == "stablehlo.optimization_barrier" else 0]
            op, number, sliced = _parent(value), value.arg_number, sliced or here
            if name_of(op) == "func.func":
                return _Origin(number - self.first if number >= self.first else None, sliced, unchanging)
            if name_of(op) != "stablehlo.while" or not is_kept(value):
                return _Origin(None, sliced, unchanging)
            unchanging, here, value = unchanging or (not here and repeats), False, op.operands[number]

    def _is_sliced(self, value: Any, axes: Sequence[Axis]) -> bool:
        """Return whether all that uses a value keeps a slice along these axes."""
        uses = [operation(use.owner) for use in value.uses]
        kept = [self.lists(str(op.attributes["slicing_axes"])) if name_of(op) == "sdy.all_slice" else () for op in uses]
        return bool(uses) and all(set(axes) <= {axis for dim in dims for axis in dim} for dims in kept)

    def before(self, op: Any, name: str) -> tuple[Place, tuple[Axis, ...]]:
        """Return how what is moved lay before, read off the operation, and the axes along which it is moved."""
        value, target = op.operands[0], self.place(op.results[0])
        text = {key: str(op.attributes[key]) for key in _SAID if key in op.attributes}
        dims = list(target.dims)
        if name == "sdy.all_gather":
            gathered = self.lists(text["gathering_axes"])
            return Place(tuple(map(_plus, dims, gathered)), target.partial), tuple(itertools.chain(*gathered))
        if name == "sdy.all_to_all":
            axes: list[Axis] = []
            for moved, source, into in reversed(_PARAM.findall(text["params"])):
                travelling = self.axes(moved)
                axes += travelling
                dims[int(into)] = _minus(dims[int(into)], travelling)
                dims[int(source)] = _plus(dims[int(source)], travelling)
            return Place(tuple(dims), target.partial), tuple(axes)
        if name == "sdy.all_reduce":
            summed = self.axes(text["reduction_axes"])
            return Place(target.dims, (*target.partial, *summed)), summed
        if name == "sdy.reduce_scatter":
            scattered = self.lists(text["reduce_scatter_axes"])
            every = tuple(itertools.chain(*scattered))
            return Place(tuple(map(_minus, dims, scattered)), (*target.partial, *every)), every
        source = self.place(value)
        changed = [
            a.name for one, two in zip(source.dims, target.dims, strict=True) if one != two for a in (*one, *two)
        ]
        return source, tuple(Axis(a, n, 1, n) for a, n in self.sizes.items() if a in changed)


_CALL, _PRODUCT = "stablehlo.custom_call", "stablehlo.dot_general"
_CARRIES = ("func.return", "stablehlo.return", "sdy.return", "stablehlo.while", "stablehlo.optimization_barrier")
# What XLA divides in ways of its own: lookups, pieces, and transforms.
_OWN_WAYS = ("stablehlo.gather", "stablehlo.scatter", "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice")
_OWN_WAYS += ("stablehlo.fft", "stablehlo.select_and_scatter")
_SAID = ("gathering_axes", "params", "reduction_axes", "reduce_scatter_axes")
_TOLD = (*_SAID, "slicing_axes", "out_sharding", "sharding")
_PARAM = re.compile(r"\{([^}]*)\}: ?(\d+) ?-> ?(\d+)")
_ENTERED = ("stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.manual_computation", "sdy.named_computation")


class Factors(NamedTuple):
    """Shardy's rule of an operation: a dimension of what it takes or gives is made of factors.

    Attributes:
      operands: For each operand the factors of each dimension.
      results: The same of the results.
      reduced: The factors that go.
      permuted: Those along which elements change places, or meet their neighbours.
    """

    operands: tuple[tuple[frozenset[str], ...], ...]
    results: tuple[tuple[frozenset[str], ...], ...]
    reduced: frozenset[str]
    permuted: frozenset[str]

    @property
    def passed(self) -> frozenset[str]:
        """The factors of results."""
        return frozenset[str]().union(*(label for labels in self.results for label in labels))


def factors_of(op: Any) -> Factors | None:
    """The rule of an operation, if it has one."""
    name = "sdy.sharding_rule"
    return _factors(str(op.attributes[name])) if name in op.attributes else None


@functools.lru_cache(1024)
def _factors(text: str) -> Factors:
    operands, results = (
        tuple(tuple(frozenset(_FACTOR.findall(dim)) for dim in one.split(", ") if dim) for one in found)
        for found in (re.findall(r"\[([^\]]*)\]", side) for side in text.partition("{")[0].split("->"))
    )
    told = {name: frozenset(_FACTOR.findall(said)) for name, said in re.findall(r"(\w+)=\{([^}]*)\}", text)}
    return Factors(operands, results, told.get("reduction", frozenset()), told.get("permutation", frozenset()))


_FACTOR = re.compile(r"[a-z](?:_\d+)?")


def _compares(op: Any) -> bool:
    """Return whether an operation reduces several arrays together, as one that finds a position does."""
    return name_of(op) == "stablehlo.reduce" and len(op.results) > 1


def _readers(value: Any) -> Iterator[tuple[Any, int]]:
    """What uses a value behind the changes of its layout, and as which operand."""
    for use in value.uses:
        op = operation(use.owner)
        if name_of(op) in _MOVES:
            yield from _readers(op.results[0])
        else:
            yield op, use.operand_number


def _merge(op: Any) -> Iterator[tuple[Any, bool]]:
    """Let moves of one value to one layout be one, as XLA does. For each that goes, give what stays. A product may get
    a move of its own: give that, and True."""
    for block in (block for region in op.regions for block in region.blocks):
        seen: dict[tuple[str, ...], list[Any]] = {}
        for one in [view.operation for view in block.operations]:
            if name_of(one) in _MOVES:
                said = [str(one.attributes[key]) for key in _TOLD if key in one.attributes]
                alike = seen.setdefault((name_of(one), *said), [])
                first = next((other for other in alike if other.operands[0] == one.operands[0]), None)
                if first is None:
                    alike.append(one)
                elif any(name_of(user) == _PRODUCT for user, _ in _readers(one.results[0])):
                    yield one, True
                else:
                    one.results[0].replace_all_uses_with(first.results[0])
                    yield first, False
            yield from _merge(one)


def operation(view: Any) -> Any:
    """An operation, however the bindings give it."""
    return view.operation if hasattr(view, "operation") else view


def typed(value: Any) -> Typed:
    """The type of a value of the module."""
    return _typed(str(value.type))


@functools.lru_cache(1024)
def _typed(text: str) -> Typed:
    found = _TENSOR.search(text)
    if found is None:  # a token
        return Typed((), 0, text)
    shape = tuple(int(n) for n in found[1].split("x") if n)
    bits = sum(int(n) for n in re.findall(r"\d+", found[2].partition("E")[0])) * (2 if "complex" in found[2] else 1)
    return Typed(shape, -(-bits // 8), found[2])


def numbers(op: Any) -> Number:
    """The numbers in the name of an operation's place."""
    return tuple(map(int, _NUMBER.findall(location_name(op))))


def owner_of(value: Any) -> Any:
    """The operation that gives a value; None for the argument of a block."""
    return None if hasattr(value.owner, "operations") else operation(value.owner)


def _maker(value: Any) -> Number:
    """The equation that gives a value, behind the changes of its layout; outside of a loop what the loop is given."""
    owner = owner_of(value)
    while owner is not None and name_of(owner) in _MOVES:
        value = owner.operands[0]
        owner = owner_of(value)
    if owner is not None:
        return numbers(owner)
    op, number = _parent(value), value.arg_number
    return _maker(op.operands[number]) if name_of(op) == "stablehlo.while" and is_kept(value) else ()


_SLICES = ("stablehlo.dynamic_slice", "stablehlo.reshape", "stablehlo.convert", "stablehlo.slice")
_COPIES = (*_MOVES, "stablehlo.convert", "stablehlo.reshape", "stablehlo.transpose", "stablehlo.optimization_barrier")


class _Origin(NamedTuple):
    """Where a value comes from, as a copy or a slice.

    Attributes:
      argument: The number of the program's input; None for what was computed.
      sliced: Whether it is a slice of that.
      unchanging: Whether some loop around gives it the same value in each round.
    """

    argument: int | None = None
    sliced: bool = False
    unchanging: bool = False


def _parent(value: Any) -> Any:
    """The operation in whose block a value is an argument."""
    return operation(value.owner.owner)


def is_kept(value: Any) -> bool:
    """Return whether a loop gives the argument of its body back as it is."""
    *_, last = value.owner.operations
    operands = last.operation.operands
    given = operands[value.arg_number] if value.arg_number < len(operands) else None
    return given is not None and owner_of(given) is None and given.arg_number == value.arg_number


# --- texts -------------------------------------------------------------------------------------------------------

# Pieces of a kernel's text: what a value is called there, and attributes of operations as Python writes them.

Names = tuple[str, ...]
_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16", "i1": "bool"}
_DTYPES |= {"complex<f32>": "complex64", "complex<f64>": "complex128"}


class Made(NamedTuple):
    """A value as the text has it.

    Attributes:
      text: An expression.
      names: What its dimensions are called.
      place: How it lies.
      number: Whether it is one number, for arrays of any shape.
      whole: Of a term of a sum over devices, the call that sums too; RESULT stands for the layout of its result.
      along: The dimensions that this layout has in brackets.
      varies: The mesh axes along which it differs by JAX's type, once that is known.
      level: In how many functions of loops and branches it is made.
    """

    text: str
    names: Names
    place: Place
    number: bool = False
    whole: str = ""
    along: tuple[int, ...] = ()
    varies: frozenset[str] = frozenset()
    level: int = 0


def bare(text: str) -> str:
    """An expression without brackets around all of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 and "," not in text else text
    return text


def dtype_text(name: str) -> str:
    """A dtype in Python: the positions of random numbers are uint64, which JAX has as uint32 without x64."""
    found = _DTYPES.get(name) or re.sub(r"^ui", "uint", re.sub(r"^i", "int", name))
    return f'"{jax.dtypes.canonicalize_dtype(found) if found.endswith("int64") else found}"'


def literal(text: str, dtype: str) -> str:
    if dtype == "i1":
        return text.capitalize()
    if text.startswith("0x"):
        bits = int(text, 16)
        special = {"f32": {0xFF800000: "-jnp.inf", 0x7F800000: "jnp.inf", 0x7FC00000: "jnp.nan"}}.get(dtype, {})
        special |= {0xFF80: "-jnp.inf", 0x7F80: "jnp.inf"} if dtype == "bf16" else {}
        return special.get(bits, "jnp.nan")
    if dtype.startswith(("i", "ui")):  # a bare number is an int32 to a function of jax.lax
        return text if dtype == "i32" else f"jnp.{dtype_text(dtype)[1:-1]}({text})"
    if dtype.startswith("complex"):
        parts = [literal(one, "f64") for one in text.strip("()").split(",")]
        return f"complex({', '.join(parts)})"
    number = float(text)
    return repr(number) if math.isfinite(number) else f"jnp.{number}"


def constant_of(op: Any) -> str:
    """The value of a constant as MLIR writes it; "" of another operation."""
    # read off the whole text, because Python has no attribute of complex numbers
    found = re.search(r"dense<.*", str(op)) if "constant" in name_of(op) else None
    return found[0] if found else ""


def integers(op: Any, name: str) -> list[int]:
    """The numbers of an attribute: two of `array<i64: 3, 4>`, one of `3 : i64`."""
    first, _, rest = str(op.attributes[name]).partition(":")
    return [int(n) for n in re.findall(r"-?\d+", rest if first.startswith("array") else first)]


def numbers_of(op: Any, attribute: str, name: str) -> list[int]:
    found = re.search(rf"{name} = \[([^\]]*)\]", str(op.attributes[attribute]))
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
