"""Wrong questions to `explain`."""

import spmd
from tests.errors.registry import X, bad, fixed

SAME = "b/dp d -> b/dp d"


def copied(mesh):
    return spmd.kernel(SAME, mesh=mesh)(lambda x: x + 0)


bad(
    explain_a_result=lambda mesh: spmd.explain(copied(mesh)(X)),
)


@fixed
def explain_a_result_fixed(mesh):
    assert spmd.explain(copied(mesh), X).total_bytes == 0


bad(
    explain_a_lowered_program_with_arguments=lambda mesh: spmd.explain(copied(mesh).lower(X), X),
)


@fixed
def explain_a_lowered_program_with_arguments_fixed(mesh):
    assert spmd.explain(copied(mesh).lower(X)).written is None


bad(
    explain_compiled_without_devices=lambda mesh: spmd.explain(
        copied(spmd.make_mesh(dp=2, tp=4, abstract=True)), X, compiled=True
    ),
    explain_compiled_is_no_program=lambda mesh: spmd.explain(copied(mesh), X, compiled="yes"),
    explain_on_another_mesh=lambda mesh: spmd.explain(copied(mesh), X, mesh=spmd.make_mesh(dp=4, tp=2, abstract=True)),
)


@bad
def explain_two_meshes(mesh):
    flat = spmd.kernel(SAME, mesh=spmd.make_mesh(dp=8))(lambda x: x + 0)
    spmd.explain(lambda x: flat(copied(mesh)(x)), X)


@fixed
def explain_on_another_mesh_fixed(mesh):
    assert spmd.explain(copied(mesh), X, mesh=mesh).mesh == {"dp": 2, "tp": 4}


bad(
    explain_with_a_mesh_that_is_none=lambda mesh: spmd.explain(copied(mesh), X, mesh=8),
    explain_on_unknown_hardware=lambda mesh: spmd.explain(copied(mesh), X, hardware="tpu-v5"),
)
