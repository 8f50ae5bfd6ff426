"""`propagate`: where the compiler lets each value lie, and what it sends for that, without devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd import _compat
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.lines import LineName, line_of, short_line
from spmd._jaxprs.walker import Equation, Role, held, opened, walk
from spmd._jaxprs.walker import equations as all_equations
from spmd._text import Line, Report, Row, Table, bytes_text, fields_of, html_page, wrapped
from spmd._trees.arguments import explained
from spmd._trees.leaves import is_array
from spmd.checker import Finding
from spmd.checker._dataflow import walk_closed
from spmd.errors import LayoutError, MeshError, SpmdError
from spmd.inspect._collectives import axes_text, by_part, counts_by_kind, grouped
from spmd.inspect._listing import listing
from spmd.inspect._program import check_mesh, is_input, meshes_of_jaxpr, names_of_inputs, of_arrays, stage, under
from spmd.inspect._recorded import States
from spmd.inspect._source import Source
from spmd.language import Layout
from spmd.mesh import ambient_mesh, sizes_for
from spmd.propagation._costs import Cost, costs_of, least
from spmd.propagation._freeze import frozen, parameters_of
from spmd.propagation._module import Reading
from spmd.propagation._moves import Move, Places, Reader, Recorded, names_of, state_of, text_of

# Shardings that are asked for, by number: of the results of an equation, under its identity; of inputs, under None.
Asks = Mapping[int | None, Mapping[int, Any]]
_NOTHING_ASKED: Asks = {}


@dataclass(frozen=True)
class Open:
    """An operation of which the plan does not say what the compiler sends for it.

    Attributes:
      where: `file:line (function)`, the user's line.
      operation: The primitive, `cumsum`.
      kind: "open", the compiler chooses later; "opaque", it runs code of the user's own to divide the operation.
      axes: The mesh axes that divide what it takes.
      least: The least that one device sends for it in one call.
      most: The most; None where nothing is known of it.
    """

    where: LineName
    operation: str
    kind: str
    axes: tuple[str, ...]
    least: int
    most: int | None

    def __str__(self) -> str:
        lies = f"{self.operation} takes what lies over {', '.join(self.axes)}"
        if self.most is None:
            return f"{lies}, and divides it by code of its own; the plan cannot say what that sends"
        return f"{lies}, and the compiler decides later what to send: at most {bytes_text(self.most)}"


class Propagation(Report):
    """The compiler's plan of one program: where each value lies, and each change of layout that this needs.

    `propagate` makes it, and printing it shows `table()`.

    Attributes:
      name: The function's name.
      mesh: Axis sizes.
      inputs: How the arguments lie, as layouts.
      results: How the results lie.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4, abstract=True)
      >>> x = jax.ShapeDtypeStruct((16, 32), "float32", sharding=spmd.Layout("b/dp d").sharding(mesh))
      >>> plan = spmd.propagate(lambda x: x.sum(0), x, layouts="b d")
      >>> plan.counts, plan.moves[0].text
      ({'psum': 1}, 'psum("d {U:dp} -> d")')
    """

    def __init__(
        self,
        traced: Traced,
        layouts: Sequence[Layout | None],
        asks: Asks = _NOTHING_ASKED,
        names: Any = None,
    ) -> None:
        self.name, self.traced = traced.name, traced
        self.mesh: dict[str, int] = sizes_for(traced.mesh, "propagate(..., mesh=...)")
        self._asks = asks
        module = traced.module(asks)
        lengths = {i: eqn.params["length"] for i, eqn in enumerate(traced.equations) if "length" in eqn.params}
        self.reading = Reading(self.mesh, lengths).read(module, len(traced.given))
        self.names = names_of(traced.jaxpr, self.mesh, layouts) if names is None else names
        self.layouts = layouts

    @functools.cached_property
    def moves(self) -> tuple[Move, ...]:
        """The changes of layout that send something, in the order of the program."""
        reader = Reader(self.traced.equations, self.names, self.mesh, self.variables)
        return tuple(map(reader.move, self.reading.moves))

    def again(self, asks: Asks) -> Propagation:
        """The plan of the same program with more constraints. It is not traced again."""
        every = {who: {**self._asks.get(who, {}), **asks.get(who, {})} for who in {**self._asks, **asks}}
        return Propagation(self.traced, self.layouts, every, self.names)

    @property
    def inputs(self) -> tuple[str, ...]:
        """How the arguments lie, as layouts."""
        shapes = [var.aval.shape for var in self.variables]
        return tuple(text_of(*one, self.mesh) for one in zip(self.reading.inputs, self.labels, shapes, strict=False))

    @property
    def variables(self) -> Sequence[Any]:
        """The inputs of the program."""
        return opened(self.traced.jaxpr)[0].invars

    @property
    def labels(self) -> list[Any]:
        """What the dimensions of the inputs are called."""
        return [self.names.known[var] for var in self.variables]

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends in one call."""
        return sum(one.bytes * one.count for one in self.reading.moves)

    @property
    def counts(self) -> dict[str, int]:
        """How many collectives of each kind one call runs, kinds in the order of their names."""
        return counts_by_kind((one.kind, one.count) for one in self.moves)

    @functools.cached_property
    def _places(self) -> Places:
        places = Places(self.reading, self.traced.equations)
        given = zip(self.reading.inputs, self.variables, strict=True)
        walk(self.traced.jaxpr, [state_of(place, var.aval.shape) for place, var in given], places)
        return places

    @functools.cached_property
    def open(self) -> tuple[Open, ...]:
        """What the plan does not say: operations for which the compiler must send something and no pass before it says
        what, such as a cumulative sum along a divided dimension; and those for which it may choose another way."""
        found: dict[tuple[LineName, str, tuple[str, ...]], list[int | None]] = {}
        for one in self.reading.open:
            *callers, eqn = [self.traced.equations[i] for i in one.number] or [None]
            name = "the result" if eqn is None else eqn.primitive.name
            where = LineName("") if eqn is None else line_of(eqn, callers)
            found.setdefault((where, name, tuple(axis.text for axis in one.axes)), []).append(one.most)
        told = []
        for (where, name, axes), bounds in found.items():
            known = [one for one in bounds if one is not None]
            kind, most = ("open", sum(known)) if len(known) == len(bounds) else ("opaque", None)
            told.append(Open(where, name, kind, axes, 0, most))
        return tuple(told)

    @property
    def least_bytes(self) -> int:
        """The least that one device may send in one call."""
        return sum(one.least for one in self.reading.moves)

    @property
    def most_bytes(self) -> int | None:
        """The most that one device may send in one call; None where something is opaque, or in a loop of
        unknown length."""
        bounds = [one.most for one in (*self.reading.moves, *self.reading.open)]
        known = [one for one in bounds if one is not None]
        return sum(known) if len(known) == len(bounds) else None

    @property
    def open_text(self) -> str:
        """What open items make of the total; empty where there is none."""
        if not self.open:
            return ""
        most = "no bound is known" if self.most_bytes is None else f"at most {bytes_text(self.most_bytes)}"
        several = "s" * (len(self.open) > 1)
        return f"with {len(self.open)} open item{several}: at least {bytes_text(self.least_bytes)}, {most}"

    @functools.cached_property
    def costs(self) -> tuple[Cost, ...]:
        """What the program may do without, the dearest first. For the first few, constraints are tried: the plan is
        made again with each of them."""
        return costs_of(self)

    @property
    def exact(self) -> bool:
        """False when a collective lies in a loop of unknown length or in a branch."""
        return all(one.exact for one in self.moves)

    def source(self) -> Source:
        """Show the program as it is written, with the layouts of its values beside each line, and under a line each
        change of layout that it needs.

        It reads as `spmd.check(...).source()` does for kernels. In the bodies of `shard_map` the layouts are those that
        the checker infers; everywhere else the compiler's.
        """
        jaxpr = self.traced.jaxpr
        states = None
        if any(eqn.primitive.name == "shard_map" for eqn in all_equations(jaxpr)):
            states = States(self.name, ())
            walk_closed(states, jaxpr)
        sizes = {**self.mesh, **{a.text: a.size for one in self.reading.moves for a in one.axes}}
        told = dict.fromkeys(map(_told, self.moves))
        told |= dict.fromkeys(Finding(str(one), kind="left open", line=one.where) for one in self.open)
        return listing(jaxpr, self.name, told, (Recorded(states, self._places, sizes), self.names))

    def freeze(self, name: str = "") -> str:
        """The plan as an explicit kernel to paste: what each device computes, and a verb where something is sent.

        It is to send what the compiled program sends, or less. Where the plan sums over devices and keeps a slice, the
        kernel scatters the sum. What no round of a loop changes is moved before it, and a sum over devices that is only
        added up in a loop is done after it. Constraints that `costs` found are taken. Along divided dimensions,
        lookups, running sums and flips become verbs; what has none is refused.

        Args:
          name: What to call the function; by default as the program.

        Returns:
          The text of the kernel. It needs `spmd`, `jax`, `jax.numpy as jnp` and a `mesh`.

        Raises:
          SpmdError: The program has an operation that is not written as a kernel yet.

        Example:
          >>> import jax, jax.numpy as jnp, spmd
          >>> mesh = spmd.make_mesh(dp=2, tp=4, abstract=True)
          >>> x, w = (jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(2))
          >>> plan = spmd.propagate(lambda x, w: jnp.tanh(x) @ w, x, w, mesh=mesh, layouts="b/dp d/tp, d/tp f")
          >>> print(plan.freeze("product"))
          @spmd.kernel("b/dp d/tp, d/tp f -> b/dp f", mesh=mesh)
          def product(x, w):
              return spmd.einsum(jnp.tanh(x), w, "b/dp d/tp, d/tp f -> b/dp f")
          <BLANKLINE>
        """
        text = name or (self.name if self.name.isidentifier() and self.name != "<lambda>" else "frozen")
        parameters = list(parameters_of(self.traced.parameters))
        try:
            return frozen(least(self).reading, text, parameters, self.labels)
        except SpmdError:  # the layouts of a constraint may be harder to write
            return frozen(self.reading, text, parameters, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = ["name", "mesh", "counts", "total_bytes", "least_bytes", "most_bytes", "exact", "costs", "moves"]
        opened = [{"text": str(one), **fields_of(one)} for one in self.open]
        return {**fields_of(self, *names), "open": opened}

    def table(self, width: int | None = None) -> str:
        """Return the plan as text: each change of layout with its bytes, its line and its reason.

        Args:
          width: The number of columns. By default it is that of the terminal.
        """
        return self._text(width)

    @property
    def _says(self) -> bool:
        return bool(self.moves or self.open)

    def cost_lines(self, width: int) -> list[Line]:
        """The lines of the table that say what the program may do without."""
        rows = [Row((short_line(one.move.where) or "-", str(one)), "loud") for one in self.costs]
        table = Table([Row(("costs",), "loud title"), *rows], below=(1,), indent=2)
        return [*table.lines(width), [("", "")]] if rows else []

    def __repr__(self) -> str:
        counts = ", ".join(f"{kind}={count}" for kind, count in self.counts.items()) or "no collectives"
        left = f", open={len(self.open)}" if self.open else ""
        return f"Propagation({self.name}: {counts}, total_bytes={self.total_bytes}{left})"

    def _repr_html_(self) -> str:
        return html_page(_heading(self), [_table(self)] if self._says else [], empty="" if self._says else _NOTHING)

    def _lines(self, width: int) -> list[Line]:
        width = max(width, 40)
        heading: list[Line] = [[(line, "bold")] for line in wrapped(_heading(self), width)]
        body = _table(self).lines(width) if self._says else [[(_NOTHING, "")]]
        return [*heading, [("", "")], *self.cost_lines(width), *body]


_NOTHING = "no change of layout"
_HEAD = ("collective", "axes", "times", "bytes", "where", "layout")


def _told(move: Move) -> Finding:
    """A move as what stands under its line."""
    again = "again in the backward pass, " if move.recomputed else "backward, " if move.phase == "backward" else ""
    return Finding(f'{again}"{move.source} -> {move.target}" {move.said}', kind=move.kind, line=move.where)


def _heading(it: Propagation) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in it.mesh.items())
    return f"{it.name or 'program'} on {sizes}: the compiler's plan, not compiled"


def _table(it: Propagation) -> Table:
    rows: list[Row] = []
    for title, ones in by_part(it.moves).items():
        alike = grouped(ones, lambda one: (one.text, one.where, one.why, one.axes)).values()  # as of a pytree
        rows += [Row((title,), "title"), *map(_row, alike)]
    if it.open:
        rows += [Row(("left open",), "loud title")]
        rows += [Row(("?", "", "", "", short_line(one.where), one.operation), "", (str(one),)) for one in it.open]
    total = ("total", "", str(sum(one.count for one in it.moves)), bytes_text(it.total_bytes), "", "")
    remarks = (it.open_text,) if it.open else ()
    return Table([*rows, Row(total, "total", remarks)], _HEAD, right=(2, 3), below=(4, 5), indent=2)


def _row(ones: Sequence[Move]) -> Row:
    one = ones[0]
    times = f"{sum(o.count for o in ones)}{'' if all(o.exact for o in ones) else '*'}"
    size = bytes_text(sum(o.total_bytes for o in ones))
    cells = (one.kind, axes_text(one.axes), times, size, short_line(one.where), f'"{one.source} -> {one.target}"')
    return Row(cells, "", (one.why,))


@explained
def propagate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    layouts: str | Sequence[str | Layout | None] | None = None,
    **kwargs: Any,
) -> Propagation:
    """Return where the compiler lets each value of a program lie, and each change of layout that this needs.

    The program is traced and lowered. Then the passes run by which XLA's partitioner, Shardy, divides it: they spread
    the shardings of arguments and constraints over all values, and put a collective wherever an operation needs another
    layout. No device is needed, and nothing is compiled, so the mesh may be abstract and as large as you like.

    It is a plan. The compiler behind it may combine collectives, make a reduce-scatter of an all-reduce and a slice,
    move them out of loops, or choose another way where it finds a cheaper one.

    Args:
      fn: A function under `jax.jit` or not, with or without kernels in it, such as `jax.grad(loss)`, or `kernel.auto`.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s. Their shardings say where they lie.
      mesh: The mesh, where no argument carries one.
      layouts: Layouts for the arrays among the arguments in their order, `"b/dp s d, d f/tp"`, or a list of them with
        None in between. They name the dimensions, and place arrays that have no sharding.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      A `Propagation`.

    Raises:
      MeshError: The program has no mesh.
      SpmdError: `fn` is not a function, or was traced already.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=4, tp=2, abstract=True)
      >>> x, w = (jax.ShapeDtypeStruct((64, 64), "float32") for _ in range(2))
      >>> plan = spmd.propagate(lambda x, w: jnp.sort(x @ w, 0), x, w, mesh=mesh, layouts="b/dp d, d f/tp")
      >>> [(one.text, one.bytes) for one in plan.moves]
      [('all_to_all("b/dp f/tp -> b f/tp/dp")', 1536), ('all_to_all("b f/tp/dp -> b/dp f/tp")', 1536)]

    References:
      https://openxla.org/shardy
    """
    named = _layouts(layouts)
    traced = trace(fn, args, kwargs, mesh, named)
    given = None if mesh is None else sizes_for(mesh, "propagate(..., mesh=...)")
    meshes = [x.sharding.mesh for x in traced.given if x.sharding is not None]
    check_mesh("propagate", [*meshes, *meshes_of_jaxpr(traced.jaxpr)], given)
    if traced.mesh is None:
        rule = "the program has no mesh: neither an argument nor a constraint names one."
        raise MeshError(rule, call="propagate(...)", advice="propagate(..., mesh=spmd.make_mesh(dp=2, abstract=True))")
    return Propagation(traced, named)


def _layouts(layouts: Any) -> list[Layout | None]:
    if layouts is None:
        return []
    parts = [one.strip() for one in layouts.split(",")] if isinstance(layouts, str) else list(layouts)
    return [None if one is None else Layout(one) for one in parts]


# --- numbered ----------------------------------------------------------------------------------------------------

# A program whose equations have numbers, which the compiler's dialect keeps, lowered and propagated.

_RUN = frozenset((Role.CALL, Role.LOOP, Role.TEST, Role.BRANCH, Role.MAP))


@dataclass
class Traced:
    """A program with its arguments, without the equations that no result needs.

    Attributes:
      name: The function's name.
      mesh: Its mesh, or None.
      jaxpr: The jaxpr, closed.
      given: One `jax.ShapeDtypeStruct` for each input of the jaxpr, with its sharding.
      parameters: What the inputs are called, `params['w']`.
      equations: All equations that run, at any depth. The place of one is its number.
    """

    name: str
    mesh: Any
    jaxpr: Any
    given: Sequence[jax.ShapeDtypeStruct]
    parameters: Sequence[str] = ()
    equations: list[Any] = field(default_factory=list)

    def module(self, asks: Asks = _NOTHING_ASKED) -> Any:
        """The module of the program after propagation, with constraints."""
        equations: list[Any] = []
        fn = jex.jaxpr_as_fun(_Numbering(equations, asks).closed(self.jaxpr))
        self.equations = equations  # all of them, or those of before: a constraint may not fit
        asked = asks.get(None, {})

        def program(*given: Any) -> Any:
            put = jax.lax.with_sharding_constraint
            return fn(*(put(x, asked[i]) if i in asked else x for i, x in enumerate(given)))

        with under(self.mesh):
            traced = jax.jit(program, keep_unused=True).trace(*self.given)
            try:
                return _compat.propagated(traced.lower(lowering_platforms=("cpu",)))
            except Exception as error:  # of JAX or of MLIR, which have no class in common
                rule = "this program cannot be lowered and propagated without its devices."
                raise SpmdError(rule, call="propagate(...)", got=[jax_errors.first_line(error)]) from error


def trace(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any, layouts: Sequence[Layout | None]
) -> Traced:
    """Trace `fn` as `jax.jit` would. `layouts` place arrays among the arguments, where they are not None."""
    if hasattr(fn, "jaxpr") or hasattr(fn, "as_text"):
        rule = "propagate traces a function by itself, and this one is traced, lowered or compiled already."
        raise SpmdError(rule, call=f"propagate({type(fn).__name__})", advice="the function itself with its arguments")
    kind = is_array if hasattr(fn, "trace") else is_input  # the numbers of a jitted function may be static
    inner, args, kwargs = of_arrays(fn, args, kwargs, kind)
    arrays, structure = jax.tree.flatten((args, kwargs))
    if layouts and len(layouts) != len(arrays):
        rule = "each array has its layout, or None."
        got = [f"arrays: {len(arrays)}", f"layouts: {len(layouts)}"]
        raise LayoutError(
            rule, call="propagate(..., layouts=)", got=got, advice="None for an array that a constraint places"
        )
    given = tuple(_placed(x, layout, mesh) for x, layout in zip(arrays, layouts or [None] * len(arrays), strict=True))
    args, kwargs = jax.tree.unflatten(structure, given)
    program = stage("propagate", inner, args, kwargs, mesh)
    live = _compat.live_jaxpr(getattr(program.jaxpr, "jaxpr", program.jaxpr))
    closed = jex.ClosedJaxpr(live, opened(program.jaxpr)[1])
    structs = [_struct(var.aval, getattr(x, "sharding", None)) for var, x in zip(live.invars, given, strict=True)]
    found = next((one for one in (program.mesh, mesh, ambient_mesh()) if isinstance(one, Mesh | AbstractMesh)), None)
    return Traced(program.name, found, closed, structs, names_of_inputs(program.jaxpr))


def _placed(x: Any, layout: Layout | None, mesh: Any) -> Any:
    if layout is None or isinstance(getattr(x, "sharding", None), NamedSharding) or mesh is None:
        return x
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout.with_rank(len(aval.shape)).sharding(mesh))


def _struct(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    known = sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=known, weak_type=getattr(aval, "weak_type", False))


class _Numbering:
    """Gives each equation a scope with its number. A jaxpr that stands in several places stays one."""

    def __init__(self, equations: list[Any], asks: Asks) -> None:
        self._equations, self._asks = equations, asks
        self._known: dict[int, Any] = {}

    def closed(self, jaxpr: Any) -> Any:
        if id(jaxpr) not in self._known:
            eqns = [new for eqn in opened(jaxpr)[0].eqns for new in self._numbered(eqn)]
            self._known[id(jaxpr)] = jaxpr, _compat.with_equations(jaxpr, eqns)  # both, so that no other gets its id
        return self._known[id(jaxpr)][1]

    def _numbered(self, eqn: Equation) -> list[Any]:
        number = len(self._equations)
        self._equations.append(eqn)
        run = {id(one.jaxpr) for one in held(eqn) if one.role in _RUN} if eqn.params else set()
        params = {name: self._param(value, run) for name, value in eqn.params.items()} if run else eqn.params
        eqn = _compat.in_scope(eqn, f"#{number}", params)
        return self._constrained(eqn, self._asks.get(id(self._equations[number]), {}))

    def _param(self, value: Any, run: set[int]) -> Any:
        if id(value) in run:
            return self.closed(value)
        if isinstance(value, tuple) and any(id(one) in run for one in value):
            parts = [self._param(one, run) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    def _constrained(self, eqn: Equation, asked: Mapping[int, Any]) -> list[Any]:
        """The equation, and a constraint behind each result that is asked for one."""
        outs, more = list(eqn.outvars), []
        for i, sharding in asked.items():
            mesh = _compat.type_mesh(outs[i])  # inside of `auto_axes` another one than around it
            sharding = sharding if mesh is None else NamedSharding(mesh, sharding.spec)
            with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
                put = jax.make_jaxpr(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s))(
                    _struct(outs[i].aval, None)
                )
            body = opened(put)[0]
            [constraint] = body.eqns
            more.append(_compat.in_scope(constraint, "asked", constraint.params).replace(outvars=[outs[i]]))
            outs[i] = body.invars[0]
        return [eqn.replace(outvars=outs), *more]
