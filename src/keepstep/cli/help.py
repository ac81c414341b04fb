"""`keepstep help KS1002`: what is behind an error or a warning, by the code that it ends with.

Comes in: a code, or a command's name. Goes out: its entry of the catalogue, or the command's help.
"""

from __future__ import annotations

import difflib
import textwrap
from typing import Annotated

import typer

from keepstep.codes import BY_NUMBER, CODES, Chapter, Code
from keepstep.errors import ConfigError

COLUMNS = 80
TopicArgument = Annotated[
    str | None,
    typer.Argument(metavar="[CODE|COMMAND]", help="Such as KS1002, or the name of a command."),
]


def help_about(ctx: typer.Context, topic: TopicArgument = None) -> None:
    """Explain an error or a warning by its code: what is behind it, and what to do."""
    if topic is None:
        print("\n".join(_overview()))
        return
    code = BY_NUMBER.get(topic.strip("[]").upper())
    if code is not None:
        print("\n".join(_entry(code)))
        return
    root = ctx.find_root()
    commands = getattr(root.command, "commands", {})
    if topic in commands:
        named = commands[topic]
        print(named.get_help(typer.Context(named, info_name=topic, parent=root)))
        return
    raise ConfigError(f"help: {_unknown(topic, [*BY_NUMBER, *commands])}")


def _overview() -> list[str]:
    """Which codes there are: a line each."""
    lines = [
        "Errors and warnings end with a code; keepstep help CODE says what is behind it.",
        "",
    ]
    for chapter in Chapter:
        lines.append(chapter.title)
        lines += [
            f"  {code.number}  {_cut(code.title)}" for code in CODES if code.chapter is chapter
        ]
        lines.append("")
    return lines[:-1]


def _entry(code: Code) -> list[str]:
    said = (
        [f'says "{phrase}"' for phrase in code.phrases]
        if code.phrases
        else ["whatever else it says"]
    )
    of = code.raised or f"{code.kind} (in the journal)"
    return [
        f"{code.number}: {of}, which {' or '.join(said)}"
        if len(said) < 3
        else f"{code.number}: {of}, which {said[0]}, and others",
        "",
        *textwrap.wrap(code.means, COLUMNS),
        "",
        *textwrap.wrap(f"What to do: {code.remedy}", COLUMNS, break_on_hyphens=False),
        *(["", f"More: docs/{code.read}"] if code.read else []),
    ]


def _cut(title: str) -> str:
    return title if len(title) <= COLUMNS - 10 else f"{title[: COLUMNS - 13]}..."


def _unknown(topic: str, known: list[str]) -> str:
    near = [
        *difflib.get_close_matches(topic.upper(), known, 1),
        *difflib.get_close_matches(topic, known, 1),
    ]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"expected a code such as KS1002 or a command, found {topic!r}{hint}"
