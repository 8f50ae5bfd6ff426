"""One walk over a jaxpr: its collectives, its work, and what must move for arrays to enter kernels."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmd import _compat
from spmd._facts import CallName, KernelName, LayoutName, PerShardName, one_line
from spmd._jaxprs import COMMUNICATES, Held, Role, axes_of, opened, shape_of
from spmd._units import sent_bytes
from spmd._walker import Domain, walk
from spmd.checker._source import line_of
from spmd.errors import MeshError, SpmdError
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
from spmd.inspect._records import PRIMITIVES, Boundary, Constraint, Island, PerShard, Written, WrittenCollective
from spmd.inspect._values import (
    WINDOWS,
    Buffer,
    Value,
    chained,
    ending_bytes,
    sliced,
    stacked,
    through,
    typed_place,
)
from spmd.inspect._work import dtype_name, flops_of, is_matmul, memory_of, size_bytes, writes_results
from spmd.language import Layout, axes_product, mesh_text

_KINDS = {primitive: kind for kind, primitives in PRIMITIVES.items() for primitive in primitives}
_OPAQUE = frozenset(("pallas_call", "tpu_custom_call", "ffi_call", "custom_call", "pure_callback", "io_callback"))
_REDUCES = ("psum", "psum_scatter", "relayout")  # a sum is what these verbs are called for


@dataclass(frozen=True, slots=True)
class _Site:
    """Where the walk is: the names around it, the sizes of the manual axes, how often and how surely it comes here."""

    names: tuple[tuple[str, str], ...] = ()
    manual: Mapping[str, int] = field(default_factory=dict)
    times: int = 1
    exact: bool = True
    branch: str = ""


class Walk(Domain):
    """What a program does, added up over its equations.

    Args:
      sizes: The mesh: axis sizes in mesh order.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.site = _Site()
        self.wanted: dict[str, Placement] = {}  # where the first kernel that an argument enters wants it
        self._collectives: list[WrittenCollective] = []
        self._boundary: dict[Any, Boundary] = {}
        self._islands: dict[tuple[str, str], Island] = {}
        self._per_shard: dict[tuple[str, str], PerShard] = {}
        self._constraints: list[Constraint] = []
        self._flops: dict[str, float] = defaultdict(float)
        self._matmul: dict[str, float] = defaultdict(float)
        self._memory = 0.0
        self._exact = True

    def read(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """Walk over a whole program, and return what is known of its results."""
        self._release(jaxpr)
        outs = walk(jaxpr, self._stand(jaxpr.invars, arguments), self)
        return self._end(jaxpr.outvars, outs)

    def local_bytes(self, var: Any) -> float:
        """Bytes on one device of a variable outside kernels, once the walk was there."""
        [size] = self._sizes([var], [self.known.get(var, Value())])
        return size

    def written(self, *, arguments: int, outputs: int, donated: int, standing: tuple[int, int]) -> Written:
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
            per_shard=tuple(self._per_shard.values()),
            constraints=tuple(self._constraints),
            arguments_bytes=arguments,
            outputs_bytes=outputs,
            donated_bytes=donated,
            standing_bytes=standing[0],
            unfused_bytes=standing[1],
        )

    # --- values -------------------------------------------------------------------------------------------

    def constant(self, var: Any, value: Any) -> Value:
        [value] = self._stand([var])
        return value

    def literal(self, value: Any) -> Value:
        return Value(ANYWHERE)

    def join(self, one: Value, other: Value) -> Value:
        alike = (one.label, one.sliced) == (other.label, other.sliced)
        label, taken = (one.label, one.sliced) if alike else ("", 0)
        return Value(one.place if one.place == other.place else None, label, taken)

    def same(self, one: Value, other: Value) -> bool:
        """A loop is walked once: what it costs is counted on the way."""
        return True

    def may_not_run(self, value: Value, start: Value) -> Value:
        """As in the costs, it is taken to run."""
        return value

    def sliced(self, value: Value, operand: Any) -> Value:
        return sliced(value)

    def stacked(self, value: Value, result: Any) -> Value:
        return stacked(value)

    # --- jaxprs inside equations --------------------------------------------------------------------------

    def run(self, eqn: Any, part: Held, operands: Sequence[Value]) -> list[Value]:
        """Loops and branches take their operands from memory and leave their results there."""
        body = opened(part.jaxpr)[0]
        before, self.site = self.site, self._inside(eqn, part)
        self._exact &= self.site.exact
        self._release(body)
        through_memory = part.role in (Role.LOOP, Role.TEST, Role.BRANCH)
        if through_memory:
            operands = self._stand(body.invars, operands)
        elif part.role == Role.MAP:
            shards = zip(operands, self._stand(body.invars), strict=True)
            operands = [Value(buffers=v.buffers, chain=True) if v.chain else shard for v, shard in shards]
        outs = super().run(eqn, part, operands)
        outs = self._end(body.outvars, outs) if through_memory else outs
        self.site = before
        return outs

    def _inside(self, eqn: Any, part: Held) -> _Site:
        """Where the walk is in a jaxpr that an equation holds."""
        site = replace(self.site, names=self._names(eqn))
        if part.role == Role.MAP:
            return replace(site, manual={**site.manual, **_compat.made_manual(eqn)})
        if part.role == Role.BRANCH:
            shown = f"branch {part.number + 1} of {len(eqn.params['branches'])}"
            return replace(site, exact=False, branch=f"{site.branch}, {shown}" if site.branch else shown)
        if part.role in (Role.LOOP, Role.TEST):
            length = eqn.params.get("length")
            return replace(site, exact=False) if length is None else replace(site, times=site.times * length)
        return site

    def call(self, eqn: Any, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        """A `jit` may say where its arguments lie."""
        if said := eqn.params.get("in_shardings"):
            lies = [of_sharding(s, len(shape_of(v)), self.sizes) for s, v in zip(said, eqn.invars, strict=True)]
            operands = [replace(v, place=p) if p is not None else v for v, p in zip(operands, lies, strict=True)]
        return super().call(eqn, part, operands)

    def loop(self, eqn: Any, body: Held, test: Held | None, operands: Sequence[Value]) -> Sequence[Value]:
        ended = self._end(eqn.invars, operands)
        return self._stand(eqn.outvars, super().loop(eqn, body, test, ended))

    def branches(self, eqn: Any, parts: Sequence[Held], operands: Sequence[Value]) -> Sequence[Value]:
        ended = self._end(eqn.invars, operands)
        return self._stand(eqn.outvars, super().branches(eqn, parts, ended))

    def mapped(self, eqn: Any, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        mesh, new = eqn.params["mesh"], _compat.made_manual(eqn)
        self.sizes = self.sizes or dict(mesh.shape)
        if dict(mesh.shape) != self.sizes:
            rule = "explain reads a program on one mesh, and the kernels of this one are on two."
            got = [mesh_text(sizes) for sizes in (self.sizes, mesh.shape)]
            raise MeshError(rule, call="explain(...)", got=got, advice="explain(...) of each kernel by itself")
        if not self.site.manual:
            specs, ranks = eqn.params["in_specs"], [len(shape_of(var)) for var in eqn.invars]
            name = next((c.params["name"] for c in reversed(self.callers) if "name" in c.params), "shard_map")
            layouts = _layouts_of(name, specs, ranks)
            for value, var, spec, layout in zip(operands, eqn.invars, specs, layouts, strict=True):
                target = with_others(of_spec(spec, len(shape_of(var)), mesh.shape), value.place, new, mesh.shape)
                self._want(value, target)
                self._move(name, value, target, var, eqn, layout, self._kept_by_vmap(value.place, specs))
        outs = super().mapped(eqn, part, operands)
        left = []
        for out, spec, var in zip(outs, eqn.params["out_specs"], eqn.outvars, strict=True):
            place = with_others(of_spec(spec, len(shape_of(var)), mesh.shape), None, new, mesh.shape)
            left.append(Value(place, buffers=out.buffers, chain=out.chain))
        return left

    def unread(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """A custom call or a callback. The marker of `spmd.opaque` tells its own."""
        if _call_around(self._names(eqn)).verb != "opaque":
            self._island(eqn.primitive.name, eqn, opaque=True)
        return self._moves(eqn, operands)

    def _marked(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        call = eqn.params["call"]
        if isinstance(call, CallName) and call.verb in ("local", "opaque"):
            self._island(call, eqn, opaque=call.verb == "opaque")
        return self.step(eqn, operands)

    # --- outside kernels ----------------------------------------------------------------------------------

    def _want(self, value: Value, target: Placement) -> None:
        """Where an argument, or each slice of it, is wanted first."""
        if value.label:
            whole = ((),) * value.sliced
            self.wanted.setdefault(value.label, (*whole, *target) if isinstance(target, tuple) else target)

    def _move(
        self,
        where_to: str,
        value: Value,
        target: Placement,
        operand: Any,
        eqn: Any,
        layout: Layout | None = None,
        note: str = "",
    ) -> None:
        """Note an array that lies elsewhere than a kernel, or an operation, wants it."""
        shape, where = shape_of(operand), self._line(eqn)
        source = value.place if value.place is not None else typed_place(operand.aval, self.sizes)
        if source in (ANYWHERE, target) or not shape:
            return
        names = () if layout is None else names_of(layout, len(shape))
        moved = Boundary(
            text=f"{where_to}: {value.label or 'a computed array'}",
            source=text_of(source, names),
            target=text_of(target, names) or "unknown",
            bytes=moved_bytes(shape, operand.aval.dtype, source, target, self.sizes),
            dtype=dtype_name(operand.aval),
            shape=shape,
            where=where,
            count=self.site.times,
            note=note,
        )
        # A backward pass takes the same argument as the forward one, and the compiler moves it once.
        key = (moved.text, target, where) if value.label else len(self._boundary)
        self._boundary.setdefault(key, moved)

    def _constrained(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """A constraint of auto mode: ours has a name that knows its layout."""
        [value], [result] = operands, eqn.outvars
        target = of_sharding(eqn.params["sharding"], len(shape_of(result)), self.sizes)
        self._want(value, target)
        names = [name for _, name in reversed(self._names(eqn)) if isinstance(name, LayoutName)]
        text, layout = _call_around(self._names(eqn)) or "sharding_constraint", text_of(target) or "unconstrained"
        if names:
            text, layout = names[0], names[0].layout.short
        self._constraints.append(Constraint(text, layout, shape_of(result), self.site.times, self._line(eqn)))
        return [Value(target, buffers=value.buffers, chain=value.chain)]

    def _resharded(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        """On Explicit axes a change of place is an operation; on others it changes a type."""
        [value], sharding = operands, eqn.params["dst_sharding"]
        if not sharding.mesh.are_all_axes_explicit:
            return [value]
        target = of_sharding(sharding, len(shape_of(eqn.outvars[0])), self.sizes)
        if target is not None:
            self._move("reshard", value, target, eqn.invars[0], eqn)
        return [replace(value, place=target)]

    def _island(self, text: str, eqn: Any, *, opaque: bool) -> None:
        text, where = one_line(text), self._line(eqn)
        self._islands.setdefault((text, where), Island(text, where, opaque))

    def _release(self, body: Any) -> None:
        """Note what is meant per shard in a jaxpr. Around a kernel it is the kernel's body that is meant."""
        names = {id(name): name for eqn in body.eqns for _, name in self._names(eqn) if isinstance(name, PerShardName)}
        for name in names.values():
            where = _short(line_of(name))
            before = self._per_shard.get((name.why, where))
            whole = not self.site.manual and (before is None or before.whole)
            self._per_shard[name.why, where] = PerShard(name.why, where, whole)

    # --- collectives and work -----------------------------------------------------------------------------

    def _collective(self, eqn: Any, operands: Sequence[Value]) -> Sequence[Value]:
        self._note(eqn)
        return self._moves(eqn, operands)

    def _note(self, eqn: Any) -> None:
        """Note a collective, unless it is one of a single device."""
        site, sizes = self.site, self.site.manual
        axes = tuple(a for a in self.sizes if a in axes_of(eqn) and sizes.get(a, 1) > 1)
        if "perm" in eqn.params:  # those that its pairs differ along, as in the compiled program
            axes = axes_of_pairs(eqn.params["perm"], {a: sizes[a] for a in axes})
        groups = eqn.params.get("axis_index_groups")
        devices = len(groups[0]) if groups else axes_product(axes, sizes)
        if devices == 1:
            return
        names = self._names(eqn)
        primitive: str = eqn.primitive.name
        kind = _KINDS.get(primitive, primitive)
        recomputed = ("Scope", "rematted_computation") in names
        transposed = _compat.is_backward(names)
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
                    where=self._line(eqn),
                    phase="backward" if transposed else "forward",
                    recomputed=recomputed,
                    implicit=kind == "psum" and (added or (bool(call) and call.verb not in _REDUCES)),
                    branch=site.branch,
                    dtype=dtype_name(operand.aval),
                    shape=shape_of(operand),
                    primitive=primitive,
                )
            )

    @property
    def _share(self) -> float:
        """One device's part of what is traced here: all inside a kernel; outside, the compiler divides it."""
        return 1 / math.prod(n for a, n in self.sizes.items() if a not in self.site.manual)

    # --- memory -------------------------------------------------------------------------------------------

    def step(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        dtype, flops = flops_of(eqn)
        if flops:
            flops *= self._share * self.site.times
            self._flops[dtype] += flops
            if is_matmul(eqn):
                self._matmul[dtype] += flops
        outs = through(eqn, operands)
        traffic = memory_of(eqn, self._sizes(eqn.invars, operands), self._sizes(eqn.outvars, outs))
        if traffic:
            self._memory += traffic * self.site.times
            return self._stand(eqn.outvars, outs, open=writes_results(eqn))
        if eqn.primitive.name in WINDOWS:  # what follows reads no more than these parts
            return [replace(value, chain=True) for value in self._stand(eqn.outvars, outs)]
        buffers, chain = chained(eqn, operands)
        return [replace(value, buffers=buffers, chain=chain) for value in outs]

    def _moves(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """A collective or an opaque call reads its operands and writes its results."""
        outs = [Value()] * len(eqn.outvars)
        both = (*self._sizes(eqn.invars, operands), *self._sizes(eqn.outvars, outs))
        self._memory += sum(both) * self.site.times
        return self._stand(eqn.outvars, outs)

    def _sizes(self, atoms: Sequence[Any], values: Sequence[Value]) -> list[float]:
        """Bytes on one device: by its place where that is known; else the devices share what no kernel has divided."""
        share, sizes = self._share, []
        for atom, value in zip(atoms, values, strict=True):
            shape, part = shape_of(atom), share
            if not self.site.manual and value.place not in (None, ANYWHERE):
                part = local_count(shape, value.place, self.sizes) / max(math.prod(shape), 1)
            sizes.append(size_bytes(atom.aval) * part)
        return sizes

    def _stand(
        self,
        atoms: Sequence[Any],
        values: Sequence[Value] | None = None,
        *,
        open: bool = False,  # noqa: A002
    ) -> list[Value]:
        """The values, as arrays that stand in memory."""
        values = [Value()] * len(atoms) if values is None else values
        sizes = self._sizes(atoms, values)
        return [
            replace(value, buffers=frozenset((Buffer(n, open),)), chain=False)
            for value, n in zip(values, sizes, strict=True)
        ]

    def _end(self, atoms: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """The values where they must be in memory."""
        sizes = self._sizes(atoms, values)
        found = {id(atom): (value, n) for atom, value, n in zip(atoms, values, sizes, strict=True)}
        self._memory += ending_bytes(found.values()) * self.site.times
        return [
            value if not value.chain else self._stand([atom], [value])[0]
            for atom, value in zip(atoms, values, strict=True)
        ]

    # --- names --------------------------------------------------------------------------------------------

    def _names(self, eqn: Any) -> tuple[tuple[str, str], ...]:
        return (*self.site.names, *_compat.name_stack(eqn))

    def _line(self, eqn: Any) -> str:
        return _short(line_of(eqn, self.callers))

    def _kept_by_vmap(self, place: Any, specs: Sequence[Any]) -> str:
        """What `jax.vmap` would need to be told, where an array enters a kernel under it and loses axes that no
        argument of the kernel is divided over."""
        if ("Transform", "vmap") not in self.site.names or not isinstance(place, tuple):
            return ""
        kernels = {a for spec in specs for entry in spec for a in (entry if isinstance(entry, tuple) else (entry,))}
        lost = [axis for axes in place for axis in axes if axis not in kernels]
        name = f'"{lost[0]}"' if len(lost) == 1 else "({})".format(", ".join(f'"{axis}"' for axis in lost))
        return f"jax.vmap(..., spmd_axis_name={name}) keeps a mapped dimension divided" if lost else ""


Walk.rules = {
    **dict.fromkeys(COMMUNICATES, Walk._collective),
    **dict.fromkeys(_OPAQUE, Walk.unread),
    "sharding_constraint": Walk._constrained,
    "reshard": Walk._resharded,
    "spmd_layout": Walk._marked,
}


def _short(line: str) -> str:
    """`file.py:12` of a line as `line_of` gives it."""
    return os.path.basename(line.partition(" (")[0])


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
