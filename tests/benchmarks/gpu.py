"""What `spmd` costs on one accelerator, beside JAX by hand: one command, at most eight minutes.

    python -m tests.benchmarks.gpu                small sizes on CPUs, large ones on a GPU; writes gpu.json
    python -m tests.benchmarks.gpu --json FILE    writes FILE
    python -m tests.benchmarks.gpu --seconds 60   begins no further repeat after so long

On one device nothing is sent. What is compared is what the library adds: a transformer block in strings, from layers, by
hand with `jax.shard_map`, and in plain jit; a Fourier transform beside `jnp.fft`; a whole training step of a decoder in
bfloat16, its tokens per second, its model FLOPs utilization, the seconds to trace, lower and compile it, and what
`explain` predicts of its time and its memory: with the vendor's figures, and with the speed of a large product and of a
large copy, measured here; experts without a capacity beside experts with one. Ratios are of medians, of runs that take
turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

if __name__ == "__main__":  # run as a file, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import spmd
from spmd import nn, parallel
from tests.benchmarks import llama_block


class Size(NamedTuple):
    """The sizes of one run.

    Attributes:
      block: Those of the transformer block.
      decoder: Layers, features, heads, hidden units, vocabulary, batch and sequence of the decoder.
      cube: The side of the transform.
      experts: Tokens, features, experts, hidden units and choices of the experts.
      repeats: How often each is run, if there is time.
    """

    block: llama_block.Sizes
    decoder: tuple[int, int, int, int, int, int, int]
    cube: int
    experts: tuple[int, int, int, int, int]
    repeats: int


SMALL = Size(llama_block.Sizes(b=2, s=16, m=32, h=2, k=16, f=64), (2, 32, 2, 64, 64, 2, 16), 8, (32, 8, 4, 16, 2), 3)
LARGE = Size(
    llama_block.Sizes(b=8, s=2048, m=4096, h=32, k=128, f=11008),
    (8, 4096, 32, 14336, 32768, 8, 2048),
    384,
    (16384, 2048, 16, 4096, 2),
    30,
)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


# -------------------- times


def medians(versions: dict[str, Callable[[], Any]], repeats: int, until: float) -> dict[str, float]:
    """The median seconds of each version. They take turns; after `until` no turn begins but the first."""
    for run in versions.values():
        jax.block_until_ready(run())
    found: dict[str, list[float]] = {name: [] for name in versions}
    for turn in range(repeats):
        if turn and time.monotonic() > until:
            break
        for name, run in versions.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def blocks(size: Size, until: float) -> dict[str, float]:
    """A transformer block, forward and backward, on a mesh of one device: each version over plain jit."""
    mesh: Any = spmd.make_mesh(dp=1, tp=1, devices=jax.devices()[:1])
    args = llama_block.arguments(size.block, mesh)
    every = llama_block.blocks(mesh)
    names = {"hand": "shard_map by hand", "spmd": "strings", "spmd.nn": "layers", "GSPMD": "plain jit"}
    versions = {}
    for name, shown in names.items():
        compiled = llama_block.step_of(every[name], mesh).lower(*args).compile()
        versions[shown] = functools.partial(compiled, *args)
    return medians(versions, size.repeats, until)


def transforms(size: Size, until: float) -> dict[str, float]:
    mesh = spmd.make_mesh(x=1, devices=jax.devices()[:1])
    x = spmd.shard(jnp.ones((size.cube,) * 3, jnp.complex64), "x/x y z", mesh=mesh)
    ours = spmd.kernel("x/x y z -> kx ky/x kz", mesh=mesh)(lambda x: spmd.fft.fft(x, "x/x y z -> kx ky/x kz"))
    theirs = jax.jit(jnp.fft.fftn)
    return medians({"spmd.fft": lambda: ours(x), "jnp.fft": lambda: theirs(x)}, size.repeats, until)


def experts(size: Size, until: float) -> dict[str, float]:
    """A mixture of experts, forward and backward, with random choices: without a capacity, and with one of 1.25."""
    tokens, d, e, f, k = size.experts
    mesh = spmd.make_mesh(ep=1, devices=jax.devices()[:1])
    shapes = ((1, tokens, d), (d, e), (e, d, f), (e, d, f), (e, f, d))
    args = [jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i, shape in enumerate(shapes)]
    x, *weights = (x / x.shape[-2] ** 0.5 if i else x for i, x in enumerate(args))
    layouts = ("b/ep s d", "d e", "e/ep d f", "e/ep d f", "e/ep f d")

    def step_of(factor: float | None) -> Any:
        @spmd.kernel(in_layouts=layouts, out_layouts="b/ep s d", mesh=mesh)
        def layer(x: Any, router: Any, *weights: Any) -> Any:
            routing = parallel.router(x, router, k=k)
            return parallel.moe(x, routing, *weights, capacity_factor=factor, dp=("ep",), ep="ep")[0]

        loss = lambda *args: jnp.sum(jnp.square(layer(*args).astype(jnp.float32)))
        return functools.partial(jax.jit(jax.grad(loss, argnums=(0, 2, 3, 4))), x, *weights)

    return medians({"dropless": step_of(None), "capacity": step_of(1.25)}, size.repeats, until)


# -------------------- the decoder


class Decoder(NamedTuple):
    """A training step of a dense decoder, from the layers of `spmd.nn`."""

    step: Any
    params: Any
    tokens: Any
    flops: float


def decoder(size: Size) -> Decoder:
    layers, d, heads, hidden, vocabulary, batch, length = size.decoder
    head, mesh = d // heads, spmd.make_mesh(dp=1, tp=1, devices=jax.devices()[:1])
    layouts = {
        "embed": "v/tp d",
        "layers": {
            **dict.fromkeys(("query", "key", "value"), "l d h/tp k"),
            "out": "l h/tp k d",
            **dict.fromkeys(("gate", "up"), "l d f/tp"),
            "down": "l f/tp d",
        },
    }
    implementation = "cudnn" if on_gpu() else None

    def layer(x: Any, w: Any) -> Any:
        turn = nn.rotary_frequencies(head)
        attention = {"frequencies": turn, "causal": True, "implementation": implementation, "tp": "tp"}
        y = nn.rms_norm(x)
        x = x + nn.multi_head_attention(y, w["query"], w["key"], w["value"], w["out"], **attention)
        return x + nn.gated_mlp(nn.rms_norm(x), (w["gate"], w["up"]), w["down"], tp="tp"), None

    def loss(params: Any, tokens: Any) -> Any:
        x = nn.embedding(tokens, params["embed"], tp="tp")
        # Products are kept, 27 GiB by the trace. Done again, they are a fifth of all FLOPs, which MFU does not count.
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=kept), x, params["layers"])
        following = jnp.roll(tokens, -1, axis=1)
        return nn.linear_cross_entropy(nn.rms_norm(x), params["embed"], following, dp="dp", tp="tp")

    @spmd.kernel(in_layouts=(layouts, "b/dp s"), out_layouts=("scalar", layouts), mesh=mesh)
    def step(params: Any, tokens: Any) -> Any:
        value, gradients = spmd.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda w, g: w - jnp.asarray(1e-3, w.dtype) * g, params, gradients)

    shapes = {"query": (d, heads, head), "key": (d, heads, head), "value": (d, heads, head), "out": (heads, head, d)}
    shapes |= {"gate": (d, hidden), "up": (d, hidden), "down": (hidden, d)}
    draw = lambda i, shape: (0.02 * jax.random.normal(jax.random.key(i), shape)).astype(jnp.bfloat16)
    params = {
        "embed": draw(0, (vocabulary, d)),
        "layers": {name: draw(i, (layers, *shape)) for i, (name, shape) in enumerate(shapes.items(), 1)},
    }
    tokens = jax.random.randint(jax.random.key(99), (batch, length), 0, vocabulary)
    # three products of two operations per weight and token, and the scores and sums of half of all pairs of tokens
    weights = sum(x.size for x in jax.tree.leaves(params))
    flops = 6 * weights * batch * length + 6 * layers * batch * length**2 * d
    return Decoder(step, params, tokens, float(flops))


def profile() -> Any:
    """The `Hardware` at hand; None for CPUs, which have no profile."""
    return spmd.accelerators.Hardware.from_devices(jax.devices()[:1]) if on_gpu() else None


def ceilings(machine: Any) -> Any:
    """The machine with the speed that one large product and one large copy have on it."""
    n, bytes_ = 8192, 2**31
    a = jax.random.normal(jax.random.key(0), (n, n)).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (bytes_ // 4,))
    product, copy = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1)
    taken = medians({"product": lambda: product(a), "copy": lambda: copy(x)}, 20, time.monotonic() + 20)
    speed = 2 * n**3 / taken["product"]
    flops = {name: peak * speed / machine.peak("bfloat16") for name, peak in machine.flops.items()}
    return dataclasses.replace(machine, flops=flops, hbm_bandwidth=2 * bytes_ / taken["copy"])


def training(size: Size, until: float, machine: Any) -> dict[str, float | None]:
    """Tokens per second and more, of the decoder in bfloat16."""
    made = decoder(size)
    jitted = jax.jit(made.step)
    seconds = {}
    start = time.perf_counter()
    traced = jitted.trace(made.params, made.tokens)
    seconds["trace"] = time.perf_counter() - start
    start = time.perf_counter()
    lowered = traced.lower()
    seconds["lower"] = time.perf_counter() - start
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds["compile"] = time.perf_counter() - start
    one = medians({"step": lambda: compiled(made.params, made.tokens)}, size.repeats, until)["step"]
    peak = predicted = serial = planned = used = None
    if machine is not None:
        peak = machine.peak("bfloat16")
        stats = jax.devices()[0].memory_stats() or {}  # none on CPUs
        used = stats.get("peak_bytes_in_use")  # of all that ran before, too: nothing larger
        predict = functools.partial(spmd.explain, jitted, made.params, made.tokens, compiled=compiled)
        told, real = predict(hardware=machine), predict(hardware=ceilings(machine))
        predicted, serial, planned = told.time.overlapped, real.time.serial, told.memory.total
    return {
        "peak_over_planned": None if used is None else used / planned,
        "measured_over_ceilings": None if serial is None else one / serial,
        "seconds": one,
        "tokens_per_second": made.tokens.size / one,
        "mfu": None if peak is None else made.flops / one / peak,
        "predicted_seconds": predicted,
        "measured_over_predicted": None if predicted is None else one / predicted,
        **{f"{name}_seconds": value for name, value in seconds.items()},
    }


# -------------------- the table


def measured(size: Size, seconds: float, machine: Any) -> dict[str, Any]:
    """All figures, in about so many seconds and what compiling takes; predicted for this machine."""
    start = time.monotonic()
    first = jax.devices()[0]
    return {
        "device": f"{first.device_kind} ({first.platform})",
        "jax": jax.__version__,
        "decoder": training(size, start + seconds / 3, machine),
        "block": blocks(size, start + seconds * 2 / 3),
        "transform": transforms(size, start + seconds * 5 / 6),
        "experts": experts(size, start + seconds),
    }


def table(found: dict[str, Any]) -> str:
    """One table: what, against whom, ratio."""
    block, transform, decoder = found["block"], found["transform"], found["decoder"]
    rows = [("what", "figure", "against")]
    for name in ("strings", "layers"):
        for other in ("shard_map by hand", "plain jit"):
            rows.append((f"block, {name}", f"{block[name] / block[other]:.3f}", other))
    rows.append(("fftn", f"{transform['spmd.fft'] / transform['jnp.fft']:.3f}", "jnp.fft.fftn"))
    experts = found["experts"]
    rows.append(
        ("experts without a capacity", f"{experts['dropless'] / experts['capacity']:.2f}", "a capacity of 1.25")
    )
    against = {
        "mfu": "the device's peak",
        "measured_over_predicted": "explain's time, all overlaps",
        "measured_over_ceilings": "explain's time with speeds measured here, nothing overlaps",
        "peak_over_planned": "explain's memory",
    }
    shown = {"tokens_per_second": "{:.0f} tokens/s", "mfu": "{:.1%} MFU", **dict.fromkeys([*against][1:], "{:.3f}")}
    for name, form in shown.items():
        figure = "-" if decoder[name] is None else form.format(decoder[name])
        rows.append((f"decoder, {name.replace('_', ' ')}", figure, against.get(name, "")))
    for name in ("trace", "lower", "compile"):
        rows.append((f"decoder, to {name}", f"{decoder[f'{name}_seconds']:.2f} s", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join((f"{found['device']}, jax {found['jax']}", *lines))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="where the figures go")
    parser.add_argument("--seconds", type=float, default=240, help="how long to repeat")
    options = parser.parse_args(argv)
    found = measured(LARGE if on_gpu() else SMALL, options.seconds, profile())
    Path(options.json).write_text(json.dumps(found, indent=1))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
