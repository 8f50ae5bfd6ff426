"""A program whose collectives run in groups of a mesh axis, as one over a mesh that has two axes in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from spmd._jaxprs.walker import Equation, axes_of, equations, opened

Factors = Mapping[str, tuple[int, int]]  # of an axis: how many groups of neighbours it has, and how large each is
_AXES = frozenset(("axis_name", "axes", "newly_manual_axes", "manual_axes", "axis_names", "auto"))


def factors_of(jaxpr: Any, sizes: Mapping[str, int]) -> Factors:
    """The axes whose groups are neighbours, or whose groups have one of each of them; not those of other groups.

    Args:
      jaxpr: The program.
      sizes: The mesh axes.
    """
    found: dict[str, set[tuple[int, int] | None]] = {}
    for eqn in equations(jaxpr):
        if eqn.params.get("axis_index_groups") is not None:
            axes = axes_of(eqn)
            found.setdefault(axes[0], set()).add(_factors(eqn, sizes[axes[0]]) if len(axes) == 1 else None)
    return {axis: one for axis, (one, *others) in ((a, tuple(b)) for a, b in found.items()) if one and not others}


def name_of(axis: str, place: int) -> str:
    """Return what a factor of an axis is called."""
    return f"{axis}{place}"


def in_factors(jaxpr: Any, factors: Factors) -> Any:
    """The program on a mesh with two axes in place of each: a group is all of one of them."""
    inner, _ = opened(jaxpr)
    eqns = [eqn.replace(params=_params(eqn, factors)) for eqn in inner.eqns]
    made = inner.replace(eqns=eqns)
    return made if inner is jaxpr else jaxpr.replace(jaxpr=made)


def _factors(eqn: Equation, count: int) -> tuple[int, int] | None:
    """Return how many groups of neighbours there are, and how large they are; the equation is within these or across
    them."""
    groups = np.asarray(eqn.params["axis_index_groups"])
    size = groups.shape[-1]
    if np.array_equal(groups, np.arange(count).reshape(-1, size)):
        return count // size, size
    return (size, count // size) if np.array_equal(groups, np.arange(count).reshape(size, -1).T) else None


def _params(eqn: Equation, factors: Factors) -> dict[str, Any]:
    params, groups = dict(eqn.params), eqn.params.get("axis_index_groups")
    if groups is not None:
        [axis] = axes_of(eqn)
        if axis in factors:
            within = np.asarray(groups)[0, :2].tolist() == [0, 1] and len(groups[0]) == factors[axis][1]
            one = (name_of(axis, 1 if within else 0),)
            size = {"axis_size": len(groups[0])} if "axis_size" in params else {}
            named = {key: one for key in ("axis_name", "axes") if key in params}
            return {**params, **named, **size, "axis_index_groups": None}
    return {key: _value(key, value, factors) for key, value in params.items()}


def _value(key: str, value: Any, factors: Factors) -> Any:
    if key in _AXES:
        axes = [value] if isinstance(value, str) else list(value)
        if not any(axis in factors for axis in axes):
            return value
        made = expanded(axes, factors)
        return frozenset(made) if isinstance(value, frozenset) else made
    if isinstance(value, PartitionSpec):
        entries = [entry if entry is None else expanded(_names(entry), factors) for entry in value]
        return PartitionSpec(*entries)
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return _mesh(value, factors)
    if isinstance(value, tuple | list):
        return type(value)(_value("", one, factors) for one in value)
    return in_factors(value, factors) if hasattr(getattr(value, "jaxpr", value), "eqns") else value


def _names(entry: Any) -> Sequence[Any]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


def expanded(axes: Sequence[Any], factors: Factors) -> tuple[Any, ...]:
    """Axes with the factors of each in its place."""
    return tuple(one for axis in axes for one in ((name_of(axis, 0), name_of(axis, 1)) if axis in factors else (axis,)))


def sizes_of(sizes: Mapping[str, int], factors: Factors) -> dict[str, int]:
    """The axes of the mesh with factors."""
    return {
        one: size
        for axis in sizes
        for one, size in zip(expanded((axis,), factors), factors.get(axis, (sizes[axis],)), strict=True)
    }


def _mesh(mesh: Any, factors: Factors) -> Any:
    sizes = sizes_of(dict(mesh.shape), factors)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    types = [kind for axis, kind in kinds.items() for _ in expanded((axis,), factors)]
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=tuple(types))


__all__ = ["Factors", "expanded", "factors_of", "in_factors", "name_of", "sizes_of"]
