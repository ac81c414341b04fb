"""Traces: recorded looks, played in the place of a machine's, so that what comes of them can be
seen without the hardware.

`<probe>.jsonl` in the directory of traces: a line for each look, a list of readings ([kind,
fields]), or why it saw nothing, a text; the last line is repeated. `recorder.py` writes such. A
probe without such a file looks at the machine; one may be put there at any time, which is how a
drill makes a device hot.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeGuard

from keepstep.edge.os.own_file import check_own_directory
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.decoding import from_json
from keepstep.model.parts import PartReading, answer_from_line

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
    if looks[number].lstrip().startswith('"'):
        return PartLook(blind=str(from_json(looks[number])), cursor=number)
    head = f'{{"probe":"{probe}","at_ns":{time.monotonic_ns()},"took_ns":0,"blind":""'
    answer = answer_from_line(f'{head},"readings":{looks[number]}}}')
    return PartLook(answer.readings, cursor=number)


def look_to_line(readings: Sequence[PartReading], blind: str) -> str:
    """A look as a line of a trace."""
    plain = [[type(each).__name__, asdict(each)] for each in readings]
    return json.dumps(blind or plain, separators=(",", ":")) + "\n"
