"""Correct programs, whose collectives are changed one by one."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import parallel
from tests import layers
from tests import programs as soaked
from tests.checker.twins import registry
from tests.comm import cases
from tests.nn.dense import placed_order
from tests.sampler import Choices

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALLS = 6  # of each verb and operation

__all__ = ["FAMILIES", "Program", "programs"]


@dataclass(frozen=True)
class Program:
    """A correct program on whole arrays.

    Attributes:
      name: Its family, and what it is.
      build: From a mesh to a function of the arguments: values, and gradients where there are any.
      mesh: The sizes of the mesh axes.
      args: The arguments, whole.
      tolerance: How far numbers of one meaning may lie apart, by the largest of each array.
    """

    name: str
    build: Callable[[Any], Callable[..., Any]]
    mesh: Mapping[str, int]
    args: tuple[Any, ...]
    tolerance: float = 1e-4

    def function(self, mesh: Mapping[str, int]) -> Callable[..., Any]:
        """A new function each time, so that nothing of an older trace is left in it."""
        return self.build(spmd.make_mesh(**dict[str, Any](mesh)))

    def other_meshes(self) -> Iterator[dict[str, int]]:
        """A mesh of ones, and one between it and the program's own: the largest axis in half, or of one device."""
        yield dict.fromkeys(self.mesh, 1)
        axis = max(self.mesh, key=self.mesh.__getitem__)
        between = {**self.mesh, axis: self.mesh[axis] // 2 if self.mesh[axis] % 2 == 0 else 1}
        if max(between.values()) > 1:
            yield between


Family = Callable[[], Iterator[Program]]
FAMILIES: dict[str, Family] = {}


def family(make: Family) -> Family:
    FAMILIES[make.__name__] = make
    return make


def programs(only: str = "") -> list[Program]:
    """All programs whose names contain `only`. If that begins with a family's name, no other family is asked."""
    asked = [make for name, make in FAMILIES.items() if only.startswith(name)] or FAMILIES.values()
    return [one for make in asked for one in make() if only in one.name]


# --- ready-made layers


@family
def layer() -> Iterator[Program]:
    """Each layer of `nn` and `parallel`, in the two of its variants that divide most."""
    layers.register_all()
    for _, (make, _) in sorted(layers.CASES.items()):
        variants: dict[str, layers.LayerCase] = {}
        for case in make():
            if _telling(case) > _telling(variants.get(case.label)):
                variants[case.label] = case
        yield from map(of_layer, sorted(variants.values(), key=_telling, reverse=True)[:2])


def _telling(case: layers.LayerCase | None) -> tuple[Any, ...]:
    """How much a case can show: roles that are divided, places that a ring turns through, few devices."""
    if case is None:
        return (-1,)
    divided = sum(axes is not None and case.n(role) > 1 for role, axes in case.axes.items())
    several = sum(isinstance(axes, tuple) for axes in case.axes.values())
    turns = any(key.startswith("ppermute") for key in case.forward(case)) and max(case.mesh.values()) > 2
    return divided + turns, several, -math.prod(case.mesh.values())


def of_layer(case: layers.LayerCase) -> Program:
    args, cotangents = layers.arguments(case), layers.cotangents_of(case)

    def build(mesh: Any) -> Callable[..., Any]:
        there, ins, outs = elsewhere(case, dict(mesh.shape))
        both = layers.pulled(layers.kernel_of(there, mesh).explicit)

        def run(*args: Any) -> Any:
            given = tuple(one.there(x) for one, x in zip(ins, args, strict=True))
            values, gradients = both(given, tuple(one.there(x) for one, x in zip(outs, cotangents, strict=True)))
            moving = [one for one, x in zip(ins, args, strict=True) if jnp.issubdtype(x.dtype, jnp.inexact)]
            values = [one.back(x) for one, x in zip(outs, values, strict=True)]
            return values, [one.back(x) for one, x in zip(moving, gradients, strict=True)]

        return run

    return Program(f"layer {case.name} {case}".strip(), build, dict(case.mesh), args)


@dataclass(frozen=True)
class Carried:
    """How an array goes to a mesh on which the layer wants it in another order or shape, and how it comes back."""

    there: Callable[[Any], Any] = lambda x: x
    back: Callable[[Any], Any] = lambda x: x

    @classmethod
    def ordered(cls, order: np.ndarray) -> Carried:
        """Tokens, which are the second dimension."""
        return cls(lambda x: x[:, order], lambda x: x[:, np.argsort(order)])

    @classmethod
    def shaped(cls, before: tuple[int, ...], after: tuple[int, ...]) -> Carried:
        return cls(lambda x: x.reshape(after), lambda x: x.reshape(before))


def elsewhere(case: layers.LayerCase, mesh: dict[str, int]) -> tuple[Any, Sequence[Carried], Sequence[Carried]]:
    """A layer on another mesh. Where its meaning depends on the number of devices: the same meaning there.

    The order of the tokens in a ring depends on its blocks, and the stages of a pipeline are as many as its devices.
    """
    there = replace(case, mesh=mesh)
    layouts = [case.ins, (case.outs,) if isinstance(case.outs, str) else case.outs]
    ins, outs = ([Carried()] * len(side) for side in layouts)
    if mesh == dict(case.mesh):
        return there, ins, outs
    if case.name.startswith("pipeline"):
        return in_rounds(case, there, outs)
    kinds = {"zigzag": "zigzag", "striped": "striped", "both-ways": "zigzag"}
    if (kind := kinds.get(case.label.split("-g")[0])) is not None:
        length, role = case.shapes["s"], "ring" if case.axes.get("ring") else "cp"
        old, new = (placed_order(length, one.n(role), kind) for one in (case, there))
        tokens = Carried.ordered(np.argsort(old)[new])
        ins = ins if case.name == "place_sequence" else [tokens] * len(ins)
        outs = outs if case.name == "restore_sequence" else [tokens] * len(outs)
    return there, ins, outs


def in_rounds(case: layers.LayerCase, there: layers.LayerCase, outs: Any) -> tuple[Any, Any, Any]:
    """A pipeline over fewer devices: in more rounds."""
    devices = there.n("pp")
    rounds = case.shapes.get("v", 1) * case.n("pp") // devices
    shapes = [case.shape(text) for text in case.ins]
    weights = [shape[1 + ("v" in case.shapes) :] for shape in shapes[1:]]
    ins = [Carried.shaped(old, (rounds, devices, *rest)) for old, rest in zip(shapes[1:], weights, strict=True)]
    texts = tuple(f"v p/pp {text.removeprefix('v ').removeprefix('p/pp ')}" for text in case.ins[1:])
    fn: Any = case.fn
    there = replace(there, fn=lambda axes: fn(axes, rounds), ins=(case.ins[0], *texts))
    return there, [Carried(), *ins], outs


# --- verbs and operations, as the soak draws them


@family
def verb() -> Iterator[Program]:
    """One call of a verb between random layouts."""
    for name, seed in itertools.product(cases.MOVES, range(CALLS)):
        case = cases.sample(name, seed)
        build = lambda mesh, case=case: with_gradients(cases.kernel_of(replace(case, mesh=dict(mesh.shape))))
        yield Program(f"verb {case}", build, dict(case.mesh), (cases.argument(case, seed=seed),))


@family
def operation() -> Iterator[Program]:
    """Operations along dimensions that may be divided: the families of the soak that are made of a body and layouts."""
    names = ("einsum", "reductions", "along_a_dimension", "takes", "rearrangements")
    for name, seed in itertools.product(names, range(CALLS)):
        kept: list[Any] = []

        def keep(*given: Any, kept: list[Any] = kept) -> dict[str, Any]:
            kept.append(given)
            return {}

        with mock.patch.object(soaked, "in_modes", keep):
            found = soaked.FAMILIES[name][0](Choices(seed))
        [(body, mesh, ins, outs)] = kept
        if any("{U:" in text for text in (*ins, outs)):  # no array outside is a partial sum
            continue

        def build(mesh: Any, body: Any = body, ins: Any = ins, outs: Any = outs) -> Callable[..., Any]:
            run = spmd.kernel(f"{', '.join(ins)} -> {outs}", mesh=mesh)(body)
            return with_gradients(run)

        yield Program(f"operation {found.text} seed {seed}", build, dict(mesh), found.args)


# --- examples


@family
def example() -> Iterator[Program]:
    """The kernels of the examples, on small arrays."""
    makers = (of_summa, of_waves, of_spectral_flow, of_llama, of_train_lm, of_transformer, of_decode)
    for program in itertools.chain.from_iterable(make() for make in makers):
        yield replace(program, build=functools.partial(relaxed, program.build))


def relaxed(build: Callable[[Any], Callable[..., Any]], mesh: Any) -> Callable[..., Any]:
    """Examples are written for JAX as users have it, tests for a stricter one."""

    def run(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return build(mesh)(*args)

    return run


def of_summa() -> Iterator[Program]:
    module = the_example("summa")
    args = normal(0, 4, 8), normal(1, 8, 4)
    bodies = {"panels": lambda a, b: module.summa(a, b, 2), "at once": module.at_once}
    for name, body in bodies.items():
        build = lambda mesh, body=body: with_gradients(spmd.kernel(module.GRID, mesh=mesh)(body))
        yield Program(f"example summa {name}", build, {"r": 2, "c": 2}, args)


def of_waves() -> Iterator[Program]:
    module, args = the_example("waves"), (normal(0, 8, 8), normal(1, 8, 8))
    box = lambda mesh: module.Box(8, 8, mesh)
    runs = {
        "start": (lambda mesh: box(mesh).start, ()),
        "advance": (lambda mesh: with_gradients(functools.partial(box(mesh).advance, steps=2)), args),
        "energy": (lambda mesh: with_gradients(box(mesh).energy), args),
    }
    for name, (build, given) in runs.items():
        yield Program(f"example waves {name}", build, {"a": 4, "b": 2}, given)


def of_spectral_flow() -> Iterator[Program]:
    module = the_example("spectral_flow")
    flow = lambda mesh: module.Flow(8, 10.0, 0.01, mesh)
    u = jax.device_get(relaxed(lambda mesh: flow(mesh).start, spmd.make_mesh(a=1, b=1))())
    runs = {
        "start": (lambda mesh: flow(mesh).start, ()),
        "advance": (lambda mesh: functools.partial(flow(mesh).advance, steps=1), (u, np.float32(0))),
        "measured": (lambda mesh: flow(mesh).measured, (u,)),
        "vorticity": (lambda mesh: flow(mesh).vorticity, (u,)),
    }
    for name, (build, given) in runs.items():
        yield Program(f"example spectral_flow {name}", build, {"a": 2, "b": 2}, given)


def of_llama() -> Iterator[Program]:
    module = the_example("llama405b")
    sizes = {"l": 1, "m": 8, "h": 4, "g": 2, "k": 4, "f": 8, "v": 8, "b": 4, "s": 4}
    shapes = jax.tree.map(lambda text: tuple(sizes[n] for n in spmd.Layout(text).names), module.LAYOUTS)
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.unflatten(structure, [normal(i, *shape) / 2 for i, shape in enumerate(leaves)])
    build = lambda mesh: jax.value_and_grad(module.make_loss(mesh))
    yield Program("example llama405b loss", build, {"dp": 2, "fsdp": 2, "tp": 2}, (params, *tokens(8, 4, 4)), 0.05)


def of_train_lm() -> Iterator[Program]:
    module = the_example("train_lm")
    c = module.Config(d=8, layers=1, groups=2, queries=1, head=4, hidden=8)
    params = jax.device_get(module.new_parameters(jax.random.key(0), c))
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 256, (2, 4, 5)).astype(np.int32)
    keys = jax.random.split(jax.random.key(1), 2)
    ins = {
        "loss_and_gradients": (params, windows),
        "evaluate": (params, windows),
        "generate": (params, windows[0][:, :4], keys),
    }
    layouts = {
        "loss_and_gradients": ((module.layouts, "m b/dp n"), ("scalar", module.layouts)),
        "evaluate": ((module.layouts, "m b/dp n"), "scalar"),
        "generate": ((module.layouts, "b/dp s", "c"), "c b/dp"),
    }
    for name, args in ins.items():

        def build(mesh: Any, name: str = name) -> Callable[..., Any]:
            given, made = layouts[name]
            again = spmd.kernel(in_layouts=given, out_layouts=made, static="dtype", mesh=mesh)
            return functools.partial(again(getattr(module, name).__wrapped__), dtype="float32")

        yield Program(f"example train_lm {name}", build, {"dp": 2, "tp": 2}, args)


PRODUCTS = {
    "dense": ({}, {"fsdp": 2, "cp": 2, "tp": 2}),
    "ulysses": ({"context": "ulysses"}, {"cp": 2, "tp": 2}),
    "pipeline": ({"micro": 2, "layers": 2}, {"pp": 2, "fsdp": 2, "tp": 2}),
    "experts": ({"experts": 4, "chosen": 2}, {"cp": 2, "ep": 2, "tp": 2}),
}


def of_transformer() -> Iterator[Program]:
    module = the_example("transformer")
    for name, (changes, mesh) in PRODUCTS.items():
        c = module.Config(**{**SMALL, **changes})
        params = jax.device_get(module.new_weights(c, jax.random.key(0)))

        def build(mesh: Any, c: Any = c) -> Callable[..., Any]:
            model = module.Transformer(c, mesh)
            return lambda weights, *ids: model.loss_and_gradients(weights, *(in_order(model, x) for x in ids))

        yield Program(f"example transformer {name}", build, mesh, (params, *tokens(28, 8, 8)))


def of_decode() -> Iterator[Program]:
    module, c = the_example("decode"), the_example("transformer").Config(**SMALL)
    params = jax.device_get(the_example("transformer").new_weights(c, jax.random.key(0)))
    decoder = lambda mesh: module.Decoder.of(c, mesh, slots=12, temperature=0.5)
    prompts, lengths = tokens(28, 4, 8)[0], np.array([3, 8, 5, 1], np.int32)

    def build(mesh: Any) -> Callable[..., Any]:
        made = decoder(mesh)
        read, write = made.kernels

        def twice(params: Any, prompts: Any, lengths: Any, key: Any) -> Any:
            cache, first = read(params, in_order(made.model, prompts), lengths, key)
            return first, write(params, cache, first, lengths, key)[1]

        return twice

    yield Program("example decode", build, {"fsdp": 2, "cp": 2, "tp": 2}, (params, prompts, lengths, jax.random.key(0)))


SMALL = {"vocabulary": 28, "layers": 1, "d": 8, "heads": 4, "kv_heads": 2, "head": 4, "hidden": 8, "chunks": 2}


def in_order(model: Any, ids: Any) -> Any:
    """What `Transformer.place` does to arrays from the host."""
    blocks = math.prod(model.mesh.shape[axis] for axis in model.axes("s") or ())
    return ids[:, parallel.sequence_order(ids.shape[1], blocks, model.placement)]


# --- the right twins of wrong programs


@family
def twin() -> Iterator[Program]:
    """The right halves of `tests/checker/twins`."""
    for pair in registry.load().values():

        def build(mesh: Any, pair: Any = pair) -> Callable[..., Any]:
            kernel = spmd.kernel(str(pair.pattern), mesh=mesh)(pair.correct)
            return kernel if pair.no_gradient else with_gradients(kernel)

        yield Program(f"twin {pair.group}.{pair.name}", build, pair.mesh, tuple(pair.arguments()))


# --- what they share


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens(vocabulary: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, vocabulary, (rows, length)).astype(np.int32) for _ in range(2))
    return ids, labels


@functools.cache
def the_example(name: str) -> Any:
    """An example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The values, and the gradients along cotangents that tell every place from its neighbours."""

    def both(*args: Any) -> Any:
        moving = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of(*given: Any) -> Any:
            filled = dict(zip(moving, given, strict=True))
            return fn(*(filled.get(i, x) for i, x in enumerate(args)))

        values, pull = jax.vjp(of, *(args[i] for i in moving))
        if not all(jnp.issubdtype(y.dtype, jnp.inexact) for y in jax.tree.leaves(values)):
            return values
        return values, pull(jax.tree.map(soaked.weights_of, values))

    return both
