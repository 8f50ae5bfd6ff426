"""What a search found: its rows as a table, and why a mesh is not the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmd._table import Line, Table, html_page, plain, rich_lines, shown_width, wrapped
from spmd._table import Row as Texts
from spmd._units import bytes_text, seconds_text
from spmd.accelerators import Hardware
from spmd.errors import MeshError
from spmd.searcher._rows import HEAD, Row, cells, marked, name_of

_KINDS = {
    "where": "left out by where=",
    "impossible": "impossible, says build",
    "sizes": "with arguments that the mesh does not divide",
    "memory at rest": "with arguments that are too large",
    "memory stated": "too large by the stated bound",
    "refused": "refused by the trace",
    "memory": "with an estimated peak that is too large",
}


@dataclass(frozen=True)
class Untraced:
    """A candidate that nothing excluded and that was not traced.

    Attributes:
      mesh: The sizes of the axes.
      choice: The other coordinates.
      seconds: The lower bound on its time.
    """

    mesh: Mapping[str, int]
    choice: Mapping[str, Any]
    seconds: float


def key_of(mesh: Mapping[str, int], choice: Mapping[str, Any]) -> Any:
    """What two names of one candidate share: axes of size 1 and the order of the axes do not count."""
    sizes = frozenset((axis, size) for axis, size in mesh.items() if size > 1)
    return sizes, tuple((name, repr(choice[name])) for name in sorted(choice))


@dataclass
class Found:
    """A search while it runs."""

    devices: int
    axes: tuple[str, ...]
    hardware: Hardware
    top: int
    considered: int = 0
    traced: int = 0
    rows: list[Row] = field(default_factory=list)
    rest: list[Untraced] = field(default_factory=list)
    excluded: dict[Any, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def worst(self) -> float:
        """The time of the row `top`, from which on a bound excludes."""
        ahead = sorted(row.seconds for row in self.rows)
        return ahead[self.top - 1] if len(ahead) >= self.top else float("inf")

    def exclude(self, mesh: Mapping[str, int], choice: Mapping[str, Any], kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.excluded[key_of(mesh, choice)] = f"{_KINDS[kind]}: {text}"

    def reasons(self) -> list[str]:
        """How many candidates were excluded by what."""
        return [f"{self.counts[kind]:,} {text}" for kind, text in _KINDS.items() if self.counts[kind]]


class Search:
    """The meshes of a search, best first. `search` makes it, and printing it shows `table()`.

    Attributes:
      devices: The number of devices.
      axes: The axes, as they were given.
      hardware: The machine.
      rows: The traced meshes that fit the memory, best first.
      untraced: What was neither excluded nor traced, lowest bound first.
      counts: How many candidates were excluded, by what: `{"sizes": 12, "memory at rest": 3}`.
      considered: How many candidates there were.
      traced: How many of them were traced.
      proven: Whether no candidate that was not traced can be among the first `top` rows.
    """

    def __init__(self, found: Found) -> None:
        rows = sorted(found.rows, key=lambda row: (row.seconds, row.peak))
        self.devices, self.axes, self.hardware = found.devices, found.axes, found.hardware
        marks = zip(rows, marked(rows), strict=True)
        self.rows: tuple[Row, ...] = tuple(replace(row, pareto=mark) for row, mark in marks)
        self.untraced: tuple[Untraced, ...] = tuple(sorted(found.rest, key=lambda one: one.seconds))
        self.counts: dict[str, int] = {kind: found.counts[kind] for kind in _KINDS if found.counts[kind]}
        self.considered, self.traced = found.considered, found.traced
        self.proven = not self.untraced or self.untraced[0].seconds >= found.worst
        self._found = found

    @property
    def best(self) -> Row:
        """The first row."""
        return self.rows[0]

    def row(self, mesh: Mapping[str, int], **choice: Any) -> Row | None:
        """The row of a mesh, whatever the order of its axes; None if it has none."""
        return next((row for row in self.rows if key_of(row.mesh, row.choice) == key_of(mesh, choice)), None)

    def why(self, mesh: Mapping[str, int], **choice: Any) -> str:
        """Why a mesh is behind the best, in one paragraph.

        Args:
          mesh: The sizes of its axes; those of size 1 may be left out.
          **choice: Its other coordinates.

        Returns:
          The differences in numbers, or what excluded it, or that its bound was too high to trace it.

        Raises:
          MeshError: If the search did not consider it.
        """
        name, key, row = name_of(mesh, choice), key_of(mesh, choice), self.row(mesh, **choice)
        if row is not None:
            return _behind(row, self.best, self.rows.index(row) + 1, len(self.rows))
        if key in self._found.excluded:
            return f"{name} is excluded; it is {self._found.excluded[key]}."
        for one in self.untraced:
            if key_of(one.mesh, one.choice) == key:
                bound, best = seconds_text(one.seconds), seconds_text(self.best.seconds)
                return f"{name} was not traced: it takes at least {bound}, and the best takes {best}."
        advice = f"axes {', '.join(self.axes)} with the product {self.devices:,}"
        raise MeshError(f"the search did not consider {name}.", call=f"why({dict(mesh)!r})", advice=advice)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "devices": self.devices,
            "axes": list(self.axes),
            "hardware": self.hardware.name,
            "considered": self.considered,
            "excluded": self.counts,
            "traced": self.traced,
            "untraced": len(self.untraced),
            "proven": self.proven,
            "rows": [row.to_dict() for row in self.rows],
        }

    def table(self, width: int | None = None) -> str:
        """Return the search as text.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        return plain(self._lines(shown_width(width)))

    def _heading(self) -> str:
        return f"{self.devices:,} devices over {', '.join(self.axes)} on {self.hardware.name}"

    def _texts(self) -> Table:
        shown = self.rows[: self._found.top]
        return Table([Texts(cells(row, i)) for i, row in enumerate(shown, 1)], HEAD, (2, 3, 4, 5), (7,), 2)

    def _account(self) -> list[str]:
        """What became of all candidates, in sentences."""
        more = len(self.rows) - self._found.top
        kept = f"{self.considered:,} candidates, {self.traced:,} traced, {len(self.untraced):,} not traced"
        kept += f"; {more:,} more row{'s' * (more > 1)}" if more > 0 else ""
        first = min(self._found.top, len(self.rows))
        which = "the first row is" if first == 1 else f"the first {first} rows are"
        least = seconds_text(self.untraced[0].seconds) if self.untraced else ""
        rest = f"what was not traced takes at least {least}" if least else "all were traced"
        sure = f"{which} the best: {rest}" if self.proven else f"others may be better: {rest}"
        kernels = sorted({name for row in self.rows for name in row.time.kernels})
        assumed = [f"counted as one kernel: {', '.join(kernels)}{self._without()}"] if kernels else []
        notes = [*assumed, "* no row is quicker and smaller"]
        return [kept, *(f"  {reason}" for reason in self._found.reasons()), sure, *notes]

    def _without(self) -> str:
        """What the best row needs if what counts as a kernel is none."""
        memory = self.best.memory
        more = (memory.opened or 0) - (memory.estimated or 0)
        return f"; if it is none, row 1 needs {bytes_text(memory.peak + more)}" if more > 0 else ""

    def _lines(self, width: int) -> list[Line]:
        width = max(width, 40)
        text = [line for sentence in self._account() for line in wrapped(sentence, width)]
        heading: list[Line] = [[(line, "bold")] for line in wrapped(self._heading(), width)]
        return [*heading, *self._texts().lines(width), *([(line, "")] for line in text)]

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Search({self._heading()}: best {self.best.name}, {self.traced} of {self.considered} traced)"

    def _repr_html_(self) -> str:
        return html_page(self._heading(), [self._texts()])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield from rich_lines(self._lines(options.max_width))


def _behind(row: Row, best: Row, place: int, count: int) -> str:
    """How a row compares with the best one."""
    if row is best:
        return f"{row.name} is the best of {count:,}: {seconds_text(row.seconds)}, {bytes_text(row.peak)}."
    parts = {
        "compute": (row.time.compute, best.time.compute),
        "memory traffic": (row.time.memory, best.time.memory),
        **{
            axes: (row.time.by_axis.get(axes, 0.0), best.time.by_axis.get(axes, 0.0))
            for axes in sorted({*row.time.by_axis, *best.time.by_axis})
        },
    }
    apart = sorted(parts.items(), key=lambda part: -abs(part[1][0] - part[1][1]))
    told = _compared(apart)
    return (
        f"{row.name} is number {place:,} of {count:,}. It takes {seconds_text(row.seconds)}, "
        f"{row.seconds / best.seconds:.2f} times the {seconds_text(best.seconds)} of {best.name}. {told} It needs "
        f"{bytes_text(row.peak)} of memory, where the best needs {bytes_text(best.peak)}."
    )


def _compared(parts: Sequence[tuple[str, tuple[float, float]]]) -> str:
    """The parts that differ most, those of the row against those of the best."""
    differing = [(name, pair) for name, pair in parts if pair[0] != pair[1]]
    texts = [f"{name} {seconds_text(mine)} against {seconds_text(other)}" for name, (mine, other) in differing[:4]]
    return f"The parts that differ most: {', '.join(texts)}." if texts else "All parts take as long."
