"""Timetables of forward and backward steps in turn: 1F1B, for one stage on each device or several, and ZB-H1.

A device waits for its neighbours in each tick, so that a tick takes the time of the longest step in it. Ticks with
steps of one length waste nothing: those of an eager 1F1B, which have forward or backward steps alone, and of ZB-H1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Work(NamedTuple):
    """One step of a stage: its micro-batch, its round, and "F" for a forward or "B" for a backward step.

    Where the backward step is cut in two, "B" is the gradient of the input, and "W" are those of the weights.
    """

    microbatch: int
    round: int
    part: str


Step = tuple[Work, int]  # and its stage


@functools.lru_cache(maxsize=64)
def timetable(stages: int, microbatches: int, repeats: int, order: str) -> tuple[dict[int, Work], ...]:
    """For each stage, its work by tick.

    A stage takes its steps in the order of `_ORDERS`, each as soon as the step before it is done. Then each forward
    step is put off until the next step needs it, so that no input is kept longer than it must be. Several rounds keep
    as many inputs in the eager order, too.
    """
    if order == "eager-1f1b" or (order == "1f1b" and repeats > 1):
        done = _eager(stages, microbatches, repeats)
    else:
        done = _put_off(_in_order(stages, microbatches, repeats, order), stages, repeats)
    table: list[dict[int, Work]] = [{} for _ in range(stages)]
    for (work, stage), when in done.items():
        table[stage][when] = work
    return tuple(table)


def before(work: Work, stage: int, stages: int, repeats: int) -> Step | None:
    """The step whose result a step needs: on the device before it, or behind it in the backward pass.

    None for the first step. The first backward step needs its own forward step, and the weights' gradients need that
    of the input.
    """
    if work.part == "W":
        return work._replace(part="B"), stage
    if work.part == "F":
        if stage == 0:
            return (work._replace(round=work.round - 1), stages - 1) if work.round else None
        return work, stage - 1
    if stage == stages - 1:
        last = work.round == repeats - 1
        return (work._replace(part="F"), stage) if last else (work._replace(round=work.round + 1), 0)
    return work, stage + 1


def _in_order(stages: int, microbatches: int, repeats: int, order: str) -> dict[Step, int]:
    """The tick of each step, if each stage takes its steps in order, each as soon as the step before it is done."""
    waiting = [_ORDERS[order](stage, stages, microbatches) for stage in range(stages)]
    done: dict[Step, int] = {}
    tick = 0
    while any(waiting):
        for step in _ready(waiting, done, repeats):
            done[step] = tick
            waiting[step[1]].pop(0)
        tick += 1
    return done


def _eager(stages: int, microbatches: int, repeats: int) -> dict[Step, int]:
    """Ticks of forward steps and ticks of backward steps in turn, in which each stage takes one if it has come.

    With several rounds, as many micro-batches as there are stages pass through all rounds before the next ones.
    """
    starts, rounds = range(0, microbatches, stages), range(repeats)
    groups = [range(start, min(start + stages, microbatches)) for start in starts]
    forward = [Work(one, turn, "F") for group in groups for turn in rounds for one in group]
    backward = [Work(one, turn, "B") for group in groups for turn in reversed(rounds) for one in group]
    now, then = ([list(steps) for _ in range(stages)] for steps in (forward, backward))
    done: dict[Step, int] = {}
    tick = 0
    while any(now) or any(then):
        ready = _ready(now, done, repeats)
        for step in ready:
            done[step] = tick
            now[step[1]].pop(0)
        tick += bool(ready)
        now, then = then, now
    return done


def _ready(waiting: list[list[Work]], done: dict[Step, int], repeats: int) -> list[Step]:
    """The next step of each stage, where the step before it is done."""
    following = [(left[0], stage) for stage, left in enumerate(waiting) if left]
    return [one for one in following if (need := before(*one, len(waiting), repeats)) is None or need in done]


def _one_by_one(stage: int, stages: int, microbatches: int) -> list[Work]:
    """The steps of one stage: some forward steps first, then forward and backward in turn, then what is left."""
    forward = [Work(one, 0, "F") for one in range(microbatches)]
    backward = [Work(one, 0, "B") for one in range(microbatches)]
    first = min(stages - 1 - stage, microbatches)
    turns = [work for pair in zip(forward[first:], backward, strict=False) for work in pair]
    return forward[:first] + turns + backward[len(forward) - first :]


def _zero_bubble(stage: int, stages: int, microbatches: int) -> list[Work]:
    """The steps of one stage where the gradients of the weights fill the gaps (ZB-H1).

    As many forward steps come first as in 1F1B. Stage s then lags behind by s gradients of its weights. So it keeps as
    many micro-batches as there are stages, and has something to do while it waits for gradients.
    """
    first = min(stages - stage, microbatches)
    steps = [Work(one, 0, "F") for one in range(first)]
    for one in range(microbatches):
        steps.append(Work(one, 0, "B"))
        steps += [Work(one - stage, 0, "W")] if one >= stage else []
        steps += [Work(one + first, 0, "F")] if one + first < microbatches else []
    return steps + [Work(one, 0, "W") for one in range(max(microbatches - stage, 0), microbatches)]


_ORDERS = {"1f1b": _one_by_one, "zb-h1": _zero_bubble}


def _put_off(done: dict[Step, int], stages: int, repeats: int) -> dict[Step, int]:
    """The same steps with each forward step as late as the step after it, and the next one of its stage, allow."""
    bound: dict[Step, int] = {}
    following: dict[int, int] = {}
    late: dict[Step, int] = {}
    for (work, stage), tick in sorted(done.items(), key=lambda one: -one[1]):
        step = work, stage
        if work.part == "F":
            tick = min(bound[step], following.get(stage, tick + len(done))) - 1
        late[step] = following[stage] = tick
        if need := before(work, stage, stages, repeats):
            bound[need] = min(tick, bound.get(need, tick))
    return late
