"""Where programs write: a folder, or a bucket of a cloud."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from spmd.errors import SpmdError


def in_a_bucket(path: str | Path, schemes: Sequence[str], call: str) -> bool:
    """Whether a path is one in a bucket, `gs://bucket/folder`, and not a folder of this machine.

    Args:
      path: The path.
      schemes: Those that are known here, such as "gs".
      call: The call, for the error.

    Raises:
      SpmdError: It is another URL, which would become a folder of that name.
    """
    found = re.match(r"([a-zA-Z][\w+.-]*):/+(.*)", str(path))  # a Path has only one slash left
    if found is None:
        return False
    scheme, rest = found.groups()
    if isinstance(path, str) and scheme in schemes and path.startswith(f"{scheme}://") and rest.strip("/"):
        return True
    known = " or ".join(f'"{one}://bucket/folder"' for one in schemes)
    raise SpmdError(f"nothing is written to {str(path)!r}.", call=call, advice=f"a folder, or {known}, as a string")
