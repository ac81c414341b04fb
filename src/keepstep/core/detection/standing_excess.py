"""Standing excess: how much more a rank needs than those that do the same, where it always has.

Comes in: what each rank needed in the middle of many blocks, by channel (`stragglers.py`), and who
does the same (`work_peers.py`). Goes out: ratios in log space, as those that are watched later:
beside its peers, which may say that it is slow; and of these beside all others, which is what the
rank's own ratio will be when it is no longer slow.

Invariant: who has no peers is compared with nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import NamedTuple

from keepstep.core.detection.leave_one_out import OthersMedian

Needs = Mapping[str, Mapping[int, float]]  # by channel, by rank, nanoseconds a step


class BesidePeers(NamedTuple):
    """peers: of the rank beside its peers. peers_beside_all: of these beside all others."""

    peers: float
    peers_beside_all: float


class StandingExcess:
    """Of ranks of which one is asked for after another."""

    def __init__(
        self, needs_ns: Needs, free_ns: Mapping[int, float], peers: Mapping[int, frozenset[int]]
    ) -> None:
        """free_ns: of a whole step. peers: by rank, with itself; only of ranks that have some."""
        self._needs_ns, self._free_ns = needs_ns, free_ns
        self._all = frozenset(free_ns)
        known = {rank: some & self._all for rank, some in peers.items()}
        self._peers = {rank: some for rank, some in known.items() if len(some) > 1}
        self._medians: dict[tuple[str, frozenset[int]], OthersMedian] = {}

    @property
    def names(self) -> list[str]:
        """Of the channels."""
        return list(self._needs_ns)

    def beside(self, rank: int, name: str, is_whole: bool) -> BesidePeers | None:
        """is_whole: the channel is of all sections together. None: it has no peers, or they do
        nothing."""
        ranks = self._peers.get(rank)
        if ranks is None or rank not in self._free_ns:
            return None
        usual = self._others(name, ranks).of(rank)
        of_all = self._others(name, self._all).of(rank)
        whole = usual if is_whole else self._others("", ranks).of(rank)
        whole_of_all = of_all if is_whole else self._others("", self._all).of(rank)
        if min(whole, whole_of_all) <= 0:
            return None
        own = self._needs_ns[name][rank]
        return BesidePeers(beyond(own, usual, whole), beyond(usual, of_all, whole_of_all))

    def _others(self, name: str, ranks: frozenset[int]) -> OthersMedian:
        """name: of a channel; "": of the whole step."""
        if (name, ranks) not in self._medians:
            by_rank = self._needs_ns[name] if name else self._free_ns
            self._medians[name, ranks] = OthersMedian(by_rank, ranks)
        return self._medians[name, ranks]


def beyond(own: float, others: float, of_step: float) -> float:
    """How much longer the whole takes if this part takes its own time, as a logarithm."""
    return log(max(0.05, 1 + (own - others) / of_step))
