"""Programs by their names in files: `python -m spmd explain` and `check`."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies

from spmd._cli import programs as _progress
from spmd._cli.programs import shown_if_slow
from tests.sampler import rare

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import jax, spmd

print("loaded as", __name__)


@spmd.kernel("b/dp d/tp, (h k)/tp 2 -> b/dp", h=4)
def body(x, w):
    return spmd.psum(x.sum(axis=1), "b/dp {U:tp} -> b/dp") * spmd.psum(w.sum(), "{U:tp} ->")


@spmd.kernel("b/dp d/tp -> b/dp", check="off")
def norms(x):
    return jax.lax.psum((x**2).sum(axis=1) ** 0.5, "tp")


@spmd.kernel(in_layouts=({"w": "d/tp"},), out_layouts="d/tp")
def tree(params):
    return params["w"]


def build(mesh):
    return norms.on(mesh), [jax.ShapeDtypeStruct((4, 8), "bfloat16")]


def bounded(mesh):
    from spmd.searcher import Bound

    return *build(mesh), Bound()


def broken(mesh):
    return norms


if __name__ == "__main__":
    raise SystemExit("it was run as a program")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "named.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("named", None)


def test_a_kernel_is_explained_by_its_name_and_sizes(run, program):
    words = ["explain", "named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=6,d=8", "--dtype", "x=bf16"]
    status, out, err = run(*words, "--json")
    assert (status, err, out.splitlines()[0]) == (0, "", "loaded as named")
    [one] = json.loads(out.split("\n", 1)[1])["written"]["collectives"]
    assert (one["kind"], one["axes"]) == ("psum", ["tp"])
    assert one["bytes"] == 2 * 3 * 2 * 3 // 4  # 6/2 numbers of 2 bytes; a ring of 4 sends 2 * 3/4 of them
    assert "compiled for cpu" not in out and "time on h100" in run(*words, "--hardware", "h100")[1]


PACKAGED = """
import jax, spmd

from ..names import SHARDED
from . import beside


@spmd.kernel(f"{SHARDED}, scalar -> b/dp")
def norms(x, shift, scale=beside.SCALE, *, negative=False):
    found = spmd.psum(scale * x.sum(axis=1), "b/dp {U:tp} -> b/dp") + shift
    return -found if negative else found


def build(mesh):
    def total(x):
        return jax.lax.psum(x.sum(0), "tp")

    return jax.shard_map(total, mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P()), (jax.numpy.ones((4, 8)),)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "of layers" / "inner"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder.parent / "names.py").write_text('SHARDED = "b/dp d/tp"')
    (folder / "beside.py").write_text("SCALE = 2.0")
    (folder / "random.py").write_text(PACKAGED)  # in a package, a name of Python's own is free
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield "of layers/inner/random.py"
    for name in set(sys.modules) - before:
        if name.startswith("of layers"):
            del sys.modules[name]


def test_a_file_of_a_package_is_a_module_of_it(run, package):
    sizes = ["--mesh", "dp=2,tp=4", "--size", "b=6,d=8"]
    status, out, err = run("check", f"{package}:norms", *sizes)
    assert (status, err) == (0, "") and out.startswith("no findings: proved")
    assert sys.modules["random"].__name__ == "random" and "of layers.inner.random" in sys.modules
    status, out, _ = run("port", f"{package}:build", "--mesh", "tp=4")
    assert status == 0 and "spmd.psum(" in out


def test_what_a_call_may_leave_out_has_its_default(run, package):
    words = ["explain", f"{package}:norms", "--mesh", "dp=2,tp=4", "--size", "b=6,d=8", "--json"]
    status, out, _ = run(*words)
    assert (status, [one["kind"] for one in json.loads(out)["written"]["collectives"]]) == (0, ["psum"])


def test_a_build_gets_the_mesh(run, program):
    status, out, _ = run("explain", "named.py:build", "--mesh", "dp=4,tp=2", "--compile")
    assert status == 0 and "dp=4 tp=2: 8 devices, compiled for cpu" in out


def test_a_program_is_compiled_for_devices_that_are_not_here(run, program, monkeypatch):
    asked = []

    def get_topology_desc(name, platform, **facts):
        asked.append((name, platform, facts.get("topology")))
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    Path("h100.txtpb").write_text("a GPU")
    for target in ("h100.txtpb", "v5p:2x2x2"):
        status, out, _ = run("explain", "named.py:build", "--mesh", "dp=4,tp=2", "--target", target)
        assert status == 0 and "dp=4 tp=2: 8 devices, compiled for cpu" in out
    assert asked == [("cuda", "cuda", "1x1x8"), ("v5p:2x2x2", "tpu", None)]
    status, _, err = run("explain", "named.py:build", "--target", "v5p:2x2x2")
    assert status == 2 and "no mesh is given" in err and "advice: --mesh dp=2,tp=4" in err


def test_a_build_may_have_a_bound_for_search(run, program):
    status, out, _ = run("explain", "named.py:bounded", "--mesh", "dp=4,tp=2")
    assert status == 0 and "norms on dp=4 tp=2" in out


@rare
def test_the_first_commands_of_the_readme(run, monkeypatch):
    """As written, from a checkout. The third command of the block is a benchmark, with a test of its own."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    [check, explain] = [
        shlex.split(line) for line in text.splitlines() if line.startswith(("spmd check ", "spmd explain "))
    ]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        code, out, err = run(*check[1:])
        meshes = "no findings: tested. On dp=4 (given 16), fsdp=4 (given 128), tp=4 (given 8), v=8 (given 128,256), "
        assert (
            code == 0
            and out.startswith(meshes)
            and " the results are those of one device, in 3 of 8 rounds of its loops. " in out
        ), err
        code, out, err = run(*explain[1:])
        assert code == 0 and "16,384 devices" in out, err


def test_check_says_what_it_finds(run, program):
    words = ["--mesh", "dp=2,tp=4", "--size", "b=4,d=8"]
    status, out, _ = run("check", "named.py:norms", *words)
    assert status == 1 and "after the sum is complete" in out and "named.py:14" in out
    status, out, _ = run("check", "named.py:norms", *words, "--source")
    assert status == 1 and "# x  b/dp d/tp" in out


RAW = """
import jax, jax.numpy as jnp
def build(mesh):
    def total(x):
        return jax.lax.psum(jnp.mean(x), "dp")
    fn = jax.shard_map(total, mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P())
    return fn, (jax.ShapeDtypeStruct((8,), jnp.float32),)
def average(x):
    return jnp.mean(x)
def total_of_means(x):
    return jnp.mean(x) * 4
"""


def test_a_reference_decides_about_raw_code(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw.py").write_text(RAW)
    words = ["check", "raw.py:build", "--mesh", "dp=4"]
    status, out, _ = run(*words, "--reference", "raw.py:average")
    assert status == 1 and "4 times too large: the size of dp" in out
    status, out, _ = run(*words, "--reference", "raw.py:total_of_means", "--strict")
    assert status == 0 and "no findings: " in out


def test_strict_fails_where_nothing_is_compared(run, program):
    words = ["check", "named.py:norms", "--mesh", "dp=1,tp=1", "--size", "b=4,d=8"]
    assert run(*words)[0] == 0
    status, out, _ = run(*words, "--strict")
    assert status == 3 and "no findings: not tested" in out


def test_the_findings_as_json(run, program):
    words = ["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8", "--json"]
    status, out, _ = run("check", *words, "--source")
    facts = json.loads(out.split("\n", 1)[1])
    [one] = facts["findings"]
    assert status == 1 and (one["kind"], one["certain"]) == ("nonlinear", True)
    assert one["line"].endswith("named.py:14 (norms)") and one["fix"] == ['spmd.reduce(x**2, "b/dp d/tp -> b/dp")']
    assert one["rule"] in one["message"] and "# x  b/dp d/tp" in facts["source"]
    status, out, _ = run("check", "named.py:body", "--mesh", "dp=1,tp=4", "--size", "b=4,d=8,k=2,h=4", "--json")
    found = json.loads(out.split("\n", 1)[1])
    assert status == 0 and found["findings"] == [] and found["verdict"]["kind"] == "proved"


def test_check_finds_nothing_in_a_right_program(run, program):
    status, out, _ = run("check", "named.py:body", "--mesh", "dp=1,tp=4", "--size", "b=4,d=8", "--size", "k=2,h=4")
    assert status == 0 and "\nno findings: proved. On dp=1, tp=4 " in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["named.py"], "a program is a file and a name in it."),
        (["other.py:norms"], "there is no file other.py."),
        (["named.py:norm"], "did you mean 'norms'?"),
        (["named.py:PROGRAM"], "kernels: body, norms, tree"),
        (["named.py:buld", "--mesh", "dp=2"], "did you mean 'build'?"),
        (["named.py:build"], "no mesh is given"),
        (["named.py:build", "--mesh", "dp=2", "--size", "b=4"], "leave out --size and --dtype"),
        (["named.py:broken", "--mesh", "dp=2"], "and a Bound if it likes, not a function"),
        (["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4"], "as in --size d=8"),
        (["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8,e=2"], "has no dimension 'e'"),
        (["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8", "--dtype", "y=i8"], "has no argument y"),
        (["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8", "--dtype", "x=wide"], "not 'wide'"),
        (["named.py:tree", "--mesh", "tp=4", "--size", "d=8"], "does not follow from a layout and sizes"),
        (["named.py:norms", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8", "--hardware", "h10"], "did you mean 'h100'?"),
    ],
)
def test_a_program_that_does_not_exist_like_that(run, program, words, says):
    status, _, err = run("explain", *words)
    assert status == 2 and says in err


SEARCHED = """
import jax, spmd


def build(mesh, f=16):
    if f == 12:
        raise spmd.errors.Impossible("f is not 12.")
    kernel = spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)
    args = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, f), "float32")
    return kernel(lambda x, w: spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")), args
"""


def test_a_search_is_a_table_or_json(run, program, tmp_path):
    (tmp_path / "named.py").write_text(SEARCHED)
    words = ["search", "named.py:build", "--devices", "8", "--axes", "dp,tp", "--hardware", "h100"]
    status, out, err = run(*words, "--choice", "f=16,12")
    assert (status, err) == (0, "") and out.startswith("8 devices over dp, tp on h100")
    assert "8 candidates, 4 traced" in out and "4 impossible, says build" in out and "f=16" in out
    status, out, _ = run(*words, "--json", "--top", "1", "--most", "2")
    found = json.loads(out)
    assert (status, found["traced"], found["untraced"], found["proven"]) == (0, 2, 2, False)


def test_wrong_words_of_a_search_are_told(run, program):
    words = ["search", "named.py:norms", "--devices", "8"]
    assert "named.py:norms is a kernel" in run(*words, "--hardware", "h100")[2]
    assert "--hardware is one of" in run(*words, "--hardware", "h1000")[2]
    assert "--choice takes a name with values" in run(*words, "--hardware", "h100", "--choice", "f")[2]


# -------------------- a command that takes long says on a terminal what it does; in a pipe it prints its lines as they come, and no more

SLOW = """
import time
print("loaded", flush=False)

def build(mesh):
    time.sleep(60)
"""


class Terminal:
    """Standard error as a terminal, while the test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours, self.theirs = pty.openpty()
        self.stream = open(self.theirs, "w")  # noqa: SIM115 - `read` closes it
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(_progress, "SECONDS", 0.01)
        monkeypatch.setattr(sys, "stderr", self.stream)

    def read(self) -> str:
        """What was written there."""
        print("\0", end="", file=self.stream, flush=True)
        written = b""
        while not written.endswith(b"\0"):  # a terminal gives what it has, in pieces
            written += os.read(self.ours, 100_000)
        self.stream.close()
        os.close(self.ours)
        return written.decode().removesuffix("\0")


def test_a_slow_step_is_shown_and_removed(monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown_if_slow("reading [bold] train.py:step"):
        time.sleep(0.3)
    written = terminal.read()
    assert "reading [bold] train.py:step" in written and "0:00:0" in written
    assert written.endswith("\x1b[2K")  # the line is empty again


def test_an_error_of_the_program_is_alone_where_rich_is_missing(monkeypatch):
    """It once came with "No module named 'rich'", as if that were the reason."""
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(_progress, "find_spec", lambda name: None)
    with pytest.raises(ZeroDivisionError) as found, shown_if_slow("loading train.py:step"):
        raise ZeroDivisionError
    assert found.value.__context__ is None and terminal.read() == ""


def test_a_step_that_counts_fills_a_bar(monkeypatch):
    terminal = Terminal(monkeypatch)
    with shown_if_slow("searching step.py:build") as progress:
        progress(1, 16)
        time.sleep(0.3)
    end_of_bar = "\N{BOX DRAWINGS HEAVY LEFT}"  # a bar without an end moves to and fro
    assert end_of_bar in terminal.read()


def test_a_quick_step_is_not_shown(monkeypatch):
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(_progress, "SECONDS", 60)
    with shown_if_slow("reading train.py:step"):
        pass
    assert terminal.read() == ""


def test_an_interrupted_step_is_removed_too(monkeypatch):
    terminal = Terminal(monkeypatch)

    @shown_if_slow("reading train.py:step")
    def interrupted():
        time.sleep(0.2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert terminal.read().endswith("\x1b[2K")


def test_nothing_is_shown_in_a_pipe(capfd, monkeypatch):
    monkeypatch.setattr(_progress, "SECONDS", 0.01)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown_if_slow("reading train.py:step"):
        time.sleep(0.1)
    assert capfd.readouterr() == ("", "")


def test_lines_come_at_once_and_an_interrupt_ends_with_a_word(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    command = [sys.executable, "-m", "spmd", "explain", f"{file}:build", "--mesh", "dp=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background begins without
    with subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, preexec_fn=heard, **pipes) as process:
        assert process.stdout.readline() == "loaded\n"  # while the program still runs
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


# --- builds that make arrays -----------------------------------------------------------------------------------------

MADE = """
import jax, jax.numpy as jnp, spmd

X = jax.ShapeDtypeStruct((8, 8), "float32")

def product(mesh):
    return spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)(lambda x, w: x @ w)

def put(mesh):
    return product(mesh), (X, jax.device_put(jnp.ones((8, 8)), spmd.Layout("d f/tp").sharding(mesh)))

def jitted(mesh):
    make = jax.jit(lambda: jnp.ones((8, 8)), out_shardings=spmd.Layout("d f/tp").sharding(mesh))
    return product(mesh), (X, make())

def counted(mesh):
    return product(mesh), (X, jnp.ones((mesh.devices.size, 8)))

def shapes(mesh):
    return product(mesh), (X, jax.eval_shape(lambda: jnp.ones((8, 8))))

def asked(mesh):
    spmd.use_cpu_devices(8)
    mesh = spmd.make_mesh(dp=2, tp=4)
    return put(mesh)

def broken(mesh):
    raise KeyError("mine")
"""


@pytest.mark.parametrize("words", [["check", "--mesh", "dp=2,tp=4"], ["explain", "--mesh", "dp=2,tp=4"], ["search"]])
def test_a_build_that_makes_arrays_is_told_what_to_return(tmp_path, run, words):
    """It ended in JAX's errors of abstract meshes."""
    path = tmp_path / "made.py"
    path.write_text(MADE)
    more = ["--devices", "8", "--axes", "dp,tp", "--hardware", "h100"] if words == ["search"] else words[1:]
    for name in ("put", "jitted", "counted"):
        code, _, err = run(words[0], f"{path}:{name}", *more)
        assert code == 2 and "shapes are enough" in err and "jax.eval_shape(make)" in err
        assert ("spmd.use_cpu_devices(8), and mesh = spmd.make_mesh(dp=2, tp=4)" in err) == (words != ["search"])
    for name in ("shapes", "asked") if words != ["search"] else ("shapes",):
        code, _, err = run(words[0], f"{path}:{name}", *more)
        assert code == 0, err
    with pytest.raises(KeyError, match="mine"):
        run(words[0], f"{path}:broken", *more)
