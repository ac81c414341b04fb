"""What the docs name is there: files, modules and commands."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from keepstep.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ROOMS = sorted(path.name for path in (ROOT / "src/keepstep").iterdir() if path.is_dir())
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
]
FILES += [f"/{path.name}" for path in ROOT.iterdir()]

FILE = re.compile(r"[\w./-]+\.(?:py|toml|txt|sbatch|sh|md)")
FOLDER = re.compile(rf"(?:{'|'.join([*FOLDERS, *ROOMS])})/[\w/.-]*")
MODULE = re.compile(r"keepstep(?:\.\w+)+")
STARTED = re.compile(r"python -m ((?:keepstep|benchmarks|tests)[\w.]*)")
COMMAND = re.compile(r"keepstep ((?:--)?[a-z][^#]*)")
KEEPSTEP = typer.main.get_command(app)
COMMANDS = KEEPSTEP.commands

# Files of a reader's own, in examples.
READERS = {"train.py", "cluster.toml", "agent.sbatch"}


def title(page: Path) -> str:
    """How a page is called in what fails."""
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@dataclass(frozen=True)
class Named:
    """What a line of a page names."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def named(page: Path) -> Iterator[Named]:
    """What stands in backticks, one line at a time."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for text in re.findall(r"`([^`]+)`", line):
            yield Named(title(page), number, text)


def commands(page: Path) -> Iterator[Named]:
    """Command lines of keepstep: in backticks, indented, or between fences."""
    is_fenced = False
    lines = page.read_text().splitlines()
    coded = [Named(title(page), n, line.strip()) for n, line in enumerate(lines, 1)]
    for found, line in zip(coded, lines, strict=True):
        is_fenced ^= line.startswith("```")
        if (is_fenced or line.startswith("    ")) and COMMAND.match(found.text):
            yield found
    yield from (found for found in named(page) if COMMAND.match(found.text))


def words(page: Path) -> Iterator[Named]:
    for found in named(page):
        for word in found.text.split():
            yield Named(found.page, found.line, word.partition("::")[0].rstrip(".,;:"))


def has_file(word: str) -> bool:
    return any(path.endswith(f"/{word.strip('/')}") for path in FILES)


def is_known(name: str) -> bool:
    """Whether that is a module, or something that one exports."""
    module, _, last = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    return hasattr(importlib.import_module(module), last)


def has_commands(command: object) -> bool:
    return hasattr(command, "commands")


def unknown_part(command: str) -> str | None:
    """What of a `keepstep` command line does not exist: its command, or an option; None: all is
    there. What follows the user's own program is the program's."""
    name, *given = command.partition("#")[0].split()
    if name.startswith("--"):  # keepstep's own options stand before any command
        own = {"--help", *(option for param in KEEPSTEP.params for option in param.opts)}
        return None if name in own else name
    known = COMMANDS.get(name)
    if known is None:
        return name
    options = {"--help", *(option for param in known.params for option in param.opts)}
    for word in given:
        if word.endswith(".py"):
            break
        option = word.partition("=")[0].rstrip(".,;:)")
        if option.startswith("--") and option not in options and not has_commands(known):
            return option
    return None


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [
        str(found)
        for found in words(page)
        if (FILE.fullmatch(found.text) or FOLDER.fullmatch(found.text))
        and found.text not in READERS
        and not has_file(found.text)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_modules_that_are_named_exist(page: Path) -> None:
    names = [found for found in words(page) if MODULE.fullmatch(found.text.partition("(")[0])]
    missing = [str(found) for found in names if not is_known(found.text.partition("(")[0])]
    missing += [
        f"{title(page)}: python -m {module}"
        for module in STARTED.findall(page.read_text())
        if importlib.util.find_spec(module) is None
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    unknown = [
        f"{found}: {part}"
        for found in commands(page)
        if (part := unknown_part(found.text.removeprefix("keepstep "))) is not None
    ]
    assert not unknown


def test_what_is_not_there_is_seen() -> None:
    assert not has_file("runtime/rank/no_such_file.py")
    assert not is_known("keepstep.no_such_name")
    assert unknown_part("drill --no-such-option") == "--no-such-option"
    assert unknown_part("no-such-command") == "no-such-command"
    assert unknown_part("--no-such-option") == "--no-such-option"
    assert COMMAND.match("keepstep --no-such-option")


def test_what_is_there_is_found() -> None:
    assert has_file("runtime/rank/rank.py")
    assert is_known("keepstep.Config") and is_known("keepstep.runtime.rank.rank")
    assert unknown_part("--install-completion") is None
    assert unknown_part("run --nnodes 2 train.py --its-own") is None


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
BESIDE_THE_SITE = [  # mkdocs looks after those of the site
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Relative links that lead to no file, or to no heading of a page."""
    for found in LINK.finditer(text):
        link = found[1] or found[2]
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or (anchor and anchor not in anchors(aim)):
            yield link


def anchors(page: Path) -> set[str]:
    """What may stand behind `#`, as GitHub makes it of a heading."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", BESIDE_THE_SITE, ids=title)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page, page.read_text())) == []


def test_a_link_that_leads_nowhere_is_seen() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/api.md) [b](docs/none.md) [c](docs/api.md#errors) [d](docs/api.md#none)"
    assert list(broken_links(page, text)) == ["docs/none.md", "docs/api.md#none"]


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    linked = {name for name in pages if f"(docs/{name}" in text}
    assert pages - linked == {"changelog.md", "index.md"}, "these two are the site's own"
