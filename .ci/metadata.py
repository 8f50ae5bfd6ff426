"""What the package index shows: the addresses of the project, and README with absolute links.

The address of the repository is in one variable, SPMD_REPOSITORY. GitHub's workflows set it; without it there are no
addresses, and README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "SPMD_REPOSITORY"
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s]+)\)")


def absolute(page: str, repository: str, tag: str) -> str:
    """The page with its links into the repository made absolute, at one tag."""

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        image = f"{repository}/raw/{tag}/{target}?sanitize=true"  # GitHub then says that SVG is an image
        return f"{match['image']}{match['text']}({image if match['image'] else f'{repository}/blob/{tag}/{target}'})"

    return LINK.sub(replaced, page)


def urls(repository: str, tag: str) -> dict[str, str]:
    """The addresses beside the description."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/pages/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class Metadata(MetadataHookInterface):
    """Called by hatchling. An sdist has the results in its PKG-INFO, and they stay."""

    def update(self, metadata: dict[str, Any]) -> None:
        tag = f"v{metadata['version']}"
        repository = os.environ.get(ADDRESS, "").rstrip("/")
        if "readme" in metadata.get("dynamic", []):
            page = Path(self.root, "README.md").read_text(encoding="utf-8")
            text = absolute(page, repository, tag) if repository else page
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if "urls" in metadata.get("dynamic", []):
            metadata["urls"] = urls(repository, tag) if repository else {}
