"""Pipelines: one round and several, with data, tensor and fully sharded parallelism inside the stages."""

import itertools
import math
from dataclasses import replace

import jax.numpy as jnp

import spmd
from spmd import nn, parallel
from tests.layers import LayerCase, cases, fit, kernel_of, placements, total

# Micro-batches and rounds: odd numbers, fewer micro-batches than stages, None for parameters without rounds.
SHAPES = list(itertools.product((5, 3, 1), (None, 2, 1, 3)))


def ticks(case):
    """Counted by hand: each round begins when all micro-batches have entered and the first is back."""
    p, m, v = case.n("pp"), case.shapes["m"], case.shapes.get("v", 1)
    return (v - 1) * max(m, p) + m + p - 1


def each_tick(kind, over, layout):
    return lambda case: case.traffic(kind, over, layout, ticks(case))


def together(*formulas):
    return lambda case: total(*(formula(case) for formula in formulas))


def pipeline_cases(name, body, ins, outs, reference, forward, backward, roles):
    """`ins` are x and the weights of one stage; all placements, with the shapes in turn."""
    for (m, v), (mesh, axes) in zip(itertools.cycle(SHAPES), placements(*roles), strict=False):
        lead = "p/pp" if v is None else "v p/pp"
        sizes = {"p": (1, "pp"), "m": (m,), "b": (3, *roles), "d": (5,), "e": (5,), "f": (7, "tp")} | (
            {"v": (v,)} if v else {}
        )
        if "fsdp" in roles:
            sizes |= {"d": (3, "fsdp"), "e": (3, "fsdp")}
        axes = {"dp": None, "tp": None, "fsdp": None} | axes
        yield LayerCase(
            name=name,
            fn=lambda axes, v=v: lambda *args: body(*args, repeats=v, **axes),
            ins=(ins[0], *(f"{lead} {layout}" for layout in ins[1:])),
            outs=outs,
            shapes=fit(mesh, axes, **sizes),
            mesh=mesh,
            axes=axes,
            reference=in_turn(reference, v),
            make=gentle,
            forward=forward,
            backward=backward(lead),
            build=on_stages,
            label=f"m{m}-v{v}",
        )


def on_stages(case, mesh):
    """The same layers on as many stages as the mesh has, in more rounds where there are fewer."""
    p = math.prod(mesh.shape[axis] for axis in case._axes("pp"))
    if p == case.n("pp"):
        return kernel_of(case, mesh)
    lead = 2 if "v" in case.shapes else 1
    rounds = case.shapes.get("v", 1) * case.n("pp") // p
    ins = [f"v p/pp {layout.partition('p/pp ')[2]}" for layout in case.ins[1:]]
    other = replace(case, ins=(case.ins[0], *ins), fn=lambda axes: case.fn(axes, v=rounds))
    return lambda x, *weights: kernel_of(other, mesh)(x, *(w.reshape(rounds, p, *w.shape[lead:]) for w in weights))


def gentle(rng, shapes):
    """Stages that do not blow up what is rounded."""
    return [(0.3 if i else 1) * rng.normal(size=shape).astype("f4") for i, shape in enumerate(shapes)]


def in_turn(stage, rounds):
    """Every stage of every round, one after another, on all micro-batches."""

    def reference(x, *weights):
        if rounds is not None:
            weights = [w.reshape(-1, *w.shape[2:]) for w in weights]
        for i in range(weights[0].shape[0]):
            x = stage(x, *(w[i] for w in weights))
        return x

    return reference


def block(x, w_in, w_out):
    return x + jnp.tanh(x @ w_in) @ w_out


HOPS = each_tick("ppermute", "pp", "b/dp d")


@cases("pipeline", draw=5)
def _():
    """A residual block whose hidden units tp divides; its gradients are summed over dp once."""

    def body(x, w_in, w_out, *, dp, tp, fsdp, pp, repeats):
        def stage(w, x):
            return x + nn.mlp(x, *w, activation=jnp.tanh, tp=tp)

        return parallel.pipeline(stage, (w_in, w_out), x, pp=pp, repeats=repeats)

    return pipeline_cases(
        "pipeline",
        body,
        ("m b/dp d", "d f/tp", "f/tp d"),
        "m b/dp d",
        block,
        together(HOPS, each_tick("psum", "tp", "b/dp d"), lambda c: c.traffic("psum", "pp", "m b/dp d")),
        lambda lead: together(
            HOPS,
            each_tick("psum", "tp", "b/dp d"),
            lambda c: c.traffic("psum", "pp", "m b/dp d"),
            *(lambda c, w=w: c.traffic("psum", "dp", f"{lead} {w}") for w in ("d f/tp", "f/tp d")),
        ),
        ("dp", "tp", "pp"),
    )


@cases("pipeline spread", draw=3)
def _():
    """What stands before and after the pipeline has its data divided over pp too; activations are kept."""

    def body(x, w, *, dp, tp, fsdp, pp, repeats):
        x = spmd.all_gather(jnp.sin(x), "m b/dp/pp d -> m b/dp d", dp=dp, pp=pp)
        stage = lambda w, x: jnp.tanh(spmd.einsum(x, w, "b/dp d, d e -> b/dp e", dp=dp))
        y = parallel.pipeline(stage, w, x, pp=pp, repeats=repeats, save="activations", result="partial")
        if pp:
            y = spmd.psum_scatter(y, "m b/dp d {U:pp} -> m b/dp/pp d", dp=dp, pp=pp)
        return jnp.cos(y)

    def ends(case):
        return total(case.traffic("all_gather", "pp", "m b/dp d"), case.traffic("psum_scatter", "pp", "m b/dp d"))

    for case in pipeline_cases(
        "pipeline spread",
        body,
        ("m b/dp/pp d", "d e"),
        "m b/dp/pp d",
        lambda x, w: jnp.tanh(x @ w),
        together(HOPS, ends),
        lambda lead: together(HOPS, ends, lambda c: c.traffic("psum", "dp", f"{lead} d e")),
        ("dp", "pp"),
    ):
        between = case.reference
        yield replace(case, reference=lambda x, w, between=between: jnp.cos(between(jnp.sin(x), w)))


@cases("pipeline fsdp", draw=2)
def _():
    """Weights that rest divided, gathered in each tick, and again in each tick of the backward pass.

    With one round they are the same in all ticks, and the compiler gathers them once.
    """

    def body(x, w, *, dp, tp, fsdp, pp, repeats):
        def stage(w, x):
            w = spmd.all_gather(w, "d/fsdp e -> d e", fsdp=fsdp)
            return jnp.tanh(spmd.einsum(x, w, "b/dp/fsdp d, d e -> b/dp/fsdp e", dp=dp, fsdp=fsdp))

        return parallel.pipeline(stage, w, x, pp=pp, repeats=repeats)

    hops = each_tick("ppermute", "pp", "b/dp/fsdp d")
    whole = lambda c: c.traffic("psum", "pp", "m b/dp/fsdp d")
    found = pipeline_cases(
        "pipeline fsdp",
        body,
        ("m b/dp/fsdp d", "d/fsdp e"),
        "m b/dp/fsdp d",
        lambda x, w: jnp.tanh(x @ w),
        together(hops, whole, each_tick("all_gather", "fsdp", "d e")),
        lambda lead: together(
            hops,
            whole,
            each_tick("all_gather", "fsdp", "d e"),
            each_tick("psum_scatter", "fsdp", "d e"),
            lambda c: c.traffic("psum", "dp", f"{lead} d/fsdp e"),
        ),
        ("dp", "fsdp", "pp"),
    )
    return [case for case in found if case.shapes.get("v", 1) > 1]
