"""Journals: one job's journals, of one node or of several, read as they grow.

Comes in: files. Goes out: events that were added; of several journals on one line of time, each
with the node it is of in `who`. Ranks have numbers of their own in the whole job, and keep their
names. Never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.dashboard.history import by_time
from keepstep.edge.os.journal import JournalTail
from keepstep.model.events import Event

NAME = "journal.jsonl"


class Journals:
    """For one thread at a time."""

    def __init__(self, paths: Sequence[Path], owner: int | None = None) -> None:
        """Each file counts once. owner: whose those must be in the directory of the first, the
        job's own. Of others whoever names them knows whose they are."""
        self._paths = list(dict.fromkeys(path.absolute() for path in paths))
        own = self._paths[0].parent
        self._tails = [
            JournalTail(path, owner=owner if path.is_relative_to(own) else None)
            for path in self._paths
        ]
        self._sizes = [-1] * len(self._paths)
        self._labels = labels_of(self._paths)
        self._known: set[tuple[int, int, str, str]] = set()

    @property
    def are_several(self) -> bool:
        return len(self._paths) > 1

    def have_grown(self) -> bool:
        """Whether a file has another size than when it was read last."""
        return any(_size(path) != size for path, size in zip(self._paths, self._sizes, strict=True))

    def read(self) -> list[Event]:
        """The events added since the last look."""
        self._sizes = [_size(path) for path in self._paths]  # first: what comes meanwhile is news
        if not self.are_several:
            return self._tails[0].read()
        added = [
            _labelled(event, label)
            for tail, label in zip(self._tails, self._labels, strict=True)
            for event in tail.read()
            if self._is_new(event)
        ]
        return by_time(added)

    def _is_new(self, event: Event) -> bool:
        """Of a node whose journal lies there twice, as itself and as a copy, each event counts
        once."""
        key = (event.wall_ns, event.mono_ns, event.who, event.kind)
        is_new = key not in self._known
        self._known.add(key)
        return is_new


def find_journals(directory: Path, job: str) -> list[Path]:
    """The journals of that job below a directory, in order of their paths: of nodes whose state
    directories lie there, and what was copied into the job's own directory under other names."""
    return sorted(path for path in directory.rglob("*.jsonl") if path.parent.name == job)


def jobs_below(directory: Path) -> list[str]:
    """The names of the jobs that have a journal there."""
    return sorted({path.parent.name for path in directory.rglob(NAME)})


def labels_of(paths: Sequence[Path]) -> list[str]:
    """What tells each of the paths from the others: the first part, seen from the root, in which
    they differ."""
    parts = [path.parts for path in paths]
    if len(parts) < 2:
        return [""] * len(parts)
    shared = 0
    while all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    return [each[shared] for each in parts]


def _labelled(event: Event, label: str) -> Event:
    return event if event.who.startswith("rank ") else replace(event, who=f"{event.who} ({label})")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
