"""Faults in the middle of a run: each names the right process in time, and what is done again is equal bit for bit."""

import os

import pytest

from tests.cluster.faults import FAULTS, TABLE, Fault, at_random, see
from tests.cluster.harness import exhaustive
from tests.sampler import first_seed, share


def test_the_page_has_each_fault() -> None:
    rows = TABLE.read().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [one.what for one in FAULTS]
    assert not any(" never " in row for row in rows)
    assert len({one.name for one in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", share(FAULTS, times=4), ids=lambda one: one.name)
def test_a_fault_is_named_and_nothing_is_lost(fault: Fault) -> None:
    [seen] = see([(fault, 5)])
    assert seen.wrong == ""


@exhaustive
def test_random_faults() -> None:
    """More of them: `python -m tests.cluster.faults --random 100`."""
    assert at_random(int(os.environ.get("SPMD_FAULTS", "8")), first_seed(), 40)[0] == 0
