"""What each device holds: a jaxpr run in NumPy, equation by equation, on all devices of a mesh at once.

It knows nothing of the checker, nor of `spmd`. A value is an array for each device that has it, and a collective looks
at the arrays of its group. Nothing is compiled, so a program costs milliseconds.

Floats are float64 here. What is not continuous (a comparison, a sort, rounding) takes numbers that are closer than
`CLOSE` for equal, so that a sum in another order does not tip it over. A few primitives have stand-ins, functions that
depend on the same elements: linear algebra on all of the last two dimensions, random bits on the key. A layout does not
depend on more.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from scipy import special

CLOSE = 1e-7
Arrays = dict[int, np.ndarray]  # by device


class Hang(Exception):
    """Some devices wait for others, which never come."""


class Machine:
    """The devices of a mesh.

    Args:
      sizes: The sizes of the mesh axes.
      saw: Called with each equation, those around it, and the arrays of its results: `saw(eqn, callers, outs)`.
    """

    def __init__(self, sizes: Mapping[str, int], saw: Callable[..., None] = lambda *_: None) -> None:
        self.sizes, self.saw = dict(sizes), saw
        self.places = list(np.ndindex(*self.sizes.values()))
        self.callers: list[Any] = []

    def groups(self, axes: Sequence[str], live: Sequence[int]) -> Iterator[list[int]]:
        """The devices that enter a collective together, in the order of their blocks."""
        at = [list(self.sizes).index(a) for a in axes]
        found: dict[Any, list[int]] = {}
        for device in live:
            place = self.places[device]
            found.setdefault(tuple(n for i, n in enumerate(place) if i not in at), []).append(device)
        for group in found.values():
            if len(group) < math.prod(self.sizes[a] for a in axes):
                raise Hang
            yield sorted(group, key=lambda device: [self.places[device][i] for i in at])

    def run(self, jaxpr: Any, args: Sequence[Arrays], live: Sequence[int], consts: Sequence[Any] = ()) -> list[Arrays]:
        """The results of a jaxpr on the devices `live`."""
        body = getattr(jaxpr, "jaxpr", jaxpr)
        consts = consts or getattr(jaxpr, "consts", ())
        known = {v: dict.fromkeys(live, wide(c)) for v, c in zip(body.constvars, consts, strict=True)}
        known.update(zip(body.invars, args, strict=True))
        read = lambda atom: dict.fromkeys(live, wide(atom.val)) if hasattr(atom, "val") else known[atom]
        for eqn in body.eqns:
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars], live)
            known.update(zip(eqn.outvars, outs, strict=True))
            self.saw(eqn, self.callers, outs)
        return [read(atom) for atom in body.outvars]

    def inside(self, eqn: Any, jaxpr: Any, args: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
        self.callers.append(eqn)
        outs = self.run(jaxpr, [{d: arg[d] for d in live} for arg in args], live)
        self.callers.pop()
        return outs

    def equation(self, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> Sequence[Arrays]:
        name = eqn.primitive.name
        together = TOGETHER.get(name)
        if together is not None:
            return together(self, eqn, operands, live)
        alone = ALONE.get(name)
        if alone is None:
            return self.inside(eqn, callee(eqn), operands, live)
        each = {device: alone(eqn, *(o[device] for o in operands)) for device in live}
        if isinstance(each[live[0]], list):
            return [{d: outs[i] for d, outs in each.items()} for i in range(len(eqn.outvars))]
        return [each]


def wide(value: Any) -> np.ndarray:
    """A number of a jaxpr as it is held here."""
    if getattr(getattr(value, "dtype", None), "kind", "") == "" and hasattr(value, "aval"):
        return np.uint64(7) * np.ones(value.shape, np.uint64)  # a key
    found = np.asarray(value)
    if found.dtype == ml_dtypes.bfloat16 or found.dtype.kind == "f":
        return found.astype(np.float64)
    return found.astype(np.complex128) if found.dtype.kind == "c" else found


def callee(eqn: Any) -> Any:
    """The jaxpr that an equation calls: `jit`, remat, rules of one's own."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    raise NotImplementedError(f"{eqn.primitive.name} is not known to tests/checker/devices.py")


# --- control flow ---------------------------------------------------------------------------------------------


def scan(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    sliced = [len(o.aval.shape) != len(i.aval.shape) for o, i in zip(eqn.invars, body.invars, strict=True)]
    stacked = [len(o.aval.shape) != len(i.aval.shape) for o, i in zip(eqn.outvars, body.outvars, strict=True)]
    count, moving = len(stacked) - sum(stacked), len(sliced) - sum(sliced)
    fixed, carry, over = operands[: moving - count], list(operands[moving - count : moving]), operands[moving:]
    steps, found = range(eqn.params["length"]), []
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        now = [{d: x[i] for d, x in one.items()} for one in over]
        outs = machine.inside(eqn, eqn.params["jaxpr"], [*fixed, *carry, *now], live)
        carry = outs[:count]
        found.append(outs[count:])
    if eqn.params["reverse"]:
        found.reverse()
    rows = []
    for k, var in enumerate(eqn.outvars[count:]):
        empty = np.zeros(var.aval.shape, kind_of(var))
        rows.append({d: np.stack([one[k][d] for one in found]) if found else empty for d in live})
    return [*carry, *rows]


def loop(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, fixed, carry = operands[:n], operands[n : n + m], list(operands[n + m :])
    going = list(live)
    for _ in range(1000):
        [on] = machine.inside(eqn, eqn.params["cond_jaxpr"], [*test, *carry], going)
        going = [d for d in going if np.any(on[d])]
        if not going:
            return carry
        outs = machine.inside(eqn, eqn.params["body_jaxpr"], [*fixed, *carry], going)
        for old, new in zip(carry, outs, strict=True):
            for d in going:  # after vmap, each row goes on by itself
                on_rows = np.reshape(on[d], (*np.shape(on[d]), *[1] * (np.ndim(new[d]) - np.ndim(on[d]))))
                new[d] = np.where(on_rows, new[d], old[d])
        carry = [{**old, **new} for old, new in zip(carry, outs, strict=True)]
    raise Hang


def cond(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
    which, *rest = operands
    found: list[Arrays] = [{} for _ in eqn.outvars]
    for k, branch in enumerate(eqn.params["branches"]):
        here = [d for d in live if min(max(int(which[d]), 0), len(eqn.params["branches"]) - 1) == k]
        outs = machine.inside(eqn, branch, rest, here) if here else [{} for _ in found]
        for have, out in zip(found, outs, strict=True):
            have.update(out)
    return found


def linear_solve(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
    first, jaxprs, lengths = 0, eqn.params["jaxprs"], eqn.params["const_lengths"]
    for name, jaxpr, n in zip(jaxprs._fields, jaxprs, lengths, strict=True):
        if name == "solve":
            rest = operands[sum(lengths) :]
            return machine.inside(eqn, jaxpr, [*operands[first : first + n], *rest], live)
        first += n
    raise NotImplementedError


# --- collectives ----------------------------------------------------------------------------------------------


def axes_of(eqn: Any) -> tuple[str, ...]:
    found = eqn.params.get("axes", eqn.params.get("axis_name", eqn.params.get("axis", ())))
    return (found,) if isinstance(found, str) else tuple(found)


def collective(fn: Callable[..., list[np.ndarray]]) -> Callable[..., list[Arrays]]:
    """`fn` takes the blocks of a group in order, and gives as many."""

    def run(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
        axes = axes_of(eqn)
        outs: list[Arrays] = []
        for operand in operands[: len(eqn.outvars)]:
            out: Arrays = {}
            for group in machine.groups(axes, live):
                out.update(zip(group, fn(eqn, [operand[d] for d in group]), strict=True))
            outs.append(out)
        return outs

    return run


def everywhere(fn: Callable[..., np.ndarray]) -> Callable[..., list[Arrays]]:
    return collective(lambda eqn, blocks: [fn(eqn, blocks)] * len(blocks))


def gathered(eqn: Any, blocks: list[np.ndarray]) -> np.ndarray:
    dim = eqn.params.get("all_gather_dimension", eqn.params.get("dim", 0))
    return np.concatenate(blocks, dim) if eqn.params.get("tiled", True) else np.stack(blocks, dim)


def scattered(eqn: Any, blocks: list[np.ndarray]) -> list[np.ndarray]:
    if len(blocks) == 1 and "scatter_dimension" not in eqn.params:  # as `spmd` writes it for a device that is alone
        return blocks
    dim, n = eqn.params["scatter_dimension"], len(blocks)
    parts = np.split(sum(blocks), n, dim)
    return parts if eqn.params["tiled"] else [part.squeeze(dim) for part in parts]


def exchanged(eqn: Any, blocks: list[np.ndarray]) -> list[np.ndarray]:
    if len(blocks) == 1 and "split_axis" not in eqn.params:
        return blocks
    split, concat, n = eqn.params["split_axis"], eqn.params["concat_axis"], len(blocks)
    parts = [np.split(block, n, split) for block in blocks]
    if eqn.params["tiled"]:
        return [np.concatenate([part[i] for part in parts], concat) for i in range(n)]
    return [np.stack([part[i].squeeze(split) for part in parts], concat) for i in range(n)]


def permuted(eqn: Any, blocks: list[np.ndarray]) -> list[np.ndarray]:
    source = {j: i for i, j in eqn.params["perm"]}
    return [blocks[source[j]] if j in source else np.zeros_like(blocks[j]) for j in range(len(blocks))]


def index(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> list[Arrays]:
    out: Arrays = {}
    for group in machine.groups(axes_of(eqn), live):
        out.update((d, np.int32(i)) for i, d in enumerate(group))
    return [out]


def own_block(eqn: Any, x: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.split(x, eqn.params["parts"], eqn.params["dim"])[int(at)]


def same_each(machine: Machine, eqn: Any, operands: Sequence[Arrays], live: Sequence[int]) -> Sequence[Arrays]:
    return operands


total = everywhere(lambda eqn, blocks: np.sum(blocks, 0))
TOGETHER: dict[str, Callable[..., Sequence[Arrays]]] = {
    "scan": scan,
    "while": loop,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), total),
    "pmax": everywhere(lambda eqn, blocks: np.max(blocks, 0)),
    "pmin": everywhere(lambda eqn, blocks: np.min(blocks, 0)),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), everywhere(gathered)),
    **dict.fromkeys(("reduce_scatter", "psum_scatter", "unreduced_reduce_scatter"), collective(scattered)),
    "all_to_all": collective(exchanged),
    "ppermute": collective(permuted),
    "axis_index": index,
    "optimization_barrier": same_each,
}

# --- one device: elementwise ----------------------------------------------------------------------------------


def kind_of(var: Any) -> Any:
    """What a variable's elements are here."""
    dtype = var.aval.dtype
    if "key" in str(dtype):
        return np.uint64
    if np.dtype(dtype).kind == "c":
        return np.complex128
    return np.float64 if np.dtype(dtype).kind in "fV" else np.dtype(dtype)


def each(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, *xs: np.asarray(fn(*xs), kind_of(eqn.outvars[0]))


def converted(eqn: Any, x: np.ndarray) -> np.ndarray:
    to = kind_of(eqn.outvars[0])
    if x.dtype.kind == "f" and np.dtype(to).kind in "iu":
        x = np.trunc(x + CLOSE * np.sign(x))
        return x.astype(np.int64).astype(to)
    return (np.abs(x) > CLOSE if np.dtype(to).kind == "b" and x.dtype.kind == "f" else x).astype(to)


def bits(eqn: Any, x: np.ndarray) -> np.ndarray:
    """The same bits as another type."""
    narrow = x.astype(np.float32) if x.dtype.kind == "f" else x
    return narrow.view(np.dtype(eqn.params["new_dtype"])).astype(kind_of(eqn.outvars[0]))


def divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if np.asarray(x).dtype.kind in "iu":
        return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y)).astype(x.dtype))
    return x / y


def powered(eqn: Any, x: np.ndarray) -> np.ndarray:
    y = eqn.params["y"]
    return x**y if y >= 0 else 1.0 / x**-y


def chosen(eqn: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    which = np.broadcast_to(which.astype(int), cases[0].shape)
    return np.choose(which, cases, mode="clip") if cases[0].dtype.kind != "V" else cases[0]


def ones_in(x: np.ndarray) -> np.ndarray:
    return np.bitwise_count(x.astype(np.uint64) & np.uint64((1 << 8 * x.dtype.itemsize) - 1))


def zeros_before(x: np.ndarray) -> np.ndarray:
    return 8 * x.dtype.itemsize - np.ceil(np.log2(np.abs(x.astype(np.float64)) + 1)).astype(int)


def stand_in(*xs: np.ndarray) -> np.ndarray:
    """A function of single elements that is neither linear nor even, for those that NumPy and SciPy lack."""
    return sum(np.sin((0.7 + i) * x + 0.3 * (i + 1)) for i, x in enumerate(xs))


def shifted(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, x, by: fn(x, np.asarray(by).astype(x.dtype) % (8 * x.dtype.itemsize)).astype(x.dtype)


def logical_right(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}") >> by.view(f"u{by.dtype.itemsize}")


def compared(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    """A comparison by the sign of the difference, 0 where numbers are close."""

    def run(eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = np.asarray(x), np.asarray(y)
        if x.dtype.kind == "b":
            x, y = x.astype(int), y.astype(int)
        if x.dtype.kind == "c":
            return np.asarray(fn((np.abs(x - y) > CLOSE).astype(int)))
        gap = x.astype(np.float64) - y.astype(np.float64)
        return np.asarray(fn(np.where(np.abs(gap) < CLOSE, 0, np.sign(gap))))

    return run


def near_floor(x: np.ndarray) -> np.ndarray:
    return np.floor(x + CLOSE)


IDENTITIES = """copy copy_p stop_gradient name sharding_constraint pvary pbroadcast pcast preduced reduced_vary_cast
    reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p reduce_precision mesh_cast layout_constraint
    spmd_layout spmd_assert_equal spmd_retype spmd_order spmd_fused device_put reshard random_clone"""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "real": np.real, "imag": np.imag, "conj": np.conj, "add": np.add, "add_any": np.add,
    "sub": np.subtract, "complex": lambda x, y: x + 1j * y, "mul": np.multiply, "div": divided, "abs": np.abs,
    "sign": lambda x: np.where(np.abs(x) < CLOSE, 0, np.sign(x)), "exp": lambda x: np.exp(np.minimum(x, 60.0)),
    "exp2": lambda x: np.exp2(np.minimum(x, 60.0)), "expm1": lambda x: np.expm1(np.minimum(x, 60.0)), "log": np.log,
    "log2": np.log2, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt,
    "square": np.square, "pow": np.power, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "atan2": np.arctan2, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "logistic": special.expit, "erf": special.erf,
    "erfc": special.erfc, "erf_inv": special.erfinv, "lgamma": special.gammaln, "digamma": special.digamma,
    "polygamma": special.polygamma, "zeta": special.zeta, "igamma": special.gammainc, "igammac": special.gammaincc,
    "igamma_grad_a": stand_in, "regularized_incomplete_beta": special.betainc, "bessel_i0e": special.i0e,
    "bessel_i1e": special.i1e, "max": np.maximum, "min": np.minimum, "rem": np.fmod, "floor": near_floor,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "ceil": lambda x: -near_floor(-x),
    "round": lambda x: near_floor(x + 0.5), "nextafter": np.nextafter, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.invert, "population_count": ones_in, "clz": zeros_before,
    "is_finite": np.isfinite, "one_minus_square": lambda x: 1.0 - x * x, "random_gamma_grad": stand_in,
}  # fmt: skip

# --- one device: shapes ---------------------------------------------------------------------------------------


def broadcast(eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, placed = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for d, n in zip(placed, x.shape, strict=True):
        sizes[d] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def sliced(eqn: Any, x: np.ndarray) -> np.ndarray:
    p = eqn.params
    steps = p["strides"] or [1] * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def parted(eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], eqn.params["axis"])


def window_at(x: np.ndarray, sizes: Sequence[int], starts: Sequence[Any]) -> tuple[slice, ...]:
    at = [min(max(int(s), 0), n - m) for s, n, m in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(s, s + m) for s, m in zip(at, sizes, strict=True))


def dynamic_slice(eqn: Any, x: np.ndarray, *starts: Any) -> np.ndarray:
    return x[window_at(x, eqn.params["slice_sizes"], starts)]


def dynamic_update(eqn: Any, x: np.ndarray, update: np.ndarray, *starts: Any) -> np.ndarray:
    out = x.copy()
    out[window_at(x, update.shape, starts)] = update
    return out


def padded(eqn: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    for d, (low, high, inner) in enumerate(eqn.params["padding_config"]):
        if inner:
            shape = list(x.shape)
            shape[d] = max(0, (shape[d] - 1) * (inner + 1) + 1)
            spread = np.full(shape, value, x.dtype)
            spread[(slice(None),) * d + (slice(None, None, inner + 1),)] = x
            x = spread
        cut = (slice(None),) * d + (slice(max(0, -low), x.shape[d] - max(0, -high)),)
        x = x[cut]
        widths = [(0, 0)] * x.ndim
        widths[d] = (max(0, low), max(0, high))
        x = np.pad(x, widths, constant_values=value)
    return x


def picked_at(numbers: Any, batch: tuple[int, ...], row: np.ndarray, rank: int, scatter: bool) -> list[int]:
    """Where a window of a gather or a scatter starts in the operand."""
    where = numbers.scatter_dims_to_operand_dims if scatter else numbers.start_index_map
    start = [0] * rank
    for k, d in enumerate(where):
        start[d] = int(row[k])
    mine = numbers.scatter_indices_batching_dims if scatter else numbers.start_indices_batching_dims
    for d, b in zip(numbers.operand_batching_dims, mine, strict=True):
        start[d] = batch[b]
    return start


def gather(eqn: Any, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [n for d, n in enumerate(sizes) if d not in gone]
    out = np.zeros((*rows.shape[:-1], *kept), x.dtype)
    clips = "CLIP" in str(eqn.params["mode"]).upper()
    for batch in np.ndindex(*rows.shape[:-1]):
        start = picked_at(numbers, batch, rows[batch], x.ndim, scatter=False)
        fits = all(0 <= s <= n - m for s, n, m in zip(start, x.shape, sizes, strict=True))
        out[batch] = x[window_at(x, sizes, start)].reshape(kept) if fits or clips else (eqn.params["fill_value"] or 0)
    return np.moveaxis(out, range(rows.ndim - 1, out.ndim), numbers.offset_dims)


def scatter(combine: Callable[[Any, Any], Any]) -> Callable[..., np.ndarray]:
    def run(eqn: Any, x: np.ndarray, rows: np.ndarray, updates: np.ndarray) -> np.ndarray:
        numbers, out = eqn.params["dimension_numbers"], x.copy()
        gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        moved = np.moveaxis(updates, numbers.update_window_dims, range(rows.ndim - 1, updates.ndim))
        kept = iter(moved.shape[rows.ndim - 1 :])
        sizes = [1 if d in gone else next(kept) for d in range(x.ndim)]
        for batch in np.ndindex(*rows.shape[:-1]):
            start = picked_at(numbers, batch, rows[batch], x.ndim, scatter=True)
            if all(0 <= s <= n - m for s, n, m in zip(start, x.shape, sizes, strict=True)):
                at = window_at(x, sizes, start)
                out[at] = combine(out[at], moved[batch].reshape(sizes))
        return out

    return run


def iota(eqn: Any) -> np.ndarray:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    ramp = np.arange(shape[d]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    return np.broadcast_to(ramp, shape).astype(kind_of(eqn.outvars[0]))


# --- one device: along a dimension ------------------------------------------------------------------------------


def reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda eqn, x: np.asarray(fn(x, axis=tuple(eqn.params["axes"])), kind_of(eqn.outvars[0]))


def first_where(best: Callable[..., Any]) -> Callable[..., Any]:
    def run(eqn: Any, x: np.ndarray) -> np.ndarray:
        [axis] = eqn.params["axes"]
        x = x.astype(np.float64)
        return np.argmax(np.abs(x - best(x, axis, keepdims=True)) < CLOSE, axis).astype(kind_of(eqn.outvars[0]))

    return run


def accumulation(fn: Any) -> Callable[..., Any]:
    def run(eqn: Any, x: np.ndarray) -> np.ndarray:
        axis = eqn.params["axis"]
        turned = np.flip(x, axis) if eqn.params["reverse"] else x
        out = fn.accumulate(turned, axis)
        return np.flip(out, axis) if eqn.params["reverse"] else out

    return run


def ordered(x: np.ndarray, axis: int) -> np.ndarray:
    return np.argsort(np.round(x.astype(np.float64) / CLOSE), axis, kind="stable")


def sort(eqn: Any, *xs: np.ndarray) -> list[np.ndarray]:
    axis = eqn.params["dimension"]
    at = ordered(xs[0], axis)
    return [np.take_along_axis(x, at, axis) for x in xs]


def top(eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % x.ndim
    k = eqn.outvars[0].aval.shape[axis]
    at = np.take(ordered(-x, axis), range(k), axis)
    return [np.take_along_axis(x, at, axis), at.astype(kind_of(eqn.outvars[1]))]


def dot(eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (one, two), (batch_one, batch_two) = eqn.params["dimension_numbers"]
    left, right = list(range(x.ndim)), [x.ndim + d for d in range(y.ndim)]
    for i, j in zip((*one, *batch_one), (*two, *batch_two), strict=True):
        right[j] = left[i]
    free = [d for i, d in enumerate(left) if i not in (*one, *batch_one)]
    rest = [d for j, d in enumerate(right) if j not in (*two, *batch_two)]
    return np.einsum(x, left, y, right, [*(left[i] for i in batch_one), *free, *rest])


def spread(x: np.ndarray, dims: Sequence[int], by: Sequence[int]) -> np.ndarray:
    """An array with zeros between its elements."""
    for d, n in zip(dims, by, strict=True):
        if n > 1:
            shape = list(x.shape)
            shape[d] = (shape[d] - 1) * n + 1
            out = np.zeros(shape, x.dtype)
            out[(slice(None),) * d + (slice(None, None, n),)] = x
            x = out
    return x


def convolution(eqn: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    space = range(2, x.ndim)
    x = spread(x.transpose(numbers.lhs_spec), space, p["lhs_dilation"])
    w = spread(w.transpose(numbers.rhs_spec), space, p["rhs_dilation"])
    x = padded_sides(x, [(0, 0), (0, 0), *p["padding"]], 0.0)
    groups, batches = p["feature_group_count"], p["batch_group_count"]
    lefts = np.split(x, groups, 1) if groups > 1 else np.split(x, batches, 0)
    rights = np.split(w, max(groups, batches), 0)
    outs = []
    for left, right in zip(lefts, rights, strict=True):
        out: Any = 0.0
        for at in np.ndindex(*w.shape[2:]):
            ends = [n - m + 1 for n, m in zip(x.shape[2:], w.shape[2:], strict=True)]
            cut = tuple(slice(s, s + e, t) for s, e, t in zip(at, ends, p["window_strides"], strict=True))
            out = out + np.einsum("nc...,oc->no...", left[(..., *cut)], right[(..., *at)])
        outs.append(out)
    return np.concatenate(outs, 1).transpose(np.argsort(numbers.out_spec))


def padded_sides(x: np.ndarray, sides: Sequence[tuple[int, int]], value: Any) -> np.ndarray:
    cut = tuple(slice(max(0, -a), n - max(0, -b)) for n, (a, b) in zip(x.shape, sides, strict=True))
    return np.pad(x[cut], [(max(0, a), max(0, b)) for a, b in sides], constant_values=value)


def windows(fn: Callable[..., Any], start: float) -> Callable[..., Any]:
    def run(eqn: Any, x: np.ndarray) -> np.ndarray:
        p = eqn.params
        x = padded_sides(x, p["padding"], start)
        sizes, out = p["window_dimensions"], None
        for at in np.ndindex(*sizes):
            ends = [n - m + 1 for n, m in zip(x.shape, sizes, strict=True)]
            part = x[tuple(slice(s, s + e, t) for s, e, t in zip(at, ends, p["window_strides"], strict=True))]
            out = part if out is None else fn(out, part)
        return out

    return run


def fourier(eqn: Any, x: np.ndarray) -> np.ndarray:
    kind, lengths = str(eqn.params["fft_type"]).upper().rpartition(".")[2], eqn.params["fft_lengths"]
    axes = tuple(range(x.ndim - len(lengths), x.ndim))
    names = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}
    by_number = ("FFT", "IFFT", "RFFT", "IRFFT")
    return names[by_number[int(kind)] if kind.isdigit() else kind](x, lengths, axes)


def of_matrices(eqn: Any, *xs: np.ndarray) -> list[np.ndarray]:
    """A stand-in for linear algebra: each element depends on all elements of its matrices. Dimensions before those are a batch."""
    total: Any = 0.0
    last = max(x.ndim for x in xs) - (1 if eqn.primitive.name == "lu_pivots_to_permutation" else 2)
    for k, x in enumerate(xs):
        weights = 1.0 + np.arange(math.prod(x.shape[last:])).reshape(x.shape[last:]) % 7
        total = total + np.sin((1 + k) * (x * weights).sum(tuple(range(last, x.ndim))))
    outs = []
    for k, var in enumerate(eqn.outvars):
        shape = var.aval.shape
        rest = shape[np.ndim(total) :]
        ramp = np.arange(math.prod(rest)).reshape(rest)
        outs.append(10 * np.sin(np.reshape(total, (*np.shape(total), *[1] * len(rest))) + k + ramp))
    return [np.broadcast_to(o, v.aval.shape).astype(kind_of(v)) for o, v in zip(outs, eqn.outvars, strict=True)]


def triangular(eqn: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    p = eqn.params
    a = np.tril(a) if p["lower"] else np.triu(a)
    a = a.swapaxes(-1, -2) if p["transpose_a"] else a
    return np.linalg.solve(a, b) if p["left_side"] else np.linalg.solve(a.swapaxes(-1, -2), b.swapaxes(-1, -2)).swapaxes(-1, -2)  # fmt: skip


# --- one device: random numbers -----------------------------------------------------------------------------------


def mixed(*xs: Any) -> np.ndarray:
    """A hash of whole numbers, element by element."""
    found = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for x in xs:
            found = (found ^ np.asarray(x).astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            found = found ^ (found >> np.uint64(29))
    return found


def random_bits(eqn: Any, key: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    places = np.arange(math.prod(shape)).reshape(shape)
    found = mixed(key.reshape((*key.shape, *[1] * len(shape))), places)
    return (found >> np.uint64(64 - eqn.params["bit_width"])).astype(kind_of(eqn.outvars[0]))


def random_split(eqn: Any, key: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    return mixed(key.reshape((*key.shape, *[1] * len(shape))), 5 + np.arange(math.prod(shape)).reshape(shape))


def threefry(eqn: Any, *xs: np.ndarray) -> list[np.ndarray]:
    found = mixed(*np.broadcast_arrays(*xs))
    return [(found >> np.uint64(32 * i)).astype(np.uint32) for i in range(2)]


def generated(eqn: Any, key: np.ndarray) -> list[np.ndarray]:
    shape = eqn.outvars[1].aval.shape
    seed = mixed(*key.reshape(-1))
    numbers = mixed(seed, np.arange(math.prod(shape))).astype(kind_of(eqn.outvars[1])).reshape(shape)
    return [mixed(key, 1).astype(key.dtype), numbers]


ALONE: dict[str, Callable[..., Any]] = {
    **{name: (lambda eqn, x, *_: x) for name in IDENTITIES.split()},
    **{name: each(fn) for name, fn in FUNCTIONS.items()},
    "spmd_split": own_block,
    "spmd_roll": lambda eqn, x: np.roll(x, eqn.params["by"], eqn.params["axis"]),
    "convert_element_type": converted, "bitcast_convert_type": bits, "select_n": chosen, "integer_pow": powered,
    "shift_left": shifted(np.left_shift), "shift_right_logical": shifted(logical_right),
    "shift_right_arithmetic": shifted(np.right_shift),
    "eq": compared(lambda s: s == 0), "ne": compared(lambda s: s != 0), "lt": compared(lambda s: s < 0),
    "le": compared(lambda s: s <= 0), "gt": compared(lambda s: s > 0), "ge": compared(lambda s: s >= 0),
    "eq_to": compared(lambda s: s == 0), "lt_to": compared(lambda s: s < 0), "le_to": compared(lambda s: s <= 0),
    "broadcast_in_dim": broadcast, "slice": sliced, "split": parted, "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update, "pad": padded, "gather": gather, "iota": iota,
    "reshape": lambda eqn, x: x.transpose(eqn.params["dimensions"] or range(x.ndim)).reshape(eqn.params["new_sizes"]),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
    "squeeze": lambda eqn, x: x.squeeze(tuple(eqn.params["dimensions"])),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "unstack": lambda eqn, x: list(np.moveaxis(x, eqn.params["axis"], 0)),
    "tile": lambda eqn, x: np.tile(x, eqn.params["reps"]),
    **dict.fromkeys(("scatter",), scatter(lambda old, new: new)),
    **dict.fromkeys(("scatter-add", "scatter_add"), scatter(np.add)),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), scatter(np.subtract)),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), scatter(np.multiply)),
    **dict.fromkeys(("scatter-min", "scatter_min"), scatter(np.minimum)),
    **dict.fromkeys(("scatter-max", "scatter_max"), scatter(np.maximum)),
    "reduce_sum": reduction(np.sum), "reduce_max": reduction(np.max), "reduce_min": reduction(np.min),
    "reduce_prod": reduction(np.prod), "reduce_and": reduction(np.all), "reduce_or": reduction(np.any),
    "reduce_xor": reduction(np.bitwise_xor.reduce),
    "argmax": first_where(np.max), "argmin": first_where(np.min),
    "cumsum": accumulation(np.add), "cumprod": accumulation(np.multiply), "cummax": accumulation(np.maximum),
    "cummin": accumulation(np.minimum), "cumlogsumexp": accumulation(np.logaddexp),
    "sort": sort, "top_k": top, "approx_top_k": top, "dot_general": dot, "conv_general_dilated": convolution,
    "reduce_window_sum": windows(np.add, 0.0), "reduce_window_max": windows(np.maximum, -np.inf),
    "reduce_window_min": windows(np.minimum, np.inf), "fft": fourier, "triangular_solve": triangular,
    **dict.fromkeys(
        ["cholesky", "lu", "qr", "geqrf", "eig", "eigh", "svd", "schur", "lu_pivots_to_permutation", "householder_product", "hessenberg", "tridiagonal", "tridiagonal_solve", "lu_solve"], of_matrices),
    "random_bits": random_bits, "random_split": random_split, "random_seed": lambda eqn, x: mixed(x),
    "random_fold_in": lambda eqn, key, x: mixed(key, x), "random_gamma": lambda eqn, key, a: stand_in(a),
    "random_unwrap": lambda eqn, key: np.stack([mixed(key, i) for i in range(2)], -1).astype(np.uint32),
    "random_wrap": lambda eqn, x: mixed(x[..., 0], x[..., 1]),
    "platform_index": lambda eqn: np.int32(0),
    **dict.fromkeys(("empty", "empty2"), lambda eqn: np.zeros(eqn.outvars[0].aval.shape, kind_of(eqn.outvars[0]))),
    "threefry2x32": threefry, "rng_bit_generator": generated,
}  # fmt: skip


def shards(whole: np.ndarray, axes: Sequence[Sequence[str]], machine: Machine) -> Arrays:
    """The block of each device, where these axes divide each dimension, the first one being the major one."""
    names = list(machine.sizes)
    out: Arrays = {}
    for device, place in enumerate(machine.places):
        cut = []
        for n, over in zip(whole.shape, axes, strict=True):
            at = count = 0
            count = math.prod(machine.sizes[a] for a in over)
            for a in over:
                at = at * machine.sizes[a] + place[names.index(a)]
            size = n // count
            cut.append(slice(at * size, (at + 1) * size))
        out[device] = whole[tuple(cut)]
    return out


def stacked(arrays: Arrays, machine: Machine) -> np.ndarray:
    """One array with a dimension for each mesh axis in front."""
    every = np.stack([arrays[d] for d in range(len(machine.places))])
    return every.reshape(*machine.sizes.values(), *every.shape[1:])
