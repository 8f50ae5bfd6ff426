"""Texts that are pinned, in a file of sections. `SPMD_UPDATE_GOLDEN=1` writes it anew: read the difference then."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spmd.errors import SpmdError

__all__ = ["Golden", "raised", "written_anew"]

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
