"""Local checks: what one node can say of itself, each measured in a child with a deadline.

Comes in: the names of checks, how much is measured. Goes out: a reading of each. A child that dies,
hangs or says what is no reading is `unknown`, with the reason; one that the kernel ended because a
memory page is broken (SIGBUS) is `bad`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keepstep.core.preflight import catalogue
from keepstep.core.preflight.catalogue import PreflightCheck
from keepstep.core.wire.codec import NotAMessage
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.preflight.child_process import ChildEnd, RunningChild
from keepstep.model.messages.preflight import CheckOutcome, CheckReading
from keepstep.model.units import MIB
from keepstep.runtime.preflight.child import READINGS

CHILD = "keepstep.runtime.preflight.child"
# Libraries' threads would measure each other; a product is computed by one core at a time.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


MEMORY_BYTES_PER_S = 200 * MIB  # all patterns written and read; a slow machine
DISK_BYTES_PER_S = 50 * MIB


@dataclass(frozen=True, slots=True)
class Efforts:
    """How much is measured. `directory`: whose disk."""

    directory: Path
    memory_bytes: int = 64 * MIB
    copy_bytes: int = 32 * MIB
    disk_bytes: int = 32 * MIB
    product_size: int = 256
    product_repetitions: int = 24
    training_steps: int = 20
    ring_bytes: int = 4 * MIB
    ring_rounds: int = 10

    def planned(self, check: PreflightCheck) -> PreflightCheck:
        """The check, with the time that it takes at this effort."""
        more = {
            catalogue.MEMORY: self.memory_bytes / MEMORY_BYTES_PER_S,
            catalogue.DISK: self.disk_bytes / DISK_BYTES_PER_S,
        }
        return replace(check, expects_s=check.expects_s + more.get(check.name, 0.0))

    def of_check(self, name: str) -> dict[str, Any]:
        """The arguments of a check's child."""
        arguments: dict[str, dict[str, Any]] = {
            catalogue.MEMORY: {"bytes": self.memory_bytes},
            catalogue.MEMORY_SPEED: {"bytes": self.copy_bytes, "samples": 9},
            catalogue.DISK: {
                "directory": str(self.directory),
                "bytes": self.disk_bytes,
                "samples": 4,
                "syncs": 9,
            },
            catalogue.PRODUCTS: {
                "size": self.product_size,
                "repetitions": self.product_repetitions,
            },
            catalogue.TRAINING: {"steps": self.training_steps, "repetitions": 2},
            catalogue.PCIE: {"bytes": 64 * MIB, "samples": 9, "size": 4096},
            catalogue.RING: {"bytes": self.ring_bytes, "rounds": self.ring_rounds},
        }
        return arguments[name]


def run_checks(
    checks: Iterable[PreflightCheck],
    efforts: Efforts,
    environ: Mapping[str, str],
    told: Callable[[str], None] = lambda name: None,
    until_s: float | None = None,
) -> list[CheckReading]:
    """One after the other. told: hears the name of each before it begins. until_s: when, by the
    monotonic clock, the time is over that there is for all: none begins after that."""
    readings = []
    for check in checks:
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            readings.append(not_begun(check.name))
            continue
        told(check.name)
        readings.append(run_check(check, efforts.of_check(check.name), environ, left_s))
    return readings


def not_begun(name: str) -> CheckReading:
    """A check that was chosen, and for which no time was left: others took longer than ever."""
    return CheckReading(name, CheckOutcome.UNKNOWN, "it was not begun: the time was over")


def run_check(
    check: PreflightCheck,
    arguments: Mapping[str, Any],
    environ: Mapping[str, str],
    left_s: float | None = None,
) -> CheckReading:
    """In a child of its own. left_s: how long it may take, its usual time at least."""
    deadline_s = check.deadline_s
    if left_s is not None:
        deadline_s = min(deadline_s, max(check.expects_s, left_s))
    begun_s = time.monotonic()
    try:
        child = start_check(check.name, arguments, environ)
    except OSError as error:
        return CheckReading(
            check.name, CheckOutcome.UNKNOWN, f"no process can be started: {error.strerror}"
        )
    end = child.end(deadline_s)
    reading = reading_of(check.name, end)
    return replace(reading, took_ms=round((time.monotonic() - begun_s) * 1000))


def start_check(
    name: str, arguments: Mapping[str, Any], environ: Mapping[str, str]
) -> RunningChild:
    """Raises OSError."""
    command = [
        sys.executable,
        *module_words(CHILD, name, json.dumps(arguments), str(os.getpid())),
    ]
    return RunningChild(command, {**environ, **ONE_THREAD})


def reading_of(name: str, end: ChildEnd) -> CheckReading:
    """What its end says."""
    if end.code == 0:
        try:
            reading = READINGS.decode(end.output)
        except NotAMessage as error:
            return CheckReading(name, CheckOutcome.UNKNOWN, f"its process said no reading: {error}")
        if reading.check == name:
            return reading
        return CheckReading(name, CheckOutcome.UNKNOWN, f"its process answered {reading.check!r}")
    if end.code == -signal.SIGBUS:
        return CheckReading(
            name, CheckOutcome.BAD, "the kernel ended it for broken memory (SIGBUS)", fix="dmesg"
        )
    return CheckReading(name, CheckOutcome.UNKNOWN, end.why)
