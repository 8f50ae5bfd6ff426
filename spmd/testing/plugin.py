"""Options of pytest: `pytest_plugins = ["spmd.testing.plugin"]` in a conftest, or `pytest -p spmd.testing.plugin`."""

from __future__ import annotations

import os
from typing import Any

from spmd.checker import ASKED


def pytest_addoption(parser: Any) -> None:
    """Add `--spmd-check full`: the numbers of each kernel are compared at its first call, whatever types say of it."""
    told = "what the first call of a kernel checks: SPMD_CHECK"
    parser.getgroup("spmd").addoption("--spmd-check", choices=ASKED, help=told)


def pytest_configure(config: Any) -> None:
    """Set the environment variable that kernels read."""
    chosen = config.getoption("--spmd-check")
    if chosen is not None:
        os.environ["SPMD_CHECK"] = chosen
