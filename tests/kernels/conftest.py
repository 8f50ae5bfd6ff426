"""The layer that the tests of kernels call."""

import pytest

from tests.kernels.harness import layer_on


@pytest.fixture(scope="module")
def layer(mesh):
    return layer_on(mesh)
