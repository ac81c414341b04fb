"""Links: which sender, receiver, link or switch moves copies more slowly than it did.

Comes in: for one direction of two nodes after the other, how fast the kernel got rid of the copies'
bytes while there were any. Goes out: who is slow and since which, once, and when that is over.

A cell of the matrix (sender, receiver) is compared with its own past, in log space: the median of
its last seven samples, and of its last 21, with the median of those before. It is slow when that is
10 % lower and six times what chance would make of it (by the median absolute deviation of its past,
or the mesh's usual one where that is larger). Its past takes in nothing while it is slow, so a cell
does not get used to it.

Then the fewest causes that explain the slow cells, the widest first:

* all cells, from two senders to two receivers at least: the switch, or what all have in common; all
  between two racks and none within: the switch between racks;
* all cells of a node's row: it sends slowly; of its column: it receives slowly; both: the node;
* one cell while others of its row and of its column are well: the link between the two.

The greatest first: copies that take longer meet others that they did not meet before, and slow
those down a little. So a cell that shares a node with one twice as slow as itself, in log space,
counts as well until that one is over; and what touches a node that is named belongs to it.

Where a row or a column has no other cell that is known to be well (each node has one holder, say),
nobody can tell the end from the link, and that is said. A cell between well and slow, or whose past
varies by more than a third, is neither.

Beside the speed stand what was sent again (loss), and for how long the receiver had no room (its
process reads slowly: no fault of the network).

Source: rows, columns and cells of a delay matrix, as in C4D (HPCA 2025).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from statistics import median

from keepstep.model.links import LinkSample
from keepstep.model.units import S_NS, human_bytes

Direction = tuple[int, int]  # sender, receiver
Cause = tuple["LinkSide", tuple[int, ...]]  # which nodes
Explained = tuple["LinkSide", tuple[int, ...], tuple[Direction, ...]]
SHORT, LONG = 7, 21
PAST = 60
LEAST_PAST = 30
LEAST_LOSS = 0.1  # of its speed
DEVIATIONS = 6
# by window: the deviation of the difference between its median and one of thirty, in deviations of
# one sample
WINDOWS = {SHORT: 0.53, LONG: 0.36}
OPEN_RATIO = 0.5  # of the limit: above it a cell is neither slow nor well
LEAST_NOISE = 0.02
MOST_NOISE = 1 / 3
QUIET_RATIO = 0.9  # of it: what was too noisy is judged again below, for those who tell of it
ALL_RATIO = 0.8  # of the cells: what counts as all of them where chance hides some
SETTLED = SHORT  # looks: as long as the windows turn
LESSER_RATIO = 0.5  # of the lag of another one, that may be what slows a cell down
RESENT_RATIO = 0.005
READER_RATIO = 0.5


class LinkSide(Enum):
    """What is slow, for a sentence."""

    SENDER = "sends"
    RECEIVER = "receives"
    NODE = "sends and receives"
    LINK = "link"
    SWITCH = "switch"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class SlowLink:
    """`nodes`: the one, the two ends of a link, or all that a switch connects. `ratio`: how many
    times slower, in the median. `cells`: those that say so. `slowest`: of these, and how fast it is
    now and was before. `fix`: what is cheapest to do."""

    side: LinkSide
    nodes: tuple[int, ...]
    ratio: float
    cells: tuple[Direction, ...]
    cause: str
    why: str
    fix: str
    slowest: Direction
    bytes_per_s: float
    usual_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SlowLinkOver:
    """`slow` is no more."""

    slow: SlowLink
    why: str


class _Cell:
    """One direction between two nodes: log bytes a second, and what stood beside."""

    def __init__(self) -> None:
        self.recent: deque[LinkSample] = deque(maxlen=LONG)
        self.past: deque[float] = deque(maxlen=PAST)
        self.is_well = self.is_slow = False
        self._unlearnt = 0  # so many samples are no part of its past
        self.noise: float | None = None  # of its past
        self.behind: dict[int, float] = {}  # by window: how much slower it is than it was

    def add(self, sample: LinkSample) -> None:
        if self.is_slow:
            self._unlearnt = LONG  # all that is in its windows now
        if len(self.recent) == LONG:
            if self._unlearnt:
                self._unlearnt -= 1
            else:
                self.past.append(_speed(self.recent[0]))
        self.recent.append(sample)
        usual = self.usual()
        if usual is not None and len(self.recent) == LONG:
            spread = median(abs(each - usual) for each in self.past)
            self.noise = max(LEAST_NOISE, 1.4826 * spread)
            speeds = [_speed(each) for each in self.recent]
            self.behind = {window: usual - median(speeds[-window:]) for window in WINDOWS}

    def judge(self, usual_noise: float) -> None:
        """`usual_noise`: of the mesh's cells. What one cell's short past says of its noise is
        itself left to chance."""
        if self.noise is None:
            return
        noise = max(self.noise, usual_noise)
        least = -math.log1p(-LEAST_LOSS)
        shares = {
            window: self.behind[window] / max(least, DEVIATIONS * deviation * noise)
            for window, deviation in WINDOWS.items()
        }
        is_judged, most = noise <= MOST_NOISE, max(shares.values())
        # the long window still tells of what the short one knows to be over
        self.is_slow = is_judged and most >= 1 and shares[SHORT] >= OPEN_RATIO
        self.is_well = is_judged and most < OPEN_RATIO

    @property
    def lag(self) -> float:
        """By how much it is slower now, in log space."""
        return max(self.behind.values(), default=0.0)

    def usual(self) -> float | None:
        return median(self.past) if len(self.past) >= LEAST_PAST else None


class SlowLinks:
    """Of one mesh. `racks`: of each node, None where nobody has said."""

    def __init__(self, racks: Sequence[str | None]) -> None:
        self._racks = racks
        self._cells: dict[Direction, _Cell] = {}
        self._told: dict[Cause, SlowLink] = {}
        self._looks: dict[Cause, int] = {}  # for how many it has been other than told

    def add(self, sender: int, receiver: int, sample: LinkSample) -> None:
        """One more of that direction. `news` makes something of it."""
        self._cells.setdefault((sender, receiver), _Cell()).add(sample)

    def news(self) -> list[SlowLink | SlowLinkOver]:
        """Look at all samples: what has come or gone, and stayed so for `SETTLED` looks. Cells
        become slow one after the other, and well again: in between they look like another fault.
        Who is slow in another way than was told is told anew."""
        noises = [known.noise for known in self._cells.values() if known.noise is not None]
        for known in self._cells.values():
            known.judge(median(noises) if noises else 0.0)
        slow = {cell for cell, known in self._cells.items() if known.is_slow}
        well = {cell for cell, known in self._cells.items() if known.is_well}
        causes = explain(self._greatest(slow), slow | well, self._racks)
        found = {(side, nodes): cells for side, nodes, cells in causes}
        settled = self._settled(found)
        told: list[SlowLink | SlowLinkOver] = []
        for what in [known for known in self._told if known in settled]:
            before = self._told.pop(what)
            still = [cell for cell in before.cells if cell in slow]
            why = "it is as fast as before" if not still else "what is slow is another now"
            told.append(SlowLinkOver(before, f"{_who(before.side, before.nodes)}: {why}"))
        for what in [cause for cause in found if cause in settled]:
            self._told[what] = verdict = self._describe(*what, found[what])
            told.append(verdict)
        return told

    def _settled(self, found: Collection[Cause]) -> set[Cause]:
        """Those that are found and were not told, or the other way round, and have been that for
        long enough."""
        others = set(found) ^ set(self._told)
        for what in others | set(self._looks):
            self._looks[what] = self._looks.get(what, 0) + (1 if what in others else -1)
        settled = {what for what, looks in self._looks.items() if looks >= SETTLED}
        self._looks = {what: n for what, n in self._looks.items() if 0 < n < SETTLED}
        return settled

    @property
    def slow(self) -> list[SlowLink]:
        """What is slow now."""
        return list(self._told.values())

    @property
    def count(self) -> int:
        """Of the directions that have samples."""
        return len(self._cells)

    @property
    def well(self) -> list[Direction]:
        """What is as fast as it was, in the order of nodes."""
        return sorted(cell for cell, known in self._cells.items() if known.is_well)

    def learning(self) -> dict[Direction, int]:
        """Of whose past too little is known to judge them, and how many samples there are."""
        return {
            cell: len(known.past) + len(known.recent)
            for cell, known in self._cells.items()
            if known.noise is None
        }

    def noisy(self, before: Collection[Direction] = ()) -> dict[Direction, float]:
        """Whose past varies too much to judge them, and by how much. before: those that were it at
        the last look, and are until they are clearly quieter."""
        return {
            cell: known.noise
            for cell, known in self._cells.items()
            if known.noise is not None
            and known.noise > MOST_NOISE * (QUIET_RATIO if cell in before else 1)
        }

    def usual_bytes_per_s(self, cell: Direction) -> float:
        """What it did in its past."""
        return math.exp(self._cells[cell].usual() or 0.0)

    def copy_of(self, cells: Collection[Direction]) -> SlowLinks:
        """A judge that knows of these directions what this one does, and has told nothing."""
        made = SlowLinks(self._racks)
        made._cells = {cell: deepcopy(self._cells[cell]) for cell in cells}
        return made

    def _greatest(self, slow: Collection[Direction]) -> set[Direction]:
        """Without those that are only as slow as others may have made them."""
        most: dict[int, float] = {}  # by node
        for cell in slow:
            for node in cell:
                most[node] = max(most.get(node, 0.0), self._cells[cell].lag)
        return {
            cell
            for cell in slow
            if self._cells[cell].lag > LESSER_RATIO * max(most[node] for node in cell)
        }

    def _describe(
        self, side: LinkSide, nodes: tuple[int, ...], cells: tuple[Direction, ...]
    ) -> SlowLink:
        known = [self._cells[cell] for cell in cells]
        ratio = math.exp(median(cell.lag for cell in known))
        samples = [sample for cell in known for sample in list(cell.recent)[-SHORT:]]
        cause, said, fix = _cause(samples)
        slowest = max(cells, key=lambda cell: self._cells[cell].lag)
        now = math.exp(median(map(_speed, list(self._cells[slowest].recent)[-SHORT:])))
        usual = self.usual_bytes_per_s(slowest)
        why = (
            f"{_who(side, nodes)}: copies move {ratio:.1f} times slower than before in "
            f"{len(cells)} of {len(self._cells)} directions ({human_bytes(round(now))}/s, and "
            f"{human_bytes(round(usual))}/s before, from node {slowest[0]}); {said}"
        )
        return SlowLink(side, nodes, ratio, cells, cause, why, fix, slowest, now, usual)


def explain(
    slow: Collection[Direction], judged: Collection[Direction], racks: Sequence[str | None]
) -> list[Explained]:
    """The fewest causes of the slow cells among those that can be judged, the widest first."""
    left = set(slow)
    if not left:
        return []
    if _is_everywhere(left, judged):
        nodes = {node for cell in left for node in cell}
        return [(LinkSide.SWITCH, tuple(sorted(nodes)), tuple(sorted(left)))]
    if (between := _between_racks(left, judged, racks)) is not None:
        return [between]
    found: dict[int, tuple[LinkSide, set[Direction]]] = {}
    while (widest := _widest(left, slow, judged)) is not None:
        side, node, cells = widest
        left -= cells
        if node in found:  # by its row and by its column
            side, cells = LinkSide.NODE, cells | found[node][1]
        found[node] = side, cells
    for cell in sorted(left):
        named = [node for node in cell if node in found]
        if named:  # what such a node acknowledges waits with what it sends, and the other way round
            found[named[0]][1].add(cell)
            left.discard(cell)
    verdicts: list[Explained] = [
        (side, (node,), tuple(sorted(cells))) for node, (side, cells) in sorted(found.items())
    ]
    pairs: dict[tuple[int, ...], set[Direction]] = {}
    for cell in left:
        pairs.setdefault(tuple(sorted(cell)), set()).add(cell)
    for ends, ways in sorted(pairs.items()):
        is_link = all(_has_well_ones(cell, slow, judged) for cell in ways)
        side = LinkSide.LINK if is_link else LinkSide.UNCLEAR
        verdicts.append((side, ends, tuple(sorted(ways))))
    return verdicts


def _is_everywhere(slow: Collection[Direction], judged: Collection[Direction]) -> bool:
    """Whether nearly all are slow, of all senders and receivers, and no one node explains it."""
    senders, receivers = {a for a, _ in judged}, {b for _, b in judged}
    if len(slow) < ALL_RATIO * len(judged) or min(len(senders), len(receivers)) < 2:
        return False
    if {a for a, _ in slow} != senders or {b for _, b in slow} != receivers:
        return False
    return not any(all(node in cell for cell in slow) for node in senders | receivers)


def _between_racks(
    slow: Collection[Direction], judged: Collection[Direction], racks: Sequence[str | None]
) -> Explained | None:
    """The switch between racks, where nothing within one is slow and nearly all between are."""
    names = {rack for rack in racks if rack is not None}
    across = {(a, b) for a, b in judged if max(a, b) < len(racks) and racks[a] != racks[b]}
    if len(names) < 2 or not set(slow) <= across or not set(judged) - across:
        return None
    if len(slow) < ALL_RATIO * len(across) or len({a for a, _ in slow}) < 2:
        return None
    if any(all(node in cell for cell in slow) for node in {a for cell in slow for a in cell}):
        return None
    nodes = tuple(sorted({node for cell in slow for node in cell}))
    return LinkSide.SWITCH, nodes, tuple(sorted(slow))


def _widest(
    left: set[Direction], slow: Collection[Direction], judged: Collection[Direction]
) -> tuple[LinkSide, int, set[Direction]] | None:
    """The row or column, nearly all of it slow, that explains most of what is left, and two cells
    at least."""
    best: tuple[LinkSide, int, set[Direction]] | None = None
    for side, place in ((LinkSide.SENDER, 0), (LinkSide.RECEIVER, 1)):
        for node in sorted({cell[place] for cell in left}):
            line = [cell for cell in judged if cell[place] == node]
            share = sum(cell in slow for cell in line) / len(line)
            mine = {cell for cell in left if cell[place] == node}
            if len(mine) >= 2 and share >= ALL_RATIO and (best is None or len(mine) > len(best[2])):
                best = side, node, mine
    return best


def _has_well_ones(
    cell: Direction, slow: Collection[Direction], judged: Collection[Direction]
) -> bool:
    """Whether another cell of its row is well, and another one of its column."""
    well = [other for other in judged if other not in slow]
    return any(a == cell[0] for a, _ in well) and any(b == cell[1] for _, b in well)


def _cause(samples: Sequence[LinkSample]) -> tuple[str, str, str]:
    """A word for tools, a clause, and what is cheapest to do."""
    sent = sum(sample.sent_bytes for sample in samples) or 1
    busy = sum(sample.busy_ns for sample in samples) or 1
    resent = sum(sample.resent_bytes for sample in samples) / sent
    reader = sum(sample.reader_ns for sample in samples) / busy
    if resent >= RESENT_RATIO:
        said = f"{resent:.1%} of the bytes had to be sent again"
        return "loss", said, "look at cable, optic and switch port (ethtool -S, dmesg)"
    if reader >= READER_RATIO:
        said = f"the receiver had no room in {reader:.0%} of the time"
        return "reader", said, "look at what takes the receiver's processors: not the network"
    said = "nothing was lost on the way"
    return "speed", said, "keepstep preflight with these nodes measures every pair"


def _who(side: LinkSide, nodes: tuple[int, ...]) -> str:
    match side:
        case LinkSide.LINK:
            return f"the link between nodes {nodes[0]} and {nodes[1]} is slow"
        case LinkSide.SWITCH:
            return f"the network between nodes {', '.join(map(str, nodes))} is slow"
        case LinkSide.UNCLEAR:
            return (
                f"node {nodes[0]}, node {nodes[1]} or the link between them is slow, which nobody "
                "can tell without another partner"
            )
        case _:
            return f"node {nodes[0]} {side.value} slowly"


def _speed(sample: LinkSample) -> float:
    return math.log(max(1.0, sample.nbytes * S_NS / max(1, sample.busy_ns)))
