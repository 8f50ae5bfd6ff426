"""A plan as an explicit kernel, ready to paste: what each operation computes on one device, and the verbs between."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import spmd.propagation._lookups as _lookups
from spmd._compat import operation_name as name_of
from spmd.errors import SpmdError
from spmd.propagation._loops import axes_of, branches, combined_by, loop, reduction
from spmd.propagation._module import (
    KINDS,
    SUMS,
    Axis,
    Made,
    Names,
    Place,
    Reading,
    bare,
    constant_of,
    dtype_text,
    integers,
    literal,
    numbers_of,
    operation,
    typed,
)
from spmd.propagation._moves import text_of

_WIDTH = 100  # of a line

# Operations element by element. In brackets, operands keep theirs.
_SAME_NAMES = ["tanh", "sqrt", "abs", "sign", "floor", "ceil", "tan", "cbrt", "maximum", "minimum", "power"]
_SAME_NAMES += ["real", "imag"]
_ELEMENTWISE = {
    **{f"stablehlo.{one}": f"jnp.{one}" for one in _SAME_NAMES},
    "stablehlo.exponential": "jnp.exp",
    "stablehlo.log": "jnp.log",
    "stablehlo.sine": "jnp.sin",
    "stablehlo.cosine": "jnp.cos",
    "stablehlo.rsqrt": "jax.lax.rsqrt",
    "stablehlo.logistic": "jax.lax.logistic",
    "stablehlo.log_plus_one": "jnp.log1p",
    "stablehlo.exponential_minus_one": "jnp.expm1",
    "stablehlo.is_finite": "jnp.isfinite",
    "stablehlo.round_nearest_even": "jnp.round",
    **{f"chlo.{one}": f"jnp.{one}" for one in ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh")},
    **{f"chlo.{one}": f"jax.lax.{one}" for one in ("digamma", "erf", "erf_inv", "erfc", "lgamma", "polygamma", "zeta")},
    "chlo.next_after": "jnp.nextafter",
    "stablehlo.round_nearest_afz": "jax.lax.round",
    "stablehlo.popcnt": "jax.lax.population_count",
    "stablehlo.count_leading_zeros": "jax.lax.clz",
    "stablehlo.complex": "jax.lax.complex",
    "chlo.square": "jnp.square",
    "chlo.conj": "jnp.conj",
    "stablehlo.atan2": "jnp.arctan2",
    "stablehlo.remainder": "jnp.fmod",
    "stablehlo.shift_left": "jnp.left_shift",
    "stablehlo.shift_right_arithmetic": "jnp.right_shift",
    "stablehlo.shift_right_logical": "jax.lax.shift_right_logical",
    "stablehlo.select": "jnp.where",
    "stablehlo.clamp": "jnp.minimum({2}, jnp.maximum({0}, {1}))",
    "stablehlo.add": "({} + {})",
    "stablehlo.subtract": "({} - {})",
    "stablehlo.multiply": "({} * {})",
    "stablehlo.divide": "({} / {})",
    "stablehlo.and": "({} & {})",
    "stablehlo.or": "({} | {})",
    "stablehlo.xor": "({} ^ {})",
    "stablehlo.negate": "(-{})",
    "stablehlo.not": "(~{})",
}
_COMPARED = {"LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!="}
_REDUCED = {
    "stablehlo.add": "sum",
    "stablehlo.multiply": "prod",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.and": "all",
    "stablehlo.or": "any",
}


@dataclass
class Writer:
    """Writes the body of a kernel from a module.

    Attributes:
      reading: What the module says.
      sizes: Whole sizes of all names.
      functions: The lines of the kernel, and of the functions in it that are being written.
      equal: Whether copies are equal by their type, as loops need them that carry values of one type.
      waiting: Values that are terms of a sum over these axes, which is done after a loop.
      between: Values on their way to another layout, by parts of mesh axes, with what they were before.
      branch: The number of the functions around the innermost branch, which nothing is moved out of.
    """

    reading: Reading
    functions: list[list[str]] = field(default_factory=lambda: [[]])
    sizes: dict[str, int] = field(default_factory=dict)
    known: dict[Any, Made] = field(default_factory=dict)
    equal: bool = False
    waiting: dict[Any, tuple[Axis, ...]] = field(default_factory=dict)
    between: dict[Any, Made] = field(default_factory=dict)
    branch: int = 0

    def __post_init__(self) -> None:
        self.fresh = (f"v{i}" for i in itertools.count(1))
        self._dims = (f"n{i}" for i in itertools.count(1))

    # --- names --------------------------------------------------------------------------------------------

    def named(self, size: int) -> str:
        """A name for a dimension that nobody has named."""
        name = next(one for one in self._dims if one not in self.sizes)
        self.sizes[name] = size
        return name

    def layout(self, names: Names, place: Place, along: Sequence[int] = ()) -> str:
        """`b/dp [s]`: with these dimensions in brackets."""
        if _is_part(place):
            self.fail("a layout over a part of a mesh axis")
        shape = [self.sizes[name] for name in names]
        if any(n % math.prod(axis.size for axis in axes) for n, axes in zip(shape, place.dims, strict=False)):
            self.fail("a dimension that its devices divide unevenly")
        labels = tuple(((name, size),) for name, size in zip(names, shape, strict=True))
        parts = text_of(place, labels, shape, self.reading.sizes).split(" ")
        return " ".join(f"[{part}]" if d in along else part for d, part in enumerate(parts)) or "scalar"

    def fail(self, what: str) -> NoReturn:
        rule = f"{what} is not written as a kernel yet."
        raise SpmdError(rule, call="freeze()", advice="freeze the parts around it, or write that part by hand")

    # --- values -------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        return self.functions[-1]

    def place(self, value: Any) -> Place:
        """Return how a value lies in the kernel."""
        found = self.reading.place(value)
        return found._replace(partial=(*found.partial, *self.waiting.get(value, ())))

    def get(self, value: Any) -> Made:
        if value in self.between:
            self.fail("a layout over a part of a mesh axis")
        return self.known[value]

    def array(self, value: Any) -> Made:
        """A value as an array, also where it is the same number everywhere."""
        made, kind, place = self.get(value), typed(value), self.place(value)
        if not made.number:
            return made
        text = f"jnp.full({self.lying(kind.shape, place)}, {bare(made.text)}, {dtype_text(kind.dtype)})"
        return Made(text, tuple(map(self.named, kind.shape)), place)

    def put(self, value: Any, made: Made, *, inline: bool = False, level: int | None = None) -> None:
        """Keep a value: as an expression where one other alone uses it, else under a name, in a function around."""
        uses = sum(1 for _ in value.uses)
        if made.number or made.text.isidentifier() or (inline and uses < 2 and len(made.text) < _WIDTH // 2):
            self.known[value] = made
            return
        name, level = next(self.fresh), len(self.functions) - 1 if level is None else level
        self.functions[level].append(f"{name} = {bare(made.text)}")
        self.known[value] = made._replace(text=name, whole="", level=level)

    def block(self, block: Any) -> list[Any]:
        """Write the operations of a block. Returns the values that it gives back."""
        *body, last = [operation(one) for one in block.operations]
        for op in body:
            self.write(op)
        return list(last.operands)

    def write(self, op: Any) -> None:
        name = name_of(op)
        if name in KINDS or name == "sdy.all_slice":
            self._moved(op, name)
        elif name in _RULES:
            _RULES[name](self, op)
        elif name == "stablehlo.divide" and typed(op.results[0]).dtype.lstrip("u").startswith("i"):
            self._elementwise(op, "jax.lax.div")  # towards zero
        elif name in _ELEMENTWISE:
            self._elementwise(op, _ELEMENTWISE[name])
        else:
            self.fail(name.replace("stablehlo.", "an operation "))
        if name not in ("stablehlo.while", "stablehlo.case"):
            self._note(op, name)

    def _note(self, op: Any, name: str) -> None:
        """Note along which axes results differ by JAX's type: along those of the operands, where no verb makes them
        equal, and those of a verb's layout; and where an expression can stand."""
        moved, counts = name in KINDS or name == "sdy.all_slice", name in ("stablehlo.iota", "stablehlo.scatter")
        joins = name in KINDS and (self.equal or name in SUMS)
        gone = {axis.name for axis in self.reading.before(op, name)[1]} if joins else set()
        operands = [self.known[value] for value in op.operands if value in self.known]
        level = max((one.level for one in operands), default=0)
        for result in [one for one in op.results if one not in self.between]:
            made = self.known[result]
            varies = frozenset().union(*(one.varies for one in operands)) - gone
            varies |= axes_of(made.place) if moved or counts else frozenset()
            named = made.text.isidentifier() and not any(made.text == one.text for one in operands)
            self.known[result] = made._replace(varies=varies, level=made.level if named else level)

    def _elementwise(self, op: Any, how: str) -> None:
        """A function of this name, or an expression."""
        operands = [self.get(value) for value in op.operands]
        arrays = [one for one in operands if not one.number]
        texts = [one.text for one in operands]
        result = how.format(*texts) if "{" in how else f"{how}({', '.join(map(bare, texts))})"
        if not arrays:
            self.known[op.results[0]] = Made(result, (), Place(()), number=True)
            return
        place = self.place(op.results[0])
        whole = [one for one in arrays if one.names]  # others are numbers that were computed
        if any(one.place.dims != place.dims for one in whole):
            self.fail(f"a {name_of(op).partition('.')[2]} of arrays that lie differently")
        self.put(op.results[0], Made(result, whole[0].names if whole else (), place), inline=True)

    def lying(self, shape: Sequence[int], place: Place) -> str:
        """The shape of one device's block of an array, on whichever mesh the kernel runs."""
        text = ", ".join(_local_size(n, axes) for n, axes in zip(shape, place.dims, strict=True))
        return f"({text},)" if len(shape) == 1 else f"({text})"

    # --- communication ------------------------------------------------------------------------------------

    def _moved(self, op: Any, name: str) -> None:
        value, result = op.operands[0], op.results[0]
        target, before = self.place(result), self.between.get(value)
        made = self.array(value) if before is None else before
        if name == "sdy.all_reduce" and made.whole:  # the product or the reduction sums by itself
            scattered = None if result in self.waiting else self._scattered(op, target)
            place = scattered or target
            text = made.whole.replace("RESULT", self.layout(made.names, place, made.along))
            self.put(result, Made(text, made.names, place))
            return
        if _is_part(target):
            self.between[result] = made
            return
        verb = {"sdy.all_slice": "split", "sdy.collective_permute": "relayout"}.get(name, KINDS.get(name, ""))
        source = self.reading.before(op, name)[0] if name in KINDS and before is None else made.place
        if (source.dims == target.dims and not source.partial) or made.place == target:
            self.known[result] = made._replace(place=target)
            return
        if before is not None or (name == "sdy.all_to_all" and len(self.reading.before(op, name)[1]) > 1):
            verb = "relayout"
        pattern = f"{self.layout(made.names, source)} -> {self.layout(made.names, target)}"
        to = ', to="invarying"' if self.equal and verb in ("all_gather", "relayout") else ""
        text = f'spmd.{verb}({bare(made.text)}, "{pattern}"{to})'
        self.put(result, Made(text, made.names, target), level=max(made.level, self.branch))

    def _scattered(self, op: Any, target: Place) -> Place | None:
        """Return where a sum lies of which all that follows keeps one slice: then it is scattered at once."""
        uses = [operation(use.owner) for use in op.results[0].uses]
        places = {self.place(one.results[0]) for one in uses if name_of(one) == "sdy.all_slice"}
        summed = set(self.reading.before(op, "sdy.all_reduce")[1])
        if len(places) != 1 or any(name_of(one) != "sdy.all_slice" for one in uses):
            return None
        [place] = places
        gained = {axis for axes in place.dims for axis in axes} - {axis for axes in target.dims for axis in axes}
        return place if gained == summed else None

    # --- operations ---------------------------------------------------------------------------------------

    def constant(self, op: Any) -> None:
        result = op.results[0]
        kind, place, text = typed(result), self.place(result), constant_of(op)
        if found := re.match(r'dense<([^\[\]<>"]*)> : ', text):  # nothing, of an empty array
            self.known[result] = Made(literal(found[1] or "0", kind.dtype), (), Place(()), number=True)
        elif (found := re.match(r"dense<(\[[^<>\"x]*\])> : ", text)) and not axes_of(place):
            numbers = found[1].replace("true", "True").replace("false", "False")
            made = Made(f"jnp.asarray({numbers}, {dtype_text(kind.dtype)})", tuple(map(self.named, kind.shape)), place)
            self.put(result, made)
        else:
            self.fail("a constant array that is large or divided")

    def broadcast(self, op: Any) -> None:
        made, kind, place = self.get(op.operands[0]), typed(op.results[0]), self.place(op.results[0])
        if made.number:  # it stays one until somebody needs an array
            self.known[op.results[0]] = made
            return
        dims, given = integers(op, "broadcast_dimensions"), typed(op.operands[0]).shape
        kept = {d: made.names[i] for i, d in enumerate(dims) if given[i] == kind.shape[d]}
        names = tuple(kept[d] if d in kept else self.named(n) for d, n in enumerate(kind.shape))
        text = f"jax.lax.broadcast_in_dim({bare(made.text)}, {self.lying(kind.shape, place)}, {tuple(dims)})"
        self.put(op.results[0], Made(text, names, place))

    def reshape(self, op: Any) -> None:
        made, old, new = self.array(op.operands[0]), typed(op.operands[0]).shape, typed(op.results[0]).shape
        left = [(name, n) for name, n in zip(made.names, old, strict=True) if n != 1]
        kept = dict(zip((d for d, n in enumerate(new) if n != 1), left, strict=False))
        same = [n for n in old if n != 1] == [n for n in new if n != 1]
        names = tuple(kept[d][0] if same and d in kept else self.named(n) for d, n in enumerate(new))
        text = f"jnp.reshape({bare(made.text)}, {self.lying(new, self.place(op.results[0]))})"
        self.put(op.results[0], Made(text, names, self.place(op.results[0])), inline=True)

    def transpose(self, op: Any) -> None:
        made, dims = self.array(op.operands[0]), integers(op, "permutation")
        names = tuple(made.names[d] for d in dims)
        text = f"jnp.transpose({bare(made.text)}, {tuple(dims)})"
        self.put(op.results[0], Made(text, names, self.place(op.results[0])), inline=True)

    def convert(self, op: Any) -> None:
        made, dtype = self.get(op.operands[0]), dtype_text(typed(op.results[0]).dtype)
        if made.number:  # a number as it is written is one of any floating-point type
            plain = "float" in dtype and re.fullmatch(r"-?[\d.e+-]+", made.text)
            self.known[op.results[0]] = made if plain else made._replace(text=f"jnp.asarray({made.text}, {dtype})")
            return
        self._elementwise(op, f"{{}}.astype({dtype})")

    def bits(self, op: Any) -> None:
        if typed(op.operands[0]).shape != typed(op.results[0]).shape:
            self.fail("the same bits as another number of elements")
        dtype = dtype_text(typed(op.results[0]).dtype)
        self._elementwise(op, f"jax.lax.bitcast_convert_type({{}}, {dtype})")

    def compare(self, op: Any) -> None:
        direction = re.search(r"(LT|LE|GT|GE|EQ|NE)", str(op.attributes["comparison_direction"]))
        sign = _COMPARED[direction[1] if direction else "EQ"]
        self._elementwise(op, f"({{}} {sign} {{}})")

    def same(self, op: Any) -> None:
        for result, operand in zip(op.results, op.operands, strict=True):
            self.known[result] = self.get(operand)

    def reduce(self, op: Any) -> None:
        kind = _REDUCED.get(combined_by(op))
        if kind is None:
            reduction(self, op)
            return
        made = self.array(op.operands[0])
        gone = integers(op, "dimensions")
        names = tuple(name for d, name in enumerate(made.names) if d not in gone)
        along = ", ".join(map(str, gone)) + ("," if len(gone) == 1 else "")
        text = f"jnp.{kind}({bare(made.text)}, axis=({along}))"
        lost = [axis for d in gone for axis in made.place.dims[d]]
        source = self.layout(made.names, made.place) if lost else ""
        whole = f'spmd.reduce({bare(made.text)}, "{source} -> RESULT", "{kind}")'
        self.partial(op, text, names, whole, lost)

    def partial(
        self, op: Any, text: str, names: Names, whole: str, lost: Sequence[Axis], along: tuple[int, ...] = ()
    ) -> None:
        """A result that a sum over devices may follow: if it follows at once, the call says both."""
        result = op.results[0]
        uses = [operation(use.owner) for use in result.uses]
        place = self.place(result)
        if lost and [name_of(one) for one in uses] == ["sdy.all_reduce"]:
            self.known[result] = Made(text, names, Place(place.dims, tuple(lost)), whole=whole, along=along)
        elif lost:
            self.fail("a sum over devices that comes later than the operation")
        else:
            self.put(result, Made(text, names, place))

    def summed(self, op: Any, text: str, names: Names, lost: Sequence[Axis]) -> None:
        """A result of an operation that no verb has, of which devices have terms of a sum."""
        marks = ",".join(dict.fromkeys(axis.name for axis in lost))
        source = f"{self.layout(names, Place(self.place(op.results[0]).dims))} {{U:{marks}}}" if lost else ""
        self.partial(op, text, names, f'spmd.psum({text}, "{source} -> RESULT")', lost)

    def options(self, op: Any) -> str:
        """The options of a product: the dtype and the precision in which it adds up, where they are its own."""
        given, made = typed(op.operands[0]).dtype, typed(op.results[0]).dtype
        kinds = re.findall(r"precision (\w+)", str(op.attributes.get("precision_config", "")))
        text = "" if given == made else f", preferred_element_type={dtype_text(made)}"
        return text if set(kinds) <= {"DEFAULT"} else f"{text}, precision={tuple(one.lower() for one in kinds)}"

    def dot(self, op: Any) -> None:
        x, w = self.array(op.operands[0]), self.array(op.operands[1])
        numbers = {name: numbers_of(op, "dot_dimension_numbers", name) for name in _NUMBERS}
        left, right = list(x.names), list(w.names)
        both = [*zip(numbers["lhs_contracting_dimensions"], numbers["rhs_contracting_dimensions"], strict=True)]
        both += zip(numbers["lhs_batching_dimensions"], numbers["rhs_batching_dimensions"], strict=True)
        for i, j in both:  # a dimension with two names in the signature is neither of these
            left[i] = left[i] if left[i] == right[j] else self.named(self.sizes[left[i]])
        shared, taken = {j: left[i] for i, j in both}, {*x.names, *left}
        for d, name in enumerate(right):
            free = name if name not in taken else ""
            right[d] = shared.get(d) or free or self.named(self.sizes[name])
        batch = [left[d] for d in numbers["lhs_batching_dimensions"]]
        gone = [left[d] for d in numbers["lhs_contracting_dimensions"]]
        rest = [name for name in (*left, *right) if name not in (*batch, *gone)]
        names = (*batch, *dict.fromkeys(rest))
        lost = [axis for d in numbers["lhs_contracting_dimensions"] for axis in x.place.dims[d]]
        operands = f"{self.layout(tuple(left), x.place)}, {self.layout(tuple(right), w.place)}"
        result = self.layout(names, Place(self.place(op.results[0]).dims))
        start = f"spmd.einsum({bare(x.text)}, {bare(w.text)}, "
        end = f"{self.options(op)})"
        text = f'{start}"{operands} -> {result}"{end}'
        self.partial(op, text, names, f'{start}"{operands} -> RESULT"{end}', lost)

    def iota(self, op: Any) -> None:
        kind, place = typed(op.results[0]), self.place(op.results[0])
        [along] = integers(op, "iota_dimension")
        names = tuple(map(self.named, kind.shape))
        one = self.layout((names[along],), Place((place.dims[along],)))
        line = f'spmd.iota("{one}", {names[along]}={kind.shape[along]}).astype({dtype_text(kind.dtype)})'
        text = f"jax.lax.broadcast_in_dim({line}, {self.lying(kind.shape, place)}, ({along},))"
        self.put(op.results[0], Made(text, names, place))

    def sort(self, op: Any) -> None:
        [along] = integers(op, "dimension")
        operands = [self.array(value) for value in op.operands]
        _lookups.whole(self, operands[0].place.dims, [along])
        if len(operands) == 1:
            text = f"jnp.sort({bare(operands[0].text)}, axis={along})"
            self.put(op.results[0], Made(text, operands[0].names, self.place(op.results[0])))
            return
        texts = ", ".join(bare(one.text) for one in operands)
        self.several(op, f"jax.lax.sort(({texts}), dimension={along}, num_keys=1)", [one.names for one in operands])

    def several(self, op: Any, text: str, names: Sequence[Names]) -> None:
        """The results of a call that gives several."""
        made = next(self.fresh)
        self.lines.append(f"{made} = {text}")
        for i, (result, one) in enumerate(zip(op.results, names, strict=True)):
            self.put(result, Made(f"{made}[{i}]", one, self.place(result)))


_NUMBERS = [f"{side}_{kind}_dimensions" for side in ("lhs", "rhs") for kind in ("batching", "contracting")]
_RULES: dict[str, Callable[[Writer, Any], None]] = {
    "sdy.constant": Writer.constant,
    "stablehlo.constant": Writer.constant,
    "stablehlo.broadcast_in_dim": Writer.broadcast,
    "stablehlo.reshape": Writer.reshape,
    "stablehlo.transpose": Writer.transpose,
    "stablehlo.convert": Writer.convert,
    "stablehlo.bitcast_convert": Writer.bits,
    "stablehlo.compare": Writer.compare,
    "stablehlo.optimization_barrier": Writer.same,
    "stablehlo.reduce": Writer.reduce,
    "stablehlo.dot_general": Writer.dot,
    "stablehlo.iota": Writer.iota,
    "stablehlo.sort": Writer.sort,
    "stablehlo.while": loop,
    "stablehlo.case": branches,
    **_lookups.RULES,
}


def _local_size(size: int, axes: Sequence[Axis]) -> str:
    """How many of these elements a device has. Where a string cannot say it, the number on this mesh."""
    blocks = math.prod(axis.size for axis in axes)
    if not axes or size % blocks or _is_part(Place((tuple(axes),))):
        return str(-(-size // blocks))
    return f'spmd.local_size("{"/".join([str(size), *(axis.name for axis in axes)])}")'


def _is_part(place: Place) -> bool:
    return any(axis.size != axis.whole for axes in (*place.dims, place.partial) for axis in axes)


def signature_names(writer: Writer, values: Sequence[Any], labels: Sequence[Any]) -> list[Names]:
    """Names for the dimensions of the inputs: those that are known, where they are single and of the right size."""
    found = []
    for value, label in zip(values, labels, strict=True):
        if len(label) != len(typed(value).shape):
            writer.fail("a key of jax.random")
        names: list[str] = []
        for size, one in zip(typed(value).shape, label, strict=True):
            name = one[0][0] if len(one) == 1 and one[0][1] == size else ""
            if not name or name in names or writer.sizes.get(name, size) != size:
                name = writer.named(size)
            writer.sizes[name] = size
            names.append(name)
        found.append(tuple(names))
    return found


def frozen(reading: Reading, name: str, parameters: Sequence[str], labels: Sequence[Any], equal: bool = False) -> str:
    """The text of an explicit kernel that does what a module says.

    Args:
      reading: What the module says.
      name: What to call the function.
      parameters: What to call its arguments.
      labels: What is known of the names of their dimensions.
      equal: Whether copies are equal by their type. A kernel whose results are copies is written again with it.

    Raises:
      SpmdError: An operation is not written as a kernel yet.
    """
    writer = Writer(reading, equal=equal or re.search(r"stablehlo\.(while|case)", str(reading.module)) is not None)
    values = list(reading.block.arguments)[reading.first :]
    if reading.first:
        writer.fail("a constant array")
    names = signature_names(writer, values, labels)
    for value, parameter, one in zip(values, parameters, names, strict=True):
        place = reading.place(value)
        writer.known[value] = Made(parameter, one, place, varies=axes_of(place))
    given = [writer.layout(one, reading.place(value)) for value, one in zip(values, names, strict=True)]
    results = [writer.array(value) for value in writer.block(reading.block)]
    if not writer.equal and any(one.varies - axes_of(one.place) for one in results):
        return frozen(reading, name, parameters, labels, equal=True)
    made = [writer.layout(one.names, one.place) for one in results]
    body = [*writer.lines, f"return {', '.join(bare(one.text) for one in results)}"]
    if len(body) > 1 and len(results) == 1 and body[-2].startswith(f"{results[0].text} = "):
        body[-2:] = [f"return {body[-2].partition(' = ')[2]}"]
    head = f'@spmd.kernel("{", ".join(given)} -> {", ".join(made)}", mesh=mesh)'
    return "\n".join([head, f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in body), ""])


def parameters_of(names: Sequence[str]) -> Iterator[str]:
    """Python names for arguments: `params['w']` is `params_w`."""
    seen: set[str] = set()
    for name in names:
        plain = re.sub(r"\W+", "_", name).strip("_") or "x"
        plain = plain if plain.isidentifier() else f"x_{plain}"
        while plain in seen:
            plain += "_"
        seen.add(plain)
        yield plain
