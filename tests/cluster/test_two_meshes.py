"""Arrays that go from one mesh to another, of which each process sees a part or nothing."""

import pytest

from tests.cluster.harness import launched
from tests.sampler import rare, seeds


@rare
@pytest.mark.parametrize("seed", seeds(12))
def test_arrays_go_to_devices_of_another_process(seed) -> None:
    found = launched(2, "tests/cluster/two_meshes.py", str(seed))
    assert found.code == 0, found.err
    assert found.out.count("done") == 2
    assert found.out.count("random keys do not go to other processes.") == 2
