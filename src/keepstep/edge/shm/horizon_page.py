"""Horizon page: the newest horizon a node knows, read by its ranks at each step boundary.

The node's keeper writes it, the ranks of the node read it: a double-buffered page in the job
directory. A horizon that is out of date is still a safe one (core/resume/commit.py), but only
within its epoch: a reader that trains in another epoch reads an empty horizon.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.edge.shm.double_buffered_page import MAX_BODY_BYTES, DoubleBufferedPage
from keepstep.errors import DamageError
from keepstep.model.decoding import (
    a_count,
    a_list,
    a_whole_number,
    counts,
    decoding,
    from_json,
)
from keepstep.model.horizon import Horizon
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.snapshot import Stamp
from keepstep.ports import Memory

MAX_ALIVE = 40  # two slots a rank make two at most; a page has room for so many
MAX_NAMED = 32  # ranks; one that ends is enough for all to go back


class HorizonPage:
    def __init__(self, memory: Memory, job_dir: Path, make: bool = True) -> None:
        """Map the page of this job directory, making it if there is none (an onlooker does not).
        Raises OSError, ValueError."""
        open_page = DoubleBufferedPage.ensure if make else DoubleBufferedPage.open
        self._page = open_page(memory, job_dir / "horizon")

    def write(self, horizon: Horizon) -> None:
        alive = sorted(horizon.alive)[:MAX_ALIVE]
        # What does not fit must not look hopeless: then nothing that recent does.
        decided_step = horizon.decided_step if len(alive) == len(horizon.alive) else alive[-1].step
        stamps = [_pair(horizon.committed), _pair(horizon.target), _pair(horizon.inherited)]
        body = json.dumps(
            [
                horizon.epoch,
                *stamps,
                [_pair(s) for s in alive],
                decided_step,
                horizon.period_steps,
                int(horizon.has_copies),
                horizon.agreed_steps,
                _told(horizon.difference),
            ],
            separators=(",", ":"),
        ).encode()
        assert len(body) <= MAX_BODY_BYTES
        self._page.write(body)

    def read(self, epoch: int) -> Horizon:
        """The last word of this epoch; an empty one when there is none yet."""
        last = self.last()
        return last if last.epoch == epoch else Horizon(epoch)

    def last(self) -> Horizon:
        """The last word of whatever epoch; of epoch -1 when there is none."""
        body = self._page.read()
        return _horizon(body) if body else Horizon(-1)

    def close(self) -> None:
        self._page.close()


@lru_cache(maxsize=1 << 4)
def _horizon(body: bytes) -> Horizon:
    """Kept: it is looked at more often than it changes. One that no keeper of this release wrote
    is none."""
    try:
        with decoding("horizon"):
            (epoch, *stamps, alive, decided, period, copies, agreed, difference) = a_list(
                from_json(body)
            )
            committed, target, inherited = stamps
            return Horizon(
                a_whole_number(epoch),
                _stamp(committed),
                _stamp(target),
                frozenset(map(_a_stamp, a_list(alive))),
                a_whole_number(decided),
                _stamp(inherited),
                a_count(period),
                bool(a_count(copies)),
                a_count(agreed),
                None if difference is None else _a_difference(difference),
            )
    except DamageError:
        return Horizon(-1)


def _told(difference: ReplicaDifference | None) -> list[Any] | None:
    if difference is None:
        return None
    named = list(difference.ranks[:MAX_NAMED])
    how = [difference.of, difference.is_certain, difference.condemns]
    return [_pair(difference.stamp), named, *how]


def _a_difference(told: Any) -> ReplicaDifference:
    stamp, ranks, of, is_certain, condemns = a_list(told)
    return ReplicaDifference(
        _a_stamp(stamp), counts(ranks), a_count(of), is_certain is True, condemns is True
    )


def _pair(stamp: Stamp | None) -> list[int] | None:
    return None if stamp is None else [stamp.step, stamp.epoch]


def _stamp(pair: Any) -> Stamp | None:
    return None if pair is None else _a_stamp(pair)


def _a_stamp(pair: Any) -> Stamp:
    step, epoch = a_list(pair)
    return Stamp(a_whole_number(step), a_whole_number(epoch))
