"""The doors of the package: what an import loads, what `dir` shows, and what a wrong name is told."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd._python import rooms as _rooms
from tests.sampler import seeds

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [name for name in spmd.__all__ if type(getattr(spmd, name)) is type(spmd)]


def loaded(program: str) -> set[str]:
    """The modules that a new process has loaded after a program."""
    program += "\nimport json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_spmd(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "spmd"}


def test_an_import_loads_nothing_but_the_door():
    assert of_spmd(loaded("import spmd")) == {"spmd", "spmd._python", "spmd._python.rooms"}
    assert "jax" not in loaded("import spmd")


def test_the_version_loads_nothing_but_the_door():
    found = loaded("from spmd.__main__ import main\nmain(['--version'])")
    assert of_spmd(found) == {"spmd", "spmd._python", "spmd._python.rooms", "spmd.__main__"} and found.isdisjoint(
        {"jax", "numpy"}
    )


def test_a_name_loads_its_room_and_what_that_stands_on():
    found = of_spmd(loaded("import spmd\nspmd.psum"))
    assert "spmd.comm" in found and found.isdisjoint({"spmd.ops", "spmd.kernels", "spmd.checker", "spmd.nn"})


def written() -> dict[str, str]:
    """Where each public name comes from, as type checkers read it. A star stands for the names that a room offers."""
    tree = ast.parse((ROOT / "spmd" / "__init__.py").read_text())
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        home = node.module if isinstance(node, ast.ImportFrom) else None
        names = [one.name for one in node.names] if home else []
        offered = importlib.import_module(home).__all__ if home and "*" in names else names
        found |= dict.fromkeys(offered, home or "")
    return found


def test_a_name_is_what_type_checkers_take_it_for():
    homes = {name: home for name, home in written().items() if name in spmd.__all__}
    assert homes.keys() == {*spmd.__all__}
    for name, home in homes.items():
        there = importlib.import_module(home)
        one = getattr(there, name) if home != "spmd" else importlib.import_module(f"spmd.{name}")
        assert getattr(spmd, name) is one, name


def test_rooms_that_are_not_public_can_be_reached_too():
    """`spmd.modes.MODES` after `import spmd` alone."""
    assert "spmd.modes" in loaded("import spmd\nspmd.modes.MODES, spmd.errors.SpmdError, spmd.ops.einsum")


@pytest.mark.parametrize("module", [spmd, *(getattr(spmd, name) for name in ROOMS)], ids=lambda m: m.__name__)
def test_dir_shows_what_is_public(module):
    assert [name for name in dir(module) if not name.startswith("_")] == sorted(module.__all__)
    assert {"__name__", "__doc__", "__file__", "__all__"} <= {*dir(module)}


def refused(module: object, name: str) -> str:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert caught.value.name == name
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (spmd, "allgather", "; did you mean 'spmd.all_gather'?"),
        (spmd, "PSUM", "; did you mean 'spmd.psum'?"),
        (spmd.nn, "layernorm", "; did you mean 'spmd.nn.layer_norm'?"),
        (spmd.nn, "LayerNorm", "; did you mean 'spmd.nn.layer_norm'?"),
        (spmd.parallel, "ring_atention", "; did you mean 'spmd.parallel.ring_attention'?"),
        (spmd.fft, "irfft2", "; did you mean 'spmd.fft.irfft'?"),
        (spmd, "layer_norm", "; did you mean 'spmd.nn.layer_norm'?"),
        (spmd, "halo", "; did you mean 'spmd.stencil.halo'?"),
        (spmd.nn, "psum", "; did you mean 'spmd.psum'?"),
        (spmd, "mean", ': write spmd.reduce(x, "b/dp d -> d", "mean")'),
        (spmd.nn, "mean", ': write spmd.reduce(x, "b/dp d -> d", "mean")'),
        (spmd, "allreduce", ': write spmd.psum(x, "d {U:dp} -> d")'),
        (spmd, "matmul", ': write spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")'),
        (spmd, "exp", ": write jnp.exp, which is right where the dimensions it works along are whole"),
        (spmd.nn, "gelu", ": write jax.nn.gelu, which is right where the dimensions it works along are whole"),
        (
            spmd.linalg,
            "cholesky",
            ": write jnp.linalg.cholesky, which is right where the dimensions it works along are whole",
        ),
        (spmd.nn, "softmax", "; did you mean 'spmd.softmax'?"),
        (spmd, "zzzzzz", ""),
        (spmd.linalg, "_ipython_canary", ""),
    ],
)
def test_a_wrong_name_is_told_the_right_one(module, name, said):
    assert refused(module, name) == f"module {module.__name__!r} has no attribute {name!r}{said}"
    assert not hasattr(module, name)


def test_every_public_room_answers():
    for name in ROOMS:
        assert refused(getattr(spmd, name), "shard_map").endswith(_rooms.ELSEWHERE["shard_map"]), name


def test_private_names_load_nothing():
    """Tools ask a module for names such as `_repr_html_`, and imports ask for modules that are not loaded yet."""
    assert of_spmd(loaded("import spmd\nhasattr(spmd, '_repr_html_')")) == {
        "spmd",
        "spmd._python",
        "spmd._python.rooms",
    }


OUTSIDE = ("spmd.kernel", "spmd.match_layouts", "spmd.shard", "spmd.Layout", "spmd.make_mesh")


@pytest.mark.parametrize("name", _rooms.ELSEWHERE)
def test_what_is_told_of_other_names_runs(name, mesh):
    code = _rooms.ELSEWHERE[name].removeprefix("@")
    rows = np.ones((8, 8), np.float32)
    assert name not in spmd.__all__
    if code.startswith(OUTSIDE):
        assert eval(code, {"spmd": spmd, "mesh": mesh, "x": rows}) is not None
        return

    @spmd.kernel("b/dp d, d f/tp, _ _ _ _ -> b/dp d", mesh=mesh)
    def body(x, w, q):
        given = spmd.reduce(x, "b/dp d -> d {U:dp}") if "{U:dp}" in code else x
        given = spmd.all_gather(x, "b/dp d -> b d") if '"b d ->' in code else given
        eval(code, {"spmd": spmd, "x": given, "w": w, "q": q, "k": q, "v": q})
        return x

    body(rows, rows, np.ones((1, 2, 3, 4), np.float32))


THREADS = """
import importlib, json, random, sys, threading
import spmd

seed, by_path = map(int, sys.argv[1:])
if by_path:
    import jax.numpy  # in several threads its own modules do not load
failed, start, rooms = [], threading.Barrier(8), list(spmd._ROOMS)

def work(number):
    names, paths = sorted(spmd.__all__), rooms[:]
    for some in (names, paths):
        random.Random(8 * seed + number).shuffle(some)
    start.wait()
    for path in paths if by_path and number % 2 else ():
        importlib.import_module(f"spmd.{path}")
    for name in names:
        getattr(spmd, name)
    for path in paths:
        for name in getattr(spmd, path).__all__:
            getattr(getattr(spmd, path), name)
    import numpy
    double = spmd.kernel("b/dp -> b/dp", mesh=spmd.make_mesh(dp=1))(lambda x: 2 * x)
    for ask in (spmd.check, spmd.explain)[:: 1 if number % 2 else -1]:
        str(ask(double, numpy.ones(4, "float32")))

def noted(number):
    try:
        work(number)
    except Exception as error:
        failed.append(f"{number}: {error!r}")

threads = [threading.Thread(target=noted, args=(number,), daemon=True) for number in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join(60)
print(json.dumps([sum(one.is_alive() for one in threads), failed]), flush=True)
"""


def in_threads(seed: int, by_path: bool = False) -> tuple[int, list[str]]:
    """What a new process comes to in which eight threads use every public name: how many of them hang, what failed."""
    command = [sys.executable, "-c", THREADS, str(seed), str(int(by_path))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    hang, failed = json.loads(done.stdout.splitlines()[-1])
    return hang, failed


@pytest.mark.parametrize("seed", seeds(12))
def test_every_public_name_is_used_first_in_several_threads(seed):
    """ImportError: cannot import name 'Explanation', in five of five processes."""
    assert in_threads(seed) == (0, [])


@pytest.mark.parametrize("seed", seeds())
def test_a_thread_that_imports_a_room_by_its_path_does_not_hang(seed):
    """It holds Python's lock of that room, for which the thread waits that loads the others."""
    assert in_threads(seed, by_path=True)[0] == 0
