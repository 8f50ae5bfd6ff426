"""The leaves of a tree: which are arrays, what is static, where they stand, their names and annotated layouts."""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from spmd.errors import LayoutError, is_int
from spmd.language import Layout

Path = tuple[Any, ...]


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array: it has a shape and a dtype (a ShapeDtypeStruct has), one that JAX has too."""
    shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
    return shaped and not is_foreign(leaf)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of `jax.random` keys, or stands for one."""
    return hasattr(leaf, "dtype") and is_key_type(leaf.dtype)


def is_key_type(dtype: Any) -> bool:
    """Return whether a dtype is that of `jax.random` keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def is_foreign(leaf: Any) -> bool:
    """Return whether a leaf is a NumPy array that JAX does not compute with: strings, objects, dates, records, long
    floats."""
    return isinstance(leaf, (np.ndarray, np.generic)) and not _held(leaf.dtype)


def foreign_kind(leaf: Any) -> str | None:
    """Return what a leaf is, in a message, if JAX cannot make it an array to compute with."""
    if is_foreign(leaf):
        return f"a NumPy array of dtype {leaf.dtype}, which JAX does not compute with"
    if not isinstance(leaf, int) or _fits_integers(leaf):
        return None
    held = jax.dtypes.canonicalize_dtype(int)
    wider = held.itemsize < 8 and -(2**63) <= leaf < 2**63
    return f"an int that {held} does not hold" + (" without jax_enable_x64" if wider else "")


def held_dtype(x: Any) -> Any:
    """The dtype in which JAX holds an array: int32 for NumPy's int64, without jax_enable_x64."""
    return jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)


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


def kind_of(value: Any) -> str:
    """Return what messages call a value. They never show the value itself, or a class that users do not know."""
    if isinstance(value, jax.core.Tracer):
        return "a traced array"
    if foreign := foreign_kind(value):
        return foreign
    if isinstance(value, (jax.Array, np.ndarray)):
        return "an array"
    if hasattr(value, "__name__") and callable(value) and not isinstance(value, type):  # a mesh is callable
        return "a function"
    return "None" if value is None else with_article(type(value).__name__)


def not_int(what: str, value: Any, least: int | None = None, more: str = "") -> str:
    """The rule for an argument that is not an integer, or is below `least`. It is empty for one that obeys.

    Args:
      what: The argument.
      value: What was given.
      least: The smallest number that is allowed; None for any.
      more: What else it can be.

    >>> not_int("chunks", 0, 1)
    'chunks is an int of at least 1, not 0.'
    >>> not_int("repeats", 1.5, 1, "None"), not_int("repeats", 2, 1)
    ('repeats is an int of at least 1, or None, not 1.5.', '')
    """
    if is_int(value, least):
        return ""
    bound, other = "" if least is None else f" of at least {least}", f", or {more}" if more else ""
    given = repr(value) if isinstance(value, str | int | float) else kind_of(value)
    return f"{what} is an int{bound}{other}, not {given}."


def is_number(leaf: Any) -> bool:
    """Return whether a leaf is a number of Python's own, which a layout of its own makes an array."""
    return isinstance(leaf, (float, complex)) or (isinstance(leaf, int) and _fits_integers(leaf))


@jax.tree_util.register_static
class Static:
    """Leaves that are not arrays, on their way through `jit` as part of the structure. 1, 1.0 and True differ here."""

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
        except (TypeError, ValueError):  # NumPy arrays compare element by element
            return False


def wrapped(tree: Any) -> Any:
    """A tree that `jit` takes and gives: what is neither array nor number is a part of its structure."""
    return jax.tree.map(lambda x: x if is_array(x) or is_number(x) else Static((x,)), tree)


def check_hashable(tree: Any, call: str) -> None:
    """Complain about leaves of a `wrapped` tree that cannot be a part of a compiled program.

    Raises:
      LayoutError: If one is not hashable.
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


def rankless(leaf: Any) -> bool:
    return is_array(leaf) and len(leaf.shape) == 0


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The keys and children of a pytree node, in JAX's order; None for a leaf."""
    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda one: one is not node)[0]
    if len(flat) == 1 and not flat[0][0]:
        return None
    return [(path[0], child) for path, child in flat]


def key_name(key: Any) -> str:
    """A key of a path as one part of it."""
    if isinstance(key, (DictKey, FlattenedIndexKey)):
        return str(key.key)
    if isinstance(key, GetAttrKey):
        return key.name
    return str(key.idx) if isinstance(key, SequenceKey) else str(key)


def _is_box(node: Any) -> bool:
    """Return whether a node is a Flax variable, whose one child `value` nobody writes in a path."""
    return any(one.__name__ == "Variable" and one.__module__.startswith("flax") for one in type(node).__mro__)


class LeafAt(NamedTuple):
    path: Path
    parts: tuple[str, ...]
    value: Any


def leaves_of(node: Any, path: Path = (), parts: tuple[str, ...] = ()) -> Iterator[LeafAt]:
    """All leaves, in the order of jax.tree.leaves."""
    below = children(node)
    if below is None:
        yield LeafAt(path, parts, node)
        return
    boxed = _is_box(node)
    for key, child in below:
        yield from leaves_of(child, (*path, key), parts if boxed else (*parts, key_name(key)))


def described(node: Any) -> str:
    """Return what stands at a place of a tree, without values."""
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
    return f"{with_article(kind)} with {listed([key_name(key) for key, _ in below])}"


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiouAEIO" else f"a {noun}"


def listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return shown or "no entries"


def by_path(fn: Callable[[str], Any], tree: Any) -> Any:
    """The same tree with `fn("mlp/w_in")` for each array, and None for any other leaf.

    >>> by_path(str.upper, {"w": jax.numpy.ones(2), "name": "mlp"})
    {'name': None, 'w': 'W'}
    """
    found = [fn("/".join(leaf.parts)) if is_array(leaf.value) else None for leaf in leaves_of(tree)]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), found)


def has_room(layout: Layout, rank: int) -> bool:
    """Return whether an array of this rank can lie so."""
    least = sum(not dim.ellipsis for dim in layout.dims)
    return rank == least or (layout.has_ellipsis and rank > least)


# --- annotations -------------------------------------------------------------------------------------------------

# Layouts in the annotations of a class: `w: "d/dp f/tp"`, also under `from __future__ import annotations`.


class Each(NamedTuple):
    """The layouts of every entry of a container, from an annotation such as `list[Block]`."""

    spec: Any


class Unknown(NamedTuple):
    """An annotation that names no layout (or a class defined where it cannot be looked up)."""

    text: str


def annotated(cls: type) -> dict[str, Any]:
    """Return what the annotations of a class and its bases say: layouts, classes with annotations, or containers of
    them."""
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
        # what typing.get_type_hints does, one annotation at a time: layouts are not types
        value = eval(text, dict(space), dict(vars(cls)))
    except Exception:
        return Unknown(text)
    return _annotation(value, cls, {**space, "annotations": None})  # a string inside is a layout, not code again
