"""A Python file that is rewritten in place: where expressions stand in it, and the text with some of them replaced."""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spmd.inspect._syntax import Span

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NUMBERS = itertools.count(1)


class Edit(NamedTuple):
    """A part of a file, and what stands there instead: texts, and parts of the file that stay."""

    start: int
    end: int
    parts: tuple[str | tuple[int, int], ...]


class Mapped(NamedTuple):
    """A call of `shard_map` in a file.

    Attributes:
      call: The call.
      body: The expression of the function that is mapped, where the call itself has it.
      function: The syntax of that function; None where it is not in the file.
      mesh: The expression of the mesh, if there is one.
    """

    call: ast.Call
    body: ast.expr | None
    function: Any
    mesh: ast.expr | None


@dataclass
class File:
    """A file as it is written. Places count bytes, as Python's own do.

    Attributes:
      path: Its path.
      text: Its text.
    """

    path: str
    text: str

    def __post_init__(self) -> None:
        self.bytes = self.text.encode()
        self.tree = ast.parse(self.text)
        self.starts = [0, *itertools.accumulate(len(line) for line in self.bytes.splitlines(keepends=True))]
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def span(self, node: Any) -> tuple[int, int]:
        """Return where an expression begins and ends."""
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def place(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def source(self, node: Any) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def call_at(self, span: Span) -> ast.Call | None:
        """The call that is this expression."""
        fits = (n for n in self.nodes if isinstance(n, ast.Call))
        return next((n for n in fits if (n.lineno, n.col_offset, n.end_lineno, n.end_col_offset) == span), None)

    def mapped(self) -> Iterator[Mapped]:
        """The calls of `shard_map`, under whichever name ends so, `partial(shard_map, ...)` and decorators too."""
        for node in self.nodes:
            if not isinstance(node, ast.Call):
                continue
            words = {word.arg: word.value for word in node.keywords}
            given = list(node.args)
            if called(node) == "partial" and given and _name(given[0]).endswith("shard_map"):
                given = given[1:]
            elif not called(node).endswith("shard_map"):
                continue
            body = given[0] if given else words.get("f")
            mesh = words.get("mesh") or (given[1] if len(given) > 1 else None)
            yield Mapped(node, body, self._function(node, body), mesh)

    def _function(self, call: ast.Call, body: ast.expr | None) -> Any:
        parent = self.parents.get(call)
        if body is None and isinstance(parent, _FUNCTIONS):
            return parent  # it decorates
        if body is None and isinstance(parent, ast.Call) and parent.func is call and parent.args:
            body = parent.args[0]
        while isinstance(body, ast.Call) and called(body) == "partial" and body.args:
            body = body.args[0]
        if isinstance(body, ast.Lambda):
            return body
        name = "" if body is None else _name(body)
        found = [n for n in self.nodes if isinstance(n, ast.FunctionDef) and n.name == name]
        around = [n for n in found if self.parents.get(n) in set(self.above(call))] or found
        return max(around, key=lambda n: n.lineno, default=None)

    def above(self, node: Any) -> Iterator[Any]:
        """Return what a piece of syntax stands in, the innermost first."""
        while (node := self.parents.get(node)) is not None:
            yield node

    def statement(self, place: int) -> Any:
        """The statement of the file itself in which something stands."""
        return next(n for n in self.tree.body if self.first(n) <= place < self.span(n)[1])

    def first(self, node: Any) -> int:
        """Return where a statement begins, with its decorators."""
        nodes = [node, *getattr(node, "decorator_list", ())]
        return min(self.starts[one.lineno - 1] for one in nodes)

    def render(self, edits: Iterable[Edit], start: int = 0, end: int | None = None) -> str:
        """A part of the text with the edits in it; those inside of others stand where these keep their place."""
        end, out, at = len(self.bytes) if end is None else end, [], start
        inside = sorted((e for e in edits if start <= e.start and e.end <= end), key=lambda e: (e.start, -e.end))
        for edit in inside:
            if edit.start < at:
                continue
            out.append(self.bytes[at : edit.start].decode())
            rest = [one for one in inside if one != edit]
            out += [part if isinstance(part, str) else self.render(rest, *part) for part in edit.parts]
            at = edit.end
        return "".join([*out, self.bytes[at:end].decode()])

    def first_line(self) -> int:
        """Return where an import is added: behind the first import of JAX, else before the first import."""
        imports = [n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        of_jax = [n for n in imports if isinstance(n, ast.Import) and n.names[0].name.split(".")[0] == "jax"]
        chosen = of_jax[-1:] or [n for n in imports if getattr(n, "module", "") != "__future__"][:1]
        return 0 if not chosen else self.starts[chosen[0].lineno - (0 if of_jax else 1)]

    def imports(self, name: str) -> bool:
        """Return whether a name is imported at the top."""
        found = (a for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names)
        return any((a.asname or a.name) == name for a in found)


def called(node: ast.Call) -> str:
    """The name of what a call calls, without its module."""
    return _name(node.func)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def loaded(path: str, text: str) -> dict[str, Any]:
    """Return what a file with this text defines. Nothing under `__main__` happens."""
    name = f"{Path(path).stem}_{next(_NUMBERS)}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    folder = str(Path(path).parent.resolve())
    sys.path.insert(0, folder)
    try:
        exec(compile(text, path, "exec"), vars(module))
    finally:
        sys.path.remove(folder)
    return vars(module)
