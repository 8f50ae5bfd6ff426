"""Layouts of whole trees: by rules over paths (`layouts`), and by a prefix tree (`match_prefix`)."""

from __future__ import annotations
import __future__

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

from spmd.errors import LayoutError, did_you_mean, nearest
from spmd.language import Layout

__all__ = [
    "SCALAR",
    "Matched",
    "Static",
    "by_path",
    "children",
    "foreign_kind",
    "is_array",
    "is_foreign",
    "is_number",
    "layouts",
    "match_prefix",
    "matched",
    "unwrapped",
    "wrapped",
]

Path = tuple[Any, ...]


# --- walking a tree ------------------------------------------------------------------------------------


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array: it has a shape and a dtype (a ShapeDtypeStruct has), one that JAX has too."""
    shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
    return shaped and not is_foreign(leaf)


def is_foreign(leaf: Any) -> bool:
    """Whether a leaf is a NumPy array that JAX does not compute with: strings, objects, dates, records, long floats."""
    return isinstance(leaf, (np.ndarray, np.generic)) and not _held(leaf.dtype)


def foreign_kind(leaf: Any) -> str | None:
    """What a leaf is, in a message, if JAX cannot make it an array to compute with."""
    if is_foreign(leaf):
        return f"a NumPy array of dtype {leaf.dtype}, which JAX does not compute with"
    if not isinstance(leaf, int) or _fits_integers(leaf):
        return None
    held = jax.dtypes.canonicalize_dtype(int)
    wider = held.itemsize < 8 and -(2**63) <= leaf < 2**63
    return f"an int that {held} does not hold" + (" without jax_enable_x64" if wider else "")


def _fits_integers(number: int) -> bool:
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(int))
    return bool(limits.min <= number <= limits.max)


@lru_cache(maxsize=256)
def _held(dtype: np.dtype) -> bool:
    try:
        jax.typeof(np.zeros(0, dtype))
    except TypeError:
        return False
    return dtype.kind != "T"  # strings of any length: JAX brings them to a CPU, and takes them into no computation


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python's own, which a layout of its own makes an array."""
    return isinstance(leaf, (float, complex)) or (isinstance(leaf, int) and _fits_integers(leaf))


@jax.tree_util.register_static
class Static:
    """What is no array, on its way through `jit`: a part of the structure. 1, 1.0 and True are not the same here."""

    def __init__(self, leaves: tuple[Any, ...], *parts: Any) -> None:
        self.parts = (leaves, *parts)
        # an object may be known by what it equals, a number only by its text: 0.0 == -0.0
        texts = tuple(repr(x) if is_number(x) else None for x in leaves)
        self._key = (self.parts, texts)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        try:
            return self is other or (isinstance(other, Static) and bool(self._key == other._key))
        except (TypeError, ValueError):  # of NumPy arrays that have no one answer
            return False


def wrapped(tree: Any) -> Any:
    """A tree that `jit` takes and gives: what is neither array nor number is a part of its structure."""
    return jax.tree.map(lambda x: x if is_array(x) or is_number(x) else Static((x,)), tree)


def check_hashable(tree: Any, call: str) -> None:
    """Complain about leaves of a `wrapped` tree that cannot be a part of a compiled program.

    Raises:
      LayoutError: if one is not hashable.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=_is_static):
        try:
            hash(leaf) if _is_static(leaf) else None
        except TypeError as error:
            rule = "what is not an array is a part of the compiled program, and must be hashable."
            raise LayoutError(rule, call=call, got=[f"{error}"]) from None


def unwrapped(tree: Any) -> Any:
    """The inverse of `wrapped`."""
    return jax.tree.map(lambda x: x.parts[0][0] if _is_static(x) else x, tree, is_leaf=_is_static)


def _is_static(x: Any) -> bool:
    return isinstance(x, Static)


SCALAR = Layout("scalar")  # the one layout that an array without dimensions can have, so nobody need write it


def _rankless(leaf: Any) -> bool:
    return is_array(leaf) and len(leaf.shape) == 0


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The keys and children of a pytree node, in JAX's order; None for a leaf."""
    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda one: one is not node)[0]
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(path[0], child) for path, child in flat]


def _name(key: Any) -> str:
    """A key of a path as one part of it."""
    if isinstance(key, (DictKey, FlattenedIndexKey)):
        return str(key.key)
    if isinstance(key, GetAttrKey):
        return key.name
    return str(key.idx) if isinstance(key, SequenceKey) else str(key)


def _is_box(node: Any) -> bool:
    """Whether a node is a Flax variable, whose one child `value` nobody writes in a path."""
    return any(one.__name__ == "Variable" and one.__module__.startswith("flax") for one in type(node).__mro__)


class _Leaf(NamedTuple):
    path: Path
    parts: tuple[str, ...]
    value: Any


def _leaves(node: Any, path: Path = (), parts: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    """All leaves, in the order of jax.tree.leaves."""
    below = children(node)
    if below is None:
        yield _Leaf(path, parts, node)
        return
    boxed = _is_box(node)
    for key, child in below:
        yield from _leaves(child, (*path, key), parts if boxed else (*parts, _name(key)))


def _describe(node: Any) -> str:
    """What stands at a place of a tree, without values."""
    if is_array(node):
        return f"an array {node.dtype}[{','.join(map(str, node.shape))}]"
    if foreign := foreign_kind(node):
        return foreign
    below = children(node)
    kind = type(node).__name__
    if node is None:
        return "None"
    if below is None:
        return f"a leaf of type {kind}"
    return f"{_article(kind)} with {_listed([_name(key) for key, _ in below])}"


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiouAEIO" else f"a {noun}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return shown or "no entries"


def by_path(fn: Callable[[str], Any], tree: Any) -> Any:
    """The same tree with `fn("mlp/w_in")` for each array, and None for any other leaf.

    >>> by_path(str.upper, {"w": jax.numpy.ones(2), "name": "mlp"})
    {'name': None, 'w': 'W'}
    """
    found = [fn("/".join(leaf.parts)) if is_array(leaf.value) else None for leaf in _leaves(tree)]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), found)


# --- rules over paths ----------------------------------------------------------------------------------


def layouts(tree: Any, rules: Mapping[str, str | Layout]) -> Any:
    """Give each array of a tree its layout, by rules over paths.

    A path is the keys from the root joined with "/": dict keys, field names, indices.  In a rule `*`
    stands for anything within one part, `**` for any number of parts.  The rule `**` alone is the catch-all
    for what no other rule matches. An array without dimensions needs no rule: its layout is `scalar`.

    Args:
      tree: arrays, or anything with a shape and a dtype, in dicts, sequences, dataclasses, modules.
      rules: a layout for each path pattern.

    Returns:
      The same tree with a Layout for each array and None for any other leaf.

    Raises:
      LayoutError: an array without a rule, a rule without an array, two rules that disagree, a rank that
        differs; all of them at once.

    >>> import jax.numpy as jnp
    >>> params = {"norm": {"scale": jnp.ones(4)}, "mlp": {"w_in": jnp.ones((4, 8))}}
    >>> layouts(params, {"**/w_in": "d/dp f/tp", "norm/*": "d"})
    {'mlp': {'w_in': Layout('d/dp f/tp')}, 'norm': {'scale': Layout('d')}}
    """
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) for rule in rules):
        raise LayoutError(
            "The rules are a dict from path patterns to layouts.",
            call="layouts(tree, rules)",
            advice='layouts(tree, {"**": "b d"}) for one layout everywhere',
        )
    read = {rule: Layout(text, call=f"{rule!r}: {text!r}") for rule, text in rules.items()}
    leaves = list(_leaves(tree))
    used: set[str] = set()
    failures: list[str] = []
    found: list[Layout | None] = []
    for leaf in leaves:
        matching = [rule for rule in read if _matches(rule, leaf.parts)] if is_array(leaf.value) else []
        used.update(matching)
        matching = [rule for rule in matching if rule != "**"] or matching
        if _rankless(leaf.value) and (not matching or (matching == ["**"] and not _fits(read["**"], 0))):
            found.append(SCALAR)
            continue
        found.append(read[matching[0]] if matching else None)
        if is_array(leaf.value):
            failures.extend(_leaf_failures(leaf, matching, read))
    paths = ["/".join(leaf.parts) for leaf in leaves if is_array(leaf.value)]
    for rule in read:
        if rule not in used:
            failures.append(f"rule {rule!r} matches no array{_near(rule, paths)}")
    if failures:
        rule = "Each array needs one layout, and each rule an array that it matches."
        raise LayoutError(rule, call="layouts(tree, rules)", got=failures)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), found)


def _leaf_failures(leaf: _Leaf, matching: list[str], read: Mapping[str, Layout]) -> list[str]:
    path = "/".join(leaf.parts) or "(the tree itself)"
    if not matching:
        return [f"no rule for {path}, {_describe(leaf.value)}{_near(path, list(read))}"]
    differing = [rule for rule in matching if read[rule] != read[matching[0]]]
    if differing:
        both = " and ".join(f"{rule!r}: '{read[rule]}'" for rule in (matching[0], differing[0]))
        return [f"two rules disagree on {path}: {both}"]
    layout = read[matching[0]]
    if _fits(layout, len(leaf.value.shape)):
        return []
    return [f"rule {matching[0]!r}: '{layout}' does not fit the rank of {path}, {_describe(leaf.value)}"]


def _fits(layout: Layout, rank: int) -> bool:
    """Whether an array of this rank can lie so."""
    least = sum(not dim.ellipsis for dim in layout.dims)
    return rank == least or (layout.has_ellipsis and rank > least)


def _near(wanted: str, known: list[str]) -> str:
    """Did-you-mean on paths: compared without the wildcards at their ends, then by the last part alone."""
    for part in (_without_wildcards, _last_part):
        whole = {part(one): one for one in reversed(known)}
        near = nearest(part(wanted), whole)
        if near is not None:
            return f"; did you mean {whole[near]!r}?"
    return ""


def _without_wildcards(path: str) -> str:
    return re.sub(r"^(\*+/)+|(/\*+)+$", "", path)


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]


def _matches(rule: str, parts: tuple[str, ...]) -> bool:
    return _regex(rule).fullmatch("".join(f"{part}/" for part in parts)) is not None


@lru_cache(maxsize=1024)
def _regex(rule: str) -> re.Pattern[str]:
    """A rule as an expression over a path whose every part ends in "/"."""
    pieces = []
    for part in rule.split("/"):
        inner = "".join("[^/]*" if one == "*" else "[^/]" if one == "?" else re.escape(one) for one in part)
        pieces.append("(?:[^/]*/)*" if part == "**" else f"{inner}/")
    return re.compile("".join(pieces))


# --- a prefix tree of layouts --------------------------------------------------------------------------


class Each(NamedTuple):
    """The layouts of every entry of a container, from an annotation such as `list[Block]`."""

    spec: Any


class Unknown(NamedTuple):
    """An annotation that names no layout (or a class defined where it cannot be looked up)."""

    text: str


class Matched(NamedTuple):
    """The leaves of a tree with their layouts, and what does not fit.

    Attributes:
      found: For each leaf of `jax.tree.leaves(tree)`: its path, itself, its layout (None: no array).
      faults: One line for each place where layouts and tree differ.
    """

    found: list[tuple[str, Any, Layout | None]]
    faults: list[str]


def matched(layouts_tree: Any, tree: Any, what: str) -> Matched:
    """Pair the leaves of a tree with layouts from a prefix of it: the one matcher of trees with layouts.

    Arrays without dimensions that are given no layout have `scalar`, and so have those under a layout for everything
    below that has no room for them. Leaves that are no arrays have none; a number has one where it is its alone.

    Args:
      layouts_tree: a string or Layout (for every array below), a dict, a sequence, a dataclass or module,
        a class whose annotations are layouts, a function from the tree to one of these, or None.
      tree: the values.
      what: the name of the tree in messages.

    Raises:
      LayoutError: a layout is malformed.
    """
    matcher = _Matcher(what)
    matcher.match(layouts_tree, tree, ())
    return Matched(matcher.found, matcher.failures)


def match_prefix(
    layouts_tree: Any, tree: Any, what: str, call: str | None = None
) -> list[tuple[str, Any, Layout | None]]:
    """`matched`, where a tree that does not fit is an error.

    Args:
      layouts_tree: as in `matched`.
      tree: the values.
      what: the name of the tree in messages.
      call: the call, for messages.

    Returns:
      For each leaf of `jax.tree.leaves(tree)`: its path, itself, its layout (None: no array).

    Raises:
      LayoutError: the structures differ; all places at once.

    >>> import jax.numpy as jnp
    >>> params = {"norms": [jnp.ones(2), jnp.ones(2)], "w": jnp.ones((2, 3)), "count": jnp.zeros(())}
    >>> found = match_prefix({"w": "d f/tp", "norms": "d"}, params, "params")
    >>> for path, _, layout in found:
    ...     print(path, "|", layout)
    params['count'] | scalar
    params['norms'][0] | d
    params['norms'][1] | d
    params['w'] | d f/tp
    """
    found, faults = matched(layouts_tree, tree, what)
    if faults:
        rule = f"The layouts of {what} follow its structure."
        raise LayoutError(rule, call=call, got=faults) from None
    return found


_RULES = "; rules over paths are for layouts: lambda tree: spmd.layouts(tree, {...})"


class _Matcher:
    """One walk over layouts and tree together, collecting pairs and failures."""

    def __init__(self, what: str):
        self.what = what
        self.found: list[tuple[str, Any, Layout | None]] = []
        self.failures: list[str] = []

    def place(self, path: Path) -> str:
        return self.what + keystr(path)

    def fail(self, path: Path, text: str) -> None:
        self.failures.append(f"{self.place(path)}: {text}")

    def match(self, spec: Any, node: Any, path: Path) -> None:
        if isinstance(spec, Unknown):
            # a class local to a function cannot be looked up by name, but the value knows its class
            spec = type(node) if type(node).__name__ == spec.text.split(".")[-1] else spec
        if spec is None or isinstance(spec, Unknown):
            self.nothing(spec, node, path)
        elif isinstance(spec, Layout):
            self.everything(spec, node, path)
        elif isinstance(spec, str):
            self.everything(Layout(spec, call=f'{self.place(path)}: "{spec}"'), node, path)
        elif isinstance(spec, Each):
            for key, child in children(node) or ():
                self.match(spec.spec, child, (*path, key))
            if node is not None and children(node) is None:
                self.fail(path, f"its annotation is a container, but here is {_describe(node)}")
        elif not isinstance(spec, type) and _entries(spec) is None and callable(spec):
            self.match(spec(node), node, path)
        else:
            self.by_key(spec, node, path)

    def nothing(self, spec: Unknown | None, node: Any, path: Path) -> None:
        """No layout: legal where there is no array, or one that can lie in one way only."""
        given = "None" if spec is None else f"the annotation {spec.text}"
        for leaf in self.bare(node, path):
            self.fail(leaf.path, f"{given} is no layout, but here is {_describe(leaf.value)}")

    def bare(self, node: Any, path: Path) -> list[_Leaf]:
        """Record the leaves of a place without layouts; give back the arrays that need one."""
        missing = []
        for leaf in _leaves(node, path):
            alone = _rankless(leaf.value)
            self.found.append((self.place(leaf.path), leaf.value, SCALAR if alone else None))
            if is_array(leaf.value) and not alone:
                missing.append(leaf)
        return missing

    def everything(self, layout: Layout, node: Any, path: Path) -> None:
        """One layout for every array below; numbers count as arrays only where the layout is theirs alone."""
        alone = children(node) is None
        leaves = list(_leaves(node, path))
        if leaves and not alone and not any(is_array(leaf.value) or is_foreign(leaf.value) for leaf in leaves):
            numbers = all(is_number(leaf.value) for leaf in leaves)
            hint = "; numpy.asarray makes an array of numbers" if numbers else ""
            self.fail(path, f"the layout '{layout}' is for arrays, but here is {_describe(node)} without one{hint}")
        for leaf in leaves:
            fits = is_array(leaf.value) or (alone and is_number(leaf.value))
            own = SCALAR if _rankless(leaf.value) and not alone and not _fits(layout, 0) else layout
            self.found.append((self.place(leaf.path), leaf.value, own if fits else None))
            if is_foreign(leaf.value) and not alone:
                self.fail(leaf.path, f"the layout '{layout}' is for arrays, but here is {_describe(leaf.value)}")
            if alone and not fits:
                self.fail(path, f"the layout '{layout}' is for an array, but here is {_describe(node)}")

    def by_key(self, spec: Any, node: Any, path: Path) -> None:
        entries = _entries(spec)
        below = children(node)
        if entries is None:
            self.fail(path, f"layouts are strings, Layouts, or containers of them, not {_kind(spec)}")
            return
        if below is None:
            self.leaf(spec, entries, node, path)
            return
        keys = {_name(key): key for key, _ in below}
        if isinstance(spec, (list, tuple)) and not hasattr(spec, "_fields") and len(below) != len(entries):
            self.fail(path, f"{len(entries)} layouts for {_describe(node)}")
            return
        for key, child in below:
            name = _name(key)
            if name in entries:
                self.match(entries[name], child, (*path, key))
                continue
            if self.bare(child, (*path, key)):
                hint = did_you_mean(name, entries)
                self.fail(
                    (*path, key),
                    f"no layout among {_listed(list(entries))}, but here is {_describe(child)}{hint}",
                )
        for name, entry in entries.items():
            # a static field is an attribute and no child; its annotation says nothing that could be wrong
            if node is None or name in keys or not (isinstance(entry, (str, Layout)) or _written_in(spec, entry)):
                continue
            if isinstance(node, Mapping) or inspect.getattr_static(node, name, None) is None:
                hint = _RULES if "*" in name else did_you_mean(name, keys)
                self.fail(path, f"a layout for {name!r}, but here is {_describe(node)}{hint}")

    def leaf(self, spec: Any, entries: Mapping[str, Any], node: Any, path: Path) -> None:
        """A container of layouts where the tree has a leaf."""
        scalar = _rankless(node) and isinstance(spec, type) and not entries
        self.found.append((self.place(path), node, SCALAR if scalar else None))
        if scalar:  # annotated as an array, and of one layout only
            return
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            name = type(node).__name__
            self.fail(path, f"{name} is no pytree; register it: @jax.tree_util.register_dataclass")
        elif is_array(node) or not isinstance(spec, type):
            given = (
                f"layouts for {_listed(list(entries))} ({_kind(spec)})" if entries else f"{_kind(spec)} has no layouts"
            )
            self.fail(path, f"{given}, but here is {_describe(node)}")


def _written_in(spec: Any, entry: Any) -> bool:
    """Whether an entry of a dict of layouts is itself a container with layouts in it."""
    leaves = jax.tree.leaves(entry, is_leaf=lambda one: isinstance(one, Layout))
    return isinstance(spec, Mapping) and any(isinstance(one, (str, Layout)) for one in leaves)


def _kind(spec: Any) -> str:
    return f"the class {spec.__name__}" if isinstance(spec, type) else _article(type(spec).__name__)


def _entries(spec: Any) -> dict[str, Any] | None:
    """The entries of a container of layouts by name; None if it is none."""
    if isinstance(spec, type):
        return annotated(spec)
    if isinstance(spec, Mapping):
        return {str(key): value for key, value in spec.items()}
    if isinstance(spec, tuple) and (fields := getattr(spec, "_fields", None)):
        return dict(zip(fields, spec, strict=True))
    if isinstance(spec, (list, tuple)):
        return {str(place): value for place, value in enumerate(spec)}
    below = children(spec)
    if below is not None:
        return {_name(key): child for key, child in below}
    if dataclasses.is_dataclass(spec):
        return {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}
    return None


# --- layouts in annotations ----------------------------------------------------------------------------


def annotated(cls: type) -> dict[str, Any]:
    """What the annotations of a class and its bases say: layouts, classes with annotations, or containers of them."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules.get(base.__module__, types))
        for name, annotation in inspect.get_annotations(base).items():
            spec = _annotation(annotation, base, space)
            if spec is not typing.ClassVar:
                found[name] = spec
    return found


def _annotation(annotation: Any, cls: type, space: Mapping[str, Any]) -> Any:
    """One annotation as layouts: a string, a class with annotations, or a container of either."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return _annotation_text(annotation, cls, space)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is typing.ClassVar or origin is typing.ClassVar:
        return typing.ClassVar
    if origin is typing.Annotated:
        texts = [one for one in arguments[1:] if isinstance(one, (str, Layout))]
        return texts[0] if texts else _annotation(arguments[0], cls, space)
    if origin in (typing.Union, types.UnionType):
        rest = [one for one in arguments if one is not type(None)]
        return _annotation(rest[0], cls, space) if len(rest) == 1 else Unknown(str(annotation))
    if isinstance(origin, type) and arguments:
        specs = [_annotation(one, cls, space) for one in arguments if one is not ...]
        if origin is tuple and ... not in arguments:
            return tuple(specs)
        return Each(specs[-1])
    return annotation if isinstance(annotation, (type, Layout)) else Unknown(str(annotation))


def _annotation_text(text: str, cls: type, space: Mapping[str, Any]) -> Any:
    """An annotation that is a string: a layout, or (under `from __future__ import annotations`) code."""
    postponed = space.get("annotations") is __future__.annotations
    if not postponed:
        known = space.get(text.strip())
        return known if isinstance(known, type) else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if isinstance(value, str):
        known = space.get(value.strip())
        return known if isinstance(known, type) else value
    try:
        # what typing.get_type_hints does, one annotation at a time: layouts are no types
        value = eval(text, dict(space), dict(vars(cls)))
    except Exception:
        return Unknown(text)
    return _annotation(value, cls, space)
