"""The schedule of a pipeline as a table and a picture: which stage works on which micro-batch in each tick."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spmd import SizeError
from spmd._leaves import not_int
from spmd._table import Line
from spmd.drawing._grid import Cell, Grid
from spmd.drawing._picture import Picture
from spmd.drawing._svg import FILLS, below, caption, card, grid_box
from spmd.drawing._text import grid_lines, sentences

__all__ = ["PipelineSchedule", "pipeline_schedule"]


@dataclass(frozen=True)
class PipelineSchedule:
    """The forward schedule of `pipeline`. The backward schedule is the same, read from right to left.

    Printed, it has a row for each stage and a column for each tick, with the number of the micro-batch. If there are
    several rounds, the round follows after a dot. A dot alone means that the stage is idle. A notebook shows it as SVG.

    Attributes:
      stages: Devices along the pipeline.
      microbatches: Micro-batches that pass through it.
      repeats: How often each micro-batch passes each device: 1 for GPipe, more for interleaved (circular) stages.
    """

    stages: int
    microbatches: int
    repeats: int = 1

    @property
    def stride(self) -> int:
        """Ticks from the start of one round to the start of the next; a micro-batch is back after `stages` ticks."""
        return max(self.microbatches, self.stages)

    @property
    def ticks(self) -> int:
        """The number of ticks: `repeats * microbatches + stages - 1`, if there are enough micro-batches."""
        return (self.repeats - 1) * self.stride + self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """Idle time over working time: (stages - 1) / (repeats * microbatches), if there are enough micro-batches."""
        busy = self.repeats * self.microbatches
        return (self.ticks - busy) / busy

    def work(self, tick: int, stage: int) -> tuple[int, int] | None:
        """The micro-batch that a stage works on, and its round. None if the stage is idle."""
        begun = tick - stage  # when it entered the first stage
        if begun < 0 or begun // self.stride >= self.repeats or begun % self.stride >= self.microbatches:
            return None
        return begun % self.stride, begun // self.stride

    def text(self, width: int | None = None) -> str:
        """The table as text. What is wider than `width`, by default the terminal, goes on below.

        Args:
          width: Columns.
        """
        return self._picture.text(width)

    def __str__(self) -> str:
        return self.text()

    @property
    def svg(self) -> str:
        """The table as a drawing: a colour for each round."""
        return self._picture.svg

    def _repr_svg_(self) -> str:
        return self.svg

    @property
    def _picture(self) -> Picture:
        return Picture(_Drawn(self))


class _Drawn:
    """A schedule as a picture: a row for each stage, a column for each tick."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        rounds = f", {schedule.repeats} rounds" if schedule.repeats > 1 else ""
        busy = schedule.repeats * schedule.microbatches
        self.title = f"{schedule.stages} stages, {schedule.microbatches} micro-batches{rounds}"
        self._about = f"{schedule.ticks} ticks, {busy} of them at work, bubble {schedule.bubble:.3g}"
        self._schedule = schedule

    def lines(self, width: int) -> list[Line]:
        return [*sentences([f"{self.title}: {self._about}"], width), *grid_lines([[self._grid]], width)]

    def svg(self) -> str:
        return card(below([caption(self.title, [self._about]), grid_box([[self._grid]])]), self.title)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self._schedule)

    @property
    def _grid(self) -> Grid:
        stages, ticks = range(self._schedule.stages), range(self._schedule.ticks)
        return Grid(
            rows=tuple(f"stage {stage}" for stage in stages),
            columns=tuple(map(str, ticks)),
            cells=tuple(tuple(self._cell(tick, stage) for tick in ticks) for stage in stages),
            row_label="tick",
            framed=False,
        )

    def _cell(self, tick: int, stage: int) -> Cell:
        done = self._schedule.work(tick, stage)
        if done is None:
            return Cell((".",))
        microbatch, number = done
        return Cell((f"{microbatch}.{number}" if self._schedule.repeats > 1 else str(microbatch),), number % len(FILLS))


def pipeline_schedule(stages: int, microbatches: int, repeats: int = 1) -> PipelineSchedule:
    """What `pipeline` does in each tick, and how much of its time is a bubble.

    A micro-batch enters the first stage and moves on by one stage in each tick. After the last stage it is done, or
    comes back to the first for its next round, once all micro-batches have entered. With m micro-batches on p devices
    in v rounds, a device works for v m of v m + p - 1 ticks: the bubble is (p-1)/(v m) of the working time. With fewer
    micro-batches than stages there are also gaps between the rounds.

    Args:
      stages: Devices along the pipeline.
      microbatches: Micro-batches.
      repeats: Rounds; 1 is GPipe, more are interleaved (circular) stages.

    Returns:
      The schedule, which prints as a table.

    Raises:
      SizeError: If a number is not an int of at least 1.

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
      Training on GPU Clusters", https://arxiv.org/abs/2104.04473, for interleaved stages
    """
    for name, n in {"stages": stages, "microbatches": microbatches, "repeats": repeats}.items():
        if fault := not_int(name, n, 1):
            raise SizeError(fault, call="pipeline_schedule(stages, microbatches, repeats)")
    return PipelineSchedule(stages, microbatches, repeats)
