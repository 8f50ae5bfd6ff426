"""Which kernel a `shard_map` in a jaxpr is of: the jaxpr keeps its name and specs, not what it calls its dimensions."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spmd.errors import SpmdError

if TYPE_CHECKING:
    from spmd.kernels._plan import Leaf, Plan

__all__ = ["arguments_of", "identifier", "remember"]

_plans: weakref.WeakSet[Plan] = weakref.WeakSet()


def remember(plan: Plan) -> None:
    """Let a plan be found, as long as it lives."""
    _plans.add(plan)


def identifier(name: str) -> str:
    """What profiles, HLO and jaxprs call a kernel."""
    return name if name.isidentifier() else "kernel"


def _written_at(fn: Any) -> str | None:
    """Where a body stands, as JAX notes it of what `shard_map` is given: "file.py:12"."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code and f"{code.co_filename}:{code.co_firstlineno}"


def arguments_of(
    name: str, place: str, sizes: Mapping[str, int], specs: Sequence[Any], ranks: Sequence[int]
) -> tuple[Leaf, ...]:
    """The arguments of the kernel of this name, place in a file, mesh and specs; none where no kernel is, or where
    several are that call their dimensions differently."""
    found: dict[Any, tuple[Leaf, ...]] = {}
    for plan in list(_plans):
        if (identifier(plan.signature.name), plan.sizes, len(plan.leaves)) != (name, dict(sizes), len(specs)):
            continue
        if not place.endswith(_written_at(plan.signature.fn) or ""):
            continue
        with contextlib.suppress(SpmdError):  # arrays of another rank
            pairs = zip(plan.leaves, specs, ranks, strict=True)
            if all(plan.spec(leaf.layout, rank) == spec for leaf, spec, rank in pairs):
                found[tuple((leaf.path, leaf.layout.short) for leaf in plan.leaves)] = plan.leaves
    return next(iter(found.values())) if len(found) == 1 else ()
