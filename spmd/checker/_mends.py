"""What mends a value: the call to paste where one is sure to be right, else advice."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.facts import layers_of, rather_told
from spmd._jaxprs.lines import line_of
from spmd._jaxprs.primitives import COLLECTIVES
from spmd._jaxprs.walker import Equation, Variable, shape_of
from spmd.checker._history import Call, Origin, call_around, given_to
from spmd.checker._made import Made, Place, is_moved, lying, operation_of, place_of, reduction_of
from spmd.checker._state import HIDDEN, Pending, State, axes_of_dim
from spmd.comm._keywords import axes_in, keyword_for, works_along
from spmd.comm._marks import same_axes
from spmd.errors import Fix, if_possible
from spmd.language import Atom, Layout, Pattern, call_between, no_room

MEANT = 'spmd.per_shard("why") if each shard is meant'


COMPLETED = {
    "max": 'reduce(x, "...", "max"), or lax.pmax over {along}',
    "min": 'reduce(x, "...", "min"), or lax.pmin over {along}',
    "scan": "spmd.cumsum, which adds what the devices before hold",
    "sort": "spmd.sort, which takes a divided dimension",
    "position": "spmd.argmax or spmd.argmin, which take a divided dimension",
    "top_k": "spmd.top_k, which takes a divided dimension",
    "flip": "spmd.flip, which takes a divided dimension",
    "fft": "spmd.fft, which takes divided dimensions",
    "stencil": "spmd.stencil.halo, which brings what the neighbours hold",
    "recurrence": "gather the sequence over {along}, or divide another dimension",
    "pairs": "gather one of the two over {along}, or pass its blocks around",
    "term": "lax.psum_scatter over {along} in place of the slice",
    "slice": "this slices each device's own block: gather it over {along} first, or spmd.take the rows of the whole",
    "concatenate": "this joins each device's own blocks: gather them over {along} first, or stack on a new dimension",
    "index": "spmd.take, which takes rows of the whole; or gather the dimension over {along} first",
}


@if_possible
def completed(walk: Any, pending: Sequence[Pending]) -> str:
    kinds = {p.kind for p in pending}
    along = listed(list(dict.fromkeys(p.axis for p in pending)))
    told = [COMPLETED[kind] for kind in COMPLETED if kind in kinds]
    named = [_of_a_call(walk, p) or _set_in_the_whole(walk, p) for p in pending]
    otherwise = "gather the dimension first, or use the operation of spmd that takes a divided one"
    [how, *_] = [*filter(None, named), *told, otherwise]
    return f"{how.format(along=along)}; {MEANT}"


def _of_a_call(walk: Any, pending: Pending) -> str | None:
    """Return what to call in place of a function that goes on with what it did to a piece: nobody can mend it there."""
    eqn, callers = walk.made_pending[pending.at]
    call, order = call_around(eqn, callers), walk.history.order
    later = (one for one in walk.history.made.values() if order[id(one[0])] > order[id(eqn)] and not is_moved(one[0]))
    if call.namesake is None and not any(call.is_of(call_around(one, around)) for one, _, around in later):
        return None
    return of_the_whole(walk, eqn.invars, call, [pending.axis])


@if_possible
def _set_in_the_whole(walk: Any, pending: Pending) -> str | None:
    """Return what to write for elements that are set by their index: all devices ask which of their own are meant."""
    eqn, _ = walk.made_pending[pending.at]
    if not eqn.primitive.name.startswith(("scatter", "dynamic_update_slice")):
        return None
    dims = walk.known[eqn.invars[0]].dims
    [at] = [d for d, dim in enumerate(dims) if pending.axis in axes_of_dim(dim)]
    behind = "" if len(dims) == 1 else f"[{', '.join(':' if d == at else 'None' for d in range(len(dims)))}]"
    index = f'spmd.iota("<name>/{"/".join(axes_of_dim(dims[at]))}"){behind}'
    return f"jnp.where({index} == <the index>, <what is set>, x), where iota counts in the whole"


@if_possible
def place_at(walk: Any, eqn: Equation) -> Place | None:
    """Return how the operand of a layout's marker lies, and what it was made by."""
    atom = eqn.invars[0]
    state = None if isinstance(atom, Literal) else walk.known.get(atom)  # unknown where another domain does the walk
    return None if state is None else place_of(walk, atom, state)


@if_possible
def as_it_says(walk: Any, eqn: Equation, place: Place | None) -> Fix | None:
    """The call that makes a value lie as its layout says; None where no call is sure to."""
    if place is None:
        return None
    layout, made = eqn.params["layout"].without_brackets(), place.made
    if made is None or made.op == "sum":
        have = place.like(layout)
        return None if have is None else between(walk, eqn, have, layout, place.name)
    kept = [dim.axes for i, dim in enumerate(made.layout.dims) if i not in made.dims] if made.layout else None
    if made.name is None or kept != [dim.axes for dim in layout.dims] or made.axes & {*layout.axes}:
        return None
    return _of_argument(made, eqn.params["call"])


def _of_argument(made: Made, call: str, keeps: bool = False) -> Fix | None:
    """The reduction of an argument over whole dimensions, in place of that of each device's own block."""
    layout = made.layout
    if layout is None or made.op == "scaled" or layout.has_ellipsis or any(dim.composite for dim in layout.dims):
        return None
    if len(layout.dims) != len(made.shape):  # vmap has added dimensions, which the string does not name
        return None
    words = text_of(layout.from_dims(layout.without_brackets().dims), layout, call).split()
    right = ["1" if d in made.dims else word for d, word in enumerate(words) if keeps or d not in made.dims]
    name = made.name or f"<what is {'averaged' if made.op == 'mean' else 'summed'}>"
    how = {} if made.op == "sum" else {"op": made.op}
    return Fix("reduce", (name,), f"{' '.join(words)} -> {' '.join(right) or 'scalar'}", how)


@if_possible
def between(walk: Any, eqn: Equation, have: Layout, wanted: Layout, name: str | None = None) -> Fix | None:
    """The call from one layout to another, on the value of a marker, if its sizes have room for that. The names of
    `have` are those of `wanted`: in another order they may be those that the value has."""
    shape, known = shape_of(eqn.invars[0]), walk.history.sizes(walk.sizes)
    room = lambda lies: no_room(lies, wanted, shape, walk.sizes, known=known) is None
    if not room(have):
        orders = (Layout.from_dims(one, have.unreduced, have.reduced) for one in permutations(wanted.dims))
        have = next(lies for lies in orders if same_axes(lies, have) and room(lies))
    make = lambda verb, shown, src, dst: Fix(verb, (shown,), f"{written(eqn, src)} -> {written(eqn, dst)}")
    return call_between(have, wanted, name or eqn.params.get("value", "x"), make)


@if_possible
def iota(walk: Any, eqn: Equation, dim: int) -> Fix | None:
    """The positions of the whole array, where the arange is as long as a block."""
    aval, layout = eqn.invars[0].aval, eqn.params["layout"]
    atoms = layout.dims[dim].atoms
    if aval.dtype != "int32" or len(layout.dims) != 1 or len(atoms) != 1:
        return None
    bound = {name for one in walk.arg_layouts for name in one.names}
    parts = math.prod(walk.sizes.get(axis, 0) for axis in atoms[0].axes or ())
    size = {} if atoms[0].name in bound else {atoms[0].name: aval.shape[0] * parts}
    return Fix("iota", (), layout.without_brackets().short, size)


@if_possible
def block_of_what(walk: Any, eqn: Equation, state: State, axes: Sequence[str]) -> str:
    """Advice for equal values that stand where blocks are meant: where they became equal, or how blocks are made."""
    gathers = [line_of(o.eqn, o.callers) for axis in axes for o in walk.history.gathers(eqn.invars[0], axis)]
    if any(gathers):
        return (
            f"it was gathered over {listed(axes)} at {listed(list(dict.fromkeys(gathers)))}; before that it is divided"
        )
    layout = eqn.params["layout"].without_brackets()
    whole = written(eqn, changed(layout, drop=axes))
    return (
        f'split(<the whole array>, "{whole} -> {written(eqn, layout)}") gives each device its block; '
        "spmd.random, spmd.iota and the like make blocks of one whole"
    )


@if_possible
def what_it_may_be(eqn: Equation, axes: Sequence[str], place: Place | None) -> str:
    """Advice for a value that differs: what can be ruled out is not offered."""
    layout = eqn.params["layout"].without_brackets()
    plain = written(eqn, layout)
    axes = [a for a in axes if a not in (*layout.axes, *layout.unreduced, *layout.reduced)]
    if not axes:
        return "the axis divides another dimension than the layout says"
    total = f'psum(x, "{written(eqn, changed(layout, unreduced={*layout.unreduced, *axes}))} -> {plain}")'
    made = None if place is None else place.made
    mean = f'a mean of each device\'s own block: reduce(<what is averaged>, "<its layout> -> {plain}", "mean")'
    if made is not None and made.op in ("mean", "scaled"):
        scaled = (
            [] if made.op == "mean" else [f"a sum that is divided by a number of all devices, as spmd.size is: {total}"]
        )
        return ";\n".join([mean, *scaled])
    if made is not None and made.op != "sum":
        return f'the {made.op} of each device\'s own block: reduce(<the array>, "<its layout> -> {plain}", "{made.op}")'
    lines = []
    if layout.dims:
        where = f", with /{axes[0]} on the dimension that is divided" if len(layout.dims) > 1 else ""
        lines = [f'a block: all_gather(x, "{written(eqn, changed(layout, add=axes[0]))} -> {plain}"){where}']
    return ";\n".join(["it depends on what each device holds;", *lines, f"a term of a sum: {total}", mean]).replace(
        ";;", ":"
    )


@if_possible
def rather(walk: Any, eqn: Equation, fix: Fix | None) -> str | None:
    """Advice in place of a fix that sends more than is needed, or that nobody can write into a layer."""
    layout = eqn.params["layout"]
    have = lying(walk.known[eqn.invars[0]]).like(layout)
    if have is not None and (told := _in_the_string(eqn, layout, have, fix)) is not None:
        return told
    place, layers = place_at(walk, eqn), layers_of(code for code, _ in _compat.call_stack(eqn))
    sends = fix is not None and fix.verb in ("all_gather", "all_to_all", "relayout")
    if fix is None or not layers or (not sends and place is not None and place.name is not None):
        return None
    shown = "one" if have is None else written(eqn, have.without_brackets())
    return rather_told(layers[-1], shown, str(fix)) if sends else f"{fix} of the array that {layers[-1]} is given"


def _in_the_string(eqn: Equation, layout: Layout, have: Layout, fix: Fix | None) -> str | None:
    """Return what the string of a call, or a keyword of it, should say of a value that lies otherwise."""
    wrong = [(d, h) for d, h in zip(layout.dims, have.dims, strict=True) if d.axes != h.axes]
    for dim, lies in wrong:
        if lies.axes and dim.short == "_":
            return f'names for what is divided, as "{written(eqn, have)}" says; or "..." for all dimensions'
        text = (layout.source or "")[slice(*dim.span)]
        keyword = None if dim.axes else keyword_for(text, axes_in(text), (), lies.axes)
        if keyword is not None and not {*lies.axes} & {*layout.axes}:
            return f"{keyword}, the keyword that says how {text} is divided"
    behind = (layout.source or "")[layout.dims[-1].span[1] if layout.dims else 0 :]
    for mark in re.findall(r"^\s*({U:[^}]*})", behind) if not layout.unreduced else ():
        if (keyword := keyword_for(mark, axes_in(mark), (), have.unreduced)) is not None:
            return f"{keyword}, the keyword that says along which axes {mark} is a sum"
    call = eqn.params["call"]
    after = Pattern(call.pattern).outputs if "->" in call.pattern else None
    if fix is not None and after and call.verb in ("all_gather", "all_to_all", "relayout", "split"):
        same = [dim.axes for dim in have.dims] == [dim.axes for dim in after[0].dims]
        return f"leave {call.verb} out: the value lies as its right side says" if same else None
    kept = None if after is None else {name for one in after for name in one.names}
    if fix is not None and fix.verb == "all_gather" and all(works_along(dim, kept) for dim, _ in wrong):
        return f'"{written(eqn, have)}" in this string: {call.verb} works along a divided dimension'
    return None


def partial_operands(walk: Any, eqn: Equation, axes: Sequence[str]) -> list[Any]:
    """The operands that are partial sums."""
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) and atom in walk.known]
    return [atom for atom in operands if walk.known[atom].partial & {*axes}]


@if_possible
def of_the_whole(walk: Any, atoms: Sequence[Any], call: Call, axes: Sequence[str]) -> str:
    """Return what to write for a call that works on each device's own piece: the verb of its name, or a whole array."""
    if call.namesake is not None:
        return f"{call.namesake}, which takes a divided dimension"
    given = {var for atom in atoms for var in given_to(walk, atom, call) if walk.known[var].divided & {*axes}}
    named = [walk.history.arguments.get(var) for var in given]
    less = "written out with spmd.reduce it sends less"
    if len(named) == 1 and named[0] is not None:
        name, layout = named[0]
        whole = Fix("all_gather", (name,), f"{layout.short} -> {changed(layout, drop=axes).short}")
        return f"{whole} in place of {name}; {less}"
    return f'all_gather(<what the call is given>, "<its layout> -> ...") over {listed(axes)}; {less}'


@if_possible
def summed_in(walk: Any, atom: Any, call: Call) -> bool:
    """Return whether a call of the user's made a partial sum that it goes on with: nobody can complete it there."""
    made = walk.history.producer(atom)
    while made is not None and call.is_of(call_around(*made)):
        parts = [one for one in made[0].invars if not isinstance(one, Literal) and walk.known[one].partial]
        if not parts:
            return True
        atom = next(iter(walk.history.operands(parts[0])), None) if parts[0] not in walk.history.made else parts[0]
        made = walk.history.producer(atom)
    return False


@if_possible
def reduced(walk: Any, atom: Variable, call: Call) -> Fix | str | None:
    """The mean or the sum over a whole dimension, in place of that of each device's own block: a line to paste where it
    is known how the user writes the array, else advice. The call that uses it may have broadcast it."""
    made = reduction_of(walk, atom)
    if made is None or made.op not in ("mean", "sum"):
        return None
    fix = _of_argument(made, walk.kernel, shape_of(next(given_to(walk, atom, call), atom)) == made.with_ones)
    return fix if fix is None or made.name else f"{fix} in place of that over each device's own block"


@if_possible
def completed_first(walk: Any, eqn: Equation, axes: Sequence[str]) -> str:
    """Advice for a partial sum that is used before it is complete. To psum a mean of pieces would add up the means."""
    total = f'psum(<the partial sum>, "... {marked(axes)} -> ...") before it, and not after'
    ops = {operation_of(walk, atom) for atom in partial_operands(walk, eqn, axes)}
    mean = 'reduce(<what is averaged>, "<its layout> -> ...", "mean") in place of the mean of each device\'s own block'
    if ops == {"mean"}:
        return mean
    return total if ops == {"sum"} else f"of a sum: {total};\nof a mean: {mean}"


def reshaped(state: State, axes: Sequence[str]) -> str | None:
    """Advice for dimensions of a block that a reshape made one."""
    merged = [dim for dim in state.dims if len(dim) > 1 and {*axes_of_dim(dim)} & {*axes}]
    told = f"a reshape made one dimension of blocks along {listed(axes)}: gather the inner ones before it"
    return f'{told}; or spmd.rearrange, which names what it joins, "(b d)"' if merged else None


OWN_NOISE = (
    'spmd.random.normal(key, "<layout>") and the like, of which each device draws its own block; '
    "or jax.random.fold_in(key, lax.axis_index(...)), if the numbers may depend on the mesh"
)


# --- words -----------------------------------------------------------------------------------------------------------

# Words that the messages share: places, reasons, lists, and layouts as the user would write them.

_SHOWN = 3  # reasons listed per value; a value of a deep network has hundreds


_KNOWN_AS = {"add_any": "add", "select_n": "where", "dot_general": "matmul"}


def named(of: Any) -> str:
    """The name of a primitive that users know."""
    name: str = of if isinstance(of, str) else of.primitive.name
    verb = COLLECTIVES.get(name)
    return _KNOWN_AS.get(name, name) if verb is None else f"{verb}_start" if name.endswith("_start") else verb


def where(walk: Any, eqn: Equation) -> tuple[str, ...]:
    place = line_of(eqn, walk.callers)
    return (f"{named(eqn)} at {place}" if place else f"{named(eqn)} in {walk.kernel}",)


def reasons(walk: Any, atom: Variable, axes: Sequence[str]) -> list[str]:
    """Return why the value differs along these axes: the inputs and the primitives that it was made from."""
    lines: dict[str, None] = {}
    for axis in axes:
        for origin in walk.history.sources(atom, axis):
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
    return f"made from {named(origin.kind)} over {origin.axis}{at}"


def joined(one: str | None, other: str | None, between: str = " ") -> str | None:
    """Two pieces of advice, of which some could not be made."""
    return f";{between}".join(filter(None, (one, other))) or None


def listed(names: Sequence[str]) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def marked(axes: Sequence[str]) -> str:
    return f"{{U:{','.join(axes)}}}"


def shown_dims(state: State) -> str:
    """A state as a layout without names."""
    dims = []
    for dim in state.dims:
        axes = axes_of_dim(dim)
        unknown = any(a is HIDDEN for _, a in dim)
        parts = ["/".join(("_", *axes_of_dim((factor,)))) for factor in dim] if axes else ["_"]
        dims.append("?" if unknown else parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    marks = f" {marked(sorted(state.partial))}" if state.partial else ""
    return (" ".join(dims) or "scalar") + marks


def text_of(layout: Layout, given: Layout, call: str) -> str:
    """The text of `layout`, which is the layout `given` in `call`, or that one changed.

    A resolved layout says `/1` wherever nothing divides. That is noise, except where a mapping is in force:
    then some name of the call is divided without a slash, and a bare name in a fix would be divided too.
    """
    written = all("/".join((atom.name, *atom.axes)) in call for atom in given.atoms if atom.axes)
    return layout.short if written else str(layout)


def changed(
    layout: Layout,
    *,
    drop: Iterable[str] = (),
    add: str | None = None,
    unreduced: Iterable[str] | None = None,
) -> Layout:
    """`layout` without some axes in its dims, with one more on its first dim, or with other `{U:}` marks."""
    gone = set(drop)
    dims = []
    for dim in layout.without_brackets().dims:
        atoms = tuple(replace(a, axes=tuple(x for x in a.axes or () if x not in gone)) for a in dim.atoms)
        if add is not None and atoms:
            atoms = (replace(atoms[0], axes=(*(atoms[0].axes or ()), add)), *atoms[1:])
            add = None
        dims.append(replace(dim, atoms=_leading(atoms)))
    marks = layout.unreduced if unreduced is None else tuple(sorted(unreduced))
    return Layout.from_dims(tuple(dims), unreduced=marks, reduced=layout.reduced)


def _leading(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """The factors of a dimension, divided on the leading ones only: another one behind a whole factor is whole too."""
    whole = next((i for i, one in enumerate(atoms) if not one.axes), len(atoms))
    return (*atoms[:whole], *(replace(one, axes=()) if one.axes else one for one in atoms[whole:]))


def written(eqn: Equation, layout: Layout) -> str:
    return text_of(layout, eqn.params["layout"], eqn.params["call"])


def done_to_pieces(pending: Sequence[Pending]) -> str:
    kinds = list(dict.fromkeys(KINDS.get(p.kind, p.kind) for p in pending))
    verb, along = "was" if len(kinds) == 1 else "were", listed(list(dict.fromkeys(p.axis for p in pending)))
    return f"{listed(kinds)} {verb} done on each device's own piece along {along}"


def pieces_of(walk: Any, pending: Sequence[Pending]) -> list[str]:
    """Return where it was done."""
    lines: dict[str, None] = {}
    for p in pending:
        eqn, callers = walk.made_pending[p.at]
        place = line_of(eqn, callers)
        lines[f"{named(eqn)} over {p.axis}" + (f", at {place}" if place else "")] = None
    return list(lines)


KINDS = {
    "max": "a maximum", "min": "a minimum", "product": "a product",
    "all": "a test of all elements", "any": "a test of any element",
    "position": "an argmax or argmin", "scan": "a cumulative operation", "sort": "a sort", "flip": "a flip",
    "fft": "a transform", "stencil": "a stencil", "slice": "a slice", "pad": "a pad", "index": "an index",
    "concatenate": "a concatenation", "fold": "a reduction", "group": "a grouping", "top_k": "a top_k",
    "linear algebra": "a factorisation",
    "recurrence": "a loop", "pairs": "a product of one piece with another", "update": "an update",
    "gather": "a gather along another dimension", "xor": "an xor",
    "term": "a slice of a partial sum, this device's block of its own term,",
}  # fmt: skip
