"""Codes: every error and every warning has a number, such as KS1003, and an entry that explains it.

Comes in: an error's class and message, or an event's kind and sentence. Goes out: the code of it.
The entries are data (`errors_asked.py`, `errors_met.py`, `warnings_told.py`);
`keepstep help KS1003` and `docs/codes.md` show them.

Invariant: whatever class of error is raised on purpose, and whatever kind of event is a warning,
has a code.
"""

from __future__ import annotations

from keepstep.codes.code import Chapter, Code
from keepstep.codes.errors_asked import ASKED
from keepstep.codes.errors_met import MET
from keepstep.codes.warnings_told import WARNINGS

ERRORS = (*ASKED, *MET)
CODES = (*ERRORS, *WARNINGS)
BY_NUMBER = {code.number: code for code in CODES}

__all__ = ["BY_NUMBER", "CODES", "Chapter", "Code", "of_error", "of_warning"]


def of_error(classes: list[str], message: str) -> Code | None:
    """The code of an error. `classes`: the names of its class and of those it derives from, the
    nearest first. An entry that knows words of the message goes before one for all of a class."""
    for name in classes:
        if (found := _best([code for code in ERRORS if code.raised == name], message)) is not None:
            return found
    return None


def of_warning(kind: str, sentence: str) -> Code | None:
    """The code of a warning or of an error that is told; None: that kind is never one."""
    return _best([code for code in WARNINGS if code.kind == kind], sentence)


def _best(codes: list[Code], message: str) -> Code | None:
    by_words = sorted(codes, key=lambda code: not code.phrases)
    return next((code for code in by_words if code.is_of(message)), None)
