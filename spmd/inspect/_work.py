"""What one equation of a jaxpr computes and what it moves to and from memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Elementwise work that costs nothing worth counting: data is moved, renamed or chosen.
_FREE = frozenset(
    str.split(
        """
        broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice
        concatenate pad rev iota convert_element_type bitcast_convert_type copy copy_p select_n stop_gradient
        device_put gather pvary pcast sharding_constraint reshard split name optimization_barrier is_finite real
        imag reduce_precision sort spmd_layout spmd_assert_equal spmd_order spmd_split spmd_roll spmd_move spmd_retype
        spmd_fused
        """
    )
)
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


def is_matmul(eqn: Any) -> bool:
    """Whether a matrix unit does it."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")


def flops_of(eqn: Any) -> tuple[str, float]:
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


def _count(eqn: Any) -> float:
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


def memory_of(eqn: Any, ins: Sequence[float], outs: Sequence[float]) -> float:
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


def writes_results(eqn: Any) -> bool:
    """Whether an equation with memory traffic writes its results whole, so that what follows can be fused into it."""
    return not eqn.primitive.name.startswith(("scatter", "dynamic_update_slice"))
