"""Every numbered check of a paper has its test: the tables of `docs/papers.md` are whole, and what
they name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = {"GEMINI": 22, "REFT": 13}
ROW = re.compile(r"^\| (GEMINI|REFT) (\d+) \| [^|]+ \| `([^`]+)` \|$", re.MULTILINE)


def rows() -> list[tuple[str, int, str]]:
    text = (ROOT / "docs" / "papers.md").read_text()
    return [(paper, int(number), where) for paper, number, where in ROW.findall(text)]


def is_there(where: str) -> bool:
    """A file, or a function of one."""
    path, _, name = where.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    functions = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef))
    return not name or any(function.name == name for function in functions)


@pytest.mark.parametrize("paper", CHECKS)
def test_each_number_has_a_row(paper: str) -> None:
    assert [number for told, number, _ in rows() if told == paper] == [*range(1, CHECKS[paper] + 1)]


def test_what_a_row_names_is_there() -> None:
    assert [where for _, _, where in rows() if not is_there(where)] == []


def test_what_is_not_there_is_seen() -> None:
    assert not is_there("tests/papers/test_gemini.py::test_check_99")
    assert not is_there("tests/papers/no_such_file.py")
