"""Every error and every warning has a code; each code is said by somebody, and has its entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep import errors
from keepstep.cli.codes_page import page
from keepstep.codes import BY_NUMBER, CODES, Code, of_error, of_warning
from keepstep.errors import ConfigError, DeviceError, KeepstepError, StoreError, UnsavedError
from keepstep.model.events import KINDS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keepstep"
HOLE = "\0"  # what is put into a message at run time
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KeepstepError) and kind is not KeepstepError
}
NOT_LOUD = {"INFO", "DEBUG", "logging.INFO", "logging.DEBUG"}
TOLD_WITHOUT_JOURNAL = {"agent-died", "journal-lost", "mark-failed"}


@dataclass(frozen=True)
class Said:
    """A place that makes an error of this class, or records an event of this kind."""

    place: str
    name: str
    words: str


def words_of(node: ast.AST) -> str:
    """The literal words of an expression; what is only known at run time is a hole."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(words_of(value) for value in values)
        case ast.FormattedValue(value=ast.Constant(value=str(value))):
            return value
        case ast.FormattedValue(value=ast.IfExp() as choice):
            return words_of(choice)
        case ast.BinOp(left=left, right=right):
            return words_of(left) + words_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return words_of(body) + HOLE + words_of(orelse)
    return HOLE + HOLE.join(
        str(part.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE)
        if room.parts[0] in ("sim", "codes"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield f"{room}:{node.lineno}", node


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


ALL_CALLS = list(calls())
RAISED = [
    Said(place, name_of(call), HOLE.join(words_of(word) for word in call.args))
    for place, call in ALL_CALLS
    if name_of(call) in CLASSES
]
STRINGS = "\n".join(
    re.sub(r"\{[^{}]*\}", HOLE, re.sub(r"\"\s*\n\s*f?\"", "", path.read_text()))
    for path in SOURCE.rglob("*.py")
    if "codes" not in path.parts
)


def loud_kinds() -> Iterator[tuple[str, str]]:
    """Which kinds of event are recorded as a warning or an error, and where."""
    for place, call in ALL_CALLS:
        if name_of(call) != "record" or not call.args:
            continue
        levels = [ast.unparse(word) for word in call.args[2:3]]
        levels += [ast.unparse(word.value) for word in call.keywords if word.arg == "level"]
        kind = call.args[0]
        if levels and levels[0] not in NOT_LOUD and isinstance(kind, ast.Constant):
            yield place, str(kind.value)


LOUD = list(loud_kinds())
# Entries that know no words stand for whatever else a class or a kind says.
SPECIFIC = [code for code in CODES if code.phrases]


def test_what_is_raised_and_told_is_found_in_the_source() -> None:
    assert len(RAISED) > 300 and len(LOUD) > 50 and len(STRINGS) > 1_000_000


@pytest.mark.parametrize("name", sorted({said.name for said in RAISED}))
def test_every_class_that_is_raised_has_a_code(name: str) -> None:
    classes = [kind.__name__ for kind in CLASSES[name].__mro__]
    assert of_error([classes[0]], "words that nobody has said") is not None


@pytest.mark.parametrize("kind", sorted({kind for _, kind in LOUD}))
def test_every_kind_that_is_told_aloud_has_a_code(kind: str) -> None:
    assert of_warning(kind, "words that nobody has said") is not None


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.number)
def test_a_code_is_of_what_there_is(code: Code) -> None:
    assert bool(code.raised) != bool(code.kind)
    assert not code.raised or code.raised in CLASSES
    assert not code.kind or code.kind in {*KINDS, *TOLD_WITHOUT_JOURNAL}
    assert re.fullmatch(r"KS\d{4}", code.number) and code.chapter
    assert code.means.endswith(".") and len(code.remedy) > 7


@pytest.mark.parametrize("code", SPECIFIC, ids=lambda code: code.number)
def test_the_words_of_a_code_are_said(code: Code) -> None:
    said = [each.words for each in RAISED if each.name == code.raised]
    for phrase in code.phrases:
        is_said = any(phrase in words for words in said) or phrase in STRINGS
        assert is_said, f"nobody says {phrase!r} any more: the message has lost its code"


# A package that is missing says so by the option that needs it, and one limit names the other: the
# lower number is the one that helps more.
FIRST_OF_TWO = {
    ("KS1007", "KS1302"),
    ("KS1007", "KS1304"),
    ("KS1007", "KS1311"),
    ("KS1310", "KS1311"),
    ("KS2002", "KS2003"),
}


@pytest.mark.parametrize("said", RAISED, ids=lambda said: said.place)
def test_no_message_could_have_two_codes(said: Said) -> None:
    found = tuple(c.number for c in SPECIFIC if c.raised == said.name and c.is_of(said.words))
    assert len(found) <= 1 or found in FIRST_OF_TWO, f"{said.words!r} is {found}"


def test_numbers_are_given_once_and_stand_in_order() -> None:
    numbers = [code.number for code in CODES]
    assert numbers == sorted(set(numbers)) and len(BY_NUMBER) == len(CODES)


def test_only_one_entry_stands_for_the_rest() -> None:
    rest = [(code.raised, code.kind) for code in CODES if not code.phrases]
    assert len(rest) == len(set(rest))


def test_numbers_that_are_written_into_messages_are_there() -> None:
    written = set(re.findall(r"\[(KS\d+)\]", STRINGS))
    assert {"KS5106", "KS5201", "KS5225"} <= written <= {*BY_NUMBER}


def slug(heading: str) -> str:
    """As Python-Markdown's table of contents makes anchors."""
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


@pytest.mark.parametrize("read", sorted({code.read for code in CODES if code.read}))
def test_pages_that_are_named_are_there(read: str) -> None:
    name, _, anchor = read.partition("#")
    text = (ROOT / "docs" / name).read_text()
    headings = {slug(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    assert not anchor or anchor in headings


def test_an_error_ends_with_its_code_and_keeps_its_words() -> None:
    error = ConfigError("protect() was called twice: expected one call")
    assert str(error) == "protect() was called twice: expected one call [KS1002]"
    assert error.args == ("protect() was called twice: expected one call",)
    assert error.code is BY_NUMBER["KS1002"]


def test_an_error_that_tells_of_another_has_its_code_once() -> None:
    inner = StoreError("no answer")
    assert str(UnsavedError(f"the last step is not stored: {inner}")).count("[KS") == 1


def test_words_go_before_the_rest_and_a_class_before_the_one_it_derives_from() -> None:
    assert str(ConfigError("anything")).endswith("[KS1000]")
    assert str(DeviceError("anything")).endswith("[KS4004]")
    assert str(KeepstepError("anything")) == "anything"


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "codes.md").read_text() == page(CODES), "run `make docs`"
