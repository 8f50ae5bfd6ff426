"""Runs the Python of a Markdown page and writes what it prints under its `<!-- output -->` comments.

    python -m docs.outputs README.md docs/pages/*.md

Also runs the commands under `<!-- run -->` and `<!-- shell -->`, and draws the images under `<!-- picture: name -->`.
What is printed is shown as `as_shown` has it; `...` matches anything in the tests. An output that already matches
stays as it is, unless it is too wide. Numbers that a page counts are counted anew.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

from tests.pages import (
    Shell,
    as_shown,
    blocks,
    counted,
    folder_of,
    keep_file,
    pictures,
    run_commands,
    same_output,
    show_source,
    terminal_of,
    width_of,
)


def with_outputs(path: str, page: str) -> str:
    """The page with the outputs that its blocks print now."""
    page = counted(page)
    with folder_of() as folder, Shell() as shell, terminal_of(page):
        return _with_outputs(folder, shell, path, page)


def _with_outputs(folder: Path, shell: Shell, path: str, page: str) -> str:
    lines = page.splitlines()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    edits: list[tuple[int, int, str]] = []
    show_source(path, page)
    for block in blocks(page):
        if block.comment.startswith("file: "):
            keep_file(folder, block)
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, path, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        elif block.comment == "run":
            printed.write(run_commands(block.text, folder))
        elif block.comment.startswith("shell"):
            printed.write(shell.type(block.text, block.comment.removeprefix("shell").removeprefix(" until ")))
        elif block.comment == "output":
            text = as_shown(path, printed.getvalue(), width_of(page))
            wide = max(map(len, block.text.splitlines()), default=0) > width_of(page)
            if wide or not same_output(block.text, text):
                indent = re.match(" *", lines[block.line - 2])[0]  # of the fence
                text = "\n".join(f"{indent}{line}".rstrip() for line in text.split("\n"))
                edits.append((block.line - 1, block.line - 1 + len(block.text.splitlines()), text))
            printed = io.StringIO()
    for name, file in pictures(page):
        stored = Path(path).parent / file
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(namespace[name].svg + "\n")
    for start, end, text in reversed(edits):
        lines[start:end] = text.splitlines()
    return "\n".join(lines) + "\n"


def main(paths: list[str]) -> None:
    """Rewrite each page in place, each in a process of its own."""
    import multiprocessing

    for path in paths:
        process = multiprocessing.get_context("spawn").Process(target=rewrite, args=(path,))
        process.start()
        process.join()
        print(f"{path}: {'ok' if process.exitcode == 0 else 'FAILED'}")


def rewrite(path: str) -> None:
    """Rewrite one page on eight CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    file = Path(path)
    file.write_text(with_outputs(path, file.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
