"""Along which dims an output is constant, from those of its operands: one small rule per primitive.

A rule takes `(eqn, operands)` and returns a mask of dims. Silence is safe: 0 (not known to be constant)
never hides an error of the program, it can only ask for `spmd.zeros` where a plain constant would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd.checker._state import EVERYWHERE, State

UniformRule = Callable[[Any, Sequence[State]], int]


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def nothing(eqn: Any, operands: Sequence[State]) -> int:
    """The output may vary along every dim."""
    return 0


def everything(eqn: Any, operands: Sequence[State]) -> int:
    """A constant output if all operands are constant; else nothing is known."""
    return EVERYWHERE if all(o.uniform == EVERYWHERE for o in operands) else 0


def elementwise(eqn: Any, operands: Sequence[State]) -> int:
    """Constant along the dims where every operand is; scalars are constant everywhere."""
    result = EVERYWHERE
    for operand in operands:
        result &= operand.uniform
    return result


def first(eqn: Any, operands: Sequence[State]) -> int:
    """As the first operand: the others only say where to look (slices, indices)."""
    return operands[0].uniform


def _pick(mask: int, dims: Sequence[int]) -> int:
    """The mask whose bit i is bit `dims[i]` of `mask`."""
    return sum(1 << i for i, dim in enumerate(dims) if mask >> dim & 1)


def transpose(eqn: Any, operands: Sequence[State]) -> int:
    return _pick(operands[0].uniform, eqn.params["permutation"])


def squeeze(eqn: Any, operands: Sequence[State]) -> int:
    gone = set(eqn.params["dimensions"])
    return _pick(operands[0].uniform, [d for d in range(_rank(eqn.invars[0])) if d not in gone])


def reduction(eqn: Any, operands: Sequence[State]) -> int:
    gone = set(eqn.params["axes"])
    mask = elementwise(eqn, operands)
    return _pick(mask, [d for d in range(_rank(eqn.invars[0])) if d not in gone])


def along(name: str) -> UniformRule:
    """An operation that mixes one dim only, named by a parameter: that dim is no longer constant."""

    def rule(eqn: Any, operands: Sequence[State]) -> int:
        mask = elementwise(eqn, operands)
        return mask & ~(1 << eqn.params[name])

    return rule


def broadcast_in_dim(eqn: Any, operands: Sequence[State]) -> int:
    shape, placed = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    before = eqn.invars[0].aval.shape
    result = (1 << len(shape)) - 1
    for source, target in enumerate(placed):
        expanded = before[source] == 1 and shape[target] != 1
        if not expanded and not operands[0].uniform >> source & 1:
            result &= ~(1 << target)
    return result


def iota(eqn: Any, operands: Sequence[State]) -> int:
    return ~(1 << eqn.params["dimension"])


def groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dims that a reshape keeps apart: runs of old and of new dims, of equal products.

    A dim of size 1 that is dropped or inserted is a run of its own, with no dims on the other side.
    """
    i = j = 0
    while i < len(old) or j < len(new):
        first, begin = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        if left == 1 != right:
            i += 1
        elif right == 1 != left:
            j += 1
        else:
            i, j = i + 1, j + 1
        while left != right and first < i and begin < j:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        yield range(first, min(i, len(old))), range(begin, min(j, len(new)))


def reshape(eqn: Any, operands: Sequence[State]) -> int:
    """A group of dims is constant if all its old dims are."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    mask = operands[0].uniform
    if mask == EVERYWHERE or 0 in old:
        return mask
    kept = [after for before, after in groups(old, new) if all(mask >> dim & 1 for dim in before)]
    return sum(1 << dim for after in kept for dim in after)


def dot_general(eqn: Any, operands: Sequence[State]) -> int:
    """Free dims stay constant where their operand is; a batch dim where both are."""
    (contract_left, contract_right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    left, right = operands[0].uniform, operands[1].uniform
    bits = [left >> a & right >> b & 1 for a, b in zip(batch_left, batch_right, strict=True)]
    for operand, mask, taken in (
        (eqn.invars[0], left, {*contract_left, *batch_left}),
        (eqn.invars[1], right, {*contract_right, *batch_right}),
    ):
        bits += [mask >> dim & 1 for dim in range(_rank(operand)) if dim not in taken]
    return sum(bit << i for i, bit in enumerate(bits))


def pad(eqn: Any, operands: Sequence[State]) -> int:
    mask = operands[0].uniform
    for dim, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if low or high or interior:
            mask &= ~(1 << dim)
    return mask


def dynamic_update_slice(eqn: Any, operands: Sequence[State]) -> int:
    mask = operands[0].uniform & operands[1].uniform
    whole, part = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    for dim, (size, piece) in enumerate(zip(whole, part, strict=True)):
        if size != piece:
            mask &= ~(1 << dim)
    return mask
