"""The written view as values: its sums are those of its parts, and all of it can be written as JSON."""

import json
import random

import pytest

from spmd.inspect import Boundary, Written, WrittenCollective


def one(rng: random.Random) -> WrittenCollective:
    kind = rng.choice(["all_gather", "psum", "ppermute"])
    numbers = {"group_size": 4, "bytes": rng.randrange(1000), "count": rng.randrange(1, 9)}
    texts = {"text": "psum(x, ...)", "where": "a.py:1", "phase": "forward", "branch": "", "dtype": "float32"}
    flags = {"exact": True, "recomputed": False, "implicit": False}
    return WrittenCollective(kind, ("tp",), **numbers, **texts, **flags, shape=(2, 3), primitive=kind)


@pytest.mark.parametrize("seed", range(5))
def test_sums(seed):
    rng = random.Random(seed)
    found = tuple(one(rng) for _ in range(rng.randrange(6)))
    view = Written(found, {"tp": 4})
    assert view.total_bytes == sum(c.bytes * c.count for c in found)
    kinds = [c.kind for c in found for _ in range(c.count)]
    assert view.counts == {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    assert list(view.counts) == sorted(view.counts)


def test_what_the_boundary_moves_is_counted_apart():
    moved = Boundary("mlp: x", "b", "b/dp", 96, "float32", (8,), "a.py:2")
    view = Written((), {"dp": 2}, boundary=(moved,))
    assert view.total_bytes == 0 and view.counts == {}
    assert view.to_dict()["boundary"][0]["bytes"] == 96


def test_plain_values():
    view = Written((one(random.Random(0)),), {"tp": 4}, flops={"float32": 8.0})
    read = json.loads(json.dumps(view.to_dict()))
    assert read["mesh"] == {"tp": 4} and read["flops"] == {"float32": 8.0} and read["exact"] is True
    assert read["collectives"][0]["axes"] == ["tp"] and read["collectives"][0]["shape"] == [2, 3]
