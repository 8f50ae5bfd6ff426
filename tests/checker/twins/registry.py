"""Wrong programs, each with its correct twin: `@wrong(pattern)` on the wrong body, `@name.right` on the right one.

A comment `# wrong: kind` at the end of a line says which finding belongs there. Bodies are per-shard code that runs in
a kernel of the pattern, and as well in a plain `jax.shard_map` with the pattern's specs: that is how numbers are
compared without any check of ours. Arguments are made by their names (`MAKERS`) and their dimensions by `SIZES`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from spmd.language import Pattern

# Local sizes and those of other dimensions must not hide a mistake: see test_sizes_hide_nothing.
SIZES = {"b": 4, "f": 8, "h": 8, "d": 12, "s": 16, "v": 24, "m": 32, "n": 40, "k": 6, "l": 3, "e": 20}
MESH = {"dp": 2, "tp": 4}

PAIRS: dict[str, Pair] = {}
MISSED = Path(__file__).parent / "missed.txt"


@dataclass
class Pair:
    """A wrong body and a right one with the same signature.

    Attributes:
      why: What the mistake is, the wrong body's docstring.
      correct: The right body.
      reference: What the right one computes, in plain JAX on whole arrays; without it, the right one on a mesh of ones.
      raw: Whether the fault is certain in a raw `shard_map` too, whose specs claim nothing about whole arrays.
      no_gradient: Why gradients are not compared, where they are not.
      unseen: Why types do not tell the wrong body from the right one; numbers do.
      helper: The function that has the wrong line, where it is not in the body.
      predicate: Of a divergent program, which must never run: what its devices decide by.
    """

    name: str
    pattern: Pattern
    mesh: dict[str, int]
    sizes: dict[str, int]
    mistaken: Callable[..., Any]
    raw: bool = False
    no_gradient: str = ""
    unseen: str = ""
    helper: Callable[..., Any] | None = None
    correct: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    predicate: Callable[..., Any] | None = None

    def right(self, body: Callable[..., Any]) -> Callable[..., Any]:
        self.correct = body
        return body

    def whole(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.reference = fn
        return fn

    def decides(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.predicate = fn
        return fn

    @property
    def group(self) -> str:
        """The class of mistakes, which is the file's name."""
        return self.mistaken.__module__.rpartition(".")[2]

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._marked()[1]

    @property
    def place(self) -> str:
        """`file.py:12`, the line of the mistake."""
        return f"{Path(inspect.getfile(self.mistaken)).name}:{self._marked()[0]}"

    def _marked(self) -> tuple[int, tuple[str, ...]]:
        lines, first = inspect.getsourcelines(self.helper or self.mistaken)
        found = [(first + i, m[1]) for i, line in enumerate(lines) if (m := re.search(r"# wrong: (.*)$", line))]
        assert len(found) == 1, f"{self.name} marks {len(found)} lines as wrong"
        return found[0][0], tuple(re.split(r" or ", found[0][1].strip()))

    def arguments(self) -> list[Any]:
        rng = np.random.default_rng(len(self.name))
        names = list(inspect.signature(self.mistaken).parameters)
        layouts = self.pattern.inputs
        return [MAKERS.get(n, normal)(rng, self.shape(lay)) for n, lay in zip(names, layouts, strict=True)]

    def shape(self, layout: spmd.Layout) -> tuple[int, ...]:
        return tuple(self.sizes[n] if n in self.sizes else int(n) for n in re.findall(r"[a-z]\w*|\d+", bare(layout)))

    def kernel(self, body: Callable[..., Any], *, ones: bool = False, check: str = "error") -> Any:
        """The body as a kernel; on the mesh, or on a mesh of ones."""
        mesh = spmd.make_mesh(**{axis: 1 if ones else n for axis, n in self.mesh.items()})
        return spmd.kernel(str(self.pattern), mesh=mesh, check=check)(body)

    def shard_map(self, body: Callable[..., Any]) -> Any:
        """The body in plain JAX, with the pattern's specs."""
        mesh = spmd.make_mesh(**self.mesh)
        ins, outs = ([lay.spec for lay in side] for side in (self.pattern.inputs, self.pattern.outputs))
        return jax.shard_map(body, mesh=mesh, in_specs=tuple(ins), out_specs=outs[0] if len(outs) == 1 else tuple(outs))

    def decisions(self) -> np.ndarray:
        """What each device of the mesh decides, of a divergent program."""
        specs = tuple(lay.spec for lay in self.pattern.inputs)
        each = lambda *args: jnp.atleast_1d(self.predicate(*args))
        out = jax.sharding.PartitionSpec(tuple(self.mesh))
        run = jax.shard_map(each, mesh=spmd.make_mesh(**self.mesh), in_specs=specs, out_specs=out)
        return np.asarray(jax.jit(run)(*self.arguments())).reshape(*self.mesh.values())


def bare(layout: spmd.Layout) -> str:
    """The names and numbers of a layout's dimensions."""
    return re.sub(r"/\w+|\{.*\}|scalar", "", str(layout))


def wrong(
    pattern: str,
    *,
    mesh: dict[str, int] | None = None,
    raw: bool = False,
    no_gradient: str = "",
    unseen: str = "",
    helper: Callable[..., Any] | None = None,
    **sizes: int,
) -> Callable[[Callable[..., Any]], Pair]:
    """Register a wrong body. `sizes` are those that differ from `SIZES`."""

    def register(body: Callable[..., Any]) -> Pair:
        name = body.__name__
        assert name not in PAIRS, f"two pairs are named {name}"
        known = {**SIZES, **sizes}
        PAIRS[name] = Pair(name, Pattern(pattern), mesh or MESH, known, body, raw, no_gradient, unseen, helper)
        return PAIRS[name]

    return register


def load() -> dict[str, Pair]:
    """All pairs of all files beside this one, but those of `layers.py`."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("registry", "__main__") and not path.stem.startswith("layers"):
            importlib.import_module(f"tests.checker.twins.{path.stem}")
    return PAIRS


# -------------------- arguments


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, SIZES["v"], shape, np.int32)


def uneven(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A mask whose blocks count differently: mostly ones at the start, hardly any at the end."""
    return (rng.random(shape) > np.linspace(0.1, 0.8, np.prod(shape)).reshape(shape)).astype(np.float32)


def definite(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = normal(rng, shape)
    return (x @ np.swapaxes(x, -1, -2) + shape[-1] * np.eye(shape[-1])).astype(np.float32)


MAKERS = {
    "ids": integers,
    "labels": integers,
    "mask": uneven,
    "spd": definite,
    "key": lambda rng, shape: jax.random.key(int(rng.integers(100))),
}


# -------------------- numbers


def results(fn: Callable[..., Any], pair: Pair) -> list[Any]:
    """Values, and gradients of a weighted sum of them by every argument that has some."""
    args = pair.arguments()
    floats = [i for i, x in enumerate(args) if is_float(x)] if not pair.no_gradient else []

    def scored(*chosen: Any) -> Any:
        full = list(args)
        for i, x in zip(floats, chosen, strict=True):
            full[i] = x
        outs = jax.tree.leaves(fn(*full))
        return sum((weighted(o) for o in outs if is_float(o)), jnp.zeros(())), outs

    if not floats:
        return [np.asarray(x) for x in jax.jit(scored)()[1]]
    graded = jax.value_and_grad(scored, argnums=tuple(range(len(floats))), has_aux=True)
    (_, outs), grads = jax.jit(graded)(*(args[i] for i in floats))
    return [np.asarray(x) for x in (*outs, *grads)]


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def weighted(x: Any) -> Any:
    weights = np.asarray(np.random.default_rng(1).standard_normal(x.shape), np.float32)
    return ((x.real + x.imag if jnp.iscomplexobj(x) else x).astype(jnp.float32) * weights).sum()


def truth(pair: Pair) -> list[Any]:
    """By plain JAX on whole arrays, or by the right body on a mesh of ones."""
    return results(pair.reference or pair.kernel(pair.correct, ones=True), pair)


def same(found: list[Any], want: list[Any], tolerance: float = 1e-4) -> bool:
    def close(a: Any, b: Any) -> bool:
        scale = max(1.0, float(np.abs(b).max(initial=0)))
        return a.shape == b.shape and a.dtype == b.dtype and np.allclose(a, b, rtol=0, atol=tolerance * scale)

    return len(found) == len(want) and all(close(a, b) for a, b in zip(found, want, strict=True))


# -------------------- what is said of a wrong body


def refused(pair: Pair) -> str:
    """Who refuses the wrong body outside of a kernel when it is traced: "JAX", "verb" for one of ours, or nobody."""
    try:
        jax.eval_shape(pair.shard_map(pair.mistaken), *pair.arguments())
    except spmd.errors.SpmdError:
        return "verb"
    except Exception:  # JAX says what it does not like in many types
        return "JAX"
    return ""


@dataclass(frozen=True)
class Said:
    """A finding, as `spmd.check` has them. Of an error at the trace, only the text is known."""

    text: str
    kind: str | None = None
    line: str | None = None
    certain: bool = True


def findings(pair: Pair, body: Callable[..., Any], *, raw: bool = False) -> list[Said]:
    run = jax.jit(pair.shard_map(body)) if raw else pair.kernel(body)
    args = pair.arguments()
    try:
        return [Said(str(one), one.kind, one.line, one.certain) for one in spmd.check(run, *args)]
    except spmd.errors.SpmdError as error:
        return [Said(str(error))]
    except Exception as error:
        if body is pair.mistaken and refused(pair) == "JAX":
            return [Said(str(error))]
        raise


def why_missed(pair: Pair, *, raw: bool = False) -> str:
    """Why the mistake does not count as found: nothing is said, or something else, or of another line. Else nothing."""
    said = findings(pair, pair.mistaken, raw=raw)
    if not said:
        return "no finding"
    if all(one.kind is None for one in said):  # an error at the trace
        return ""
    if all(one.kind == "numbers" for one in said):  # they say that it is wrong, and not where
        return ""
    kinds = [one for one in said if one.kind in pair.kinds]
    if not kinds:
        return f"found as {', '.join(sorted({str(one.kind) for one in said}))}"
    if not any(pair.place in str(one.line) for one in kinds):
        return f"found at {', '.join(sorted({str(one.line) for one in kinds}))}"
    return ""
