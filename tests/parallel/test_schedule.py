"""The schedule of a pipeline against a simulation, and its pictures."""

import itertools

import pytest

from spmd import parallel

SIZES = [(p, m, v) for p in (1, 2, 3, 4) for m in (1, 2, 5, 6, 7) for v in (1, 2, 3)]


def simulated(p, m, v):
    """Machines that work on what has come, oldest round first; a round begins when all micro-batches have entered."""
    waiting, running, rows = [(i, 0) for i in range(m)], [None] * p, []
    entered = 0
    while waiting or any(running):
        if waiting and len(rows) >= waiting[0][1] * max(m, p):
            running[0] = waiting.pop(0)
            entered += 1
        rows.append(list(running))
        done = running[-1]
        running = [None, *running[:-1]]
        if done and done[1] + 1 < v:
            waiting.append((done[0], done[1] + 1))
    return rows


@pytest.mark.parametrize(("p", "m", "v"), SIZES)
def test_the_table_is_what_machines_would_do(p, m, v):
    schedule = parallel.pipeline_schedule(p, m, v)
    table = [[schedule.work(tick, stage) for stage in range(p)] for tick in range(schedule.ticks)]
    assert table == [[one and (*one, "F") for one in row] for row in simulated(p, m, v)]
    idle = sum(one is None for row in table for one in row)
    assert schedule.bubble == pytest.approx(idle / (p * m * v))
    if m >= p:
        assert schedule.bubble == pytest.approx((p - 1) / (v * m))


def test_both_passes_in_a_table():
    schedule = parallel.pipeline_schedule(2, 3, order="1f1b")
    assert str(schedule) == "\n".join([
        "2 stages, 3 micro-batches, 1f1b: 8 ticks, 6 of them at work, bubble 0.333",
        "tick      0   1   2   3   4   5   6   7",
        "stage 0  F0   .  F1  B0  F2  B1   .  B2",
        "stage 1   .  F0  B0  F1  B1  F2  B2   .",
    ])  # fmt: skip
    assert "F0.1" in str(parallel.pipeline_schedule(2, 2, 2, "1f1b"))


def test_rounds_and_narrow_terminals():
    schedule = parallel.pipeline_schedule(2, 3, 2)
    assert str(schedule) == "\n".join([
        "2 stages, 3 micro-batches, 2 rounds: 7 ticks, 6 of them at work, bubble 0.167",
        "tick       0    1    2    3    4    5    6",
        "stage 0  0.0  1.0  2.0  0.1  1.1  2.1    .",
        "stage 1    .  0.0  1.0  2.0  0.1  1.1  2.1",
    ])  # fmt: skip
    assert max(map(len, schedule.text(30).splitlines())) <= 30
    assert repr(schedule) == str(schedule)


# -------------------- forward and backward steps in turn, against the formulas of the papers

WHOLE = [(p, m, v) for p, m, v in itertools.product((1, 2, 3, 4), (1, 2, 5, 6, 8), (1, 2, 3)) if v == 1 or m % p == 0]


@pytest.mark.parametrize("order", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("p", "m", "v"), WHOLE)
def test_one_forward_one_backward_against_the_papers(p, m, v, order):
    """Every step once and after what it needs; ticks, bubble and inputs in flight by the formulas."""
    compare_with_the_papers(parallel.pipeline_schedule(p, m, v, order), p, m, v, order)


def compare_with_the_papers(schedule, p, m, v, order):
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


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m, v in WHOLE if v == 1])
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


def test_a_wrong_order_is_noticed():
    """Where a step waits longer than it must, more is kept than the formula says."""
    with pytest.raises(AssertionError):
        compare_with_the_papers(parallel.pipeline_schedule(3, 6, 1, "eager-1f1b"), 3, 6, 1, "1f1b")
