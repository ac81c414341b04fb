"""Parts watch: what an agent knows of the parts of its machine, and what it does about a sick one.

    the probes' answers -> core/parts/judgement.py -> the parts file, the journal, an event for
    core/recovery/restarts.py where somebody asked for more than a word

The probes run in a process of their own, which begins a while after the ranks. When it ends or is
silent it is ended and started anew, after a pause that grows; until it is heard again nothing is
called well. It reads on where the one before it ended. Nothing here waits.

Invariant: the file says nothing that was not true when it was written, and says when that was; and
a part is acted upon at most once for each time it falls sick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.core.parts.judgement import Judgement
from keepstep.core.parts.kernel_log import KernelTable
from keepstep.core.parts.news import PartsNews
from keepstep.edge.shm.parts_file import write_parts
from keepstep.model.events import INFO, WARNING
from keepstep.model.parts import (
    BEAT_NS,
    PROBES,
    SILENT_NS,
    PartHealth,
    PartPolicy,
    PartsReport,
    PartState,
    answer_from_line,
)
from keepstep.model.restarts import PartSick
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Clock, Journal, Memory, PartProber

EVENTS = {
    PartState.BAD.value: "part-sick",
    PartState.UNKNOWN.value: "part-unknown",
    PartState.OK.value: "part-well",
}
# Starting an interpreter takes a tenth of a core's second: not while the ranks start.
BEGIN_AFTER_NS = 10 * S_NS
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = S_NS, 300 * S_NS
WELL_FOR_NS = 60 * S_NS  # after so long the next pause is the first one again


class PartsWatch:
    """Of one node."""

    def __init__(
        self,
        prober: PartProber,
        clock: Clock,
        memory: Memory,
        journal: Journal,
        job_dir: Path,
        policies: Mapping[str, PartPolicy],
        table: KernelTable,
        canary_every_ns: int = 0,
    ) -> None:
        self._prober, self._clock = prober, clock
        self._memory, self._journal, self._job_dir = memory, journal, job_dir
        now_ns = clock.monotonic_ns()
        self._judgement = Judgement(table, now_ns + BEGIN_AFTER_NS, canary_every_ns)
        self._news = PartsNews(policies)
        self._start_ns = now_ns + BEGIN_AFTER_NS  # when the next prober is due; -1: one runs
        self._started_ns = 0
        self._pause_ns = FIRST_PAUSE_NS
        self._written: tuple[PartHealth, ...] | None = None
        self._written_ns = 0
        self._known: tuple[PartHealth, ...] = ()  # at the last tick
        self._is_closed = False
        self._cursors: dict[str, int] = {}  # by probe, where its last good look ended

    def tick(self) -> Iterator[PartSick]:
        """To be called every half second or so."""
        now_ns = self._clock.monotonic_ns()
        self._see_to_the_prober(now_ns)
        if self._started_ns == 0:
            return
        parts = self._known = self._judgement.parts(now_ns)
        self._write(parts, now_ns)
        for news in self._news.of(parts, now_ns):
            part = news.part
            self._journal.record(
                EVENTS[part.health],
                news.why,
                INFO if part.health == PartState.OK.value else WARNING,
                part=part.part,
                policy=news.policy.name.lower(),
                seen_ns=part.seen_ns,
            )
            if news.policy is not PartPolicy.WARN:
                yield PartSick(news.why, now_ns, news.policy)

    @property
    def parts(self) -> tuple[PartHealth, ...]:
        """All that were ever seen, as they were at the last tick."""
        return self._known

    def _write(self, parts: tuple[PartHealth, ...], now_ns: int) -> None:
        """When something is new, and now and then to say that nothing is."""
        said = tuple(part._replace(seen_ns=0) for part in parts)
        if said == self._written and now_ns - self._written_ns < BEAT_NS:
            return
        self._written, self._written_ns = said, now_ns
        numbers = self._judgement.numbers(now_ns)
        report = PartsReport(now_ns, self._clock.boot(), parts, numbers)
        write_parts(self._memory, self._job_dir, report)

    # -- the process that runs the probes

    def _see_to_the_prober(self, now_ns: int) -> None:
        if self._is_closed:
            return
        if self._start_ns >= 0:
            if now_ns >= self._start_ns:
                self._start(now_ns)
            return
        lived_ns = now_ns - self._started_ns
        if self._judgement.is_silent(now_ns) and lived_ns > SILENT_NS:
            self._prober.stop()
            self._again(f"the process that runs the probes was silent for {human_ns(SILENT_NS)}")

    def _start(self, now_ns: int) -> None:
        self._start_ns, self._started_ns = -1, now_ns
        try:
            self._prober.start(self._heard, self._again, self._cursors)
        except OSError as error:
            self._again(f"the process that runs the probes cannot be started: {error.strerror}")

    def _again(self, why: str) -> None:
        """It says no more: start another one, later each time."""
        self._judgement.lose(why)
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._started_ns > WELL_FOR_NS:
            self._pause_ns = FIRST_PAUSE_NS
        pause_ns = self._pause_ns
        self._pause_ns = min(2 * pause_ns, LONGEST_PAUSE_NS)
        self._start_ns = now_ns + pause_ns
        told = f"{why}; parts are unknown until another one answers, {human_ns(pause_ns)} from now"
        self._journal.record("probes-lost", told, WARNING)

    def _heard(self, line: bytes) -> None:
        try:
            answer = answer_from_line(line)
            self._judgement.hear(answer)
            if answer.cursor >= 0 and answer.probe in PROBES:
                self._cursors[answer.probe] = answer.cursor
        except ValueError as error:
            self._journal.record("message-refused", f"an answer of a probe: {error}", WARNING)

    def close(self) -> None:
        """The job is over here."""
        self._is_closed = True
        self._prober.stop()
