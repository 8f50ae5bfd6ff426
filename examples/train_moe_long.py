"""Train a mixture of experts on sequences that no device holds whole: context x expert parallelism.

    python examples/train_moe_long.py                            # 8 virtual CPU devices, a minute or two on 2 cores
    python examples/train_moe_long.py --mesh cp=8 --length 512   # any mesh of dp, fsdp, cp, tp, ep, pp
    python examples/train_moe_long.py --mesh cp=2,ep=2,tp=2 --context ulysses
    python examples/train_moe_long.py --help                     # every setting

The task: the second half of each sequence repeats the first half, which is random, and the model must predict it. A
model that sees less than half a sequence can only guess, and with the sequence divided over cp the answer is on another
device. The model is `transformer.py`: keys and values go round a ring (or heads go through all-to-alls), tokens go to
their experts and back, and ep divides rows as well as experts.

Training ends when the loss falls below the goal. If it does not, this is an error. Then the same weights are scored
with a window of a quarter of the sequence, to show that the model learnt attention across blocks.
"""

# test: --goal 99 --rows 4 --length 32 --d 32 --experts 4

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformer import Config, Transformer

import spmd

console = Console(highlight=False)


def batch(model: Transformer, step: int, options: argparse.Namespace) -> tuple[Any, Any]:
    """Tokens and labels, placed on the mesh. A label that does not count is -1."""
    rng = np.random.default_rng((options.seed, step))
    half = rng.integers(0, model.c.vocabulary, (options.rows, options.length // 2), np.int32)
    tokens = np.concatenate([half, half], axis=1)
    labels = np.full_like(tokens, -1)
    labels[:, half.shape[1] - 1 : -1] = half
    return model.place(tokens), model.place(labels)


def train(model: Transformer, options: argparse.Namespace) -> tuple[Any, list[float], Any]:
    """Train until the goal is reached. Returns the weights, the losses and the last report."""
    schedule = optax.linear_schedule(options.lr / 10, options.lr, 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    state = model.new_state(jax.random.key(options.seed), optimizer)
    step = model.train_step(optimizer).lower(state, *batch(model, 0, options)).compile()
    console.print("[bold]what a device sends in one step[/bold]")
    for axis, sent in spmd.inspect.collectives(step, mesh=model.mesh).by_axis().items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in sent.counts.items())
        console.print(f"  {axis:10} {sent.total_bytes / 2**20:7.3f} MiB  {kinds}", soft_wrap=True)
    losses: list[float] = []
    report: Any = None
    began = time.perf_counter()
    with Progress(console=console) as bar:
        task = bar.add_task("training", total=options.steps)
        for i in range(options.steps):
            state, report = step(state, *batch(model, i, options))
            losses.append(float(report["loss"]))
            rate = options.rows * options.length * (i + 1) / (time.perf_counter() - began)
            text = f"loss {losses[-1]:.3f}, {float(report['drop_rate']):.1%} dropped, {rate:,.0f} tokens/s"
            bar.update(task, advance=1, description=text)
            if recent(losses) < options.goal:
                break
    return state["params"], losses, report


def score(model: Transformer, params: Any, options: argparse.Namespace) -> float:
    """The loss of a batch that was not trained on."""
    layouts = (model.layouts, model.tokens, model.tokens)

    @spmd.kernel(in_layouts=layouts, out_layouts="scalar", mesh=model.mesh)
    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        return model.loss(params, tokens, labels)[1]["loss"]

    return float(loss(params, *batch(model, options.steps, options)))


def recent(losses: list[float]) -> float:
    return statistics.mean(losses[-5:])


def show_experts(report: Any) -> None:
    """Each expert's share of the choices; 1/e would be balanced."""
    table = Table("expert", "load", "", box=None)
    load = np.asarray(report["load"])
    for i, share in enumerate(load):
        table.add_row(str(i), f"{share:.1%}", "█" * round(20 * share * len(load)))
    console.print(table, f"{float(report['drop_rate']):.2%} of the choices found no place", "")


def read_flags(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    for name, default, text in (
        ("mesh", "cp=4,ep=2", "axes and sizes: of dp, fsdp, cp, tp, ep, pp"),
        ("devices", "8", "virtual CPU devices, or 'all' accelerators of this machine"),
        ("context", "ring", "ring or ulysses"),
        ("rows", 8, "sequences in a step"),
        ("length", 512, "tokens of a sequence"),
        ("symbols", 32, "different tokens"),
        ("layers", 2, "of the model"),
        ("d", 64, "its width"),
        ("experts", 8, "in each layer; each token goes to two"),
        ("capacity", 1.25, "places of an expert, in units of a balanced load"),
        ("balance", 0.1, "weight of the loss that balances the experts"),
        ("micro", 1, "micro-batches of a pipeline"),
        ("steps", 400, "at most"),
        ("goal", 0.1, "loss at which training ends"),
        ("lr", 3e-3, "highest learning rate"),
        ("seed", 0, "of weights and data"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} ({default})")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    options = read_flags(argv)
    devices = spmd.use_cpu_devices(int(options.devices)) if options.devices != "all" else jax.devices()
    sizes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    mesh = spmd.make_mesh(**sizes, devices=devices[: math.prod(sizes.values())])
    names = ("layers", "d", "experts", "capacity", "balance", "context", "micro")
    c = Config(vocabulary=options.symbols, hidden=options.d, **{name: getattr(options, name) for name in names})
    model = Transformer(c, mesh)
    console.print(f"mesh {dict(mesh.shape)}, {options.rows} sequences of {options.length} tokens\n")

    began = time.perf_counter()
    params, losses, report = train(model, options)
    chance = math.log(options.symbols)
    console.print(f"\nloss {recent(losses):.3f} after {len(losses)} steps, guessing would be {chance:.3f}")
    blind = Transformer(dataclasses.replace(c, window=options.length // 4), mesh)
    console.print(f"with a window of {options.length // 4} tokens: {score(blind, params, options):.3f}\n")
    show_experts(report)
    console.print(f"{time.perf_counter() - began:.0f} s")
    if recent(losses) >= options.goal:
        raise SystemExit(f"the loss did not fall below {options.goal}")
    return losses


if __name__ == "__main__":
    main()
