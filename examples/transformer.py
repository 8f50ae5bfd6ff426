"""A decoder-only transformer, dense or mixture of experts. Only the mesh and a mapping choose its parallelism.

    dp    data parallel        rows of tokens
    fsdp  fully sharded        rows of tokens, and the weights at rest, gathered layer by layer
    tp    tensor parallel      heads, hidden units, vocabulary
    sp    sequence parallel    between the layers tokens too, over the axis of tp: the rule "stream" of the mapping
    cp    context parallel     the sequence, in attention too
    ep    expert parallel      rows of tokens, and experts
    pp    pipeline parallel    layers; before and after them rows of tokens

Any combination works: `spmd.make_mesh(fsdp=2, cp=2, tp=2)`. An axis that the mesh lacks, or that has size
1, does not divide anything. Loss
and gradients are those of one device on every mesh. With experts this needs the same `micro`, and either no dropped
choices (`capacity=None`) or the same ones on every mesh (`groups` given, `placement="contiguous"`).

The letters: b rows of tokens, s sequence, l layers, d model, h query heads, g key and value heads, k size of a head, f
hidden units, e experts, v vocabulary. `train_moe_long.py` trains this model, and `decode.py` generates text.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd import nn, parallel

# Which mesh axes divide what. Axes that the mesh lacks do not count.
MAPPING = spmd.AxisMapping(
    {
        "b": ("dp", "fsdp", "ep"),  # the axes that divide experts also divide the rows of tokens, as the last ones
        "s": "cp",
        "stream": "tp",  # the sequence between the layers, besides s; None: tensor without sequence parallel
        "rest": "fsdp",  # d of the weights at rest
        "h": "tp",
        "f": "tp",
        "v": "tp",
        "e": "ep",
        "l": "pp",  # outside of the layers the rows of tokens too
    }
)

# The dimensions of the weights. "/1": never divided.
NAMES = {
    "embed": "v d",
    "unembed": "v d",
    "norm": "d/1",
    "norm_attention": "l d/1",
    "norm_mlp": "l d/1",
    "query": "l d h k",
    "key": "l d g k",
    "value": "l d g k",
    "out": "l h k d",
}
DENSE = {"gate": "l d f", "up": "l d f", "down": "l f d"}
EXPERTS = {"router": "l d/1 e/1", "gate": "l e d f", "up": "l e d f", "down": "l e f d"}


@dataclass(frozen=True)
class Config:
    """What to compute. It does not say where."""

    vocabulary: int = 256
    layers: int = 2
    d: int = 64
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    hidden: int = 128
    experts: int = 0  # 0: a dense model
    chosen: int = 2  # experts of each token
    capacity: float | None = None  # places per expert in units of a balanced load; None: no capacity, and no drops
    groups: tuple[int, int] | None = None  # of tokens, within which the capacity holds: see parallel.moe
    balance: float = 1e-2  # weight of the loss that balances experts
    z_loss: float = 1e-3  # weight of the squared logsumexp of the router
    context: str = "ring"  # how attention sees the divided sequence: "ring" or "ulysses"
    placement: str = "zigzag"  # of the tokens in a ring
    window: int | None = None  # how far back a token sees, including itself
    implementation: str | None = None  # of attention to whole sequences: "cudnn" on GPUs, which needs bfloat16
    theta: float = 10_000.0  # base of the rotary positions
    micro: int = 1  # micro-batches of a pipeline
    rounds: int | None = (
        None  # of a pipeline: with v of them, the stack of layers is in the order "p v ..." of its stages
    )
    slots: int | None = (
        None  # rows of the stack of layers, if a pipeline needs more: the layers behind `layers` do nothing
    )
    chunks: int = 2  # of the sequence, in the loss
    dtype: str = "float32"  # of the weights in use, and of activations
    save: str = "activations"  # "inputs": each layer is computed again in the backward pass
    prefetch: bool = False  # whether the next layer's weights are gathered during this one


@dataclass(frozen=True)
class Transformer:
    """The model on a mesh, under a mapping."""

    c: Config
    mesh: Any
    mapping: spmd.AxisMapping = MAPPING

    # --- placement ------------------------------------------------------------------------------------------

    def axes(self, *names: str) -> tuple[str, ...] | None:
        """The mesh axes of these dimensions, or None. An axis of size 1 does not count."""
        found = [axis for name in names for axis in self.mapping.get(name, ()) if self.mesh.shape.get(axis, 1) > 1]
        return tuple(dict.fromkeys(found)) or None

    @property
    def kv_heads(self) -> str:
        """Key heads are whole if there are fewer than devices: each device takes those that its queries look at."""
        heads = math.prod(self.mesh.shape[axis] for axis in self.axes("h") or ())
        return "whole" if self.c.kv_heads % heads else "divided"

    @property
    def placement(self) -> str:
        return self.c.placement if self.c.context == "ring" else "contiguous"

    def layouts(self, params: Any, d: str | None = "rest") -> Any:
        """The layouts of all or some weights: at rest, or in use with d=None."""
        rules = {name: self.axes(name) for name in "lkhfve"}
        rules |= {"d": d and self.axes(d), "g": self.axes("h") if self.kv_heads == "divided" else None}
        names = {**NAMES, **(EXPERTS if self.c.experts else DENSE)}
        by_key = jax.tree_util.tree_map_with_path(lambda path, _: names[path[-1].key], params)
        return parallel.mapped_layouts(params, by_key, rules)

    @property
    def tokens(self) -> spmd.Layout:
        return spmd.Layout("b s").resolve(spmd.AxisMapping({"b": self.axes("b", "l"), "s": self.axes("s")}))

    def place(self, tokens: np.ndarray) -> Any:
        """Tokens or labels from the host, in the order that the ring needs."""
        blocks = math.prod(self.mesh.shape[axis] for axis in self.axes("s") or ())
        order = parallel.sequence_order(tokens.shape[1], blocks, self.placement)
        return spmd.from_process_local(tokens[:, order], self.tokens, mesh=self.mesh)

    # --- the model, as one device sees it -------------------------------------------------------------------

    def block(self, w: Any, x: Any, positions: Any, attend: Any) -> tuple[Any, Any]:
        """One layer of the stream "b s/cp/sp d", and the report of its experts."""
        c, sp, cp = self.c, self.axes("stream"), self.axes("s")
        y = nn.rms_norm(x, w["norm_attention"])
        turn = nn.rotary_frequencies(c.head, theta=c.theta)
        heads = {"attend": attend, "frequencies": turn, "positions": positions, "kv_heads": self.kv_heads}
        weights = (w["query"], w["key"], w["value"], w["out"])
        x = x + nn.multi_head_attention(y, *weights, **heads, tp=self.axes("h"), sp=sp, cp=cp)
        y = nn.rms_norm(x, w["norm_mlp"])
        weights, tp = (w["gate"], w["up"], w["down"]), self.axes("f")
        if not c.experts:
            return x + nn.gated_mlp(y, weights[:2], weights[2], tp=tp, sp=sp, cp=cp), None
        routing = parallel.router(y, w["router"], k=c.chosen)
        where: dict[str, Any] = {"dp": self.axes("b"), "sp": self.axes("s", "stream"), "ep": self.axes("e"), "tp": tp}
        y, report = parallel.moe(y, routing, *weights, **where, groups=c.groups, capacity_factor=c.capacity)
        return x + y, report

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Causal attention of "b s/cp h/tp k": over whole sequences, by a ring, or by all-to-alls."""
        cp, how = self.axes("s"), {"tp": self.axes("h"), "causal": True, "window": self.c.window}
        whole = how | {"implementation": self.c.implementation}
        if cp is None:
            return nn.dot_product_attention(q, k, v, **whole)
        if self.c.context == "ulysses":
            return parallel.ulysses_attention(q, k, v, cp=cp, **whole)
        return parallel.ring_attention(q, k, v, cp=cp, placement=self.placement, **how)

    def gather(self, params: Any, over: tuple[str, ...]) -> Any:
        """Weights in use. Gradients are summed once over the tokens that `over` divides, in the layouts at rest."""
        where = self.layouts(params), self.layouts(params, None)
        return parallel.gather(params, *where, dtype=self.c.dtype, data=self.axes(*over))

    def layer(self, w: Any, carry: Any, positions: Any) -> Any:
        x, total = carry
        x, found = self.block(w, x, positions, self.attend)
        return x, jax.tree.map(jnp.add, total, found)

    def run_layers(self, params: Any, x: Any, positions: Any) -> tuple[Any, Any]:
        """All layers, with weights gathered layer by layer; the reports of their experts are summed."""
        c = self.c
        where = {"at_rest": self.layouts(params), "compute": self.layouts(params, None)}
        options = {"dtype": c.dtype, "data": self.axes("b", "s", "stream"), "save": c.save, "prefetch": c.prefetch}
        return parallel.scan_layers(self.layer, params, (x, self.nothing()), positions, **where, **options)

    def stages(self, tree: Any, stages: int) -> Any:
        """Arrays `"l/pp ..."` by stages: `"p/pp i ..."`, or with rounds `"n p/pp i ..."`."""
        pp, n = self.axes("l"), self.c.rounds
        layouts = ("(p i)/pp ...", "p/pp i ...") if n is None else ("(p n i)/pp ...", "n p/pp i ...")
        sizes = {"p": stages} if n is None else {"p": stages, "n": n}
        return jax.tree.map(lambda one: spmd.rearrange(one, " -> ".join(layouts), **sizes, pp=pp), tree)

    def run_pipeline(self, params: Any, x: Any, positions: Any) -> tuple[Any, Any]:
        """Like `run_layers`, with layers in stages. The weights of each stage are gathered once for all micro-batches.

        A micro-batch is every m-th row, so its rows do not depend on the mesh.
        """
        c = self.c
        names: dict[str, Any] = {"dp": self.axes("b"), "pp": self.axes("l")}
        w = self.gather(params, ("b", "s", "stream"))
        stages = spmd.axis_size(names["pp"] or ())
        used = self.used(stages)
        w = self.stages((w, used), stages)

        def one_layer(carry: Any, one: Any) -> tuple[Any, None]:
            w, used = one
            after = self.layer(w, carry, positions)
            return after if self.c.slots is None else jax.tree.map(
                lambda a, b: jnp.where(used, a, b), after, carry
            ), None

        def stage(w: Any, carry: Any) -> Any:
            if len(jax.tree.leaves(w)[0]) == 1:  # a loop would stack what a single layer keeps
                return one_layer(carry, jax.tree.map(lambda one: one[0], w))[0]
            return jax.lax.scan(one_layer, carry, w)[0]

        x = spmd.all_gather(x, "b/dp/pp ... -> b/dp ...", **names)
        x = spmd.rearrange(x, "(r m)/dp ... -> m r/dp ...", m=c.micro, dp=names["dp"])
        totals = jax.tree.map(lambda one: jnp.broadcast_to(one, (c.micro, *one.shape)), self.nothing())
        options = {"pp": names["pp"], "save": c.save, "result": "partial", "repeats": c.rounds}
        x, totals = parallel.pipeline(stage, w, (x, totals), **options)
        x = spmd.rearrange(x, "m r/dp ... {U:pp} -> (r m)/dp ... {U:pp}", **names)
        x = spmd.psum_scatter(x, "b/dp ... {U:pp} -> b/dp/pp ...", **names)
        totals = spmd.psum(totals, "... {U:pp} -> ...", pp=names["pp"])
        return x, jax.tree.map(lambda one: jnp.mean(one, axis=0), totals)

    def used(self, stages: int) -> Any:
        """Which rows of the stack of layers are in use, `"l/pp"`: in the order of the rounds, the first ones."""
        c, pp = self.c, self.axes("l")
        at = spmd.iota("l/pp", l=c.slots or c.layers, pp=pp)
        if c.rounds is not None:
            each = (c.slots or c.layers) // (stages * c.rounds)  # layers of a stage
            p, v, i = at // (c.rounds * each), at // each % c.rounds, at % each
            at = (v * stages + p) * each + i
        return at < c.layers

    def nothing(self) -> Any:
        """The report of zero layers."""
        e = self.c.experts
        return parallel.MoEReport(*(jnp.zeros(shape) for shape in ((), (), e, ()))) if e else None

    def loss(self, params: Any, tokens: Any, labels: Any) -> tuple[Any, Any]:
        """The mean cross-entropy of the labels that are not negative, and the report."""
        c, sp, cp, tp = self.c, self.axes("stream"), self.axes("s"), self.axes("v")
        tables = {name: w for name, w in params.items() if name != "layers"}
        w = self.gather(tables, ("b", "l", "s", "stream"))
        x = nn.embedding(tokens, w["embed"], tp=tp, sp=sp, cp=cp)
        positions = parallel.sequence_positions(spmd.size("s"), self.placement, cp=cp)
        run = self.run_layers if c.micro == 1 and self.axes("l") is None else self.run_pipeline
        x, report = run(params["layers"], x, positions)
        x = nn.rms_norm(x, w["norm"])
        where: dict[str, Any] = {"tp": tp, "sp": sp, "cp": cp, "dp": self.axes("b", "l")}
        loss = nn.linear_cross_entropy(x, w["unembed"], labels, chunks=c.chunks, ignore=-1, **where)
        if report is None:
            return loss, {"loss": loss}
        report = jax.tree.map(lambda total: total / c.layers, report)
        total = loss + c.balance * report.balance_loss + c.z_loss * report.z_loss
        return total, {"loss": loss, "load": report.load, "drop_rate": report.drop_rate}

    # --- kernels and the step -------------------------------------------------------------------------------

    @functools.cached_property
    def loss_and_gradients(self) -> spmd.Kernel:
        """From weights, tokens and labels to the loss with its auxiliary terms, the report, and the gradients."""
        report = {"loss": "scalar", **({"load": "e", "drop_rate": "scalar"} if self.c.experts else {})}
        ins, outs = (self.layouts, self.tokens, self.tokens), ("scalar", report, self.layouts)

        @spmd.kernel(in_layouts=ins, out_layouts=outs, mesh=self.mesh)
        def loss_and_gradients(params: Any, tokens: Any, labels: Any) -> Any:
            (loss, report), gradients = spmd.value_and_grad(self.loss, has_aux=True)(params, tokens, labels)
            return loss, report, gradients

        return loss_and_gradients

    def init(self, key: Any) -> Any:
        """Random weights, created in their layouts at rest."""
        return spmd.init(functools.partial(new_weights, self.c), self.layouts, mesh=self.mesh)(key)

    def state_layouts(self, state: Any) -> Any:
        rest = self.layouts(state["params"])
        return {"params": rest, "optimizer": parallel.state_layouts(state["optimizer"], state["params"], rest)}

    def new_state(self, key: Any, optimizer: optax.GradientTransformation) -> Any:
        """Weights, and the optimizer's state in the same layouts."""

        def make(key: Any) -> Any:
            params = new_weights(self.c, key)
            return {"params": params, "optimizer": optimizer.init(params)}

        return spmd.init(make, self.state_layouts, mesh=self.mesh)(key)

    def train_step(self, optimizer: optax.GradientTransformation) -> Any:
        """The jitted step: from `step(state, tokens, labels)` to the next state and the report."""

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, tokens: Any, labels: Any) -> Any:
            _, report, gradients = self.loss_and_gradients(state["params"], tokens, labels)
            report["gradient_norm"] = optax.global_norm(gradients)
            changes, moments = optimizer.update(gradients, state["optimizer"], state["params"])
            state = {"params": optax.apply_updates(state["params"], changes), "optimizer": moments}
            return spmd.shard(state, self.state_layouts, mesh=self.mesh), report

        return step


def new_weights(c: Config, key: Any) -> Any:
    """Random weights: ordinary JAX on whole arrays."""
    keys, rows = iter(jax.random.split(key, 16)), c.slots or c.layers

    def matrix(inputs: int, *shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / math.sqrt(inputs)

    deep = 2 * c.layers  # the number of terms that the stream sums up
    many = (c.experts,) if c.experts else ()
    layers = {
        "norm_attention": jnp.ones((rows, c.d)),
        "norm_mlp": jnp.ones((rows, c.d)),
        "query": matrix(c.d, rows, c.d, c.heads, c.head),
        "key": matrix(c.d, rows, c.d, c.kv_heads, c.head),
        "value": matrix(c.d, rows, c.d, c.kv_heads, c.head),
        "out": matrix(c.heads * c.head * deep, rows, c.heads, c.head, c.d),
        "gate": matrix(c.d, rows, *many, c.d, c.hidden),
        "up": matrix(c.d, rows, *many, c.d, c.hidden),
        "down": matrix(c.hidden * deep, rows, *many, c.hidden, c.d),
    }
    if many:
        layers["router"] = matrix(c.d, rows, c.d, c.experts)
    tables = {name: matrix(c.d, c.vocabulary, c.d) for name in ("embed", "unembed")}
    return {**tables, "norm": jnp.ones(c.d), "layers": layers}
