"""Loops and branches of a plan as a kernel has them: functions of their own, and what no round changes left outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from spmd._compat import operation_name as name_of
from spmd.language import axes_code
from spmd.propagation._module import (
    Made,
    Place,
    bare,
    constant_of,
    dtype_text,
    integers,
    is_kept,
    operation,
    owner_of,
    typed,
)


class _Counted(NamedTuple):
    """A loop that counts: which operand does, and how often it runs."""

    operand: int
    start: int
    limit: int


def loop(writer: Any, op: Any) -> None:
    """`stablehlo.while`, as `fori_loop` where it counts to a fixed number, so that it has a gradient."""
    test, body = (region.blocks[0] for region in op.regions)
    arguments, given = list(body.arguments), list(op.operands)
    *_, last = [operation(one) for one in body.operations]
    counted = _counted(op)
    same = [i for i, value in enumerate(last.operands) if value == arguments[i] and _stays(writer, op, i)]
    skip = {*same, *([] if counted is None else [counted.operand])}
    carried = [i for i in range(len(given)) if i not in skip]
    for i in same:
        for value in (arguments[i], list(test.arguments)[i], op.results[i]):
            writer.known[value] = writer.get(given[i])
    for i in carried:
        _wait(writer, op, i)
    places = [writer.place(arguments[i]) for i in carried]
    starts = [_start(writer, given[i], place) for i, place in zip(carried, places, strict=True)]
    name = next(writer.fresh)
    carries = [next(writer.fresh) for _ in carried]
    index, level = next(writer.fresh) if counted else "", len(writer.functions)
    for i, carry, start, place in zip(carried, carries, starts, places, strict=True):
        one = Made(carry, start.names, place, varies=axes_of(place), level=level)
        for block in (test, body):
            writer.known[list(block.arguments)[i]] = one
    if counted:
        writer.known[arguments[counted.operand]] = Made(index, (), Place(()), number=True, level=level)
    inside, results = _inside(writer, body, carried, places)
    parameters = ", ".join([index, "carry"] if counted else ["carry"])
    lines = _function(f"{name}({parameters})", carries, inside, _tuple([one.text for one in results])[1:-1] or "()")
    if not counted:
        tested, [goes_on] = _inside(writer, test, [0], None)
        lines = [*_function(f"{name}_goes_on(carry)", carries, tested, bare(goes_on.text)), *lines]
    begin = _tuple([one.text for one in starts])
    made = next(writer.fresh)
    call = f"fori_loop({counted.start}, {counted.limit}, {name}" if counted else f"while_loop({name}_goes_on, {name}"
    writer.lines.extend([*lines, f"{made} = jax.lax.{call}, {begin})"])
    _given(writer, op, made, carried, [one.names for one in starts], places)
    if counted:
        writer.known[op.results[counted.operand]] = Made(str(counted.limit), (), Place(()), number=True)


def branches(writer: Any, op: Any) -> None:
    """`stablehlo.case`, as `switch`. A branch takes what it needs from around it."""
    index, name, around = writer.get(op.operands[0]), next(writer.fresh), writer.branch
    functions = [f"{name}_{number}" for number in range(len(op.regions))]
    names: list[Any] = []
    these, places = range(len(op.results)), [writer.place(one) for one in op.results]
    writer.branch = len(writer.functions)
    for function, region in zip(functions, op.regions, strict=True):
        lines, results = _inside(writer, region.blocks[0], these, places)
        writer.lines.extend(_function(f"{function}()", [], lines, _tuple([one.text for one in results])[1:-1] or "()"))
        names = [one.names for one in results]
    writer.branch, made = around, next(writer.fresh)
    writer.lines.append(f"{made} = jax.lax.switch({bare(index.text)}, [{', '.join(functions)}])")
    _given(writer, op, made, these, names, places)


def reduction(writer: Any, op: Any) -> None:
    """`stablehlo.reduce` of several arrays by a function of its own, along dimensions that are whole: an `argmax`."""
    gone, [block], count = integers(op, "dimensions"), op.regions[0].blocks, len(op.results)
    arrays = [writer.array(value) for value in list(op.operands)[:count]]
    if any(one.place.dims[d] for one in arrays for d in gone):
        writer.fail("a reduction of several arrays along a divided dimension")
    begins = [f"jnp.asarray({writer.get(one).text}, {_dtype(one)})" for one in list(op.operands)[count:]]
    name, elements, level = next(writer.fresh), [next(writer.fresh) for _ in block.arguments], len(writer.functions)
    for value, element in zip(block.arguments, elements, strict=True):
        writer.known[value] = Made(element, (), Place(()), level=level)
    lines, results = _inside(writer, block, range(count), None)
    pair = f"{_tuple(elements[:count])}, {_tuple(elements[count:])}"
    inside = [f"{pair} = one, other", *lines]
    function = _function(f"{name}(one, other)", [], inside, _tuple([bare(one.text) for one in results]))
    given = [one.text for one in arrays]
    if not any("f" in typed(one).dtype for one in op.results if list(one.uses)):  # a position has no gradient
        given = [f"jax.lax.stop_gradient({bare(one)})" for one in given]
    made = next(writer.fresh)
    writer.lines.extend(
        [*function, f"{made} = jax.lax.reduce({_tuple(given)}, {_tuple(begins)}, {name}, {tuple(gone)})"]
    )
    names = tuple(one for d, one in enumerate(arrays[0].names) if d not in gone)
    places = [writer.place(one) for one in op.results]
    _given(writer, op, made, range(count), [names] * count, places)


def _inside(
    writer: Any, block: Any, these: Sequence[int], places: Sequence[Place] | None
) -> tuple[list[str], list[Made]]:
    """The lines of a block, and these of its results, as they are to lie."""
    writer.functions.append([])
    found = writer.block(block)
    results = [writer.get(found[i]) if places is None else writer.array(found[i]) for i in these]
    for i, place in enumerate(places or ()):
        if results[i].place.dims != place.dims or results[i].whole:
            writer.fail("a loop or a branch whose results lie otherwise than what takes their place")
        results[i] = _typed(results[i], place)
    return writer.functions.pop(), results


def _given(
    writer: Any, op: Any, made: str, these: Sequence[int], names: Sequence[Any], places: Sequence[Place]
) -> None:
    """The results of an operation are those of a call, which gives one, or a tuple. Sums that waited are done now."""
    for number, i in enumerate(these):
        place, result, level = writer.place(op.results[i]), op.results[i], len(writer.functions) - 1
        text = f"{made}[{number}]"
        if place != places[number]:
            source, target = (writer.layout(names[number], one) for one in (places[number], place))
            writer.lines.append(f'{(name := next(writer.fresh))} = spmd.psum({text}, "{source} -> {target}")')
            text = name
        writer.known[result] = Made(text, names[number], place, varies=axes_of(place), level=level)


def _wait(writer: Any, op: Any, i: int) -> None:
    """Let sums over devices that are only added up in a carry wait for the end of the loop, if that sends less."""
    later = None if op.results[i] in writer.waiting else _after(op, i)
    if later is None:
        return
    axes = {writer.reading.before(one, name_of(one))[1] for one, _ in later.sums}
    size = lambda value: typed(value).local_bytes(writer.reading.place(value))
    if len(axes) == 1 and size(op.results[i]) < sum(size(one.results[0]) * times for one, times in later.sums):
        writer.waiting |= dict.fromkeys(later.values, axes.pop())


def _start(writer: Any, value: Any, place: Place) -> Made:
    """Return what a loop begins with."""
    if not place.partial:
        return _typed(writer.array(value), place)
    kind = typed(value)
    names = tuple(map(writer.named, kind.shape))
    sizes = "".join(f", {name}={size}" for name, size in zip(names, kind.shape, strict=True))
    text = f'spmd.zeros("{writer.layout(names, place)}", {dtype_text(kind.dtype)}{sizes})'
    return Made(text, names, place, varies=axes_of(place))


def _stays(writer: Any, op: Any, i: int) -> bool:
    made = writer.get(op.operands[i])
    return made.number or made.place == writer.reading.place(op.results[i])


def _function(head: str, carries: list[str], inside: list[str], returned: str) -> list[str]:
    """The lines of a function: of a loop, it takes the carries."""
    opened = [f"{_tuple(carries)[1:-1]} = carry"] if carries else []
    return [f"def {head}:", *(f"    {line}" for line in [*opened, *inside, f"return {returned}"])]


def _counted(op: Any) -> _Counted | None:
    """The operand that begins with a number, grows by one, and is compared with a number by the test."""
    test, body = (region.blocks[0] for region in op.regions)
    *before, last = [operation(one) for one in test.operations]
    compared = [one for one in before if name_of(one) == "stablehlo.compare"]
    if len(compared) != 1 or list(last.operands) != [compared[0].results[0]]:
        return None
    [compare] = compared
    value, limit = compare.operands
    if "LT" not in str(compare.attributes["comparison_direction"]) or value not in list(test.arguments):
        return None
    i = list(test.arguments).index(value)
    *_, ends = [operation(one) for one in body.operations]
    start, most = _constant(op.operands[i]), _constant(limit)
    if start is None or most is None or not _grows(list(ends.operands)[i], list(body.arguments)[i]):
        return None
    return _Counted(i, int(start), int(most))


def _dtype(value: Any) -> str:
    return dtype_text(typed(value).dtype)


def _grows(value: Any, argument: Any) -> bool:
    """Return whether a value is the argument and one."""
    op = owner_of(value)
    if op is None or name_of(op) != "stablehlo.add" or argument not in list(op.operands):
        return False
    [other] = [one for one in op.operands if one != argument] or [None]
    return other is not None and _constant(other) == "1"


def _constant(value: Any) -> str | None:
    op = owner_of(value)
    if op is None or "constant" not in name_of(op):
        return None
    found = re.match(r"dense<(-?\d+)> : ", constant_of(op))
    return found[1] if found and not typed(value).shape else None


def _typed(made: Made, place: Place) -> Made:
    """A carry differs in JAX's types along the axes that divide it: before the first round, and after each."""
    missing = sorted(axes_of(place) - made.varies)
    if not missing:
        return made._replace(text=bare(made.text))  # alone in a tuple
    return made._replace(
        text=f'jax.lax.pcast({bare(made.text)}, {axes_code(missing)}, to="varying")', varies=axes_of(place)
    )


def axes_of(place: Place) -> frozenset[str]:
    """The mesh axes along which a value differs."""
    return frozenset(axis.name for axes in (*place.dims, place.partial) for axis in axes)


def _tuple(texts: list[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


# --- sums --------------------------------------------------------------------------------------------------------

# Sums over devices that a loop only adds up: they may be done once, after it.

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


def _after(op: Any, i: int) -> Later | None:
    """Return what waits, if the sums of the i-th result of a loop are done after it; None if it may not."""
    test, body = (region.blocks[0] for region in op.regions)
    carry = body.arguments[i]
    unread = not any(test.arguments[i].uses) and len(list(carry.uses)) == 1
    if not unread or not is_zero(op.operands[i]):
        return None
    *_, last = body.operations
    found, counted = _linear(operation(last).operands[i], carry, body), _counted(op)
    if found is None:
        return None
    times = 1 if counted is None else counted.limit - counted.start
    return Later((carry, *found.values), tuple((one, n * times) for one, n in found.sums))


def _linear(value: Any, carry: Any, block: Any) -> Later | None:
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
        found = _after(op, value.result_number)
        return None if found is None else Later((value, *found.values), found.sums)
    factors = operands if name == "stablehlo.multiply" else operands[: _LINEAR.get(name, 0)]
    known = [one for one in (_linear(x, carry, block) for x in factors) if one is not None]
    if len(known) != (1 if name == "stablehlo.multiply" else len(factors)) or not known:
        return None
    values = (value, *(x for one in known for x in one.values))
    return Later(values, tuple(x for one in known for x in one.sums))


def is_zero(value: Any) -> bool:
    """Return whether a value is zeros that nobody computes."""
    op = owner_of(value)
    if op is None:
        loop = operation(value.owner.owner)
        return name_of(loop) == "stablehlo.while" and is_kept(value) and is_zero(loop.operands[value.arg_number])
    if name_of(op) in ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"):
        return is_zero(op.operands[0])
    return re.match(r"dense<-?0(\.0+e\+00)?> : ", constant_of(op)) is not None


def combined_by(op: Any, region: int = 0) -> str:
    """The operation by which a function combines two numbers, or `stablehlo.return` of one of them; "" of several."""
    inside = [name_of(operation(one)) for one in op.regions[region].blocks[0].operations]
    return inside[0] if len(inside) <= 2 else ""


def _adds(op: Any) -> bool:
    """Return whether an operation's terms on the devices are added, and not compared."""
    if op is None or name_of(op) not in ("stablehlo.reduce", "stablehlo.dot_general", "stablehlo.scatter"):
        return False
    return not len(op.regions) or combined_by(op) == "stablehlo.add"
