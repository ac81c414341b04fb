"""Code: one number for one error or warning, and what is behind it.

Comes in: nothing. Goes out: entries of the catalogue, which `of_error` and `of_warning` look up.
Invariant: a number that was ever given away keeps its meaning; one that is no longer said stays
unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Chapter(Enum):
    """What a code is about: the first two digits of its number, and a heading of the page."""

    CALLS = "KS10", "What was asked for"
    STATE = "KS11", "What is protected"
    NODES = "KS12", "Several nodes and ranks"
    COMMANDS = "KS13", "Commands"
    MEMORY = "KS20", "Memory"
    IDENTITY = "KS21", "Whose it is"
    LAYOUT = "KS22", "The saved state and the program"
    DAMAGE = "KS23", "Damaged bytes"
    KEEPER = "KS30", "The keeper"
    STORE = "KS31", "The store"
    MEETING = "KS32", "Where nodes meet"
    RANKS = "KS40", "Lost ranks and wrong numbers"
    TOLD_STATE = "KS50", "Warnings: what is protected"
    TOLD_STORE = "KS51", "Warnings: checkpoints"
    TOLD_JOB = "KS52", "Warnings: the job and its nodes"
    TOLD_RANKS = "KS53", "Warnings: ranks that hang, are slow, or compute wrong"

    @property
    def digits(self) -> str:
        return str(self.value[0])

    @property
    def title(self) -> str:
        return str(self.value[1])


@dataclass(frozen=True, slots=True)
class Code:
    """`raised`: the class of errors, or empty; `kind`: the kind of event, or empty. `phrases`: any
    of them in the message makes it this code; none: all that no other entry of that class or kind
    takes. `read`: a page of the documentation, with its anchor."""

    number: str
    raised: str
    kind: str
    phrases: tuple[str, ...]
    means: str
    remedy: str
    read: str = ""

    @property
    def chapter(self) -> Chapter:
        return next(chapter for chapter in Chapter if self.number.startswith(chapter.digits))

    @property
    def title(self) -> str:
        """What a person sees of it: the message's own words, or its class or kind."""
        return f"... {self.phrases[0]} ..." if self.phrases else self.raised or self.kind

    def is_of(self, message: str) -> bool:
        return not self.phrases or any(phrase in message for phrase in self.phrases)


def error(number: str, raised: str, *phrases: str, means: str, do: str, read: str = "") -> Code:
    return Code(number, raised, "", phrases, means, do, read)


def warning(number: str, kind: str, *phrases: str, means: str, do: str, read: str = "") -> Code:
    return Code(number, "", kind, phrases, means, do, read)
