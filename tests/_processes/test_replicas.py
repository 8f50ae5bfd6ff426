"""What every process gives whole. Several processes compare it in `tests/cluster/programs.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd._processes import copies as _replicas
from spmd._processes.copies import check_parts, check_replicas, fingerprint
from spmd.errors import PlacementError

VALUES = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(3, 2),
    np.arange(6).reshape(2, 3),
    np.zeros((0, 3)),
    np.zeros(()),
    jnp.ones(3, jnp.bfloat16),
    jnp.ones(3, jnp.int4),
    jnp.array([True, False]),
    jax.random.key(0),
    jax.random.key(1),
    1.0,
    0,
]


def test_other_values_shapes_and_dtypes_have_other_fingerprints():
    found = [fingerprint(x) for x in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found[0].startswith("float32[2, 3] #") and found[8].startswith("key<fry>[] #")
    assert found[0] == fingerprint(jnp.asarray(VALUES[0])) == fingerprint(VALUES[0].T.copy().T)  # however it lies


@pytest.fixture
def several(monkeypatch, mesh):
    """This process, made to believe that it compares with another one, which has other facts."""
    monkeypatch.setattr(_replicas, "takes_part", lambda mesh: True)
    monkeypatch.setattr(_replicas, "disagreements", lambda facts: [f"{name}: rank 1" for name in facts])
    _replicas.compare_replicas(True)
    yield mesh
    _replicas.compare_replicas(False)


def test_only_what_other_processes_have_themselves_is_compared(several):
    shape = jax.ShapeDtypeStruct((2,), "float32")
    with pytest.raises(PlacementError) as caught:
        check_replicas([("a", np.ones(2)), ("b", shape), ("c", 1.0)], several, "call")
    assert "a: rank 1" in str(caught.value) and "c: rank 1" in str(caught.value) and "b:" not in str(caught.value)
    check_replicas([("b", shape)], several, "call")
    jax.jit(lambda x: [check_replicas([("a", np.ones(2))], several, "call"), x][1])(1.0)  # nothing waits in a trace
    with pytest.raises(PlacementError, match="another global shape"):
        check_parts([("x", jnp.ones(3))], "call")


def test_values_with_one_name_are_all_compared(several, monkeypatch):
    """Keys of a tree that have one repr: the last one was compared, and no other."""
    seen = []
    monkeypatch.setattr(_replicas, "disagreements", lambda facts: seen.append(facts) or [])
    monkeypatch.setattr(_replicas, "different_copies", lambda arrays: seen.append(arrays) or [])
    check_replicas([("a", np.ones(2)), ("a", np.zeros(3)), ("b", 1.0)], several, "call")
    assert list(seen[0]) == ["a", "a (2)", "b"] and len(set(seen[0].values())) == 3
    check_parts([("a", jnp.ones(2)), ("a", jnp.zeros(3))], "call")
    assert list(seen[1]) == ["a", "a (2)"] and list(seen[2]) == ["a", "a (2)"]


@pytest.mark.parametrize("call", ["shard", "kernel", "warm kernel", "init", "parts"])
def test_who_compares(several, call):
    x = np.ones((8, 4), np.float32)
    double = spmd.kernel("b/dp d -> b/dp d", mesh=several)(lambda x: 2 * x)
    if call == "warm kernel":
        _replicas.compare_replicas(False)
        double(jnp.asarray(x))
        _replicas.compare_replicas(True)
        double = spmd.kernel("b/dp d -> b/dp d", mesh=several)(lambda x: 2 * x)
    calls = {
        "shard": lambda: spmd.shard(x, "b/dp d", mesh=several),
        "kernel": lambda: double(x),
        "warm kernel": lambda: double(jnp.asarray(x)),
        "init": lambda: spmd.init(lambda key: jax.random.normal(key, (8,)), "d/dp", mesh=several)(jax.random.key(0)),
        "parts": lambda: spmd.from_process_local(x, "b/dp d", mesh=several),
    }
    with pytest.raises(PlacementError, match="rank 1"):
        calls[call]()
    _replicas.compare_replicas(False)
    calls[call]()


def test_one_process_compares_nothing(mesh):
    assert not _replicas.takes_part(mesh)
    spmd.from_process_local(np.ones((8, 4)), "b/dp d", mesh=mesh, check=True)
