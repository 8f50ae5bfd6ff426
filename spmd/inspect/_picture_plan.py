"""Pictures of plans: each step with the layouts before and after it, and what moves between which devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from spmd._text import Line, bytes_text, seconds_text
from spmd.comm.plans import Plan, Step, summary
from spmd.drawing import _picture as draw
from spmd.inspect._blocks import Holdings, block_grids, device_runs, is_summary, of_layout, tints
from spmd.inspect._collectives import grouped
from spmd.language import Dim, Layout, axes_product, mesh_text

_MOST_ARROWS = 12  # that the text lists
_MOST_CHIPS = 16  # devices of a group that are drawn
_CHIP, _SPACE, _REACH = 20.0, 26.0, 90.0  # the size of a device, the step to the next, the length of an arrow
_HEAD = 60.0  # the height of the title and the headers above a grid
_WIDEST = 1.3 * draw.WIDTH  # of a step: two grids of 8 x 8 stand side by side


class PlanDrawing:
    """A plan as a picture."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.title = f"{plan.source.short} -> {plan.target.short}"
        self._sizes = ", ".join(f"{name}={size}" for name, size in plan.sizes.items()) + f", {plan.dtype.name}"
        self._mesh = mesh_text(plan.mesh)

    def lines(self, width: int) -> list[Line]:
        lines = [*draw.heading([self.title, self._sizes, self._mesh], width), [], *self._state_lines(0, width)]
        for number, step in enumerate(self.plan.steps):
            lines += [[], *draw.sentences([f"{number + 1}. {_what(step)}"], width)]
            lines += draw.sentences(self.moves(step), width, "   ", "   ")
            lines += [[], *self._state_lines(number + 1, width)]
        return [*lines, [], *draw.sentences(self.totals, width)]

    def svg(self) -> str:
        boxes = [draw.caption(self.title, [f"{self._sizes}; {self._mesh}"])]
        boxes += [] if self.plan.steps else [self._state_box(0)]
        for number, step in enumerate(self.plan.steps):
            title = draw.caption(f"{number + 1}. {_what(step)}", self.moves(step))
            boxes.append(draw.below([title, self._step_box(number)], 8))
        boxes.append(draw.caption("", self.totals))
        return draw.card(draw.below(boxes, 20), f"{self.title}: what each step moves")

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
        return is_summary(self.states[0])

    @cached_property
    def states(self) -> list[Holdings]:
        """Return what each device holds before the first step and after each."""
        axes = self.plan.steps_mesh
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
        steps = self.plan.steps
        layouts = [steps[0].before if steps else self.plan.source, *(step.after for step in steps)]
        return [of_layout(layout, self.plan.sizes, mesh, call=f'plan("{self.title}")') for layout in layouts]

    def transfers(self, step: Step) -> list[Transfer]:
        return transfers(step, self.plan.sizes, self.plan.steps_mesh, self.plan.dtype.itemsize)

    def moves(self, step: Step) -> list[str]:
        """Return what moves between which devices, in words."""
        if step.kind == "split":
            return ["each device keeps a part of what it holds; nothing is sent"]
        found = groups(step.axes, self.plan.steps_mesh)
        if self.is_summary:
            return [f"{len(found)} group{'s' * (len(found) > 1)} of {len(found[0])} devices"]
        among = "; ".join(",".join(device_runs(group)) for group in found)
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

    def _state_lines(self, number: int, width: int) -> list[Line]:
        state = self.states[number]
        return [*draw.sentences([state.title], width), *draw.grid_lines(block_grids(state, self._colours), width)]

    def _state_box(self, number: int) -> draw.Box:
        state = self.states[number]
        return draw.below([draw.paragraph(state.title), draw.grid_box(block_grids(state, self._colours))], 4)

    def _step_box(self, number: int) -> draw.Box:
        """Before and after, what moves between them: side by side, or above each other where that is too wide."""
        before, after = self._state_box(number), self._state_box(number + 1)
        row = draw.beside([before, self._arrows(number, (before, after), down=False), after])
        if row.width <= _WIDEST:
            return row
        return draw.below([before, self._arrows(number, (before, after), down=True), after])

    def _arrows(self, number: int, between: Sequence[draw.Box], *, down: bool) -> draw.Box:
        """A line for each transfer, from its sender to its receiver: those of the first group, if there are many. They
        lead from left to right, or `down`. A single arrow stands for what cannot be drawn."""

        def at(across: float, along: float) -> tuple[float, float]:
            return (along, across) if down else (across, along)

        step = self.plan.steps[number]
        group, *others = groups(step.axes, self.plan.steps_mesh)
        moved = [] if self.is_summary or len(group) > _MOST_CHIPS else self.transfers(step)
        if not moved:
            width, height = (min(sizes) for sizes in zip(*((box.width, box.height) for box in between), strict=True))
            along = 0.75 * width if down else (_HEAD + height) / 2  # to the right of the headers, or below them
            line = _arrow(*at(0, along), *at(_REACH / 2, along), draw.FAINT)
            return draw.Box(*at(_REACH / 2, along + 4), line)
        state = self.states[number]
        colour = {device: self._colours[state.cells[state.block_of[device]][0][0]] for device in group}
        along = {device: _SPACE * (row + 0.5) for row, device in enumerate(group)}
        start, far, parts = _CHIP + 3, 2 * _CHIP + 6 + _REACH, []
        for transfer in moved:
            if transfer.to in along:
                source = transfer.sources[0]
                dashed = {"stroke_dasharray": "3 3"} if len(transfer.sources) > 1 else {}
                ends = (*at(start, along[source]), *at(start + _REACH, along[transfer.to]))
                parts.append(_arrow(*ends, draw.EDGES[colour[source]], **dashed))
        for device in group:
            for across in (_CHIP / 2, far - _CHIP / 2):
                parts.append(_chip(*at(across, along[device]), device, colour[device]))
        drawn = draw.Box(*at(far, _SPACE * len(group)), "".join(parts))
        return draw.below([drawn, draw.caption("", [f"group 1 of {len(others) + 1}"])], 4) if others else drawn


def _what(step: Step) -> str:
    over = f" over {', '.join(step.axes)}" if step.axes else ""
    rounds = f" in {step.collectives} rounds" if step.kind == "sends" else ""
    time = f", {seconds_text(step.seconds)}" if step.seconds else ""
    return f"{step.kind}{over}{rounds}: {bytes_text(step.bytes)} per device{time}"


def _arrows_text(moved: Sequence[Transfer]) -> str:
    """`0 -> 1, 1 -> 2: 4 KiB each`, one part per amount; where several hold it, `any of 4-7 -> 1`."""
    parts = []
    for amount, alike in grouped(moved, lambda one: one.nbytes).items():
        many = ["any of " * (len(one.sources) > 1) + ",".join(device_runs(one.sources)) for one in alike]
        arrows = [f"{sources} -> {one.to}" for sources, one in zip(many, alike, strict=True)]
        shown = arrows if len(arrows) <= _MOST_ARROWS else [*arrows[: _MOST_ARROWS - 1], f"... ({len(arrows)} in all)"]
        parts.append(f"{', '.join(shown)}: {bytes_text(amount)}{' each' if len(arrows) > 1 else ''}")
    return "; ".join(parts)


def _arrow(x: float, y: float, to_x: float, to_y: float, colour: str, **look: str) -> str:
    """A line with a head, without a marker, whose id could clash."""
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    dx, dy = (to_x - x) / length, (to_y - y) / length
    line = draw.element("line", "", x1=x, y1=y, x2=to_x - 5 * dx, y2=to_y - 5 * dy, stroke=colour, **look)
    foot_x, foot_y = to_x - 7 * dx, to_y - 7 * dy
    corners = ((to_x, to_y), (foot_x - 3 * dy, foot_y + 3 * dx), (foot_x + 3 * dy, foot_y - 3 * dx))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
    return line + draw.element("polygon", "", points=points, fill=colour)


def _chip(x: float, y: float, device: int, colour: int) -> str:
    """A device, its middle at a place."""
    fill, edge = draw.FILLS[colour], draw.EDGES[colour]
    left, top = x - _CHIP / 2, y - _CHIP / 2
    rect = draw.element("rect", "", x=left, y=top, width=_CHIP, height=_CHIP, rx=4, fill=fill, stroke=edge)
    return rect + draw.text(x, y, str(device), anchor="middle")


# --- what each device receives ---------------------------------------------------------------------------------

Ranges = tuple[tuple[int, int], ...]
"""From where to where in each name of a layout."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one device receives: `nbytes`, from one of `sources`, who hold the same."""

    to: int
    sources: tuple[int, ...]
    nbytes: int


def groups(axes: Sequence[str], mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The devices that talk to each other, by place on the mesh: they differ along `axes` only; without axes all."""
    if not axes:
        return [tuple(range(math.prod(mesh.values())))]
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    moved = [place for place, axis in enumerate(mesh) if axis in axes]
    alike = np.moveaxis(places, moved, range(-len(moved), 0)).reshape(-1, axes_product(axes, mesh))
    return [tuple(group) for group in alike.tolist()]


def transfers(step: Any, sizes: Mapping[str, int], mesh: Mapping[str, int], itemsize: int) -> list[Transfer]:
    """Return what each device receives that it does not hold. A psum is left out: what travels are sums on their
    way."""
    if step.kind in ("split", "psum"):
        return []
    before, after = _ranges(step.before, sizes, mesh), _ranges(step.after, sizes, mesh)
    found = []
    for group in groups(step.axes, mesh):
        for to in group:
            # summands of equal place are different values: each is a source of its own
            owner = (lambda device: device) if step.kind == "psum_scatter" else before.__getitem__
            for sources in grouped(group, owner).values():
                count = 0 if to in sources else _overlap(before[sources[0]], after[to])
                if count:
                    found.append(Transfer(to, sources, count * itemsize))
    return found


def _ranges(layout: Layout, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> list[Ranges]:
    """Return what each device holds, per name; a composite is as many names."""
    names = Layout.from_dims([Dim((atom,)) for atom in layout.atoms])
    held = of_layout(names, sizes, AbstractMesh(tuple(mesh.values()), tuple(mesh)), call="plan(...)")
    runs = [[(start, stop) for [(_, _, start, stop)] in side.blocks] for side in held.sides]
    return [tuple(run[n] for run, n in zip(runs, blocks, strict=True)) for blocks in held.held.tolist()]


def _overlap(a: Ranges, b: Ranges) -> int:
    return math.prod(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x, y in zip(a, b, strict=True))
