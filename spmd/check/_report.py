"""The texts: one function per way to be wrong. Each returns the message without its place in the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spmd.check._source import line_of
from spmd.check._state import State
from spmd.check._text import changed, text_of
from spmd.errors import ReplicationError, compose

if TYPE_CHECKING:
    from spmd.check._axes import Origin
    from spmd.check._dataflow import Walk

_SHOWN = 3  # reasons listed per value; a value of a deep network has hundreds


# The names that users know, for the variants that JAX picks by type.
_KNOWN_AS = {
    "psum2": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "add_any": "add",
    "select_n": "where",
    "dot_general": "matmul",
}


def _name(of: Any) -> str:
    name: str = of if isinstance(of, str) else of.primitive.name
    return _KNOWN_AS.get(name, name)


@dataclass(frozen=True)
class Failure:
    """One finding; equal findings of one line are one."""

    rule: str
    call: str | None
    source: str | None
    span: tuple[int, int] | None
    got: tuple[str, ...]
    fix: str

    def text(self) -> str:
        return compose(self.rule, call=self.call, source=self.source, span=self.span, got=self.got, fix=self.fix)


def raise_all(kernel: str, failures: Sequence[Failure]) -> None:
    """Raise one error with all findings, if there are any."""
    unique = list(dict.fromkeys(failures))
    if not unique:
        return
    if len(unique) == 1:
        raise ReplicationError(unique[0].text())
    head = f"{kernel}: {len(unique)} values are not what their layouts say."
    raise ReplicationError("\n\n".join([head, *(f"({i}) {f.text()}" for i, f in enumerate(unique, start=1))]))


# --- markers ------------------------------------------------------------------------------------------------


def claimed_divided(walk: Walk, eqn: Any, dim: int, axes: Sequence[str], arange: bool) -> Failure:
    """Equal, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), _and(axes)
    name = " ".join(a.name for a in layout.dims[dim].atoms)
    says = f'"{shown}" says that {name} is divided over {along}'
    if arange:
        rule = f"{says}, but this arange counts from 0 on every device along {along}."
        return _at_marker(walk, eqn, rule, shown, (), f'spmd.iota("{shown}")')
    rule = f"{says}, but every device along {along} holds the same block."
    fix = f'split(x, "{_text(eqn, changed(layout, drop=axes))} -> {_text(eqn, layout)}")'
    return _at_marker(walk, eqn, rule, shown, (), fix)


def partial_claimed_divided(walk: Walk, eqn: Any, dim: int, axes: Sequence[str]) -> Failure:
    """A partial sum, and claimed divided."""
    layout = eqn.params["layout"].without_brackets()
    shown, along = _dim(eqn, dim), _and(axes)
    rule = f'"{shown}" says that each device along {along} holds a block, but each holds a partial sum.'
    before = changed(layout, drop=axes, unreduced={*layout.unreduced, *axes})
    fix = f'psum_scatter(x, "{_text(eqn, before)} -> {_text(eqn, layout)}")'
    return _at_marker(walk, eqn, rule, shown, (), fix)


def claimed_partial(walk: Walk, eqn: Any, axes: Sequence[str]) -> Failure:
    """Equal, and claimed to be a partial sum."""
    layout = eqn.params["layout"]
    along, mark = _and(axes), _mark(axes)
    count = 1
    for axis in axes:
        count *= walk.axes.sizes.get(axis, 0)
    n = str(count) if count > 1 else "n"
    rule = (
        f'"{mark}" says that each device along {along} holds one term of a sum, '
        f"but the value is equal on {along}: summing {n} copies multiplies it by {n}."
    )
    whole = changed(layout, unreduced=[a for a in layout.unreduced if a not in axes])
    fix = f'"{_text(eqn, whole)}": it is complete, leave out {mark} and the psum'
    return _at_marker(walk, eqn, rule, "{U:", (), fix)


def unexpected_partial(walk: Walk, eqn: Any, state: State, axes: Sequence[str]) -> Failure:
    """A partial sum, and claimed complete."""
    layout = eqn.params["layout"]
    along, shown = _and(axes), _text(eqn, layout)
    rule = f'"{shown}" says that the value is equal on {along}, but it is a partial sum {_mark(axes)}.'
    return _at_marker(walk, eqn, rule, shown, reasons(walk, state, axes), _psum_of(eqn, layout, axes))


def unexpected_difference(walk: Walk, eqn: Any, state: State, axes: Sequence[str]) -> Failure:
    """Different, and claimed equal."""
    layout = eqn.params["layout"]
    along, shown = _and(axes), _text(eqn, layout)
    rule = f'"{shown}" says that the value is equal on {along}, but it differs along {along}.'
    fix = f"{_psum_of(eqn, layout, axes)} if each device holds one term of a sum"
    if layout.dims:
        gathered = changed(layout, add=axes[0])
        plain = _text(eqn, layout.without_brackets())
        where = f" (with /{axes[0]} on the dimension that is)" if len(layout.dims) > 1 else ""
        fix = f'all_gather(x, "{_text(eqn, gathered)} -> {plain}") if it is divided{where},\n{fix}'
    return _at_marker(walk, eqn, rule, shown, reasons(walk, state, axes), fix)


def _psum_of(eqn: Any, layout: Any, axes: Sequence[str]) -> str:
    before = changed(layout, unreduced={*layout.unreduced, *axes})
    return f'psum(x, "{_text(eqn, before)} -> {_text(eqn, layout.without_brackets())}")'


def _text(eqn: Any, layout: Any) -> str:
    return text_of(layout, eqn.params["layout"], eqn.params["call"])


def _dim(eqn: Any, dim: int) -> str:
    """One dimension of the marker's layout, as it is written."""
    layout = eqn.params["layout"]
    return layout.from_dims((layout.dims[dim],)).short


def _mark(axes: Sequence[str]) -> str:
    return f"{{U:{','.join(axes)}}}"


def _at_marker(walk: Walk, eqn: Any, rule: str, needle: str, got: Sequence[str], fix: str) -> Failure:
    call = eqn.params["call"]
    role = eqn.params["role"]
    source, span = _find(call, needle, role)
    return Failure(rule, call, source, span, (*_value(walk, eqn), *got), fix)


def _find(call: str, needle: str, role: str) -> tuple[str | None, tuple[int, int] | None]:
    """The string in a call, and where the fault stands in it: on the role's side of the arrow."""
    quoted = re.search(r'"([^"]*)"|\'([^\']*)\'', call)
    source = (quoted.group(1) or quoted.group(2)) if quoted else call if "->" in call else None
    if not source:
        return None, None
    arrow = source.find("->")
    low, high = 0, len(source)
    if arrow >= 0 and role in ("operand", "argument"):
        high = arrow
    elif arrow >= 0 and role in ("result", "output"):
        low = arrow + 2
    pattern = re.escape(needle) if needle.endswith(":") else rf"(?<![\w/]){re.escape(needle)}(?![\w/])"
    found = list(re.compile(pattern).finditer(source, low, high))
    # The same text twice on that side: underlining one of them would be a guess.
    if len(found) != 1:
        return None, None
    start, end = found[0].span()
    return source, (start, source.find("}", start) + 1 if needle.endswith(":") else end)


def _value(walk: Walk, eqn: Any) -> list[str]:
    """What it is about: the type of the value, its role, and the user's line."""
    aval = eqn.invars[0].aval
    shape = ",".join(str(n) for n in getattr(aval, "shape", ()))
    role = eqn.params.get("role", "")
    what = {
        "argument": "an argument",
        "operand": "an operand",
        "output": "an output",
        "annotate": "annotated",
    }.get(role, "a result")
    place = line_of(eqn, walk.callers)
    return [f"{what}: {getattr(aval, 'dtype', aval)}[{shape}]" + (f", at {place}" if place else "")]


# --- equations ----------------------------------------------------------------------------------------------


def nonlinear_use(walk: Walk, eqn: Any, axes: Sequence[str]) -> Failure:
    """Something that is not linear, of a partial sum."""
    mark, name = _mark(axes), _name(eqn)
    rule = f"{name} is not linear, so the {name} of the parts of a sum {mark} is no part of its {name}."
    if name in ("mul", "matmul", "conv_general_dilated"):
        rule = f"{name} of two partial sums {mark}: the product of the parts is no part of the product."
    if name == "div":
        rule = f"div by a partial sum {mark}: dividing by the parts is not dividing by the sum."
    if name == "convert_element_type":
        dtype = eqn.params["new_dtype"]
        rule = f"rounding a partial sum {mark} to {dtype}: the sum of rounded parts is not the rounded sum."
    return Failure(rule, walk.kernel, None, None, _where(walk, eqn), f'psum(x, "... {mark} -> ...") before it')


def mixed_sum(walk: Walk, eqn: Any, axes: Sequence[str]) -> Failure:
    """A partial sum and an equal value in one sum."""
    mark, along = _mark(axes), _and(axes)
    rule = (
        f"{_name(eqn)} of a partial sum {mark} and a value that is equal on {along}: "
        f"the sum over {along} would count that value once per device."
    )
    return Failure(rule, None, None, None, _where(walk, eqn), f'psum(x, "... {mark} -> ...") the partial sum first')


def scaled_by_different(walk: Walk, eqn: Any, axes: Sequence[str]) -> Failure:
    """A partial sum times a value that is not the same for all its parts."""
    mark, along = _mark(axes), _and(axes)
    rule = (
        f"{_name(eqn)} of a partial sum {mark} and a value that differs along {along}: "
        "each part would be scaled differently."
    )
    return Failure(rule, walk.kernel, None, None, _where(walk, eqn), f'psum(x, "... {mark} -> ...") before it')


def returned_partial(walk: Walk, eqn: Any, index: int, axes: Sequence[str], spec: Any) -> Failure:
    """A partial sum leaves the kernel as if it were complete."""
    mark, along = _mark(axes), _and(axes)
    rule = f"The body returned a partial sum over {along}, and the signature does not say {mark}."
    got = (f"output {index}, {spec}",)
    return Failure(rule, walk.kernel, None, None, got, f'psum(x, "... {mark} -> ...") before the return')


def divergent(walk: Walk, eqn: Any, inner: Sequence[str], axes: Sequence[str], state: State) -> Failure:
    """Collectives that only some of their devices would enter."""
    along, names = _and(axes), _and(sorted({_name(one) for one in inner}))
    if eqn.primitive.name == "while":
        what, doing = "a while whose condition", "leave the loop at different times"
        fix = f"make the condition equal on {along}, e.g. pmax of the flag that goes on"
        if any(caller.primitive.name == "custom_linear_solve" for caller in walk.callers):  # the loop is JAX's own
            fix = "call the solver outside of the kernel, on whole arrays, with a kernel as its product"
    else:
        what, doing = "a cond whose predicate", "take different branches"
        fix = f"make the predicate equal on {along} (pmax or all_gather it), or compute both and use jnp.where"
    rule = (
        f"{names} over {along} inside {what} differs along {along}: "
        f"the devices would {doing} and wait for each other for ever."
    )
    got = (*_where(walk, eqn), *reasons(walk, state, axes))
    return Failure(rule, walk.kernel, None, None, got, fix)


def _where(walk: Walk, eqn: Any) -> tuple[str, ...]:
    place = line_of(eqn, walk.callers)
    return (f"{_name(eqn)} at {place}" if place else f"{_name(eqn)} in {walk.kernel}",)


def reasons(walk: Walk, state: State, axes: Sequence[str]) -> list[str]:
    """Why the value differs along these axes: the inputs and the primitives that it was made from."""
    lines: dict[str, None] = {}
    for axis in axes:
        for origin in walk.origins.of(state.origin, axis):
            lines[describe(origin)] = None
    found = list(lines)
    if len(found) > _SHOWN:
        found = [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]
    return found


def describe(origin: Origin) -> str:
    """One reason, as a line."""
    if origin.kind == "input":
        return f"made from {origin.label}"
    place = line_of(origin.eqn, origin.callers)
    at = f", at {place}" if place else ""
    if origin.kind == "spmd_layout":
        return f'made from a value divided by "{origin.eqn.params["layout"]}"{at}'
    return f"made from {_name(origin.kind)} over {origin.axis}{at}"


def _and(names: Sequence[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
