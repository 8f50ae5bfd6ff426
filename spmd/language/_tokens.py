"""From a string to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from spmd.language._syntax import Span, fault

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<ellipsis>\.\.\.)|(?P<arrow>->)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<int>[0-9]+)|(?P<punct>[/+()\[\]{}:,])|(?P<bad>.)",
    re.DOTALL,
)
_LOOKALIKES = {
    "…": "...",
    "→": "->",
    "⇒": "->",
    "＝": "->",
    "∕": "/",
    "⁄": "/",
    "÷": "/",
    "\\": "/",
    "|": "/",
}


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int

    @property
    def span(self) -> Span:
        return (self.start, self.end)


def fixed(source: str, start: int, end: int, text: str) -> str:
    """The source with a part replaced, in quotes: a fix to paste. Of a source of several lines, that line alone."""
    whole = source[:start] + text + source[end:]
    if "\n" in whole:
        first = whole.rfind("\n", 0, start) + 1
        last = whole.find("\n", start + len(text))
        return whole[first : last if last >= 0 else len(whole)].strip()
    return f'"{whole.strip()}"'


def tokenize(source: str) -> list[Token]:
    tokens: list[Token] = []
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or "bad"
        if kind == "bad":
            _bad(source, match.start())
        if kind != "space":
            text = match.group()
            tokens.append(Token(text if kind in ("punct", "arrow", "ellipsis") else kind, text, *match.span()))
    tokens.append(Token("end", "", len(source), len(source)))
    return tokens


def _bad(source: str, at: int) -> NoReturn:
    """A character that is not part of the language, with a guess at what was meant."""
    rest = source[at:]
    for wrong in ("=>", ">", "-", "="):
        arrow = re.match(r"[-=]*>|-+|=+", rest)
        if rest.startswith(wrong) and arrow:
            raise fault(
                "The two sides of a pattern are separated by '->'.",
                (at, at + arrow.end()),
                fixed(source, at, at + arrow.end(), "->"),
            )
    if rest[0] == ".":
        dots = len(rest) - len(rest.lstrip("."))
        left = " " if source[at - 1 : at].strip() else ""
        right = " " if rest[dots : dots + 1].strip() else ""
        fix = fixed(source, at, at + dots, f"{left}...{right}")
        raise fault("Any number of dimensions is written '...', three dots.", (at, at + dots), fix)
    shown = rest[0] if rest[0].isprintable() else f"U+{ord(rest[0]):04X}"
    if rest[0] in _LOOKALIKES:
        better = _LOOKALIKES[rest[0]]
        raise fault(f"A layout has no '{shown}'; write '{better}'.", (at, at + 1), fixed(source, at, at + 1, better))
    if rest[0] == "*":
        raise fault(
            "A layout has no '*'; any number of dimensions is '...', a product of two is '(h k)'.",
            (at, at + 1),
        )
    if rest[0] in ";|":
        fix = fixed(source, at, at + 1, ",")
        raise fault("Layouts are separated by ','.", (at, at + 1), fix)
    if rest[0].isidentifier():
        raise fault(f"Names consist of ASCII letters, digits and '_', and '{shown}' is not one of them.", (at, at + 1))
    raise fault(f"A layout has no character '{shown}'.", (at, at + 1))
