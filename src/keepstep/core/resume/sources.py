"""Restore sources: which snapshots can be had from the nodes that answer, and from whom each is
fetched.

Comes in: what every living node has proven (`Inventory`). Goes out: the stamps that a rank can be
given, and for one stamp where its bytes come from: holders of a copy, or enough members of the
stripe group it was coded with. The least loaded come first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from keepstep.model.restore_sources import GroupMember, HeldParity, Inventory, RestoreSource
from keepstep.model.snapshot import Stamp


def restorable_stamps(rank: int, inventories: Mapping[int, Inventory]) -> frozenset[Stamp]:
    """The stamps of `rank` that can be restored from these nodes."""
    whole = {stamp for i in inventories.values() for r, stamp in i.snapshots if r == rank}
    coded = {p.stamp for i in inventories.values() for p in i.parities if rank in p.stripe_group}
    return frozenset(
        whole | {stamp for stamp in coded if _coded(rank, stamp, inventories) is not None}
    )


def restorable_by_rank(
    ranks: Iterable[int], inventories: Mapping[int, Inventory]
) -> dict[int, frozenset[Stamp]]:
    """`restorable_stamps` of each of them: what is whole is looked for once, for all."""
    if any(i.parities for i in inventories.values()):
        return {rank: restorable_stamps(rank, inventories) for rank in ranks}
    whole: dict[int, set[Stamp]] = {}
    for inventory in inventories.values():
        for rank, stamp in inventory.snapshots:
            whole.setdefault(rank, set()).add(stamp)
    return {rank: frozenset(whole.get(rank, ())) for rank in ranks}


def restore_sources(
    wanted: Sequence[int], stamp: Stamp, inventories: Mapping[int, Inventory]
) -> dict[int, RestoreSource]:
    """From whom each of the wanted ranks fetches `stamp`, by rank; the reading is spread. Ranks
    that cannot be given it are left out."""
    load = dict.fromkeys(inventories, 0.0)
    found = {}
    for rank in wanted:
        copies = _copies(rank, stamp, inventories, load)
        source = RestoreSource(rank, copies) if copies else _coded(rank, stamp, inventories)
        if source is None:
            continue
        readers = copies or [member.node for member in source.members]
        for node in readers:
            load[node] += 1 if source.members else 1 / len(readers)
        found[rank] = source
    return found


def _copies(
    rank: int, stamp: Stamp, inventories: Mapping[int, Inventory], load: Mapping[int, float]
) -> tuple[int, ...]:
    """The nodes that hold it, the least loaded first."""
    holders = (node for node, held in inventories.items() if (rank, stamp) in held.snapshots)
    return tuple(sorted(holders, key=lambda node: (load[node], node)))


def _coded(rank: int, stamp: Stamp, inventories: Mapping[int, Inventory]) -> RestoreSource | None:
    """Enough members of a stripe group of that rank to decode its snapshot; None: too few."""
    parities = [
        (node, parity)
        for node, held in sorted(inventories.items())
        for parity in held.parities
        if parity.stamp == stamp and rank in parity.stripe_group
    ]
    groups = dict.fromkeys((parity.stripe_group, parity.tolerates) for _, parity in parities)
    for group, tolerates in groups:
        # A member counts with both its data and its parity: what it lacks of one, another would
        # have to give.
        members = dict(_whole_members(group, stamp, parities, inventories))
        if len(members) >= len(group) - tolerates:
            whole = tuple(GroupMember(*member) for member in sorted(members.items()))
            return RestoreSource(rank, (), group, tolerates, whole)
    return None


def _whole_members(
    group: tuple[int, ...],
    stamp: Stamp,
    parities: Sequence[tuple[int, HeldParity]],
    inventories: Mapping[int, Inventory],
) -> Iterable[tuple[int, int]]:
    """Rank and node of those members that have both."""
    for node, parity in parities:
        own = (parity.rank, stamp)
        if parity.stripe_group == group and own in inventories[node].snapshots:
            yield parity.rank, node
