"""Names in a jaxpr that know what they name: the scope of a call, the `jit` of a kernel.

JAX keeps the very string that it is given as the name of a scope or of a jitted function, through `jit`, `grad`,
`vmap`, loops and rematerialisation. A string that carries a fact can therefore be found in the jaxpr of any program. It
adds no equation, and the compiled program contains its text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax.extend.source_info_util as source_info_util

from spmd import _compat
from spmd.language import Layout


class CallName(str):
    """A call of ours as text, `psum(x, "b {U:tp} -> b")`.

    Attributes:
      verb: The function that is called, `psum`.
      pattern: Its string, if it takes one.
    """

    verb: str
    pattern: str

    def __new__(cls, text: str, verb: str = "", pattern: str = "") -> Self:
        self = super().__new__(cls, text)
        self.verb, self.pattern = verb, pattern
        return self


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


def per_shard_reason(eqn: Any, callers: Sequence[Any] = ()) -> str | None:
    """Why an equation is meant per shard, as its innermost `per_shard` says; None where nobody says so.

    Args:
      eqn: The equation.
      callers: The equations whose jaxprs it is inside of, outermost first. The scope of a whole loop or of a call of
        `jit` is around that equation only.
    """
    names = (name for one in (eqn, *reversed(callers)) for _, name in reversed(_compat.name_stack(one)))
    return next((name.why for name in names if isinstance(name, PerShardName)), None)


def one_line(text: str) -> str:
    """The same text in one line, as the name of a scope must be; what it knows is kept."""
    line = " ".join(text.split())
    return CallName(line, text.verb, one_line(text.pattern)) if isinstance(text, CallName) else line


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments of a kernel: where it stands, `params['w']`, and how it lies."""

    path: str
    layout: Layout


class KernelName(str):
    """What profiles, HLO and jaxprs call a kernel.

    Attributes:
      arguments: Those of its `shard_map`, in order; none where the kernel has no `shard_map`.
    """

    arguments: tuple[Leaf, ...]

    def __new__(cls, name: str, arguments: tuple[Leaf, ...] = ()) -> Self:
        self = super().__new__(cls, name if name.isidentifier() else "kernel")
        self.arguments = arguments
        return self


def kernel_around(callers: Sequence[Any]) -> KernelName | None:
    """The kernel whose body an equation right inside these ones is: its `shard_map` stands in its own `jit`."""
    name = callers[-1].params.get("name") if callers else None
    return name if isinstance(name, KernelName) else None
