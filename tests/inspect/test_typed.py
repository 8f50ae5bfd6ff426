"""What the user wrote by other means than a verb: types of Explicit axes, asynchronous scatters, partition rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from spmd import explain
from tests.inspect.harness import DEVICES

TYPED = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def at(layout, *shape, mesh=TYPED):
    return jax.ShapeDtypeStruct(shape, "float32", sharding=spmd.Layout(layout).sharding(mesh))


ARGS = at("b/dp d", 16, 32), at("d f/tp", 32, 64), at("f/tp d", 64, 32)


def mlp(x, w, v):
    h = jnp.tanh(x @ w)
    y = jnp.einsum("bf,fd->bd", h, v, out_sharding=P("dp", None))
    return jax.sharding.reshard(y, P(None, None))


def test_explicit_axes_are_somebodys_code():
    with jax.set_mesh(TYPED):
        report = explain(jax.jit(mlp), *ARGS)
    assert report.unwritten == ()
    assert {(one.kind, one.axes) for one in report.collectives} == {("psum", ("tp",)), ("all_gather", ("dp",))}
    notes = {one.kind: one.note for one in report.collectives}
    assert notes["psum"] == "dot_general adds up what is divided over tp, and its out_sharding= has no partial sum"
    assert notes["all_gather"] == "a reshard asks for it"
    assert "nothing: every compiled collective" in str(report) and "moved to enter a kernel" not in str(report)


def test_and_so_are_the_gradients_that_they_ask_for():
    with jax.set_mesh(TYPED):
        report = explain(jax.grad(lambda *args: (mlp(*args) ** 2).sum(), argnums=(1, 2)), *ARGS)
    assert report.unwritten == ()
    assert next(one for one in report.collectives if one.written and one.phase == "backward").kind == "psum"


def test_without_devices_they_are_planned_as_written():
    mesh = spmd.make_mesh(dp=2, tp=4, abstract=True)
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    args = at("b/dp d", 16, 32, mesh=mesh), at("d f/tp", 32, 64, mesh=mesh), at("f/tp d", 64, 32, mesh=mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        report = explain(mlp, *args)
        spmd.testing.assert_collectives(mlp, args, {"psum": {"tp": 1}, "all_gather": {"dp": 1}}, view="planned")
    assert report.unwritten == () and [one.kind for one in report.collectives] == ["psum", "all_gather"]


def test_check_says_that_the_types_know():
    with jax.set_mesh(TYPED):
        found = spmd.check(mlp, *ARGS)
    assert not found and str(found) == "no findings: typed. JAX's types say how each value lies, and complete its sums"
    assert "/tp" in str(found.source())


def test_a_partial_sum_that_a_reshard_takes():
    def late(x, w):
        y = jnp.einsum("bf,fd->bd", x, w, out_sharding=P("dp", None, unreduced={"tp"}))
        return jax.sharding.reshard(y, P("dp", None))

    with jax.set_mesh(TYPED):
        [one] = explain(jax.jit(late), at("b/dp f/tp", 16, 64), at("f/tp d", 64, 32)).collectives
    assert one.written and one.note == "dot_general adds up what is divided over tp, and a reshard takes the sum"


typed_tanh = spmd.kernel("b/dp d -> b/dp d", mesh=TYPED)(jnp.tanh)


def product(x, w):
    return jnp.einsum("bf,fd->bd", x, w, out_sharding=P("dp", None))


PRODUCT = at("b/dp f/tp", 16, 64), at("f/tp d", 64, 32)


@pytest.mark.parametrize("compiled", [None, False])
def test_beside_a_kernel_they_are_somebodys_code_too(compiled):
    """No plan is asked for where a kernel divides a part of the program."""
    with jax.set_mesh(TYPED):
        report = explain(jax.jit(lambda x, w: typed_tanh(product(x, w))), *PRODUCT, compiled=compiled)
        grad = jax.grad(lambda w, x: typed_tanh(product(x, w)).sum())
        back = explain(jax.jit(grad), *PRODUCT[::-1], compiled=compiled)
        three = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda i, y: typed_tanh(product(x, w)) + y, product(x, w)))
        loop = explain(three, *PRODUCT, compiled=False)
    [one] = report.collectives
    assert (one.kind, one.axes, one.bytes, one.text) == (
        "psum",
        ("tp",),
        8 * 32 * 4 * 3 // 2,
        "out_sharding= of a product",
    )
    assert report.unwritten == back.unwritten == ()
    assert {(one.axes, one.phase) for one in back.collectives} == {(("tp",), "forward"), (("dp",), "backward")}
    assert sum(one.count for one in loop.collectives) == 4


def test_beside_a_kernel_a_reshard_is_somebodys_code_too():
    with jax.set_mesh(TYPED):
        report = explain(jax.jit(lambda x: typed_tanh(jax.sharding.reshard(x * 2, P("dp", None)))), PRODUCT[0])
    [one] = report.collectives
    assert one.written and (one.kind, one.axes) == ("all_gather", ("tp",)) and one.text.startswith("reshard: ")


@pytest.mark.parametrize("compiled", [None, False])
def test_the_end_of_auto_axes_asks_for_sums(compiled):
    """A gather, a product of three and their gradients have no `out_sharding=` of their own in the jaxpr."""
    table, ids = at("v/tp d", 64, 16), jax.ShapeDtypeStruct((8,), "int32", sharding=NamedSharding(TYPED, P("dp")))
    rows = lambda t, i: t.at[i].get(out_sharding=P("dp", None))
    three = lambda x, w: jnp.einsum("bf,fd,de->be", x, w, jnp.ones((32, 4)), out_sharding=P("dp", None))
    with jax.set_mesh(TYPED):
        found = [
            explain(jax.jit(rows), table, ids, compiled=compiled),
            explain(jax.jit(jax.grad(lambda t, i: rows(t, i).sum())), table, ids, compiled=compiled),
            explain(jax.jit(three), *PRODUCT, compiled=compiled),
        ]
    for report, phase in zip(found, ("forward", "backward", "forward"), strict=True):
        [one] = report.collectives
        assert (
            one.written and one.phase == phase and one.note.endswith("the out_sharding= around it has no partial sum")
        )


def test_a_sum_that_no_type_asks_for_stays_the_compilers():
    with jax.set_mesh(TYPED):
        [one] = explain(jax.jit(lambda x: x.sum(1)), PRODUCT[0]).collectives
    assert not one.written


@custom_partitioning
def row_sums(x):
    return x.sum(1)


row_sums.def_partition(
    partition=lambda mesh, args, result: (
        mesh,
        lambda x: jax.lax.psum(x.sum(1), "tp"),
        NamedSharding(mesh, P("dp")),
        (NamedSharding(mesh, P("dp", "tp")),),
    ),
    infer_sharding_from_operands=lambda mesh, args, result: NamedSharding(mesh, P("dp")),
    sharding_rule="i j -> i",
)


def test_a_partition_rule_is_somebodys_code():
    x = at("b/dp d/tp", 8, 16, mesh=DEVICES)
    report = explain(jax.jit(lambda x: row_sums(x) * 2), x)
    [one] = report.collectives
    assert (one.kind, one.axes, one.written) == ("psum", ("tp",), True)
    assert one.text == "the partition rule of a custom_partitioning" and report.unwritten == ()


@pytest.mark.skipif(not hasattr(jax.lax, "psum_scatter_start"), reason="JAX 0.12 has it")
def test_an_asynchronous_scatter():
    def shards(x):
        going = jax.lax.psum_scatter_start(x, "tp", scatter_dimension=0, tiled=True)
        return jnp.sin(x), going.done()

    fn = jax.jit(jax.shard_map(shards, mesh=DEVICES, in_specs=P(None, "tp"), out_specs=(P(None, "tp"), P("tp"))))
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    report = explain(fn, x)
    [one] = report.collectives
    assert (one.kind, one.axes, one.bytes, one.written, report.unwritten) == ("psum_scatter", ("tp",), 96, True, ())
    assert not spmd.check(fn, x)
    np.testing.assert_allclose(fn(np.ones((16, 8), np.float32))[1], np.full((16, 2), 4.0))


def test_a_ragged_all_to_all():
    def shards(x):
        one, at = jnp.ones((4,), jnp.int32), jnp.arange(4, dtype=jnp.int32)
        return jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), at, one, at, one, axis_name="tp")

    mesh = spmd.make_mesh(dp=2, tp=4, abstract=True)
    fn = jax.jit(jax.shard_map(shards, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
    [one] = explain(fn, jax.ShapeDtypeStruct((16, 8), "float32")).collectives
    assert (one.kind, one.axes, one.written) == ("ragged_all_to_all", ("tp",), True)
