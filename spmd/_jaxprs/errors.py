"""What JAX's own errors say, as facts.

JAX raises sentences whose words change between its versions. Only this file reads them. Code that catches such an
error asks here what it says, and words its own message. No other file reads the text of an error.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import traceback
from dataclasses import dataclass
from typing import Literal

import jax

from spmd import _compat
from spmd._jaxprs.lines import is_outside, is_users
from spmd.errors import SpmdError

Kind = Literal[
    "carry",
    "branches",
    "placement",
    "pallas",
    "axis",
    "decision",
    "layout",
    "pattern",
    "mixed",
    "numpy",
    "number",
    "selection",
    "memory",
    "rule",
    "mapped",
]


@dataclass(frozen=True, slots=True)
class Carry:
    """A part of a loop's carry whose type changes: its name, its type before the loop and after one step."""

    name: str
    before: str
    after: str

    @property
    def is_scalar(self) -> bool:
        return "[]" in self.before

    @property
    def varying(self) -> frozenset[str]:
        """The mesh axes on which it varies after one step, and not before."""
        return _varying(self.after) - _varying(self.before)

    @property
    def constant(self) -> bool:
        """Whether it is equal on all axes before the loop, as what `jnp.zeros` makes."""
        return not _varying(self.before)


@dataclass(frozen=True, slots=True)
class Told:
    """What an error of JAX is about.

    Attributes:
      kind: "carry" (a loop changes the type of its carry), "branches" (those of a cond give different types),
        "placement" (whole arrays are placed where shards are), "pallas" (a result without manual axes), "axis" (a
        collective names an axis that is not bound), "decision" (Python decides by a value), "layout" or "pattern" (a
        call lacks its string), "mixed" (a reduction also over axes on which the value is equal), "numpy" (NumPy
        takes a traced array), "number" (Python takes its value), "selection" (its values decide the size of a result),
        "memory" (operands lie in different memories),
        "rule" (the forward rule of a `custom_vjp` gives other types than its function), "mapped" (what `vmap` makes of
        a loop has values of other types than the loop).
      axis: The axis that is not bound, where JAX says it; the function that lacks a layout.
      carries: The parts of the carry.
      varying: Of the axes of a reduction, those on which its value varies.
      equal: Those on which it is equal.
    """

    kind: Kind
    axis: str | None = None
    carries: tuple[Carry, ...] = ()
    varying: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()


# What code asks of a traced array, by the errors of JAX; the first is one of the third.
_TRACED: dict[Kind, tuple[type[Exception], ...]] = {
    "decision": (jax.errors.TracerBoolConversionError,),
    "numpy": (jax.errors.TracerArrayConversionError,),
    "selection": (jax.errors.NonConcreteBooleanIndexError,),
    "number": (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError),
}


def of_shapes(error: Exception) -> bool:
    """Return whether JAX, or NumPy for it, says that shapes do not fit."""
    return "shape" in str(error)


def told(error: Exception) -> Told | None:
    """Return what an error that a trace raised is about. None for all other errors, which may be the user's own."""
    text = str(error)
    for kind, classes in _TRACED.items():
        if isinstance(error, classes):
            return Told(kind)
    if isinstance(error, TypeError) and ("of concrete values" in text or "Tracer.__format__" in text):
        return Told("number")
    if text.startswith("memory_space of all inputs"):
        return Told("memory")
    lacks = re.match(r"(\w+)\(\) missing 1 required positional argument: '(layout|pattern)'", text)
    if lacks and isinstance(error, TypeError):
        return Told("layout" if lacks[2] == "layout" else "pattern", lacks[1])
    if "manual axis types do not match" in text and "carry" in text:
        return Told("carry", carries=_carries(text))
    if "manual axis types do not match" in text and text.startswith(("cond branches", "switch branches")):
        return Told("branches")
    if "should be of type `Manual`" in text:
        return Told("placement")
    if "`manual_axis_type` on `jax.ShapeDtypeStruct` must not be" in text:
        return Told("pallas")
    if text.startswith("Custom VJP fwd rule") and "{V:" in text:
        return Told("rule")
    if mapped_loop(error):
        return Told("mapped")
    mixed = re.search(r"can only accept axis_name which .* Got input type: (\S+), axes: \(([^)]*)\)", text)
    if mixed:
        varies = _varying(mixed[1])
        axes = re.findall(r"'(\w+)'", mixed[2])
        return Told("mixed", None, (), tuple(a for a in axes if a in varies), tuple(a for a in axes if a not in varies))
    unbound = re.search(r"[Uu]nbound axis name:? ?'?(\w+)?", text)
    if unbound or (isinstance(error, AssertionError) and not text and raised_by_jax(error)):
        return Told("axis", unbound[1] if unbound else None)
    return None


def mapped_loop(error: Exception) -> bool:
    """Return whether JAX says that types do not fit where it maps code, or derives what it has mapped."""
    frames = (os.path.basename(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
    told = any(one in str(error) for one in ("varying manual axes", "invariant->variant"))
    return told and not {"batching.py", "ad.py"}.isdisjoint(frames)


def _varying(type_: str) -> frozenset[str]:
    """The mesh axes on which a value of this type varies, as JAX prints it."""
    return frozenset(axis for found in re.findall(r"V:\(?([\w,]+)", type_) for axis in found.split(","))


def _carries(text: str) -> tuple[Carry, ...]:
    facts = re.findall(
        r"[Tt]he input carry (?:component )?(\S+) has type (\S+)\s+but[^;]*?component has type (\S+?),? so the manual",
        text,
    )
    return tuple(Carry(name, before.rstrip(","), after.rstrip(",")) for name, before, after in facts)


def raised_by_jax(error: BaseException) -> bool:
    """Return whether the line that raised an error is JAX's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _compat.in_jax(frames[-1].filename)


_CONTROL = ("scan", "while_loop", "fori_loop", "cond", "switch", "map", "associative_scan")


def made_by_library(error: BaseException) -> bool:
    """Return whether a function of JAX, or of another package, made the loop or the branches that an error is about."""
    codes = [here.f_code for here, _ in traceback.walk_tb(error.__traceback__)]
    last = max((i for i, code in enumerate(codes) if is_outside(code.co_filename)), default=-1)
    control = {inspect.unwrap(getattr(jax.lax, name)).__code__ for name in _CONTROL}
    # JAX wraps its functions to shorten tracebacks; any other function before the loop's own is not the user's.
    between = itertools.takewhile(lambda code: code not in control, codes[last + 1 :])
    makers = [code for code in between if code.co_name != "reraise_with_filtered_traceback"]
    return bool(makers) or (last >= 0 and not is_users(codes[last].co_filename))


def named_axes(error: BaseException) -> list[str]:
    """The axes that a collective was given, innermost first. Where JAX asserts without a word, its frames tell them."""
    found: list[str] = []
    for here, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _compat.in_jax(here.f_code.co_filename):
            break
        for name in ("axis_name", "axes", "axis_names", "axis"):
            value = here.f_locals.get(name)
            several = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            found += [axis for axis in several if isinstance(axis, str)]
    return found


def lacks_batching(error: Exception) -> bool:
    """Return whether JAX raised this for want of a batching rule of a collective, and not the user's code."""
    texts = ("pvary", "pcast", "under `jax.shard_map`", "under jax.shard_map")
    return raised_by_jax(error) and (not isinstance(error, ValueError) or any(one in str(error) for one in texts))


def lacks_devices(error: Exception) -> bool:
    """Return whether JAX could not compile since a mesh has no devices."""
    return "AbstractMesh" in str(error)


def first_line(error: BaseException) -> str:
    """Return how an error begins, to be quoted: the sentence that says what is wrong, where the error is ours."""
    if isinstance(error, SpmdError):
        return error.fault.rule
    return (str(error) or type(error).__name__).splitlines()[0]


def refused_by_the_system(error: BaseException | None) -> BaseException | None:
    """The error among those that led to this one that says what the operating system refused, such as to write on a
    full disk. Python says it by an OSError, a time-out among them, and tensorstore by a ValueError. None for others,
    which are faults of a program."""
    while error is not None and not isinstance(error, OSError) and "os_error_code=" not in str(error):
        error = error.__cause__ or error.__context__
    return error
