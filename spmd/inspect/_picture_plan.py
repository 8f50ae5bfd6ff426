"""Pictures of plans: each step with the layouts before and after it, and what moves between which devices."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh

from spmd._units import bytes_text, seconds_text
from spmd.comm.plans import Plan, Step, summary
from spmd.inspect import _svg
from spmd.inspect._arrange import MOST_DEVICES, cell_parts, tints
from spmd.inspect._blocks import Holdings, of_layout
from spmd.inspect._picture_svg import grid_box
from spmd.inspect._picture_text import Line, grid_lines, heading_lines, text_lines
from spmd.inspect._svg import Box, text
from spmd.inspect._transfers import Transfer, groups, transfers
from spmd.language import Layout

__all__ = ["PlanDrawing"]

_MOST_ARROWS = 12  # written out
_MOST_CHIPS = 16  # devices of a group that are drawn
_CHIP, _SPACE, _REACH = 20.0, 26.0, 90.0  # of a device, from one to the next, of an arrow
_HEAD = 60.0  # of the title and the headers above a grid
_WIDEST = 1.3 * _svg.WIDTH  # of a step: two grids of 8 x 8 stand side by side


class PlanDrawing:
    """A plan as a picture."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.title = f"{plan.source.short} -> {plan.target.short}"

    def lines(self, width: int) -> list[Line]:
        sizes = ", ".join(f"{name}={size}" for name, size in self.plan.sizes.items())
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.plan.mesh.items())
        head = (self.title, f"{sizes}, {self.plan.dtype.name}", f"mesh {mesh}")
        lines: list[Line] = [*heading_lines(head, width), []]
        lines += self._state_lines(self.states[0], width)
        for number, step in enumerate(self.plan.steps):
            lines += [[], *text_lines(f"{number + 1}. {_what(step)}", width)]
            for sentence in self.sentences(step):
                wrapped = textwrap.wrap(sentence, max(20, width - 3), break_on_hyphens=False)
                lines += [_said(f"   {line}") for line in wrapped]
            lines += [[], *self._state_lines(self.states[number + 1], width)]
        return [*lines, [], *(line for sentence in self.totals for line in text_lines(sentence, width))]

    def svg(self) -> str:
        plan = self.plan
        sizes = ", ".join(f"{name}={size}" for name, size in plan.sizes.items())
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
        head = [_svg.paragraph(self.title, weight="bold")]
        head.append(_svg.paragraph(f"{sizes}, {plan.dtype.name}; mesh {mesh}", fill=_svg.FAINT))
        boxes = [_svg.below(head, 2)]
        if not plan.steps:
            boxes.append(self._state_box(self.states[0]))
        for number, step in enumerate(plan.steps):
            title = [_svg.paragraph(f"{number + 1}. {_what(step)}", weight="bold")]
            title += [_svg.paragraph(sentence, fill=_svg.FAINT) for sentence in self.sentences(step)]
            boxes.append(_svg.below([_svg.below(title, 1), self._step_box(number)], 8))
        boxes.append(_svg.below([_svg.paragraph(sentence, fill=_svg.FAINT) for sentence in self.totals], 1))
        return _svg.card(_svg.below(boxes, 20), f"{self.title}: what each step moves")

    def to_dict(self) -> dict[str, Any]:
        found = self.plan.to_dict()
        if not self.is_summary:
            for entry, step in zip(found["steps"], self.plan.steps, strict=True):
                moved = self.transfers(step)
                entry["transfers"] = [{"to": t.to, "from": list(t.sources), "bytes": t.nbytes} for t in moved]
        return found

    # --- what moves

    @property
    def is_summary(self) -> bool:
        return len(self.states[0].devices) > MOST_DEVICES

    @cached_property
    def states(self) -> list[Holdings]:
        """What each device holds before the first step and after each."""
        layouts = [self.plan.source, *(step.after for step in self.plan.steps)]
        return [self._state(layout) for layout in layouts]

    def _state(self, layout: Layout) -> Holdings:
        mesh = AbstractMesh(tuple(self.plan.mesh.values()), tuple(self.plan.mesh))
        return of_layout(layout, self.plan.sizes, mesh, call=f'plan("{self.title}")')

    def transfers(self, step: Step) -> list[Transfer]:
        return transfers(step, self.plan.sizes, self.plan.mesh, self.plan.dtype.itemsize)

    def sentences(self, step: Step) -> list[str]:
        """What moves between which devices, in words."""
        if step.kind == "split":
            return ["each device keeps a part of what it holds; nothing is sent"]
        found = groups(step.axes, self.plan.mesh)
        if self.is_summary:
            return [f"{len(found)} group{'s' * (len(found) > 1)} of {len(found[0])} devices"]
        among = "; ".join(",".join(cell_parts([(device,) for device in group], short=False)) for group in found)
        if step.kind == "psum":
            return [f"among {among}: the sum of what they hold"]
        moved = self.transfers(step)
        amounts = {transfer.nbytes for transfer in moved}
        if len(amounts) == 1 and len(moved) == sum(len(group) * (len(group) - 1) for group in found):
            return [f"among {among}: {bytes_text(amounts.pop())} from each device to each other one"]
        return [f"among {among}: {_arrows_text(moved)}"]

    @property
    def totals(self) -> list[str]:
        return summary(self.plan) if self.plan.steps else ["nothing moves"]

    # --- drawing

    @cached_property
    def _colours(self) -> Mapping[int, int]:
        return tints(*self.states)

    def _state_lines(self, state: Holdings, width: int) -> list[Line]:
        return [*text_lines(state.title, width), *grid_lines(state, width, self._colours)]

    def _state_box(self, state: Holdings) -> Box:
        return _svg.below([_svg.paragraph(state.title), grid_box(state, self._colours)], 4)

    def _step_box(self, number: int) -> Box:
        """Before and after, what moves between them: side by side, or above each other where that is too wide."""
        before, after = (self._state_box(state) for state in self.states[number : number + 2])
        row = _svg.beside([before, self._arrows(self.plan.steps[number], (before, after)), after])
        if row.width <= _WIDEST:
            return row
        return _svg.below([before, self._arrows(self.plan.steps[number], (before, after), down=True), after])

    def _arrows(self, step: Step, between: Sequence[Box], *, down: bool = False) -> Box:
        """From senders to receivers a line for each transfer: of the first group, if of many. From left to right, or
        `down`, as the boxes lie `between` which it stands."""
        moved = self.transfers(step) if not self.is_summary else []
        group, *others = groups(step.axes, self.plan.mesh)
        if len(group) > _MOST_CHIPS or not moved:
            if down:
                x = 0.75 * min(box.width for box in between)  # to the right of the headers
                return Box(x + 4, _REACH / 2, _arrow(x, 0, x, _REACH / 2, _svg.FAINT))
            y = (_HEAD + min(box.height for box in between)) / 2
            return Box(_REACH / 2, y + 4, _arrow(0, y, _REACH / 2, y, _svg.FAINT))
        colour = {device: self._colour_of(step, device) for device in group}
        along = {device: _SPACE * (row + 0.5) for row, device in enumerate(group)}
        at = (lambda across, along: (along, across)) if down else (lambda across, along: (across, along))
        start, far = _CHIP + 3, 2 * _CHIP + 6 + _REACH
        parts = []
        for transfer in moved:
            if transfer.to in along:
                source = transfer.sources[0]
                dashed = {"stroke_dasharray": "3 3"} if len(transfer.sources) > 1 else {}
                ends = (*at(start, along[source]), *at(start + _REACH, along[transfer.to]))
                parts.append(_arrow(*ends, _svg.EDGES[colour[source]], **dashed))
        for device in group:
            for across in (_CHIP / 2, far - _CHIP / 2):
                parts.append(_chip(*at(across, along[device]), device, colour[device]))
        drawn = Box(*at(far, _SPACE * len(group)), "".join(parts))
        note = _svg.paragraph(f"group 1 of {len(others) + 1}", fill=_svg.FAINT)
        return _svg.below([drawn, note], 4) if others else drawn

    def _colour_of(self, step: Step, device: int) -> int:
        """The colour of what a device holds before the step."""
        at = 0 if step is self.plan.steps[0] else self.plan.steps.index(step)
        state = self.states[at]
        return self._colours[state.cells[state.block_of[device]][0][0]]


def _said(words: str) -> Line:
    return [(words, None)]


def _what(step: Step) -> str:
    over = f" over {', '.join(step.axes)}" if step.axes else ""
    rounds = f" in {step.collectives} rounds" if step.kind == "sends" else ""
    time = f", {seconds_text(step.seconds)}" if step.seconds else ""
    return f"{step.kind}{over}{rounds}: {bytes_text(step.bytes)} per device{time}"


def _arrows_text(moved: Sequence[Transfer]) -> str:
    """`0 -> 1, 1 -> 2: 4 KiB each`, one part per amount; where several hold it, `any of 4-7 -> 1`."""
    by_amount: dict[int, list[str]] = {}
    for transfer in moved:
        sources = ",".join(cell_parts([(device,) for device in transfer.sources], short=False))
        arrow = f"{'any of ' if len(transfer.sources) > 1 else ''}{sources} -> {transfer.to}"
        by_amount.setdefault(transfer.nbytes, []).append(arrow)
    parts = []
    for amount, arrows in by_amount.items():
        shown = arrows if len(arrows) <= _MOST_ARROWS else [*arrows[: _MOST_ARROWS - 1], f"... ({len(arrows)} in all)"]
        parts.append(f"{', '.join(shown)}: {bytes_text(amount)}{' each' if len(arrows) > 1 else ''}")
    return "; ".join(parts)


def _arrow(x: float, y: float, to_x: float, to_y: float, colour: str, **look: str) -> str:
    """A line with a head, without a marker, whose id could clash."""
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    dx, dy = (to_x - x) / length, (to_y - y) / length
    line = _svg.element("line", "", x1=x, y1=y, x2=to_x - 5 * dx, y2=to_y - 5 * dy, stroke=colour, **look)
    foot_x, foot_y = to_x - 7 * dx, to_y - 7 * dy
    corners = ((to_x, to_y), (foot_x - 3 * dy, foot_y + 3 * dx), (foot_x + 3 * dy, foot_y - 3 * dx))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return line + _svg.element("polygon", "", points=points, fill=colour)


def _chip(x: float, y: float, device: int, colour: int) -> str:
    """A device, its middle at a place."""
    fill, edge = _svg.FILLS[colour], _svg.EDGES[colour]
    left, top = x - _CHIP / 2, y - _CHIP / 2
    rect = _svg.element("rect", "", x=left, y=top, width=_CHIP, height=_CHIP, rx=4, fill=fill, stroke=edge)
    return rect + text(x, y, str(device), anchor="middle")
