"""The compiler's plan beside what XLA compiled for eight CPUs, collective by collective.

python -m tests.propagation.compare
"""

import collections
import math
import re
from typing import Any

import spmd
from spmd.inspect import collectives
from tests.propagation.programs import Plain, programs
from tests.simulator import sent_bytes

Sent = collections.Counter[tuple[str, tuple[str, ...], int]]


def both(plain: Plain, mesh: Any) -> tuple[Sent, Sent, bool]:
    """What the plan sends and what the compiled program sends, kind, axes and elements of each run; and whether the plan leaves something open."""
    fn, args = plain.make(mesh)
    plan, compiled = Sent(), Sent()
    planned = spmd.propagate(fn, *args)
    for one in planned.moves:
        elements = one.bytes // one.raw.type.width
        plan[one.kind, tuple(sorted({axis.name for axis in one.raw.axes})), elements] += one.count
    for one in collectives(fn, *args, mesh=_mesh(args, mesh)):
        for size in _parts(one):
            compiled[one.kind, tuple(sorted(one.axes)), size] += one.count
    return plan, compiled, bool(planned.open)


def _mesh(args: Any, mesh: Any) -> Any:
    import jax

    return next((x.sharding.mesh for x in jax.tree.leaves(args)), mesh)


def _parts(one: Any) -> list[int]:
    """The elements of each array, of a collective that XLA has combined: XLA for CPUs sends bfloat16 as float32."""
    width = int(re.sub(r"\D", "", one.operands[0][0])) // 8 if one.operands[0][0] != "pred" else 1
    if one.kind == "all_to_all":
        return [one.bytes // width]
    return [sent_bytes(one.kind, math.prod(shape) * width, one.group_size) // width for _, shape in one.operands]


def verdict(plan: Sent, compiled: Sent) -> str:
    """In one word, how a plan and a compiled program differ."""
    if plan == compiled:
        return "equal"
    sent = [sum(size * count for (_, _, size), count in one.items()) for one in (plan, compiled)]
    kinds = [collections.Counter() for _ in range(2)]
    for one, found in zip((plan, compiled), kinds, strict=True):
        for (kind, axes, _), count in one.items():
            found[kind, axes] += count
    if kinds[0] == kinds[1]:
        return "other sizes"
    return "less" if sent[1] < sent[0] else "more" if sent[1] > sent[0] else "other kinds"


def main() -> None:
    spmd.use_cpu_devices(8)
    mesh = spmd.make_mesh(dp=2, tp=4)
    found: dict[str, list[str]] = {}
    for plain in programs():
        plan, compiled, is_open = both(plain, mesh)
        word = verdict(plan, compiled)
        if is_open:
            word += ", left open"
        found.setdefault(word, []).append(plain.name)
        if not word.startswith("equal"):
            print(f"{word}: {plain.name} ({plain.kind})")
            for name, more in (("only planned", plan - compiled), ("only compiled", compiled - plan)):
                for (kind, axes, size), count in sorted(more.items()):
                    print(f"    {name}: {count} {kind} over {'/'.join(axes)}, {size} elements")
    print({word: len(names) for word, names in found.items()}, "of", sum(map(len, found.values())))


if __name__ == "__main__":
    main()
