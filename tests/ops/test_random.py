"""`spmd.random` is `jax.random` on the whole shape, bit for bit, on every mesh."""

import functools
import math
import random as pyrandom

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from spmd import random
from spmd.errors import ModeError, ReplicationError
from spmd.kernels import kernel
from spmd.language import Layout
from spmd.modes import MODES
from spmd.ops._random import _block_prng, _positions, _words
from tests.sampler import rare, share

KEY = jax.random.key(7)
SAMPLERS = ("uniform", "normal", "bernoulli", "truncated_normal")


def make_mesh(**axes):
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def explicit(body, mesh, out, key=KEY):
    out_specs = Layout(out).spec if isinstance(out, str) else out
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=out_specs))(key)


@functools.cache
def expected(sampler, shape, dtype=jnp.float32):
    if sampler == "bernoulli":
        return jax.random.bernoulli(KEY, 0.3, shape)
    if sampler == "truncated_normal":
        return jax.random.truncated_normal(KEY, -1.5, 1.0, shape, dtype)
    if sampler == "uniform":
        return jax.random.uniform(KEY, shape, dtype, -1.0, 3.0)
    return jax.random.normal(KEY, shape, dtype)


def draw(sampler, key, layout, dtype=jnp.float32, **names):
    own = {
        "bernoulli": {"p": 0.3},
        "truncated_normal": {"lower": -1.5, "upper": 1.0, "dtype": dtype},
        "uniform": {"minval": -1.0, "maxval": 3.0, "dtype": dtype},
        "normal": {"dtype": dtype},
    }[sampler]
    return getattr(random, sampler)(key, layout, **own, **names)


def same(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def shape_matters():
    """Whether XLA's code for erf_inv rounds by the shape of its operand (jaxlib 0.12 on CPUs with FMA does)."""
    x = jnp.linspace(-0.99, 0.99, 1200)
    return bool((jax.lax.erf_inv(x) != jax.lax.erf_inv(x.reshape(400, 3)).reshape(-1)).any())


@pytest.fixture
def same_normal(shape_matters):
    """`same`, but up to rounding where JAX's own `normal` is not the same for the same bits in other shapes."""

    def compare(a, b):
        if not shape_matters:
            same(a, b)
        assert a.shape == b.shape
        np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), maxulp=4)

    return compare


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "layout"),
    share(
        [
            ({"dp": 1, "tp": 1}, "b/dp s d/tp"),
            ({"dp": 2, "tp": 4}, "b/dp s d/tp"),
            ({"dp": 3}, "b d s/dp"),
            ({"dp": 2, "tp": 3}, "b/tp/dp d s"),
            ({"dp": 2, "tp": 3}, "b/dp/tp d s"),
            ({"dp": 4}, "b d s"),
        ]
    ),
)
def test_the_bits_of_the_whole_array(axes, layout, same_normal):
    sizes = {"b": 12, "s": 3, "d": 20}
    body = lambda k: tuple(draw(sampler, k, layout, **sizes) for sampler in SAMPLERS)
    shape = tuple(sizes[n] for n in Layout(layout).names)
    for sampler, got in zip(SAMPLERS, explicit(body, make_mesh(**axes), Layout(layout).spec), strict=True):
        compare = same_normal if "normal" in sampler else same
        compare(got, expected(sampler, shape))


@pytest.mark.parametrize("dtype", share([jnp.bfloat16, jnp.float16]))
def test_dtypes(dtype):
    samplers = ("uniform", "normal", "truncated_normal")
    body = lambda k: tuple(draw(sampler, k, "b/dp d/tp", dtype, b=6, d=28) for sampler in samplers)
    for sampler, got in zip(samplers, explicit(body, make_mesh(dp=2, tp=4), P("dp", "tp")), strict=True):
        same(got, expected(sampler, (6, 28), dtype=dtype))


def test_complex_normal():
    got = explicit(lambda k: random.normal(k, "b/dp d", dtype=jnp.complex64, b=6, d=5), make_mesh(dp=2), "b/dp d")
    same(got, jax.jit(lambda k: jax.random.normal(k, (6, 5), jnp.complex64))(KEY))


@rare
def test_float64():
    samplers = ("uniform", "normal", "truncated_normal")
    with jax.enable_x64(True):
        body = lambda k: tuple(draw(sampler, k, "b d/dp", jnp.float64, b=3, d=8) for sampler in samplers)
        for sampler, got in zip(samplers, explicit(body, make_mesh(dp=4), P(None, "dp")), strict=True):
            same(got, expected(sampler, (3, 8), dtype=jnp.float64))


@pytest.mark.parametrize("x64", share([False, True]))
@rare
def test_without_a_dtype_it_is_jaxs_own(x64, same_normal):
    """The promise of the module, where float means float64 as well."""
    mesh, shape = make_mesh(dp=4), (8, 3)
    draws = {
        "uniform": (lambda k: random.uniform(k, "b/dp d", b=8, d=3), lambda k: jax.random.uniform(k, shape)),
        "bounds": (
            lambda k: random.uniform(k, "b/dp d", minval=1, maxval=3.5, b=8, d=3),
            lambda k: jax.random.uniform(k, shape, minval=1, maxval=3.5),
        ),
        "normal": (lambda k: random.normal(k, "b/dp d", b=8, d=3), lambda k: jax.random.normal(k, shape)),
        "complex": (
            lambda k: random.normal(k, "b/dp d", dtype=complex, b=8, d=3),
            lambda k: jax.random.normal(k, shape, complex),
        ),
        "truncated normal": (
            lambda k: random.truncated_normal(k, "b/dp d", b=8, d=3),
            lambda k: jax.random.truncated_normal(k, -2, 2, shape),
        ),
        "bernoulli": (
            lambda k: random.bernoulli(k, "b/dp d", p=0.3, b=8, d=3),
            lambda k: jax.random.bernoulli(k, 0.3, shape),
        ),
    }
    with jax.enable_x64(x64):
        ours, jaxs = zip(*draws.values(), strict=True)
        wanted = jax.jit(lambda key: [draw(key) for draw in jaxs])(KEY)
        run = kernel(in_layouts=("scalar",), out_layouts=("b/dp d",) * len(ours), mesh=mesh)(
            lambda key: tuple(draw(key) for draw in ours)
        )
        for mode in MODES:
            for name, a, b in zip(draws, getattr(run, mode)(KEY), wanted, strict=True):
                assert a.dtype == b.dtype, (mode, name)
                (same_normal if name in ("normal", "truncated normal") else same)(a, b)


def test_random_cases(cases, same_normal):
    rng = pyrandom.Random(0)
    for _ in range(cases):
        axes = dict(zip(("x", "y", "z"), rng.choice([(2, 2, 2), (1, 3, 2), (4, 1, 2), (7, 1, 1)]), strict=True))
        dims, sizes, left = [], {}, ["x", "y", "z"]
        rng.shuffle(left)
        for name in "abcd"[: rng.randint(1, 4)]:
            mine = [left.pop() for _ in range(rng.randint(0, min(2, len(left))))]
            sizes[name] = rng.randint(1, 5) * math.prod(axes[m] for m in mine)
            dims.append("/".join([name, *mine]))
        layout = " ".join(dims)
        body = lambda k, a=layout, s=sizes: (random.normal(k, a, **s), random.uniform(k, a, **s))
        normal, uniform = explicit(body, make_mesh(**axes), (Layout(layout).spec,) * 2)
        same_normal(normal, jax.random.normal(KEY, tuple(sizes.values())))
        same(uniform, jax.random.uniform(KEY, tuple(sizes.values())))


@rare
def test_composite_dimensions():
    mesh = make_mesh(dp=2, cp=2)
    got = explicit(lambda k: random.uniform(k, "(h k)/dp d", h=4, k=3, d=5), mesh, "b/dp d")
    same(got, jax.random.uniform(KEY, (12, 5)))
    # Both factors divided: a device holds scattered pieces of the dimension, given their own two here.
    body = lambda k: random.uniform(k, "(b/dp s/cp) d", b=4, s=3 * 2, d=5).reshape(2, 3, 5)
    same(explicit(body, mesh, "b/dp s/cp d"), jax.random.uniform(KEY, (24, 5)).reshape(4, 6, 5))


def test_a_literal_size_and_a_renamed_axis():
    got = explicit(lambda k: random.normal(k, "3 b/tp", b=8, tp=("dp", "cp")), make_mesh(dp=2, cp=2), "3 b/dp/cp")
    same(got, jax.random.normal(KEY, (3, 8)))


def test_scalar_layout():
    same(explicit(lambda k: random.uniform(k, "scalar"), make_mesh(dp=2), "scalar"), jax.random.uniform(KEY))


def test_keys_of_the_old_kind():
    old = jax.random.PRNGKey(5)
    body = lambda k: random.normal(k, "b/dp", b=8)
    same(explicit(body, make_mesh(dp=4), "b/dp", old), jax.random.normal(jax.random.key(5), (8,)))


# --- positions that do not fit 32 bits ----------------------------------------------------------------------


@rare
def test_positions_beyond_a_word():
    rng = pyrandom.Random(1)
    for _ in range(5):
        sizes = (rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6))
        strides = tuple(rng.randrange(1, 2 ** rng.randint(1, 62)) for _ in sizes)
        first = rng.randrange(2**63)
        high, low = _positions(_words(first), sizes, strides, wide=True)
        got = (np.asarray(high).astype(object) << 32) + np.asarray(low).astype(object)
        for place in np.ndindex(*sizes):
            want = (first + sum(i * s for i, s in zip(place, strides, strict=True))) % 2**64
            assert got[place] == want


def test_bits_beyond_a_word():
    sizes, strides, first = (3, 4), (2**33 + 5, 7), 2**40 + 11
    data = jax.random.key_data(KEY)
    key = jax.random.wrap_key_data(
        jnp.concatenate([data, jnp.array(_words(first))]), impl=_block_prng(sizes, sizes, strides, True)
    )
    place = [[first + i * strides[0] + j * strides[1] for j in range(4)] for i in range(3)]
    words = jnp.array([[_words(p)[w] for row in place for p in row] for w in (0, 1)])
    hashed = threefry_2x32(data, words)
    same(jax.random.bits(key, sizes), (hashed[0] ^ hashed[1]).reshape(sizes))


# --- what a device holds, and how it composes ---------------------------------------------------------------


def test_a_device_draws_its_shard_only():
    mesh = make_mesh(dp=2, tp=4)
    body = jax.shard_map(
        lambda k: random.normal(k, "b/dp d/tp", b=1024, d=1024),
        mesh=mesh,
        in_specs=P(),
        out_specs=P("dp", "tp"),
    )
    text = jax.jit(body).lower(KEY).compile().as_text()
    assert "1024,1024" not in text
    assert not any(word in text for word in ("all-gather", "all-reduce", "collective-permute", "all-to-all"))


def test_typed_varying_on_exactly_the_axes_of_the_layout():
    seen = {}

    def body(key):
        for layout in ("b/dp", "b/tp/dp", "b"):
            seen[layout] = jax.typeof(random.normal(key, layout, b=8)).manual_axis_type.varying
        return jnp.zeros(())

    explicit(body, make_mesh(dp=2, tp=4, pp=1), "scalar")
    assert seen == {"b/dp": {"dp"}, "b/tp/dp": {"dp", "tp"}, "b": set()}


def test_inside_vmap_over_keys(same_normal):
    keys = jax.random.split(KEY, 3)
    got = explicit(jax.vmap(lambda k: random.normal(k, "b/dp d", b=4, d=5)), make_mesh(dp=2), "k b/dp d", keys)
    same_normal(got, jnp.stack([jax.random.normal(k, (4, 5)) for k in keys]))


def test_inside_scan_with_a_key_that_is_carried():
    def body(key):
        def step(key, _):
            key, sub = jax.random.split(key)
            return key, random.uniform(sub, "b/dp", b=4)

        return jax.lax.scan(step, key, None, length=3)[1]

    want, key = [], KEY
    for _ in range(3):
        key, sub = jax.random.split(key)
        want.append(jax.random.uniform(sub, (4,)))
    same(explicit(body, make_mesh(dp=2), "n b/dp"), jnp.stack(want))


def test_gradient_passes_through_the_noise():
    mesh = make_mesh(dp=2)

    def loss(w, key):
        body = lambda w, k: (w * random.normal(k, "b/dp", b=4)).sum(keepdims=True)
        return jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))(w, key).sum()

    got = jax.jit(jax.grad(loss))(jnp.ones(4), KEY)
    np.testing.assert_array_equal(got, jax.random.normal(KEY, (4,)))


def test_bounds_may_be_traced():
    def body(key):
        high = jax.random.uniform(jax.random.fold_in(key, 1)) + 1.0
        return random.uniform(key, "b/dp", maxval=high, b=4)

    high = jax.random.uniform(jax.random.fold_in(KEY, 1)) + 1.0
    same(explicit(body, make_mesh(dp=2), "b/dp"), jax.random.uniform(KEY, (4,), maxval=high))


def test_bounds_under_vmap_and_grad():
    scaled = lambda high, k: random.uniform(k, "b/dp", maxval=high, b=4)
    highs = jnp.array([1.0, 2.0])
    want = jnp.stack([jax.random.uniform(KEY, (4,), maxval=h) for h in highs])
    mesh = make_mesh(dp=2)
    same(explicit(lambda k: jax.vmap(scaled, (0, None))(highs, k), mesh, "n b/dp"), want)
    slope = lambda k: jax.lax.psum(jax.grad(lambda h: scaled(h, k).sum())(1.0), ())
    np.testing.assert_allclose(explicit(slope, mesh, "scalar"), want[0].sum(), rtol=1e-6)


def test_other_masks_on_equal_data_are_an_error():
    def body(x):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("tp"))
        return x * random.uniform(key, "b/dp d")

    with pytest.raises(ReplicationError, match="says that the value is equal on tp, but it differs along tp"):
        kernel("b/dp d -> b/dp d", mesh=make_mesh(dp=2, tp=2))(body)(np.ones((4, 4), np.float32))


# --- errors -------------------------------------------------------------------------------------------------


def message(body, kind, key=KEY, mesh=None):
    with pytest.raises(kind) as caught:
        explicit(body, mesh or make_mesh(dp=2), "b/dp", key)
    return str(caught.value).strip("\n")


def test_error_the_older_threefry():
    with jax.threefry_partitionable(False):
        assert message(lambda k: random.normal(k, "b/dp", b=4), ModeError) == (
            'random.normal(key, "b/dp")\n'
            "the numbers of the older threefry scheme depend on the shape of the whole draw, so no shard can "
            "be drawn alone.\n"
            "got: jax_threefry_partitionable=False\n"
            'fix: jax.config.update("jax_threefry_partitionable", True)'
        )


# --- meta ---------------------------------------------------------------------------------------------------


def test_the_comparison_sees_one_wrong_shard():
    # Were each shard drawn with the key alone, the first device would still be right: not so the others.
    naive = explicit(lambda k: jax.lax.pcast(jax.random.normal(k, (4,)), "dp", to="varying"), make_mesh(dp=2), "b/dp")
    whole = jax.random.normal(KEY, (8,))
    np.testing.assert_array_equal(naive[:4], whole[:4])
    with pytest.raises(AssertionError):
        same(naive, whole)
