"""Collectives of hand-written shard_maps: counts and bytes are exact, and a wrong count is noticed."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd.errors import SpmdError
from spmd.inspect import collectives

MESH = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
CUBE = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)


def mapped(body, in_specs, out_specs, mesh=MESH):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = f32(16, 32)  # local shape 8, 8 under P("dp", "tp"): 256 bytes
SHARD = 8 * 8 * 4
BOTH = P("dp", "tp")


@pytest.mark.parametrize(
    ("body", "out", "kind", "axes", "bytes_"),
    [
        (lambda x: lax.all_gather(x, "tp", axis=1, tiled=True), BOTH, "all_gather", ("tp",), 3 * SHARD),
        (lambda x: lax.all_gather(x, "dp", axis=0, tiled=True), BOTH, "all_gather", ("dp",), SHARD),
        (lambda x: lax.psum(x, "tp"), P("dp"), "psum", ("tp",), SHARD * 3 // 2),
        (lambda x: lax.pmax(x, "dp"), P(None, "tp"), "psum", ("dp",), SHARD),
        (lambda x: lax.psum(x, ("dp", "tp")), P(), "psum", ("dp", "tp"), SHARD * 7 // 4),
        (
            lambda x: lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True),
            P(("dp", "tp")),
            "psum_scatter",
            ("tp",),
            SHARD * 3 // 4,
        ),
        (lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True), BOTH, "all_to_all", ("tp",), SHARD * 3 // 4),
        (
            lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
            P("dp", "tp"),
            "ppermute",
            ("tp",),
            SHARD,
        ),
    ],
)
def test_one_collective_of_each_kind(body, out, kind, axes, bytes_):
    report = collectives(mapped(body, P("dp", "tp"), out), X)
    assert report.counts == {kind: 1}
    (item,) = report
    assert (item.axes, item.whole, item.bytes, item.count) == (axes, True, bytes_, 1)
    assert report.total_bytes == bytes_
    assert item.where.startswith("test_collectives.py:")


def test_a_loop_multiplies():
    def body(x):
        def step(carry, _):
            return lax.pcast(lax.psum(carry * x, "b"), "b", to="varying"), None

        return lax.scan(step, x, None, length=7)[0]

    report = collectives(mapped(body, P("a", "b"), P("a", "b"), CUBE), f32(16, 16))
    assert report.counts == {"psum": 7}
    assert report.by_axis()["b"].total_bytes == 7 * (8 * 8 * 4)
    assert report.exact


def test_a_loop_of_unknown_length_is_flagged():
    def body(x):
        return lax.while_loop(lambda c: lax.psum(jnp.sum(c), ("dp", "tp")) < 1e3, lambda c: c * 2.0, x)

    report = collectives(mapped(body, P("dp", "tp"), P("dp", "tp")), X)
    assert report.counts == {"psum": 1}
    assert not report.exact
    assert "loop of unknown length" in report.table()


def test_local_programs_have_none():
    report = collectives(mapped(lambda x: x * 2, P("dp", "tp"), P("dp", "tp")), X)
    assert len(report) == 0
    assert report.counts == {}
    assert report.total_bytes == 0
    assert str(report) == "no collectives"


def test_the_compilers_own_resharding_is_seen():
    fn = jax.jit(
        lambda x: x * 2,
        in_shardings=NamedSharding(MESH, P("tp", None)),
        out_shardings=NamedSharding(MESH, P(None, "tp")),
    )
    report = collectives(fn, X)
    assert report.mesh == {"dp": 2, "tp": 4}
    assert report.counts == {"all_to_all": 1}
    assert report.total_bytes == 16 * 32 * 4 // 4 * 3 // 4


def test_every_kind_of_program_is_taken():
    fn = mapped(lambda x: lax.psum(x, "tp"), P("dp", "tp"), P("dp"))
    reports = [
        collectives(fn, X),
        collectives(lambda x: fn(x), X),
        collectives(fn.lower(X)),
        collectives(fn.lower(X).compile()),
        collectives(fn.lower(X).compile(), mesh=MESH),
        collectives(fn, X, mesh={"dp": 2, "tp": 4}),
    ]
    assert [report.counts for report in reports] == [{"psum": 1}] * len(reports)
    assert [report[0].axes for report in reports] == [("tp",)] * len(reports)


def test_a_kernel_has_the_collectives_that_its_strings_say():
    """Bytes by formula, forward and backward, each with the line of the body that wrote it."""
    mesh = spmd.make_mesh(dp=2, tp=4)

    @spmd.kernel("b/dp s/tp d, d/dp f/tp -> b/dp s f/tp", mesh=mesh)
    def linear(x, w):
        x = spmd.all_gather(x, "b/dp s/tp d -> b/dp s d")
        w = spmd.all_gather(w, "d/dp f/tp -> d f/tp")
        return spmd.einsum(x, w, "b/dp s d, d f/tp -> b/dp s f/tp")

    x, w, out = f32(4, 8, 16), f32(16, 32), f32(4, 8, 32)
    gathers = {"tp": 2 * 8 * 16 * 4 * 3 // 4, "dp": 16 * 8 * 4 // 2}
    forward = collectives(linear, x, w)
    assert forward.counts == {"all_gather": 2}
    assert {axis: part.total_bytes for axis, part in forward.by_axis().items()} == gathers
    assert {item.where.partition(":")[0] for item in forward} == {"test_collectives.py"}

    def backward(x, w, cotangent):
        return jax.vjp(linear, x, w)[1](cotangent)

    report = collectives(backward, x, w, out)
    assert report.counts == {"all_gather": 2, "psum_scatter": 2}
    assert {axis: part.total_bytes for axis, part in report.by_axis().items()} == {
        axis: 2 * count for axis, count in gathers.items()
    }


def test_wrong_programs_are_errors():
    fn = mapped(lambda x: lax.psum(x, "tp"), P("dp", "tp"), P("dp"))
    with pytest.raises(SpmdError, match="has its arguments already"):
        collectives(fn.lower(X), X)
    with pytest.raises(SpmdError, match="got: int"):
        collectives(3)
    with pytest.raises(SpmdError, match="advice: mesh="):
        collectives(fn, X, mesh={"dp": 2})


def test_table_and_dict():
    def body(x):
        y = lax.all_gather(x, "tp", axis=1, tiled=True)
        return lax.psum(jnp.sum(y * y, 0), "dp")[: x.shape[1]]

    report = collectives(mapped(body, P("dp", "tp"), P("tp")), X)
    lines = report.table(width=80).splitlines()
    assert lines[0].split() == ["collective", "axes", "times", "operand", "bytes", "where"]
    assert lines[-1].startswith("total: 1 all_gather, 1 psum; ")
    assert max(map(len, lines)) <= 80
    narrow = report.table(width=40).splitlines()
    assert max(map(len, narrow)) <= 40
    assert " ".join(" ".join(narrow[5:]).split()) == lines[-1]  # the totals are wrapped, not cut
    assert [line.strip() for line in narrow[2:5:2]] == [one.where for one in report]  # below their rows
    assert json.loads(json.dumps(report.to_dict()))["counts"] == {"all_gather": 1, "psum": 1}
    assert set(report.by_axis()) == {"dp", "tp"}
    assert set(report.by_kind()) == {"all_gather", "psum"}
    assert "all_gather=1" in repr(report)


def test_the_counter_can_fail():
    """Meta-test: an extra collective, a wider one and a wrong axis each change what is counted."""
    right = collectives(mapped(lambda x: lax.psum(x, "tp"), P("dp", "tp"), P("dp")), X)
    twice = collectives(mapped(lambda x: lax.psum(jnp.sin(lax.psum(x, "tp")), "dp"), P("dp", "tp"), P()), X)
    other = collectives(mapped(lambda x: lax.psum(x, "dp"), P("dp", "tp"), P(None, "tp")), X)
    wider = collectives(mapped(lambda x: lax.psum(x, ("dp", "tp")), P("dp", "tp"), P()), X)
    for wrong in (twice, other, wider):
        assert wrong != right
        assert wrong.total_bytes != right.total_bytes
    assert twice.counts == {"psum": 2}
