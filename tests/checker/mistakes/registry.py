"""Mistakes of someone who builds a language model of the ready-made layers: a wrong call beside the right one.

`python -m tests.checker.mistakes` prints what becomes of each; docs/pages/mistakes.md has the same table. Each other
file of this folder registers some:

    mistake(
        "nn.mlp",
        "sp= is forgotten where the stream is divided over the sequence",
        "b s/tp d, d f/tp, f/tp d -> b s/tp d",
        right=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp", sp="tp"),
        wrong=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp"),
    )

The twins (`tests.checker.twins`) prove that the checker names the right finding at the right line. Here each call is
also tried on values whose layouts no call knows, as in a training step that casts its weights.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.errors import ReplicationError, SpmdError
from spmd.language import Pattern
from tests.checker.twins.registry import MAKERS, normal, results, same

__all__ = ["MISTAKES", "Mistake", "load", "mistake"]

SIZES = {"b": 4, "s": 8, "t": 8, "d": 8, "f": 16, "h": 4, "g": 4, "k": 4, "v": 24, "e": 4, "l": 2, "m": 4, "p": 2}

MISTAKES: list[Mistake] = []


@dataclass(frozen=True)
class Mistake:
    """One wrong call.

    Attributes:
      layer: The layer that is called.
      what: The mistake, in words.
      pattern: The kernel's string. The names of the arguments are the parameters of `right`, as for the twins.
      right: The right body.
      wrong: The wrong one.
      wrong_pattern: The string of the wrong kernel, if the mistake is in it.
      mesh: The sizes of the mesh axes.
      sizes: The sizes of the names.
      truth: The same in plain JAX on whole arrays, where the meaning of `right` depends on the sizes of mesh axes.
    """

    layer: str
    what: str
    pattern: str
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    wrong_pattern: str
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    truth: Callable[..., Any] | None = None
    no_gradient: str = ""

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}"

    def arguments(self) -> list[Any]:
        """Whole arrays."""
        rng = np.random.default_rng(len(self.what))
        layouts = Pattern(self.pattern).inputs
        names = list(inspect.signature(self.right).parameters)
        shapes = [tuple(self.sizes[name] for name in layout.names) for layout in layouts]
        return [MAKERS.get(name, normal)(rng, shape) for name, shape in zip(names, shapes, strict=True)]

    def kernel(self, body: Callable[..., Any], pattern: str, *, ones: bool = False, check: str = "error") -> Any:
        """The body on its mesh, or on a mesh of ones."""
        sizes = dict.fromkeys(self.mesh, 1) if ones else self.mesh
        return spmd.kernel(pattern, mesh=spmd.make_mesh(**sizes), check=check)(body)

    def caught(self, *, computed: bool) -> str:
        """Who rejects the wrong call; `computed` as in `_rejected`."""
        return self._rejected(self.wrong, self.wrong_pattern, computed)

    def alarm(self, *, computed: bool) -> str:
        """Who rejects the right call: nobody should."""
        return self._rejected(self.right, self.pattern, computed)

    def _rejected(self, body: Callable[..., Any], pattern: str, computed: bool) -> str:
        """Who rejects a body: "call", "JAX", the check with the kinds of its findings, or nobody, "".

        Args:
          body: The body.
          pattern: Its string.
          computed: Whether the layer is given what was computed from the arguments, and not the arguments themselves,
            whose layouts every call knows.
        """
        body, args = on_computed(body) if computed else body, self.arguments()
        try:
            jax.eval_shape(self.kernel(body, pattern, check="off"), *args)
        except SpmdError as error:
            return "call" if error.__cause__ is None else "JAX"
        except (TypeError, ValueError):
            return "JAX"
        try:
            jax.eval_shape(self.kernel(body, pattern), *args)
        except ReplicationError as error:
            return f"check: {kinds(error.findings)}"
        found = spmd.check(self.kernel(body, pattern), *args)
        return f"spmd.check: {kinds(found)}" if found else ""

    def numbers(self) -> str:
        """Whether the wrong call, unchecked, gives other values or gradients than the right one on a mesh of ones.

        "differ", "same", or "" if it cannot run.
        """
        truth = results(self.truth or self.kernel(self.right, self.pattern, ones=True), self)
        right = results(self.kernel(self.right, self.pattern), self)
        assert same(right, truth), f"{self}: the right call depends on the mesh"
        for body in (self.wrong, on_computed(self.wrong)):  # a call may refuse arguments, and not what is computed
            with contextlib.suppress(SpmdError, TypeError, ValueError):
                found = results(self.kernel(body, self.wrong_pattern, check="off"), self)
                return "same" if same(found, truth, tolerance=1e-3) else "differ"
        return ""


def mistake(
    layer: str,
    what: str,
    pattern: str,
    *,
    right: Callable[..., Any],
    wrong: Callable[..., Any],
    wrong_pattern: str | None = None,
    mesh: Mapping[str, int] | None = None,
    truth: Callable[..., Any] | None = None,
    **sizes: int,
) -> None:
    """Register a mistake; `sizes` are those that differ from `SIZES`."""
    mesh = {"dp": 2, "tp": 2} if mesh is None else mesh
    sizes = {**SIZES, **sizes}
    MISTAKES.append(Mistake(layer, what, pattern, right, wrong, wrong_pattern or pattern, mesh, sizes, truth))


def load() -> list[Mistake]:
    """All mistakes of all files beside this one."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("registry", "__main__"):
            importlib.import_module(f"tests.checker.mistakes.{path.stem}")
    return MISTAKES


def kinds(findings: Iterable[Any]) -> str:
    """The classes of findings."""
    return ", ".join(sorted({one.kind for one in findings}))


def on_computed(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body on the same numbers, computed."""

    def changed(x: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * jnp.ones((), x.dtype)

    return lambda *args: body(*map(changed, args))
