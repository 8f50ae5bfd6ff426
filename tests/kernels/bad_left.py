"""Axes that a kernel cannot leave to the compiler."""

import jax
from jax.sharding import AxisType

import spmd
from tests.errors.registry import X, bad


def scaled(mesh, pattern="b d/tp -> b d/tp", **options):
    return spmd.kernel(pattern, mesh=mesh, **options)(lambda x: 2 * x)(X)


bad(
    an_axis_left_that_the_mesh_lacks=lambda mesh: scaled(mesh, auto="db"),
    every_axis_left=lambda mesh: scaled(mesh, "b d -> b d", auto=("dp", "tp")),
    an_axis_left_and_named=lambda mesh: scaled(mesh, auto="tp"),
    an_axis_left_by_a_number=lambda mesh: scaled(mesh, auto=2),
)


@bad
def an_explicit_axis_left(mesh):
    typed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    scaled(typed, auto="dp")


@bad
def an_axis_left_and_named_in_the_body(mesh):
    body = lambda x: spmd.all_gather(x, "b/dp d/tp -> b d/tp")
    spmd.kernel("b d/tp -> b d/tp", mesh=mesh, auto="dp")(body)(X)


@bad
def an_axis_left_inside_a_kernel_that_divides_it(mesh):
    inner = spmd.kernel("b d/tp -> b d/tp", mesh=mesh, auto="dp")(lambda x: 2 * x)
    spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)(lambda x: inner(x))(X)
