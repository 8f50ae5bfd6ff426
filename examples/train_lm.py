"""Train a language model on a mesh of devices: FSDP, tensor and sequence parallelism in layout strings.

    pip install -e ".[examples]"
    python examples/train_lm.py                              # 8 virtual CPU devices, two to three minutes on 2 cores
    python examples/train_lm.py --devices all --tp 4 --bf16  # the GPUs or TPUs of this machine
    python examples/train_lm.py --mode auto                  # the same program, its communication left to the compiler
    python examples/train_lm.py --help                       # every setting
    python -m spmd launch -n 2 --devices 4 examples/train_lm.py                # the same run in two processes
    python examples/train_lm.py --checkpoint run --every 100                   # saved; the same command goes on

A decoder-only transformer (RMSNorm, rotary positions, grouped-query attention, SwiGLU) reads the source files of
Python's standard library byte by byte, or any text given with `--data`, and must predict the next byte better than the
bigrams of that text do. Begin reading at "the layouts": the whole model is in this file.

The letters in the strings:

    w windows of a step   b of a micro-batch   m micro-batches   n bytes of a window   s sequence (n - 1)
    t sequence, as attention looks back on it   d model   l layers   f hidden   v vocabulary   k head
    g groups of query heads, one key and value head each   r query heads in a group
    mesh axes: dp data parallel and FSDP, tp tensor and sequence parallel
"""

# test: --steps 2 --layers 1 --d 32 --hidden 48 --seq 32 --heldout 2048 --sample 4

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import text_bytes  # beside this file: plain NumPy

try:
    import optax
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is not installed: pip install -e '.[examples]'") from None

import spmd
from spmd import all_gather, cluster, defer, einsum, psum, psum_scatter, rearrange, reduce

# --- what can be set ----------------------------------------------------------------------------------------


def option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting; each is also a command-line flag. Frozen and therefore hashable, for a static argument of jit."""

    d: int = option(128, "width of the model")
    layers: int = option(3, "number of layers")
    groups: int = option(4, "key and value heads; divides over tp")
    queries: int = option(2, "query heads in each group")
    head: int = option(16, "width of a head, even")
    hidden: int = option(384, "width of the hidden layer of the MLP; divides over tp")
    tied: bool = option(False, "one table for embedding and output")
    bf16: bool = option(False, "compute in bfloat16; the weights stay float32")
    seq: int = option(128, "bytes to predict in a window; divides over tp")
    batch: int = option(16, "windows in a step, all micro-batches together")
    accumulate: int = option(1, "micro-batches in a step; gradients are still reduced once per step")
    steps: int = option(1000, "training steps")
    lr: float = option(4e-3, "highest learning rate, of a cosine schedule")
    decay: float = option(0.1, "weight decay, not of the norms")
    seed: int = option(0, "of parameters, batches, held-out files and the sample")
    mode: str = option("explicit", "explicit, auto or reference")
    devices: str = option("8", "virtual CPU devices of a process, or 'all' accelerators of this machine")
    dp: int = option(0, "size of the mesh axis dp; 0: what tp leaves")
    tp: int = option(0, "size of the mesh axis tp; 0: up to 2")
    data: str = option("", "a file or folder of text; by default Python's standard library")
    heldout: int = option(2**19, "bytes of the held-out files to score")
    sample: int = option(160, "bytes to generate at the end")
    compare: bool = option(True, "compare a step with the compiler's own choice of communication at the end")
    checkpoint: str = option("", "save the training state in this folder, and go on from what is there")
    every: int = option(100, "steps from one checkpoint to the next")
    stopped: int = option(0, "exit code of a run that a signal has stopped and that is saved")
    json: str = option("", "write the results to this file")
    plot: str = option("", "save the loss curve here; by default in a new folder for temporary files")

    @property
    def dtype(self) -> Any:
        return jnp.bfloat16 if self.bf16 else jnp.float32


def read_flags(argv: list[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    for field in dataclasses.fields(Config):
        kind: dict[str, Any] = {"type": type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        text = f"{field.metadata['help']} ({field.default})" if field.default != "" else field.metadata["help"]
        parser.add_argument(f"--{field.name}", default=field.default, help=text, **kind)
    return Config(**vars(parser.parse_args(argv)))


# --- the layouts --------------------------------------------------------------------------------------------

# The layout of every parameter. tp divides heads, hidden units and vocabulary (tensor parallelism). dp divides the
# model's width, for storage only (FSDP): no device holds a whole matrix between steps. The norms are small, and every
# device keeps them. Layers are stacked along l, for scan.
PARAMETERS = {
    "**/vocab/*": "v/tp d/dp",
    "**/layers/query": "l d/dp g/tp r k",
    "**/layers/key": "l d/dp g/tp k",
    "**/layers/value": "l d/dp g/tp k",
    "**/layers/attended": "l d/dp g/tp r k",
    "**/layers/gate": "l d/dp f/tp",
    "**/layers/up": "l d/dp f/tp",
    "**/layers/down": "l d/dp f/tp",
    "**/norms/final": "d",
    "**/norms/attention": "l d",
    "**/norms/mlp": "l d",
}


def layouts(tree: Any) -> Any:
    """The layouts of the parameters, and of their gradients."""
    return spmd.match_layouts(tree, PARAMETERS)


def state_layouts(tree: Any) -> Any:
    """The layouts of the training state: Adam's moments have the layouts of their parameters, by the same rules."""
    return spmd.match_layouts(tree, {**PARAMETERS, "**/count": "scalar"})


def new_parameters(key: jax.Array, c: Config) -> dict[str, Any]:
    """Random parameters: ordinary JAX on whole arrays. Under `spmd.init` each device draws its own part."""
    keys = iter(jax.random.split(key, 16))

    def matrix(inputs: int, *shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(inputs)

    deep = 2 * c.layers  # each layer adds to the residual stream twice; the sum should not grow with depth
    tables = ("embed",) if c.tied else ("embed", "unembed")
    return {
        "vocab": {name: matrix(c.d, 256, c.d) for name in tables},
        "layers": {
            "query": matrix(c.d, c.layers, c.d, c.groups, c.queries, c.head),
            "key": matrix(c.d, c.layers, c.d, c.groups, c.head),
            "value": matrix(c.d, c.layers, c.d, c.groups, c.head),
            "attended": matrix(c.groups * c.queries * c.head * deep, c.layers, c.d, c.groups, c.queries, c.head),
            "gate": matrix(c.d, c.layers, c.d, c.hidden),
            "up": matrix(c.d, c.layers, c.d, c.hidden),
            "down": matrix(c.hidden * deep, c.layers, c.d, c.hidden),
        },
        "norms": {
            "final": jnp.ones(c.d),
            "attention": jnp.ones((c.layers, c.d)),
            "mlp": jnp.ones((c.layers, c.d)),
        },
    }


# --- the model, as one device sees it -----------------------------------------------------------------------
#
# The residual stream is "b/dp s/tp d": between blocks each device keeps its rows and its part of the sequence. A
# block gathers the sequence, multiplies by its part of the heads or hidden units, and the einsum that ends it
# sums over tp and scatters back onto s in one reduce-scatter.


def norm(x, scale):  # "b/dp s/tp d", "d"
    """RMSNorm. d is whole on each device, so plain JAX may work along it."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def rotate(x):  # "... s k": queries and keys alike
    """Rotary positions. s is whole here, and its positions are those of the whole sequence."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[-2])[:, None] * speeds
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attention(x, w):
    x = all_gather(x, "b/dp s/tp d -> b/dp s d")
    query = rotate(einsum(x, w["query"], "b/dp s d, d g/tp r k -> b/dp g/tp r s k"))
    key = rotate(einsum(x, w["key"], "b/dp s d, d g/tp k -> b/dp g/tp s k"))
    value = einsum(x, w["value"], "b/dp s d, d g/tp k -> b/dp g/tp s k")
    scores = einsum(query, key, "b/dp g/tp r s k, b/dp g/tp t k -> b/dp g/tp r s t").astype(jnp.float32)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))  # s and t are whole: each byte sees those before it
    look = spmd.softmax(scores / math.sqrt(query.shape[-1]), "b/dp g/tp r s [t]", where=seen).astype(x.dtype)
    mixed = einsum(look, value, "b/dp g/tp r s t, b/dp g/tp t k -> b/dp g/tp r s k")
    return einsum(mixed, w["attended"], "b/dp g/tp r s k, d g/tp r k -> b/dp s/tp d")


def mlp(x, w):
    x = all_gather(x, "b/dp s/tp d -> b/dp s d")
    gate = einsum(x, w["gate"], "b/dp s d, d f/tp -> b/dp s f/tp")
    up = einsum(x, w["up"], "b/dp s d, d f/tp -> b/dp s f/tp")
    return einsum(jax.nn.silu(gate) * up, w["down"], "b/dp s f/tp, d f/tp -> b/dp s/tp d")


def layer(x, weights):
    w, norms = weights
    x = x + attention(norm(x, norms["attention"]), w)
    return x + mlp(norm(x, norms["mlp"]), w), None


def model(weights, tokens):
    """The residual stream after the last layer, with the whole sequence. tokens: "b/dp s"."""
    # Each device looks up the rows of the table that it has. Their sum is scattered onto the sequence.
    x = spmd.take(weights["vocab"]["embed"], tokens, "[v/tp] d, b/dp s -> b/dp s/tp d")
    # remat: the backward pass computes each layer again instead of keeping what is inside it
    norms = {name: weights["norms"][name] for name in ("attention", "mlp")}
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, (weights["layers"], norms))
    return all_gather(norm(x, weights["norms"]["final"]), "b/dp s/tp d -> b/dp s d")


def logits(weights, x):  # "b/dp s d", or any dimensions between b and d
    """Scores for the next byte. Each device computes those of its part of the vocabulary."""
    table = weights["vocab"].get("unembed", weights["vocab"]["embed"])
    return einsum(x, table, "b/dp ... d, v/tp d -> b/dp ... v/tp", preferred_element_type=jnp.float32)


def mean_loss(weights, windows):
    """The cross-entropy of each byte of "b/dp n" given the bytes before it, in nats. No device has all logits."""
    tokens, labels = windows[:, :-1], windows[:, 1:]  # n is whole
    scores = logits(weights, model(weights, tokens))
    # Only arrays "b/dp s" travel between the devices of the vocabulary: a maximum, a sum, and the label's logit. One
    # device finds that logit by comparing the global positions of its part of v with the label.
    here = spmd.iota("v/tp") == labels[..., None]
    right = reduce(jnp.where(here, scores, 0.0), "b/dp s v/tp -> b/dp s")
    loss = reduce(scores, "b/dp s v/tp -> b/dp s", "logsumexp") - right
    # The mean divides by the global count. {U:dp} leaves each dp row with its part of the mean: the sum over dp comes
    # later.
    return reduce(loss, "b/dp s -> {U:dp}", "mean")


# --- one step: loss and gradients, reduced once -------------------------------------------------------------


def gather(parameters, dtype):
    """The weights as the model uses them, before the loop over micro-batches.

    FSDP gathers once per step, and so reduces gradients once. (For ZeRO-3, which holds one gathered layer, move the
    middle line into `layer` and remove its counterpart below. Each micro-batch then gathers and reduces.)
    """
    vocab, layers = jax.tree.map(lambda w: w.astype(dtype), (parameters["vocab"], parameters["layers"]))
    return {
        "vocab": all_gather(vocab, "v/tp d/dp -> v/tp d"),
        "layers": all_gather(layers, "l d/dp ... -> l d ..."),
        # These are whole, but data divided over dp and sequences divided over tp use them. Without `defer`, each use
        # would sum its gradient over both at once. With it, the gradients are partial sums until we reduce them.
        "norms": defer(parameters["norms"], "... -> ... {R:dp,tp}"),
    }


def reduce_gradients(gradients):
    """The reverse of `gather`: partial sums become complete, in the layouts of the parameters."""
    return {
        "vocab": psum_scatter(gradients["vocab"], "v/tp d {U:dp} -> v/tp d/dp"),
        "layers": psum_scatter(gradients["layers"], "l d ... {U:dp} -> l d/dp ..."),
        "norms": psum(gradients["norms"], "... {U:dp,tp} -> ..."),
    }


def micro_batches(windows, c):
    """The batch in parts: every m-th window, so that each device cuts up its own rows."""
    return rearrange(windows, "(b m)/dp n -> m b/dp n", b=c.batch // c.accumulate)


@spmd.kernel(in_layouts=(layouts, "w/dp n"), out_layouts=("scalar", layouts), static="c")
def loss_and_gradients(parameters, windows, c):
    weights = gather(parameters, c.dtype)

    def micro_batch(totals, windows):
        found = spmd.value_and_grad(mean_loss, loss="{U:dp}")(weights, windows)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), totals, found), None

    # The sums are float32 and have the gathered shapes. Nothing is reduced before the last micro-batch.
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), weights)
    (loss, gradients), _ = jax.lax.scan(micro_batch, (spmd.zeros("{U:dp}"), zeros), micro_batches(windows, c))
    loss, gradients = jax.tree.map(lambda x: x / c.accumulate, (loss, gradients))
    return psum(loss, "{U:dp} -> scalar"), reduce_gradients(gradients)


def optimizer(c: Config) -> optax.GradientTransformation:
    """An optimizer of optax, outside the kernel: it works on sharded arrays, which are in place already."""
    schedule = optax.warmup_cosine_decay_schedule(c.lr / 10, c.lr, min(50, c.steps // 10), c.steps, c.lr / 20)
    decayed = {"vocab": True, "layers": True, "norms": False}
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=c.decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def new_state(key: jax.Array, c: Config) -> dict[str, Any]:
    parameters = new_parameters(key, c)
    return {"parameters": parameters, "optimizer": optimizer(c).init(parameters)}


@functools.partial(jax.jit, static_argnames="c", donate_argnames="state")
def train_step(state, windows, c: Config):
    loss, gradients = loss_and_gradients(state["parameters"], windows, c)
    changes, moments = optimizer(c).update(gradients, state["optimizer"], state["parameters"])
    state = {"parameters": optax.apply_updates(state["parameters"], changes), "optimizer": moments}
    return spmd.shard(state, state_layouts), loss  # in the same layouts: the next step reuses the buffers


# --- the trained model --------------------------------------------------------------------------------------


@spmd.kernel(in_layouts=(layouts, "w/dp n"), out_layouts="scalar", static="c")
def evaluate(parameters, windows, c):
    """The mean loss over many windows."""
    weights = gather(parameters, c.dtype)
    losses = jax.lax.map(lambda batch: mean_loss(weights, batch), micro_batches(windows, c))
    return reduce(losses, "m {U:dp} -> scalar", "mean")


@spmd.kernel(in_layouts=(layouts, "b/dp s", "c"), out_layouts="c b", static="c")
def generate(parameters, prompts, keys, c):
    """Continue "b/dp s" by one byte per key: "c". Sampling is an argmax over v/tp: no device has all logits."""
    weights = gather(parameters, c.dtype)

    def next_byte(tokens, key):
        scores = logits(weights, model(weights, tokens)[:, -1])  # s is whole
        # the same noise as on one device; each device draws its own part
        noise = -jnp.log(-jnp.log(spmd.random.uniform(key, "b/dp v/tp", minval=1e-7)))
        byte = spmd.argmax(scores / 0.7 + noise, "b/dp [v/tp] -> b/dp")
        return jnp.concatenate([tokens[:, 1:], byte[:, None]], axis=1), byte

    return all_gather(jax.lax.scan(next_byte, prompts, keys)[1], "c b/dp -> c b")  # to every process


# --- the text -----------------------------------------------------------------------------------------------


class Windows:
    """The text as samples: a window, and the byte after it. Each byte is predicted once in an epoch."""

    def __init__(self, text: np.ndarray, c: Config):
        self.text, self.seq = text, c.seq

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq

    def __getitem__(self, index: int) -> np.ndarray:
        return self.text[index * self.seq : (index + 1) * self.seq + 1].astype(np.int32)


def batches(text: np.ndarray, c: Config, mesh: Any) -> cluster.Batches:
    """The data: batch i depends only on the seed and on i. Each process reads only the windows of its own devices."""
    return cluster.batches(Windows(text, c), "w/dp n", batch=c.batch, seed=c.seed, mesh=mesh)


def all_windows(text: np.ndarray, c: Config, mesh: Any) -> jax.Array:
    """The whole text in order, as one batch. The end is left out if it does not fill one for training."""
    windows = Windows(text, c)
    count = len(windows) // c.batch * c.batch
    return cluster.batches(windows, "w/dp n", batch=count, shuffle=False, mesh=mesh)[0]


# --- output -------------------------------------------------------------------------------------------------

console = Console(highlight=False)


def show_parameters(parameters: Any) -> dict[str, Any]:
    """Each parameter with its layout, its shape, and the shape of a device's block."""
    table = Table("parameter", "layout", "shape", "on each device", box=None)
    found = {}
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    for (path, x), layout in zip(leaves, jax.tree.leaves(layouts(parameters)), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        block = x.sharding.shard_shape(x.shape)
        found[name] = {"layout": str(layout), "shape": x.shape, "block": block}
        table.add_row(name, str(layout), str(x.shape), str(block))
    console.print(table)
    console.print(f"{sum(x.size for x in jax.tree.leaves(parameters)):,} parameters\n")
    return found


def save_curve(path: Path, results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bits = np.array(results["losses"]) / math.log(2)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(results["first"] + np.arange(len(bits)), bits, lw=0.8, label="training")
    for name, style in (("unigram", ":"), ("bigram", "--"), ("heldout", "-")):
        if f"{name}_bits" in results:
            axes.axhline(results[f"{name}_bits"], ls=style, color="black", lw=1, label=name)
    axes.set(xlabel="step", ylabel="bits per byte", title="a language model and its text")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- the run ------------------------------------------------------------------------------------------------


def choose_mesh(c: Config) -> Any:
    """A mesh of the devices of all processes."""
    tp = c.tp or math.gcd(2, jax.device_count() // (c.dp or 1))
    return spmd.make_mesh(dp=c.dp or -1, tp=tp)


def compile_step(state: Any, batch: Any, c: Config, mode: str) -> tuple[Any, dict[str, float]]:
    """The training step for one mode, and the times of tracing and compiling."""
    with spmd.mode(mode):
        start = time.perf_counter()
        lowered = train_step.lower(state, batch, c)
        traced = time.perf_counter()
        cluster.same_program(lowered)
        compiled = lowered.compile()
    return compiled, {"trace_and_lower": traced - start, "compile": time.perf_counter() - traced}


def train(
    step: Any, state: Any, data: cluster.Batches, first: int, saved: cluster.Checkpoints | None, c: Config
) -> tuple[Any, list[float], list[float]]:
    """The steps from `first` on, under a progress bar. Returns the state, the losses and the seconds of each step."""
    losses: list[float] = []
    seconds: list[float] = []
    with Progress(console=console) as bar:
        task = bar.add_task("training", total=c.steps, completed=first)
        for i in range(first, c.steps):
            if cluster.stopping(i):  # a signal to any process ends all of them here
                break
            start = time.perf_counter()
            state, loss = step(state, next(data))
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
            if saved and (i + 1) % c.every == 0:
                saved.save(i + 1, state, data=data)
                console.print(f"step {i + 1}: loss {losses[-1]:.3f}, saving")
            rate = c.batch * c.seq / statistics.median(seconds[-50:])
            recent = statistics.mean(losses[-20:])
            bar.update(task, advance=1, description=f"loss {recent:.3f}, {rate:,.0f} tokens/s")
    if saved:
        saved.save(first + len(losses), state, data=data)
        saved.close()
    return state, losses, seconds


def compare_modes(explicit: Any, state: Any, batch: jax.Array, c: Config) -> dict[str, Any]:
    """One step from the same state in explicit and in auto mode: the loss is the same, and the bytes are compared.

    The compiler's choice in auto mode differs between CPU, GPU and TPU. Measure it where you train.
    """
    reports = {}
    console.print("[bold]the same step, and with its communication left to the compiler[/bold]")
    for mode, step in (("explicit", explicit), ("auto", compile_step(state, batch, c, "auto")[0])):
        _, loss = step(jax.tree.map(jnp.copy, state), batch)  # copies: the step reuses its argument's buffers
        report = spmd.inspect.collectives(step)
        reports[mode] = {"loss": float(loss), **report.to_dict()}
        console.print(f"  {mode:8} loss {loss:.5f}, {str(report).splitlines()[-1]}", soft_wrap=True)
    return reports


def show_sample(parameters: Any, text: np.ndarray, c: Config, mesh: Any) -> None:
    """The model continues the beginnings of held-out windows, one per dp row. The first is shown."""
    starts = np.linspace(0, len(text) - c.seq, mesh.shape["dp"] + 1).astype(int)[:-1]
    prompts = text[starts[:, None] + np.arange(c.seq)].astype(np.int32)
    keys = jax.random.split(jax.random.key(c.seed), c.sample)
    made = generate(parameters, spmd.shard(prompts, "b/dp s"), keys, c)  # every process has all prompts
    prompt, more = (bytes(np.asarray(x, np.uint8)).decode("latin-1") for x in (prompts[0], made[:, 0]))
    console.print("\n[bold]a sample[/bold] (what it was given is dim)")
    console.print(f"[dim]{escape(prompt)}[/dim]{escape(more)}\n")


def run(c: Config, mesh: Any) -> dict[str, Any]:
    """Train, score, sample and compare, on this mesh and in this mode."""
    train_text, heldout_text = text_bytes.split(c.data, c.heldout, c.seed, least=c.batch * c.seq + 1)
    console.print(f"text: {len(train_text):,} bytes to train on, {len(heldout_text):,} held out\n")
    data = batches(train_text, c, mesh)

    # Created sharded: each device computes and holds its own part of the parameters and of Adam's moments.
    make, key = spmd.init(functools.partial(new_state, c=c), state_layouts), jax.random.key(c.seed)
    saved = cluster.checkpoints(c.checkpoint) if c.checkpoint else None
    state, first = saved.restore(make, key, data=data) if saved else (make(key), 0)
    parameters = show_parameters(state["parameters"])

    step, timings = compile_step(state, data[first], c, c.mode)
    collectives = spmd.inspect.collectives(step)
    console.print(f"[bold]the collectives of one step, {c.mode} mode[/bold]")
    console.print(collectives.table(), markup=False, end="\n\n")

    if first:
        console.print(f"step {first} was saved in {c.checkpoint}: training goes on", soft_wrap=True)
    state, losses, seconds = train(step, state, data, first, saved, c)
    if seconds:
        timings["step"] = statistics.median(seconds)
        timings["tokens_per_second"] = c.batch * c.seq / timings["step"]
    unigram, bigram = text_bytes.entropies(heldout_text)
    results = {
        "first": first,
        "losses": losses,
        "unigram_bits": unigram,
        "bigram_bits": bigram,
        "mesh": dict(mesh.shape),
        "parameters": parameters,
        "collectives": {c.mode: collectives.to_dict()},
        "timings": timings,
    }
    done = first + len(losses)
    if done < c.steps:
        where = f"which is saved in {c.checkpoint}" if saved else "which is not saved: there is no --checkpoint"
        console.print(f"stopped after step {done} of {c.steps}, {where}", soft_wrap=True)
        if saved:  # who stopped it may not wait for more than that
            return results

    loss = evaluate(state["parameters"], all_windows(heldout_text, c, mesh), c)
    results["heldout_bits"] = float(loss) / math.log(2)
    console.print("\n[bold]held-out text, bits per byte[/bold]")
    for label, name in (("unigram entropy", "unigram"), ("bigram entropy", "bigram"), ("this model", "heldout")):
        console.print(f"  {label:16} {results[f'{name}_bits']:.3f}")
    if c.sample:
        show_sample(state["parameters"], heldout_text, c, mesh)
    if c.compare and c.mode == "explicit" and done == c.steps:
        results["collectives"] = compare_modes(step, state, data[done], c)
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    c = read_flags(argv)
    began = time.perf_counter()
    cluster.initialize(cpu_devices=None if c.devices == "all" else int(c.devices))  # joins the other processes, if any
    cluster.stopping(0)  # from here on a signal ends the run in order
    console.quiet = jax.process_index() != 0
    mesh = choose_mesh(c)
    console.print(f"mesh: {dict(mesh.shape)} of {mesh.devices.flat[0].platform} devices, {c.mode} mode")

    # The mesh and the mode are set once, here: kernels, init and data placement find them. Reference mode runs on one
    # device, so its mesh only has names and sizes.
    one = c.mode == "reference"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if one else jax.set_mesh(mesh), spmd.mode(c.mode):
        results = run(c, mesh)

    results["timings"]["total"] = time.perf_counter() - began
    if jax.process_index() == 0:
        write(results, c)
    if c.stopped and "heldout_bits" not in results:
        raise SystemExit(c.stopped)
    return results


def write(results: dict[str, Any], c: Config) -> None:
    """What stays of a run: files, and its times. The run is over, so a file that cannot be written does not fail it."""
    console.print(", ".join(f"{name} {value:,.4g}" for name, value in results["timings"].items()))
    try:
        if c.json:
            Path(c.json).write_text(json.dumps(results))
        plot = Path(c.plot or Path(tempfile.mkdtemp(prefix="train_lm-")) / "loss.png")
        save_curve(plot, results)
        console.print(f"loss curve: {plot}", soft_wrap=True)
    except OSError as error:
        console.print(f"[red]not written: {escape(str(error))}[/red]", soft_wrap=True)


if __name__ == "__main__":
    main()
