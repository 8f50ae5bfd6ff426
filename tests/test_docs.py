"""The documentation names every public name, and its pages are all in the menu."""

from __future__ import annotations

import re
from pathlib import Path

import spmd
from tests.pages import WIDTH, blocks

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Modules whose names stand on the API page under the module's.
MODULES = ("cluster", "fft", "haliax", "linalg", "nn", "parallel", "random", "searcher", "stencil", "testing")


def documented(page: str) -> set[str]:
    """The names after `:::` of an API page, without the package."""
    return set(re.findall(r"^::: spmd\.([\w.]+)$", page, re.MULTILINE))


def expected() -> set[str]:
    """Every public name; the modules among them by what they hold."""
    names = set(spmd.__all__) - {"inspect", *MODULES}
    return names | {f"{module}.{name}" for module in MODULES for name in getattr(spmd, module).__all__}


def test_the_api_page_has_every_public_name():
    assert documented((DOCS / "pages" / "api.md").read_text()) == expected()


def test_the_page_of_inspect_has_every_public_name():
    page = (DOCS / "pages" / "reference" / "inspect.md").read_text()
    assert documented(page) >= {f"inspect.{name}" for name in spmd.inspect.__all__}


def test_a_missing_name_is_noticed():
    """Meta-test."""
    assert documented("::: spmd.kernel\n\n::: spmd.random.normal\ntext ::: spmd.other\n") == {"kernel", "random.normal"}
    assert "kernel" in expected() and "random.normal" in expected()


def too_wide(page: str) -> list[str]:
    """The lines of code and output that do not fit into the column of a page."""
    return [line for block in blocks(page) for line in block.text.splitlines() if len(line) > WIDTH]


def test_code_and_output_fit_into_the_column_of_a_page():
    pages = [DOCS.parent / "README.md", *sorted((DOCS / "pages").rglob("*.md"))]
    assert {path.name: lines for path in pages if (lines := too_wide(path.read_text()))} == {}


def test_a_wide_line_is_noticed():
    """Meta-test."""
    page = "```python\n{}\n```\n" + "prose " * 30
    assert too_wide(page.format("x" * WIDTH)) == [] and len(too_wide(page.format("x" * (WIDTH + 1)))) == 1


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": ([\w/-]+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE))
    assert menu == {path.relative_to(DOCS / "pages").as_posix() for path in (DOCS / "pages").rglob("*.md")}
