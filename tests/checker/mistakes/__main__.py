"""What becomes of each mistake: `python -m tests.checker.mistakes`. With `--write`, docs/pages/mistakes.md says it."""

import sys

import tests.conftest  # noqa: F401  eight devices, strict JAX
from tests.checker.mistakes.registry import load
from tests.checker.mistakes.table import row, summary, write


def main() -> None:
    rows = []
    for one in load():
        rows.append(row(one))
        print(rows[-1], flush=True)
    print(summary(rows))
    if "--write" in sys.argv:
        write(rows)


main()
