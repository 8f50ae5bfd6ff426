"""The functions of `spmd.nn` and `spmd.parallel` that a call comes from: the user called those, and not the verb."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from types import CodeType

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS = {os.path.join(_HERE, room) + os.sep: f"spmd.{room}" for room in ("nn", "parallel")}


def layers_of(codes: Iterable[CodeType]) -> list[str]:
    """Their names, such as `nn.mlp`, in the order of the calls that were running."""
    found = []
    for code in codes:
        room = next((room for folder, room in _ROOMS.items() if code.co_filename.startswith(folder)), None)
        if room is not None and code.co_name in getattr(sys.modules.get(room), "__all__", ()):
            found.append(f"{room.removeprefix('spmd.')}.{code.co_name}")
    return found


def layer_now() -> str | None:
    """The layer that the user's line calls now."""
    found = layers_of(_running())
    return found[-1] if found else None


def _running() -> Iterator[CodeType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def rather_told(layer: str, have: str, fix: str) -> str:
    """Advice in place of a fix that sends what a layer is given: the layer may be told how that lies.

    Args:
      layer: The layer.
      have: How the array lies.
      fix: The call that would move it.
    """
    names = _axis_keywords(layer)
    told = f"{' or '.join(names)} of {layer}, if one is for this axis"
    if not names:
        told = f'"{have}" where {layer} is told how it lies'
    return f"{told}; or else {fix} before it"


def _axis_keywords(layer: str) -> list[str]:
    """The keywords that tell a layer which mesh axes divide its arguments, such as `tp=`."""
    room, _, name = layer.partition(".")
    parameters = inspect.signature(getattr(sys.modules[f"spmd.{room}"], name)).parameters.values()
    return [f"{one.name}=" for one in parameters if str(one.annotation).startswith(("Axes", "str | tuple[str, ...]"))]
