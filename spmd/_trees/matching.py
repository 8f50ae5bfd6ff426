"""Layouts of whole trees: by rules over paths (`match_layouts`), and by a prefix tree (`match_prefix`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from spmd import _compat
from spmd._python.rooms import nearest
from spmd._trees.leaves import (
    SCALAR,
    Each,
    LeafAt,
    Path,
    Unknown,
    annotated,
    children,
    described,
    has_room,
    is_array,
    is_foreign,
    is_number,
    key_name,
    leaves_of,
    listed,
    rankless,
    with_article,
)
from spmd.errors import LayoutError, did_you_mean
from spmd.language import Layout, check_length

# --- rules over paths ----------------------------------------------------------------------------------


def match_layouts(tree: Any, rules: Mapping[str, str | Layout]) -> Any:
    """Give each array of a tree its layout, by rules over paths.

    A path is the keys from the root joined with "/": dict keys, field names, indices.  In a rule `*`
    stands for anything within one part, `**` for any number of parts.  The rule `**` alone is the catch-all
    for what no other rule matches. An array without dimensions needs no rule: its layout is `scalar`.

    Args:
      tree: Arrays, or anything with a shape and a dtype, in dicts, sequences, dataclasses, modules.
      rules: A layout for each path pattern.

    Returns:
      The same tree with a Layout for each array and None for any other leaf.

    Raises:
      LayoutError: If an array without a rule, a rule without an array, two rules that disagree, a rank that
        differs; all of them at once.

    >>> import jax.numpy as jnp
    >>> params = {"norm": {"scale": jnp.ones(4)}, "mlp": {"w_in": jnp.ones((4, 8))}}
    >>> match_layouts(params, {"**/w_in": "d/dp f/tp", "norm/*": "d"})
    {'mlp': {'w_in': Layout('d/dp f/tp')}, 'norm': {'scale': Layout('d')}}
    """
    if not isinstance(rules, Mapping) or not all(isinstance(rule, str) for rule in rules):
        raise LayoutError(
            "The rules are a dict from path patterns to layouts.",
            call="match_layouts(tree, rules)",
            advice='match_layouts(tree, {"**": "b d"}) for one layout everywhere',
        )
    for rule in rules:
        check_length(rule, "match_layouts(tree, rules)")
    read = {rule: Layout(text, call=f"{rule!r}: {text!r}") for rule, text in rules.items()}
    leaves = list(leaves_of(tree))
    used: set[str] = set()
    failures: list[str] = []
    found: list[Layout | None] = []
    for leaf in leaves:
        matching = [rule for rule in read if _matches(rule, leaf.parts)] if is_array(leaf.value) else []
        used.update(matching)
        matching = [rule for rule in matching if rule != "**"] or matching
        if rankless(leaf.value) and (not matching or (matching == ["**"] and not has_room(read["**"], 0))):
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
        raise LayoutError(rule, call="match_layouts(tree, rules)", got=failures)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), found)


def _leaf_failures(leaf: LeafAt, matching: list[str], read: Mapping[str, Layout]) -> list[str]:
    path = "/".join(leaf.parts) or "(the tree itself)"
    if not matching:
        return [f"no rule for {path}, {described(leaf.value)}{_near(path, list(read))}"]
    differing = [rule for rule in matching if read[rule] != read[matching[0]]]
    if differing:
        both = " and ".join(f"{rule!r}: '{read[rule]}'" for rule in (matching[0], differing[0]))
        return [f"two rules disagree on {path}: {both}"]
    layout = read[matching[0]]
    if has_room(layout, len(leaf.value.shape)):
        return []
    return [f"rule {matching[0]!r}: '{layout}' does not fit the rank of {path}, {described(leaf.value)}"]


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
    rule = re.sub(r"(?<![^/])(\*\*/)+", "**/", rule)  # of several, each would try what the others leave
    for part in rule.split("/"):
        inner = "".join("[^/]*" if one == "*" else "[^/]" if one == "?" else re.escape(one) for one in part)
        pieces.append("(?:[^/]*/)*" if part == "**" else f"{inner}/")
    return re.compile("".join(pieces))


# --- a prefix tree of layouts --------------------------------------------------------------------------


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
    below that has no room for them. Leaves that are not arrays have no layout. A number has a layout only if it has one
    of its own.

    Args:
      layouts_tree: A string or Layout (for every array below), a dict, a sequence, a dataclass or module,
        a class whose annotations are layouts, a function from the tree to one of these, or None.
      tree: The values.
      what: The name of the tree in messages.

    Raises:
      LayoutError: If a layout is malformed.
    """
    matcher = _Matcher(what)
    matcher.match(layouts_tree, tree, ())
    return Matched(matcher.found, matcher.failures)


def match_prefix(
    layouts_tree: Any, tree: Any, what: str, call: str | None = None
) -> list[tuple[str, Any, Layout | None]]:
    """`matched`, where a tree that does not fit is an error.

    Args:
      layouts_tree: As in `matched`.
      tree: The values.
      what: The name of the tree in messages.
      call: The call, for messages.

    Returns:
      For each leaf of `jax.tree.leaves(tree)`: its path, itself, its layout (None: no array).

    Raises:
      LayoutError: If the structures differ; all places at once.

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


_RULES = "; rules over paths are for layouts: lambda tree: spmd.match_layouts(tree, {...})"


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
                self.fail(path, f"its annotation is a container, but here is {described(node)}")
        elif not isinstance(spec, type) and _entries(spec) is None and callable(spec):
            self.match(spec(node), node, path)
        else:
            self.by_key(spec, node, path)

    def nothing(self, spec: Unknown | None, node: Any, path: Path) -> None:
        """No layout: legal where there is no array, or one that can lie in one way only."""
        given = "None" if spec is None else f"the annotation {spec.text}"
        for leaf in self.bare(node, path):
            self.fail(leaf.path, f"{given} is not a layout, but here is {described(leaf.value)}")

    def bare(self, node: Any, path: Path) -> list[LeafAt]:
        """Record the leaves of a place without layouts; give back the arrays that need one."""
        missing = []
        for leaf in leaves_of(node, path):
            alone = rankless(leaf.value)
            self.found.append((self.place(leaf.path), leaf.value, SCALAR if alone else None))
            if is_array(leaf.value) and not alone:
                missing.append(leaf)
        return missing

    def everything(self, layout: Layout, node: Any, path: Path) -> None:
        """One layout for every array below; numbers count as arrays only where the layout is theirs alone."""
        if isinstance(node, jax.Array):
            self.found.append((self.place(path), node, layout))
            return
        alone = children(node) is None
        leaves = list(leaves_of(node, path))
        if leaves and not alone and not any(is_array(leaf.value) or is_foreign(leaf.value) for leaf in leaves):
            hint = _hint_for([leaf.value for leaf in leaves], layout)
            self.fail(path, f"the layout '{layout}' is for arrays, but here is {described(node)} without one{hint}")
        for leaf in leaves:
            fits = is_array(leaf.value) or (alone and is_number(leaf.value))
            own = SCALAR if rankless(leaf.value) and not alone and not has_room(layout, 0) else layout
            self.found.append((self.place(leaf.path), leaf.value, own if fits else None))
            if is_foreign(leaf.value) and not alone:
                self.fail(leaf.path, f"the layout '{layout}' is for arrays, but here is {described(leaf.value)}")
            if alone and not fits:
                self.fail(path, f"the layout '{layout}' is for an array, but here is {described(node)}")

    def by_key(self, spec: Any, node: Any, path: Path) -> None:
        entries = _entries(spec)
        below = children(node)
        if entries is None:
            kind = _kind(spec)
            if isinstance(spec, PartitionSpec):
                rank = np.ndim(node) if is_array(node) else 0
                kind = f'a PartitionSpec; did you mean "{layout_of_spec(spec, rank)}"?'
            self.fail(path, f"layouts are strings, Layouts, or containers of them, not {kind}")
            return
        if below is None:
            self.leaf(spec, entries, node, path)
            return
        keys = {key_name(key): key for key, _ in below}
        if isinstance(spec, (list, tuple)) and not hasattr(spec, "_fields") and len(below) != len(entries):
            self.fail(path, f"{len(entries)} layouts for {described(node)}")
            return
        for key, child in below:
            name = key_name(key)
            if name in entries:
                self.match(entries[name], child, (*path, key))
                continue
            if self.bare(child, (*path, key)):
                hint = did_you_mean(name, entries)
                self.fail(
                    (*path, key),
                    f"{described(child)} has no layout; there are layouts for {listed(list(entries))}{hint}",
                )
        for name, entry in entries.items():
            # a static field is an attribute and no child; its annotation says nothing that could be wrong
            if node is None or name in keys or not (isinstance(entry, (str, Layout)) or _written_in(spec, entry)):
                continue
            if isinstance(node, Mapping) or inspect.getattr_static(node, name, None) is None:
                hint = _RULES if "*" in name else did_you_mean(name, keys)
                self.fail(path, f"a layout for {name!r}, but here is {described(node)}{hint}")

    def leaf(self, spec: Any, entries: Mapping[str, Any], node: Any, path: Path) -> None:
        """A container of layouts where the tree has a leaf."""
        scalar = rankless(node) and isinstance(spec, type) and not entries
        self.found.append((self.place(path), node, SCALAR if scalar else None))
        if scalar:  # annotated as an array, and of one layout only
            return
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            name = type(node).__name__
            self.fail(path, f"{name} is not a pytree; register it: @jax.tree_util.register_dataclass")
        elif is_array(node) or not isinstance(spec, type):
            given = (
                f"layouts for {listed(list(entries))} ({_kind(spec)})" if entries else f"{_kind(spec)} has no layouts"
            )
            self.fail(path, f"{given}, but here is {described(node)}")


def _hint_for(values: Sequence[Any], layout: Layout) -> str:
    """Return what numbers that stand where an array belongs may be meant for: a shape, or an array."""
    if all(type(n) is int for n in values) and has_room(layout, len(values)):
        shape = f"({', '.join(map(str, values))}{',' * (len(values) == 1)})"
        return f"; of a shape, spmd.check and spmd.explain take jax.ShapeDtypeStruct({shape}, dtype)"
    return "; numpy.asarray makes an array of numbers" if all(map(is_number, values)) else ""


def _written_in(spec: Any, entry: Any) -> bool:
    """Return whether an entry of a dict of layouts is itself a container with layouts in it."""
    leaves = jax.tree.leaves(entry, is_leaf=lambda one: isinstance(one, Layout))
    return isinstance(spec, Mapping) and any(isinstance(one, (str, Layout)) for one in leaves)


def layout_of_spec(spec: PartitionSpec, rank: int = 0) -> str:
    """Return what a spec says of the dimensions up to `rank`, as a layout without names."""
    entries = _compat.partitions(spec, rank)
    dims = ["/".join(("_", *((one,) if isinstance(one, str) else one or ()))) for one in entries]
    return " ".join(dims) or "scalar"


def _kind(spec: Any) -> str:
    return f"the class {spec.__name__}" if isinstance(spec, type) else with_article(type(spec).__name__)


def _entries(spec: Any) -> dict[str, Any] | None:
    """The entries of a container of layouts by name; None for anything else."""
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
        return {key_name(key): child for key, child in below}
    if dataclasses.is_dataclass(spec):
        return {one.name: getattr(spec, one.name) for one in dataclasses.fields(spec)}
    return None
