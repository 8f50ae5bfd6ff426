"""Loops and branches of a plan as a kernel has them: functions of their own, and what no round changes left outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from spmd._compat import operation_name as name_of
from spmd.propagation._module import Place, operation, typed
from spmd.propagation._texts import Made, bare


class _Counted(NamedTuple):
    """A loop that counts: which operand does, and how often it runs."""

    operand: int
    start: str
    limit: str


def loop(writer: Any, op: Any) -> None:
    """`stablehlo.while`, as `fori_loop` where it counts to a fixed number, so that it has a gradient."""
    test, body = (region.blocks[0] for region in op.regions)
    arguments, given = list(body.arguments), list(op.operands)
    *_, last = [operation(one) for one in body.operations]
    returned = list(last.operands)
    counted = _counted(writer, op, test, body)
    same = [i for i, value in enumerate(returned) if value == arguments[i] and _stays(writer, op, i)]
    skip = {*same, *([] if counted is None else [counted.operand])}
    carried = [i for i in range(len(given)) if i not in skip]
    for i in same:
        for value in (arguments[i], list(test.arguments)[i], op.results[i]):
            writer.known[value] = writer.get(given[i])
    starts = [_typed(writer.array(given[i]), writer.reading.place(op.results[i])) for i in carried]
    name = next(writer.fresh)
    carries = [next(writer.fresh) for _ in carried]
    index = next(writer.fresh) if counted else ""
    for i, carry, start in zip(carried, carries, starts, strict=True):
        place = writer.reading.place(op.results[i])
        one = Made(carry, start.names, place, varies=axes_of(place))
        for block in (test, body):
            writer.known[list(block.arguments)[i]] = one
    if counted:
        writer.known[arguments[counted.operand]] = Made(index, (), Place(()), number=True)
    parameters = ", ".join([index, "carry"] if counted else ["carry"])
    inside = _function(writer, f"{name}({parameters})", carries, body, carried, op)
    if not counted:
        inside = [*_test(writer, f"{name}_goes_on(carry)", carries, test), *inside]
    writer.lines += inside
    begin = _tuple([one.text for one in starts])
    made = next(writer.fresh)
    call = f"fori_loop({counted.start}, {counted.limit}, {name}" if counted else f"while_loop({name}_goes_on, {name}"
    writer.lines.append(f"{made} = jax.lax.{call}, {begin})")
    _given(writer, op, made, carried, [one.names for one in starts])
    if counted:
        writer.known[op.results[counted.operand]] = Made(counted.limit, (), Place(()), number=True)


def branches(writer: Any, op: Any) -> None:
    """`stablehlo.case`, as `switch`. A branch takes what it needs from around it."""
    index, name = writer.get(op.operands[0]), next(writer.fresh)
    functions = [f"{name}_{number}" for number in range(len(op.regions))]
    names: list[Any] = []
    for function, region in zip(functions, op.regions, strict=True):
        lines, results = _inside(writer, op, region.blocks[0], range(len(op.results)))
        texts = _tuple([one.text for one in results])[1:-1] or "()"
        writer.lines += [f"def {function}():", *(f"    {line}" for line in [*lines, f"return {texts}"])]
        names = [one.names for one in results]
    made = next(writer.fresh)
    writer.lines.append(f"{made} = jax.lax.switch({bare(index.text)}, [{', '.join(functions)}])")
    _given(writer, op, made, range(len(op.results)), names)


def _inside(writer: Any, op: Any, block: Any, these: Sequence[int]) -> tuple[list[str], list[Made]]:
    """The lines of a block, and its results as these results of the operation lie."""
    outside, writer.lines = writer.lines, []
    found = writer.block(block)
    results = []
    for i, value in zip(these, [found[i] for i in these], strict=True):
        place, one = writer.reading.place(op.results[i]), writer.array(value)
        if one.place.dims != place.dims or one.whole:
            writer.fail("a loop or a branch whose results lie otherwise than what takes their place")
        results.append(_typed(one, place))
    inside, writer.lines = writer.lines, outside
    return inside, results


def _given(writer: Any, op: Any, made: str, these: Sequence[int], names: Sequence[Any]) -> None:
    """The results of an operation are those of a call, which gives one, or a tuple."""
    for number, i in enumerate(these):
        place = writer.reading.place(op.results[i])
        writer.known[op.results[i]] = Made(f"{made}[{number}]", names[number], place, varies=axes_of(place))


def _stays(writer: Any, op: Any, i: int) -> bool:
    made = writer.get(op.operands[i])
    return made.number or made.place == writer.reading.place(op.results[i])


def _function(writer: Any, head: str, carries: list[str], body: Any, carried: list[int], op: Any) -> list[str]:
    """The lines of a body: it takes the carries, and gives those of the next round."""
    inside, results = _inside(writer, op, body, carried)
    opened = [f"{_tuple(carries)[1:-1]} = carry"] if carries else []
    returned = _tuple([one.text for one in results])[1:-1] or "()"
    return [f"def {head}:", *(f"    {line}" for line in [*opened, *inside, f"return {returned}"])]


def _test(writer: Any, head: str, carries: list[str], test: Any) -> list[str]:
    outside, writer.lines = writer.lines, []
    [goes_on] = writer.block(test)
    inside, writer.lines = writer.lines, outside
    opened = [f"{_tuple(carries)[1:-1]} = carry"] if carries else []
    return [f"def {head}:", *(f"    {line}" for line in [*opened, *inside, f"return {bare(writer.get(goes_on).text)}"])]


def _counted(writer: Any, op: Any, test: Any, body: Any) -> _Counted | None:
    """The operand that begins with a number, grows by one, and is compared with a number by the test."""
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
    grown, start, most = list(ends.operands)[i], writer.get(op.operands[i]), _constant(limit)
    by_one = _grows(grown, list(body.arguments)[i])
    if not (by_one and start.number and re.fullmatch(r"-?\d+", start.text) and most is not None):
        return None
    return _Counted(i, start.text, most)


def _grows(value: Any, argument: Any) -> bool:
    """Whether a value is the argument and one."""
    if hasattr(value.owner, "operations"):
        return False
    op = operation(value.owner)
    if name_of(op) != "stablehlo.add" or argument not in list(op.operands):
        return False
    [other] = [one for one in op.operands if one != argument] or [None]
    return other is not None and _constant(other) == "1"


def _constant(value: Any) -> str | None:
    if hasattr(value.owner, "operations"):
        return None
    op = operation(value.owner)
    found = re.match(r"dense<(-?\d+)> : ", str(op.attributes["value"])) if "constant" in name_of(op) else None
    return found[1] if found and not typed(value).shape else None


def _typed(made: Made, place: Place) -> Made:
    """A carry differs in JAX's types along the axes that divide it: before the first round, and after each."""
    missing = sorted(axes_of(place) - made.varies)
    if not missing:
        return made._replace(text=bare(made.text))  # alone in a tuple
    axes = f'"{missing[0]}"' if len(missing) == 1 else str(tuple(missing)).replace("'", '"')
    return made._replace(text=f'jax.lax.pcast({bare(made.text)}, {axes}, to="varying")', varies=axes_of(place))


def axes_of(place: Place) -> frozenset[str]:
    """The mesh axes along which a value differs."""
    return frozenset(axis.name for axes in (*place.dims, place.partial) for axis in axes)


def _tuple(texts: list[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


__all__ = ["axes_of", "branches", "loop"]
