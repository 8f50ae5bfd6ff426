"""`spmd.check`: what a whole program does otherwise than on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spmd._jaxprs.lines import short_line
from spmd._trees.arguments import explained
from spmd.checker import Findings, checked
from spmd.checker._findings import report
from spmd.errors import SpmdError
from spmd.inspect._listing import listing
from spmd.propagation import propagate


@explained
def check(
    fn: Callable[..., Any],
    *args: Any,
    strict: bool = False,
    reference: Callable[..., Any] | None = None,
    build: Callable[[Any], Any] | None = None,
    rtol: float | None = None,
    **kwargs: Any,
) -> Findings:
    """Check the layouts of a whole program: every kernel and every raw `shard_map` that a function calls.

    The function is traced and not run. The layout of each value is inferred, line by line, from the layouts of the
    arguments. Then the program is interpreted in NumPy, on its mesh and on a mesh of ones, and results and gradients
    are compared. A finding is a place where the program does not do what it does on one device. It has the line, the
    layout, how the layout came to be, and what mends it.

    Communication: none. No device is needed. The program is traced once more, where nothing is divided.

    Args:
      fn: A kernel, or any function: a training step, `jax.grad` of a kernel, a function with `jax.shard_map` in it.
      *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s. What is not an array stays as it is.
      strict: Whether anything but a program that is proved or tested is an error.
      reference: The same in plain JAX on whole arrays, `reference(*args, **kwargs)`: what the program means. With it
        numbers decide about a raw `shard_map` too, which has a mesh of its own.
      build: Makes the program for another mesh, `build(mesh)`: a function, or a tuple that begins with one. With it
        a raw `shard_map` is compared with itself on one device, where it may mean other numbers.
      rtol: How large a difference may be, as a part of the largest number of an array: 1e-6 unless it is given. An
        iteration that stops at 1e-10 agrees with its exact result to about that.
      **kwargs: Keyword arguments.

    Returns:
      The findings, in the order of the program; empty and falsy if there are none. `.verdict` is proved, tested, wrong
      or not tested. A raw `shard_map` may mean one result per device, so what only a string could contradict is not
      `certain` there. `.source()` is the program with the layout of each value beside its line.

    Raises:
      ReplicationError: With `strict`, if there are findings.
      SpmdError: With `strict`, if nothing could be compared, or there is nothing to check.

    Example:
      >>> import jax, jax.numpy as jnp, spmd
      >>> mesh = spmd.make_mesh(dp=2, tp=4)
      >>> @spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)
      ... def norms(x):
      ...     return jax.lax.psum(jnp.sqrt(jnp.sum(x**2, axis=1)), "tp")
      >>> [finding] = spmd.check(norms, jax.ShapeDtypeStruct((4, 8), "float32"))
      >>> print(finding.kind, finding.rule, sep=": ")
      nonlinear: each device along tp has only its term of a sum {U:tp}; take sqrt after the sum is complete.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    findings = checked(fn, name, args, kwargs, reference, build, listing, rtol)
    if findings.verdict.kind in ("", "typed") and (left := _left_open(fn, args, kwargs)):
        findings.verdict = replace(findings.verdict, reasons=(*findings.verdict.reasons, *left))
    if strict:
        report(name, findings)
        if findings.verdict.kind not in ("proved", "tested", "typed"):
            rule = "strict=True asks for proof or test, and there is neither."
            raise SpmdError(rule, call=f"spmd.check({name}, ..., strict=True)", got=[str(findings.verdict)])
    return findings


def _left_open(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What the compiler's plan of a program without kernels leaves open."""
    try:
        plan = propagate(fn, *args, **kwargs)
    except SpmdError:  # no mesh divides it
        return []
    return [f"left open at {short_line(one.where) or 'the result'}: {one}" for one in plan.open]
