"""The verdicts that are kept, in `verdicts.txt`, and the tables of docs/pages/checker.md.

A mutant that the file does not name changes the numbers or cannot run, and is noticed by the checker and by a comparison
with another mesh. Under each program is a line for each of the others: what becomes of it, which kinds of findings the
checker has, and whether another mesh shows it. A mutant has the name of its function and not its line, which moves.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.judge import UNKNOWN, Verdict
from tests.mutants.sites import Mutant
from tests.mutants.table import Tally
from tests.pages import Part

__all__ = ["TABLES", "is_listed", "line_of", "listed", "names", "read", "tables", "verdict_of", "write"]

FILE = Path(__file__).with_name("verdicts.txt")
TABLES = Part(Path(__file__).parents[2] / "docs/pages/checker.md", "mutants")
JAX, CALL, WAIT, OTHER, SAME = "JAX refuses", "a call refuses", "devices wait", "other numbers", "same numbers"
Kept = dict[str, dict[str, Verdict]]


def line_of(one: Verdict, name: str = "") -> str:
    """A verdict as the file has it."""
    refused = JAX if one.by_jax else CALL
    what = refused if one.rejected else WAIT if one.waits else OTHER if one.wrong else SAME
    shown = one.numbers if one.numbers in ("", UNKNOWN) else "shown"
    return " | ".join((name or one.mutant.name, what, kinds(one.types) or "-", shown or "-"))


def kinds(types: str) -> str:
    """The kinds of the findings; an error that ends the trace has none."""
    found = types.partition(": ")[0]
    return found if re.fullmatch("([a-z]+(, [a-z]+)*)?", found) else "error"


def verdict_of(program: str, line: str) -> Verdict:
    """A line of the file, as far as tables need it."""
    name, what, types, shown = line.strip().split(" | ")
    found = Verdict(program, Mutant.named(name.partition(" #")[0]), types=types.strip("-"), numbers=shown.strip("-"))
    if what in (JAX, CALL):
        found.rejected, found.by_jax = what, what == JAX
    elif what != WAIT:
        found.moved = math.inf if what == OTHER else 0.0
    return found


def is_listed(one: Verdict) -> bool:
    """Whether a verdict is an exception: a change that changes nothing, or one that somebody misses."""
    return not (one.wrong and one.by_types and one.by_numbers)


def names(every: Iterable[Mutant]) -> dict[Mutant, str]:
    """The names of the mutants of a program. The second of several of one name has a #2."""
    count: Counter[str] = Counter()
    found = {}
    for one in every:
        count[one.name] += 1
        found[one] = f"{one.name} #{count[one.name]}" if count[one.name] > 1 else one.name
    return found


def read() -> Kept:
    """The exceptions of each program, by their names."""
    kept: Kept = {}
    for line in FILE.read_text().splitlines() if FILE.exists() else ():
        if not line.startswith(" "):
            program = line
            kept[program] = {}
        else:
            kept[program][line.strip().partition(" | ")[0]] = verdict_of(program, line)
    return kept


def listed(verdicts: Sequence[Verdict]) -> dict[str, Verdict]:
    """The exceptions among the verdicts on all mutants of a program, by their names."""
    name = names(one.mutant for one in verdicts)
    return {name[one.mutant]: one for one in verdicts if is_listed(one)}


def write(kept: Kept) -> None:
    """The file, anew."""
    parts = [
        [program, *(f"  {line_of(one, name)}" for name, one in every.items())]
        for program, every in sorted(kept.items())
        if every
    ]
    FILE.write_text("".join(f"{line}\n" for part in parts for line in part))


# --- the tables of the page

FAMILIES = {
    "layer": "ready-made layers",
    "verb": "verbs",
    "operation": "operations",
    "twin": "right twins of wrong programs",
    "example": "examples",
}


def tables(kept: Mapping[str, Sequence[Verdict]]) -> str:
    """What the page says: a sentence, a table by change, and a table by kind of program."""
    every = Tally([one for verdicts in kept.values() for one in verdicts])
    families = {title: [] for title in FAMILIES.values()}
    changes: dict[str, list[Verdict]] = {}
    for one in every.verdicts:
        families[FAMILIES[one.program.partition(" ")[0]]].append(one)
        changes.setdefault(one.mutant.change, []).append(one)
    ordered = dict(sorted(changes.items(), key=lambda item: -len(Tally(item[1]).wrong)))
    families["all"] = every.verdicts
    said = (
        f"Of {len(every.verdicts):,} changes, {len(every.wrong):,} change the numbers or cannot run. The checker or JAX "
        f"rejects {share(every.wrong, 'by_types')} of these. {share(every.wrong, 'by_numbers')} cannot run, or have other "
        f"numbers on another mesh. {len(every.alarms)} more are rejected though the numbers stay the same."
    )
    return "\n\n".join((textwrap.fill(said, 120), table("change", ordered), table("changed in", families)))


def table(head: str, rows: Mapping[str, list[Verdict]]) -> str:
    lines = [
        f"| {head} | changes the numbers | rejected | of these by plain JAX | shown by another mesh |",
        "|---" * 5 + "|",
    ]
    for title, every in rows.items():
        wrong = Tally(every).wrong
        cells = (title, f"{len(wrong):,}", share(wrong, "by_types"), f"{sum(one.by_jax for one in wrong):,}",
                 share(wrong, "by_numbers"))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def share(wrong: Sequence[Verdict], noticed: str) -> str:
    seen = sum(bool(getattr(one, noticed)) for one in wrong)
    return f"{seen:,} ({seen / max(1, len(wrong)):.1%})"
