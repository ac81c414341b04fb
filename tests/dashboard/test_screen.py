"""What somebody else has chosen is shown as it is, and nothing in it acts on the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from keepstep.dashboard.screen import Screen

HOSTILE = {
    "title": "\x1b]0;pwned\x07name",
    "clear": "\x1b[2Jname",
    "c1": "\x9b31mname",
    "backspace": "good\b\b\b\bname",
    "direction": "\u202ename",
    "half a character": "na\udcffme",
}


def table(text: str | Text) -> Table:
    made = Table("name")
    made.add_row(text)
    return made


def shown(what: RenderableType) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    Screen(file=file, width=200).print(what)
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "wrapped",
    [str, Text, table, lambda text: table(Text(text))],
    ids=["str", "Text", "row", "cell"],
)
def test_what_a_terminal_acts_on_does_not_reach_it(name: str, wrapped: object) -> None:
    assert callable(wrapped)
    found = shown(wrapped(HOSTILE[name]))
    acts = [c for c in found if not c.isprintable() and c != "\n"]
    assert acts == [] and "me" in found


@pytest.mark.parametrize("text", ["[/x]", "[red]a[/red]", "[link=http://a]b[/link]", ":bug:"])
def test_nothing_is_taken_for_markup(text: str) -> None:
    assert shown(text).strip() == text
    assert text in shown(table(text))
