"""One walk over a jaxpr: its collectives, its work, and what must move for arrays to enter kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import spmd.inspect._program as places
import spmd.inspect._records as records
import spmd.inspect._values as _values
from spmd import _compat
from spmd._jaxprs.facts import CallName, FusedName, LayoutName, PerShardName, WindowName, kernel_around, one_line
from spmd._jaxprs.lines import line_of, short_line
from spmd._jaxprs.primitives import kind_of, primitive_of
from spmd._jaxprs.walker import COMMUNICATES, Domain, Equation, Held, Role, Variable, axes_of, opened, shape_of, walk
from spmd._text import sent_bytes
from spmd.checker import _tables as tables
from spmd.checker._claims import arguments_of
from spmd.errors import MeshError
from spmd.inspect._collectives import axes_of_pairs
from spmd.inspect._program import ANYWHERE, Placement, of_sharding
from spmd.inspect._records import Turns, Work, Written
from spmd.inspect._values import Buffer, Inside, Value, dtype_name, size_bytes, typed_place
from spmd.language import Layout, axes_code, axes_product, axes_tuple, mesh_text

_OPAQUE = frozenset(("pallas_call", "tpu_custom_call", "ffi_call", "custom_call", "pure_callback", "io_callback"))
_FOUND = ("collectives", "boundary", "islands", "per_shard", "constraints", "windows")  # as `Written` has it
_ASKED = "out_sharding= of a product"
_REDUCES = ("psum", "psum_scatter", "relayout")  # a sum is what these verbs are called for


@dataclass(frozen=True, slots=True)
class _Site:
    """Where the walk is: the names around it, the sizes of the manual axes, how often and how surely it comes here."""

    names: tuple[tuple[str, str], ...] = ()
    manual: Mapping[str, int] = field(default_factory=dict)
    times: int = 1
    share: float = 1.0  # the part of them in which a device comes here, in branches that are known
    exact: bool = True
    branch: str = ""


class Walk(Domain):
    """What a program does, added up over its equations.

    Args:
      sizes: The mesh: axis sizes in mesh order.
      asks: Whether the sums that `out_sharding=` asks for are among what is written; else a plan has them.
    """

    def __init__(self, sizes: Mapping[str, int], *, asks: bool = False) -> None:
        super().__init__()
        self._asks = asks
        self.sizes = dict(sizes)
        self.site = _Site()
        self.wanted: dict[str, Placement] = {}  # where the first kernel that an argument enters wants it
        self._found: dict[str, dict[Any, Any]] = {name: {} for name in _FOUND}
        self._work = Work()
        self._switches: list[tuple[Turns | None, list[Work]]] = []  # that the walk is in, and what their branches spend
        self._rounds: dict[str, int] = {}  # how many rounds the loops have that the walk is in, as axes of tables
        self._constants: Mapping[Any, Any] = {}
        self._captured: dict[int, int] = {}  # bytes of each, on one device
        self._exact = True
        self.has_kernels = False  # as `spmd.fused` says

    def read(self, jaxpr: Any, arguments: Sequence[Value], constants: Mapping[Any, Any]) -> list[Value]:
        """Walk over a whole program with its constants, and return what is known of its results."""
        self._constants = constants
        self._release(jaxpr)
        outs = walk(jaxpr, self._stand(jaxpr.invars, arguments), self)
        return self._end(jaxpr.outvars, outs)

    def local_bytes(self, var: Variable, *, host: bool = False) -> float:
        """Bytes on one device, or of its part on the host, of a variable outside kernels, once the walk was there."""
        [size] = self._sizes([var], [self.known.get(var, Value())], host=host)
        return size

    def written(self, **memory: Any) -> Written:
        """All that was found, and what is known of memory."""
        found: dict[str, Any] = {name: tuple(ones.values()) for name, ones in self._found.items()}
        flops, matmul_flops, traffic = (self._work.total(what) for what in ("flops", "matmul_flops", "traffic"))
        spent = flops, matmul_flops, round(traffic.pop("", 0.0)), traffic, self._exact
        memory["constants_bytes"] = sum(self._captured.values())
        again, first = (self._work.total(f"{what}_flops") for what in ("again", "first"))
        memory["again_flops"] = {dtype: min(n, first.get(dtype, 0.0)) for dtype, n in again.items()}
        return Written(found.pop("collectives"), self.sizes, *spent, **found, **memory, work=self._work)

    # --- values -------------------------------------------------------------------------------------------

    def constant(self, var: Variable | None, value: Any) -> Value:
        value = self._constants.get(var, value)
        lies = of_sharding(getattr(value, "sharding", None), np.ndim(value), self.sizes)
        place = None if self.site.manual or isinstance(lies, str) else lies  # each device has what a body closes over
        count = places.local_count(np.shape(value), place, self.sizes)
        self._captured[id(value)] = count * getattr(getattr(value, "dtype", None), "itemsize", 0)
        [one] = self._stand([var])
        return replace(one, table=_integers_of(value))

    def literal(self, atom: Variable) -> Value:
        return Value(ANYWHERE, table=_integers_of(atom.val))

    def join(self, one: Value, other: Value) -> Value:
        alike = (one.label, one.sliced) == (other.label, other.sliced)
        label, taken = (one.label, one.sliced) if alike else ("", 0)
        place = one.place if one.place == other.place else None
        return Value(place, label, taken, inside=one.inside or other.inside)

    def same(self, one: Value, other: Value) -> bool:
        """A loop is walked once: what it costs is counted on the way."""
        return True

    def may_not_run(self, value: Value, start: Value) -> Value:
        """As in the costs, it is taken to run."""
        return value

    def sliced(self, value: Value, operand: Any) -> Value:
        table = None if value.table is None else tables.by_rounds(value.table, [*self._rounds][-1])
        return replace(_values.sliced(value), table=table)

    def stacked(self, value: Value, result: Any) -> Value:
        return _values.stacked(value)

    # --- jaxprs inside equations --------------------------------------------------------------------------

    def run(self, eqn: Equation, part: Held, operands: Sequence[Value]) -> list[Value]:
        """Loops and branches take their operands from memory and leave their results there."""
        body = opened(part.jaxpr)[0]
        before, self.site, work = self.site, self._inside(eqn, part), self._work
        self._exact &= self.site.exact
        self._work = Work() if part.role == Role.BRANCH else work
        self._release(body)
        given = operands
        through_memory = part.role in (Role.LOOP, Role.TEST, Role.BRANCH)
        if through_memory:
            operands = self._stand(body.invars, operands)
        elif part.role == Role.MAP:
            shards = zip(operands, self._stand(body.invars), strict=True)
            operands = [
                Value(buffers=v.buffers, chain=True, inside=v.inside) if v.chain else replace(shard, inside=v.inside)
                for v, shard in shards
            ]
            whole = [shape_of(a) == shape_of(b) for a, b in zip(eqn.invars, body.invars, strict=True)]
            operands = [replace(v, table=o.table) if w else v for v, o, w in zip(operands, given, whole, strict=True)]
        outs = super().run(eqn, part, operands)
        outs = self._end(body.outvars, outs) if through_memory else outs
        if part.role == Role.BRANCH:
            self._switches[-1][1].append(self._work)
        self.site, self._work = before, work
        return outs

    def _inside(self, eqn: Equation, part: Held) -> _Site:
        """Return where the walk is in a jaxpr that an equation holds."""
        site = replace(self.site, names=self._names(eqn))
        if part.role == Role.MAP:
            return replace(site, manual={**site.manual, **_compat.made_manual(eqn)})
        if part.role == Role.BRANCH:
            shown = f"branch {part.number + 1} of {len(eqn.params['branches'])}"
            site = replace(site, branch=f"{site.branch}, {shown}" if site.branch else shown)
            turns, _ = self._switches[-1]
            if turns is None:
                return replace(site, exact=False)
            return replace(site, share=site.share * turns.most[part.number])
        if part.role in (Role.LOOP, Role.TEST):
            length = eqn.params.get("length")
            return replace(site, exact=False) if length is None else replace(site, times=site.times * length)
        return site

    def call(self, eqn: Equation, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        """A `jit` may say where its arguments lie."""
        if said := eqn.params.get("in_shardings"):
            lies = [of_sharding(s, len(shape_of(v)), self.sizes) for s, v in zip(said, eqn.invars, strict=True)]
            operands = [replace(v, place=p) if p is not None else v for v, p in zip(operands, lies, strict=True)]
        return super().call(eqn, part, operands)

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[Value]) -> Sequence[Value]:
        """A round of a scan is to integers what a device is: they are another array in each."""
        ended, before = self._end(eqn.invars, operands), self._rounds
        count = len(body.stacked) - sum(body.stacked)
        first = len(body.operands) - sum(body.sliced) - count
        carries = {*body.operands[first : first + count]}
        ended = [replace(v, table=None) if i in carries else v for i, v in enumerate(ended)]
        self._rounds = {**before, f"round of {len(before)}": eqn.params.get("length", 1)}
        outs = super().loop(eqn, body, test, ended)
        self._rounds = before
        return self._stand(eqn.outvars, [replace(value, table=None) for value in outs])

    def branches(self, eqn: Equation, parts: Sequence[Held], operands: Sequence[Value]) -> Sequence[Value]:
        """Devices may take branches of their own, where the index is a known integer on each."""
        ended = self._end(eqn.invars, operands)
        self._switches.append((records.turns_of(ended[0].table, self.sizes, len(parts)), []))
        outs = super().branches(eqn, parts, ended)
        turns, spent = self._switches.pop()
        self._work.switches.append(records.Switch(spent, turns))
        return self._stand(eqn.outvars, outs)

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Value]) -> Sequence[Value]:
        mesh, new = eqn.params["mesh"], _compat.made_manual(eqn)
        self.sizes = self.sizes or dict(mesh.shape)
        if dict(mesh.shape) != self.sizes:
            rule = "explain reads a program on one mesh, and the kernels of this one are on two."
            got = [mesh_text(sizes) for sizes in (self.sizes, mesh.shape)]
            raise MeshError(rule, call="explain(...)", got=got, advice="explain(...) of each kernel by itself")

        def place(spec: Any, var: Variable, before: Placement) -> Placement:
            said = places.of_spec(spec, len(shape_of(var)), mesh.shape)
            return places.with_others(said, before, new, mesh.shape)

        if not self.site.manual:
            specs, leaves = eqn.params["in_specs"], arguments_of(eqn, kernel_around(self.callers))
            name = next((c.params["name"] for c in reversed(self.callers) if "name" in c.params), "shard_map")
            for i, (value, var, spec) in enumerate(zip(operands, eqn.invars, specs, strict=True)):
                target = place(spec, var, value.place)
                self._want(value, target)
                layout = leaves[i].layout if i in leaves else None
                self._move(name, value, target, var, eqn, layout, self._kept_by_vmap(value.place, specs, new))
        outs = super().mapped(eqn, part, operands)
        left = []
        for out, spec, var in zip(outs, eqn.params["out_specs"], eqn.outvars, strict=True):
            left.append(Value(place(spec, var, None), buffers=out.buffers, chain=out.chain, inside=out.inside))
        return left

    def unread(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """A custom call or a callback. The marker of `spmd.opaque` tells its own."""
        if _call_around(self._names(eqn)).verb != "opaque":
            self._island(eqn.primitive.name, eqn, opaque=True)
        return self._moves(eqn, operands)

    def _marked(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        call = eqn.params["call"]
        if isinstance(call, CallName) and call.verb in ("local", "opaque"):
            self._island(call, eqn, opaque=call.verb == "opaque")
        return self.step(eqn, operands)

    # --- outside kernels ----------------------------------------------------------------------------------

    def _want(self, value: Value, target: Placement) -> None:
        """Return where an argument, or each slice of it, is wanted first."""
        if value.label:
            whole = ((),) * value.sliced
            self.wanted.setdefault(value.label, (*whole, *target) if isinstance(target, tuple) else target)

    def _move(
        self,
        where_to: str,
        value: Value,
        target: Placement,
        operand: Any,
        eqn: Equation,
        layout: Layout | None = None,
        note: str = "",
    ) -> None:
        """Note an array that lies elsewhere than a kernel, or an operation, wants it."""
        shape, where = shape_of(operand), self._line(eqn)
        source = value.place if value.place is not None else typed_place(operand.aval, self.sizes)
        if source in (ANYWHERE, target) or not shape:
            return
        names = () if layout is None else places.names_of(layout, len(shape))
        moved = records.Boundary(
            text=f"{where_to}: {value.label or 'a computed array'}",
            source=places.text_of(source, names),
            target=places.text_of(target, names) or "unknown",
            bytes=places.moved_bytes(shape, operand.aval.dtype, source, target, self.sizes),
            dtype=dtype_name(operand.aval),
            shape=shape,
            where=where,
            count=self.site.times,
            note=note,
        )
        # A backward pass takes the same argument as the forward one, and the compiler moves it once.
        found = self._found["boundary"]
        found.setdefault((moved.text, target, where) if value.label else len(found), moved)

    def _constrained(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """A constraint of auto mode: ours has a name that knows its layout."""
        [value], [result] = operands, eqn.outvars
        target = of_sharding(eqn.params["sharding"], len(shape_of(result)), self.sizes)
        self._want(value, target)
        names = [name for _, name in reversed(self._names(eqn)) if isinstance(name, LayoutName)]
        text = names[0] if names else _call_around(self._names(eqn)) or "sharding_constraint"
        layout = names[0].layout.short if names else places.text_of(target) or "unconstrained"
        asked = records.Constraint(text, layout, shape_of(result), self.site.times, self._line(eqn))
        self._found["constraints"][len(self._found["constraints"])] = asked
        return [Value(target, buffers=value.buffers, chain=value.chain, inside=value.inside)]

    def _resharded(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """On Explicit axes a change of place is an operation; on others it changes a type."""
        [value], sharding = operands, eqn.params["dst_sharding"]
        if not sharding.mesh.are_all_axes_explicit:
            return [value]
        target = of_sharding(sharding, len(shape_of(eqn.outvars[0])), self.sizes)
        if target is not None:
            self._move("reshard", value, target, eqn.invars[0], eqn)
        return [replace(value, place=target)]

    def _island(self, text: str, eqn: Equation, *, opaque: bool) -> None:
        text, where = one_line(text), self._line(eqn)
        self._found["islands"].setdefault((text, where), records.Island(text, where, opaque))

    def _release(self, body: Any) -> None:
        """Note what is meant per shard in a jaxpr. Around a kernel it is the kernel's body that is meant."""
        names = {id(name): name for eqn in body.eqns for _, name in self._names(eqn) if isinstance(name, PerShardName)}
        for name in names.values():
            where = short_line(line_of(name))
            before = self._found["per_shard"].get((name.why, where))
            whole = not self.site.manual and (before is None or before.whole)
            self._found["per_shard"][name.why, where] = records.PerShard(name.why, where, whole)

    # --- collectives and work -----------------------------------------------------------------------------

    def _collective(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """A collective, noted unless it is one of a single device."""
        site, sizes = self.site, self.site.manual
        axes = tuple(a for a in self.sizes if a in axes_of(eqn) and sizes.get(a, 1) > 1)
        if "perm" in eqn.params:  # those that its pairs differ along, as in the compiled program
            axes = axes_of_pairs(eqn.params["perm"], {a: sizes[a] for a in axes})
        groups = eqn.params.get("axis_index_groups")
        devices = len(groups[0]) if groups else axes_product(axes, sizes)
        if devices == 1 or not site.times:  # a ring of two devices has a loop of no rounds
            return self._moves(eqn, operands)
        primitive: str = eqn.primitive.name
        kind = kind_of(primitive)
        sent = eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars
        self._send(eqn, kind, axes, devices, [(shape_of(one), one.aval) for one in sent])
        return self._moves(eqn, operands)

    def _product(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """On Explicit axes `out_sharding=` asks for the sum over what the operands are divided along."""
        sharding, [result] = eqn.params["out_sharding"], eqn.outvars
        if self._asks and sharding is not None and sharding.mesh.are_all_axes_explicit and not self.site.manual:
            (sides, _), left = eqn.params["dimension_numbers"], _compat.unreduced_spec(sharding.spec)
            lie = [
                (typed_place(atom.aval, self.sizes) or (), dims) for atom, dims in zip(eqn.invars, sides, strict=True)
            ]
            summed = {axis for place, dims in lie if place for d in dims for axis in place[d]} - {*left}
            axes = tuple(axis for axis in self.sizes if axis in summed)
            place = places.of_spec(sharding.spec, len(shape_of(result)), self.sizes) or ()
            parts = (axes_product([a for a in dim if a not in summed], self.sizes) for dim in place)
            shape = tuple(n // k for n, k in zip(shape_of(result), parts, strict=True))
            if axes:
                self._send(eqn, "psum", axes, axes_product(axes, self.sizes), [(shape, result.aval)], _ASKED)
        return self.step(eqn, operands)

    def _send(
        self, eqn: Equation, kind: str, axes: Sequence[str], devices: int, arrays: Sequence[Any], asked: str = ""
    ) -> None:
        """Note that something is sent: arrays, each with its local shape, by a collective of its own."""
        site, names, primitive = self.site, self._names(eqn), eqn.primitive.name
        recomputed = records.AGAIN in names
        transposed = _compat.is_backward(names)
        call = _call_around(names)
        maps = [i for i, one in enumerate(self.callers) if one.primitive.name == "shard_map"]
        ruled = transposed and _compat.is_of_rule((eqn, *self.callers[maps[-1] + 1 if maps else 0 :]), names)
        added = transposed and not recomputed and not ruled
        found = self._found["collectives"]
        for shape, aval in arrays:
            for window in self._windows_around(names, moves=True):
                window.collectives.append(len(found))
            self._work.collectives[len(found)] = site.times
            nbytes = math.prod(shape) * size_bytes(aval) // max(math.prod(aval.shape), 1)
            found[len(found)] = records.WrittenCollective(
                kind=kind,
                axes=tuple(axes),
                group_size=devices,
                bytes=sent_bytes(kind, nbytes, devices),
                count=round(site.times * site.share),
                exact=site.exact,
                text=asked or call or _raw_text(primitive, kind, axes, added),
                where=self._line(eqn),
                phase="backward" if transposed else "forward",
                recomputed=recomputed,
                implicit=kind == "psum" and not asked and (added or (bool(call) and call.verb not in _REDUCES)),
                branch=site.branch,
                dtype=dtype_name(aval),
                shape=shape,
                primitive=primitive,
            )

    @property
    def _share(self) -> float:
        """One device's part of what is traced here: all inside a kernel; outside, the compiler divides it."""
        return 1 / math.prod(n for a, n in self.sizes.items() if a not in self.site.manual)

    # --- memory -------------------------------------------------------------------------------------------

    def step(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        inside = Inside.of(operands) or self._fused_around(eqn)
        dtype, flops = _values.flops_of(eqn)
        if flops:
            matmul = _values.is_matmul(eqn)
            dtype = inside.dtype.name if matmul and inside and inside.dtype is not None else dtype
            names = self._names(eqn)
            windows = self._windows_around(names, moves=False)
            counts = [self._work.matmul_flops, *(window.flops for window in windows)] if matmul else []
            if matmul and records.AGAIN in names:
                counts.append(self._work.again_flops)
            elif matmul and not _compat.is_backward(names):
                counts.append(self._work.first_flops)
            for count in (self._work.flops, *counts):
                count[dtype] += flops * self._share * self.site.times
        outs = self._results(eqn, operands, "" if inside is None else inside.kernel)
        outs = [replace(value, inside=inside) for value in outs] if inside else outs
        found = self._tables(eqn, operands)
        return [v if v.table is t else replace(v, table=t) for v, t in zip(outs, found, strict=True)]

    def _results(self, eqn: Equation, operands: Sequence[Value], inside: str) -> list[Value]:
        """Return what the results are computed from. What is read and written for them is counted."""
        outs = _values.through(eqn, operands)
        traffic = _values.memory_of(eqn, self._sizes(eqn.invars, operands), self._sizes(eqn.outvars, outs))
        if traffic:
            self._work.traffic[inside] += traffic * self.site.times
            # what writes its results whole may have what follows fused into it
            whole = primitive_of(eqn).cost not in ("scatter", "update")
            return self._stand(eqn.outvars, outs, open=whole)
        if primitive_of(eqn).cost == "part":  # what follows reads no more than these parts
            return [replace(value, chain=True) for value in self._stand(eqn.outvars, outs)]
        buffers, chain = _values.chained(eqn, operands)
        return [replace(value, buffers=buffers, chain=chain) for value in outs]

    def _tables(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Any]:
        """The integers of the results, where those of all operands are known: the index of a `cond` is made of such."""
        aval = eqn.outvars[0].aval if eqn.outvars else None
        known = [value.table for value in operands if isinstance(value.table, tables.Table)]
        if not _is_index(aval) or len(known) < len(operands):
            return [None] * len(eqn.outvars)
        return tables.evaluate(eqn, known, {**self.sizes, **self._rounds})

    def _fused(self, eqn: Equation, operands: Sequence[Value]) -> Sequence[Value]:
        """An array that enters or leaves a kernel. The kernel reads it, or writes it. That of the backward pass knows
        cotangents only: it also reads the array whose cotangent it is."""
        self.has_kernels = True
        [value], [size] = operands, self._sizes(eqn.invars, operands)
        what, role = eqn.params["what"], eqn.params["role"]
        if around := self._fused_around(eqn):  # a kernel inside of a kernel is a part of it
            return [replace(value, inside=around)]
        nbytes = size * self.site.times * (2 if role.endswith("back") else 1)
        self._work.traffic[""] += nbytes
        self._work.traffic[what] -= nbytes
        if role.startswith("enter"):
            dtype = eqn.invars[0].aval.dtype
            known = dtype if jax.numpy.issubdtype(dtype, jax.numpy.inexact) else None
            return [replace(value, inside=Inside(what, known))]
        return self._stand(eqn.outvars, [replace(value, inside=None)])

    def _fused_around(self, eqn: Equation) -> Inside | None:
        """The kernel that an equation belongs to by its names. One that is made of nothing has no operand inside."""
        name = _innermost(self._names(eqn)[::-1], FusedName)
        return None if name is None else Inside(name)

    def _windows_around(self, names: Sequence[tuple[str, str]], moves: bool) -> list[records.Window]:
        """The calls of `meanwhile` that compute this, or in which it travels."""
        again = records.AGAIN in names
        phase, found = "recomputed" if again else "backward" if _compat.is_backward(names) else "forward", []
        for _, name in names:
            if isinstance(name, WindowName) and (name.moves is name) == moves:
                made = records.Window(short_line(line_of(name)), phase)
                found.append(self._found["windows"].setdefault((id(name.moves), phase), made))
        return found

    def _moves(self, eqn: Equation, operands: Sequence[Value]) -> list[Value]:
        """A collective or an opaque call reads its operands and writes its results."""
        outs = [Value()] * len(eqn.outvars)
        both = (*self._sizes(eqn.invars, operands), *self._sizes(eqn.outvars, outs))
        self._work.traffic[""] += sum(both) * self.site.times
        return self._stand(eqn.outvars, outs)

    def _sizes(self, atoms: Sequence[Any], values: Sequence[Value], *, host: bool = False) -> list[float]:
        """Bytes on one device: by its place where that is known; else the devices share what no kernel has divided."""
        share, sizes = self._share, []
        for atom, value in zip(atoms, values, strict=True):
            shape, part = shape_of(atom), share
            if not self.site.manual and value.place not in (None, ANYWHERE):
                part = places.local_count(shape, value.place, self.sizes) / max(math.prod(shape), 1)
            sizes.append(size_bytes(atom.aval, host=host) * part)
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
        outside = _values.ending_bytes(one for one in found.values() if not one[0].inside)
        self._work.traffic[""] += outside * self.site.times
        if inside := Inside.of(values):
            self._work.traffic[inside.kernel] += (_values.ending_bytes(found.values()) - outside) * self.site.times
        return [
            value if not value.chain else self._stand([atom], [value])[0]
            for atom, value in zip(atoms, values, strict=True)
        ]

    # --- names --------------------------------------------------------------------------------------------

    def _names(self, eqn: Equation) -> tuple[tuple[str, str], ...]:
        return (*self.site.names, *_compat.name_stack(eqn))

    def _line(self, eqn: Equation) -> str:
        return short_line(line_of(eqn, self.callers))

    def _kept_by_vmap(self, place: Any, specs: Sequence[Any], own: Collection[str]) -> str:
        """Return what `jax.vmap` would need to be told, where an array enters a kernel under it and loses axes of the
        kernel's own that none of its arguments is divided over."""
        if ("Transform", "vmap") not in self.site.names or not isinstance(place, tuple):
            return ""
        kernels = {a for spec in specs for entry in spec for a in axes_tuple(entry)}
        lost = [axis for axes in place for axis in axes if axis in own and axis not in kernels]
        return f"jax.vmap(..., spmd_axis_name={axes_code(lost)}) keeps a mapped dimension divided" if lost else ""


Walk.rules = {
    **dict.fromkeys(COMMUNICATES, Walk._collective),
    **dict.fromkeys(_OPAQUE, Walk.unread),
    "sharding_constraint": Walk._constrained,
    "reshard": Walk._resharded,
    "dot_general": Walk._product,
    "spmd_layout": Walk._marked,
    "spmd_fused": Walk._fused,
}


_MOST = 4096  # entries of an array that is followed as integers


def _is_index(aval: Any) -> bool:
    """Return whether an array may be a part of what chooses a branch: few integers or truth values."""
    dtype = getattr(aval, "dtype", None)
    return getattr(dtype, "kind", "-") in "iub" and math.prod(aval.shape) <= _MOST


def _integers_of(value: Any) -> Any:
    """A constant of integers as a table, or as it is if it is too large for one: its rows may be smaller."""
    if not isinstance(value, bool | int) and getattr(getattr(value, "dtype", None), "kind", "-") not in "iub":
        return None
    table = tables.constant(value)
    return np.asarray(value) if table is None and isinstance(value, np.ndarray | jax.Array) else table


def _innermost(names: Sequence[tuple[str, str]], kind: type) -> Any:
    """The innermost name of a kind, if there is one."""
    return next((name for _, name in reversed(names) if isinstance(name, kind)), None)


def _call_around(names: Sequence[tuple[str, str]]) -> CallName:
    """The innermost scope that is a call of ours; an empty name where there is none."""
    return _innermost(names, CallName) or CallName("")


_RAW = {"psum_scatter": "lax.all_gather", "all_gather": "lax.psum_scatter"}


def _raw_text(primitive: str, kind: str, axes: Sequence[str], transposed: bool) -> str:
    """Return what to call a collective that stands in no call of ours."""
    if transposed and kind == "psum":
        return f"gradient of a value equal on {', '.join(axes)}"
    if transposed:
        return f"gradient of {_RAW.get(kind, f'lax.{kind}')}"
    return f"lax.{primitive if kind == 'psum' and primitive in ('pmax', 'pmin') else kind}"
