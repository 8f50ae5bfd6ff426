"""Names in a jaxpr that know what they name: the scope of a call, the `jit` of a kernel.

JAX keeps the very string that it is given as the name of a scope or of a jitted function, through `jit`, `grad`,
`vmap`, loops and rematerialisation. A string that carries a fact can therefore be found in the jaxpr of any program. It
adds no equation, and the compiled program contains its text only.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple, Self

import jax.extend.source_info_util as source_info_util

from spmd import _compat
from spmd._jaxprs.walker import Equation, Role, held, opened
from spmd.errors import Fix
from spmd.language import Layout, Size

Place = tuple[Any, ...]  # where a body calls something: the code and the instruction of each function on the way


class CallName(str):
    """A call of ours as text, `psum(x, "b {U:tp} -> b")`.

    Attributes:
      verb: The function that is called, `psum`.
      pattern: Its string, if it takes one.
      gather: What is known of a call that gathers, where a kernel is traced again because of it.
    """

    verb: str
    pattern: str
    gather: Gather | None

    def __new__(cls, text: str, verb: str = "", pattern: str = "", gather: Gather | None = None) -> Self:
        self = super().__new__(cls, text)
        self.verb, self.pattern, self.gather = verb, pattern, gather
        return self


@dataclass(frozen=True, slots=True)
class Gather:
    """A call that gathers.

    Attributes:
      place: Which call of the body it is; None where the user said `to=`, and nothing is left to choose.
      again: The same call with `to="invarying"`, to paste.
      chosen: Whether `to="invarying"` was chosen for it.
    """

    place: Place | None = None
    again: Fix | None = None
    chosen: bool = False


def gather_around(eqn: Equation, callers: Sequence[Equation] = ()) -> Gather | None:
    """The call that gathers which an equation is a part of, where a kernel is traced again because of it."""
    names = (name for one in (eqn, *reversed(callers)) for _, name in reversed(_compat.name_stack(one)))
    return next((name.gather for name in names if isinstance(name, CallName) and name.gather), None)


class LayoutName(str):
    """What asks the compiler for a layout: a call of ours, or an argument or result of a kernel."""

    layout: Layout

    def __new__(cls, text: str, layout: Layout = Layout("...")) -> Self:
        self = super().__new__(cls, text)
        self.layout = layout
        return self


class PerShardName(str):
    """The scope of `spmd.per_shard(why)`: what is traced inside is meant per shard.

    Attributes:
      why: The user's reason.
      source_info: Where `per_shard` was called, as an equation has it.
    """

    why: str
    source_info: Any

    def __new__(cls, why: str) -> Self:
        why = one_line(why)
        self = super().__new__(cls, f'per_shard("{why}")')
        self.why, self.source_info = why, source_info_util.current()
        return self


class GradientName(str):
    """The scope of `spmd.grad` and `spmd.value_and_grad`: the sums that a gradient adds there are written by their
    `loss=`."""


class DecisionName(str):
    """The scope of what chooses for the user in a call of ours: `spmd.cond` decides as the user's predicate says."""


class FusedName(str):
    """The scope of `spmd.fused(what)`: what is traced inside is meant to be one kernel on an accelerator."""


class WindowName(str):
    """The scope of what `spmd.meanwhile` computes, or of what travels in that time.

    Attributes:
      source_info: Where `meanwhile` was called, as an equation has it. Both scopes of a call have the same.
      moves: The scope of what travels; the scope itself, if it is that one.
    """

    source_info: Any
    moves: WindowName

    def __new__(cls, text: str = "meanwhile") -> Self:
        self = super().__new__(cls, text)
        self.source_info, self.moves = source_info_util.current(), self
        if text == "meanwhile":
            self.moves = cls("meanwhile: what travels")
            self.moves.source_info = self.source_info
        return self


def per_shard_reason(eqn: Equation, callers: Sequence[Equation] = ()) -> str | None:
    """Return why an equation is meant per shard: the reason of its innermost `per_shard`. None if there is none around
    it.

    Args:
      eqn: The equation.
      callers: The equations whose jaxprs it is inside of, outermost first. The scope of a whole loop or of a call of
        `jit` is around that equation only.
    """
    names = (name for one in (eqn, *reversed(callers)) for _, name in reversed(_compat.name_stack(one)))
    return next((name.why for name in names if isinstance(name, PerShardName)), None)


def one_line(text: str) -> str:
    """The same text in one line, as the name of a scope must be. It keeps what the name knows."""
    line = " ".join(text.split())
    if not isinstance(text, CallName):
        return line
    return CallName(line, text.verb, one_line(text.pattern), text.gather)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments of a kernel: where it stands, `params['w']`, and how it lies."""

    path: str
    layout: Layout


class Apart(NamedTuple):
    """What tells names apart that have one size.

    Attributes:
      kernel: Their kernel, for messages.
      arguments: Its arguments.
      bound: All its names, with their sizes.
      alike: Those that have the size of another one.
      raised: From two of them to what its body raises where one has another size, and where the other has; None for
        each trace that ends.
    """

    kernel: str
    arguments: Sequence[Leaf]
    bound: tuple[tuple[str, Size], ...]
    alike: frozenset[str]
    raised: Callable[[str, str], Sequence[Exception | None]]


class KernelName(str):
    """What profiles, HLO and jaxprs call a kernel.

    Attributes:
      arguments: Those of its `shard_map`, in order; none where the kernel has no `shard_map`.
      apart: From what has the shapes of its arguments to what tells its names apart.
    """

    arguments: tuple[Leaf, ...]
    apart: Callable[[Sequence[Any]], Apart] | None

    def __new__(
        cls, name: str, arguments: tuple[Leaf, ...] = (), apart: Callable[[Sequence[Any]], Apart] | None = None
    ) -> Self:
        self = super().__new__(cls, name if name.isidentifier() else "kernel")
        self.arguments, self.apart = arguments, apart
        return self

    def __reduce__(self) -> Any:
        """Another process gets the name without the kernel, whose body cannot be pickled."""
        return type(self), (str(self), self.arguments)


def kernel_around(callers: Sequence[Equation]) -> KernelName | None:
    """The kernel whose body an equation right inside these ones is: its `shard_map` stands in its own `jit`."""
    name = callers[-1].params.get("name") if callers else None
    return name if isinstance(name, KernelName) else None


# --- callers -----------------------------------------------------------------------------------------------------

# The functions of `spmd.nn` and `spmd.parallel` that a call comes from: the user called those, and not the verb.

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS = {os.path.join(_HERE, room) + os.sep: f"spmd.{room}" for room in ("nn", "parallel")}


def layers_of(codes: Iterable[CodeType]) -> list[str]:
    """Their names, such as `nn.mlp`, in the order of the calls that were running."""
    found = []
    for code in codes:
        room = next((room for folder, room in _ROOMS.items() if code.co_filename.startswith(folder)), None)
        if room is not None and code.co_name in getattr(sys.modules.get(room), "__all__", ()):
            found.append(f"{room.removeprefix('spmd.')}.{code.co_name}")
    return found


def layer_now() -> str | None:
    """The layer that the user's line calls now."""
    found = layers_of(_running())
    return found[-1] if found else None


def _running() -> Iterator[CodeType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def rather_told(layer: str, have: str, fix: str) -> str:
    """Advice in place of a fix that sends what a layer is given: the layer may be told how that lies.

    Args:
      layer: The layer.
      have: How the array lies.
      fix: The call that would move it.
    """
    names = _axis_keywords(layer)
    told = f"{' or '.join(names)} of {layer}, if one is for this axis"
    if not names:
        told = f'"{have}" where {layer} is told how it lies'
    return f"{told}; or else {fix} before it"


def _axis_keywords(layer: str) -> list[str]:
    """The keywords that tell a layer which mesh axes divide its arguments, such as `tp=`."""
    room, _, name = layer.partition(".")
    parameters = inspect.signature(getattr(sys.modules[f"spmd.{room}"], name)).parameters.values()
    return [f"{one.name}=" for one in parameters if str(one.annotation).startswith(("Axes", "str | tuple[str, ...]"))]


# --- axes that are left to the compiler --------------------------------------------------------------------------

# Which mesh axes the bodies of a program leave to the compiler: those that no `shard_map` around them makes manual.


def left_axes(jaxpr: Any) -> dict[str, tuple[str, ...]]:
    """For each mesh axis, the kernels or functions that run per shard and leave it to the compiler.

    Args:
      jaxpr: The whole program.
    """
    found: dict[str, dict[str, None]] = {}
    _enter(jaxpr, frozenset(), "", found)
    return {axis: tuple(names) for axis, names in found.items()}


def _enter(jaxpr: Any, manual: frozenset[str], name: str, found: dict[str, dict[str, None]]) -> bool:
    """Look into a jaxpr. Returns whether a `shard_map` in it makes more axes manual."""
    deeper = False
    for eqn in opened(jaxpr)[0].eqns:
        around = eqn.params.get("name") or name
        inside = manual
        if eqn.primitive.name == "shard_map":
            deeper = True
            inside = manual | set(_compat.made_manual(eqn))
        for part in held(eqn) if eqn.params else ():
            if part.role == Role.DERIVATIVE:
                continue
            more = _enter(part.jaxpr, inside, around, found)
            deeper = deeper or more
            if eqn.primitive.name == "shard_map" and not more:
                own = getattr(opened(part.jaxpr)[0].debug_info, "func_name", "") or "shard_map"
                for axis, size in eqn.params["mesh"].shape.items():
                    if axis not in inside and size > 1:
                        found.setdefault(axis, {})[around or own] = None
    return deeper


def left_text(left: dict[str, tuple[str, ...]]) -> list[str]:
    """One sentence for each axis."""
    return [f"{axis} is the compiler's in {', '.join(names)}" for axis, names in left.items()]
