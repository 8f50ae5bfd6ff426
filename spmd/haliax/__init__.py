"""Placement by named axes, with Haliax's function names: a thin layer on plain arrays with layout strings.

Haliax arrays carry their axis names. Here layouts give the names, so every function takes `names`: a string for an
array (`"batch embed"`), a prefix tree of strings for a tree of arrays, a class or dataclass with layouts as
annotations, or a function from a leaf's key path (`"mlp/w_in"`) to its string. (`pspec_for` and `sharding_for_axis` get
no tree, so they do not take a function.) The mapping places bare names. These functions report what Haliax ignores
silently: a name that is not in the mapping, a missing mesh or mapping, and a big array that stays whole.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from spmd._python.rooms import open_room
from spmd.haliax._placement import (
    WholeArrayWarning,
    auto_sharded,
    fsdp,
    named_jit,
    physical_axis_name,
    physical_axis_size,
    pspec_for,
    round_axis_for_partitioning,
    shard,
    shard_with_axis_mapping,
    sharding_for_axis,
)
from spmd.modes import axis_mapping

ResourceMapping: TypeAlias = Mapping[str, str | Sequence[str] | None]
"""The mesh axes of named dimensions: one, several, or None for whole. An `AxisMapping` or a dict."""

__all__ = [
    "ResourceMapping",
    "WholeArrayWarning",
    "auto_sharded",
    "axis_mapping",
    "fsdp",
    "named_jit",
    "physical_axis_name",
    "physical_axis_size",
    "pspec_for",
    "round_axis_for_partitioning",
    "shard",
    "shard_with_axis_mapping",
    "sharding_for_axis",
]

open_room(globals())
