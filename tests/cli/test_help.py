"""`keepstep help`: a code's entry, a command's help, and what to say to a word that is neither."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from keepstep.codes import CODES, Code

WIDTH = 80


def answer(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["help", *words], env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.number)
def test_each_code_says_what_is_behind_it_and_what_to_do(code: Code) -> None:
    said = " ".join(answer(code.number).split())
    assert said.startswith(f"{code.number}: {code.raised or code.kind}")
    assert code.means in said and code.remedy in said


@pytest.mark.parametrize("asked", ["ks1002", "KS1002", "[KS1002]"])
def test_a_code_is_taken_as_it_was_printed(asked: str) -> None:
    assert answer(asked).startswith("KS1002")


def test_without_a_word_all_codes_are_listed_within_a_terminal() -> None:
    said = answer()
    assert all(code.number in said for code in CODES)
    assert max(map(len, said.splitlines())) <= WIDTH


def test_a_command_is_explained_as_by_its_own_option() -> None:
    assert "--grace-s" in answer("run") or "Train" in answer("run")
    assert "Usage:" in answer("status")


@pytest.mark.parametrize(
    ("asked", "near"), [("KS100", "KS"), ("statu", "status"), ("explan", "explain")]
)
def test_a_word_that_is_neither_gets_the_nearest(asked: str, near: str) -> None:
    assert f"did you mean {near}" in answer(asked, code=2)
