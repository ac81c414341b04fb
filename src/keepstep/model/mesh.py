"""Mesh: the nodes of a job, for one attempt of its ranks: who they are, where their keepers listen,
which ranks live where.

Values only. An agent (or, under a foreign launcher, the sessions) makes one and hands it to each
keeper. Every attempt has a mesh of a higher version, so that whatever is still on its way from the
attempt before can be told from what counts. Versions begin at the time, in milliseconds since 1970,
so that they grow from one start of a job to the next, too.

Invariant: nodes are 0..N-1, and their ranks are 0..world_size-1 without gaps, in the order of the
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from keepstep.errors import ConfigError
from keepstep.model.bounds import MAX_WORLD_SIZE, Count, HostName, Port, Range, Rank, Text
from keepstep.model.topology import Topology, topology

# the node whose keeper leads the vote and the commit; with a new mesh whoever is node 0 then
LEADER = 0
MAX_RANKS_A_NODE = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """One node. `incarnation` is its keeper's life: a later one supersedes an earlier."""

    node: Rank
    host: HostName
    port: Port
    incarnation: Count
    ranks: Annotated[int, Range(0, MAX_RANKS_A_NODE)]
    rack: Text | None = None


@dataclass(frozen=True)
class Mesh:
    """All nodes as one of them, `node`, sees them. `secret`: what their keepers prove they know;
    `encrypt`: they do with all that they send each other."""

    version: Count
    node: Rank
    members: tuple[Member, ...]
    secret: Text
    encrypt: bool = False

    def __post_init__(self) -> None:
        ids = [m.node for m in self.members]
        if ids != list(range(len(ids))) or not 0 <= self.node < len(ids):
            raise ConfigError(
                "mesh: expected nodes 0 to N-1 in order and this one among them, found "
                f"{ids} and {self.node}"
            )
        if self.world_size > MAX_WORLD_SIZE:
            raise ConfigError(
                f"mesh: expected at most {MAX_WORLD_SIZE} ranks, found {self.world_size}"
            )
        if any(m.ranks < 1 for m in self.members):
            raise ConfigError(
                f"mesh: expected at least one rank a node, found {[m.ranks for m in self.members]}"
            )

    @cached_property
    def world_size(self) -> int:
        return sum(m.ranks for m in self.members)

    @cached_property
    def topology(self) -> Topology:
        racks = [m.rack for m in self.members]
        return topology(len(racks), None if None in racks else [str(r) for r in racks])

    def ranks_of(self, node: int) -> range:
        return range(self._first_ranks[node], self._first_ranks[node + 1])

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """Of each node, and of one behind the last."""
        return tuple(accumulate((m.ranks for m in self.members), initial=0))

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """The node of each rank."""
        return {rank: m.node for m in self.members for rank in self.ranks_of(m.node)}

    @property
    def leads(self) -> bool:
        return self.node == LEADER
