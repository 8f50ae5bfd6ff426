"""Decode with a transformer on a mesh: read whole prompts at once, then generate token by token from a divided cache.

    python examples/decode.py                                        # 8 virtual CPU devices
    python examples/decode.py --mesh dp=2,tp=4 --temperature 0       # greedy; rows over dp, heads over tp
    python examples/decode.py --mesh cp=4,tp=2 --prompt 512          # the slots of the cache over cp, heads over tp
    python examples/decode.py --experts 8 --mesh ep=4,tp=2           # mixture of experts
    python examples/decode.py --one                                  # compare with one device: the same tokens

The model is `transformer.py` with random weights. Its output means nothing, but it is the same on every mesh, also with
sampled tokens. Rows have prompts of different lengths. A ring over cp reads them in striped order, which leaves keys
and values on the devices that have their slots of the cache. No device ever holds all scores of the vocabulary:
choosing a token is an argmax over its parts.
"""

# test: --layers 1 --rows 4 --prompt 16 --new 4 --one

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from transformer import MAPPING, Config, Transformer

import spmd
from spmd import nn, parallel

# n key and value heads, at least one per device, so n is larger than in the model if that has fewer heads than devices.
CACHE = {"k": "l b/dp t/cp n/tp k", "v": "l b/dp t/cp n/tp k", "positions": "l b/dp t/cp"}
console = Console(highlight=False)


@dataclass(frozen=True)
class Decoder:
    """A transformer that generates text.

    Weights rest in the layouts in which they are used, and rows are divided over fsdp too. pp cannot be used. The two
    models differ in the sequence: that of a prompt is divided over cp, and that of a new token is whole.
    """

    model: Transformer
    slots: int
    temperature: float = 0.0

    @staticmethod
    def of(c: Config, mesh: Any, **options: Any) -> Decoder:
        c = replace(c, context="ring", placement="striped")
        return Decoder(Transformer(c, mesh, MAPPING.merge({"rest": None, "l": None})), **options)

    @property
    def names(self) -> dict[str, Any]:
        """The mesh axes of rows, slots and heads, for the strings below."""
        return {"dp": self.model.axes("b"), "cp": self.model.axes("s"), "tp": self.model.axes("h")}

    def read(self, params: Any, prompts: Any, lengths: Any, key: Any) -> Any:
        """Read prompts "b/dp s/cp" of `lengths` "b/dp" tokens; return the cache and the next tokens."""
        m, c, names = self.model, self.model.c, self.names
        rows = spmd.size("b")
        at = parallel.sequence_positions(spmd.size("s"), "striped", cp=names["cp"])
        positions = jnp.where(at[None] < lengths[:, None], at[None], -1)
        x = nn.embedding(prompts, params["embed"], tp=m.axes("v"), sp=m.axes("stream"), cp=names["cp"])

        def layer(x: Any, w: Any) -> Any:
            made = {}

            def attend(q: Any, k: Any, v: Any) -> Any:
                heads = spmd.size(k, "... [n/tp] k", tp=names["tp"])
                cache = nn.kv_cache(rows, self.slots, heads, c.head, k.dtype, **names)
                where = {"cp": names["cp"], "tp": names["tp"], "tokens": "striped"}
                made.update(nn.kv_cache_append(cache, k, v, positions, **where))
                return m.attend(q, k, v)

            return m.block(w, x, at, attend)[0], made

        x, cache = jax.lax.scan(layer, x, params["layers"])
        # One device has the last token of a row. A sum brings it to all devices.
        stream = {"dp": names["dp"], "cp": names["cp"], "sp": m.axes("stream")}
        last = spmd.split(at[None] == lengths[:, None] - 1, "b/dp s/cp -> b/dp s/cp/sp", **stream)
        last = spmd.reduce(jnp.where(last[..., None], x, jnp.zeros_like(x)), "b/dp s/cp/sp d -> b/dp d", **stream)
        return cache, self.choose(params, last, key)

    def write(self, params: Any, cache: Any, tokens: Any, positions: Any, key: Any) -> Any:
        """Add `tokens` "b/dp" at `positions` "b/dp", one per row; return the cache and the next tokens."""
        one = replace(self.model, mapping=self.model.mapping.merge({"s": None, "stream": None}))
        where = {"cp": self.names["cp"], "tp": self.names["tp"]}
        at = positions[:, None]
        x = nn.embedding(tokens[:, None], params["embed"], tp=one.axes("v"))

        def layer(x: Any, given: Any) -> Any:
            w, cache = given
            made = {}

            def attend(q: Any, k: Any, v: Any) -> Any:
                made.update(nn.kv_cache_append(cache, k, v, at, **where))
                return nn.cached_attention(q, made, at, **where)

            return one.block(w, x, at, attend)[0], made

        x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
        return cache, self.choose(params, x[:, 0], key)

    def choose(self, params: Any, x: Any, key: Any) -> Any:
        """The next tokens from the stream "b/dp d": the best, or sampled: the best after adding noise."""
        names = {"dp": self.names["dp"], "tp": self.model.axes("v")}
        scores = nn.unembedding(nn.rms_norm(x, params["norm"]), params["unembed"], tp=names["tp"])
        if self.temperature:
            # The same noise as on one device; each device draws its own part.
            shape = {"b": spmd.size("b"), "v": self.model.c.vocabulary}
            noise = spmd.random.uniform(key, "b/dp v/tp", minval=1e-7, **shape, **names)
            scores = scores / self.temperature - jnp.log(-jnp.log(noise))
        return spmd.argmax(scores, "b/dp [v/tp] -> b/dp", **names)

    @functools.cached_property
    def kernels(self) -> tuple[spmd.Kernel, spmd.Kernel]:
        """`read` and `write` as kernels. `write` reuses the buffers of the cache."""
        place = lambda text: spmd.Layout(text).bind(**self.names)
        row, prompts, out = place("b/dp"), place("b/dp s/cp"), (jax.tree.map(place, CACHE), place("b/dp"))
        weights, mesh = self.model.layouts, self.model.mesh

        @spmd.kernel(in_layouts=(weights, prompts, row, "scalar"), out_layouts=out, mesh=mesh)
        def read(params: Any, prompts: Any, lengths: Any, key: Any) -> Any:
            return self.read(params, prompts, lengths, key)

        @spmd.kernel(in_layouts=(weights, out[0], row, row, "scalar"), out_layouts=out, mesh=mesh, donate="cache")
        def write(params: Any, cache: Any, tokens: Any, positions: Any, key: Any) -> Any:
            return self.write(params, cache, tokens, positions, key)

        return read, write


# --- the run ------------------------------------------------------------------------------------------------


def generate(decoder: Decoder, params: Any, prompts: np.ndarray, lengths: np.ndarray, keys: Any) -> Any:
    """One token per row for each key. Also returns the seconds of each step and the arguments of the last step.

    The first token comes from the prompts. The first two steps include compilation.
    """
    read, write = decoder.kernels
    made, seconds = [], []
    began = time.perf_counter()
    cache, tokens = read(params, decoder.model.place(prompts), lengths, keys[0])
    for i in range(len(keys)):
        made.append(np.asarray(tokens))
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        if i + 1 < len(keys):
            cache, tokens = write(params, cache, tokens, lengths + i, keys[i + 1])
    return np.stack(made, 1), seconds, (params, cache, tokens, lengths, keys[0])


def run(c: Config, mesh: Any, options: argparse.Namespace) -> tuple[np.ndarray, list[float], Any]:
    """Generate from random weights and prompts, which are the same on every mesh."""
    decoder = Decoder.of(c, mesh, slots=options.slots, temperature=options.temperature)
    model, rng = decoder.model, np.random.default_rng(options.seed)
    params = model.init(jax.random.key(options.seed))
    prompts = rng.integers(0, c.vocabulary, (options.rows, options.prompt), np.int32)
    lengths = rng.integers(1, options.prompt + 1, options.rows, np.int32)
    keys = jax.random.split(jax.random.key(options.seed), options.new)
    made, seconds, last = generate(decoder, params, prompts, lengths, keys)
    return made, seconds, spmd.inspect.collectives(decoder.kernels[1], *last)


def main(argv: list[str] | None = None) -> np.ndarray:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--mesh", default="dp=2,cp=2,tp=2", help="axes and sizes: of dp, fsdp, cp, tp, ep")
    parser.add_argument("--devices", default="8", help="virtual CPU devices, or 'all' accelerators of this machine")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the best")
    parser.add_argument("--one", action="store_true", help="also run on one device and compare")
    for name, default, text in (
        ("rows", 8, "prompts"),
        ("prompt", 64, "tokens of the longest possible prompt; divides over cp and tp"),
        ("new", 64, "tokens to make for each row"),
        ("layers", 4, "of the model"),
        ("d", 128, "its width"),
        ("experts", 0, "in each layer; 0: a dense model"),
        ("seed", 0, "of weights, prompts, lengths and noise"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    options = parser.parse_args(argv)
    devices = spmd.use_cpu_devices(int(options.devices)) if options.devices != "all" else jax.devices()
    sizes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    mesh = spmd.make_mesh(**sizes, devices=devices[: math.prod(sizes.values())])
    options.slots = -(-(options.prompt + options.new) // sizes.get("cp", 1)) * sizes.get("cp", 1)
    c = Config(layers=options.layers, d=options.d, head=16, heads=8, kv_heads=4, experts=options.experts)

    made, seconds, sent = run(c, mesh, options)
    table = Table("row", "its tokens", box=None)
    for i, row in enumerate(made[:4]):
        table.add_row(str(i), " ".join(map(str, row[:24])) + " ..."[: 4 * (len(row) > 24)])
    console.print(f"mesh {dict(mesh.shape)}, {options.rows} prompts of up to {options.prompt} tokens\n", table, "")
    console.print("[bold]what a device sends for one token of every row[/bold]")
    console.print(sent.table(), markup=False)
    steady = statistics.median(seconds[2:] or seconds)
    console.print(f"\n{options.rows / steady:,.0f} tokens/s, {sent.total_bytes / options.rows:,.0f} bytes per token")
    if options.one:
        alone = run(c, spmd.make_mesh(one=1, devices=devices[:1]), options)[0]
        console.print(f"one device makes the same tokens: {np.array_equal(alone, made)}")
        if not np.array_equal(alone, made):
            raise SystemExit(1)
    return made


if __name__ == "__main__":
    main()
