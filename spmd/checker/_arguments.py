"""Arguments for a trial: random values, and sizes as small as the program allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.facts import KernelName, kernel_around
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, walk
from spmd._trees.leaves import held_dtype, is_array, is_key
from spmd.checker._claims import arguments_of
from spmd.checker._table import TABLE
from spmd.language import Dim, bind


def drawn(tree: Any, seed: int, *, bold: bool = False) -> Any:
    """The same tree with random values for each `jax.ShapeDtypeStruct`.

    Floating-point and complex numbers are normal. Integers may be indices, of tokens or rows, so they are at least 0
    and below the smallest dimension of a floating-point array. With `bold` they are below the largest one for seed 1,
    the second largest for seed 2, and so on: an index of another dimension may then leave its array.
    """
    draws = np.random.default_rng((seed, 1))  # not those of the cotangents
    arrays = [x for x in jax.tree.leaves(tree) if is_array(x) and not is_key(x)]
    rows = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)] or arrays
    sizes = sorted({n for x in rows for n in x.shape if n > 1}) or [2]
    below = sizes[max(len(sizes) - seed, 0) if bold else 0]
    return jax.tree.map(lambda x: _drawn(x, below, draws) if isinstance(x, jax.ShapeDtypeStruct) else x, tree)


def _drawn(x: jax.ShapeDtypeStruct, below: int, draws: np.random.Generator) -> Any:
    if is_key(x):
        return _keys(x, int(draws.integers(2**31)))
    if x.dtype == np.bool_:
        return jnp.asarray(draws.random(x.shape) < 0.5)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(draws.integers(0, below, x.shape).astype(x.dtype), x.dtype)
    values = draws.normal(size=x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        values = values + 1j * draws.normal(size=x.shape)
    return jnp.asarray(values.astype(x.dtype), x.dtype)  # converted in NumPy, which compiles nothing


def _keys(x: jax.ShapeDtypeStruct, seed: int) -> Any:
    made = (jax.random.key(seed, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg"))
    key = next(key for key in made if key.dtype == x.dtype)
    return jax.random.split(key, x.shape) if x.shape else key


# --- small sizes -----------------------------------------------------------------------------------------------------

# A program at small sizes: those of the names in its kernels' signatures, on a mesh of few devices.

_MOST = 64  # devices of a mesh that is taken as it is
_FEW = 4  # devices along an axis of a larger one

Key = tuple[str, int]  # a name, and its size
Place = tuple[int, int]  # an argument, and one of its dimensions


def distinct(free: Mapping[Any, int], blocks: Mapping[Any, int], used: set[int], least: int = 0) -> dict[Any, int]:
    """The smallest size of each name: at least `least`, a multiple of its blocks, two in each of these, and none that
    another name has."""
    found, taken = {}, set(used)
    for name in free:
        step = blocks[name]
        small = max(2 * step, -(-least // step) * step)
        while small in taken:
            small += step
        taken.add(min(small, free[name]))
        found[name] = small
    return found


def resized_array(x: Any, dims: Sequence[tuple[Dim, int | None]], sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """An array with other sizes of its names."""
    shape = []
    for (dim, _), now in zip(dims, np.shape(x), strict=True):
        parts = [atom.size or sizes.get(atom.name) for atom in dim.atoms]
        known = [n for n in parts if n is not None]
        shape.append(math.prod(known) if len(known) == len(parts) > 0 else now)
    return jax.ShapeDtypeStruct(tuple(shape), held_dtype(x), sharding=getattr(x, "sharding", None))


def fewer_devices(sizes: Mapping[str, int], most: int = _FEW) -> dict[str, int]:
    """The sizes of a mesh of few devices: each axis has the largest divisor of its size that is not above `most`."""
    small = lambda n: max((k for k in range(2, most + 1) if n % k == 0), default=n)
    large = math.prod(sizes.values()) > _MOST or most < _FEW
    return {axis: small(n) if large else n for axis, n in sizes.items()}


def halved(sizes: Mapping[Any, int], targets: Mapping[Any, int], allowed: Callable[[Any], bool]) -> dict[Any, int]:
    """The sizes, as many as possible of them at their targets: all, else one half and then the other."""
    found = dict(sizes)

    def take(names: Sequence[Any]) -> None:
        trial = found | {name: targets[name] for name in names}
        if allowed(trial):
            found.update(trial)
        elif len(names) > 1:
            take(names[: len(names) // 2])
            take(names[len(names) // 2 :])

    if targets:
        take(list(targets))
    return found


class _Arguments(Domain):
    """Which argument of the program each value is, and what kernels say of those that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[list[tuple[int, Any]]] = []

    def constant(self, var: Variable | None, value: Any) -> None:
        return None

    def join(self, one: Any, other: Any) -> Any:
        return one if one == other else None

    def step(self, eqn: Equation, operands: Sequence[Any]) -> list[Any]:
        entry = TABLE.get(eqn.primitive.name)
        same = entry is not None and entry.says == "elementwise" and len(operands) == 1
        return [operands[0] if same else None] * len(eqn.outvars)

    def sliced(self, value: Any, operand: Any) -> None:
        return None

    def stacked(self, value: Any, result: Any) -> None:
        return None

    def mapped(self, eqn: Equation, part: Held, operands: Sequence[Any]) -> list[Any]:
        kernel: KernelName | None = kernel_around(self.callers)
        told = arguments_of(eqn, kernel).items()
        self.kernels.append([(operands[i], leaf) for i, leaf in told if operands[i] is not None])
        return [None] * len(eqn.outvars)


def smaller(
    jaxpr: Any,
    arrays: Sequence[Any],
    sizes: Mapping[str, int],
    fewer: Mapping[str, int],
    allowed: Callable[[Sequence[Any]], bool],
) -> list[Any]:
    """The arguments of a program, with as many names of its kernels as possible at their smallest sizes.

    A dimension that no kernel names keeps its size. An argument that no kernel is given is as another one of its shape:
    so the moments of an optimizer follow the parameters.

    Args:
      jaxpr: The program.
      arrays: Its arguments.
      sizes: The sizes of the mesh axes.
      fewer: Those of the mesh on which the program is going to be tried.
      allowed: Whether the program can be traced there with these arguments.
    """
    seen = _Arguments()
    walk(jaxpr, range(len(arrays)), seen)
    names = _Names(fewer)
    for given in seen.kernels:
        bound = bind([(f"{at}", tuple(np.shape(arrays[at])), leaf.layout) for at, leaf in given], sizes)
        if not bound.faults:
            known = {name: one.size for name, one in bound.sizes.items()}
            for (at, _), dims in zip(given, bound.dims, strict=True):
                names.add(at, dims, known)
    resized = lambda chosen: _resized(arrays, {at: names.of(at, chosen) for at in names.dims})
    before = {key: key[1] for key in names.parts}
    least, fits = names.least(), lambda chosen: allowed(resized(chosen))
    found = halved(before, least, fits)
    for key in (key for key in least if found[key] == before[key]):  # a multiple of another name, or of a constant
        powers = (8 << i for i in range(before[key].bit_length()) if least[key] < 8 << i < before[key])
        found[key] = next((n for n in powers if n % names.parts[key] == 0 and fits({**found, key: n})), before[key])
    return resized(found)


def _resized(arrays: Sequence[Any], told: Mapping[int, tuple[Sequence[Any], dict[str, int]]]) -> list[Any]:
    """The arguments of which new sizes are told, and those of the same shapes."""
    found = {at: resized_array(arrays[at], *sizes).shape for at, sizes in told.items()}
    shapes: dict[Any, set[Any]] = {}
    for at, shape in found.items():
        shapes.setdefault(np.shape(arrays[at]), set()).add(shape)
    out = []
    for at, x in enumerate(arrays):
        alike = shapes.get(np.shape(x), set())
        shape = found[at] if at in found else next(iter(alike)) if len(alike) == 1 else np.shape(x)
        out.append(x if shape == np.shape(x) else jax.ShapeDtypeStruct(shape, held_dtype(x)))
    return out


class _Names:
    """The names of all kernels. Two are one if they have the same size and name, or name one dimension."""

    def __init__(self, fewer: Mapping[str, int]) -> None:
        self.fewer = fewer
        self.dims: dict[int, tuple[Sequence[Any], Mapping[str, int]]] = {}
        self.blocks: dict[Key, int] = {}
        self._parent: dict[Key, Key] = {}
        self._at: dict[Place, Key] = {}

    def root(self, key: Key) -> Key:
        while (parent := self._parent.setdefault(key, key)) != key:
            key = parent
        return key

    def add(self, at: int, dims: Sequence[tuple[Dim, int | None]], known: Mapping[str, int]) -> None:
        """Record what a kernel calls the dimensions of an argument."""
        self.dims.setdefault(at, (dims, known))
        for place, (dim, _) in enumerate(dims):
            for atom in dim.atoms:
                if atom.name in known:
                    key = atom.name, known[atom.name]
                    parts = math.prod(self.fewer[axis] for axis in atom.axes or ())
                    self.blocks[key] = math.lcm(parts, self.blocks.get(key, 1))
                    if len(dim.atoms) == 1:
                        self._parent[self.root(key)] = self.root(self._at.setdefault((at, place), key))

    @functools.cached_property
    def parts(self) -> dict[Key, int]:
        """Into how many blocks each name is divided."""
        found: dict[Key, int] = {}
        for key, n in self.blocks.items():
            found[self.root(key)] = math.lcm(n, found.get(self.root(key), 1))
        return found

    def least(self) -> dict[Key, int]:
        """The smallest size of each name that is larger."""
        small = distinct({key: key[1] for key in self.parts}, self.parts, set())
        return {key: n for key, n in small.items() if n < key[1]}

    def of(self, at: int, chosen: Mapping[Key, int]) -> tuple[Sequence[Any], dict[str, int]]:
        """The dimensions of an argument, and the new sizes of their names."""
        dims, known = self.dims[at]
        keys = {name: self.root((name, size)) for name, size in known.items() if (name, size) in self.blocks}
        return dims, {name: chosen[key] for name, key in keys.items()}
