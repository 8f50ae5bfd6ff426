"""A program whose equations have numbers, which the compiler's dialect keeps, lowered and propagated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd import _compat
from spmd._jaxprs import errors as jax_errors
from spmd._jaxprs.walker import Equation, Role, held, opened
from spmd._trees.leaves import is_array
from spmd.errors import SpmdError
from spmd.inspect._program import is_input, names_of_inputs, of_arrays, stage, under
from spmd.language import Layout
from spmd.mesh import ambient_mesh

_RUN = frozenset((Role.CALL, Role.LOOP, Role.TEST, Role.BRANCH, Role.MAP))
Constrain = Callable[[Any], Mapping[int, Any]]  # for an equation, shardings for its results by their number


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

    def module(self, constrain: Constrain = lambda eqn: {}, inputs: Mapping[int, Any] | None = None) -> Any:
        """The module of the program after propagation.

        Args:
          constrain: Shardings that the results of an equation are asked to have.
          inputs: Shardings that inputs are asked to have, by their number.
        """
        self.equations, known = [], {}
        numbered = _Numbering(self.equations, known, constrain).closed(self.jaxpr)
        fn = jex.jaxpr_as_fun(numbered)
        asked = inputs or {}

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

    def __init__(self, equations: list[Any], known: dict[int, Any], constrain: Constrain) -> None:
        self._equations, self._known, self._constrain = equations, known, constrain

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
        return self._constrained(eqn, self._constrain(self._equations[number]))

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
            put = jax.make_jaxpr(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s))(
                _struct(outs[i].aval, None)
            )
            body = opened(put)[0]
            [constraint] = body.eqns
            more.append(_compat.in_scope(constraint, "asked", constraint.params).replace(outvars=[outs[i]]))
            outs[i] = body.invars[0]
        return [eqn.replace(outvars=outs), *more]
