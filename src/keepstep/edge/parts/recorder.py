"""Recorder: what this machine's probes see for a while, as traces that `traces.py` plays.

Comes in: what is probed, a directory, for how long. Goes out: `<probe>.jsonl` in it for each probe
that answered, a line for each look, redacted (`core/parts/redactor.py`); how many looks, by probe.
It runs the prober that an agent runs, so that a trace holds what an agent would have been told. The
log of the kernel is read from its begin, because what is worth sending has happened already.

Invariant: nothing that is there is overwritten, and nobody else can read what is written.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from keepstep.edge.os.own_file import append_to_own
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.prober import cursors_to_text, targets_to_text
from keepstep.edge.parts.prober_process import MODULE
from keepstep.edge.parts.traces import look_to_line
from keepstep.errors import ConfigError
from keepstep.model.parts import BEAT, PartReading, answer_from_line

FROM_THE_BEGIN = {"kernel": 0}
ENDS_WITHIN_S = 10.0


class Redacts(Protocol):
    """Takes out of what was read what is nobody's business."""

    def reading(self, probe: str, reading: PartReading) -> PartReading:
        """Of that probe."""

    def text(self, text: str) -> str:
        """Why a probe is blind."""


def record(targets: Targets, directory: Path, for_s: float, redactor: Redacts) -> Mapping[str, int]:
    """Looks by probe. It takes so long from the first word of the prober on, and up to five seconds
    more. Raises ConfigError where the directory is not empty or cannot be written to."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError(f"--record: expected a new or empty directory, found {directory}")
    except OSError as error:
        raise ConfigError(
            f"--record: expected a directory to write to, found {directory}: {error.strerror}"
        ) from error
    looks = Counter[str]()
    given = targets_to_text(targets), cursors_to_text(FROM_THE_BEGIN)
    prober = subprocess.Popen(
        [sys.executable, *module_words(MODULE, *given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert prober.stdin is not None and prober.stdout is not None
    until_s = math.inf
    try:
        for line in prober.stdout:
            until_s = min(until_s, time.monotonic() + for_s)
            answer = answer_from_line(line)
            if answer.probe != BEAT:
                readings = tuple(redactor.reading(answer.probe, r) for r in answer.readings)
                _append(
                    directory / f"{answer.probe}.jsonl",
                    look_to_line(readings, redactor.text(answer.blind)),
                )
                looks[answer.probe] += 1
            if time.monotonic() >= until_s and not prober.stdin.closed:
                prober.stdin.close()  # which ends it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(prober.pid, signal.SIGKILL)  # with the probes that it was running
        prober.wait(ENDS_WITHIN_S)
    return dict(looks)


def _append(path: Path, line: str) -> None:
    with open(append_to_own(path), "a", encoding="utf-8") as file:
        file.write(line)
