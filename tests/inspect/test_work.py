"""Floating-point operations and memory traffic, against formulas."""

import math

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.inspect._written import written


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
