"""A program as it is traced: its `shard_map`s, the calls in its file that communicate in them, and what else a kernel
needs, because JAX's checker is on in it."""

from __future__ import annotations

import ast
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from spmd import _compat
from spmd._jaxprs.factored import expanded, factors_of, in_factors
from spmd._jaxprs.lines import frames_of, is_ours, is_transposed, line_of, short_line
from spmd._jaxprs.walker import COMMUNICATES, Equation, Role, Variable, equations, held, opened, shape_of, walk
from spmd._python.named import module_name
from spmd.checker._dataflow import walk_closed
from spmd.inspect._recorded import States
from spmd.inspect._source import Span
from spmd.language import axes_code, axes_tuple
from spmd.porting._writing import Guess, Namer, Operand, X, in_groups, reduction, text_of, ways

_VERBS = ("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pshuffle")
_OTHERS = {
    "ragged_all_to_all": "no verb takes offsets; spmd.exchange(rows, owner, layout) sends rows to those who own them"
}
_NO_STRING = "no one string says how its arrays lie"
_KEY = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.(\w+)")


@dataclass(frozen=True)
class Site:
    """A call of the file that communicates.

    Attributes:
      line: Where it is, `file.py:12`.
      text: The call.
      node: Its syntax; None where it is not in the file.
      argument: The expression of the array that a verb takes in its place.
      ways: What may be written instead, the best first.
      why: Why nothing may, if so.
    """

    line: str
    text: str
    node: ast.Call | None
    argument: ast.expr | None = None
    ways: Sequence[str] = ()
    why: str = ""


@dataclass
class Body:
    """A `shard_map` of the program.

    Attributes:
      eqn: Its equation.
      inputs: The layout of each argument, under its path: `x`, `params['w']`.
      outputs: Those of the results.
    """

    eqn: Equation
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    @property
    def auto(self) -> list[str]:
        """The axes that are left to the compiler."""
        return [a for a in self.eqn.params["mesh"].axis_names if a not in _compat.made_manual(self.eqn)]


class Trace:
    """What is known of a program: how each value lies, and what its dimensions are called.

    Args:
      fn: The program.
      args: Its arguments.
      names: What the dimensions of the first body's arguments are called, one text for each: `["b s d", "d f"]`.
      file: Where it is written.

    Attributes:
      differentiated: Whether the program itself takes the gradient of a `shard_map`.
      gradients: Whether a body takes one.
      factors: The axes of which collectives run in groups: the kernel's mesh has two in place of each.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], names: Sequence[str], file: File):
        self.file = file
        self.jaxpr, self.shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        raw = self._states(fn)
        self.factors = factors_of(self.jaxpr, raw.sizes)
        self.jaxpr = in_factors(self.jaxpr, self.factors) if self.factors else self.jaxpr
        self.states = self._states(fn) if self.factors else raw
        self.sizes: Mapping[str, int] = self.states.sizes
        self.guess = Guess(self.sizes)
        walk(self.jaxpr, [((),) * len(shape_of(v)) for v in opened(self.jaxpr)[0].invars], self.guess)
        self.namer = Namer(self.guess, self.sizes)
        self.equations = [eqn for eqn in equations(self.jaxpr, derivatives=False) if not is_transposed(eqn)]
        mapped = [eqn for eqn in self.equations if eqn.primitive.name == "shard_map" and not is_ours(eqn)]
        raw = [eqn for eqn in mapped if eqn.params["jaxpr"].debug_info.arg_names is not None]
        self.differentiated = len(raw) < len(mapped)
        self.gradients = any(is_transposed(one) for eqn in raw for one in equations(eqn.params["jaxpr"]))
        self.bodies = [self._body(eqn, names if i == 0 else ()) for i, eqn in enumerate(raw)]
        self.sites = self._sites()

    def _states(self, fn: Any) -> States:
        states = States(getattr(fn, "__name__", "program"), ())
        walk_closed(states, self.jaxpr)
        return states

    def _body(self, eqn: Equation, names: Sequence[str]) -> Body:
        inner, params = opened(eqn.params["jaxpr"])[0], eqn.params
        paths = [path for path in eqn.params["jaxpr"].debug_info.arg_names if path]
        first = len(inner.invars) - len(paths)  # constants that JAX hoisted out of the body come before
        labels = [self.guess.known[var] for var in inner.invars]
        body = Body(eqn)
        for one, given in zip(labels[max(first, 0) :], names, strict=False):
            self.namer.give(one, given.split())
        self._unpacked(body, dict(zip(paths, labels[max(first, 0) :], strict=False)))
        for i, path in enumerate(paths, max(first, 0)):
            body.inputs[path] = self._layout(eqn.invars[i], inner.invars[i], params["in_specs"][i])
        for outer, var, spec in zip(eqn.outvars, inner.outvars, params["out_specs"], strict=True):
            body.outputs.append(self._layout(outer, var, spec))
        return body

    def _layout(self, outer: Any, inner: Any, spec: Any) -> str:
        """The layout of an argument or a result of a body: its variable outside, that inside, and its spec."""
        shape = shape_of(outer)
        labels = None if hasattr(inner, "val") else self.guess.known.get(inner)
        axes = [axes_tuple(entry) for entry in _compat.partitions(spec, len(shape))]
        dims = self.namer.argument(shape, labels or ((),) * len(shape), axes)
        return text_of(dims, sorted(_compat.unreduced_spec(spec)))

    def _unpacked(self, body: Body, labels: Mapping[str, Any]) -> None:
        """Names that the body itself gives to sizes: `b, s, d = x.shape`."""
        function = self.function(body)
        for node in ast.walk(function) if function is not None else ():
            match node:
                case ast.Assign(
                    targets=[ast.Tuple(elts=elts)], value=ast.Attribute(value=ast.Name(id=name), attr="shape")
                ) if name in labels:
                    self.namer.give(labels[name], [getattr(e, "id", "_").lower().strip("_") for e in elts])

    def call(self, body: Body) -> Mapped | None:
        """The call in the file that made a `shard_map` of a function of the file."""
        made_of = body.eqn.params["jaxpr"].debug_info
        line = getattr(made_of, "func_lineno", None) or 0  # where the function begins
        return next((one for one in self.file.mapped() if line in one.lines), None)

    def function(self, body: Body) -> Any:
        """The syntax of the function that a body maps, if it is in the file."""
        found = self.call(body)
        return None if found is None else found.function

    # --- calls that communicate --------------------------------------------------------------------------------

    def _sites(self) -> list[Site]:
        found: dict[Any, list[Any]] = {}
        others: dict[str, Site] = {}
        for eqn in self.equations:
            if eqn.primitive.name not in COMMUNICATES or is_ours(eqn):
                continue
            frames = frames_of(eqn)
            node = (
                self.file.call_at(frames[0].span) if frames and frames[0].code.co_filename == self.file.path else None
            )
            line = short_line(line_of(eqn))
            if node is None:
                others.setdefault(line, Site(line, eqn.primitive.name, None, why="it stands in another file"))
            elif called(node) not in _VERBS or not (node.args or node.keywords):
                why = _OTHERS.get(
                    called(node), f"{called(node) or 'the call'} makes it, and no verb says what that sends"
                )
                others.setdefault(line, Site(line, self.file.source(node), node, why=why))
            else:
                found.setdefault(node, []).append((eqn, line))
        return [*(self._site(node, pairs) for node, pairs in found.items()), *others.values()]

    def _site(self, node: ast.Call, pairs: Sequence[tuple[Any, str]]) -> Site:
        operands = [(eqn, i) for eqn, _ in pairs for i in range(len(eqn.invars)) if not hasattr(eqn.invars[i], "val")]
        argument = node.args[0] if node.args else next((w.value for w in node.keywords if w.arg == "x"), None)
        line, text = pairs[0][1], " ".join(self.file.source(node).split())
        if argument is None or isinstance(argument, ast.Starred):
            return Site(line, text, node, why="its operand is not written out")
        each = [self._operand(eqn, i, called(node), len(eqn.invars) == 1) for eqn, i in operands]
        if called(node) in ("pmax", "pmin"):
            return self._reduction(Site(line, text, node), argument, each)
        texts = [ways(one) for one in each]
        both = [way for way in texts[0] if all(way in other for other in texts)] if texts else []
        why = (in_groups(each[0], self.factors) if each else "") or ("" if both else _NO_STRING)
        return Site(line, text, node, argument, both, why)

    def _operand(self, eqn: Equation, number: int, callee: str, alone: bool) -> Operand:
        var = eqn.invars[number]
        state, labels = self.states.known[var], self.guess.known[var]
        order = tuple(self.sizes)
        return Operand(eqn, number, state, self.namer.of(state, labels), self.namer, order, callee, alone)

    def _reduction(self, site: Site, argument: ast.expr, each: Sequence[Operand]) -> Site:
        """`pmax(x.max(0), "dp")` as one reduction of x."""
        why = "no verb is a maximum over devices alone; reduce is one of a divided dimension"
        left, around = Site(site.line, site.text, site.node, why=why), X
        if isinstance(argument, ast.Call) and called(argument) == "stop_gradient" and argument.args:
            around, argument = f"{self.file.source(argument.func)}({X})", argument.args[0]
        if len(each) != 1 or not isinstance(argument, ast.Call):
            return left
        name = each[0].eqn.primitive.name.removeprefix("p")
        makes = [e for e in self.equations if e.primitive.name == f"reduce_{name}" and self._stands(e, argument)]
        method = isinstance(argument.func, ast.Attribute) and _is_array(argument.func.value)
        array = getattr(argument.func, "value", None) if method else next(iter(argument.args), None)
        if len(makes) != 1 or array is None:
            return left
        operand = self._operand(makes[0], 0, name, True)
        whole = Operand(each[0].eqn, 0, operand.state, operand.dims, self.namer, operand.order, name, True)
        keeps = len(shape_of(each[0].eqn.invars[0])) == len(operand.dims)
        text = reduction(whole, makes[0].params["axes"], keeps)
        return left if text is None else Site(site.line, site.text, site.node, array, [text.replace(X, around)])

    def _stands(self, eqn: Equation, node: ast.expr) -> bool:
        """Return whether an expression made an equation."""
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return any(one.code.co_filename == self.file.path and one.span == span for one in frames_of(eqn))


def _is_array(node: ast.expr) -> bool:
    """Return whether an expression is not the name of a module: `x` of `x.max()`, and not `jnp` of `jnp.max(x)`."""
    return not (isinstance(node, ast.Name) and node.id in ("jnp", "np", "lax", "jax"))


def tree_of(paths: Sequence[str], layouts: Sequence[str]) -> dict[str, Any] | None:
    """The layouts of arguments as trees by the argument's name; None where a path goes through attributes."""
    found: dict[str, Any] = {}
    for path, layout in zip(paths, layouts, strict=True):
        root = re.match(r"\w+", path)
        keys = _KEY.findall(path[root.end() :] if root else "")
        if root is None or any(attribute for _, _, attribute in keys):
            return None
        at: dict[Any, Any] = found
        last: Any = root[0]
        for key, index, _ in keys:
            at = at.setdefault(last, {})
            last = key or int(index)
        at[last] = layout
    return found


# --- what else a kernel needs: typed starts of loops, and layouts of Pallas calls -----------------------------------


_LIKE = ("zeros_like", "ones_like", "full_like")
_MAKERS = frozenset(("zeros", "ones", "full", "empty", "arange", "array", "asarray", "broadcast_to", *_LIKE))


def starts(trace: Trace) -> Iterator[Edit]:
    """The values with which loops start and which the loops let differ, typed so: `jax.lax.pcast(zeros, "sp", ...)`."""
    made = {var: eqn for eqn in trace.equations for var in eqn.outvars}
    wanted: dict[ast.Call, set[str]] = {}
    for eqn in trace.equations:
        body = next((one for one in held(eqn) if one.role == Role.LOOP), None) if eqn.params else None
        if body is None:
            continue
        count = len(body.stacked) - sum(body.stacked)
        carries = body.of(eqn.invars)[len(body.operands) - sum(body.sliced) - count :][:count]
        for start, out in zip(carries, eqn.outvars, strict=False):
            node = None if isinstance(start, Literal) else _maker(trace, made, start)
            if node is not None:
                known = trace.states.known
                wanted.setdefault(node, set()).update(known[out].axes - known[start].axes)
    for node, axes in wanted.items():
        if axes:
            ordered = tuple(axis for axis in trace.sizes if axis in axes)
            span = trace.file.span(node)
            yield Edit(*span, ("jax.lax.pcast(", span, f', {axes_code(ordered)}, to="varying")'))


def _maker(trace: Trace, made: Any, var: Variable) -> ast.Call | None:
    """The call in the file that makes a constant array, through changes of its dtype or shape."""
    for _ in range(4):
        eqn = None if isinstance(var, Literal) else made.get(var)
        if eqn is None:
            return None
        for frame in frames_of(eqn)[:1]:
            node = trace.file.call_at(frame.span) if frame.code.co_filename == trace.file.path else None
            if node is not None and called(node) in _MAKERS:
                return node
        if not eqn.invars:
            return None
        var = eqn.invars[0]
    return None


def sizes(trace: Trace) -> Iterator[Edit]:
    """Questions about mesh axes as those that every mode answers: `spmd.axis_size`, `spmd.axis_index`."""
    functions = [one for body in trace.bodies if (one := trace.function(body)) is not None]
    sites = [site.node for site in trace.sites if site.node is not None]
    functions += [one for node in sites for one in _functions(trace.file, node)[-1:]]
    seen: set[Any] = set()
    for node in (n for top in set(functions) for n in ast.walk(top) if isinstance(n, ast.Call)):
        of_jax = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("lax", "jax.lax")
        counts = called(node) == "psum" and node.args and isinstance(node.args[0], ast.Constant)
        axis = (node.args[1:] if counts else node.args)[:1] or [k.value for k in node.keywords if k.arg == "axis_name"]
        if node in seen or not of_jax or not axis or not (counts or called(node) in ("axis_size", "axis_index")):
            continue
        seen.add(node)
        name = "axis_size" if counts else called(node)
        asked: Any = trace.file.span(axis[0])
        if isinstance(axis[0], ast.Constant) and axis[0].value in trace.factors:
            asked = axes_code(expanded((axis[0].value,), trace.factors))
        yield Edit(*trace.file.span(node), (f"spmd.{name}(", asked, ")"))


def _functions(file: File, node: ast.AST) -> list[Any]:
    """The functions that a piece of syntax stands in, the innermost first."""
    return [one for one in file.above(node) if isinstance(one, ast.FunctionDef | ast.Lambda)]


def opaques(trace: Trace) -> Iterator[Edit]:
    """Calls of Pallas with their layouts: `spmd.opaque(lambda x: pl.pallas_call(...)(x), "b/dp d -> b/dp d")(x)`."""
    for eqn in trace.equations:
        frames = frames_of(eqn) if eqn.primitive.name == "pallas_call" else []
        node = trace.file.call_at(frames[0].span) if frames else None
        if node is None or frames[0].code.co_filename != trace.file.path or not isinstance(node.func, ast.Call):
            continue
        names = [one.id for one in node.args if isinstance(one, ast.Name)]
        given = [text_of(trace.namer.of(trace.states.known[v], trace.guess.known[v])) for v in eqn.invars]
        alike = {shape_of(var): text for var, text in zip(reversed(eqn.invars), reversed(given), strict=True)}
        made = [alike.get(shape_of(var), "") for var in eqn.outvars]  # a guess, which the trace decides
        if len(names) != len(node.args) or len(names) != len(given) or not all(made):
            continue
        start, end = trace.file.span(node.func)
        inside = f'({", ".join(names)}), "{", ".join(given)} -> {", ".join(made)}")'
        yield Edit(start, end, (f"spmd.opaque(lambda {', '.join(names)}: ", (start, end), inside))


# --- file --------------------------------------------------------------------------------------------------------

# A Python file that is rewritten in place: where expressions stand in it, and the text with some of them replaced.

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

    @property
    def lines(self) -> set[int]:
        """The lines on which the function, or a decorator of it, begins."""
        return {one.lineno for one in _with_decorators(self.function)}


def _with_decorators(node: Any) -> list[Any]:
    """A function or a statement, if there is one, and its decorators."""
    return [] if node is None else [node, *getattr(node, "decorator_list", ())]


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
        return min(self.starts[one.lineno - 1] for one in _with_decorators(node))

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
    full_name, folder = module_name(path)
    name = f"{full_name}_{next(_NUMBERS)}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__, module.__package__ = path, full_name.rpartition(".")[0]
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    folders = folder, str(Path(path).parent.resolve())
    sys.path[:] = [folders[0], *sys.path, folders[1]]
    try:
        exec(compile(text, path, "exec"), vars(module))
    finally:
        for one in folders:
            sys.path.remove(one)
    return vars(module)
