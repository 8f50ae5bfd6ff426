"""What a release consists of: one version, absolute links on the index, pinned actions, and the steps themselves."""

import importlib.util
import re
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import spmd
from tests.pages import blocks

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(path: str) -> ModuleType:
    """A script of .ci, as a module."""
    loader = SourceFileLoader(Path(path).stem, str(ROOT / path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


release = loaded(".ci/release")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# -------------------- one version


def files() -> list[str]:
    return [(ROOT / name).read_text() for name in ("spmd/__init__.py", "CHANGELOG.md", "CITATION.cff")]


def test_one_version():
    """The package has the version; the build reads it, and the changelog and the citation agree."""
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "spmd/__init__.py"
    assert release.disagreements(f"v{spmd.__version__}", *files()) == []


def test_another_version_is_noticed():
    package, changelog, citation = files()
    tag = f"v{spmd.__version__}"
    assert "the tag is v9" in release.disagreements("v9", package, changelog, citation)[0]
    assert "CHANGELOG.md has no line" in release.disagreements(tag, package, "## Unreleased", citation)[0]
    assert len(release.disagreements(tag, package, changelog, "version: 0")) == 2


def test_a_name_is_not_lost_without_a_warning():
    index = "[`a`](reference/x.md#spmd.a), [`b`](reference/x.md#spmd.nn.b)"
    changelog = "## 0.2.0 - 2027-01-01\n\n### Deprecated\n\n- `nn.b`: use `a`.\n\n## 0.1.0 - 2026-11-25\n\n`a`\n"
    assert release.lost_names(index, index, "") == []
    assert release.lost_names(index, "", changelog) == ["a"]


def test_the_conda_recipe_has_the_dependencies_and_the_version():
    recipe = yaml.safe_load(release.filled((ROOT / ".ci" / "conda" / "recipe.yaml").read_text(), "ab" * 32))
    plain = lambda names: {re.sub(r"\s", "", name) for name in names}
    project = PROJECT["project"]
    assert recipe["package"]["version"] == spmd.__version__ and recipe["source"]["sha256"] == "ab" * 32
    assert plain(recipe["requirements"]["run"]) == plain(
        [*project["dependencies"], f"python{project['requires-python']}"]
    )
    assert plain(PROJECT["build-system"]["requires"]) <= plain(recipe["requirements"]["host"])
    assert recipe["about"]["summary"] == project["description"]


# -------------------- what the index shows


def test_the_index_shows_no_relative_link():
    pytest.importorskip("hatchling")
    metadata = loaded(".ci/metadata.py")
    page = (ROOT / "README.md").read_text()
    shown = metadata.absolute(page, "https://example.org/a/b", "v1")
    assert len(release.RELATIVE.findall(page)) > 20 and release.RELATIVE.findall(shown) == []
    assert "](https://example.org/a/b/raw/v1/docs/pages/images/readme.svg?sanitize=true)" in shown
    for target in re.findall(r"/(?:blob|raw)/v1/([^)#?]+)", shown):
        assert (ROOT / target).exists(), target
    assert [block.text for block in blocks(shown)] == [block.text for block in blocks(page)]  # no code is touched


def test_links_are_told_from_others():
    absolute = pytest.importorskip("hatchling") and loaded(".ci/metadata.py").absolute
    same = "[a](https://x.org), [b](#part)"
    assert absolute("[a](b.md#c) ![d](e.svg)", "R", "T") == "[a](R/blob/T/b.md#c) ![d](R/raw/T/e.svg?sanitize=true)"
    assert absolute(same, "R", "T") == same


# -------------------- the workflows


def used(text: str) -> list[str]:
    """The actions that a workflow uses, each with its comment."""
    return re.findall(r"uses: (.*)", text)


def unpinned(text: str) -> list[str]:
    """The actions that are not given by their hash, with the version behind it for people and dependabot."""
    return [one for one in used(text) if not re.match(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\b", one)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_hash(path):
    text = path.read_text()
    assert used(text) and unpinned(text) == []
    assert yaml.safe_load(text)["permissions"]  # none but those that are named


def test_all_workflows_pin_the_same():
    pins = {one.split(";")[0].split(" # v")[0].strip() for path in WORKFLOWS for one in used(path.read_text())}
    assert len(pins) == len({one.partition("@")[0] for one in pins})


def test_an_action_without_a_hash_is_noticed():
    assert unpinned("uses: actions/checkout@v4\nuses: actions/checkout@" + "0" * 40) != []
    assert unpinned("uses: actions/checkout@" + "0" * 40 + " # v4.1.0") == []


def test_the_nightly_of_jax_runs_every_night():
    gate = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text())
    assert "schedule" in gate[True]["schedule"] or gate[True]["schedule"][0]["cron"]  # YAML reads `on` as true
    assert "schedule" in gate["jobs"]["nightly"]["if"]
    assert any("--pre jax" in step.get("run", "") for step in gate["jobs"]["nightly"]["steps"])
    watched = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {one["package-ecosystem"] for one in watched} == {"github-actions", "pip"}


def test_the_release_is_published_by_trust():
    """No password: the job has a token of its own, for the environment that the index knows."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["release"]
    assert job["permissions"]["id-token"] == "write" and job["environment"] == "pypi" and "secrets." not in text
    steps = [step["run"].split()[:2] for step in job["steps"] if ".ci/release" in step.get("run", "")]
    assert steps == [[".ci/release", step] for step in ("check", "build", "upload")]


def test_an_upload_needs_the_address(monkeypatch, tmp_path):
    monkeypatch.delenv("SPMD_REPOSITORY", raising=False)
    assert "SPMD_REPOSITORY is not set" in release.upload(tmp_path)[0]
