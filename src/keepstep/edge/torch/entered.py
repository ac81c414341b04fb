"""Entered: what this process has entered, by process group.

Comes in: that a collective of a group is called, on any thread. Goes out: sums of the first
`MOST_GROUPS` groups that were used in this life, so that who reads them needs no room for more. Of
the others nothing is kept here: `Membership.entered` counts them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from keepstep.model.step_work import MOST_GROUPS, GroupEntries

NUMBER_BYTES = 6  # a number that JSON and a double hold


class EnteredGroups:
    """Of one life of the groups. Like the count of all collectives it takes no lock: a count that
    two threads raise at once may lack one."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}  # collectives, messages

    @property
    def sums(self) -> tuple[GroupEntries, ...]:
        return tuple(GroupEntries(group, *counts) for group, counts in list(self._counts.items()))

    def add(self, group: int, is_message: bool) -> None:
        counts = self._counts.get(group)
        if counts is None:
            if not group or len(self._counts) >= MOST_GROUPS:
                return
            counts = self._counts.setdefault(group, [0, 0])
        counts[is_message] += 1


def group_number(name: str, ranks: Sequence[int]) -> int:
    """The same in all members, and never 0. Torch counts its groups for a name, and some that are
    made at once have the same: so their members belong to it. ranks: in the job, none for all."""
    text = f"{name}/{','.join(map(str, ranks))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=NUMBER_BYTES).digest(), "big") or 1
