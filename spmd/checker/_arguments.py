"""Arguments for a trial: random values, and sizes as small as the program allows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd._jaxprs.facts import KernelName, kernel_around
from spmd._jaxprs.primitives import primitive_of
from spmd._jaxprs.walker import Domain, Equation, Held, Variable, walk
from spmd._trees.leaves import held_dtype, is_array, is_key
from spmd.checker._claims import arguments_of
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
        return draws.random(x.shape) < 0.5
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return draws.integers(0, below, x.shape).astype(x.dtype)
    values = draws.normal(size=x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        values = values + 1j * draws.normal(size=x.shape)
    return values.astype(x.dtype)  # by NumPy: JAX compiles and traces nothing


def _keys(x: jax.ShapeDtypeStruct, seed: int) -> Any:
    made = (jax.random.key(seed, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg"))
    key = next(key for key in made if key.dtype == x.dtype)
    return jax.random.split(key, x.shape) if x.shape else key


# --- small sizes -----------------------------------------------------------------------------------------------------

# A program at small sizes: those of the names in its kernels' signatures, on a mesh of few devices.

_MOST = 64  # devices of a mesh that is taken as it is
_FEW = 4  # devices along an axis of a larger one
_NUMBERS = 2**15  # in arguments that keep the sizes of their blocks

Key = tuple[str, int]  # a name, and its size
Place = tuple[int, int]  # an argument, and one of its dimensions


def fewer_devices(sizes: Mapping[str, int], most: int = _FEW) -> dict[str, int]:
    """The sizes of a mesh of few devices: each axis has the largest divisor of its size that is not above `most`."""
    small = lambda n: max((k for k in range(2, most + 1) if n % k == 0), default=n)
    large = math.prod(sizes.values()) > _MOST or most < _FEW
    return {axis: small(n) if large else n for axis, n in sizes.items()}


def few(arrays: Sequence[Any]) -> bool:
    """Return whether there are few enough numbers to compute with them many times."""
    return sum(math.prod(np.shape(x)) for x in arrays) <= _NUMBERS


class Names:
    """The names that kernels have for the dimensions of a program's arguments.

    Two names are one if they have the same size and name, or name one dimension.

    Args:
      meshes: The sizes of the axes of each mesh on which the program is going to run.
      fixed: The names that keep their sizes.
    """

    def __init__(self, meshes: Sequence[Mapping[str, int]], fixed: Collection[str] = ()) -> None:
        self._meshes, self._fixed = meshes, fixed
        self._dims: dict[int, tuple[Sequence[Any], Mapping[str, int]]] = {}
        self._blocks: dict[Key, int] = {}
        self._parent: dict[Key, Key] = {}
        self._at: dict[Place, Key] = {}

    def _root(self, key: Key) -> Key:
        while (parent := self._parent.setdefault(key, key)) != key:
            key = parent
        return key

    def add(self, at: int, dims: Sequence[tuple[Dim, int | None]], sizes: Mapping[str, int]) -> None:
        """Record what a kernel calls the dimensions of an argument."""
        self._dims.setdefault(at, (dims, sizes))
        self.divide([dim for dim, _ in dims], sizes)
        for place, (dim, _) in enumerate(dims):
            if len(dim.atoms) == 1 and (name := dim.atoms[0].name) in sizes:
                first = self._at.setdefault((at, place), (name, sizes[name]))
                self._parent[self._root((name, sizes[name]))] = self._root(first)

    def divide(self, dims: Iterable[Dim], sizes: Mapping[str, int]) -> None:
        """Record into how many blocks a kernel divides its names."""
        for atom in (atom for dim in dims for atom in dim.atoms if atom.name in sizes):
            key = atom.name, sizes[atom.name]
            parts = [math.prod(mesh[axis] for axis in atom.axes or ()) for mesh in self._meshes]
            self._blocks[key] = math.lcm(*parts, self._blocks.get(key, 1))

    @functools.cached_property
    def parts(self) -> dict[Key, int]:
        """Into how many blocks each name is divided."""
        found: dict[Key, int] = {}
        for key, n in self._blocks.items():
            found[self._root(key)] = math.lcm(n, found.get(self._root(key), 1))
        return found

    def smallest(self, least: int = 0) -> dict[Key, int]:
        """The smallest size of each name: at least `least`, a multiple of its blocks, two in each of these, and none
        that another name has."""
        fixed = {self._root(key) for key in self._blocks if key[0] in self._fixed}
        found, taken = {}, {size for _, size in fixed}
        for key, step in self.parts.items():
            if key not in fixed:
                small = max(2 * step, -(-least // step) * step)
                while small in taken:
                    small += step
                taken.add(min(small, key[1]))
                found[key] = small
        return found

    def of_blocks(self, sizes: Mapping[str, int]) -> dict[Key, int]:
        """The size of each name where its blocks are as large as on a mesh of these sizes: Python that looks at a block
        takes the same way."""
        parts: dict[Key, int] = {}
        for dims, known in self._dims.values():
            for atom in (atom for dim, _ in dims for atom in dim.atoms if atom.name in known):
                key = self._root((atom.name, known[atom.name]))
                parts[key] = math.lcm(math.prod(sizes[axis] for axis in atom.axes or ()), parts.get(key, 1))
        return {key: max(key[1] // parts[key], 1) * self.parts.get(key, 1) for key in parts}

    def resized(self, arrays: Sequence[Any], chosen: Mapping[Key, int]) -> list[Any]:
        """The arguments with other sizes of these names. One that no kernel is given is as another one of its shape."""
        shapes: dict[Any, dict[Any, None]] = {}
        for at in self._dims:
            shapes.setdefault(np.shape(arrays[at]), {})[self._shape(at, np.shape(arrays[at]), chosen)] = None
        out = []
        for at, x in enumerate(arrays):
            alike = list(shapes.get(np.shape(x), ()))
            shape = self._shape(at, np.shape(x), chosen) if at in self._dims or len(alike) != 1 else alike[0]
            lies = getattr(x, "sharding", None)
            out.append(x if shape == np.shape(x) else jax.ShapeDtypeStruct(shape, held_dtype(x), sharding=lies))
        return out

    def _shape(self, at: int, before: Sequence[int], chosen: Mapping[Key, int]) -> tuple[int, ...]:
        dims, known = self._dims.get(at, ((), {}))
        if not dims:
            return tuple(before)
        now = lambda name: chosen.get(self._root((name, known[name])), known[name]) if name in known else None
        parts = [[atom.size or now(atom.name) for atom in dim.atoms] for dim, _ in dims]
        known_parts = [[n for n in one if n is not None] for one in parts]
        pairs = zip(parts, known_parts, before, strict=True)
        return tuple(math.prod(known) if len(known) == len(one) > 0 else was for one, known, was in pairs)


def smaller(
    names: Names, arrays: Sequence[Any], allowed: Callable[[Sequence[Any]], bool], least: int = 0
) -> tuple[list[Any], dict[Key, int]]:
    """The arguments of a program with as many names as possible at their smallest sizes, and the sizes of the names.

    A dimension that no kernel names keeps its size.

    Args:
      names: The names.
      arrays: The arguments.
      allowed: Whether the program can be traced with other arguments.
      least: What each new size is at least.
    """
    small = names.smallest(least)
    before = {key: math.lcm(key[1], names.parts[key]) for key in small}
    found = {**before}

    def take(targets: Mapping[Key, int]) -> None:
        """Give as many names as possible their targets: all, else one half and then the other."""
        if targets and allowed(names.resized(arrays, {**found, **targets})):
            found.update(targets)
        elif len(targets) > 1:
            half = list(targets.items())
            take(dict(half[: len(half) // 2]))
            take(dict(half[len(half) // 2 :]))

    take({key: n for key, n in small.items() if n < before[key]})
    # A multiple of another name, or of a constant, each for itself; then those that fit together only.
    kept = sorted((key for key in before if found[key] == before[key]), key=before.__getitem__)
    starts = [8 << i for i in range(max(before.values(), default=0).bit_length())]
    for several, start in itertools.product((*([key] for key in kept), kept), starts):
        left = [key for key in several if found[key] == before[key]]
        steps = {key: math.lcm(start << i, names.parts[key]) for i, key in enumerate(left)}
        targets = {key: max(n, -(-least // n) * n) for key, n in steps.items()}
        take({key: n for key, n in targets.items() if n < before[key]})
    return names.resized(arrays, found), found


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
        same = primitive_of(eqn).pointwise and len(operands) == 1
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


def names_of(jaxpr: Any, arrays: Sequence[Any], sizes: Mapping[str, int], meshes: Sequence[Mapping[str, int]]) -> Names:
    """The names that the kernels of a program have for its arguments.

    Args:
      jaxpr: The program.
      arrays: Its arguments.
      sizes: The sizes of the mesh axes.
      meshes: Those of the meshes on which it is going to be tried.
    """
    seen = _Arguments()
    walk(jaxpr, range(len(arrays)), seen)
    names = Names(meshes)
    for given in seen.kernels:
        bound = bind([(f"{at}", tuple(np.shape(arrays[at])), leaf.layout) for at, leaf in given], sizes)
        if not bound.faults:
            known = {name: one.size for name, one in bound.sizes.items()}
            for (at, _), dims in zip(given, bound.dims, strict=True):
                names.add(at, dims, known)
    return names
