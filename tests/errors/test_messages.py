"""Errors are a product: each bad input has its whole message pinned in golden.txt.

`SPMD_UPDATE_GOLDEN=1 python -m pytest tests/errors` writes the file anew; read the difference before committing it.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

import spmd
from tests.errors.registry import BAD, FIXED

for _file in sorted(Path(__file__).parent.glob("bad_*.py")):  # they fill the registry, in this order
    importlib.import_module(f"tests.errors.{_file.stem}")

GOLDEN = Path(__file__).with_name("golden.txt")
HEADER = "=== "


def message(name: str, mesh) -> str:
    """Class and text of the error that a bad input raises; lines of this machine's files without path or number."""
    with pytest.raises(spmd.SpmdError) as caught:
        BAD[name](mesh)
    text = str(caught.value).strip("\n")
    text = re.sub(r"\S*(bad_\w+\.py):\d+", r"\1:N", text)
    return f"{type(caught.value).__name__}\n{text}"


def golden() -> dict[str, str]:
    parts = re.split(rf"^{HEADER}(\w+)\n", GOLDEN.read_text(), flags=re.M)[1:]
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.fixture(scope="module")
def mesh():
    return spmd.make_mesh(dp=2, tp=4)


if os.environ.get("SPMD_UPDATE_GOLDEN"):

    def test_write(mesh):
        GOLDEN.write_text("\n\n".join(f"{HEADER}{name}\n{message(name, mesh)}" for name in BAD) + "\n")


@pytest.mark.parametrize("name", BAD)
def test_message(name, mesh):
    assert message(name, mesh) == golden()[name]


def test_there_are_many_and_each_says_something_else():
    texts = golden()
    assert list(texts) == list(BAD)
    assert len(BAD) >= 60
    assert len(set(texts.values())) == len(texts)
    assert 'all_gather(x, "x/dp -> x", to="invarying")' in texts["gathered_copy_leaves"]


@pytest.mark.parametrize("name", FIXED)
def test_the_program_as_the_message_says(name, mesh):
    assert name in BAD
    FIXED[name](mesh)


def test_many_fixes_are_run():
    assert len(FIXED) >= 15
    texts = golden()
    assert all(
        "fix: " in texts[name]
        or "pad it" in texts[name]
        or "numpy.asarray" in texts[name]
        or "did you mean" in texts[name]
        for name in FIXED
    )
    assert 'fix: all_gather(x, "x/i -> x", to="invarying")' in texts["the_first_program"]


def test_meshes_are_shown_in_their_own_order():
    for name, text in golden().items():
        for axes in re.findall(r"mesh ((?:\w+=\d+(?:, )?)+)", text):
            assert re.fullmatch(r"dp=\d+(, tp=\d+)?|i=8", axes), name


def test_no_message_shows_values_or_internals():
    for name, text in golden().items():
        assert not re.search(r"Array\(|\[\s*\d+\.\s", text), name
        assert not re.search(r"frozenset|Tracer|NoneType object|Traceback|0x[0-9a-f]{6}", text), name
        assert not re.search(r"\n\n(?!\(\d+\) )", text), name  # a blank line only before the next of several faults


def test_a_changed_message_is_noticed(mesh, monkeypatch):
    name = "unknown_mode"
    assert message(name, mesh) != golden()[name].replace("explicit", "explict")
    monkeypatch.setitem(BAD, "fine", lambda mesh: None)
    monkeypatch.setitem(BAD, "fine", lambda mesh: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        message("fine", mesh)
