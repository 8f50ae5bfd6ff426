"""Forward and backward steps in turn, against the formulas of the papers."""

import itertools

import pytest

from spmd import parallel
from spmd.parallel import schedule as _timetable

SIZES = [(p, m, v) for p, m, v in itertools.product((1, 2, 3, 4), (1, 2, 5, 6, 8), (1, 2, 3)) if v == 1 or m % p == 0]


@pytest.mark.parametrize("order", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_one_forward_one_backward_against_the_papers(p, m, v, order):
    """Every step once and after what it needs; ticks, bubble and inputs in flight by the formulas."""
    schedule = parallel.pipeline_schedule(p, m, v, order)
    when = {}
    for stage in range(p):
        for tick in range(schedule.ticks):
            if (work := schedule.work(tick, stage)) is not None:
                assert (work, stage) not in when
                when[work, stage] = tick
    assert len(when) == 2 * p * m * v
    layers = [(turn, stage) for turn in range(v) for stage in range(p)]
    for i in range(m):
        forward = [when[(i, turn, "F"), stage] for turn, stage in layers]
        backward = [when[(i, turn, "B"), stage] for turn, stage in reversed(layers)]
        way = [*forward, *backward]
        assert way == sorted(set(way)), "each step after the one before it"
    assert max(when.values()) + 1 == schedule.ticks == 2 * (v * m + p - 1)
    assert schedule.bubble == pytest.approx((p - 1) / (v * m))
    kept = [schedule.in_flight(stage) for stage in range(p)]
    if (v, order) == (1, "1f1b"):
        assert kept == [min(p - stage, m) for stage in range(p)]
    else:
        parts = [{work.part for (work, _), tick in when.items() if tick == t} for t in range(schedule.ticks)]
        assert all(len(one) == 1 for one in parts), (
            "steps of one kind in each tick, so that none waits for a longer one"
        )
        assert kept == [min(2 * (p - stage - 1) + (v - 1) * p + 1, v * m) for stage in range(p)]
    assert parallel.pipeline_schedule(p, m, v).in_flight(0) == v * m


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m, v in SIZES if v == 1])
def test_zero_bubble_against_the_paper(p, m):
    """Every step once and after what it needs; the bubble is that of one third of a step, and p micro-batches are kept."""
    schedule = parallel.pipeline_schedule(p, m, order="zb-h1")
    when = {
        (work, stage): tick
        for stage in range(p)
        for tick in range(schedule.ticks)
        if (work := schedule.work(tick, stage)) is not None
    }
    assert len(when) == 3 * p * m
    for i in range(m):
        forward = [when[(i, 0, "F"), stage] for stage in range(p)]
        backward = [when[(i, 0, "B"), stage] for stage in reversed(range(p))]
        way = [*forward, *backward]
        assert way == sorted(set(way)), "each step after the one before it"
        assert all(when[(i, 0, "W"), stage] > when[(i, 0, "B"), stage] for stage in range(p))
    assert max(when.values()) + 1 == schedule.ticks
    if m >= p:
        assert schedule.bubble == pytest.approx((p - 1) / (3 * m))
    assert [schedule.in_flight(stage) for stage in range(p)] == [min(p, m)] * p


def test_a_wrong_order_is_noticed(monkeypatch):
    """With all forward steps first, more is kept than the formula says."""
    plain = _timetable._ORDERS["1f1b"]
    late = lambda *where: sorted(plain(*where), key=lambda work: work.part == "B")
    monkeypatch.setitem(_timetable._ORDERS, "1f1b", late)
    _timetable.timetable.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_one_forward_one_backward_against_the_papers(3, 6, 1, "1f1b")
    finally:
        monkeypatch.undo()
        _timetable.timetable.cache_clear()
