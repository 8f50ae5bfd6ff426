"""Correct programs, whose collectives are changed one by one."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import fft, linalg, stencil
from tests import layers
from tests import programs as soaked
from tests import test_same_on_any_mesh as anywhere
from tests.checker.twins import registry
from tests.comm import cases
from tests.sampler import Choices

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
        run = layers.kernel_of(case, mesh) if case.build is None else case.build(case, mesh)
        both = layers.pulled(run)
        return lambda *args: both(args, cotangents)

    return Program(f"layer {case.name} {case}".strip(), build, dict(case.mesh), args)


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
    yield from of_grids()
    yield from of_algebra()


def in_cells(hops: tuple[int, ...] | None) -> Any:
    """Rows that go to the owners of their cells, and are added there."""

    def body(x: Any, cells: Any) -> Any:
        mine = spmd.local_size("v/a")
        (x, cells), owner, _ = spmd.exchange((x, cells), cells // mine, "[n/a] ...", capacity=8, hops=hops)
        here = jnp.where(owner >= 0, cells - spmd.offset("v/a"), mine)
        return jnp.zeros((mine, x.shape[1]), x.dtype).at[here].add(x, mode="drop")

    return body


def both_sides(u: Any) -> Any:
    """Each element adds to the ones around it."""
    wide = jnp.pad(u, ((0, 2), (0, 1))) + 2 * jnp.pad(u, ((2, 0), (1, 0)))
    return stencil.deposit(wide, "1+x/a+1 y/b+1 -> x/a y/b")


GRIDS: dict[str, tuple[str, tuple[int, ...], Callable[..., Any]]] = {
    "deposit": ("x/a y/b -> x/a y/b", (16, 8), both_sides),
    "halo": (
        "x/a y/b -> x/a y/b",
        (16, 8),
        lambda x: stencil.halo(x, "x/a y/b -> 1+x/a+1 y/b+1", edge="edge")[2:, 1:],
    ),
    "exchange": ("n/a d, n/a -> v/a d", (16, 3), in_cells(None)),
    "exchange with neighbours": ("n/a d, n/a -> v/a d", (16, 3), in_cells((1,))),
    "scatter_add": (
        "n/a d, n/a -> v/a d",
        (16, 3),
        lambda x, i: spmd.scatter_add(x, i, "n/a d, n/a -> [v/a] d", outside="drop"),
    ),
    "sums of scatter_add": (
        "n/a d, n/a -> d v/b",
        (16, 3),
        lambda x, i: spmd.scatter_add(x, i, "n/a d, n/a -> d [v/b]", outside="drop"),
    ),
    "sort by another dimension": (
        "x/a y/b -> x/a y/b",
        (16, 8),
        lambda x: spmd.sort(x, "[x/a] y/b", payload=2 * x)[1],
    ),
    "sort by columns": ("x/a -> x/a", (80,), lambda x: spmd.sort(x, "[x/a]", payload=2 * x)[1]),
    "sort by merges": ("x/a -> x/a", (8,), lambda x: spmd.sort(x, "[x/a]")),
    "argsort": ("x/a -> x/a", (8,), lambda x: spmd.argsort(x, "[x/a]")),
    "places of top_k": ("x/a y/b -> k y/b", (16, 8), lambda x: spmd.top_k(x, "[x/a] y/b", 3)[1]),
    "traced roll": ("x/a y/b -> x/a y/b", (16, 8), lambda x: spmd.roll(x, "[x/a] y/b", jnp.int32(5))),
    "dct": ("x/a y/b -> kx/b ky/a", (8, 8), lambda x: fft.dct(x, "x/a y/b -> kx/b ky/a")),
    "dst": ("x/a y -> kx ky/a", (8, 8), lambda x: fft.dst(x, "x/a y -> kx ky/a", type=1)),
}


def neighbours(u: Any) -> Any:
    return 4 * u - spmd.roll(u, "[x/a] y", 1) - 2 * spmd.roll(u, "[x/a] y", -1)


ALGEBRA: dict[str, tuple[str, tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "qr": ("m/a n -> m/a n, k n", ((16, 3),), lambda x: linalg.qr(x, "[m/a] [n]")),
    "cg": (
        "x/a y -> x/a y",
        ((8, 2),),
        lambda b: linalg.cg(lambda u: neighbours(u) + spmd.roll(u, "[x/a] y", -1), b, "x/a y", tol=0, maxiter=2)[0],
    ),
    "gmres": ("x/a y -> x/a y", ((8, 2),), lambda b: linalg.gmres(neighbours, b, "x/a y", tol=0, maxiter=2)[0]),
}


def of_algebra() -> Iterator[Program]:
    """Matrices whose rows are divided; systems, with as many steps on every mesh."""
    for name, (pattern, shapes, body) in ALGEBRA.items():
        build = lambda mesh, pattern=pattern, body=body: with_gradients(spmd.kernel(pattern, mesh=mesh)(body))
        yield Program(f"operation {name}", build, {"a": 4}, tuple(normal(i, *s) for i, s in enumerate(shapes)))


def of_grids() -> Iterator[Program]:
    """What simulations move: margins, rows to their owners, places in an order, transforms."""
    for name, (pattern, shape, body) in GRIDS.items():
        cells = {"v": 16} if pattern.startswith("n/a d, n/a ") else {}
        build = lambda mesh, p=pattern, body=body, cells=cells: with_gradients(spmd.kernel(p, mesh=mesh, **cells)(body))
        args = normal(0, *shape), *[(np.arange(v, dtype=np.int32) + 3) % v for v in cells.values()]
        yield Program(f"operation {name}", build, {"a": 4, "b": 2}, args)


# --- examples


@family
def example() -> Iterator[Program]:
    """The kernels of the examples, on small arrays."""
    with anywhere.importing():
        own = itertools.chain(of_summa(), of_llama(), of_train_lm(), of_transformer(), of_others())
        for program in own:
            yield replace(program, build=functools.partial(relaxed, program.build))


def relaxed(build: Callable[[Any], Callable[..., Any]], mesh: Any) -> Callable[..., Any]:
    """Examples are written for JAX as users have it, tests for a stricter one."""

    def run(*args: Any) -> Any:
        with anywhere.importing():
            return build(mesh)(*args)

    return run


def of_others() -> Iterator[Program]:
    """As the assertion on any mesh has them."""
    for name in ("waves", "spectral_flow", "decode", "gaussian_process"):
        build, args, options = anywhere.EXAMPLE_PROGRAMS[name]()
        yield Program(f"example {name}", build, dict(options["mesh"].shape), from_host(args))


PRODUCTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dense": ({"fsdp": 2, "cp": 2, "tp": 2}, {}),
    "ulysses": ({"cp": 2, "tp": 2}, {"context": "ulysses"}),
    "pipeline": ({"pp": 2, "fsdp": 2, "tp": 2}, {"micro": 2}),
    "experts": ({"cp": 2, "ep": 2, "tp": 2}, {"experts": 4}),
}


def of_transformer() -> Iterator[Program]:
    for name, (mesh, config) in PRODUCTS.items():
        build, args, _ = anywhere.transformer_of(mesh, chunks=1, **config)
        yield Program(f"example transformer {name}", build, mesh, from_host(args))


def from_host(args: Any) -> Any:
    """The arguments on no device in particular; keys are so already."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), args)


def of_summa() -> Iterator[Program]:
    module = anywhere.module("summa")
    args = normal(0, 4, 8), normal(1, 8, 4)
    bodies = {"panels": lambda a, b: module.summa(a, b, 2), "at once": module.at_once}
    for name, body in bodies.items():
        build = lambda mesh, body=body: with_gradients(spmd.kernel(module.GRID, mesh=mesh)(body))
        yield Program(f"example summa {name}", build, {"r": 2, "c": 2}, args)


def of_llama() -> Iterator[Program]:
    module = anywhere.module("llama405b")
    sizes = {"l": 1, "m": 8, "h": 4, "g": 2, "k": 4, "f": 8, "v": 8, "b": 4, "s": 4}
    shapes = jax.tree.map(lambda text: tuple(sizes[n] for n in spmd.Layout(text).names), module.LAYOUTS)
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.unflatten(structure, [normal(i, *shape) / 2 for i, shape in enumerate(leaves)])
    build = lambda mesh: jax.value_and_grad(module.make_loss(mesh))
    yield Program("example llama405b loss", build, {"dp": 2, "fsdp": 2, "tp": 2}, (params, *tokens(8, 4, 4)), 0.05)


def of_train_lm() -> Iterator[Program]:
    module = anywhere.module("train_lm")
    c = module.Config(d=8, layers=1, groups=2, queries=1, head=4, hidden=8, batch=8, accumulate=2)
    params = jax.device_get(module.new_parameters(jax.random.key(0), c))
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 256, (8, 5)).astype(np.int32)
    keys = jax.random.split(jax.random.key(1), 2)
    ins = {
        "loss_and_gradients": (params, windows),
        "evaluate": (params, windows),
        "generate": (params, windows[:4, :4], keys),
    }
    layouts = {
        "loss_and_gradients": ((module.layouts, "w/dp n"), ("scalar", module.layouts)),
        "evaluate": ((module.layouts, "w/dp n"), "scalar"),
        "generate": ((module.layouts, "b/dp s", "c"), "c b"),
    }
    for name, args in ins.items():

        def build(mesh: Any, name: str = name) -> Callable[..., Any]:
            given, made = layouts[name]
            again = spmd.kernel(in_layouts=given, out_layouts=made, static="c", mesh=mesh)
            return functools.partial(again(getattr(module, name).__wrapped__), c=c)

        yield Program(f"example train_lm {name}", build, {"dp": 2, "tp": 2}, args)


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
