"""The collectives of a program: the right ones pass, the wrong ones are told in a table that is pinned."""

import re

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.testing import (
    Mismatch,
    assert_collectives,
    assert_no_unwritten_collectives,
)
from tests.testing.harness import LAYOUTS, make_mlp, message, structs

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


GOLDEN = {
    "two tables": """\
mlp does not send what the test says.
   collective        axes   expected  compiled
!  all_gather        dp            1         2
   all_gather        tp            1         1
!  psum              dp/tp         1         0
   psum_scatter      tp            1         1
!  bytes per device              900       648
where they come from:
  all_gather  dp  1  harness.py:N  all_gather(x, "d/dp f/tp -> d f/tp")  forward
  all_gather  dp  1  harness.py:N  all_gather(x, "f/tp d/dp -> f/tp d")  forward""",
    "bytes": """\
mlp does not send what the test says.
   collective        axes  at most  written
   all_gather        dp          2        2
   all_gather        tp          1        1
   psum_scatter      tp          1        1
!  bytes per device            100      648
where they come from:
  all_gather    tp  1  harness.py:N  all_gather(x, "b/dp s/tp d -> b/dp s d")            forward
  all_gather    dp  1  harness.py:N  all_gather(x, "d/dp f/tp -> d f/tp")                forward
  all_gather    dp  1  harness.py:N  all_gather(x, "f/tp d/dp -> f/tp d")                forward
  psum_scatter  tp  1  harness.py:N  einsum(x, y, "b/dp s f/tp, f/tp d -> b/dp s/tp d")  forward""",
    "implicit": """\
<lambda> does not send what the test says.
   collective        axes  expected  written
!  psum              tp           0        1
   bytes per device             any       36
where they come from:
  psum  tp  1  test_collectives.py:N  einsum(x, y, "b/dp f/tp, f/tp d -> b/dp d")  forward, implicit""",
    "elsewhere": """\
mlp runs 2 collectives that nobody wrote, 144 B per device.
   collective    axes   written  compiled
   all_gather    dp           2         2
   all_gather    tp           1         1
!  all_to_all    tp           0         1
!  ppermute      dp/tp        0         1
   psum_scatter  tp           1         1""",
}
