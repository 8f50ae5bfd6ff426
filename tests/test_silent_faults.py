"""What goes wrong without a word in raw JAX, each fault beside what happens here: an error, or the right result.

The raw half of each test states the wrong number itself, so that a JAX that learns better is noticed.
"""

import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import CommunicationError, MeshError, ReplicationError
from spmd.inspect import collectives


def auto_mesh(**axes):
    return spmd.make_mesh(**axes)


def mapped(body, in_specs, out_specs, mesh):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


EIGHT = np.arange(8, dtype=np.float32)
FOUR = np.arange(1, 5, dtype=np.float32)


# -------------------- what a value is: a shard, a copy, a sum


def test_a_gathered_copy_taken_for_a_shard():
    """JAX types both varying: four copies leave as if they were four shards."""
    mesh = auto_mesh(x=4)
    raw = mapped(lambda v: lax.all_gather(v, "x", tiled=True) * 1, P("x"), P("x"), mesh)
    assert raw(EIGHT).shape == (32,)

    ours = spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: spmd.all_gather(v, "n/x -> n") * 1)
    with pytest.raises(spmd.errors.SizeError, match=r"n has two sizes: 32 here \(8 on each device\), and 8 from v"):
        ours(EIGHT)
    # where the size happens to fit, the values tell
    first = spmd.kernel("n/x -> m/x", mesh=mesh)(lambda v: spmd.all_gather(v, "n/x -> n")[:2])
    with pytest.raises(ReplicationError, match="every device along x holds the same block"):
        first(EIGHT)


def test_a_shard_taken_for_the_whole():
    """The softmax of a shard sums to one on each device."""
    mesh = auto_mesh(x=4)
    raw = mapped(lambda v: jax.nn.softmax(v), P("x"), P("x"), mesh)
    assert raw(EIGHT).sum() == pytest.approx(4.0)

    soft = spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: spmd.softmax(v, "[n/x]"))
    np.testing.assert_allclose(soft(EIGHT), jax.nn.softmax(EIGHT), rtol=1e-6)
    whole = spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: spmd.softmax(v, "[n]"))
    with pytest.raises(CommunicationError, match=r'"\[n/x\]" in this string: softmax works along'):
        whole(EIGHT)


def test_one_key_in_every_shard():
    """The same noise everywhere."""
    mesh = auto_mesh(x=4)
    key = jax.random.key(0)
    raw = mapped(lambda k: jax.random.normal(k, (2,)), P(), P("x"), mesh)(key)
    assert np.unique(raw).size == 2

    ours = spmd.kernel("scalar -> n/x", mesh=mesh)(lambda k: spmd.random.normal(k, "n/x", n=8))(key)
    np.testing.assert_array_equal(ours, jax.random.normal(key, (8,)))


def test_permuting_over_axes_in_another_order():
    """JAX numbers devices in mesh order whatever order is asked for: wrong on 0.10, refused on 0.12."""
    mesh = auto_mesh(dp=2, tp=4)
    ring = [(i, (i + 1) % 8) for i in range(8)]
    layout = P(("tp", "dp"))
    raw = mapped(lambda v: lax.ppermute(v, ("tp", "dp"), ring), layout, layout, mesh)
    try:
        found = raw(np.arange(8)).tolist()
    except RuntimeError as error:
        assert "same order" in str(error)
    else:
        assert found == [7, 6, 0, 1, 2, 3, 4, 5]
    ours = spmd.kernel("n/tp/dp -> n/tp/dp", mesh=mesh)(lambda v: spmd.ppermute(v, "[n/tp/dp]", ring))
    assert ours(np.arange(8)).tolist() == np.roll(np.arange(8), 1).tolist()


# -------------------- losses and their gradients


def square_mean(w, v):
    return ((v * w) ** 2).mean()


TRUE_GRADIENT = 70.0  # of the mean of (2 v)**2 over v = 0..7, by the 2


def test_the_gradient_of_a_copied_loss():
    """`jax.grad` differentiates the sum over devices of their scalars: n times too big for a copy."""
    assert jax.grad(square_mean)(2.0, EIGHT) == TRUE_GRADIENT
    mesh = auto_mesh(x=4)

    def body(w, v):
        return jax.grad(lambda w: square_mean(w, lax.all_gather(v, "x", tiled=True)))(w)

    assert mapped(body, (P(), P("x")), P(), mesh)(2.0, EIGHT) == 4 * TRUE_GRADIENT

    def copied(w, v):
        return square_mean(w, spmd.all_gather(v, "n/x -> n"))

    kernel = spmd.kernel("scalar, n/x -> scalar", mesh=mesh)
    with pytest.raises(ReplicationError, match="neither complete nor a declared partial sum"):
        kernel(lambda w, v: spmd.grad(lambda w: copied(w, v))(w))(2.0, EIGHT)
    closed = kernel(lambda w, v: spmd.grad(lambda w: spmd.reduce(copied(w, v), "-> scalar", "mean"))(w))
    assert closed(2.0, EIGHT) == TRUE_GRADIENT


def test_a_custom_rule_must_know_where_it_is_used():
    """With a psum in its backward rule it works for a replicated weight only, without for a divided one only."""
    mesh = auto_mesh(x=4)

    def rule(make, summed):
        @make
        def scale(w, v):
            return w * v

        add = (lambda g: lax.psum(g, "x")) if summed else (lambda g: g)
        scale.defvjp(lambda w, v: (w * v, (w, v)), lambda kept, g: (add((g * kept[1]).sum()), g * kept[0]))
        return scale

    def gradient(scale, varying):
        use = lambda w, v: scale(lax.pcast(w, "x", to="varying") if varying else w, v)
        return jax.grad(lambda w: mapped(use, (P(), P("x")), P("x"), mesh)(w, EIGHT).sum())(2.0)

    assert gradient(rule(jax.custom_vjp, summed=True), varying=False) == 28.0
    for summed, varying in ((False, False), (True, True)):
        with pytest.raises(ValueError, match="manual axis types do"):
            gradient(rule(jax.custom_vjp, summed), varying)

    scale = rule(spmd.custom_vjp, summed=False)  # one rule for both
    kept = spmd.kernel("scalar, n/x -> n/x", mesh=mesh)(scale)
    deferred = spmd.kernel("scalar, n/x -> n/x", mesh=mesh)(lambda w, v: scale(spmd.defer(w, "scalar -> {R:x}"), v))
    for kernel in (kept, deferred, spmd.kernel("scalar, n/x -> n/x", mesh=mesh)(rule(spmd.custom_vjp, summed=True))):
        assert jax.grad(lambda w, k=kernel: k(w, EIGHT).sum())(2.0) == 28.0


def test_a_branch_that_devices_disagree_on():
    """The gradient through `lax.cond` with a predicate that differs (jax#40823)."""
    mesh = auto_mesh(x=4)

    def raw(w, v):
        return lax.psum(lax.cond(v.sum() > 2, lambda: 4 * w, lambda: w), "x")

    total = lambda w: mapped(raw, (P(), P("x")), P(), mesh)(w, FOUR)
    assert total(1.0) == 10.0
    assert jax.grad(total)(1.0) == 4.0  # and the truth is 10

    def kernel(cond):
        @spmd.kernel("scalar, n/x -> scalar", mesh=mesh)
        def ours(w, v):
            with spmd.per_shard("each device decides by its own block"):
                y = cond(v.sum() > 2, lambda: 4 * w, lambda: w)
            return spmd.psum(y, "{U:x} -> scalar")

        return ours

    with pytest.raises(CommunicationError, match="equal on x, so it is not a partial sum"):
        kernel(lax.cond)(1.0, FOUR)
    ours = kernel(spmd.cond)
    assert ours(1.0, FOUR) == 10.0
    assert jax.grad(ours)(1.0, FOUR) == 10.0


def test_a_slice_of_a_replicated_value_costs_an_all_reduce_backward():
    """And `split` one all-gather, of half the bytes."""
    mesh = auto_mesh(x=4)
    struct = jax.ShapeDtypeStruct((64,), jnp.float32)

    def naive(v):
        return lax.dynamic_slice_in_dim(v, lax.axis_index("x") * 16, 16)

    def backward(fn):
        pull = lambda v, g: jax.vjp(fn, v)[1](g)
        at = lambda spec: jax.NamedSharding(mesh, spec)
        jitted = jax.jit(pull, in_shardings=(at(P()), at(P("x"))), out_shardings=(at(P()),))
        return collectives(jitted, struct, struct, mesh=mesh)

    raw = backward(mapped(naive, P(), P("x"), mesh))
    ours = backward(spmd.kernel("n -> n/x", mesh=mesh)(lambda v: spmd.split(v, "n -> n/x")))
    assert raw.counts == {"psum": 1} and ours.counts == {"all_gather": 1}
    assert ours.total_bytes * 2 == raw.total_bytes


# -------------------- names, meshes, loops, closures


def test_a_mesh_axis_that_does_not_exist():
    mesh = auto_mesh(x=4)
    with pytest.raises(AssertionError) as raw:
        mapped(lambda v: lax.psum(v, "typo"), P("x"), P(), mesh)(EIGHT)
    assert str(raw.value) == ""

    with pytest.raises(MeshError, match="no axis 'y'"):
        spmd.kernel("n/x -> scalar", mesh=mesh)(lambda v: spmd.psum(v.sum(), "{U:y} -> scalar"))(EIGHT)
    with pytest.raises(MeshError, match="a mesh axis"):
        spmd.kernel("n/x -> n", mesh=mesh)(lambda v: lax.psum(v, "typo"))(EIGHT)


def test_a_kernel_keeps_no_context_mesh():
    """`jax.shard_map` without a mesh remembers the first one around it."""
    one, two = auto_mesh(x=4), auto_mesh(x=2)
    raw = jax.jit(jax.shard_map(lambda v: v * lax.axis_size("x"), in_specs=P("x"), out_specs=P("x")))
    with jax.set_mesh(one):
        assert raw(EIGHT)[1] == 4
    with jax.set_mesh(two), pytest.raises(ValueError, match="context mesh"):
        raw(EIGHT)

    ours = spmd.kernel("n/x -> n/x")(lambda v: v * spmd.axis_size("x"))
    for mesh, n in ((one, 4), (two, 2), (one, 4)):
        with jax.set_mesh(mesh):
            assert ours(EIGHT).tolist() == (n * EIGHT).tolist()


def test_a_mesh_of_jax_make_mesh_and_numpy_inputs():
    """Its axes are Explicit, and then shard_map's in_specs assert instead of moving."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    assert set(mesh.axis_types) == {AxisType.Explicit}
    with pytest.raises(ValueError, match="in_specs"):
        jax.jit(jax.shard_map(lambda v: v, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(EIGHT)

    ours = spmd.kernel("n/x -> n/x", mesh=mesh)(lambda v: 2 * v)
    assert ours(EIGHT).tolist() == (2 * EIGHT).tolist()


def test_the_carry_of_a_loop():
    """A carry of zeros is equal everywhere by type, and a step makes it vary."""
    mesh = auto_mesh(x=4)

    @spmd.per_shard("a sum of each block")
    def body(v, start):
        return lax.scan(lambda carry, row: (carry + row, None), start, v)[0][None]

    with pytest.raises(TypeError, match="manual axis types do not match"):
        mapped(lambda v: body(v, jnp.zeros(())), P("x"), P("x"), mesh)(EIGHT)

    with pytest.raises(ReplicationError, match="spmd.zeros"):
        spmd.kernel("n/x -> m/x", mesh=mesh)(lambda v: body(v, jnp.zeros(())))(EIGHT)
    right = spmd.kernel("n/x -> m/x", mesh=mesh)(lambda v: body(v, spmd.zeros("{U:x}")))
    assert right(EIGHT).tolist() == [1, 5, 9, 13]


def test_a_compiled_function_that_closes_over_a_tracer():
    """A cached `jit` keeps the first value of a closure cell: a gradient of zero, without a word."""
    mesh = auto_mesh(x=4)

    def losses(decorate):
        weight = None

        @decorate
        def scaled(v):
            return weight * v

        def loss(w):
            nonlocal weight
            weight = w
            return scaled(FOUR).sum()

        return loss

    raw = losses(jax.jit)
    assert raw(3.0) == 30.0
    assert jax.grad(raw)(5.0) == 0.0  # the truth is 10

    ours = losses(spmd.kernel("n/x -> n/x", mesh=mesh))
    assert jax.value_and_grad(ours)(5.0) == (50.0, 10.0)
    assert jax.value_and_grad(ours)(7.0) == (70.0, 10.0)
    assert jax.jit(jax.value_and_grad(ours))(7.0) == (70.0, 10.0)


def test_a_mode_is_part_of_what_jit_remembers():
    """A context variable is not: a compiled function ignores it."""
    switch = contextvars.ContextVar("switch", default=1.0)
    raw = jax.jit(lambda v: switch.get() * v)
    assert raw(1.0) == 1.0
    switch.set(2.0)
    assert raw(1.0) == 1.0  # stale

    mesh = auto_mesh(x=4)
    seen = []

    @spmd.kernel("n/x -> n/x", mesh=mesh)
    def ours(v):
        seen.append(v.shape)
        return v

    step = jax.jit(lambda v: ours(v))
    step(EIGHT)
    with spmd.mode("auto"):
        step(EIGHT)
    assert seen == [(2,), (8,)]


def test_reductions_inside_a_loop_over_micro_batches():
    """Raw gradients of a replicated weight are summed in every step; deferred, once, after the loop."""
    mesh = auto_mesh(x=4)
    struct = jax.ShapeDtypeStruct((16,), jnp.float32), jax.ShapeDtypeStruct((6, 8, 16), jnp.float32)

    def loop(w, batches, gradient, start):
        return lax.scan(lambda total, v: (total + gradient(w, v), None), start, batches)[0]

    local = lambda w, v: jax.grad(lambda w: ((v * w[None]) ** 2).sum())(w)
    raw = mapped(lambda w, v: loop(w, v, local, jnp.zeros(16)), (P(), P(None, "x")), P(), mesh)
    assert collectives(raw, *struct, mesh=mesh).counts == {"psum": 6}

    @spmd.kernel("d, m n/x d -> d", mesh=mesh)
    def ours(w, batches):
        w = spmd.defer(w, "d -> d {R:x}")
        gradient = lambda w, v: spmd.grad(lambda w: ((v * w[None]) ** 2).sum(), loss="{U:x}")(w)
        return spmd.psum(loop(w, batches, gradient, spmd.zeros("d {U:x}", d=16)), "d {U:x} -> d")

    assert collectives(ours, *struct).counts == {"psum": 1}
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s.shape, np.float32) for s in struct]
    np.testing.assert_allclose(ours(*values), raw(*values), rtol=1e-5)
