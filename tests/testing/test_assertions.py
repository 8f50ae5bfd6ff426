"""The collectives of a program: the right ones pass, the wrong ones are told in a table that is in assertions.txt."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd import testing
from spmd.testing import (
    Mismatch,
    assert_collectives,
    assert_modes_agree,
    assert_no_unwritten_collectives,
    assert_sharded,
)
from tests.goldens import Golden
from tests.testing.harness import LAYOUTS, make_mlp, message, structs

GOLDEN = Golden(Path(__file__).with_name("assertions.txt")).read()
RIGHT = {"all_gather": {"tp": 1, "dp": 2}, "psum_scatter": {"tp": 1}}
BYTES = 4 * (2 * 8 * 6 * 3 // 4 * 2 + 6 * 3 // 2 * 2)


@pytest.mark.parametrize("view", ["compiled", "written"])
def test_the_right_collectives(mesh, view):
    mlp, args = make_mlp(mesh), structs(mesh)
    assert_collectives(mlp, args, RIGHT, bytes=BYTES, view=view)
    assert_collectives(mlp, args, {"all_gather": 3, "psum_scatter": 1, "psum": 0}, view=view)
    assert_collectives(mlp, args, {"all_gather": 9, "psum_scatter": 1}, bytes=BYTES + 1, at_most=True, view=view)


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        ({"all_gather": {"tp": 1, "dp": 1}, "psum_scatter": {"tp": 1}}, {}),
        ({"all_gather": {"tp": 1, "dp": 3}, "psum_scatter": {"tp": 1}}, {"view": "compiled"}),
        ({"all_gather": {"tp": 1, "dp": 2}, "psum_scatter": {"tp": 1}, "psum": {"dp": 1}}, {}),
        ({"all_gather": {"tp": 1, "dp": 2}}, {}),
        ({"all_gather": 4, "psum_scatter": 1}, {}),
        (RIGHT, {"bytes": BYTES - 1}),
        (RIGHT, {"bytes": BYTES - 1, "at_most": True}),
        ({"all_gather": 2, "psum_scatter": 1}, {"at_most": True}),
    ],
)
def test_the_wrong_collectives(mesh, expected, options):
    with pytest.raises(Mismatch):
        assert_collectives(make_mlp(mesh), structs(mesh), expected, **{"view": "written", **options})


def test_both_tables_side_by_side(mesh):
    expected = {"all_gather": {"tp": 1, "dp": 1}, "psum": {"dp/tp": 1}, "psum_scatter": {"tp": 1}}
    assert message(assert_collectives, make_mlp(mesh), structs(mesh), expected, bytes=900) == GOLDEN["two tables"]
    again = message(assert_collectives, make_mlp(mesh), structs(mesh), RIGHT, bytes=100, at_most=True, view="written")
    assert again == GOLDEN["bytes"]


def test_an_implicit_reduction_is_named(mesh):
    """The name that a right side drops costs an all-reduce: said under the line that drops it."""
    kernel = spmd.kernel("b/dp f/tp, f/tp d -> b/dp d", mesh=mesh)(
        lambda x, w: spmd.einsum(x, w, "b/dp f/tp, f/tp d -> b/dp d")
    )
    args = jnp.ones((4, 8)), jnp.ones((8, 3))
    assert message(assert_collectives, kernel, args, {}, view="written") == GOLDEN["implicit"]


def test_a_gradient_is_a_program_too(mesh):
    mlp = make_mlp(mesh)
    places = tuple(spmd.Layout(a).sharding(mesh) for a in LAYOUTS)

    def pull(cotangent, *args):
        return jax.vjp(mlp, *args)[1](cotangent)

    grad = jax.jit(pull, in_shardings=(places[0], *places), out_shardings=places)
    args = structs(mesh)
    wanted = {"all_gather": {"dp": 2, "tp": 2}, "psum_scatter": {"dp": 2, "tp": 1}}
    assert_collectives(grad, (args[0], *args), wanted)
    with pytest.raises(Mismatch, match="backward"):
        assert_collectives(grad, (args[0], *args), {})


def test_no_devices_are_needed_for_what_is_written():
    mesh = spmd.make_mesh(dp=256, tp=64, abstract=True)
    shapes = (256, 128, 512), (512, 128), (128, 512)
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    assert_collectives(make_mlp(mesh), args, RIGHT, view="written")
    with pytest.raises(spmd.errors.MeshError):
        assert_collectives(make_mlp(mesh), args, RIGHT)


def test_nothing_unwritten(mesh):
    mlp = make_mlp(mesh)
    assert_no_unwritten_collectives(mlp, structs(mesh))
    elsewhere = structs(mesh, "b/tp s/dp d", *LAYOUTS[1:])
    table, _, loose = message(assert_no_unwritten_collectives, mlp, elsewhere).partition("\nthat nobody wrote:\n")
    assert table == GOLDEN["elsewhere"]
    assert [line.split()[:4] for line in loose.splitlines()] == [
        ["all_to_all", "tp", "48", "B"],
        ["ppermute", "dp/tp", "96", "B"],
    ]
    assert_no_unwritten_collectives(mlp, elsewhere, above=10**6)


def test_the_compilers_own_in_auto_mode(mesh):
    """Auto mode writes constraints: every collective of the compiled program is the compiler's."""
    text = message(assert_no_unwritten_collectives, make_mlp(mesh).auto, structs(mesh))
    assert re.search(r"!  all_gather\s+\S+\s+0\s+\d", text)


# --- mismatch ----------------------------------------------------------------------------------------------------

# Every assertion fails in one way, as an assertion: pytest shows it, and one `except` catches all.


def gather(mesh, *, to="invarying"):
    return spmd.kernel("b/dp d -> b d", mesh=mesh)(lambda x: spmd.all_gather(x, "b/dp d -> b d", to=to))


def wrong(mesh):
    @spmd.kernel("b/dp -> b/dp", mesh=mesh)
    def body(x):
        return x * spmd.axis_size("dp")

    return body


def added(mesh):
    """The compiler gathers what nobody wrote."""
    lies = jax.NamedSharding(mesh, jax.P())
    return jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, lies))


CALLS = {
    "assert_collectives": lambda mesh, x: testing.assert_collectives(gather(mesh), (x,), {"psum": {"dp": 1}}),
    "assert_no_unwritten_collectives": lambda mesh, x: testing.assert_no_unwritten_collectives(added(mesh), (x,)),
    "assert_modes_agree": lambda mesh, x: testing.assert_modes_agree(disagrees(mesh), jnp.ones((4, 6))),
    "assert_same_on_any_mesh": lambda mesh, x: testing.assert_same_on_any_mesh(wrong(mesh), jnp.ones(4)),
    "assert_sharded": lambda mesh, x: testing.assert_sharded({"w": jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P()))}, layouts={"w": "a/dp b"}),
}  # fmt: skip


def disagrees(mesh):
    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def body(x):
        return x * x.shape[0]

    return body


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith("assert_")])
def test_each_assertion_raises_it(name, mesh):
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
    with pytest.raises(testing.Mismatch) as caught:
        CALLS[name](mesh, x)
    assert isinstance(caught.value, AssertionError) and str(caught.value).strip()


# --- modes -------------------------------------------------------------------------------------------------------

# Equal values and gradients in all modes; what differs is told leaf by leaf.


def test_modes_agree(mesh):
    @spmd.kernel("b/dp d/tp, d/dp f -> b/dp f/tp", mesh=mesh)
    def layer(x, w):
        x = spmd.all_gather(x, "b/dp d/tp -> b/dp d")
        w = spmd.all_gather(w, "d/dp f -> d f")
        return jnp.sin(spmd.split(spmd.einsum(x, w, "b/dp d, d f -> b/dp f"), "b/dp f -> b/dp f/tp"))

    draws = np.random.default_rng(3)
    x, w = (np.asarray(draws.normal(size=s), np.float32) for s in ((4, 8), (8, 12)))
    assert_modes_agree(layer, x, w)
    assert_modes_agree(layer, x, w, modes=("explicit", "reference"), grad=False)
    assert_modes_agree(lambda x: (layer(x, w) ** 2).sum(), x, modes=("explicit", "reference"))


def test_modes_that_do_not(mesh):
    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def local(x):
        return x * x.shape[0]

    @spmd.kernel("b/dp d -> b/dp d", mesh=mesh)
    def wrong_gradient(x):
        return jax.lax.stop_gradient(x) if x.shape[0] == 4 else x * 1.0  # whole arrays have no gradient

    x = jnp.asarray(np.arange(12.0).reshape(4, 3), jnp.float32)
    text = message(assert_modes_agree, local, x)
    assert text == GOLDEN["modes"]
    assert_modes_agree(wrong_gradient, x, grad=False)
    with pytest.raises(Mismatch, match=r"gradient of args\[0\]"):
        assert_modes_agree(wrong_gradient, x)


def test_a_shape_that_differs_is_a_difference(mesh):
    @spmd.kernel("b/dp d -> n", mesh=mesh)
    def shape(x):
        return spmd.reduce(x, "b/dp d -> d")[: x.shape[0]]

    with pytest.raises(Mismatch, match=r"float32\[2\]\s+float32\[3\]"):
        assert_modes_agree(shape, jnp.ones((4, 3)), modes=("explicit", "reference"), grad=False)


# --- sharded -----------------------------------------------------------------------------------------------------

# How parameters lie: what is divided passes, what is not is told leaf by leaf.


def params(mesh, w="d/dp f/tp", norm="d"):
    at = lambda layout, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spmd.Layout(layout).sharding(mesh))
    return {"layer": {"w": at(w, 512, 256), "norm": at(norm, 512)}, "head": at("d/dp v/tp", 512, 1024)}


INTENDED = {"layer": {"w": "d/dp f/tp", "norm": "d"}, "head": "d/dp v/tp"}


def test_parameters_are_divided(mesh):
    assert_sharded(params(mesh))
    assert_sharded(params(mesh), layouts=INTENDED)
    assert_sharded(params(mesh, w="f/tp d/dp"), layouts=INTENDED)  # over the same axes
    assert_sharded(params(mesh, w="d f/tp"), axes=("tp",))
    assert_sharded(params(mesh, w="d f/tp"), layouts=INTENDED, tolerance=0.6)
    assert_sharded(params(mesh, w="d f/tp"), layouts={"layer": {"w": "d f/tp", "norm": "d"}, "head": "d/dp v/tp"})
    assert_sharded({})
    mapping = {"d": "dp", "f": "tp", "v": "tp"}
    assert_sharded(params(mesh), layouts={"layer": {"w": "d f", "norm": "d/1"}, "head": "d v"}, mapping=mapping)
    x = spmd.shard(np.ones((8, 4), np.float32), "a/dp b/tp", mesh=mesh)
    assert_sharded({"x": x}, layouts="a/dp b/tp")
    state = optax.adamw(1e-3).init({"x": x})  # its count is a number on one device
    assert_sharded(state)
    assert_sharded({"x": x, "state": state}, 0.01, layouts="a/dp b/tp")


def test_parameters_that_are_not(mesh):
    assert message(assert_sharded, params(mesh, w="d f/tp"), layouts=INTENDED) == GOLDEN["intended"]
    assert message(assert_sharded, params(mesh, w="d f/tp")) == GOLDEN["share"]
    mapping = {"d": "dp", "f": "tp", "v": "tp"}
    with pytest.raises(Mismatch, match="norm"):
        assert_sharded(
            params(mesh), layouts={"layer": {"w": "d f", "norm": "d"}, "head": "d v"}, mapping=mapping, tolerance=0
        )
    with pytest.raises(Mismatch):
        assert_sharded(params(mesh), tolerance=0.0)  # the norm is whole
    many = {f"w{i}": params(mesh, w="d f")["layer"]["w"] for i in range(30)}
    assert "and 10 more" in message(assert_sharded, many)
