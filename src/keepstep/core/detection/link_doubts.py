"""Link doubts: why nobody can tell of some link whether it is slow, told once and without flapping.

Comes in: what the links' judge knows by now (`links.py`), who has sent a sample when, whether the
judge still sees. Goes out: each reason when it begins and when it is over. That no link is called
slow says something only where none of these holds.

Invariant: a mesh of several nodes begins as unknown, and is known only when that has been told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from keepstep.core.detection.links import LEAST_PAST, LONG, Direction, SlowLinks
from keepstep.model.units import S_NS, counted, first_names, human_ns

# SAMPLES: some node has told nothing of what it sends. LEARNING: too little is known of the past.
# NOISE: the past varies too much. UNHEARD: a node that has told tells no longer. BLIND: the judge
# does not see a slow link that is planted.
LinkDoubt = Literal["samples", "learning", "noise", "unheard", "blind"]

SETTLED_NS = 20 * S_NS  # so long a doubt lasts before it is told, and is gone before that is told
AT_ONCE: Collection[LinkDoubt] = ("unheard", "blind")  # these have lasted already
SILENT_NS = 20 * S_NS
SILENT_GAPS = 4  # times the longest of a node's last pauses
GAPS = 8

KNOWN: dict[LinkDoubt, str] = {
    "samples": "of all nodes it is measured how fast their copies go",
    "learning": "enough is known of how fast copies went on all links",
    "noise": "how fast copies go varies little enough on all links",
    "unheard": "all nodes tell again how fast their copies go",
    "blind": "what judges the links sees a slow one again",
}


@dataclass(frozen=True, slots=True)
class LinksUnknown:
    """Nobody can tell of some link whether it is slow. is_trouble: it neither passes by
    itself nor is so by what was asked for."""

    doubt: LinkDoubt
    why: str
    is_trouble: bool


@dataclass(frozen=True, slots=True)
class LinksKnown:
    """That reason is over."""

    doubt: LinkDoubt
    why: str


class _Sender:
    """When a node told of what it sends."""

    def __init__(self, now_ns: int) -> None:
        self.told_ns = now_ns
        self._gaps: deque[int] = deque(maxlen=GAPS)

    def tell(self, now_ns: int) -> None:
        self._gaps.append(now_ns - self.told_ns)
        self.told_ns = now_ns

    def is_silent(self, now_ns: int) -> bool:
        limit_ns = max(SILENT_NS, SILENT_GAPS * max(self._gaps, default=0))
        return now_ns - self.told_ns > limit_ns


class LinkDoubts:
    """Of one mesh of so many nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._senders: dict[int, _Sender] = {}
        self._noisy: set[Direction] = set()
        self._since: dict[LinkDoubt, int] = {}  # found, and not told yet
        self._told: set[LinkDoubt] = set()
        self._gone: dict[LinkDoubt, int] = {}  # told, and not found since

    def hear(self, sender: int, now_ns: int) -> None:
        """It has told a sample."""
        if sender in self._senders:
            self._senders[sender].tell(now_ns)
        else:
            self._senders[sender] = _Sender(now_ns)

    def news(self, links: SlowLinks, flaw: str, now_ns: int) -> list[LinksUnknown | LinksKnown]:
        """What has come or gone. flaw: why the judge is not to be believed, empty: it is."""
        if self._nodes < 2:
            return []
        found = self._found(links, flaw, now_ns)
        told: list[LinksUnknown | LinksKnown] = []
        for doubt, why in found.items():
            self._gone.pop(doubt, None)
            since_ns = self._since.setdefault(doubt, now_ns)
            lasts = doubt in AT_ONCE or now_ns - since_ns >= SETTLED_NS
            if lasts and doubt not in self._told:
                self._told.add(doubt)
                told.append(LinksUnknown(doubt, why, self._is_trouble(doubt, now_ns)))
        self._since = {doubt: ns for doubt, ns in self._since.items() if doubt in found}
        for doubt in sorted(self._told - found.keys()):
            if now_ns - self._gone.setdefault(doubt, now_ns) >= SETTLED_NS:
                self._told.remove(doubt)
                del self._gone[doubt]
                told.append(LinksKnown(doubt, KNOWN[doubt]))
        return told

    def _is_trouble(self, doubt: LinkDoubt, now_ns: int) -> bool:
        """Where no node tells anything, none copies: an evaluation, or the end of the training."""
        if doubt == "unheard":
            return not all(sender.is_silent(now_ns) for sender in self._senders.values())
        return doubt in ("noise", "blind")

    def _found(self, links: SlowLinks, flaw: str, now_ns: int) -> dict[LinkDoubt, str]:
        found: dict[LinkDoubt, str] = {}
        if missing := [node for node in range(self._nodes) if node not in self._senders]:
            found["samples"] = f"nothing was measured of what {_nodes(missing)} sent; {LITTLE}"
        if learning := links.learning():
            found["learning"] = (
                f"of {len(learning)} of {counted(links.count, 'direction')} too little is known: "
                f"{min(learning.values())} of {LEAST_PAST + LONG} samples"
            )
        noises = links.noisy(self._noisy)
        self._noisy = set(noises)
        if noises:
            sender, receiver = worst = max(noises, key=lambda cell: noises[cell])
            found["noise"] = (
                f"{len(noises)} of {counted(links.count, 'direction')} varied too much to be "
                f"judged, that from node {sender} to node {receiver} by {noises[worst]:.0%}"
            )
        silent = [node for node, one in self._senders.items() if one.is_silent(now_ns)]
        if silent:
            latest_ns = max(self._senders[node].told_ns for node in silent)
            found["unheard"] = (
                f"for {human_ns(now_ns - latest_ns)} {_nodes(silent)} told nothing of what they "
                "send: no copies go, or the keeper there is stopped"
            )
        if flaw:
            found["blind"] = flaw
        return found


LITTLE = "copies of less than a MiB, or none, cross no link for long enough"


def _nodes(nodes: Collection[int]) -> str:
    names = first_names([str(node) for node in sorted(nodes)])
    return f"node{'s' * (len(nodes) > 1)} {names}"
