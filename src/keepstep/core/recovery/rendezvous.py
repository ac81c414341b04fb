"""Rounds: which node is whose.

Comes in: the arrivals of a full round, in their order. Goes out: the id of each. It is computed by
every agent for itself, from the same arrivals, so there is nobody to ask and nobody to wait for.

Invariant: the ids are 0..N-1, each once; an arrival that was a node in the round before is the same
node again, so that its memory's place in the job stays, and a newcomer takes the id of the node
that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.model.mesh import Member
from keepstep.model.rounds import Arrival


def present(arrivals: Sequence[Arrival | None]) -> list[int]:
    """The places of a round that nodes have taken: all of them, unless it was closed with fewer."""
    return [
        place
        for place, arrival in enumerate(arrivals)
        if arrival is not None and not arrival.is_nobody
    ]


def sat_there(arrivals: Sequence[Arrival | None], host: str, port: int, incarnation: int) -> bool:
    """Whether the node of this keeper has a seat already, to an agent that has not come to any: one
    of its own that was killed. Nobody will speak for it, and since its keeper lives no link is lost
    either."""
    return any(
        a is not None and (a.host, a.port, a.incarnation) == (host, port, incarnation)
        for a in arrivals
    )


def assign(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """The node id of each arrival: former ids first, then those asked for, then whatever is vacant
    in order of arrival."""
    ids: dict[int, int] = {}  # arrival -> node

    def claim(at: int, node: int | None) -> None:
        if (
            at not in ids
            and node is not None
            and 0 <= node < len(arrivals)
            and node not in ids.values()
        ):
            ids[at] = node

    for at, arrival in enumerate(arrivals):
        claim(at, arrival.node)
    for at, arrival in enumerate(arrivals):
        claim(at, arrival.node_rank)
    vacant = iter(sorted(set(range(len(arrivals))) - set(ids.values())))
    return tuple(ids[at] if at in ids else next(vacant) for at in range(len(arrivals)))


def members_of(arrivals: Sequence[Arrival]) -> tuple[Member, ...]:
    """The nodes of the round, by id."""
    ids = assign(arrivals)
    members = [
        Member(node, a.host, a.port, a.incarnation, a.ranks, a.rack)
        for node, a in zip(ids, arrivals, strict=True)
    ]
    return tuple(sorted(members, key=lambda m: m.node))


def missing(arrivals: Sequence[Arrival], ready: Sequence[bool]) -> str:
    """The nodes that came and have not answered to their place, in words."""
    late = [
        f"node {node} on {a.host}"
        for node, a, answered in zip(assign(arrivals), arrivals, ready, strict=True)
        if not answered
    ]
    return " and ".join(late)


@dataclass
class Silence:
    """Who says nothing new for so long that it counts as gone. Judged by one clock, that of the one
    who listens."""

    limit_ns: int
    _heard: dict[int, tuple[str | None, int]] = field(default_factory=dict)

    def gone(self, said: Mapping[int, str | None], now_ns: int) -> list[int]:
        """Of those that are listened to now, by what each last said; whoever was not listened to
        before begins anew."""
        before, self._heard = self._heard, {}
        for who, word in said.items():
            old, since_ns = before.get(who, (word, now_ns))
            self._heard[who] = word, (since_ns if word == old else now_ns)
        return [
            who for who, (_, since_ns) in self._heard.items() if now_ns - since_ns >= self.limit_ns
        ]


def keepers_round(number: int, first: int, arrivals: Sequence[Arrival]) -> int:
    """The round's number for the keepers: it grows from one start of the job to the next, whatever
    the clocks say, because a keeper that saw the last start does not listen to a round before it.
    `first` is the time when the nodes first met, in any unit."""
    return max(first + number, *(a.newest_round + 1 for a in arrivals))


def disagreement(mine: Arrival, other: Arrival) -> str | None:
    """Why these two cannot be in one round; None when they can."""
    if mine.nodes != other.nodes:
        return f"--nnodes: expected {other.nodes}, as on {other.host}, found {mine.nodes}"
    if mine.least_nodes != other.least_nodes:
        least = [f"{a.least_nodes}:{a.nodes}" for a in (other, mine)]
        return f"--nnodes: expected {least[0]}, as on {other.host}, found {least[1]}"
    if mine.own_secret != other.own_secret:
        words = {True: "one", False: "none"}
        return (
            f"secret: expected {words[other.own_secret]}, as on {other.host}, found "
            f"{words[mine.own_secret]}"
        )
    if (mine.rack is None) != (other.rack is None):
        return (
            f"rack: expected a rack for all nodes or for none, found {mine.rack} here and "
            f"{other.rack} on {other.host}"
        )
    return None
