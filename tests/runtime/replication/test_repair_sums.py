"""Repair sums: who asks is sent the code's sum of the pieces it named, or hears that there is
none; nothing of it outlives its mesh."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding import reference
from keepstep.model.messages.peers import Addend, AddUp
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from tests.runtime.replication.room import BLOCK_BYTES, VERSION, ReplicationRoom, flip, hear_asker

STAMP = Stamp(5, 1)
NODES = 4
SIZE = 3 * BLOCK_BYTES
PAYLOADS = [random.Random(node).randbytes(SIZE) for node in range(NODES)]


class Adding:
    """Nodes that have a rank's snapshot each. Node 0 asks."""

    def __init__(self) -> None:
        self.rooms: dict[int, ReplicationRoom] = {}
        self.sums: list[RepairSums] = []
        self.doubts: list[int] = []
        self.came: list[bytearray | str] = []
        for node in range(NODES):
            room = ReplicationRoom(node, nodes=NODES, rooms=self.rooms)
            room.join()
            room.seal(node, STAMP, PAYLOADS[node])
            doubt = partial(self.doubts.append, node)
            server = SnapshotServer(room.links, room.held, doubt)
            self.sums.append(RepairSums(room.world, room.links, server))
            room.on_message = partial(hear_asker, server, self.sums[node])

    def ask(self, adder: int, addends: list[Addend], nbytes: int) -> None:
        self.sums[0].bring(adder, STAMP, nbytes, addends, self.came.append)

    def settle(self) -> None:
        while any(room.settle() for room in self.rooms.values()):
            pass

    def apart(self, *pair: int) -> None:
        """Their link is down."""
        first, second = pair
        self.rooms[first].net.away.add(second)
        self.rooms[second].net.away.add(first)


def piece(node: int, coefficient: int = 1, start: int = 0, stop: int = SIZE) -> Addend:
    return Addend(node, node, BlockRange(Part.KEPT, start, stop - start), coefficient)


pieces = st.builds(
    lambda coefficient, start, length: (coefficient, start, min(start + length, SIZE)),
    st.integers(1, 255),
    st.integers(0, SIZE - 1),
    st.integers(1, SIZE),
)


@given(
    chosen=st.dictionaries(st.integers(1, NODES - 1), pieces, min_size=1), more=st.integers(0, 70)
)
def test_a_sum_is_that_of_the_code(chosen: dict[int, tuple[int, int, int]], more: int) -> None:
    adding = Adding()
    nbytes = max(stop - start for _, start, stop in chosen.values()) + more
    expected = bytearray(nbytes)
    for node, (coefficient, start, stop) in chosen.items():
        reference.add_product(
            coefficient, memoryview(PAYLOADS[node])[start:stop], memoryview(expected)
        )
    for adder in chosen:
        adding.ask(adder, [piece(node, *cut) for node, cut in chosen.items()], nbytes)
    assert adding.came == []
    adding.settle()
    assert adding.came == [expected] * len(chosen)
    assert adding.doubts == []


def test_who_asks_at_once_is_answered_each_for_itself() -> None:
    adding = Adding()
    both = [piece(1), piece(2, 7)]
    came: list[bytearray | str] = []
    adding.ask(1, both, SIZE)
    adding.sums[3].bring(1, STAMP, SIZE, both, came.append)
    adding.settle()
    assert adding.came == came and isinstance(came[0], bytearray)


def test_a_sum_waits_for_a_link_that_takes_no_block_now() -> None:
    adding = Adding()
    adding.rooms[1].net.takes = 0
    adding.ask(1, [piece(1), piece(2)], SIZE)
    adding.settle()
    assert adding.came == []
    adding.rooms[1].net.takes = 9
    adding.sums[1].writable(2)  # of another node's link
    assert adding.came == []
    adding.sums[1].writable(0)
    adding.settle()
    assert isinstance(adding.came[0], bytearray)


@pytest.mark.parametrize(
    "what", ["no link to the giver", "a giver that has none", "no link to who adds", "damaged"]
)
def test_a_sum_that_cannot_be_had_is_told(what: str) -> None:
    adding = Adding()
    match what:
        case "no link to the giver":
            adding.apart(1, 2)
        case "a giver that has none":
            adding.rooms[2].memory.remove(adding.rooms[2].job_dir / "rank-00002")
        case "no link to who adds":
            adding.apart(0, 1)
        case "damaged":
            path = adding.rooms[2].job_dir / "rank-00002" / "slot-0"
            flip(adding.rooms[2].memory, path, PAGE_BYTES + 3)
    adding.ask(1, [piece(1, stop=BLOCK_BYTES), piece(2, stop=BLOCK_BYTES)], BLOCK_BYTES)
    adding.settle()
    [why] = adding.came
    assert isinstance(why, str) and why
    assert adding.doubts == ([2] if what == "damaged" else [])


def test_a_sum_that_comes_damaged_is_told() -> None:
    adding = Adding()
    give = adding.rooms[1].net.send_block

    def lose(node: int, span: Span, source: memoryview, done, checksum=None) -> bool:  # type: ignore[no-untyped-def]
        if node == 0:
            done("damaged four times")
            return True
        return give(node, span, source, done, checksum)

    adding.rooms[1].net.send_block = lose  # type: ignore[method-assign]
    adding.ask(1, [piece(1), piece(2)], SIZE)
    adding.settle()
    assert adding.came == ["damaged four times"]


@pytest.mark.parametrize("settled", range(6))
@pytest.mark.parametrize("dies", [1, 2])
def test_what_a_dead_link_owes_is_told_once(dies: int, settled: int) -> None:
    adding = Adding()
    adding.ask(1, [piece(1), piece(2)], SIZE)
    for _ in range(settled):
        for room in adding.rooms.values():
            room.settle()
    for node in set(range(NODES)) - {dies}:
        adding.apart(node, dies)
        adding.sums[node].link_is_dead(dies, "gone")
    adding.settle()
    assert len(adding.came) == 1


def test_nothing_comes_once_all_is_released() -> None:
    adding = Adding()
    adding.ask(1, [piece(1), piece(2)], SIZE)
    adding.sums[0].release()
    adding.settle()
    assert adding.came == []


def test_a_sum_of_a_mesh_before_is_not_taken_for_one_of_this() -> None:
    adding = Adding()
    room = adding.rooms[0]
    adding.ask(1, [piece(1)], SIZE)
    [first] = [m for _, m in room.net.sent if isinstance(m, AddUp)]
    room.time.pass_ns(1)
    server = SnapshotServer(room.links, room.held, lambda: None)
    RepairSums(room.world, room.links, server).bring(2, STAMP, SIZE, [piece(2)], adding.came.append)
    second = [m for _, m in room.net.sent if isinstance(m, AddUp)][-1]
    assert first.number != second.number and first.mesh_version == VERSION
    late = Span(1, STAMP, Part.SUM, first.number, SIZE)
    assert room.block_comes(1, late, PAYLOADS[1]) is False
