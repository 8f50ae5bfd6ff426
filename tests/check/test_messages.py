"""Every way to be wrong is found, and its message is the one in messages.txt."""

from __future__ import annotations

import pathlib

import pytest

from tests.check import wrong_programs
from tests.check.harness import message

GOLDEN = {
    section.split("\n", 1)[0].strip(): section.split("\n", 1)[1].strip("\n")
    for section in (pathlib.Path(__file__).parent / "messages.txt").read_text().split("## ")[1:]
}


@pytest.mark.parametrize("name", GOLDEN)
def test_message(name: str) -> None:
    assert message(getattr(wrong_programs, name)) == GOLDEN[name]


def test_every_wrong_program_has_a_message() -> None:
    written = {n for n, f in vars(wrong_programs).items() if getattr(f, "__module__", "") == wrong_programs.__name__}
    assert written - {"helper"} == set(GOLDEN)
