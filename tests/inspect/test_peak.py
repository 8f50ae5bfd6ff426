"""The memory that a trace tells: small programs counted by hand, and the transformer against what is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import spmd
from tests.benchmarks.memory import BOUNDS, PROGRAMS, QUICK, compared, example, same_order
from tests.conftest import FULL_CASES, case_count
from tests.sampler import rare

X = jax.ShapeDtypeStruct((16, 16), "float32")
ONE = 16 * 16 * 4
FOUR = np.ones((4, 16, 16), "float32")


def standing(fn, *args) -> tuple[int, int]:
    """The most arrays of the size of X that stand at one time, and the same if nothing is fused."""
    found = spmd.explain(fn, *args, compiled=False).memory
    return found.estimated / ONE, found.unfused / ONE


def product_chain(x):
    """A product needs its operand whole: while one is computed, its operand and its result stand, one of the two where
    the result of the last will be."""
    return (((x @ x) @ x) @ x) @ x


def kept_to_the_end(x):
    """The first product stands until the last line, beside the operand and the result of a product, one of them where
    the result will be."""
    y = x @ x
    return ((y @ x) @ x) @ x + y


def a_chain(x):
    """Three steps of elementwise work are one pass from the argument to the result."""
    return jnp.sin(x * 2 + 1)


def a_chain_for_a_product(x):
    """The product needs it whole."""
    return jnp.sin(x * 2 + 1) @ x


def two_readers_of_a_dear_chain(x):
    """It is not computed twice, and each reduction needs its operand whole."""
    y = jnp.exp(x)
    return y.sum(0), (y * 3).max()


def two_readers_of_a_cheap_chain(x):
    """It is computed twice. The operand of the product stands where the result will be, beside that of the product."""
    y = x + 1
    return (y * 2) @ x + y


def a_reduction(x):
    """It needs its operand whole."""
    return (x * 2 + 1).sum(0)


def groups_of_rows(x):
    """A product whose rows belong to four groups reads a copy of the rows for each group."""
    return lax.ragged_dot(x, FOUR, jnp.full(4, 4)).sum()


def ready_together(x):
    """The four products are ready at once. They run before what reads them, so their operands stand together."""
    return [((x + i) @ x) @ x[0] for i in range(4)]


def one_after_another(x):
    """Each product waits for the one before."""
    y = x
    for i in range(4):
        y = (y + i) @ x
    return y @ x[0]


def a_branch_of_two(x):
    """One of them runs. From 0.12 on it may write where its operand was."""
    return lax.cond(x[0, 0] > 0, lambda: product_chain(x), lambda: product_chain(x + 1))


def a_loop_of_one_round(x):
    """It is no loop: what it would stack is the one value."""
    return lax.scan(lambda y, _: (y @ x, y @ x), x, length=1)[1].sum()


def dimensions_of_one(x):
    """To move them or to sum over them moves nothing."""
    y = (x @ x)[None].transpose(1, 0, 2).sum(1)
    return y @ x


def residuals(x):
    """What each of five rounds keeps for the backward pass stands until that is over."""

    def loss(w):
        return lax.scan(lambda y, _: (jnp.sin(y @ w), None), x, length=5)[0].sum()

    return jax.grad(loss)(x)


@pytest.mark.parametrize(
    ("fn", "fused", "unfused"),
    [
        (product_chain, 1, 1),
        (kept_to_the_end, 2, 2),
        (a_chain, 0, 1),
        (a_chain_for_a_product, 1, 1),
        (two_readers_of_a_dear_chain, 2, 2),
        (two_readers_of_a_cheap_chain, 1, 2),
        (a_reduction, 1, 2),
        (groups_of_rows, 5, 5),
        (ready_together, 5, 5),
        (one_after_another, 2, 2),
        (a_branch_of_two, *[2 if jax.__version_info__ >= (0, 12) else 3] * 2),
        (a_loop_of_one_round, 1, 1),
        (dimensions_of_one, 1, 1),
    ],
)
def test_arrays_stand_as_long_as_they_are_read(fn, fused, unfused):
    found = standing(fn, X)
    assert found == pytest.approx((fused, unfused), abs=0.2)  # vectors are a sixteenth


def test_a_result_in_a_donated_argument_leaves_no_room_for_others():
    def step(x):
        return x - ((x @ x) @ x) @ x

    args = (jax.ShapeDtypeStruct((256, 256), "float32"),)
    own, donated = (spmd.explain(jax.jit(step, donate_argnums=to), *args, compiled=False).memory for to in ((), (0,)))
    assert own.peak == donated.peak == 3 * 4 * 256 * 256
    assert donated.aliased == 4 * 256 * 256 and donated.estimated == own.estimated + donated.aliased


def test_a_loop_keeps_its_residuals():
    kept, more = standing(residuals, X)
    assert 2 * 5 <= kept <= 2 * 5 + 6  # y and cos(y @ w) of each round, and what a round works on
    assert kept <= more


def test_a_loop_needs_no_more_for_more_rounds_without_a_backward_pass():
    def run(length):
        return standing(lambda x: lax.scan(lambda y, _: (jnp.tanh(y @ x), None), x, length=length)[0], X)

    assert run(3) == run(300)


def test_what_is_stacked_stands_until_it_is_written():
    def body(x, y):
        z = y @ x
        return ((z @ x) @ x) @ x, z

    kept = standing(lambda x: lax.scan(lambda y, _: body(x, y), x, length=5)[1].sum(), X)
    assert kept == pytest.approx((5 + 3, 5 + 3), abs=0.2)  # the carry, and the operand and the result of a product


def test_each_device_holds_its_shards(mesh):
    @spmd.kernel("b/dp d/tp, d f/tp -> b/dp f/tp", mesh=mesh)
    def product(x, w):
        return spmd.einsum(spmd.all_gather(x, "b/dp d/tp -> b/dp d"), w, "b/dp d, d f/tp -> b/dp f/tp")

    args = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 256), (256, 512)))
    found = spmd.explain(product, *args, compiled=False).memory
    assert found.estimated == 32 * 256 * 4  # the gathered copy
    assert found.peak == found.arguments + found.outputs + found.estimated <= found.cautious


# -------------------- what is not among the arguments, and what is not on the device


def kept_in_loops(destination):
    """The gradient of five layers, which keep `h` on the device, or offload it."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["h"]}
    offload = jax.checkpoint_policies.save_and_offload_only_these_names
    policy = jax.checkpoint_policies.save_only_these_names("h")
    if destination:
        policy = offload(**names, offload_src="device", offload_dst=destination)

    def layers(w, x):
        layer = lambda h, w: (jnp.tanh(checkpoint_name(h, "h") @ w), None)
        return lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()

    return jax.grad(layers)


@pytest.mark.parametrize("layout", ["", "l d e, b/dp/tp d -> l d e"])
def test_what_is_offloaded_stands_on_the_host(layout, mesh):
    rows, layers, d = 512, 5, 16  # so that rows are most of what stands

    def memory(destination):
        fn = kept_in_loops(destination)
        fn = spmd.kernel(layout, mesh=mesh, check="off")(fn) if layout else fn
        args = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((layers, d, d), (rows, d)))
        return spmd.explain(fn, *args, compiled=False).memory

    stack = layers * rows * d * 4 // (mesh.size if layout else 1)
    kept, offloaded = memory(""), memory("pinned_host")
    assert kept.host == 0 and stack <= offloaded.host <= stack * (1 + 1 / layers)
    assert kept.peak - offloaded.peak == pytest.approx(stack, rel=0.2)
    assert offloaded.arguments == kept.arguments


def test_arguments_on_the_host_are_not_on_the_device():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.device_put(np.ones((64, 64), np.float32), where)
    found = spmd.explain(jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2), x, compiled=False).memory
    assert (found.arguments, found.outputs, found.host) == (0, x.nbytes, x.nbytes)


CLOSED = np.ones((64, 32), np.float32)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_a_device_holds_what_a_body_closes_over(make, times, mesh):
    """Once, however often it is used, in both views."""
    closed = make(CLOSED)
    body = lambda x: sum((x @ closed for _ in range(times)), jnp.zeros((1, 1)))
    kernel = spmd.kernel("b/dp d -> b/dp f", mesh=mesh)(body)
    x = jax.ShapeDtypeStruct((8, 64), "float32")
    for compiled in (None, False):
        found = spmd.explain(kernel, x, compiled=compiled).memory
        assert found.constants == CLOSED.nbytes
        assert found.total - found.constants == found.arguments + found.outputs + (found.temporaries or 0)
        assert found.peak == found.arguments + found.constants + found.outputs + found.estimated
    assert "constants" in str(spmd.explain(kernel, x, compiled=False))


def test_a_constant_that_is_divided_lies_in_blocks(mesh):
    closed = spmd.shard(CLOSED, "d/tp f", mesh=mesh)
    fn = lambda x: jax.lax.with_sharding_constraint(x @ closed, jax.NamedSharding(mesh, jax.P()))
    found = spmd.explain(jax.jit(fn), jax.ShapeDtypeStruct((8, 64), "float32"), compiled=False).memory
    assert found.constants == CLOSED.nbytes // 4


@pytest.fixture
def optimized():
    """The compiler as users have it: the other tests compile with most optimisations off."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", PROGRAMS if case_count() > FULL_CASES else QUICK[:1])
@rare
def test_the_transformer_needs_what_is_compiled(name):
    found = compared(example(), name, jax.devices("cpu"))
    assert BOUNDS[0] <= found.ratio <= BOUNDS[1]
    assert found.cautious >= found.peak
    assert found.written > 0


def test_the_order_of_figures():
    assert same_order([(1, 10), (2, 20), (3, 30)]) == 1 and same_order([(1, 30), (2, 20), (3, 10)]) == 0
