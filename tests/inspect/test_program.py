"""What `explain` and its like take: anything callable with its arguments, traced once, with a mesh from anywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import spmd
from spmd import all_gather, einsum, explain
from tests.inspect.harness import DEVICES, f32
from tests.inspect.programs import MESH

# -------------------- what it takes


def test_whatever_can_be_called_is_taken():
    @spmd.kernel("b/dp d/tp, d/tp -> b/dp", mesh=DEVICES)
    def dot(x, w):
        return einsum(x, w, "b/dp d/tp, d/tp -> b/dp")

    x, w = f32(8, 16), f32(16)
    jitted = jax.jit(lambda x, w: dot(x, w).sum())
    arrays = (jnp.ones((8, 16)), np.ones(16, np.float32))
    for fn, args in [
        (dot, (x, w)),
        (dot, arrays),
        (lambda x, w: dot(x, w), (x, w)),
        (jitted, (x, w)),
        (functools.partial(jitted, arrays[0]), arrays[1:]),
        (dot.trace(x, w), ()),
        (jitted.trace(x, w), ()),
    ]:
        report = explain(fn, *args)
        assert [(one.kind, one.axes) for one in report.collectives if one.written] == [("psum", ("tp",))], fn
        assert report.compiled is not None
    for fn in (dot.lower(x, w), dot.lower(x, w).compile(), jitted.lower(x, w).compile()):
        report = explain(fn, hardware="h100")
        assert report.written is None and report.time is None
        assert "psum" in report.counts and "written view" in str(report)
        assert "NOBODY WROTE" not in str(report) and "compiler's own" not in str(report)  # who wrote it is not known
    assert explain(dot, x, w, compiled=dot.lower(x, w).compile()).compiled.counts == {"psum": 1}
    gradient = explain(jax.grad(lambda x, w: dot(x, w).sum()), x, w)
    assert {one.phase for one in gradient.collectives if one.written} <= {"forward", "backward"}


def test_partial_sums_between_kernels():
    """JAX's unreduced type stands on a boundary, on axes of type Explicit."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    part = spmd.kernel("b/dp d/tp, d/tp f -> b/dp f {U:tp}", mesh=mesh)(
        lambda x, w: einsum(x, w, "b/dp d/tp, d/tp f -> b/dp f {U:tp}")
    )
    whole = spmd.kernel("b/dp f {U:tp} -> b/dp f", mesh=mesh)(lambda x: spmd.psum(x, "b/dp f {U:tp} -> b/dp f"))
    args = f32(8, 16, spec=P("dp", "tp"), mesh=mesh), f32(16, 6, spec=P("tp"), mesh=mesh)
    report = explain(lambda x, w: whole(part(x, w)), *args)
    assert [(one.kind, one.axes, one.runs, one.total_bytes) for one in report.collectives] == [
        ("psum", ("tp",), 1, 2 * 3 * (4 * 6 * 4) // 4)
    ]
    assert report.written.boundary == ()
    assert "sum(0-3)" in str(spmd.visualize(f32(8, 6, spec=P("dp", unreduced={"tp"}), mesh=mesh)))
    with pytest.raises(spmd.testing.Mismatch, match="not over"):
        spmd.testing.assert_sharded({"w": f32(8, 16, spec=P("dp", unreduced={"tp"}), mesh=mesh)})


def test_what_a_program_is_called():
    double = spmd.kernel("b/dp d -> b/dp d", mesh=MESH)(lambda x: 2 * x)
    double.__name__ = "double"
    assert explain(double, f32(8, 16)).name == "double"
    assert explain(double.auto, f32(8, 16)).name == "double.auto"
    assert explain(functools.partial(double), f32(8, 16)).name == "double"


def test_arguments_that_are_no_arrays_are_constants():
    @spmd.kernel("b/dp d/tp -> b/dp d", mesh=DEVICES)
    def body(x):
        return all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    def step(config, x, *, scale):
        return body(x) * scale if config["on"] == "yes" else x

    report = explain(step, {"on": "yes"}, f32(8, 16), scale=2.0)
    assert report.counts == {"all_gather": 1}
    assert explain(step, {"on": "no"}, f32(8, 16), scale=2.0).collectives == ()


def test_the_mesh_may_come_from_outside():
    @spmd.kernel("b/dp d/tp -> b/dp d")
    def body(x):
        return all_gather(x, "b/dp d/tp -> b/dp d", to="invarying")

    for mesh in (MESH, DEVICES):
        report = explain(body, f32(8, 16), mesh=mesh)
        assert report.mesh == {"dp": 2, "tp": 4}
        assert [one.axes for one in report.collectives] == [("tp",)]
        assert (report.compiled is None) == (mesh is MESH)
    own = spmd.kernel("b/dp -> b/dp", mesh=DEVICES)(lambda x: x)
    with pytest.raises(spmd.errors.MeshError, match="another mesh than that of the program"):
        explain(own, f32(8), mesh=spmd.make_mesh(dp=4, tp=2))


def test_donated_memory_is_counted_once():
    fn = lambda x: x + 1
    plain = explain(jax.jit(fn), f32(64, 64)).memory
    donated = explain(jax.jit(fn, donate_argnums=0), f32(64, 64)).memory
    assert plain.aliased == 0 and donated.aliased == 64 * 64 * 4
    assert donated.total == plain.total - 64 * 64 * 4


def test_donated_memory_is_known_without_devices():
    step = jax.jit(lambda state, x: (state + x, (x * x).sum()), donate_argnums=0)
    twice = spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=MESH, donate="x")(lambda x: 2 * x)
    x = f32(8, 16, spec=P("dp", "tp"), mesh=MESH)
    for report in (explain(step, x, x), explain(step.trace(x, x)), explain(twice, x)):
        memory = report.memory
        assert memory.temporaries is None and 0 < memory.aliased == memory.outputs - memory.outputs % 64
        assert "donated" in str(report) and report.compiled is None
    assert explain(lambda *args: step(*args), x, x).memory.aliased == 0  # inside a program nothing is donated
