"""The user's source: which names its statements give to what, and how it is shown with a layout beside each line."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spmd._jaxprs.lines import short_file
from spmd._text import Line, Report, Row, Table, html_page, wrapped
from spmd.checker._finding import Finding

Span = tuple[int, int, int, int]  # the line and the column where an expression begins, and where it ends

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Function:
    """A function of the user's.

    Attributes:
      name: Its name.
      file: Its file, as Python knows it.
      first: Its first line, that of a decorator if it has one.
      last: Its last line.
      node: Its syntax; None without the source.
    """

    name: str
    file: str
    first: int
    last: int = 0
    node: Any = field(default=None, compare=False)

    def is_in(self, other: Function) -> bool:
        """Return whether it is another one, or stands inside of it."""
        return self == other or (self.file == other.file and other.first <= self.first <= self.last <= other.last)


class Slot(NamedTuple):
    """An expression whose value a statement names, or returns.

    Attributes:
      line: The line beside which it is shown.
      names: What it is called: several where a tuple is taken apart, none of what is returned.
      value: The expression.
      number: Which of several returned values it is.
    """

    line: int
    names: tuple[str, ...]
    value: Any
    number: int = 0

    def holds(self, span: Span) -> bool:
        return _inside(span, self.value)


class Texts:
    """The source of files, each read once: on disk, cells of a notebook, whatever else Python's `linecache` knows."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[list[str], list[Function]]] = {}

    def lines(self, file: str) -> list[str]:
        return self._read(file)[0]

    def line(self, file: str, number: int) -> str:
        """One line, or "" without the source."""
        lines = self.lines(file)
        return lines[number - 1].rstrip("\n") if 0 < number <= len(lines) else ""

    def function_at(self, file: str, span: Span, name: str = "") -> Function | None:
        """The innermost function around an expression. If its name is given too: None where the file has changed."""
        found = None
        for function in self._read(file)[1]:
            if _inside(span, function.node):
                found = function
        known = name.startswith("<") or found is None or found.name == name or not name
        return found if known else None

    def function_on(self, file: str, number: int) -> Function | None:
        """The innermost function that has a line."""
        found = [one for one in self._read(file)[1] if one.first <= number <= one.last]
        return found[-1] if found else None

    def function_of(self, file: str, first: int, name: str) -> Function | None:
        """The function with this first line and this name, if there is only one."""
        found = [one for one in self._read(file)[1] if (one.first, one.name) == (first, name)]
        return found[0] if len(found) == 1 else None

    def _read(self, file: str) -> tuple[list[str], list[Function]]:
        if file not in self._files:
            lines = linecache.getlines(file)
            try:
                tree: Any = ast.parse("".join(lines))
            except (SyntaxError, ValueError):
                tree = ast.Module([], [])
            nodes = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
            nodes.sort(key=lambda node: (node.lineno, node.col_offset))
            self._files[file] = lines, [_function(file, node) for node in nodes]
        return self._files[file]


def _function(file: str, node: Any) -> Function:
    decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
    first = min([node.lineno, *decorators])
    return Function(getattr(node, "name", "<lambda>"), file, first, node.end_lineno or first, node)


def _inside(span: Span, node: Any) -> bool:
    begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return begin <= span[:2] and span[2:] <= end


def parameters(function: Function) -> dict[str, int]:
    """The lines on which a function names its parameters."""
    given = function.node.args
    nodes = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return {node.arg: node.lineno for node in nodes if node is not None}


def slots(function: Function) -> list[Slot]:
    """Return what a function names and returns, in the order of its lines; not what functions inside of it do."""
    if isinstance(function.node, ast.Lambda):
        return [Slot(function.node.body.lineno, (), function.node.body)]
    return [slot for statement in _statements(function.node.body) for slot in _slots_of(statement)]


def returned(function: Function) -> list[Slot]:
    """The values of the one statement that returns something; nothing where there are several."""
    nodes = [one for one in _statements(getattr(function.node, "body", [])) if isinstance(one, ast.Return)]
    return list(_slots_of(nodes[0])) if len(nodes) == 1 else []


def _statements(body: Any) -> Iterator[ast.stmt]:
    for statement in body if isinstance(body, list) else ():
        yield statement
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, part, []))
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _statements(part.body)


def _slots_of(statement: ast.stmt) -> Iterator[Slot]:
    for node in _expressions(statement):
        if isinstance(node, ast.NamedExpr):
            yield from _paired(node.target, node.value)
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _paired(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _paired(target, value)
        case ast.AugAssign(target=target):
            yield Slot(statement.lineno, (ast.unparse(target),), statement)
        case ast.For(target=target, iter=value):
            for one in value.elts if isinstance(value, ast.Tuple | ast.List) else [value]:
                yield from _paired(target, one)
        case ast.With(items=items):
            for item in items:
                if item.optional_vars is not None:
                    yield from _paired(item.optional_vars, item.context_expr)
        case ast.Return(value=ast.Tuple(elts=elements)):
            for number, one in enumerate(elements):
                yield Slot(statement.lineno, (), one, number)
        case ast.Return(value=ast.expr() as value):
            yield Slot(statement.lineno, (), value)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[Slot]:
    """Targets and what they are given, one by one as far as the syntax says so."""
    if isinstance(target, ast.Tuple | ast.List):
        starred = any(isinstance(one, ast.Starred) for one in target.elts)
        each = value.elts if isinstance(value, ast.Tuple | ast.List) else ()
        if not starred and len(each) == len(target.elts):
            for one, given in zip(target.elts, each, strict=True):
                yield from _paired(one, given)
            return
        yield Slot(target.lineno, tuple(map(ast.unparse, target.elts)), value)
        return
    yield Slot(target.lineno, (ast.unparse(target),), value)


# --- a program as its user wrote it, with the layouts that were inferred beside each line -----------------------------


_HEAD = ("source", "layouts")  # as HTML and a style sheet know the columns
_INDENT = 2  # spaces before each line; a finding has its mark there


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a line makes.

    Attributes:
      name: What the line calls it: `h`, `state.sum`, or `a, b` where it is not known which is which. A returned value
        does not have a name.
      layouts: How it lies, one text for each way: `("b/dp s f/tp",)`. A line that runs several times may have several.
    """

    name: str
    layouts: tuple[str, ...]

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.name, " | ".join(self.layouts))))


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the program.

    Attributes:
      number: Its number in the file, from 1. Findings without a known line have 0.
      text: Its text. Without the source it is "", and values have the names of primitives.
      values: What it makes.
      findings: What is wrong with it.
    """

    number: int
    text: str
    values: tuple[Value, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A function of the program.

    Attributes:
      name: Its name.
      file: Its file, as Python knows it.
      lines: Its lines, each of them where the source is known.
    """

    name: str
    file: str
    lines: tuple[SourceLine, ...]

    @property
    def title(self) -> str:
        """`norms  train.py:12`."""
        place = f"{short_file(self.file)}:{self.lines[0].number}" if self.file else ""
        return "  ".join(filter(None, (self.name, place)))


@dataclass(frozen=True)
class Source(Report):
    """The source of a program with the layout of each value; made by `spmd.check(...).source()`.

    Printing it shows the text. In a notebook it is a table.

    Attributes:
      blocks: The user's functions, in the order in which they run.
      mesh: The sizes of the mesh axes.
    """

    blocks: tuple[SourceBlock, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)

    def text(self, width: int | None = None) -> str:
        """The source, with what was found on lines of `width`, by default the terminal's. Layouts that do not fit
        beside a line of the program stand below it."""
        return self._text(width)

    def _repr_html_(self) -> str:
        return html_page(_heading(self), [_table(block) for block in self.blocks])

    def _lines(self, width: int) -> list[Line]:
        tables = [_table(block, "# ", width).lines() for block in self.blocks]
        return [[(_heading(self), "bold")], *(line for table in tables for line in table)]


def _heading(source: Source) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in source.mesh.items())
    return f"mesh {mesh}" if mesh else "the trace ended before its end" if source.blocks else "no kernel, no shard_map"


def _table(block: SourceBlock, mark: str = "", width: int | None = None) -> Table:
    """The lines of a block; `mark` begins what stands beside or below them."""
    rows = [Row((block.title or "nobody knows where",), "title")]
    known = any(line.text for line in block.lines)
    texts = [line.text if line.text or known else f"line {line.number}" for line in block.lines]
    values = [";  ".join(map(str, line.values)) for line in block.lines]
    shown = [(text, value and mark + value) for text, value in zip(texts, values, strict=True)]
    for line, (text, value), beside in zip(block.lines, shown, _beside(shown, width), strict=True):
        start = " " * (len(line.text) - len(line.text.lstrip()))
        if line.number:
            rows.append(Row((text, value if beside else ""), "loud" if line.findings else ""))
        if not beside:
            more = f"{start}    {mark}  "
            rows += [Row((part, "")) for part in wrapped(value, width and width - _INDENT, f"{start}    ", more)]
        for one in line.findings:
            told = wrapped(f"{one.kind}: {one.rule}", width, f"{start}^ ", f"{start}  ")
            rows += [Row((part,), "loud") for part in told]
    return Table(rows, _HEAD if width is None else (), indent=_INDENT)


def _beside(shown: Sequence[tuple[str, str]], width: int | None) -> list[bool]:
    """Return whether layouts stand beside their line: in one column, which is where most of them fit. Others stand
    below."""
    if width is None:
        return [True for _ in shown]
    space = width - _INDENT - len("  ")
    columns = sorted({len(text) for text, value in shown if value})
    ways = [
        [not value or (len(text) <= column and column + len(value) <= space) for text, value in shown]
        for column in [*columns, width]
    ]
    return max(ways, key=sum)
