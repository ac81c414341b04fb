"""The table of patterns: whole, with a source for each line, and blind to mere mentions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.core.postmortem import collectives, exits, line, places, sightings, table
from keepstep.core.postmortem.line import parse_line
from keepstep.core.postmortem.table import ROLES, LogPattern, parse_table
from keepstep.edge.os.own_tables import pattern_text

try:
    from re import _parser as regex_parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as regex_parser

TABLE = parse_table(pattern_text())
MOST_REPEATS = 1500  # of nested repetitions together


def test_there_are_roots_of_many_classes_and_all_roles() -> None:
    roots = {pattern.failure for pattern in TABLE.patterns if pattern.role == "root"}
    assert len(roots) >= 30
    assert {pattern.role for pattern in TABLE.patterns} == set(ROLES)
    assert roots | {"hang", "lost-rank", "own-exit", "teardown"} == set(TABLE.classes)


def test_every_pattern_says_where_its_words_are_from() -> None:
    assert [pattern for pattern in TABLE.patterns if len(pattern.origin) < 4] == []
    assert [c for c in TABLE.classes.values() if not (c.means and c.action and c.advice)] == []


def test_every_pattern_is_reached_by_a_needle() -> None:
    needles = TABLE.needles()
    assert [p for p in TABLE.patterns if not any(n in p.words[0] for n in needles)] == []
    assert sum(len(group) for group in TABLE.by_needle.values()) == len(TABLE.patterns)


def test_the_first_pattern_of_the_table_wins_as_if_all_were_tried() -> None:
    for pattern in TABLE.patterns:
        read = parse_line(f"Some: {' '.join(pattern.words)}")
        slowly = next((p for p in TABLE.patterns if p.matches(read)), None)
        assert TABLE.match(read) is slowly


@pytest.mark.parametrize(
    "text",
    [
        "2026-03-14 10:00:00,123 INFO trainer: retry_on: CUDA out of memory",
        "2026-03-14 10:00:00,123 WARNING trainer: CUDA out of memory; trying again",
        '  patterns: ["RuntimeError: CUDA out of memory"]',
        "the user wrote: Xid 79, GPU has fallen off the bus",
        "NVRM: Xid (PCI:0000:18:00): 79, as the handbook says",
        "# OSError: [Errno 28] No space left on device",
        "error: *** JOB 1 ON n1 CANCELLED DUE TO NODE FAILURE",
        "we saw NCCL WARN NET/IB : Got completion from peer",
    ],
)
def test_a_mention_is_no_root(text: str) -> None:
    found = TABLE.match(parse_line(text))
    assert found is None or found.role != "root"


@pytest.mark.parametrize("pattern", TABLE.patterns, ids=lambda p: " ".join(p.words))
def test_the_words_of_no_pattern_are_a_root_where_they_are_mentioned(pattern: LogPattern) -> None:
    words = " ".join(pattern.words)
    for text in (
        f"2026-03-14 10:00:00,123 INFO trainer: config: {{'retry_on': ['{words}']}}",
        f'  fatal_patterns: "{words}"',
        f"2026-03-14 10:00:01,123 WARNING trainer: caught {words}; trying again (1 of 3)",
    ):
        found = TABLE.match(parse_line(text))
        assert found is None or found.role != "root", (text, found)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bash: line 3: torchrun: command not found", "import"),
        (
            "python3: can't open file '/w/train.py': [Errno 2] No such file or directory",
            "missing-file",
        ),
        ("slurmstepd: error: execve(): /v/bin/python: No such file or directory", "missing-file"),
        ("no such thing: command not found here", None),
        ("INFO node-watcher: Preemption notice: the node goes in 30 s", "preempted"),
        ("INFO train: on a Preemption notice we save", None),
    ],
)
def test_what_is_said_without_an_error(text: str, kind: str | None) -> None:
    found = TABLE.match(parse_line(text))
    assert (found and found.failure) == kind


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"class": "no-such"}, "no class 'no-such'"),
        ({"role": "maybe"}, "not a pattern"),
        ({"where": "nowhere"}, "not a pattern"),
        ({"words": []}, "not a pattern"),
        ({"words": [""]}, "not a pattern"),
    ],
)
def test_a_table_that_is_wrong_is_refused(change: dict[str, Any], words: str) -> None:
    entry = {"class": "code", "words": ["Error"], "origin": "Python", **change}
    classes = {"code": {"means": "m", "action": "a", "advice": "b"}}
    with pytest.raises(ValueError, match=words):
        parse_table(json.dumps({"classes": classes, "patterns": [entry], "exits": {}}))


def expressions() -> Iterator[re.Pattern[str]]:
    for module in (line, places, collectives, exits, sightings, table):
        for value in vars(module).values():
            if isinstance(value, re.Pattern):
                yield value
    yield from [*line.PIECES, *exits.RAISED, *exits.PLAIN]


def repeats(tree: Any) -> int:
    """How often the innermost thing of this expression can be tried from one place."""
    most = 1
    for kind, value in tree:
        if "REPEAT" in str(kind):
            most = max(most, int(value[1]) * repeats(value[2]))
        else:
            parts = value if isinstance(value, (tuple, list)) else [value]
            trees = [p for p in flat(parts) if isinstance(p, regex_parser.SubPattern)]
            most = max([most, *(repeats(part) for part in trees)])
    return most


def flat(parts: Any) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, (tuple, list)):
            yield from flat(part)
        else:
            yield part


@pytest.mark.parametrize("expression", list(expressions()), ids=lambda e: e.pattern[:40])
def test_no_expression_can_run_away(expression: re.Pattern[str]) -> None:
    """Each repetition has a bound, so that no line costs more than its length times a constant."""
    assert repeats(regex_parser.parse(expression.pattern, expression.flags)) <= MOST_REPEATS


def test_the_rule_sees_one_that_can() -> None:
    assert repeats(regex_parser.parse(r"(?:a+b?)+c")) > MOST_REPEATS
    assert repeats(regex_parser.parse(r"(?:x|(?:a{0,90}){0,90})c")) > MOST_REPEATS
