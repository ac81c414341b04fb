"""Work peers: which ranks do the same in a step, by the collectives that they enter.

Comes in: blocks of steps, with what each rank has entered in which process group. Goes out: sets of
ranks that can be compared from the beginning on.

All members of a group enter its collectives, so a group alone says nothing: of a pipeline all
stages may sum a norm. Ranks do the same that enter equally many in one group, and in all: another
stage has other layers. Where they are as many by chance, messages tell: ranks that pass tensors
from one to the next (`send`, `recv`) are neighbours in a pipeline, in which each does its own part.
So a group with two members of such another one is none of peers. Of the rest the largest counts.

Messages in a group of all ranks say nothing of who is whose neighbour: then that group is none of
peers, and the others are. In a ring (context parallelism) messages are taken for a pipeline's; its
ranks have the peers of their other groups, or none.

Invariant: a rank is in one set at most, and no set has one rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from keepstep.model.step_work import WorkBlock

Members = Mapping[int, frozenset[int]]  # by group


def peers_of(blocks: Mapping[int, Sequence[WorkBlock]]) -> dict[int, frozenset[int]]:
    """By rank, with itself; those without peers are left out. blocks: of the same steps."""
    collectives = {rank: _summed(some, of_messages=False) for rank, some in blocks.items()}
    messages = {rank: _summed(some, of_messages=True) for rank, some in blocks.items()}
    members = _members(collectives)
    mixed = _mixed(members, _members(messages), frozenset(blocks))
    alike: dict[tuple[int, int, int], set[int]] = {}
    for rank, counts in collectives.items():
        groups = [group for group in counts if group not in mixed]
        if groups:
            group = max(groups, key=lambda one: (len(members[one]), counts[one], one))
            total = sum(block.collectives for block in blocks[rank])
            alike.setdefault((group, counts[group], total), set()).add(rank)
    found = [frozenset(ranks) for ranks in alike.values() if len(ranks) > 1]
    return {rank: ranks for ranks in found for rank in ranks}


def _summed(blocks: Sequence[WorkBlock], of_messages: bool) -> Counter[int]:
    """By group, where there are any."""
    found: Counter[int] = Counter()
    for block in blocks:
        for group, collectives, messages in block.groups:
            count = messages if of_messages else collectives
            if count:
                found[group] += count
    return found


def _members(counts: Mapping[int, Counter[int]]) -> dict[int, frozenset[int]]:
    """Of those ranks that are looked at."""
    found: dict[int, set[int]] = {}
    for rank, groups in counts.items():
        for group in groups:
            found.setdefault(group, set()).add(rank)
    return {group: frozenset(ranks) for group, ranks in found.items()}


def _mixed(members: Members, messages: Members, everybody: frozenset[int]) -> set[int]:
    """Groups with several stages of a pipeline among their members. messages: of which members
    each passes tensors to another."""
    pipelines: dict[int, set[int]] = {rank: set() for rank in everybody}
    for group, ranks in messages.items():
        for rank in ranks if ranks != everybody else ():
            pipelines[rank].add(group)
    found = set()
    for group, ranks in members.items():
        stages = Counter(pipeline for rank in ranks for pipeline in pipelines[rank])
        if max(stages.values(), default=0) > 1 or (ranks == everybody in messages.values()):
            found.add(group)
    return found
