"""Print commands of a README: the fenced block under its `<!-- test-command -->` comment, or under another one."""

import re
import sys
from pathlib import Path


def commands(text: str, name: str = "test-command") -> str:
    """The block's lines, joined; a leading `$ ` is dropped."""
    found = re.findall(rf"^<!-- {name} -->\s*\n```[^\n]*\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise SystemExit(f"expected one block under <!-- {name} -->, found {len(found)}")
    return "\n".join(line.removeprefix("$ ") for line in found[0].splitlines())


if __name__ == "__main__":
    print(commands(Path(sys.argv[1]).read_text(), *sys.argv[2:]))
