"""What a rank's last word says: the class of failure that the table of patterns gives for it.

Comes in: the type and message of the error with which a program ended, as text. Goes out: the
pattern that its lines match, as the reader of logs would take it, or none. Decides nothing: what is
done about an end follows from `core/detection/diagnosis.py`, which has to be right about fewer
words.

The rule is that of `verdict.py` for one rank: a root beats every cascade, the heavier root wins,
then the first. The error was raised, so a traceback stands above its lines wherever they are kept.

Invariant: never longer than so many lines of so many characters, whatever a program says.
"""

from __future__ import annotations

from itertools import islice

from keepstep.core.postmortem.line import parse_line
from keepstep.core.postmortem.table import FailureClass, LogPattern, PatternTable

MOST_LINES, MOST_CHARACTERS = 200, 2000
ANYTHING = "code"  # that a program raised an error everybody knows


def pattern_of(message: str, table: PatternTable) -> LogPattern | None:
    """What its words mean; None: the table knows none of them."""
    best: LogPattern | None = None
    for text in islice(message.splitlines(), MOST_LINES):
        line = parse_line(text[:MOST_CHARACTERS])
        line.is_traced = True
        found = table.match(line)
        if found is not None and (best is None or _counts(found) > _counts(best)):
            best = found
    return best


def _counts(pattern: LogPattern) -> tuple[bool, int]:
    return pattern.role == "root", pattern.weight


def clause_of(pattern: LogPattern | None, table: PatternTable) -> str:
    """For the sentence about that end, or empty: what others made it say tells nothing of it."""
    if pattern is None or pattern.role != "root" or pattern.failure == ANYTHING:
        return ""
    kind: FailureClass = table.classes[pattern.failure]
    return f"; {kind.means}; cheapest: {kind.action}"
