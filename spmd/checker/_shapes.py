"""Reshapes, slices and indices: the primitives whose map depends on sizes and positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import spmd.checker._tables as tables
from spmd._jaxprs.facts import per_shard_reason
from spmd._jaxprs.walker import Equation, shape_of
from spmd.checker._engine import Engine
from spmd.checker._linear import Linear, curved, fetches, passes, product, sums
from spmd.checker._state import (
    FREE,
    HIDDEN,
    NONE,
    OWN,
    Axes,
    Dim,
    Factor,
    Pending,
    State,
    axes_of_dim,
    ends_of,
    free,
    hidden,
    hide,
    is_divided,
    kept_order,
    normal,
    plain,
    refined,
    remade,
    size_of,
    still_pending,
    unify,
)
from spmd.checker._table import groups


def _made(
    walk: Engine,
    eqn: Equation,
    operand: State,
    dims: Sequence[Dim],
    pieces: Iterable[tuple[str, str]] = (),
    others: Sequence[State] = (),
    linear: tuple[frozenset[str], frozenset[str], bool] | None = None,
) -> State:
    """The state of a result with these dims. `pieces` are (kind, axis) of what was done to a piece."""
    partial, lost, zero = linear or passes(walk, eqn, [operand, *others])
    held = {axis for dim in dims for axis in axes_of_dim(dim)}
    if not partial.isdisjoint(held):  # other rows of each term: no sum over the devices makes them whole
        dims = hide(dims, partial)
        left = {axis for dim in dims for axis in axes_of_dim(dim)}
        lost, held = lost | (held - left), left
    lost = lost.union(*(o.axes - o.different - {p.axis for p in o.pending} for o in others))
    different = NONE.union(lost, operand.different, *(o.different for o in others))
    older = NONE.union(operand.pending, *(o.pending for o in others))
    new = {(kind, axis) for kind, axis in pieces if axis not in different and walk.wide(axis)}
    if new and (walk.silent(eqn) or not walk.active):
        different |= {axis for _, axis in new}
        new = set()
    pending = older | {Pending(kind, axis, walk.number(eqn)) for kind, axis in new}
    pending = still_pending(pending, (operand, *others), lost)
    gone = operand.axes - held - partial - different - {p.axis for p in pending}
    pending |= {Pending(OWN, axis, -1) for axis in gone}
    order = kept_order([operand, *others], dims)
    return walk.kept(State(tuple(dims), partial - different, different | gone, pending, zero, order=order))


def _beside(operand: State, known: Iterable[str]) -> State:
    """Return what an operand adds to a result besides its dimensions; the result says what it is along the axes
    `known`."""
    different = (operand.axes - {p.axis for p in operand.pending} | operand.different).difference(known)
    return State(different=different, pending=operand.pending)


# --- reshape --------------------------------------------------------------------------------------------------


def _reshape(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Merge runs of dimensions into one list of factors, and take it apart again."""
    operand = operands[0]
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    order = eqn.params.get("dimensions")
    if order is not None:  # in which the dimensions are read
        operand, old = (
            operand._replace(dims=tuple(operand.dims[d] for d in order)),
            tuple(old[d] for d in order),
        )
    if 0 in old:
        return [walk.kept(State(tuple(map(hidden, new)), different=operand.axes, zero=operand.zero))]
    dims: list[Dim] = [free(n) for n in new]
    ones = {a for n, dim in zip(old, operand.dims, strict=True) if n == 1 for a in axes_of_dim(dim)}
    loose = bool(ones) and old.count(1) != new.count(1)
    if loose:  # any of the dimensions of one element may be the one that is divided
        dims = [hidden(n) if n == 1 else free(n) for n in new]
    ambiguous = False
    ending: Sequence[int] = ()  # the dimensions just made, if the last factor is divided and has one element
    for before, after in groups(old, new):
        factors = [factor for d in before for factor in operand.dims[d]]
        if not after:  # an element of a dimension of size 1 is not a block any more
            ambiguous |= any(is_divided(axes) for _, axes in factors)
            continue
        if not before:
            for d in (*ending, *after) if ending else ():
                dims[d] = hidden(new[d])
            ambiguous |= any(new[d] == 1 for d in after) and after.stop < len(new)
            continue
        leading = bool(factors) and is_divided(factors[0][1])
        for d, dim in zip(after, _apart(factors, [new[d] for d in after]), strict=True):
            # A dimension of one element here may be the one that the axis divides.
            doubt = leading and (ambiguous or (new[after[0]] == 1 and len(after) > 1))
            doubt = (doubt and bool(axes_of_dim(dim) or new[d] == 1)) or (loose and new[d] == 1)
            if len(dim) > 1 and axes_of_dim(dim) and per_shard_reason(eqn, walk.callers):  # the order is not meant
                doubt = True
            dims[d] = hidden(new[d]) if doubt or not ones.isdisjoint(axes_of_dim(dim) if loose else ()) else dim
        ambiguous = False
        ending = after if len(factors) > 1 and factors[-1][0] == 1 and is_divided(factors[-1][1]) else ()
    return walk.counted(eqn, operands, [_made(walk, eqn, operand, dims)])


def _apart(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Dim]:
    """A list of factors as the dimensions of a reshape."""
    factors = normal(factors)
    if math.prod(s for s, _ in factors) == 1 and len(sizes) == 1:
        return [normal(factors)]
    cut = refined(factors, ends_of(sizes))
    if cut is None:
        return [hidden(n) for n in sizes]
    out: list[Dim] = []
    rest = list(cut)
    for i, n in enumerate(sizes):
        taken: list[Factor] = []
        size = 1
        while rest and (size < n or (rest[0][0] == 1 and not taken)) and size * rest[0][0] <= n:
            taken.append(rest.pop(0))
            size *= taken[-1][0]
        if i == len(sizes) - 1:
            taken += rest
        out.append(normal(taken) if size == n else hidden(n))
    return out


# --- slices ---------------------------------------------------------------------------------------------------


def _piece_of(dim: Dim, size: int) -> Dim:
    """Some elements of a dimension."""
    if dim[0][1] is FREE and len(dim) == 1:
        return free(size)
    return remade(dim, size)


def _dynamic_slice(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """A block of this device, where the start says so; otherwise some elements."""
    operand, starts = operands[0], operands[1:]
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    dims: list[Dim] = []
    pieces: list[tuple[str, str]] = []
    own: set[int] = set()
    terms: set[str] = set()
    for d, (dim, n, m) in enumerate(zip(operand.dims, before, after, strict=True)):
        start = starts[d] if d < len(starts) else State()
        if n == m or all(axes is FREE for _, axes in dim):  # of what is constant every block is the same
            own.add(d)
            dims.append(dim if n == m else free(m))
            continue
        block = _own_block(walk, operand, d, start.table, m)
        if block is not None:
            own.add(d)
            dims.append(block[0])
            terms |= operand.partial.intersection(block[1])
            continue
        dims.append(hidden(m) if start.axes else _piece_of(dim, m))
        pieces += [("slice", a) for a in axes_of_dim(dim)]
    others = [start for d, start in enumerate(starts) if d not in own]
    # The other terms of this device's block are elsewhere.
    pieces += [("term", axis) for axis in terms if not operand.zero]
    rest = operand._replace(partial=operand.partial - terms)
    return walk.counted(eqn, operands, [_made(walk, eqn, rest, dims, pieces, others)])


def _own_block(walk: Engine, operand: State, d: int, starts: Any, length: int = 1) -> tuple[Dim, Axes] | None:
    """Return how this device's block of a dimension lies, and the axes that number the blocks; None where other rows
    are taken from the starts on."""
    (_, outer), *more = operand.dims[d]
    if starts is None or (axes := tables.rows_of(starts, size_of(operand.dims[d]), walk.sizes, length)) is None:
        return None
    if more or outer is HIDDEN or outer is FREE:
        return None
    size = math.prod(starts.shape) * length
    return normal([(size, (*outer, *axes))]) if operand.axes.isdisjoint(axes) else hidden(size), axes


def _tile(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Copies one after another."""
    [operand] = operands
    reps = eqn.params["reps"]
    dims = [normal([(n, FREE), *dim]) if n > 1 else dim for n, dim in zip(reps, operand.dims, strict=True)]
    return walk.counted(eqn, operands, [_made(walk, eqn, operand, dims)])


# --- indices ----------------------------------------------------------------------------------------------------


def _own_rows(walk: Engine, operand: State, indices: State, numbers: Any) -> list[Dim] | None:
    """The dimensions of the indices, if they pick from one dimension all elements in order, or this device's block."""
    if len(numbers.start_index_map) != 1 or indices.table is None:
        return None
    block = _own_block(walk, operand, numbers.start_index_map[0], indices.table)
    long = [i for i, n in enumerate(indices.table.shape[:-1]) if block and n == size_of(block[0])]
    if block is None or not long or block[0][0][1] is HIDDEN:
        return None
    return [block[0] if i == long[0] else free(n) for i, n in enumerate(indices.table.shape[:-1])]


def _own_window(walk: Engine, eqn: Equation, operand: State, indices: State) -> dict[int, tuple[Dim, Axes]]:
    """The dimensions of which the picked window is this device's block: how they lie, and the axes."""
    if indices.table is None or math.prod(indices.table.shape[:-1]) != 1:
        return {}
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    starts = ((d, tables.column_of(indices.table, k)) for k, d in enumerate(numbers.start_index_map))
    found = {d: _own_block(walk, operand, d, start, sizes[d]) for d, start in starts}
    return {d: block for d, block in found.items() if block is not None}


def _gather(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """`x[indices]`: whole dimensions pass, and each index picks an element."""
    operand, indices = operands
    numbers, taken = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    before, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    window = [d for d in range(len(before)) if d not in numbers.collapsed_slice_dims and d not in batching]
    own = _own_rows(walk, operand, indices, numbers)
    blocks = _own_window(walk, eqn, operand, indices)
    rows = list(indices.dims[:-1] if own is None else own)
    for d, i in zip(batching, getattr(numbers, "start_indices_batching_dims", ()), strict=True):
        both = unify(rows[i], operand.dims[d], indices.different, operand.different)
        rows[i] = both or hidden(size_of(rows[i]))
    rest = iter(rows)
    dims: list[Dim] = []
    for d, n in enumerate(out):
        if d in numbers.offset_dims:
            source = window[numbers.offset_dims.index(d)]
            dim = operand.dims[source]
            # Windows that begin elsewhere on each device, as in a ring, are not the same piece of the whole.
            piece = hidden(n) if indices.axes and source in numbers.start_index_map else _piece_of(dim, n)
            dims.append(dim if taken[source] == before[source] else blocks.get(source, (piece,))[0])
        else:
            dims.append(next(rest, hidden(n)))
    known = blocks.keys() & set(window)
    picked = [d for d in numbers.start_index_map if taken[d] != before[d] and own is None and d not in known]
    pieces = [("index", a) for d in picked for a in axes_of_dim(operand.dims[d])]
    # The other terms of this device's block are elsewhere.
    own_axes = {axis for _, axes in blocks.values() for axis in axes}
    terms = operand.partial & own_axes
    pieces += [("term", axis) for axis in terms if not operand.zero]
    operand = operand._replace(partial=operand.partial - terms)
    # An index into a whole dimension lies as the indices do. One into a piece is right if it was moved by axis_index.
    lies = {a for dim in dims for a in axes_of_dim(dim)}
    others = [_beside(indices, lies | own_axes)]
    linear = fetches(walk, eqn, [operand, others[0]])
    return walk.counted(eqn, operands, [_made(walk, eqn, operand, dims, pieces, others, linear)])


def _covering(operand: State, indices: State, updates: State, numbers: Any) -> dict[int, Dim]:
    """For each dimension of the operand of a scatter that indices do not pick from, the one of the updates. Rows with
    indices of their own lie as these do, too."""
    batching = tuple(getattr(numbers, "operand_batching_dims", ()))
    window = [d for d in range(len(operand.dims)) if d not in numbers.inserted_window_dims and d not in batching]
    found = {d: updates.dims[i] for d, i in zip(window, numbers.update_window_dims, strict=True)}
    rest = [dim for i, dim in enumerate(updates.dims) if i not in numbers.update_window_dims]
    for d, i in zip(batching, getattr(numbers, "scatter_indices_batching_dims", ()), strict=True):
        both = unify(rest[i], indices.dims[i], updates.different, indices.different)
        found[d] = both or hidden(size_of(rest[i]))
    return found


def _combined(walk: Engine, eqn: Equation, operand: State, updates: State) -> Linear:
    """Return how a scatter brings updates together with what is there."""
    name = eqn.primitive.name
    if name.endswith(("min", "max")):
        return curved(walk, eqn, [operand, updates])
    if not name.endswith("mul"):
        return sums(walk, eqn, [operand, updates])
    if updates.zero:  # elements that are not picked stay as they are
        return operand.partial, NONE, operand.zero
    partial, lost, zero = product(walk, eqn, [operand, updates])
    mixed = partial - operand.partial
    return partial - mixed, lost | mixed, zero


def _scatter(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """`x.at[indices].set(updates)`, or add. How a dimension lies that indices pick from is not known."""
    operand, indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    covering = _covering(operand, indices, updates, numbers)
    full = {d for d, dim in covering.items() if size_of(dim) == size_of(operand.dims[d])}  # of which 0 is the one index
    placed = set(numbers.scatter_dims_to_operand_dims) - full | set(numbers.inserted_window_dims)
    dims: list[Dim] = []
    for d, dim in enumerate(operand.dims):
        update = None if d in placed else covering.get(d)
        if update is not None and size_of(update) == size_of(dim):
            update = unify(dim, update, operand.different, updates.different)
        dims.append(update if update is not None and size_of(update) == size_of(dim) else hidden(size_of(dim)))
    pieces = [("index", a) for d in placed for a in axes_of_dim(operand.dims[d])]
    held = {a for dim in dims for a in axes_of_dim(dim)}
    linear = _combined(walk, eqn, operand, updates)
    others = [_beside(o, held | linear[0]) for o in (indices, updates)]
    return walk.counted(eqn, operands, [_made(walk, eqn, operand, dims, pieces, others, linear)])


def _iota(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Each device counts from 0, so all have the same numbers."""
    dimension = eqn.params["dimension"]
    dims = tuple(plain(n) if d == dimension else free(n) for d, n in enumerate(shape_of(eqn.outvars[0])))
    return walk.counted(eqn, operands, [walk.kept(State(dims))])


# --- random numbers -----------------------------------------------------------------------------------------------


def _random(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Random numbers of one key are the same on every device that has the key."""
    axes = NONE.union(*(o.axes for o in operands))
    outs = []
    for var in eqn.outvars:
        shape = shape_of(var)
        batch = operands[0].dims if operands and len(operands[0].dims) <= len(shape) else ()
        known = batch if all(size_of(d) == n for d, n in zip(batch, shape, strict=False)) else ()
        rest = tuple(hidden(n) if axes else plain(n) for n in shape[len(known) :])
        held = {a for dim in known for a in axes_of_dim(dim)}
        outs.append(walk.kept(State((*known, *rest), different=axes - held)))
    return outs


def _keyless(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """Random numbers without a key: each device draws its own, and others in each run."""
    return [
        walk.kept(State(tuple(map(hidden, shape_of(eqn.outvars[0]))), different=frozenset(walk.tracked(walk.sizes))))
    ]


def _tied(walk: Engine, eqn: Equation, operands: Sequence[State]) -> list[State]:
    """The last operand, which waits for the others."""
    return [operands[-1]]


RULES = {
    "tie": _tied,
    "rng_uniform": _keyless,
    "reshape": _reshape,
    "dynamic_slice": _dynamic_slice,
    "tile": _tile,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-sub", "scatter_sub"), _scatter),
    **dict.fromkeys(("scatter-mul", "scatter_mul", "scatter-min", "scatter_min"), _scatter),
    **dict.fromkeys(("scatter-max", "scatter_max"), _scatter),
    "iota": _iota,
    **dict.fromkeys(("random_bits", "random_split", "random_seed", "random_wrap", "random_unwrap"), _random),
    **dict.fromkeys(("random_fold_in", "threefry2x32", "random_clone", "random_gamma", "rng_bit_generator"), _random),
}
