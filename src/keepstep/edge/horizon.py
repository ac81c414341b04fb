"""Horizon page: the leader's last word, where every rank of a node reads it at its step boundary.

Written by the node's keeper, read by its sessions, in a twin page of the job directory. An old word is a safe word (core/commit.py), but
only within its epoch: a reader that trains in another takes it as nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from keepstep.edge.twin_page import MAX_BODY_BYTES, TwinPage
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Stamp

MAX_ALIVE = 40  # two slots a rank make two at most; a page has room for so many


class HorizonPage:
    def __init__(self, job_dir: Path) -> None:
        """Map the page of this job directory, making it if there is none. Raises OSError."""
        self._page = TwinPage.ensure(job_dir / "horizon")

    def write(self, horizon: Horizon) -> None:
        alive = sorted(horizon.alive)[:MAX_ALIVE]
        # What does not fit must not look hopeless: then nothing that recent does.
        decided_step = horizon.decided_step if len(alive) == len(horizon.alive) else alive[-1].step
        words = [horizon.epoch, _pair(horizon.committed), _pair(horizon.target), [_pair(s) for s in alive], decided_step]
        body = json.dumps(words, separators=(",", ":")).encode()
        assert len(body) <= MAX_BODY_BYTES
        self._page.write(body)

    def read(self, epoch: int) -> Horizon:
        """The last word of this epoch; an empty one when there is none yet."""
        body = self._page.read()
        words = json.loads(body) if body else [-1]
        if words[0] != epoch:
            return Horizon(epoch)
        _, committed, target, alive, decided_step = words
        return Horizon(epoch, _stamp(committed), _stamp(target), frozenset(Stamp(*s) for s in alive), decided_step)

    def close(self) -> None:
        self._page.close()


def _pair(stamp: Stamp | None) -> list[int] | None:
    return None if stamp is None else [stamp.step, stamp.epoch]


def _stamp(pair: list[int] | None) -> Stamp | None:
    return None if pair is None else Stamp(*pair)
