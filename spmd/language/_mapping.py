"""`AxisMapping`: where named dimensions live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

from spmd.errors import LayoutError, MeshError, did_you_mean
from spmd.language._layout import Axes, Layout
from spmd.language._syntax import Atom, Dim, Span, divided, writable

__all__ = ["AxisMapping"]


class AxisMapping(Mapping[str, tuple[str, ...]]):
    """Rules that say over which mesh axes named dimensions are divided.

    Under a mapping a bare name lies as its rule says; `name/axis` is exactly that, `name/1` is whole.
    Immutable and hashable.

    Args:
      rules: for each name a mesh axis, a tuple of them (major first), or None: whole.

    Raises:
      LayoutError: a name or an axis cannot be written in a layout, or a rule has one axis twice.

    >>> mapping = AxisMapping({"batch": ("dp", "fsdp"), "mlp": "tp", "seq": None})
    >>> mapping["mlp"], mapping.get("seq"), mapping.get("other")
    (('tp',), (), None)
    >>> mapping.resolve(Layout("batch seq mlp"))
    Layout('batch/dp/fsdp seq/1 mlp/tp')
    """

    __slots__ = ("_hash", "_rules")
    _rules: dict[str, tuple[str, ...]]

    def __init__(self, rules: Mapping[str, Axes] | Iterable[tuple[str, Axes]] = ()):
        try:
            pairs = dict(rules)
        except (TypeError, ValueError):
            rule = f"The rules of a mapping are a dict, but this is of type {type(rules).__name__}."
            raise LayoutError(rule, advice='as in AxisMapping({"batch": "dp"})') from None
        found = {str(name): _checked(name, value) for name, value in pairs.items()}
        object.__setattr__(self, "_rules", found)
        object.__setattr__(self, "_hash", hash(frozenset(found.items())))

    @staticmethod
    def of(rules: AxisMapping | Mapping[str, Axes] | None) -> AxisMapping:
        """Return a mapping; a dict becomes one, None is the empty one.

        >>> AxisMapping.of({"mlp": "tp"})
        AxisMapping({'mlp': 'tp'})
        """
        if isinstance(rules, AxisMapping):
            return rules
        if rules is None:
            return _EMPTY
        if not isinstance(rules, Mapping):
            rule = f"A mapping is an AxisMapping or a dict, but this is of type {type(rules).__name__}."
            raise LayoutError(rule, advice='as in AxisMapping({"batch": "dp"})')
        return AxisMapping(rules)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have a rule, in order."""
        return tuple(self._rules)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes of all rules, in order of appearance."""
        return tuple(dict.fromkeys(axis for axes in self._rules.values() for axis in axes))

    def merge(self, other: AxisMapping | Mapping[str, Axes] | None) -> AxisMapping:
        """Return this mapping with the rules of another added; where both have one, the other's holds.

        >>> AxisMapping({"mlp": "tp"}).merge({"mlp": None, "batch": "dp"})
        AxisMapping({'mlp': None, 'batch': 'dp'})
        """
        return AxisMapping({**self._rules, **AxisMapping.of(other)._rules})

    def only(self, *names: str) -> AxisMapping:
        """Return the mapping with the rules of these names only.

        >>> AxisMapping({"batch": "dp", "mlp": "tp"}).only("mlp")
        AxisMapping({'mlp': 'tp'})
        """
        for name in names:
            if name not in self._rules:
                hint = did_you_mean(name, self._rules) or "."
                raise LayoutError(f"The mapping has no rule for '{name}'{hint}", call=repr(self))
        return AxisMapping({name: self._rules[name] for name in names})

    def check(self, mesh_axis_names: Iterable[str]) -> None:
        """Check that the mesh has all axes of the rules.

        Raises:
          MeshError: it lacks some; all of them are named.

        >>> AxisMapping({"mlp": "tp"}).check(("dp", "tp"))
        """
        known = tuple(mesh_axis_names)
        missing = [
            f"{_rule_text(name, axes)}: no axis '{axis}'{did_you_mean(axis, known)}"
            for name, axes in self._rules.items()
            for axis in axes
            if axis not in known
        ]
        if missing:
            got = [*missing, f"mesh axes {', '.join(known) or '(none)'}"]
            raise MeshError("The rules of a mapping name axes of the mesh.", call=repr(self), got=got)

    def lacks(self, layout: Layout | str) -> tuple[str, ...]:
        """Return the bare names of a layout that have no rule, in order.

        >>> AxisMapping({"embed": "dp"}).lacks(Layout("batch embed mlp/tp seq/1"))
        ('batch',)
        """
        layout = _as_layout(layout)
        return tuple(name for name in layout.bare if name in layout.names and name not in self._rules)

    def resolve(self, layout: Layout | str) -> Layout:
        """Return the layout with no bare name: placed by the rules, whole where there is none.

        Raises:
          LayoutError: two names come to lie on one mesh axis, or a factor behind a whole one is divided.

        >>> AxisMapping({"embed": "dp", "mlp": "tp"}).resolve(Layout("embed/1 mlp"))
        Layout('embed/1 mlp/tp')
        """
        layout = _as_layout(layout)
        if not layout.bare:
            return layout
        return _resolved(self, layout, layout.source, tuple(dim.span for dim in layout.dims))

    def place(self, layout: Layout | str, call: str, got: Iterable[str] = ()) -> Layout:
        """`resolve` for a layout that stands by itself: each of its bare names has a rule.

        Args:
          layout: The layout.
          call: The call, for messages.
          got: What the layout was given for, for messages; the layout itself where absent.

        Raises:
          LayoutError: a bare name has no rule, or as `resolve`.

        >>> AxisMapping({"embed": None, "mlp": "tp"}).place(Layout("embed mlp"), "shard(tree, layouts)")
        Layout('embed/1 mlp/tp')
        """
        layout = _as_layout(layout)
        missing = self.lacks(layout)
        if missing:
            rule = f"the mapping says nothing of {', '.join(missing)}{did_you_mean(missing[0], self) or '.'}"
            shown = [*(got or [f'"{layout.short}"']), f"mapping: {', '.join(self)}"]
            raise LayoutError(rule, call=call, got=shown, advice=f'"{missing[0]}": None for a whole dimension')
        return self.resolve(layout)

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self._rules == other._rules if isinstance(other, AxisMapping) else NotImplemented

    def __repr__(self) -> str:
        return f"AxisMapping({{{', '.join(_rule_text(*rule) for rule in self._rules.items())}}})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an AxisMapping is immutable, '{name}' cannot be set")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __copy__(self) -> AxisMapping:
        return self

    def __deepcopy__(self, memo: object) -> AxisMapping:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return AxisMapping, (self._rules,)


def _as_layout(layout: Layout | str) -> Layout:
    return layout if isinstance(layout, Layout) else Layout(layout)


def _rule_text(name: str, axes: tuple[str, ...]) -> str:
    """A rule as it is written in a mapping: `'batch': ('dp', 'fsdp')`."""
    return f"{name!r}: {(axes[0] if len(axes) == 1 else axes or None)!r}"


def _checked(name: object, value: object) -> tuple[str, ...]:
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


# --- resolving -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _resolved(mapping: AxisMapping, layout: Layout, source: str | None, spans: tuple[Span, ...]) -> Layout:
    # Equal layouts of two strings stand at other places in them: source and spans are part of the key.
    dims: list[Dim] = []
    ruled: set[str] = set()
    for dim in layout.dims:
        atoms = list(dim.atoms)
        for place, atom in enumerate(atoms):
            if atom.axes is None:
                atoms[place] = replace(atom, axes=mapping.get(atom.name) or ())
                ruled.add(atom.name)
        dims.append(replace(dim, atoms=tuple(atoms)))
    _need_distinct(mapping, layout, dims, ruled)
    for dim in dims:
        _need_leading(mapping, layout, dim, ruled)
    return Layout.from_dims(dims, layout.unreduced, layout.reduced, source=layout.source)


def _need_distinct(mapping: AxisMapping, layout: Layout, dims: list[Dim], ruled: set[str]) -> None:
    """No mesh axis may be used twice; the message names both places."""

    def place(atom: Atom) -> str:
        if atom.name in ruled:
            return f"'{atom.name}' by the rule {_rule_text(atom.name, mapping[atom.name])}"
        return f"'{divided(atom)}' as written"

    seen = {
        axis: f"the mark {{{kind}:{axis}}}"
        for kind, axes in (("U", layout.unreduced), ("R", layout.reduced))
        for axis in axes
    }
    for dim in dims:
        for atom in dim.atoms:
            for axis in atom.axes or ():
                if axis in seen:
                    rule = f"The mapping puts two parts of one layout on the mesh axis '{axis}'."
                    _raise(layout, atom, rule, [seen[axis], place(atom)])
                seen[axis] = place(atom)


def _need_leading(mapping: AxisMapping, layout: Layout, dim: Dim, ruled: set[str]) -> None:
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
            ruling = f"by the rule {_rule_text(whole.name, ())}" if whole.name in mapping else "without a rule"
            got = [
                f"'{atom.name}' by the rule {_rule_text(atom.name, mapping[atom.name])}",
                f"'{whole.name}' whole {ruling}",
            ]
            bare = replace(dim, atoms=tuple(replace(one, axes=()) for one in dim.atoms))
            _raise(layout, atom, rule, got, f"{bare.text}, or a rule that divides '{whole.name}' too")


def _raise(layout: Layout, atom: Atom, rule: str, got: list[str], advice: str | None = None) -> NoReturn:
    source = layout.source
    shown = {"call": repr(layout)} if source is None else {"source": source, "span": atom.span}
    raise LayoutError(rule, got=got, advice=advice, **shown)  # type: ignore[arg-type]


_EMPTY = AxisMapping()
