"""Layouts in the annotations of a class: `w: "d/dp f/tp"`, also under `from __future__ import annotations`."""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from spmd.language import Layout


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
