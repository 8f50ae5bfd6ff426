"""`explain`: what a program sends, from which line, what the compiler made of it, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd import _jax_errors
from spmd._leaves import kind_of
from spmd.accelerators import Hardware, hardware
from spmd.errors import MeshError, SpmdError
from spmd.inspect._collectives import collectives_of_text
from spmd.inspect._explanation import Explanation
from spmd.inspect._program import Program, meshes_of_jaxpr, stage
from spmd.inspect._roofline import memory_of
from spmd.inspect._written import written as read
from spmd.kernels import Kernel
from spmd.language import mesh_text
from spmd.mesh import crossing, sizes_for


def explain(
    fn: Any,
    *args: Any,
    mesh: Any = None,
    hardware: str | Hardware | None = None,
    compiled: Any = None,
    **kwargs: Any,
) -> Explanation:
    """What a program sends, from which line, over which mesh axes, what the compiler made of it, and its cost.

    Two views are put side by side. *Written*: each collective of the traced program with the user's string,
    bytes, loops multiplied out, forward or backward, and what is moved to enter a kernel. *Compiled*: what the
    optimised program runs, matched to what was written; collectives that nobody wrote are marked. Nothing is
    run. `fn` is traced once and compiled once.

    Where the devices of the mesh belong to several processes, it names the axes that cross them, and sums what is sent
    over those apart: between hosts the links are slower.

    On a mesh without devices (`spmd.make_mesh(..., abstract=True)`) there is no compiled program; the written
    view, bytes and times are the same.

    Args:
      fn: A kernel, a `jax.jit`ed, differentiated or plain function with kernels in it, or what `.trace`,
        `.lower` or `.compile` returned (then without arguments; lowered and compiled programs have no written
        view).
      *args: Arguments of `fn`, arrays or `jax.ShapeDtypeStruct`s. Their shardings, if they have any, say what the
        boundary of a kernel moves.
      mesh: The mesh, where neither `fn` nor its arguments carry one.
      hardware: The name of a preset as `spmd.hardware` takes it ("h100"), or a `spmd.Hardware`, for times.
      compiled: False for the written view alone, or a compiled program of `fn` to look at instead. By default
        `fn` is compiled if its mesh has devices; with True it is an error if it has none.
      **kwargs: Keyword arguments of `fn`.

    Returns:
      An `Explanation`.

    Raises:
      SpmdError: `fn` is none of the above, or `hardware` is not known.
      MeshError: `compiled=True` on a mesh without devices, or `mesh` is not the program's own.

    Example:
      >>> import jax, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4, abstract=True)
      >>> @spmd.kernel("b/dp d/tp -> b/dp d", mesh=mesh)
      ... def gather(x):
      ...     return spmd.all_gather(x, "b/dp d/tp -> b/dp d")
      >>> report = spmd.explain(gather, jax.ShapeDtypeStruct((8, 64), "float32"))
      >>> [(one.kind, one.axes, one.bytes, one.count, one.phase) for one in report.collectives]
      [('all_gather', ('tp',), 768, 1, 'forward')]
    """
    machine = None if hardware is None else _hardware(hardware)
    _check_compiled(compiled)
    given = None if mesh is None else sizes_for(mesh, "explain(..., mesh=...)")
    program = stage("explain", fn, args, kwargs, mesh)
    _check_mesh(program, given)
    found = program.mesh if program.mesh is not None else mesh
    missing: list[str] = []
    if compiled is True and not program.has_devices:
        rule = "a program is compiled for devices, and this mesh has none."
        raise MeshError(rule, call="explain(..., compiled=True)", advice="compiled=None, or a mesh with devices")
    stats = _compiled(program, compiled, missing)
    found = program.mesh if found is None else found
    sizes = {} if found is None else sizes_for(found, "")
    # A jitted function is read inside another trace, which shares its body: see `written`.
    own = hasattr(fn, "lower") and not isinstance(fn, Kernel) and not hasattr(fn, "jaxpr")
    jaxpr = None if own else program.jaxpr
    written = None if program.jaxpr is None else read(fn, args, kwargs, mesh, jaxpr=jaxpr, donated=program.donated)
    if written is None:
        missing.append("written view: a lowered or compiled program has no strings; pass the function itself")
    report = None if stats is None else collectives_of_text(stats.as_text(), mesh=sizes or None)
    return Explanation(
        program.name,
        sizes or (report.mesh if report is not None and report.mesh else {}),
        written,
        report,
        memory=memory_of(written, stats),
        machine=machine,
        platform=_platform(found) if stats is not None else "",
        missing=missing,
        crossing=crossing(found),
    )


_hardware = hardware


def _check_compiled(compiled: Any) -> None:
    if compiled is None or isinstance(compiled, bool) or hasattr(compiled, "memory_analysis"):
        return
    rule = f"compiled is None, True, False or a compiled program, not {kind_of(compiled)}."
    raise SpmdError(rule, call="explain(..., compiled=...)", advice="as in compiled=jax.jit(fn).lower(x).compile()")


def _check_mesh(program: Program, given: Mapping[str, int] | None) -> None:
    """Refuse a mesh that is not the program's own."""
    for mesh in meshes_of_jaxpr(program.jaxpr):
        if given is not None and dict(mesh.shape) != given:
            rule = "mesh= is another mesh than that of the program."
            got = [f"the program: {mesh_text(mesh.shape)}", f"the call: {mesh_text(given)}"]
            advice = "without mesh=, or a program made for that mesh"
            raise MeshError(rule, call="explain(..., mesh=...)", got=got, advice=advice)
        return


def _compiled(program: Program, compiled: Any, missing: list[str]) -> Any:
    """The compiled program to look at, or None; then `missing` says why."""
    if hasattr(compiled, "memory_analysis"):
        return compiled
    abstract = "compiled view: needs devices, and the mesh is abstract"
    if not program.has_devices:
        missing.append(abstract)
        return None
    if compiled is False:
        return None
    try:
        return program.compiled
    except ValueError as error:  # the mesh of a traced program may be unknown until JAX needs its devices
        if compiled is True or program.mesh is not None or not _jax_errors.lacks_devices(error):
            raise
        missing.append(abstract)
        return None


def _platform(mesh: Any) -> str:
    devices = getattr(mesh, "devices", None)
    return "" if devices is None else devices.flat[0].platform
