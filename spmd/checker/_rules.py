"""One entry per primitive: how a partial sum passes, and along which dims the output is constant.

The equal/different bit needs no entry: it is the union of the operands. Collectives are in `_collectives`,
control flow and calls in `_control`, our own markers in `_markers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import spmd.checker._linear as linear
import spmd.checker._uniform as uniform
from spmd.checker._state import EVERYWHERE, IOTA, UNKNOWN, ZERO, State, normal
from spmd.checker._walk import Walk


class Rule(NamedTuple):
    """The entry of one primitive."""

    linear: linear.LinearRule
    uniform: uniform.UniformRule


# No rule: a constant of constants may still be noise (random bits) or a count, so nothing is known.
NO_RULE = Rule(linear.forgets, uniform.nothing)

TABLE: dict[str, Rule] = {}


def _enter(names: str, linear_rule: linear.LinearRule, uniform_rule: uniform.UniformRule) -> None:
    for name in names.split():
        TABLE[name] = Rule(linear_rule, uniform_rule)


_IDENTITIES = """neg real imag conj copy stop_gradient reduce_precision name sharding_constraint rev tile
    pvary pbroadcast pcast preduced reduced_vary_cast reduced_vary_cast_p"""
_CURVED = """abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt square integer_pow pow polynomial
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh one_minus_square
    logistic erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a
    regularized_incomplete_beta bessel_i0e bessel_i1e max min clamp rem floor ceil round nextafter
    eq ne lt le gt ge eq_to lt_to le_to and or xor not population_count clz
    shift_left shift_right_logical shift_right_arithmetic"""

_enter(_IDENTITIES, linear.passes, uniform.first)
_enter("convert_element_type", linear.converts, uniform.first)
_enter("bitcast_convert_type", linear.nonlinear, uniform.everything)
_enter("add sub add_any complex", linear.sums, uniform.elementwise)
_enter("mul", linear.product, uniform.elementwise)
_enter("div", linear.quotient, uniform.elementwise)
_enter("select_n", linear.selects, uniform.elementwise)
_enter(_CURVED, linear.nonlinear, uniform.elementwise)
# Asking whether a part of a sum is finite is a fair question (loss scaling), so no fault.
_enter("is_finite", linear.forgets, uniform.elementwise)

_enter("broadcast_in_dim", linear.passes, uniform.broadcast_in_dim)
_enter("reshape", linear.passes, uniform.reshape)
_enter("transpose", linear.passes, uniform.transpose)
_enter("squeeze", linear.passes, uniform.squeeze)
_enter("slice dynamic_slice split", linear.passes, uniform.first)
_enter("gather", linear.fetches, uniform.everything)
_enter("pad", linear.sums, uniform.pad)
_enter("concatenate", linear.sums, uniform.along("dimension"))
_enter("dynamic_update_slice", linear.updates, uniform.dynamic_update_slice)
_enter("scatter", linear.scatters, uniform.nothing)
_enter("scatter-add scatter_add", linear.scatters, uniform.nothing)
_enter("iota", linear.forgets, uniform.iota)

_enter("reduce_sum", linear.passes, uniform.reduction)
_enter("reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor", linear.nonlinear, uniform.reduction)
_enter("argmax argmin", linear.nonlinear, uniform.reduction)
_enter("cumsum", linear.passes, uniform.along("axis"))
_enter("cumprod cummax cummin cumlogsumexp", linear.nonlinear, uniform.along("axis"))
_enter("sort", linear.nonlinear, uniform.elementwise)
_enter("top_k", linear.nonlinear, uniform.along("axis"))
_enter("dot_general", linear.product, uniform.dot_general)
_enter("conv_general_dilated", linear.product, uniform.nothing)
_enter("reduce_window_sum fft", linear.passes, uniform.nothing)
_enter("reduce_window_max reduce_window_min", linear.nonlinear, uniform.nothing)


def compute(walk: Walk, eqn: Any, operands: Sequence[State]) -> list[State]:
    """The outputs of a primitive that does not communicate: the union of its operands, refined."""
    if not eqn.outvars:
        return []
    different = partial = origin = flags = 0
    for operand in operands:
        different |= operand.different
        partial |= operand.partial
        origin |= operand.origin
        flags |= operand.flags
    name = eqn.primitive.name
    rule = TABLE.get(name, NO_RULE)
    mask = rule.uniform(eqn, operands)
    if mask and mask != EVERYWHERE:
        mask = normal(mask, len(eqn.outvars[0].aval.shape))
    elif not mask and not eqn.outvars[0].aval.shape:
        mask = EVERYWHERE
    if partial or flags & ZERO:
        found = len(walk.findings)
        partial, zero = rule.linear(walk, eqn, operands)
        flags = (flags & ~ZERO) | (ZERO if zero else 0) | (UNKNOWN if len(walk.findings) != found else 0)
        mask = EVERYWHERE if zero else mask
    if name == "iota":
        flags |= IOTA
    return [State(different, partial, mask, flags, origin)] * len(eqn.outvars)
