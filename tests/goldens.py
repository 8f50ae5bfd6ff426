"""Texts that are pinned, in a file of sections. `SPMD_UPDATE_GOLDEN=1` writes it anew: read the difference then."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spmd.errors import SpmdError

__all__ = ["Golden", "pinned", "raised", "written_anew"]

HEADER = "=== "


def written_anew() -> bool:
    """Say whether this run writes the files."""
    return bool(os.environ.get("SPMD_UPDATE_GOLDEN"))


@dataclass(frozen=True)
class Golden:
    """A file of texts, each under a line `=== name`."""

    path: Path

    def read(self) -> dict[str, str]:
        """Return the texts by name, without blank lines around them."""
        parts = re.split(rf"^{HEADER}(.+)\n", self.path.read_text(), flags=re.MULTILINE)[1:]
        return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}

    def write(self, texts: Mapping[str, str]) -> None:
        """Write the texts in their order."""
        self.path.write_text("\n\n".join(f"{HEADER}{name}\n{text}" for name, text in texts.items()) + "\n")


def raised(call: str, names: Mapping[str, Any]) -> str:
    """Return the class and the text of the error that a call raises."""
    with pytest.raises(SpmdError) as caught:
        eval(call, dict(names))
    text = str(caught.value).split("\n--------------------")[0].strip("\n")
    return f"{type(caught.value).__name__}\n{text}"


def pinned(path: Path, told: Callable[[str], str]) -> tuple[dict[str, str], Callable[..., None], Callable[..., None]]:
    """Return the texts of a file under the calls that raise them, and two tests: `test_write` and `test_message`.

    A new one is a line `=== call` there: `SPMD_UPDATE_GOLDEN=1 python -m pytest tests/ROOM -k write` writes its text.
    """
    golden = Golden(path)
    texts = golden.read()

    @pytest.mark.skipif(not written_anew(), reason="no golden texts are written")
    def test_write() -> None:
        golden.write({call: told(call) for call in texts})

    @pytest.mark.parametrize("call", texts)
    def test_message(call: str) -> None:
        assert told(call) == texts[call]

    return texts, test_write, test_message
