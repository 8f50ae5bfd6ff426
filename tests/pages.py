"""Runs the Python of a Markdown page, as a reader would: block after block, in one namespace.

    python -m tests.pages README.md

What an `<!-- output -->` comment announces must be what was printed since the last such block, as `as_shown` has it;
`...` in it stands for anything. A block of `>>>` lines is run as a doctest. A block that shows an error catches it. The commands
of a block under `<!-- run -->`, `$ python -m ...`, are run, in a folder with the blocks under `<!-- file: NAME -->`, which
the page's Python can import. The lines `$ ...` of a block under `<!-- shell -->` are typed into one bash, in a folder
that looks like the checkout; under `<!-- shell until TEXT -->` it goes on when a command in the background has printed
the text. An image under `<!-- picture: name -->` must be what that variable of the page draws in the end.
`<!-- columns: 56 -->` makes a page narrower, for a phone. A number between `<!-- count: name -->` and `<!-- end -->` must be what `COUNTS` counts.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import linecache
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 84  # of code and output; what is wider does not fit beside the menu
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")


@dataclass(frozen=True)
class Part:
    """The part of a page that a command writes: what stands between `<!-- name -->` and `<!-- end of name -->`."""

    page: Path
    name: str

    def read(self) -> str:
        return self._around()[1]

    def write(self, text: str) -> None:
        before, _, after = self._around()
        self.page.write_text(f"{before}{text}{after}")

    def _around(self) -> tuple[str, str, str]:
        start, end = f"<!-- {self.name} -->\n", f"\n<!-- end of {self.name} -->"
        before, found, rest = self.page.read_text().partition(start)
        text, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{self.page} has no part {self.name!r}.")
        return before + start, text, end + after


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it starts on, and the comment right above it."""

    language: str
    text: str
    line: int
    comment: str


def width_of(page: str) -> int:
    """How wide the code and the output of a page may be."""
    found = re.search(r"^<!-- columns: (\d+) -->$", page, re.MULTILINE)
    return int(found[1]) if found else WIDTH


@contextlib.contextmanager
def terminal_of(page: str) -> Iterator[None]:
    """What is printed inside is as wide as the page: `...` may be two wider than the number of a line."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width_of(page) - 2)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _golden() -> list[str]:
    return re.split("^=== ", (ROOT / "tests" / "errors" / "golden.txt").read_text(), flags=re.MULTILINE)[1:]


def _tens(found: list[bool]) -> int:
    """How many percent of them, in whole tens, so that the number is rarely another one."""
    return 10 * sum(found) // len(found) * 10


# What a page may count, by the names in it.
COUNTS: dict[str, Callable[[], int]] = {
    "tasks": lambda: len(re.findall("^### ", (ROOT / "docs" / "pages" / "cookbook.md").read_text(), re.MULTILINE)),
    "percent of messages with a fix": lambda: _tens(["\nfix: " in one or "\nadvice: " in one for one in _golden()]),
}


def counted(page: str) -> str:
    """The page with the numbers between `<!-- count: name -->` and `<!-- end -->` as they are now."""
    number = lambda match: f"{match[1]}{COUNTS[match['name']]()}{match[3]}"
    return re.sub(r"(<!-- count: (?P<name>[^>]+) -->)\d*(<!-- end -->)", number, page)


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, lines, at, comment = [], page.splitlines(), 0, ""
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            if lines[at].strip():
                remark = re.fullmatch(r"<!--\s*(.*?)\s*-->", lines[at].strip())
                comment = remark.group(1) if remark else ""
            at += 1
            continue
        end = at + 1
        while end < len(lines) and lines[end].strip() != fence.group("ticks"):
            end += 1
        indent = len(fence.group("indent"))
        body = "\n".join(line[indent:] for line in lines[at + 1 : end])
        language = (fence.group("info").split() or [""])[0]
        found.append(Block(language, body, at + 2, comment))
        at, comment = end + 1, ""
    return found


def run_page(path: str, page: str) -> list[str]:
    """Run the page's Python and its commands; returns what went wrong, empty when nothing did."""
    with folder_of() as folder, Shell() as shell, terminal_of(page):
        return _run_in(folder, shell, path, page)


@contextlib.contextmanager
def folder_of() -> Iterator[Path]:
    """A folder for the files of a page, from which its Python imports; what it has imported is forgotten after it."""
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as name:
        sys.path.insert(0, name)
        try:
            yield Path(name)
        finally:
            sys.path[:] = path
            for module, held in list(sys.modules.items()):
                if (getattr(held, "__file__", None) or "").startswith(name):
                    del sys.modules[module]


def keep_file(folder: Path, block: Block) -> None:
    """Write a block under `<!-- file: NAME -->`. An import right after it sees it."""
    (folder / block.comment.removeprefix("file: ")).write_text(block.text + "\n")
    importlib.invalidate_caches()


def _run_in(folder: Path, shell: Shell, path: str, page: str) -> list[str]:
    faults = [] if counted(page) == page else [f"{path}: a number is not what is counted; python -m docs.outputs"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    show_source(path, page)
    for block in blocks(page):
        here = f"{path}:{block.line}"
        if block.comment.startswith("file: "):
            keep_file(folder, block)
        elif block.language == "python":
            with contextlib.redirect_stdout(printed):
                fault = _doctest(here, block, namespace) if ">>> " in block.text else _run(path, block, namespace)
            if fault:
                return [*faults, f"{here}: {fault}"]  # what follows would only fail for want of its names
        elif block.comment == "run":
            printed.write(run_commands(block.text, folder))
        elif block.comment.startswith("shell"):
            printed.write(shell.type(block.text, block.comment.removeprefix("shell").removeprefix(" until ")))
        elif block.comment == "output":
            found = as_shown(path, printed.getvalue(), width_of(page))
            if not same_output(block.text, found):
                faults.append(f"{here}: the page says\n{block.text}\nand was printed\n{found}")
            printed = io.StringIO()
    for name, file in pictures(page):
        stored = Path(path).parent / file
        if not stored.exists() or stored.read_text() != namespace[name].svg + "\n":
            faults.append(f"{path}: {file} is not what {name} draws")
    return faults


def as_shown(path: str, printed: str, width: int = WIDTH) -> str:
    """What was printed, as a page shows it: `...` for its own line numbers, and lines of at most this width.

    A line that is wider goes on in the next one, a little further in.
    """
    text = re.sub(rf"({re.escape(Path(path).name)}):\d+", r"\1:...", printed).strip("\n")
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    """The line in pieces. A string is broken between its layouts, if that takes no more pieces."""
    indent = " " * (len(line) - len(line.lstrip()))
    pieces = lambda text: textwrap.wrap(
        text.lstrip(" "),
        max(width, len(indent) + 10),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )
    if len(line) <= width:
        return [line.rstrip()]
    tied = re.sub('"[^"]*"', lambda string: re.sub("(?<=[^,]) (?!->)", "\u00a0", string[0]), line)
    whole, words = pieces(tied), pieces(line)
    fits = max(map(len, tied.lstrip().split(" "))) <= width - len(indent) - 2 and len(whole) <= len(words)
    return [piece.replace("\u00a0", " ") for piece in (whole if fits else words)]


def show_source(path: str, page: str) -> None:
    """Let what reads the source of a function find the page's Python at its lines."""
    code = [""] * len(page.splitlines())
    for block in blocks(page):
        if block.language == "python" and ">>> " not in block.text:
            lines = block.text.splitlines()
            code[block.line - 1 : block.line - 1 + len(lines)] = lines
    linecache.cache[path] = (len(page), None, [f"{line}\n" for line in code], path)


def pictures(page: str) -> list[tuple[str, str]]:
    """The variables that draw the page's images, each with its file."""
    return re.findall(r"^<!-- picture: (\w+) -->\s*\n!\[[^\]]*\]\(([^)]+)\)", page, re.MULTILINE)


def run_commands(text: str, folder: Path) -> str:
    """What the lines `$ python -m module ...` print, errors too, in the folder that has the files of the page."""
    out = io.StringIO()
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if words[:3] != ["$", "python", "-m"]:
            raise ValueError(f"only `$ python -m module` is run: {line}")
        given = sys.argv, list(sys.path)
        sys.argv = words[3:]
        sys.path.insert(0, str(folder))  # as `-m` does
        try:
            with contextlib.chdir(folder):
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # that a test has imported the module already
                    runpy.run_module(words[3], run_name="__main__")
        except SystemExit as left:
            if left.code not in (None, 0):
                out.write(f"exit status {left.code}\n")
        finally:
            sys.argv, sys.path[:] = given
    return out.getvalue()


class Shell:
    """A bash for the commands of a page, started with the first of them.

    Its folder has the examples and the licence of the checkout, and `python` is this one.
    """

    TYPED = "-- typed --"

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def type(self, text: str, until: str = "") -> str:
        """What is printed until the commands have ended, and the text has been printed by those in the background."""
        if self.folder is None:
            self._start()
        for line in text.replace("\\\n", " ").splitlines():
            if not line.startswith("$ "):
                raise ValueError(f"a command begins with `$ `: {line}")
            print(line.removeprefix("$ "), file=self.bash.stdin)
        print(f"echo {self.TYPED}", file=self.bash.stdin, flush=True)
        out, typed = "", False
        while not typed or until not in out:
            line = self.bash.stdout.readline()
            if not line:
                raise ValueError(f"bash has ended, and {until!r} was not printed:\n{out}")
            typed = typed or line.strip() == self.TYPED
            out += line if line.strip() != self.TYPED else ""
        return out

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for name in ("examples", "LICENSE"):
            (Path(self.folder.name) / name).symlink_to(ROOT / name)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
            env.pop(name, None)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.bash = subprocess.Popen(["bash"], cwd=self.folder.name, env=env, start_new_session=True, **pipes)

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.bash.pid, signal.SIGKILL)  # and what still runs in the background
            self.bash.communicate()
            self.folder.cleanup()


def same_output(expected: str, printed: str) -> bool:
    """Equal up to white space at the ends of lines; `...` stands for anything."""
    trim = lambda text: "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
    return doctest.OutputChecker().check_output(trim(expected), trim(printed), doctest.ELLIPSIS)


def _run(path: str, block: Block, namespace: dict[str, Any]) -> str:
    # Empty lines in front: a traceback then names the line of the page.
    source = "\n" * (block.line - 1) + block.text
    try:
        exec(compile(source, path, "exec"), namespace)
    except Exception:
        return "".join(traceback.format_exc().splitlines(keepends=True)[-30:])
    return ""


def _doctest(here: str, block: Block, namespace: dict[str, Any]) -> str:
    example = doctest.DocTestParser().get_doctest(block.text, namespace, here, here, block.line)
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failed, _ = runner.run(example, out=out.append, clear_globs=False)
    namespace.update(example.globs)
    return "".join(out) if failed else ""


def main(path: str) -> int:
    """Run one page on eight CPU devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    faults = run_page(path, Path(path).read_text())
    print("\n\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
