"""The documentation names every public name, and its pages are all in the menu."""

import re
from pathlib import Path

import pytest

import spmd
from tests.conftest import main
from tests.pages import WIDTH, blocks, width_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Modules whose names stand in the reference under the module's.
MODULES = (
    "accelerators",
    "cluster",
    "errors",
    "fft",
    "haliax",
    "inspect",
    "linalg",
    "nn",
    "parallel",
    "porting",
    "propagation",
    "random",
    "searcher",
    "stencil",
    "testing",
)


def documented(page: str) -> set[str]:
    """The names after `:::` of a page of the reference, without the package."""
    return set(re.findall(r"^::: spmd\.([\w.]+)$", page, re.MULTILINE))


def expected() -> set[str]:
    """Every public name; the modules among them by what they hold."""
    names = set(spmd.__all__) - {*MODULES}
    held = {f"{module}.{name}" for module in MODULES for name in getattr(spmd, module).__all__}
    return names | (held - {"porting.port", "propagation.propagate"})  # they are `spmd.port` and `spmd.propagate`


def linked(page: str) -> dict[str, str]:
    """The names of the index, each with the page of the reference to which its link leads."""
    return {name: file for file, name in re.findall(r"\]\((reference/\w+\.md)#spmd\.([\w.]+)\)", page)}


def test_the_reference_has_every_public_name_once_and_the_index_leads_to_it():
    pages = {f"reference/{path.name}": path.read_text() for path in (DOCS / "pages" / "reference").glob("*.md")}
    where = [(name, file) for file, page in pages.items() for name in documented(page)]
    assert len(dict(where)) == len(where)
    assert dict(where).keys() == expected()
    assert linked((DOCS / "pages" / "api.md").read_text()) == dict(where)


def test_a_missing_name_is_noticed():
    """Meta-test."""
    assert documented("::: spmd.kernel\n\n::: spmd.random.normal\ntext ::: spmd.other\n") == {"kernel", "random.normal"}
    assert "kernel" in expected() and "random.normal" in expected()
    assert linked("[`normal`](reference/a.md#spmd.random.normal), [b](a.md#spmd.b)") == {
        "random.normal": "reference/a.md"
    }


def too_wide(page: str) -> list[str]:
    """The lines of code and output that do not fit into the column of a page."""
    return [line for block in blocks(page) for line in block.text.splitlines() if len(line) > width_of(page)]


def test_code_and_output_fit_into_the_column_of_a_page():
    pages = [DOCS.parent / "README.md", *sorted((DOCS / "pages").rglob("*.md"))]
    assert {path.name: lines for path in pages if (lines := too_wide(path.read_text()))} == {}


def test_a_wide_line_is_noticed():
    """Meta-test."""
    page = "```python\n{}\n```\n" + "prose " * 30
    assert too_wide(page.format("x" * WIDTH)) == [] and len(too_wide(page.format("x" * (WIDTH + 1)))) == 1


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": ([\w/-]+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(DOCS / "pages").as_posix() for path in (DOCS / "pages").rglob("*.md")}
    assert menu == {page for page in pages if not page.startswith("decisions/0")}  # their index is in the menu


# -------------------- the changelog and the decisions

PARTS = ["Status", "Context", "Decision", "Consequences"]


def words(text: str) -> int:
    """Count the words as `wc -w` does."""
    return len(text.split())


def without_form(pages: dict[str, str], index: str) -> list[str]:
    """Return the decisions that lack a heading or their line in the index, and lines of the index without a page."""
    listed = re.findall(r"^- \[(\d{4})\]\((\1-[\w-]+\.md)\): (.+)\.$", index, re.MULTILINE)
    lines = [(name, title) for _, name, title in listed]
    titles = {name: page.partition("\n")[0].removeprefix("# ") for name, page in pages.items()}
    wrong = [name for name, page in pages.items() if re.findall("^## (.*)$", page, re.MULTILINE) != PARTS]
    wrong += [name for name, title in titles.items() if lines.count((name, title)) != 1]
    return wrong + [name for name, _ in lines if name not in pages]


def decisions() -> tuple[dict[str, str], str]:
    """Return the pages of the decisions by their file names, and the index."""
    folder = DOCS / "pages" / "decisions"
    return {path.name: path.read_text() for path in sorted(folder.glob("0*.md"))}, (folder / "index.md").read_text()


def test_each_entry_of_the_changelog_is_short():
    entries = re.split(r"^- ", (DOCS.parent / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    assert [entry for entry in entries if words(entry.split("\n\n")[0]) > 80] == []


def test_every_decision_has_its_parts_and_one_line_in_the_index():
    pages, index = decisions()
    assert len(pages) > 30
    assert without_form(pages, index) == []
    assert sorted(name[:4] for name in pages) == [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert {name: words(page) for name, page in pages.items() if words(page) > 250 or words(page) < 80} == {}


def test_a_decision_without_its_form_is_noticed():
    """Meta-test."""
    page = "# We do\n\n" + "".join(f"## {part}\n\nText.\n\n" for part in PARTS)
    line = "- [0001](0001-do.md): We do.\n"
    assert without_form({"0001-do.md": page}, line) == []
    assert without_form({"0001-do.md": page.replace("## Context", "Context")}, line) == ["0001-do.md"]
    for index in ("", line + line, line.replace("We", "They")):
        assert without_form({"0001-do.md": page}, index) == ["0001-do.md"]
    assert without_form({}, line) == ["0001-do.md"] and words("a b\nc") == 3


def test_the_site_shows_examples_without_the_marks_of_doctest():
    pytest.importorskip("griffe")
    from docs.doctests import fenced

    shown = fenced("Text.\n\n  >>> print('a\\n\\nb')\n  a\n  <BLANKLINE>\n  b\n\nMore.")
    assert shown == "Text.\n\n  ```pycon\n  >>> print('a\\n\\nb')\n  a\n  \n  b\n  ```\n\nMore."


CARD = (DOCS / "pages" / "card.md").read_text()


def on_the_card(name: str, card: str) -> bool:
    """Whether the card has the name in code."""
    return re.search(rf"`[^`\n]*(?<!\w){re.escape(name)}(?!\w)[^`\n]*`", card) is not None


def verbs_and_layers() -> set[str]:
    """Every public function, those of the modules for layers, grids, tests and clusters too."""
    names = {name for name in spmd.__all__ if callable(getattr(spmd, name))}
    for module in ("nn", "parallel", "stencil", "fft", "linalg", "random", "testing", "cluster"):
        held = getattr(spmd, module)
        names |= {name for name in held.__all__ if callable(getattr(held, name))}
    return {name for name in names if not name[0].isupper()}


def test_the_card_has_every_verb_layer_and_command(capsys):
    missing = {name for name in verbs_and_layers() if not on_the_card(name, CARD)}
    assert missing == set()
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)  +\w", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 8
    table = CARD.partition("## Commands")[2].partition("##")[0]
    assert [command for command in commands if not on_the_card(command, table)] == []


def test_the_strings_of_the_card_are_strings():
    strings = re.findall(r'"([^"]*)"', CARD.partition("## Looking")[0])
    layouts = [text for text in strings if re.search(r"[/{\[ ]|->", text) and "=" not in text]
    assert len(layouts) > 30
    for text in layouts:
        if text not in ("{x}", "{U:dp}"):
            spmd.Pattern(text) if "->" in text else spmd.Layout(text)


def test_a_name_that_is_not_on_the_card_is_noticed():
    """Meta-test."""
    assert on_the_card("sort", "| `sort`, `argsort` |") and not on_the_card("sort", "| sort, `argsort` |")
    assert {"einsum", "rms_norm", "halo", "launch"} - verbs_and_layers() == {"launch"}
