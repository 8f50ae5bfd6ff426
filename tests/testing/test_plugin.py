"""The option of pytest: each kernel's numbers at its first call."""

import textwrap
from pathlib import Path

import pytest

from tests.fresh import run_python

PROGRAM = """
import jax.numpy as jnp
import spmd


def test_a_step():
    mesh = spmd.make_mesh(dp=2)
    step = spmd.kernel("b/dp -> b/dp", mesh=mesh)(lambda x: x * x.shape[0])  # only numbers show it
    step(jnp.arange(4.0))
"""


@pytest.mark.parametrize("words", [(), ("--spmd-check", "full"), ("--spmd-check", "types"), ("--spmd-check", "off")])
def test_a_suite_asks_numbers_of_each_kernel(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        textwrap.dedent("""
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        pytest_plugins = ["spmd.testing.plugin"]
        """)
    )
    (tmp_path / "test_step.py").write_text(PROGRAM)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *words]
    found = run_python("-m", "pytest", *options, str(tmp_path))
    asked = words[-1] in ("full", "quick") if words else True
    assert found.returncode == int(asked), found.stdout + found.stderr
    assert ("computes something else on several devices" in found.stdout) == asked
