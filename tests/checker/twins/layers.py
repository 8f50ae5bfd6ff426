"""Mistakes of someone who builds a language model of the ready-made layers: a wrong call beside the right one.

    mistake(
        "nn.mlp",
        "sp= is forgotten where the stream is divided over the sequence",
        "b s/tp d, d f/tp, f/tp d -> b s/tp d",
        right=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp", sp="tp"),
        wrong=lambda x, a, c: x + nn.mlp(x, a, c, tp="tp"),
    )

The layers are given values that were computed from the arguments, as in a training step that casts its weights: no call
knows the layouts of such values, so no call can refuse them. docs/pages/mistakes.md has a row for each, with the kinds of
findings that are wanted; `python -m tests.checker.twins --write` writes it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmd.language import Pattern
from tests.checker.twins.registry import Pair
from tests.pages import Part

SIZES = {"b": 4, "s": 8, "t": 8, "d": 8, "f": 16, "h": 4, "g": 4, "k": 4, "v": 24, "e": 4, "m": 4, "p": 2}
TABLE = Part(Path(__file__).parents[3] / "docs/pages/mistakes.md", "mistakes")
LAYERS: dict[str, LayerPair] = {}


class LayerPair(Pair):
    """A pair of calls of a layer. Its name is the layer and the mistake, as a row of the page has them."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return rows()[self.name]

    @property
    def place(self) -> str:
        """The file: a call of a layer stands in a lambda of its own."""
        return f"{self.group}.py:"

    def shard_map(self, body: Callable[..., Any]) -> Any:
        """The body in a kernel that checks nothing: layers ask it for sizes."""
        return self.kernel(body, check="off")


def mistake(
    layer: str,
    what: str,
    pattern: str,
    *,
    right: Callable[..., Any],
    wrong: Callable[..., Any],
    mesh: Mapping[str, int] | None = None,
    truth: Callable[..., Any] | None = None,
    **sizes: int,
) -> None:
    """Register a mistake; `sizes` are those that differ from `SIZES`.

    `truth` is the same in plain JAX on whole arrays, where the meaning of `right` depends on the sizes of mesh axes.
    """
    name = f"`{layer}` | {what}"
    assert name not in LAYERS, f"two rows of the page are {name}"
    mesh = {"dp": 2, "tp": 2} if mesh is None else dict(mesh)
    wrong, right = on_computed(wrong), on_computed(right)
    LAYERS[name] = LayerPair(name, Pattern(pattern), mesh, {**SIZES, **sizes}, wrong, correct=right, reference=truth)


def on_computed(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body on the same numbers, computed."""

    def changed(x: Any) -> Any:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x * jnp.ones((), x.dtype)

    @functools.wraps(body)
    def run(*args: Any) -> Any:
        return body(*map(changed, args))

    return run


def load_layers() -> dict[str, LayerPair]:
    """All pairs of calls of layers."""
    for path in sorted(Path(__file__).parent.glob("layers_*.py")):
        importlib.import_module(f"tests.checker.twins.{path.stem}")
    return LAYERS


def write(found: Mapping[str, Iterable[str]]) -> None:
    """Put the table into the page."""
    lines = [f"| {name} | {', '.join(kinds)} |" for name, kinds in found.items()]
    TABLE.write("\n".join(["| layer | mistake | found as |", "|---|---|---|", *lines]))


def rows() -> dict[str, tuple[str, ...]]:
    """The kinds of findings of each row of the page."""
    cells = [line.strip("| ").rpartition(" | ") for line in TABLE.read().splitlines()[2:]]
    return {name: tuple(kinds.split(", ")) for name, _, kinds in cells}
