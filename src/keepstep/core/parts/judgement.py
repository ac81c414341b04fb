"""Judgement: what is known of all parts of a node at one moment.

Comes in: what probes answered, and the time. Goes out: the health of every part, the worst that any
probe says of it.

Invariant: OK is said only of what a probe that is a good witness has just seen. A probe that hung,
died, did not see its canary, or has not been heard of for longer than it may, makes its parts
UNKNOWN; so does the silence of the process that runs the probes, and a judge that no longer sees a
sickness that is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace

from keepstep.core.parts.canaries import flaw_of
from keepstep.core.parts.clock import ClockJudge
from keepstep.core.parts.gpus import Gpus
from keepstep.core.parts.judge import Judge, unseen
from keepstep.core.parts.kernel_log import KernelLog, KernelTable
from keepstep.core.parts.measured import LASTING, numbers_of
from keepstep.core.parts.nics import Nics
from keepstep.core.parts.places import Places
from keepstep.core.parts.pressure import Pressure
from keepstep.model.parts import (
    BEAT,
    PROBES,
    SILENT_NS,
    STALE_NS,
    PartHealth,
    PartNumber,
    PartsReport,
    PartState,
    ProbeAnswer,
)
from keepstep.model.units import human_ns

_BAD_FIRST = {PartState.BAD.value: 0, PartState.UNKNOWN.value: 1, PartState.OK.value: 2}


def judges(table: KernelTable) -> Mapping[str, Callable[[], Judge]]:
    """By probe."""
    return {
        "nvml": Gpus,
        "amd": Gpus,
        "nic": Nics,
        "disk": lambda: Places("disk"),
        "shm": lambda: Places("shm"),
        "pressure": Pressure,
        "clock": ClockJudge,
        "kernel": lambda: KernelLog(table),
    }


class _Witness:
    """One probe. canary_every_ns: so often a copy of its judge is shown the canary again; 0:
    never."""

    def __init__(self, probe: str, judge: Judge, flaw: str, canary_every_ns: int) -> None:
        self.probe, self.judge, self.flaw = probe, judge, flaw
        self._canary_every_ns = canary_every_ns
        self._shown_ns: int | None = None  # None: only when it was made
        self.blind = "it has not answered yet"
        self.answered_ns = 0
        self.found: dict[str, PartHealth] = {}
        self.numbers: tuple[PartNumber, ...] = ()
        self._lasting: dict[tuple[str, str], PartNumber] = {}

    def hear(self, answer: ProbeAnswer) -> None:
        """Raises ValueError when its judge cannot read that; nothing is known then."""
        self.answered_ns = answer.at_ns
        self.numbers = ()
        self.blind = "its judge cannot read what it saw"  # until it has
        self._show_again(answer.at_ns)
        blind = answer.blind or self.flaw
        if not blind:
            read = [number for reading in answer.readings for number in numbers_of(reading)]
            self._lasting.update({(n.name, n.of): n for n in read if n.name in LASTING})
            news = (number for number in read if number.name not in LASTING)
            self.numbers = (*news, *self._lasting.values())
            self.found = {part.part: part for part in self.judge.add(answer.readings, answer.at_ns)}
        self.blind = blind

    def _show_again(self, now_ns: int) -> None:
        """The judge itself learns nothing of it."""
        if self._shown_ns is None:
            self._shown_ns = now_ns
        elif self._canary_every_ns and now_ns - self._shown_ns >= self._canary_every_ns:
            self._shown_ns = now_ns
            self.flaw = flaw_of(self.probe, deepcopy(self.judge), now_ns)

    def says(self, now_ns: int, silence: str) -> Iterator[PartHealth]:
        late_ns = now_ns - self.answered_ns
        blind = silence or self.blind
        if not blind and late_ns > PROBES[self.probe].every_ns + SILENT_NS:
            blind = f"it has not answered for {human_ns(late_ns)}"
        if not blind:
            yield from self.found.values()
            return
        why = f"nobody can tell: probe {self.probe}: {blind}"
        for part in self.found or PROBES[self.probe].kinds:
            yield unseen(part, self.answered_ns, why)


class Judgement:
    """Of one node. canary_every_ns: so often each judge shows anew that it can see; 0: only when it
    is made."""

    def __init__(self, table: KernelTable, now_ns: int, canary_every_ns: int = 0) -> None:
        self._makers = judges(table)
        self._canary_every_ns = canary_every_ns
        self._witnesses = {
            probe: self._witness(probe) for probe, kind in PROBES.items() if not kind.needs
        }
        self._heard_ns = now_ns  # of the process that runs the probes

    def _witness(self, probe: str) -> _Witness:
        make = self._makers[probe]
        return _Witness(probe, make(), flaw_of(probe, make()), self._canary_every_ns)

    def hear(self, answer: ProbeAnswer) -> None:
        """What a probe answered. Raises ValueError when there is no such probe, or its judge cannot
        read that."""
        self._heard_ns = max(self._heard_ns, answer.at_ns)
        if answer.probe == BEAT:
            return
        if answer.probe not in PROBES:
            raise ValueError(f"expected the name of a probe, found {answer.probe!r:.40}")
        if answer.probe not in self._witnesses:
            self._witnesses[answer.probe] = self._witness(answer.probe)
        self._witnesses[answer.probe].hear(answer)

    def lose(self, why: str) -> None:
        """The process that runs the probes is gone: what it saw counts no more. Each probe has to
        answer anew, though another process may say at once that it lives."""
        for witness in self._witnesses.values():
            witness.blind = why
            witness.numbers = ()

    def is_silent(self, now_ns: int) -> bool:
        """Whether the process that runs the probes has not been heard of for too long."""
        return now_ns - self._heard_ns > SILENT_NS

    def parts(self, now_ns: int) -> tuple[PartHealth, ...]:
        """The worst that is said of each, in the order of their names."""
        silence = ""
        if self.is_silent(now_ns):
            silence = f"no word of any probe for {human_ns(now_ns - self._heard_ns)}"
        worst: dict[str, PartHealth] = {}
        for witness in self._witnesses.values():
            for said in witness.says(now_ns, silence):
                known = worst.get(said.part)
                if known is None or _BAD_FIRST[said.health] < _BAD_FIRST[known.health]:
                    worst[said.part] = said
        return tuple(worst[part] for part in sorted(worst))

    def numbers(self, now_ns: int) -> tuple[PartNumber, ...]:
        """What good witnesses have just read."""
        if self.is_silent(now_ns):
            return ()
        return tuple(each for witness in self._witnesses.values() for each in witness.numbers)


def as_of(report: PartsReport, now_ns: int, boot: str) -> PartsReport:
    """What a report says at this moment: nothing, when it is old or of another life of the
    machine."""
    is_old = now_ns - report.at_ns > STALE_NS
    if report.boot == boot and not is_old:
        return report
    why = "nobody can tell: the node's agent has not said anything"
    if report.boot == boot:
        why += f" for {human_ns(now_ns - report.at_ns)}"
    parts = tuple(unseen(part.part, part.seen_ns, why) for part in report.parts)
    return replace(report, parts=parts, numbers=())
