"""The axes that steps name: those of the mesh, where it pays in parts (an axis of 4 as two of 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax import lax

__all__ = ["Axes", "Grid"]

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The devices, numbered by axes and parts of axes.

    Attributes:
      mesh: Names with their sizes, in mesh order; an axis in parts is replaced by them, the major one first.
      parts: Each part with its axis.
    """

    mesh: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, str], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @cached_property
    def part_of(self) -> dict[str, str]:
        return dict(self.parts)

    def whole(self, names: Sequence[str]) -> Axes:
        """The mesh axes that these are or are parts of, in mesh order."""
        wanted = {self.part_of.get(a, a) for a in names}
        return tuple(dict.fromkeys(axis for a in self.sizes if (axis := self.part_of.get(a, a)) in wanted))

    def named(self, axes: Sequence[str]) -> Axes:
        """Axes by the names that are used here."""
        return tuple(a for axis in axes for a in self.sizes if self.part_of.get(a, a) == axis)

    def count(self, names: Sequence[str]) -> int:
        """How many devices they number."""
        return math.prod(self.sizes[a] for a in names)

    def lines(self, names: Sequence[str]) -> np.ndarray:
        """The devices that differ along `names` only, one group a row in the order of `names`; devices are numbered as
        JAX does along whole axes in mesh order."""
        axes = self.whole(names)
        members = [a for a in self.sizes if self.part_of.get(a, a) in axes]
        numbers = np.arange(self.count(members)).reshape([self.sizes[a] for a in members])
        others = [i for i, a in enumerate(members) if a not in names]
        return numbers.transpose([*others, *(members.index(a) for a in names)]).reshape(-1, self.count(names))

    def group(self, names: Sequence[str]) -> tuple[Axes, list[list[int]] | None]:
        """The axes of a collective over `names`, and its groups where those are no whole axes."""
        lines = self.lines(names)
        return self.whole(names), None if len(lines) == 1 else lines.tolist()

    def index(self, name: str) -> Any:
        """Where this device is along one name."""
        axis = self.part_of.get(name, name)
        behind = [a for a in self.sizes if self.part_of.get(a, a) == axis]
        inner = self.count(behind[behind.index(name) + 1 :])
        index = lax.axis_index(axis)
        return index if axis == name else index // inner % self.sizes[name]

    def number(self, names: Sequence[str]) -> Any:
        """Where this device is along several, the first being the major one."""
        number: Any = 0
        for name in names:
            number = number * self.sizes[name] + self.index(name)
        return number
