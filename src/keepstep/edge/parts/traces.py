"""Traces: recorded looks, played in the place of a machine's, so that what comes of them can be
seen without the hardware.

`<probe>.jsonl` in the directory of traces: a line for each look, a list of readings ([kind,
fields]); the last line is repeated. A probe without such a file looks at the machine; one may be
put there at any time, which is how a drill makes a device hot.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeGuard

from keepstep.edge.os.own_file import check_own_directory
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import answer_from_line

TRACES = "parts-traces"  # beside a job's journal


def _is_own(traces: Path | None) -> TypeGuard[Path]:
    """Whether it and what it is in are this user's: what a stranger records decides nothing."""
    if traces is None:
        return False
    try:
        check_own_directory(traces.parent)
        check_own_directory(traces)
    except OSError:
        return False
    return True


def is_there(probe: str, targets: Targets) -> bool:
    """Whether that probe has a trace."""
    return _is_own(targets.traces) and (targets.traces / f"{probe}.jsonl").exists()


def play(probe: str, targets: Targets, cursor: int) -> PartLook | None:
    """The next look of that trace; None: there is none. Raises OSError, ValueError."""
    if not _is_own(targets.traces):
        return None
    try:
        text = (targets.traces / f"{probe}.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    looks = [line for line in text.splitlines() if line.strip()]
    if not looks:
        return PartLook(blind="the trace has no looks")
    number = min(max(cursor, -1) + 1, len(looks) - 1)
    head = f'{{"probe":"{probe}","at_ns":{time.monotonic_ns()},"took_ns":0,"blind":""'
    answer = answer_from_line(f'{head},"readings":{looks[number]}}}')
    return PartLook(answer.readings, cursor=number)
