"""Options of pytest: `pytest_plugins = ["spmd.testing.plugin"]` in a conftest, or `pytest -p spmd.testing.plugin`."""

from __future__ import annotations

import os
from typing import Any


def pytest_addoption(parser: Any) -> None:
    """Add `--spmd-check full`: the numbers of each kernel are compared at its first call, whatever types say of it."""
    told = "what a kernel's first call checks: types, and numbers where types suspect something; or both of each kernel"
    parser.getgroup("spmd").addoption("--spmd-check", choices=("types", "full"), help=told)


def pytest_configure(config: Any) -> None:
    """Set the environment variable that kernels read."""
    chosen = config.getoption("--spmd-check")
    if chosen is not None:
        os.environ["SPMD_CHECK"] = chosen
