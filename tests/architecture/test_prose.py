"""`.ci/prose`: what it finds in a page, and where; and that it finds nothing in ours."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / ".ci" / "prose"
pytest.importorskip("proselint")


def loaded() -> ModuleType:
    loader = SourceFileLoader("prose", str(SCRIPT))
    spec = spec_from_loader("prose", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


prose = loaded()


def run(*pages: Path) -> tuple[int, list[str]]:
    told = subprocess.run(
        [sys.executable, SCRIPT, *pages], capture_output=True, text=True, timeout=100
    )
    return told.returncode, told.stdout.splitlines() + told.stderr.splitlines()


def test_there_is_nothing_to_find_in_our_pages() -> None:
    code, told = run()
    assert told[-1].endswith("pages: nothing found") and code == 0, "\n".join(told)


FIFTEEN = "all ranks of one job keep what each step has made in memory and on"
PLANTED = {
    "a word that the glossary does not use": "A straggler delays all.",
    "a word twice": "All ranks wait for the the slowest one.",
    "a cliche": "At the end of the day all ranks resume.",
    "a line that is too wide": f"{FIFTEEN} nodes that nobody has lost so far or ever will.",
    "a sentence that is too long": "\n".join([FIFTEEN] * 5) + ".",
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found_where_it_is(what: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\nAll ranks resume.\n\n{PLANTED[what]}\n")
    code, told = run(page)
    assert code == 1 and any(line.startswith(f"{page}:5: ") for line in told), told


def test_sentences_that_are_long_in_the_mean_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{FIFTEEN}\n{FIFTEEN}.\n\n{FIFTEEN}\n{FIFTEEN}.\n")
    assert run(page) == (
        1, [f"{page}:1: 30.0 words a sentence in the mean; expected fewer than 30"],
    )  # fmt: skip


def test_code_is_not_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "All ranks resume: `the the straggler`.\n\n```\nthe the straggler\n```\n\n"
        "    the the straggler\n\n[here](the-the-straggler.md) <b title='straggler'>too</b>\n"
    )
    assert run(page) == (0, ["1 pages: nothing found"])


@given(st.text(alphabet="ab` \n.#|-<>[]()*\"'", max_size=120))
def test_what_is_left_out_keeps_its_place(text: str) -> None:
    kept = prose.prose_of(text)
    assert len(kept) == len(text) and kept.count("\n") == text.count("\n")
    assert all(b in (a, " ", prose.CODE) for a, b in zip(text, kept, strict=True))


def test_a_sentence_ends_where_a_reader_sees_it_end() -> None:
    page = (
        "One two three. Four `a.b. C` five (six. seven). Eight!\n* Nine ten.\n* Eleven, e.g. 12\n"
    )
    assert [words for _, words in prose.sentences_of(prose.prose_of(page))] == [3, 5, 2, 3]


def test_wide_prose_is_seen_and_wide_tables_and_code_are_not() -> None:
    wide = "word " * 30
    text = f"{wide}\n| {wide} |\n    {wide}\n```\n{wide}\n```\n* {wide}"
    assert [line for line, _ in prose.too_wide(text)] == [1, 7]


def test_every_word_that_is_not_used_has_another() -> None:
    words = prose.not_used()
    assert words["k8s"] == "Kubernetes" and len(words) > 10
