"""Whose file it is: rank, host and attempt as launchers write them into paths.

Comes in: the paths of all files, since a number in one means something only beside the others. Goes
out: a `LogPlace` for each. What a path does not say stays None; a line may still say it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TORCHRUN = re.compile(r"(?:^|/)attempt_(\d{1,6})/(\d{1,6})/[^/]{0,255}$")
RANK = re.compile(r"(?:^|[^a-z])(?:global_?)?rank[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
HOST = re.compile(
    r"(?:^|/)((?:node|host|worker|gpu|dgx|hgx|compute|ip|cn)[\w.-]{0,40}\d[\w.-]{0,40})/",
    re.IGNORECASE,
)
NAMES = r"(?:node|host|worker|gpu|dgx|hgx|compute|ip|cn)[\w-]{0,40}\d[\w-]{0,40}"
KERNEL = r"(?:dmesg|kern(?:el)?|syslog|journal|messages)"
KERNEL_OF = re.compile(  # `gpu-02.dmesg`, `kern-node7.log`
    rf"^(?:(?P<before>{NAMES})[-_.]{KERNEL}|{KERNEL}[-_.](?P<after>{NAMES}))(?:\.\w{{1,8}})?$",
    re.IGNORECASE,
)
NUMBER = re.compile(r"\d{1,9}")
MIN_SIBLINGS = 2

RankColumns = Mapping[str, tuple[int, frozenset[int]]]


@dataclass(frozen=True, slots=True)
class LogPlace:
    """`local`: the rank within its node, where the path tells no other. `is_counted`: the rank is
    only a number that counts its files, which may count nodes."""

    path: str
    rank: int | None = None
    local: int | None = None
    host: str | None = None
    attempt: int = 0
    is_counted: bool = False


def places_of(paths: Sequence[str]) -> dict[str, LogPlace]:
    """Whose each of these files is."""
    ranks = _numbered(paths)
    hosts = {found[1] for path in paths if (found := HOST.search(path))}
    return {path: _place(path, ranks.get(path), len(hosts) <= 1) for path in paths}


def _place(path: str, number: int | None, is_one_node: bool) -> LogPlace:
    host = found[1] if (found := HOST.search(path)) else None
    if found := TORCHRUN.search(path):
        local = int(found[2])
        return LogPlace(path, local if is_one_node else None, local, host, int(found[1]))
    name = path.rpartition("/")[2]
    if found := KERNEL_OF.match(name):
        return LogPlace(path, None, None, found["before"] or found["after"])
    if found := RANK.search(name) or RANK.search(path):
        return LogPlace(path, int(found[1]), None, host)
    return LogPlace(path, number, None, host, is_counted=number is not None)


def _numbered(paths: Sequence[str]) -> dict[str, int]:
    """The ranks of files that differ in one number alone, which counts from 0: `train-%j-%t.out`
    as Slurm writes it."""
    alike: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for path in paths:
        numbers = [int(n) for n in NUMBER.findall(path)]
        alike[NUMBER.sub("#", path)].append((path, numbers))
    found: dict[str, int] = {}
    for group in alike.values():
        columns = list(zip(*(numbers for _, numbers in group), strict=True))
        varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        if len(group) < MIN_SIBLINGS or len(varying) != 1:
            continue
        column = columns[varying[0]]
        if sorted(column) == list(range(len(group))):
            found.update({path: numbers[varying[0]] for path, numbers in group})
    return found


def rank_columns(alone: Mapping[str, int]) -> RankColumns:
    """By the shape of a path, which of its numbers is the rank, and the ranks that show it.
    `alone`: files in whose lines one rank speaks, and which. Rank 0 alone shows nothing: it often
    speaks for all of its node."""
    columns: dict[str, set[int]] = {}
    ranks: dict[str, set[int]] = defaultdict(set)
    for path, rank in alone.items():
        shape = NUMBER.sub("#", path)
        same = {at for at, number in enumerate(NUMBER.findall(path)) if int(number) == rank}
        columns[shape] = columns.get(shape, same) & same
        ranks[shape].add(rank)
    return {
        shape: (same.pop(), frozenset(ranks[shape]))
        for shape, same in columns.items()
        if len(same) == 1 and any(ranks[shape])
    }


def rank_beside(path: str, columns: RankColumns) -> int | None:
    """The rank of a file whose lines name none, as others of its shape name theirs: of
    `worker-4.log`, where in `worker-5.log` rank 5 speaks."""
    column, ranks = columns.get(NUMBER.sub("#", path), (0, frozenset()))
    if not ranks:
        return None
    rank = int(NUMBER.findall(path)[column])
    return None if rank in ranks else rank  # else it differs from them in another number
