"""What a layout is made of, the rules that hold for any layout however it was made, and those of a mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn, Self

from spmd.errors import LayoutError

Span = tuple[int, int]
_MOST = 64  # mistakes of one string that a fix mends


@dataclass(frozen=True, slots=True)
class Atom:
    """One named factor of a dimension.

    `axes` is None where the mapping decides (a bare name), `()` where the dimension is whole whatever
    the mapping says (`d/1`), else exactly the mesh axes that divide it, major first.
    """

    name: str
    axes: tuple[str, ...] | None = None
    size: int | None = None
    span: Span = field(default=(0, 0), compare=False)
    named: bool = field(init=False, repr=False, compare=False)
    """Whether this is a name: not `_`, not a literal size."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", self.size is None and self.name != "_")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of an array: one atom, or the factors of a composite such as `(h k)/tp`."""

    atoms: tuple[Atom, ...]
    composite: bool = False
    margin: tuple[int, int] = (0, 0)
    bracket: bool = False
    ellipsis: bool = False
    span: Span = field(default=(0, 0), compare=False)
    axes: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The mesh axes that divide this dimension, in order."""
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The names of its factors; one for all of `...`."""
    scattered: bool = field(init=False, repr=False, compare=False)
    """Whether several factors are divided, so that a device holds scattered pieces of it."""

    def __post_init__(self) -> None:
        axes: tuple[str, ...] = ()
        names: tuple[str, ...] = ("...",) if self.ellipsis else ()
        divided = 0
        for atom in self.atoms:
            axes += atom.axes or ()
            names += (atom.name,)
            divided += bool(atom.axes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "scattered", divided > 1)

    @property
    def text(self) -> str:
        """Return how the dimension is written."""
        return _dim_text(self, explicit=True)

    @property
    def short(self) -> str:
        """Return how it is written where no mapping is in force: `d` for `d/1`."""
        return _dim_text(self, explicit=False)


class Parsed(NamedTuple):
    """A layout as parsed, and the string that it is a part of."""

    dims: tuple[Dim, ...]
    unreduced: tuple[str, ...]
    reduced: tuple[str, ...]
    source: str


class Value:
    """An immutable value. A copy is the value itself, and values of one class are equal if their keys are."""

    __slots__ = ("__weakref__", "_hash", "_key")
    _key: Hashable
    _hash: int

    def _hold(self, key: Hashable, **parts: object) -> None:
        """Set the parts, once."""
        for name, part in {**parts, "_key": key, "_hash": hash(key)}.items():
            object.__setattr__(self, name, part)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (self._key == other._key if isinstance(other, type(self)) else NotImplemented)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable, '{name}' cannot be set")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def fault(
    rule: str, span: Span | None, fix: str | None = None, *, advice: str | None = None, got: Sequence[str] = ()
) -> LayoutError:
    """Return what is wrong with a layout, for those who know neither its string nor the call: `with_call` adds them."""
    return LayoutError(rule, span=span, got=got, fix=fix, advice=advice)


def with_call(
    error: LayoutError, source: str | None, call: str | None, parse: Callable[[str], object] = id
) -> LayoutError:
    """The error with the string that its span points into, and the call. `parse` reads what the fix says: where that is
    refused too, the fix mends both."""
    fix = error.fault.fix
    for _ in range(_MOST):
        text = re.fullmatch(r'"([^"]*)"(.*)', fix) if isinstance(fix, str) else None
        if text is None:
            break
        try:
            parse(text[1])
            break
        except LayoutError as again:
            fix = f"{again.fault.fix}{text[2]}" if isinstance(again.fault.fix, str) else None
    return LayoutError(replace(error.fault, source=source, call=call, fix=fix))


def _dim_text(dim: Dim, *, explicit: bool) -> str:
    if dim.ellipsis:
        return "..."
    if dim.composite:
        core = _group_text(dim.atoms, explicit)
    else:
        core = dim.atoms[0].name + _axes_text(dim.atoms[0], explicit)
    if dim.bracket:
        return f"[{core}]"
    low, high = dim.margin
    # "1+3" could be a margin before or after: a literal size is printed with both
    both = (low or high) and not dim.composite and dim.atoms[0].size is not None
    return (f"{low}+" if low or both else "") + core + (f"+{high}" if high or both else "")


def _axes_text(atom: Atom, explicit: bool) -> str:
    if atom.axes:
        return "".join(f"/{axis}" for axis in atom.axes)
    return "/1" if explicit and atom.axes == () and atom.named else ""


def _group_text(atoms: tuple[Atom, ...], explicit: bool) -> str:
    divided = [atom for atom in atoms if atom.axes]
    if len(divided) > 1 or (divided and not atoms[0].axes):
        inside = [atom.name + "".join(f"/{axis}" for axis in atom.axes or ()) for atom in atoms]
        return f"({' '.join(inside)})"
    tail = _axes_text(divided[0] if divided else atoms[0], explicit)
    return f"({' '.join(atom.name for atom in atoms)}){tail}"


# --- what holds for any layout, however it was made ----------------------------------------------------


def normal(dim: Dim) -> Dim:
    """One form for one meaning: `_` and `3` are whole unless divided, `(h/tp k)` leaves k whole.

    A dimension that was parsed has this form."""
    if dim.ellipsis:
        return dim
    explicit = dim.composite and any(atom.axes is not None for atom in dim.atoms)
    atoms = tuple(
        replace(atom, axes=()) if atom.axes is None and (explicit or not atom.named) else atom for atom in dim.atoms
    )
    return dim if atoms == dim.atoms else replace(dim, atoms=atoms)


def check_rules(
    dims: Iterable[Dim], unreduced: tuple[str, ...], reduced: tuple[str, ...], spans: dict[str, Span]
) -> None:
    """Check that names, axes, `...` and divided factors obey the rules. `spans` says where the marks' axes are written.

    Raises:
      LayoutError: They do not obey.
    """
    names: set[str] = set()
    places: dict[str, Atom | str] = {}
    ellipsis = False
    for dim in dims:
        if dim.ellipsis and ellipsis:
            raise fault("A layout has at most one '...'.", dim.span)
        ellipsis = ellipsis or dim.ellipsis
        for atom in dim.atoms:
            if atom.named and atom.name in names:
                raise fault(f"A name stands for one dimension of a layout, but '{atom.name}' occurs twice.", atom.span)
            names.add(atom.name)
            for axis in atom.axes or ():
                if axis in places:
                    raise _twice(axis, places[axis], atom, atom.span)
                places[axis] = atom
        if dim.composite:
            _check_factors(dim)
    for kind, axes in (("U", unreduced), ("R", reduced)):
        for axis in axes:
            mark = f"{{{kind}:{axis}}}"
            if axis in places:
                raise _twice(axis, places[axis], mark, spans.get(axis))
            places[axis] = mark


def divided(atom: Atom) -> str:
    return atom.name + "".join(f"/{axis}" for axis in atom.axes or ())


def _twice(axis: str, one: Atom | str, other: Atom | str, span: Span | None) -> LayoutError:
    """An axis that two atoms or marks have."""
    first, second = (place if isinstance(place, str) else f"'{divided(place)}'" for place in (one, other))
    where = f"twice in {second}" if first == second else f"in {first} and in {second}"
    return fault(f"A mesh axis occurs once in a layout, but '{axis}' is used {where}.", span)


def _check_factors(dim: Dim) -> None:
    """Only leading factors may be divided: otherwise a device would hold scattered pieces of it."""
    whole = None
    for atom in dim.atoms:
        if not atom.axes:
            whole = whole or atom
        elif whole is not None:
            rest = [one for one in dim.atoms if one is not atom]
            moved = replace(dim, atoms=(atom, *rest), margin=(0, 0), bracket=False)
            raise fault(
                f"A composite dimension is divided on its leading factors, but '{divided(atom)}' comes after "
                f"the whole factor '{whole.name}'.",
                atom.span,
                advice=f"divide '{whole.name}' too, or put '{atom.name}' first: {_dim_text(moved, explicit=False)}",
            )


def check_form(dims: tuple[Dim, ...], marks: tuple[str, ...]) -> None:
    """Raise a LayoutError unless each part could have been written in a string (for layouts made by code)."""
    for place, dim in enumerate(dims):
        if not _has_form(dim):
            raise fault(f"Dimension {place} cannot be written in the layout language.", dim.span)
        for atom in dim.atoms:
            if not (atom.name == "_" or atom.size is not None or writable(atom.name)) or atom.name == "scalar":
                raise fault(f"'{atom.name}' is not a name of a dimension.", atom.span)
            if atom.size is not None and (atom.size < 0 or atom.name != str(atom.size)):
                raise fault(f"'{atom.name}' is not the literal size {atom.size}.", atom.span)
    for axis in (*marks, *(axis for dim in dims for axis in dim.axes)):
        if not writable(axis):
            raise fault(f"'{axis}' is not a name of a mesh axis.", None)


def _has_form(dim: Dim) -> bool:
    """Return whether the parts of a dimension may stand together in a string."""
    if dim.ellipsis:
        return not (dim.atoms or any(dim.margin) or dim.bracket)
    if dim.composite and not all(atom.named for atom in dim.atoms):
        return False
    if dim.bracket and any(dim.margin):
        return False
    return bool(dim.atoms) and (dim.composite or len(dim.atoms) == 1) and min(dim.margin) >= 0


def writable(name: object) -> bool:
    """Return whether a layout string could have this name."""
    return isinstance(name, str) and name.isascii() and name.isidentifier() and bool(name.strip("_"))


# --- from a string to tokens ------------------------------------------------------------------------------------------


_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<ellipsis>\.\.\.)|(?P<arrow>->)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<int>[0-9]+)|(?P<punct>[/+()\[\]{}:,])|(?P<bad>.)",
    re.DOTALL,
)
_LOOKALIKES = {
    "…": "...",
    "→": "->",
    "⇒": "->",
    "＝": "->",
    "∕": "/",
    "⁄": "/",
    "÷": "/",
    "\\": "/",
    "|": "/",
    "@": "/",
}


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int

    @property
    def span(self) -> Span:
        return (self.start, self.end)


def fixed(source: str, start: int, end: int, text: str) -> str:
    """The source with a part replaced, in quotes: a fix to paste. Of a source of several lines, that line alone."""
    whole = source[:start] + text + source[end:]
    if "\n" in whole:
        first = whole.rfind("\n", 0, start) + 1
        last = whole.find("\n", start + len(text))
        return whole[first : last if last >= 0 else len(whole)].strip()
    return f'"{whole.strip()}"'


def replaced(rule: str, source: str, start: int, end: int, text: str | None) -> LayoutError:
    """Return what is wrong with a part of a string; a text in its place, if there is one, mends it."""
    return fault(rule, (start, end), None if text is None else fixed(source, start, end, text))


_MOST = 5000  # characters of a string. Some of its checks take the square of their number.


def check_length(source: str, call: str | None = None) -> None:
    """Raise a LayoutError for a string that is so long that nobody has written it."""
    if len(source) > _MOST:
        rule = f"A string has at most {_MOST} characters, and this one has {len(source)}."
        raise LayoutError(rule, call=call, source=source, span=(_MOST, len(source)))


def tokenize(source: str) -> list[Token]:
    check_length(source)
    tokens: list[Token] = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or "bad"
        if kind == "bad":
            _bad(source, match.start())
        if kind != "space":
            text = match.group()
            tokens.append(Token(text if kind in ("punct", "arrow", "ellipsis") else kind, text, *match.span()))
    tokens.append(Token("end", "", len(source), len(source)))
    return tokens


def _bad(source: str, at: int) -> NoReturn:
    """A character that is not part of the language, with a guess at what was meant."""
    rest = source[at:]
    for wrong in ("=>", ">", "-", "="):
        arrow = re.match(r"[-=]*>|-+|=+", rest)
        if rest.startswith(wrong) and arrow:
            raise replaced("The two sides of a pattern are separated by '->'.", source, at, at + arrow.end(), "->")
    if re.match(r"\w\.\w", source[max(at - 1, 0) :]):
        raise replaced("A layout has no '.'; write '/'.", source, at, at + 1, "/")
    if rest[0] == ".":
        dots = len(rest) - len(rest.lstrip("."))
        left = " " if source[at - 1 : at].strip() else ""
        right = " " if rest[dots : dots + 1].strip() else ""
        rule = "Any number of dimensions is written '...', three dots."
        raise replaced(rule, source, at, at + dots, f"{left}...{right}")
    shown = rest[0] if rest[0].isprintable() else f"U+{ord(rest[0]):04X}"
    if rest[0] in _LOOKALIKES:
        better = _LOOKALIKES[rest[0]]
        raise replaced(f"A layout has no '{shown}'; write '{better}'.", source, at, at + 1, better)
    if rest[0] == "*":
        rule = "A layout has no '*'; any number of dimensions is '...', a product of two is '(h k)'."
        raise fault(rule, (at, at + 1))
    if rest[0] in ";|":
        raise replaced("Layouts are separated by ','.", source, at, at + 1, ",")
    if rest[0].isidentifier():
        raise fault(f"Names consist of ASCII letters, digits and '_', and '{shown}' is not one of them.", (at, at + 1))
    raise fault(f"A layout has no character '{shown}'.", (at, at + 1))


# --- the rules of a mapping: over which mesh axes named dimensions lie, and where they put bare names -----------------


Axes = str | tuple[str, ...] | None  # mesh axes as a user gives them
Rules = Mapping[str, tuple[str, ...]]


def rule_text(name: str, axes: tuple[str, ...]) -> str:
    """A rule as it is written in a mapping: `'batch': ('dp', 'fsdp')`."""
    return f"{name!r}: {(axes[0] if len(axes) == 1 else axes or None)!r}"


def axes_of_rule(name: object, value: object) -> tuple[str, ...]:
    """The axes of a rule as a tuple."""
    shown = (
        f"{name!r}: {value!r}"
        if isinstance(value, (str, tuple, list, type(None)))
        else f"{name!r}: {type(value).__name__}"
    )
    if not writable(name) or name == "scalar":
        raise LayoutError("The keys of a mapping are names of dimensions.", call="AxisMapping(...)", got=[shown])
    axes = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(axes, (tuple, list)) or not all(map(writable, axes)):
        rule = "A rule says a mesh axis, a tuple of mesh axes (major first), or None for whole."
        raise LayoutError(rule, call="AxisMapping(...)", got=[shown])
    for place, axis in enumerate(axes):
        if axis in axes[:place]:
            rule = f"A rule divides over each mesh axis once, but '{axis}' occurs twice."
            raise LayoutError(rule, call="AxisMapping(...)", got=[shown])
    return tuple(map(str, axes))  # NumPy's strings have a repr of their own


def place(dims: Iterable[Dim], marks: Mapping[str, Iterable[str]], rules: Rules) -> list[Dim]:
    """The dimensions with no bare name: placed by the rules, whole where there is none.

    Args:
      dims: The dimensions of a layout.
      marks: The axes of its marks, which no dimension may have too: `{"U": ..., "R": ...}`.
      rules: The mesh axes of each name.

    Raises:
      LayoutError: Two names come to lie on one mesh axis, or a factor behind a whole one is divided.
    """
    placed: list[Dim] = []
    ruled: set[str] = set()
    for dim in dims:
        atoms: list[Atom] = []
        for atom in dim.atoms:
            bare = atom.axes is None
            atoms.append(replace(atom, axes=rules.get(atom.name, ())) if bare else atom)
            if bare:
                ruled.add(atom.name)
        placed.append(replace(dim, atoms=tuple(atoms)))
    if ruled & rules.keys():  # what is whole breaks no rule
        _need_distinct(placed, marks, rules, ruled)
        for dim in placed:
            _need_leading(dim, rules, ruled)
    return placed


def _need_distinct(dims: list[Dim], marks: Mapping[str, Iterable[str]], rules: Rules, ruled: set[str]) -> None:
    """No mesh axis may be used twice; the message names both places."""

    def where(place: Atom | str) -> str:
        if isinstance(place, str):
            return f"the mark {place}"
        if place.name in ruled:
            return f"'{place.name}' by the rule {rule_text(place.name, rules[place.name])}"
        return f"'{divided(place)}' as written"

    seen: dict[str, Atom | str] = {axis: f"{{{kind}:{axis}}}" for kind, axes in marks.items() for axis in axes}
    for atom in (atom for dim in dims for atom in dim.atoms):
        for axis in atom.axes or ():
            if axis in seen:
                rule = f"The mapping puts two parts of one layout on the mesh axis '{axis}'."
                raise fault(rule, atom.span, got=[where(seen[axis]), where(atom)])
            seen[axis] = atom


def _need_leading(dim: Dim, rules: Rules, ruled: set[str]) -> None:
    """A rule may not divide a factor that stands behind a whole one."""
    whole: Atom | None = None
    for atom in dim.atoms:
        if not atom.axes:
            whole = whole or atom
        elif whole is not None and atom.name in ruled:
            rule = (
                "A composite dimension is divided on its leading factors, but the mapping divides "
                f"'{atom.name}' behind the whole factor '{whole.name}'."
            )
            ruling = f"by the rule {rule_text(whole.name, ())}" if whole.name in rules else "without a rule"
            got = [
                f"'{atom.name}' by the rule {rule_text(atom.name, rules[atom.name])}",
                f"'{whole.name}' whole {ruling}",
            ]
            bare = replace(dim, atoms=tuple(replace(one, axes=()) for one in dim.atoms))
            raise fault(rule, atom.span, got=got, advice=f"{bare.text}, or a rule that divides '{whole.name}' too")
