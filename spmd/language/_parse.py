"""From a string to dimensions and marks. This module does not know arrays, meshes or JAX.

layout  :=  'scalar'  |  dim* mark*
dim     :=  '...'  |  [margin '+'] core ['+' margin]  |  '[' core ']'
core    :=  (NAME | INT | '_' | '(' (NAME ('/' AXIS)*)+ ')')  ( '/1' | ('/' AXIS)* )
mark    :=  '{U:' AXIS (',' AXIS)* '}'  |  '{R:' AXIS (',' AXIS)* '}'
pattern :=  layout (',' layout)* '->' layout (',' layout)*
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import NoReturn

from spmd.errors import LayoutError
from spmd.language._syntax import Atom, Dim, Parsed, Span, Token, check_rules, fault, fixed, normal, replaced, tokenize

_COMMAS = "A mark lists names of mesh axes, separated by commas."
_MAX_DIGITS = 18  # int() of thousands of digits is a ValueError in Python, and no array is that large


class Parser:
    """Recursive descent over the tokens of one string; every fault has a span."""

    def __init__(self, source: str):
        self.source = source
        self.tokens = tokenize(source)
        self.index = 0
        self.token = self.tokens[0]
        self.end = -1  # of the last token read
        self.touching = False  # whether no space stands before the current token

    def advance(self) -> Token:
        token = self.token
        self.index = min(self.index + 1, len(self.tokens) - 1)
        self.token, self.end = self.tokens[self.index], token.end
        self.touching = self.end == self.token.start
        return token

    def fixed(self, start: int, end: int, text: str) -> str:
        return fixed(self.source, start, end, text)

    def wrong(self, rule: str, span: Span | None = None, text: str | None = None) -> LayoutError:
        """Return what is wrong with a part of the string, by default the current token. `text` there mends it."""
        start, end = span or self.token.span
        return replaced(rule, self.source, start, end, text)

    def closed(self) -> str:
        """The whole string without spaces around its slashes."""
        text = re.sub(r"\s*/\s*", "/", self.source)
        return f'"{text}"'

    def spaced(self) -> str:
        """The rest, with a space between dimensions that touch; parentheses and marks stay as they are."""
        text, depth = self.source[self.token.start :], 0
        gaps = []
        for before, token in itertools.pairwise(self.tokens[self.index - 1 :]):
            depth += (before.text in ("(", "{")) - (before.text in (")", "}"))
            ends = before.kind in ("name", "int", "...", ")", "]")
            begins = token.kind in ("name", "int", "...", "(", "[")
            if ends and begins and not depth and before.end == token.start:
                gaps.append(token.start - self.token.start)
        for gap in reversed(gaps):
            text = f"{text[:gap]} {text[gap:]}"
        return fixed(self.source, self.token.start, len(self.source), text)

    # layouts and patterns

    def single(self) -> Parsed:
        """A string that is one layout."""
        parsed = self.layout()
        if self.token.kind == "->":
            raise self.wrong("A layout has no '->'; two layouts with an arrow between them are a Pattern.")
        if self.token.kind == ",":
            raise self.wrong("A layout has no comma; several layouts make a Pattern.")
        return parsed

    def pattern(self, arrow: bool) -> tuple[list[Parsed], list[Parsed], bool, bool]:
        """Both sides of a pattern, and whether each of them was empty."""
        left, empty_left = self.side()
        if not arrow:
            if self.token.kind == "->":
                without = f'"{self.source[: self.token.start].strip()}"'
                raise fault("This takes the layout of its operands only, without '->'.", self.token.span, without)
            return left, [], empty_left, True
        if self.token.kind != "->":
            have = self.source.strip()
            raise fault(
                "A pattern has two sides with '->' between them: what you have -> what you want.",
                (0, len(self.source)),
                advice=f'"{have} -> ..." with what you want in place of the dots' if have else None,
            )
        self.advance()
        right, empty_right = self.side()
        if self.token.kind == "->":
            raise self.wrong("A pattern has one '->', this is the second.")
        return left, right, empty_left, empty_right

    def side(self) -> tuple[list[Parsed], bool]:
        layouts: list[Parsed] = []
        while self.token.kind not in ("->", "end"):
            if self.token.kind == ",":
                rule = "A layout is empty only when it is the whole side; a scalar among others is 'scalar'."
                raise fault(rule, self.token.span, self.fixed(self.token.start, self.token.start, "scalar"))
            layouts.append(self.layout())
            if self.token.kind != ",":
                break
            self.advance()
        return (layouts, False) if layouts else ([Parsed((), (), (), self.source)], True)

    def layout(self) -> Parsed:
        first = self.index
        if self.token.text == "scalar" and self.tokens[self.index + 1].kind in (",", "->", "end"):
            self.advance()
            return Parsed((), (), (), self.source)
        dims: list[Dim] = []
        marks: dict[str, tuple[str, ...]] = {}
        spans: dict[str, Span] = {}
        while self.token.kind not in (",", "->", "end"):
            if self.token.kind == "{":
                self.mark(marks, spans)
                continue
            if self.index > first and self.touching and self.token.kind not in ("/", "+", ")", "]", "}", ":"):
                raise fault("Dimensions are separated by spaces.", self.token.span, self.spaced())
            if marks:
                raise self.wrong("The marks {U:...} and {R:...} come after all dimensions.")
            dims.append(self.dim(first))
        unreduced, reduced = marks.get("U", ()), marks.get("R", ())
        check_rules(dims, unreduced, reduced, spans)
        return Parsed(tuple(dims), tuple(sorted(unreduced)), tuple(sorted(reduced)), self.source)

    # dimensions

    def dim(self, first: int) -> Dim:
        token = self.token
        if token.kind == "...":
            self.advance()
            if self.token.kind in ("/", "+") and self.touching:
                rule = "The dimensions of '...' lie as the operand has them; they take no axis and no margin."
                raise self.wrong(rule, (token.start, self.token.end))
            return Dim((), ellipsis=True, span=token.span)
        if token.kind == "[":
            return self.bracket()
        if token.kind not in ("name", "int", "("):
            self.stray(first)
        core = self.core()
        return self.with_margin(core) if self.token.kind == "+" and self.touching else core

    def stray(self, first: int) -> NoReturn:
        """A token that cannot begin a dimension."""
        token = self.token
        before = self.tokens[self.index - 1] if self.index > first else None
        if token.kind in (")", "]", "}"):
            raise fault(f"'{token.text}' closes nothing.", token.span)
        if token.kind in ("/", "+") and before is not None:
            after = self.tokens[self.index + 1]
            fix = self.fixed(before.end, after.start if after.kind in ("name", "int") else token.end, token.text)
            fix = self.closed() if token.kind == "/" else fix
            raise fault(f"No space stands before or after '{token.text}'.", (before.end, token.end), fix)
        if token.kind == "/":
            raise fault("A dimension comes before '/': 'b/dp' is b divided over dp.", token.span)
        if token.kind == "+":
            raise fault("A margin is a number beside a dimension: '1+x/a+1'.", token.span)
        between = before is not None and self.tokens[self.index + 1].kind == "name"
        raise self.wrong("A ':' occurs only in the marks {U:axis} and {R:axis}.", None, "/" if between else None)

    def with_margin(self, core: Dim) -> Dim:
        """`1+x/a+1`: numbers on either side of a core."""
        parts = [core]
        while self.token.kind == "+" and self.touching:
            plus = self.advance()
            if not self.touching or self.token.kind not in ("name", "int", "("):
                after = self.token
                fix = self.fixed(plus.end, after.start, "") if after.kind in ("name", "int", "(") else None
                raise fault("A margin is a number beside a dimension, without spaces: '1+x/a+1'.", plus.span, fix)
            parts.append(self.core())
        span = (parts[0].span[0], parts[-1].span[1])
        plain = [part.atoms[0].size if not part.composite and not part.axes else None for part in parts]
        at = 1 if len(parts) == 3 or (plain[0] is not None and plain[1] is None) else 0
        low, high = plain[0] if at else 0, plain[-1] if at + 1 < len(parts) else 0
        if len(parts) == 2 and None not in plain:
            rule = "Which of the two numbers is the margin? Name the dimension, or write both margins."
            sides = f"{parts[0].text}+{parts[1].text}"
            raise fault(rule, span, advice=f"'{sides}+0' or '0+{sides}'")
        if len(parts) > 3 or low is None or high is None:
            raise fault("A dimension has at most one margin on each side, and a margin is a number: '1+x/a+1'.", span)
        return replace(parts[at], margin=(low, high), span=span)

    def bracket(self) -> Dim:
        opening = self.advance()
        if self.token.kind == "]":
            rule = "Brackets hold the dimension that the operation works along: '[k]'."
            raise self.wrong(rule, (opening.start, self.token.end))
        if self.token.kind in (",", "->", "end"):
            raise fault("This '[' is never closed.", opening.span)
        if self.token.kind not in ("name", "int", "("):
            raise self.wrong("Brackets hold one dimension: a name, a number or a '(h k)'.")
        core = self.core()
        if self.token.kind in ("name", "int", "("):
            between = self.fixed(core.span[1], self.token.start, "] [")
            raise fault("Brackets hold one dimension; give each its own.", self.token.span, between)
        if self.token.kind == "+":
            raise self.wrong("A dimension in brackets has no margin.")
        if self.token.kind != "]":
            raise fault("This '[' is never closed.", opening.span)
        closing = self.advance()
        if self.token.kind == "/" and self.touching:
            axes = re.match(r"[/A-Za-z0-9_]+", self.source[closing.end :])
            end = closing.end + (axes.end() if axes else 1)
            inside = self.fixed(closing.start, end, self.source[closing.end : end] + "]")
            raise fault("The mesh axis stands inside the brackets.", (closing.end, end), inside)
        if self.token.kind == "+" and self.touching:
            raise self.wrong("A dimension in brackets has no margin.")
        return replace(core, bracket=True, span=(opening.start, closing.end))

    def core(self) -> Dim:
        token = self.token
        if token.kind == "(":
            return self.group()
        self.advance()
        if token.kind == "int":
            size = self.number(token)
            axes = self.axes(token)
            return Dim((Atom(str(size), axes or (), size, (token.start, self.end)),), span=(token.start, self.end))
        self.name(token)
        axes = self.axes(token)
        span = (token.start, self.end)
        if token.text == "_":
            if axes == ():
                rule = "An unnamed dimension is whole unless an axis divides it; '_' says so already."
                raise self.wrong(rule, span, "_")
            axes = axes or ()
        return Dim((Atom(token.text, axes, None, span),), span=span)

    def number(self, token: Token) -> int:
        if len(token.text.lstrip("0")) > _MAX_DIGITS:
            raise fault(f"A literal size has at most {_MAX_DIGITS} digits.", token.span)
        if self.token.kind == "name" and self.touching:
            raise fault("A name begins with a letter.", (token.start, self.token.end))
        return int(token.text.lstrip("0") or "0")

    def name(self, token: Token) -> None:
        if token.text == "scalar":
            fix = None
            if self.token.kind == "{" and (brace := self.source.find("}", token.start)) > 0:
                mark = self.source[self.token.start : brace + 1]
                fix = self.fixed(token.start, brace + 1, mark)
            raise fault("'scalar' is a whole layout: no dimension, axis or mark stands beside it.", token.span, fix)
        if not token.text.strip("_") and token.text != "_":
            raise fault("A name has a letter in it; '_' alone is an unnamed dimension.", token.span)

    def group(self) -> Dim:
        """`(h k)/tp`, `(b/dp s/cp)`."""
        opening = self.advance()
        atoms: list[Atom] = []
        while self.token.kind != ")":
            token = self.advance()
            if token.kind in (",", "->", "end"):
                raise fault("This '(' is never closed.", opening.span)
            if token.kind != "name" or token.text == "_":
                self.no_factor(token, atoms)
            self.name(token)
            axes = self.axes(token)
            if axes == ():
                rule = "A factor takes mesh axes only; '/1' stands after the whole of it: '(h k)/1'."
                raise self.wrong(rule, (token.start, self.end))
            atoms.append(Atom(token.text, axes, None, (token.start, self.end)))
        closing = self.advance()
        if not atoms:
            self.empty_group(opening, closing)
        axes = self.axes(closing)
        span = (opening.start, self.end)
        if axes is not None:
            if any(atom.axes for atom in atoms):
                raise fault("Mesh axes stand on the factors or after the whole '(h k)', not on both.", span)
            atoms = [replace(atom, axes=() if place else axes) for place, atom in enumerate(atoms)]
        return normal(Dim(tuple(atoms), composite=True, span=span))

    def no_factor(self, token: Token, atoms: list[Atom]) -> NoReturn:
        """Something other than a name among the factors of a composite."""
        if token.kind == "/" and atoms:
            raise fault("No space stands before or after '/'.", token.span, self.closed())
        if token.kind == "{":
            self.braces(token)
        if token.kind == "(":
            raise fault("A '(h k)' holds names, not another '('.", token.span)
        if token.kind == "int":
            fix = f"{self.fixed(token.start, token.end, 'n')}, n={token.text}"
            raise fault("The factors of a '(h k)' are names; a keyword binds a size.", token.span, fix)
        raise fault("The factors of a '(h k)' are names.", token.span)

    def empty_group(self, opening: Token, closing: Token) -> NoReturn:
        """`()`: a scalar in other notations."""
        before = self.tokens[self.tokens.index(opening) - 1].kind  # of the first: the end token
        alone = before in (",", "->", "end") and self.token.kind in (",", "->", "end")
        span = (opening.start, closing.end)
        raise self.wrong("A scalar is written 'scalar', not '()'.", span, "scalar" if alone else None)

    # mesh axes

    def axes(self, owner: Token) -> tuple[str, ...] | None:
        """`/dp/tp` after a name; None if there is none, `()` for `/1`."""
        found: list[str] = []
        while self.token.kind == "/" and self.touching:
            slash = self.advance()
            token = self.token
            if token.kind not in ("name", "int") or not self.touching:
                self.no_axis(slash, token)
            if token.kind == "int" and token.text != "1":
                raise self.wrong("'/' takes the name of a mesh axis (or 1 for whole), not a number of devices.")
            if token.kind == "name" and not token.text.strip("_"):
                raise self.wrong("A mesh axis has a name with a letter in it.")
            found.append(self.advance().text)
            if token.kind == "int" and self.token.kind == "name" and self.touching:
                raise fault("A name begins with a letter.", (token.start, self.token.end))
        if not found:
            return None
        if "1" in found:
            if len(found) > 1:
                raise fault("'/1' says whole; no other axis stands beside it.", (owner.start, self.end))
            return ()
        return tuple(found)

    def no_axis(self, slash: Token, token: Token) -> NoReturn:
        """Something other than a mesh axis after a slash."""
        if token.kind == "/" and self.touching:
            rest = self.source[token.start :]
            end = token.start + len(rest) - len(rest.lstrip("/"))  # of the run of slashes
            raise self.wrong("One '/' stands before each mesh axis.", (slash.start, end), "/")
        if token.kind == "{" and self.touching:
            self.braces(token, "/")
        if token.kind == "(" and self.touching:
            raise fault("Several mesh axes are written one after another: 'b/dp/fsdp'.", token.span)
        if token.kind in ("name", "int") and not self.touching:
            raise fault("No space stands before or after '/'.", (slash.start, token.start), self.closed())
        raise fault("'/' takes the name of a mesh axis, or 1 for whole.", slash.span)

    def braces(self, opening: Token, before: str = "") -> NoReturn:
        """`{b}`, as left over from an f-string or str.format."""
        close = self.source.find("}", opening.start)
        end = close + 1 if close >= 0 else opening.end
        inside = self.source[opening.end : end - 1].strip() if close >= 0 else ""
        word = inside if inside.isascii() and inside.isidentifier() else "axis" if before else "n"
        what = "mesh axes" if before else "sizes and mesh axes"
        raise fault(
            f"Strings are constants: braces hold the marks {{U:axis}} and {{R:axis}}, and keywords bind {what}.",
            (opening.start, end),
            advice=f"{self.fixed(opening.start, end, word)}, {word}=...",
        )

    def mark(self, marks: dict[str, tuple[str, ...]], spans: dict[str, Span]) -> None:
        """`{U:dp,tp}`."""
        opening = self.advance()
        kind, colon = self.token, self.tokens[min(self.index + 1, len(self.tokens) - 1)]
        if kind.kind in ("}", "name") and colon.kind != ":" and kind.text not in ("U", "R"):
            self.braces(opening)
        if kind.text not in ("U", "R"):
            better = kind.text.upper()
            fix = self.fixed(kind.start, kind.end, better) if better in ("U", "R") else None
            raise fault("The marks are {U:axis}, a partial sum, and {R:axis}, reduced.", (opening.start, kind.end), fix)
        self.advance()
        if self.token.kind == "}" or (self.token.kind == ":" and self.tokens[self.index + 1].kind == "}"):
            raise self.wrong(f"A mark names its mesh axes: {{{kind.text}:axis}}.", (opening.start, self.token.end))
        if self.token.kind != ":":
            raise fault(f"A mark is written {{{kind.text}:axis}}.", (opening.start, kind.end))
        self.advance()
        axes = self.mark_axes(opening, kind.text, spans)
        if kind.text in marks:
            rule, both = f"A layout has one {{{kind.text}:...}}; it lists all its axes.", (*marks[kind.text], *axes)
            raise fault(rule, (opening.start, self.end), advice=f"{{{kind.text}:{','.join(both)}}}")
        marks[kind.text] = axes

    def mark_axes(self, opening: Token, kind: str, spans: dict[str, Span]) -> tuple[str, ...]:
        axes: dict[str, None] = {}
        while True:
            token = self.token
            if token.kind in ("->", "end"):
                raise fault("This '{' is never closed.", opening.span)
            if token.kind != "name" or not token.text.strip("_"):
                raise self.wrong(_COMMAS)
            if token.text in axes:
                raise self.wrong(f"A mesh axis occurs once in a layout, but '{token.text}' is twice in {{{kind}:...}}.")
            axes[token.text] = None
            spans[token.text] = token.span
            self.advance()
            closing = self.token
            if closing.kind in ("name", "/"):
                end = closing.end if closing.kind == "/" else closing.start
                raise fault(_COMMAS, closing.span, self.fixed(token.end, end, ","))
            if closing.kind not in (",", "}"):
                raise fault("This '{' is never closed.", opening.span)
            self.advance()
            if closing.kind == "}":
                return tuple(axes)
