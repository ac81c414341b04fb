"""Collectives: what ranks that train together do with each other, and their groups as
`ports.Groups`.

A collective is over when all ranks of the attempt have entered it, and their machines reach each
other. When a rank hears that a peer is lost its own end at once, with nothing in them; the others
wait until they hear it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.edge.shm.collective_profile_page import CollectiveProfileWriter
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.units import MS_NS
from keepstep.ports import Clock, Memory
from keepstep.sim.protocol.network import Network
from keepstep.sim.protocol.world import Process, World

LOOK_NS = 10 * MS_NS

Combine = Callable[[Sequence[bytes]], bytes]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rank in a collective. `then` hears what all gave, in their order."""

    groups: SimGroups
    given: bytes
    then: Callable[[list[bytes]], None]


class MeetingPlace:
    """Where the ranks of one attempt meet: their collectives, one after the other."""

    def __init__(self, world: World, network: Network, world_size: int) -> None:
        self._world = world
        self._network = network
        self._world_size = world_size
        self._random = world.stream("collectives")
        self._entered: dict[int, _Entry] = {}  # by rank
        self._kind = ""

    def enter(
        self,
        kind: str,
        groups: SimGroups,
        given: bytes,
        lasts_ns: int,
        then: Callable[[list[bytes]], None],
    ) -> None:
        """kind: all who are in one collective mean the same. lasts_ns: from the last one's
        entry."""
        living = {rank: e for rank, e in self._entered.items() if e.groups.is_at(self)}
        self._entered = living
        if not living:
            self._kind = kind
        assert kind == self._kind, f"rank {groups.rank} enters {kind}, others are in {self._kind}"
        self._entered[groups.rank] = _Entry(groups, given, then)
        if len(self._entered) == self._world_size:
            entries, self._entered = self._entered, {}
            self._world.after(lasts_ns, None, self._over, entries)

    def leave(self, groups: SimGroups) -> None:
        """It waits no longer."""
        entry = self._entered.get(groups.rank)
        if entry is not None and entry.groups is groups:
            del self._entered[groups.rank]

    def _over(self, entries: dict[int, _Entry]) -> None:
        if any(not entry.groups.is_at(self) for entry in entries.values()):
            return  # one died or gave up meanwhile: nobody gets the result
        machines = {entry.groups.process.machine.number for entry in entries.values()}
        carries = self._network.carries
        if not all(carries(a, b) for a in machines for b in machines if a != b):
            self._world.after(LOOK_NS, None, self._over, entries)
            return
        given = [entries[rank].given for rank in sorted(entries)]
        for rank in sorted(entries):
            entry = entries[rank]
            delay_ns = self._random.randrange(MS_NS)
            entry.groups.process.after(delay_ns, entry.groups.ended, self, entry.then, given)


class SimGroups:
    """One process's groups. `place`: where it meets its peers at first; None while it is muted."""

    def __init__(
        self,
        process: Process,
        memory: Memory,
        clock: Clock,
        rank: int,
        can_be_rebuilt: bool,
        is_muted: bool,
        place_at: Callable[[RegroupAt], MeetingPlace],
        place: MeetingPlace,
    ) -> None:
        self.process = process
        self.rank = rank
        self.can_be_rebuilt = can_be_rebuilt
        self.is_muted = is_muted
        self.is_worthless = False
        self._memory = memory
        self._clock = clock
        self._place_at = place_at
        self._place: MeetingPlace | None = None if is_muted else place
        self._is_lost = False
        self._given_up: Callable[[], None] | None = None  # of a collective under way
        self._profile: CollectiveProfileWriter | None = None
        self._on_enter: Callable[[int], None] = _nobody
        self._entered = 0

    def is_at(self, place: MeetingPlace) -> bool:
        return self.process.alive and self._place is place and not self._is_lost

    # -- what the program does

    def collective(
        self, kind: str, given: bytes, lasts_ns: int, then: Callable[[list[bytes] | None], None]
    ) -> None:
        """`then` hears what all gave, or None when it ended because a peer is lost."""
        self._entered += 1
        self._on_enter(self._entered)
        place = self._place
        if self._is_lost or place is None:
            self.is_worthless = True
            self.process.after(1, then, None)
            return
        if self._profile is not None:
            self._profile.began()
        self._given_up = lambda: then(None)
        place.enter(kind, self, given, lasts_ns, then)

    def ended(
        self,
        place: MeetingPlace,
        then: Callable[[list[bytes]], None],
        given: list[bytes],
    ) -> None:
        """The collective is over."""
        if self.is_at(place):
            self._given_up = None
            if self._profile is not None:
                self._profile.ended(1)
            then(given)

    # -- the port

    def begin_body(self) -> None:
        self.is_worthless = self._is_lost

    def lose(self, why: str) -> None:
        self._is_lost = True
        given_up, self._given_up = self._given_up, None
        if self._place is not None:
            self._place.leave(self)
        if given_up is not None:
            self.is_worthless = True
            if self._profile is not None:
                self._profile.ended(1)
            self.process.after(1, given_up)

    def listen(self, on_error: Callable[[str], None], on_enter: Callable[[int], None]) -> None:
        self._on_enter = on_enter

    def expect_notice(self) -> None:
        """No transport fails here before somebody says why."""

    def rebuild(self, place: RegroupAt, then: Callable[[str | None], None]) -> None:
        self._is_lost = False
        self._place = self._place_at(place)
        self._entered = 0

        def met(given: list[bytes]) -> None:
            self.is_muted = False
            then(None)

        self._given_up = _nothing
        self._place.enter("rebuild", self, b"", MS_NS, met)

    def gather(self, mine: bytes, then: Callable[[list[bytes]], None]) -> None:
        assert self._place is not None, "a newcomer's peers gathered long ago"
        self._given_up = _nothing
        self._place.enter("gather", self, mine, MS_NS, then)

    def record_profile(self, path: Path) -> None:
        self._profile = CollectiveProfileWriter(
            self._memory, path, self._clock.monotonic_ns, "sim0"
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
