"""The ticks of a schedule as numbers, from which each device reads what it does and where it keeps what comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from spmd.parallel.schedule import PipelineSchedule, Step, Work, before

# What a device does: a backward step of the weights is alone where the backward step is cut in two. The step with the
# loss is the last stage's backward step, or its forward step where the backward step is cut.
NOTHING, FORWARD, BACKWARD, LOSS, WEIGHTS = range(5)


class Tick(NamedTuple):
    """One tick of one device. A place of -1 is none; an input without a place is a micro-batch of x."""

    kind: Any = NOTHING
    microbatch: Any = 0
    round: Any = 0
    input: Any = -1
    cotangent: Any = -1
    put_input: Any = -1
    put_cotangent: Any = -1
    put_x: Any = -1
    kept: Any = -1
    delayed: Any = -1
    put_own: Any = -1
    put_kept: Any = -1
    put_delayed: Any = -1


class Ticks(NamedTuple):
    """All ticks of all devices.

    Attributes:
      table: The numbers, `"tick stage entry"`.
      inputs: How many places a device has for inputs.
      cotangents: How many for cotangents.
      kept: How many for what a forward step keeps, if the backward step is cut.
      delayed: How many for what the gradient of the input leaves to those of the weights.
    """

    table: np.ndarray
    inputs: int
    cotangents: int
    kept: int
    delayed: int

    @staticmethod
    def step(numbers: Any) -> Tick:
        """A row of the table."""
        return Tick(*numbers)

    @staticmethod
    def of(schedule: PipelineSchedule) -> Ticks:
        """The ticks of a schedule."""
        stages, cut = schedule.stages, schedule.order == "zb-h1"
        when = {
            (work, stage): tick
            for stage in range(stages)
            for tick in range(schedule.ticks)
            if (work := schedule.work(tick, stage)) is not None
        }
        found = [[Tick() for _ in range(stages)] for _ in range(schedule.ticks)]
        inputs = _places(_coming(when, schedule, "F", "F" if cut else "B"))
        cotangents = _places(_coming(when, schedule, "B", "B"))
        kept = _places(_own(when, "F", "W")) if cut else _Places({}, 0)
        delayed = _places(_own(when, "B", "W")) if cut else _Places({}, 0)
        for (work, stage), tick in when.items():
            of = lambda places, part, step=(work, stage): places.of.get((step[0]._replace(part=part), step[1]), -1)
            found[tick][stage] = found[tick][stage]._replace(
                kind=_kind(work, stage, schedule),
                microbatch=work.microbatch,
                round=work.round,
                input=of(inputs, "F"),
                cotangent=of(cotangents, "B"),
                kept=of(kept, "F"),
                delayed=of(delayed, "B"),
                put_x=work.microbatch if work.part == "B" and (stage, work.round) == (0, 0) else -1,
                put_kept=of(kept, "F") if work.part == "F" else -1,
                put_delayed=of(delayed, "B") if work.part == "B" else -1,
            )
        for name, places in (("put_input", inputs), ("put_cotangent", cotangents)):
            for (work, stage), place in places.of.items():
                source = before(work, stage, stages, schedule.repeats)
                if source is not None:
                    tick, put = when[source], name if source[0].part == work.part else "put_own"
                    found[tick][stage] = found[tick][stage]._replace(**{put: place})
        return Ticks(np.asarray(found, np.int32), *(max(one.count, 1) for one in (inputs, cotangents, kept, delayed)))


def _kind(work: Work, stage: int, schedule: PipelineSchedule) -> int:
    last = (stage, work.round) == (schedule.stages - 1, schedule.repeats - 1)
    if schedule.order in ("forward", "zb-h1"):
        return {"F": LOSS if last else FORWARD, "B": BACKWARD, "W": WEIGHTS}[work.part]
    if work.part == "F":
        return NOTHING if last else FORWARD  # the last forward step is a part of its backward step
    return LOSS if last else BACKWARD


class _Stay(NamedTuple):
    """Something that a device keeps: for which step, and the ticks in which it comes and in which it is read last."""

    comes: int
    step: Step
    until: int


def _coming(when: dict[Step, int], schedule: PipelineSchedule, part: str, until: str) -> Iterable[_Stay]:
    """What a step of this part needs from the step before it."""
    cut = schedule.order == "zb-h1"
    for (work, stage), tick in when.items():
        source = before(work, stage, schedule.stages, schedule.repeats)
        if work.part == part and source is not None and (source[0].part == part or cut):
            yield _Stay(when[source], (work, stage), when.get((work._replace(part=until), stage), tick))


def _own(when: dict[Step, int], part: str, until: str) -> Iterable[_Stay]:
    """What a step leaves to a later one of the same device."""
    for (work, stage), tick in when.items():
        if work.part == part:
            yield _Stay(tick, (work, stage), when[work._replace(part=until), stage])


class _Places(NamedTuple):
    of: dict[Step, int]
    count: int


def _places(stays: Iterable[_Stay]) -> _Places:
    """A place for each thing, which no other thing has until it is read last."""
    places: dict[Step, int] = {}
    free: dict[int, list[int]] = {}  # for each stage and place, the tick in which it is read last
    for tick, step, last in sorted(stays):
        until = free.setdefault(step[1], [])
        place = next((i for i, end in enumerate(until) if end <= tick), len(until))
        until[place : place + 1] = [last]
        places[step] = place
    return _Places(places, max(map(len, free.values()), default=0))
