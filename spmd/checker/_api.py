"""The questions to the pass: users ask about whole programs, kernels ask about their bodies and results."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from spmd import _compat
from spmd._jaxprs.facts import Apart, Gather, gather_around, left_axes, left_text
from spmd._jaxprs.lines import called_at, is_ours, is_transposed, line_of, line_of_error
from spmd._jaxprs.traces import FlatProgram
from spmd._jaxprs.walker import Variable, equations, opened
from spmd._trees.leaves import is_array
from spmd.checker._arbiter import Trial, collecting, first_body, is_traced, too_large, tried
from spmd.checker._arguments import few, fewer_devices, names_of, smaller
from spmd.checker._choices import WAY
from spmd.checker._dataflow import Dataflow, typed, walk_closed
from spmd.checker._finding import Finding, found
from spmd.checker._findings import Findings, Listing, report
from spmd.checker._mends import describe
from spmd.checker._names import misnamed
from spmd.checker._state import State
from spmd.checker._verdict import (
    Verdict,
    about_gradients,
    believed_lines,
    but_for_noise,
    confirmed,
    judge,
    unknown_lines,
    unreached,
)
from spmd.errors import ReplicationError, SpmdError
from spmd.language import Layout
from spmd.mesh import resized, with_sizes
from spmd.modes import interpreted

_UNEQUAL = (3, 2, 4)  # the sizes of the axes of a mesh that most programs were not written for

_MEANT = "its numbers depend on the sizes of axes, as a raw shard_map may mean: reference= tells what it means"


def checked(
    fn: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Any,
    reference: Callable[..., Any] | None,
    build: Callable[[Any], Any] | None,
    listing: Listing,
    rtol: float | None = None,
) -> Findings:
    """Return what `spmd.check` finds. `listing` makes the source of a program of this name, for its findings."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if is_array(x)]
    meshes: list[Any] = []

    def run(*given: Any, plain: Callable[..., Any] | None = None) -> Any:
        rest = iter(given)
        args, kwargs = jax.tree.unflatten(structure, [next(rest) if is_array(x) else x for x in leaves])
        made = build(with_sizes(meshes[0], dict(resized.value))) if build and meshes and resized.value else fn
        program = plain or (made[0] if isinstance(made, tuple) else made)
        return jax.tree.map(lambda x: x if is_array(x) else None, program(*args, **kwargs))

    with collecting(True), interpreted(True):
        try:
            program = FlatProgram.of(run, *arrays)
        except ReplicationError as error:  # what a verb or JAX's own types say before the trace ends
            told = [one for one in error.findings if isinstance(one, Finding)]
            told = told or [found(error.fault, "layout", line_of_error(error) or called_at())]
            shown = partial(listing, error.program, name)
            return Findings(told, shown, Verdict("wrong", ["It is refused as it is traced"]))
    walk, jaxpr = Dataflow(name, ()), program.jaxpr
    walk_closed(walk, jaxpr)
    if not walk.sizes:
        return Findings((), partial(listing, jaxpr, name), _without_bodies(jaxpr, name))
    backward = any(map(is_transposed, equations(jaxpr)))
    meshes.append(first_body(jaxpr).params["mesh"])
    unknown = unknown_lines(walk, jaxpr)
    trial = _tried(
        run,
        arrays,
        program,
        walk.sizes,
        unsure=bool(unknown or walk.findings),
        gradients=not backward,
        alone=about_gradients(walk.findings),
        modes=True,
        reference=reference and partial(run, plain=reference),
        rtol=rtol,
    )
    raw = reference is None and any(eqn.primitive.name == "shard_map" and not is_ours(eqn) for eqn in equations(jaxpr))
    trial = trial if reference else but_for_noise(trial, walk)
    # A raw one may mean the size of a block, which fits nothing else.
    trial = replace(trial, fails=trial.fails and not raw)
    whole = not raw or bool(trial.faults)
    findings = confirmed(dict.fromkeys(walk.findings), trial, name, unknown, whole=whole, walk=walk)
    if raw and trial.wrong and not any(one.certain for one in findings):
        trial = replace(trial, why=_MEANT)
    kept = {one.line for one in findings}
    cleared = dict.fromkeys(one.line for one in walk.findings if one.line not in kept)
    findings = [*(misnamed(jaxpr) if walk.compares_names else ()), *findings]
    verdict = judge(findings, trial, unknown, list(cleared), believed_lines(jaxpr))
    if left := left_axes(jaxpr):
        verdict = replace(verdict, reasons=(*verdict.reasons, *left_text(left)))
    return Findings(findings, partial(listing, jaxpr, name), verdict)


def _without_bodies(jaxpr: Any, name: str) -> Verdict:
    """Return what is known of a program without kernels: on Explicit axes JAX's types say it all, and on others
    nothing."""
    inner = opened(jaxpr)[0]
    meshes = [var.aval.sharding.mesh for var in inner.invars if _compat.is_typed(var)]
    if not meshes:
        return Verdict("", [f"nothing to check: {name} calls no kernel, and has no jax.shard_map"])
    partial_along = {axis for var in inner.outvars if (state := typed(var.aval)) for axis in state.partial}
    left = [axis for axis in meshes[0].shape if axis in partial_along]
    told = [f"a result is a partial sum along {', '.join(left)}, as its type says"] if left else []
    return Verdict("typed", ["JAX's types say how each value lies, and complete its sums", *told])


def _tried(
    run: Callable[..., Any],
    arrays: Sequence[Any],
    traced: FlatProgram,
    sizes: Mapping[str, int],
    **asked: Any,
) -> Trial:
    """Return what numbers say of a program: as it is, or where that is too much, at small sizes on a mesh of few
    devices. `asked` is what `tried` is asked."""
    mesh, found = first_body(traced.jaxpr).params["mesh"], too_large(sizes)
    if fewer_devices(sizes) == sizes:
        found = tried(run, arrays, mesh, sizes, traced=traced, given=(traced, arrays), **asked)
    for most in (4, 2):
        if not found.large:
            break
        fewer = fewer_devices(sizes, most)
        allowed = lambda given, fewer=fewer: is_traced(run, given, mesh, fewer)
        names = names_of(traced.jaxpr, arrays, sizes, [fewer])
        same = names.of_blocks(sizes)
        for given, chosen in ((names.resized(arrays, same), same), smaller(names, arrays, allowed)):
            if chosen is same and not (few(given) and allowed(given)):
                continue
            found = tried(run, given, mesh, fewer, **asked, written=sizes, given=(traced, arrays))
            found = replace(found, whole=sizes, names=_changed(chosen))
            if not any(one.question == WAY for one in found.unreached) and not found.large:
                break
    return found if found.wrong or found.why else _on_unequal_axes(run, arrays, traced, sizes, found, asked)


def _on_unequal_axes(
    run: Callable[..., Any],
    arrays: Sequence[Any],
    traced: FlatProgram,
    sizes: Mapping[str, int],
    found: Trial,
    asked: Mapping[str, Any],
) -> Trial:
    """Return what numbers say, if they say the same on a mesh whose axes have several devices and different sizes. The
    size of an axis may stand for that of another one, a power of 2 for any number, and 1 for nothing."""
    mesh = first_body(traced.jaxpr).params["mesh"]
    unequal = dict(zip(sizes, itertools.cycle(_UNEQUAL), strict=False))
    doubled = {axis: 2 * n if n < sizes[axis] else n for axis, n in found.sizes.items()}
    for other in (unequal, doubled) if not asked.get("reference") else ():
        names = names_of(traced.jaxpr, arrays, sizes, [other])
        chosen = names.smallest()
        given = names.resized(arrays, chosen)
        if other != found.sizes and is_traced(run, given, mesh, other):
            trial = tried(run, given, mesh, other, once=True, gradients=False, written=sizes)
            trial = replace(trial, names=_changed(chosen))
            if trial.wrong or not trial.why:
                same = trial.agrees and not found.meant
                return trial if trial.wrong else replace(found, also=trial if same else None)
    return found


def _changed(chosen: Mapping[tuple[str, int], int]) -> dict[str, tuple[int, int]]:
    """For each name that has another size in a trial, that size and the one that is given."""
    return {name: (n, was) for (name, was), n in chosen.items() if n != was}


def check_jaxpr(
    closed_jaxpr: Any,
    *,
    mesh_axes: tuple[str, ...],
    kernel: str,
    arg_names: Sequence[str] = (),
    arg_layouts: Sequence[Layout] = (),
    how: str = "error",
    always: bool = False,
    ask: Callable[..., Trial] | None = None,
    known: bool = False,
    apart: Callable[[], Apart | None] = lambda: None,
) -> None:
    """Check every layout in the body of a kernel that was traced as `jit(shard_map(body))`.

    No communication, no evaluation.

    Args:
      closed_jaxpr: `kernel.trace(*args).jaxpr`.
      mesh_axes: The mesh axes that the kernel's layouts speak about.
      kernel: Its name, for the message.
      arg_names: What messages call the inputs of the body (`x`, `params['w']`), without hoisted constants.
      arg_layouts: Their layouts, from which a message tells how to mend a value.
      how: "error", "warn", or "off".
      always: Check even if `check` looks at the whole program later, because this trace ends before that.
      ask: What the numbers say; keywords are those of `tried`. They are asked where types suspect something, and
        decide; and where they cost little.
      known: Whether they were asked before, for arguments of these shapes.
      apart: What tells its names apart that have one size.

    Raises:
      ReplicationError: One for all findings, each with the user's line and the text to paste.
    """
    if how == "off" or (collecting.value and not always):
        return
    walk = Dataflow(kernel, mesh_axes, arg_names=arg_names, arg_layouts=arg_layouts)
    walk_closed(walk, closed_jaxpr)
    try:
        _report(kernel, walk, how, ask, apart, known)
    except ReplicationError as error:
        error.program = closed_jaxpr
        raise


def _report(
    kernel: str,
    walk: Dataflow,
    how: str,
    ask: Callable[..., Trial] | None,
    apart: Callable[[], Apart | None],
    known: bool = False,
) -> None:
    """Raise what types suspect, if numbers say so too. Where numbers cannot be asked, raise all of it. Where types
    suspect nothing, `numbers_asked` says how many numbers are asked."""
    found, asked = dict.fromkeys(walk.findings), numbers_asked()
    names = misnamed(walk.root, apart()) if walk.compares_names else []
    cheap = asked == "quick" and not (found or known or resized.value)  # a trial around it asks numbers itself
    full = ask is not None and (asked == "full" or (cheap and _differs(walk.root, ask)))
    if ask is None or not (found or full):
        report(kernel, [*names, *found], how, _NAMES if names else "")
        return
    trial = but_for_noise(ask(alone=about_gradients(walk.findings)), walk)
    unknown = unknown_lines(walk, walk.root) if full else ()
    every = [*names, *confirmed(found, trial, kernel, unknown, whole=full, walk=walk)]
    why = trial.why or (f"no draw shows {unreached(trial)[0]}" if trial.unreached else "")
    report(kernel, every, how, why or (_NAMES if names else ""), hang=not trial.why and bool(trial.unreached))


# What a first call may cost where types suspect nothing: an equation costs about a millisecond, for two traces and one
# draw, and a loop as many as its rounds.
_FEW = 200  # equations


def _differs(jaxpr: Any, ask: Callable[..., Trial]) -> bool:
    """Return whether one draw shows that the results are not those of one device, where that costs little."""
    if sum(1 for _ in itertools.islice(equations(jaxpr), _FEW + 1)) > _FEW:
        return False
    return ask(quick=True, gradients=False).wrong


ASKED = ("off", "types", "quick", "full")


def numbers_asked() -> str:
    """Return what the first call of a kernel asks: the environment variable SPMD_CHECK.

    "off" is nothing, "types" is types, and numbers where these suspect something, "quick" is that, and results of one
    draw of each kernel that has few equations, and "full" all draws of each kernel, with gradients.

    Raises:
      SpmdError: SPMD_CHECK is something else.
    """
    asked = os.environ.get("SPMD_CHECK") or "quick"
    if asked not in ASKED:
        rule = f"the environment variable SPMD_CHECK is one of {', '.join(ASKED)}."
        raise SpmdError(rule, call=f"SPMD_CHECK={asked}")
    return asked


_NAMES = "the body cannot be traced where the sizes of these names differ"


def check_names(closed_jaxpr: Any, apart: Apart, how: str) -> None:
    """Check the names of dimensions alone: of a body on whole arrays, where layouts claim nothing.

    Raises:
      ReplicationError: One for all findings.
    """
    report(apart.kernel, misnamed(closed_jaxpr, apart), how, _NAMES)


def check_body(
    closed_jaxpr: Any,
    shards: Sequence[Any],
    *,
    mesh_axes: tuple[str, ...],
    kernel: str,
    axis_sizes: Mapping[str, int],
    how: str = "error",
    ask: Callable[..., Trial] | None = None,
    apart: Callable[[], Apart | None] = lambda: None,
) -> None:
    """Check a body that was inlined in the user's own `shard_map`, and traced on its shards.

    No communication, no evaluation.

    Args:
      closed_jaxpr: The body's own jaxpr.
      shards: Its inputs, without constants. JAX's types say along which axes they differ, or are partial sums.
      mesh_axes: The mesh axes that the kernel's layouts speak about.
      kernel: Its name, for the message.
      axis_sizes: Their sizes.
      how: "error", "warn", or "off".
      ask: What the numbers say, as for `check_jaxpr`.
      apart: What tells its names apart, as there.

    Raises:
      ReplicationError: One for all findings.
    """
    if how == "off" or collecting.value:
        own = apart() if how != "off" else None
        if own is not None and own.alike:  # in the whole program nothing tells whose body it is
            check_names(closed_jaxpr, own, how)
        return
    walk = Dataflow(kernel, mesh_axes, axis_sizes)
    walk.active = True
    walk.varying = [sorted(_compat.varying_axes(x) | _compat.unreduced_axes(x)) for x in shards]
    walk_closed(walk, closed_jaxpr, [walk.constant(None, x) for x in shards])
    _report(kernel, walk, how, ask, apart)


def closed_rows(closed_jaxpr: Any, mesh_axes: tuple[str, ...]) -> frozenset[Any]:
    """The calls that would mix rows of different devices: they close axes that divide what a loop goes over."""
    walk = Dataflow("", mesh_axes)
    walk_closed(walk, closed_jaxpr)
    return frozenset(walk.rows)


@dataclass(frozen=True)
class OutputFacts:
    """What one output of a body really is.

    Attributes:
      different: Mesh axes along which it may differ.
      partial: Mesh axes along which it is certainly a partial sum.
      copies: For each axis on which it is equal as a gathered copy, which JAX types varying, the lines of the
        all_gathers that made it so. (On an axis in neither, it became equal in another way.)
      calls: The calls of ours that these gathers are a part of; None among them for a raw one.
      reasons: For each axis in `different`, the values and primitives that it comes from.
      line: The nearest line of the user's that made it.
    """

    different: tuple[str, ...]
    partial: tuple[str, ...]
    copies: dict[str, tuple[str, ...]]
    calls: dict[str, tuple[Gather | None, ...]]
    reasons: dict[str, tuple[str, ...]]
    line: str


def explain_output(
    closed_jaxpr: Any,
    *,
    mesh_axes: tuple[str, ...],
    kernel: str = "kernel",
    arg_names: Sequence[str] = (),
    arg_layouts: Sequence[Layout] = (),
) -> list[OutputFacts]:
    """Tell gathered copies from different values, for each output of the first body in a jaxpr.

    JAX refused the outputs of a kernel, so the kernel is traced again with out_specs that allow everything. The jaxpr
    of this trace says which outputs are equal after all, and which `all_gather` should say `to="invarying"`.

    Args:
      closed_jaxpr: The diagnosing jaxpr.
      mesh_axes: The mesh axes to tell about.
      kernel: Its name.
      arg_names: What messages call the inputs of the body.
      arg_layouts: Their layouts.

    Returns:
      One entry per output of the body.
    """
    walk = Dataflow(kernel, mesh_axes, arg_names=arg_names, arg_layouts=arg_layouts, trusting=False)
    walk_closed(walk, closed_jaxpr)
    if not walk.outputs:
        return []
    # A nested body is recorded before the one around it, and the outermost is the kernel.
    eqn, outs = walk.outputs[-1]
    atoms = opened(eqn.params["jaxpr"])[0].outvars
    return [_facts(walk, state, atom) for state, atom in zip(outs, atoms, strict=True)]


def _facts(walk: Dataflow, state: State, atom: Variable) -> OutputFacts:
    order = [axis for axis in walk.sizes if axis in walk.wanted]
    gathered = {axis: walk.history.gathers(atom, axis) for axis in order}
    # Along one device nothing differs, and the missing reduction is an error all the same.
    different = tuple(a for a in order if a in state.axes or not (walk.wide(a) or gathered[a]))
    copies: dict[str, tuple[str, ...]] = {}
    calls: dict[str, tuple[Gather | None, ...]] = {}
    for axis in order:
        found = gathered[axis] if axis not in different else []
        if found:
            copies[axis] = tuple(dict.fromkeys(line_of(o.eqn, o.callers) for o in found))
            calls[axis] = tuple(dict.fromkeys(gather_around(o.eqn, o.callers) for o in found))
    sources = {axis: walk.history.sources(atom, axis) for axis in different}
    reasons = {axis: tuple(dict.fromkeys(map(describe, ones))) for axis, ones in sources.items()}
    partial = tuple(axis for axis in order if axis in state.partial)
    return OutputFacts(different, partial, copies, calls, reasons, walk.history.line(atom))
