"""Correct programs raise no alarm."""

from __future__ import annotations

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
from tests.checker.harness import AXES, assert_equal, check, layout_p, mark, mesh, split, trace, varying


def gathered_softmax(x, w):
    x = mark(x, "s/dp d/tp", "operand")
    full = lax.all_gather(x, "tp", axis=1, tiled=True)
    return mark(jax.nn.softmax(full, axis=-1), "s/dp d")


def softmax_by_hand(x, w):
    top = lax.pmax(lax.stop_gradient(x).max(1, keepdims=True), "tp")
    e = jnp.exp(x - top)
    total = mark(lax.psum(e.sum(1, keepdims=True), "tp"), "s/dp _")
    return mark(e / total, "s/dp d/tp")


def density_of_a_complete_sum(x, w):
    y = lax.psum(mark(x @ w[:2], "s/dp d {U:tp}", "result"), "tp")
    return mark(jnp.log(lax.bessel_i0e(y)), "s/dp d")


def scan_with_remat(x, w):
    def layer(h, _):
        h = mark(h, "s/dp d", "operand")
        return mark(jnp.tanh(h @ w), "s/dp d"), lax.psum(h.sum(), "dp")

    h = lax.all_gather(x, "tp", axis=1, tiled=True)
    h, sums = lax.scan(jax.checkpoint(layer), h, None, length=3)
    return mark(h, "s/dp d").sum() + mark(sums, "l").sum()


@jax.custom_jvp
def doubled(x):
    return 2.0 * x


doubled.defjvp(lambda p, t: (doubled(p[0]), 2.0 * t[0]))


@jax.custom_vjp
def tripled(x):
    return 3.0 * x


tripled.defvjp(lambda x: (3.0 * x, None), lambda _, g: (3.0 * g,))


def custom_derivatives(x, w):
    y = mark(tripled(doubled(w)), "s d")
    loss = lambda v: (tripled(doubled(v)) * x.sum()).sum()
    g = jax.grad(loss)(w)
    return mark(y + g, "s d")


def vmapped(x, w):
    one = lambda row: mark(lax.psum(mark(row, "d/tp", "operand"), "tp"), "d")
    y = mark(jax.vmap(one)(x), "s/dp d")  # inside, no layout mentions s nor dp
    z = jax.vmap(lambda v: mark(jnp.zeros_like(v), "d/tp", "created"))(w)
    return y + z[:4, :2]


def polluted_carry(x, w):
    """A carry that JAX types varying because another one is, and that is equal all the same."""

    def step(carry, row):
        total, count = carry
        return (total + row.sum(), count + varying(jnp.ones(()))), None

    (total, count), _ = lax.scan(step, (varying(jnp.zeros(())), varying(jnp.zeros(()))), x)
    return mark(count, "") + mark(lax.psum(total, AXES), "")


def grad_inside(x, w):
    def loss(w):
        y = mark(x @ w[:2], "b/dp f {U:tp}", "result")
        y = mark(lax.psum(y, "tp"), "b/dp f")
        return mark(lax.psum((y**2).sum(), "dp"), "")

    value, g = jax.value_and_grad(loss)(w)
    return mark(value, "") + mark(g, "d f")


def partial_gradients(x, w):
    """Gradient accumulation: one psum after the loop over micro-batches."""

    def micro(total, row):
        g = jax.grad(lambda v: (jnp.tanh(row[None] @ v[:2]) * 2.0).sum())(varying(w))
        total = mark(total + g, "d f {U:dp,tp}", "annotate")
        return total, None

    total, _ = lax.scan(micro, varying(jnp.zeros_like(w)), x)
    scaled = -0.5 * (total / 4.0).T.reshape(-1) + 0.0
    return mark(lax.psum(scaled, AXES), "n")


def linear_in_a_partial_sum(x, w):
    y = mark(x @ w[:2], "b/dp f {U:tp}", "result")
    y = y @ w + jnp.pad(y, ((0, 0), (1, 0)))[:, 1:] - jnp.where(w[:4] > 0, y, 0.0)
    y = jnp.concatenate([y, y * w[:4]], 1).astype(jnp.bfloat16).cumsum(1)
    y = jnp.zeros_like(y).at[0].set(y[0]) + jnp.take(y, jnp.array([0, 1, 2, 3]), axis=0)
    return mark(lax.psum(y, "tp"), "b/dp f")


def constants(x, w):
    a = mark(jnp.zeros(SHAPE2) + 1.0, "s/dp d/tp", "operand")
    b = mark(jnp.broadcast_to(w[:1], SHAPE2[:1] + (8,)), "s/dp d")
    c = mark(jnp.full((2, 3), 2.0).reshape(6).astype(jnp.bfloat16), "n/dp/tp")
    d = mark(np.full((4,), 3.0, np.float32) * jnp.ones((4,)), "n/tp")
    e = mark(jnp.arange(4), "n/tp", "created")
    f = mark(jnp.zeros(()), "{U:tp}", "created")
    counted = mark(mark(jnp.ones((4,)), "n/tp", "operand").sum(), "{U:tp}", "result")
    return (
        a.sum()
        + b.sum()
        + c.sum().astype(jnp.float32)
        + d.sum()
        + e.sum().astype(jnp.float32)
        + lax.psum(varying(f + counted, "tp"), "tp")
    )


SHAPE2 = (4, 2)


def loops_and_branches(x, w):
    h = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0, w))[1]
    h = lax.cond(lax.psum(x.sum(), AXES) > 0, lambda v: v + 1.0, lambda v: v, h)
    k = lax.cond(x.sum() > 0, lambda v: v + 1.0, lambda v: v, varying(w))
    same = lax.cond(w.sum() > 0, lambda v: lax.psum(v, "tp"), lambda v: lax.pmax(v, "tp"), x)
    mark(k, "a/dp b/tp"), mark(same, "a/dp b")
    return mark(h, "d f")


def solvers(x, w):
    """A solver of equal values is equal; one that sums what its dots are of may run on shards."""
    y = jax.scipy.sparse.linalg.cg(lambda v: 2.0 * v + varying(lax.psum(v, "tp")), varying(w))[0]
    z = lax.custom_linear_solve(
        lambda v: v * 2.0,
        x,
        lambda _, b: (b / 2.0, varying(lax.psum(b.sum(), AXES))),
        lambda _, b: (b, 0.0),
        has_aux=True,
    )
    mark(z[1], "")
    return mark(y, "a b"), mark(z[0], "a/dp b/tp")


def unread(x, w):
    """What becomes of a jaxpr that the pass does not know is asked of nobody."""

    def body(ref):
        ref[...] = lax.psum(ref[...], AXES)

    return mark(run_state(body)(varying(x)), "a b")


def ring(x, w):
    """All blocks visited: equal by arithmetic, which only the author can say."""

    def step(_, carry):
        total, block = carry
        return total + block, lax.ppermute(block, "tp", [(i, (i + 1) % 4) for i in range(4)])

    total, _ = lax.fori_loop(0, 4, step, (jnp.zeros_like(x), x))
    return mark(assert_equal(total, "tp"), "s/dp d")


def splitting(x, w):
    a = mark(split(mark(w, "a b", "operand"), "tp", 1, 4), "a b/tp")
    scattered = lax.psum_scatter(mark(w * a[:1, :1], "a b {U:tp}"), "tp", tiled=True)
    swapped = lax.all_to_all(x, "tp", 0, 1, tiled=True)
    return mark(swapped, "a/dp/tp b")[0, 0] + mark(scattered, "a/tp b")[0, 0] + a[0, 0]


def ellipsis(x, w):
    return mark(lax.all_gather(mark(x, "... d/tp", "operand"), "tp", axis=1, tiled=True), "... d")


def equal_noise(x, w):
    key = jax.random.key(0)
    return mark(jax.random.normal(key, (3,)) + jax.random.uniform(key, (3,)), "n")


def shifted_equal(x, w):
    return mark(lax.ppermute(varying(w), "tp", [(i, (i + 1) % 4) for i in range(4)]), "a b")


PROGRAMS = [
    gathered_softmax,
    softmax_by_hand,
    density_of_a_complete_sum,
    scan_with_remat,
    custom_derivatives,
    vmapped,
    polluted_carry,
    grad_inside,
    partial_gradients,
    linear_in_a_partial_sum,
    constants,
    loops_and_branches,
    solvers,
    unread,
    ring,
    splitting,
    ellipsis,
    equal_noise,
    shifted_equal,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_no_alarm(program) -> None:
    check(program)


@pytest.mark.parametrize("program", [gathered_softmax, softmax_by_hand, grad_inside, scan_with_remat])
def test_no_alarm_under_grad_and_jit(program) -> None:
    def body(x, w):
        loss = lambda x, w: lax.psum(varying(jnp.sum(jax.jit(program)(x, w))), AXES)
        return jax.grad(loss, argnums=(0, 1))(x, w)[0]

    check(body)


def test_unit_axes_are_like_any_other() -> None:
    check(gathered_softmax, m=mesh(1, 1))
    check(grad_inside, m=mesh(1, 4))


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
        return lax.pcast(mark(varying(x @ w[:2], "tp"), "b/dp f {U:tp}", "output"), "tp", to="unreduced")

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


def test_no_marker_no_work() -> None:
    check_jaxpr(trace(lambda x, w: x + w[:4, :2], out=P("dp", "tp")), mesh_axes=AXES, kernel="kernel")
