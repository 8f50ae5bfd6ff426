"""Every example runs: docstrings, the README, the pages and the example scripts, all found by glob."""

import doctest
import importlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import FULL_CASES, case_count
from tests.fresh import run_python
from tests.pages import FLAGS, Block, blocks, counted, run_page, same_output
from tests.sampler import share

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for path in (ROOT / "spmd").rglob("*.py")
    if path.name != "__main__.py"
)
HELPERS = ["tests.sampler", "tests.simulator"]
FIRST = [
    ROOT / "README.md",
    ROOT / "docs" / "pages" / "quickstart.md",
]
PAGES = [path for path in (*FIRST, *sorted({*(ROOT / "docs" / "pages").rglob("*.md")} - {*FIRST})) if path.exists()]
SCRIPTS = sorted((ROOT / "examples").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_doctests(module: object) -> tuple[int, str]:
    """How many examples failed, and what was printed about them."""
    out: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=out.append)
    for number, handler in before.items():  # `stopping` takes them
        signal.signal(number, handler)
    return runner.failures, "".join(out)


def test_an_example_does_not_keep_the_signals():
    before = signal.getsignal(signal.SIGTERM)
    failed, _ = run_doctests(importlib.import_module("spmd.cluster._start"))
    assert not failed and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", share([*MODULES, *HELPERS]))
def test_docstrings(name):
    failed, text = run_doctests(importlib.import_module(name))
    assert not failed, text


def some(paths: Iterable[Path]) -> list[Path]:
    """A share of them, each as long as another: a page takes seconds. The gate runs all of them."""
    return share(sorted(paths, key=lambda path: path.stat().st_size), times=2)


def kinds_of(page: Path) -> set[str]:
    """What has to be done with the blocks of a page."""
    found = {"run" if block.language == "python" else block.comment.split(" ")[0] for block in blocks(page.read_text())}
    return found & {"run", "shell"}


@pytest.mark.parametrize(
    "page", [*FIRST, *some(path for path in PAGES if path not in FIRST and kinds_of(path))], ids=name_of
)
def test_pages(page):
    if "shell" in kinds_of(page) and case_count() <= FULL_CASES:
        pytest.skip("one of the exhaustive tests: its commands start processes")
    done = run_python("-m", "tests.pages", name_of(page))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("script", some(SCRIPTS), ids=name_of)
def test_scripts(script):
    """With the arguments of the script's `# test: --steps 2` line, if it has one."""
    line = re.search(r"^# test:(.*)$", script.read_text(), re.MULTILINE)
    done = run_python(name_of(script), *shlex.split(line.group(1) if line else ""))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


# -------------------- what must be noticed

PAGE = """# A page
```python
x = 20
print(x + 1)
```

Some text.

<!-- output -->
```text
21
```

```text
not checked
```

1. in a list

   ```python
   print(x,
         "a b")
   ```
   <!-- output -->
   ```text
   20 ...
   ```

```python
>>> x + 2
22
```
"""


def test_a_good_page_runs():
    assert run_page("page.md", PAGE) == []


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("x = 20\n", "x = 30\n", "page.md:11: the page says\n21\nand was printed\n31"),
        ("x = 20\n", "y = 20\n", "NameError: name 'x' is not defined"),
        ("x = 20\n", "x = 1 / 0\n", 'File "page.md", line 3'),
        ("22\n", "23\n", "Expected:\n    23\nGot:\n    22"),
        ("20 ...\n", "20\n", "page.md:26: the page says"),
    ],
)
def test_a_wrong_page_is_noticed(right, wrong, fault):
    """Meta-test: wrong output, an exception with the page's own line, a wrong doctest."""
    assert PAGE.count(right) == 1
    assert fault in "\n".join(run_page("page.md", PAGE.replace(right, wrong)))


def test_commands_of_a_page_are_run():
    page = "<!-- run -->\n```console\n$ python -m spmd show a/x --mesh x=0\n```\n\n<!-- output -->\n```text\n{}\n```\n"
    assert run_page("page.md", page.format("--mesh x=0...\nexit status 2")) == []
    assert "not 'x=0'" in run_page("page.md", page.format("fine"))[0]


def test_files_of_a_page_are_there_for_its_commands():
    page = (
        "<!-- file: hello.py -->\n```python\nprint(__name__)\n```\n<!-- run -->\n```console\n$ python -m hello\n```\n"
    )
    page += "<!-- output -->\n```text\n{}\n```\n"
    assert run_page("page.md", page.format("__main__")) == []
    assert "was printed\n__main__" in run_page("page.md", page.format("other"))[0]


def test_files_of_a_page_are_there_for_its_python_and_forgotten_after_it():
    page = "<!-- file: held.py -->\n```python\nx = {}\n```\n```python\nfrom held import x\nprint(x)\n```\n"
    page += "<!-- output -->\n```text\n{}\n```\n"
    assert run_page("page.md", page.format(1, 1)) == [] == run_page("page.md", page.format(2, 2))


def test_commands_in_a_shell_share_it_and_the_folder():
    page = (
        "<!-- shell until two -->\n```console\n$ word=two; ls examples/summa.py\n$ (sleep .2; echo $word) &\n```\n\n"
        "<!-- shell -->\n```console\n$ wait; python -c 'import sys; sys.exit(3)'; \\\n echo $word $?\n```\n\n"
        "<!-- output -->\n```text\n{}\n```\n"
    )
    assert run_page("page.md", page.format("examples/summa.py\ntwo\ntwo 3")) == []
    assert "was printed" in run_page("page.md", page.format("examples/summa.py\ntwo\ntwo 0"))[0]
    with pytest.raises(ValueError, match="'three' was not printed"):
        run_page("page.md", "<!-- shell until three -->\n```console\n$ exit\n```\n")


def test_pictures_of_a_page_are_drawn(tmp_path):
    page = "```python\nclass P:\n    svg = '<svg/>'\n```\n\n<!-- picture: P -->\n![A picture](p.svg)\n"
    assert "p.svg is not what P draws" in run_page(f"{tmp_path}/page.md", page)[0]
    (tmp_path / "p.svg").write_text("<svg/>\n")
    assert run_page(f"{tmp_path}/page.md", page) == []


def test_a_number_that_is_not_what_is_counted_is_noticed():
    page = "There are <!-- count: tasks -->7<!-- end --> of them.\n"
    assert "a number is not what is counted" in run_page("page.md", page)[0]
    assert run_page("page.md", counted(page)) == [] and counted(counted(page)) == counted(page) != page


def test_a_narrow_page_prints_narrow_tables():
    block = "```python\nimport os\nprint(os.environ['COLUMNS'], 'a ' * 25)\n```\n"
    page = "<!-- columns: 40 -->\n" + block + "<!-- output -->\n```text\n38" + 19 * " a" + "\n  a a a a a a\n```\n"
    assert run_page("page.md", page) == []


def test_blocks_know_their_line_and_comment():
    assert blocks("<!-- test-command -->\n\n```bash\na\nb\n```\n") == [Block("bash", "a\nb", 4, "test-command")]
    assert blocks("<!-- output -->\ntext between\n```text\na\n```\n")[0].comment == ""


def test_output_is_compared_exactly_but_for_trailing_space():
    assert same_output("a  b\n...\nc", "a  b   \nanything\nat all\nc\n")
    assert not same_output("a b", "a  b")
    assert not same_output("a", "")


def test_a_wrong_docstring_is_noticed():
    """Meta-test: the doctest runner fails on a wrong example."""

    class Module:
        """
        >>> 1 + 1
        3
        """

    Module.__name__ = "module"
    failed, text = run_doctests(Module)
    assert failed == 1
    assert "Expected:\n    3\nGot:\n    2" in text


def test_a_missing_extra_is_one_line() -> None:
    """Without a package of the extra, the example names the command that installs it."""
    script = ROOT / "examples" / "train_lm.py"
    code = (
        "import runpy, sys; sys.modules['optax'] = None; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])"
    )
    args = [sys.executable, "-c", code, str(script.parent), str(script)]
    found = subprocess.run(args, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 1
    assert found.stderr == "optax is not installed: pip install -e '.[examples]'\n"
