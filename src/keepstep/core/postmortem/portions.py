"""Which parts of which logs are read, where all of them would take too long.

Comes in: how large each log is, and a bound over all of them. Goes out: portions, in rounds. What
fits is read whole, in one round. Of more, first the beginning and the end of every log, so that
each rank is heard however early the time runs out: who is who stands at the beginning, and why it
ended at the end. What is left of the bound is then shared, so that small logs are read whole, and
goes to what stands before the ends.

A log that can only be read from its beginning (packed, or of wide characters) is unpacked as far as
its share goes. Its size is a guess, and what the others leave over is added to it.

Invariant: the same logs give the same portions, and no round asks for more than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.model.units import GIB, MIB

MOST_BYTES = 4 * GIB  # of all logs together
MOST_ENDS_BYTES = MIB  # of each, in the first round
ENDS_FRACTION = 4  # of the bound is for the first round
HEAD_FRACTION = 8  # of a log's ends is its beginning


@dataclass(frozen=True, slots=True)
class LogSize:
    """`size`: in bytes, unpacked; of a stream that is a guess."""

    name: str
    size: int
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class LogPortion:
    name: str
    begin: int
    end: int


def portions_of(
    logs: Sequence[LogSize], most_bytes: int = MOST_BYTES
) -> tuple[tuple[LogPortion, ...], ...]:
    """What to read, round by round."""
    total = sum(log.size for log in logs)
    if total <= most_bytes:
        spare = (most_bytes - total) // max(1, sum(log.is_stream for log in logs))
        return (tuple(LogPortion(log.name, 0, _whole(log, spare)) for log in logs),)
    ends = min(MOST_ENDS_BYTES, most_bytes // ENDS_FRACTION // len(logs))
    share = _level([log.size for log in logs], most_bytes - ends * len(logs))
    first = tuple(part for log in logs for part in _ends(log, ends))
    rest = tuple(part for log in logs for part in _middle(log, ends, share))
    return first, rest


def _whole(log: LogSize, spare: int) -> int:
    return log.size + spare if log.is_stream else log.size


def _ends(log: LogSize, ends: int) -> list[LogPortion]:
    if log.size <= ends or log.is_stream:
        return [LogPortion(log.name, 0, min(log.size, ends))]
    head = ends // HEAD_FRACTION
    return [
        LogPortion(log.name, 0, head),
        LogPortion(log.name, log.size - ends + head, log.size),
    ]


def _middle(log: LogSize, ends: int, share: int) -> list[LogPortion]:
    """A stream is read from its beginning again."""
    if log.is_stream:
        return [LogPortion(log.name, 0, min(log.size, share))]
    head, tail = ends // HEAD_FRACTION, log.size - ends + ends // HEAD_FRACTION
    begin = max(head, tail - share)
    return [LogPortion(log.name, begin, tail)] if begin < tail else []


def _level(sizes: Sequence[int], most: int) -> int:
    """How much each may have, so that all together have this much: the small ones have less."""
    left, level = most, 0
    waiting = sorted(sizes)
    for place, size in enumerate(waiting):
        level = left // (len(waiting) - place)
        if size > level:
            return level
        left -= size
    return level
