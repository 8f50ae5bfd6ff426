"""What every process gives whole, and what is noted to be compared; several processes do: `tests/cluster/test_comparison.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd._processes import facts
from spmd._processes.agreement import differences
from spmd._processes.copies import fingerprint, takes_part

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
    """This process, made to believe that it is one of several."""
    monkeypatch.setattr(facts, "takes_part", lambda mesh: True)
    list(facts.noted())
    yield mesh
    list(facts.noted())


def said() -> list[dict[str, Any]]:
    return [dict(found) for _, _, found in facts.noted()]


def test_only_what_other_processes_have_themselves_is_noted(several):
    shape = jax.ShapeDtypeStruct((2,), "float32")
    facts.note_arguments("call", [("a", np.ones(2)), ("b", shape), ("c", 1.0)], several)
    jax.jit(lambda x: [facts.note_arguments("call", [("d", x)], several), x][1])(1.0)
    first, second = said()
    assert list(first) == ["a", "c", "settings"] and list(second) == ["settings"]
    facts.note_arguments("call", [("large", np.arange(2**20))], several)
    facts.note_arguments("call", [("large", np.arange(2**20) + 1)], several)
    one, other = said()
    assert one != other


def kernel_of(mesh: Any, factor: float, closed: Any = 0.0) -> Any:
    return spmd.kernel("b/dp d -> b/dp d", mesh=mesh)(lambda x: factor * x + closed)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))])
def test_a_kernel_is_noted_at_its_first_call(several, wrap):
    x = np.ones((8, 4), np.float32)
    for _ in range(2):
        facts._times.clear()
        call = wrap(kernel_of(several, 2.0))
        call(x), call(x)
    one, again = said()
    assert one == again
    wrap(kernel_of(several, 2.5))(x)
    wrap(kernel_of(several, 2.0, np.arange(4.0)[None]))(x)
    wrap(kernel_of(several, 2.0, np.arange(4.0)[None] + 1))(x)
    assert len({f"{found}" for found in [one, *said()]}) == 4


def test_init_is_noted_and_off_is_off(several):
    make = spmd.init(lambda key: jax.random.normal(key, (8,)), "d/dp", mesh=several)
    make(jax.random.key(0)), make(jax.random.key(1))
    one, other = said()
    assert one != other and one["settings"] == other["settings"]
    facts.compare(False)
    try:
        make(jax.random.key(0)), kernel_of(several, 2.0)(np.ones((8, 4), np.float32))
        assert not said()
    finally:
        facts.compare(True)


def test_two_kernels_of_one_name_are_told_apart(several):
    facts._times.clear()
    for factor, rows in ((2.0, 8), (3.0, 8), (4.0, 16)):
        kernel_of(several, factor)(np.ones((rows, 4), np.float32))
    names = [(name, which) for name, which, _ in facts.noted()]
    assert len({name for name, _ in names}) == 1 and len(set(names)) == 3


def test_facts_of_some_ranks_are_compared():
    assert differences({1: {"program": "#1"}, 3: {"program": "#1"}}) == []
    assert differences({1: {"program": "#1"}, 3: {"program": "#2"}}) == ['program: rank 1: "#1"; rank 3: "#2"']
    [line] = differences({0: {"s": {"a": 1, "b": 2}}, 2: {"s": {"a": 1, "b": 2}}, 5: {"s": {"a": 1, "b": 3}}})
    assert line == "s: b (rank 5) differ from the other processes'"


def test_one_process_notes_nothing(mesh):
    assert not takes_part(mesh)
    kernel_of(mesh, 5.0)(np.ones((8, 4), np.float32))
    assert not said()
