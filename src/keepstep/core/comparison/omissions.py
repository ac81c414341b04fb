"""Omissions: what a training changes and a restore does not bring back.

Comes in: what two undisturbed runs and a restored one have at two moments: where the restored run
begins, and some steps later. Goes out: names.

What differs at both moments was not given to `protect`. What differs later alone is a consequence:
a schedule that began anew changes every weight. So is a variable that the restored run has not
assigned when it begins. What differs between the undisturbed runs is not deterministic, and nothing
can be said of it. A container of plain values that lacks what the killed process had put in, and
grows as before, is a record (losses by step): told apart, since a program does not go on from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.model.fingerprint import SeenValue

_PART = re.compile(r"\.|\[")


@dataclass(frozen=True, slots=True)
class Omission:
    """A value of the program's by name. `paths`: all below it that differ, the first first."""

    name: str
    kind: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found. `compared`: how many values were the same in both undisturbed runs."""

    compared: int
    omissions: tuple[Omission, ...]
    consequences: tuple[Omission, ...]
    undetermined: tuple[Omission, ...]
    records: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the restored run has all that the undisturbed one has. A consequence without an
        omission is one of something that nothing reachable shows."""
        return not self.omissions and not self.consequences


class TwoLooks(NamedTuple):
    """What a run had at both moments."""

    first: Mapping[str, SeenValue]
    later: Mapping[str, SeenValue]


def audit(undisturbed: TwoLooks, again: TwoLooks, restored: TwoLooks) -> Audit:
    """Judge the three runs."""
    paths = undisturbed.later.keys() | again.later.keys()
    unsure = {p for p in paths if undisturbed.later.get(p) != again.later.get(p)}
    sure = [path for path in undisturbed.later if path not in unsure]
    lost = [p for p in sure if undisturbed.later[p] != restored.later.get(p)]
    records = tuple(path for path in lost if _is_record(path, undisturbed, restored))
    lost = [path for path in lost if not _is_below(path, records)]
    begun = {_variable(path) for path in restored.first}
    missing = [
        path
        for path in lost
        if undisturbed.first.get(path) != restored.first.get(path) and _variable(path) in begun
    ]
    named = {_variable(path) for path in missing}
    consequences = [path for path in lost if _variable(path) not in named]
    every = {**again.later, **undisturbed.later}
    return Audit(
        len(sure),
        _grouped(missing, every),
        _grouped(consequences, every),
        _grouped(sorted(unsure), every),
        records,
    )


def _is_record(path: str, undisturbed: TwoLooks, restored: TwoLooks) -> bool:
    """Whether the restored run lacks some of the entries, and has put in as many since."""
    sizes = []
    for look in (*undisturbed, *restored):
        entries = look[path].entries if path in look else None
        if entries is None:
            return False
        sizes.append(len(entries))
    before, now, restored_before, restored_now = sizes
    return restored_now < now and now - before == restored_now - restored_before > 0


def _is_below(path: str, containers: Sequence[str]) -> bool:
    return any(
        path.startswith(c) and path[len(c) : len(c) + 1] in ("", ".", "[") for c in containers
    )


def _variable(path: str) -> str:
    """`where: name`, by which the program reaches it."""
    where, _, rest = path.partition(": ")
    return f"{where}: {_PART.split(rest, maxsplit=1)[0]}"


def _grouped(paths: Sequence[str], seen: Mapping[str, SeenValue]) -> tuple[Omission, ...]:
    """By variable, with all that differs below it. Of a container its entries are told."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(_variable(path), []).append(path)
    told = []
    for name, below in groups.items():
        inner = [path for path in below if seen[path].entries is None] or below
        told.append(Omission(name, seen[inner[0]].kind, tuple(inner)))
    return tuple(told)
