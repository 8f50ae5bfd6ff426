"""A row of a search: what one mesh costs, as the trace says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd._units import bytes_text, seconds_text
from spmd.accelerators import Hardware
from spmd.inspect import Explanation, Memory, Time
from spmd.inspect._roofline import estimate, priced
from spmd.searcher._meshes import Bound, Sizes, compute_seconds, laid


@dataclass(frozen=True)
class Row:
    """What a step takes on one mesh.

    Attributes:
      mesh: The sizes of the axes, in the order in which they are best laid on the links: the last are inside a node.
      choice: The other coordinates.
      time: Estimated seconds, with the axes in this order.
      memory: Bytes on one device; `memory.peak` is what the filter looks at.
      bytes_by_axis: Bytes that one device sends, by mesh axes.
      seconds: What rows are ranked by: `time.serial`, but for the collectives that overlap.
      mfu: The most that the model's FLOPs can be of the peak in that time. Without a `Bound` that says what the model
        needs, all products of the trace count, also those that are computed again.
      pareto: Whether no other row is as quick and as small, and quicker or smaller.
    """

    mesh: Sizes
    choice: Mapping[str, Any]
    time: Time
    memory: Memory
    bytes_by_axis: Mapping[str, int]
    seconds: float
    mfu: float
    pareto: bool = False

    @property
    def peak(self) -> int:
        """Bytes of memory on one device, estimated from the trace."""
        return self.memory.peak

    @property
    def name(self) -> str:
        """The mesh and the choices as text: `dp=16 tp=8 micro=4`. Axes of size 1 are left out."""
        return name_of(self.mesh, self.choice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "mesh": dict(self.mesh),
            "choice": {name: _plain(value) for name, value in self.choice.items()},
            "seconds": self.seconds,
            "time": self.time.to_dict(),
            "memory": self.memory.to_dict(),
            "bytes_by_axis": dict(self.bytes_by_axis),
            "mfu": self.mfu,
            "pareto": self.pareto,
        }


def row_of(
    found: Explanation, mesh: Sizes, choice: Mapping[str, Any], hardware: Hardware, bound: Bound, overlap: Sequence[str]
) -> Row:
    """The row of a program that `explain` has read."""
    assert found.written is not None and found.memory is not None  # the program was traced here
    price = priced(found.written, found.collectives, hardware, mesh)
    counted = ((one, price.times.get(i, 0.0)) for i, one in enumerate(found.collectives))
    sent = [(one.kind, one.axes, one.bytes, times) for one, times in counted]
    order, seconds = laid(sent, mesh, hardware, price.compute + price.memory, overlap)
    time = estimate(found.written, found.collectives, hardware, order)
    needed = found.written.matmul_flops if bound.needed is None else bound.needed
    by_axis = {axes: sum(one.total_bytes for one in ones) for axes, ones in found.by_axis().items()}
    share = compute_seconds(needed, hardware) / seconds if seconds else 0.0
    return Row(order, choice, time, found.memory, by_axis, seconds, share)


def name_of(mesh: Mapping[str, int], choice: Mapping[str, Any]) -> str:
    sizes = [f"{axis}={size}" for axis, size in mesh.items() if size > 1] or ["one device"]
    return " ".join([*sizes, *(f"{name}={_plain(value)}" for name, value in choice.items())])


def cells(row: Row, number: int) -> tuple[str, ...]:
    """The texts of a row of the table: see `HEAD`."""
    sent = sorted(row.bytes_by_axis.items(), key=lambda part: (-part[1], part[0]))
    return (
        f"{number}{'*' if row.pareto else ''}",
        row.name,
        seconds_text(row.seconds),
        seconds_text(row.time.overlapped),
        f"{row.mfu:.0%}",
        bytes_text(row.peak),
        row.time.bound,
        ", ".join(f"{axes} {bytes_text(size)}" for axes, size in sent if size),
    )


HEAD = ("", "mesh", "time", "at least", "MFU", "memory", "binds", "sent")


def marked(rows: Sequence[Row]) -> list[bool]:
    """Which rows are not dominated, of a list in the order of time and memory."""
    found, least = [], (float("inf"), 0.0)
    for row in rows:
        found.append(row.peak < least[0] or (row.peak, row.seconds) == least)
        least = (row.peak, row.seconds) if row.peak < least[0] else least
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else repr(value)
