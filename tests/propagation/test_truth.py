"""What the plan says of any JAX program, beside what the compiler sends."""

import random

import pytest

from tests.conftest import case_count
from tests.propagation import truth
from tests.sampler import FULL_CASES, seeds

FEW = 16


def drawn() -> list[str]:
    """A few programs of each gate, and all of them in the exhaustive suite."""
    every = sorted(truth.CASES)
    return every if case_count() >= FULL_CASES else random.Random(seeds()[0]).sample(every, FEW * case_count())


@pytest.mark.parametrize("name", drawn())
def test_a_plan_is_equal_to_the_compiled_program_or_says_what_is_open(mesh, name):
    word, told = truth.verdict(truth.CASES[name], mesh)
    assert word in ("equal", "apart", "open"), told


def test_the_table_is_large():
    assert len({case.name for case in truth.CASES.values()}) >= 150


def test_a_plan_that_is_silent_is_wrong(mesh, monkeypatch):
    """Meta-test."""
    case = truth.CASES["jnp.cumsum axis=0 | b/dp d"]
    assert truth.verdict(case, mesh)[0] == "open"
    monkeypatch.setattr("spmd.propagation._module.Reading._own", lambda *_: None)
    assert truth.verdict(case, mesh)[0] == "wrong"
