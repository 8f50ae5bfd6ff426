"""Placement by named axes, under the names that Haliax users know: thin, on plain arrays with layout strings.

Haliax arrays carry their axis names; here layouts say them, so every function takes `names`: a string for an array
(`"batch embed"`), a prefix tree of strings for a tree of arrays, a class or dataclass whose annotations are layouts,
or a function from a leaf's key path (`"mlp/w_in"`) to its string. (`pspec_for` and `sharding_for_axis` are given no
tree, so they take all but the function.) A bare name lies where the mapping says. What
Haliax passes over in silence is reported: a name that the mapping lacks, a mesh or a mapping that is missing, a big
array that stays whole.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from spmd.haliax._jit import fsdp, named_jit
from spmd.haliax._placement import WholeArrayWarning, auto_sharded, shard, shard_with_axis_mapping
from spmd.haliax._queries import (
    physical_axis_name,
    physical_axis_size,
    pspec_for,
    round_axis_for_partitioning,
    sharding_for_axis,
)
from spmd.modes import axis_mapping

ResourceMapping: TypeAlias = Mapping[str, str | Sequence[str] | None]
"""Where named dimensions live: a mesh axis, several, or None for whole. An `AxisMapping` or a dict."""

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
