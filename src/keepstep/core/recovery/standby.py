"""Standby: which programs a process can become that has imported torch and waits.

Comes in: a command line. Goes out: what of it the interpreter would run.
"""

from __future__ import annotations

from collections.abc import Sequence


def can_become(command: Sequence[str], interpreter: str) -> bool:
    """Whether the command is a Python program that a process of this interpreter can take over."""
    entry, *words = command
    return entry == interpreter and bool(program_of(words))


def program_of(words: Sequence[str]) -> list[str]:
    """Of a command line what follows the interpreter's own `-u`, which a standby process has as
    well; nothing when there are other options, or no program."""
    rest = list(words)
    if rest[:1] == ["-u"]:
        del rest[0]
    if rest[:1] == ["-m"]:
        return rest if len(rest) > 1 else []
    return rest if rest and not rest[0].startswith("-") else []
