"""One walk over a jaxpr: its collectives, its work, and what must move for arrays to enter kernels."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Literal

from spmd import _compat
from spmd._facts import CallName, KernelName
from spmd._jaxprs import COMMUNICATES, Held, axes_of, call_of, held, is_unknown, opened
from spmd.checker._source import line_of
from spmd.errors import MeshError, SpmdError
from spmd.inspect._collectives import sent_bytes
from spmd.inspect._groups import axes_of_pairs
from spmd.inspect._placement import (
    ANYWHERE,
    Placement,
    local_count,
    moved_bytes,
    names_of,
    of_sharding,
    of_spec,
    text_of,
    with_others,
)
from spmd.inspect._records import Boundary, Constraint, Island, Written, WrittenCollective
from spmd.inspect._values import (
    WINDOWS,
    Buffer,
    Value,
    chained,
    ending_bytes,
    shape_of,
    sliced,
    stacked,
    through,
    typed_place,
)
from spmd.inspect._work import dtype_name, flops_of, is_matmul, memory_of, size_bytes, writes_results
from spmd.language import Layout

__all__ = ["Walk"]

_KINDS: dict[str, str] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "unreduced_psum", "pmax", "pmin"), "psum"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "psum_scatter"),
}
_OPAQUE = frozenset(("pallas_call", "tpu_custom_call", "ffi_call", "custom_call", "pure_callback", "io_callback"))
_REDUCES = ("psum", "psum_scatter", "relayout")  # a sum is what these verbs are called for


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
        body, site = opened(jaxpr)[0], _Site()
        outs = self._run(body, self._stand(body.invars, arguments, site), site)
        return self._end(body.outvars, outs, site)

    def written(self, *, arguments: int, outputs: int, donated: int) -> Written:
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
            donated_bytes=donated,
        )

    # --- the walk -----------------------------------------------------------------------------------------

    def _run(self, jaxpr: Any, values: Sequence[Value], site: _Site) -> list[Value]:
        body = opened(jaxpr)[0]
        env: dict[Any, Value] = dict(zip(body.invars, values, strict=True))
        marked = (eqn for eqn in body.eqns if eqn.primitive.name == "spmd_layout")
        notes = {eqn.invars[0]: eqn for eqn in marked if not isinstance(eqn.invars[0], Literal)}

        env |= dict(zip(body.constvars, self._stand(body.constvars, None, site), strict=True))

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
        elif name in _OPAQUE or is_unknown(eqn):
            if _call_around(site.names_of(eqn)).verb != "opaque":  # whose note says it
                self._island(name, eqn, site, opaque=True)
        elif (inner := call_of(eqn)) is not None:
            return self._call(eqn, inner, ins, site)
        else:
            verb = getattr(eqn.params["call"], "verb", "") if name == "spmd_layout" else ""
            if verb in ("local", "opaque"):
                self._island(eqn.params["call"], eqn, site, opaque=verb == "opaque")
            return self._work(eqn, ins, site)
        return self._moves(eqn, ins, site)

    def _call(self, eqn: Any, inner: Held, ins: list[Value], site: _Site) -> list[Value]:
        """A call: `jit`, `remat`, a custom rule, a solver."""
        if said := eqn.params.get("in_shardings"):
            lies = [of_sharding(s, len(shape_of(v)), self.sizes) for s, v in zip(said, eqn.invars, strict=True)]
            ins = [replace(v, place=p) if p is not None else v for v, p in zip(ins, lies, strict=True)]
        return self._run(inner.jaxpr, inner.of(ins), site.inside(eqn))

    def _scan(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        [body] = held(eqn)
        ended = self._end(eqn.invars, ins, site)
        per = [sliced(v) if one else v for v, one in zip(ended, body.sliced, strict=True)]
        outs = self._loop(body.jaxpr, per, site.inside(eqn, times=site.times * eqn.params["length"]))
        outs = [stacked(v) if one else v for v, one in zip(outs, body.stacked, strict=True)]
        return self._stand(eqn.outvars, outs, site)

    def _while(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        test, body = held(eqn)
        ins = self._end(eqn.invars, ins, site)
        within = site.inside(eqn, exact=False)
        self._exact = False
        self._loop(test.jaxpr, test.of(ins), within)
        outs = self._loop(body.jaxpr, body.of(ins), within)
        return self._stand(eqn.outvars, outs, site)

    def _cond(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        branches = held(eqn)
        self._exact = False
        outs = []
        ins = self._end(eqn.invars, ins, site)
        for i, branch in enumerate(branches):
            shown = f"branch {i + 1} of {len(branches)}"
            within = site.inside(eqn, exact=False, branch=f"{site.branch}, {shown}" if site.branch else shown)
            outs.append(self._loop(branch.jaxpr, branch.of(ins), within))
        places = [v[0].place if all(x.place == v[0].place for x in v) else None for v in zip(*outs, strict=True)]
        return self._stand(eqn.outvars, [Value(place) for place in places], site)

    def _loop(self, jaxpr: Any, values: Sequence[Value], site: _Site) -> list[Value]:
        """A body that takes its operands from memory and leaves its results there."""
        body = opened(jaxpr)[0]
        return self._end(body.outvars, self._run(body, self._stand(body.invars, values, site), site), site)

    def _shard_map(self, eqn: Any, ins: list[Value], site: _Site) -> list[Value]:
        mesh = eqn.params["mesh"]
        self.sizes = self.sizes or dict(mesh.shape)
        if dict(mesh.shape) != self.sizes:
            rule = "what is looked at has one mesh, and the kernels of this program are on two."
            got = ["mesh " + ", ".join(f"{a}={n}" for a, n in sizes.items()) for sizes in (self.sizes, mesh.shape)]
            raise MeshError(rule, call="explain(...)", got=got, advice="explain(...) of each kernel by itself")
        new = {axis: mesh.shape[axis] for axis in eqn.params["newly_manual_axes"] or mesh.axis_names}
        if not site.manual:
            specs, ranks = eqn.params["in_specs"], [len(shape_of(var)) for var in eqn.invars]
            name = next((c.params["name"] for c in reversed(site.callers) if "name" in c.params), "shard_map")
            layouts = _layouts_of(name, specs, ranks)
            for value, var, spec, layout in zip(ins, eqn.invars, specs, layouts, strict=True):
                target = with_others(of_spec(spec, len(shape_of(var)), mesh.shape), value.place, new, mesh.shape)
                note = _kept_by_vmap(value.place, specs, site)
                self._enter(name, eqn, value, var.aval, target, layout, site, note)
        body = opened(eqn.params["jaxpr"])[0]
        within = site.inside(eqn, manual=(*site.manual, *new.items()))
        stand = self._stand(body.invars, None, within)
        given = [Value(buffers=v.buffers, chain=True) if v.chain else new for v, new in zip(ins, stand, strict=True)]
        outs = self._run(body, given, within)
        return [
            Value(
                with_others(of_spec(spec, len(shape_of(var)), mesh.shape), None, new, mesh.shape),
                buffers=out.buffers,
                chain=out.chain,
            )
            for spec, var, out in zip(eqn.params["out_specs"], eqn.outvars, outs, strict=True)
        ]

    # --- outside kernels ----------------------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        eqn: Any,
        value: Value,
        aval: Any,
        target: Placement,
        layout: Layout | None,
        site: _Site,
        note: str,
    ) -> None:
        """An array at the boundary of a kernel."""
        source = value.place if value.place is not None else typed_place(aval, self.sizes)
        self._want(value, target)
        if source in (ANYWHERE, target) or not shape_of(aval):
            return
        self._move(f"{name}: {value.label or 'a computed array'}", source, target, aval, eqn, site, layout, note)

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
        note: str = "",
    ) -> None:
        shape, where = shape_of(aval), site.line(eqn)
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
            note=note,
        )
        # A backward pass takes the same argument as the forward one, and the compiler moves it once.
        key = (text, target, where) if not text.endswith("a computed array") else len(self._boundary)
        self._boundary.setdefault(key, moved)

    def _placed(self, eqn: Any, ins: list[Value], site: _Site, notes: Mapping[Any, Any]) -> list[Value]:
        """A constraint, or on Explicit axes a change of place that is an operation."""
        [aval] = [v.aval for v in eqn.outvars]
        sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        target = of_sharding(sharding, len(shape_of(aval)), self.sizes)
        if eqn.primitive.name == "reshard":
            if not sharding.mesh.are_all_axes_explicit:  # then it changes a type, and no place
                return [ins[0]]
            source = ins[0].place if ins[0].place is not None else typed_place(eqn.invars[0].aval, self.sizes)
            if shape_of(aval) and target is not None and source not in (ANYWHERE, target):
                self._move(f"reshard: {ins[0].label or 'a computed array'}", source, target, aval, eqn, site)
            return [replace(ins[0], place=target)]
        self._want(ins[0], target)
        note = notes.get(eqn.outvars[0])
        layout = note.params["layout"].short if note is not None else text_of(target) or "unconstrained"
        text = note.params["call"] if note is not None else _call_around(site.names_of(eqn)) or "sharding_constraint"
        self._constraints.append(Constraint(text, layout, shape_of(aval), site.times, site.line(eqn)))
        return [Value(target, buffers=ins[0].buffers, chain=ins[0].chain)]

    def _island(self, text: str, eqn: Any, site: _Site, *, opaque: bool) -> None:
        text, where = " ".join(text.split()), site.line(eqn)
        self._islands.setdefault((text, where), Island(text, where, opaque))

    # --- collectives and work -----------------------------------------------------------------------------

    def _collective(self, eqn: Any, site: _Site) -> None:
        sizes = dict(site.manual)
        axes = tuple(a for a in self.sizes if a in axes_of(eqn) and sizes.get(a, 1) > 1)
        if "perm" in eqn.params:  # those that its pairs differ along, as in the compiled program
            axes = axes_of_pairs(eqn.params["perm"], {a: sizes[a] for a in axes})
        groups = eqn.params.get("axis_index_groups")
        devices = len(groups[0]) if groups else math.prod(sizes[a] for a in axes)
        if devices == 1:
            return
        names = site.names_of(eqn)
        primitive: str = eqn.primitive.name
        kind = _KINDS.get(primitive, primitive)
        recomputed = ("Scope", "rematted_computation") in names
        transposed = ("Transform", "transpose") in names
        call = _call_around(names)
        added = transposed and not recomputed
        for operand in eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars:
            self._collectives.append(
                WrittenCollective(
                    kind=kind,
                    axes=axes,
                    group_size=devices,
                    bytes=sent_bytes(kind, size_bytes(operand.aval), devices),
                    count=site.times,
                    exact=site.exact,
                    text=call or _raw_text(primitive, kind, axes, added),
                    where=site.line(eqn),
                    phase="backward" if transposed else "forward",
                    recomputed=recomputed,
                    implicit=kind == "psum" and (added or (bool(call) and call.verb not in _REDUCES)),
                    branch=site.branch,
                    dtype=dtype_name(operand.aval),
                    shape=shape_of(operand),
                    primitive=primitive,
                )
            )

    def _share(self, site: _Site) -> float:
        """One device's part of what is traced here: all inside a kernel; outside, the compiler divides it."""
        manual = dict(site.manual)
        return site.times / math.prod(n for a, n in self.sizes.items() if a not in manual)

    # --- memory -------------------------------------------------------------------------------------------

    def _work(self, eqn: Any, ins: Sequence[Value], site: _Site) -> list[Value]:
        dtype, flops = flops_of(eqn)
        if flops:
            self._flops[dtype] += flops * self._share(site)
            if is_matmul(eqn):
                self._matmul[dtype] += flops * self._share(site)
        outs = through(eqn, ins)
        traffic = memory_of(eqn, self._sizes(eqn.invars, ins, site), self._sizes(eqn.outvars, outs, site))
        if traffic:
            self._memory += traffic * site.times
            return self._stand(eqn.outvars, outs, site, open=writes_results(eqn))
        if eqn.primitive.name in WINDOWS:  # what follows reads no more than these parts
            return [replace(value, chain=True) for value in self._stand(eqn.outvars, outs, site)]
        buffers, chain = chained(eqn, ins)
        return [replace(value, buffers=buffers, chain=chain) for value in outs]

    def _moves(self, eqn: Any, ins: Sequence[Value], site: _Site) -> list[Value]:
        """A collective or an opaque call reads its operands and writes its results."""
        outs = [Value()] * len(eqn.outvars)
        both = (*self._sizes(eqn.invars, ins, site), *self._sizes(eqn.outvars, outs, site))
        self._memory += sum(both) * site.times
        return self._stand(eqn.outvars, outs, site)

    def _sizes(self, atoms: Sequence[Any], values: Sequence[Value], site: _Site) -> list[float]:
        """Bytes on one device: by its place where that is known; else the devices share what no kernel has divided."""
        share = 1 / math.prod(n for a, n in self.sizes.items() if a not in dict(site.manual))
        sizes = []
        for atom, value in zip(atoms, values, strict=True):
            shape, part = shape_of(atom), share
            if not site.manual and value.place not in (None, ANYWHERE):
                part = local_count(shape, value.place, self.sizes) / max(math.prod(shape), 1)
            sizes.append(size_bytes(atom.aval) * part)
        return sizes

    def _stand(
        self,
        atoms: Sequence[Any],
        values: Sequence[Value] | None,
        site: _Site,
        *,
        open: bool = False,  # noqa: A002
    ) -> list[Value]:
        """The values, as arrays that stand in memory."""
        values = [Value()] * len(atoms) if values is None else values
        sizes = self._sizes(atoms, values, site)
        return [
            replace(value, buffers=frozenset((Buffer(n, open),)), chain=False)
            for value, n in zip(values, sizes, strict=True)
        ]

    def _end(self, atoms: Sequence[Any], values: Sequence[Value], site: _Site) -> list[Value]:
        """The values where they must be in memory."""
        sizes = self._sizes(atoms, values, site)
        found = {id(atom): (value, n) for atom, value, n in zip(atoms, values, sizes, strict=True)}
        self._memory += ending_bytes(found.values()) * site.times
        return [
            value if not value.chain else self._stand([atom], [value], site)[0]
            for atom, value in zip(atoms, values, strict=True)
        ]


_RULES = {"scan": Walk._scan, "while": Walk._while, "cond": Walk._cond, "shard_map": Walk._shard_map}


# --- names ----------------------------------------------------------------------------------------------------


def _call_around(names: Sequence[tuple[str, str]]) -> CallName:
    """The innermost scope that is a call of ours; an empty name where there is none."""
    return next((text for _, text in reversed(names) if isinstance(text, CallName)), CallName(""))


def _layouts_of(name: str, specs: Sequence[Any], ranks: Sequence[int]) -> Sequence[Layout | None]:
    """The layouts of a kernel's arguments, by the kernel's name; None where a transformation changed what enters."""
    leaves = name.arguments if isinstance(name, KernelName) else ()
    if len(leaves) == len(specs):
        with contextlib.suppress(SpmdError):  # arrays of another rank, under vmap
            layouts = [leaf.layout for leaf in leaves]
            if all(a.with_rank(n).spec == spec for a, n, spec in zip(layouts, ranks, specs, strict=True)):
                return layouts
    return [None] * len(specs)


_RAW = {"psum_scatter": "lax.all_gather", "all_gather": "lax.psum_scatter"}


def _raw_text(primitive: str, kind: str, axes: Sequence[str], transposed: bool) -> str:
    """What to call a collective that stands in no call of ours."""
    if transposed and kind == "psum":
        return f"gradient of a value equal on {', '.join(axes)}"
    if transposed:
        return f"gradient of {_RAW.get(kind, f'lax.{kind}')}"
    return f"lax.{primitive if kind == 'psum' and primitive in ('pmax', 'pmin') else kind}"


def _kept_by_vmap(place: Any, specs: Sequence[Any], site: _Site) -> str:
    """What `jax.vmap` would need to be told, where an array enters a kernel under it and loses axes that no argument of
    the kernel is divided over."""
    if ("Transform", "vmap") not in site.names or not isinstance(place, tuple):
        return ""
    kernels = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    lost = [axis for axes in place for axis in axes if axis not in kernels]
    name = f'"{lost[0]}"' if len(lost) == 1 else "({})".format(", ".join(f'"{axis}"' for axis in lost))
    return f"jax.vmap(..., spmd_axis_name={name}) keeps a mapped dimension divided" if lost else ""
