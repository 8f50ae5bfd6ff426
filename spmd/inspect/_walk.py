"""One walk over a jaxpr: its collectives, its work, and what must move for arrays to enter kernels."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from spmd import _compat
from spmd.check._collectives import COMMUNICATES, axes_of
from spmd.check._source import line_of
from spmd.errors import MeshError, compose
from spmd.inspect._collectives import sent_bytes
from spmd.inspect._placement import ANYWHERE, Placement, moved_bytes, names_of, of_sharding, of_spec, text_of
from spmd.inspect._records import Boundary, Constraint, Island, Written, WrittenCollective
from spmd.inspect._work import dtype_name, flops_of, is_matmul, memory_of, size_bytes
from spmd.kernel import arguments_of
from spmd.language import Layout

__all__ = ["Value", "Walk"]

_KINDS: dict[str, str] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "psum"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "psum_scatter"),
}
_OPAQUE = frozenset(("pallas_call", "tpu_custom_call", "ffi_call", "custom_call", "pure_callback", "io_callback"))
# Their jaxprs combine two scalars; the work is counted with the equation.
_SCALAR_BODIES = ("scatter", "reduce", "select_and_", "sort")
_ELEMENTWISE = frozenset(
    (
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
        "tanh",
        "logistic",
        "sin",
        "cos",
        "sqrt",
        "rsqrt",
        "cbrt",
        "erf",
        "integer_pow",
        "pow",
        "max",
        "min",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "select_n",
        "clamp",
        "convert_element_type",
        "and",
        "or",
        "not",
        "xor",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "square",
        "add_any",
        "copy",
        "is_finite",
        "rem",
        "nextafter",
        "optimization_barrier",
        "reduce_precision",
        "name",
        "spmd_layout",
        "stop_gradient",
    )
)
_CALL = re.compile(r"(custom_vjp\(.*\)|[a-z][\w.]*\(.*\".*\"\))", re.DOTALL)
_VERBS = ("psum", "relayout", "lax.")


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an array outside kernels: where it lies, and which argument it is, if it is one; in a scan over
    the argument a slice of it, of as many dimensions fewer as `sliced`."""

    place: Placement = None
    label: str = ""
    sliced: int = 0


@dataclass(frozen=True, slots=True)
class _Site:
    """Where the walk is."""

    callers: tuple[Any, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    manual: tuple[tuple[str, int], ...] = ()
    times: int = 1
    exact: bool = True
    branch: str = ""

    def inside(self, eqn: Any, **changes: Any) -> _Site:
        names = (*self.names, *_compat.name_stack(eqn))
        return replace(self, callers=(*self.callers, eqn), names=names, **changes)

    def names_of(self, eqn: Any) -> tuple[tuple[str, str], ...]:
        return (*self.names, *_compat.name_stack(eqn))

    def line(self, eqn: Any) -> str:
        return os.path.basename(line_of(eqn, self.callers).partition(" (")[0])


class Walk:
    """What a program does, added up over its equations.

    Args:
      sizes: The mesh: axis sizes in mesh order.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.wanted: dict[str, Placement] = {}  # where the first kernel that an argument enters wants it
        self._collectives: list[WrittenCollective] = []
        self._boundary: dict[Any, Boundary] = {}
        self._islands: dict[tuple[str, str], Island] = {}
        self._constraints: list[Constraint] = []
        self._flops: dict[str, float] = defaultdict(float)
        self._matmul: dict[str, float] = defaultdict(float)
        self._memory = 0.0
        self._exact = True

    def read(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """Walk over a whole program; what is known of its results."""
        return self._run(jaxpr, arguments, _Site())

    def written(self, *, arguments: int, outputs: int) -> Written:
        """All that was found."""
        return Written(
            collectives=tuple(self._collectives),
            mesh=self.sizes,
            flops=dict(self._flops),
            matmul_flops=dict(self._matmul),
            hbm_bytes=round(self._memory),
            exact=self._exact,
            boundary=tuple(self._boundary.values()),
            islands=tuple(self._islands.values()),
            constraints=tuple(self._constraints),
            arguments_bytes=arguments,
            outputs_bytes=outputs,
        )

    # --- the walk -----------------------------------------------------------------------------------------

    def _run(self, jaxpr: Any, values: Sequence[Value], site: _Site) -> list[Value]:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Value] = dict(zip(body.invars, values, strict=True))
        notes = {eqn.invars[0]: eqn for eqn in body.eqns if eqn.primitive.name == "spmd_layout"}

        def known(atom: Any) -> Value:
            return Value(ANYWHERE) if isinstance(atom, Literal) else env.get(atom, Value())

        for eqn in body.eqns:
            outs = self._step(eqn, [known(v) for v in eqn.invars], site, notes)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [known(v) for v in body.outvars]

    def _step(self, eqn: Any, ins: list[Value], site: _Site, notes: Mapping[Any, Any]) -> list[Value]:
        name = eqn.primitive.name
        if name in COMMUNICATES:
            self._collective(eqn, site)
        elif name in _RULES:
            return _RULES[name](self, eqn, ins, site)
        elif name in ("sharding_constraint", "reshard"):
            return self._placed(eqn, ins, site, notes)
        elif name in _OPAQUE:
            if not _call_text(site.names_of(eqn)).startswith("opaque("):  # whose note says it
                self._island(name, eqn, site, opaque=True)
        elif not name.startswith(_SCALAR_BODIES) and (inner := list(jaxprs_in_params(eqn.params))):
            return self._call(eqn, inner, ins, site)
        else:
            if name == "spmd_layout" and (text := str(eqn.params["call"])).startswith(("local(", "opaque(")):
                self._island(text, eqn, site, opaque=text.startswith("opaque("))
            self._work(eqn, site)
            return _through(eqn, ins)
        self._moves(eqn, site)
        return [Value()] * len(eqn.outvars)

    def _call(self, eqn: Any, inner: list[Any], ins: list[Value], site: _Site) -> list[Value]:
        """A call: `jit`, `remat`, a custom rule."""
        if said := eqn.params.get("in_shardings"):
            lies = [of_sharding(s, len(_shape(v)), self.sizes) for s, v in zip(said, eqn.invars, strict=True)]
            ins = [replace(v, place=p) if p is not None else v for v, p in zip(ins, lies, strict=True)]
        outs: list[Value] = []
        for jaxpr in inner:
            count = len(getattr(jaxpr, "jaxpr", jaxpr).invars)
            outs = self._run(jaxpr, ins if count == len(ins) else [Value()] * count, site.inside(eqn))
        return outs if len(inner) == 1 and len(outs) == len(eqn.outvars) else [Value()] * len(eqn.outvars)

    def _scan(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        body = _body(eqn)
        per = [
            _sliced(v) if len(_shape(outer)) != len(_shape(inner)) else v
            for v, outer, inner in zip(ins, eqn.invars, body.invars, strict=True)
        ]
        outs = self._run(body, per, site.inside(eqn, times=site.times * eqn.params["length"]))
        return [
            _stacked(v) if len(_shape(outer)) != len(_shape(inner)) else v
            for v, outer, inner in zip(outs, eqn.outvars, body.outvars, strict=True)
        ]

    def _while(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = ins[n_test + n_body :]
        within = site.inside(eqn, exact=False)
        self._exact = False
        self._run(eqn.params["cond_jaxpr"], [*ins[:n_test], *carry], within)
        return self._run(eqn.params["body_jaxpr"], [*ins[n_test : n_test + n_body], *carry], within)

    def _cond(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        branches = eqn.params["branches"]
        self._exact = False
        outs = []
        for i, branch in enumerate(branches):
            shown = f"branch {i + 1} of {len(branches)}"
            within = site.inside(eqn, exact=False, branch=f"{site.branch}, {shown}" if site.branch else shown)
            outs.append(self._run(branch, ins[1:], within))
        return [v[0] if all(x == v[0] for x in v) else Value() for v in zip(*outs, strict=True)]

    def _shard_map(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        mesh = eqn.params["mesh"]
        self.sizes = self.sizes or dict(mesh.shape)
        if dict(mesh.shape) != self.sizes:
            rule = "what is looked at has one mesh, and the kernels of this program are on two."
            got = ["mesh " + ", ".join(f"{a}={n}" for a, n in sizes.items()) for sizes in (self.sizes, mesh.shape)]
            raise MeshError(compose(rule, call="explain(...)", got=got, fix="explain(...) of each kernel by itself"))
        new = {axis: mesh.shape[axis] for axis in eqn.params["newly_manual_axes"] or mesh.axis_names}
        if not site.manual:
            specs, ranks = eqn.params["in_specs"], [len(_shape(var)) for var in eqn.invars]
            name = next((c.params["name"] for c in reversed(site.callers) if "name" in c.params), "shard_map")
            place = getattr(getattr(_body(eqn), "debug_info", None), "func_src_info", None) or ""
            leaves = arguments_of(name, place, mesh.shape, specs, ranks) or [None] * len(specs)
            for value, var, spec, leaf in zip(ins, eqn.invars, specs, leaves, strict=True):
                target = of_spec(spec, len(_shape(var)), mesh.shape)
                self._enter(name, eqn, value, var.aval, target, leaf and leaf.layout, site)
        body = _body(eqn)
        within = site.inside(eqn, manual=(*site.manual, *new.items()))
        self._run(body, [Value()] * len(body.invars), within)
        return [
            Value(of_spec(spec, len(_shape(var)), mesh.shape))
            for spec, var in zip(eqn.params["out_specs"], eqn.outvars, strict=True)
        ]

    # --- outside kernels ----------------------------------------------------------------------------------

    def _enter(
        self, name: str, eqn: Any, value: Value, aval: Any, target: Placement, layout: Layout | None, site: _Site
    ) -> None:
        """An array at the boundary of a kernel."""
        source = value.place if value.place is not None else _typed_place(aval, self.sizes)
        self._want(value, target)
        if source in (ANYWHERE, target) or not _shape_of(aval):
            return
        self._move(f"{name}: {value.label or 'a computed array'}", source, target, aval, eqn, site, layout)

    def _want(self, value: Value, target: Placement) -> None:
        """Where an argument, or each slice of it, is wanted first."""
        if value.label:
            whole = ((),) * value.sliced
            self.wanted.setdefault(value.label, (*whole, *target) if isinstance(target, tuple) else target)

    def _move(
        self,
        text: str,
        source: Placement,
        target: Placement,
        aval: Any,
        eqn: Any,
        site: _Site,
        layout: Layout | None = None,
    ) -> None:
        shape, where = _shape_of(aval), site.line(eqn)
        names = () if layout is None else names_of(layout, len(shape))
        moved = Boundary(
            text=text,
            source=text_of(source, names),
            target=text_of(target, names) or "unknown",
            bytes=moved_bytes(shape, aval.dtype, source, target, self.sizes),
            dtype=dtype_name(aval),
            shape=shape,
            where=where,
            count=site.times,
        )
        # A backward pass takes the same argument as the forward one, and the compiler moves it once.
        key = (text, target, where) if not text.endswith("a computed array") else len(self._boundary)
        self._boundary.setdefault(key, moved)

    def _placed(self, eqn: Any, ins: list[Value], site: _Site, notes: Mapping[Any, Any]) -> list[Value]:
        """A constraint, or on Explicit axes a change of place that is an operation."""
        [aval] = [v.aval for v in eqn.outvars]
        sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        target = of_sharding(sharding, len(_shape_of(aval)), self.sizes)
        if eqn.primitive.name == "reshard":
            if not sharding.mesh.are_all_axes_explicit:  # then it changes a type, and no place
                return [ins[0]]
            source = ins[0].place if ins[0].place is not None else _typed_place(eqn.invars[0].aval, self.sizes)
            if _shape_of(aval) and target is not None and source not in (ANYWHERE, target):
                self._move(f"reshard: {ins[0].label or 'a computed array'}", source, target, aval, eqn, site)
            return [replace(ins[0], place=target)]
        self._want(ins[0], target)
        note = notes.get(eqn.outvars[0])
        layout = note.params["layout"].short if note is not None else text_of(target) or "unconstrained"
        text = note.params["call"] if note is not None else _call_text(site.names_of(eqn)) or "sharding_constraint"
        self._constraints.append(Constraint(text, layout, _shape_of(aval), site.times, site.line(eqn)))
        return [Value(target)]

    def _island(self, text: str, eqn: Any, site: _Site, *, opaque: bool) -> None:
        text, where = " ".join(text.split()), site.line(eqn)
        self._islands.setdefault((text, where), Island(text, where, opaque))

    # --- collectives and work -----------------------------------------------------------------------------

    def _collective(self, eqn: Any, site: _Site) -> None:
        sizes = dict(site.manual)
        axes = tuple(a for a in self.sizes if a in axes_of(eqn) and sizes.get(a, 1) > 1)
        groups = eqn.params.get("axis_index_groups")
        devices = len(groups[0]) if groups else math.prod(sizes[a] for a in axes)
        if devices == 1:
            return
        names = site.names_of(eqn)
        primitive: str = eqn.primitive.name
        kind = _KINDS.get(primitive, primitive)
        recomputed = ("Scope", "rematted_computation") in names
        transposed = ("Transform", "transpose") in names
        text = _call_text(names)
        said = text or _raw_text(primitive, kind, axes, transposed and not recomputed)
        for operand in eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars:
            self._collectives.append(
                WrittenCollective(
                    kind=kind,
                    axes=axes,
                    group_size=devices,
                    bytes=sent_bytes(kind, size_bytes(operand.aval), devices),
                    count=site.times,
                    exact=site.exact,
                    text=said,
                    where=site.line(eqn),
                    phase="backward" if transposed else "forward",
                    recomputed=recomputed,
                    implicit=kind == "psum" and _implicit(said, transposed and not recomputed),
                    branch=site.branch,
                    dtype=dtype_name(operand.aval),
                    shape=_shape(operand),
                    primitive=primitive,
                )
            )

    def _share(self, site: _Site) -> float:
        """One device's part of what is traced here: all inside a kernel; outside, the compiler divides it."""
        manual = dict(site.manual)
        return site.times / math.prod(n for a, n in self.sizes.items() if a not in manual)

    def _work(self, eqn: Any, site: _Site) -> None:
        dtype, flops = flops_of(eqn)
        if flops:
            self._flops[dtype] += flops * self._share(site)
            if is_matmul(eqn):
                self._matmul[dtype] += flops * self._share(site)
        self._memory += memory_of(eqn) * self._share(site)

    def _moves(self, eqn: Any, site: _Site) -> None:
        """A collective or an opaque call reads its operands and writes its results."""
        both = (*eqn.invars, *eqn.outvars)
        self._memory += sum(size_bytes(v.aval) for v in both) * self._share(site)


_RULES = {"scan": Walk._scan, "while": Walk._while, "cond": Walk._cond, "shard_map": Walk._shard_map}


# --- names ----------------------------------------------------------------------------------------------------


def _body(eqn: Any) -> Any:
    return getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])


def _call_text(names: Sequence[tuple[str, str]]) -> str:
    """The innermost scope that is a call of ours."""
    return next((text for kind, text in reversed(names) if kind == "Scope" and _CALL.fullmatch(text)), "")


_RAW = {"psum_scatter": "lax.all_gather", "all_gather": "lax.psum_scatter"}


def _raw_text(primitive: str, kind: str, axes: Sequence[str], transposed: bool) -> str:
    """What to call a collective that stands in no call of ours."""
    if transposed and kind == "psum":
        return f"gradient of a value equal on {', '.join(axes)}"
    if transposed:
        return f"gradient of {_RAW.get(kind, f'lax.{kind}')}"
    return f"lax.{primitive if kind == 'psum' and primitive in ('pmax', 'pmin') else kind}"


def _implicit(text: str, transposed: bool) -> bool:
    """Whether an all-reduce is no verb's own: of a dropped name, or of a gradient."""
    return transposed or not text.startswith(_VERBS)


# --- values outside kernels -----------------------------------------------------------------------------------


def _shape_of(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def _shape(atom: Any) -> tuple[int, ...]:
    return _shape_of(atom.aval)


def _typed_place(aval: Any, sizes: Mapping[str, int]) -> Placement:
    """What the type of an array says of its place: something on Explicit axes only."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
        return None
    return of_sharding(sharding, len(_shape_of(aval)), sizes)


def _sliced(value: Value) -> Value:
    place = value.place
    if isinstance(place, tuple):
        place = place[1:] if not place[0] else None
    return Value(place, value.label, value.sliced + 1)


def _stacked(value: Value) -> Value:
    return Value(((), *value.place) if isinstance(value.place, tuple) else value.place)


def _through(eqn: Any, ins: Sequence[Value]) -> list[Value]:
    """Where the results of an elementwise equation lie: with its operands, as sharding propagation has it."""
    shape = _shape(eqn.outvars[0]) if eqn.outvars else ()
    name = eqn.primitive.name
    if name == "transpose" and isinstance(ins[0].place, tuple):
        return [Value(tuple(ins[0].place[i] for i in eqn.params["permutation"]))]
    if all(v.place == ANYWHERE or not _shape(atom) for v, atom in zip(ins, eqn.invars, strict=True)):
        return [Value(ANYWHERE)] * len(eqn.outvars)
    if name not in _ELEMENTWISE:
        return [Value()] * len(eqn.outvars)
    whole = [v for v, atom in zip(ins, eqn.invars, strict=True) if _shape(atom) == shape and v.place != ANYWHERE]
    places = {v.place for v in whole}
    kept = whole[0] if len(whole) == len(ins) == 1 else Value()
    return [replace(kept, place=places.pop() if len(places) == 1 else None)] * len(eqn.outvars)
