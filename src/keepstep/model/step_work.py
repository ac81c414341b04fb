"""Step work: what a rank does in its steps, by section, and what hinders it.

Values only. `runtime/rank/step_clock.py` measures, `edge/shm/step_work_page.py` lays it into
memory, `core/detection/stragglers.py` judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple


class Timing(IntEnum):
    """What a rank's time tells of what it computes. HOST: its thread computes. UNSEEN: a device
    does, and nobody sees how long that takes it. DEVICE: a device does, and it is measured. PASSES:
    a device does, and nobody sees when it waits for others: of it only those passes tell something
    in which it cannot have."""

    HOST = 0
    UNSEEN = 1
    DEVICE = 2
    PASSES = 3


class Section(IntEnum):
    """Where in a step a rank is. COMPUTE: forward, backward, and whatever else the body does. HOOK:
    inside keepstep. APART: what the program has announced to be no part of a step (an evaluation, a
    checkpoint): nobody is judged by it. FORWARD, BACKWARD: these passes where they are seen, which
    are parts of COMPUTE: their time is in both."""

    DATA = 0
    COMPUTE = 1
    UPDATE = 2
    HOOK = 3
    APART = 4
    FORWARD = 5
    BACKWARD = 6


PASSES = (Section.FORWARD, Section.BACKWARD)
JUDGED = (Section.DATA, Section.COMPUTE, Section.UPDATE, Section.HOOK)
NONE_NS = (0,) * len(Section)


MOST_GROUPS = 8  # whose collectives a rank counts one by one


class GroupEntries(NamedTuple):
    """What a rank has entered in one process group. group: its number, the same in all members, not
    0. messages: from one rank to another (send, recv), which are not of all members."""

    group: int
    collectives: int
    messages: int = 0


class StepWork(NamedTuple):
    """Sums since the rank began, as they stood when `step` had ended.

    own_ns: by section, the wall time in which the trainer's thread did not wait for its peers.
    cpu_ns: by section, the same thread's processor time. wait_ns: off the processor while a
    collective was under way. delay_ns: by section, ready to run while others had the processor,
    which is a part of its own time. collectives: how many were entered, with messages from rank to
    rank. tokens: as the program has told of its work, 0: it has not.
    micro_batches: of those that ranks share, how many were this one's; 0: it shares none. ended_ns
    is CLOCK_MONOTONIC. device_ns: by section, the device's time but for what it waited for others,
    where that is measured. groups: of the collectives, those of the first `MOST_GROUPS` process
    groups; what else was entered is only in the sum.
    """

    step: int
    epoch: int
    ended_ns: int
    own_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    wait_ns: int
    delay_ns: tuple[int, ...]
    collectives: int
    tokens: int
    micro_batches: int = 0
    device_ns: tuple[int, ...] = NONE_NS
    groups: tuple[GroupEntries, ...] = ()


class FixedWork(NamedTuple):
    """Of one rank. `processors`: on which it may run; `tries_ns`: processor time of the same work
    there, try by try; none where it could not be measured."""

    processors: frozenset[int]
    tries_ns: tuple[int, ...]


class Hindrance(NamedTuple):
    """What the kernel counts where a process lives, since some moment. throttled_ns: its cgroup had
    used up its quota of processor time. memory_stall_ns: some process there waited for memory.
    None: nobody counts."""

    throttled_ns: int | None = None
    memory_stall_ns: int | None = None


class WorkBlock(NamedTuple):
    """What one rank did in some steps that follow each other: differences of two `StepWork`, and
    of two `Hindrance`. groups: those in which it has entered something."""

    steps: int
    own_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    wait_ns: int
    delay_ns: tuple[int, ...]
    collectives: int
    tokens: int
    throttled_ns: int = 0
    memory_stall_ns: int = 0
    micro_batches: int = 0
    device_ns: tuple[int, ...] = NONE_NS
    groups: tuple[GroupEntries, ...] = ()


def block_between(older: StepWork, newer: StepWork) -> WorkBlock:
    """Of the steps behind `older`, up to `newer`."""
    return WorkBlock(
        newer.step - older.step,
        tuple(b - a for a, b in zip(older.own_ns, newer.own_ns, strict=True)),
        tuple(b - a for a, b in zip(older.cpu_ns, newer.cpu_ns, strict=True)),
        newer.wait_ns - older.wait_ns,
        tuple(b - a for a, b in zip(older.delay_ns, newer.delay_ns, strict=True)),
        newer.collectives - older.collectives,
        newer.tokens - older.tokens,
        micro_batches=newer.micro_batches - older.micro_batches,
        device_ns=tuple(b - a for a, b in zip(older.device_ns, newer.device_ns, strict=True)),
        groups=_entered_between(older.groups, newer.groups),
    )


def _entered_between(
    older: tuple[GroupEntries, ...], newer: tuple[GroupEntries, ...]
) -> tuple[GroupEntries, ...]:
    """A group that was not there before had entered nothing."""
    before = {entries.group: entries for entries in older}
    found = []
    for group, collectives, messages in newer:
        _, had_collectives, had_messages = before.get(group, (group, 0, 0))
        grown = collectives - had_collectives, messages - had_messages
        if min(grown) >= 0 < max(grown):  # else the rank began to count anew
            found.append(GroupEntries(group, *grown))
    return tuple(found)


SlowCause = Literal["compute", "data", "quota", "memory", "neighbour", "blocked"]


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank has become slow. own_ns, peers_ns: of that section, a step; peers_ns is what it took
    itself before, where there are none. excess_ns: a step, of all sections. is_stage: it passes
    tensors to other ranks, as a pipeline's stages do: no other rank can do a part of its work.
    lost_ns: what all of it has cost until it was told."""

    rank: int
    section: Section
    cause: SlowCause
    since_step: int
    own_ns: int
    peers_ns: int
    excess_ns: int
    excess_ratio: float
    has_peers: bool
    is_standing: bool
    why: str
    is_stage: bool = False
    lost_ns: int = 0
