"""What has to be equal in all processes is compared by itself: hashes, in the background."""

from pathlib import Path

import pytest

from tests.cluster.harness import exhaustive, joined
from tests.sampler import share

DIFFERING = "tests/cluster/differing.py"
SAID = {
    "constant": "do not compute the same: kernel",
    "closed": "do not compute the same: kernel",
    "key": 'argument[0]: rank 0: "key<fry>[] #',
    "setting": "settings: jax_default_matmul_precision (rank 1) differ",
    "flip": "copies that are equal by their layout differ",
}


@pytest.mark.parametrize("kind", share([*SAID], times=2))
def test_what_differs_silently_ends_the_run_with_the_rank(kind: str, tmp_path: Path) -> None:
    found = joined([[DIFFERING, kind, str(tmp_path)]] * 2)
    assert [one.code for one in found] == [1, 1], found
    for one in found:
        assert (SAID[kind] in one.err and "rank 1" in one.err and "done" not in one.out) or kind != "flip", one
    assert not (tmp_path / "steps" / "1").exists() or kind != "flip"


@exhaustive
@pytest.mark.parametrize("kind", [*SAID])
def test_with_the_comparison_off_nothing_is_found(kind: str, tmp_path: Path) -> None:
    found = joined([[DIFFERING, kind, str(tmp_path)]] * 2, [{"COMPARE": "off"}] * 2)
    assert [one.code for one in found] == [0, 0], found


def test_equal_programs_of_one_name_are_no_difference(tmp_path: Path) -> None:
    """Processes write sets in another order, and functions at other addresses."""
    found = joined([[DIFFERING, "same", str(tmp_path)]] * 2, [{"PYTHONHASHSEED": f"{seed}"} for seed in (1, 2)])
    assert [one.code for one in found] == [0, 0] and all("done" in one.out for one in found), found
