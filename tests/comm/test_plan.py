"""Plans, against references that know nothing of the planner: sets of elements per device, and every step checked on them.

A block is an integer whose bits are the elements of the whole array, so that "what it needs and lacks" is one operation.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter

import numpy as np
import pytest

import spmd
from spmd.comm.planner import _route, _search
from tests import simulator as sim
from tests.comm.cases import written
from tests.comm.test_relayout import CUBE, placements
from tests.sampler import seeds

MESHES = [{"x": 2, "y": 3}, {"x": 4, "y": 2}, {"x": 3, "y": 4}, {"x": 5, "y": 2}, {"x": 1, "y": 3, "z": 2}, CUBE]
NAMES = "abc"


def planned(source, target, mesh, sizes, **how):
    """The plan between two placements, or between two layouts as written."""
    pattern = f"{source if isinstance(source, str) else written(source)} -> "
    pattern += target if isinstance(target, str) else written(target)
    return spmd.plan(pattern, sizes=dict(zip(NAMES, sizes, strict=False)), mesh=mesh, dtype=np.uint8, **how)


def blocks(layout, mesh, sizes):
    """For each device the set of elements that it holds, as bits."""
    whole = np.arange(math.prod(sizes)).reshape(sizes)
    held = sim.scatter(whole, layout if isinstance(layout, str) else written(layout), mesh)
    return {device: sum(1 << int(i) for i in block.ravel()) for device, block in held.items()}


def lacking(have, want):
    """The most that any device needs and lacks."""
    return max((want[d] & ~have[d]).bit_count() for d in want)


# -------------------- the bound


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_bound_is_what_the_worst_device_lacks(mesh) -> None:
    """Analytically in the planner, device by device here."""
    sizes = (math.prod(mesh.values()), 2 * math.prod(mesh.values()))
    everything = placements(tuple(mesh))
    dice = random.Random(len(mesh))
    found = set()
    for _ in range(60):
        source, target = dice.choice(everything), dice.choice(everything)
        if source == target:
            continue
        bound = planned(source, target, mesh, sizes).lower_bound
        assert bound == lacking(blocks(source, mesh, sizes), blocks(target, mesh, sizes)), (source, target)
        found.add(bound)
    assert len(found) > 2


@pytest.mark.parametrize(
    ("pattern", "sent"),
    [
        ("a {U:x} -> a/x", 18),  # a reduce-scatter: 24 (4-1)/4
        ("a {U:x} -> a", 36),  # an all-reduce: twice that
        ("a {U:x,y} -> a/y", 21 + 9),  # four copies of each half: a reduce-scatter over all 8 devices, a gather of 4
        ("a {U:x,y} -> a/y {U:x}", 12),  # what stays partial is another array on each x
    ],
)
def test_the_bound_of_partial_sums_is_met_by_the_known_optima(pattern, sent) -> None:
    """Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009."""
    plan = spmd.plan(pattern, sizes={"a": 24}, mesh={"x": 4, "y": 2}, dtype=np.uint8)
    assert plan.bytes == sent == plan.lower_bound


# -------------------- the route


def edges(here, there, mesh, groups):
    """The cheapest single collective from one placement to another, from the sets alone; None where none does it."""
    (before, after), size = (here, there), next(iter(there.values())).bit_count()
    if all(after[d] & ~before[d] == 0 for d in after):
        return 0
    found = [size] if Counter(before.values()) == Counter(after.values()) else []
    for axes, partners in groups.items():
        n = sim.count(mesh, axes)
        union = {d: _union(before[p] for p in partners[d]) for d in after}
        if all(after[d] == union[d] and after[d].bit_count() == n * before[d].bit_count() for d in after):
            found.append(size - size // n)
        elif size % n == 0 and all(
            (after[d] & before[p]).bit_count() == size // n for d in after for p in partners[d]
        ):
            if all(after[d] & ~union[d] == 0 for d in after):
                found.append(size - size // n)
    return min(found, default=None)


def _union(sets):
    total = 0
    for one in sets:
        total |= one
    return total


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 2, "y": 3}, CUBE], ids=str)
def test_no_sequence_of_collectives_is_cheaper(mesh) -> None:
    """Shortest paths over all placements, with an edge wherever slices, or pieces of one size from each device of a
    group, or whole blocks of others make the next placement."""
    sizes = (math.prod(mesh.values()), math.prod(mesh.values()))
    everything = placements(tuple(mesh))
    held = {p: blocks(p, mesh, sizes) for p in everything}
    axes = [g for n in range(1, len(mesh) + 1) for g in itertools.combinations(mesh, n)]
    groups = {g: {d: sim.group(mesh, d, g) for d in sim.coords(mesh)} for g in axes}
    graph = {
        p: [(q, cost) for q in everything if q != p and (cost := edges(held[p], held[q], mesh, groups)) is not None]
        for p in everything
    }
    for source in random.Random(3).sample(everything, min(len(everything), 4)):
        best = _shortest(graph, source)
        for target in everything:
            if target != source:
                assert planned(source, target, mesh, sizes).bytes == best[target], (source, target)


def _shortest(graph, source):
    best, queue, count = {source: 0}, [(0, 0, source)], itertools.count(1)
    while queue:
        cost, _, here = heapq.heappop(queue)
        for there, more in graph[here]:
            if cost + more < best.get(there, math.inf):
                best[there] = cost + more
                heapq.heappush(queue, (cost + more, next(count), there))
    return best
