"""`python -m spmd`: what the commands print, their JSON, and how wrong words are answered."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import metadata

import pytest

import spmd
from tests.conftest import main
from tests.inspect.drawings import SVG, devices_of_text

PLAN = ["plan", "a/x b -> a b/x", "--mesh", "x=4", "--size", "a=4096", "--size", "b=4096"]
SHOW = ["show", "b/dp (h k)/tp", "--mesh", "dp=2,tp=4", "--size", "b=8,h=4,k=16"]


MLP = """
import jax, spmd


@spmd.kernel("b/dp s/tp d, d/dp f/tp, f/tp d/dp -> b/dp s/tp d")
def mlp(x, w_in, w_out):
    w_in = spmd.all_gather(w_in, "d/dp f/tp -> d f/tp")
    w_out = spmd.all_gather(w_out, "f/tp d/dp -> f/tp d")
    return spmd.nn.mlp(x, w_in, w_out, tp="tp", sp="tp")
"""

LOSS = """
import jax.numpy as jnp


def loss(x, w):
    return jnp.sort(jnp.tanh(x @ w), axis=0)
"""

LAYERS = """
import jax
from jax.sharding import PartitionSpec as P


def build(mesh):
    def rows(x):
        return jax.lax.psum(x.sum(1), "tp")

    fn = jax.jit(jax.shard_map(rows, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp")))
    return fn, (jax.numpy.ones((4, 8)),)
"""

STEP = """
import jax, spmd


def build(mesh):
    kernel = spmd.kernel("b/dp d, d f/tp -> b/dp f/tp", mesh=mesh)
    args = jax.ShapeDtypeStruct((512, 32), "float32"), jax.ShapeDtypeStruct((32, 512), "float32")
    return kernel(lambda x, w: spmd.einsum(x, w, "b/dp d, d f/tp -> b/dp f/tp")), args
"""


def test_plan(run):
    status, out, err = run(*PLAN, "--dtype", "bf16")
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 4096, "b": 4096}, mesh={"x": 4}, dtype="bfloat16")
    assert (status, out, err) == (0, f"{plan}\n", "")
    assert "bfloat16" in out and "all_to_all" in out


def test_plan_as_json(run):
    status, out, _ = run(*PLAN, "--json", "--dtype", "f32")
    found = json.loads(out)
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 4096, "b": 4096}, mesh={"x": 4})
    moved = [step.pop("transfers") for step in found["steps"]]
    assert status == 0
    assert found == json.loads(json.dumps(plan.to_dict()))
    assert [len(one) for one in moved] == [4 * 3]


def test_plan_with_hardware_and_preference(run):
    status, out, _ = run(*PLAN, "--hardware", "h100", "--prefer", "latency")
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 4096, "b": 4096}, mesh={"x": 4}, hardware="h100")
    assert (status, out) == (0, f"{plan}\n") and " µs" in out
    assert json.loads(run(*PLAN, "--hardware", "h100", "--json")[1])["seconds"] > 0


def test_plan_with_its_picture(run):
    plain = run(*PLAN)[1]
    out = run(*PLAN, "--picture")[1]
    assert out.startswith(plain)
    assert devices_of_text(out) == [0, 1, 2, 3] * 2


def test_show(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run(*SHOW)
    picture = spmd.visualize("b/dp (h k)/tp", {"b": 8, "h": 4, "k": 16}, {"dp": 2, "tp": 4})
    assert (status, out, err) == (0, f"{picture}\n", "")
    assert sorted(devices_of_text(out)) == list(range(8))


def test_show_as_json_and_svg(run, tmp_path):
    file = tmp_path / "layout.svg"
    status, out, _ = run(*SHOW, "--json", "--svg", str(file))
    found = json.loads(out)
    assert status == 0
    assert found["mesh"] == {"dp": 2, "tp": 4} and found["local_shape"] == [4, 16]
    assert [one["coordinates"] for one in found["devices"]][5] == {"dp": 1, "tp": 1}
    groups = [one for one in ET.parse(file).getroot().iter(f"{SVG}g") if one.get("data-devices")]
    assert len(groups) == 8


def test_flags_may_be_repeated_and_keep_their_order(run):
    one = run("show", "a/x/y", "--mesh", "y=2,x=3", "--size", "a=12")[1]
    two = run("show", "a/x/y", "--mesh", "y=2", "--mesh", "x=3", "--size", "a=12")[1]
    assert one == two and "mesh y=2, x=3" in one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "b/dp/dp", "--mesh", "dp=2"], "A mesh axis occurs once in a layout"),
        (["show", "b/tp", "--mesh", "dp=2"], "the mesh has no axis 'tp'"),
        (["show", "b/dp", "--mesh", "dp=2", "--size", "b=3"], "b of size 3 does not divide into the 2 blocks of dp"),
        (["show", "b/dp", "--mesh", "dp=two"], "--mesh takes names with positive numbers, not 'dp=two'."),
        (["show", "b/dp", "--mesh", "dp=0"], "--mesh takes names with positive numbers, not 'dp=0'."),
        (["show", "b/dp", "--mesh", ","], "A mesh has at least one axis.\nadvice: as in --mesh dp=2,tp=4"),
        (["show", "b/dp ...", "--mesh", "dp=2"], "advice: write the dimensions out"),
        (
            ["show", "b/dp", "--mesh", "dp=2", "--size", "batch=8"],
            "--size batch=8\nthe layout has no dimension 'batch'",
        ),
        (["show", "b/dp", "--mesh", "dp=2,dp=2"], "'dp' occurs twice"),
        (["show", "b/dp -> b", "--mesh", "dp=2"], 'advice: plan "b/dp -> b" --mesh dp=2 --size ... --picture'),
        (["show", "b/dp", "--mesh", "dp=2", "--svg", "no/such/folder/p.svg"], "The file cannot be written"),
        (["show", "b/dp", "--mesh", "dp=2", "--svg", "p.gif"], "saved as .svg, .html or .txt"),
        (["plan", "a/x b -> a b/x", "--mesh", "x=4"], "advice: as in --size a=4096,b=4096"),
        (["plan", "a/x b -> a b/x", "--mesh", "x=4", "--size", "b=8"], "advice: as in --size a=4096"),
        (["plan", "a/x b -> a c/x", "--mesh", "x=4", "--size", "a=8"], "both sides name the same ones"),
        ([*PLAN, "--size", "bb=3"], "--size a=4096,b=4096,bb=3\nthe pattern has no dimension 'bb'; did you mean 'b'?"),
        (["plan", "a/x -> a", "--mesh", "x=0", "--size", "a=4"], "not 'x=0'."),
        (["plan", "a/x b", "--mesh", "x=4", "--size", "a=4"], "->"),
        ([*PLAN, "--prefer", "bites"], "did you mean 'bytes'?"),
        ([*PLAN, "--hardware", "h1000"], "did you mean 'h100'?"),
        ([*PLAN, "--hardware", "h100", "--dtype", "floaty"], "--dtype is the type of the elements"),
        ([*PLAN, "--prefer", "latency"], "advice: as in --hardware h100"),
        ([*PLAN, "--svg", "plan.gif"], "advice: as in --svg picture.svg"),
    ],
)
def test_wrong_words(run, words, message):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert not re.search(r"spmd\.\w|[\w]+=[{(\"']|jnp|mesh=", err.replace("python -m spmd", "")), (
        "Python in an answer to options"
    )
    assert "Traceback" not in err and err.strip("\n") == err[:-1]


def test_without_a_command_all_of_them_are_listed(capsys):
    assert main([]) == 2
    written = capsys.readouterr()
    assert written.out == "" and "launch" in written.err and "examples:" in written.err


def test_the_help_calls_the_command_as_it_was_called(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/spmd"])
    with pytest.raises(SystemExit, match="0"):
        main(["show", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: spmd show") and '  spmd show "b/dp' in out and "python -m" not in out


@pytest.mark.parametrize("words", [["fly"], ["plan"], ["show", "b"], [*PLAN, "--quick"]])
def test_words_that_argparse_refuses(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "usage: python -m spmd" in capsys.readouterr().err


def test_sizes_with_spaces_between(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "d=4", "f=8"])
    assert "unrecognized arguments: d=4 f=8; commas join them, as in --size b=8,d=16" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["show", "--help"], ["rules", "--help"]])
def test_help(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "python -m spmd" in out
    assert "examples:" in out or words[0] == "rules"


def test_examples_of_the_help_run(run, tmp_path, monkeypatch, capsys):
    import shlex

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; assert sys.argv[1:] == ['--steps', '100']")
    (tmp_path / "mlp.py").write_text(MLP)
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "layers.py").write_text(LAYERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main(["--help"])
    examples = capsys.readouterr().out.partition("examples:")[2]
    lines = [line.strip() for line in examples.splitlines() if "python -m spmd" in line]
    assert len(lines) >= 4
    for line in lines:
        assert run(*shlex.split(line)[3:])[0] == 0, line


def test_port(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text(LAYERS)
    words = ("layers.py:build", "--mesh", "dp=2,tp=4")
    status, out, err = run("port", *words, "--names", "rows columns")
    assert (status, err) == (0, "") and 'spmd.kernel("rows/dp columns/tp -> rows/dp", mesh=mesh)(rows)' in out
    assert run("check", *words)[1].startswith("no findings: proved")


def test_port_of_a_function_with_its_own_mesh(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = "axis_types=(jax.sharding.AxisType.Auto,) * 2"
    (tmp_path / "layers.py").write_text(LAYERS + f'fn, _ = build(jax.make_mesh((2, 4), ("dp", "tp"), {kinds}))')
    status, out, _ = run("port", "layers.py:fn", "--mesh", "dp=2,tp=4", "--layouts", "b/dp d/tp", "--size", "b=4,d=8")
    assert status == 0 and "spmd.psum(x.sum(1)" in out


def test_rules(run):
    status, out, err = run("rules")
    lines = [re.split("  +", line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert ["dot_general", "contracted", "product"] in lines
    assert ["psum", "psum, pmax, pmin: equal along their axes."] in lines
    assert [row for row in lines if row[0] in ("primitive", "partial sum")] == [
        ["primitive", "dimensions", "partial sum"],
        ["partial sum", "what becomes of it"],
        ["primitive", "a rule of its own"],
    ]


def test_rules_are_those_of_the_checker(run):
    """Every primitive once, and what becomes of a partial sum is said of each."""
    found = json.loads(run("rules", "--json")[1])
    assert len(found["table"]) > 100 and {"psum", "all_gather", "dot_general"} <= {*found["table"], *found["own"]}
    assert not set(found["table"]) & set(found["own"])
    assert {linear for _, linear in found["table"].values()} == set(found["partial"])
    assert all(found["partial"].values()) and all(found["own"].values()), "a rule without a docstring"
    assert found["table"]["sin"] == ["elementwise", "curved"]


WHOLE = {
    ("show", "b/dp", "--mesh", "dp=2,tp"): """
--mesh dp=2,tp
--mesh takes names with positive numbers, not 'tp'.
advice: as in --mesh dp=2,tp=4""",
    ("show", "b/dp", "--mesh", "dp=2", "--size", "b=2,d=4", "--size", "b=3"): """
--size b=2,d=4,b=3
--size takes each name once, but 'b' occurs twice.""",
    ("launch", "-n", "2"): """
python -m spmd launch
launch needs the program to run.
advice: python -m spmd launch -n 2 train.py""",
    ("launch", "-n", "2", "train.py"): """
python -m spmd launch
there is no file 'train.py' to run.
advice: options of launch come before the program; a module: -m NAME""",
}


@pytest.mark.parametrize("words", WHOLE)
def test_messages_of_the_command_line_alone(run, words):
    status, out, err = run(*words)
    assert (status, out, err.strip()) == (2, "", WHOLE[words].strip())


# --- as a program ------------------------------------------------------------------------------------------------


def program(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spmd", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120, check=False)


def test_no_device_is_asked_for():
    """With a platform that does not exist any question for devices would fail; also in a terminal without boxes."""
    done = program(*SHOW, JAX_PLATFORMS="nonsense", PYTHONIOENCODING="ascii", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert "|   0   |" in done.stdout and "─" not in done.stdout


def test_errors_of_a_program():
    done = program("plan", "a/x b -> a b/x", "--mesh", "y=4", "--size", "a=4,b=4", JAX_PLATFORMS="nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean" in done.stderr or "no axis" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error():
    shell = f'"{sys.executable}" -m spmd show "a/x" --mesh x=2048 --json | head -1'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_version(run):
    assert run("--version") == (0, f"spmd {metadata.version('spmd')}\n", "")


def test_a_program_without_kernels(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "loss.py"
    file.write_text(LOSS)
    words = (f"{file}:loss", "--layouts", "b/dp d, d f/tp", "--mesh", "dp=2,tp=4", "--size", "b=4,d=32,f=64")
    status, out, err = run("check", *words, "--source")
    assert (status, err) == (0, "")
    assert "nothing to check" in out and '^ all_to_all: "b/dp f/tp -> b f/tp/dp" sends 64 B' in out
    status, out, err = run("explain", *words)
    assert (status, err) == (0, "") and "the compiler's plan" in out and "sort needs b whole" in out
    found = json.loads(run("check", *words, "--json")[1])
    assert found["plan"]["counts"] == {"all_to_all": 2}


@pytest.mark.parametrize(
    "words, told",
    [
        (("--layouts", "b/dp d, d f/tp"), "no mesh is given"),
        (("--layouts", "b d, d f, f b", "--mesh", "dp=2,tp=4"), "has 3 layouts, and the function 2 parameters"),
        (("--layouts", "b/dp d, d f/tp", "--mesh", "dp=2,tp=4", "--size", "b=4,d=8"), "the size of f is not given"),
    ],
)
def test_wrong_layouts_of_a_plain_function(run, tmp_path, monkeypatch, words, told):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "loss.py"
    file.write_text(LOSS)
    status, _, err = run("check", f"{file}:loss", *words)
    assert status == 2 and told in err


PER_RANK = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def build(mesh):
    body = lambda x, i: x[i]
    fn = jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
    return fn, (jnp.arange(16.0), jnp.array([1, 0, 3, 2]))


def meant(x, i):
    return jax.vmap(lambda row, at: row[at])(x.reshape(4, 4), i.reshape(4, 1)).reshape(-1)


def of_the_whole(x, i):
    return x[i]
"""


def test_what_may_be_meant_per_shard_is_a_question(run, tmp_path):
    """It is no failure until a reference says that something else is meant."""
    file = tmp_path / "per_rank.py"
    file.write_text(PER_RANK)
    asked = ["check", f"{file}:build", "--mesh", "dp=4"]
    status, out, _ = run(*asked)
    assert status == 0 and out.startswith("meant per shard?\n<lambda>\nAn index was done on each device's own piece")
    found = json.loads(run(*asked, "--json")[1])
    assert [one["certain"] for one in found["findings"]] == [False]
    assert run(*asked, "--strict")[0] == 3
    status, out, _ = run(*asked, "--reference", f"{file}:meant")
    assert status == 0 and out.startswith("no findings: tested")
    status, out, _ = run(*asked, "--reference", f"{file}:of_the_whole")
    assert status == 1 and "computes something else on several devices than on one" in out
