"""What primitives without communication compute, on every device at once, in double precision.

An array has the mesh axes in front: a dimension for each, of size 1 where the value is equal along the axis. NumPy
broadcasts them. The primitives that programs are full of are entered here, because NumPy compiles nothing. Every other
primitive is asked of JAX, mapped over the devices.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.primitives import PRIMITIVES
from spmd._jaxprs.walker import Equation, shape_of
from spmd._trees.leaves import is_key_type

Array = np.ndarray


class NotSimulated(Exception):
    """The program has something that cannot be interpreted; the message says what."""


class Outside(NotSimulated):
    """An index leaves its array."""


stay_inside = contextvars.ContextVar("stay_inside", default=False)  # whether an index that leaves its array is an error
leaving: contextvars.ContextVar[set[str]] = contextvars.ContextVar("leaving")  # gets at which end one does


def _check_inside(index: Array, room: int) -> Array:
    """Return where windows that start here lie within an array."""
    ends = {"below": index < 0, "above": index > room}
    if beyond := {end for end, there in ends.items() if there.any()}:
        leaving.get(set()).update(beyond)
        if stay_inside.get():
            raise Outside("an index leaves its array")
    return ~(ends["below"] | ends["above"])


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which a number is held: floating-point and complex numbers are double, and keys are their words."""
    if is_key_type(dtype):
        return np.dtype(np.uint32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype)


def numbers_of(x: Array) -> Array:
    """The numbers whose bits are carried, or the array itself."""
    return x[x.dtype.names[0]] if x.dtype.names else x


def alike(arrays: Sequence[Array]) -> list[Array]:
    """The same arrays. Where some carry bits, all do."""
    name = next((x.dtype.names[0] for x in arrays if x.dtype.names), None)
    return [x if name is None or x.dtype.names else _carried(x.view(jnp.dtype(name)), name) for x in arrays]


def _carried(x: Array, name: str) -> Array:
    """Bits that are moved, and nothing else, are carried as the numbers that they are of: a record, whose one field is
    named for their type. So they are not rounded."""
    out = np.empty(x.shape, [(name, np.float64)])
    out[name] = x
    return out


# What only moves elements.
MOVES = frozenset((
    "bitcast_convert_type", "transpose", "squeeze", "broadcast_in_dim", "reshape", "slice", "dynamic_slice", "rev",
    "select_n", "dynamic_update_slice", "concatenate", "split", "stack", "unstack", "pad",
))  # fmt: skip


# What says something of its operands, and changes nothing.
SAME = frozenset(("reduce_precision", *(name for name, one in PRIMITIVES.items() if one.dims == "same")))


def draws(eqn: Equation) -> bool:
    """Return whether an equation makes numbers of keys."""
    keys = [any(is_key_type(getattr(v.aval, "dtype", None)) for v in atoms) for atoms in (eqn.invars, eqn.outvars)]
    return keys == [True, False] and eqn.primitive.name != "random_unwrap"


def compute(eqn: Equation, lead: int, operands: Sequence[Array], generators: dict[Any, Any]) -> list[Array]:
    """The results of an equation.

    Args:
      eqn: The equation.
      lead: How many mesh axes the arrays have in front.
      operands: Its operands.
      generators: For each type of keys that was met, what makes numbers of them.
    """
    keys = any(is_key_type(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars))
    known = None if keys else NUMPY.get(eqn.primitive.name)
    if known is None:
        return _asked(eqn, lead, operands, generators)
    try:
        outs = known(eqn, lead, *operands)
    except TypeError:  # NumPy has no such function of these numbers: an arctan2 of complex ones
        return _asked(eqn, lead, operands, generators)
    outs = outs if isinstance(outs, list) else [outs]
    held = zip(outs, eqn.outvars, strict=True)
    return [out if out.dtype.names else np.asarray(out, wide_dtype(v.aval.dtype)) for out, v in held]


# --- by JAX -----------------------------------------------------------------------------------------------------


def _asked(eqn: Equation, lead: int, operands: Sequence[Array], generators: dict[Any, Any]) -> list[Array]:
    """The results by JAX's own arithmetic, in a batch of all devices that differ."""
    front = np.broadcast_shapes(*(x.shape[:lead] for x in operands)) if operands else (1,) * lead
    count = math.prod(front)
    given, mapped = [], []
    for x, atom in zip(operands, eqn.invars, strict=True):
        own = math.prod(x.shape[:lead]) > 1
        rows = np.broadcast_to(x, front + x.shape[lead:]) if own else x
        given.append(_shown(rows.reshape((count,) * own + x.shape[lead:]), atom.aval.dtype, generators))
        mapped.append(0 if own else None)
    params = {name: _widened(value) if "type" in name else value for name, value in eqn.params.items()}
    how = eqn.primitive, tuple(params.items()), tuple(mapped)
    try:
        run = _compiled(*how)
    except TypeError:  # a parameter has no hash
        run = _compiled.__wrapped__(*how)
    try:
        found = run(*given)
    except Exception as error:  # whatever JAX says of what it cannot compute at once
        found = _one_by_one(eqn, params, given, mapped, count, error)
    outs = found if eqn.primitive.multiple_results else [found]
    if not all(isinstance(out, jax.Array | np.ndarray) for out in outs):  # a `jax.Ref`
        raise NotSimulated(f"{eqn.primitive.name} gives what is not an array")
    shared = front if 0 in mapped else (1,) * lead
    return [_held(out, v.aval, shared) for out, v in zip(outs, eqn.outvars, strict=True)]


def _one_by_one(
    eqn: Equation, params: Any, given: Sequence[Any], mapped: Sequence[int | None], count: int, error: Exception
) -> Any:
    """The results on one device after another, of a primitive that JAX does not map."""
    try:
        if 0 not in mapped:
            raise error
        rows = ([x if own is None else x[i] for x, own in zip(given, mapped, strict=True)] for i in range(count))
        found = [eqn.primitive.bind(*row, **params) for row in rows]
    except Exception as alone:
        raise NotSimulated(f"{eqn.primitive.name}: {type(alone).__name__}") from alone
    return jax.tree.map(lambda *outs: np.stack(outs), *found)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive: Any, params: Sequence[tuple[str, Any]], mapped: Sequence[int | None]) -> Any:
    """A primitive of JAX's, compiled once for operands of equal shapes."""
    run = lambda *args: primitive.bind(*args, **dict(params))
    return jax.jit(jax.vmap(run, mapped) if 0 in mapped else run)


def _shown(x: Array, dtype: Any, generators: dict[Any, Any]) -> Any:
    """An operand as JAX takes it."""
    if not is_key_type(dtype):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=generator(dtype, generators))


def generator(dtype: Any, generators: dict[Any, Any]) -> Any:
    """Return what makes numbers of keys of a type: the functions that JAX keeps in an equation which makes them."""
    if dtype not in generators:
        make = lambda words, name: jax.random.wrap_key_data(words, impl=name)
        for name, size in (("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)):
            [eqn] = jax.make_jaxpr(functools.partial(make, name=name))(jax.ShapeDtypeStruct((size,), np.uint32)).eqns
            generators[eqn.outvars[0].aval.dtype] = eqn.params["impl"]
    return generators[dtype]


def _held(x: Any, aval: Any, front: tuple[int, ...]) -> Array:
    if is_key_type(aval.dtype):
        words = np.asarray(jax.random.key_data(x))
        return words.reshape((*front, *aval.shape, words.shape[-1]))
    return np.asarray(x, wide_dtype(aval.dtype)).reshape((*front, *aval.shape))


def _widened(value: Any) -> Any:
    try:
        return wide_dtype(value) if value is not None else None
    except TypeError:  # it is no dtype
        return value


# --- single elements ---------------------------------------------------------------------------------------------


def _each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of single elements. Numbers without dimensions fit any array."""

    def run(eqn: Equation, lead: int, *operands: Array) -> Any:
        rank = len(shape_of(eqn.outvars[0]))
        return fn(*(x.reshape(x.shape[:lead] + (1,) * rank) if x.ndim == lead < lead + rank else x for x in operands))

    return run


def _quotient(x: Array, y: Array) -> Array:
    if x.dtype.kind in "iu":  # towards zero
        safe = np.where(y == 0, 1, y)
        found = (np.abs(x) // np.abs(safe)) * np.sign(x) * np.sign(safe)
        return np.where(y == 0, np.array(-1).astype(x.dtype), found).astype(x.dtype)
    return x / y


def _remainder(x: Array, y: Array) -> Array:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y))) if x.dtype.kind in "iu" else np.fmod(x, y)


def _converted(eqn: Equation, lead: int, x: Array) -> Array:
    new = eqn.params["new_dtype"]
    if np.iscomplexobj(x) and not jnp.issubdtype(new, jnp.complexfloating):
        x = x.real
    return x.astype(np.bool_) if new == np.bool_ else x.astype(wide_dtype(new))


def _bits(eqn: Equation, lead: int, x: Array) -> Array:
    """The same bits as another type: those of the program's own type, and not of the one that is held."""
    old, new = np.dtype(eqn.invars[0].aval.dtype), np.dtype(eqn.params["new_dtype"])
    if x.dtype.names and x.dtype.names[0] == new.name:
        return numbers_of(x)
    if jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.integer) and old.itemsize == new.itemsize:
        return _carried(x, old.name)
    return np.asarray(jax.lax.bitcast_convert_type(bits_of(x, eqn.invars[0].aval).astype(old), new))


def bits_of(x: Array, aval: Any) -> Array:
    """The bits that an array carries, in the type of its variable; an array that carries none."""
    return numbers_of(x).astype(jnp.dtype(x.dtype.names[0])).view(aval.dtype) if x.dtype.names else x


def _chosen(eqn: Equation, lead: int, which: Array, *cases: Array) -> Array:
    rank = len(shape_of(eqn.outvars[0]))
    which = which.reshape(which.shape[:lead] + (1,) * rank) if which.ndim == lead else which
    out = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        out = np.where(which == i, case, out)
    return out


def _logical_right(x: Array, y: Array) -> Array:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.where(y.astype(unsigned) < 8 * x.dtype.itemsize, x.astype(unsigned) >> y.astype(unsigned), 0)


def _left(x: Array, y: Array) -> Array:
    return np.where(y < 8 * x.dtype.itemsize, np.left_shift(x, y), 0)


def _logistic(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x)) if x.dtype.kind == "f" else 1 / (1 + np.exp(-x))


def _sign(x: Array) -> Array:
    return np.where(x == 0, 0, x / np.where(x == 0, 1, np.abs(x))) if x.dtype.kind == "c" else np.sign(x)


_by_element = lambda fn: np.vectorize(fn, otypes=[np.float64])

# --- dimensions --------------------------------------------------------------------------------------------------


def _reduced(fn: np.ufunc) -> Callable[..., Any]:
    def run(eqn: Equation, lead: int, x: Array) -> Array:
        axes = tuple(d + lead for d in eqn.params["axes"])
        if x.size or fn.identity is not None:
            return fn.reduce(x, axis=axes)
        bounds = (-np.inf, np.inf) if x.dtype.kind == "f" else (False, True)
        least, largest = (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max) if x.dtype.kind in "iu" else bounds
        return fn.reduce(x, axis=axes, initial=least if fn is np.maximum else largest)

    return run


def _largest(pick: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, lead, x: pick(x, axis=eqn.params["axes"][0] + lead)


def _accumulated(fn: Any) -> Callable[..., Any]:
    def run(eqn: Equation, lead: int, x: Array) -> Array:
        axis, turned = eqn.params["axis"] + lead, eqn.params["reverse"]
        out = fn.accumulate(np.flip(x, axis) if turned else x, axis=axis)
        return np.flip(out, axis) if turned else out

    return run


def _broadcast(eqn: Equation, lead: int, x: Array, *_: Array) -> Array:
    shape, places = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for place, n in zip(places, x.shape[lead:], strict=True):
        inner[place] = n
    return np.broadcast_to(x.reshape((*x.shape[:lead], *inner)), (*x.shape[:lead], *shape))


def _reshaped(eqn: Equation, lead: int, x: Array, *_: Array) -> Array:
    order = eqn.params["dimensions"]  # in which the dimensions are read
    x = x if order is None else x.transpose((*range(lead), *(lead + d for d in order)))
    return x.reshape(x.shape[:lead] + shape_of(eqn.outvars[0]))


def _joined(eqn: Equation, lead: int, *parts: Array) -> Array:
    front = np.broadcast_shapes(*(x.shape[:lead] for x in parts))
    return np.concatenate([np.broadcast_to(x, front + x.shape[lead:]) for x in parts], eqn.params["dimension"] + lead)


def _stacked(eqn: Equation, lead: int, *parts: Array) -> Array:
    front = np.broadcast_shapes(*(x.shape[:lead] for x in parts))
    return np.stack([np.broadcast_to(x, front + x.shape[lead:]) for x in parts], eqn.params["axis"] + lead)


def _parted(eqn: Equation, lead: int, x: Array) -> list[Array]:
    ends = np.cumsum(eqn.params["sizes"])[:-1]
    return list(np.split(x, ends, eqn.params["axis"] + lead))


def _sliced(eqn: Equation, lead: int, x: Array) -> Array:
    p = eqn.params
    steps = p["strides"] or (1,) * len(p["start_indices"])
    cuts = [slice(*one) for one in zip(p["start_indices"], p["limit_indices"], steps, strict=True)]
    return x[(slice(None),) * lead + tuple(cuts)]


def _padded(eqn: Equation, lead: int, x: Array, value: Array) -> Array:
    return padded(lead, x, value, eqn.params["padding_config"])


def padded(lead: int, x: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """An array with a number around it and between its elements, as `jax.lax.pad` says it."""
    front = np.broadcast_shapes(x.shape[:lead], value.shape[:lead])
    filled = value.reshape(value.shape[:lead] + (1,) * len(config))
    grown = [max(low, 0) + max(high, 0) + n + max(n - 1, 0) * inner
             for n, (low, high, inner) in zip(x.shape[lead:], config, strict=True)]  # fmt: skip
    out = np.broadcast_to(filled, (*front, *grown)).copy()
    places = [slice(max(low, 0), max(low, 0) + n + max(n - 1, 0) * inner, inner + 1)
              for n, (low, _, inner) in zip(x.shape[lead:], config, strict=True)]  # fmt: skip
    out[(..., *places)] = x
    cuts = [slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(grown, config, strict=True)]
    return out[(..., *cuts)]


def _starts(lead: int, indices: Sequence[Array], room: Sequence[int]) -> tuple[tuple[int, ...], list[Array]]:
    """The devices that have their own, and where a window starts on each: within the array, as JAX moves it."""
    front = np.broadcast_shapes(*(i.shape[:lead] for i in indices)) if indices else (1,) * lead
    for i, n in zip(indices, room, strict=True):
        _check_inside(i, n)
    return front, [np.broadcast_to(np.clip(i, 0, n), front) for i, n in zip(indices, room, strict=True)]


def _window(eqn: Equation, lead: int, x: Array, *indices: Array) -> Array:
    sizes = eqn.params["slice_sizes"]
    front, starts = _starts(lead, indices, [n - m for n, m in zip(x.shape[lead:], sizes, strict=True)])
    front = np.broadcast_shapes(front, x.shape[:lead])
    out = np.empty((*front, *sizes), x.dtype)
    whole = np.broadcast_to(x, front + x.shape[lead:])
    starts = [np.broadcast_to(s, front) for s in starts]
    for place in np.ndindex(front):
        cuts = (slice(int(s[place]), int(s[place]) + m) for s, m in zip(starts, sizes, strict=True))
        out[place] = whole[(*place, *cuts)]
    return out


def _written(eqn: Equation, lead: int, x: Array, update: Array, *indices: Array) -> Array:
    front, starts = _starts(lead, indices, [n - m for n, m in zip(x.shape[lead:], update.shape[lead:], strict=True)])
    front = np.broadcast_shapes(front, x.shape[:lead], update.shape[:lead])
    out = np.broadcast_to(x, front + x.shape[lead:]).copy()
    new, starts = np.broadcast_to(update, front + update.shape[lead:]), [np.broadcast_to(s, front) for s in starts]
    for place in np.ndindex(front):
        cuts = (slice(int(s[place]), int(s[place]) + m) for s, m in zip(starts, update.shape[lead:], strict=True))
        out[(*place, *cuts)] = new[place]
    return out


def _counted(eqn: Equation, lead: int, *_: Array) -> Array:
    shape, dim = shape_of(eqn.outvars[0]), eqn.params["dimension"]
    numbers = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return np.broadcast_to(numbers, (1,) * lead + shape)


def _dot(eqn: Equation, lead: int, x: Array, y: Array) -> Array:
    return _product(x, y, lead, eqn.params["dimension_numbers"], wide_dtype(eqn.outvars[0].aval.dtype))


def _product(x: Array, y: Array, lead: int, numbers: Any, dtype: Any) -> Array:
    """A `dot_general`: batch dimensions, then those of the left, then those of the right."""
    (left, right), (left_batch, right_batch) = numbers

    def arranged(z: Array, batch: Sequence[int], summed: Sequence[int], behind: bool) -> tuple[Array, tuple[int, ...]]:
        free = [d for d in range(z.ndim - lead) if d not in (*batch, *summed)]
        order = (*batch, *summed, *free) if behind else (*batch, *free, *summed)
        size = lambda dims: math.prod(z.shape[lead + d] for d in dims)
        sides = (size(summed), size(free)) if behind else (size(free), size(summed))
        front = z.shape[:lead] + tuple(z.shape[lead + d] for d in batch)
        moved = z.transpose((*range(lead), *(lead + d for d in order)))
        return moved.reshape(front + sides).astype(dtype, copy=False), tuple(z.shape[lead + d] for d in free)

    one, kept = arranged(x, left_batch, left, False)
    other, more = arranged(y, right_batch, right, True)
    out = one @ other
    return out.reshape((*out.shape[:-2], *kept, *more))


# --- indices -----------------------------------------------------------------------------------------------------


def _places(
    lead: int, shape: Sequence[int], indices: Array, window: Sequence[int], starts: Sequence[int],
    batches: Sequence[tuple[int, int]], mode: Any,
) -> tuple[list[Array], Array]:  # fmt: skip
    """For each dimension of an array the place of every element of every window, and whether a window lies inside.

    The arrays have the mesh axes in front, then the dimensions of `indices` but for the last, then those of a window.

    Args:
      lead: How many mesh axes are in front.
      shape: The array's own shape.
      indices: Where windows start, in the last dimension.
      window: The size of a window in each dimension of the array.
      starts: The dimension that each of these numbers is for.
      batches: The pairs of dimensions, of the array and of the indices, that go together.
      mode: What becomes of a window that reaches beyond the array.
    """
    many = indices.shape[lead:-1]
    beside = lambda x: x.reshape((*x.shape, *(1,) * len(shape)))
    inside = np.ones((1,) * (indices.ndim - 1 + len(shape)), bool)
    found = []
    for d, (n, m) in enumerate(zip(shape, window, strict=True)):
        begin = np.zeros((1,) * (indices.ndim - 1), np.int64)
        if d in starts:
            begin = indices[..., list(starts).index(d)].astype(np.int64)
            fits = _check_inside(begin, n - m)
            if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
                inside = inside & beside(fits)
            begin = np.clip(begin, 0, n - m)
        for own, other in batches:
            if own == d:
                begin = np.arange(n).reshape([-1 if i == lead + other else 1 for i in range(lead + len(many))])
        offset = np.arange(m).reshape([-1 if i == d else 1 for i in range(len(shape))])
        found.append(beside(begin) + offset)
    return found, inside


def _devices(front: Sequence[int], rank: int) -> list[Array]:
    """The number of each device along each mesh axis, for an array of `rank` dimensions that has them in front."""
    return [np.arange(n).reshape([-1 if i == d else 1 for i in range(rank)]) for d, n in enumerate(front)]


def _fill(mode: Any, value: Any, dtype: Any) -> Any:
    if value is not None:
        return value
    if dtype.kind in "fc":
        return np.nan
    return np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min if dtype.kind == "i" else True


def _looked_up(eqn: Equation, lead: int, x: Array, indices: Array) -> Array:
    numbers, sizes, mode = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "mode"))
    front = np.broadcast_shapes(x.shape[:lead], indices.shape[:lead])
    batches = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    own = x.shape[lead:]
    places, inside = _places(lead, own, indices, sizes, numbers.start_index_map, batches, mode)
    rank = indices.ndim - 1 + len(own)
    x = np.broadcast_to(x, front + own)
    out = x[(*_devices(front, rank), *places)]
    out = out if inside.all() else np.where(inside, out, _fill(mode, eqn.params["fill_value"], x.dtype))
    many = indices.ndim - 1 - lead
    gone = [lead + many + d for d in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    out = out.reshape([n for i, n in enumerate(out.shape) if i not in gone])
    kept = out.ndim - lead - many  # the dimensions of a window, which stand among the others
    order = iter(range(many))
    offsets = iter(range(many, many + kept))
    final = [next(offsets) if d in numbers.offset_dims else next(order) for d in range(many + kept)]
    return out.transpose((*range(lead), *(lead + d for d in final)))


def _put(fn: Any) -> Callable[..., Any]:
    def run(eqn: Equation, lead: int, x: Array, indices: Array, updates: Array) -> Array:
        numbers, own = eqn.params["dimension_numbers"], x.shape[lead:]
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        dims = iter(numbers.update_window_dims)
        window = [1 if d in gone else updates.shape[lead + next(dims)] for d in range(len(own))]
        batches = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        mode = eqn.params["mode"]
        places, inside = _places(lead, own, indices, window, numbers.scatter_dims_to_operand_dims, batches, mode)
        front = np.broadcast_shapes(x.shape[:lead], indices.shape[:lead], updates.shape[:lead])
        many = [d for d in range(updates.ndim - lead) if d not in numbers.update_window_dims]
        moved = updates.transpose((*range(lead), *(lead + d for d in (*many, *numbers.update_window_dims))))
        moved = moved.reshape((*updates.shape[:lead], *(updates.shape[lead + d] for d in many), *window))
        rank = moved.ndim
        shape = np.broadcast_shapes(
            moved.shape, inside.shape, *(p.shape for p in places), (*front, *(1,) * (rank - lead))
        )
        every = [np.broadcast_to(p, shape) for p in (*_devices(front, rank), *places)]
        keep = np.broadcast_to(inside, shape)
        out, new = np.broadcast_to(x, front + own).copy(), np.broadcast_to(moved, shape)
        at = tuple(p[keep] for p in every)
        if fn is None:
            out[at] = new[keep]
        else:
            fn.at(out, at, new[keep].astype(out.dtype))
        return out

    return run


def _threefry(one: Array, two: Array, x: Array, y: Array) -> list[Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    keys = (one, two, one ^ two ^ np.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn)))
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return [x, y]


def _sorted(eqn: Equation, lead: int, *operands: Array) -> list[Array]:
    axis, count = eqn.params["dimension"] + lead, eqn.params["num_keys"]
    front = np.broadcast_shapes(*(x.shape for x in operands))
    whole = [np.broadcast_to(x, front) for x in operands]
    keys = [part for x in whole[:count] for part in ((x.real, x.imag) if x.dtype.kind == "c" else (x,))]
    order = np.lexsort(keys[::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in whole]


NUMPY: dict[str, Callable[..., Any]] = {
    **{
        name: _each(fn)
        for name, fn in {
            "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient,
            "rem": _remainder, "neg": np.negative, "sign": _sign, "abs": np.abs, "exp": np.exp, "exp2": np.exp2,
            "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt,
            "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "square": np.square, "pow": np.power, "sin": np.sin,
            "cos": np.cos, "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
            "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh,
            "acosh": np.arccosh, "atanh": np.arctanh, "logistic": _logistic, "erf": _by_element(math.erf),
            "erfc": _by_element(math.erfc), "max": np.maximum, "min": np.minimum,
            "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "floor": np.floor, "ceil": np.ceil,
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "eq_to": np.equal, "lt_to": np.less, "le_to": np.less_equal,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "real": np.real,
            "imag": np.imag, "conj": np.conj, "complex": lambda x, y: x + 1j * y, "is_finite": np.isfinite,
            "shift_left": _left, "shift_right_logical": _logical_right,
        }.items()
    },
    "integer_pow": lambda eqn, lead, x: x ** n if (n := eqn.params["y"]) >= 0 else 1 / x**-n,
    "select_n": _chosen,
    "convert_element_type": _converted,
    "bitcast_convert_type": _bits,
    **{
        f"reduce_{name}": _reduced(fn)
        for name, fn in {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
                         "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items()
    },
    "argmax": _largest(np.argmax),
    "argmin": _largest(np.argmin),
    **{
        name: _accumulated(fn)
        for name, fn in {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum,
                         "cumlogsumexp": np.logaddexp}.items()
    },
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": lambda eqn, lead, x: x.reshape(x.shape[:lead] + shape_of(eqn.outvars[0])),
    "transpose": lambda eqn, lead, x: x.transpose((*range(lead), *(lead + d for d in eqn.params["permutation"]))),
    "rev": lambda eqn, lead, x: np.flip(x, tuple(lead + d for d in eqn.params["dimensions"])),
    "concatenate": _joined,
    "split": _parted,
    "slice": _sliced,
    "pad": _padded,
    "dynamic_slice": _window,
    "dynamic_update_slice": _written,
    "iota": _counted,
    "dot_general": _dot,
    "threefry2x32": _each(_threefry),
    "stack": _stacked,
    "unstack": lambda eqn, lead, x: list(np.moveaxis(x, eqn.params["axis"] + lead, 0)),
    "sort": _sorted,
    "gather": _looked_up,
    "scatter": _put(None),
    **dict.fromkeys(("scatter-add", "scatter_add"), _put(np.add)),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), _put(np.subtract)),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), _put(np.multiply)),
    **dict.fromkeys(("scatter-min", "scatter_min"), _put(np.minimum)),
    **dict.fromkeys(("scatter-max", "scatter_max"), _put(np.maximum)),
}  # fmt: skip
