"""Python files, each in a process of its own that has imported JAX already: it is forked from one that did so once.

    done = run_python("-m", "tests.pages", "README.md")

The process that is forked has started no backend, so a file may still ask for devices, as in a new one.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600
VARIABLES = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100", "MPLBACKEND": "agg"}

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["jax", "optax", "spmd", "spmd.nn", "spmd.parallel", "spmd.inspect", "spmd.testing"])


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` does in the checkout: its status, what it printed, what it complained of."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = forked.Process(target=_run, args=(arguments, out, err))
        process.start()
        process.join(TIMEOUT)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, out.read_text(), err.read_text())


def _run(arguments: tuple[str, ...], out: Path, err: Path) -> None:
    import jax

    os.environ.pop("SPMD_CHECK", None)  # as users run it

    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(ROOT)
    os.environ.update(VARIABLES)
    jax.config.update("jax_platforms", "cpu")  # it was imported before
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
