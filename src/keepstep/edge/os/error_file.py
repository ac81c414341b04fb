"""Error file: what a rank leaves in its error file when the program fails, in torch's format, and
what the agent reads there.

torch's `record` decorator writes the same; a program without it has its words written when
`keepstep` sees the exception. Whoever is killed leaves none. What a rank has started finds the same
variable in its environment, and may have written there: whose words they are is told along.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from keepstep.errors import ConfigError, MemoryBudgetError, StoppedError, WrongNumbersError
from keepstep.model.decoding import from_json
from keepstep.model.launch import ErrorReport

# What a person has to change before any start of these ranks can go well.
REFUSALS = tuple(f"{kind.__name__}:" for kind in (ConfigError, MemoryBudgetError))
# A person is to decide, however far the training has come. A subclass of one of these is not.
STOPS = tuple(f"{kind.__name__}:" for kind in (StoppedError, WrongNumbersError))
VARIABLE = "TORCHELASTIC_ERROR_FILE"
WRITER = "keepstep_pid"
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def write_error_file(error: BaseException, environ: Mapping[str, str]) -> None:
    """Where the agent looks for them, unless the rank's words are there already."""
    path = Path(environ.get(VARIABLE, ""))
    if not environ.get(VARIABLE) or not _may_write(path):
        return
    told = "".join(traceback.format_exception(error))
    more = {"py_callstack": told, "timestamp": str(int(time.time())), WRITER: os.getpid()}
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # a full disk costs the words, not the exception
        fresh.write_text(
            json.dumps(
                {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
            )
        )
        fresh.replace(path)


def _may_write(path: Path) -> bool:
    """A rank, which leads its session, over what a process that it has started has left there."""
    if not path.exists():
        return True
    writer = read_error_file(str(path)).writer
    return writer not in (0, os.getpid()) and os.getsid(0) == os.getpid()


def read_error_file(path: str) -> ErrorReport:
    """None of them when there is no whole file."""
    try:
        said = from_json(Path(path).read_text(encoding="utf-8"))["message"]
        if not isinstance(said, dict):
            return ErrorReport(str(said), "", path)
        message = str(said["message"])
        more = said.get("extraInfo", {})
        told, writer = str(more.get("py_callstack", "")), more.get(WRITER, 0)
        is_refusal, is_stop = _is_of(REFUSALS, message, told), _is_of(STOPS, message, told)
        return ErrorReport(
            message, _place(told), path, is_refusal, is_stop, writer if type(writer) is int else 0
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ErrorReport()


def last_words(path: str, pid: int, code: int) -> ErrorReport:
    """Of a rank that has ended. Of one that a signal has ended only its own words are a reason to
    start nothing again: the process that wrote others may have ended long before."""
    report = read_error_file(path)
    if code < 0 and report.writer != pid:
        return replace(report, is_refusal=False, is_stop=False)
    return report


def _is_of(kinds: tuple[str, ...], message: str, told: str) -> bool:
    """Other libraries have errors of these names, too: the traceback tells whose it is."""
    return message.startswith(kinds) and f"{ConfigError.__module__}.{message}" in told


def _place(told: str) -> str:
    """The innermost frame of the program's own; of somebody's else when there is none."""
    frames = list(_FRAME.finditer(told))
    own = [frame for frame in frames if "site-packages" not in frame["path"]] or frames
    return (
        f"{os.path.basename(own[-1]['path'])}:{own[-1]['line']} in {own[-1]['function']}"
        if own
        else ""
    )
