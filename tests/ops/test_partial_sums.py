"""What the right side makes of partial sums: read off again by other means, and compared with the simulator's numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd.comm._call import open_call
from spmd.errors import CommunicationError, SpmdError
from spmd.ops._reduce import Landing, factors_by_name, finish, land, right_names
from tests import simulator as sim
from tests.ops.harness import frame, run
from tests.sampler import Sampler, seeds

SIZES = {"dp": 2, "cp": 2, "tp": 2}


def total(x, pattern, landings=None, *, linear=True):
    """The sum over the names that the right side lacks, by these functions alone."""
    call = open_call("total", pattern, {}, arrays=(x,), arrow=True, example='total(x, "b/dp d -> d")')
    operand = call.operand(x)
    have = factors_by_name(operand)
    names = right_names(call, call.pattern.outputs[0], have)
    gone = [name for name in have if name not in names]
    partial = {axis: f"{name} is summed" for name in gone for axis in have[name].axes}
    landing = land(call, have, partial, names, linear=linear)
    if landings is not None:
        landings.append(landing)
    with call.scope():
        y = operand.x.sum(tuple(i for i, name in enumerate(have) if name in gone))
        order = [name for name in have if name not in gone]
        return call.result(finish(y.transpose([order.index(name) for name in names]), landing))


def draw(seed: int) -> tuple[str, Landing]:
    """A pattern, and what must become of its partial axes."""
    sampler = Sampler(seed)
    rng = sampler.rng
    source = sampler.layout("a b c d", SIZES)
    dims = {name: list(axes) for ((name, axes),) in sim.read(source).dims}
    kept = [str(name) for name in rng.permutation(list(dims))[: rng.integers(0, 4)]]
    after, left, sums = {name: dims[name].copy() for name in kept}, [], []
    for axis in (axis for name in dims if name not in kept for axis in dims[name]):
        where = sampler.choice(["sum", "scatter", "leave"])
        if where == "scatter" and kept:
            after[str(sampler.choice(kept))].append(axis)
        else:
            (left if where == "leave" else sums).append(axis)
    mark = f" {{U:{','.join(axis for axis in SIZES if axis in left)}}}" if left else ""
    target = (" ".join("/".join((name, *after[name])) for name in kept) + mark).strip() or "scalar"
    scattered = [(i, tuple(after[name][len(dims[name]) :])) for i, name in enumerate(kept)]
    in_order = lambda axes: tuple(axis for axis in SIZES if axis in axes)
    wanted = Landing(tuple((i, axes) for i, axes in scattered if axes), in_order(sums), in_order(left))
    return f"{source} -> {target}", wanted


@pytest.mark.parametrize("seed", seeds())
def test_each_partial_axis_goes_where_the_right_side_says(seed):
    pattern, wanted = draw(seed)
    source, target = pattern.split(" -> ")
    x = Sampler(seed).array((8, 8, 8, 8), "int32")
    keep = [name.partition("/")[0] for name in target.partition("{")[0].replace("scalar", "").split()]
    whole = np.einsum(x, [0, 1, 2, 3], ["abcd".index(name) for name in keep])
    for mode in ("explicit", "reference"):
        landings = []
        out = run(lambda x, found=landings: total(x, pattern, found), SIZES, [source], target, mode)(x)
        np.testing.assert_array_equal(out, whole)
        assert set(landings) == {wanted if mode == "explicit" else Landing((), (), ())}, "whole arrays have no parts"
    assert set(wanted.all_axes).isdisjoint(wanted.left)


REFUSED = {
    "it would gather": ("a/dp b/tp -> a", "Gather dp in a line of its own"),
    "an axis in front": ("a/dp b/tp -> a/tp/dp", "at the end of a dimension only"),
    "nothing is partial there": ("a/dp b/tp -> a/dp/cp", "That is a split"),
    "another name has the axis": ("a b/tp c/cp -> a/tp b", "it divides b on the left. That is a relayout"),
    "a mark that nothing made": ("a/dp b/tp -> a/dp {U:cp}", "leave cp out of the mark"),
    "a mark of copies": ("a/dp b/tp -> a/dp {R:tp}", "made by defer"),
    "a name from nowhere": ("a/dp b/tp -> a/dp e", "e is on the right and not on the left"),
    "dimensions that are kept": ("a/dp ... -> a/dp", "write ... on the right too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_is_refused_with_what_it_is(name):
    pattern, words = REFUSED[name]
    rank = pattern.partition(" ->")[0].count(" ") + 1
    with frame(SIZES, "explicit").enter(), pytest.raises(SpmdError) as caught:
        total(jnp.zeros((4,) * rank), pattern)
    assert words in str(caught.value)


def test_parts_of_what_is_not_linear_may_not_be_left():
    with frame(SIZES, "explicit").enter(), pytest.raises(CommunicationError, match="do not add up"):
        total(jnp.zeros((4, 4)), "a/dp b/tp -> a/dp {U:tp}", linear=False)
