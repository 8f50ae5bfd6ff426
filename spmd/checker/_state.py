"""What the pass knows about one value: a handful of bits, joined where control flow meets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

# A uniform mask of all ones: constant along every dimension, whatever the rank. Scalars are always that.
EVERYWHERE = -1

ZERO = 1  # known to be all zeros: neutral in every sum, so it may meet a partial sum
IOTA = 2  # built from an arange; only the wording of errors depends on it
UNKNOWN = 4  # no rule, or an error was already reported: ask nothing of it until the next marker

# Larger constants are not looked at: reading them would cost more than the trace.
LARGEST_CONSTANT = 1_000_000


class State(NamedTuple):
    """One value: masks of mesh axes, a mask of dims, flags, and a mask of `Origins`: where it comes from."""

    different: int = 0
    partial: int = 0
    uniform: int = 0
    flags: int = 0
    origin: int = 0


EQUAL = State()
SCALAR = State(uniform=EVERYWHERE)
ZEROS = State(uniform=EVERYWHERE, flags=ZERO)


def normal(uniform: int, rank: int) -> int:
    """The uniform mask with `all dims` spelled one way, so that states compare equal when they are."""
    full = (1 << rank) - 1
    return EVERYWHERE if uniform & full == full else uniform & full


def join(left: State, right: State) -> State:
    """What is certain when the value is one or the other: a partial sum only if both are (or zero)."""
    if left == right:
        return left
    if left.flags & right.flags & ZERO:
        partial, zero = left.partial & right.partial, ZERO
    elif left.flags & ZERO:
        partial, zero = right.partial, 0
    elif right.flags & ZERO:
        partial, zero = left.partial, 0
    else:
        partial, zero = left.partial & right.partial, 0
    return State(
        left.different | right.different,
        partial,
        left.uniform & right.uniform,
        ((left.flags | right.flags) & ~ZERO) | zero,
        left.origin | right.origin,
    )


def joined(states: Iterable[State]) -> State:
    """The join of at least one state."""
    states = iter(states)
    result = next(states)
    for state in states:
        result = join(result, state)
    return result


def literal_state(value: Any) -> State:
    """A literal of a jaxpr: nearly always a scalar."""
    if np.ndim(value) == 0:
        try:
            return ZEROS if bool(value == 0) else SCALAR
        except (TypeError, ValueError):  # PRNG keys and other extended dtypes compare with nothing
            return SCALAR
    return constant_state(value)


def constant_state(value: Any) -> State:
    """A constant that the jaxpr closed over: equal everywhere; its uniform dims are read off its elements."""
    shape = getattr(value, "shape", None)
    if shape is None or not all(isinstance(n, int) for n in shape):
        return EQUAL
    if not shape:
        return SCALAR
    if int(np.prod(shape)) > LARGEST_CONSTANT or not getattr(value, "is_fully_addressable", True):
        return EQUAL
    try:
        elements = np.asarray(value)
        uniform, zero = _uniform_dims(elements), not elements.any()
        flags = (ZERO if zero else 0) | (IOTA if _is_arange(elements) else 0)
    except (TypeError, ValueError, RuntimeError):  # keys, deleted buffers
        return EQUAL
    return State(uniform=normal(uniform, elements.ndim), flags=flags)


def _uniform_dims(elements: np.ndarray) -> int:
    if elements.size == 0:
        return EVERYWHERE
    return sum(1 << dim for dim in range(elements.ndim) if bool((elements == elements.take([0], axis=dim)).all()))


def _is_arange(elements: np.ndarray) -> bool:
    if elements.ndim != 1 or elements.size < 2 or elements.dtype.kind not in "iuf":
        return False
    steps = np.diff(elements)
    return bool(steps[0] != 0 and (steps == steps[0]).all())
