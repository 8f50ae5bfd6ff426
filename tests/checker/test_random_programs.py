"""Random loops, gradients inside and sizes of shards: other numbers are a finding, and right ones are none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker import random_programs
from tests.checker.random_programs import FAMILIES, judged
from tests.sampler import Choices, rare, seeds


@pytest.mark.parametrize("seed", seeds(times=6))
def test_other_numbers_are_a_finding(seed: int) -> None:
    judged(Choices(seed))


@rare
def test_each_family_has_right_and_wrong_programs() -> None:
    for family in FAMILIES:
        outcomes: set[str] = set()
        for seed in range(200):
            outcomes.add(judged(Choices(seed), family)[1])
            if "right" in outcomes and outcomes & {"first call", "check"}:
                break
        else:
            pytest.fail(f"{family.__name__}: {outcomes}")


class Findings(list[Any]):
    """What a checker says that is sure of itself."""

    verdict = type("Verdict", (), {"kind": "proved", "unreached": ()})


def test_a_judge_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checker, wrong programs have no finding; and with one that says too much, right ones have."""
    of = lambda seed: judged(Choices(seed), random_programs.sizes)
    monkeypatch.setattr(random_programs, "ASKED", "types")
    seed = next(seed for seed in range(50) if of(seed)[1] == "check")
    right = next(seed for seed in range(50) if of(seed)[1] == "right")
    monkeypatch.setattr(random_programs.spmd, "check", lambda *args: Findings([]))
    with pytest.raises(AssertionError, match="no finding"):
        of(seed)
    finding = type("Finding", (), {"kind": "layout"})
    monkeypatch.setattr(random_programs.spmd, "check", lambda *args: Findings([finding]))
    with pytest.raises(AssertionError, match="an alarm"):
        of(right)
