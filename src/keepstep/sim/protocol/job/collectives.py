"""Collectives: what ranks that train together do with each other, and their groups as
`ports.Groups`.

A collective is over when all ranks of the attempt have entered it, and their machines reach each
other. When a rank hears that a peer is lost its own end at once, with nothing in them; the others
wait until they hear it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.edge.shm.collective_profile_page import CollectiveProfileWriter
from keepstep.model.device import DeviceAnswer
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.units import MS_NS
from keepstep.ports import Clock, Memory
from keepstep.sim.protocol.wire.network import Network
from keepstep.sim.protocol.world.world import Process, World

LOOK_NS = 10 * MS_NS
INTERFACE = "sim0"  # of every machine

Combine = Callable[[list[bytes]], Any]


# What torch says where nobody listens, and of a store that ends while somebody waits for it.
NOBODY_MEETS = "DistNetworkError: The client socket has timed out while trying to connect"
STORE_GONE = (
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote "
    "server shutdown or crash?"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rank in a collective. `then` hears what came of it, `failed` why nothing can."""

    groups: SimGroups
    given: bytes
    then: Callable[[Any], None]
    failed: Callable[[str], None]


def _unheard(why: str) -> None:
    """Who meets without the store hears of no failure."""


class MeetingPlace:
    """Where the ranks of one attempt meet: their collectives, one after the other. `host`: the
    process whose store they find each other by; None: it is nobody's."""

    def __init__(self, world: World, network: Network, host: Process | None) -> None:
        self._world = world
        self._network = network
        self._host = host
        self._random = world.stream("collectives")
        self._entered: dict[int, _Entry] = {}  # by rank
        self._kind = ""
        self._is_open = True  # the store is there
        if host is not None:
            host.on_end.append(self.close)

    def enter(
        self,
        kind: str,
        groups: SimGroups,
        given: bytes,
        lasts_ns: int,
        combine: Combine,
        then: Callable[[Any], None],
        failed: Callable[[str], None] = _unheard,
    ) -> None:
        """kind: all who are in one collective mean the same. lasts_ns: from the last one's entry.
        combine: makes of what all gave, in their order, what all hear. failed: of one that needs
        the store."""
        if kind != self._kind:
            self._forget_gone()
            others = f"rank {groups.rank} enters {kind}, others are in {self._kind}"
            assert not self._entered, others
            self._kind = kind
        if failed is not _unheard and not self._is_open:
            groups.process.after(MS_NS, failed, NOBODY_MEETS)
            return
        self._entered[groups.rank] = _Entry(groups, given, then, failed)
        if len(self._entered) == groups.world_size:
            self._forget_gone()
        if len(self._entered) == groups.world_size:
            entries, self._entered = self._entered, {}
            self._world.after(lasts_ns, None, self._over, entries, combine)

    def _forget_gone(self) -> None:
        """Who has entered and died, or given up, does not count."""
        self._entered = {rank: e for rank, e in self._entered.items() if e.groups.is_at(self)}

    def leave(self, groups: SimGroups) -> None:
        """It waits no longer."""
        entry = self._entered.get(groups.rank)
        if entry is not None and entry.groups is groups:
            del self._entered[groups.rank]

    def close(self) -> None:
        """The store is gone: who has not met by then does not."""
        self._is_open = False
        for rank, entry in list(self._entered.items()):
            if entry.failed is not _unheard:
                del self._entered[rank]
                if entry.groups.is_at(self):
                    entry.groups.process.after(MS_NS, entry.failed, STORE_GONE)

    def _over(self, entries: dict[int, _Entry], combine: Combine) -> None:
        if any(not entry.groups.is_at(self) for entry in entries.values()):
            return  # one died or gave up meanwhile: nobody gets the result
        machines = {entry.groups.process.machine.number for entry in entries.values()}
        if self._network.is_faulty:
            carries = self._network.carries
            if not all(carries(a, b) for a in machines for b in machines if a != b):
                self._world.after(LOOK_NS, None, self._over, entries, combine)
                return
        found = combine([entries[rank].given for rank in sorted(entries)])
        for rank in sorted(entries):
            entry = entries[rank]
            delay_ns = self._random.randrange(MS_NS)
            entry.groups.process.after(delay_ns, entry.groups.ended, self, entry.then, found)


class SimGroups:
    """One process's groups. `place`: where it meets its peers at first; None while it is muted."""

    def __init__(
        self,
        process: Process,
        memory: Memory,
        clock: Clock,
        rank: int,
        world_size: int,
        can_be_rebuilt: bool,
        is_muted: bool,
        place_at: Callable[[RegroupAt], MeetingPlace],
        place: MeetingPlace,
    ) -> None:
        self.process = process
        self.rank = rank
        self.world_size = world_size
        self.can_be_rebuilt = can_be_rebuilt
        self.is_muted = is_muted
        self.is_worthless = False
        self._memory = memory
        self._clock = clock
        self._place_at = place_at
        self._place: MeetingPlace | None = None if is_muted else place
        self.why_lost = ""
        self.expects_notice = False
        self._given_up: Callable[[], None] | None = None  # of a collective under way
        self._profile: CollectiveProfileWriter | None = None
        self._on_enter: Callable[[int], None] = _nobody
        self._entered = 0

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a collective."""
        return self._given_up is not None

    def is_at(self, place: MeetingPlace) -> bool:
        return self.process.alive and self._place is place and not self.why_lost

    # -- what the program does

    def begin(self, then: Callable[[str | None], None]) -> None:
        """Meet all others for the first time: `then` hears None, or why that failed. One that takes
        a lost rank's place meets nobody yet."""
        if self._place is None:
            self.process.after(1, then, None)
        else:
            self._meet(self._place, "begin", then)

    def collective(
        self,
        kind: str,
        given: bytes,
        lasts_ns: int,
        combine: Combine,
        then: Callable[[Any], None],
    ) -> None:
        """`then` hears what `combine` made of what all gave, or None when it ended because a peer
        is lost."""
        self._entered += 1
        self._on_enter(self._entered)
        place = self._place
        if self.why_lost or place is None:
            self.is_worthless = True
            self.process.after(1, then, None)
            return
        if self._profile is not None:
            self._profile.began()
        self._given_up = lambda: then(None)
        place.enter(kind, self, given, lasts_ns, combine, then)

    def ended(self, place: MeetingPlace, then: Callable[[Any], None], found: Any) -> None:
        """The collective is over."""
        if self.is_at(place):
            self._given_up = None
            if self._profile is not None:
                self._profile.ended(1)
            then(found)

    # -- the port

    def begin_body(self) -> None:
        self.is_worthless = bool(self.why_lost)

    def lose(self, why: str) -> None:
        self.why_lost = why
        given_up, self._given_up = self._given_up, None
        if self._place is not None:
            self._place.leave(self)
        if given_up is not None:
            self.is_worthless = True
            if self._profile is not None:
                self._profile.ended(1)
            self.process.after(1, given_up)

    has_device = False

    def mark(self) -> object:
        return None

    def stands(self, mark: object) -> bool:
        return True  # a collective that is over has brought what it was to bring

    def abort(self, within_ns: int) -> list[str]:
        return []

    def look_at_device(self, within_ns: int) -> DeviceAnswer:
        return DeviceAnswer()

    def listen(self, on_error: Callable[[str], None], on_enter: Callable[[int], None]) -> None:
        self._on_enter = on_enter

    def expect_notice(self) -> None:
        self.expects_notice = True

    def rebuild(self, place: RegroupAt, then: Callable[[str | None], None]) -> None:
        self.process.touch("rebuild groups")
        self.why_lost = ""
        self._place = self._place_at(place)
        self._entered = 0
        self._meet(self._place, "rebuild", then)

    def _meet(self, place: MeetingPlace, kind: str, then: Callable[[str | None], None]) -> None:
        def met(found: Any) -> None:
            self.is_muted = False
            then(None)

        def failed(why: str) -> None:
            if self.is_at(place):
                self._given_up = None
                then(why)

        self._given_up = _nothing
        place.enter(kind, self, b"", MS_NS, len, met, failed)

    def gather(self, mine: bytes, then: Callable[[list[bytes]], None]) -> None:
        assert self._place is not None, "a newcomer's peers gathered long ago"
        self._given_up = _nothing
        self._place.enter("gather", self, mine, MS_NS, list, then)

    def record_profile(self, path: Path) -> None:
        self._profile = CollectiveProfileWriter(
            self._memory, path, self._clock.monotonic_ns, INTERFACE
        )

    def profile_step(self, step: int) -> None:
        if self._profile is not None:
            self._profile.step(step)

    def close(self) -> None:
        self._on_enter = _nobody
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.close()


def _nobody(number: int) -> None:
    """Nobody counts."""


def _nothing() -> None:
    """Who waits hears nothing: what it waited for is over."""
