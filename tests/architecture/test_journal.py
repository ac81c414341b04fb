"""The kinds of journal events: what is recorded is in the table, and what a reader looks for is
recorded by somebody."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from keepstep.dashboard.timeline import LINKS
from keepstep.model.diagnosis import ExitKind, Kind
from keepstep.model.events import KINDS
from keepstep.testing.faults import KINDS as FAULT_KINDS
from keepstep.testing.faults import NODE_KINDS

ROOT = Path(__file__).parents[2]

# What else is told apart by a `.kind`: faults of a drill, slots, diagnoses, shapes of a state.
DIAGNOSES = {*get_args(ExitKind), *(kind for kind in get_args(Kind) if isinstance(kind, str))}
OTHER_KINDS = {*FAULT_KINDS, *NODE_KINDS, *DIAGNOSES, "own", "copy", "parity", "code"}
# The trace of the first is another thing; the second needs libraries that may be missing.
NO_JOURNAL = ("sim/protocol", "integrations/")


@dataclass(frozen=True)
class Use:
    """A kind, and where it is recorded or looked for."""

    kind: str
    place: str


class Module:
    """A module's source, and what its global names stand for."""

    def __init__(self, text: str, name: str, loaded: ModuleType | None = None) -> None:
        self.tree = ast.parse(text)
        self.name = name
        self._loaded = loaded

    def recorded(self) -> Iterator[Use]:
        """Of calls that record an event: the kinds that they may have, and one that is in no table
        where that cannot be read off the source."""
        for function in self._functions():
            local = _assigned(function)
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                if len(call.args) < 2 or not _records(call.func, call.args[0]):
                    continue
                kinds = list(self._values(call.args[0], local))
                for kind in kinds or [f"unknown: {ast.unparse(call.args[0])}"]:
                    yield Use(kind, f"{self.name}:{call.lineno}")

    def looked_for(self) -> Iterator[Use]:
        """The kinds that `x.kind` is compared with."""
        for scope in (self.tree, *self._functions()):
            local = _assigned(scope)
            for node in ast.walk(scope):
                if isinstance(node, ast.Compare) and _is_kind(node.left):
                    for kind in self._values(node.comparators[0], local):
                        yield Use(kind, f"{self.name}:{node.lineno}")

    def _functions(self) -> Iterator[ast.AST]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node

    def _values(self, node: ast.expr, local: dict[str, ast.expr]) -> Iterator[str]:
        match node:
            case ast.Constant(value=str(kind)):
                yield kind
            case ast.IfExp(body=body, orelse=orelse):
                yield from self._values(body, local)
                yield from self._values(orelse, local)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                yield from self._values(left, local)
                yield from self._values(right, local)
            case ast.Tuple(elts=elements) | ast.Set(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    yield from self._values(element, local)
            case ast.Name(id=name) if name in local:
                yield from self._values(local[name], {})
            case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)):
                yield from self._of_global(name)
            case _:
                pass

    def _of_global(self, name: str) -> Iterator[str]:
        value = getattr(self._loaded, name, None)
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (set, frozenset, tuple, list)):
            yield from value


def _records(called: ast.Attribute, first: ast.expr) -> bool:
    """Whether an event is recorded: by a journal, or by a `boxes.Tell`, which takes two words."""
    if called.attr == "_tell":
        return isinstance(first, ast.Constant)
    return called.attr == "record" and ast.unparse(called.value).endswith("journal")


def _is_kind(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "kind"


def _assigned(function: ast.AST) -> dict[str, ast.expr]:
    """The function's names, with what they were assigned last, or what they run through."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.comprehension(target=ast.Name(id=name), iter=value):
                found[name] = value
    return found


def _modules() -> Iterator[Module]:
    for path in sorted((ROOT / "src" / "keepstep").rglob("*.py")):
        short = path.relative_to(ROOT / "src" / "keepstep").with_suffix("").as_posix()
        if short.startswith(NO_JOURNAL) or path.name == "__init__.py":
            continue
        text = path.read_text(encoding="utf-8")
        loaded = importlib.import_module(f"keepstep.{short.replace('/', '.')}")
        yield Module(text, short, loaded)


MODULES = list(_modules())
RECORDED = [use for module in MODULES for use in module.recorded()]
LOOKED_FOR = [
    *(use for module in MODULES for use in module.looked_for()),
    *(Use(kind, "dashboard/timeline LINKS") for _, kinds in LINKS.values() for kind in kinds),
]


def test_every_recorded_kind_is_in_the_table() -> None:
    assert [use for use in RECORDED if use.kind not in KINDS] == []


def test_every_kind_of_the_table_is_recorded() -> None:
    assert sorted(set(KINDS) - {use.kind for use in RECORDED}) == []


def test_every_kind_that_is_looked_for_is_recorded() -> None:
    """A reader of a kind that nobody records sees nothing, and does not know it."""
    recorded = {use.kind for use in RECORDED}
    assert [use for use in LOOKED_FOR if use.kind not in recorded | OTHER_KINDS] == []


def test_no_other_kind_hides_a_dead_one() -> None:
    """A word with two meanings would let a reader of the dead one pass."""
    assert OTHER_KINDS & set(KINDS) <= {"torn", "preempted"}


def test_each_meaning_is_one_line() -> None:
    assert [kind for kind, meaning in KINDS.items() if not 0 < len(meaning) <= 100] == []


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        ('self._journal.record("a", why)', {"a"}),
        ('self._journal.record("a" if ok else "b", why)', {"a", "b"}),
        ('kind = "a" if ok else "b"\n    self._journal.record(kind, why)', {"a", "b"}),
        ("self._journal.record(OF[outcome], why)", {"a", "c"}),
        ('self._tell("a", why)', {"a"}),
        ("self._wire.record(1, payload)", set()),
        ("self._journal.record(what(), why)", {"unknown: what()"}),
        ('self._record("a", why)', set()),
    ],
)
def test_the_rule_reads_a_writer(call: str, kinds: set[str]) -> None:
    loaded = ModuleType("loaded")
    loaded.__dict__["OF"] = {1: "a", 2: "c"}
    found = Module(f"def f(self):\n    {call}\n", "m", loaded).recorded()
    assert {use.kind for use in found} == kinds


@pytest.mark.parametrize(
    ("test", "kinds"),
    [
        ('event.kind == "a"', {"a"}),
        ('event.kind != "a"', {"a"}),
        ('event.kind in ("a", "b")', {"a", "b"}),
        ('event.kind in SOME | {"b"}', {"a", "b"}),
        ('window[0].kind in {"a"}', {"a"}),
        ('[e for kind in ("a", "b") for e in events if e.kind == kind]', {"a", "b"}),
        ('event.why == "a"', set()),
    ],
)
def test_the_rule_reads_a_reader(test: str, kinds: set[str]) -> None:
    loaded = ModuleType("loaded")
    loaded.__dict__["SOME"] = {"a"}
    found = Module(f"if {test}:\n    pass\n", "m", loaded).looked_for()
    assert {use.kind for use in found} == kinds


IN_THE_JOURNAL = re.compile(r"`([a-z]+(?:-[a-z]+)*)` in\s+the\s+journal")


def test_the_docs_name_kinds_that_are_recorded() -> None:
    named = {
        kind
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for kind in IN_THE_JOURNAL.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 2 and named <= set(KINDS)


# The files that these read were named by a person, or lie in a test's own room.
NAMED = ("cli/journal_replay.py", "edge/os/journal.py", "testing/")
READERS = {"read_journal": 2, "JournalTail": 3}  # and how many arguments stand before the owner


def without_an_owner(text: str) -> list[int]:
    """Lines in which a journal is read, whoever has put it there."""
    found = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        words = [call.func, *call.args]  # `partial(read_journal, ...)` is a call of it, too
        for at, word in enumerate(words[:2]):
            if isinstance(word, ast.Name) and word.id in READERS:
                is_said = len(words) - at - 1 >= READERS[word.id]
                if not (is_said or any(each.arg == "owner" for each in call.keywords)):
                    found.append(call.lineno)
    return found


def test_whose_a_journal_must_be_is_said_wherever_one_is_read() -> None:
    """In a shared state directory anybody may have put it there."""
    source = ROOT / "src" / "keepstep"
    found = {
        f"{path.relative_to(source)}:{line}"
        for path in source.rglob("*.py")
        if not str(path.relative_to(source)).startswith(NAMED)
        for line in without_an_owner(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    ["read_journal(path)", "JournalTail(path, from_its_end=True)", "partial(read_journal, path)"],
)
def test_the_rule_of_owners_sees(line: str) -> None:
    assert without_an_owner(line) == [1]
    assert without_an_owner(line[:-1] + ", owner=me)") == []
