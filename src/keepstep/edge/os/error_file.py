"""Error file: what a rank leaves in its error file when the program fails, in torch's format, and
what the agent reads there.

torch's `record` decorator writes the same; a program without it has its words written when
`keepstep` sees the exception. Whoever is killed leaves none.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keepstep.errors import ConfigError, MemoryBudgetError, StoppedError, WrongNumbersError
from keepstep.model.decoding import from_json
from keepstep.model.launch import ErrorReport

# What a person has to change before any start of these ranks can go well.
REFUSALS = tuple(f"{kind.__name__}:" for kind in (ConfigError, MemoryBudgetError))
# A person is to decide, however far the training has come. A subclass of one of these is not.
STOPS = tuple(f"{kind.__name__}:" for kind in (StoppedError, WrongNumbersError))
VARIABLE = "TORCHELASTIC_ERROR_FILE"
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def write_error_file(error: BaseException, environ: Mapping[str, str]) -> None:
    """Where the agent looks for them, unless somebody has written there already."""
    path = Path(environ.get(VARIABLE, ""))
    if not environ.get(VARIABLE) or path.exists():
        return
    told = "".join(traceback.format_exception(error))
    more = {"py_callstack": told, "timestamp": str(int(time.time()))}
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # a full disk costs the words, not the exception
        fresh.write_text(
            json.dumps(
                {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
            )
        )
        fresh.replace(path)


def read_error_file(path: str) -> ErrorReport:
    """None of them when there is no whole file."""
    try:
        said = from_json(Path(path).read_text(encoding="utf-8"))["message"]
        if not isinstance(said, dict):
            return ErrorReport(str(said), "", path)
        message = str(said["message"])
        told = str(said.get("extraInfo", {}).get("py_callstack", ""))
        is_refusal, is_stop = _is_of(REFUSALS, message, told), _is_of(STOPS, message, told)
        return ErrorReport(message, _place(told), path, is_refusal, is_stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ErrorReport()


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
