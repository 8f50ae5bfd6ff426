"""Random meshes, layouts, sizes and arrays, from a seed: what the simulator-based tests run over.

A failing case is reproduced by its seed alone: `Sampler(seed)` makes the same choices in the same order. Seeds start
at SPMD_TEST_SEED, 0 by default; the gate sets it from the commit. `tests/soak.py` draws from `Choices`, which it can
also make smaller.
"""

import math
import os
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from tests.conftest import FULL_CASES, case_count, in_slice
from tests.simulator import count, read

MAX_DEVICES = 8
AXIS_NAMES = ("dp", "tp", "cp", "fsdp", "ep", "x", "row")
DTYPES = ("float32", "bfloat16", "int32", "complex64")
T = TypeVar("T")
U = TypeVar("U")
F = TypeVar("F", bound=Callable[..., Any])


def first_seed() -> int:
    """Where the seeds of all sampled tests start: SPMD_TEST_SEED, else 0."""
    return int(os.environ.get("SPMD_TEST_SEED", 0))


def seeds(full: int = FULL_CASES, *, first: int = 0, times: int = 1) -> range:
    """Seeds for `pytest.mark.parametrize`: `times` as many as SPMD_TEST_CASES says."""
    start = first + first_seed()
    return range(start, start + times * case_count(full))


def share(cases: Iterable[T], times: int = 1, always: Container[T] = ()) -> list[T]:
    """Those of costly cases that a run takes: a sixth by default, chosen by the seed; all of them if exhaustive.

    With `times=2` a twelfth of them. Cases of `always` reach lines of the library that no other test does.
    """
    every = list(cases)
    step = -(-FULL_CASES // case_count())
    step = min(step * times if step > 1 else 1, len(every))
    return [case for i, case in enumerate(every) if i % step == first_seed() % step or case in always]


def rare(test: F) -> F:
    """A costly test of what cheaper ones touch too: one of six runs by default, by name and seed; exhaustively, all."""
    parts = -(-FULL_CASES // case_count())
    here = in_slice(test.__name__, first_seed(), parts)
    return pytest.mark.skipif(not here, reason="a rare test, which runs with another seed")(test)


def mixed(first: Iterable[T], second: Iterable[U]) -> list[tuple[T, U]]:
    """All pairs, in an order of which each `share` has every one of the first, and the second ones in turn.

    >>> mixed("abc", (1, 2, 3))[::3]
    [('a', 1), ('b', 2), ('c', 3)]
    """
    others = list(second)
    return [(one, others[(i + j) % len(others)]) for i, one in enumerate(first) for j in range(len(others))]


class Choices:
    """Random choices that are remembered, so that a failing case can be made smaller: with smaller choices.

    It stands for a NumPy generator and for a `random.Random`. Each choice is a number below some bound, 0 being the
    simplest; given `replay`, those come first and then zeros. The elements of arrays are not choices.

    >>> a = Choices(7)
    >>> drawn = a.integers(1, 100), a.choice("xyz"), list(a.permutation(3))
    >>> b = Choices(7, a.drawn)
    >>> (b.integers(1, 100), b.choice("xyz"), list(b.permutation(3))) == drawn
    True
    >>> Choices(7, ()).integers(1, 100), Choices(7, ()).choice("xyz"), Choices(7, ()).permutation(3).tolist()
    (1, 'x', [0, 1, 2])
    """

    MOST = 2000

    def __init__(self, seed: int, replay: Sequence[int] | None = None) -> None:
        self.seed, self.replay = seed, replay
        self.drawn: list[int] = []
        self.rng = np.random.default_rng(seed)
        self.data = np.random.default_rng(seed)

    def below(self, bound: int) -> int:
        """The one primitive: a number from 0 to bound - 1."""
        if len(self.drawn) >= self.MOST:
            raise RuntimeError("the choices lead nowhere")
        if self.replay is None:
            found = int(self.rng.integers(bound))
        else:
            found = min(self.replay[len(self.drawn)] if len(self.drawn) < len(self.replay) else 0, bound - 1)
        self.drawn.append(found)
        return found

    def random(self, size: Any = None) -> Any:
        return self.below(1000) / 1000 if size is None else self.data.random(size)

    def integers(self, low: int, high: int | None = None, size: Any = None) -> Any:
        low, high = (0, low) if high is None else (low, high)
        return low + self.below(int(high) - int(low)) if size is None else self.data.integers(low, high, size)

    def normal(self, size: Any = None) -> Any:
        return self.data.normal(size=size)

    def choice(self, options: Any, size: Any = None, p: Sequence[float] | None = None) -> Any:
        if p is None:
            if size is not None:
                return self.data.choice(options, size)
            return options[self.below(len(options))]
        order = sorted(range(len(p)), key=lambda i: -p[i])  # the likeliest is the simplest

        def one() -> Any:
            at = self.below(1000) / 1000
            for i in order:
                at -= p[i]
                if at < 0:
                    return options[i]
            return options[order[-1]]

        return one() if size is None else np.array([one() for _ in range(size)])

    def sample(self, options: Sequence, k: int) -> list:
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(k)]

    def permutation(self, options: Any) -> np.ndarray:
        options = range(options) if isinstance(options, int) else options
        return np.array(self.sample(options, len(options)))

    def shuffle(self, options: list) -> None:
        options[:] = self.sample(options, len(options))

    def randint(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def randrange(self, bound: int) -> int:
        return self.below(bound)


def dice(seed: int | Choices) -> Any:
    """A `random.Random` of this seed, or the choices themselves."""
    return seed if isinstance(seed, Choices) else random.Random(seed)


ROWS = ("as it is", "banned", "padded", "its own", "all others", "all", "nan", "inf")


class Sampler:
    """Choices from one seed.

    >>> a, b = Sampler(3), Sampler(3)
    >>> a.mesh() == b.mesh() and a.layout("b s d", {"dp": 2}) == b.layout("b s d", {"dp": 2})
    True
    """

    def __init__(self, seed: int | Choices) -> None:
        self.rng: Any = seed if isinstance(seed, Choices) else np.random.default_rng(seed)

    def choice(self, options: Sequence) -> object:
        """One of the options."""
        return options[int(self.rng.integers(len(options)))]

    def mesh(self, axes: int | None = None) -> dict[str, int]:
        """Two or three axes of sizes 1 to 4, at most eight devices and at least two."""
        number = axes or int(self.rng.integers(2, 4))
        names = [str(name) for name in self.rng.permutation(AXIS_NAMES)[:number]]
        while True:
            sizes = [int(size) for size in self.rng.choice([1, 2, 3, 4], p=[0.1, 0.5, 0.2, 0.2], size=number)]
            if 2 <= math.prod(sizes) <= MAX_DEVICES:
                return dict(zip(names, sizes, strict=True))

    def layout(
        self,
        dims: str | Sequence[str],
        mesh: Mapping[str, int],
        *,
        unreduced: bool = False,
        used: float = 0.75,
    ) -> str:
        """A layout of these dims: each axis divides a random dim, in random order, or none.

        With `unreduced`, an axis may stand in a `{U:}` mark instead.
        """
        names = dims.split() if isinstance(dims, str) else list(dims)
        placed: dict[str, list[str]] = {name: [] for name in names}
        marked = []
        for axis in self.rng.permutation(list(mesh)):
            if self.rng.random() > used:
                continue
            if unreduced and self.rng.random() < 0.3:
                marked.append(str(axis))
            elif names:
                placed[str(self.choice(names))].append(str(axis))
        words = ["/".join([name, *axes]) for name, axes in placed.items()]
        words += [f"{{U:{','.join(axis for axis in mesh if axis in marked)}}}"] if marked else []
        return " ".join(words) or "scalar"

    def sizes(self, names: str | Sequence[str], mesh: Mapping[str, int], layouts: Sequence[str] = ()) -> dict[str, int]:
        """Distinct sizes that all the layouts divide; without layouts, that the whole mesh divides.

        No two are equal, so that swapped dimensions cannot go unnoticed.
        """
        names = names.split() if isinstance(names, str) else list(names)
        base = {name: 1 if layouts else math.prod(mesh.values()) for name in names}
        for layout in map(read, layouts):
            for name, axes in (atom for dim in layout.dims for atom in dim):
                if name in base:
                    base[name] = math.lcm(base[name], count(mesh, axes))
        found: dict[str, int] = {}
        for name in names:
            options = [base[name] * k for k in range(1, 12) if base[name] * k > 1]
            options = [size for size in options if size not in found.values()]
            found[name] = int(self.choice(options[:3]))
        return found

    def dtype(self, *, kinds: str = "fic") -> np.dtype:
        """float32 or bfloat16 (kind f), int32 (i), complex64 (c)."""
        of_kind = {"float32": "f", "bfloat16": "f", "int32": "i", "complex64": "c"}
        name = self.choice([name for name in DTYPES if of_kind[name] in kinds])
        return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(str(name))

    def array(self, shape: Sequence[int], dtype: object = "float32", *, whole: bool = True) -> np.ndarray:
        """Random values; small whole numbers by default, whose sums are exact in every dtype and order."""
        dtype = np.dtype(dtype)
        draw = lambda: self.rng.integers(-2, 3, shape) if whole else self.rng.normal(size=shape)
        values = draw() + 1j * draw() if dtype.kind == "c" else draw()
        return np.asarray(values).astype(dtype)

    def scores(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """A row of float32 for each kind of `ROWS`: some are -inf, or what overflowed; and a column of each, its own.

        It is in the first half, and no score of -inf unless the row's kind says so.
        """
        rows, own = 3 * self.rng.normal(size=(len(ROWS), size)), self.rng.integers(0, size // 2, size=len(ROWS))
        for kind, row, at in zip(ROWS, rows, own, strict=True):
            kept = row[at]
            hidden = {
                "banned": self.rng.random(size) < 0.5,
                "padded": np.arange(size) >= size // 2,  # so that the last devices have no score at all
                "its own": np.arange(size) == at,
                "all others": np.arange(size) != at,
                "all": np.ones(size, bool),
            }
            row[hidden.get(kind, np.zeros(size, bool))] = -np.inf
            row[at] = kept if kind == "banned" else row[at]
            if kind in ("nan", "inf"):
                row[int(self.choice([at, size - 1]))] = float(kind)
        return rows.astype(np.float32), own.astype(np.int32)
