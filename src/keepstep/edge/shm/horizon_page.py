"""Horizon page: the newest horizon a node knows, and the newest share classes, read by its ranks at
each step boundary.

The node's keeper writes them, the ranks of the node read them: two double-buffered pages in the job
directory. A horizon that is out of date is still a safe one (core/resume/commit.py), but only
within its epoch: a reader that trains in another epoch reads an empty horizon.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from keepstep.edge.shm.double_buffered_page import MAX_BODY_BYTES, DoubleBufferedPage
from keepstep.errors import DamageError, MemoryBudgetError
from keepstep.model.bounds import U64
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
from keepstep.model.shares import RankRun, ShareClass
from keepstep.model.snapshot import Stamp
from keepstep.ports import Memory

MAX_ALIVE = 40  # two slots a rank make two at most; a page has room for so many
CLASSES_HEAD_BYTES = 32  # around the rows of share classes
MAX_NAMED = 32  # ranks; one that ends is enough for all to go back


class HorizonPage:
    def __init__(self, memory: Memory, job_dir: Path, make: bool = True) -> None:
        """Map the page of this job directory, making it if there is none (an onlooker does not).
        Raises OSError, ValueError."""
        open_page = DoubleBufferedPage.ensure if make else DoubleBufferedPage.open
        self._page = open_page(memory, job_dir / "horizon")
        self._classes_path, self._memory = job_dir / "share-classes", memory
        self._classes: DoubleBufferedPage | None = None  # there is none before somebody shares

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

    def write_classes(
        self, epoch: int, classes: Iterable[ShareClass], ranks: Container[int]
    ) -> None:
        """Those that some of these ranks are members of. What does not fit is left out: then nobody
        here goes by it, as where there is no room for the page."""
        if self._classes is None:
            try:
                self._classes = DoubleBufferedPage.ensure(self._memory, self._classes_path)
            except (OSError, MemoryBudgetError):
                return
        room, rows = MAX_BODY_BYTES - CLASSES_HEAD_BYTES, []
        for each in classes:
            if any(rank in ranks for rank in each.members):
                words = [each.runs, f"{each.told:x}", f"{each.number:x}", each.is_over]
                row = json.dumps(words, separators=(",", ":"))
                room -= len(row) + 1
                if room < 0:
                    break
                rows.append(row)
        self._classes.write(f"[{epoch},[{','.join(rows)}]]".encode())

    def classes(self, epoch: int) -> tuple[ShareClass, ...] | None:
        """Of that epoch, as far as they are known here; None when nothing is."""
        found, classes = self._read_classes()
        return classes if found == epoch else None

    def last_classes(self) -> tuple[ShareClass, ...]:
        """Of whatever epoch."""
        return self._read_classes()[1]

    def _read_classes(self) -> tuple[int, tuple[ShareClass, ...]]:
        if self._classes is None:
            try:
                self._classes = DoubleBufferedPage.open(self._memory, self._classes_path)
            except (OSError, ValueError):
                return -1, ()
        body = self._classes.read()
        return (-1, ()) if body is None else _share_classes(body)

    def close(self) -> None:
        self._page.close()
        if self._classes is not None:
            self._classes.close()


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


@lru_cache(maxsize=1 << 4)
def _share_classes(body: bytes) -> tuple[int, tuple[ShareClass, ...]]:
    """And their epoch."""
    try:
        with decoding("share classes"):
            epoch, rows = a_list(from_json(body))
            return a_whole_number(epoch), tuple(map(_share_class, a_list(rows)))
    except DamageError:
        return -1, ()


def _share_class(row: Any) -> ShareClass:
    runs, told, number, is_over = a_list(row)
    return ShareClass(
        tuple(RankRun(*counts(run)) for run in a_list(runs)),
        a_checksum(told),
        a_checksum(number),
        is_over is True,
    )


def a_checksum(word: Any) -> int:
    """64 bits, as JSON's numbers of ours have room for 63. Raises ValueError."""
    found = int(word, 16) if isinstance(word, str) else -1
    if not 0 <= found <= U64:
        raise ValueError(f"expected 64 bits in hexadecimal, found {word!r:.40}")
    return found


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
