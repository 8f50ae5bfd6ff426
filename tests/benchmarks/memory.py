"""What a trace tells of memory and of bytes sent, beside what a compiler plans for 8 devices.

    python tests/benchmarks/memory.py [--json FILE] [--quick | --holdout | --others | --large]
    python tests/benchmarks/memory.py --target h100_sxm.txtpb     for eight GPUs that are not here
    python tests/benchmarks/memory.py --target v5p:2x2x2          for TPUs that are not here

Small programs of `examples/transformer.py`: dense and experts, meshes of every axis, rings, all-to-alls, pipelines, and
what is kept for the backward pass. Nothing is run. Prints for each program argument + output + temporary - alias of
`compiled.memory_analysis()`, the same with the temporaries that the trace gives, their ratio, the ratio of the cautious
figure, and the bytes that one device sends, as compiled over as written. Exits with 1 where a ratio leaves `BOUNDS`.
`--holdout` takes nineteen programs of other sizes, `--others` ten of other kinds: pipelines with the loss inside, latent
attention, waves and spectra, and `--large` eleven in bfloat16, with the attention of cuDNN where the devices are GPUs.

By default the compiler is that for virtual CPUs. For `--target` see `spmd.topology_devices`.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from tests.benchmarks.memory_others import OTHERS

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"vocabulary": 2048, "layers": 4, "d": 256, "heads": 8, "kv_heads": 4, "head": 32, "hidden": 768}
ROWS, LENGTH = 16, 512
BOUNDS = (0.80, 1.25)  # of the ratio
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
# In bfloat16, layers of 2048 features and 32768 tokens a step.
LARGE_SIZES: dict[str, Any] = {"vocabulary": 32768, "d": 2048, "heads": 16, "kv_heads": 8, "head": 128, "hidden": 5632}
LARGE_SIZES |= {"rows": 16, "length": 2048, "dtype": "bfloat16", "chunks": 4}
LARGE: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "large: fsdp": ({}, {"fsdp": 8}, {}),
    "large: fsdp, inputs": (INPUTS, {"fsdp": 8}, {}),
    "large: tp": ({}, {"tp": 8}, {}),
    "large: tp, inputs": (INPUTS, {"tp": 8}, {}),
    "large: fsdp x tp, inputs": (INPUTS, {"fsdp": 2, "tp": 4}, {}),
    "large: dp x fsdp x tp": ({}, {"dp": 2, "fsdp": 2, "tp": 2}, {}),
    "large: pp x fsdp x tp, inputs": (STAGES | INPUTS, {"pp": 2, "fsdp": 2, "tp": 2}, {}),
    "large: pp x dp, no batch": (STAGES | NO_BATCH | {"micro": 8}, {"pp": 4, "dp": 2}, {}),
    "large: cp, inputs": (INPUTS | {"rows": 2, "length": 16384}, {"cp": 8}, {}),
    "large: cp by all-to-alls x tp, inputs": (
        INPUTS | {"context": "ulysses", "kv_heads": 16},
        {"cp": 4, "tp": 2},
        {},
    ),
    "large: ep x fsdp, inputs": (INPUTS | {"experts": 8, "chunks": 1}, {"ep": 4, "fsdp": 2}, {}),
}
QUICK = ("fsdp", "fsdp x cp x tp")


def program(module: Any, name: str, devices: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients of a program, and its arguments without values. `module` is the example."""

    def make_mesh(**axes: int) -> Any:
        return spmd.make_mesh(devices=devices[: math.prod(axes.values())], **axes)

    if name in OTHERS:
        return OTHERS[name](make_mesh)
    config, axes, changes = (PROGRAMS | HOLDOUT | LARGE)[name]
    if name in LARGE:
        whole = "cp" not in axes or config.get("context") == "ulysses"  # a ring computes its own products
        config = LARGE_SIZES | {"implementation": "cudnn" if whole and devices[0].platform == "gpu" else None} | config
    config = {"rows": ROWS, "length": LENGTH} | SIZES | config
    rows, length = config.pop("rows"), config.pop("length")
    mesh = make_mesh(**axes)
    model = module.Transformer(module.Config(**config), mesh, module.MAPPING.merge(changes))
    shapes = jax.eval_shape(lambda: module.new_weights(model.c, jax.random.key(0)))

    def placed(x: Any, layout: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.sharding(mesh))

    params = jax.tree.map(placed, shapes, model.layouts(shapes))
    tokens = placed(jax.ShapeDtypeStruct((rows, length), "int32"), model.tokens)
    return model.loss_and_gradients, (params, tokens, tokens)


class Figures(NamedTuple):
    """Bytes on one device.

    Attributes:
      total: Memory as compiled.
      peak: Memory as the trace says.
      cautious: The larger figure of the trace.
      written: What is sent, as written.
      sent: What is sent, as compiled.
    """

    total: int
    peak: int
    cautious: int
    written: int
    sent: int

    @property
    def ratio(self) -> float:
        return self.peak / self.total


def compared(module: Any, name: str, devices: Sequence[Any]) -> Figures:
    """The figures of a program."""
    fn, args = program(module, name, devices)
    report = spmd.explain(fn, *args)
    memory = report.memory
    assert memory is not None
    written = sum(one.bytes * one.count for one in report.collectives if one.written)
    sent = sum(one.total_bytes for one in report.collectives)
    peak = replace(memory, estimated=memory.opened).peak  # a CPU has no kernel of attention
    return Figures(memory.total, peak, memory.cautious, written, sent)


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
    parser.add_argument("--large", action="store_true", help="in bfloat16")
    parser.add_argument("--target", metavar="WHAT", help="devices that are not here: h100_sxm.txtpb, v5p:2x2x2")
    options = parser.parse_args()
    devices = spmd.use_cpu_devices(8)
    if options.target is not None:
        devices = spmd.topology_devices(options.target, 8)
    module, found = example(), dict[str, Figures]()
    chosen = (options.quick, QUICK), (options.holdout, HOLDOUT), (options.others, OTHERS), (options.large, LARGE)
    for name in next((names for asked, names in chosen if asked), PROGRAMS):
        found[name] = one = compared(module, name, devices)
        mib = f"{one.total / 2**20:8.1f} MiB {one.peak / 2**20:8.1f} MiB"
        ratios = f"{one.ratio:5.2f}  {one.cautious / one.total:5.2f}  {one.sent / one.written:8.6f}"
        print(f"{name:37} {mib}  {ratios}", flush=True)
    ratios = [one.ratio for one in found.values()]
    median = statistics.median(abs(ratio - 1) for ratio in ratios)
    order = same_order([(one.total, one.peak) for one in found.values()])
    print(f"jax {jax.__version__}: median error {median:.1%}, ratios {min(ratios):.2f} to {max(ratios):.2f}, ", end="")
    print(f"{order:.1%} of all pairs in the same order")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return int(median > MEDIAN or not BOUNDS[0] <= min(ratios) <= max(ratios) <= BOUNDS[1])


if __name__ == "__main__":
    sys.exit(main())
