"""A link whose connections break at any moment, in any way: every message arrives once and in
order, every block once and whole, or its sender is told why not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from keepstep.core.wire.delivery import MAX_TRIES
from keepstep.core.wire.streams import StreamLimits
from keepstep.model.units import S_NS
from tests.core.wire.keepers import NOWHERE, TIMEOUTS, End, World, note, span_of

BLOCK = 300
PLACES = 40  # blocks in each direction, at most
_PATIENT = replace(TIMEOUTS, dead_ns=1 << 60)


class Schedule(RuleBasedStateMachine):
    """Two keepers, and everything that may happen to what is between them but its death: bytes
    move in pieces of any size, connections break for both ends or for one, ends learn of it late,
    second connections are made while the first ones are open, bits flip. Each has some streams,
    and an address or two."""

    @initialize(streams=st.integers(1, 3), addresses=st.integers(1, 2))
    def begin(self, streams: int, addresses: int) -> None:
        self.world = World(timeouts=_PATIENT, streams=StreamLimits.of(streams))
        one, two = self.world.keeper(1), self.world.keeper(2)
        one.addresses = two.addresses = [NOWHERE] * addresses
        self.sides = (one, two)
        self.sent: tuple[list[int], list[int]] = ([], [])
        self.data = [Random(side).randbytes(PLACES * BLOCK) for side in (1, 2)]
        self.blocks: tuple[list[int], list[int]] = ([], [])  # offsets
        self.done: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})
        self.flips = 0
        for side in self.sides:
            side.memory = bytearray(PLACES * BLOCK)
        two.connect(one)
        one.connect(two)

    def ends(self) -> list[End]:
        return [end for side in self.sides for end in side.ends]

    # what the keepers do

    @rule(side=st.integers(0, 1), count=st.integers(1, 40))
    def say(self, side: int, count: int) -> None:
        for _ in range(count):
            number = len(self.sent[side])
            if self.sides[side].table.send(2 - side, note(number)):
                self.sent[side].append(number)

    @rule(side=st.integers(0, 1))
    def send_block(self, side: int) -> None:
        at = len(self.blocks[side]) * BLOCK
        if at >= PLACES * BLOCK:
            return
        source = memoryview(self.data[side])[at : at + BLOCK]

        def done(why: str | None) -> None:
            assert at not in self.done[side], "told twice"
            self.done[side][at] = why

        if self.sides[side].table.send_block(2 - side, span_of(BLOCK, at), source, done):
            self.blocks[side].append(at)

    # what happens between them

    @precondition(lambda self: self.sides[0].to_dial)
    @rule()
    def dial(self) -> None:
        self.world.dial(*self.sides)

    @precondition(lambda self: self.ends())
    @rule(which=st.integers(0, 99), nbytes=st.integers(1, 700))
    def move(self, which: int, nbytes: int) -> None:
        self.world.step(self.ends()[which % len(self.ends())], nbytes)

    @rule()
    def move_all(self) -> None:
        for end in self.ends():
            self.world.step(end)

    @precondition(lambda self: self.ends())
    @rule(which=st.integers(0, 99), both=st.booleans())
    def cut(self, which: int, both: bool) -> None:
        end = self.ends()[which % len(self.ends())]
        end.endpoint.cut("cut")
        if both:
            end.other.endpoint.cut("cut")

    @precondition(lambda self: self.ends())
    @rule(which=st.integers(0, 99), at=st.integers(0, 10_000))
    def flip(self, which: int, at: int) -> None:
        end = self.ends()[which % len(self.ends())]
        if end.coming and self.flips < MAX_TRIES - 1:
            piece = bytearray(end.coming[0])
            piece[at % len(piece)] ^= 1 << at % 8
            end.coming[0] = bytes(piece)
            self.flips += 1

    @precondition(lambda self: self.ends())
    @rule(which=st.integers(0, 99))
    def learn(self, which: int) -> None:
        """An end that is to close is closed, and one whose other end is closed hears of that."""
        end = self.ends()[which % len(self.ends())]
        if end.endpoint.closing is not None or end.other.is_closed:
            side = next(side for side in self.sides if end in side.ends)
            side.lose(end)

    @rule(tenths=st.integers(1, 30))
    def time_passes(self, tenths: int) -> None:
        self.world.now_ns += tenths * S_NS // 10
        for side in self.sides:
            side.table.tick(self.world.now_ns)

    # what holds

    @invariant()
    def messages_arrive_once_and_in_order(self) -> None:
        for side in (0, 1):
            heard = self.sides[1 - side].heard
            assert heard == list(range(len(heard))) and len(heard) <= len(self.sent[side])

    @invariant()
    def blocks_arrive_once_and_whole(self) -> None:
        for side in (0, 1):
            there = self.sides[1 - side]
            assert there.memory is not None
            arrived = [span.offset for span in there.blocks]
            assert len(set(arrived)) == len(arrived)
            for at in arrived:
                assert there.memory[at : at + BLOCK] == self.data[side][at : at + BLOCK]
            assert all(at in arrived for at, why in self.done[side].items() if why is None)

    @invariant()
    def one_connection_carries_a_channel(self) -> None:
        for side in self.sides:
            links = list(side.table._links.values())
            carried = [end for link in links for end in link._carried.values()]
            assert len({(id(e.link), e.index) for e in carried}) == len(carried)
            assert all(not e.is_lost for e in carried)

    @invariant()
    def nobody_is_told_of_what_passes(self) -> None:
        assert all(side.told in ([], [("up", 2 - n)]) for n, side in enumerate(self.sides))

    def teardown(self) -> None:
        """Without further trouble all of it arrives."""
        self.world.settle()
        for n, side in enumerate(self.sides):
            assert side.told == [("up", 2 - n)]
            assert self.sides[1 - n].heard == self.sent[n]
            assert self.done[n] == dict.fromkeys(self.blocks[n])


TestEverySchedule = Schedule.TestCase
TestEverySchedule.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
