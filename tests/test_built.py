"""The checks of the built site notice what is missing. The gate runs them on the site itself, right after the build."""

import json

import pytest

from docs import built


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site of two pages without faults."""
    pages, site = tmp_path / "pages", tmp_path / "site"
    for page, title in (("index.md", "Home"), ("reference/a.md", "A")):
        (pages / page).parent.mkdir(parents=True, exist_ok=True)
        (pages / page).write_text(f"# {title}\n")
        folder = site / built.address(page)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.md").write_text("text")
        (folder / "index.html").write_text('<h2 id="part">')
    (site / "search").mkdir()
    entry = {"location": "reference/a/#part", "title": "Means", "text": "<code>jnp</code> mean"}
    (site / "search" / "search_index.json").write_text(json.dumps({"docs": [entry]}))
    (site / "llms.txt").write_text("# x\n\n- [Home](http://x/index.md)\n- [A](http://x/reference/a/index.md): text\n")
    (site / "llms-full.txt").write_text("# x\n\n# Home\n\n# A\n")
    (tmp_path / "README.md").write_text("[a](docs/pages/reference/a.md#part)")
    monkeypatch.setattr(built, "PAGES", pages)
    monkeypatch.setattr(built, "ROOT", tmp_path)
    monkeypatch.setattr(built, "SEARCHED", {"jnp.mean": "reference/a/"})
    return site


def test_a_good_site_has_no_faults(site):
    assert built.faults(site) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("llms.txt", "- [Home](http://x/index.md)\n", "", "llms.txt lists 1 of 2 pages"),
        ("llms.txt", "reference/a/", "reference/b/", "llms.txt does not list reference/a.md"),
        ("llms-full.txt", "# A", "", "llms-full.txt does not have reference/a.md: A"),
        ("search/search_index.json", " mean", " man", "a search for jnp.mean does not find reference/a/"),
        ("index.html", "<h2", '{"provider": "mike"}<h2', "the home page asks for versions.json"),
        ("index.html", "<h2", '<script async src="https://x.org/a.js"><h2', "the home page fetches https://x.org/a.js"),
        ("reference/a/index.html", "part", "other", "README links to reference/a.md#part"),
    ],
)
def test_a_fault_is_noticed(site, file, old, new, fault):
    text = (site / file).read_text()
    assert old in text
    (site / file).write_text(text.replace(old, new))
    assert fault in "\n".join(built.faults(site))


def test_addresses():
    assert [built.address(page) for page in ("index.md", "card.md", "reference/a.md")] == ["", "card/", "reference/a/"]
