"""How often a number is too large on a mesh, and what each primitive makes of that.

On 4 devices `psum(x.mean(), "dp")` is 4 times what it is on one: its *power* of the size of dp is 1. Products add
powers, roots halve them. But `h + psum(x.mean(), "dp")` has no one power, nor has its tanh: such a value *grows*. It
depends on the mesh all the same, and so does what is made of it, unless something undoes it: `tanh(4 * x)` is not
`tanh(x)`, while `4 * x / norm(4 * x)` is `x / norm(x)`. What might undo it makes nobody know.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import Literal

from spmd._jaxprs import shape_of
from spmd.checker._state import FREE, HIDDEN, State, size_of


class Grown(NamedTuple):
    """The power of a value that depends on the size of an axis, though not as a power of it.

    Attributes:
      factor: Whether a factor may undo that, as a norm has one: `sqrt(n * n * v + eps)`. Where data that the size
        multiplies and data that it does not are added, none does.
      term: Whether a term may undo it, as a softmax subtracts one: `log(n * v)`.
      path: What was done to it since, a hash. Values of one path may be equal, and their difference zero. Terms and
        numbers by which it was multiplied are not on it: a difference takes them away.
      turned: Whether its sign was turned.
      varies: Whether what depends on the size differs from element to element.
      like: The power that it has but for an epsilon: 2 of `n * n * v + eps`.
    """

    factor: bool = False
    term: bool = False
    path: int = 0
    turned: bool = False
    varies: bool = True
    like: Fraction | None = None


class Near(NamedTuple):
    """The power of a norm of what is too large: there is none, but for an epsilon. Nobody minds that."""

    def __bool__(self) -> bool:
        return False


Power = Fraction | Grown | Near | None  # None: nobody knows
ZERO, NEAR = Fraction(0), Near()


class Operand(NamedTuple):
    """What a rule asks of an operand."""

    power: Power
    state: State

    def varies(self, result: Any) -> bool:
        """Whether it is data, and differs along every dimension of this result."""
        if self.state.number or tuple(map(size_of, self.state.dims)) != shape_of(result):
            return False
        return not any(n > 1 and (axes is FREE or axes is HIDDEN) for dim in self.state.dims for n, axes in dim)


_LINEAR = frozenset(("mul", "reduce_sum", "slice", "gather", "dynamic_slice"))
Rule = Callable[[Any, Sequence[Operand]], Power]
RULES: dict[str, Rule] = {}


def _enter(names: str, rule: Rule) -> None:
    RULES.update(dict.fromkeys(names.split(), rule))


def power_of(eqn: Any, operands: Sequence[Operand], number: int = 0) -> Power:
    """The power of a result of an equation, the one of this number, wherever both traces have it."""
    exact, near = nearly(operands)
    power = near(RULES.get(eqn.primitive.name, _all_alike)(eqn, exact))
    return power._replace(path=hash((power.path, number))) if number and isinstance(power, Grown) else power


def nearly(operands: Sequence[Operand]) -> tuple[Sequence[Operand], Callable[[Power], Power]]:
    """Operands without epsilons, and what to make of a result of theirs."""
    if not any(isinstance(o.power, Near) for o in operands):
        return operands, lambda power: power
    exact = [o._replace(power=ZERO) if isinstance(o.power, Near) else o for o in operands]
    return exact, lambda power: power if isinstance(power, Grown) else NEAR if power == ZERO else None


# --- what stays as it is ----------------------------------------------------------------------------------------


def _all_alike(eqn: Any, operands: Sequence[Operand]) -> Power:
    """Of any other primitive: what has no power keeps none."""
    return ZERO if all(o.power == ZERO for o in operands) else None


def _first(eqn: Any, operands: Sequence[Operand]) -> Power:
    return operands[0].power


def _further(eqn: Any, operands: Sequence[Operand]) -> Power:
    return further(operands[0].power, eqn)


def further(power: Power, eqn: Any, *others: Any) -> Power:
    """A power whose value went through an equation, together with these other operands."""
    if not isinstance(power, Grown):
        return power
    where = eqn.params.get("start_indices") if eqn.primitive.name == "slice" else None
    like = power.like if eqn.primitive.name in _LINEAR else None
    return power._replace(path=hash((power.path, eqn.primitive.name, where, *map(id, others))), like=like)


def alike(one: Power, other: Power) -> bool:
    """Whether two powers are the same but for their paths."""
    if isinstance(one, Grown) and isinstance(other, Grown):
        return one == other._replace(path=one.path)
    return one == other


def _turned(power: Power) -> Power:
    return _minus(power) if isinstance(power, Grown) else power


def _minus(power: Grown) -> Grown:
    return power._replace(turned=not power.turned)


def _repeated(eqn: Any, operands: Sequence[Operand]) -> Power:
    """The same number in many places is a shift, or a factor, of what it is combined with."""
    power = operands[0].power
    if isinstance(power, Grown) and math.prod(shape_of(eqn.outvars[0])) > math.prod(shape_of(eqn.invars[0])):
        return power._replace(factor=True, term=True, varies=False)
    return power


def _taken(eqn: Any, operands: Sequence[Operand]) -> Power:
    """Elements of the first operand, at places that the others say."""
    return further(operands[0].power, eqn, *eqn.invars[1:]) if all(o.power == ZERO for o in operands[1:]) else None


def _written(eqn: Any, operands: Sequence[Operand]) -> Power:
    """Elements of an operand in another one, at places that the rest say."""
    name = eqn.primitive.name
    old, new, *places = operands if name == "dynamic_update_slice" else (operands[0], *operands[:0:-1])
    return together([old, new]) if all(o.power == ZERO for o in places) else None


# --- sums -------------------------------------------------------------------------------------------------------


def together(operands: Sequence[Operand]) -> Power:
    """Elements of all operands, side by side, or one in place of another. Zeros do not count. If all of them grow,
    each by a path of its own, so does the result."""
    powers = dict.fromkeys(o.power for o in operands if not o.state.zero)
    grown = [power for power in powers if isinstance(power, Grown)]
    if len(powers) > 1 and len(grown) == len(powers) == len({power.path for power in grown}):
        return functools.reduce(_both, grown)._replace(varies=all(power.varies for power in grown))
    return next(iter(powers)) if len(powers) == 1 else None if powers else ZERO


def either(operands: Sequence[Operand]) -> Power:
    """Elements of one operand or of another one: where a mask or a bound puts a number, the data depend on the size."""
    data = [o for o in operands if not o.state.number]
    power = together(data or operands)
    if not data:  # zeros do not count: `where(mask, 1 / n, 0)` is in gradients of means
        return power if isinstance(power, Fraction) else None
    if power is None or power == ZERO:
        return power if power is None or all(o.power == ZERO for o in operands) else None
    numbers = [o for o in operands if o.state.number and not o.state.zero]
    if any(o.power != ZERO for o in numbers):
        return None
    if not numbers:
        return power
    return Grown(factor=True, term=True, varies=False) if isinstance(power, Fraction) else power._replace(like=None)


def _sum(eqn: Any, operands: Sequence[Operand]) -> Power:
    minus = eqn.primitive.name == "sub"
    if minus and eqn.invars[0] is eqn.invars[1]:
        return ZERO
    power = together(operands)
    if isinstance(power, Fraction) or len(operands) != 2 or any(o.power is None for o in operands):
        return power
    one, other = operands
    result = eqn.outvars[0]
    if one.state.zero or other.state.zero:
        return _turned(power) if minus and one.state.zero else power
    if isinstance(one.power, Grown) and isinstance(other.power, Grown):
        return _sum_of_grown(one.power, _minus(other.power) if minus else other.power)
    if isinstance(one.power, Grown):
        return _with(one.power, other, result)
    if isinstance(other.power, Grown):
        return _with(_minus(other.power) if minus else other.power, one, result)
    varies = all(o.varies(result) for o in operands if o.power != ZERO)
    data = one.varies(result) and other.varies(result)
    grown = Grown(factor=varies and not data, term=not data, varies=varies)
    for o, eps in ((one, other), (other, one)):
        if eps.state.number and eps.power == ZERO and isinstance(o.power, Fraction):
            return grown._replace(like=o.power)
    return grown


def _sum_of_grown(one: Grown, other: Grown) -> Power:
    """A difference of two values of one path may be one of a value and itself."""
    if one.turned != other.turned and (one.term or other.term or one.path == other.path):
        return None
    return _both(one, other)


def _both(one: Grown, other: Grown) -> Grown:
    path = one.path if one.path == other.path else hash(frozenset((one.path, other.path)))
    return one._replace(factor=one.factor or other.factor, term=one.term or other.term, path=path, like=None)


def _with(grown: Grown, other: Operand, result: Any) -> Power:
    """A value that grows, and another one that does not."""
    if other.power != ZERO:
        return None
    grown = grown._replace(like=None)
    return grown._replace(factor=False, term=False) if grown.varies and other.varies(result) else grown


# --- products and functions ---------------------------------------------------------------------------------------


def _product(eqn: Any, operands: Sequence[Operand]) -> Power:
    one, other = operands
    inverse = eqn.primitive.name == "div"
    if one.state.zero or (other.state.zero and not inverse):
        return ZERO
    if one.power is None or other.power is None:
        return None
    if isinstance(one.power, Fraction) and isinstance(other.power, Fraction):
        return one.power - other.power if inverse else one.power + other.power
    contracts = eqn.primitive.name not in ("mul", "div")
    power = _product_of_grown(eqn, one, other, inverse)
    if isinstance(power, Near):
        return power
    negative = any(_number(atom) < 0 for atom in eqn.invars)
    if negative or not isinstance(power, Grown):
        return _turned(power)
    data = [atom for atom, o in zip(eqn.invars, operands, strict=True) if not o.state.number and o.power == ZERO]
    return further(power, eqn, *data) if contracts or data else power


def _product_of_grown(eqn: Any, one: Operand, other: Operand, inverse: bool) -> Power:
    grown = [o.power for o in (one, other) if isinstance(o.power, Grown)]
    if len(grown) == 1:
        [power] = grown
        known = not power.factor or ZERO in (one.power, other.power)
        rest = other if one.power is grown[0] else one
        if isinstance(rest.power, Fraction) and rest.power and power.like == (rest.power if inverse else -rest.power):
            return NEAR
        if not power.varies and rest.varies(eqn.outvars[0]):
            power = power._replace(factor=True, term=False, varies=True)
        return (further(power, eqn) if inverse and grown[0] is other.power else power) if known else None
    if eqn.invars[0] is eqn.invars[1]:
        return None if inverse else further(one.power, eqn)
    if any(power.factor for power in grown) or (inverse and grown[0].path == grown[1].path):
        return None
    return further(_both(*grown), eqn)


def _number(atom: Any) -> float:
    """The value of a literal; 1 for all else."""
    try:
        return float(atom.val) if isinstance(atom, Literal) else 1.0
    except (TypeError, ValueError):
        return 1.0


def _root(factor: Callable[[Any], Fraction]) -> Rule:
    def rule(eqn: Any, operands: Sequence[Operand]) -> Power:
        power = operands[0].power
        if isinstance(power, Fraction):
            return power * factor(eqn)
        after = further(power, eqn)
        if isinstance(power, Grown) and isinstance(after, Grown) and power.like is not None:
            return after._replace(like=power.like * factor(eqn))
        return after

    return rule


def _solved(eqn: Any, operands: Sequence[Operand]) -> Power:
    """A matrix in the place of a divisor."""
    matrix, right = (o.power for o in operands)
    if isinstance(matrix, Fraction) and isinstance(right, Fraction):
        return right - matrix
    if ZERO not in (matrix, right) or matrix is None or right is None:
        return None
    return further(matrix or right, eqn, *eqn.invars)


def _pow(eqn: Any, operands: Sequence[Operand]) -> Power:
    power, to = operands[0].power, _number(eqn.invars[1])
    if operands[1].power != ZERO:
        return None
    if not isinstance(power, Fraction) or not power:
        return further(power, eqn)
    known = isinstance(eqn.invars[1], Literal)
    return power * Fraction(to).limit_denominator(4) if known and (4 * to).is_integer() else None


def _curved(of: Callable[[Grown], Grown], bounded: bool = False) -> Rule:
    """A function of single elements that takes no value twice. It makes terms of factors, or factors of terms."""

    def rule(eqn: Any, operands: Sequence[Operand]) -> Power:
        power = operands[0].power
        if isinstance(power, Grown):
            return further(of(power), eqn)
        if power is None or power == ZERO:
            return power
        varies = operands[0].varies(eqn.outvars[0])
        return further(of(Grown(factor=not (bounded and varies), varies=varies)), eqn)

    return rule


def _logarithm(power: Grown) -> Grown:
    """`log(n * x)` is `log(x)` and a term that is the same everywhere."""
    return power._replace(factor=False, term=power.factor or power.term, varies=power.varies and not power.factor)


def _exponential(power: Grown) -> Grown:
    return power._replace(factor=power.factor or power.term, term=False)


def _same(power: Grown) -> Grown:
    return power


def _signed(eqn: Any, operands: Sequence[Operand]) -> Power:
    """Which is larger, which is positive, where the largest is: no positive factor changes that."""
    powers = {o.power for o in operands if not o.state.zero}
    return ZERO if len(powers) <= 1 and all(isinstance(p, Fraction) for p in powers) else None


def _finite(eqn: Any, operands: Sequence[Operand]) -> Power:
    """No size makes a number infinite."""
    return None if operands[0].power is None else ZERO


def _selected(eqn: Any, operands: Sequence[Operand]) -> Power:
    """A mask that comes from data takes some elements of each case."""
    mask, *cases = operands
    if mask.power != ZERO:
        return None
    mixed = not mask.state.number and not any(o.state.number for o in cases)
    if mixed and len({o.power for o in cases}) > 1 and all(isinstance(o.power, Fraction) for o in cases):
        return Grown(factor=True, term=True, varies=False)
    return either(cases)


_enter(
    """real imag conj copy copy_p stop_gradient name pvary pcast reduce_precision convert_element_type
    transpose squeeze reshape rev split spmd_retype spmd_relayout spmd_split spmd_layout spmd_fused
    spmd_assert_equal spmd_block pmax pmin all_gather all_gather_invariant all_gather_reduced ppermute all_to_all
    optimization_barrier sharding_constraint""",
    _first,
)
_enter("broadcast_in_dim tile", _repeated)
_enter("reduce_max reduce_min cumsum cummax cummin reduce_sum fft abs slice", _further)
_enter("neg", lambda eqn, operands: _turned(operands[0].power))
_enter("gather dynamic_slice copysign", _taken)
_enter("dynamic_update_slice scatter scatter-add scatter_add", _written)
_enter("concatenate stack pad", lambda eqn, operands: together(operands))
_enter("add sub add_any", _sum)
_enter("mul div dot_general conv_general_dilated", _product)
_enter("triangular_solve", _solved)
_enter("sqrt cholesky", _root(lambda eqn: Fraction(1, 2)))
_enter("rsqrt", _root(lambda eqn: Fraction(-1, 2)))
_enter("cbrt", _root(lambda eqn: Fraction(1, 3)))
_enter("square", _root(lambda eqn: Fraction(2)))
_enter("integer_pow", _root(lambda eqn: Fraction(eqn.params["y"])))
_enter("pow", _pow)
_enter("tanh logistic erf erfc sin cos atan", _curved(_same, bounded=True))
_enter("exp exp2", _curved(_exponential))
_enter("expm1 log1p sinh cosh asinh erf_inv lgamma", _curved(_same))
_enter("log log2", _curved(_logarithm))
_enter("eq ne lt le gt ge sign argmax argmin", _signed)
_enter("is_finite", _finite)
_enter("select_n", _selected)
_enter("max min clamp", lambda eqn, operands: either(operands))
