"""Assertions about what a program sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from spmd._text.table import Table
from spmd._text.units import bytes_text
from spmd._trees.leaves import kind_of, not_int
from spmd.errors import MeshError, SpmdError, did_you_mean, not_one_of
from spmd.inspect._explanation import Explanation, explain
from spmd.inspect._match import Communication
from spmd.language import check_axes
from spmd.testing._mismatch import Mismatch

KINDS = ("all_gather", "all_to_all", "pbroadcast", "ppermute", "psum", "psum_scatter", "ragged_all_to_all")
Key = tuple[str, str]  # a kind, and axes as a layout writes them


def assert_collectives(
    fn: Callable[..., Any],
    args: Sequence[Any],
    expected: Mapping[str, Mapping[str, int] | int],
    *,
    bytes: int | None = None,  # noqa: A002 - what it is
    kwargs: Mapping[str, Any] | None = None,
    mesh: Any = None,
    view: Literal["compiled", "written", "planned"] = "compiled",
    at_most: bool = False,
) -> None:
    """Assert which collectives a program runs, over which mesh axes, how often, and with how many bytes.

    Nothing is run. What `expected` does not name must not occur. Communication: none.

    Args:
      fn: What `spmd.explain` takes: a kernel, or a function with kernels in it, jitted or differentiated or not.
      args: Its positional arguments as a tuple, arrays or `jax.ShapeDtypeStruct`s.
      expected: Times by kind and axes, `{"all_gather": {"tp": 2}, "psum": {"dp/tp": 1}}`, loops multiplied out; a
        number instead of the axes counts all axes together, `{"ppermute": 3}`. `psum` is any all-reduce.
      bytes: The bytes that one device sends in one call, all collectives together; None for any number.
      kwargs: Keyword arguments of `fn`.
      mesh: The mesh, where neither `fn` nor the arguments carry one.
      view: "compiled" for what the optimised program runs, including what nobody wrote; "written" for what the strings
        say, which needs no devices and is the same on every backend; "planned" for the compiler's plan of a program
        without kernels, as `spmd.propagate` gives it, which needs no devices either.
      at_most: Whether the numbers are upper limits.

    Raises:
      Mismatch: The numbers differ. The message has both, and where each such collective was written.
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
    found = _explained("assert_collectives", fn, args, kwargs, mesh, view)
    wanted = _wanted(expected, found)
    got = _counted(found, view)
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
    lines = [f"{found.name or 'the program'} does not send what the test says.", _table(rows, limit, view)]
    kinds = {(kind, axes) for kind, axes in wrong} or set(got)
    lines += _origins(found, view, kinds)
    raise Mismatch("\n".join(lines))


def _differs(got: int, wanted: int, at_most: bool) -> bool:
    return got > wanted if at_most else got != wanted


def _explained(call: str, fn: Any, args: Any, kwargs: Any, mesh: Any, view: str) -> Explanation:
    if view not in ("compiled", "written", "planned"):
        raise SpmdError(not_one_of("view", view, ("compiled", "written", "planned")), call=f"{call}(...)")
    if not isinstance(args, tuple | list):
        rule = f"the arguments of the function come as one tuple, not as {kind_of(args)}."
        raise SpmdError(rule, call=f"{call}(fn, args, ...)", advice=f"as in {call}(fn, (x, w), ...)")
    found = explain(fn, *args, mesh=mesh, compiled=None if view == "compiled" else False, **dict(kwargs or {}))
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


def _wanted(expected: Mapping[str, Mapping[str, int] | int], found: Explanation) -> dict[Key, int]:
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


def _counted(found: Explanation, view: str) -> dict[Key, tuple[int, int]]:
    """Times and bytes by kind and axes."""
    seen = {"compiled": found.compiled, "planned": found.plan and found.plan.moves}
    items: Iterable[Any] = seen.get(view, found.written and found.written.collectives) or ()
    counts: dict[Key, tuple[int, int]] = {}
    for one in items:
        key = one.kind, "/".join(one.axes)
        times, sent = counts.get(key, (0, 0))
        counts[key] = (times + one.count, sent + one.total_bytes)
    return counts


def _table(rows: list[tuple[str, ...]], left: str, right: str) -> str:
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
    kwargs: Mapping[str, Any] | None = None,
    mesh: Any = None,
    above: int = 0,
) -> None:
    """Assert that the compiled program runs no collective that nobody wrote: no resharding of the compiler's own.

    Nothing is run. Communication: none.

    Args:
      fn: What `spmd.explain` takes.
      args: Its positional arguments as a tuple. Their shardings matter: a kernel moves what lies elsewhere than its
        signature says.
      kwargs: Keyword arguments of `fn`.
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
    found = _explained("assert_no_unwritten_collectives", fn, args, kwargs, mesh, "compiled")
    loose = [one for one in found.unwritten if one.total_bytes > above]
    if not loose:
        return
    said, runs = _counted(found, "written"), _counted(found, "compiled")
    marked = {(one.kind, "/".join(one.axes)) for one in loose}
    rows = []
    for key in sorted({*said, *runs}):
        counts = (str(counted.get(key, (0, 0))[0]) for counted in (said, runs))
        rows.append(("!" if key in marked else "", *key, *counts))
    sent = sum(one.total_bytes for one in loose)
    name, several = found.name or "the program", "s" * (len(loose) != 1)
    lines = [
        f"{name} runs {len(loose)} collective{several} that nobody wrote, {bytes_text(sent)} per device.",
        _table(rows, "written", "compiled"),
        "that nobody wrote:",
    ]
    unwritten = [
        (one.kind, "/".join(one.axes), bytes_text(one.total_bytes), one.where or "-", one.text) for one in loose
    ]
    lines.append(Table(unwritten, right=(2,), indent=2).text())
    raise Mismatch("\n".join(lines))
