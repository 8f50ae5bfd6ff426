"""The places that devices have for what comes and what they keep, against the formulas of the schedules."""

import itertools

import pytest

from spmd.parallel.schedule import BACKWARD, FORWARD, LOSS, NOTHING, WEIGHTS, PipelineSchedule, Tick, Ticks

SIZES = list(itertools.product((1, 2, 3, 4), (1, 4, 12)))


@pytest.mark.parametrize("order", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_places_of_steps_in_turn(p, m, order):
    """Inputs without the first stage, which has x itself, and with what waits for its forward step."""
    for v in (1, 2):
        if v > 1 and m % p:
            continue
        schedule = PipelineSchedule(p, m, v, order)
        ticks = Ticks.of(schedule)
        assert ticks.table.shape == (schedule.ticks, p, len(Tick._fields))
        if v == 1:
            inputs = p - 1 if order == "1f1b" else 2 * (p - 1)  # and one that comes while others wait
            assert (ticks.inputs, ticks.cotangents) == (max(1, min(inputs, m)), 1)
        assert ticks.inputs <= (v + 1) * p and ticks.cotangents <= p
        done = ticks.table[:, :, 0]
        assert (done == LOSS).sum() == m and (done == BACKWARD).sum() == m * (p * v - 1) == (done == FORWARD).sum()
        assert not (done == WEIGHTS).any()


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_places_where_the_backward_step_is_cut(p, m):
    """At most one micro-batch for each stage is kept, and one thing of each kind is under way."""
    schedule = PipelineSchedule(p, m, 1, "zb-h1")
    ticks = Ticks.of(schedule)
    assert (ticks.kept, ticks.delayed) == (min(p, m), min(p, m))
    assert ticks.inputs <= 2 and ticks.cotangents <= 2
    done = ticks.table[:, :, 0]
    assert [(done == kind).sum() for kind in (LOSS, FORWARD, BACKWARD, WEIGHTS)] == [m, m * (p - 1), m * p, m * p]
    assert (done == NOTHING).sum() == p * (schedule.ticks - 3 * m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_places_of_forward_steps_alone(p, m):
    """An input goes on at once. What is back for its next round waits until all micro-batches have entered."""
    for v in (1, 2):
        ticks = Ticks.of(PipelineSchedule(p, m, v, "forward"))
        assert ticks.inputs == (1 if v == 1 else max(1, m - p + 1))
        assert (ticks.cotangents, ticks.kept, ticks.delayed) == (1, 1, 1)
        done = ticks.table[:, :, 0]
        assert (done == LOSS).sum() == m and (done == FORWARD).sum() == m * (p * v - 1)
        assert not (done == BACKWARD).any() and not (done == WEIGHTS).any()
