"""What the rules of the pass stand on: the mesh axes, where values came from, what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spmd._walker import Domain
from spmd.checker._axes import AxisBits, Origin, Origins
from spmd.checker._places import Place, Places
from spmd.checker._source import is_transposed
from spmd.checker._state import State
from spmd.errors import Fault
from spmd.language import Layout


class Walk(Domain):
    """One run of the pass, with what it found; `Dataflow` adds the rules.

    Attributes:
      kernel: Its name, for messages.
      axes: The mesh axes as bits.
      wanted: The axes that the caller asked about.
      checked: Those that markers are checked on where the walk is: the axes of the kernel's own shard_map.
      active: Whether the walk is inside a body. Outside, values are global and layouts say nothing.
      arg_names: What the kernel calls the inputs of its body.
      arg_layouts: Their layouts, where they are told.
      root: The jaxpr that is walked, for those who look again.
      trusting: Whether a layout is believed once it was checked; not where the question is what a value is.
      outputs: The output states of each body.
    """

    def __init__(self, kernel: str, axes: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.axes = AxisBits(axes, sizes)
        self.origins = Origins()
        self.wanted = self.checked = self.axes.mask(tuple(axes))
        self.active = False
        self.trusting = True
        self.arg_names: tuple[str, ...] = ()
        self.arg_layouts: tuple[Layout, ...] = ()
        self.root: Any = None
        self._places: Places | None = None
        self.findings: list[Fault] = []
        self.outputs: list[list[State]] = []

    def place(self, eqn: Any) -> Place | None:
        """How the operand of a layout's marker lies, for a message; the first question reads the whole jaxpr again."""
        if self._places is None:
            self._places = Places(self.root, self.arg_names, self.arg_layouts)
        return self._places.of(eqn)

    def fault(self, eqn: Any, axes: int, describe: Callable[[Walk, Any, Sequence[str]], Fault]) -> None:
        """Note a wrong use of a partial sum, unless JAX wrote it: layouts claim nothing about cotangents."""
        axes &= self.checked
        if self.active and axes and not is_transposed(eqn, self.callers):
            self.findings.append(describe(self, eqn, self.axes.names(axes)))

    def origin_of(self, eqn: Any, axis: str) -> int:
        """The bit of an equation that makes its output different."""
        return self.origins.bit(id(eqn), Origin(eqn.primitive.name, axis, eqn=eqn, callers=tuple(self.callers)))
