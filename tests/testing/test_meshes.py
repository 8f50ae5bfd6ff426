"""The same results and gradients on any mesh: what is right passes, and what is wrong is told with its cause."""

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import parallel
from spmd.testing import Mismatch, assert_same_on_any_mesh
from tests.goldens import Golden, written_anew
from tests.sampler import rare, share
from tests.testing.harness import SHAPES, make_mlp, message

GOLDEN = Golden(Path(__file__).with_name("mismatches.txt"))


def struct(*shape, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# -------------------- what is right


def test_a_block_with_arrays_and_without(mesh):
    """A model's own sizes are never computed with: the names become small."""
    mlp = make_mlp(mesh)
    assert_same_on_any_mesh(mlp, *(struct(*shape) for shape in SHAPES), meshes=())
    assert_same_on_any_mesh(mlp, struct(64, 4096, 4096), struct(4096, 14336), struct(14336, 4096))
    draws = np.random.default_rng(5)
    x, *weights = (draws.normal(size=shape).astype("f4") for shape in SHAPES)
    assert_same_on_any_mesh(mlp, spmd.shard(x, "b/dp s/tp d", mesh=mesh), *weights, meshes=[{"tp": 2}])


@pytest.mark.parametrize("dtype", share(["bfloat16", "float16", "complex64", "int32", "bool"]))
def test_dtypes(mesh, dtype):
    """Numbers without gradients, with complex ones, and with few bits."""

    @spmd.kernel("b/dp s/tp -> b/dp, s/tp", mesh=mesh)
    def sums(x):
        kind = "any" if x.dtype == bool else "sum"
        return spmd.reduce(x, "b/dp s/tp -> b/dp", kind), spmd.reduce(x, "b/dp s/tp -> s/tp", kind)

    assert_same_on_any_mesh(sums, struct(64, 64, dtype=dtype), meshes=())


def test_trees_keys_numbers_and_static_arguments(mesh):
    """All that a kernel takes and gives: keys of both kinds, a number with a layout, a function, integers beside floats."""

    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: float

    @spmd.kernel(
        in_layouts=({"x": "b/dp d", "ids": "b/dp"}, "scalar", "scalar"),
        out_layouts={"x": "b/dp d", "key": "scalar", "sum": "scalar", "big": "b/dp"},
        mesh=mesh,
        static="scale",
    )
    def noisy(data, key, rate, *, scale):
        noise = spmd.random.normal(key, "b/dp d", b=spmd.size("b"), d=spmd.size("d"))
        x = data["x"] * rate + noise * scale.by
        total = spmd.reduce(x * data["ids"][:, None].astype(x.dtype), "b/dp d -> scalar")
        return {"x": x, "key": jax.random.fold_in(key, 3), "sum": total, "big": (x > 0).any(1)}

    data = {"x": struct(512, 64), "ids": struct(512, dtype="int32")}
    key = jax.random.key(0)
    assert_same_on_any_mesh(noisy, data, struct(dtype=key.dtype), 0.5, scale=Scale(2.0), meshes=[{"dp": 2}])
    assert_same_on_any_mesh(noisy, data, rate=0.5, key=key, scale=Scale(2.0), meshes=())


@rare
def test_experts_are_built_with_their_groups():
    """Capacity is counted by groups. By default there is one for each block of tokens, so the mesh is a part of the
    meaning."""
    shapes = [struct(8, 6, 4), struct(4, 4), *[struct(4, 4, 6)] * 2, struct(4, 6, 4)]
    mesh = spmd.make_mesh(dp=2, ep=2)

    def build(groups):
        def made(mesh):
            pattern = "b/dp/ep s d, d e, e/ep d f, e/ep d f, e/ep f d -> b/dp/ep s d"

            @spmd.kernel(pattern, mesh=mesh)
            def experts(x, w, gate, up, down):
                routing = parallel.router(x, w, k=2)
                data = {"dp": ("dp", "ep"), "ep": "ep"}
                return parallel.moe(x, routing, gate, up, down, **data, capacity_factor=0.5, groups=groups)[0]

            return experts

        return made

    assert_same_on_any_mesh(build((4, 1)), *shapes, mesh=mesh, meshes=())
    with pytest.raises(Mismatch, match="experts is not the same"):
        assert_same_on_any_mesh(build(None), *shapes, mesh=mesh, meshes=(), grad=False)


def pipeline_of(mesh):
    """Layers on as many stages as the mesh has."""

    @spmd.kernel("p/pp l d f, m b d -> m b d", mesh=mesh)
    def stages(w, x):
        stage = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return parallel.pipeline(stage, w, x, pp="pp")

    return lambda layers, x: stages(layers.reshape(mesh.shape["pp"], -1, *layers.shape[1:]), x)


def test_pipelines_are_built_for_their_stages():
    mesh = spmd.make_mesh(pp=4)
    assert_same_on_any_mesh(pipeline_of, struct(8, 3, 3), struct(3, 2, 3), mesh=mesh, meshes=())

    @spmd.kernel("p/pp d f, m b d -> m b d", mesh=mesh)
    def stages(w, x):
        return parallel.pipeline(lambda w, x: jnp.tanh(x @ w), w, x, pp="pp")

    text = message(assert_same_on_any_mesh, stages, jnp.ones((4, 3, 3)), jnp.ones((3, 2, 3)))
    assert "stages runs on the mesh given, and fails on pp=1" in text and "advice: build(mesh)" in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_shard_map_is_built(kind):
    """Raw JAX, on both kinds of axes; arguments lie on each mesh as they did."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)

    def build(mesh):
        def mean(x):
            return lax.pmean(x.mean(0), "dp")

        return jax.shard_map(mean, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("tp"))

    assert_same_on_any_mesh(build, struct(8, 6, sharding=NamedSharding(mesh, P("dp", "tp"))))


def test_an_abstract_mesh_and_a_surrounding_one():
    @spmd.kernel("b/dp -> b/dp")
    def double(x):
        return 2 * x

    assert_same_on_any_mesh(double, jnp.ones(8), mesh=spmd.make_mesh(dp=2, abstract=True))
    with jax.set_mesh(spmd.make_mesh(dp=4)):
        assert_same_on_any_mesh(double, jnp.ones(8))
    elsewhere = spmd.shard(jnp.ones(8), "b/x", mesh=spmd.make_mesh(x=8))
    assert_same_on_any_mesh(double, elsewhere, mesh=spmd.make_mesh(dp=2))
    with spmd.mode("auto"):  # each mesh is compared in explicit mode
        assert_same_on_any_mesh(double, struct(64), mesh=spmd.make_mesh(dp=2))


# -------------------- what is wrong


def sum_for_mean(mesh):
    @spmd.kernel("b/dp d -> d", mesh=mesh)
    def mean(x):
        return spmd.psum(x.mean(0), "d {U:dp} -> d")

    return mean, struct(512, 4096)


def dropped_psum(mesh):
    """Hidden from the checker by a false word."""

    @spmd.kernel("b/dp d/tp, d/tp f -> b/dp f/tp", mesh=mesh)
    def linear(x, w):
        return spmd.split(spmd.assert_equal(x @ w, "tp", "so it seems"), "b/dp f -> b/dp f/tp")

    return linear, struct(512, 4096), struct(4096, 64)


def local_statistics(mesh):
    """What the checker is told not to look at."""

    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def soften(x):
        with spmd.per_shard("a mistake that somebody is sure of"):
            return jax.nn.softmax(x, 1)

    return soften, struct(512, 4096)


def reversed_ring(mesh):
    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def turn(x):
        n = spmd.axis_size("tp")
        return lax.ppermute(x, "tp", [((i + 1) % n, i) for i in range(n)]) - spmd.roll(x, "b/dp [s/tp]", 2)

    return turn, struct(512, 4096)


def a_step_short(mesh):
    """A ring that sums what comes by, and stops one device too early."""

    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def total(x):
        n = spmd.axis_size("tp")
        found = here = x.sum(1, keepdims=True)
        for _ in range(max(n - 2, 0)):
            here = lax.ppermute(here, "tp", [(i, (i + 1) % n) for i in range(n)])
            found = found + here
        return x + found

    return total, struct(512, 4096)


def wrong_gradient(mesh):
    """A right result, and a gradient that stays on its device."""

    @jax.custom_vjp
    def own(w):
        return w

    own.defvjp(lambda w: (w, None), lambda _, g: (g / 4,))

    @spmd.kernel("b/dp d/tp, d/tp -> b/dp d/tp", mesh=mesh)
    def scale(x, w):
        return x * (own(w) if spmd.axis_size("tp") > 1 else w)[None]

    return scale, struct(512, 4096), struct(4096)


def other_order(mesh):
    @spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)
    def swap(x):
        n = spmd.axis_size("tp")
        return lax.ppermute(x, "tp", [(i, n - 1 - i) for i in range(n)])

    return swap, struct(512, 4096)


def other_shape(mesh):
    @spmd.kernel("b/dp -> n", mesh=mesh)
    def zeros(x):
        return jnp.zeros(x.shape[0])

    return zeros, struct(512)


WRONG = [
    sum_for_mean,
    dropped_psum,
    local_statistics,
    reversed_ring,
    a_step_short,
    wrong_gradient,
    other_order,
    other_shape,
]


def told(program):
    return message(assert_same_on_any_mesh, *program(spmd.make_mesh(dp=2, tp=4)))


if written_anew():

    def test_write():
        GOLDEN.write({program.__name__: told(program) for program in WRONG})


@pytest.mark.parametrize("program", share(WRONG), ids=lambda program: program.__name__)
def test_what_is_wrong_is_told(program):
    assert told(program) == GOLDEN.read()[program.__name__]


def test_the_axis_is_told_where_two_have_one_size():
    """A factor of 2 on a mesh of 2 x 2 is that of dp: the meshes between say so."""
    text = message(assert_same_on_any_mesh, *sum_for_mean(spmd.make_mesh(tp=2, dp=2)))
    assert "2 times too large: the size of dp" in text and "the size of tp" not in text


def test_between_alone_may_differ():
    """Each mesh is compared: here both ends are right."""

    @spmd.kernel("b/dp -> b/dp", mesh=spmd.make_mesh(dp=4))
    def odd(x):
        return x * (3 if spmd.axis_size("dp") == 2 else 1)

    text = message(assert_same_on_any_mesh, odd, struct(8))
    assert "dp=2" in text and "the same: dp=4" in text and "3 times too large" in text


def test_a_failure_names_its_mesh(mesh):
    """On the mesh given it is the program's own error with a note; on another one it is a mismatch."""

    def fails_at(n):
        @spmd.kernel("b/dp -> b/dp", mesh=mesh)
        def body(x):
            if spmd.axis_size("dp") == n:
                raise RuntimeError("not here")
            return x

        return body

    with pytest.raises(RuntimeError, match="not here") as caught:
        assert_same_on_any_mesh(fails_at(2), jnp.ones(8))
    assert "dp=2, tp=4" in "".join(caught.value.__notes__)
    text = message(assert_same_on_any_mesh, fails_at(1), jnp.ones(8))
    assert text.startswith(
        "body runs on the mesh given, and fails on dp=1, tp=1.\nRuntimeError: not here\nadvice: build"
    )


def test_a_divergent_collective_is_found_before_it_hangs():
    """In a raw `shard_map` too; along another axis than that of the predicate every group agrees."""
    mesh = spmd.make_mesh(dp=2, tp=2)

    def build(axis):
        def made(mesh):
            def body(x):
                add = lambda x: lax.pcast(lax.psum(x, axis), axis, to="varying")
                return lax.cond(lax.axis_index("dp") == 0, add, lambda x: x * 2, x)

            return jax.shard_map(body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))

        return made

    with pytest.raises(spmd.errors.ReplicationError, match="dp"):
        assert_same_on_any_mesh(build("dp"), struct(4, 4), mesh=mesh)
    with pytest.raises(Mismatch, match="body is not the same"):  # it runs; it means something else on each mesh
        assert_same_on_any_mesh(build("tp"), struct(4, 4), mesh=mesh)


@pytest.mark.parametrize("how", ["error", "warn", "off"])
def test_a_divergent_collective_is_found_whatever_the_kernel_asks_for(how):
    @spmd.kernel("b/dp -> b/dp", mesh=spmd.make_mesh(dp=2), check=how)
    def body(x):
        return lax.cond((x > 0).any(), lambda x: x * lax.psum(x.sum(), "dp"), lambda x: x, x)

    with pytest.raises(spmd.errors.ReplicationError, match="wait for each other"):
        assert_same_on_any_mesh(body, struct(4))


def test_the_findings_of_check_are_asked_for(monkeypatch):
    """Only those of a divergent collective end the run before it begins; all others show in the numbers."""
    found = types.SimpleNamespace(kind="scale")
    monkeypatch.setattr(spmd, "check", lambda fn, *args, **kwargs: [found], raising=False)
    build = lambda mesh: jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    assert_same_on_any_mesh(build, struct(4), mesh=spmd.make_mesh(dp=2), devices=True)
    found.kind = "divergent"
    with pytest.raises(spmd.errors.ReplicationError, match="divergent"):
        assert_same_on_any_mesh(build, struct(4), mesh=spmd.make_mesh(dp=2), devices=True)


def test_tolerances(mesh):
    """By the coarsest dtype in the program, or by what is given."""

    def rounded(dtype):
        @spmd.kernel("b/dp -> b/dp", mesh=mesh)
        def body(x):
            off = 1 + 1e-3 * (spmd.axis_size("dp") - 1)
            return (x.astype(dtype).astype("float32")) * off

        return body

    x = jnp.linspace(1, 2, 8)
    assert_same_on_any_mesh(rounded("bfloat16"), x, meshes=(), devices=True)
    for options in ({"rtol": 1e-4}, {"rtol": {"bfloat16": 1e-4}}):
        with pytest.raises(Mismatch):
            assert_same_on_any_mesh(rounded("bfloat16"), x, meshes=(), devices=True, **options)
    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(rounded("float32"), x, meshes=(), devices=True)
    for options in ({"rtol": 0.01}, {"atol": 0.01}, {"rtol": {"float32": 0.01}}):
        assert_same_on_any_mesh(rounded("float32"), x, meshes=(), devices=True, **options)
    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(rounded("float32"), x, meshes=(), devices=True, rtol={"bfloat16": 0.01})


@pytest.mark.parametrize("number", [-1e9, -3e38])
@pytest.mark.parametrize("devices", [False, True])
def test_a_mask_hides_no_difference(mesh, number, devices):
    """What is -1e9 on all meshes is not rounded. So it does not say how much the other numbers may differ."""

    @spmd.kernel("b/dp -> b/dp", mesh=mesh)
    def biased(x):
        return jnp.where(x > 0, number, x + jnp.log(1.0 * x.shape[0]))

    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(biased, jnp.linspace(-1, 1, 8), meshes=(), devices=devices)


def test_what_rounding_changes_is_allowed(mesh):
    """A program that makes much of little: its sums of many steps differ by more than rounding alone."""

    def steep(off):
        @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
        def body(x):
            total = spmd.reduce(x * x, "b/dp d/tp -> b/dp")
            return jnp.sin(300 * total) * (1 + off * (spmd.axis_size("tp") - 1))

        return body

    x = np.asarray(np.random.default_rng(0).normal(size=(8, 64)), np.float32)
    assert_same_on_any_mesh(steep(0), x, meshes=(), devices=True)
    for program, options in ((steep(0), {"rtol": 2e-5}), (steep(0.05), {})):
        with pytest.raises(Mismatch):
            assert_same_on_any_mesh(program, x, meshes=(), devices=True, **options)


def test_gradients_can_be_left_out(mesh):
    program = wrong_gradient(mesh)
    assert_same_on_any_mesh(*program, grad=False)
    with pytest.raises(Mismatch, match="gradient of w"):
        assert_same_on_any_mesh(*program)


def step_of(mesh, mean="mean"):
    """A function that calls kernels: it takes no mesh."""

    @spmd.kernel("d f/tp, b/dp d -> scalar", mesh=mesh)
    def loss(w, x):
        return spmd.reduce(jnp.tanh(x @ w), "b/dp f/tp -> scalar", mean) / (1 if mean == "mean" else x.size)

    return lambda w, x: w - 0.1 * jax.grad(loss)(w, x)


@pytest.mark.parametrize("devices", [False, True])
@rare
def test_a_function_that_calls_kernels_is_not_built(mesh, devices):
    args = struct(6, 12), struct(8, 6)
    assert_same_on_any_mesh(step_of(mesh), *args, mesh=mesh, devices=devices)
    with pytest.raises(Mismatch, match="the size of dp"):
        assert_same_on_any_mesh(step_of(mesh, "sum"), *args, mesh=mesh, devices=devices)


def test_what_cannot_be_interpreted_is_run(mesh):
    def shifted(by):
        @spmd.kernel("b, c/dp -> c/dp", mesh=mesh)
        def body(x, y):
            own = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return y * own.sum() + by * spmd.axis_size("dp")

        return body

    assert_same_on_any_mesh(shifted(0.0), struct(8), struct(4), grad=False)
    with pytest.raises(Mismatch):
        assert_same_on_any_mesh(shifted(1.0), struct(8), struct(4), grad=False)


def test_a_permutation_for_one_number_of_devices_is_not_blamed_on_gradients():
    @spmd.kernel("n/a -> n/a", mesh=spmd.make_mesh(a=2, b=2))
    def swapped(x):
        return x + lax.ppermute(x, "a", [(0, 1), (1, 0)])

    with pytest.raises(Mismatch, match="swapped runs on the mesh given, and fails on a=1, b=1"):
        assert_same_on_any_mesh(swapped, jnp.arange(4.0))
