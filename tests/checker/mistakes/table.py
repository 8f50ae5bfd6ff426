"""The table of mistakes: its rows, its place in the documentation, its sums."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.checker.mistakes.registry import Mistake
from tests.pages import Part

__all__ = ["Row", "read", "row", "summary", "write"]

TABLE = Part(Path(__file__).parents[3] / "docs/pages/mistakes.md", "mistakes")
HEAD = ("layer", "mistake", "numbers", "given the arguments", "given computed values")


@dataclass(frozen=True)
class Row:
    """What becomes of one mistake.

    Attributes:
      layer: The layer.
      what: The mistake.
      numbers: "differ", "same", or "" if nothing can be computed.
      arguments: Who rejects the call on the kernel's arguments; "" for nobody.
      computed: Who rejects it on what was computed from them.
    """

    layer: str
    what: str
    numbers: str
    arguments: str
    computed: str

    @property
    def silent(self) -> bool:
        """Whether it gives wrong numbers and nobody says so, at least on computed values."""
        return self.numbers == "differ" and not (self.arguments and self.computed)

    def __str__(self) -> str:
        cells = [f"`{self.layer}`", self.what, *(text or "-" for text in astuple(self)[2:])]
        return f"| {' | '.join(cells)} |"


def row(one: Mistake) -> Row:
    """What becomes of a mistake now."""
    return Row(one.layer, one.what, one.numbers(), one.caught(computed=False), one.caught(computed=True))


def summary(rows: Sequence[Row]) -> str:
    """How many there are, and who rejects those on computed values."""
    by = Counter(one.computed.partition(":")[0] or "nobody" for one in rows if one.numbers != "same")
    shown = ", ".join(f"{who} {by[who]}" for who in ("call", "JAX", "check", "spmd.check", "nobody") if by[who])
    return f"{len(rows)} mistakes, {sum(by.values())} of which change the numbers or cannot run. Rejected by: {shown}."


def write(rows: Iterable[Row]) -> None:
    """Put the table into the page."""
    rows = list(rows)
    head = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    TABLE.write("\n".join([summary(rows), "", *head, *map(str, rows)]))


def read() -> tuple[str, list[Row]]:
    """The sums and the rows of the page."""
    said, _, table = TABLE.read().partition("\n\n")
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return said, [Row(one[0].strip("`"), one[1], *("" if text == "-" else text for text in one[2:])) for one in cells]
