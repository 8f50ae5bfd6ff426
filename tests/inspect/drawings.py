"""What a drawing says, read back from the drawing: devices from the text, blocks and boxes from the SVG."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.language import Layout

SVG = "{http://www.w3.org/2000/svg}"
CHAR = 7.22  # px of a character of a monospaced font at 12 px: 0.602 em in DejaVu Sans Mono and Menlo


def expected_index(layout: Layout, shape: tuple[int, ...], mesh: Mapping[str, int]) -> list[tuple[range, ...]]:
    """What each device holds, in mesh order, by cutting ranges axis after axis; margins left out."""
    found = []
    for place in itertools.product(*map(range, mesh.values())):
        at = dict(zip(mesh, place, strict=True))
        held = []
        for dim, size in zip(layout.dims, shape, strict=True):
            run = range(size)
            for axis in dim.axes:
                parts = np.array_split(np.array(run), mesh[axis])
                run = range(int(parts[at[axis]][0]), int(parts[at[axis]][-1]) + 1)
            held.append(run)
        found.append(tuple(held))
    return found


def devices_of_text(text: str) -> list[int]:
    """All device numbers in the cells of a picture's grids, runs written out; labels between panels are not cells."""
    found: list[int] = []
    for line in text.splitlines():
        for cell in re.findall(r"(?<=│)[^│]*(?=│)", line):
            if re.fullmatch(r"(sum|[\d\s,().-])*", cell):
                for low, high, one in re.findall(r"(\d+)-(\d+)|(\d+)", cell):
                    found += [int(one)] if one else range(int(low), int(high) + 1)
    return found


def blocks_of_svg(svg: str) -> dict[int, str]:
    """For each device the block that the SVG draws it in."""
    found: dict[int, str] = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        for device in group.get("data-devices", "").split():
            assert int(device) not in found, f"device {device} is drawn twice"
            found[int(device)] = group.get("data-index", "")
    return found


@dataclass(frozen=True)
class Word:
    """A text of an SVG with the rectangle that it covers on the page."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Word) -> bool:
        return (
            min(self.right, other.right) - max(self.left, other.left) > 0.5
            and min(self.bottom, other.bottom) - max(self.top, other.top) > 0.5
        )


def words(svg: str) -> list[Word]:
    """Every text with its place, transforms applied."""
    return list(_words(ET.fromstring(svg), 0.0, 0.0))


def _words(element: ET.Element, x: float, y: float) -> Iterator[Word]:
    moved = re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    if element.tag == f"{SVG}text":
        text = element.text or ""
        width = CHAR * len(text) * (1.02 if element.get("font-weight") else 1.0)
        left = (
            x
            + float(element.get("x", 0))
            - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
        )
        base = y + float(element.get("y", 0))
        yield Word(text, left, base - 9.0, left + width, base + 2.5)
    for child in element:
        yield from _words(child, x, y)


def steps_of_svg(svg: str) -> Iterator[tuple[Word, list[tuple[float, float, float, float]], Word]]:
    """For each step of a plan the rectangle of the cells before it, its arrows from end to end, and the cells after."""
    cells: list[Word] = []
    arrows: list[tuple[float, float, float, float]] = []
    steps: list[tuple[list[Word], list[tuple[float, float, float, float]], list[Word]]] = []
    for kind, item in _shapes(ET.fromstring(svg), 0.0, 0.0):
        if kind == "arrow":
            arrows.append(item)
        elif arrows:  # the grid after them
            steps.append((cells, arrows, [item]))
            cells, arrows = [], []
        elif kind == "cell" and steps and not cells and item.text not in {c.text for c in steps[-1][2]}:
            steps[-1][2].append(item)
        else:
            cells.append(item)
    for before, between, after in steps:
        yield _around(before), between, _around(after)


def _around(cells: list[Word]) -> Word:
    sides = [min(c.left for c in cells), min(c.top for c in cells)]
    return Word("", *sides, max(c.right for c in cells), max(c.bottom for c in cells))


def _shapes(element: ET.Element, x: float, y: float) -> Iterator[tuple[str, Any]]:
    """Cells of grids and arrows, in the order they are drawn, transforms applied."""
    moved = re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    at = lambda child, *names: [float(child.get(name, 0)) + (x if name[0] == "x" else y) for name in names]
    if element.get("data-index") is not None:
        rect = element.find(f"{SVG}rect")
        assert rect is not None
        left, top = at(rect, "x", "y")
        right, bottom = left + float(rect.get("width", 0)), top + float(rect.get("height", 0))
        yield "cell", Word(element.get("data-index", ""), left, top, right, bottom)
    elif element.tag == f"{SVG}line":
        yield "arrow", tuple(at(element, "x1", "y1", "x2", "y2"))
    for child in element:
        yield from _shapes(child, x, y)


def faults_of_svg(svg: str) -> list[str]:
    """Texts that overlap each other or leave the page."""
    page = ET.fromstring(svg)
    width, height = float(page.get("width", 0)), float(page.get("height", 0))
    found = words(svg)
    outside = [w.text for w in found if w.left < 0 or w.top < 0 or w.right > width or w.bottom > height]
    meeting = [f"{a.text!r} and {b.text!r}" for a, b in itertools.combinations(found, 2) if a.meets(b)]
    return [*(f"{text!r} is clipped" for text in outside), *meeting]
