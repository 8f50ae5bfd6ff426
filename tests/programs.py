"""Random programs of every kind, and one way to run them: values and gradients in all modes, in one compilation.

A family is a function from choices to a `Program`. The pytest tests (`tests/test_soak.py`) run a few of each, the soak
(`tests/soak.py`) as many as there is time for; both by `attempt`, which compiles several at once.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import spmd
from spmd import nn, ops
from spmd.comm.planner import uneven
from spmd.modes import MODES
from tests import layers
from tests import simulator as sim
from tests.comm import cases
from tests.comm.test_permute import Move
from tests.ops import (
    harness,
    test_along,
    test_einops,
    test_reduce,
    test_top_k,
)
from tests.sampler import Choices, Sampler


@dataclass(frozen=True)
class Program:
    """One random program on whole arrays.

    Attributes:
      text: What it is, with its mesh and pattern.
      args: Its arguments, whole.
      runs: The same in each mode.
      plain: The same in plain JAX on whole arrays, written independently.
      devices: How many devices its mesh has.
      gradient: Whether gradients are compared: with weights that tell every place from its neighbours.
      wanted: The value by the simulator, where that has it; else `plain` is the only judge.
      tolerance: Relative to the largest number of each array.
    """

    text: str
    args: tuple[Any, ...]
    runs: Mapping[str, Callable[..., Any]]
    plain: Callable[..., Any]
    devices: int
    gradient: bool = True
    wanted: Any = None
    tolerance: float = 1e-5


# -------------------- running them


def weights_of(x: Any) -> Any:
    """A cotangent for `x`: small whole numbers, no two neighbours alike."""
    flat = (jnp.arange(math.prod(x.shape), dtype=jnp.int32) * 7 + 3) % 11 - 5
    return flat.reshape(x.shape).astype(x.dtype)


def weights_like(program: Program) -> Any:
    """The cotangents for a program's values, made outside: they would be compiled for each mode."""
    if not program.gradient:
        return ()
    shapes = jax.eval_shape(program.plain, *program.args)
    return jax.tree.map(
        lambda x: ((np.arange(math.prod(x.shape)) * 7 + 3) % 11 - 5).reshape(x.shape).astype(x.dtype), shapes
    )


def pulled(fn: Callable[..., Any], args: Sequence[Any], weights: Any) -> Any:
    """The values and the gradients along the weights; those alone where there are none."""
    if not jax.tree.leaves(weights):
        return fn(*args), ()
    moving = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of(*given: Any) -> Any:
        filled = dict(zip(moving, given, strict=True))
        return fn(*(filled.get(i, x) for i, x in enumerate(args)))

    values, pull = jax.vjp(of, *(args[i] for i in moving))
    return values, pull(jax.tree.unflatten(jax.tree.structure(values), jax.tree.leaves(weights)))


def attempt(programs: Sequence[Program]) -> list[Exception | None]:
    """What is wrong with each, in one compilation; where that fails as a whole, one by one.

    All have meshes of as many devices. Reference mode and plain JAX run on one device, in a compilation of their own:
    the compiler would divide what shares its arguments with the other modes.
    """
    faults: list[Exception | None] = [None] * len(programs)

    def modes(every: Sequence[Any]) -> list[Any]:
        return [caught(i, [m for m in programs[i].runs if m != "reference"], args) for i, args in enumerate(every)]

    def alone(every: Sequence[Any]) -> list[Any]:
        return [caught(i, ["plain", *({"reference"} & {*programs[i].runs})], args) for i, args in enumerate(every)]

    def caught(i: int, which: Sequence[str], args: Any) -> Any:
        found: dict[str, Any] = {}
        for mode in which if faults[i] is None else ():
            run = programs[i].runs.get(mode, programs[i].plain)
            try:
                found[mode] = pulled(run, *args[mode])
            except Exception as error:
                error.add_note(f"in mode {mode}")
                faults[i] = error
                return {}
        return found

    try:
        given = [(p.args, weights_like(p)) for p in programs]
        # each mode has its own, or they would lie alike in all
        every = [dict.fromkeys([*p.runs, "plain"], one) for p, one in zip(programs, given, strict=True)]
        found = [jax.device_get(compiled(fn, n, every)) for fn, n in ((modes, programs[0].devices), (alone, 1))]
    except Exception as error:
        return [error] if len(programs) == 1 else [attempt([one])[0] for one in programs]
    for i, (program, ours, plain) in enumerate(zip(programs, *found, strict=True)):
        if faults[i] is None:
            try:
                compare(program, {**ours, **plain})
            except AssertionError as error:
                faults[i] = error
    return faults


def compiled(fn: Callable[..., Any], devices: int, *args: Any) -> Any:
    """`fn(*args)`, jitted, with whole results. One device is one of this process."""
    chosen = jax.devices()[:devices] if devices > 1 else jax.local_devices()[:1]
    mesh = jax.make_mesh((devices,), ("all",), axis_types=(AxisType.Auto,), devices=chosen)
    lowered = jax.jit(fn, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(*args)
    return lowered.compile()(*args)


def compare(program: Program, found: Mapping[str, Any]) -> None:
    """Every mode against plain JAX, and explicit mode against the simulator."""
    values, gradients = found["plain"]
    if program.wanted is not None:
        near(program, found["explicit"][0], program.wanted, "explicit value, by the simulator")
    for mode in program.runs:
        near(program, found[mode][0], values, f"{mode} value")
        near(program, found[mode][1], gradients, f"{mode} gradient")


def near(program: Program, found: Any, wanted: Any, what: str) -> None:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    for i, (a, b) in enumerate(pairs):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what} {i}: {a.dtype}{a.shape} for {b.dtype}{b.shape}"
        a, b = (np.asarray(x, np.float32 if x.dtype.kind == "V" else x.dtype) for x in (a, b))
        if not a.size:
            continue
        if a.dtype.kind in "fc":
            odd = ~np.isfinite(b)
            assert np.array_equal(a[odd], b[odd], equal_nan=True), f"{what} {i}: {a[odd][:4]} for {b[odd][:4]}"
            a, b = np.where(odd, 0, a), np.where(odd, 0, b)
            error, scale = np.abs(a - b).max(), np.abs(b).max() + 1e-2
            big = np.abs(b) > scale / 100
            ratios = np.abs(a[big] / b[big]) if big.any() else np.ones(1)
            text = (
                f"off by {error / scale:.2g} of its largest number; {ratios.min():.3g} to {ratios.max():.3g} times it"
            )
            assert error <= program.tolerance * scale, f"{what} {i}: {text}"
        else:
            assert (a == b).all(), f"{what} {i}: {(a != b).sum()} of {a.size} numbers differ"


# -------------------- families


Family = Callable[[Choices], Program]
FAMILIES: dict[str, tuple[Family, int]] = {}


def family(often: int = 1) -> Callable[[Family], Family]:
    """Register a family, which the soak draws so many times as often as others."""

    def register(make: Family) -> Family:
        FAMILIES[make.__name__] = make, often
        return make

    return register


def in_modes(body: Any, mesh: Mapping[str, int], ins: Sequence[str], outs: Any) -> dict[str, Any]:
    return {mode: harness.run(body, mesh, ins, outs, mode) for mode in MODES}


def modes_of(kernel: Any) -> dict[str, Any]:
    return {mode: getattr(kernel, mode) for mode in MODES}


def devices(mesh: Mapping[str, int]) -> int:
    return math.prod(mesh.values())


def numbers(c: Sampler, shape: Sequence[int], kinds: str = "f") -> np.ndarray:
    """float32 three times of four, and always for gradients; else one of the dtypes."""
    return c.array(shape, "float32" if kinds == "f" or c.rng.below(4) < 3 else c.dtype(kinds=kinds))


def grads(x: np.ndarray) -> bool:
    return x.dtype == np.float32


def marked(layout: str, *names: str) -> str:
    return test_along.bracket(layout, *names)


# --- communication


@family(10)
def verbs(c: Choices) -> Program:
    """One call of a verb, in any of its spellings."""
    case = cases.sample(c.choice(tuple(cases.MOVES)), c)
    x = cases.argument(case, numbers(Sampler(c), (1,), "fic").dtype, c.seed)
    return Program(
        text=str(case),
        args=(x,),
        runs=modes_of(cases.kernel_of(case)),
        plain=lambda x: x.sum(0, dtype=x.dtype) if case.partial else x,
        devices=devices(case.mesh),
        gradient=grads(x),
        wanted=sim.gather(cases.expected(case, x), cases.written(case.dst), case.mesh),
    )


@family(4)
def relayouts(c: Choices) -> Program:
    """Changes of layout only, where plans are long: three axes, sums, copies, axes in parts."""
    case = cases.sample("relayout", c)
    prefer = c.choice(["collectives", "collectives", "bytes"])
    case = replace(case, keywords={**case.keywords, "prefer": prefer})
    x = cases.argument(case, np.float32, c.seed)
    plain = lambda x: x.sum(0) if case.partial else x
    return Program(str(case), (x,), modes_of(cases.kernel_of(case)), plain, devices(case.mesh))


def once(run: Callable[..., Any]) -> Callable[..., Any]:
    return run


def twice(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of the sum of squares, all in one array: what is pulled through it is a gradient of gradients."""

    def gradients(*args: Any) -> Any:
        loss = lambda *args: jnp.sum(jnp.square(y := run(*args)) * weights_of(y))
        return jnp.concatenate([g.reshape(-1) for g in jax.grad(loss, tuple(range(len(args))))(*args)])

    return gradients


@family(2)
def copies(c: Choices) -> Program:
    """Gathered copies that change their layout and meet divided data; half of them with gradients of gradients."""
    case, order = cases.sample("relayout", c), c.choice([once, once, twice])
    copied, kernel = cases.through_copies(case)
    x, w = cases.whole(case, seed=c.seed), Sampler(c).array((2 * sim.count(case.mesh, copied),))
    runs = {mode: order(run) for mode, run in modes_of(kernel).items()}
    plain = order(lambda x, w: jnp.einsum("w,abc->wabc", w, x))
    return Program(f"copies of {case}, {order.__name__}", (x, w), runs, plain, devices(case.mesh))


@family(3)
def permutations(c: Choices) -> Program:
    """`ppermute` and `shift`."""
    move, verb = Move(c), c.choice(["shift", "ppermute"])
    x = numbers(move.sampler, move.shape, "fic")
    table = move.wanted(verb, np.arange(1, x.size + 1).reshape(x.shape))  # each place's source; 0 for zeros

    def plain(x: Any) -> Any:
        return jnp.concatenate([jnp.zeros(1, x.dtype), x.reshape(-1)])[table.reshape(-1)].reshape(x.shape)

    return Program(
        text=f"{verb} {move.mesh} {move.bracketed} by {move.by} {move.wrap} {move.pairs}",
        args=(x,),
        runs=modes_of(move.kernel(verb)),
        plain=plain,
        devices=devices(move.mesh),
        gradient=grads(x),
        wanted=move.wanted(verb, x),
    )


# --- transformations


def scanned(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda carry, one: (carry, run(one)), jnp.int32(0), x)[1]


def in_turns(run: Callable[..., Any], turn: Any, x: Any) -> Any:
    return turn + 1, jax.lax.cond(turn % 2 == 0, run, lambda x: run(-x), x)


WRAPS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": jax.vmap,
    "scan": scanned,
    "remat in scan": lambda run: scanned(jax.checkpoint(lambda x: jnp.sin(run(x)))),
    "vmap of vmap": lambda run: lambda x: jax.vmap(jax.vmap(run))(x[:, None])[:, 0],
    "scan in vmap": lambda run: lambda x: jax.vmap(lambda one: scanned(run)(one[None])[0])(x),
    "cond in scan": lambda run: lambda x: jax.lax.scan(functools.partial(in_turns, run), jnp.int32(0), x)[1],
    "jvp": lambda run: jax.vmap(lambda x: jnp.add(*jax.jvp(lambda x: jnp.square(run(x)), (x,), (x * 2,)))),
    "twice": jax.vmap,
}


@family(6)
def transforms(c: Choices) -> Program:
    """Verbs and permutations under vmap, scan, remat, jvp, grad: around the body, or around the kernel."""
    name = c.choice(tuple(WRAPS))
    wrap, outside = WRAPS[name], bool(c.below(3) == 2)
    if c.below(4) < 3:
        case = cases.sample(c.choice(tuple(cases.MOVES)), c)
        kernel, mesh, text = functools.partial(cases.kernel_of, case), case.mesh, str(case)
        one, plain = cases.argument(case), (lambda x: x.sum(0)) if case.partial else lambda x: x
    else:
        move, verb = Move(c), c.choice(["shift", "ppermute"])
        kernel, mesh, text = functools.partial(move.kernel, verb), move.mesh, f"{verb} {move.mesh} {move.bracketed}"
        text += f" by {move.by} {move.wrap} {move.pairs}"
        one, table = (
            np.zeros(move.shape, np.float32),
            move.wanted(verb, np.arange(1, math.prod(move.shape) + 1).reshape(move.shape)),
        )
        plain = lambda x: jnp.concatenate([jnp.zeros(1, x.dtype), x.reshape(-1)])[table.reshape(-1)].reshape(x.shape)
    x = Sampler(c).array((2, *one.shape))
    runs = {k: wrap(run) for k, run in modes_of(kernel()).items()} if outside else modes_of(kernel(wrap, lead="n "))
    whole = wrap(plain)
    if name == "twice":
        runs, whole = {k: twice(run) for k, run in runs.items()}, twice(whole)
    where = "around the kernel" if outside else "around the body"
    return Program(f"{name} {where}: {text}", (x,), runs, whole, devices(mesh), tolerance=2e-5)


# --- operations


@family(10)
def einsum(c: Choices) -> Program:
    sampler = Sampler(c)
    mesh, pattern, sizes = test_einops.random_call(sampler, c.choice(test_einops.SHAPES))
    inputs, (output,) = sim.split_pattern(pattern)
    dtype = numbers(sampler, (1,), "fic").dtype
    arrays = [sampler.array(test_einops.shape_of(i, sizes), dtype) for i in inputs]
    bound = {n: sizes[n] for n in ("h",) if n in sizes}
    flat = lambda layout: "".join(sim.read(layout).names)
    apart = lambda x, layout: einops.rearrange(
        x, f"{sim.plain(layout)} -> {sim.flat(layout)}", **{n: sizes[n] for n in sim.read(layout).names}
    )

    def plain(*xs: Any) -> Any:
        parts = [apart(x, layout) for x, layout in zip(xs, inputs, strict=True)]
        out = jnp.einsum(f"{','.join(map(flat, inputs))}->{flat(output)}", *parts)
        return einops.rearrange(out, f"{sim.flat(output)} -> {sim.plain(output)}")

    body = lambda *xs: ops.einsum(*xs, pattern, **bound)
    return Program(
        text=f"einsum {mesh} {pattern} {sizes} {dtype}",
        args=tuple(arrays),
        runs=in_modes(body, mesh, inputs, output),
        plain=plain,
        devices=devices(mesh),
        gradient=grads(arrays[0]),
        wanted=sim.einsum(*arrays, pattern=pattern, sizes=sizes),
        tolerance=2e-5 if dtype.itemsize > 2 else 2e-2,
    )


@family(10)
def reductions(c: Choices) -> Program:
    sampler, op = Sampler(c), c.choice(test_reduce.OPS)
    mesh, pattern = test_reduce.random_call(sampler, op)
    [inputs], [output] = sim.split_pattern(pattern)
    sizes = sampler.sizes("b s d", mesh, [inputs, output])
    x = test_reduce.draw(sampler, op, tuple(sizes.values()), whole=bool(c.below(2)))  # whole numbers tie
    order, gone = test_reduce._order(inputs, output), test_reduce._gone(inputs, output)
    function = jax.nn.logsumexp if op == "logsumexp" else getattr(jnp, op)
    return Program(
        text=f"reduce {op} {mesh} {pattern} {sizes}",
        args=(x,),
        runs=in_modes(lambda x: ops.reduce(x, pattern, op), mesh, [inputs], output),
        plain=lambda x: function(x.transpose(order), axis=gone),
        devices=devices(mesh),
        gradient=grads(x),
        tolerance=5e-5 if x.itemsize != 2 else 2e-2,
    )


@family(3)
def rearrangements(c: Choices) -> Program:
    """Transpositions, dimensions joined and repeated along new ones, divided or not."""
    sampler = Sampler(c)
    mesh = sampler.mesh()
    left = sampler.layout("a b c", mesh)
    sizes = sampler.sizes("a b c", mesh, [left])
    words = [str(word) for word in c.permutation(left.split())]
    new = [axis for axis in mesh if not any(axis in word.split("/") for word in words)]
    right, known = list(words), {}
    repeats = bool(c.below(2))
    if repeats:
        right.insert(c.below(len(words) + 1), "/".join(["n", *(str(axis) for axis in c.permutation(new))]))
        known = {"n": sim.count(mesh, new) * (1 + c.below(3))}
    elif "/" not in words[-1]:
        right = [*words[:-2], f"({words[-2].split('/')[0]} {words[-1]})" + words[-2][len(words[-2].split("/")[0]) :]]
    pattern, x = f"{left} -> {' '.join(right)}", numbers(sampler, tuple(sizes.values()), "fic")
    verb = ops.repeat if repeats else ops.rearrange
    wanted = (sim.repeat if repeats else sim.rearrange)(x, pattern, **known)
    plain_text = f"{sim.plain(left)} -> {sim.plain(' '.join(right))}"
    return Program(
        text=f"{verb.__name__} {mesh} {pattern} {known}",
        args=(x,),
        runs=in_modes(lambda x: verb(x, pattern, **known), mesh, [left], " ".join(right)),
        plain=lambda x: (einops.repeat if repeats else einops.rearrange)(x, plain_text, **known),
        devices=devices(mesh),
        gradient=grads(x),
        wanted=wanted,
    )


def _topmost(x: Any, axis: int, k: int) -> Any:
    values, places = jax.lax.top_k(jnp.moveaxis(x, axis, -1), k)
    return jnp.moveaxis(values * (1 + places).astype(x.dtype), -1, axis)


@family(22)
def along_a_dimension(c: Choices) -> Program:
    """softmax, cumsum, argmax, argmin, top_k, sort, argsort, flip, roll: along one dimension, whole or divided."""
    every = [
        "softmax",
        "cumsum",
        "argmax",
        "argmin",
        "top_k",
        "sort",
        "payload",
        "argsort",
        "flip",
        "roll",
        "traced roll",
    ]
    sampler, name = Sampler(c), c.choice(every)
    mesh, dims = sampler.mesh(), c.choice(["s", "s d", "b s d"])
    layout = sampler.layout(dims, mesh, used=0.9)
    along, sizes = c.choice(dims.split()), sampler.sizes(dims, mesh, [layout])
    axis, bracketed = dims.split().index(along), marked(layout, along)
    x = numbers(sampler, tuple(sizes.values()), "f" if name == "softmax" else "fi")
    k, by, down = 1 + c.below(sizes[along]), c.below(4 * sizes[along]) - 2 * sizes[along], bool(c.below(2))
    without = " ".join(word for word in layout.split() if word.split("/")[0] != along) or "scalar"

    def best(x: Any) -> Any:
        values, places = ops.top_k(x, bracketed, k)
        return values * (1 + places).astype(values.dtype)

    body, plain, out = {
        "softmax": (lambda x: ops.softmax(x, bracketed), lambda x: jax.nn.softmax(x, axis), layout),
        "cumsum": (lambda x: ops.cumsum(x, bracketed), lambda x: jnp.cumsum(x, axis, dtype=x.dtype), layout),
        "argmax": (lambda x: ops.argmax(x, bracketed), lambda x: jnp.argmax(x, axis), without),
        "argmin": (lambda x: ops.argmin(x, bracketed), lambda x: jnp.argmin(x, axis), without),
        "top_k": (best, lambda x: _topmost(x, axis, k), test_top_k.without(layout, along)),
        "sort": (
            lambda x: ops.sort(x, bracketed, descending=down),
            lambda x: jnp.sort(x, axis, descending=down),
            layout,
        ),
        "payload": (
            lambda x: ops.sort(x % 3, bracketed, descending=down, payload=x)[1],
            lambda x: jnp.take_along_axis(x, jnp.argsort(x % 3, axis, descending=down, stable=True), axis),
            layout,
        ),
        "argsort": (
            lambda x: ops.argsort(x, bracketed, descending=down),
            lambda x: jnp.argsort(x, axis, descending=down, stable=True).astype(jnp.int32),
            layout,
        ),
        "flip": (lambda x: ops.flip(x, bracketed), lambda x: jnp.flip(x, axis), layout),
        "roll": (lambda x: ops.roll(x, bracketed, by), lambda x: jnp.roll(x, by, axis), layout),
        "traced roll": (
            lambda x: ops.roll(x, bracketed, jnp.int32(by)),
            lambda x: jnp.roll(x, by, axis),
            layout,
        ),
    }[name]
    text = f"{name} {mesh} {bracketed} {sizes} k={k} by={by} descending={down}"
    runs = in_modes(body, mesh, [layout], out)
    return Program(
        text, (x,), runs, plain, devices(mesh), gradient=grads(x) and not name.startswith("arg"), tolerance=5e-5
    )


@family(6)
def rows(c: Choices) -> Program:
    """Losses, softmax and extremes of rows some of whose scores are -inf, and some rows all of them; also inf and NaN."""
    sampler, name = Sampler(c), c.choice(["softmax", "logsumexp", "max", "min", "argmax", "top_k", "loss", "smoothed"])
    mesh = sampler.mesh()
    layout = sampler.layout("b v", mesh, used=0.9)
    sizes = sampler.sizes("b v", mesh, [layout])
    x, first = numbers(sampler, tuple(sizes.values())), layout.split()[0]
    masked = c.data.random(x.shape) < (c.below(4) / 4)
    masked[:, 0] &= bool(c.below(2))
    odd = ["-inf", "nan"] if name in ("loss", "smoothed") else ["-inf", "nan", "inf"]  # optax makes NaN of inf
    x = np.where(masked, np.float32(c.choice(odd)), x)
    labels = np.argmax(np.where(masked, -1, c.data.random(x.shape)), 1).astype(np.int32)
    tp = tuple(layout.split()[1].split("/")[1:]) or None
    keywords = {"label_smoothing": 0.1 * (name == "smoothed"), "reduction": "none"}
    reduced = lambda x: ops.reduce(x, f"{layout} -> {first}", name)
    heard = lambda y: jnp.where(jnp.isfinite(y), y, jnp.nan)  # where devices compare, an infinity stands for NaN
    best = lambda x: ops.top_k(x, marked(layout, "v"), 1)[0]
    target = lambda y: optax.losses.smooth_labels(jax.nn.one_hot(y, x.shape[1]), keywords["label_smoothing"])
    losses = lambda x, y: nn.cross_entropy(x, y, tp=tp, **keywords)
    meant = lambda x, y: optax.losses.softmax_cross_entropy(x, target(y))
    body, plain, out = {
        "softmax": (lambda x, _: ops.softmax(x, marked(layout, "v")), lambda x, _: jax.nn.softmax(x, 1), layout),
        "argmax": (lambda x, _: ops.argmax(x, marked(layout, "v")), lambda x, _: jnp.argmax(x, 1), first),
        "top_k": (lambda x, _: best(x), lambda x, _: jax.lax.top_k(x, 1)[0], test_top_k.without(layout, "v")),
        "logsumexp": (lambda x, _: reduced(x), lambda x, _: jax.nn.logsumexp(x, 1), first),
        "max": (lambda x, _: heard(reduced(x)), lambda x, _: heard(x.max(1)), first),
        "min": (lambda x, _: heard(reduced(x)), lambda x, _: heard(x.min(1)), first),
        "loss": (losses, meant, first),
        "smoothed": (losses, meant, first),
    }[name]  # fmt: skip
    text = f"{name} {mesh} {layout} {sizes} {masked.sum()} masked"
    runs = in_modes(body, mesh, [layout, first], out)
    return Program(text, (x, labels), runs, plain, devices(mesh), gradient=not masked.any(), tolerance=5e-5)


@family(3)
def takes(c: Choices) -> Program:
    """Rows of a table, or of a table for each b: each axis divides the rows, their features, the positions, or nothing."""
    sampler = Sampler(c)
    mesh = sampler.mesh()
    where: dict[str, list[str]] = {name: [] for name in "vdbs"}
    lands: dict[str, list[str]] = {name: [] for name in "dbs"}
    for axis in mesh:
        name = c.choice(["v", "v", "d", "b", "s", ""])
        if name:
            where[name].append(axis)
        if name == "v" and (fate := c.choice(["", "d", "b", "s"])):
            lands[fate].append(axis)
    word = lambda name, axes: "/".join([name, *axes])
    table, ids = f"{word('v', where['v'])} {word('d', where['d'])}", f"{word('b', where['b'])} {word('s', where['s'])}"
    if batched := bool(c.choice([0, 0, 1])):
        table = f"{word('b', where['b'])} {table}"
    order = [str(name) for name in c.permutation(list("bsd"))]
    out = " ".join(word(name, where[name] + lands[name]) for name in order)
    sizes = sampler.sizes("v d b s", mesh, [table, ids, out])
    x = numbers(sampler, (*((sizes["b"],) if batched else ()), sizes["v"], sizes["d"]))
    places = c.data.integers(0, sizes["v"], (sizes["b"], sizes["s"])).astype(np.int32)
    pattern = f"{marked(table, 'v')}, {ids} -> {out}"
    return Program(
        text=f"take {mesh} {pattern} {sizes}",
        args=(x, places),
        runs=in_modes(lambda t, i: ops.take(t, i, pattern), mesh, [table, ids], out),
        plain=lambda t, i: (jax.vmap(lambda t, i: t[i])(t, i) if batched else t[i]).transpose(
            ["bsd".index(name) for name in order]
        ),
        devices=devices(mesh),
        wanted=sim.take(x, places, pattern),
    )


# --- layers and placement


@functools.cache
def layer_cases(name: str) -> list[layers.LayerCase]:
    return [case for case in layers.CASES[name][0]() if devices(case.mesh) > 1]


@family(2)
def layer(c: Choices) -> Program:
    """Any case of any ready-made layer, in float32; the formulas of its collectives are `test_layers.py`'s business."""
    layers.register_all()
    return of_layer(c.choice(layer_cases(c.choice(sorted(layers.CASES)))))


def of_layer(case: layers.LayerCase) -> Program:
    """One case of a layer."""
    return Program(
        text=f"{case.name} {case}",
        args=layers.arguments(case),
        runs=modes_of(layers.kernel_of(case, spmd.make_mesh(**case.mesh))),
        plain=case.reference,
        devices=devices(case.mesh),
        tolerance=4 * layers.tolerance_of(case),
    )


@family(4)
def placement(c: Choices) -> Program:
    """Arrays that lie in one layout, go through a kernel in two more, and are placed in a fourth, all inside jit."""
    sampler = Sampler(c)
    sizes = sampler.mesh()
    mesh, layouts = cases.device_mesh(sizes), [sampler.layout("a b c", sizes) for _ in range(4)]
    if uneven(sizes.values()):  # inside jit the compiler alone moves arrays, and XLA of jax 0.12 may abort
        layouts = [layouts[1], layouts[1], layouts[2], layouts[2]]
    known = sampler.sizes("a b c", sizes, layouts)
    x = numbers(sampler, tuple(known.values()), "fic")
    move = f"{layouts[1]} -> {layouts[2]}"
    same = spmd.Layout(layouts[1]) == spmd.Layout(layouts[2])
    body = lambda x: (x if same else spmd.relayout(x, move, to="invarying")) * 2
    kernel = spmd.kernel(move, mesh=mesh)(body)

    def through(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: spmd.shard(run(spmd.shard(x, layouts[0], mesh=mesh)), layouts[3], mesh=mesh)

    runs = {mode: through(run) for mode, run in modes_of(kernel).items() if mode != "reference"}
    text = f"placement {sizes} {' -> '.join(layouts)}"
    return Program(text, (x,), runs, lambda x: x * 2, devices(sizes), gradient=grads(x), wanted=x * 2)
