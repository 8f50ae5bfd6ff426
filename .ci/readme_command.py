"""Print the test command of a README: the fenced block under its `<!-- test-command -->` comment."""

import re
import sys
from pathlib import Path


def test_command(text: str) -> str:
    """The block's lines, joined; a leading `$ ` is dropped."""
    found = re.findall(r"^<!-- test-command -->\s*\n```[^\n]*\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise SystemExit(f"expected one block under <!-- test-command -->, found {len(found)}")
    return "\n".join(line.removeprefix("$ ") for line in found[0].splitlines())


if __name__ == "__main__":
    print(test_command(Path(sys.argv[1]).read_text()))
