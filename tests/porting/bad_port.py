"""Programs that `port` refuses."""

import os
import tempfile
from pathlib import Path

import spmd
from tests.errors.registry import bad

TEXT = "def build(mesh):\n    return lambda x: x, (1.0,)\n\n\ndef alone(mesh):\n    return lambda x: x\n"


def refused(mesh, name):
    """Port what a file calls so, from the folder of the file."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "layers.py").write_text(TEXT)
        os.chdir(folder)
        try:
            spmd.port(f"layers.py:{name}", mesh=mesh)
        finally:
            os.chdir(before)


bad(
    a_port_of_no_file=lambda mesh: spmd.port("nothing.py:build", mesh=mesh),
    a_port_of_an_unknown_name=lambda mesh: refused(mesh, "built"),
    a_port_of_a_function_alone=lambda mesh: refused(mesh, "alone"),
    a_port_of_what_is_not_mapped=lambda mesh: refused(mesh, "build"),
)
