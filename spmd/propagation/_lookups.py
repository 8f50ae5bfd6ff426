"""Slices, lookups, updates and windows of a plan as a kernel has them: local, where the dimension is whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from spmd._compat import operation_name as name_of
from spmd.propagation._loops import combined_by, is_zero
from spmd.propagation._module import Dims, Made, Place, bare, dtype_text, integers, numbers_of, operation, typed

# What combines two numbers, as `jax.lax` calls it.
_OF_TWO = {"stablehlo.add": "add", "stablehlo.multiply": "mul", "stablehlo.minimum": "min", "stablehlo.maximum": "max"}
_WINDOW = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
_PADDING = ("edge_padding_low", "edge_padding_high", "interior_padding")


def sliced(writer: Any, op: Any) -> None:
    """`stablehlo.slice`: a piece between fixed places."""
    made, old = writer.array(op.operands[0]), typed(op.operands[0]).shape
    starts, limits, strides = (integers(op, name) for name in ("start_indices", "limit_indices", "strides"))
    taken = [n if (a, b, s) == (0, n, 1) else -1 for a, b, s, n in zip(starts, limits, strides, old, strict=True)]
    whole(writer, made.place.dims, [d for d, n in enumerate(taken) if n < 0])
    text = f"jax.lax.slice({bare(made.text)}, {tuple(starts)}, {writer.lying(limits, made.place)}, {tuple(strides)})"
    _put(writer, op, text, _renamed(writer, op, made, [n >= 0 for n in taken]))


def dynamic_slice(writer: Any, op: Any) -> None:
    """`stablehlo.dynamic_slice`: a piece that begins where numbers say."""
    made, old = writer.array(op.operands[0]), typed(op.operands[0]).shape
    sizes = integers(op, "slice_sizes")
    kept = [size == n for size, n in zip(sizes, old, strict=True)]
    whole(writer, made.place.dims, [d for d, one in enumerate(kept) if not one])
    shape = writer.lying(sizes, made.place)
    text = f"jax.lax.dynamic_slice({bare(made.text)}, {_starts(writer, list(op.operands)[1:], kept)}, {shape})"
    _put(writer, op, text, _renamed(writer, op, made, kept))


def dynamic_update(writer: Any, op: Any) -> None:
    """`stablehlo.dynamic_update_slice`: a piece that takes the place of another."""
    made, part = writer.array(op.operands[0]), writer.array(op.operands[1])
    old, new = typed(op.operands[0]).shape, typed(op.operands[1]).shape
    kept = [size == n for size, n in zip(new, old, strict=True)]
    whole(writer, made.place.dims, [d for d, one in enumerate(kept) if not one])
    _alike(writer, made.place, part.place)
    starts = _starts(writer, list(op.operands)[2:], kept)
    text = f"jax.lax.dynamic_update_slice({bare(made.text)}, {bare(part.text)}, {starts})"
    _put(writer, op, text, made.names)


def concatenated(writer: Any, op: Any) -> None:
    """`stablehlo.concatenate`."""
    [along] = integers(op, "dimension")
    parts = [writer.array(value) for value in op.operands]
    for part in parts:
        whole(writer, part.place.dims, [along])
        _alike(writer, parts[0].place, part.place)
    text = f"jnp.concatenate([{', '.join(bare(one.text) for one in parts)}], axis={along})"
    _put(writer, op, text, _renamed(writer, op, parts[0], [d != along for d in range(len(parts[0].names))]))


def padded(writer: Any, op: Any) -> None:
    """`stablehlo.pad`: more of a dimension, at its ends or between its elements."""
    made, fill = writer.array(op.operands[0]), writer.get(op.operands[1])
    by = list(zip(*(integers(op, name) for name in _PADDING), strict=True))
    whole(writer, made.place.dims, [d for d, one in enumerate(by) if one != (0, 0, 0)])
    value = _number(op, fill)
    text = f"jax.lax.pad({bare(made.text)}, {value}, {tuple(by)})"
    _put(writer, op, text, _renamed(writer, op, made, [one == (0, 0, 0) for one in by]))


def reversed_(writer: Any, op: Any) -> None:
    """`stablehlo.reverse`."""
    made, along = writer.array(op.operands[0]), integers(op, "dimensions")
    if any(made.place.dims[d] for d in along):
        _put(writer, op, f'spmd.flip({bare(made.text)}, "{writer.layout(made.names, made.place, along)}")', made.names)
        return
    _put(writer, op, f"jax.lax.rev({bare(made.text)}, {tuple(along)})", made.names)


def windowed(writer: Any, op: Any) -> None:
    """`stablehlo.reduce_window`: sums over windows, such as cumulative sums."""
    verb = _OF_TWO.get(combined_by(op), "")
    if len(op.results) != 1 or not verb:
        writer.fail("a window that this function combines")
    made, start = writer.array(op.operands[0]), writer.get(op.operands[1])
    words = [integers(op, name) for name in _WINDOW]
    padding = _padding(op, len(made.names))
    alone = [(*one, *pad) == (1, 1, 1, 1, 0, 0) for *one, pad in zip(*words, padding, strict=True)]
    [along, *more] = [d for d, one in enumerate(alone) if not one] or [0]
    size, over = typed(op.operands[0]).shape[along], [one[along] for one in words]
    runs = {(size - 1, 0): "", (0, size - 1): ", reverse=True"}  # from the beginning, from the end
    if not more and over == [size, 1, 1, 1] and padding[along] in runs:
        _put(writer, op, _running(writer, made, along, verb, runs[padding[along]]), made.names)
        return
    whole(writer, made.place.dims, [d for d, one in enumerate(alone) if not one])
    window, strides, base, dilation = map(tuple, words)
    how = f"jax.lax.{verb}, {window}, {strides}, {padding}, {base}, {dilation}"
    # As it stands: JAX differentiates windows that begin with a number that it knows.
    text = f"jax.lax.reduce_window({bare(made.text)}, {bare(start.text)}, {how})"
    _put(writer, op, text, _renamed(writer, op, made, alone))


def top_k(writer: Any, op: Any) -> None:
    """`chlo.top_k`: the largest of the last dimension, and where they stand."""
    x, [count] = writer.array(op.operands[0]), integers(op, "k")
    whole(writer, x.place.dims, [len(x.names) - 1])
    names = (*x.names[:-1], writer.named(count))
    writer.several(op, f"jax.lax.top_k({bare(x.text)}, {count})", [names, names])


def transformed(writer: Any, op: Any) -> None:
    """`stablehlo.fft`, of its last dimensions."""
    x, sizes = writer.array(op.operands[0]), integers(op, "fft_length")
    first = len(x.names) - len(sizes)
    whole(writer, x.place.dims, range(first, len(x.names)))
    [kind] = re.findall("I?R?FFT", str(op.attributes["fft_type"]))
    text = f'jax.lax.fft({bare(x.text)}, "{kind}", {tuple(sizes)})'
    _put(writer, op, text, _renamed(writer, op, x, [d < first for d in range(len(x.names))]))


def picked(writer: Any, op: Any) -> None:
    """`stablehlo.select_and_scatter`, the gradient of a maximum or a minimum over windows."""
    x, cotangent = writer.array(op.operands[0]), writer.array(op.operands[1])
    first = operation(op.regions[0].blocks[0].operations[0])
    compared = str(first.attributes["comparison_direction"]) if "compare" in name_of(first) else ""
    [found] = re.findall("GE|LE", compared) or [""]
    if not found or combined_by(op, 1) != "stablehlo.add" or not is_zero(op.operands[2]):
        writer.fail("a selection that is not the gradient of a maximum")
    verb, start = {"GE": ("max", "-jnp.inf"), "LE": ("min", "jnp.inf")}[found]
    window, strides = (tuple(integers(op, name)) for name in _WINDOW[:2])
    padding = _padding(op, len(x.names))
    alone = [one == (1, 1, (0, 0)) for one in zip(window, strides, padding, strict=True)]
    whole(writer, x.place.dims, [d for d, one in enumerate(alone) if not one])
    _alike(writer, x.place, cotangent.place)
    pool = f"lambda x: jax.lax.reduce_window(x, {start}, jax.lax.{verb}, {window}, {strides}, {padding})"
    _put(writer, op, f"jax.vjp({pool}, {bare(x.text)})[1]({bare(cotangent.text)})[0]", x.names)


def convolved(writer: Any, op: Any) -> None:
    """`stablehlo.convolution`, of windows that lie in one block. Channels that are divided are terms of a sum."""
    x, w = (writer.array(value) for value in op.operands)
    sides = [part.split(", ") for part in re.findall(r"\[([^\]]*)\]", str(op.attributes["dimension_numbers"]))]
    spaces = [str(i) for i in range(len(sides[0]) - 2)]
    of_x, of_w, of_out = (
        tuple(side.index(one) for one in (*first, *spaces))
        for side, first in zip(sides, ("bf", "oi", "bf"), strict=True)
    )
    whole(writer, x.place.dims, of_x[2:])
    whole(writer, w.place.dims, of_w[2:])
    groups = [n for kind in ("feature", "batch") for n in integers(op, f"{kind}_group_count")]
    if max(groups) > 1:  # a block has a part of each
        whole(writer, x.place.dims, [of_x[groups[0] > 1]])
        whole(writer, w.place.dims, of_w[: 1 + (groups[0] > 1)])
    lost = list(x.place.dims[of_x[1]])
    if lost != list(w.place.dims[of_w[1]]):
        writer.fail("a convolution of arrays whose channels lie differently")
    strides, dilation, spread = (integers(op, name) for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    turned = re.findall("true|false|[01]", str(op.attributes["window_reversal"]).partition(":")[2])
    back = tuple(of_w[2 + i] for i, one in enumerate(turned) if one in ("true", "1"))
    window = f"jax.lax.rev({bare(w.text)}, {back})" if back else bare(w.text)
    how = f"{tuple(strides)}, {_padding(op, len(spaces))}, {tuple(dilation)}, {tuple(spread)}"
    numbers = f"jax.lax.ConvDimensionNumbers{(of_x, of_w, of_out)}, {groups[0]}, {groups[1]}"
    text = f"jax.lax.conv_general_dilated({bare(x.text)}, {window}, {how}, {numbers}{writer.options(op)})"
    known = {of_out[0]: x.names[of_x[0]], of_out[1]: w.names[of_w[0]]}
    same = {d: name for d, name in known.items() if writer.sizes[name] == typed(op.results[0]).shape[d]}
    names = _different(writer, op, [same.get(d) or writer.named(n) for d, n in enumerate(typed(op.results[0]).shape)])
    writer.summed(op, text, names, lost)


def _running(writer: Any, made: Made, along: int, verb: str, end: str) -> str:
    """A window that begins or ends with the dimension: a running sum, or the like."""
    if made.place.dims[along] and verb == "add":
        return f'spmd.cumsum({bare(made.text)}, "{writer.layout(made.names, made.place, [along])}"{end})'
    whole(writer, made.place.dims, [along])
    name = {"add": "sum", "mul": "prod"}.get(verb, verb)
    return f"jax.lax.cum{name}({bare(made.text)}, axis={along}{end})"


def gathered(writer: Any, op: Any) -> None:
    """`stablehlo.gather`: a lookup by indices."""
    made, at = writer.array(op.operands[0]), writer.array(op.operands[1])
    words = lambda name: numbers_of(op, "dimension_numbers", name)
    offset, gone, found = words("offset_dims"), words("collapsed_slice_dims"), words("start_index_map")
    batch, where = words("operand_batching_dims"), words("start_indices_batching_dims")
    sizes, kind = integers(op, "slice_sizes"), typed(op.operands[0])
    if found == gone and len(gone) == 1 and not batch and made.place.dims[gone[0]]:
        _taken(writer, op, made, at, gone[0], offset)
        return
    piece = [d for d in range(len(sizes)) if d not in batch and (d in found or sizes[d] != kind.shape[d])]
    _indexed(writer, made, piece, batch, at, where)
    taken = writer.lying(sizes, made.place)
    left = [d for d in range(len(sizes)) if d not in (*gone, *batch)]
    numbers = f"jax.lax.GatherDimensionNumbers{tuple(map(tuple, (offset, gone, found, batch, where)))}"
    text = f'jax.lax.gather({bare(made.text)}, {bare(at.text)}, {numbers}, {taken}, mode="clip")'
    kept = [made.names[d] if sizes[d] == kind.shape[d] else writer.named(sizes[d]) for d in left]
    rest, of_slices = iter(at.names[:-1]), iter(kept)
    names = [next(of_slices if d in offset else rest) for d in range(len(typed(op.results[0]).shape))]
    _put(writer, op, text, _different(writer, op, names))


def _taken(writer: Any, op: Any, made: Made, at: Made, along: int, offset: Sequence[int]) -> None:
    """A lookup of whole rows in a divided dimension: each device has some of them, and zeros for the others."""
    kind, ids = typed(op.operands[0]), iter(at.names[:-1])
    if integers(op, "slice_sizes") != [1 if d == along else n for d, n in enumerate(kind.shape)]:
        whole(writer, made.place.dims, [along])
    rows = iter(one for d, one in enumerate(made.names) if d != along)
    result = typed(op.results[0]).shape
    lies = _different(writer, op, [next(rows) if d in offset else next(ids) for d in range(len(result))])
    table = list(made.names)
    for one, name in zip([d for d in range(len(table)) if d != along], [lies[d] for d in offset], strict=True):
        table[one] = name
    table[along] = writer.named(kind.shape[along])
    numbers = tuple(lies[d] for d in range(len(lies)) if d not in offset)
    first = writer.layout(tuple(table), made.place, [along])
    second = writer.layout(numbers, _rows(at))
    shape = writer.lying(typed(op.operands[1]).shape[:-1], _rows(at))
    number = f"jnp.clip(jnp.reshape({bare(at.text)}, {shape}), 0, {kind.shape[along] - 1})"
    text = f'spmd.take({bare(made.text)}, {number}, "{first}, {second} -> RESULT")'
    writer.partial(op, text, tuple(lies), text, list(made.place.dims[along]))


def scattered(writer: Any, op: Any) -> None:
    """`stablehlo.scatter`: updates at indices. Those of other devices are terms of a sum."""
    if len(op.results) != 1:
        writer.fail("an update of several arrays")
    made, at, new = (writer.array(value) for value in op.operands)
    words = lambda name: numbers_of(op, "scatter_dimension_numbers", f"{name}_dims")
    window, gone, found = words("update_window"), words("inserted_window"), words("scatter_dims_to_operand")
    batch, where = words("input_batching"), words("scatter_indices_batching")
    kind, updates = typed(op.operands[0]), typed(op.operands[2]).shape
    left = iter(d for d in range(len(kind.shape)) if d not in (*gone, *batch))
    sizes = [1] * len(kind.shape)
    for d in window:
        sizes[next(left)] = updates[d]
    by = combined_by(op)
    if by != "stablehlo.return" and by not in _OF_TWO:
        writer.fail("an update by this function")
    verb = f"scatter_{_OF_TWO[by]}" if by in _OF_TWO else "scatter"
    piece = [d for d in range(len(sizes)) if d not in batch and (d in found or sizes[d] != kind.shape[d])]
    rows = piece == found == gone and len(gone) == 1 and not batch
    if rows and made.place.dims[gone[0]] and verb == "scatter_add" and is_zero(op.operands[0]):
        _added(writer, op, at, new, gone[0], window)
        return
    # Each device drops the updates that lie outside of its block. This takes single elements along the dimension.
    divided = [d for d in found if d in gone and made.place.dims[d]]
    _indexed(writer, made, [d for d in piece if d not in divided], batch, at, where)
    ids = _in_blocks(writer, op, made, at, found, divided) if divided else bare(at.text)
    numbers = f"jax.lax.ScatterDimensionNumbers{tuple(map(tuple, (window, gone, found, batch, where)))}"
    given = f"{bare(made.text)}, {ids}, {bare(new.text)}, {numbers}"
    text = f'jax.lax.{verb}({given}, mode="fill")'
    over = [d for d in range(len(updates)) if d not in window]
    own = {axis for d in batch for axis in made.place.dims[d]}
    lost = [axis for d in over for axis in new.place.dims[d] if axis not in own]
    if lost and (verb != "scatter_add" or not is_zero(op.operands[0])):
        writer.fail("an update by divided indices that is not a sum from zero")
    writer.summed(op, text, made.names, lost)


def _added(writer: Any, op: Any, at: Made, new: Made, along: int, window: Sequence[int]) -> None:
    """Whole rows that are added to zeros in a divided dimension: each device adds those of its own part."""
    kind, over = typed(op.operands[0]), [d for d in range(len(new.names)) if d not in window]
    _alike(writer, Place(at.place.dims[:-1]), Place(tuple(new.place.dims[d] for d in over)))
    key, names = writer.named(kind.shape[along]), [new.names[d] for d in window]
    names.insert(along, key)
    place, lost = writer.place(op.results[0]), [axis for d in over for axis in new.place.dims[d]]
    rows, numbers = writer.layout(new.names, new.place), writer.layout(tuple(new.names[d] for d in over), _rows(at))
    ids = f"jnp.reshape({bare(at.text)}, {writer.lying(typed(op.operands[1]).shape[:-1], _rows(at))})"
    start = f'spmd.scatter_add({bare(new.text)}, {ids}, "{rows}, {numbers} -> '
    end = f'", outside="drop", {key}={kind.shape[along]})'
    text = f"{start}{writer.layout(tuple(names), Place(place.dims), [along])}{end}"
    writer.partial(op, text, tuple(names), f"{start}RESULT{end}", lost, (along,))


# --- what they have in common -------------------------------------------------------------------------------------


def _indexed(
    writer: Any, made: Made, piece: Sequence[int], batch: Sequence[int], at: Made, where: Sequence[int]
) -> None:
    """Refuse a lookup along divided dimensions of `piece`, and batches of an array and of its indices that differ."""
    whole(writer, made.place.dims, piece)
    if [made.place.dims[d] for d in batch] != [at.place.dims[d] for d in where]:
        writer.fail("a lookup whose batch lies otherwise than its indices")


def _in_blocks(writer: Any, op: Any, made: Made, at: Made, found: Sequence[int], divided: Sequence[int]) -> str:
    """Return indices that count from where this device's block begins: those of other blocks are outside of it."""
    starts = []
    for d in found:
        key = writer.named(typed(op.operands[0]).shape[d])
        layout = writer.layout((key,), Place((made.place.dims[d],)))
        starts.append(f'spmd.offset("{layout}", {key}={writer.sizes[key]})' if d in divided else "0")
    shape = (*(1 for _ in at.names[:-1]), len(starts))
    first = f"jnp.reshape(jnp.stack([{', '.join(starts)}]), {shape})" if len(starts) > 1 else starts[0]
    return f"{bare(at.text)}.astype(jnp.int32) - {first}"  # of no sign, indices would not go below zero


def whole(writer: Any, dims: Dims, these: Sequence[int]) -> None:
    """Refuse what works along divided dimensions."""
    for d in these:
        if dims[d]:
            axes = ", ".join(axis.name for axis in dims[d])
            writer.fail(f"a slice or a lookup along a dimension that {axes} divides")


def _rows(at: Made) -> Place:
    """Return how the numbers of rows lie, without the dimension that says which of their indices one is."""
    return Place(at.place.dims[:-1])


def _padding(op: Any, count: int) -> list[tuple[int, int]]:
    """How many elements a window has more, before and behind each of so many dimensions."""
    ends = [int(n) for n in re.findall(r"-?\d+", str(op.attributes["padding"]).partition(":")[0])]
    ends *= 2 * count if len(ends) == 1 else 1  # MLIR writes many equal ones as one
    return list(zip(ends[::2], ends[1::2], strict=True))


def _number(op: Any, made: Made) -> str:
    """A number of the dtype of the array that the operation takes."""
    return f"jnp.asarray({bare(made.text)}, {dtype_text(typed(op.operands[0]).dtype)})" if made.number else made.text


def _alike(writer: Any, one: Place, other: Place) -> None:
    if one.dims != other.dims:
        writer.fail("arrays that are put together and lie differently")


def _starts(writer: Any, values: Sequence[Any], kept: Sequence[bool]) -> str:
    """Return where a piece begins, `(i, 0)`: of a dimension that is taken whole, at its beginning."""
    texts = ["0" if one else bare(writer.get(value).text) for value, one in zip(values, kept, strict=True)]
    return f"({', '.join(texts)},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _renamed(writer: Any, op: Any, made: Made, kept: Sequence[bool]) -> list[str]:
    shape = typed(op.results[0]).shape
    return [name if one else writer.named(n) for name, one, n in zip(made.names, kept, shape, strict=True)]


def _different(writer: Any, op: Any, names: Sequence[str]) -> list[str]:
    """No name twice: that of an array and that of its indices may be one."""
    shape = typed(op.results[0]).shape
    return [
        writer.named(n) if name in names[:d] else name for d, (name, n) in enumerate(zip(names, shape, strict=True))
    ]


def _put(writer: Any, op: Any, text: str, names: Sequence[str]) -> None:
    writer.put(op.results[0], Made(text, tuple(names), writer.place(op.results[0])))


RULES = {
    "stablehlo.slice": sliced,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update,
    "stablehlo.concatenate": concatenated,
    "stablehlo.pad": padded,
    "stablehlo.reverse": reversed_,
    "stablehlo.reduce_window": windowed,
    "stablehlo.convolution": convolved,
    "stablehlo.select_and_scatter": picked,
    "stablehlo.fft": transformed,
    "chlo.top_k": top_k,
    "stablehlo.gather": gathered,
    "stablehlo.scatter": scattered,
}
