"""The table: how the dimensions of each primitive's operands become those of its results.

One entry per primitive. A map gives every dimension of the operands and results a label. Dimensions with one label lie
alike. A label is passed on, or reduced by an operation, or needed whole by one. The second half of an entry says what
the primitive does to a partial sum. The engine does the rest, the same for all of them.

The idea of one factor map per operation is that of Shardy's sharding rules
(https://openxla.org/shardy/propagation). There a factor that is needed whole asks for a reshard. Here it is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import numpy as jnp

from spmd._jaxprs.walker import Equation, Variable, shape_of
from spmd.checker._state import UNREAD

Label = int | None
NEW: Label = None  # of an operand: the dimension goes; of a result: it is constant along the dimension


class Map(NamedTuple):
    """How the dimensions of one equation correspond.

    Attributes:
      operands: For each operand a label per dimension.
      result: A label per dimension of each result.
      reduced: For each label that is reduced, what reduces it: "sum", "max" and so on.
      whole: For each label that is needed whole, what needs it.
      made: Labels of the result that are new, and not constant: positions of a sort, pieces of a window.
      joined: The labels of dimensions that lie one behind the other in the result, as the first of them.
    """

    operands: Sequence[Sequence[Label]]
    result: Sequence[Label]
    reduced: Mapping[int, str] = {}
    whole: Mapping[int, str] = {}
    made: frozenset[int] = frozenset()
    joined: Sequence[int] = ()


class Entry(NamedTuple):
    """One primitive.

    Attributes:
      map: From an equation to its map.
      linear: What becomes of a partial sum, the name of a rule in `_linear`.
      says: The map in words, for the printed table.
      params: The parameters that the map depends on.
      told: What the map takes from them, to remember it by; None where it depends on none.
    """

    map: Callable[[Any], Map]
    linear: str
    says: str
    params: tuple[str, ...] = ()
    told: Callable[[Any], Hashable] | None = None


def _rank(atom: Variable) -> int:
    return len(shape_of(atom))


# --- maps -----------------------------------------------------------------------------------------------------


def _elementwise(eqn: Equation) -> Map:
    rank = _rank(eqn.outvars[0])
    every = tuple(range(rank))
    return Map([every if _rank(v) else () for v in eqn.invars], every)


def _reduction(kind: str) -> Callable[[Any], Map]:
    def made(eqn: Equation) -> Map:
        every = range(_rank(eqn.invars[0]))
        gone = set(eqn.params["axes"])
        return Map([every] * len(eqn.invars), [d for d in every if d not in gone], reduced=dict.fromkeys(gone, kind))

    return made


def _along(kind: str, name: str) -> Callable[[Any], Map]:
    """One dimension is needed whole. It stays."""

    def made(eqn: Equation) -> Map:
        every, dim = range(_rank(eqn.invars[0])), eqn.params[name]
        dim %= len(every) or 1
        return Map([every] * len(eqn.invars), every, whole={dim: kind}, made=frozenset((dim,)))

    return made


def _top_k(eqn: Equation) -> Map:
    every, new = range(_rank(eqn.invars[0])), 1000
    along = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(every)
    return Map([every], [new if d == along else d for d in every], whole={along: "top_k"}, made=frozenset((new,)))


def _scan(kind: str) -> Callable[[Any], Map]:
    """One dimension is needed whole, and each of its elements stays where it is."""

    def made(eqn: Equation) -> Map:
        every = range(_rank(eqn.invars[0]))
        return Map([every], every, whole={eqn.params["axis"]: kind})

    return made


def _rev(eqn: Equation) -> Map:
    every, dims = range(_rank(eqn.invars[0])), eqn.params["dimensions"]
    return Map([every], every, whole=dict.fromkeys(dims, "flip"), made=frozenset(dims))


def _fft(eqn: Equation) -> Map:
    every = range(_rank(eqn.invars[0]))
    last = every[len(every) - len(eqn.params["fft_lengths"]) :]
    return Map([every], every, whole=dict.fromkeys(last, "fft"), made=frozenset(last))


def _transpose(eqn: Equation) -> Map:
    return Map([range(_rank(eqn.invars[0]))], eqn.params["permutation"])


def _squeeze(eqn: Equation) -> Map:
    gone = {d % _rank(eqn.invars[0]) for d in eqn.params["dimensions"]}
    every = range(_rank(eqn.invars[0]))
    return Map([[NEW if d in gone else d for d in every]], [d for d in every if d not in gone])


def _broadcast(eqn: Equation) -> Map:
    before, shape, placed = shape_of(eqn.invars[0]), eqn.params["shape"], eqn.params["broadcast_dimensions"]
    labels = [t if before[s] == shape[t] else NEW for s, t in enumerate(placed)]
    kept = {label for label in labels if label is not NEW}
    return Map([labels, *[()] * (len(eqn.invars) - 1)], [d if d in kept else NEW for d in range(len(shape))])


def _dot(eqn: Equation) -> Map:
    (one, two), (batch_one, batch_two) = eqn.params["dimension_numbers"]
    rank = _rank(eqn.invars[0])
    left = list(range(rank))
    right: list[Label] = [NEW] * _rank(eqn.invars[1])
    for i, j in zip((*one, *batch_one), (*two, *batch_two), strict=True):
        right[j] = i
    free = [j for j, label in enumerate(right) if label is NEW]
    for n, j in enumerate(free):
        right[j] = rank + n
    result = [*batch_one, *(d for d in left if d not in (*one, *batch_one)), *(right[j] for j in free)]
    return Map([left, right], result, reduced=dict.fromkeys(one, "sum"))


def _conv(eqn: Equation) -> Map:
    """Batch and output features pass, input features are contracted, and a window needs its dimension whole.

    One input feature may be a block of one: of another dimension, because a reshape to the same shape leaves no trace.
    Features that are convolved each by itself pass. Of other groups nobody knows how they lie.
    """
    numbers = eqn.params["dimension_numbers"]
    left, right, out = (tuple(spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    rank, window, strides = len(left), shape_of(eqn.invars[1]), eqn.params["window_strides"]
    groups = eqn.params["feature_group_count"]
    grouped = max(groups, eqn.params["batch_group_count"]) > 1
    alone = grouped and groups == shape_of(eqn.invars[0])[left[1]] == window[right[0]]
    labels_left, labels_right, result = [NEW] * rank, [NEW] * rank, [NEW] * rank
    labels_left[left[0]] = result[out[0]] = 0
    labels_left[left[1]] = 1
    labels_right[right[0]] = result[out[1]] = 1 if alone else 2
    labels_right[right[1]] = 3 if grouped else 1
    if not grouped and window[right[1]] == 1:
        labels_left[left[1]] = labels_right[right[1]] = None
    unknown = (() if alone else (1, 2, 3) if groups > 1 else (0, 1, 2, 3)) if grouped else ()
    whole: dict[int, str] = dict.fromkeys(unknown, UNREAD)
    for i in range(2, rank):
        label, size = 2 + i, window[right[i]]
        labels_left[left[i]] = result[out[i]] = label
        labels_right[right[i]] = rank + 2 + i
        whole[rank + 2 + i] = "stencil"
        if size > 1 or strides[i - 2] > 1:
            whole[label] = "stencil"
    reduced = {} if grouped else {1: "sum"}
    return Map([labels_left, labels_right], result, reduced, whole, frozenset(whole))


def _window(eqn: Equation) -> Map:
    every, sizes = range(_rank(eqn.invars[0])), eqn.params["window_dimensions"]
    wide = [d for d in every if sizes[d] > 1 or eqn.params["window_strides"][d] > 1]
    return Map([every], every, whole=dict.fromkeys(wide, "stencil"), made=frozenset(wide))


def _matrices(kind: str, core: int = 2) -> Callable[[Any], Map]:
    """The matrices are needed whole: the last `core` dimensions of the largest operand. Those before them are a batch,
    of the other operands too."""

    def made(eqn: Equation) -> Map:
        batch = max(0, max(map(_rank, eqn.invars)) - core)
        operands = []
        whole: dict[int, str] = {}
        for i, var in enumerate(eqn.invars):
            last = [1000 + 10 * i + d for d in range(_rank(var) - batch)]
            whole |= dict.fromkeys(last, kind)
            operands.append([*range(batch), *last])
        return Map(operands, range(batch), whole=whole)

    return made


def _triangular_solve(eqn: Equation) -> Map:
    """The matrix is needed whole, and so is that dimension of the other operand that it is applied to."""
    rank = _rank(eqn.invars[0])
    batch = list(range(rank - 2))
    solved, other = 1000, 1001
    last = [solved, other] if eqn.params["left_side"] else [other, solved]
    whole: dict[int, str] = dict.fromkeys([solved, 1002, 1003], "linear algebra")
    return Map([[*batch, 1002, 1003], [*batch, *last]], [*batch, *last], whole=whole, made=frozenset((solved,)))


# --- pieces -------------------------------------------------------------------------------------------------------

# Some elements of a piece are not the same elements of the whole, and pieces side by side are not the whole.
MOVES = frozenset(("slice", "pad", "concatenate", "update"))


def _cut(eqn: Equation) -> tuple[int, ...]:
    """Return the dimensions that are cut: not those of which evenly spaced elements of each block are taken."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    starts, strides = eqn.params["start_indices"], eqn.params["strides"] or (1,) * len(before)
    every = range(len(before))
    return tuple([d for d in every if before[d] != after[d] * strides[d] or starts[d] >= strides[d]])


def _slice(eqn: Equation) -> Map:
    every, cut = range(_rank(eqn.invars[0])), _cut(eqn)
    return Map([every], every, whole=dict.fromkeys(cut, "slice"), made=frozenset(cut))


def _unstack(eqn: Equation) -> Map:
    every, at = range(_rank(eqn.invars[0])), eqn.params["axis"]
    return Map([every], [d for d in every if d != at], whole={at: "slice"})


def _pad(eqn: Equation) -> Map:
    every, padded = range(_rank(eqn.invars[0])), eqn.params["padding_config"]
    cut = [d for d in every if any(padded[d])]
    return Map([every, ()], every, whole=dict.fromkeys(cut, "pad"), made=frozenset(cut))


def _concatenate(eqn: Equation) -> Map:
    every, along = range(_rank(eqn.outvars[0])), eqn.params["dimension"]
    if len(eqn.invars) == 1:
        return Map([every], every)
    parts = range(1000, 1000 + len(eqn.invars))
    operands = [[part if d == along else d for d in every] for part in parts]
    return Map(operands, operands[0], whole=dict.fromkeys(parts, "concatenate"), joined=parts)


def _stack(eqn: Equation) -> Map:
    every, at, new = list(range(_rank(eqn.invars[0]))), eqn.params["axis"], 1000
    return Map([every] * len(eqn.invars), [*every[:at], new, *every[at:]], made=frozenset((new,)))


def _update(eqn: Equation) -> Map:
    """Let what is written over lie as the array does, where it is as long."""
    every, shapes = range(_rank(eqn.invars[0])), [shape_of(v) for v in eqn.invars[:2]]
    cut = [d for d in every if shapes[0][d] != shapes[1][d]]
    written = [NEW if d in cut else d for d in every]
    starts: list[Sequence[Label]] = [()] * (len(eqn.invars) - 2)
    return Map([every, written, *starts], every, whole=dict.fromkeys(cut, "update"), made=frozenset(cut))


# --- runs of a reshape --------------------------------------------------------------------------------------------


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


def rounds(eqn: Equation) -> bool:
    """Return whether a conversion or a quotient rounds to whole numbers, or drops some of their bits."""
    source, target = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if eqn.primitive.name == "div":
        return not jnp.issubdtype(target, np.inexact)
    if jnp.issubdtype(source, np.integer) and jnp.issubdtype(target, np.integer):
        return jnp.iinfo(target).bits < jnp.iinfo(source).bits
    return not jnp.issubdtype(target, np.inexact)


# --- the table --------------------------------------------------------------------------------------------------

TABLE: dict[str, Entry] = {}


def _enter(names: str, how: Callable[[Any], Map], linear: str, says: str, *params: str, told: Any = None) -> None:
    given = (lambda eqn: tuple(map(eqn.params.get, params))) if params else None
    for name in names.split():
        TABLE[name] = Entry(how, linear, says, params, told or given)


_IDENTITIES = """neg real imag conj copy copy_p spmd_fused stop_gradient name sharding_constraint reshard
    pvary pbroadcast pcast preduced reduced_vary_cast reduced_vary_cast_p reduce_precision mesh_cast
    layout_constraint reduce_scatter_done"""
_CURVED = """abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt square integer_pow pow polynomial
    sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh one_minus_square
    logistic erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a
    regularized_incomplete_beta bessel_i0e bessel_i1e max min clamp rem floor ceil round nextafter
    eq ne lt le gt ge eq_to lt_to le_to and or xor not population_count clz
    shift_left shift_right_logical shift_right_arithmetic"""

_enter(_IDENTITIES, _elementwise, "passes", "elementwise")
_enter("convert_element_type", _elementwise, "converts", "elementwise", "new_dtype")
_enter("bitcast_convert_type", _elementwise, "curved", "elementwise", "new_dtype")
_enter("add sub add_any complex", _elementwise, "sums", "elementwise")
_enter("mul", _elementwise, "product", "elementwise")
_enter("div", _elementwise, "quotient", "elementwise")
_enter("select_n", _elementwise, "selects", "elementwise")
_enter(_CURVED, _elementwise, "curved", "elementwise")
# Asking whether a part of a sum is finite is a fair question (loss scaling), so it is not a fault.
_enter("is_finite", _elementwise, "forgets", "elementwise")

_enter("transpose", _transpose, "passes", "permuted", "permutation")
_enter("squeeze", _squeeze, "passes", "some go", "dimensions")
_enter("broadcast_in_dim", _broadcast, "passes", "some are new", "shape", "broadcast_dimensions")
_enter("rev", _rev, "passes", "whole: flip", "dimensions")

_enter("reduce_sum", _reduction("sum"), "passes", "reduced: sum", "axes")
for _name, _kind in (
    ("max", "max"),
    ("min", "min"),
    ("prod", "product"),
    ("and", "all"),
    ("or", "any"),
    ("xor", "xor"),
):
    _enter(f"reduce_{_name}", _reduction(_kind), "curved", f"reduced: {_kind}", "axes")
_enter("argmax argmin", _reduction("position"), "curved", "reduced: position", "axes", "index_dtype")
_enter("cumsum", _scan("scan"), "passes", "whole: scan", "axis")
_enter("cumprod cummax cummin cumlogsumexp", _scan("scan"), "curved", "whole: scan", "axis")
_enter("sort", _along("sort", "dimension"), "curved", "whole: sort", "dimension")
_enter("top_k approx_top_k", _top_k, "curved", "whole: top_k", "axis", "reduction_dimension", "k")
_enter("slice", _slice, "passes", "whole: slice", "start_indices", "strides", told=_cut)
_enter("split", _along("slice", "axis"), "passes", "whole: slice", "axis", "sizes")
_enter("unstack", _unstack, "passes", "whole: slice", "axis")
_enter("pad", _pad, "sums", "whole: pad", "padding_config")
_enter("concatenate", _concatenate, "sums", "whole: concatenate", "dimension")
_enter("stack", _stack, "sums", "one is new", "axis")
_enter("dynamic_update_slice", _update, "writes", "whole: update")
_enter("dot_general", _dot, "product", "reduced: sum", "dimension_numbers")
_enter("conv_general_dilated", _conv, "product", "reduced: sum, whole: stencil", "dimension_numbers")
_enter("fft", _fft, "passes", "whole: fft", "fft_lengths")
_enter("reduce_window_sum cumulative_sum", _window, "passes", "whole: stencil", "window_dimensions")
_enter("reduce_window_max reduce_window_min", _window, "curved", "whole: stencil", "window_dimensions")
_enter(
    """cholesky lu qr geqrf eig eigh svd schur householder_product hessenberg
    tridiagonal tridiagonal_solve lu_solve""",
    _matrices("linear algebra"),
    "curved",
    "whole: linear algebra",
    told=lambda eqn: tuple(map(shape_of, eqn.outvars)),  # singular values come with vectors, and without
)
_enter(
    "lu_pivots_to_permutation", _matrices("linear algebra", 1), "curved", "whole: linear algebra", "permutation_size"
)
_enter("triangular_solve", _triangular_solve, "curved", "whole: linear algebra, columns pass", "left_side")
