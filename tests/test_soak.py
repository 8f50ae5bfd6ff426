"""A few random programs of every family, and proof that the soak finds a mistake and prints the line that repeats it."""

import ast
import re

import jax
import pytest

from tests import soak
from tests.programs import FAMILIES
from tests.sampler import Choices, seeds, share

OFTEN = {name: often for name, (_, often) in FAMILIES.items()} | dict.fromkeys(share(["calls", "checker", "scans"]), 1)


@pytest.mark.parametrize(
    ("family", "seed"), [(name, seed) for name in OFTEN for seed in seeds(1, times=-(-OFTEN[name] // 2))]
)
def test_programs(family: str, seed: int) -> None:
    """What the soak runs, and as often: here the values of random calls of each operation are compared."""
    result, error = soak.run_one(family, Choices(seed))
    if error is not None:
        error.add_note(result.text)
        raise error


def four_times(psum):
    """A sum whose value is right and whose gradient is four times too large."""

    def wrong(x, axes, **more):
        y = psum(x, axes, **more)
        return y if not axes else 4 * y - 3 * jax.lax.stop_gradient(y)

    return wrong


def test_a_planted_mistake_is_found_shrunk_and_repeated(monkeypatch, capsys) -> None:
    given = ["--in-process", "--programs", "8", "--seed", "3", "--only", "verbs"]
    monkeypatch.setattr(soak, "SHRINKING", 2.0)
    monkeypatch.setattr(jax.lax, "psum", four_times(jax.lax.psum))
    assert soak.main(given) == 1
    printed = capsys.readouterr().out
    assert "explicit gradient" in printed and "4 to 4 times it" in printed
    family, seed = re.search(r"test_soak.py::test_programs\[(\w+)-(\d+)\]'", printed).groups()
    with pytest.raises(AssertionError, match="4 to 4 times it"):
        test_programs(family, int(seed))
    found = re.search(r"smaller: (.*)\n    python -m tests.soak (--only verbs --choices \S+)", printed)
    mesh = ast.literal_eval(re.search(r"\{[^}]*\}", found[1])[0])
    assert {*mesh.values()} == {2}, "axes of two, the simplest"
    assert soak.main(found[2].split()) == 1
    monkeypatch.undo()
    test_programs(family, int(seed))
    assert soak.main(found[2].split()) == 0


def test_what_was_run_is_counted(capsys) -> None:
    assert soak.main(["--in-process", "--programs", "6", "--seed", "1", "--only", "verbs,calls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = next(line for line in lines if line.startswith("all ")).split()
    assert total[1] == "6" and total[3] == "0"
    assert f"jax {jax.__version__}, seed 1" in lines[-1] and "programs/s" in lines[-1]
    assert any(line.startswith("verbs") and "explicit" in line and "reference" in line for line in lines)


def test_the_suites_own_tests_are_among_them() -> None:
    names = {f"{path}::{test.__name__}" for path, test in soak.sampled_tests()}
    assert {"tests/comm/test_verbs.py::test_derivatives", "tests/ops/test_fft.py::test_sampled"} <= names
    test, given, name = soak.sampled_call(Choices(5))
    assert given["seed"] >= 5 and str(given["seed"]) in name and test.__name__ in name


def test_a_process_that_dies_is_a_failure_of_one_program(monkeypatch, capsys) -> None:
    """The others of its batch are run again, and those after it too; none twice."""
    todo = [("verbs", 1), ("verbs", 2), ("calls", 3), ("verbs", 4)]
    heard: list[list[tuple[str, int]]] = []

    def listen(these, until):
        heard.append(list(these))
        if ("verbs", 2) in these:
            yield "about", [list(one) for one in these[:2]]
            yield "end", (-6, "Check failed: sliced")
            return
        for family, seed in these:
            yield "result", {"family": family, "seed": seed, "text": "fine"}
        yield "end", (0, "")

    monkeypatch.setattr(soak, "listen", listen)
    monkeypatch.setattr(soak, "order", lambda *_: iter(todo))
    assert soak.main(["--programs", "4"]) == 1
    assert heard == [todo, todo[:1], todo[1:2], todo[2:]]
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 1 and "ended with -6: Check failed" in printed and "[verbs-2]" in printed
