"""Mesh axes as bits, and the record of where a difference or a gathered copy came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class AxisBits:
    """Numbers the axis names in the order in which they are met."""

    def __init__(self, names: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        self.sizes = dict(sizes or {})
        self._bits: dict[str, int] = {}
        for name in names:
            self.bit(name)

    def bit(self, name: str) -> int:
        """The mask of one axis."""
        found = self._bits.get(name)
        if found is None:
            found = self._bits[name] = 1 << len(self._bits)
        return found

    def mask(self, names: Any) -> int:
        """The mask of one axis or several. Integers are dims of a vmapped array, not axes of the mesh."""
        if isinstance(names, str):
            return self.bit(names)
        if not isinstance(names, tuple | list | set | frozenset):
            return 0
        result = 0
        for name in names:
            result |= self.mask(name)
        return result

    def names(self, mask: int) -> tuple[str, ...]:
        """The axes of a mask, in order."""
        return tuple(name for name, bit in self._bits.items() if mask & bit)

    def unit(self) -> int:
        """The mask of the axes known to have size 1, along which nothing can differ."""
        return self.mask([name for name, size in self.sizes.items() if size == 1])


@dataclass(frozen=True)
class Origin:
    """One reason why a value is as it is on one axis."""

    kind: str  # "input", "gather", or the name of the primitive
    axis: str
    label: str = ""
    eqn: Any = None
    callers: tuple[Any, ...] = ()


class Origins:
    """One bit per reason and axis, so that a collective over an axis forgets that axis only."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, str], int] = {}
        self._list: list[Origin] = []
        self._by_axis: dict[str, int] = {}

    def bit(self, key: object, make: Origin) -> int:
        """The bit of this reason, the same each time the key comes back."""
        found = self._known.get((key, make.axis))
        if found is None:
            found = self._known[key, make.axis] = 1 << len(self._list)
            self._list.append(make)
            self._by_axis[make.axis] = self._by_axis.get(make.axis, 0) | found
        return found

    def without(self, mask: int, axes: Iterable[str]) -> int:
        """`mask` without the reasons that concern these axes."""
        for axis in axes:
            mask &= ~self._by_axis.get(axis, 0)
        return mask

    def of(self, mask: int, axis: str, kind: str | None = None) -> list[Origin]:
        """The reasons in `mask` for this axis, oldest first; gathers only when asked for."""
        mask &= self._by_axis.get(axis, 0)
        found = [origin for i, origin in enumerate(self._list) if mask >> i & 1]
        if kind is None:
            return [origin for origin in found if origin.kind != "gather"]
        return [origin for origin in found if origin.kind == kind]
