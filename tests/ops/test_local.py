"""Islands: per-shard code gives the same values and gradients in all modes, or an error that says why not."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd import explain, random
from spmd.comm import all_gather, psum
from spmd.errors import ModeError, ReplicationError
from spmd.kernels import kernel
from spmd.mesh import make_mesh
from spmd.modes import MODES
from spmd.ops import axis_index, local, opaque, size, typeof
from spmd.testing import assert_modes_agree
from tests.checker.harness import suspicions

X = np.asarray(jax.random.normal(jax.random.key(0), (8, 6)))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(dp=2, tp=3)


def agree(body, want, *args, modes=MODES):
    """The kernel gives these values in every mode, and the same gradients."""
    weight = jnp.cos(jnp.arange(np.size(want), dtype=jnp.float32)).reshape(np.shape(want))

    def both(mode):
        out, pull = jax.vjp(getattr(body, mode), *args)
        return out, pull(weight)

    got = {mode: jax.jit(both, static_argnums=0)(mode) for mode in modes}
    for out, found in got.values():
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(found, got["reference"][1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# --- local: the same in all modes ----------------------------------------------------------------------------


def test_ring(mesh):
    ring = lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 3) for i in range(3)])

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        return 2 * local(ring, "b/dp d/tp -> b/dp d/tp")(x)

    agree(body, 2 * np.roll(X, 2, 1), X)


def test_axis_index(mesh):
    def scale(x):
        return x * (1 + lax.axis_index("tp") + 3 * axis_index("dp")).astype(x.dtype)

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        return local(scale, "b/dp d/tp -> b/dp d/tp")(x)

    agree(body, X * (1 + np.repeat([0, 1, 2], 2) + 3 * np.repeat([0, 1], 4)[:, None]), X)


def test_axes_in_another_order_than_the_mesh(mesh):
    @kernel("b/dp d/tp -> d/tp/dp b", mesh=mesh)
    def body(x):
        swap = lambda x: lax.all_to_all(x, "dp", 1, 0, tiled=True) + 0 * lax.axis_index(("tp", "dp")).astype(x.dtype)
        return local(swap, "b/dp d/tp -> b d/tp/dp")(x).T

    agree(body, np.tile(X[:, :6], 1).T, np.asarray(X))


def test_complete_sum(mesh):
    @kernel("b/dp d/tp -> b/dp", mesh=mesh)
    def body(x):
        return local(lambda x: lax.psum((x * x).sum(1), "tp"), "b/dp d/tp -> b/dp")(x)

    agree(body, (X * X).sum(1), X)


def test_partial_sum_leaves_and_enters(mesh):
    @kernel("b/dp d/tp -> b/dp", mesh=mesh)
    def body(x):
        part = local(lambda x: x.sum(1), "b/dp d/tp -> b/dp {U:tp}")(x)
        part = local(lambda y: 3 * y, "b/dp {U:tp} -> b/dp {U:tp}")(part)
        return psum(part, "b/dp {U:tp} -> b/dp")

    agree(body, 3 * X.sum(1), X)


def test_a_gathered_copy_is_one_value(mesh):
    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        whole = local(lambda x: lax.all_gather(x, "tp", axis=1, tiled=True), "b/dp d/tp -> b/dp d")(x)
        return x * whole.sum(1, keepdims=True)

    agree(body, X * X.sum(1, keepdims=True), X)


def test_booleans_and_integers_leave_as_copies(mesh):
    def sign(x):
        whole = lax.all_gather(x, "tp", axis=1, tiled=True)
        return whole > 0, (whole * 10).astype(jnp.int32)

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        positive, ten = local(sign, "b/dp d/tp -> b/dp d, b/dp d")(x)
        return x * positive.sum(1, keepdims=True, dtype=x.dtype) + ten.sum(1, keepdims=True).astype(x.dtype)

    want = X * (X > 0).sum(1, keepdims=True) + (X * 10).astype(np.int32).sum(1, keepdims=True)
    for mode in MODES:
        np.testing.assert_allclose(getattr(body, mode)(X), want, rtol=1e-5, atol=1e-5)


def test_several_arguments_and_results(mesh):
    def mix(x, w):
        return lax.psum(x @ w, "tp"), lax.pmax(lax.stop_gradient(w), "tp")

    @kernel("b/dp d/tp, d/tp f -> b/dp f", mesh=mesh)
    def body(x, w):
        y, top = local(mix, "b/dp d/tp, d/tp f -> b/dp f, 2 f")(x, w)
        return y + top.sum(0)[None]

    w = np.asarray(jax.random.normal(jax.random.key(1), (6, 5)))
    agree(body, X @ w + w.reshape(3, 2, 5).max(0).sum(0), X, w)


def test_no_arguments(mesh):
    @kernel("-> n/dp/tp", mesh=mesh)
    def body():
        place = lambda: lax.axis_index(("dp", "tp"))[None]
        return local(place, "-> n/dp/tp", n=6)()

    for mode in MODES:
        assert getattr(body, mode)().tolist() == [0, 1, 2, 3, 4, 5]


def test_scalars_and_ellipses(mesh):
    def scaled(x, s):
        return x * s, lax.pmean(x.mean(), ("dp", "tp"))

    @kernel("b/dp d/tp, scalar -> b/dp d/tp", mesh=mesh)
    def body(x, s):
        y, mean = local(scaled, "b/dp d/tp, scalar -> b/dp d/tp, scalar")(x, s)
        return y + mean

    agree(body, X * 2 + X.mean(), X, np.float32(2))


def test_an_ellipsis_is_whole_inside(mesh):
    @kernel("a b d/tp -> a b d/tp", mesh=mesh)
    def body(x):
        total = local(lambda x: lax.psum(x.sum(-1), "tp"), "... d/tp -> ...")(x)
        return x + total[..., None]

    x = X.reshape(2, 4, 6)
    agree(body, x + x.sum(-1, keepdims=True), x)


def test_composite_dimensions(mesh):
    def heads(x):  # two heads of 2 per device
        return jnp.flip(x, 1) * (1 + lax.axis_index("tp")).astype(x.dtype)

    @kernel("b/dp (h k)/tp -> b/dp (h k)/tp", mesh=mesh)
    def body(x):
        return local(heads, "b/dp (h k)/tp -> b/dp (h k)/tp", k=2)(x)

    x = np.concatenate([X, X], 1)
    want = np.concatenate([np.flip(x[:, 4 * i : 4 * i + 4], 1) * (i + 1) for i in range(3)], 1)
    agree(body, want, x)


def test_scattered_blocks_in_reference_mode(mesh):
    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        flat = x.reshape(-1)
        scale = lambda v: v * (1 + lax.axis_index("tp")).astype(v.dtype)
        return local(scale, "(b/dp d/tp) -> (b/dp d/tp)")(flat).reshape(x.shape)

    want = X * (1 + np.repeat([0, 1, 2], 2))
    np.testing.assert_allclose(body.explicit(X), want, rtol=1e-6)
    np.testing.assert_allclose(body.reference(X), want, rtol=1e-6)
    with pytest.raises(ModeError, match="a whole array cannot be cut into scattered blocks"):
        body.auto(X)


def test_string_operations_inside(mesh):
    def inner(x):
        whole = all_gather(x, "b/dp d/tp -> b/dp d")
        noise = random.normal(jax.random.key(3), "b/dp d/tp")
        return x * whole.sum(1, keepdims=True) / size("d") + noise

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        return local(inner, "b/dp d/tp -> b/dp d/tp")(x)

    agree(body, X * X.mean(1, keepdims=True) + jax.random.normal(jax.random.key(3), (8, 6)), X)


def test_inside_scan_vmap_and_jit(mesh):
    ring = lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 3) for i in range(3)])

    @kernel("n b/dp d/tp -> n b/dp d/tp", mesh=mesh)
    def body(x):
        island = local(ring, "b/dp d/tp -> b/dp d/tp")
        step = lambda c, _: (jax.vmap(island)(c), None)
        return jax.jit(lambda x: lax.scan(step, x, None, length=2)[0])(x)

    x = X.reshape(2, 4, 6)
    agree(body, np.roll(x, 4, 2), x)


def test_auto_mode_communicates_what_the_function_says(mesh):
    ring = lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 3) for i in range(3)])
    body = kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: local(ring, "b/dp d/tp -> b/dp d/tp")(x))
    from spmd.modes import mode

    with mode("auto"):
        text = body.lower(X).compile().as_text()
    assert text.count(" collective-permute(") + text.count(" collective-permute-start(") == 1
    assert not any(f" {word}(" in text for word in ("all-gather", "all-reduce", "all-to-all"))


# --- local: errors -------------------------------------------------------------------------------------------


def message(body, kind, mode="explicit", args=(X,)):
    with pytest.raises(kind) as caught:
        getattr(body, mode)(*args)
    return str(caught.value).strip("\n")


def wrap(mesh, fn, pattern="b/dp d/tp -> b/dp d/tp", make=local, **names):
    return kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: make(fn, pattern, **names)(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.pcast(lax.psum(x, "tp"), "tp", to="varying"),
        lambda x: lax.psum_scatter(jnp.tile(x, (1, 6)), ("dp", "tp"), scatter_dimension=1, tiled=True),
        lambda x: lax.ppermute(x, "tp", [(0, 1)]),
    ],
)
def test_error_what_vmap_cannot(mesh, fn):
    text = message(wrap(mesh, fn), ModeError, "reference")
    assert text.startswith('local(fn, "b/dp d/tp -> b/dp d/tp")\nreference mode runs per-shard code under jax.vmap(')
    advice = 'local(..., reference=global_fn); or the kernel\'s explicit mode, with spmd.mode("explicit"): around it'
    assert text.endswith(f"advice: {advice}")
    assert "\ngot: JAX: " in text


def test_a_reference_says_what_the_function_means():
    """It runs on whole arrays in reference mode, and there alone: where they differ, the assertion says so."""
    flip = lambda x: jax.lax.ppermute(x[::-1], "cp", [(0, 3), (1, 2), (2, 1), (3, 0)])
    over = lambda pattern: kernel(pattern, mesh=make_mesh(dp=2, cp=4))
    for meaning, right in ((jnp.flip, True), (lambda x: x, False)):
        job = local(flip, "s/cp -> s/cp", reference=meaning)
        found = over("s/cp -> s/cp")(job)
        x = jnp.arange(8.0)
        np.testing.assert_array_equal(found(x), x[::-1])
        np.testing.assert_array_equal(found.auto(x), x[::-1])
        np.testing.assert_array_equal(found.reference(x), meaning(x))
        with contextlib.nullcontext() if right else pytest.raises(AssertionError):
            assert_modes_agree(found, x)
    inside = local(jax.grad(lambda x: jnp.sum(x**2)), "s/cp -> s/cp", reference=lambda x: 2 * x)
    found = over("s/cp -> s/cp")(inside)
    np.testing.assert_array_equal(found.reference(x), 2 * x)  # `vmap` could not differentiate inside
    np.testing.assert_array_equal(found(x), 2 * x)


def test_error_gradient_inside_in_reference_mode(mesh):
    # There JAX would answer 6x, where on a mesh it answers 2x.
    slope = jax.grad(lambda x: lax.psum((x * x).sum(), "tp"))
    body = wrap(mesh, lambda x: jax.jit(slope)(x))
    np.testing.assert_allclose(body.explicit(X), 2 * X)
    np.testing.assert_allclose(body.auto(X), 2 * X)
    assert message(body, ModeError, "reference") == (
        'local(fn, "b/dp d/tp -> b/dp d/tp")\n'
        "the function differentiates, and under jax.vmap(axis_name=...) JAX's collectives have other gradients.\n"
        "advice: jax.grad around the kernel, or the kernel's explicit mode"
    )


def test_a_fault_of_the_function_stays_its_own(mesh):
    def fn(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine"):
        wrap(mesh, fn).reference(X)


def test_error_result_that_differs(mesh):
    body = kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: x + local(lambda x: 2 * x, "b/dp d/tp -> b/dp _")(x))
    assert "local(" in str(suspicions(body, X)[0])


# --- opaque --------------------------------------------------------------------------------------------------


def host(x):
    return jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_pallas(mesh):
    from jax.experimental import pallas as pl

    def double(x):
        def code(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2 + 1

        return pl.pallas_call(code, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    body = wrap(mesh, double, make=opaque, reference=lambda x: x * 2 + 1)
    for mode in MODES:
        np.testing.assert_array_equal(getattr(body, mode)(X), X * 2 + 1)


def test_pallas_without_opaque(mesh):
    """JAX's interpreter cannot handle values that vary: said at the trace, under any transformation."""
    from jax.experimental import pallas as pl

    def double(x):
        def code(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2 + 1

        kind = jax.typeof(x)
        shape = jax.ShapeDtypeStruct(kind.shape, kind.dtype, manual_axis_type=kind.manual_axis_type)
        return pl.pallas_call(code, out_shape=shape, interpret=True)(x)

    body = wrap(mesh, double, make=lambda fn, *_, **__: fn)
    mapped = lambda x: jax.vmap(body)(x[None])
    for call in (body, jax.jit(body), body.trace, body.lower, lambda x: explain(body, x), mapped):
        with pytest.raises(ReplicationError, match=r"spmd.opaque\(fn, .* around the Pallas call"):
            call(X)
    for mode in ("auto", "reference"):
        np.testing.assert_array_equal(getattr(body, mode)(X), X * 2 + 1)
    specs = {"mesh": mesh, "in_specs": jax.P("dp", "tp"), "out_specs": jax.P("dp", "tp")}
    with pytest.raises((ValueError, TypeError)):  # once plain JAX can do it, the finding is to go
        jax.jit(jax.shard_map(double, **specs))(X)
    whole = kernel("b d -> b d", mesh=mesh)(double)  # nothing varies, so there is nothing to hide
    np.testing.assert_array_equal(whole(X), X * 2 + 1)


def test_opaque_types(mesh):
    seen = []

    @kernel("b/dp d/tp, n -> b/dp d/tp", mesh=mesh)
    def body(x, v):
        y = opaque(host, "n -> n")(v)
        z = opaque(lambda x: x.sum(1), "b/dp d/tp -> b/dp {U:tp}")(x)
        seen.append([{*typeof(a).varying} for a in (y, z)])
        return x + psum(z, "b/dp {U:tp} -> b/dp")[:, None] + y.sum()

    np.testing.assert_allclose(body(X, np.ones(4, np.float32)), X + X.sum(1)[:, None] + 8, rtol=1e-5)
    assert seen[-1] == [set(), {"dp", "tp"}]


def test_opaque_gradient_of_a_gathered_copy(mesh):
    # Were the result typed equal on tp, its cotangent would be complete and the gather's transpose count it thrice.
    cube = lambda x: x**3

    @kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
    def body(x):
        whole = opaque(cube, "b/dp d -> b/dp d", reference=cube)(all_gather(x, "b/dp d/tp -> b/dp d"))
        return x * whole.sum(1, keepdims=True)

    agree(body, X * (X**3).sum(1, keepdims=True), X, modes=("explicit", "reference"))


def test_error_opaque_result_that_differs(mesh):
    body = kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: x + opaque(lambda x: 2 * x, "b/dp d/tp -> b/dp _")(x))
    assert "opaque(" in str(suspicions(body, X)[0])
