"""What a program's own text says that it sends, needs and takes: no device, no compiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd import _compat
from spmd._jaxprs.walker import equations, opened
from spmd._text import fields_of
from spmd._trees.leaves import is_array
from spmd.accelerators import Hardware
from spmd.inspect._collectives import axes_text
from spmd.inspect._match import Communication
from spmd.inspect._peak import Peak
from spmd.inspect._program import ANYWHERE, Program, is_input, local_count, names_of_inputs, of_sharding
from spmd.inspect._records import Price, Written, price
from spmd.inspect._values import Value, on_host, size_bytes
from spmd.inspect._walk import Walk


def written(program: Program, sizes: Mapping[str, int], *, asks: bool = False) -> Written:
    """The written view of a program; see `Written`.

    Equations that no result needs are left out first, as the compiler does. The compiled program may still differ: XLA
    merges equal collectives of equal operands, combines several into one, moves some out of loops and knows the length
    of some `while` loops.

    Args:
      program: The program, which was traced.
      sizes: The sizes of the axes of its mesh.
      asks: Whether the sums that `out_sharding=` asks for are among what is written; else the compiler's plan has them.
    """
    inner, consts = opened(program.called)
    jaxpr = _compat.live_jaxpr(inner)
    walk = Walk(sizes, asks=asks)
    values = [Value(_lies(leaf, sizes), label) for label, leaf in _inputs(program, len(jaxpr.invars))]
    outs = walk.read(jaxpr, values, dict(zip(jaxpr.constvars, consts, strict=False)))
    held = [v.place if isinstance(v.place, tuple) else walk.wanted.get(v.label) for v in values]
    given = [(v.aval, _bytes(v.aval, place, sizes)) for v, place in zip(jaxpr.invars, held, strict=True)]
    made = [(v.aval, _bytes(v.aval, out.place, sizes)) for v, out in zip(jaxpr.outvars, outs, strict=True)]
    taken = program.donated if len(program.donated) == len(given) else (False,) * len(given)
    shared = _shared(list(itertools.compress(given, taken)), made)
    in_arguments = [size > 0 for size in shared]
    apart, unfused = together, _ = Peak(walk.local_bytes).most(jaxpr, in_arguments)
    if walk.has_kernels:  # what `spmd.fused` says is one
        together, _ = Peak(walk.local_bytes, kernels=True).most(jaxpr, in_arguments)
    ends = zip((*jaxpr.invars, *jaxpr.outvars), (*held, *(out.place for out in outs)), strict=True)
    on_hosts = sum(_bytes(var.aval, place, sizes, host=True) for var, place in ends)
    if any(on_host(var.aval) for eqn in equations(jaxpr) for var in eqn.outvars):
        on_hosts += Peak(walk.local_bytes, host=True).most(jaxpr)[0]
    return walk.written(
        host_bytes=on_hosts,
        arguments_bytes=sum(size for _, size in given),
        outputs_bytes=sum(size for _, size in made),
        donated_bytes=sum(shared),
        standing_bytes=together,
        opened_bytes=apart,
        unfused_bytes=unfused,
    )


def _shared(donated: Sequence[tuple[Any, int]], made: Sequence[tuple[Any, int]]) -> list[int]:
    """Return how many bytes of each result can lie in a donated argument: in one of the same shape and dtype each."""
    free: dict[Any, list[int]] = {}
    for aval, size in donated:
        free.setdefault((aval.shape, aval.dtype), []).append(size)
    keys = [(aval.shape, aval.dtype) for aval, _ in made]
    return [min(free[key].pop(), size) if free.get(key) else 0 for key, (_, size) in zip(keys, made, strict=True)]


def _inputs(program: Program, count: int) -> list[tuple[str, Any]]:
    """Return what each input of the jaxpr is called, `params['w']`, with the argument; static ones are not inputs."""
    named = names_of_inputs(program.jaxpr)
    inputs = ([*filter(kind, program.arguments)] for kind in (is_input, is_array))
    leaves: Sequence[Any] = next((found for found in inputs if len(found) == len(named)), [None] * len(named))
    labelled = list(zip(named, leaves, strict=True))
    arrays = [(label, leaf) for label, leaf in labelled if is_array(leaf)]
    unnamed: list[tuple[str, Any]] = [(f"argument {i}", None) for i in range(count)]
    return next(found for found in (labelled, arrays, unnamed) if len(found) == count)


def _lies(array: Any, sizes: Mapping[str, int]) -> Any:
    """Return where an argument lies. A NumPy array or a number does not move between devices."""
    if isinstance(array, np.ndarray | np.generic | bool | int | float | complex):
        return ANYWHERE
    return of_sharding(getattr(array, "sharding", None), len(getattr(array, "shape", ())), sizes)


def _bytes(aval: Any, place: Any, sizes: Mapping[str, int], *, host: bool = False) -> int:
    shape = tuple(getattr(aval, "shape", ()))
    whole = size_bytes(aval, host=host)
    return whole * local_count(shape, place, sizes) // max(math.prod(shape), 1)


# --- bounds on the memory and the time of a program, from a few numbers of the machine --------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
      arguments: The arguments.
      outputs: The results.
      temporaries: What the compiled program needs besides; None without devices.
      aliased: The part of `outputs` that lies in donated arguments.
      code: The compiled program itself.
      estimated: What `temporaries` are by the trace alone, if each `spmd.fused` is one kernel; None without a written
        view.
      opened: The same if none is, as on CPUs, and on GPUs where attention is not an implementation of theirs.
      unfused: The same if no elementwise chain is fused either, and nothing is written where an operand lay.
      constants: The arrays that functions close over, which are part of the compiled program.
      host: What stands in the memory of the host instead, such as what a checkpoint policy offloads.
    """

    arguments: int
    outputs: int
    temporaries: int | None = None
    aliased: int = 0
    code: int = 0
    estimated: int | None = None
    opened: int | None = None
    unfused: int | None = None
    constants: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes that one call needs: arguments, constants, outputs and temporaries. What is donated counts once.

        The temporaries are one allocation, made at the start, so this is the peak. Without them it is a lower bound.
        """
        return self._with(self.temporaries)

    @property
    def peak(self) -> int:
        """`total` as the trace alone says it, whether or not the program was compiled."""
        return self._with(self.estimated)

    @property
    def cautious(self) -> int:
        """`peak` if nothing is fused, nor anything written where an operand lay, or a tenth above that without kernels.

        `spmd.fused` does not count as a kernel here. It is the larger of both, and not a bound. For programs of a
        transformer the estimate without kernels was at most 10 % below the figure of the compiler for CPUs. It was at
        most 8 % below that for H100s in bfloat16, and up to 29 % in float32, where attention writes its scores.
        """
        return max(
            self._with(self.unfused),
            math.ceil(1.1 * self._with(self.estimated if self.opened is None else self.opened)),
        )

    def _with(self, temporaries: int | None) -> int:
        return self.arguments + self.constants + self.outputs - self.aliased + (temporaries or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return fields_of(self, *self.__slots__, "total", "peak", "cautious")


@dataclass(frozen=True, slots=True)
class Time:
    """Estimated seconds of one call on one device of `hardware`.

    The model: floating-point work at the dtype's peak, memory traffic at full bandwidth, collectives one after
    another, each as `Hardware.collective_seconds` says. A program takes between `overlapped`, the largest of the three,
    and `serial`, their sum. Both assume peaks: slower kernels and stragglers are not in them.

    Of a `cond` the dearest branch counts. Where its index is a known integer on each device, and in each round of the
    scans around it, each round takes as long as the dearest branch that runs on some device. The others wait: such are
    the ticks of a pipeline.

    Attributes:
      compute: Seconds of matrix products and convolutions.
      memory: Seconds of reading and writing the device's memory.
      communication: Seconds of collectives.
      by_axis: `communication` by mesh axes, as a layout writes them: `{"tp": ..., "dp/tp": ...}`.
      flops: Floating-point operations of one device, all dtypes together.
      hardware: The name of the machine.
      again: The part of `compute` that a `jax.checkpoint` computes again.
      kernels: What counts as one kernel, by the names that `spmd.fused` was given: what is inside is neither read nor
        written.
      idle: The part of `serial` in which a device waits for others that run a dearer branch, as the mean over the
        devices.
    """

    compute: float
    memory: float
    communication: float
    by_axis: Mapping[str, float]
    flops: float
    hardware: str
    again: float = 0.0
    idle: float = 0.0
    kernels: tuple[str, ...] = ()

    @property
    def serial(self) -> float:
        """Seconds if nothing overlaps: the sum of the three."""
        return self.compute + self.memory + self.communication

    @property
    def overlapped(self) -> float:
        """Seconds if everything overlaps: the largest of the three."""
        return max(self.compute, self.memory, self.communication)

    @property
    def mfu(self) -> float:
        """Return the share of the peak that a device computes with, if all overlaps, without what it computes again."""
        return (self.compute - self.again) / self.overlapped if self.overlapped else 0.0

    @property
    def bound(self) -> str:
        """Return what takes longest: "compute", "memory" or "communication"."""
        return max(("compute", "memory", "communication"), key=lambda name: getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return fields_of(self, *self.__slots__, "serial", "overlapped", "bound", "mfu")


def seconds_of(one: Communication, hardware: Hardware, mesh: Mapping[str, int]) -> float:
    """Seconds that a collective takes in one call of the program."""
    if not one.compiled or all(c.kind == one.kind and c.axes == one.axes for c in one.compiled):
        return one.ran * hardware.collective_seconds(one.kind, one.bytes, one.axes, mesh)
    return sum(hardware.collective_seconds(c.kind, c.bytes, c.axes, mesh) * c.count for c in one.compiled)


def priced(
    written: Written, collectives: Sequence[Communication], hardware: Hardware, mesh: Mapping[str, int]
) -> Price:
    """Return what a program takes, and how often each of its collectives counts."""
    each = [seconds_of(one, hardware, mesh) / (one.count or 1) for one in collectives]
    found = price(written.work, hardware, each)
    added = {i: float(collectives[i].count) for i in range(len(written.collectives), len(collectives))}
    more = sum(each[i] * n for i, n in added.items())  # those that nobody wrote
    times = {**found.times, **added}
    return Price(found.compute, found.memory, found.communication + more, times, found.busy + more)


def estimate(
    written: Written, collectives: Sequence[Communication], hardware: Hardware, mesh: Mapping[str, int]
) -> Time:
    """The time of a program whose written view is known."""
    found = priced(written, collectives, hardware, mesh)
    by_axis: dict[str, float] = {}
    for i, one in enumerate(collectives):
        name, times = axes_text(one.axes), found.times.get(i, 0.0) / (one.count or 1)
        by_axis[name] = by_axis.get(name, 0.0) + seconds_of(one, hardware, mesh) * times
    spent, again = (
        sum(n / hardware.peak(dtype) for dtype, n in flops.items())
        for flops in (written.matmul_flops, written.again_flops)
    )
    return Time(
        again=found.compute * again / spent if spent else 0.0,
        compute=found.compute,
        memory=found.memory,
        communication=sum(by_axis.values()),
        by_axis=by_axis,
        flops=sum(written.flops.values()),
        hardware=hardware.name,
        idle=max(0.0, 1 - found.busy / found.seconds) if found.seconds else 0.0,
        kernels=tuple(written.left_out),
    )


def memory_of(written: Written | None, compiled: Any) -> Memory | None:
    """The memory of a compiled program, or what is known without one."""
    stats = None if compiled is None else compiled.memory_analysis()
    names = ("standing_bytes", "opened_bytes", "unfused_bytes", "constants_bytes", "host_bytes")
    traced = () if written is None else [getattr(written, name) for name in names]
    if stats is not None:
        planned = ["argument", "output", "temp", "alias", "generated_code"]
        return Memory(*(getattr(stats, f"{name}_size_in_bytes") for name in planned), *traced)
    if written is None:
        return None
    return Memory(written.arguments_bytes, written.outputs_bytes, None, written.donated_bytes, 0, *traced)
