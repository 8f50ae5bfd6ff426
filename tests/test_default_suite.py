"""What the default suite touches however few cases it draws, and the slices that share out the exhaustive one."""

import re
from pathlib import Path

import pytest

import spmd
from spmd import comm, ops
from tests import layers
from tests.conftest import FULL_CASES, default_parts, in_slice
from tests.sampler import share

ROOMS = {"ops": ops, "comm": comm}
MODES = re.compile(r'\bMODES\b|"reference"|\.reference\b')
layers.register_all()


def in_every_mode(name: str, texts: list[str]) -> bool:
    """Whether a file of tests runs modes and speaks of a name; how few cases are drawn is of no account to either."""
    return any(MODES.search(text) and re.search(rf"\b{name}\b", text) for text in texts)


def texts_of(room: str) -> list[str]:
    return [path.read_text() for path in Path(__file__).parent.glob(f"{room}/**/test_*.py")]


def operations(room: str) -> list[str]:
    """The room's functions that are public at the top level too."""
    return [name for name in ROOMS[room].__all__ if name in spmd.__all__ and name.islower()]


@pytest.mark.parametrize("cases", ["1", None])
def test_every_layer_is_drawn(cases, monkeypatch):
    """`check` runs each that is drawn in every mode."""
    monkeypatch.delenv("SPMD_TEST_CASES", raising=False)
    if cases:
        monkeypatch.setenv("SPMD_TEST_CASES", cases)
    assert {case.name for case in layers.drawn()} == layers.CASES.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_every_operation_is_tested_in_every_mode(room):
    assert len(operations(room)) > 8
    missing = [name for name in operations(room) if not in_every_mode(name, texts_of(room))]
    assert not missing


def test_an_operation_without_modes_is_noticed():
    assert in_every_mode("roll", ["for mode in MODES: roll(x)"])
    assert not in_every_mode("roll", ["for mode in MODES: unroll(x)", "roll(x)"])


def test_a_test_is_in_one_slice():
    names = [f"test[{i}]" for i in range(400)]
    assert all(sum(in_slice(name, seed, 8) for seed in range(90, 98)) == 1 for name in names)
    assert all(any(in_slice(name, seed, 8) for name in names) for seed in range(8))


def test_a_run_of_all_takes_a_third_of_them(monkeypatch):
    monkeypatch.delenv("SPMD_TEST_CASES", raising=False)
    assert default_parts(named=False) == 3 and default_parts(named=True) == 1
    monkeypatch.setenv("SPMD_TEST_CASES", str(FULL_CASES + 1))
    assert default_parts(named=False) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_shares_of_a_few_seeds_are_all_cases(count, monkeypatch):
    monkeypatch.delenv("SPMD_TEST_CASES", raising=False)
    drawn = []
    for seed in "123456":
        monkeypatch.setenv("SPMD_TEST_SEED", seed)
        assert share(range(count))
        drawn += share(range(count))
    assert {*drawn} == {*range(count)}
    monkeypatch.setenv("SPMD_TEST_CASES", str(FULL_CASES + 1))
    assert share(range(count)) == [*range(count)]
