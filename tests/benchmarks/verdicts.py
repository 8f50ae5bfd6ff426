"""What `spmd.check` says of the library's own layers: `python -m tests.benchmarks.verdicts`.

One case of each layer in the registry, drawn by SPMD_TEST_SEED; what stands beside "tested" is what is left open.
"""

import collections
import time

import tests.conftest  # noqa: F401  eight devices, strict JAX
from spmd import check, make_mesh
from spmd._text import Table
from tests import layers


def verdicts() -> list[tuple[str, str, str, float]]:
    """Name, verdict, what is left open and seconds of CPU, of each layer."""
    layers.register_all()
    rows = []
    for name in sorted(layers.CASES):
        case = layers.drawn([name])[0]
        began = time.process_time()
        found = check(layers.kernel_of(case, make_mesh(**case.mesh)), *layers.arguments(case))
        verdict = found.verdict
        left = "; ".join([*verdict.unreached, *verdict.reasons[1:]]) or (str(found) if found else "")
        left = verdict.reasons[0] if verdict.kind == "not tested" else left
        rows.append((name, verdict.kind, left, time.process_time() - began))
    return rows


def main() -> None:
    found = verdicts()
    print(Table([(name, kind, f"{seconds:.2f}", left) for name, kind, left, seconds in found]).text())
    print(dict(collections.Counter(kind for _, kind, *_ in found)))


if __name__ == "__main__":
    main()
