"""The timetable of one forward and one backward step in turn (1F1B), for one stage on each device or several."""

from __future__ import annotations

import functools
from typing import NamedTuple


class Work(NamedTuple):
    """One step of a stage: its micro-batch, its round, and "F" for a forward or "B" for a backward step."""

    microbatch: int
    round: int
    part: str


Step = tuple[Work, int]  # and its stage


@functools.lru_cache(maxsize=64)
def timetable(stages: int, microbatches: int, repeats: int) -> tuple[dict[int, Work], ...]:
    """For each stage, its work by tick.

    A stage takes its steps in the order of `_order`, each as soon as the step before it is done. Then each forward step
    is put off until the next step needs it, so that no input is kept longer than it must be.
    """
    waiting = [_order(stage, stages, microbatches, repeats) for stage in range(stages)]
    done: dict[Step, int] = {}
    tick = 0
    while any(waiting):
        ready = [(left[0], stage) for stage, left in enumerate(waiting) if left]
        ready = [step for step in ready if (need := before(*step, stages, repeats)) is None or need in done]
        for work, stage in ready:
            done[work, stage] = tick
            waiting[stage].pop(0)
        tick += 1
    table: list[dict[int, Work]] = [{} for _ in range(stages)]
    for (work, stage), when in _put_off(done, stages, repeats).items():
        table[stage][when] = work
    return tuple(table)


def before(work: Work, stage: int, stages: int, repeats: int) -> Step | None:
    """The step whose result a step needs: on the device before it, or behind it in the backward pass.

    None for the first step. The first backward step needs its own forward step.
    """
    if work.part == "F":
        if stage == 0:
            return (work._replace(round=work.round - 1), stages - 1) if work.round else None
        return work, stage - 1
    if stage == stages - 1:
        last = work.round == repeats - 1
        return (work._replace(part="F"), stage) if last else (work._replace(round=work.round + 1), 0)
    return work, stage + 1


def _order(stage: int, stages: int, microbatches: int, repeats: int) -> list[Work]:
    """The steps of one stage: some forward steps first, then forward and backward in turn, then what is left.

    With several rounds, as many micro-batches as there are stages pass through all rounds before the next ones.
    """
    starts, rounds = range(0, microbatches, stages), range(repeats)
    groups = [range(start, min(start + stages, microbatches)) for start in starts]
    forward = [Work(one, turn, "F") for group in groups for turn in rounds for one in group]
    backward = [Work(one, turn, "B") for group in groups for turn in reversed(rounds) for one in group]
    left = stages - 1 - stage
    first = min(left if repeats == 1 else 2 * left + (repeats - 1) * stages, len(forward))
    turns = [work for pair in zip(forward[first:], backward, strict=False) for work in pair]
    return forward[:first] + turns + backward[len(forward) - first :]


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
