"""What else a kernel needs, because JAX's checker is on in it: typed starts of loops, and layouts of Pallas calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from spmd._jaxprs.equations import Role, held, shape_of
from spmd._jaxprs.factored import expanded
from spmd.checker._source import frames_of
from spmd.porting._file import Edit, File, called
from spmd.porting._names import text_of
from spmd.porting._read import Trace

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
            text = f'"{ordered[0]}"' if len(ordered) == 1 else str(ordered).replace("'", '"')
            span = trace.file.span(node)
            yield Edit(*span, ("jax.lax.pcast(", span, f', {text}, to="varying")'))


def _maker(trace: Trace, made: Any, var: Any) -> ast.Call | None:
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
            asked = str(expanded((axis[0].value,), trace.factors)).replace("'", '"')
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
        shape, text = _typed_shape(trace, node.func)
        if len(names) != len(node.args) or len(names) != len(given) or not all(made) or shape is None:
            continue
        (start, end), (first, last) = trace.file.span(node.func), trace.file.span(shape)
        inside = f'({", ".join(names)}), "{", ".join(given)} -> {", ".join(made)}")'
        yield Edit(start, end, (f"spmd.opaque(lambda {', '.join(names)}: ", (start, first), text, (last, end), inside))


def _typed_shape(trace: Trace, call: ast.Call) -> tuple[ast.expr | None, str]:
    """The shape of a call's result, and the text of one that has the type of the argument which it is like."""
    shape = next((word.value for word in call.keywords if word.arg == "out_shape"), None)
    made: Any = shape
    if isinstance(shape, ast.Name):
        function = _functions(trace.file, call)[0]
        given = [
            n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == shape.id
        ]
        made = given[0] if len(given) == 1 else None
    structs: list[Any] = [
        one for one in (made.elts if isinstance(made, ast.Tuple | ast.List) else [made]) if one is not None
    ]
    for one in structs:
        like = one.args[0] if isinstance(one, ast.Call) and called(one) == "ShapeDtypeStruct" and one.args else None
        if not isinstance(like, ast.Attribute) or not isinstance(like.value, ast.Name):
            return None, ""
        typed: Any = ast.parse(f"f(manual_axis_type=jax.typeof({like.value.id}).manual_axis_type)", mode="eval").body
        one.keywords += typed.keywords
    text = ast.unparse(made) if structs else ""
    for one in structs:
        one.keywords.pop()
    return (shape if structs else None), text
