"""Outside kernels: arrays that lie on the mesh already are moved by the planned steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd import _compat
from spmd.comm.planner._route import Axes, Request, route
from spmd.comm.planner._run import run
from spmd.language import axes_tuple


def uneven(sizes: Iterable[int]) -> bool:
    """Whether the size of some axis does not divide a larger one. XLA of jax 0.12 then aborts the process on some
    direct changes of layout ("Could not slice dimension"), but not on steps of one axis at a time."""
    return any(a % b and b % a for a, b in itertools.combinations(sizes, 2))


def move(x: Any, target: NamedSharding) -> Any:
    """`x` brought to another sharding by the planned steps. None if JAX's own way is as good, or the only one.

    Args:
      x: An array, or the tracer of a gradient that is taken outside jit.
      target: Where it is to lie.
    """
    source = getattr(_compat.concrete(x), "sharding", None)
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)  # not every collective takes keys
    if keys or not isinstance(source, NamedSharding) or not _comparable(source, target):
        return None
    steps = program(source, target, tuple(x.shape), x.dtype.itemsize)
    return None if steps is None else steps(x)


def _comparable(a: NamedSharding, b: NamedSharding) -> bool:
    """Whether both are on one mesh and in one memory, and differ in nothing but divisions."""
    return (
        a.mesh == b.mesh
        and a.memory_kind == b.memory_kind
        and not any(s.spec.unreduced or s.spec.reduced for s in (a, b))
    )


@functools.lru_cache(maxsize=1024)
def program(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], itemsize: int) -> Any:
    """The steps, to be compiled once. None if nothing travels."""
    before, after = _placement(source, len(shape)), _placement(target, len(shape))
    mesh = tuple(source.mesh.shape.items())
    request = Request(shape, mesh, before, after, itemsize=itemsize)
    if not any(leg.collectives for leg in route(request).legs):
        return None
    body = functools.partial(run, request=request, copies=frozenset())
    moved = jax.shard_map(body, mesh=source.mesh, in_specs=source.spec, out_specs=target.spec)
    return jax.jit(moved, out_shardings=target)


def _placement(sharding: NamedSharding, rank: int) -> tuple[Axes, ...]:
    return tuple(map(axes_tuple, _compat.partitions(sharding.spec, rank)))
