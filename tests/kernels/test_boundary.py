"""Arguments that lie anywhere: what a call moves, what `boundary="error"` refuses, what `vmap` gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import PlacementError
from spmd.inspect import collectives
from tests.kernels.harness import KINDS, linear_on, mesh_of
from tests.sampler import share

A, E = AxisType.Auto, AxisType.Explicit
X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.arange(96, dtype=np.float32).reshape(8, 12) / 7


def placements(mesh):
    """Ways to hold X that are not the signature's."""
    other = jax.make_mesh((4, 2), ("p", "q"), axis_types=(A, A))
    turned = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(A, A))
    explicit = jax.make_mesh((8,), ("z",), axis_types=(E,))
    return {
        "numpy": X,
        "uncommitted": jnp.asarray(X),
        "one device": jax.device_put(X, jax.devices()[0]),
        "another device": jax.device_put(X, jax.devices()[5]),
        "single": jax.device_put(X, SingleDeviceSharding(jax.devices()[3])),
        "replicated": jax.device_put(X, NamedSharding(mesh, P())),
        "as wanted": jax.device_put(X, NamedSharding(mesh, P("dp", "tp"))),
        "other axes": jax.device_put(X, NamedSharding(mesh, P("tp", "dp"))),
        "other mesh": jax.device_put(X, NamedSharding(other, P("p", "q"))),
        "turned mesh": jax.device_put(X, NamedSharding(turned, P("dp", "tp"))),
        "explicit mesh": jax.device_put(X, NamedSharding(explicit, P(None, "z"))),
    }


NAMES = (
    "numpy", "uncommitted", "one device", "another device", "single", "replicated", "as wanted", "other axes",
    "other mesh", "turned mesh", "explicit mesh",
)  # fmt: skip


@pytest.mark.parametrize("kinds", ["auto", "explicit"])
@pytest.mark.parametrize("name", share(NAMES, always=("explicit mesh",)))
def test_an_argument_that_lies_elsewhere_is_moved(name, kinds):
    mesh = mesh_of(KINDS[kinds])
    linear = linear_on(mesh)
    x = placements(mesh)[name]
    w = jax.device_put(W, NamedSharding(mesh, P("tp")))
    for mode in ("explicit", "auto", "reference"):
        with spmd.mode(mode):
            np.testing.assert_allclose(linear(x, w), X @ W, rtol=1e-5, err_msg=mode)
            if name in ("replicated", "as wanted", "other axes"):
                np.testing.assert_allclose(jax.jit(linear)(x, w), X @ W, rtol=1e-5, err_msg=mode)


@pytest.mark.parametrize("name", NAMES)
def test_boundary_error_allows_only_what_lies_there(name):
    mesh = mesh_of(KINDS["auto"])
    linear = linear_on(mesh, boundary="error")
    x = placements(mesh)[name]
    w = jax.device_put(W, NamedSharding(mesh, P("tp")))
    if name == "as wanted":
        np.testing.assert_allclose(linear(x, w), X @ W, rtol=1e-5)
    else:
        with pytest.raises(PlacementError, match='x: .*wanted "b/dp d/tp"'):
            linear(x, w)


@pytest.mark.parametrize("kind", share([(A, A), (E, E), (E, A), (A, E)]))
def test_boundary_error_inside_jit_sees_what_the_type_says(kind):
    """Explicit axes stand in an array's type, Auto ones do not; outside jit the array itself tells."""
    mesh = mesh_of(kind)
    double = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh, boundary="error")(lambda x: 2 * x)
    step, slope = jax.jit(lambda x: double(x)), jax.jit(jax.grad(lambda x: double(x).sum()))
    put = lambda *spec: jax.device_put(X, NamedSharding(mesh, P(*spec)))
    np.testing.assert_array_equal(step(put("dp", "tp")), 2 * X)
    np.testing.assert_array_equal(slope(put("dp", "tp")), np.full_like(X, 2))
    for spec in [("tp", "dp"), ()]:
        with pytest.raises(PlacementError, match='x: .*wanted "b/dp d/tp"'):
            double(put(*spec))
        with pytest.raises(PlacementError, match='x: .*wanted "b/dp d/tp"'):
            jax.linearize(double, put(*spec))
        for run in (step, slope):
            if E in kind:
                with pytest.raises(PlacementError, match='x: .*wanted "b/dp d/tp"'):
                    run(put(*spec))
            else:
                run(put(*spec))
    if kind == (E, A):  # what moves along Auto axes is not seen
        np.testing.assert_array_equal(step(put("dp")), 2 * X)


def test_vmap_keeps_what_it_maps():
    """Where arrays show how they lie; `spmd_axis_name` says it anywhere."""
    mesh = mesh_of((A, A))
    double, strict = (
        spmd.kernel("d/tp -> d/tp", mesh=mesh, boundary=boundary)(lambda x: 2 * x) for boundary in ("move", "error")
    )
    x = jax.device_put(X, NamedSharding(mesh, P("dp", "tp")))
    jax.vmap(double.auto)(x), jax.vmap(double.reference)(x)  # one keeps it, the other has one device
    with pytest.raises(PlacementError, match='wanted "d/tp"'):
        jax.vmap(strict, in_axes=1)(x)
    for kernel in (double, strict):
        run = jax.vmap(kernel, spmd_axis_name="dp")
        assert not collectives(jax.jit(run), x).counts
        for how in (run, jax.vmap(kernel)):
            assert how(x).sharding.spec == P("dp", "tp")
            np.testing.assert_array_equal(how(x), 2 * X)
    whole = jax.device_put(X, NamedSharding(mesh, P(None, "tp")))
    np.testing.assert_array_equal(jax.vmap(strict)(whole), 2 * X)  # nothing to gather


def test_vmap_says_that_it_gathers_what_it_maps():
    """Where another vmap is around it, JAX does not take the axes of one."""
    mesh = mesh_of((A, A))
    double = spmd.kernel("d/tp -> d/tp", mesh=mesh)(lambda x: 2 * x)
    x = jax.device_put(np.stack([X, X]), NamedSharding(mesh, P(None, "dp", "tp")))
    advice = r'mapped dimension is divided over dp\nadvice: jax.vmap\(fn, spmd_axis_name="dp"\), and the innermost'
    with pytest.warns(spmd.errors.VmapWarning, match=advice) as caught:
        jax.vmap(jax.vmap(double))(x)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", [A, E])
def test_vmap_in_vmap_and_in_jit(kind):
    """The types of Explicit axes tell in jit too, and JAX itself keeps those; two mapped dimensions are seen as one is."""
    mesh = mesh_of((kind, kind))
    strict = spmd.kernel("d/tp -> d/tp", mesh=mesh, boundary="error")(lambda x: 2 * x)
    cube = np.stack([X, X])
    put = lambda *spec: jax.device_put(cube, NamedSharding(mesh, P(*spec)))
    inner = jax.vmap(jax.vmap(strict, spmd_axis_name="dp"))
    assert inner(put(None, "dp", "tp")).sharding.spec == P(None, "dp", "tp")
    np.testing.assert_array_equal(inner(put(None, "dp", "tp")), 2 * cube)
    swapped = jax.vmap(jax.vmap(strict, spmd_axis_name="dp"), in_axes=1, out_axes=1)  # as the advice says
    assert swapped(put("dp", None, "tp")).sharding.spec == P("dp", None, "tp")
    for spec in [("dp", None, "tp"), (None, "dp", "tp")]:
        if kind == A:
            advice = r'divided over dp\nadvice: jax.vmap\(fn, spmd_axis_name="dp"\), and the innermost'
            with pytest.raises(PlacementError, match=advice):
                jax.vmap(jax.vmap(strict))(put(*spec))
        else:
            assert jax.jit(jax.vmap(jax.vmap(strict)))(put(*spec)).sharding.spec == P(*spec)
    with pytest.raises(PlacementError, match='x: .*wanted "d/tp"'):
        inner(put(None, "dp"))
    if kind == E:
        with pytest.raises(PlacementError, match='x: .*wanted "d/tp"'):
            jax.jit(inner)(put(None, "dp"))
