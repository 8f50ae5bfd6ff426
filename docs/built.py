"""Check the site that MkDocs has built: what readers that are programs get, what a search finds, what is asked for.

    python -m docs.built site

MkDocs checks the links between pages by itself.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"
# What people type, and a page on which the search finds it.
SEARCHED = {
    "argmin": "card/",
    "broadcast": "card/",
    "mean": "operations/",
    "per-sample": "gradients/",
    "padding": "card/",
    "jnp.mean": "card/",
    "jnp.pad": "card/",
    "jnp.einsum": "card/",
    "jnp.argmax": "card/",
}


def address(page: str) -> str:
    """Where the site has a page, from its root."""
    stem = page.removesuffix(".md").removesuffix("index")
    return f"{stem.rstrip('/')}/" if stem else ""


def faults(site: Path) -> list[str]:
    """What is wrong with the site."""
    pages = sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    home = (site / "index.html").read_text()
    return [*_texts(site, pages), *_not_found(index), *_asked_for(site, home), *_anchors(site)]


def _texts(site: Path, pages: list[str]) -> list[str]:
    """`llms.txt` lists each page once, and `llms-full.txt` has the text of all."""
    listed = re.findall(r"^- \[[^\]]*\]\(([^)]*)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    full = (site / "llms-full.txt").read_text()
    wrong = (
        [] if len(listed) == len({*listed}) == len(pages) else [f"llms.txt lists {len(listed)} of {len(pages)} pages"]
    )
    for page in pages:
        if not any(one.endswith(f"/{address(page)}index.md") for one in listed):
            wrong.append(f"llms.txt does not list {page}")
        title = re.search(r"^# (.*)", (PAGES / page).read_text(), re.MULTILINE)[1]
        if f"\n# {title.replace('`', '')}" not in full.replace("`", ""):
            wrong.append(f"llms-full.txt does not have {page}: {title}")
        if not (site / address(page) / "index.md").exists():
            wrong.append(f"the site does not have {page} as Markdown")
    return wrong


def _not_found(index: list[dict[str, str]]) -> list[str]:
    """What is typed and not found on the page that has it: all its words are in one section."""
    found = {
        word: {
            entry["location"].partition("#")[0]
            for entry in index
            if {*_words(word)} <= {*_words(f"{entry['title']} {re.sub('<[^>]*>', ' ', entry['text'])}")}
        }
        for word in SEARCHED
    }
    return [f"a search for {word} does not find {page}" for word, page in SEARCHED.items() if page not in found[word]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _asked_for(site: Path, home: str) -> list[str]:
    """The list of versions is there or not asked for; nothing is fetched from elsewhere."""
    asks = '"provider": "mike"' in home and not (site / "versions.json").exists()
    wrong = ["the home page asks for versions.json, which is not there"] if asks else []
    fetched = re.findall(
        r'<(?:img|script)[^>]* src="(https?://[^"]*)"|<link rel="stylesheet" href="(https?://[^"]*)"', home
    )
    return [*wrong, *(f"the home page fetches {''.join(one)}" for one in fetched)]


def _anchors(site: Path) -> list[str]:
    """The links of README into pages lead to headings that are there."""
    links = re.findall(r"\]\(docs/pages/([\w/-]+\.md)#([\w-]+)\)", (ROOT / "README.md").read_text())
    return [
        f"README links to {page}#{anchor}, which is not there"
        for page, anchor in links
        if f'id="{anchor}"' not in (site / address(page) / "index.html").read_text()
    ]


if __name__ == "__main__":
    if wrong := faults(Path(sys.argv[1])):
        sys.exit("\n".join(wrong))
