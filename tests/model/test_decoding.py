"""Decoding: what others wrote is shown without changing the screen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.decoding import a_file_name, a_name, on_a_screen

HOSTILE = ["\x1b]0;title\x07", "\x1b[2J", "\r done", "\x9b31m", "a\u202eb", "\ud800", "\0", "\x7f"]


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_what_can_be_seen_stays(text: str) -> None:
    assert on_a_screen(text) == text
    assert on_a_screen(f"{text}\t \n{text}") == f"{text}\t \n{text}"


@given(st.text())
def test_what_is_left_can_be_printed_and_moves_no_cursor(text: str) -> None:
    shown = on_a_screen(text)
    assert len(shown) == len(text)
    shown.encode()
    assert not [c for c in shown if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160]
    assert on_a_screen(shown) == shown


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_changes_no_screen(text: str) -> None:
    assert on_a_screen(text) != text
    for read in (a_name, a_file_name):
        with pytest.raises(ValueError, match="expected a"):
            read(f"x{text}")
