"""Each message about what an equation does is the one in messages.txt."""

from __future__ import annotations

import pytest

from tests.checker import wrong_programs
from tests.checker.harness import message
from tests.checker.messages import GOLDEN, OF_EQUATIONS


@pytest.mark.parametrize("name", OF_EQUATIONS)
def test_message(name: str) -> None:
    assert message(getattr(wrong_programs, name)) == GOLDEN[name]
