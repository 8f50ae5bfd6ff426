"""Which mesh axes the bodies of a program leave to the compiler: those that no `shard_map` around them makes manual."""

from __future__ import annotations

from typing import Any

from spmd import _compat
from spmd._jaxprs.walker import Role, held, opened


def left_axes(jaxpr: Any) -> dict[str, tuple[str, ...]]:
    """For each mesh axis, the kernels or functions that run per shard and leave it to the compiler.

    Args:
      jaxpr: The whole program.
    """
    found: dict[str, dict[str, None]] = {}
    _enter(jaxpr, frozenset(), "", found)
    return {axis: tuple(names) for axis, names in found.items()}


def _enter(jaxpr: Any, manual: frozenset[str], name: str, found: dict[str, dict[str, None]]) -> bool:
    """Look into a jaxpr. Returns whether a `shard_map` in it makes more axes manual."""
    deeper = False
    for eqn in opened(jaxpr)[0].eqns:
        around = eqn.params.get("name") or name
        inside = manual
        if eqn.primitive.name == "shard_map":
            deeper = True
            inside = manual | set(_compat.made_manual(eqn))
        for part in held(eqn) if eqn.params else ():
            if part.role == Role.DERIVATIVE:
                continue
            more = _enter(part.jaxpr, inside, around, found)
            deeper = deeper or more
            if eqn.primitive.name == "shard_map" and not more:
                own = getattr(opened(part.jaxpr)[0].debug_info, "func_name", "") or "shard_map"
                for axis, size in eqn.params["mesh"].shape.items():
                    if axis not in inside and size > 1:
                        found.setdefault(axis, {})[around or own] = None
    return deeper


def left_text(left: dict[str, tuple[str, ...]]) -> list[str]:
    """One sentence for each axis."""
    return [f"{axis} is the compiler's in {', '.join(names)}" for axis, names in left.items()]
