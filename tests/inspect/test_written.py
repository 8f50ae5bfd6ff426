"""The written view against the compiled program: the same kinds, axes, bytes and counts, forward and backward."""

import math
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from spmd.inspect import collectives
from tests.comm import cases
from tests.inspect.harness import agree, written
from tests.sampler import mixed, seeds, share

HERE = os.path.basename(__file__)
MESH = {"dp": 2, "tp": 4}


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(**MESH)


def pulled(kernel, ins, out, shapes, mesh, dtype=jnp.float32):
    """The value and all gradients, everything in its own layout; with the structs to call it with."""
    lie = lambda layout: spmd.Layout(layout).sharding(mesh)
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    made = jax.eval_shape(kernel, *args)

    def both(cotangent, *args):
        value, pull = jax.vjp(kernel, *args)
        return value, pull(cotangent)

    places = tuple(map(lie, ins))
    jitted = jax.jit(both, in_shardings=(lie(out), *places), out_shardings=(lie(out), places))
    return jitted, (jax.ShapeDtypeStruct(made.shape, made.dtype), *args)


WRAPS = {
    "jit": lambda run: run,
    "remat": lambda run: lambda x: jax.checkpoint(lambda x: run(jnp.sin(x)))(x),
    "scan": lambda run: lambda x: jax.lax.scan(lambda c, one: (c, jnp.sin(run(one))), jnp.int32(0), x)[1],
    "vmap": lambda run: lambda x: jax.vmap(run)(x),
}


@pytest.mark.parametrize(("verb", "wrap"), share(mixed(cases.MOVES, WRAPS)))
@pytest.mark.parametrize("seed", seeds(1))
def test_verbs(verb, wrap, seed):
    case = cases.sample(verb, 1000 + 10 * seed + list(WRAPS).index(wrap))
    lead = "r " if wrap in ("scan", "vmap") else ""
    kernel = cases.kernel_of(case, WRAPS[wrap], lead=lead)
    before, after = cases.ends(case)
    shape = ((3,) if lead else ()) + cases.argument(case).shape
    fn, args = pulled(kernel, [lead + before], lead + after, [shape], cases.device_mesh(case.mesh))
    agree(fn, *args, mesh=cases.device_mesh(case.mesh))


def test_a_permutation_moves_along_the_axes_that_its_pairs_differ_on():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    body = lambda x: jax.lax.ppermute(x, ("a", "b"), [(0, 1), (1, 0), (2, 3), (3, 2)])
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b"))))
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert [one.axes for one in written(fn, (x,), {}, mesh).collectives] == [("b",)]
    agree(fn, x, mesh=mesh)


def weighted(x, w):
    return x * w[None]


doubled = spmd.custom_vjp(weighted)
doubled.defvjp(lambda x, w: (weighted(x, w), (x, w)), lambda kept, g: (g * kept[1][None], (g * kept[0]).sum(0)))


def in_a_rule(make):
    """A function whose backward rule sends: as it is written, in a loop, and by a gradient that JAX takes there."""
    fn = make(lambda x: 2 * x)
    swap = lambda g: jax.lax.all_to_all(g, "tp", 0, 0, tiled=True)

    def back(x, g):
        swapped = jax.lax.scan(lambda c, _: (swap(c), None), swap(g), length=2)[0]
        return (swapped + jax.vjp(lambda y: jax.lax.all_gather(y, "tp", tiled=True), x)[1](jnp.tile(g, (4, 1)))[0],)

    fn.defvjp(lambda x: (2 * x, x), back)
    return lambda x: fn(x) + swap(x)


@pytest.mark.parametrize("make", [jax.custom_vjp, spmd.custom_vjp])
@pytest.mark.parametrize("around", [lambda fn: fn, jax.checkpoint])
def test_what_a_backward_rule_calls_is_written(make, around, mesh):
    kernel = spmd.kernel("b/dp/tp d -> b/dp/tp d", mesh=mesh)(in_a_rule(make))
    fn = jax.grad(lambda x: around(kernel)(x).sum())
    x = jax.ShapeDtypeStruct((64, 4), "float32")
    found = [(one.kind, one.text, one.count) for one in written(fn, (x,), {}).collectives if one.phase == "backward"]
    assert found == [
        ("all_to_all", "gradient of lax.all_to_all", 1),
        ("all_to_all", "lax.all_to_all", 1),
        ("all_to_all", "lax.all_to_all", 2),
        ("psum_scatter", "gradient of lax.all_gather", 1),
    ]


def test_a_sum_of_a_backward_rule_is_not_implicit(mesh):
    fn = jax.custom_vjp(lambda w, x: w * x)
    fn.defvjp(lambda w, x: (w * x, (w, x)), lambda k, g: (jax.lax.psum((g * k[1]).sum(), ("dp", "tp")), g * k[0]))
    kernel = spmd.kernel("scalar, b/dp/tp -> b/dp/tp", mesh=mesh)(fn)
    args = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((64,), "float32")
    [one] = written(jax.grad(lambda w, x: kernel(w, x).sum()), args, {}).collectives
    assert (one.text, one.implicit, one.phase) == ("lax.psum", False, "backward")


# name: signature, body, shapes
OPS = {
    "einsum psum": (
        "b/dp f/tp, f/tp d -> b/dp d",
        lambda x, w: spmd.einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d"),
        [(4, 8), (8, 3)],
    ),
    "einsum scatter": (
        "b/dp f/tp, f/tp d -> b/dp d/tp",
        lambda x, w: spmd.einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d/tp"),
        [(4, 8), (8, 12)],
    ),
    "einsum with a whole weight": (
        "b/dp s/tp d, d f -> b/dp s/tp f",
        lambda x, w: spmd.einsum(x, w, "b/dp s/tp d, d f -> b/dp s/tp f"),
        [(4, 8, 5), (5, 3)],
    ),
    **{
        f"reduce {op}": (
            "a/dp b/tp -> a/dp",
            lambda x, op=op: spmd.reduce(x, "a/dp b/tp -> a/dp", op),
            [(4, 8)],
        )
        for op in ("sum", "mean", "max", "min", "prod", "logsumexp")
    },
    "softmax": ("a/dp b/tp -> a/dp b/tp", lambda x: spmd.softmax(x, "a/dp [b/tp]"), [(4, 8)]),
    "cumsum": ("a/dp b/tp -> a/dp b/tp", lambda x: spmd.cumsum(x, "a/dp [b/tp]"), [(4, 8)]),
    "roll": ("a/dp b/tp -> a/dp b/tp", lambda x: spmd.roll(x, "a/dp [b/tp]", 3), [(4, 16)]),
    "top_k": ("a/dp b/tp -> a/dp k", lambda x: spmd.top_k(x, "a/dp [b/tp]", 2)[0], [(4, 16)]),
    "shift": ("a/dp b/tp -> a/dp b/tp", lambda x: spmd.shift(x, "a/dp [b/tp]", 1, wrap=False), [(4, 8)]),
    "ppermute": (
        "a/dp b/tp -> a/dp b/tp",
        lambda x: spmd.ppermute(x, "a/dp [b/tp]", [(0, 3), (3, 1), (1, 0)]),
        [(4, 8)],
    ),
    "take": (
        "v/tp d, b/dp -> b/dp d",
        lambda e, x: spmd.take(e, (x > 0).astype(jnp.int32) * 5, "[v/tp] d, b/dp -> b/dp d"),
        [(8, 3), (4,)],
    ),
    "split": ("a b -> a/tp b/dp", lambda x: spmd.split(x, "a b -> a/tp b/dp"), [(8, 6)]),
    "a split of a gather": (
        "a/tp b -> a b/tp",
        lambda x: spmd.split(jnp.sin(spmd.all_gather(x, "a/tp b -> a b")), "a b -> a b/tp"),
        [(8, 12)],
    ),
    "defer": (
        "d, b/dp d/tp -> b/dp d/tp",
        lambda w, x: x * spmd.split(spmd.defer(w, "d -> d {R:dp}"), "d {R:dp} -> d/tp {R:dp}")[None],
        [(8,), (4, 8)],
    ),
    "a predicate": (
        "a/dp b/tp -> a/dp b/tp",
        lambda x: jnp.where(spmd.reduce(x, "a/dp b/tp -> scalar") > 0, jnp.sin(x), jnp.cos(x)),
        [(4, 8)],
    ),
    "cond on a predicate that differs": (
        "a/dp b/tp -> a/dp b/tp",
        lambda x: spmd.cond(
            spmd.per_shard("each device decides by its own block")(lambda x: x.sum() > 0)(x),
            lambda x: x + spmd.reduce(jnp.sin(x), "a/dp b/tp -> a/dp")[:, None],
            lambda x: x * spmd.reduce(jnp.cos(x), "a/dp b/tp -> a/dp")[:, None],
            x,
        ),
        [(4, 8)],
    ),
    "value_and_grad": (
        "d, b/dp d/tp -> d",
        lambda w, x: spmd.grad(
            lambda w: spmd.reduce(jnp.sin(x * spmd.split(w, "d -> d/tp")[None]), "b/dp d/tp -> scalar", "mean")
        )(w),
        [(8,), (4, 8)],
    ),
    "custom_vjp": ("b/dp d/tp, d -> b/dp d/tp", lambda x, w: doubled(x, spmd.split(w, "d -> d/tp")), [(4, 8), (8,)]),
    "raw lax": (
        "a/tp b -> a/tp b",
        lambda x: x * jax.lax.psum(jnp.sin(x).sum(), "tp") + jax.lax.all_gather(x, "tp", tiled=True).sum(),
        [(8, 3)],
    ),
    "a fori_loop": (
        "a/tp b -> a/tp b",
        lambda x: jax.lax.fori_loop(0, 3, lambda _, x: spmd.shift(jnp.sin(x), "[a/tp] b"), x),
        [(8, 3)],
    ),
    "local": (
        "a/tp b -> a/tp b",
        lambda x: spmd.local(lambda v: jax.lax.ppermute(v, "tp", [(0, 1), (1, 0)]), "a/tp b -> a/tp b")(x),
        [(8, 3)],
    ),
}


@pytest.mark.parametrize("name", share(OPS, always=("local",)))
def test_operations(name, mesh):
    pattern, body, shapes = OPS[name]
    ins, out = (side.split(",") for side in pattern.split("->"))
    fn, args = pulled(spmd.kernel(pattern, mesh=mesh)(body), ins, out[0], shapes, mesh)
    agree(fn, *args, mesh=mesh)


def test_what_no_result_needs_is_left_out(mesh):
    """As the compiler leaves it out: also in loops, and where only a gradient would have needed it."""

    @spmd.kernel("a/tp b, a/tp b -> a/tp b", mesh=mesh)
    def body(x, y):
        spmd.all_gather(x, "a/tp b -> a b")
        step = lambda c, t: (c + 1.0, spmd.all_gather(y * t, "a/tp b -> a b").sum())
        return jax.lax.scan(step, x, jnp.arange(3.0))[0]

    x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    assert written(body, [x, x], {}).collectives == () == tuple(collectives(body, x, x))


def test_numbers_of_a_jit_may_be_static(mesh):
    kernel = spmd.kernel("a/tp -> a/tp", mesh=mesh)(lambda x: spmd.shift(x, "[a/tp]"))

    def times(x, n, *, name):
        for _ in range(n):
            x = kernel(x) if name == "shift" else x
        return x

    jitted = jax.jit(times, static_argnums=1, static_argnames="name")
    view = written(jitted, (jax.ShapeDtypeStruct((8,), jnp.float32), 3), {"name": "shift"})
    assert view.counts == {"ppermute": 3} and view.boundary[0].text == "kernel: x"


def test_what_was_traced_before(mesh):
    kernel = spmd.kernel("a/tp -> a/tp", mesh=mesh)(lambda x: spmd.shift(x, "[a/tp]"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert written(kernel.trace(x), (), {}).counts == written(kernel, (x,), {}).counts == {"ppermute": 1}
    lowered = spmd.explain(kernel.lower(x), compiled=False)
    assert lowered.written is None and "written view" in str(lowered)


# -------------------- floating-point operations and memory traffic, against formulas


def test_a_rematerialised_loop(mesh):
    """Per device: two per product, backward twice that, once more for remat, all of it in a loop."""

    @spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)
    def chain(x, w):
        step = jax.checkpoint(lambda x: jnp.sin(spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")))
        return jax.lax.scan(
            lambda total, _: (total + step(x), None), spmd.zeros("b/dp f/tp", b=4, f=12), None, length=5
        )[0]

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (6, 12))]
    once = 2 * 2 * 6 * 3  # b/dp d f/tp
    assert written(chain, args, {}).matmul_flops == {"float32": 5 * once}
    both = written(jax.value_and_grad(lambda *args: chain(*args).sum(), (0, 1)), args, {})
    assert both.matmul_flops == {"float32": (1 + 5 * (1 + 2)) * once}  # forward the loop's invariant is hoisted
    assert both.flops["float32"] > both.matmul_flops["float32"]


@pytest.mark.parametrize(
    ("fn", "shapes", "wanted"),
    [
        (lambda a, b: a @ b, [(4, 6), (6, 3)], 2 * 4 * 6 * 3),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [(2, 4, 6), (2, 6, 3)], 2 * 2 * 4 * 6 * 3),
        (lambda a: jnp.sin(a) + 1, [(4, 6)], 2 * 24),
        (lambda a: a.sum(0), [(4, 6)], 24),
        (lambda a: a.T.reshape(-1)[3:], [(4, 6)], 0),
        (lambda a, b: jax.lax.conv(a, b, (1, 1), "VALID"), [(2, 3, 8, 8), (5, 3, 3, 3)], 2 * 2 * 5 * 36 * 27),
        (lambda a: jax.lax.scan(lambda c, x: (c * x, None), a[0], a)[0], [(4, 6)], 24),
    ],
)
def test_flops(fn, shapes, wanted):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert sum(written(fn, args, {}).flops.values()) == wanted


def test_flops_by_dtype_and_outside_kernels(mesh):
    """A product counts at the dtype of its operands; outside a kernel the devices share the work."""
    args = [jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)] * 2
    wide = lambda a, b: jnp.einsum("ij,jk->ik", a, b, preferred_element_type=jnp.float32)
    assert written(wide, args, {}).matmul_flops == {"bfloat16": 2 * 16**3}
    assert written(wide, args, {}, mesh).matmul_flops == {"bfloat16": 2 * 16**3 / 8}
    complex_args = [jax.ShapeDtypeStruct((4, 4), jnp.complex64)] * 2
    assert written(lambda a, b: a @ b, complex_args, {}).flops == {"complex64": 4 * 2 * 4**3}


def test_memory_traffic():
    """Operands and results of a product; nothing of what is fused into it; of a gather what it reads."""
    a, b = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (6, 3)))
    size = 4 * (4 * 6 + 6 * 3 + 4 * 3)
    assert written(lambda a, b: a @ b, [a, b], {}).hbm_bytes == size
    assert written(lambda a, b: jnp.sin(jnp.cos(a) @ b), [a, b], {}).hbm_bytes == size
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert written(lambda a, i: a.at[i].get(mode="clip"), [a, ids], {}).hbm_bytes == 2 * 4 * 5 * 6


def test_a_product_can_be_counted_wrong():
    """Meta-test: the formula is not one that any count would meet."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (6, 3))]
    assert math.prod((4, 6, 3)) != sum(written(lambda a, b: a @ b, args, {}).flops.values())


N = 4 * 64 * 64  # bytes of one array below


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - m / (jnp.sqrt(v) + 1e-8), m, v


def two_of_a_product(a, b):
    product = a @ b
    return jnp.sin(product), jnp.cos(product)


@pytest.mark.parametrize(
    ("fn", "count", "wanted"),
    [
        (lambda x: x + 1, 1, 2 * N),
        (lambda x, y: jax.nn.gelu(jnp.sin(x)) + y, 2, 3 * N),
        (lambda x, y: (x + y, x - y), 2, 4 * N),  # one pass over both
        (adam, 4, 7 * N),
        (lambda x: x.T, 1, 2 * N),
        (lambda x: x.reshape(32, 128), 1, 0),
        (lambda x: (x, jnp.zeros_like(x)), 1, N),
        (lambda a, b: jnp.sin(a @ b) + a, 2, 4 * N),  # the product is written once, as the result; a is read again
        (two_of_a_product, 2, 3 * N + N),  # one of them is
        (lambda c: jax.lax.scan(lambda c, _: (jnp.sin(c) + 1, None), c, None, length=5)[0], 1, 5 * 2 * N),
        (lambda c, x: jax.lax.scan(lambda c, x: (c * x, None), c[0], x)[0], 2, 3 * N + 2 * N // 64),  # rows
        (lambda x: x[:16] + x[16:32], 1, 3 * N // 4),
        (jax.grad(lambda x: jnp.sin(x).sum()), 1, 2 * N),
    ],
)
def test_memory_traffic_of_what_is_fused(fn, count, wanted):
    """A chain that ends in a result reads what it is made of and writes the result, each once."""
    assert written(jax.jit(fn), [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * count, {}).hbm_bytes == wanted


def test_memory_traffic_is_the_same_in_every_trace():
    """A result goes into the smallest product that has room, and not into the first of a set, whose order changes."""
    fn = lambda a, b, c: jnp.sin(a @ b) * (b[:1] @ c) * (c @ a[:, :1])
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    assert len({written(jax.jit(lambda *args: fn(*args)), args, {}).hbm_bytes for _ in range(20)}) == 1


@pytest.mark.parametrize(("layout", "share"), [("a/dp b", 2), ("a b/tp", 4), ("a/dp/tp b", 8), ("a b", 1), (None, 8)])
def test_memory_traffic_outside_kernels_is_one_devices(mesh, layout, share):
    """By placement; where nobody knows it, the devices share the array. A kernel of no operations adds nothing."""
    at = None if layout is None else spmd.Layout(layout).sharding(mesh)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=at)
    assert written(lambda x: jnp.sin(x) + 1, [x], {}, mesh).hbm_bytes == 2 * N // share
    assert written(lambda x: x @ x, [x], {}, mesh).hbm_bytes == 2 * N // share + N // 8
    if layout:
        inner = spmd.kernel(f"{layout} -> {layout}", mesh=mesh)(lambda x: 2 * x)
        assert written(lambda x: inner(x + 1) * 3, [x], {}, mesh).hbm_bytes == 2 * N // share
