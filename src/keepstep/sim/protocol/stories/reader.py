"""Reader: a story's text.

A story is prose, and then sections, each entry of which stands on a line of its own, indented:

    plan            fields of `RunPlan`, and `wires.` fields; `seed`. `a | b` tells it with each
    vary            names that stand in braces further down, with their texts: `byte = 40 | 4106`
    what happens    rules: `at 4.2s: kill rank 1`, `when rank 0 has completed step 5: ...`
    expected        what must be so in the end

What a rule begins with: `at TIME`; `[from TIME, ]when CONDITION[ for the 2nd time][, TIME later]`;
either behind `then ` counts from when the rule before has happened. Several acts are separated by
semicolons. `#` begins a comment. Which phrases there are: `conditions.py`, `happenings.py`,
`expectations.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, get_type_hints

from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.stories.conditions import CONDITIONS, LOOKS, Condition, Look
from keepstep.sim.protocol.stories.expectations import EXPECTATIONS, Expectation
from keepstep.sim.protocol.stories.happenings import HAPPENINGS, Happening
from keepstep.sim.protocol.stories.phrases import TIME, StoryError, ns, quantity, unknown
from keepstep.sim.protocol.wire.network import Wires

SECTIONS = ("plan", "vary", "what happens", "expected")
RULE = re.compile(
    rf"(?P<then>then )?(?:at (?P<at>{TIME})"
    rf"|(?P<after>{TIME}) later"
    rf"|(?:from (?P<start>{TIME}), )?when (?P<condition>.+?)"
    rf"(?: for the (?P<nth>\d+)(?:st|nd|rd|th) time)?(?:, (?P<late>{TIME}) later)?)"
)


@dataclass(frozen=True)
class Entry:
    """One line of a section."""

    line: int
    text: str


@dataclass(frozen=True)
class StoryRule:
    """`after_ns`: no sooner than so long after the beginning, or after the rule before, if it
    `follows`. `condition`, or `look`: what it waits for then, None for nothing, for the `nth` time;
    and `late_ns` more."""

    line: int
    text: str
    follows: bool
    after_ns: int
    condition: Condition | None
    look: Look | None
    nth: int
    late_ns: int
    acts: tuple[Happening, ...]


@dataclass(frozen=True)
class StoryCase:
    """A story with all its alternatives chosen, which `name` says."""

    name: str
    seed: int
    plan: RunPlan
    rules: tuple[StoryRule, ...]
    expected: tuple[tuple[Entry, Expectation], ...]


@dataclass
class Sections:
    """Of a story's text."""

    prose: list[str] = field(default_factory=list)
    entries: dict[str, list[Entry]] = field(default_factory=lambda: {s: [] for s in SECTIONS})


def read_story(text: str) -> list[StoryCase]:
    """One case for each choice of its alternatives. Raises StoryError."""
    sections = _sections(text)
    planned = [_alternatives(entry) for entry in sections.entries["plan"]]
    varied = [_alternatives(entry) for entry in sections.entries["vary"]]
    cases = []
    for chosen in product(*(texts for _, _, texts in planned + varied)):
        names = [name for _, name, _ in planned + varied]
        many = [len(texts) > 1 for _, _, texts in planned + varied]
        pairs = list(zip(names, chosen, strict=True))
        label = " ".join(f"{n}={v}" for (n, v), m in zip(pairs, many, strict=True) if m)
        lines = [line for line, _, _ in planned]
        plan, seed = _plan(zip(lines, pairs[: len(planned)], strict=True))
        values = dict(pairs[len(planned) :])
        cases.append(_case(label, seed, plan, sections, values))
    return cases


def _sections(text: str) -> Sections:
    found = Sections()
    current: str | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].rstrip()
        if line in SECTIONS:
            current = line
        elif current is None:
            found.prose.append(line)
        elif line.startswith(" "):
            found.entries[current].append(Entry(number, line.strip()))
        elif line:
            raise StoryError(number, f"one of {', '.join(SECTIONS)}, or an indented entry", line)
    if not "".join(found.prose):
        raise StoryError(1, "prose that says why there is this story", text[:40])
    for section in ("plan", "expected"):
        if not found.entries[section]:
            raise StoryError(len(text.splitlines()), f"the section {section!r}", "the end")
    return found


def _alternatives(entry: Entry) -> tuple[int, str, list[str]]:
    name, equals, value = entry.text.partition("=")
    if not equals:
        raise StoryError(entry.line, "`name = value`", entry.text)
    return entry.line, name.strip(), [each.strip() for each in value.split("|")]


def _case(
    label: str, seed: int, plan: RunPlan, sections: Sections, values: Mapping[str, str]
) -> StoryCase:
    def fill(entry: Entry) -> Entry:
        text = entry.text
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        return Entry(entry.line, text)

    rules = [_rule(fill(entry)) for entry in sections.entries["what happens"]]
    if rules and rules[0].follows:
        raise StoryError(rules[0].line, "a rule before the one with `then`", rules[0].text)
    expected = [fill(entry) for entry in sections.entries["expected"]]
    return StoryCase(
        name=label,
        seed=seed,
        plan=plan,
        rules=tuple(rules),
        expected=tuple((e, EXPECTATIONS.read(e.line, e.text)) for e in expected),
    )


# -- the plan


def _plan(given: Iterable[tuple[int, tuple[str, str]]]) -> tuple[RunPlan, int]:
    plan: dict[str, Any] = {}
    wires: dict[str, Any] = {}
    seed = 1
    for line, (name, text) in given:
        if name == "seed":
            seed = _value(line, int, text)
        elif name.startswith("wires."):
            wires[name.removeprefix("wires.")] = _field(line, Wires, name[6:], text)
        else:
            plan[name] = _field(line, RunPlan, name, text)
    return replace(RunPlan(), wires=replace(Wires(), **wires), **plan), seed


def _field(line: int, whose: type, name: str, text: str) -> Any:
    hints = get_type_hints(whose)
    names = [each.name for each in fields(whose)]
    if name not in names:
        raise StoryError(line, f"a field of {whose.__name__} ({', '.join(names)})", name)
    return _value(line, hints[name], text)


def _value(line: int, kind: Any, text: str) -> Any:
    if kind is bool:
        if text not in ("yes", "no"):
            raise StoryError(line, "yes or no", text)
        return text == "yes"
    if kind not in (int, float):
        return text
    try:
        found = quantity(text)
    except ValueError:
        raise StoryError(
            line, "a number, a time such as 4.2s or a size such as 10KiB", text
        ) from None
    return round(found) if kind is int else found


# -- rules


def _rule(entry: Entry) -> StoryRule:
    head, colon, tail = entry.text.partition(": ")
    found = RULE.fullmatch(head)
    if not colon or found is None:
        expected = "`at TIME: ACT`, `when CONDITION: ACT` or one of both behind `then `"
        raise StoryError(entry.line, expected, entry.text)
    condition, look = _condition(entry.line, found["condition"])
    after = found["at"] or found["after"] or found["start"]
    if found["after"] and not found["then"]:
        raise StoryError(entry.line, "`then` before `later`", entry.text)
    return StoryRule(
        line=entry.line,
        text=entry.text,
        follows=found["then"] is not None,
        after_ns=ns(after) if after else 0,
        condition=condition,
        look=look,
        nth=int(found["nth"] or 1),
        late_ns=ns(found["late"]) if found["late"] else 0,
        acts=tuple(HAPPENINGS.read(entry.line, act.strip()) for act in tail.split(";")),
    )


def _condition(line: int, text: str | None) -> tuple[Condition | None, Look | None]:
    if text is None:
        return None, None
    condition = CONDITIONS.find(text)
    look = LOOKS.find(text)
    if condition is None and look is None:
        raise unknown(line, "a condition", CONDITIONS.examples + LOOKS.examples, text)
    return condition, look
