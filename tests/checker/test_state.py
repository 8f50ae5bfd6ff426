"""Factors of dimensions as index arithmetic: every way to write, cut, join or hide them against the indices they mean."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from spmd.checker._state import (
    FREE,
    HIDDEN,
    NONE,
    Pending,
    State,
    axes_of_dim,
    emptied,
    ends_of,
    equal_along,
    free,
    hidden,
    hide,
    is_divided,
    is_empty,
    join,
    join_dims,
    normal,
    plain,
    refined,
    size_of,
    unify,
)
from tests.sampler import seeds

COUNTS = {"a": 2, "b": 3}


def indices(factors) -> np.ndarray:
    """Which element of the whole each device holds at each place: dimensions for the devices, then one for the place."""
    devices = [range(n) for n in COUNTS.values()]
    found = []
    for at in itertools.product(*devices):
        where = dict(zip(COUNTS, at, strict=True))
        total = np.zeros(1, int)
        for size, axes in factors:
            block, parts = 0, 1
            for axis in axes if is_divided(axes) else ():
                block, parts = block * COUNTS[axis] + where[axis], parts * COUNTS[axis]
            here = block * size + np.arange(size)
            total = (total[:, None] * size * parts + here).ravel()
        found.append(total)
    return np.array(found)


def draw(rng: random.Random, *, loose: bool = False):
    """Some factors; with `loose`, constant and hidden ones too."""
    axes = (
        rng.sample([("a",), ("b",)], rng.randint(0, 2))
        if rng.random() < 0.8
        else [rng.choice([("a", "b"), ("b", "a")])]
    )
    found = [(rng.choice([1, 2, 3, 4]), one) for one in axes]
    found += [(rng.choice([1, 2, 3]), ()) for _ in range(rng.randint(0, 2))]
    found += [(rng.choice([2, 3]), rng.choice([FREE, HIDDEN])) for _ in range(loose and rng.randint(0, 1))]
    rng.shuffle(found)
    return tuple(found) or ((2, ()),)


@pytest.mark.parametrize("seed", seeds(times=5))
def test_the_canonical_form_means_the_same(seed):
    factors = draw(random.Random(seed))
    dim = normal(factors)
    np.testing.assert_array_equal(indices(dim), indices(factors))
    assert normal(dim) == dim and size_of(dim) == math.prod(n for n, _ in factors)
    assert sorted(axes_of_dim(dim)) == sorted(a for _, axes in factors for a in axes)


def test_equal_dimensions_compare_equal():
    """Two lists of factors that mean the same indices have one canonical form."""
    rng, by_meaning = random.Random(0), {}
    for _ in range(600):
        dim = normal(draw(rng))
        if any(n == 1 for n, axes in dim if is_divided(axes)):
            continue  # blocks of one element may be written in several ways: the rest is unknown, never wrong
        by_meaning.setdefault(indices(dim).tobytes(), set()).add(dim)
    assert len(by_meaning) > 50 and all(len(dims) == 1 for dims in by_meaning.values())


@pytest.mark.parametrize("seed", seeds(times=5))
def test_cut_factors_mean_the_same_and_end_where_they_should(seed):
    rng = random.Random(seed)
    factors = normal(draw(rng))
    total = size_of(factors)
    sizes = [d for d in (2, 3, 4, 6) if total % d == 0]
    sizes = [rng.choice(sizes), 0] if sizes else [total]
    sizes = [sizes[0], total // sizes[0]]
    ends = ends_of(sizes)
    assert ends == [sizes[1], 1]
    cut = refined(factors, ends)
    suffixes = {math.prod(n for n, _ in factors[i:]) for i in range(len(factors) + 1)}
    if cut is None:
        return
    np.testing.assert_array_equal(indices(cut), indices(factors))
    reached = {math.prod(n for n, _ in cut[i:]) for i in range(len(cut) + 1)}
    assert suffixes <= reached and {end for end in ends if end < total} <= reached


def test_a_factor_is_not_cut_across():
    assert refined([(4, ()), (3, ("a",))], [6]) == [(2, ()), (2, ()), (3, ("a",))]
    assert refined([(6, ("a",))], [4]) is None
    assert refined([(6, ("a",))], [2]) == [(3, ("a",)), (2, ())], "the axes stay with the leading part"


@pytest.mark.parametrize("seed", seeds(times=5))
def test_operands_that_agree_hold_the_same_indices(seed):
    rng = random.Random(seed)
    one, two = normal(draw(rng)), normal(draw(rng))
    two = two if size_of(one) == size_of(two) else one
    for other in (two, normal([(size_of(one), ("a",))]), plain(size_of(one))):
        both = unify(one, other)
        if FREE in [axes for _, axes in (*one, *other)]:  # one element, which is constant
            assert both in (one, other)
            continue
        if both is None:
            assert not np.array_equal(indices(one), indices(other)), "certainly another element somewhere"
        elif HIDDEN not in [axes for _, axes in both]:
            np.testing.assert_array_equal(indices(both), indices(one))
            np.testing.assert_array_equal(indices(both), indices(other))


def test_an_empty_dimension_has_no_parts():
    assert refined(hidden(0), [1]) is None
    assert unify(((2, ()), (0, ("a",))), hidden(0)) == hidden(0)


def test_what_is_constant_or_unknown_agrees_with_anything():
    block = normal([(6, ("a",))])
    assert unify(block, free(6)) == unify(free(6), block) == block
    assert unify(block, hidden(6)) == unify(hidden(6), block) == block
    assert unify(plain(6), hidden(6)) == hidden(6)
    assert unify(block, plain(6)) is None
    assert unify(block, plain(6), NONE, frozenset("a")) == block, "the other may be that very block"


def test_a_block_of_one_element_may_have_no_place_in_the_other():
    """Two runs of blocks of one, against two elements: nobody knows, and no walk may fail."""
    assert unify(((2, ()), (1, ("a",))), plain(2)) == hidden(2)
    assert unify(normal([(3, ("a",)), (1, ("b",))]), normal([(3, ("a",))])) == hidden(3)
    assert join_dims(((2, ()), (1, ("a",))), plain(2)) == hidden(2)


@pytest.mark.parametrize("seed", seeds(times=5))
def test_where_two_paths_meet_only_what_is_common_is_known(seed):
    rng = random.Random(seed)
    dims = [normal(draw(rng, loose=True)) for _ in range(2)]
    one, two = dims if size_of(dims[0]) == size_of(dims[1]) else (dims[0], plain(size_of(dims[0])))
    both = join_dims(one, two)
    assert both == join_dims(two, one) and join_dims(one, one) == one and size_of(both) == size_of(one)
    assert join_dims(both, one) == both, "nothing is learned by going there again"
    known = [axes for _, axes in both]
    if HIDDEN not in known and FREE not in known:
        for side in (one, two):
            if FREE not in [axes for _, axes in side]:
                np.testing.assert_array_equal(indices(both), indices(side))


def state(rng: random.Random) -> State:
    axes = ["a", "b"]
    rng.shuffle(axes)
    where = {axis: rng.choice(["dim", "partial", "different", "pending", "equal"]) for axis in axes}
    dims = [plain(6), plain(6)]
    if block := tuple(axis for axis in axes if where[axis] == "dim"):
        dims[rng.randint(0, 1)] = normal([(6, block)])
    of = lambda kind: frozenset(axis for axis in axes if where[axis] == kind)
    pending = frozenset(Pending("max", axis, 0) for axis in of("pending"))
    return State(tuple(dims), of("partial"), of("different"), pending, zero=rng.random() < 0.1)


@pytest.mark.parametrize("seed", seeds(times=5))
def test_an_array_without_elements(seed):
    one = state(random.Random(seed))
    assert not is_empty(one.dims)
    dims = (*one.dims, ((2, ()), (0, ("a",))))
    assert is_empty(dims)
    none = emptied(one._replace(dims=dims))
    assert [size_of(dim) for dim in none.dims] == [size_of(dim) for dim in dims]
    assert not none.axes and all(unify(lies, other) == other for lies, other in zip(none.dims, dims, strict=True))


@pytest.mark.parametrize("seed", seeds(times=5))
def test_joined_states(seed):
    rng = random.Random(seed)
    one, two = state(rng), state(rng)
    both = join(one, two)
    assert join(one, one) == one and (both == join(two, one) or (one.zero and two.zero))
    if not (one.zero or two.zero):
        assert join(both, one) == both, "nothing is learned by going there again"
        assert both.partial <= one.partial & two.partial, "a partial sum on both paths"
    assert one.axes | two.axes <= both.axes, "what may differ on one path may differ"
    assert both.different.isdisjoint(both.partial | {p.axis for p in both.pending})


@pytest.mark.parametrize("seed", seeds(times=5))
def test_equal_along_and_hidden(seed):
    rng = random.Random(seed)
    one = state(rng)
    axes = frozenset(rng.sample(["a", "b"], rng.randint(1, 2)))
    after = equal_along(one, axes)
    assert not after.axes & axes
    assert one.axes - axes <= after.axes, "another axis of that dimension is not forgotten"
    for dim, left in zip(one.dims, hide(one.dims, axes), strict=True):
        assert left == (hidden(size_of(dim)) if axes & set(axes_of_dim(dim)) else dim)
