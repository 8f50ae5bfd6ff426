"""The schedule of a pipeline against a simulation, and its pictures."""

import xml.etree.ElementTree as ET

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


def test_both_passes_in_a_picture():
    schedule = parallel.pipeline_schedule(2, 3, order="1f1b")
    assert str(schedule) == "\n".join([
        "2 stages, 3 micro-batches, 1f1b: 8 ticks, 6 of them at work, bubble 0.333",
        "tick      0   1   2   3   4   5   6   7",
        "stage 0  F0   .  F1  B0  F2  B1   .  B2",
        "stage 1   .  F0  B0  F1  B1  F2  B2   .",
    ])  # fmt: skip
    assert "F0.1" in str(parallel.pipeline_schedule(2, 2, 2, "1f1b"))


def test_pictures():
    schedule = parallel.pipeline_schedule(2, 3, 2)
    assert str(schedule) == "\n".join([
        "2 stages, 3 micro-batches, 2 rounds: 7 ticks, 6 of them at work, bubble 0.167",
        "tick       0    1    2    3    4    5    6",
        "stage 0  0.0  1.0  2.0  0.1  1.1  2.1    .",
        "stage 1    .  0.0  1.0  2.0  0.1  1.1  2.1",
    ])  # fmt: skip
    drawn = ET.fromstring(schedule.svg)
    texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("2.1") == 2 and len(list(drawn.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 * 6, (
        "a card, and what is at work"
    )
    assert texts.count(".") == 2
    assert max(map(len, schedule.text(30).splitlines())) <= 30
    assert schedule._repr_svg_() == schedule.svg
