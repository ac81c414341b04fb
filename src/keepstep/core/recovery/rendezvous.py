"""Rendezvous: which agent's node gets which number in an attempt.

Comes in: the arrivals of a full attempt, in their order. Goes out: the node of each. Every agent
computes it for itself, from the same arrivals, so there is nobody to ask and nobody to wait for.

Invariant: the nodes are 0..N-1, each once; an arrival that was a node in the attempt before is the
same node again, so that its memory's place in the job stays, and a newcomer takes the number of the
node that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.model.attempts import Arrival
from keepstep.model.mesh import Member


def present(arrivals: Sequence[Arrival | None]) -> list[int]:
    """The places of an attempt that nodes have taken: all of them, unless it was closed with
    fewer."""
    return [
        place
        for place, arrival in enumerate(arrivals)
        if arrival is not None and not arrival.is_vacant
    ]


def has_seat(arrivals: Sequence[Arrival | None], host: str, port: int, incarnation: int) -> bool:
    """Whether the node of this keeper has a seat, though its agent has taken none: an agent that
    was killed has. Nobody will speak for that one, and since its keeper lives no link is lost
    either."""
    return any(
        a is not None and (a.host, a.port, a.incarnation) == (host, port, incarnation)
        for a in arrivals
    )


def assign(arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """The node of each arrival: former numbers first, then those asked for, then whatever is vacant
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
    """The nodes of the attempt, in order."""
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
    """Who says nothing new for so long that it counts as gone. Judged by one clock, that of the
    listener."""

    limit_ns: int
    _last: dict[int, tuple[str | None, int]] = field(default_factory=dict)

    def gone(self, texts: Mapping[int, str | None], now_ns: int) -> list[int]:
        """Of those that are listened to now, by what each said last; who was not listened to before
        begins anew."""
        before, self._last = self._last, {}
        for who, text in texts.items():
            old, since_ns = before.get(who, (text, now_ns))
            self._last[who] = text, (since_ns if text == old else now_ns)
        limit_ns = self.limit_ns
        return [who for who, (_, since_ns) in self._last.items() if now_ns - since_ns >= limit_ns]


def mesh_version(attempt: int, first_version: int, arrivals: Sequence[Arrival]) -> int:
    """Of the attempt's mesh. It grows from one start of the job to the next, whatever the clocks
    say, because a keeper that saw the last start does not listen to an older mesh. `first_version`
    is the time when the nodes first met, in milliseconds."""
    return max(first_version + attempt, *(a.newest_version + 1 for a in arrivals))


def disagreement(mine: Arrival, other: Arrival) -> str | None:
    """Why these two cannot be in one attempt; None when they can."""
    if mine.nodes != other.nodes:
        return f"--nnodes: expected {other.nodes}, as on {other.host}, found {mine.nodes}"
    if mine.min_nodes != other.min_nodes:
        least = [f"{a.min_nodes}:{a.nodes}" for a in (other, mine)]
        return f"--nnodes: expected {least[0]}, as on {other.host}, found {least[1]}"
    if mine.redundancy and other.redundancy and mine.redundancy != other.redundancy:
        return (
            f"redundancy: expected {other.redundancy}, as on {other.host}, found "
            f"{mine.redundancy}: one of them decides for all, so set the same on every node"
        )
    if (mine.rack is None) != (other.rack is None):
        return (
            f"rack: expected a rack for all nodes or for none, found {mine.rack} here and "
            f"{other.rack} on {other.host}"
        )
    return None
