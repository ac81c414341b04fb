"""Damage: whether what comes from a node is again and again not as it was sent.

Nothing damaged is ever believed, but copies are late then, or do not come at all. Comes in: by
node, how often that was seen until now. Goes out: who is worth a word, once a minute at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keepstep.model.units import S_NS, human_ns

# So much within so long is no chance: TCP's checksum lets one in some ten million damages pass.
WINDOW_NS = 60 * S_NS
LEAST_COUNT = 10  # a block whose source changes is tried several times


@dataclass(frozen=True)
class LinkDamage:
    """`count`: of messages and blocks within the window."""

    node: int
    count: int

    @property
    def why(self) -> str:
        return (
            f"{self.count} messages and blocks from node {self.node} were not as they were sent, "
            f"in {human_ns(WINDOW_NS)}: none is believed, copies are late; look at the NIC, the "
            f"cable, the switch, and what else stands between here and node {self.node}"
        )


class LinkDamages:
    """Of all that one node hears from."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, int]]] = {}  # by node: when, and how often by then
        self._told_ns: dict[int, int] = {}

    def news(self, counts: Mapping[int, int], now_ns: int) -> Iterator[LinkDamage]:
        """counts: by node, how often until now."""
        for node, count in counts.items():
            seen = self._seen.setdefault(node, deque())
            seen.append((now_ns, count))
            while seen[0][0] < now_ns - WINDOW_NS:
                seen.popleft()
            grown = count - seen[0][1]
            is_new = now_ns - self._told_ns.get(node, -WINDOW_NS) >= WINDOW_NS
            if grown >= LEAST_COUNT and is_new:
                self._told_ns[node] = now_ns
                yield LinkDamage(node, grown)
