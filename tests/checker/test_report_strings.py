"""Each message about what a string says is the one in messages.txt."""

from __future__ import annotations

import pytest

from tests.checker import wrong_programs
from tests.checker.harness import message
from tests.checker.messages import GOLDEN, OF_STRINGS, WRONG


@pytest.mark.parametrize("name", OF_STRINGS)
def test_message(name: str) -> None:
    assert message(getattr(wrong_programs, name)) == GOLDEN[name]


def test_every_wrong_program_has_a_message() -> None:
    assert set(WRONG) == set(GOLDEN) and len(OF_STRINGS) > 10
