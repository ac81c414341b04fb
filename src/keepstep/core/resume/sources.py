"""Reach: which snapshots can be had from the nodes that answer, and from whom each is fetched.

Comes in: what every living node has proven (`Inventory`). Goes out: the stamps within reach of a
rank, and for one stamp where its bytes come from: holders of a copy, or enough members of the row
it was coded with. The least loaded come first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from keepstep.model.snapshot import Stamp


@dataclass(frozen=True, slots=True)
class CodedRow:
    """A parity that rests on a node: that of `rank` (a member of `row`), at one stamp."""

    rank: int
    stamp: Stamp
    row: tuple[int, ...]
    tolerates: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """One node's proven contents: whole snapshots (its own ranks' and copies), and parities."""

    snapshots: frozenset[tuple[int, Stamp]] = frozenset()
    parities: frozenset[CodedRow] = frozenset()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank's snapshot comes from. `copies`: nodes with all of it. Else `row` with
    `members`: (rank, node) of those that have both their data and their parity, enough of them."""

    rank: int
    copies: tuple[int, ...] = ()
    row: tuple[int, ...] = ()
    tolerates: int = 0
    members: tuple[tuple[int, int], ...] = ()


def within_reach(rank: int, inventories: Mapping[int, Inventory]) -> frozenset[Stamp]:
    """The stamps of `rank` that can be had from these nodes."""
    whole = {stamp for i in inventories.values() for r, stamp in i.snapshots if r == rank}
    coded = {p.stamp for i in inventories.values() for p in i.parities if rank in p.row}
    return frozenset(
        whole | {stamp for stamp in coded if _decodable(rank, stamp, inventories) is not None}
    )


def reach_of_all(
    ranks: Iterable[int], inventories: Mapping[int, Inventory]
) -> dict[int, frozenset[Stamp]]:
    """`within_reach` of each of them: what is whole is looked for once, for all."""
    if any(i.parities for i in inventories.values()):
        return {rank: within_reach(rank, inventories) for rank in ranks}
    whole: dict[int, set[Stamp]] = {}
    for inventory in inventories.values():
        for rank, stamp in inventory.snapshots:
            whole.setdefault(rank, set()).add(stamp)
    return {rank: frozenset(whole.get(rank, ())) for rank in ranks}


def sources(
    wanted: Sequence[int], stamp: Stamp, inventories: Mapping[int, Inventory]
) -> dict[int, Source]:
    """From whom each of the wanted ranks fetches `stamp`; the reading is spread. Ranks out of reach
    are left out."""
    load = dict.fromkeys(inventories, 0.0)
    found = {}
    for rank in wanted:
        copies = sorted(
            (n for n, i in inventories.items() if (rank, stamp) in i.snapshots),
            key=lambda n: (load[n], n),
        )
        source = (
            Source(rank, copies=tuple(copies)) if copies else _decodable(rank, stamp, inventories)
        )
        if source is None:
            continue
        readers = copies or [node for _, node in source.members]
        for node in readers:
            load[node] += 1 if source.members else 1 / len(readers)
        found[rank] = source
    return found


def _decodable(rank: int, stamp: Stamp, inventories: Mapping[int, Inventory]) -> Source | None:
    parities = [
        (node, p)
        for node, i in sorted(inventories.items())
        for p in i.parities
        if p.stamp == stamp and rank in p.row
    ]
    for row, tolerates in dict.fromkeys((p.row, p.tolerates) for _, p in parities):
        # A member counts with both its data and its parity: what it lacks of one, another would
        # have to give.
        members = dict(_whole_members(row, stamp, parities, inventories))
        if len(members) >= len(row) - tolerates:
            return Source(
                rank, row=row, tolerates=tolerates, members=tuple(sorted(members.items()))
            )
    return None


def _whole_members(
    row: tuple[int, ...],
    stamp: Stamp,
    parities: Sequence[tuple[int, CodedRow]],
    inventories: Mapping[int, Inventory],
) -> Iterable[tuple[int, int]]:
    for node, parity in parities:
        if parity.row == row and (parity.rank, stamp) in inventories[node].snapshots:
            yield parity.rank, node
