"""The verdicts in tables: how many mutants of each kind are noticed, and by what."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.mutants.judge import Verdict

__all__ = ["BY_NUMBERS", "BY_TYPES", "Tally"]

BY_TYPES, BY_NUMBERS = 0.85, 0.99  # of the mutants that do something else, how many are noticed

COLUMNS = ("mutants", "same", "alarms", "wrong", "by JAX", "by types", "by numbers", "by neither")


@dataclass
class Tally:
    """The verdicts so far."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def wrong(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.wrong]

    @property
    def alarms(self) -> list[Verdict]:
        return [one for one in self.verdicts if not one.wrong and one.types]

    def share(self, noticed: Callable[[Verdict], bool]) -> float:
        """How many of the wrong ones are noticed."""
        return sum(map(noticed, self.wrong)) / max(1, len(self.wrong))

    @property
    def promised(self) -> bool:
        types, numbers = (self.share(lambda one: one.by_types), self.share(lambda one: one.by_numbers))
        return types >= BY_TYPES and numbers >= BY_NUMBERS and not self.alarms

    def report(self) -> str:
        parts = [
            self._by("change", lambda one: one.mutant.change),
            self._by("collective", lambda one: one.mutant.collective),
            self._by("program", lambda one: " ".join(one.program.split(" ")[:2])),
            self._listed("the checker does not see", [one for one in self.wrong if not one.by_types]),
            self._listed("numbers do not show", [one for one in self.wrong if not one.by_numbers]),
            self._listed("numbers stay, and the checker refuses", self.alarms),
            self._rates(),
        ]
        return "\n\n".join(part for part in parts if part)

    def _rates(self) -> str:
        types, numbers = self.share(lambda one: one.by_types), self.share(lambda one: one.by_numbers)
        return f"of {len(self.wrong)} wrong ones {types:.1%} noticed by types, {numbers:.1%} by numbers"

    def _by(self, name: str, key: Callable[[Verdict], str]) -> str:
        rows: dict[str, list[Verdict]] = {}
        for one in self.verdicts:
            rows.setdefault(key(one), []).append(one)
        lines = [(title, *_counts(every)) for title, every in sorted(rows.items())]
        lines.append(("all", *_counts(self.verdicts)))
        rows = [(name, *COLUMNS), *lines]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return "\n".join("  ".join(row) for row in aligned)

    def _listed(self, title: str, every: list[Verdict]) -> str:
        return "\n  ".join([f"{title} ({len(every)}):", *map(str, every)]) if every else ""


def _counts(every: list[Verdict]) -> list[str]:
    wrong = [one for one in every if one.wrong]
    numbers = (
        len(every),
        len(every) - len(wrong),
        sum(not one.wrong and bool(one.types) for one in every),
        len(wrong),
        sum(one.by_jax for one in wrong),
        sum(one.by_types for one in wrong),
        sum(one.by_numbers for one in wrong),
        sum(not (one.by_types or one.by_numbers) for one in wrong),
    )
    return [*map(str, numbers)]
