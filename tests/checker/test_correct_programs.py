"""Correct programs raise no alarm."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import run_state
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker import check_jaxpr
from spmd.language import Layout
from tests.checker.harness import (
    AXES,
    SHAPE,
    assert_equal,
    check,
    dims_of,
    layout_p,
    mark,
    mesh,
    rows,
    shards,
    split,
    trace,
    varying,
    whole,
)
from tests.sampler import share

PROGRAMS = []


def right(*layouts: str):
    """A program that gives the same numbers on every mesh; its results lie like this."""

    def keep(program):
        PROGRAMS.append(program)
        program.layouts = layouts
        return program

    return keep


@right("s/dp d")
def gathered_softmax(x, w):
    x = mark(x, "s/dp d/tp", "operand")
    full = lax.all_gather(x, "tp", axis=1, tiled=True)
    return mark(jax.nn.softmax(full, axis=-1), "s/dp d")


@right("s/dp d/tp")
def softmax_by_hand(x, w):
    top = lax.pmax(lax.stop_gradient(x).max(1, keepdims=True), "tp")
    e = jnp.exp(x - top)
    total = mark(lax.psum(e.sum(1, keepdims=True), "tp"), "s/dp _")
    return mark(e / total, "s/dp d/tp")


@right("s/dp d")
def density_of_a_complete_sum(x, w):
    y = lax.psum(mark(x @ rows(w), "s/dp d {U:tp}", "result"), "tp")
    return mark(jnp.log(lax.bessel_i0e(y)), "s/dp d")


@right("s/dp d", "l")
def scan_with_remat(x, w):
    def layer(h, _):
        h = mark(h, "s/dp d", "operand")
        return mark(jnp.tanh(h @ w), "s/dp d"), lax.psum(h.sum(), "dp")

    h = lax.all_gather(x, "tp", axis=1, tiled=True)
    h, sums = lax.scan(jax.checkpoint(layer), h, None, length=3)
    return mark(h, "s/dp d"), mark(sums, "l")


@jax.custom_jvp
def doubled(x):
    return 2.0 * x


doubled.defjvp(lambda p, t: (doubled(p[0]), 2.0 * t[0]))


@jax.custom_vjp
def tripled(x):
    return 3.0 * x


tripled.defvjp(lambda x: (3.0 * x, None), lambda _, g: (3.0 * g,))


@right("s d")
def custom_derivatives(x, w):
    y = mark(tripled(doubled(w)), "s d")
    loss = lambda v: (tripled(doubled(v)) * x.sum()).sum()
    g = jax.grad(loss)(w)  # JAX sums it over the devices: w is the same on all of them
    return mark(y + g, "s d")


@right("s/dp", "s d/tp")
def vmapped(x, w):
    one = lambda row: mark(lax.psum(mark(row, "d/tp", "operand").sum(), "tp"), "")
    y = mark(jax.vmap(one)(x), "s/dp")  # inside, no layout mentions s nor dp
    z = jax.vmap(lambda v: mark(jnp.zeros_like(v), "d/tp", "created"))(rows(w).T)
    return y, mark(z, "s d/tp")


@right("", "")
def polluted_carry(x, w):
    """A carry that JAX types varying because another one is, and that is equal all the same."""

    def step(carry, _):
        total, count = carry
        return (total + x.sum(), count + varying(jnp.ones(()))), None

    (total, count), _ = lax.scan(step, (varying(jnp.zeros(())), varying(jnp.zeros(()))), None, length=3)
    return mark(count, ""), mark(lax.psum(total, AXES), "")


@right("", "d f")
def grad_inside(x, w):
    def loss(w):
        y = mark(x @ rows(w), "b/dp f {U:tp}", "result")
        y = mark(lax.psum(y, "tp"), "b/dp f")
        return mark(lax.psum((y**2).sum(), "dp"), "")

    value, g = jax.value_and_grad(loss)(w)
    return mark(value, ""), mark(g, "d f")


@right("n")
def partial_gradients(x, w):
    """Gradient accumulation: one psum after the loop over micro-batches."""

    def micro(total, row):
        g = jax.grad(lambda v: (jnp.sin(row)[None] @ rows(v) * 2.0).sum())(varying(w))
        total = mark(total + g, "d f {U:dp,tp}", "annotate")
        return total, None

    total, _ = lax.scan(micro, varying(jnp.zeros_like(w)), x)
    scaled = -0.5 * (total / 4.0).T.reshape(-1) + 0.0
    return mark(lax.psum(scaled, AXES), "n")


@right("b/dp f")
def linear_in_a_partial_sum(x, w):
    y = mark(x @ rows(w), "b/dp f {U:tp}", "result")
    y = y @ w + jnp.pad(y, ((0, 0), (1, 0)))[:, 1:] - jnp.where(w[:1] > 0, y, 0.0)
    y = jnp.concatenate([y, y * w[1:2]], 1).astype(jnp.float16).astype(jnp.float32).cumsum(1)
    y = jnp.zeros_like(y).at[:, 0].set(y[:, 0]) + jnp.take(y, jnp.arange(16)[::-1], axis=1)
    return mark(lax.psum(y, "tp"), "b/dp f")


@right("s/dp d/tp", "s/dp d", "n/dp/tp", "n/tp", "")
def constants(x, w):
    s, d = x.shape
    mark(jnp.arange(4), "n/tp", "created")  # the verb that made it knows which positions are meant
    counted = mark(mark(jnp.ones((d,)), "n/tp", "operand").sum(), "{U:tp}", "result")
    return (
        mark(jnp.zeros((s, d)) + 1.0, "s/dp d/tp", "operand"),
        mark(jnp.broadcast_to(w[:1], (s, 8)), "s/dp d"),
        mark(jnp.full((s, d), 2.0).reshape(s * d).astype(jnp.bfloat16), "n/dp/tp").astype(jnp.float32),
        mark(np.full((d,), 3.0, np.float32) * jnp.ones((d,)), "n/tp"),
        lax.psum(varying(mark(jnp.zeros(()), "{U:tp}", "created") + counted, "tp"), "tp"),
    )


@right("d f", "a/dp")
def loops_and_branches(x, w):
    h = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0, w))[1]
    h = lax.cond(lax.psum(x.sum(), AXES) > 0, lambda v: v + 1.0, lambda v: v, h)
    same = lax.cond(w.sum() > 0, lambda v: lax.psum(v.sum(1), "tp"), lambda v: lax.pmax(v.max(1), "tp"), x)
    return mark(h, "d f"), mark(same, "a/dp")


@right()
def a_decision_that_is_meant_per_shard(x, w):
    with spmd.per_shard("each device looks at its own block"):
        k = lax.cond(x.sum() > 0, lambda v: v + 1.0, lambda v: v, x)
    mark(k, "a/dp b/tp")
    return ()


@right("a b", "a/dp b/tp", "")
def solvers(x, w):
    """A solver of equal values is equal; one that sums what its dots are of may run on shards."""
    y = jax.scipy.sparse.linalg.cg(lambda v: 2.0 * v + varying(lax.pmean(v, "tp")), varying(w))[0]
    z = lax.custom_linear_solve(
        lambda v: v * 2.0,
        x,
        lambda _, b: (b / 2.0, varying(lax.psum(b.sum(), AXES))),
        lambda _, b: (b, 0.0),
        has_aux=True,
    )
    return mark(y, "a b"), mark(z[0], "a/dp b/tp"), mark(z[1], "")


@right("")
def unread(x, w):
    """What becomes of a jaxpr that the pass does not know is asked of nobody."""

    def body(ref):
        ref[...] = lax.psum(ref[...], AXES)

    return mark(run_state(body)(varying(x.sum())), "")


@right("s/dp")
def ring(x, w):
    """All blocks visited: equal by arithmetic, which only the author can say."""
    n = lax.axis_size("tp")

    def step(_, carry):
        total, block = carry
        return total + block, lax.ppermute(block, "tp", [(i, (i + 1) % n) for i in range(n)])

    block = x.sum(1)
    total, _ = lax.fori_loop(0, n, step, (jnp.zeros_like(block), block))
    return mark(assert_equal(total, "tp"), "s/dp")


@right("a b/tp", "a/dp b/tp", "a/dp/tp b", "a/dp/tp b")
def splitting(x, w):
    y = mark(x @ rows(w), "a/dp b {U:tp}")
    return (
        mark(split(mark(w, "a b", "operand"), "tp", 1, lax.axis_size("tp")), "a b/tp"),
        mark(lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True), "a/dp b/tp"),
        mark(lax.psum_scatter(y, "tp", tiled=True), "a/dp/tp b"),
        mark(lax.all_to_all(x, "tp", 0, 1, tiled=True), "a/dp/tp b"),
    )


@right("s/dp d")
def ellipsis(x, w):
    return mark(lax.all_gather(mark(x, "... d/tp", "operand"), "tp", axis=1, tiled=True), "... d")


@right("n")
def equal_noise(x, w):
    key = jax.random.key(0)
    return mark(jax.random.normal(key, (3,)) + jax.random.uniform(key, (3,)), "n")


@right("a b")
def shifted_equal(x, w):
    n = lax.axis_size("tp")
    return mark(lax.ppermute(varying(w), "tp", [(i, (i + 1) % n) for i in range(n)]), "a b")


@right("s/dp", "s/dp", "s/dp")
def logsumexps_of_the_blocks_are_merged(x, w):
    own = jax.nn.logsumexp(x, axis=1)
    top = lax.pmax(lax.stop_gradient(own), "tp")
    together = top + jnp.log(lax.psum(jnp.exp(own - top), "tp"))
    gathered = lax.pmean(jax.nn.logsumexp(lax.all_gather(own, "tp"), axis=0), "tp")
    return mark(together, "s/dp"), mark(gathered, "s/dp"), jnp.log(lax.psum(jnp.exp(own), "tp"))


@right("s/dp d", "s/dp d")
def attention_over_divided_keys(x, w):
    values = rows(w)
    weighed = jax.nn.softmax(x, axis=1) @ values
    own = jax.nn.logsumexp(x, axis=1)
    every = lax.all_gather(own, "tp")
    share = jnp.exp(own - jax.nn.logsumexp(every, axis=0))
    shares = jax.nn.softmax(every, axis=0)[lax.axis_index("tp")]
    return mark(lax.psum(weighed * share[:, None], "tp"), "s/dp d"), lax.psum(weighed * shares[:, None], "tp")


@right("s/dp", "s/dp")
def variances_of_the_blocks_are_merged(x, w):
    mean = x.mean(1)
    distance = mean - lax.pmean(mean, "tp")
    squares = ((x - mean[:, None]) ** 2).sum(1)
    merged = (lax.psum(squares, "tp") + lax.psum(x.shape[1] * distance**2, "tp")) / w.shape[1]
    return mark(merged, "s/dp"), mark(lax.pmean(x.var(1) + distance**2, "tp"), "s/dp")


@right("s/dp", "s/dp", "s/dp")
def means_that_are_taken_twice(x, w):
    """Each call of `mean` and `var` is traced anew, and makes the same number."""
    distance = x.mean(1) - lax.pmean(x.mean(1), "tp")
    mean = lax.pmean(x.mean(1), "tp")
    squares = lax.pmean(x.var(1) + x.mean(1) ** 2, "tp")
    spread = lax.pmean((x - x.mean(1, keepdims=True)) ** 2, "tp").mean(1)
    return (
        mark(lax.pmean(x.var(1) + distance**2, "tp"), "s/dp"),
        mark(squares - mean**2, "s/dp"),
        mark(spread + lax.pmean(distance * distance, "tp"), "s/dp"),
    )


@right("s/dp", "s/dp d", "s/dp", "s/dp d")
def rows_that_each_device_counts(x, w):
    """`arange` numbers the rows of a block where these are picked all, and in order."""
    x = lax.all_gather(x, "tp", axis=1, tiled=True)
    count = jnp.arange(x.shape[0])
    best = x.argmax(1)
    pairs = jnp.stack([best, best - 1], axis=1)
    return (
        mark(x[count, best], "s/dp"),
        mark(x.at[count, best].add(1.0), "s/dp d"),
        mark(x[count, 1], "s/dp"),
        mark(x.at[count[:, None], pairs].set(0.5), "s/dp d"),
    )


@right("s/dp", "s/dp", "s/dp", "s/dp")
def curves_that_are_undone(x, w):
    norm = jnp.linalg.norm(x, axis=1)
    weights = jnp.abs(x).sum(1)
    mean = (x * jnp.abs(x)).sum(1) / weights
    root = jnp.sqrt(lax.psum(norm**2, "tp"))
    joined = lax.pmean(jnp.linalg.norm(lax.all_gather(norm, "tp"), axis=0), "tp")
    geometric = jnp.exp(jnp.log(x**2 + 1.0).mean(1))
    back = lax.psum(mean * weights, "tp") / lax.psum(weights, "tp")
    return root, joined, mark(back, "s/dp"), jnp.exp(lax.pmean(jnp.log(geometric), "tp"))


def loss_of(program):
    """The sum over all results, which is the same on every device."""

    def loss(x, w):
        total = 0.0
        for value, layout in zip(jax.tree.leaves(jax.jit(program)(x, w)), program.layouts, strict=True):
            axes = Layout(layout).axes
            copies = lax.pmean(varying(jnp.sin(value).sum()), [a for a in AXES if a not in axes])
            total += lax.psum(copies, axes) if axes else copies
        return total

    return loss


def gradients(program):
    return lambda x, w: jax.grad(loss_of(program), argnums=(0, 1))(x, w)


DIFFERENTIATED = [gathered_softmax, softmax_by_hand, grad_inside, scan_with_remat]


def accepted(body, layouts) -> None:
    """The first call says nothing, and `spmd.check` finds nothing. Copies are closed, so that JAX takes them for one."""

    def closed(value, layout):
        axes = [a for a in AXES if a not in Layout(layout).axes and a not in Layout(layout).unreduced]
        close = lax.pmean if jnp.issubdtype(value.dtype, jnp.inexact) else lax.pmax
        return close(varying(value), axes) if axes else value

    def run(x, w):
        return tuple(map(closed, jax.tree.leaves(body(x, w)), layouts))

    bare = lambda layout: " ".join("/".join(("_", *dim.axes)) for dim in Layout(layout).dims)
    shown = [bare(layout) or "scalar" for layout in layouts]
    kernel = spmd.kernel(f"a/dp b/tp, a b -> {', '.join(shown)}", mesh=mesh())(run)
    structs = [jax.ShapeDtypeStruct(SHAPE, "float32")] * 2
    kernel.trace(*structs)
    assert spmd.check(kernel, *structs).verdict.kind in ("proved", "tested")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_no_alarm(program) -> None:
    accepted(program, program.layouts) if program.layouts and program is not unread else check(program)


@pytest.mark.parametrize("program", DIFFERENTIATED)
def test_no_alarm_under_grad_and_jit(program) -> None:
    accepted(gradients(program), ("a/dp b/tp", "a b"))


X, W = (0.3 * np.random.default_rng(0).normal(size=(2, 8, 8))).astype(np.float32)


def agrees_with_one_device(body, layouts) -> None:
    found = [jax.tree.leaves(shards(body, m=m, args=(X, W))) for m in (mesh(), mesh(1, 1))]
    for here, alone, layout in zip(*found, layouts, strict=True):
        together, one = (whole(v, dims_of(layout, v.shape[2:])) for v in (here, alone))
        np.testing.assert_allclose(together, one, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("program", share([p for p in PROGRAMS if p.layouts]), ids=lambda f: f.__name__)
def test_they_are_right_on_whole_arrays(program) -> None:
    agrees_with_one_device(program, program.layouts)


@pytest.mark.parametrize("program", DIFFERENTIATED)
def test_their_gradients_are_right_on_whole_arrays(program) -> None:
    agrees_with_one_device(gradients(program), ("a/dp b/tp", "a b"))


def test_numbers_can_tell() -> None:
    with pytest.raises(AssertionError):
        agrees_with_one_device(lambda x, w: jax.nn.softmax(x, axis=1), ("s/dp d/tp",))
    with pytest.raises(AssertionError):
        agrees_with_one_device(lambda x, w: x.sum(1), ("s/dp",))


def test_unit_axes_are_like_any_other() -> None:
    check(gathered_softmax, m=mesh(1, 1))
    check(softmax_by_hand, m=mesh(1, 4))


def test_results_on_unit_axes_are_believed() -> None:
    check(lambda x, w: mark(mark(x, "a/dp b", "result"), "a/dp b", "operand"), m=mesh(2, 1))


@pytest.mark.parametrize("dp", [1, 2])
def test_what_a_layout_does_not_speak_of_may_lie_on_unit_axes(dp) -> None:
    """Behind `...` and under vmap; but what a verb took away is gone, named or not."""
    m = mesh(dp, 2)

    @spmd.kernel("m b/dp d/tp -> m b/dp", mesh=m)
    def behind_dots(x):
        total = spmd.annotate(spmd.reduce(x, "m ... d/tp -> m ... {U:tp}"), "m b/dp {U:tp}")
        return spmd.psum(total, "m b/dp {U:tp} -> m b/dp")

    @spmd.kernel("m b/dp d/tp -> m b/dp", mesh=m)
    def mapped(x):
        sums = jax.vmap(lambda x: spmd.reduce(x, "m d/tp -> m"), in_axes=1, out_axes=1)(x)
        return spmd.annotate(sums, "m b/dp")

    @spmd.kernel("m b/dp d/tp -> m d/tp", mesh=m)
    def gone(x):
        return spmd.annotate(spmd.all_gather(x, "m b/dp ... -> m b ...", to="invarying").sum(1), "m d/tp")

    for kernel in (behind_dots, mapped, gone):
        assert kernel.trace(jnp.ones((3, 4, 6))).jaxpr


def test_partial_sums_may_leave_as_such() -> None:
    def body(x, w):
        return lax.pcast(mark(varying(x @ rows(w), "tp"), "b/dp f {U:tp}", "output"), "tp", to="unreduced")

    m = mesh(kind=AxisType.Explicit)
    args = [jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(m, spec)) for spec in (P("dp", "tp"), P())]
    check(body, out=P("dp", unreduced={"tp"}), m=m, args=args)


def test_inner_axes_of_an_inlined_kernel() -> None:
    """Markers that say which axes they know are not asked about the others."""

    def body(x, w):
        return layout_p.bind(lax.psum(x, "tp"), layout=Layout("a b"), call="inner", role="output", axes=("tp",))

    check(body)


def test_nested_shard_map() -> None:
    m = mesh()

    def body(x, w):
        def inner(v):
            return mark(lax.psum(mark(v, "a/tp b", "operand"), "tp"), "a b")

        return mark(jax.shard_map(inner, in_specs=P("tp"), out_specs=P(), axis_names={"tp"})(x), "a/dp b")

    def whole(x):
        return jax.shard_map(body, mesh=m, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"})(x, x)

    with jax.set_mesh(m):
        jaxpr = jax.jit(whole).trace(jnp.ones((8, 8))).jaxpr
    check_jaxpr(jaxpr, mesh_axes=AXES, kernel="kernel")


def test_factors_of_the_factors_of_blocks() -> None:
    """The rows of the second orthogonal matrix are those of all first ones, so a block of them belongs to a device."""

    def positive(qr):  # the factors are unique with a positive diagonal only
        q, r = qr
        signs = jnp.sign(jnp.diagonal(r))
        return q * signs[None], signs[:, None] * r

    def tall_and_narrow(a):
        own, upper = positive(jnp.linalg.qr(a))
        second, upper = positive(jnp.linalg.qr(lax.all_gather(upper, "tp", tiled=True)))
        block = lax.dynamic_slice_in_dim(second, lax.axis_index("tp") * 2, 2)
        return own @ block, lax.pmean(upper, "tp")

    a = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    kernel = spmd.kernel("n/tp k -> n/tp k, k l", mesh=mesh())(tall_and_narrow)
    assert not spmd.check(kernel, a)
    q, r = kernel(a)
    np.testing.assert_allclose(q @ r, a, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(q.T @ q, np.eye(2), atol=1e-5)


def test_a_permutation_may_name_devices_that_one_device_has_not() -> None:
    """`spmd.check` also walks over the trace on one device, where the numbers of a permutation do not fit."""

    def around(x):
        return lax.fori_loop(0, 4, lambda i, y: lax.ppermute(y, "tp", [(j, (j + 1) % 4) for j in range(4)]), x)

    kernel = spmd.kernel("n/tp -> n/tp", mesh=mesh())(around)
    assert not spmd.check(jax.grad(lambda x: (kernel(x) ** 2).sum()), X[0])


def test_no_marker_no_work() -> None:
    check_jaxpr(trace(lambda x, w: x + w[0, 0], out=P("dp", "tp")), mesh_axes=AXES, kernel="kernel")


# --- ready-made layers ------------------------------------------------------------------------------------------


def users_of_per_shard(text: str) -> list[str]:
    """The functions that use `per_shard`."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    calls = lambda node: any(isinstance(one, ast.Name) and one.id == "per_shard" for one in ast.walk(node))
    return [node.name for node in functions if calls(node)]


@pytest.mark.parametrize("room", ["nn", "parallel", "ops", "comm"])
def test_no_layer_needs_per_shard(room: str) -> None:
    """All layers run in kernels that check them. Where a part is meant per shard, numbers that differ prove nothing, so
    a layer with such a part would silence what is wrong in the program around it."""
    for path in Path(spmd.__file__).parent.joinpath(room).rglob("*.py"):
        assert not users_of_per_shard(path.read_text()), path


def test_a_layer_with_per_shard_is_noticed() -> None:
    assert users_of_per_shard('def f(x):\n    """Sums."""\n    with per_shard("x"):\n        return x') == ["f"]
