"""What the string of a transform asks for: which dimensions are transformed, and the work in terms of factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from spmd.comm._call import Call, Operand
from spmd.errors import Fix, LayoutError, SizeError
from spmd.language import Atom, Dim, Layout
from spmd.ops._fft_freq import frequencies
from spmd.ops._fft_route import Job
from spmd.ops._fft_walls import Wall
from spmd.ops._partial_sums import plain_dims


def renamed_dims(call: Call) -> tuple[int, ...]:
    """Which dimensions of the pattern have a new name."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    for layout in (src, dst):
        plain_dims(call, layout)
        if layout.unreduced or layout.reduced:
            rule = "a Fourier transform is of complete values, without marks."
            call.fail(rule, advice=f"psum them first, then {call.name}", error=LayoutError)
    same = len(src.dims) == len(dst.dims)
    if not same or [d.ellipsis for d in src.dims] != [d.ellipsis for d in dst.dims]:
        rule = "the dimensions of both sides match by position, so there are as many, and '...' stands in one place."
        call.fail(rule, got=[f'"{src.short}": {len(src.dims)}', f'"{dst.short}": {len(dst.dims)}'], error=LayoutError)
    pairs = list(zip(src.dims, dst.dims, strict=True))
    moved = [i for i, (a, b) in enumerate(pairs) if a.names != b.names]
    for i in moved:
        dim = next((d for d in pairs[i] if len(d.atoms) != 1), None)
        if dim is not None:
            call.fail("a transformed dimension has one name on each side.", at=dim.span, error=LayoutError)
        if dst.dims[i].atoms[0].name in src.names:
            rule = f"{dst.dims[i].atoms[0].name} is another dimension on the left: transforms keep the order."
            call.fail(rule, at=dst.dims[i].span, error=LayoutError)
    if not moved:
        rule = "the transform is along the dimensions that get another name, and none does."
        call.fail(rule, fix=call.paste(src, _renaming(src)), error=LayoutError)
    _check_order(call, [(src.dims[i], dst.dims[i]) for i in moved])
    return tuple(moved)


def _check_order(call: Call, pairs: list[tuple[Dim, Dim]]) -> None:
    """Refuse names that repeat those of the left side in another order, as in `"x y -> ky kx"`. They say that something
    is transposed, and the positions say that nothing is. Other libraries do transpose."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    left, right = ([one[side].atoms[0].name for one in pairs] for side in (0, 1))
    one, other = _told_apart(left), _told_apart(right)
    if one == other or sorted(one) != sorted(other):
        return
    meant = dict(zip(one, left, strict=True))
    own = dict(zip(other, (after for _, after in pairs), strict=True))
    of = {before: own[told] for told, before in meant.items()}
    both = zip(src.dims, dst.dims, strict=True)
    ordered = Layout.from_dims([of.get(a.atoms[0].name, b) if a.atoms else b for a, b in both])
    i = next(i for i, told in enumerate(one) if told != other[i])
    rule = (
        f"dimensions match by position, so {left[i]} would become {right[i]}, which by its name is the transform "
        f"of {meant[other[i]]}: transforms keep the order."
    )
    by_name = (of[name].atoms[0].name for name in left)
    by_position = f"by position: {_arrows(left, right)}; any other names would say so"
    got = [by_position, f"by name: {_arrows(left, by_name)}, and transposed"]
    in_order = call.paste(src, ordered)
    fix = None if in_order is None else Fix("rearrange", (in_order,), f"{ordered.short} -> {dst.short}")
    call.fail(rule, at=pairs[i][1].span, got=got, fix=fix, error=LayoutError)


def _told_apart(names: list[str]) -> list[str]:
    """Names without their common beginning and end: `x`, `y` for `kx`, `ky`."""
    names = [name.casefold() for name in names]
    for _ in range(2):  # the front, then, written backwards, the back
        shared = sum(1 for _ in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*names, strict=False)))
        names = [name[: shared - 1 if shared else None : -1] for name in names]
    return names


def _arrows(left: Iterable[str], right: Iterable[str]) -> str:
    return ", ".join(f"{a} -> {b}" for a, b in zip(left, right, strict=True))


def _renaming(src: Layout) -> Layout:
    """The right side that transforms the last dimension."""
    i = max(i for i, dim in enumerate(src.dims) if not dim.ellipsis) if src.names else 0
    dims = list(src.dims)
    if dims and len(dims[i].atoms) == 1:
        dims[i] = Dim((Atom(f"k{dims[i].atoms[0].name}", dims[i].atoms[0].axes),))
    return Layout.from_dims(dims)


def job_of(call: Call, operand: Operand, dtype: Any, moved: tuple[int, ...], pad: bool, wall: Wall | None) -> Job:
    """The work in terms of factors, one per array axis."""
    [src], [dst] = call.pattern.inputs, call.pattern.outputs
    extra = len(call.ellipsis_shape())
    counts = [extra if dim.ellipsis else len(dim.atoms) for dim in src.dims]
    places = [sum(counts[:i]) for i in range(len(counts))]  # of each dim, its first factor
    target: list[tuple[str, ...]] = []
    after: list[int] = []
    for i, (dim, place, count) in enumerate(zip(dst.dims, places, counts, strict=True)):
        those = operand.factors[place : place + count]
        if dim.ellipsis:
            target += [()] * extra
            after += [factor.size for factor in those]
            continue
        least = wall.least if wall is not None and i in moved else 0
        for atom, factor in zip(dim.atoms, those, strict=True):
            after.append(_size_after(call, atom, factor, pad, i == moved[-1], least))
            target.append(atom.axes or ())
    real = {"fft.rfft": "first", "fft.irfft": "last"}.get(call.name, "" if wall is None else "both")
    bare = [i for i, f in enumerate(operand.factors) if not f.name.startswith("...")]
    single = {places[i] for i, dim in enumerate(src.dims) if len(dim.atoms) == 1 and len(dst.dims[i].atoms) == 1}
    return Job(
        source=tuple(f.axes for f in operand.factors),
        target=tuple(target),
        before=tuple(f.size for f in operand.factors),
        after=tuple(after),
        moved=frozenset(places[i] for i in moved),
        half=places[moved[-1]] if real in ("first", "last") else -1,
        real=real,
        movable=frozenset(i for i in bare if i in single),
        together=call.frame.mode != "auto",
        mesh=call.frame.sizes,
        given=dtype.itemsize,
        itemsize=np.result_type(dtype, np.complex64).itemsize if wall is None else dtype.itemsize,
    )


def _size_after(call: Call, atom: Atom, factor: Any, pad: bool, last: bool, least: int) -> int:
    """The size of a factor on the right, at least `least`. Its name is bound to it, and its axes divide it."""
    size, fix = factor.size, None
    if last and call.name == "fft.rfft":
        size = frequencies(call, atom, size, pad)
        fix = None if pad else call.paste(call.pattern.inputs[0], call.pattern.outputs[0], pad=True)
    elif last and call.name == "fft.irfft":
        size = _samples(call, atom, size, pad)
    if size < least:
        rule = f"a cosine transform of type 1 has an element at each wall, and {atom.name} has one element."
        call.fail(rule, at=atom.span, advice="type=2, with walls half an element beyond", error=SizeError)
    call.bind(atom.name, size, f"{call.name} of {factor.name}", atom.span)
    call.local(size, atom.axes or (), atom.name, atom.span, fix=fix)
    return size


def _samples(call: Call, atom: Atom, size: int, pad: bool) -> int:
    """How many samples a half spectrum of `size` entries belongs to."""
    known = call.sizes.get(atom.name)
    if pad and known is None:
        rule = f"the size of {atom.name} says how many of the {size} entries are padding, and it is not known."
        call.fail(rule, at=atom.span, advice=f"{atom.name}={2 * size - 2}, if nothing is padding", error=SizeError)
    n = known[0] if known else 2 * (size - 1)
    if n < 1:
        rule = "one frequency belongs to one sample; without a size it would belong to 2 (1 - 1) = 0 samples."
        call.fail(rule, at=atom.span, fix=f"{atom.name}=1", error=SizeError)
    padded = size - (n // 2 + 1)
    if padded < 0 or (padded and not pad):
        rule = f"{size} frequencies belong to {2 * size - 2} or {2 * size - 1} samples, not to {n}."
        got = [f"{atom.name} = {n}: {known[1]}"] if known else []
        advice = f"{atom.name}={2 * size - 2}" + (
            f", or pad=True if the last {padded} are padding" if padded > 0 else ""
        )
        call.fail(rule, at=atom.span, got=got, advice=advice, error=SizeError)
    return n
