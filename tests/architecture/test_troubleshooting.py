"""What `docs/troubleshooting.md` quotes is said somewhere: in the source, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepstep.codes import BY_NUMBER, CODES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
CELL = re.compile(r"^\| (`.+?(?<!\\)`) \|", re.MULTILINE)
HOLE = re.compile(r"\[[^\]]*\]")


def quoted() -> list[str]:
    """The messages in the first column that are nothing but a quotation."""
    return [cell.strip("`").replace("\\`", "`") for cell in CELL.findall(PAGE.read_text())]


def source() -> str:
    """All of it, with strings that go on from line to line joined, and what is put into them
    left out."""
    texts = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(texts))
    return re.sub(r"\{[^{}\"]*\}", "[]", joined)


SAID = source()


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_said(message: str) -> None:
    assert HOLE.sub("[]", message) in SAID


def test_messages_are_quoted_and_a_wrong_one_is_seen() -> None:
    assert len(quoted()) > 15
    assert "a message that nobody says" not in SAID.replace(__name__, "")


ROW = re.compile(r"^\| `(.+?)(?<!\\)` \|.*\| (.*) \|$", re.MULTILINE)
CODE = re.compile(r"\[(KS\d{4})\]\(codes\.md#(ks\d{4})\)")
ROWS = {row[1].replace("\\`", "`"): CODE.findall(row[2]) for row in ROW.finditer(PAGE.read_text())}


@pytest.mark.parametrize("message", ROWS)
def test_a_message_that_has_a_code_names_it(message: str) -> None:
    has = {
        code.number
        for code in CODES
        if any(phrase in message or message in phrase for phrase in code.phrases if phrase)
        or (code.raised == message and not code.phrases)
    }
    named = ROWS[message]
    assert has <= {number for number, _ in named}
    for number, anchor in named:
        assert number in BY_NUMBER and anchor == number.lower()


def test_most_messages_have_a_code() -> None:
    assert len(ROWS) > 15 and sum(map(bool, ROWS.values())) >= 13
