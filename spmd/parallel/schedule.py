"""The schedule of a pipeline as a table and a picture: which stage works on which micro-batch in each tick."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spmd import SizeError
from spmd._leaves import not_int

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

    def __str__(self) -> str:
        width = max(len(self._label(tick, stage)) for tick, stage in self._places())
        width = max(width, len(str(self.ticks - 1)))
        rows = [("tick", [str(tick) for tick in range(self.ticks)])]
        for stage in range(self.stages):
            rows.append((f"stage {stage}", [self._label(tick, stage) for tick in range(self.ticks)]))
        names = max(len(name) for name, _ in rows)
        lines = [self._title()]
        lines += [f"{name:<{names}} " + " ".join(f"{one:>{width}}" for one in row) for name, row in rows]
        return "\n".join(lines)

    @property
    def svg(self) -> str:
        """The table as a drawing: a colour for each round."""
        cell, left, top = 34, 70, 40
        texts = [f'<text x="12" y="22">{self._title()}</text>']
        texts += [f'<text x="12" y="{top + cell * s + 21}">stage {s}</text>' for s in range(self.stages)]
        cells = []
        for tick, stage in self._places():
            done, x, y = self.work(tick, stage), left + cell * tick, top + cell * stage
            fill = "none" if done is None else _FILLS[done[1] % len(_FILLS)]
            cells.append(f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="{fill}" stroke="#57606a"/>')
            if done is not None:
                middle = f'x="{x + cell // 2}" y="{y + 21}" text-anchor="middle"'
                cells.append(f"<text {middle}>{self._label(tick, stage)}</text>")
        width = left + max(cell * self.ticks, 8 * len(self._title())) + 12
        size = f'viewBox="0 0 {width} {top + cell * self.stages + 12}" width="{width}"'
        ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
        font = 'font-family="ui-monospace, monospace" font-size="12" fill="#1f2328"'
        content = f"{ground}<g {font}>{''.join(texts + cells)}</g>"
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{content}</svg>'

    def _repr_svg_(self) -> str:
        return self.svg

    def _title(self) -> str:
        rounds = f", {self.repeats} rounds" if self.repeats > 1 else ""
        return (
            f"{self.stages} stages, {self.microbatches} micro-batches{rounds}: {self.ticks} ticks, "
            f"{self.repeats * self.microbatches} of them at work, bubble {self.bubble:.3g}"
        )

    def _label(self, tick: int, stage: int) -> str:
        done = self.work(tick, stage)
        if done is None:
            return "."
        return f"{done[0]}.{done[1]}" if self.repeats > 1 else str(done[0])

    def _places(self) -> Iterator[tuple[int, int]]:
        return ((tick, stage) for stage in range(self.stages) for tick in range(self.ticks))


# Tints that colour-blind readers can tell apart (Okabe and Ito, https://jfly.uni-koeln.de/color/).
_FILLS = ("#abdaf4", "#f5cf80", "#80cfb9", "#e6bcd3", "#f8f2a1")


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
      tick    0 1 2 3 4 5
      stage 0 0 1 2 3 . .
      stage 1 . 0 1 2 3 .
      stage 2 . . 0 1 2 3

    References:
      Huang et al., "GPipe", https://arxiv.org/abs/1811.06965; Narayanan et al., "Efficient Large-Scale Language Model
      Training on GPU Clusters", https://arxiv.org/abs/2104.04473, for interleaved stages
    """
    for name, n in {"stages": stages, "microbatches": microbatches, "repeats": repeats}.items():
        if fault := not_int(name, n, 1):
            raise SizeError(fault, call="pipeline_schedule(stages, microbatches, repeats)")
    return PipelineSchedule(stages, microbatches, repeats)
