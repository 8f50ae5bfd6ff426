"""Change every collective of correct programs, one at a time, and see who notices.

    python -m tests.mutants                       all programs
    python -m tests.mutants --only "layer mlp"    those whose names contain this
    python -m tests.mutants --sample 3 --seed 7   so many mutants of each program
    python -m tests.mutants --types               asks only the checker again; the numbers are those of verdicts.txt
    python -m tests.mutants --types --write       writes verdicts.txt and the tables of docs/pages/checker.md, too

It ends with 1 if fewer are noticed than tests/mutants/table.py promises, or a program whose numbers stay is refused.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping

import tests.conftest  # noqa: F401  eight devices, strict JAX
from tests.mutants import verdicts
from tests.mutants.judge import Verdict, judge, mutants
from tests.mutants.programs import Program, programs
from tests.mutants.table import Tally


def main() -> int:
    options = parsed()
    before, kept = verdicts.read(), {}
    start = time.monotonic()
    for program in programs(options.only):
        kept[program.name] = []
        for one in judged(program, options, before.get(program.name, {})):
            kept[program.name].append(one)
            if options.verbose:
                print(f"{time.monotonic() - start:7.1f} s  {one}", flush=True)
        if options.write:
            verdicts.write({**before, program.name: verdicts.listed(kept[program.name])})
            before = verdicts.read()
    if options.write and not options.only:  # without the programs that there are no more
        verdicts.write({name: verdicts.listed(every) for name, every in kept.items()})
        verdicts.TABLES.write(verdicts.tables(kept))
    tally = Tally([one for every in kept.values() for one in every])
    print(tally.report())
    return int(not tally.promised)


def judged(program: Program, options: argparse.Namespace, known: Mapping[str, Verdict]) -> Iterator[Verdict]:
    every = mutants(program)
    named = verdicts.names(every)
    if options.sample and len(every) > options.sample:
        every = random.Random(f"{options.seed} {program.name}").sample(every, options.sample)
    if not options.types:
        return judge(program, every)
    noticed = Verdict(program.name, every[0], moved=math.inf, numbers="shown") if every else None
    return judge(program, every, {one: known.get(named[one], noticed) for one in every})


def parsed() -> argparse.Namespace:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=about)
    parser.add_argument("--only", default="")
    for number in ("seed", "sample"):
        parser.add_argument(f"--{number}", type=int, default=0)
    parser.add_argument("--types", action="store_true", help="ask only the checker again")
    parser.add_argument("--write", action="store_true", help="keep the verdicts, and write the tables of the page")
    parser.add_argument("--verbose", action="store_true", help="print each verdict")
    options = parser.parse_args()
    if options.write and options.sample:
        parser.error("--write keeps the verdicts on all mutants of a program, and --sample has some")
    return options


if __name__ == "__main__":
    sys.exit(main())
