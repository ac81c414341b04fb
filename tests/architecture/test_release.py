"""What a release says of itself in several places is the same everywhere, and workflows run what is
pinned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import keepstep

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSION = re.compile(r"^## \[(\d+\.\d+\.\d+)\]", re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelogs_newest_release_is_the_packages() -> None:
    assert VERSION.findall((ROOT / "CHANGELOG.md").read_text())[0] == keepstep.__version__


def test_citation_and_chart_name_it() -> None:
    assert f"\nversion: {keepstep.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    chart = (ROOT / "examples" / "kubernetes" / "chart" / "Chart.yaml").read_text()
    assert f'appVersion: "{keepstep.__version__}"' in chart


def test_it_is_a_semantic_version() -> None:
    assert re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9a-z.-]+)?", keepstep.__version__)


def test_headings_of_the_changelog_are_those_of_its_format() -> None:
    headings = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings and {heading.partition(":")[0] for heading in headings} <= KINDS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_and_may_read_only(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), used
    assert re.search(r"^permissions: \{contents: read\}", text, re.MULTILINE)


def test_an_action_by_its_tag_is_seen(tmp_path: Path) -> None:
    loose = tmp_path / "loose.yml"
    loose.write_text("permissions: {contents: read}\njobs: {a: {steps: [{uses: a/b@v4}]}}")
    with pytest.raises(AssertionError):
        test_actions_are_pinned_to_a_commit_and_may_read_only(loose)


def test_the_page_of_the_registry_has_no_loose_ends() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'readme = "README.md"' in text and 'license = "Apache-2.0"' in text
    for python in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {python}" in text


def test_every_day_the_integrations_are_run() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    job = text.partition("\n  integrations:")[2].partition("\n  platforms:")[0]
    assert "run: make integrations" in job and "schedule" in job
