"""What a program's own text says it communicates, read off its jaxpr: no device, no compiler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd import _compat
from spmd._jaxprs.walker import opened
from spmd._trees.leaves import is_array
from spmd.inspect._peak import Peak
from spmd.inspect._program import ANYWHERE, Program, is_input, local_count, names_of_inputs, of_sharding
from spmd.inspect._records import Written
from spmd.inspect._values import Value, size_bytes
from spmd.inspect._walk import Walk


def written(program: Program, sizes: Mapping[str, int]) -> Written:
    """The written view of a program; see `Written`.

    Equations that no result needs are left out first, as the compiler does. The compiled program may still differ: XLA
    merges equal collectives of equal operands, combines several into one, moves some out of loops and knows the length
    of some `while` loops.

    Args:
      program: The program, which was traced.
      sizes: The sizes of the axes of its mesh.
    """
    inner, consts = opened(program.called)
    jaxpr = _compat.live_jaxpr(inner)
    walk = Walk(sizes)
    values = [Value(_lies(leaf, sizes), label) for label, leaf in _inputs(program, len(jaxpr.invars))]
    outs = walk.read(jaxpr, values, dict(zip(jaxpr.constvars, consts, strict=False)))
    held = [v.place if isinstance(v.place, tuple) else walk.wanted.get(v.label) for v in values]
    given = [(v.aval, _bytes(v.aval, place, sizes)) for v, place in zip(jaxpr.invars, held, strict=True)]
    made = [(v.aval, _bytes(v.aval, out.place, sizes)) for v, out in zip(jaxpr.outvars, outs, strict=True)]
    taken = program.donated if len(program.donated) == len(given) else (False,) * len(given)
    shared = _shared(list(itertools.compress(given, taken)), made)
    in_arguments = [size > 0 for size in shared]
    apart, unfused = together, _ = Peak(walk.local_bytes).most(jaxpr, in_arguments)
    if walk.has_kernels:  # what `spmd.fused` says is one
        together, _ = Peak(walk.local_bytes, kernels=True).most(jaxpr, in_arguments)
    return walk.written(
        arguments_bytes=sum(size for _, size in given),
        outputs_bytes=sum(size for _, size in made),
        donated_bytes=sum(shared),
        standing_bytes=together,
        opened_bytes=apart,
        unfused_bytes=unfused,
    )


def _shared(donated: Sequence[tuple[Any, int]], made: Sequence[tuple[Any, int]]) -> list[int]:
    """Return how many bytes of each result can lie in a donated argument: in one of the same shape and dtype each."""
    free: dict[Any, list[int]] = {}
    for aval, size in donated:
        free.setdefault((aval.shape, aval.dtype), []).append(size)
    keys = [(aval.shape, aval.dtype) for aval, _ in made]
    return [min(free[key].pop(), size) if free.get(key) else 0 for key, (_, size) in zip(keys, made, strict=True)]


def _inputs(program: Program, count: int) -> list[tuple[str, Any]]:
    """Return what each input of the jaxpr is called, `params['w']`, with the argument; static ones are not inputs."""
    named = names_of_inputs(program.jaxpr)
    inputs = ([*filter(kind, program.arguments)] for kind in (is_input, is_array))
    leaves: Sequence[Any] = next((found for found in inputs if len(found) == len(named)), [None] * len(named))
    labelled = list(zip(named, leaves, strict=True))
    arrays = [(label, leaf) for label, leaf in labelled if is_array(leaf)]
    unnamed: list[tuple[str, Any]] = [(f"argument {i}", None) for i in range(count)]
    return next(found for found in (labelled, arrays, unnamed) if len(found) == count)


def _lies(array: Any, sizes: Mapping[str, int]) -> Any:
    """Return where an argument lies. A NumPy array or a number does not move between devices."""
    if isinstance(array, np.ndarray | np.generic | bool | int | float | complex):
        return ANYWHERE
    return of_sharding(getattr(array, "sharding", None), len(getattr(array, "shape", ())), sizes)


def _bytes(aval: Any, place: Any, sizes: Mapping[str, int]) -> int:
    shape = tuple(getattr(aval, "shape", ()))
    whole = size_bytes(aval)
    return whole * local_count(shape, place, sizes) // max(math.prod(shape), 1)
