"""Change every collective of correct programs, one at a time, and see who notices.

    python -m tests.mutants                       all programs
    python -m tests.mutants --only "layer mlp"    those whose names contain this
    python -m tests.mutants --sample 3 --seed 7   so many mutants of each program
    python -m tests.mutants --keep found.json     writes the verdicts, too
    python -m tests.mutants --types found.json    asks only the checker again; the numbers are those of the file

It ends with 1 if fewer are noticed than tests/mutants/table.py promises, or a program whose numbers stay is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401  eight devices, strict JAX
from tests.mutants.judge import Verdict, judge, mutants, said
from tests.mutants.programs import Program, programs
from tests.mutants.sites import Mutant
from tests.mutants.table import Tally

Known = dict[tuple[str, str], list[dict[str, Any]]]


def main() -> int:
    options = parsed()
    known = by_name(json.loads(Path(options.types).read_text())) if options.types else {}
    tally, start = Tally(), time.monotonic()
    for program in programs(options.only):
        for one in verdicts(program, options, known):
            tally.verdicts.append(one)
            if options.verbose:
                print(f"{time.monotonic() - start:7.1f} s  {one}", flush=True)
    if options.keep:
        kept = [{**dataclasses.asdict(one), "mutant": one.mutant.name} for one in tally.verdicts]
        Path(options.keep).write_text(json.dumps(kept, indent=1))
    print(tally.report())
    return int(not tally.promised)


def verdicts(program: Program, options: argparse.Namespace, known: Known) -> Iterator[Verdict]:
    every = mutants(program)
    if options.sample and len(every) > options.sample:
        every = random.Random(f"{options.seed} {program.name}").sample(every, options.sample)
    yield from again(program, every, known) if known else judge(program, every)


def by_name(kept: list[dict[str, Any]]) -> Known:
    """The verdicts of an earlier run, by program and mutant: several where a function has several such places."""
    found: Known = {}
    for one in kept:
        found.setdefault((one["program"], one["mutant"]), []).append(one)
    return found


def again(program: Program, every: list[Mutant], known: Known) -> Iterator[Verdict]:
    """The verdicts of an earlier run, with what the checker says now."""
    for mutant in every:
        if earlier := known.get((program.name, mutant.name)):
            verdict = Verdict(**{**earlier.pop(0), "mutant": mutant, "types": ""})
            if not verdict.rejected:
                verdict.types = said(program, mutant)
            yield verdict


def parsed() -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=about)
    for text in ("only", "keep", "types"):
        parser.add_argument(f"--{text}", default="")
    for number in ("seed", "sample"):
        parser.add_argument(f"--{number}", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print each verdict")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
