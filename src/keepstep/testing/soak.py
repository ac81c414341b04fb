"""Soak: faults for so many seconds, each after the job has recovered from the one before.

Comes in: turns, and what the witness sees. Goes out: faults, told to ranks and witness as their
turn comes; how far the job may train; for each turn what its recovery took. Ends the job by
allowing no step more, and fails when a fault is not recovered from within a limit. Injects nothing
itself and judges no bytes.

A turn is recovered from when every rank lives and has done a step that is new since the last of its
faults, and that step is protected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus
from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.testing import lines
from keepstep.testing.allowance import allow
from keepstep.testing.faults import AGENT_KILL, STORE_KINDS, Fault, to_plan
from keepstep.testing.memory import in_words
from keepstep.testing.turns import DrillTurn, Shape
from keepstep.testing.witness import DrillFacts, Witness

RECOVERED_WITHIN_S = 120.0
AHEAD_MS = 1500.0  # the job may be so far ahead of what it was last allowed
AT_REST = (Phase.STARTING, Phase.RESTORE)
STORY_EVENTS = 40


@dataclass(frozen=True, slots=True)
class Passed:
    """A turn that was recovered from. `trained_ns`: every rank has done a new step; `whole_ns`: and
    it is protected."""

    faults: tuple[int, ...]
    began_ns: int
    trained_ns: int
    whole_ns: int


class Soak:
    """One run's. `stop_step`: how many steps the job does in all, once that is decided. `failure`:
    why it is not recovered from."""

    def __init__(
        self,
        seconds: float,
        shape: Shape,
        turns: Iterator[DrillTurn],
        protects: bool,
        fills_store: bool = False,
        roughens_store: bool = False,
    ) -> None:
        self.seconds = seconds
        self.fills_store, self.roughens_store = fills_store, roughens_store
        self._shape, self._turns, self._protects = shape, turns, protects
        self.faults: list[Fault] = []
        self.passed: list[Passed] = []
        self.stop_step: int | None = None
        self.failure = ""
        self.lasted_ns = 0
        self._allowed_steps = 0

    def begin(self, witness: Witness, facts: DrillFacts, later: Path, until: Path) -> None:
        self._witness, self._facts, self._later, self._until = witness, facts, later, until
        self._ahead_steps = max(4, ceil(AHEAD_MS / max(1.0, self._shape.step_ms)))
        self._allow_more()
        self._course = self._run()

    @property
    def is_over(self) -> bool:
        return self.stop_step is not None or bool(self.failure)

    def look(self) -> None:
        """Once every few milliseconds, after the witness has looked."""
        if not self.is_over:
            self._allow_more()
            next(self._course, None)

    def fail(self, why: str) -> None:
        """Nothing more is to be recovered from. The story: why, how every node's journal ends, and
        what lies in memory."""
        self.failure = "\n".join(
            [why, *_story(self._witness.events), *in_words(self._witness.places)]
        )

    def _allow_more(self) -> None:
        completed = self._witness.completed_step
        if completed + self._ahead_steps // 2 >= self._allowed_steps - 1:
            self._allowed_steps = max(self._allowed_steps, completed + 1 + self._ahead_steps)
            allow(self._until, self._allowed_steps)

    # -- the course of it

    def _run(self) -> Iterator[None]:
        yield from self._within("the job to begin", self._await_training(1))
        began_ns = time.monotonic_ns()
        end_ns = began_ns + int(self.seconds * S_NS)
        while not self.failure:
            turn = next(self._turns)
            due_ns = time.monotonic_ns() + int(turn.gap_ms * MS_NS)
            while time.monotonic_ns() < min(due_ns, end_ns):
                yield
            if time.monotonic_ns() >= end_ns:
                break
            numbers = [self._give(fault) for fault in turn.at(self._witness.completed_step + 1)]
            asked = " and ".join(str(self.faults[n]) for n in numbers)
            yield from self._within(
                f"fault {' and '.join(map(str, numbers))} ({asked}) to be recovered from",
                self._recover(numbers),
            )
        self.lasted_ns = time.monotonic_ns() - began_ns
        if not self.failure:
            allow(self._until, self._allowed_steps, final=True)
            self.stop_step = self._allowed_steps

    def _give(self, fault: Fault) -> int:
        """To the witness first: whoever is told of a fault by a rank must know it."""
        number = self._witness.add(fault)
        self.faults.append(fault)
        lines.append(self._later, to_plan([fault])[0])
        return number

    def _within(self, what: str, course: Iterator[None]) -> Iterator[None]:
        until = time.monotonic() + RECOVERED_WITHIN_S
        for _ in course:
            if time.monotonic() > until:
                self.fail(
                    f"expected {what} within {RECOVERED_WITHIN_S:.0f} s; it is not, since "
                    f"{self._missing}"
                )
                return
            yield

    def _recover(self, numbers: Sequence[int]) -> Iterator[None]:
        self._missing = "its moment has not come"
        while not all(self._is_settled(n) for n in numbers):
            yield
        done = [n for n in numbers if self._noted(n, "did")]
        if not done:
            return  # it could not be done here, and the report says why
        began_ns = min(self._noted(n, "about to")[0] for n in done)
        deadly = [n for n in done if self.faults[n].ends_a_rank]
        settled_ns = time.monotonic_ns()
        for number in set(done) - set(deadly):
            self._missing = f"nothing answers to {self.faults[number]}"
            while not self._is_answered(number, settled_ns):
                yield
        step = self._witness.completed_step
        if deadly:
            self._missing = "the ranks have not resumed"
            last_ns = max(
                ns for n in deadly for ns in (*self._noted(n, "about to"), *self._noted(n, "ended"))
            )
            while (resumed := self._newest("resumed", last_ns)) is None:
                yield
            step = int(resumed.data["step"])
        yield from self._await_training(step)
        trained_ns = time.monotonic_ns()
        self._missing = "no newer step is protected"
        while not self._is_protected(step):
            yield
        self.passed.append(Passed(tuple(done), began_ns, trained_ns, time.monotonic_ns()))

    def _await_training(self, step: int) -> Iterator[None]:
        """Until every rank lives and has done more than that step, all in one epoch."""
        while not self._is_training(self._witness.living, step):
            yield

    def _is_training(self, living: Sequence[RankStatus], step: int) -> bool:
        behind = [s for s in living if s.completed_step <= step or s.phase in AT_REST]
        epochs = sorted({s.epoch for s in living})
        words = ", ".join(
            f"rank {s.rank} in {s.phase.name.lower()} after step {s.completed_step}" for s in behind
        )
        self._missing = (
            f"{len(living)} of {self._shape.world_size} ranks live, in epochs {epochs}; not "
            f"beyond step {step}: {words or 'none'}"
        )
        return len(living) == self._shape.world_size and not behind and len(epochs) == 1

    # -- what was seen

    def _noted(self, number: int, what: str) -> list[int]:
        return [
            int(n["mono_ns"])
            for n in self._facts.notes
            if n["fault"] == number and n["what"] == what
        ]

    def _is_settled(self, number: int) -> bool:
        """It was done and seen to its end, or cannot be done."""
        return bool(
            self._noted(number, "did") or self._noted(number, "cannot")
        ) and not self._witness.is_followed(number)

    def _is_answered(self, number: int, settled_ns: int) -> bool:
        kind = self.faults[number].kind
        if kind == "keeper-kill":
            return self._newest("keeper-started", self._noted(number, "about to")[0]) is not None
        if kind == AGENT_KILL:
            return self._newest("agent-restarted", self._noted(number, "about to")[0]) is not None
        if kind not in ("full", *STORE_KINDS):
            return True
        return self._newest("persisted", settled_ns) is not None

    def _newest(self, kind: str, since_ns: int) -> Event | None:
        found = (
            e for e in reversed(self._witness.events) if e.kind == kind and e.mono_ns > since_ns
        )
        return max(found, key=lambda event: event.mono_ns, default=None)

    def _is_protected(self, step: int) -> bool:
        living = self._witness.living
        if not self._protects or not living:
            return not self._protects
        committed = self._witness.committed(max(s.epoch for s in living))
        return committed is not None and committed.step > step


def _story(events: Sequence[Event]) -> Iterator[str]:
    last = sorted(events, key=lambda event: event.mono_ns)[-STORY_EVENTS:]
    for event in last:
        yield (
            f"{human_ns(last[-1].mono_ns - event.mono_ns)} before: {event.who}: {event.kind}: "
            f"{event.why}"
        )
