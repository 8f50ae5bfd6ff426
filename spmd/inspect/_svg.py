"""SVG from boxes: pieces of drawing with their sizes, put beside and below others.

Text is monospaced, so that widths are known. Nothing outside is referred to, and no ids or styles could clash in a
notebook. A light card lies under the drawing, so that it reads the same on dark and light pages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

__all__ = [
    "EDGES",
    "FAINT",
    "FILLS",
    "INK",
    "WIDTH",
    "Box",
    "beside",
    "below",
    "card",
    "element",
    "flow",
    "paragraph",
    "text",
]

# Tints and shades of Okabe and Ito's colours, which colour-blind readers can tell apart
# (https://jfly.uni-koeln.de/color/); dark text reads on every tint.
FILLS = ("#f5cf80", "#abdaf4", "#80cfb9", "#f8f2a1", "#80b9d9", "#eaaf80", "#e6bcd3", "#b0b0b0")
EDGES = ("#8a5f00", "#1f6d9c", "#00694d", "#8a8000", "#004c77", "#8e3f00", "#8f4a6d", "#595959")
INK, FAINT, CARD, RIM = "#1f2328", "#57606a", "#ffffff", "#c8ccd1"

WIDTH = 900  # of a drawing, where its parts can be wrapped
_LINE, _CHAR, _SIZE = 17.0, 7.25, 12
_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of SVG that fills a rectangle from (0, 0)."""

    width: float
    height: float
    body: str


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; underscores in attributes are hyphens, numbers are written short."""
    parts = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_number(value))}" for key, value in attributes.items()
    )
    return f"<{name}{parts}>{content}</{name}>" if content else f"<{name}{parts}/>"


def text_width(words: str) -> float:
    return len(words) * _CHAR


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = INK, weight: str | None = None) -> str:
    """A line of text whose middle is at height `y`."""
    more = {} if weight is None else {"font_weight": weight}
    return element("text", escape(words), x=x, y=y + 4, text_anchor=anchor, fill=fill, **more)


def paragraph(words: str, *, width: float = WIDTH, fill: str = INK, weight: str | None = None) -> Box:
    """Lines of text, wrapped."""
    lines = textwrap.wrap(words, int(width / _CHAR), break_on_hyphens=False) or [""]
    body = "".join(text(0, _LINE * (n + 0.5), line, fill=fill, weight=weight) for n, line in enumerate(lines))
    return Box(max(map(text_width, lines)), _LINE * len(lines), body)


def moved(box: Box, x: float, y: float) -> str:
    return element("g", box.body, transform=f"translate({_number(x)} {_number(y)})") if x or y else box.body


def beside(boxes: Sequence[Box], gap: float = 28) -> Box:
    """Boxes from left to right, their tops level."""
    bodies, x = [], 0.0
    for box in boxes:
        bodies.append(moved(box, x, 0))
        x += box.width + gap
    return Box(max(0.0, x - gap), max((box.height for box in boxes), default=0.0), "".join(bodies))


def below(boxes: Sequence[Box], gap: float = 14) -> Box:
    """Boxes from top to bottom."""
    bodies, y = [], 0.0
    for box in boxes:
        bodies.append(moved(box, 0, y))
        y += box.height + gap
    return Box(max((box.width for box in boxes), default=0.0), max(0.0, y - gap), "".join(bodies))


def flow(boxes: Sequence[Box]) -> Box:
    """Boxes side by side, on as many rows as the width asks for."""
    rows: list[list[Box]] = []
    for box in boxes:
        if rows and beside([*rows[-1], box]).width <= WIDTH:
            rows[-1].append(box)
        else:
            rows.append([box])
    return below([beside(row) for row in rows])


def card(box: Box, title: str) -> str:
    """A whole SVG document: the box on a light card."""
    edge = 16
    width, height = box.width + 2 * edge, box.height + 2 * edge
    ground = element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=8, fill=CARD, stroke=RIM)
    content = element("title", escape(title)) + ground + moved(box, edge, edge)
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        font_family=_FONT,
        font_size=_SIZE,
    )


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
