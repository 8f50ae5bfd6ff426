"""Collectives over every layout: what they complete, join and divide agrees with the numbers of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import spmd
from spmd.checker._dataflow import walk_closed
from spmd.checker._simulator import held_number, simulate
from tests.checker.harness import AXES, Inside, is_known, mesh, parted, seen, split, trace, varying
from tests.sampler import share

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
LAYOUTS = ("a b", "a/dp b", "a b/tp", "a/dp b/tp", "a/tp/dp b", "a/dp/tp b", "a b/dp/tp")


COMPLETES = {"max": "pmax", "min": "pmin", "any": "pmax", "all": "pmin"}


def gathered(axis, dim):
    return lambda x: lax.all_gather(x, axis, axis=dim, tiled=True)


def exchanged(axis, to, start):
    return lambda x: lax.all_to_all(x, axis, to, start, tiled=True)


def axes_of(layout: str) -> list[tuple[str, ...]]:
    return [tuple(word.split("/")[1:]) for word in layout.split()]


@pytest.mark.parametrize("layout", share(LAYOUTS))
def test_gathers_and_exchanges(layout):
    """The innermost axis of a dimension can be taken away; then the dimension is whole, or divided by the others."""
    cases = [(axis, dim) for dim, axes in enumerate(axes_of(layout)) for axis in axes]
    inner = [(axis, dim) for axis, dim in cases if axes_of(layout)[dim][-1] == axis]
    outer = [case for case in cases if case not in inner]
    body = lambda x: [f(x) for axis, dim in inner for f in (gathered(axis, dim), exchanged(axis, 1 - dim, dim))]
    found = seen(body, layout, args=(X,)) if inner else None
    for (axis, dim), one in zip(inner, parted(found, [2] * len(inner)), strict=True) if inner else ():
        assert one.agree() == 2
        assert axis not in one.states[0].axes and one.axes[1][1 - dim][-1] == axis
    assert found is None or found.kinds == []
    for axis, dim in outer:  # in another order than they were cut
        one = seen(gathered(axis, dim), layout, args=(X,))
        assert axis not in one.states[0].axes
        if is_known(one.states[0]):  # runs of blocks, as the numbers say, and not the dimension in order
            assert len(one.states[0].dims[dim]) > 1


def test_blocks_out_of_order_are_told_when_they_are_joined():
    body = lambda x: lax.all_gather(lax.all_gather(x, "dp", tiled=True), "tp", tiled=True)
    assert seen(body, "a/dp/tp b", args=(X,)).kinds == ["order"]
    right = lambda x: lax.all_gather(lax.all_gather(x, "tp", tiled=True), "dp", tiled=True)
    found = seen(right, "a/dp/tp b", args=(X,))
    assert found.kinds == [] and found.agree() == 1


@pytest.mark.parametrize("kind", share(["max", "min", "any", "all"]))
def test_what_was_done_to_a_piece_is_completed_by_its_own_reduction(kind):
    piece = {"max": jnp.max, "min": jnp.min, "any": lambda x, d: (x > 1).any(d), "all": lambda x, d: (x > -9).all(d)}
    reduced = lambda how: lambda x: getattr(lax, how)(piece[kind](x, 0).astype("float32"), "dp")
    found = seen(reduced(COMPLETES[kind]), "a/dp b", args=(X,))
    assert found.kinds == [] and found.agree() == 1
    other = {"pmax": "pmin", "pmin": "pmax"}[COMPLETES[kind]]
    for how in (other, "psum"):
        assert seen(reduced(how), "a/dp b", args=(X,)).kinds == ["pending"], how


def test_sums_of_parts_and_of_copies():
    found = seen(lambda x: lax.psum(x.sum(0), "dp"), "a/dp b", args=(X,))
    assert found.kinds == [] and found.agree() == 1
    assert seen(lambda x: lax.psum(x, "dp"), "a b", args=(X,)).kinds == ["copies"]
    assert seen(lambda x: lax.pmean(x, "dp"), "a b", args=(X,)).kinds == ["copies"], "numbers know that it is a mean"
    assert seen(lambda x: lax.psum(jnp.ones(()), "dp"), "a b", args=(X,)).kinds == [], "devices may be counted"
    assert seen(lambda x: lax.pmax(x.sum(0), "dp"), "a/dp b", args=(X,)).kinds == ["nonlinear"]


def test_blocks_of_a_sum_and_of_a_whole():
    scattered = lambda x: lax.psum_scatter(x.sum(0), "dp", tiled=True)
    found = seen(scattered, "a/dp b", args=(X,))
    assert found.kinds == [] and found.agree() == 1 and found.axes[0][0] == ("dp",)
    own = seen(lambda x: split(x, "tp", 0, lax.axis_size("tp")), "a b", args=(X,))
    assert own.agree() == 1 and own.axes[0][0] == ("tp",)


def test_another_devices_block_is_unknown_and_equal_values_stay_equal():
    perm = lambda pairs: lambda x: lax.ppermute(varying(x, "dp"), "dp", pairs(lax.axis_size("dp")))
    ring = perm(lambda n: [(i, (i + 1) % n) for i in range(n)])
    found = seen(ring, "a/dp b", args=(X,))
    assert not is_known(found.states[0]) and found.states[0].different == {"dp"}
    assert seen(ring, "a b/tp", args=(X,)).agree() == 1
    some = seen(perm(lambda n: [(0, n - 1)]), "a b", args=(X,))
    assert "dp" in some.states[0].different, "whoever gets nothing has zeros"


def test_groups_leave_groups_different():
    body = lambda x: spmd.per_shard("groups")(lambda x: lax.psum(x, "tp", axis_index_groups=[[0, 1], [2, 3]]))(x)
    try:
        found = seen(body, "a b/tp", args=(X,))
    except (NotImplementedError, ValueError, TypeError):
        return  # versions of JAX that refuse groups in a typed shard_map
    assert "tp" in found.states[0].different


def test_indices_differ_along_their_axis():
    found = seen(lambda x: [lax.axis_index(axis) for axis in AXES], "a b", args=(X,))
    assert [state.axes for state in found.states] == [{"dp"}, {"tp"}]
    assert not any(state.pending for state in found.states)


def test_rows_that_travel_without_gaps_are_unknown():
    """ragged_all_to_all has five more operands than results, and CPUs cannot run it: it is only traced."""

    @spmd.kernel("a/dp b, n -> a/dp b", mesh=spmd.make_mesh(dp=2))
    def body(x, n):
        sizes = varying(n, "dp")
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), sizes, sizes, sizes, sizes, axis_name="dp")

    spmd.check(body, X, np.array([4, 4], np.int32))


TERM = X[:8, :8]
unheard_of = Primitive("unheard_of")
unheard_of.def_abstract_eval(lambda x: x)


def walked(body):
    """A walk over a body of two arrays whose product is a sum over dp."""
    walk = Inside("kernel", AXES)
    listed = lambda x, w: [varying(y)[None] for y in jax.tree.leaves(body(x @ w))]
    walk_closed(walk, trace(listed, P(None, "dp"), P("dp"), args=(TERM, TERM)))
    return walk.outputs[-1][1], [one.kind for one in walk.findings]


WAYS = {
    "untiled exchange": lambda y: lax.all_to_all(y.reshape(4, 2, 8), "tp", 0, 0),
    "exchange of copies": lambda y: lax.all_to_all(y, "tp", 0, 0, tiled=True),
    "gather in groups": lambda y: lax.all_gather(y, "tp", axis_index_groups=[[0, 1], [2, 3]]),
    "untiled scatter": lambda y: lax.psum_scatter(y.reshape(4, 16), "tp"),
    "no rule": unheard_of.bind,
}


@pytest.mark.parametrize("name", WAYS)
def test_what_no_rule_knows_keeps_a_term_a_term(name):
    """Along another axis, or where nobody knows what was done to it. The sum completes it all the same."""
    assert walked(lambda y: lax.psum(jnp.tanh(WAYS[name](y)), "dp"))[1] == ["nonlinear"]
    [state], kinds = walked(lambda y: lax.psum(WAYS[name](y), "dp"))
    assert kinds == [] and not state.partial and "dp" not in state.axes


def test_what_no_rule_knows_keeps_what_was_done_to_a_piece():
    walk = Inside("kernel", AXES)
    walk_closed(walk, trace(lambda x: unheard_of.bind(jnp.sort(x, 0)), P("dp"), args=(TERM,)))
    assert {(p.kind, p.axis) for p in walk.outputs[-1][1][0].pending} == {("sort", "dp")}


def test_what_one_device_sends_to_all_is_equal():
    """JAX has it for GPUs. Here it is interpreted."""

    def body(x):
        return [f(lax.pbroadcast(x, ("tp",), 2)) for f in (lambda y: y, lambda y: lax.pbroadcast(y, ("dp", "tp"), 5))]

    made = {"mesh": mesh(), "in_specs": P("dp", "tp"), "out_specs": P("dp", "tp")}
    jaxpr = jax.make_jaxpr(jax.shard_map(body, **made))(TERM)
    one, both = simulate(jaxpr, [held_number(TERM)], 10**6).outs
    blocks = TERM.reshape(2, 4, 4, 2)
    np.testing.assert_array_equal(one.reshape(2, 4, 4, 2), np.broadcast_to(blocks[:, :, 2:3], blocks.shape))
    np.testing.assert_array_equal(both.reshape(2, 4, 4, 2), np.broadcast_to(blocks[1:, :, 2:3], blocks.shape))
    walk = Inside("kernel", AXES)
    walk_closed(walk, jaxpr)
    states = walk.outputs[-1][1]
    assert [state.axes for state in states] == [{"dp"}, set()] and walk.findings == []


def test_a_term_that_is_sent_to_all_is_no_sum():
    assert walked(lambda y: lax.pbroadcast(y, ("dp",), 0))[1] == ["nonlinear"]


def test_a_sum_that_is_begun_is_one_when_it_is_done():
    """The newest JAX has asynchronous collectives."""
    if not hasattr(lax, "psum_scatter_start"):
        return
    begun = lambda y: lax.psum_scatter_start(y, "dp", scatter_dimension=0, tiled=True).done()
    right = spmd.kernel("a b/dp, b/dp c -> a/dp c", mesh=spmd.make_mesh(dp=4))(lambda x, w: begun(x @ w))
    verdict = spmd.check(right, TERM, TERM).verdict  # JAX has no derivative of it
    assert verdict.kind == "tested" and not verdict.unreached and "Gradients are not compared" in str(verdict)
    wrong = spmd.kernel("a b/dp, b/dp c -> a/dp c", mesh=spmd.make_mesh(dp=4))(lambda x, w: begun(jnp.tanh(x @ w)))
    assert [one.kind for one in spmd.check(wrong, TERM, TERM)] == ["nonlinear"]
