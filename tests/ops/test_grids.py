"""`linspace`, `meshgrid`, `from_function`: coordinates created sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.inspect import collectives
from spmd.modes import MODES
from spmd.ops import linspace, meshgrid
from tests.ops.harness import close, make_mesh, pulled, run
from tests.sampler import Sampler, seeds, share

MESH = {"dp": 2, "tp": 4}


def made(make, out: str, mode: str = "explicit", mesh=MESH):
    """What a body without operands makes."""
    return run(lambda _: make(), mesh, ["scalar"], out, mode)(jnp.zeros(()))


@pytest.mark.parametrize("seed", seeds(4))
def test_linspace_is_the_same_on_every_mesh(seed: int) -> None:
    sampler = Sampler(seed)
    mesh = sampler.mesh()
    layout = sampler.layout("s", mesh)
    sizes = sampler.sizes("s", mesh, [layout])
    start, stop = (float(v) for v in sampler.rng.normal(size=2))
    for endpoint in (True, False):
        make = lambda endpoint=endpoint: linspace(start, stop, layout, endpoint=endpoint, **sizes)
        found = {mode: made(make, layout, mode, mesh) for mode in ("explicit", "reference")}
        np.testing.assert_array_equal(found["explicit"], found["reference"])
        alone = made(lambda endpoint=endpoint: linspace(start, stop, "s", endpoint=endpoint, **sizes), "s")
        np.testing.assert_array_equal(found["explicit"], alone)
        close(found["explicit"], np.linspace(start, stop, sizes["s"], endpoint=endpoint, dtype=np.float32), 1e-6)
        assert found["explicit"][0] == np.float32(start)
        if endpoint and sizes["s"] > 1:
            assert found["explicit"][-1] == np.float32(stop)


@pytest.mark.parametrize("mode", MODES)
def test_linspace_of_several_dimensions_dtypes_and_one_element(mode: str) -> None:
    found = made(lambda: linspace(1, 2, "b/dp [s/tp]", dtype=jnp.bfloat16, b=4, s=8), "b/dp s/tp", mode)
    close(found, jnp.broadcast_to(jnp.linspace(1, 2, 8).astype(jnp.bfloat16), (4, 8)))
    counted = made(lambda: linspace(0, 7, "(c l)/tp", c=4, l=2), "(c l)/tp", mode)
    np.testing.assert_array_equal(counted, np.arange(8))  # exactly
    close(made(lambda: linspace(3, 7, "s", s=1), "s", mode), jnp.array([3.0]))


@pytest.mark.parametrize("ends", [(1e38, 3e38), (-3e38, 3e38), (3e38, 0.0), (0.0, np.inf), (np.nan, 1.0)])
def test_linspace_of_the_largest_numbers(ends: tuple[float, float]) -> None:
    found = made(lambda: linspace(*ends, "n/tp", n=12), "n/tp")
    wanted = (
        np.float32(np.linspace(*ends, 12))
        if np.isfinite(ends).all()
        else np.float32([ends[0], *[np.nan] * 10, ends[1]])
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e31)


def test_the_ends_may_be_traced_and_have_gradients() -> None:
    by = jnp.arange(8.0)
    wanted = pulled(lambda a, b: jnp.linspace(a, b, 8), jnp.asarray(1.0), jnp.asarray(3.0), by=by)
    for mode in MODES:
        fn = run(lambda a, b: linspace(a, b, "n/tp", n=8), MESH, ["scalar", "scalar"], "n/tp", mode)
        jax.tree.map(close, pulled(fn, jnp.asarray(1.0), jnp.asarray(3.0), by=by), wanted)


@pytest.mark.parametrize("order", share(["x/dp y/tp z", "y/tp x/dp z", "z y/tp x/dp"]))
@pytest.mark.parametrize("sparse", [False, True])
def test_meshgrid_and_its_gradients(order: str, sparse: bool) -> None:
    sides = [jnp.asarray(Sampler(n).array((n,), whole=False)) for n in (6, 8, 3)]
    names = [word[0] for word in order.split()]
    shape = tuple({"x": 6, "y": 8, "z": 3}[n] for n in names)
    by = jnp.asarray(Sampler(0).array(shape, whole=False))

    def whole(*sides):
        grids = [x.reshape([-1 if n == name else 1 for n in names]) for name, x in zip("xyz", sides, strict=True)]
        return sum(jnp.broadcast_to((i + 1) * x * x, shape) for i, x in enumerate(grids))

    def body(*sides):
        grids = meshgrid(*sides, f"x/dp, y/tp, z -> {order}", sparse=sparse)
        assert [g.ndim for g in grids] == [3, 3, 3]
        assert not sparse or all(sorted(g.shape)[:2] == [1, 1] for g in grids)
        return sum((i + 1) * g * g for i, g in enumerate(grids))

    wanted = pulled(whole, *sides, by=by)
    for mode in MODES:
        fn = run(body, MESH, ["x/dp", "y/tp", "z"], order, mode)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), pulled(fn, *sides, by=by), wanted)


def test_a_grid_is_created_without_communication_and_in_parts() -> None:
    """No device computes or holds more than its block."""
    mesh = make_mesh(MESH)

    @spmd.kernel("-> x/dp y/tp", mesh=mesh, x=512, y=1024)
    def radius():
        x, y = linspace(-1, 1, "x/dp"), linspace(0, 1, "y/tp", endpoint=False)
        xs, ys = meshgrid(x, y, "x/dp, y/tp -> x/dp y/tp")
        return jnp.hypot(xs, ys)

    assert not collectives(radius, mesh=mesh).counts
    x, y = np.linspace(-1, 1, 512, dtype=np.float32), np.linspace(0, 1, 1024, endpoint=False, dtype=np.float32)
    close(radius(), np.hypot(*np.meshgrid(x, y, indexing="ij")))
    block = 4 * 512 * 1024 // 8
    assert radius.lower().compile().memory_analysis().temp_size_in_bytes < block


# --- from_function -------------------------------------------------------------------------------------------


def wave(i, j, k):
    return (i * 7 - j) * k + j


@pytest.mark.parametrize("seed", seeds(4))
def test_from_function_outside_and_inside(seed: int) -> None:
    sampler = Sampler(seed)
    mesh = sampler.mesh()
    layout = sampler.layout("x y z", mesh)
    sizes = sampler.sizes("x y z", mesh, [layout])
    shape = tuple(sizes[w.split("/")[0]] for w in layout.split())
    wanted = wave(*np.indices(shape, np.int32, sparse=True))
    where = make_mesh(mesh)
    outside = spmd.from_function(wave, layout, mesh=where, **sizes)
    close(outside, wanted)
    assert outside.sharding.is_equivalent_to(spmd.Layout(layout).sharding(where), 3)
    kernel = spmd.kernel(f"-> {layout}", mesh=where, **sizes)(lambda: spmd.from_function(wave, layout))
    for mode in ("explicit", "reference"):
        np.testing.assert_array_equal(getattr(kernel, mode)(), outside)


def test_from_function_takes_axes_mappings_and_the_ambient_mesh() -> None:
    mesh = make_mesh(MESH)
    with jax.set_mesh(mesh), spmd.axis_mapping({"x": "tp"}):
        a = spmd.from_function(lambda i, j: 10 * i + j, "x y/p", x=8, y=2, p="dp")
        b = jax.jit(lambda: spmd.from_function(lambda i, j: 10 * i + j, "x y/p", x=8, y=2, p="dp"))()
    assert a.sharding.spec == jax.P("tp", "dp") == b.sharding.spec
    np.testing.assert_array_equal(a, b)
    with spmd.mode("reference"):
        c = spmd.from_function(lambda i, j: 10 * i + j, "x/tp y/dp", x=8, y=2, mesh=mesh)
    assert len(c.sharding.device_set) == 1
    np.testing.assert_array_equal(a, c)
    constant = spmd.from_function(lambda i: 3, "x/tp", x=8, mesh=mesh)  # broadcasts
    np.testing.assert_array_equal(constant, np.full(8, 3))


def test_a_function_given_again_is_not_compiled_again() -> None:
    """Unless what it closes over is another: equal numbers of other types too, and arrays always."""
    mesh, runs = make_mesh(MESH), []
    note, scale = runs.append, 1  # (a list is not hashable, and may change)

    def scaled(i):
        note(1)
        return i * jnp.asarray(scale).astype(i.dtype) if isinstance(scale, jax.Array) else i.astype(type(scale)) * scale

    for scale, fresh in ((1, True), (1, False), (1.0, True), (2.5, True), (1, False), (jnp.ones(()) * 3, True)):
        runs.clear()
        out = spmd.from_function(scaled, "x/tp", x=8, mesh=mesh)
        np.testing.assert_array_equal(out, np.arange(8) * np.asarray(scale))
        assert bool(runs) == fresh and out.dtype == (np.float32 if isinstance(scale, float) else np.int32)
    with spmd.mode("reference"):
        assert len(spmd.from_function(scaled, "x/tp", x=8, mesh=mesh).sharding.device_set) == 1
    assert spmd.from_function(scaled, "x/tp", x=16, mesh=mesh).shape == (16,)


def test_what_the_function_closes_over_has_a_gradient() -> None:
    mesh = make_mesh(MESH)
    kernel = spmd.kernel("scalar -> x/tp", mesh=mesh, x=8)(
        lambda v: spmd.from_function(lambda i: v * i.astype(float), "x/tp")
    )
    for mode in MODES:
        run = getattr(kernel, mode)
        assert jax.grad(lambda v, run=run: run(v).sum())(2.0) == 28.0


def test_the_comparison_can_fail() -> None:
    """A linspace of each block by itself is noticed."""
    wrong = made(lambda: linspace(0, 1, "n", n=4) + spmd.ops.zeros("n/tp", n=16), "n/tp")
    with pytest.raises(AssertionError):
        close(wrong, jnp.linspace(0, 1, 16))
