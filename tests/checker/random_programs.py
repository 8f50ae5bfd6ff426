"""Random bodies with loops, scans and rings over divided dimensions, gradients inside, sizes of shards, and conditions,
each beside plain JAX.

Nobody says of a body whether it is right: JAX runs it on all devices, unchecked, and the numbers are compared with those
of plain JAX on whole arrays. Where they differ, the first call or `spmd.check` must say so; where they agree, the first
call must not refuse the body, and `spmd.check` must not call it wrong.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import spmd
from tests.sampler import Choices

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "logsumexp": jax.scipy.special.logsumexp,
}
RAW = {"psum": jnp.sum, "pmean": jnp.mean, "pmax": jnp.max, "pmin": jnp.min}
LOOPS = ("map", "scan", "vmap", "named vmap")


class Random(NamedTuple):
    """A body with its pattern, and what it means on whole arrays."""

    text: str
    pattern: str
    body: Callable[..., Any]
    plain: Callable[..., Any]
    args: tuple[np.ndarray, ...]
    mesh: dict[str, int]
    more: tuple[tuple[np.ndarray, ...], ...] = ()  # other arguments that it has to be right for


def around(loop: str, axis: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a row as one of all rows."""
    if loop == "map":
        return lambda x: lax.map(fn, x)
    if loop == "scan":
        return lambda x: lax.scan(lambda carry, row: (carry, fn(row)), 0, x)[1]
    return jax.vmap(fn, spmd_axis_name=axis if loop == "named vmap" and axis else None)


def loops(c: Choices) -> Random:
    """A reduction inside a loop or a map, over a dimension that is divided or not."""
    mesh = {"e": int(c.choice((2, 1, 4))), "b": int(c.choice((2, 1)))}
    rows, inner = c.choice(("e/e", "e")), c.choice(("b/b", "b"))
    loop, op = c.choice(LOOPS), c.choice([*REDUCTIONS, *RAW])
    whole, keeps = c.choice((False, True)), c.choice((False, True))
    axis = "e" if rows == "e/e" else ""

    if op in RAW:
        axes = "b" if inner == "b/b" else ("b",)
        fn = RAW[op]

        def one(row: Any) -> Any:
            part = fn(row)
            missing = tuple(a for a in ("b",) if a not in jax.typeof(part).manual_axis_type.varying)
            return row * getattr(lax, op)(lax.pcast(part, missing, to="varying") if missing else part, axes)

        meant = fn
    else:
        target = "scalar" if not keeps else "1"
        one = lambda row: row * spmd.reduce(row, f"{inner} -> {target}", op)
        meant = REDUCTIONS[op]
    run = around(loop, axis, one)
    if whole and op in REDUCTIONS:  # the same before the loop, and that is right
        run = lambda x: x * spmd.reduce(x, f"{rows} {inner} -> {rows} 1", op)
    plain = lambda x: x * meant(x, axis=1, keepdims=True)
    x = normal(c, 4 * mesh["e"], 3 * mesh["b"])
    text = f"loop {loop} over {rows}, {op} of {inner}{', before the loop' * whole}"
    return Random(text, f"{rows} {inner} -> {rows} {inner}", run, plain, (x,), mesh)


def gradients(c: Choices) -> Random:
    """A step by a gradient that is taken inside."""
    mesh = {"dp": int(c.choice((2, 1, 4))), "tp": int(c.choice((1, 2)))}
    how = c.choice(("mean", "sum", "psum", "pmean", "reduce", "spmd.grad", "partial", "deferred"))
    curve = c.choice((lambda e: e**2, jnp.sin, lambda e: e))
    rows = c.choice(("b/dp", "b"))
    total = c.choice((jnp.mean, jnp.sum))

    def errors(w: Any, x: Any, t: Any) -> Any:
        return curve(x @ w - t)

    def body(w: Any, x: Any, t: Any) -> Any:
        def loss(w: Any) -> Any:
            e = errors(w, x, t)
            if how in ("mean", "sum", "partial", "deferred"):
                return {"mean": jnp.mean, "sum": jnp.sum}.get(how, jnp.sum)(e)
            if how in ("psum", "pmean"):
                part = total(e)
                missing = tuple(a for a in ("dp",) if a not in jax.typeof(part).manual_axis_type.varying)
                return getattr(lax, how)(lax.pcast(part, missing, to="varying") if missing else part, "dp")
            return spmd.reduce(e, f"{rows} -> scalar", "mean" if total is jnp.mean else "sum")

        if how == "spmd.grad":
            return w - spmd.grad(loss)(w)
        if how == "partial":
            mark = "{U:dp}" if rows == "b/dp" else ""
            return w - spmd.grad(loss, loss=mark)(w)
        if how == "deferred":
            g = jax.grad(loss)(spmd.defer(w, "d -> d {R:dp}"))
            return w - (spmd.psum(g, "d {U:dp} -> d") if rows == "b/dp" else g)
        return w - jax.grad(loss)(w)

    def plain(w: Any, x: Any, t: Any) -> Any:
        summed = how in ("sum", "partial", "deferred") or (how != "mean" and total is jnp.sum)
        return w - jax.grad(lambda w: (jnp.sum if summed else jnp.mean)(errors(w, x, t)))(w)

    args = normal(c, 3), normal(c, 4 * mesh["dp"], 3), normal(c, 4 * mesh["dp"])
    text = f"a gradient inside, {how} of {rows}"
    return Random(text, f"d, {rows} d, {rows} -> d", body, plain, args, mesh)


def per_sample(c: Choices) -> Random:
    """Something of the gradients of single rows."""
    mesh = {"a": int(c.choice((2, 1, 4)))}
    how, rows = c.choice(("raw", "deferred", "spmd.grad")), c.choice(("s/a", "s"))
    power, closes = c.choice((2, 1)), c.choice((True, False))
    score = c.choice((lambda f, s: jnp.sin(f @ s), lambda f, s: (f @ s) ** 2))
    loop = c.choice(("vmap", "map"))

    def body(f: Any, s: Any) -> Any:
        if how == "deferred":
            f = spmd.defer(f, "p -> p {R:a}")
        grad = spmd.grad(score, loss="{U:a}") if how == "spmd.grad" and rows == "s/a" else jax.grad(score)
        each = jax.vmap(grad, (None, 0))(f, s) if loop == "vmap" else lax.map(lambda row: grad(f, row), s)
        total = (each**power).sum(0)
        missing = tuple(a for a in ("a",) if a not in jax.typeof(total).manual_axis_type.varying)
        if rows == "s":
            return total if missing else lax.pmean(total, "a")
        if closes or not missing:
            return lax.psum(lax.pcast(total, missing, to="varying") if missing else total, "a")
        return total

    plain = lambda f, s: (jax.vmap(jax.grad(score), (None, 0))(f, s) ** power).sum(0)
    args = normal(c, 3), normal(c, 2 * mesh["a"], 3)
    return Random(f"gradients of rows, {how} of {rows} by {loop}", f"p, {rows} p -> p", body, plain, args, mesh)


def sizes(c: Choices) -> Random:
    """A number of rows from a shape, or from `spmd.size`: on several devices, as it is right on one by chance."""
    mesh = {"dp": int(c.choice((2, 3, 4))), "tp": int(c.choice((1, 2)))}
    rows, result = c.choice(("b/dp", "b")), c.choice(("scaled", "alone", "sum", "mean", "indices"))
    source = c.choice(("shape", "len", "size", "local_size"))
    number = {
        "shape": lambda x: x.shape[0],
        "len": len,
        "size": lambda x: spmd.size("b"),
        "local_size": lambda x: spmd.local_size(rows),
    }[source]

    def body(x: Any) -> Any:
        n = number(x)
        if result == "scaled":
            return x / n
        if result == "indices":
            return x * jnp.arange(n)[-1].astype(x.dtype)
        if result == "alone":
            return jnp.float32(n)
        return spmd.reduce(x, f"{rows} d -> d", result) / n

    def plain(x: Any) -> Any:
        n = x.shape[0]
        if result == "scaled":
            return x / n
        if result == "indices":
            return x * (n - 1)
        return jnp.float32(n) if result == "alone" else (x.sum(0) if result == "sum" else x.mean(0)) / n

    target = {"alone": "scalar", "sum": "d", "mean": "d"}.get(result, f"{rows} d")
    x = normal(c, 3 * mesh["dp"], 5)
    return Random(f"a size by {source}, {result} of {rows}", f"{rows} d -> {target}", body, plain, (x,), mesh)


def scans(c: Choices) -> Random:
    """A scan by products of matrices: of each piece alone, or of the pieces and then of what they come to."""
    mesh = {"t": int(c.choice((2, 1, 4))), "b": int(c.choice((1, 2)))}
    rows, levels = c.choice(("t/t", "t")), c.choice((1, 2, 2))
    how = c.choice(("right", "right", "inclusive", "wrong side"))
    how = how if mesh["t"] > 1 else "right"  # what is wrong on one device too, no mesh shows
    product = c.choice((
        lambda p, q: q @ p,
        lambda p, q: jnp.einsum("...ij,...jk->...ik", q, p),
        lambda p, q: jnp.linalg.solve(q, p),
        lambda p, q: jnp.linalg.inv(q) @ p,
        lambda p, q: q * p,
        lambda p, q: q + p,
    ))  # fmt: skip

    def body(x: Any) -> Any:
        own = lax.associative_scan(product, x)
        if levels == 1 or rows == "t":
            return own
        ends = lax.associative_scan(product, lax.all_gather(own[-1], "t"))
        place = lax.axis_index("t") - int(how != "inclusive")
        before = lax.dynamic_index_in_dim(ends, jnp.maximum(place, 0), 0, keepdims=False)
        both = (own, before) if how == "wrong side" else (before, own)
        several = (jnp.broadcast_to(one, own.shape) for one in both)
        return jnp.where(place >= 0, product(*several), own)

    x = 0.3 * normal(c, int(c.choice((1, 2, 3, 4))) * mesh["t"], 2, 2) + np.eye(2, dtype=np.float32)
    plain = lambda x: lax.associative_scan(product, x)
    return Random(f"a scan of {rows} in {levels} levels, {how}", f"{rows} i j -> {rows} i j", body, plain, (x,), mesh)


def rings(c: Choices) -> Random:
    """Blocks that travel around a ring: as a dimension that is made or given, or without one, as whole arrays have none."""
    n, blocks = int(c.choice((2, 1, 4))), c.choice(("made", "given", ""))
    left, by = c.choice((0, 0, 1)), c.choice((1, -1))  # rounds that are left out
    left = left if n > 1 else 0
    meet = c.choice((
        lambda x, y: x * y.sum(-2, keepdims=True),
        lambda x, y: jnp.einsum("...id,...jd->...i", jnp.sin(x), y)[..., None] * x,
        lambda x, y: x * 0 + jnp.tanh(y).sum(-2, keepdims=True),
    ))  # fmt: skip
    loop = c.choice(("scan", "fori_loop", "python"))
    rows, turned = "c/a l d" if blocks == "given" else "n/a d", "[c/a] l d" if blocks else "[n/a] d"

    def body(x: Any) -> Any:
        if blocks != "made":
            return around_once(x)
        parts = spmd.rearrange(x, "(c l)/a d -> c/a l d", c=spmd.axis_size("a"))
        return spmd.rearrange(around_once(parts), "c/a l d -> (c l)/a d")

    def around_once(x: Any) -> Any:
        def once(total: Any, y: Any) -> Any:
            return total + meet(x, y), spmd.shift(y, turned, by)

        state, rounds = (jnp.zeros_like(x), x), spmd.axis_size("a") - left
        if loop == "scan":
            return lax.scan(lambda s, _: (once(*s), None), state, length=rounds)[0][0]
        if loop == "fori_loop":
            return lax.fori_loop(0, rounds, lambda _, s: once(*s), state)[0]
        for _ in range(rounds):
            state = once(*state)
        return state[0]

    def plain(x: Any) -> Any:
        parts = x.reshape(n, -1, x.shape[-1])
        return sum(meet(parts, jnp.roll(parts, r, 0)) for r in range(n)).reshape(x.shape)

    x = normal(c, *((n, 3) if blocks == "given" else (3 * n,)), 4)
    text = f"a ring of {rows}, {blocks or 'no'} blocks, by {loop}, {left} rounds less"
    return Random(text, f"{rows} -> {rows}", body, plain, (x,), {"a": n})


def conditions(c: Choices) -> Random:
    """A choice that depends on numbers of the whole array, or by mistake on those of one shard."""
    mesh = {"dp": int(c.choice((2, 1, 4)))}
    rows, whole, bound = c.choice(("b/dp", "b")), c.choice((False, True)), np.float32(c.choice((3.0, 0.5, 40.0, 1e4)))
    measure, reduction = c.choice((
        (lambda x: x.sum(), lax.psum),
        (lambda x: jnp.abs(x).max(), lax.pmax),
        (lambda x: jnp.sqrt((x * x).sum()), lambda part, axes: jnp.sqrt(lax.psum(part**2, axes))),
        (lambda x: bound * (~jnp.isfinite(x).all() | (x.max() > bound)).astype(x.dtype) * 2, lax.pmax),
    ))  # fmt: skip
    how = c.choice(tuple(TAKEN))

    def body(x: Any) -> Any:
        over = whole and rows == "b/dp"
        return TAKEN[how](x, lambda y: reduction(measure(y), "dp") if over else measure(y), bound)

    x = normal(c, 3 * mesh["dp"], 4)
    uneven = np.where(np.arange(len(x))[:, None] < len(x) // 2, x, 50 * x)
    sides = bound * (1 + np.abs(x) / 10) * np.where(np.arange(len(x))[:, None] < len(x) // 2, 2, 0.01)
    several = x / 100, x * 100, uneven, uneven[::-1] / 40, uneven * 1e3, uneven * -1e5, sides, sides[::-1]
    more = tuple((one.astype(np.float32),) for one in several)
    text = f"{how} by {'all' if whole else 'one shard'} of {rows}, at {bound}"

    def plain(x: Any) -> Any:  # what stands for itself alone has no kernel around it
        return TAKEN[how.removeprefix("spmd.")](x, measure, bound)

    return Random(text, f"{rows} d -> {rows} d", body, plain, (x,), mesh, more)


def halved(x: Any, of: Callable[..., Any], bound: Any) -> Any:
    """An array that is halved until a number is small."""
    until = lambda state: (of(state[0]) > bound) & (state[1] < 9)
    return lax.while_loop(until, lambda state: (state[0] / 2, state[1] + 1), (x, jnp.int32(0)))[0]


TAKEN: dict[str, Callable[..., Any]] = {
    "where": lambda x, of, bound: jnp.where(of(x) > bound, x / 2, x),
    "minimum": lambda x, of, bound: x * jnp.minimum(1, bound / (of(x) + 1e-3)),
    "maximum": lambda x, of, bound: x / jnp.maximum(of(x), bound),
    "product": lambda x, of, bound: x * (of(x) > bound).astype(x.dtype),
    "sign": lambda x, of, bound: x * jnp.sign(of(x) - bound),
    "cond": lambda x, of, bound: lax.cond(of(x) > bound, lambda x: x / 2, lambda x: x, x),
    "spmd.cond": lambda x, of, bound: spmd.cond(of(x) > bound, lambda x: x / 2, lambda x: x, x),
    "switch": lambda x, of, bound: lax.switch((of(x) > bound).astype(int), [lambda x: x, lambda x: x / 2], x),
    "while_loop": halved,
}  # fmt: skip
ASKED = "quick"  # by the first call

# Each with how often the soak draws it.
FAMILIES = {loops: 1, gradients: 1, per_sample: 1, sizes: 1, scans: 2, rings: 3, conditions: 4}


def normal(c: Choices, *shape: int) -> np.ndarray:
    return np.random.default_rng(c.seed).normal(size=shape).astype(np.float32)


def wider(one: Random) -> Random:
    """The same on a mesh whose axes of one device have two: there a check looks too, and may find what is right here.
    Where numbers choose, those of the second device are also small, and negative and large."""
    mesh = {axis: max(2, devices) for axis, devices in one.mesh.items()}
    layouts = one.pattern.partition("->")[0].split(",")

    def longer(x: np.ndarray, layout: str, factor: float) -> np.ndarray:
        for at, dim in enumerate(spmd.Layout(layout).dims):
            if any(one.mesh[axis] == 1 for axis in dim.axes):
                x = np.concatenate([x, np.float32(factor) * np.flip(x, at)], at)
        return x

    args, *more = [
        tuple(longer(x, layout, factor) for x, layout in zip(args, layouts, strict=True))
        for factor in (1.25, *((0.01, -100) if one.more else ()))
        for args in (one.args, *one.more)
    ]
    return one._replace(mesh=mesh, args=args, more=tuple(more))


def unchecked(one: Random) -> Callable[..., Any]:
    """The body on the devices, as JAX runs it."""
    return spmd.kernel(one.pattern, mesh=spmd.make_mesh(**one.mesh), check="off")(one.body)


def copies_agree(out: jax.Array) -> bool:
    """Whether the devices that should hold equal copies do."""
    blocks: dict[str, np.ndarray] = {}
    return all(
        np.allclose(np.asarray(shard.data), blocks.setdefault(str(shard.index), np.asarray(shard.data)), atol=1e-6)
        for shard in out.addressable_shards
    )


def right(one: Random) -> bool:
    """Whether the devices compute what plain JAX does of whole arrays, for all of the arguments."""
    run, plain = unchecked(one), jax.jit(one.plain)  # each is compiled once for all of them

    def agrees(args: tuple[np.ndarray, ...]) -> bool:
        outs = jax.tree.leaves(run(*args))
        return all(map(copies_agree, outs)) and alike(outs, plain(*args))

    return all(map(agrees, (one.args, *one.more)))


def alike(got: Any, wanted: Any) -> bool:
    """Whether all results are close."""
    ours, others = ([np.asarray(y, dtype) for y in jax.tree.leaves(x)] for x, dtype in ((got, None), (wanted, "f8")))
    return len(ours) == len(others) and all(map(close, ours, others))


def close(x: Any, y: Any) -> bool:
    largest = max(1.0, float(np.abs(y[np.isfinite(y)]).max(initial=0)))
    return x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)


def another_reference(one: Random, kernel: Any) -> bool:
    """Whether reference mode gives other numbers than plain JAX, and says nothing."""
    try:
        return not alike(kernel.reference(*one.args), jax.jit(one.plain)(*one.args))
    except spmd.errors.SpmdError:
        return False


def judged(c: Choices, family: Callable[[Choices], Random] | None = None) -> tuple[str, str]:
    """What a random program is, of any family or of this one, and what became of it: "right", "refused while traced", or
    by whom it was found.

    Raises:
      AssertionError: If other numbers are no finding, or right numbers are one.
    """
    one = (family or c.choice([*FAMILIES]))(c)
    try:
        same = right(one)
    except spmd.errors.SpmdError:
        return one.text, "refused while traced"
    kernel = spmd.kernel(one.pattern, mesh=spmd.make_mesh(**one.mesh))(one.body)
    with warnings.catch_warnings(record=True) as told, mock.patch.dict(os.environ, SPMD_CHECK=ASKED):
        warnings.simplefilter("always")
        try:
            kernel.trace(*one.args)
            first = ""
        except spmd.errors.ReplicationError as error:
            first = ", ".join(finding.kind for finding in error.findings)
        warned = bool(told)
        checked = spmd.check(kernel, *one.args)
    findings, known = [finding.kind for finding in checked], checked.verdict.kind in ("proved", "tested")
    if same and (first or findings) and 1 in one.mesh.values() and not right(wider(one)):
        return one.text, "check, with more devices"
    if same:
        meant = {"closed"}  # nobody wrote what it moves, and that its numbers are right is an accident
        assert set(filter(None, first.split(", "))) <= meant and set(findings) <= meant, (
            f"{one.text}: an alarm, {first or findings}"
        )
        assert first or not known or not another_reference(one, kernel), f"{one.text}: {checked}, and another reference"
        return one.text, "closed" if first else "right" if known else "right, and not tested"
    if first or findings:
        return one.text, "first call" if first else "warned at the first call" if warned else "check"
    assert told or not known or checked.verdict.unreached, f"{one.text}: other numbers, and no finding"
    named = "named by the verdict" if known else "wrong, and not tested"
    return one.text, "warned at the first call" if warned else named
