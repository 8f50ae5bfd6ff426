"""What a walk knows of a value: where it lies outside kernels, and which buffers it would be computed from.

Elementwise chains count as fused into what uses them: only arrays in memory are read and written. Those are the
arguments, the results of products, reductions, gathers and collectives, and the carries of loops. Everything else is a
chain. It is read and written only where it is itself a result, of the program or of a loop's body.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spmd._jaxprs.walker import Equation, shape_of
from spmd.inspect._program import ANYWHERE, Placement, of_sharding

_ELEMENTWISE_NAMES = """add sub mul div neg exp exp2 log log1p expm1 tanh logistic sin cos sqrt rsqrt cbrt erf
    integer_pow pow max min abs sign floor ceil round select_n clamp convert_element_type and or not xor eq ne lt le
    gt ge square add_any copy is_finite rem nextafter optimization_barrier reduce_precision name spmd_layout
    stop_gradient spmd_names spmd_fused"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
# They give another name to the same bytes.
_RENAMES_NAMES = """reshape squeeze expand_dims name pvary pcast sharding_constraint stop_gradient
    optimization_barrier spmd_layout spmd_assert_equal spmd_order spmd_names spmd_retype spmd_fused"""
RENAMES = frozenset(_RENAMES_NAMES.split())

WINDOWS = frozenset(("slice", "split", "unstack"))  # their results are parts of the operand's bytes


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array that stands in memory.

    Attributes:
      nbytes: What it takes on one device.
      open: Whether a chain that follows may be fused into what writes it, which writes the chain's result instead.
      number: Its place among all: sets have no order of their own.
    """

    nbytes: float
    open: bool = False
    number: int = field(default_factory=itertools.count().__next__)


@dataclass(frozen=True, slots=True)
class Inside:
    """What is known of a value that does not leave a kernel.

    Attributes:
      kernel: The name that `spmd.fused` was given.
      dtype: The type of the numbers that enter it, in which it multiplies.
    """

    kernel: str
    dtype: Any = None

    @staticmethod
    def of(values: Iterable[Value]) -> Inside | None:
        """That of what is made of some values, with the narrowest type."""
        found = [value.inside for value in values if value.inside is not None]
        if not found:
            return None
        types = [one.dtype for one in found if one.dtype is not None]
        return Inside(found[0].kernel, min(types, key=lambda dtype: dtype.itemsize, default=None))


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of an array.

    Attributes:
      place: Where it lies, outside kernels.
      label: Which argument it is, if it is one.
      sliced: How many dimensions it lacks as a slice of the argument, in a scan over it.
      buffers: What it is computed from, itself if it stands in memory.
      chain: Whether it is computed from them when it is used.
      inside: The kernel that it does not leave, if `spmd.fused` says so.
      table: Its integers on each device and in each round of the loops around it, if they are known.
    """

    place: Placement = None
    label: str = ""
    sliced: int = 0
    buffers: frozenset[Buffer] = frozenset()
    chain: bool = False
    inside: Inside | None = None
    table: Any = None


def chained(eqn: Equation, ins: Sequence[Value]) -> tuple[frozenset[Buffer], bool]:
    """The buffers of the results of an equation that is fused, and whether they are a chain."""
    found = [value.buffers for value in ins if value.buffers]
    if all(one is found[0] for one in found[1:]):
        buffers = found[0] if found else frozenset()
    else:
        buffers = frozenset().union(*found)
    return buffers, eqn.primitive.name not in RENAMES or any(value.chain for value in ins)


def ending_bytes(results: Iterable[tuple[Value, float]]) -> float:
    """The bytes read and written to put these values into memory. What they are computed from is read once for all of
    them. Each value is written, unless an open buffer has room for it."""
    total, read, filled = 0.0, set[Buffer](), set[Buffer]()
    for value, nbytes in results:
        if not value.chain:
            continue
        rooms = (one for one in value.buffers if one.open and one not in filled and one.nbytes >= nbytes)
        room = min(rooms, key=lambda one: (one.nbytes, one.number), default=None)
        if room is None:
            total += nbytes
        else:
            filled.add(room)
        read |= value.buffers - filled
    return total + sum(one.nbytes for one in read - filled)


def typed_place(aval: Any, sizes: Mapping[str, int]) -> Placement:
    """The place that the type of an array states. Only types on Explicit axes state one."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.are_all_axes_explicit:
        return None
    return of_sharding(sharding, len(aval.shape), sizes)


def sliced(value: Value) -> Value:
    place = value.place
    if isinstance(place, tuple):
        place = place[1:] if not place[0] else None
    return Value(place, value.label, value.sliced + 1, inside=value.inside)


def stacked(value: Value) -> Value:
    return Value(((), *value.place) if isinstance(value.place, tuple) else value.place, inside=value.inside)


def through(eqn: Equation, ins: Sequence[Value]) -> list[Value]:
    """Return where the results of an elementwise equation lie: with its operands, as sharding propagation has it."""
    shape = shape_of(eqn.outvars[0]) if eqn.outvars else ()
    name = eqn.primitive.name
    if name == "transpose" and isinstance(ins[0].place, tuple):
        return [Value(tuple(ins[0].place[i] for i in eqn.params["permutation"]))]
    if all(v.place == ANYWHERE or not shape_of(atom) for v, atom in zip(ins, eqn.invars, strict=True)):
        return [Value(ANYWHERE)] * len(eqn.outvars)
    if name not in ELEMENTWISE:
        return [Value()] * len(eqn.outvars)
    whole = [v for v, atom in zip(ins, eqn.invars, strict=True) if shape_of(atom) == shape and v.place != ANYWHERE]
    places = {v.place for v in whole}
    kept = whole[0] if len(whole) == len(ins) == 1 else Value()
    return [replace(kept, place=places.pop() if len(places) == 1 else None)] * len(eqn.outvars)


# --- what one equation of a jaxpr computes and what it moves to and from memory ---------------------------------------


# Elementwise work that costs nothing worth counting: data is moved, renamed or chosen.
_FREE_NAMES = """broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice
    concatenate pad rev iota convert_element_type bitcast_convert_type copy copy_p select_n stop_gradient device_put
    gather pvary pcast sharding_constraint reshard split name optimization_barrier is_finite real imag
    reduce_precision sort spmd_layout spmd_assert_equal spmd_order spmd_names spmd_split spmd_roll spmd_move spmd_retype
    spmd_fused"""
_FREE = frozenset(_FREE_NAMES.split())
# What writes its result to memory and reads its operands from there; elementwise chains between are fused into it.
_WHOLE = frozenset(
    ("conv_general_dilated", "sort", "fft", "cholesky", "lu", "qr", "eigh", "svd", "triangular_solve", "top_k")
)
_MOVED = frozenset(("gather", "dynamic_slice"))  # of a large operand only what was asked for is read


def size_bytes(aval: Any) -> int:
    """Bytes of an abstract value."""
    try:
        return math.prod(aval.shape) * aval.dtype.itemsize
    except (AttributeError, TypeError):  # a token, or a key whose words are not told
        return 0


def dtype_name(aval: Any) -> str:
    """`bfloat16`."""
    return str(getattr(aval, "dtype", ""))


def is_matmul(eqn: Equation) -> bool:
    """Return whether a matrix unit does it."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")


def flops_of(eqn: Equation) -> tuple[str, float]:
    """dtype and floating-point operations of one execution of an equation without jaxprs inside.

    Dots and convolutions: two per product. Reductions: one per element of the operand. Everything elementwise: one
    per element of the result, transcendental functions too. Complex products count as four real ones, sums as two.
    """
    name = eqn.primitive.name
    if name in _FREE or not eqn.outvars:
        return "", 0.0
    aval = eqn.invars[0].aval if is_matmul(eqn) else eqn.outvars[0].aval
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not _is_inexact(dtype):
        return "", 0.0
    weight = (4 if is_matmul(eqn) else 2) if dtype.name.startswith("complex") else 1
    return dtype.name, weight * _count(eqn)


def _is_inexact(dtype: Any) -> bool:
    return getattr(dtype, "kind", "") in "fc" or dtype.name.startswith(("bfloat16", "float"))


def _count(eqn: Equation) -> float:
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    first = eqn.invars[0].aval if eqn.invars else out
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * math.prod(out.shape) * math.prod(first.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"]
        window = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
        return 2.0 * math.prod(out.shape) * window
    if name == "ragged_dot_general":
        return 2.0 * math.prod(first.shape) * out.shape[-1]
    if name == "fft":
        points = math.prod(eqn.params["fft_lengths"])
        return 2.5 * math.prod(first.shape) * math.log2(max(points, 2))  # 5 n log2(n), the dtype counting two of it
    if name in ("cholesky", "lu"):
        return math.prod(first.shape) * first.shape[-1] / (3 if name == "cholesky" else 1.5)
    if name == "triangular_solve":
        return float(math.prod(out.shape) * first.shape[-1])
    if name.startswith(("reduce_", "arg", "cum")):
        return float(math.prod(first.shape))
    return float(math.prod(out.shape))


def memory_of(eqn: Equation, ins: Sequence[float], outs: Sequence[float]) -> float:
    """Bytes of memory traffic of one execution, for operands and results of so many bytes: all of them for dots,
    convolutions, reductions, sorts and transforms; twice what a gather, a scatter or a slice moves; nothing of what is
    elementwise."""
    name = eqn.primitive.name
    if is_matmul(eqn) or name in _WHOLE or name.startswith(("reduce_", "arg", "cum")):
        return sum(ins) + sum(outs)
    if name in _MOVED:
        return 2 * sum(outs)
    if name == "dynamic_update_slice":
        return 2 * ins[1]
    if name.startswith("scatter"):
        return 2 * ins[-1]
    return 0
