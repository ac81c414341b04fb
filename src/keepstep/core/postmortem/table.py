"""The table of patterns: which words in a log mean what, and what to do about it.

Comes in: the text of `patterns.json`. Goes out: for a line, the first pattern that it matches.

The table is data and holds no regular expressions, only literal strings: a line matches a pattern
when it holds all of `words` and none of `unless`, in a place where such words are said by who says
them (`where`). So a line costs its length times the table's, whatever stands in it.

A role says what words can be: `root`, the cause; `cascade`, what others say because of it;
`teardown`, what is said while the rest is ended. `weight` orders roots: 5, a fact of the kernel,
of Slurm or of who else ended it; 4, an error that names itself; 3, how a process ended; 2, an error
that could be anything, with a traceback above it; 1, what is also said of those that are ended; 0,
taken only when there is nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from keepstep.core.postmortem.line import LOGGER, LogLine
from keepstep.model.decoding import from_json

PatternRole = Literal["root", "cascade", "teardown"]
ROLES = ("root", "cascade", "teardown")
SHELL = re.compile(r"[\w./-]{1,200}: line \d{1,6}: {0,8}\d{1,9} ")  # `run.sh: line 3: 47 Killed`
SAID_BY = re.compile(r"[\w./-]{1,200}: ")  # `bash: line 3: torchrun: command not found`
POD = re.compile(  # as kubectl describes a pod, tells of events, and lists pods
    r"[ \t]{0,40}(?:Reason|Message):[ \t]"
    r"|[ \t]{1,8}(?:Normal|Warning)[ \t]{2,20}[A-Z]\w{2,60}[ \t]{2,60}"
    r"|(?:[\w().-]{1,40}[ \t]{1,20}){1,8}(?:pod|workload|[a-z]{0,20}job)/[\w.-]{1,253}[ \t]"
    r"|[\w.-]{1,253}[ \t]{1,40}\d{1,3}/\d{1,3}[ \t]"
)
OWN_CODES = range(2, 128)  # 1 is an error's, 128 and more a signal's, as a shell tells it


@dataclass(frozen=True, slots=True)
class FailureClass:
    """`action`: the cheapest thing to do, in a word or two; `advice`: in a sentence. `scope` job:
    no rank is to blame."""

    name: str
    means: str
    action: str
    advice: str
    scope: Literal["rank", "job"] = "rank"


@dataclass(frozen=True, slots=True)
class LogPattern:
    """`failure`: the name of its class. `origin`: who prints these words. `of`: others, who says
    them is not to blame."""

    failure: str
    role: PatternRole
    weight: int
    where: str
    words: tuple[str, ...]
    unless: tuple[str, ...]
    origin: str
    of: Literal["its rank", "others"] = "its rank"

    def matches(self, line: LogLine) -> bool:
        text = line.text
        return (
            all(word in text for word in self.words)
            and not any(word in text for word in self.unless)
            and WHERE[self.where](line, self.words[0])
        )


@dataclass(frozen=True, slots=True)
class PatternTable:
    """`exits`: what a process's end by this code says, where nothing else does; `own_exit`:
    likewise of codes that no error of Python's and no signal has. `by_needle`: the patterns whose
    lines hold this, with their places in the table."""

    classes: Mapping[str, FailureClass]
    patterns: tuple[LogPattern, ...]
    exits: Mapping[int, LogPattern]
    own_exit: LogPattern
    by_needle: Mapping[str, Sequence[tuple[int, LogPattern]]]

    def needles(self) -> list[str]:
        """One of these is in every line that any pattern matches."""
        return list(self.by_needle)

    def of_exit(self, code: int) -> LogPattern | None:
        return self.exits.get(code, self.own_exit if code in OWN_CODES else None)

    def match(self, line: LogLine) -> LogPattern | None:
        """The first pattern of the table that this line matches."""
        text = line.text
        near = [group for needle, group in self.by_needle.items() if needle in text]
        likely = [found for group in near for found in group if found[1].words[0] in text]
        likely.sort(key=lambda found: found[0])
        return next((pattern for _, pattern in likely if pattern.matches(line)), None)


def _is_raised(line: LogLine, word: str) -> bool:
    """At the head of an exception's line, or of an error's in a log; not quoted in another. In the
    margin of a group of exceptions below a traceback: tables have such margins, too."""
    if line.is_nested:
        return line.is_exception and line.is_traced
    return not line.is_mild and (line.is_exception or line.body.startswith(word))


def _said(line: LogLine) -> str:
    """The words of a line that no error needs to tell, without its logger's name."""
    name = LOGGER.match(line.body)
    return line.body[name.end() :] if name else line.body


def _is_head(line: LogLine, word: str) -> bool:
    return not line.is_mild and not line.is_nested and line.body.startswith(word)


WHERE: Mapping[str, Callable[[LogLine, str], bool]] = {
    "raised": _is_raised,
    "head": _is_head,
    "traced": lambda line, _: line.is_exception and line.is_traced,
    "alone": lambda line, word: line.body == word,
    "notice": lambda line, word: not line.is_nested and _said(line).startswith(word),
    "ends": lambda line, word: line.body.endswith(word) and bool(SAID_BY.match(line.body)),
    "shell": lambda line, _: SHELL.match(line.body) is not None,
    "pod": lambda line, _: POD.match(line.text) is not None,
    "kernel": lambda line, _: line.by == "kernel",
    "nccl": lambda line, _: line.by == "nccl",
    "slurm": lambda line, _: line.by == "slurm",
    "torch": lambda line, _: line.by == "torch" or line.is_exception,
    "anywhere": lambda line, _: True,
}


def parse_table(text: str) -> PatternTable:
    """The table in this text. Raises ValueError naming what is wrong with it."""
    document = from_json(text)
    classes = {
        name: FailureClass(name=name, **fields) for name, fields in document["classes"].items()
    }
    patterns = tuple(_pattern(entry, classes) for entry in document["patterns"])
    exits = {
        code: _pattern({"words": [code], "where": "anywhere", **entry}, classes)
        for code, entry in document["exits"].items()
    }
    own_exit = exits.pop("own")
    by_code = {int(code): pattern for code, pattern in exits.items()}
    return PatternTable(classes, patterns, by_code, own_exit, _by_needle(patterns))


def _by_needle(patterns: Sequence[LogPattern]) -> dict[str, list[tuple[int, LogPattern]]]:
    """Patterns by their first words, or the shortest of other patterns' that those hold."""
    firsts = sorted({pattern.words[0] for pattern in patterns}, key=len)
    found: dict[str, list[tuple[int, LogPattern]]] = {}
    for first in firsts:
        if not any(shorter in first for shorter in found):
            found[first] = []
    for place, pattern in enumerate(patterns):
        needle = next(shorter for shorter in found if shorter in pattern.words[0])
        found[needle].append((place, pattern))
    return found


def _pattern(entry: Mapping[str, Any], classes: Mapping[str, FailureClass]) -> LogPattern:
    role, kind = entry.get("role", "root"), entry["class"]
    where, words = entry.get("where", "raised"), entry["words"]
    if role not in ROLES or where not in WHERE or not words or not all(words):
        raise ValueError(f"not a pattern: {entry}")
    if kind not in classes:
        raise ValueError(f"no class {kind!r}, in {entry}")
    weight = entry.get("weight", 4 if role == "root" else 0)
    unless = tuple(entry.get("unless", ()))
    of = entry.get("of", "its rank")
    return LogPattern(kind, role, weight, where, tuple(words), unless, entry["origin"], of)
