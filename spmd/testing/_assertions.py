"""Assertions about what a program sends, what devices hold of a tree, and its modes; and the one error of all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from jax.sharding import NamedSharding

from spmd import _compat
from spmd._text import Table, bytes_text
from spmd._trees.leaves import kind_of, not_int
from spmd._trees.matching import match_prefix
from spmd.checker._numbers import compared, labelled, pulled
from spmd.errors import LayoutError, MeshError, ModeError, SizeError, SpmdError, did_you_mean, not_one_of
from spmd.inspect._explanation import Explanation, explain
from spmd.inspect._match import Communication
from spmd.language import AxisMapping, Layout, axes_product, axes_tuple, check_axes, mesh_text
from spmd.mesh import check_arguments_alive
from spmd.modes import MODES, Mode, mode


class Mismatch(AssertionError):
    """A program is not what a test says of it. The message has both, side by side."""


# --- collectives -------------------------------------------------------------------------------------------------

# Assertions about what a program sends.

KINDS = ("all_gather", "all_to_all", "pbroadcast", "ppermute", "psum", "psum_scatter", "ragged_all_to_all")
Key = tuple[str, str]  # a kind, and axes as a layout writes them


def assert_collectives(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Mapping[str, Mapping[str, int] | int],
    *,
    bytes: int | None = None,  # noqa: A002 - what it is
    mesh: Any = None,
    view: Literal["compiled", "written", "planned"] = "compiled",
    at_most: bool = False,
    open: int | None = None,  # noqa: A002 - what the plan calls it
) -> None:
    """Assert which collectives a program runs, over which mesh axes, how often, and with how many bytes.

    Nothing is run. What `expected` does not name must not occur. Communication: none.

    Args:
      fn: What `spmd.explain` takes: a kernel, or a function with kernels in it, jitted or differentiated or not.
      args: Its positional arguments as a tuple, arrays or `jax.ShapeDtypeStruct`s.
      expected: Times by kind and axes, `{"all_gather": {"tp": 2}, "psum": {"dp/tp": 1}}`, loops multiplied out; a
        number instead of the axes counts all axes together, `{"ppermute": 3}`. `psum` is any all-reduce.
      bytes: The bytes that one device sends in one call, all collectives together; None for any number.
      mesh: The mesh, where neither `fn` nor the arguments carry one.
      view: "compiled" for what the optimised program runs, including what nobody wrote; "written" for what the strings
        say, which needs no devices and is the same on every backend; "planned" for the compiler's plan of a program
        without kernels, as `spmd.propagate` gives it, which needs no devices either.
      at_most: Whether the numbers are upper limits.
      open: Of the planned view, the most bytes that a device may send in one call with all that the plan leaves open;
        None where it must leave nothing open.

    Raises:
      Mismatch: The numbers differ, or the plan leaves more open. The message has both, and where each was written.
      SpmdError: A kind or a view is not known, or something is not a number.
      MeshError: The mesh lacks an axis, or has no devices for the compiled view.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp d", mesh=mesh)
      ... def gather(x):
      ...     return spmd.all_gather(x, "b/dp d/tp -> b/dp d")
      >>> x = jax.ShapeDtypeStruct((8, 64), "float32")
      >>> spmd.testing.assert_collectives(gather, (x,), {"all_gather": {"tp": 1}}, bytes=768)
    """
    if bytes is not None and (fault := not_int("bytes, what one device may send,", bytes, 0)):
        raise SpmdError(fault, call="assert_collectives(...)", advice="as in bytes=768")
    if open is not None and (fault := not_int("open, what one device may send with what is left open,", open, 0)):
        raise SpmdError(fault, call="assert_collectives(...)", advice="as in open=1536")
    found = _explained("assert_collectives", fn, args, mesh, view)
    if view == "planned":
        _check_open(found, open)
    wanted = _expected_times(expected, found)
    got = _times_and_bytes(found, view)
    together = {kind for kind, axes in wanted if axes == "*"}
    for (kind, axes), (times, sent) in list(got.items()):
        if kind in together:
            del got[kind, axes]
            before = got.get((kind, "*"), (0, 0))
            got[kind, "*"] = (before[0] + times, before[1] + sent)
    total = sum(sent for _, sent in got.values())
    wrong = {key for key in {*wanted, *got} if _differs(got.get(key, (0, 0))[0], wanted.get(key, 0), at_most)}
    heavy = bytes is not None and _differs(total, bytes, at_most)
    if not wrong and not heavy:
        return
    limit = "at most" if at_most else "expected"
    rows = []
    for key in sorted({*wanted, *got}):
        kind, axes = key
        shown = "any" if axes == "*" else axes
        rows.append(("!" if key in wrong else "", kind, shown, str(wanted.get(key, 0)), str(got.get(key, (0, 0))[0])))
    said = "any" if bytes is None else f"{bytes:,}"
    rows.append(("!" if heavy else "", "bytes per device", "", said, f"{total:,}"))
    lines = [f"{found.name or 'the program'} does not send what the test says.", _beside(rows, limit, view)]
    kinds = {(kind, axes) for kind, axes in wrong} or set(got)
    lines += _origins(found, view, kinds)
    raise Mismatch("\n".join(lines))


def _check_open(found: Explanation, limit: int | None) -> None:
    """Compare what the plan leaves open with what a test allows."""
    plan = found.plan
    if not plan.open or (limit is not None and plan.most_bytes is not None and plan.most_bytes <= limit):
        return
    said = "allows nothing open" if limit is None else f"allows {bytes_text(limit)}"
    lines = [f"{found.name or 'the program'} is planned {plan.open_text}, and the test {said}."]
    lines += [f"{one.where or '-'}: {one}" for one in plan.open]
    lines += (
        [] if plan.most_bytes is None else [f"write open={plan.most_bytes}, or compile the program for its devices"]
    )
    raise Mismatch("\n".join(lines))


def _differs(got: int, wanted: int, at_most: bool) -> bool:
    return got > wanted if at_most else got != wanted


def _explained(call: str, fn: Any, args: Any, mesh: Any, view: str) -> Explanation:
    if view not in ("compiled", "written", "planned"):
        raise SpmdError(not_one_of("view", view, ("compiled", "written", "planned")), call=f"{call}(...)")
    if not isinstance(args, tuple | list):
        rule = f"the arguments of the function come as one tuple, not as {kind_of(args)}."
        raise SpmdError(rule, call=f"{call}(fn, args, ...)", advice=f"as in {call}(fn, (x, w), ...)")
    found = explain(fn, *args, mesh=mesh, compiled=None if view == "compiled" else False)
    if view == "compiled" and found.compiled is None:
        rule = "a program is compiled for devices, and this mesh has none."
        other = "written" if found.plan is None else "planned"
        fix, advice = (f'view="{other}"', None) if call == "assert_collectives" else (None, "a mesh with devices")
        raise MeshError(rule, call=f"{call}(...)", fix=fix, advice=advice)
    if view == "planned" and found.plan is None:
        rule = "the compiler plans a program without kernels, and this one has kernels or was traced already."
        raise SpmdError(rule, call=f"{call}(...)", fix='view="written"')
    if view == "written" and found.written is None:
        rule = "the strings are read from the trace, which a lowered or compiled program does not have."
        raise SpmdError(rule, call=f"{call}(...)", advice="the function itself with its arguments")
    return found


def _expected_times(expected: Mapping[str, Mapping[str, int] | int], found: Explanation) -> dict[Key, int]:
    """Times by kind and axes, the axes in mesh order; `*` for all of them together."""
    wanted: dict[Key, int] = {}
    if not isinstance(expected, Mapping):
        _malformed(expected)
    for kind, by_axes in expected.items():
        if kind not in KINDS:
            rule = f"there is no collective {kind!r}{did_you_mean(str(kind), KINDS) or '.'}"
            raise SpmdError(rule, call="assert_collectives(...)", got=[f"kinds: {', '.join(KINDS)}"])
        if not isinstance(by_axes, Mapping):
            wanted[kind, "*"] = _times(by_axes)
            continue
        for axes, times in by_axes.items():
            names = (axes.split("/") if axes else []) if isinstance(axes, str) else _malformed({kind: by_axes})
            check_axes(names, found.mesh, call="assert_collectives(...)")
            wanted[kind, "/".join(a for a in found.mesh if a in names)] = _times(times)
    return {key: times for key, times in wanted.items() if times}


def _times(times: Any) -> int:
    if fault := not_int("how often a collective runs", times, 0):
        raise SpmdError(fault, call="assert_collectives(...)", advice='as in {"all_gather": {"tp": 2}}')
    return int(times)


def _malformed(expected: Any) -> NoReturn:
    rule = "expected is a dict from kinds to numbers, or to dicts from axes, as a layout writes them, to numbers."
    advice = 'as in {"all_gather": {"tp": 2}, "psum": {"dp/tp": 1}}'
    raise SpmdError(rule, call="assert_collectives(...)", got=[repr(expected)], advice=advice)


def _times_and_bytes(found: Explanation, view: str) -> dict[Key, tuple[int, int]]:
    """Times and bytes by kind and axes."""
    seen = {"compiled": found.compiled, "planned": found.plan and found.plan.moves}
    items: Iterable[Any] = seen.get(view, found.written and found.written.collectives) or ()
    counts: dict[Key, tuple[int, int]] = {}
    for one in items:
        key = one.kind, "/".join(one.axes)
        times, sent = counts.get(key, (0, 0))
        counts[key] = (times + one.count, sent + one.total_bytes)
    return counts


def _beside(rows: list[tuple[str, ...]], left: str, right: str) -> str:
    """A row per collective: a mark where it differs, its kind and axes, and two numbers."""
    return Table(rows, head=("", "collective", "axes", left, right), right=(3, 4)).text()


def _origins(found: Explanation, view: str, keys: Iterable[Key]) -> list[str]:
    """Return where the collectives of these kinds and axes were written, one line each."""
    wanted = set(keys)
    alike: dict[tuple[str, ...], int] = {}  # a verb on a pytree is one line and many collectives
    for one in found.collectives:
        asked = bool({(one.kind, "/".join(one.axes)), (one.kind, "*")} & wanted)
        times = one.runs if view == "compiled" and one.runs is not None else one.count
        if asked and times and (one.written or view != "written"):
            origin = _origin(one)
            alike[origin] = alike.get(origin, 0) + times
    rows = [(kind, axes, str(times), *rest) for (kind, axes, *rest), times in alike.items()]
    return ["where they come from:", Table(rows, right=(2,), indent=2).text()] if rows else []


def _origin(one: Communication) -> tuple[str, ...]:
    """Kind, axes, line, call, and what else is known."""
    marks = (("recomputed", one.recomputed), ("implicit", one.implicit), (one.branch, bool(one.branch)))
    who = [one.phase if one.written else one.note or "nobody wrote it", *(mark for mark, on in marks if on)]
    return one.kind, "/".join(one.axes), one.where or "-", one.text, ", ".join(who)


def assert_no_unwritten_collectives(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Any = None,
    above: int = 0,
) -> None:
    """Assert that the compiled program runs no collective that nobody wrote: no resharding of the compiler's own.

    Nothing is run. Communication: none.

    Args:
      fn: What `spmd.explain` takes.
      args: Its positional arguments as a tuple. Their shardings matter: a kernel moves what lies elsewhere than its
        signature says.
      mesh: The mesh, where neither `fn` nor the arguments carry one.
      above: Collectives of at most so many bytes per device and call are allowed.

    Raises:
      Mismatch: There are such collectives. The message lists them, and what was written and compiled by kind and axes.
      MeshError: The mesh has no devices.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp d/tp", mesh=mesh)
      ... def double(x):
      ...     return 2 * x
      >>> x = jax.ShapeDtypeStruct((8, 64), "float32", sharding=spmd.Layout("b/dp d/tp").sharding(mesh))
      >>> spmd.testing.assert_no_unwritten_collectives(double, (x,))
    """
    found = _explained("assert_no_unwritten_collectives", fn, args, mesh, "compiled")
    loose = [one for one in found.unwritten if one.total_bytes > above]
    if not loose:
        return
    said, runs = _times_and_bytes(found, "written"), _times_and_bytes(found, "compiled")
    marked = {(one.kind, "/".join(one.axes)) for one in loose}
    rows = []
    for key in sorted({*said, *runs}):
        counts = (str(counted.get(key, (0, 0))[0]) for counted in (said, runs))
        rows.append(("!" if key in marked else "", *key, *counts))
    sent = sum(one.total_bytes for one in loose)
    name, several = found.name or "the program", "s" * (len(loose) != 1)
    lines = [
        f"{name} runs {len(loose)} collective{several} that nobody wrote, {bytes_text(sent)} per device.",
        _beside(rows, "written", "compiled"),
        "that nobody wrote:",
    ]
    unwritten = [
        (one.kind, "/".join(one.axes), bytes_text(one.total_bytes), one.where or "-", one.text) for one in loose
    ]
    lines.append(Table(unwritten, right=(2,), indent=2).text())
    raise Mismatch("\n".join(lines))


# --- sharded -----------------------------------------------------------------------------------------------------

# An assertion that no device holds much more of a tree than its share.

_CALL = "assert_sharded(tree, ...)"
_SHOWN = 20


def assert_sharded(
    tree: Any,
    tolerance: float = 0.02,
    *,
    layouts: Any = None,
    mapping: Any = None,
    axes: str | Sequence[str] | None = None,
) -> None:
    """Assert that no parameter is left more replicated than intended.

    With `layouts`: every mesh axis that a leaf's layout names divides the leaf, in whatever dimension. Without: one
    device holds at most `1 + tolerance` times its share, the bytes of the whole tree over the number of devices.
    Reads shardings only. Communication: none.

    Args:
      tree: Arrays, or `jax.ShapeDtypeStruct`s with shardings, such as `spmd.init(...).abstract`. Single numbers, such
        as the step count of an optimizer's state, may lie anywhere.
      tolerance: How much more than its share a device may hold, as a part of it: small vectors are rarely divided.
        With `layouts` it is a part of the intended bytes.
      layouts: The intended layouts, a prefix tree as kernels take it: a string for all leaves below.
      mapping: The `AxisMapping` that places bare names of `layouts`.
      axes: The mesh axes that are meant to divide parameters, all by default: `("fsdp", "tp")` where `dp` replicates
        them on purpose.

    Raises:
      Mismatch: A device holds too much. The message has each leaf that is too large, how it lies and how it should.
      SpmdError: A leaf does not say where it lies, or the tolerance is not a number.
      MeshError: The mesh lacks an axis, or leaves lie on different meshes.
      SizeError: A layout has another rank than its leaf.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(fsdp=4, tp=2)
      >>> def at(layout, *shape):
      ...     return jax.ShapeDtypeStruct(shape, "float32", sharding=spmd.Layout(layout).sharding(mesh))
      >>> params = {"w": at("d/fsdp f/tp", 512, 256), "norm": at("d", 512)}
      >>> spmd.testing.assert_sharded(params, layouts={"w": "d/fsdp f/tp", "norm": "d"})
      >>> spmd.testing.assert_sharded(params, tolerance=0.05)

    References:
      `assert_params_sufficiently_sharded` of https://github.com/AI-Hypercomputer/maxtext, for the tolerance.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance >= 0:
        rule = f"tolerance, how much more than its share a device may hold, is at least 0, not {tolerance!r}."
        raise SpmdError(rule, call=_CALL, advice="tolerance=0.02, or layouts=...")
    axes = (axes,) if isinstance(axes, str) else axes
    leaves = _leaves(tree)
    mesh = _mesh(leaves)
    if layouts is None:
        _check_share(leaves, mesh, tolerance, axes)
    else:
        _check_intended(leaves, mesh, _pairs(layouts, tree), tolerance, mapping, axes)


@dataclass(frozen=True)
class _Leaf:
    """One array: its path, its sharding, its bytes in all and on one device."""

    path: str
    sharding: NamedSharding
    shape: tuple[int, ...]
    whole: int
    held: int

    @property
    def used(self) -> frozenset[str]:
        return frozenset(axis for entry in _compat.partitions(self.sharding.spec) for axis in axes_tuple(entry))

    @property
    def lies(self) -> str:
        entries = _compat.partitions(self.sharding.spec, len(self.shape))
        return " ".join("/".join(("_", *axes_tuple(entry))) for entry in entries) or "scalar"


def _leaves(tree: Any) -> list[_Leaf]:
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        shown = f"tree{jax.tree_util.keystr(path)}"
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            if _anywhere(leaf):
                continue
            got = f"{shown}: {type(sharding).__name__ if sharding is not None else type(leaf).__name__}"
            rule = "every leaf is an array, or a jax.ShapeDtypeStruct, that lies on a mesh."
            raise SpmdError(rule, call=_CALL, got=[got], advice='as in spmd.shard(tree, "d/fsdp f/tp", mesh=mesh)')
        size = leaf.dtype.itemsize
        local = math.prod(sharding.shard_shape(leaf.shape)) * size
        found.append(_Leaf(shown, sharding, tuple(leaf.shape), math.prod(leaf.shape) * size, local))
    return found


def _anywhere(leaf: Any) -> bool:
    """Return whether it is a single number, which cannot be divided, and does not lie on a mesh."""
    return not np.shape(leaf) and not isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _pairs(layouts: Any, tree: Any) -> list[Any]:
    return [pair for pair in match_prefix(layouts, tree, "tree", _CALL) if not _anywhere(pair[1])]


def _mesh(leaves: Sequence[_Leaf]) -> Mapping[str, int]:
    shapes = {tuple(leaf.sharding.mesh.shape.items()) for leaf in leaves}
    if len(shapes) > 1:
        got = [mesh_text(dict(shape)) for shape in sorted(shapes)]
        raise MeshError("all leaves lie on one mesh.", call=_CALL, got=got)
    return dict(shapes.pop()) if shapes else {}


def _divided(mesh: Mapping[str, int], axes: Sequence[str] | None) -> list[str]:
    """The axes that are meant to divide parameters."""
    check_axes(axes or (), mesh, call=_CALL)
    return [a for a in mesh if axes is None or a in axes]


def _check_share(leaves: Sequence[_Leaf], mesh: Mapping[str, int], tolerance: float, axes: Any) -> None:
    wanted = _divided(mesh, axes)
    parts = axes_product(wanted, mesh)
    held, share = sum(leaf.held for leaf in leaves), sum(leaf.whole for leaf in leaves) / parts
    if held <= (1 + tolerance) * share:
        return
    over = sorted((leaf for leaf in leaves if leaf.held * parts > leaf.whole), key=lambda leaf: -leaf.held)
    rows = []
    for leaf in over:
        missing = ", ".join(a for a in wanted if a not in leaf.used and mesh[a] > 1) or "-"
        shape = "x".join(map(str, leaf.shape))
        rows.append(
            (leaf.path, shape, leaf.lies, missing, bytes_text(round(leaf.whole / parts)), bytes_text(leaf.held))
        )
    rule = (
        f"One device holds {bytes_text(held)} of parameters, {held / share - 1:.1%} more than its share of "
        f"{bytes_text(round(share))} over {', '.join(wanted)}; {tolerance:.1%} are allowed."
    )
    head = ("leaf", "shape", "lies as", "not over", "its share", "held")
    raise Mismatch(f"{rule}\n{_table(rows, head)}")


def _check_intended(
    leaves: Sequence[_Leaf], mesh: Mapping[str, int], pairs: Any, tolerance: float, mapping: Any, axes: Any
) -> None:
    wanted = _divided(mesh, axes)
    rules = None if mapping is None else AxisMapping.of(mapping)
    rows = []
    meant = too_much = 0
    for leaf, (_, _, layout) in zip(leaves, pairs, strict=True):
        resolved: Layout = _of_rank(layout, leaf).resolve(rules)
        check_axes(resolved.axes, mesh, call=f'{_CALL}, {leaf.path} as "{resolved.short}"', source=resolved.short)
        intended = [a for a in resolved.axes if a in wanted]
        missing = [a for a in intended if a not in leaf.used and mesh[a] > 1]
        aim = leaf.whole // axes_product(intended, mesh)
        meant += aim
        if missing:
            too_much += leaf.held - min(aim, leaf.held)
            sizes = (bytes_text(aim), bytes_text(leaf.held))
            rows.append(
                (leaf.path, "x".join(map(str, leaf.shape)), resolved.short, leaf.lies, ", ".join(missing), *sizes)
            )
    if too_much > tolerance * meant:
        rule = f"{len(rows)} of {len(leaves)} leaves are not divided over an axis of their layout, "
        rule += f"and one device holds {bytes_text(too_much)} more than the intended {bytes_text(meant)}."
        head = ("leaf", "shape", "expected", "lies as", "not over", "expected", "held")
        raise Mismatch(f"{rule}\n{_table(rows, head)}")


def _of_rank(layout: Layout, leaf: _Leaf) -> Layout:
    """The layout with as many dimensions as the leaf has."""
    try:
        return layout.with_rank(len(leaf.shape))
    except SizeError:
        named = sum(not dim.ellipsis for dim in layout.dims)
        count = f"{'at least ' * layout.has_ellipsis}{named} dimension{'s' * (named != 1)}"
        rule = f'the layout "{layout.short}" has {count}, and {leaf.path} has {len(leaf.shape)}.'
        fix = " ".join(("...", *(dim.short for dim in layout.dims if not dim.ellipsis)))
        wide = len(leaf.shape) > named
        got = [f"{leaf.path}: shape {leaf.shape}"]
        raise SizeError(rule, call=_CALL, got=got, fix=f'"{fix}"' if wide else None) from None


def _table(rows: list[tuple[str, ...]], head: tuple[str, ...]) -> str:
    more = [(f"and {len(rows) - _SHOWN} more",)] if len(rows) > _SHOWN else []
    return Table([*rows[:_SHOWN], *more], head, right=(len(head) - 2, len(head) - 1)).text()


# --- modes -------------------------------------------------------------------------------------------------------

# An assertion that the modes of a program agree, in results and gradients.


def assert_modes_agree(
    fn: Callable[..., Any],
    *args: Any,
    modes: Sequence[Mode] = MODES,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    grad: bool = True,
    **kwargs: Any,
) -> None:
    """Assert that a kernel, or a function of kernels, has the same results and gradients in each mode.

    `fn` runs once per mode under `jax.jit`, and so does its pull-back along fixed random cotangents. The other modes
    are compared with the last. Communication: that of `fn` in each mode.

    Args:
      fn: A kernel, or a function that calls kernels.
      *args: Its arguments, with values.
      modes: Of "explicit", "auto" and "reference", two or more.
      rtol: Relative tolerance.
      atol: Absolute tolerance.
      grad: Whether to compare the gradients of all floating-point arguments too.
      **kwargs: Keyword arguments of `fn`; not differentiated.

    Raises:
      Mismatch: Results or gradients differ. The message says by how much, or in which shapes and dtypes.
      ModeError: A mode is not known.
      LayoutError: An argument has no values.
      PlacementError: An argument was donated or deleted.

    Example:
      >>> import jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
      ... def norm(x):
      ...     return spmd.reduce(x * x, "b/dp d/tp -> b/dp") ** 0.5
      >>> spmd.testing.assert_modes_agree(norm, jnp.arange(32.0).reshape(4, 8) + 1)
    """
    names = _checked(modes)
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            got = [f"args{jax.tree_util.keystr(path)}: {leaf.dtype}{list(leaf.shape)} without values"]
            rule = "the modes are compared by running them, so arguments have values."
            raise LayoutError(rule, call="assert_modes_agree(...)", got=got, advice="as in jnp.ones(shape, dtype)")
    check_arguments_alive(args, kwargs, "assert_modes_agree(...)")
    found = {}
    for name in names:
        with mode(name):
            program, arrays = pulled(functools.partial(fn, **kwargs), args, grad=grad)
            found[name] = jax.tree.map(np.asarray, jax.jit(program)(*arrays))
    *others, base = names
    rows: list[tuple[str, ...]] = []
    for name in others:
        rows += _rows(name, found[name], found[base], rtol, atol)
    if rows:
        head = ("", "mode", "got", f"in {base} mode", "largest difference", "allowed there", "elements")
        shown = getattr(fn, "__name__", "fn")
        rule = f"{shown} is not the same in all modes."
        raise Mismatch("\n".join([rule, Table(rows, head, right=(4, 5, 6)).text()]))


def _checked(modes: Sequence[Mode]) -> list[Mode]:
    names: list[Any] = [modes] if isinstance(modes, str) else list(modes)
    for name in names:
        if name not in MODES:
            raise ModeError(not_one_of("mode", name, MODES), call="assert_modes_agree(...)")
    if len(set(names)) < 2:
        rule = "there is nothing to compare with one mode alone."
        raise ModeError(rule, call="assert_modes_agree(...)", fix='modes=("explicit", "reference")')
    return names


def _rows(name: str, got: Any, wanted: Any, rtol: float, atol: float) -> list[tuple[str, ...]]:
    found = compared(got, wanted, lambda _path, _x, y: atol + rtol * np.abs(y))
    types = [(one.got, one.wanted) if one.got != one.wanted else ("", "") for one in found]
    return [(labelled(one.path), name, *both, *one.counts) for one, both in zip(found, types, strict=True)]
