"""Step sources: how the pieces come that a lost member is rebuilt from: added up by one of those
who have them (`repair_sums.py`), or each as it is.

Comes in: the steps of a decode plan (`core/redundancy/stripes.py`), in order. Goes out: a step's
sum, or all of its sources.

A sum may stay away though nobody is lost: those who have the pieces reach each other by other ways
than they reach us. When nothing has come for a while the pieces of the oldest step are asked for
beside its sum. If they are here first, whoever was to add them up is not asked any more. If the sum
is, all ways are only slow, and the next while is twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keepstep.core.redundancy.stripes import Combine, Piece, StripeRegion, Stripes
from keepstep.model.messages.peers import Addend
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB, S_NS
from keepstep.model.wire import BlockRange, Part
from keepstep.ports import Timer
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.decode import coefficients
from keepstep.runtime.replication.receive import WantedRanges
from keepstep.runtime.replication.repair_sums import RepairSums

CHUNK_BYTES = MIB  # of each source, in one step of decoding
PATIENCE_NS = 1 * S_NS
REFUSED_STEPS = 16  # perhaps its link to another one opens meanwhile

Want = Callable[[int, list[tuple[int, BlockRange]]], None]


@dataclass(eq=False)
class _WaitingSum:
    """A step whose sum has been asked of the node `adder`. `has_pieces`: its pieces have been asked
    for, too."""

    step: Combine
    adder: int
    has_pieces: bool = False


class StepSources:
    """Of one fetch."""

    def __init__(
        self,
        world: KeeperWorld,
        here: int,
        stamp: Stamp,
        stripes: Stripes,
        node_of: Mapping[int, int],
        sums: RepairSums,
        ranges: WantedRanges,
        want: Want,
        came: Callable[[], None],
    ) -> None:
        """here: this node. node_of: where each member lives. `want` asks a node for ranges, which
        come into `ranges`; `came` is called after each sum."""
        self._clock, self._timers = world.clock, world.timers
        self._here, self._stamp, self._stripes, self._node_of = here, stamp, stripes, node_of
        self._repair_sums, self._ranges = sums, ranges
        self._ask, self._came = want, came
        self._sums: dict[int, bytearray] = {}  # by a step's first byte, likewise below
        self._waiting: dict[int, _WaitingSum] = {}
        self._refusals: dict[int, int] = {}  # by node: so many of its turns are taken without it
        self._barred: set[int] = set()  # nodes whose sums take longer than the pieces
        self._patience_ns = PATIENCE_NS
        self._heard_ns = 0
        self._timer: Timer | None = None
        self._is_over = False
        self.nbytes = 0  # of sums that came

    def end(self) -> None:
        """Nothing is wanted any more."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    # -- one step

    def want(self, step: Combine) -> None:
        """Have what it takes brought."""
        adder = self._adder_of(step)
        if adder is None:
            self._want_pieces(step)
            return
        [target] = step.targets
        counts = dict(zip(step.sources, coefficients(self._stripes, step), strict=True))
        addends = [
            Addend(self._node_of[piece.member], piece.member, _range(piece), counts[piece])
            for piece in _pieces(step)
        ]
        self._waiting[target.start] = _WaitingSum(step, adder)
        self._watch()
        self._repair_sums.bring(
            adder, self._stamp, target.nbytes, addends, lambda found: self._heard(step, found)
        )

    def has(self, step: Combine) -> bool:
        """Whether its sum is here, or all of its sources are."""
        if step.targets[0].start in self._sums:
            return True
        return all(self._ranges.has(p.member, _range(p)) for p in _pieces(step))

    def take(self, step: Combine) -> bytearray | list[bytearray]:
        """Its sum, or its sources in their order."""
        start = step.targets[0].start
        if start in self._sums:
            return self._sums.pop(start)
        self._heard_ns = self._clock.monotonic_ns()
        late = self._waiting.pop(start, None)
        if late is not None:
            self._bar(late.adder)
        return [
            self._ranges.take(p.member, _range(p)) if p.nbytes else bytearray()
            for p in step.sources
        ]

    # -- who adds up

    def _adder_of(self, step: Combine) -> int | None:
        """Of those who give its sources, each in turn. None when there is nothing to gain, or that
        one is not to be asked."""
        pieces = _pieces(step)
        nodes = [self._node_of[piece.member] for piece in pieces]
        if len(set(nodes)) < 2 or self._here in nodes:
            return None
        adder = nodes[step.targets[0].start // CHUNK_BYTES % len(nodes)]
        if self._refusals.get(adder):
            self._refusals[adder] -= 1
            return None
        return None if adder in self._barred else adder

    def _want_pieces(self, step: Combine) -> None:
        for piece in _pieces(step):
            self._ask(self._node_of[piece.member], [(piece.member, _range(piece))])

    def _heard(self, step: Combine, found: bytearray | str) -> None:
        """Of a sum: it is here, or why it will not come."""
        known = self._waiting.pop(step.targets[0].start, None)
        if self._is_over or known is None:
            return  # the pieces were here first
        self._heard_ns = self._clock.monotonic_ns()
        if isinstance(found, str):
            self._refusals[known.adder] = REFUSED_STEPS
            if not known.has_pieces:
                self._want_pieces(step)
        else:
            self._sums[step.targets[0].start] = found
            self.nbytes += len(found)
            if known.has_pieces:
                self._patience_ns *= 2
                for piece in _pieces(step):
                    self._ranges.give_up(piece.member, _range(piece))
        self._came()

    # -- sums that stay away

    def _watch(self) -> None:
        if self._timer is None:
            self._heard_ns = self._clock.monotonic_ns()
            self._timer = self._timers.after(self._patience_ns, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._is_over or not self._waiting:
            return
        quiet_ns = self._clock.monotonic_ns() - self._heard_ns
        if quiet_ns >= self._patience_ns:
            self._want_beside(next(iter(self._waiting.values())))
            quiet_ns = 0
        self._timer = self._timers.after(self._patience_ns - quiet_ns, self._look)

    def _want_beside(self, waiting: _WaitingSum) -> None:
        if not waiting.has_pieces:
            waiting.has_pieces = True
            self._want_pieces(waiting.step)

    def _bar(self, adder: int) -> None:
        self._barred.add(adder)
        for waiting in list(self._waiting.values()):
            if waiting.adder == adder:
                self._want_beside(waiting)


def _pieces(step: Combine) -> list[Piece]:
    """Its sources that are not empty."""
    return [piece for piece in step.sources if piece.nbytes]


def _range(piece: Piece) -> BlockRange:
    part = Part.KEPT if piece.region is StripeRegion.DATA else Part.PARITY
    return BlockRange(part, piece.start, piece.nbytes)
