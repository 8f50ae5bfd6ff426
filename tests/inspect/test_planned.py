"""The plan beside the compiled program: lines and reasons for what nobody wrote."""

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd import explain
from tests.inspect.harness import DEVICES
from tests.propagation.programs import mlp, struct

MESH = spmd.make_mesh(dp=2, tp=4, abstract=True)
MLP = ("b/dp d", "d f/tp", "f/tp d")


def test_without_devices_the_plan_is_shown():
    report = explain(mlp, *(struct(MESH, one) for one in MLP), layouts="b d, d f, f d")
    [one] = report.unwritten
    assert (one.kind, one.axes, one.total_bytes, one.runs, one.shape) == ("psum", ("tp",), 1536, None, (8, 32))
    assert one.text == 'psum("b/dp d {U:tp} -> b/dp d")' and "the compiler's plan" in str(report)
    assert report.counts == {"psum": 1} and report.plan.counts == report.counts and report.to_dict()["plan"]


def test_with_devices_it_says_why():
    def program(x, w):
        return jnp.sort(x @ w, axis=0)

    report = explain(program, struct(DEVICES, "b/dp d"), struct(DEVICES, "d f/tp"), layouts="b d, d f")
    assert {one.text for one in report.unwritten} == {
        'all_to_all("b/dp f/tp -> b f/tp/dp")',
        'all_to_all("b f/tp/dp -> b/dp f/tp")',
    }
    assert {one.note for one in report.unwritten} == {"sort needs b whole", "the result is to lie so"}
    assert {one.where.partition(":")[0] for one in report.unwritten} == {"test_planned.py"}


def test_a_program_with_kernels_has_no_plan():
    body = spmd.kernel("b/dp d -> d", mesh=MESH)(lambda x: spmd.reduce(x, "b/dp d -> d", "sum"))
    assert explain(body, struct(MESH, "b/dp d")).plan is None
    assert explain(jax.jit(lambda x: body(x) * 2), struct(MESH, "b/dp d")).plan is None


def test_times_and_memory_know_the_plan():
    report = explain(mlp, *(struct(MESH, one) for one in MLP), hardware="h100")
    assert report.time.communication > 0 if hasattr(report.time, "communication") else "communication" in str(report)


def test_a_sum_over_more_axes_than_planned_is_told():
    """XLA sums the gradient of a depthwise convolution over all devices, and it is wrong then."""
    mesh, numbers = spmd.make_mesh(dp=2, tp=4), ("NHWC", "HWIO", "NHWC")

    def loss(w, x):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)
        return (y**2).sum()

    draw = np.random.default_rng(0).normal
    values = [draw(size=shape).astype("float32") for shape in ((3, 3, 1, 8), (8, 6, 5, 8))]
    layouts = [spmd.Layout(one).sharding(mesh) for one in ("y x i c", "n/dp h w c")]
    w, x = map(jax.device_put, values, layouts)
    right = np.allclose(jax.jit(jax.grad(loss))(w, x), jax.grad(loss)(*values), rtol=1e-4)
    shown = " ".join(str(explain(jax.grad(loss), w, x)).split())
    assert ("the plan sums over dp alone: compare the numbers with one device" in shown) is not right
