"""How many wrong programs plain JAX rejects, and how many the checker finds: `python -m tests.checker.twins`.

With `--write`, what is not found goes into `missed.txt`, and what is found of layers into docs/pages/mistakes.md.
"""

import sys
from collections import defaultdict

import tests.conftest  # noqa: F401  eight devices, strict JAX
from tests.checker.twins.layers import load_layers, write
from tests.checker.twins.registry import MISSED, findings, load, refused, why_missed


def main() -> None:
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    missed, layers = [], load_layers()
    if "--write" in sys.argv:
        write({name: sorted({str(one.kind) for one in findings(one, one.mistaken)}) for name, one in layers.items()})
    for pair in [*load().values(), *layers.values()]:
        why, alarms = why_missed(pair), findings(pair, pair.correct)
        marks = (True, refused(pair) == "JAX", not why, bool(alarms))
        rows[pair.group] = [n + mark for n, mark in zip(rows[pair.group], marks, strict=True)]
        missed += [f"{pair.name}: {why}"] if why else []
        missed += [f"{pair.name}, right: {alarms[0].kind}"] if alarms else []
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    print(f"{'class':16}{'pairs':>8}{'JAX':>8}{'found':>8}{'alarms':>8}")
    for group, counts in [*rows.items(), ("all", total)]:
        print(f"{group:16}" + "".join(f"{n:8}" for n in counts))
    print(f"plain JAX rejects {total[1]} of {total[0]}")
    if "--write" in sys.argv:
        MISSED.write_text("".join(f"{line}\n" for line in missed))


main()
