"""The schedule of a pipeline as a table and numbers: which stage works on which micro-batch in each tick."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from spmd import scope
from spmd._text import plain, shown_width
from spmd._trees.leaves import not_int
from spmd.drawing._picture import Cell, Grid, grid_lines, sentences
from spmd.errors import SizeError, check_one_of

# --- timetables of forward and backward steps in turn: 1F1B, for one stage on each device or several, and ZB-H1 -------
#
# A device waits for its neighbours in each tick, so that a tick takes the time of the longest step in it. Ticks with
# steps of one length waste nothing: those of an eager 1F1B, which have forward or backward steps alone, and of ZB-H1.


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


Order = Literal["forward", "1f1b", "eager-1f1b", "zb-h1"]
ORDERS = get_args(Order)
_STEPS = {"forward": 1, "1f1b": 2, "eager-1f1b": 2, "zb-h1": 3}  # of one micro-batch in one stage


@dataclass(frozen=True)
class PipelineSchedule:
    """What each stage works on in each tick.

    With the order "forward" it is the forward pass of `pipeline`. The backward pass is the same, read from right to
    left. With the others it is both passes of `pipeline_loss`.

    Printed, it has a row for each stage and a column for each tick, with the number of the micro-batch. If there are
    several rounds, the round follows after a dot. If there are two passes, F or B stands before the number, or W for
    the gradients of weights apart. A dot alone means that the stage is idle.

    Attributes:
      stages: Devices along the pipeline.
      microbatches: Micro-batches that pass through it.
      repeats: How often each micro-batch passes each device: 1 for one stage on each device, more for interleaved
        (circular) stages.
      order: "forward", "1f1b", "eager-1f1b" or "zb-h1".

    Example:
      >>> from spmd.parallel import pipeline_schedule
      >>> schedule = pipeline_schedule(4, 6)
      >>> schedule.ticks, schedule.bubble, schedule.busy
      (9, 0.5, 6)
    """

    stages: int
    microbatches: int
    repeats: int = 1
    order: str = "forward"

    @property
    def stride(self) -> int:
        """Ticks from the start of one round to the start of the next; a micro-batch is back after `stages` ticks."""
        return max(self.microbatches, self.stages)

    @property
    def ticks(self) -> int:
        """The number of ticks: `repeats * microbatches + stages - 1`, if there are enough micro-batches.

        With "1f1b" and "eager-1f1b" there are twice as many. With "zb-h1" there are `3 * microbatches + stages - 1`,
        or more with fewer micro-batches than stages.
        """
        if _STEPS[self.order] == 2:
            return 2 * (self.repeats * self.microbatches + self.stages - 1)
        if self.order == "zb-h1":
            return 2 * self.microbatches + self.stages - 1 + max(self.microbatches, self.stages)
        return (self.repeats - 1) * self.stride + self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """Idle time over working time: (stages - 1) / (repeats * microbatches), if there are enough micro-batches.

        With "zb-h1" it is a third of that.
        """
        return (self.ticks - self.busy) / self.busy

    @property
    def busy(self) -> int:
        """The ticks in which a stage works."""
        return self.repeats * self.microbatches * _STEPS[self.order]

    def in_flight(self, stage: int) -> int:
        """The most inputs that a stage keeps at once for the backward pass.

        With the order "forward" these are all inputs, one for each micro-batch and round. With "zb-h1" a stage
        keeps an input from its forward step to the gradients of its weights, else to its backward step.
        """
        most = now = 0
        for tick in range(self.ticks):
            done = self.work(tick, stage)
            now += done is not None and done.part == "F"
            most = max(most, now)
            now -= done is not None and done.part == ("W" if self.order == "zb-h1" else "B")
        return most

    def work(self, tick: int, stage: int) -> Work | None:
        """The micro-batch that a stage works on, its round and the pass, "F", "B" or "W". None if the stage is idle."""
        if self.order != "forward":
            return timetable(self.stages, self.microbatches, self.repeats, self.order)[stage].get(tick)
        begun = tick - stage  # when it entered the first stage
        if begun < 0 or begun // self.stride >= self.repeats or begun % self.stride >= self.microbatches:
            return None
        return Work(begun % self.stride, begun // self.stride, "F")

    def text(self, width: int | None = None) -> str:
        """The table as text. What is wider than `width`, by default the terminal, goes on below.

        Args:
          width: Columns.
        """
        rounds = f", {self.repeats} rounds" if self.repeats > 1 else ""
        order = f", {self.order}" if self.order != "forward" else ""
        title = f"{self.stages} stages, {self.microbatches} micro-batches{rounds}{order}"
        about = f"{self.ticks} ticks, {self.busy} of them at work, bubble {self.bubble:.3g}"
        stages, ticks = range(self.stages), range(self.ticks)
        grid = Grid(
            rows=tuple(f"stage {stage}" for stage in stages),
            columns=tuple(map(str, ticks)),
            cells=tuple(tuple(Cell((self._cell_text(tick, stage),)) for tick in ticks) for stage in stages),
            row_label="tick",
            framed=False,
        )
        columns = shown_width(width)
        return plain([*sentences([f"{title}: {about}"], columns), *grid_lines([[grid]], columns)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _cell_text(self, tick: int, stage: int) -> str:
        done = self.work(tick, stage)
        if done is None:
            return "."
        part = done.part if _STEPS[self.order] > 1 else ""
        return f"{part}{done.microbatch}" + (f".{done.round}" if self.repeats > 1 else "")


@scope
def pipeline_schedule(stages: int, microbatches: int, repeats: int = 1, order: Order = "forward") -> PipelineSchedule:
    """Return what a pipeline does in each tick, and how much of its time is a bubble.

    A micro-batch enters the first stage and moves on by one stage in each tick. After the last stage it is done, or
    comes back to the first for its next round, once all micro-batches have entered. With m micro-batches on p devices
    in v rounds, a device works for v m of v m + p - 1 ticks: the bubble is (p-1)/(v m) of the working time. With fewer
    micro-batches than stages there are also gaps between the rounds.

    With the order "1f1b" the table has both passes, of ticks that count the same. A device takes forward and backward
    steps in turn, so that it gives up one micro-batch before it takes another. The bubble is the same. Stage s keeps
    p - s micro-batches, where all m of them are kept if the passes follow one another.

    With the order "eager-1f1b" forward steps do not wait for backward steps, and each tick has forward or backward
    steps alone. The bubble is the same, and stays so if a backward step takes longer than a forward step and devices
    wait for their neighbours in each tick. Stage s keeps 2 (p - s) - 1 micro-batches. With v rounds, "1f1b" is eager,
    too, and the first stage keeps at most (v+1) p - 1 inputs, each of a v-th of its layers.

    With the order "zb-h1" the backward step is cut into the gradient of the input (B) and those of the weights (W). No
    stage waits for the gradients of the weights, so they fill gaps: the bubble is (p-1)/(3 m) of the working time. Each
    stage keeps at most p micro-batches.

    Args:
      stages: Devices along the pipeline.
      microbatches: Micro-batches. With both passes and several rounds, a multiple of the stages.
      repeats: Rounds; 1 is one stage on each device, more are interleaved (circular) stages. "zb-h1" has one.
      order: "forward" for the forward pass of `pipeline`; "1f1b", "eager-1f1b" or "zb-h1" for both passes of
        `pipeline_loss`.

    Returns:
      The schedule, which prints as a table.

    Raises:
      SizeError: If a number is not an int of at least 1, the micro-batches of several rounds are not a multiple of
        the stages, or "zb-h1" has several rounds.
      LayoutError: If the order is unknown.

    Example:
      >>> import spmd
      >>> print(spmd.parallel.pipeline_schedule(3, 4))
      3 stages, 4 micro-batches: 6 ticks, 4 of them at work, bubble 0.5
      tick     0  1  2  3  4  5
      stage 0  0  1  2  3  .  .
      stage 1  .  0  1  2  3  .
      stage 2  .  .  0  1  2  3

    References:
      Huang et al., "GPipe", https://arxiv.org/abs/1811.06965; Narayanan et al., "Efficient Large-Scale Language Model
      Training on GPU Clusters", https://arxiv.org/abs/2104.04473, for interleaved stages and 1F1B (section 2.2);
      Zhuang et al., "On Optimizing the Communication of Model Parallelism", https://arxiv.org/abs/2211.05322, for eager
      1F1B;
      Qi et al., "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241, for ZB-H1 (section 2.2)
    """
    call = "pipeline_schedule(stages, microbatches, repeats, order)"
    for name, n in {"stages": stages, "microbatches": microbatches, "repeats": repeats}.items():
        if fault := not_int(name, n, 1):
            raise SizeError(fault, call=call)
    schedule = PipelineSchedule(stages, microbatches, repeats, order)
    check_order(schedule, ORDERS, call)
    return schedule


def check_order(schedule: PipelineSchedule, orders: tuple[str, ...], call: str) -> None:
    """Check that the order is one of these, and fits the micro-batches and rounds."""
    stages, microbatches, repeats, order = schedule.stages, schedule.microbatches, schedule.repeats, schedule.order
    check_one_of("order", order, orders, call, fix=f'order="{orders[0]}"')
    if _STEPS[order] == 2 and repeats > 1 and microbatches % stages:
        rule = "with several rounds, forward and backward steps take turns in groups of one micro-batch for each stage."
        got = [f"{microbatches} micro-batches, {stages} stages"]
        raise SizeError(
            rule, call=call, got=got, advice=f"{-(-microbatches // stages) * stages} micro-batches, or repeats=1"
        )
    if order == "zb-h1" and repeats > 1:
        rule = "with the gradients of the weights apart, each device has one stage."
        raise SizeError(rule, call=call, got=[f"repeats={repeats}"], advice='repeats=1, or order="1f1b"')


# --- the ticks as numbers, from which each device reads what it does and where it keeps what comes -------------------


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
        inputs = _places(_stays_of_inputs(when, schedule, "F", "F" if cut else "B"))
        cotangents = _places(_stays_of_inputs(when, schedule, "B", "B"))
        kept = _places(_stays_on_device(when, "F", "W")) if cut else _Places({}, 0)
        delayed = _places(_stays_on_device(when, "B", "W")) if cut else _Places({}, 0)
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


def _stays_of_inputs(when: dict[Step, int], schedule: PipelineSchedule, part: str, until: str) -> Iterable[_Stay]:
    """Return what a step of this part needs from the step before it."""
    cut = schedule.order == "zb-h1"
    for (work, stage), tick in when.items():
        source = before(work, stage, schedule.stages, schedule.repeats)
        if work.part == part and source is not None and (source[0].part == part or cut):
            yield _Stay(when[source], (work, stage), when.get((work._replace(part=until), stage), tick))


def _stays_on_device(when: dict[Step, int], part: str, until: str) -> Iterable[_Stay]:
    """Return what a step leaves to a later one of the same device."""
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
