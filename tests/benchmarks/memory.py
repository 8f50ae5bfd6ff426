"""The memory that `explain` reads off the trace, beside what the compiler plans for 8 virtual CPU devices.

    python tests/benchmarks/memory.py [--json FILE] [--quick | --holdout | --others]

Small programs of `examples/transformer.py`: dense and experts, meshes of every axis, rings, all-to-alls, pipelines, and
what is kept for the backward pass. Nothing is run. Prints for each program argument + output + temporary - alias of
`compiled.memory_analysis()`, the same with the temporaries that the trace gives, their ratio, and the ratio if nothing is
fused. Exits with 1 where a ratio leaves `BOUNDS`. `--holdout` takes nineteen programs of other sizes, and `--others`
ten of other kinds: pipelines with the loss inside, latent attention, waves and spectra.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from tests.benchmarks.memory_others import OTHERS

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocabulary": 2048, "layers": 4, "d": 256, "heads": 8, "kv_heads": 4, "head": 32, "hidden": 768}
ROWS, LENGTH = 16, 512
BOUNDS = (0.90, 1.25)  # of the ratio
MEDIAN = 0.10  # of its distance from 1

DENSE: dict[str, Any] = {"chunks": 2}
MOE: dict[str, Any] = {"experts": 4, "chosen": 2, "chunks": 1}
STAGES: dict[str, Any] = {"micro": 4, "chunks": 1}
INPUTS: dict[str, Any] = {"save": "inputs"}
DOTS: dict[str, Any] = {"save": jax.checkpoint_policies.dots_saveable}

# What is computed, where, and changes to the mapping.
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "dp": (DENSE, {"dp": 8}, {}),
    "fsdp": (DENSE, {"fsdp": 8}, {}),
    "fsdp, inputs": (DENSE | INPUTS, {"fsdp": 8}, {}),
    "fsdp, prefetch": (DENSE | {"prefetch": True}, {"fsdp": 8}, {}),
    "tp": (DENSE, {"tp": 8}, {}),
    "tp, inputs": (DENSE | INPUTS, {"tp": 8}, {}),
    "dp x fsdp x tp": (DENSE, {"dp": 2, "fsdp": 2, "tp": 2}, {}),
    "dp x fsdp x tp, inputs": (DENSE | INPUTS, {"dp": 2, "fsdp": 2, "tp": 2}, {}),
    "fsdp x tp without sp": (DENSE, {"fsdp": 4, "tp": 2}, {"stream": None}),
    "cp": (DENSE, {"cp": 8}, {}),
    "fsdp x cp, inputs": (DENSE | INPUTS, {"fsdp": 2, "cp": 4}, {}),
    "fsdp x cp x tp": (DENSE, {"fsdp": 2, "cp": 2, "tp": 2}, {}),
    "cp by all-to-alls x tp": (DENSE | {"context": "ulysses"}, {"cp": 4, "tp": 2}, {}),
    "pp x fsdp x tp, dots": (STAGES | DOTS, {"pp": 2, "fsdp": 2, "tp": 2}, {}),
    "pp x fsdp x tp, inputs": (STAGES | INPUTS, {"pp": 2, "fsdp": 2, "tp": 2}, {}),
    "ep": (MOE, {"ep": 4}, {}),
    "fsdp x ep x tp": (MOE, {"fsdp": 2, "ep": 2, "tp": 2}, {}),
    "fsdp x ep, capacity, inputs": (MOE | {"capacity": 1.25} | INPUTS, {"fsdp": 4, "ep": 2}, {}),
    "pp x ep x cp": (MOE | STAGES, {"pp": 2, "ep": 2, "cp": 2}, {}),
}
# Other sizes, meshes and policies.
LARGE_VOCABULARY: dict[str, Any] = {"vocabulary": 16384, "d": 128, "layers": 2, "chunks": 1, "rows": 16, "length": 128}
LONG: dict[str, Any] = {"d": 128, "hidden": 384, "rows": 2, "length": 2048}
WIDE: dict[str, Any] = {"d": 512, "hidden": 2048, "chunks": 4, "length": 256}
NO_BATCH: dict[str, Any] = {"save": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
HOLDOUT: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "wide: dp x fsdp": ({"d": 512, "hidden": 1024, "layers": 2, "length": 256}, {"dp": 2, "fsdp": 4}, {}),
    "large vocabulary: dp x tp": (LARGE_VOCABULARY, {"dp": 2, "tp": 4}, {}),
    "deep: fsdp": ({"layers": 12, "rows": 8, "length": 256}, {"fsdp": 8}, {}),
    "deep: fsdp x tp, inputs": (INPUTS | {"layers": 8, "length": 256}, {"fsdp": 2, "tp": 4}, {}),
    "long: cp x tp, inputs": (LONG | INPUTS, {"cp": 4, "tp": 2}, {}),
    "long: fsdp x cp by all-to-alls": (LONG | {"context": "ulysses", "kv_heads": 8}, {"fsdp": 2, "cp": 4}, {}),
    "four stages: pp x dp, no batch": (
        STAGES | NO_BATCH | {"layers": 8, "micro": 8, "length": 256},
        {"pp": 4, "dp": 2},
        {},
    ),
    "two stages: pp x tp, inputs": (STAGES | INPUTS | {"micro": 2, "rows": 8}, {"pp": 2, "tp": 4}, {}),
    "eight experts: ep x tp": (MOE | {"experts": 8, "capacity": 2.0}, {"ep": 4, "tp": 2}, {}),
    "eight experts: ep x cp, inputs": (MOE | INPUTS | {"experts": 8, "length": 256}, {"ep": 4, "cp": 2}, {}),
    "sixteen layers: fsdp x tp, inputs": (DENSE | INPUTS | {"layers": 16, "length": 128}, {"fsdp": 2, "tp": 4}, {}),
    "wide, one layer: tp": (WIDE | {"layers": 1}, {"tp": 8}, {}),
    "wide: fsdp x tp, inputs": (WIDE | INPUTS | {"layers": 3}, {"fsdp": 2, "tp": 4}, {}),
    "eight experts: ep, inputs": (MOE | INPUTS | {"experts": 8, "length": 256}, {"ep": 8}, {}),
    "eight experts: ep x tp, inputs": (
        MOE | INPUTS | {"experts": 8, "length": 256, "hidden": 512},
        {"ep": 2, "tp": 4},
        {},
    ),
    "sixteen experts: ep x dp": (MOE | {"experts": 16, "length": 128, "hidden": 384}, {"ep": 4, "dp": 2}, {}),
    "two rounds: pp x tp, inputs": (
        STAGES | INPUTS | {"layers": 8, "rounds": 2, "length": 256},
        {"pp": 4, "tp": 2},
        {},
    ),
    "two stages: pp x cp x dp": (STAGES | {"length": 256}, {"pp": 2, "cp": 2, "dp": 2}, {}),
    "window: cp, inputs": (DENSE | INPUTS | {"window": 64, "placement": "contiguous"}, {"cp": 8}, {}),
}
QUICK = ("fsdp", "fsdp x cp x tp")


def program(module: Any, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients of a program, and its arguments without values. `module` is the example."""
    if name in OTHERS:
        return OTHERS[name]()
    config, named, changes = (PROGRAMS | HOLDOUT)[name]
    config = {"rows": ROWS, "length": LENGTH} | SIZES | config
    rows, length, axes = config.pop("rows"), config.pop("length"), dict[str, Any](named)
    mesh = spmd.make_mesh(**axes)
    model = module.Transformer(module.Config(**config), mesh, module.MAPPING.merge(changes))
    shapes = jax.eval_shape(lambda: module.new_weights(model.c, jax.random.key(0)))

    def placed(x: Any, layout: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(mesh))

    params = jax.tree.map(placed, shapes, model.layouts(shapes))
    tokens = placed(jax.ShapeDtypeStruct((rows, length), "int32"), model.tokens)
    return model.loss_and_gradients, (params, tokens, tokens)


def compared(module: Any, name: str) -> tuple[int, int, int]:
    """Bytes on one device: as compiled, as the trace says, and as it says if nothing is fused."""
    fn, args = program(module, name)
    memory = spmd.explain(fn, *args).memory
    assert memory is not None
    return memory.total, memory.peak, memory.cautious


def example() -> Any:
    """`examples/transformer.py`."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return __import__("transformer")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def same_order(pairs: list[tuple[int, int]]) -> float:
    """Of all pairs of programs, the share that the second figures put in the order of the first."""
    found = [(a - b) * (c - d) > 0 for i, (a, c) in enumerate(pairs) for b, d in pairs[:i]]
    return sum(found) / len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="two programs")
    parser.add_argument("--holdout", action="store_true", help="other sizes and meshes")
    parser.add_argument("--others", action="store_true", help="other kinds of programs")
    options = parser.parse_args()
    spmd.use_cpu_devices(8)
    module, found = example(), {}
    chosen = (options.quick, QUICK), (options.holdout, HOLDOUT), (options.others, OTHERS), (True, PROGRAMS)
    for name in next(names for asked, names in chosen if asked):
        found[name] = total, peak, cautious = compared(module, name)
        mib = f"{total / 2**20:8.1f} MiB {peak / 2**20:8.1f} MiB"
        print(f"{name:30} {mib}  {peak / total:5.2f}  {cautious / total:5.2f}", flush=True)
    ratios = [peak / total for total, peak, _ in found.values()]
    median = statistics.median(abs(ratio - 1) for ratio in ratios)
    order = same_order([(total, peak) for total, peak, _ in found.values()])
    print(f"jax {jax.__version__}: median error {median:.1%}, ratios {min(ratios):.2f} to {max(ratios):.2f}, ", end="")
    print(f"{order:.1%} of all pairs in the same order")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(median > MEDIAN or not BOUNDS[0] <= min(ratios) <= max(ratios) <= BOUNDS[1])


if __name__ == "__main__":
    sys.exit(main())
