"""What every device of a mesh holds, computed on one device: a traced program, interpreted equation by equation.

Outside of bodies a value is the whole array. Inside, each mesh axis is a dimension in front of it, and each collective
moves or combines along these dimensions. Nothing is compiled, no device is needed, and nothing waits: devices that do
not all reach a collective are reported.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _compat
from spmd._jaxprs.lines import line_of
from spmd._jaxprs.primitives import COLLECTIVES
from spmd._jaxprs.walker import (
    COMMUNICATES,
    Domain,
    Equation,
    Held,
    Rule,
    Variable,
    axes_of,
    equations,
    held,
    opened,
    shape_of,
    vmapped_dims,
    walk,
)
from spmd._trees.leaves import held_dtype, is_key_type
from spmd.checker._choices import BEYOND, CHOICES, Key, Side, key_of, sides
from spmd.checker._primitives import (
    MOVES,
    SAME,
    Array,
    NotSimulated,
    alike,
    bits_of,
    compute,
    draws,
    generator,
    leaving,
    numbers_of,
    padded,
    stay_inside,
    wide_dtype,
)
from spmd.language import axes_tuple
from spmd.mesh import no_mesh

_ROUNDS = 10_000  # of a loop that nobody knows to end
_QUIET_ROUNDS = 200  # of one that may wait for a random number which never comes


class Fault(NamedTuple):
    """What went wrong while the program ran: devices that part, or copies that are not equal.

    Attributes:
      kind: "divergent", or "copies".
      eqn: The equation.
      callers: Those around it.
      axes: The mesh axes along which the devices differ.
      output: Which output of the body it is, for copies.
    """

    kind: str
    eqn: Equation
    callers: tuple[Equation, ...]
    axes: tuple[str, ...]
    output: int = 0


class TooLarge(NotSimulated):
    """There are more numbers to compute than the caller allows."""


COUNTS = "jax.lax.axis_size counts devices on any mesh, and reference= says what is meant for one"
FOR_ONE_NUMBER = f"a permutation is written for one number of devices; {COUNTS}"


class NoSuchDevice(NotSimulated):
    """A permutation names a device that the axis does not have: its numbers are those of another mesh."""


class Parted(NotSimulated):
    """Devices that differ do not all reach a collective. On a mesh of devices the program would never end."""

    def __init__(self, fault: Fault) -> None:
        super().__init__("devices that differ do not all reach a collective")
        self.fault = fault


class Run(NamedTuple):
    """What a program made of its arguments.

    Attributes:
      outs: Its results.
      faults: What went wrong on the way.
      shifts: The line of each permutation for another number of devices.
      rounded: How much an equation rounds that computes with the bits of numbers.
      known: The value of each variable, if they were kept.
      rounds: How many rounds the longest loop ran, if values were kept.
      taken: Which sides the choices took that were asked about.
    """

    outs: list[Array]
    faults: list[Fault]
    shifts: Sequence[str] = ()
    rounded: float = 0.0
    known: Mapping[Variable, Array] = MappingProxyType({})
    rounds: int = 0
    taken: Mapping[Key, set[Side]] = MappingProxyType({})


def simulate(
    jaxpr: Any,
    args: Sequence[Array],
    most: int,
    *,
    noise: float | None = None,
    numbers: Mapping[int, float] | None = None,
    inside: bool = False,
    shifted: bool = False,
    keep: int | None = None,
    choices: Container[Key] = (),
    rounds: Mapping[int, int] = MappingProxyType({}),
) -> Run:
    """Run a whole program.

    Args:
      jaxpr: The closed jaxpr of the program.
      args: Its inputs, held as `wide_dtype` says, keys as their words.
      most: How many numbers may be computed.
      noise: A number between 0 and 1 that stands in for each random one, so that none depends on the mesh.
      numbers: What stands in for numbers of the program, by the `id` of each `Literal` or constant.
      inside: Whether an index that leaves its array is an error.
      shifted: Whether a permutation for another number of devices is taken as the shift that it is there. Else it is
        an error.
      keep: The round of a loop whose values are kept, with those outside of loops; of a shorter loop the last one.
      choices: The equations of which it is kept which sides they take.
      rounds: How many rounds a scan of each of these lengths runs: the first ones, and the last. A round between them
        makes what the round before made. For 0: of a loop that a test ends, the first ones.

    Raises:
      NotSimulated: If a primitive cannot be interpreted, or there is too much to compute.
      Outside: If an index leaves its array.
      Parted: If devices part before a collective.
    """
    machine = Simulator(most)
    machine.noise, machine.numbers = noise, numbers or {}
    machine.shifts, machine.rounds, machine.kept = [] if shifted else None, None if keep is None else {}, keep or 0
    machine.choices, machine.keep = choices, machine.watch if choices else None
    machine.shortened = rounds
    before, before_leaving = stay_inside.set(inside), leaving.set(machine.leaving)
    try:
        with _arithmetic():
            outs = walk(jaxpr, [np.asarray(x) for x in args], machine)
    finally:
        stay_inside.reset(before)
        leaving.reset(before_leaving)
    machine.read(outs)
    known = {} if machine.rounds is None else machine.known | machine.rounds
    return Run(
        [bits_of(x, v.aval) for x, v in zip(outs, opened(jaxpr)[0].outvars, strict=True)],
        machine.faults,
        machine.shifts or (),
        machine.rounded,
        {var: numbers_of(x) for var, x in known.items()},
        machine.longest,
        machine.taken,
    )


@contextlib.contextmanager
def _arithmetic() -> Iterator[None]:
    """JAX computes at once here, in double precision, and on a CPU where there is one; NumPy warns of nothing."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        host = None
    with jax.ensure_compile_time_eval(), jax.enable_x64(True), no_mesh(), jax.default_device(host):
        with np.errstate(all="ignore"):
            yield


def held_number(value: Any) -> Array:
    """A number of a jaxpr, or an argument, as it is held here."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", np.dtype(bool)), jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    if isinstance(value, jax.core.Tracer):
        raise NotSimulated("it closes over a value of a trace around it")
    found = np.asarray(value)
    return found.astype(wide_dtype(held_dtype(found)))  # NumPy's int64 is int32 in JAX


class Simulator(Domain):
    """One run.

    Attributes:
      sizes: The mesh axes that are in front of values where the walk is.
      faults: What went wrong.
      generators: For each type of keys that was met, what makes numbers of them.
      noise: What stands in for each random number, if something does.
      apart: Copies that are not equal, which have left a body: what each device holds, the spec, and the fault that it
        is to read them as one array. Another body may take them as they are: JAX hands on what a derivative keeps so.
      numbers: What stands in for numbers of the program.
      shifts: The lines of permutations that were taken as shifts; None if they may not be.
      rounds: The values of variables inside of loops, in the round that is kept; None if they are not asked for.
      kept: Which round that is.
      longest: How many rounds the longest loop ran, if they are asked for.
      rounded: How much is rounded at most, because bits of numbers are computed with.
      choices: The equations of which it is kept which sides they take.
      taken: These sides.
      shortened: How many rounds a scan of each of these lengths runs; for 0, a loop that a test ends.
      leaving: At which ends an index left its array since the last equation.
    """

    rules: ClassVar[dict[str, Rule]] = {}

    def __init__(self, most: int) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}
        self.faults: list[Fault] = []
        self.generators: dict[Any, Any] = {}
        self.noise: float | None = None
        self.apart: dict[int, tuple[Array, Array, Any, Fault]] = {}
        self.numbers: Mapping[int, float] = {}
        self.shifts: list[str] | None = None
        self.rounds: dict[Variable, Array] | None = None
        self.kept = self.longest = 0
        self.rounded = 0.0
        self.choices: Container[Key] = ()
        self.taken: dict[Key, set[Side]] = {}
        self.shortened: Mapping[int, int] = {}
        self.leaving: set[str] = set()
        self._left = most

    @property
    def lead(self) -> int:
        return len(self.sizes)

    def constant(self, var: Variable | None, value: Any) -> Array:
        if value is None:
            raise NotSimulated("it has a constant that nobody knows")
        found = held_number(value)
        return self._read(value, found.reshape((1,) * self.lead + found.shape))

    def literal(self, atom: Variable) -> Array:
        return self._read(atom, self.constant(None, np.asarray(atom.val, atom.aval.dtype)))  # rounded as JAX does it

    def _read(self, of: Any, number: Array) -> Array:
        return np.full_like(number, self.numbers[id(of)]) if id(of) in self.numbers else number

    def step(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        if not eqn.outvars:
            return []
        if self.apart:
            self.read(operands)
        self._spend(eqn)
        if any(x.dtype.names for x in operands):
            operands = (self.moved if eqn.primitive.name in MOVES else self.plain)(eqn, operands)
        given = [
            x if x.dtype.names or x.dtype == (kind := wide_dtype(v.aval.dtype)) else x.astype(kind)
            for x, v in zip(operands, eqn.invars, strict=True)
            if hasattr(v.aval, "dtype")
        ]
        if len(given) < len(operands) or any(not hasattr(v.aval, "dtype") for v in eqn.outvars):
            raise NotSimulated(f"{eqn.primitive.name} works on a reference")
        if self.noise is not None and draws(eqn):
            return [_alike(self, eqn, operands[0], self.noise)]
        return [
            _within_halves(x, v)
            for x, v in zip(compute(eqn, self.lead, given, self.generators), eqn.outvars, strict=True)
        ]

    def watch(self, eqn: Equation, operands: Sequence[Array], outs: Sequence[Array]) -> Sequence[Array]:
        """Keep which sides a choice takes."""
        if eqn.primitive.name in CHOICES and (key := key_of(eqn, self.callers)) in self.choices:
            left = {(BEYOND, end) for end in self.leaving}
            self.taken.setdefault(key, set()).update(left or sides(eqn, self.lead, operands, outs))
        self.leaving.clear()
        return outs

    def plain(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        """The operands of an equation with the bits that they carry: these are rounded."""
        for x in operands:
            if x.dtype.names:
                self.rounded = max(self.rounded, float(jnp.finfo(x.dtype.names[0]).eps))
        return [bits_of(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]

    def moved(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        """The operands of an equation that only moves elements. Where one carries bits, all of its type do."""
        found, types = list(operands), [v.aval.dtype for v in eqn.invars]
        carried = [kind for x, kind in zip(operands, types, strict=True) if x.dtype.names]
        places = [i for i, kind in enumerate(types) if kind in carried]
        for i, x in zip(places, alike([operands[i] for i in places]), strict=True):
            found[i] = x
        return found

    def read(self, values: Sequence[Array]) -> None:
        """Report those of these arrays that are not equal on all devices that hold them."""
        for x in values:
            if (held := self.apart.get(id(x))) is not None and held[-1] not in self.faults:
                self.faults.append(held[-1])

    def unread(self, eqn: Equation, operands: Sequence[Array]) -> Sequence[Array]:
        raise NotSimulated(f"{eqn.primitive.name} runs code that is not JAX's")

    def _spend(self, eqn: Equation) -> None:
        self._left -= 50 + sum(math.prod(shape_of(v)) for v in eqn.outvars) * math.prod(self.sizes.values())
        if self._left < 0:
            raise TooLarge("there are too many numbers to compute")

    # --- the axes in front ------------------------------------------------------------------------------------

    def place(self, axis: str) -> int:
        """Return which dimension in front belongs to a mesh axis."""
        return list(self.sizes).index(axis)

    def full(self, x: Array, axes: Sequence[str]) -> Array:
        """The same values, written out along these axes."""
        shape = list(x.shape)
        for axis in axes:
            shape[self.place(axis)] = self.sizes[axis]
        return np.broadcast_to(x, shape)

    def gathered(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        """The blocks along these axes as dimensions of their own, the first of them at `dim`; equal everywhere."""
        at = [self.place(axis) for axis in axes]
        lead = self.lead
        moved = np.moveaxis(self.full(x, axes), at, [lead - len(at) + dim + i for i in range(len(at))])
        return np.expand_dims(moved, tuple(sorted(at)))

    def divided(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        """The dimensions from `dim` on are one for each of these axes; each device keeps its own place of them."""
        for axis in axes:
            here, there = self.place(axis), self.lead + dim
            if x.shape[here] == 1:
                x = np.moveaxis(x.squeeze(here), there - 1, here)
            else:
                own = np.diagonal(x, axis1=here, axis2=there)
                x = np.moveaxis(own, -1, here)
        return x

    def cut(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        """Each device keeps its block of a dimension; the first of the axes is the major one."""
        at, counts = self.lead + dim, [self.sizes[a] for a in axes]
        rest = x.shape[at] // math.prod(counts)
        return self.divided(x.reshape((*x.shape[:at], *counts, rest, *x.shape[at + 1 :])), axes, dim)

    def joined(self, x: Array, axes: Sequence[str], dim: int) -> Array:
        """The blocks of a dimension, one after another."""
        found, at = self.gathered(x, axes, dim), self.lead + dim
        size = math.prod(found.shape[at : at + len(axes) + 1])
        return found.reshape((*found.shape[:at], size, *found.shape[at + len(axes) + 1 :]))

    # --- bodies -----------------------------------------------------------------------------------------------

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Array]) -> list[Array]:
        """A `shard_map`: its specs cut the operands and join the results."""
        before, own = self.sizes, _compat.made_manual(eqn)
        given = [x.reshape(x.shape[: len(before)] + (1,) * len(own) + x.shape[len(before) :]) for x in operands]
        self.sizes = {**before, **own}
        for i, (spec, var) in enumerate(zip(eqn.params["in_specs"], eqn.invars, strict=True)):
            if (held := self.apart.get(id(operands[i]))) is not None and held[2] == (spec, own):
                given[i] = held[1]
                continue
            self.read([operands[i]])
            for dim, axes in enumerate(_compat.partitions(spec, len(shape_of(var)))):
                given[i] = self.cut(given[i], axes_tuple(axes or ()), dim) if axes else given[i]
        outs = self.run(eqn, part, given)
        for i, (spec, var) in enumerate(zip(eqn.params["out_specs"], eqn.outvars, strict=True)):
            outs[i] = self._leaving(eqn, outs[i], i, spec, len(shape_of(var)), own)
        self.sizes = before
        return outs

    def _leaving(self, eqn: Equation, x: Array, index: int, spec: Any, rank: int, own: Collection[str]) -> Array:
        summed = tuple(getattr(spec, "unreduced", ()) or ())
        for axis in summed:
            x = _reduced(np.sum, self.full(x, [axis]), self.place(axis))
        for dim, axes in enumerate(_compat.partitions(spec, rank)):
            x = self.joined(x, axes_tuple(axes or ()), dim) if axes else x
        differ, held = [], x
        for axis in own:
            at = self.place(axis)
            first = x.take([0], at)
            if x.shape[at] > 1 and not same_numbers(x, np.broadcast_to(first, x.shape)):
                differ.append(axis)
            x = first
        front = len(self.sizes) - len(own)
        out = x.reshape(x.shape[:front] + x.shape[front + len(own) :])
        if differ:
            fault = Fault("copies", eqn, tuple(self.callers), tuple(differ), index)
            self.apart[id(out)] = out, held, (spec, own), fault
        return out

    # --- loops and branches -----------------------------------------------------------------------------------

    def loop(self, eqn: Equation, body: Held, test: Held | None, operands: Sequence[Array]) -> list[Array]:
        if test is not None:
            return self._while(eqn, body, test, operands)
        count, length = len(body.stacked) - sum(body.stacked), eqn.params["length"]
        given = list(zip(body.of(operands), body.sliced, strict=True))
        first = len(given) - sum(body.sliced) - count
        carry = [x for x, _ in given[first : first + count]]
        made: list[list[Array]] = []
        self.read([x for x, sliced in given if sliced])
        rounds = self.shortened.get(length, length)
        for done, at in enumerate(range(length)[:: -1 if eqn.params["reverse"] else 1], start=1):
            if rounds <= done < length:
                made.append(made[-1])
                continue
            rows = [x.take(at, self.lead) if sliced else x for x, sliced in given]
            outs = self._round(eqn, body, [*rows[:first], *carry, *rows[first + count :]], done - 1)
            carry = outs[:count]
            made.append(outs[count:])
        made = made[:: -1 if eqn.params["reverse"] else 1]
        return [
            *carry,
            *(self._stack(eqn.outvars[count + i], rows) for i, rows in enumerate(_columns(made, eqn, count))),
        ]

    def _round(self, eqn: Equation, body: Held, operands: Sequence[Array], number: int) -> list[Array]:
        outs = self.run(eqn, body, operands)
        if self.rounds is not None and number <= self.kept:
            inside = itertools.chain(opened(body.jaxpr)[0].invars, *(one.outvars for one in equations(body.jaxpr)))
            self.rounds.update((var, self.known[var]) for var in inside if var in self.known)
        if self.rounds is not None:
            self.longest = max(self.longest, number + 1)
        return outs

    def _stack(self, var: Variable, rows: Sequence[Array]) -> Array:
        self.read(rows)
        if not rows:
            return np.zeros((1,) * self.lead + shape_of(var), wide_dtype(var.aval.dtype))
        front = np.broadcast_shapes(*(x.shape for x in rows))
        return np.stack([np.broadcast_to(x, front) for x in alike(rows)], self.lead)

    def _while(self, eqn: Equation, body: Held, test: Held, operands: Sequence[Array]) -> list[Array]:
        count = len(body.stacked)
        given, asked = body.of(operands), test.of(operands)
        constants, carry = given[: len(given) - count], given[len(given) - count :]
        for done in range(_ROUNDS if self.noise is None else _QUIET_ROUNDS):
            [goes_on] = self.run(eqn, test, [*asked[: len(asked) - count], *carry])
            if not goes_on.any() or done == self.shortened.get(0):
                return carry
            # A loop that is mapped asks for each element, and all go on while one does.
            self._check_together(eqn, goes_on.any(tuple(range(self.lead, goes_on.ndim))))
            outs = self._round(eqn, body, [*constants, *carry], done)
            carry = [self._where(goes_on, new, old) for new, old in zip(outs, carry, strict=True)]
        raise NotSimulated("a loop does not end")

    def branches(self, eqn: Equation, parts: Sequence[Held], operands: Sequence[Array]) -> list[Array]:
        which = np.clip(bits_of(operands[0], eqn.invars[0].aval).astype(np.int64), 0, len(parts) - 1)
        taken = np.unique(which)
        if len(taken) > 1:
            self._check_together(eqn, which)
        found = {int(i): self.run(eqn, parts[int(i)], parts[int(i)].of(operands)) for i in taken}
        outs = found.pop(int(taken[0]))
        for i, others in found.items():
            outs = [self._where(which == i, new, old) for new, old in zip(others, outs, strict=True)]
        return outs

    def _where(self, chosen: Array, new: Array, old: Array) -> Array:
        if chosen.all():
            return new
        self.read([new, old])
        new, old = alike([new, old])
        return np.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - chosen.ndim)), new, old)

    def _check_together(self, eqn: Equation, decision: Array) -> None:
        """Devices that decide differently must not meet a collective that waits for all of them."""
        differ = [
            a for i, a in enumerate(self.sizes) if decision.shape[i] > 1 and (decision != decision.take([0], i)).any()
        ]
        inner = (one for part in held(eqn) for one in equations(part.jaxpr, derivatives=False))
        waiting = {a for one in inner if one.primitive.name in COMMUNICATES for a in axes_of(one)}
        if axes := tuple(a for a in differ if a in waiting):
            raise Parted(Fault("divergent", eqn, tuple(self.callers), axes))


def _within_halves(x: Array, var: Variable) -> Array:
    """Numbers that float16 does not have are infinite, as they are on a device. No other type is left so soon."""
    if getattr(var.aval, "dtype", None) != np.float16 or x.dtype.names:
        return x
    return np.where(np.abs(x) > float(jnp.finfo(np.float16).max), np.sign(x) * np.inf, x)


def _columns(made: Sequence[Sequence[Array]], eqn: Equation, count: int) -> Iterator[list[Array]]:
    for i in range(len(eqn.outvars) - count):
        yield [row[i] for row in made]


def same_numbers(x: Array, y: Array) -> bool:
    """Return whether numbers are equal but for the rounding of sums in another order."""
    x, y = numbers_of(x), numbers_of(y)
    if x.dtype.kind not in "fc":
        return bool((x == y).all())
    finite = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
    return bool(np.isclose(x, y, rtol=1e-7, atol=1e-9 * finite, equal_nan=True).all())


# --- collectives --------------------------------------------------------------------------------------------------


def _named(machine: Simulator, eqn: Equation) -> tuple[str, ...]:
    names = axes_of(eqn)
    if lacking := [axis for axis in names if axis not in machine.sizes]:
        raise NotSimulated(f"{eqn.primitive.name} over {lacking[0]}, which is no axis of a mesh")
    return names


def _reduces(fn: Callable[..., Array]) -> Rule:
    def run(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        names = _named(machine, eqn)
        if groups := eqn.params.get("axis_index_groups"):
            return [_within(machine, x, names, groups, fn) for x in operands]
        at = tuple(map(machine.place, names))
        sums = [_reduced(fn, machine.full(x, names), at) for x in operands]
        if own := tuple(machine.lead + axis for axis in vmapped_dims(eqn)):  # the dimension of a vmap with this name
            sums = [fn(x, axis=own).astype(x.dtype, copy=False) for x in sums]
        return [_within_halves(x, v) for x, v in zip(sums, eqn.outvars, strict=True)]

    return run


def _reduced(fn: Callable[..., Array], x: Array, at: Any) -> Array:
    """A reduction that stays in its dtype. NumPy adds up small integers in large ones."""
    return fn(x, axis=at, keepdims=True).astype(x.dtype, copy=False)


def _within(machine: Simulator, x: Array, names: Sequence[str], groups: Any, fn: Callable[..., Array]) -> Array:
    """A reduction within groups of the places of an axis."""
    [axis] = names
    x, at = machine.full(x, names), machine.place(axis)
    out = np.empty_like(x)
    if any(place >= x.shape[at] for group in groups for place in group):
        raise NoSuchDevice("groups of an axis are written for one number of devices")
    for group in groups:
        chosen = (slice(None),) * at + (list(group),)
        out[chosen] = _reduced(fn, x[chosen], at)
    return out


def _plain(machine: Simulator, eqn: Equation) -> tuple[str, ...]:
    names = _named(machine, eqn)
    if eqn.params.get("axis_index_groups") is not None:
        raise NotSimulated(f"{eqn.primitive.name} within groups of an axis")
    return names


def _or_grouped(rule: Rule, within: Callable[[Array, Mapping[str, Any], int], Array]) -> Rule:
    """A rule for collectives within groups too: `within` takes the members of one, in front."""

    def run(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        groups = eqn.params.get("axis_index_groups")
        if groups is None or not eqn.params["tiled"]:
            return list(rule(machine, eqn, operands))
        names = _named(machine, eqn)
        at, count = [machine.place(a) for a in names], math.prod(machine.sizes[a] for a in names)
        if sum(map(len, groups)) != count:
            raise NoSuchDevice("groups of an axis are written for one number of devices")
        outs = []
        for x in operands:
            front = np.moveaxis(machine.full(x, names), at, range(len(at)))
            flat = front.reshape((count, *front.shape[len(at) :]))
            found = {
                p: one
                for group in groups
                for p, one in zip(group, within(flat[list(group)], eqn.params, machine.lead - len(at)), strict=True)
            }
            out = np.stack([found[place] for place in range(count)])
            outs.append(np.moveaxis(out.reshape((*front.shape[: len(at)], *out.shape[1:])), range(len(at)), at))
        return outs

    return run


def _gathered_within(members: Array, params: Mapping[str, Any], lead: int) -> Array:
    joined = np.concatenate(list(members), lead + params["all_gather_dimension"])
    return np.broadcast_to(joined, (len(members), *joined.shape))


def _scattered_within(members: Array, params: Mapping[str, Any], lead: int) -> Array:
    return np.stack(np.split(_reduced(np.sum, members, 0)[0], len(members), lead + params["scatter_dimension"]))


def _exchanged_within(members: Array, params: Mapping[str, Any], lead: int) -> Array:
    pieces = [np.split(x, len(members), lead + params["split_axis"]) for x in members]
    return np.stack([np.concatenate(got, lead + params["concat_axis"]) for got in zip(*pieces, strict=True)])


def _gathers(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    names, dim = _plain(machine, eqn), eqn.params["all_gather_dimension"]
    if eqn.params["tiled"]:
        return [machine.joined(x, names, dim) for x in operands]
    shapes = [shape_of(v) for v in eqn.outvars]
    found = [machine.gathered(x, names, dim) for x in operands]
    return [x.reshape(x.shape[: machine.lead] + shape) for x, shape in zip(found, shapes, strict=True)]


def _scatters(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    names = _plain(machine, eqn)
    if math.prod(machine.sizes[a] for a in names) == 1 and eqn.params["tiled"]:
        return list(operands)
    dim = eqn.params["scatter_dimension"]
    at = tuple(map(machine.place, names))
    sums = [_reduced(np.sum, machine.full(x, names), at) for x in operands]
    outs = [machine.cut(x, names, dim) for x in sums]
    return outs if eqn.params["tiled"] else [x.squeeze(machine.lead + dim) for x in outs]


def _exchanges(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    names = _plain(machine, eqn)
    count = math.prod(machine.sizes[a] for a in names)
    if count == 1 and eqn.params.get("tiled"):
        return list(operands)
    split, concat = eqn.params["split_axis"], eqn.params["concat_axis"]
    lead, outs = machine.lead, []
    for x in operands:
        at, counts = lead + split, [machine.sizes[a] for a in names]
        parts = x.reshape((*x.shape[:at], *counts, x.shape[at] // count, *x.shape[at + 1 :]))
        gathered = machine.gathered(parts, names, 0)  # the senders in front, then the blocks in their dimension
        mine = machine.divided(gathered, names, len(names) + split)
        mine = mine if eqn.params["tiled"] else mine.squeeze(lead + len(names) + split)
        placed = np.moveaxis(mine, range(lead, lead + len(names)), range(lead + concat, lead + concat + len(names)))
        shape = placed.shape
        rest = shape[lead + concat + len(names) :]
        tail = (count * rest[0], *rest[1:]) if eqn.params["tiled"] else (count, *rest)
        outs.append(placed.reshape((*shape[: lead + concat], *tail)))
    return outs


def _permutes(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    names = _named(machine, eqn)
    order = [a for a in machine.sizes if a in names]  # JAX numbers devices in the order of the mesh
    at, outs = [machine.place(a) for a in order], []
    count = math.prod(machine.sizes[a] for a in order)
    pairs = eqn.params["perm"]
    if any(max(pair) >= count for pair in pairs):
        if (pairs := _shift_of(pairs, count)) is None or machine.shifts is None:
            raise NoSuchDevice(FOR_ONE_NUMBER)
        machine.shifts.append(line_of(eqn, machine.callers))
    for x in operands:
        front = np.moveaxis(machine.full(x, order), at, range(len(at)))
        flat = front.reshape((count, *front.shape[len(at) :]))
        out = np.zeros_like(flat)
        for source, target in pairs:
            out[target] = flat[source]
        outs.append(np.moveaxis(out.reshape(front.shape), range(len(at)), at))
    return outs


def _shift_of(pairs: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]] | None:
    """The pairs of the same shift on another number of devices: round the ring, or with an end; None for no shift."""
    written = max(map(max, pairs)) + 1
    [by, *others] = sorted({target - source for source, target in pairs}, key=lambda by: (abs(by), -by))
    ring = len(pairs) == written and all(target == (source + by) % written for source, target in pairs)
    if not ring and (others or len(pairs) < written - abs(by)):
        return None
    return [(one, (one + by) % count) for one in range(count) if ring or 0 <= one + by < count]


def _broadcasts(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """The value of one device on all: its number is a parameter, or an operand."""
    names, lead = _named(machine, eqn), machine.lead
    found = machine.gathered(operands[0], names, 0)
    rows = found.reshape((*found.shape[:lead], -1, *operands[0].shape[lead:]))
    source = np.full((1,) * lead, eqn.params["source"]) if len(operands) == 1 else operands[1]
    return [np.take_along_axis(rows, source.reshape((*source.shape, *(1,) * (rows.ndim - lead))), lead).squeeze(lead)]


def _indexes(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    out = np.zeros((1,) * machine.lead, np.int32)
    for axis in _named(machine, eqn):
        numbers = np.arange(machine.sizes[axis], dtype=np.int32)
        shape = [-1 if a == axis else 1 for a in machine.sizes]
        out = out * np.int32(machine.sizes[axis]) + numbers.reshape(shape)
    return [out]


def _splits(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    return [machine.cut(operands[0], (eqn.params["axis"],), eqn.params["dim"])]


def _same(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Return the first operands: the equation says something of them, and changes nothing."""
    return list(operands[: len(eqn.outvars)])


def _ragged(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Rows from anywhere to anywhere: each device says from where, how many, to where, and how many it gets."""
    names = _plain(machine, eqn)
    order = [a for a in machine.sizes if a in names]  # JAX numbers devices in the order of the mesh
    at = [machine.place(a) for a in order]
    front = np.broadcast_shapes(*(machine.full(x, order).shape[: machine.lead] for x in operands))
    rows, out, begins, sizes, targets, _ = (np.broadcast_to(x, front + x.shape[machine.lead :]) for x in operands)
    out, peers = out.copy(), list(np.ndindex(*(machine.sizes[a] for a in order)))
    for place in np.ndindex(front):
        for peer, coordinates in enumerate(peers):
            there = list(place)
            for i, c in zip(at, coordinates, strict=True):
                there[i] = c
            begin, n, target = int(begins[place][peer]), int(sizes[place][peer]), int(targets[place][peer])
            out[tuple(there)][target : target + n] = rows[place][begin : begin + n]
    return [out]


def _random(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Numbers, or other keys, made of keys: the generator's own steps, traced and interpreted."""
    p = eqn.params
    if machine.noise is not None and eqn.primitive.name != "random_seed":
        return [_alike(machine, eqn, operands[0], machine.noise)]
    known = eqn.params.get("impl") or generator(eqn.invars[0].aval.dtype, machine.generators)
    run: Any = {
        "random_bits": lambda key: known.random_bits(key, p["bit_width"], p["shape"]),
        "random_split": lambda key: known.split(key, p["shape"]),
        "random_fold_in": known.fold_in,
        "random_seed": known.seed,
    }[eqn.primitive.name]
    # Each key is for itself: one number may be folded into many keys, and many numbers into one.
    of = np.broadcast_shapes(*(shape_of(v) for v in eqn.invars))
    for _ in of:
        run = jax.vmap(run)
    words = [x.shape[machine.lead + len(shape_of(v)) :] for v, x in zip(eqn.invars, operands, strict=True)]

    def each(*given: Any) -> Any:
        return run(*(jnp.broadcast_to(x, of + w) for x, w in zip(given, words, strict=True)))

    structs = [jax.ShapeDtypeStruct(x.shape[machine.lead :], x.dtype) for x in operands]
    return walk(jax.make_jaxpr(each)(*structs), operands, machine)


def _alike(machine: Simulator, eqn: Equation, key: Array, noise: float) -> Array:
    """One number in place of all that are made of a key, and that key in place of other keys."""
    [out] = eqn.outvars
    if not is_key_type(out.aval.dtype):
        number = noise * 2.0 ** eqn.params["bit_width"] if eqn.primitive.name == "random_bits" else noise
        return np.full((1,) * machine.lead + shape_of(out), number).astype(wide_dtype(out.aval.dtype))
    inner, rank = shape_of(eqn.invars[0]), len(shape_of(out))
    spread = key.reshape((*key.shape[:-1], *(1,) * (rank - len(inner)), key.shape[-1]))
    return np.broadcast_to(spread, (*key.shape[: machine.lead], *shape_of(out), key.shape[-1]))


def _folds(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """A `reduce`, whose jaxpr takes what is gathered so far and one more element of each array."""
    count = len(operands) // 2
    gone = [machine.lead + d for d in eqn.params["dimensions"]]
    arrays = [np.moveaxis(x, gone, range(len(gone))) for x in operands[:count]]
    places = np.ndindex(arrays[0].shape[: len(gone)])
    return _folded(machine, eqn, operands[count:], ([x[at] for x in arrays] for at in places))


def _folds_windows(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """A `reduce_window`: a `reduce` of what stands at each place of a window, for all windows at once."""
    p, lead, shape = eqn.params, machine.lead, shape_of(eqn.outvars[0])
    config = [(low, high, inner - 1) for (low, high), inner in zip(p["padding"], p["base_dilation"], strict=True)]
    count = len(operands) // 2
    arrays = [padded(lead, x, start, config) for x, start in zip(operands[:count], operands[count:], strict=True)]
    steps = list(zip(p["window_dilation"], p["window_strides"], shape, strict=True))

    def at(place: Sequence[int]) -> list[Array]:
        cuts = [slice(i * gap, i * gap + (n - 1) * by + 1, by) for i, (gap, by, n) in zip(place, steps, strict=True)]
        return [x[(slice(None),) * lead + tuple(cuts)] for x in arrays]

    return _folded(machine, eqn, operands[count:], map(at, np.ndindex(*p["window_dimensions"])))


def _folded(
    machine: Simulator, eqn: Equation, starts: Sequence[Array], elements: Iterator[Sequence[Array]]
) -> list[Array]:
    """Return what the jaxpr of an equation makes of numbers to begin with and of elements, one after another."""
    [part], rest = held(eqn), (1,) * len(shape_of(eqn.outvars[0]))
    found = [np.reshape(x, x.shape[: machine.lead] + rest) for x in starts]
    for one in elements:
        found = machine.run(eqn, part, [*found, *one])
    return [np.broadcast_to(x, x.shape[: machine.lead] + shape_of(v)) for x, v in zip(found, eqn.outvars, strict=True)]


def _keyless(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    raise NotSimulated(f"{eqn.primitive.name} draws other numbers in each run: jax.random draws them of a key")


def _wraps(machine: Simulator, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """Keys are held as their words. What makes numbers of them is kept by their type."""
    machine.generators[eqn.outvars[0].aval.dtype] = eqn.params["impl"]
    return list(operands)


def _counts(rule: Rule) -> Rule:
    """A rule that computes with its operands, and so with the bits that they carry."""
    return lambda machine, eqn, operands: rule(machine, eqn, machine.plain(eqn, operands))


_VERBS: dict[str, Rule] = {
    "psum": _counts(_reduces(np.sum)),
    "pmax": _counts(_reduces(np.max)),
    "pmin": _counts(_reduces(np.min)),
    "all_gather": _or_grouped(_gathers, _gathered_within),
    "psum_scatter": _counts(_or_grouped(_scatters, _scattered_within)),
    "all_to_all": _or_grouped(_exchanges, _exchanged_within),
    "ragged_all_to_all": _counts(_ragged),
    "ppermute": _permutes,
    "pbroadcast": _broadcasts,
}

Simulator.rules = {
    **dict.fromkeys(SAME, _same),
    **{name: _VERBS[verb] for name, verb in COLLECTIVES.items() if verb in _VERBS},
    "axis_index": _indexes,
    "spmd_split": _splits,
    **dict.fromkeys(("random_bits", "random_split", "random_fold_in", "random_seed"), _counts(_random)),
    "random_wrap": _counts(_wraps),
    "reduce": _counts(_folds),
    "reduce_window": _counts(_folds_windows),
    "rng_uniform": _keyless,
    "random_unwrap": _same,
    "debug_callback": lambda machine, eqn, operands: [],
    "debug_print": lambda machine, eqn, operands: [],
}
