"""Persisting: the keeper's side of writing checkpoints.

Requests wait here until the step they ask for is held by all ranks; then the slots of that cut are pinned (shared flock: their
ranks write elsewhere meanwhile) and handed to the persister, a child process that imports torch and may die without
harm. One checkpoint at a time; requests for steps that the running one covers are answered by it.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config import Settings
from keepstep.core.cut import Holding, cut
from keepstep.edge.arena import Slot, slot_paths
from keepstep.edge.journal import Journal
from keepstep.edge.mailbox import Mailbox
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import S_NS, human_ns

PATIENCE_NS = 60 * S_NS  # how long a wanted step may take to become common before the newest cut serves instead


@dataclass
class Request:
    box: Mailbox | None
    ticket: int
    step: int | None
    why: str
    since_ns: int


class Persisting:
    """Owns the persister process and the pins."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings, self._journal = settings, journal
        self._requests: list[Request] = []
        self._running: tuple[Stamp, list[Request], list[Slot], int] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._selector: selectors.BaseSelector | None = None
        self._newest: int | None = None

    @property
    def pending(self) -> bool:
        return bool(self._requests or self._running)

    def warm_up(self, selector: selectors.BaseSelector) -> None:
        """Start the persister: importing torch takes seconds that SIGTERM's notice may not have."""
        self._selector = selector
        self._child = subprocess.Popen(
            [sys.executable, "-m", "keepstep.runtime.persister", self._settings.to_text()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._child.stdout is not None
        selector.register(self._child.stdout, selectors.EVENT_READ, self._hear)

    def ask(self, box: Mailbox | None, step: int | None, why: str, ticket: int = 0) -> None:
        """Want `step` (None: the newest) in the store; `box` hears the outcome with its ticket."""
        if self._settings.store is None:
            self._journal.record("persist-impossible", f"{why}: nothing is written, the job has no store")
            _answer([Request(box, ticket, step, why, 0)], False, step, "the job has no store: give one with store=... or --store")
            return
        self._requests.append(Request(box, ticket, step, why, time.monotonic_ns()))

    def forget(self, box: Mailbox) -> None:
        """The asker is gone; what it asked for is still done."""
        for request in [*self._requests, *(self._running[1] if self._running else ())]:
            if request.box is box:
                request.box = None

    def resumed_from_store(self, step: int) -> None:
        """Everybody stands on this checkpoint: it need not be written again."""
        self._newest = step

    def step(self, holdings: Sequence[Holding], world_size: int | None, anybody: bool) -> None:
        """Start what can be started. `anybody`: whether a rank is connected that may still bring a wanted step."""
        if self._running or not self._requests:
            return
        now_ns = time.monotonic_ns()
        newest = cut(holdings, world_size or 1)
        reached = max(-1 if newest is None else newest.step, -1 if self._newest is None else self._newest)
        # Nothing is being written and all have decided about it: what is not common by now never will be.
        settled = min((h.decided_step for h in holdings), default=-1) if all(h.pending is None for h in holdings) else -1
        ready = [r for r in self._requests if _is_ready(r, reached, settled, anybody, now_ns)]
        if not ready:
            return
        if newest is None or newest.step <= reached == self._newest:
            self._requests = [r for r in self._requests if r not in ready]
            known = self._newest is not None
            word = f"step {self._newest} is already in the store" if known else "no step is held by every rank"
            _answer(ready, known, self._newest, word)
            return
        slots = pin(self._settings.job_dir, newest, world_size or 1)
        if slots is None:
            return  # overwritten this moment: the next round has a newer cut
        self._requests = [r for r in self._requests if r not in ready]
        self._running = (newest, ready, slots, now_ns)
        self._journal.record("persist-started", f"writing step {newest.step} to the store: {ready[0].why}", step=newest.step)
        self._send({"step": newest.step, "slots": [str(s.path) for s in slots]})

    def _send(self, request: dict[str, Any]) -> None:
        if self._child is None or self._child.poll() is not None:
            assert self._selector is not None
            self._close_child()
            self.warm_up(self._selector)
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._done(False, "the persister died before it began")

    def _hear(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            self._close_child()
            if self._running:
                self._done(False, f"the persister died (exit code {code})")
            return
        answer = json.loads(line)
        self._done(bool(answer["ok"]), str(answer["why"]))

    def _done(self, ok: bool, why: str) -> None:
        assert self._running is not None
        stamp, requests, slots, began_ns = self._running
        self._running = None
        for slot in slots:
            slot.unlock()
            slot.close()
        took = human_ns(time.monotonic_ns() - began_ns)
        if ok:
            self._newest = stamp.step
        self._journal.record("persisted" if ok else "persist-failed", f"step {stamp.step}, after {took}: {why}", step=stamp.step)
        _answer(requests, ok, stamp.step, why)

    def _close_child(self) -> None:
        if self._child is None:
            return
        assert self._selector is not None and self._child.stdin is not None and self._child.stdout is not None
        self._selector.unregister(self._child.stdout)
        self._child.stdin.close()
        self._child.stdout.close()
        self._child = None

    def close(self) -> None:
        """End the persister."""
        child = self._child
        if child is not None:
            self._close_child()
            child.terminate()
            child.wait()


def _is_ready(request: Request, reached: int, settled: int, anybody: bool, now_ns: int) -> bool:
    if request.step is None or request.step <= reached or not anybody:
        return True
    return request.step <= settled or now_ns - request.since_ns > PATIENCE_NS


def pin(job_dir: Path, stamp: Stamp, world_size: int) -> list[Slot] | None:
    """Every rank's slot of `stamp`, locked against overwriting, in rank order; None when one is not there any more."""
    slots: list[Slot] = []
    for rank in range(world_size):
        slot = _pin_one(slot_paths(job_dir, rank), stamp)
        if slot is None:
            for other in slots:
                other.close()  # closing gives the lock back
            return None
        slots.append(slot)
    return slots


def _pin_one(paths: list[Path], stamp: Stamp) -> Slot | None:
    for path in paths:
        try:
            slot = Slot(path)
        except (DamageError, OSError):
            continue
        try:
            if slot.lock(exclusive=False) and (slot.header().state, slot.header().stamp) == (SlotState.SEALED, stamp):
                return slot
        except DamageError:
            pass
        slot.close()
    return None


def _answer(requests: list[Request], ok: bool, step: int | None, why: str) -> None:
    for request in requests:
        if request.box is not None:
            request.box.send({"kind": "persisted", "ticket": request.ticket, "ok": ok, "step": step, "why": why})
