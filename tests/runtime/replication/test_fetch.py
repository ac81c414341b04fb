"""Fetch: what is brought from other nodes is what its owner sealed, byte by byte, whoever fails on
the way; or nothing is left of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.plausible import flaw_of_peer
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import DamageError
from keepstep.model.messages.peers import (
    CopyUnavailable,
    FetchRanges,
    MeshMessage,
    SnapshotUnproven,
)
from keepstep.model.restore_sources import GroupMember, RestoreSource
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.model.wire import Part, Span
from keepstep.runtime.replication.encode import (
    Encoding,
    SnapshotSizes,
    contents_of,
    ranges_for,
)
from keepstep.runtime.replication.fetch import Fetch, FetchResult, free_slot_path, replace_bytes
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from keepstep.runtime.replication.step_sources import PATIENCE_NS
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_DIR,
    JOB_HASH,
    ReplicationRoom,
    a_memory,
    bytes_of,
    flip,
    hear_asker,
    payload_of,
    seal,
)

STAMP = Stamp(6, 2)
HELD = JOB_DIR / "held"
PARITY = JOB_DIR / "parity"
MANIFEST = b"m" * 700
SIZES = st.integers(1, 6 * BLOCK_BYTES)


def state(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class FetchNodes:
    """Nodes with a rank each, which serve what they have. Node 0 fetches."""

    def __init__(self, count: int) -> None:
        self.rooms: dict[int, ReplicationRoom] = {}
        for node in range(count):
            ReplicationRoom(node, ranks=(1,) * count, rooms=self.rooms)
        self.here = self.rooms[0]
        self.ended: list[FetchResult] = []
        self.doubts: set[int] = set()  # nodes that are to look at what they gave
        self.fetch: Fetch | None = None
        self.sums: dict[int, RepairSums] = {}

    def open(self) -> None:
        """What was laid into their memory is there from the beginning."""
        for node, room in self.rooms.items():
            room.join()
            room.held = HeldSnapshots(room.memory, room.workers, JOB_DIR)
            doubt = partial(self.doubts.add, node)
            server = SnapshotServer(room.links, room.held, doubt)
            sums = self.sums[node] = RepairSums(room.world, room.links, server)
            room.on_message = partial(self._hear, server, sums, node)
            if node == 0:
                self.server = server

    def _hear(
        self,
        server: SnapshotServer,
        sums: RepairSums,
        node: int,
        asker: int,
        message: MeshMessage,
    ) -> None:
        assert flaw_of_peer(asker, message, self.rooms[node].mesh) == ""
        hear_asker(server, sums, asker, message)
        match message:
            case CopyUnavailable():
                assert node == 0 and self.fetch is not None
                self.fetch.source_failed(asker, message.why)
            case SnapshotUnproven():
                assert (asker, message.stamp) == (0, STAMP)
                self.doubts.add(node)

    def begin(
        self, source: RestoreSource, path: Path | None = None, has_one_slot: bool = False
    ) -> Fetch:
        self.fetch = Fetch(
            self.here.world,
            self.here.links,
            self.server,
            self.sums[0],
            JOB_DIR,
            JOB_HASH,
            source,
            STAMP,
            self.ended.append,
            path,
            has_one_slot,
        )
        self.fetch.start()
        return self.fetch

    def settle(self) -> None:
        while any(room.settle() for room in self.rooms.values()):
            pass

    def files(self, rank: int = 0) -> list[str]:
        return self.here.memory.names(JOB_DIR / f"rank-{rank:05d}")


def fetched(nodes: FetchNodes, rank: int = 0) -> bytes:
    """The payload of what was brought; it proves."""
    [name] = nodes.files(rank)
    slot = Slot(nodes.here.memory, slot_path(JOB_DIR, rank, int(name.removeprefix("slot-"))))
    header, manifest = slot.verify_bytes()
    assert (header.rank, header.stamp, manifest) == (rank, STAMP, MANIFEST)
    return payload_of(slot)


def copies_on(nodes: FetchNodes, holders: list[int], payload: bytes) -> RestoreSource:
    """All of them have a copy of rank 0."""
    for node in holders:
        seal(nodes.rooms[node].memory, HELD, 0, STAMP, payload, manifest=MANIFEST).close()
    nodes.open()
    return RestoreSource(0, copies=tuple(holders))


@given(nbytes=SIZES, holders=st.sets(st.integers(1, 3), min_size=1))
def test_a_snapshot_comes_from_all_who_have_it(nbytes: int, holders: set[int]) -> None:
    nodes, payload = FetchNodes(4), state(nbytes)
    nodes.begin(copies_on(nodes, sorted(holders), payload))
    assert not nodes.ended
    nodes.settle()
    [result] = nodes.ended
    assert (result.why, result.rank, result.stamp) == (None, 0, STAMP)
    assert result.sources == tuple(sorted(holders))
    assert fetched(nodes) == payload


@given(nbytes=SIZES, data=st.data())
def test_what_a_source_that_fails_owed_is_asked_of_the_others(
    nbytes: int, data: st.DataObject
) -> None:
    nodes, payload = FetchNodes(4), state(nbytes)
    source = copies_on(nodes, [1, 2, 3], payload)
    failing = data.draw(st.lists(st.integers(1, 3), unique=True, max_size=3))
    steps_before = data.draw(st.integers(0, 4))
    fetch = nodes.begin(source)
    for _ in range(steps_before):
        nodes.here.settle()
        nodes.rooms[data.draw(st.integers(1, 3))].settle()
    is_early = not nodes.ended
    for node in failing:
        nodes.here.net.away.add(node)
        nodes.rooms[node].on_message = lambda asker, message: None
        fetch.link_is_dead(node, "gone")
    nodes.settle()
    [result] = nodes.ended
    if is_early and len(failing) == 3:
        assert result.why is not None and result.is_away
        assert nodes.files() == []
    else:
        assert result.why is None
        assert fetched(nodes) == payload


@given(data=st.data(), nbytes=SIZES)
def test_a_damaged_copy_is_never_taken_for_a_good_one(data: st.DataObject, nbytes: int) -> None:
    nodes, payload = FetchNodes(3), state(nbytes)
    source = copies_on(nodes, [1, 2], payload)
    at = data.draw(st.integers(0, PAGE_BYTES + nbytes - 1))
    flip(nodes.rooms[1].memory, slot_path(HELD, 0, 0), at)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert result.why is None
    assert fetched(nodes) == payload


@pytest.mark.parametrize("block", range(6))
def test_what_is_damaged_here_comes_from_another_node(block: int) -> None:
    nodes, payload = FetchNodes(3), state(6 * BLOCK_BYTES)
    source = copies_on(nodes, [0, 1, 2], payload)
    share = 6 // 3
    flip(nodes.here.memory, slot_path(HELD, 0, 0), PAGE_BYTES + block * BLOCK_BYTES)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert result.why is None
    assert fetched(nodes) == payload
    assert nodes.doubts == ({0} if block < share else set())


def damage(nodes: FetchNodes, node: int, what: str) -> None:
    """Of what that holder has. A header of another job, or one that names another table, proves
    itself; one that does not is not found there."""
    slot = Slot(nodes.rooms[node].memory, slot_path(HELD, 0, 0))
    header = slot.header()
    match what:
        case "header":
            flip(nodes.rooms[node].memory, slot.path, 40)
        case "job":
            slot.adopt(header._replace(job_hash=b"x" * 16))
        case "names":
            slot.adopt(header._replace(table_checksum=header.table_checksum ^ 1))
        case _:
            slot.part(Part[what.upper()], header)[3] ^= 1


DAMAGES = ["header", "job", "names", "table", "manifest"]


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("damaged", [[1], [0], [0, 1], [1, 2]])
def test_what_proves_comes_from_another_holder_where_that_of_one_does_not(
    damaged: list[int], what: str
) -> None:
    nodes, payload = FetchNodes(4), state(5 * BLOCK_BYTES)
    source = copies_on(nodes, [*damaged, 3], payload)
    for node in damaged:
        damage(nodes, node, what)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert (result.why, result.sources) == (None, (3,))
    assert fetched(nodes) == payload
    assert nodes.doubts == (set() if what == "header" else set(damaged))


def test_a_header_that_comes_damaged_costs_who_gave_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, payload = FetchNodes(3), state(3 * BLOCK_BYTES)
    source = copies_on(nodes, [1, 2], payload)
    give = nodes.rooms[1].net.send_block

    def give_damaged(node: int, span: Span, source: memoryview, *more: Any) -> bool:
        data = bytearray(source)
        data[40] ^= span.part is Part.HEADER
        return give(node, span, memoryview(data), *more)

    monkeypatch.setattr(nodes.rooms[1].net, "send_block", give_damaged)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert (result.why, result.sources) == (None, (2,))
    assert fetched(nodes) == payload
    assert nodes.doubts == {1}


def test_a_block_that_differs_from_the_proven_table_costs_who_gave_it_alone() -> None:
    nodes, payload = FetchNodes(4), state(9 * BLOCK_BYTES)
    source = copies_on(nodes, [1, 2, 3], payload)
    slot = Slot(nodes.rooms[2].memory, slot_path(HELD, 0, 0))
    slot.payload[4 * BLOCK_BYTES] ^= 1  # in the second third: the link of the tests lets it pass
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert (result.why, result.sources) == (None, (1, 3))
    assert fetched(nodes) == payload
    assert nodes.doubts == {2}


@pytest.mark.parametrize("others", [[], [3]])
@pytest.mark.parametrize("settled", range(6))
def test_a_link_that_dies_in_the_second_try_leaves_it_to_the_others(
    settled: int, others: list[int]
) -> None:
    nodes, payload = FetchNodes(4), state(5 * BLOCK_BYTES)
    source = copies_on(nodes, [1, 2, *others], payload)
    damage(nodes, 1, "manifest")
    fetch = nodes.begin(source)
    while not nodes.here.said(FetchRanges, 2):
        nodes.rooms[1].settle()
        nodes.here.settle()
    for _ in range(settled):
        nodes.rooms[2].settle()
        nodes.here.settle()
    is_early = not nodes.ended
    nodes.here.net.away.add(2)
    nodes.rooms[2].on_message = lambda asker, message: None
    fetch.link_is_dead(2, "gone")
    nodes.settle()
    [result] = nodes.ended
    if is_early and not others:
        assert result.why is not None and result.is_away
        assert nodes.files() == []
    else:
        assert result.why is None
        assert fetched(nodes) == payload
    assert 1 not in result.sources and nodes.doubts == {1}


def test_who_cannot_be_asked_at_all_is_left_out() -> None:
    nodes, payload = FetchNodes(3), state(3 * BLOCK_BYTES)
    source = copies_on(nodes, [1, 2], payload)
    nodes.here.net.away.add(1)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert (result.why, result.sources) == (None, (2,))
    assert fetched(nodes) == payload


@pytest.mark.parametrize("what", [*DAMAGES, "payload"])
@pytest.mark.parametrize("holders", [[0], [1], [1, 2]])
def test_who_gave_what_does_not_prove_looks_at_it(holders: list[int], what: str) -> None:
    """A manifest crosses with no other checksum than that of its bytes as they lie there."""
    nodes, payload = FetchNodes(3), state(3 * BLOCK_BYTES)
    source = copies_on(nodes, holders, payload)
    for node in holders:
        damage(nodes, node, what)
    nodes.begin(source)
    nodes.settle()
    [result] = nodes.ended
    assert result.why is not None
    assert not result.is_away
    assert nodes.doubts == (set() if what == "header" else set(holders))
    assert nodes.files() == []


def test_who_gave_what_was_decoded_to_something_else_looks_at_it() -> None:
    nodes = FetchNodes(3)
    payloads = [state(2 * BLOCK_BYTES, seed) for seed in range(3)]
    lay_parities(nodes, payloads, 1)
    flip(nodes.rooms[1].memory, slot_path(PARITY, 1, 0), PAGE_BYTES + 1)
    nodes.open()
    nodes.begin(RestoreSource(0, (), (0, 1, 2), 1, (GroupMember(1, 1), GroupMember(2, 2))))
    nodes.settle()
    [result] = nodes.ended
    assert result.why is not None
    assert nodes.doubts == {1, 2}


def test_nobody_has_it() -> None:
    nodes = FetchNodes(3)
    nodes.open()
    nodes.begin(RestoreSource(0, copies=(1, 2)))
    nodes.settle()
    [result] = nodes.ended
    assert result.why is not None
    assert not result.is_away
    assert nodes.files() == []


def test_who_stops_hears_nothing_and_nothing_is_left() -> None:
    nodes = FetchNodes(2)
    fetch = nodes.begin(copies_on(nodes, [1], state(1000)))
    for _ in range(2):
        nodes.rooms[1].settle()
        nodes.here.settle()
    # the slot is made by now
    assert nodes.files() != []
    fetch.stop()
    nodes.settle()
    assert not nodes.ended
    assert nodes.files() == []


def test_it_may_be_wanted_at_a_place_of_its_own() -> None:
    nodes, payload = FetchNodes(2), state(1000)
    path = JOB_DIR / "rank-00000" / "mended"
    nodes.begin(copies_on(nodes, [1], payload), path)
    nodes.settle()
    assert nodes.files() == ["mended"]
    assert payload_of(Slot(nodes.here.memory, path)) == payload


# -- into the only slot of a rank


def only_slot(nodes: FetchNodes, stamp: Stamp, nbytes: int = 3 * BLOCK_BYTES) -> Slot:
    """Of the rank that lives here, mapped as its process has it."""
    return seal(nodes.here.memory, JOB_DIR, 0, stamp, state(nbytes, 9))


def used_bytes(nodes: FetchNodes) -> int:
    directory = JOB_DIR / "rank-00000"
    return sum(nodes.here.memory.size(directory / name) for name in nodes.files())


@pytest.mark.parametrize(
    "state_of", ["newer", "torn", "damaged", "the same, and damaged", "none is there"]
)
def test_the_only_slot_is_taken_where_it_holds_nothing_of_worth(state_of: str) -> None:
    nodes, payload = FetchNodes(3), state(2 * BLOCK_BYTES)
    stamp = STAMP if "same" in state_of else STAMP._replace(step=STAMP.step + 1)
    slot = only_slot(nodes, stamp)
    before = used_bytes(nodes)
    match state_of:
        case "torn":
            slot.begin(JOB_HASH, 0, 3, 0, stamp)
        case "damaged":
            flip(nodes.here.memory, slot.path, 8)
        case "the same, and damaged":
            slot.payload[0] ^= 1
        case "none is there":
            nodes.here.memory.remove(slot.path)
    nodes.begin(copies_on(nodes, [1, 2], payload), has_one_slot=True)
    most = 0
    while not nodes.ended:
        most = max(most, used_bytes(nodes))
        nodes.here.settle()
        most = max(most, used_bytes(nodes))
        for room in nodes.rooms.values():
            room.settle()
    [result] = nodes.ended
    assert result.why is None
    assert nodes.files() == ["slot-0"] and fetched(nodes) == payload
    if state_of != "none is there":
        assert most == before, "no second one was made beside it"


def test_the_only_slot_stays_where_it_holds_what_may_be_gone_back_to() -> None:
    nodes, payload = FetchNodes(3), state(2 * BLOCK_BYTES)
    older = STAMP._replace(step=STAMP.step - 1)
    only_slot(nodes, older)
    nodes.begin(copies_on(nodes, [1, 2], payload), has_one_slot=True)
    most_files = 0
    while not nodes.ended:
        assert "slot-0" in nodes.files()
        most_files = max(most_files, len(nodes.files()))
        for room in nodes.rooms.values():
            room.settle()
    assert nodes.ended[0].why is None and most_files == 2
    assert nodes.files() == ["slot-0"] and fetched(nodes) == payload


def test_the_only_slot_stays_while_somebody_reads_it() -> None:
    nodes, payload = FetchNodes(3), state(2 * BLOCK_BYTES)
    only_slot(nodes, STAMP._replace(step=STAMP.step + 1))
    reader = Slot(nodes.here.memory, slot_path(JOB_DIR, 0, 0))
    assert reader.lock(exclusive=False)
    nodes.begin(copies_on(nodes, [1, 2], payload), has_one_slot=True)
    nodes.settle()
    assert nodes.ended[0].why is None and fetched(nodes) == payload
    assert reader.header().stamp != STAMP, "what is read is as it was"


def test_a_slot_that_is_too_small_is_not_taken() -> None:
    nodes, payload = FetchNodes(3), state(5 * BLOCK_BYTES)
    only_slot(nodes, STAMP._replace(step=STAMP.step + 1), nbytes=BLOCK_BYTES)
    nodes.begin(copies_on(nodes, [1, 2], payload), has_one_slot=True)
    nodes.settle()
    assert nodes.files() == ["slot-0"] and fetched(nodes) == payload


def test_when_what_takes_the_only_slot_cannot_be_had_nothing_of_it_is_found() -> None:
    """The rank sees that its slot is gone, and has another one made."""
    nodes = FetchNodes(2)
    slot = only_slot(nodes, STAMP._replace(step=STAMP.step + 1))
    source = copies_on(nodes, [1], state(2 * BLOCK_BYTES))
    damage(nodes, 1, "payload")
    nodes.begin(source, has_one_slot=True)
    nodes.settle()
    assert nodes.ended[0].why is not None
    assert nodes.files() == [] and not slot.is_there()


def test_the_only_slot_is_not_taken_before_what_comes_is_known_to_prove() -> None:
    nodes = FetchNodes(2)
    slot = only_slot(nodes, STAMP._replace(step=STAMP.step + 1))
    source = copies_on(nodes, [1], state(2 * BLOCK_BYTES))
    damage(nodes, 1, "table")
    nodes.begin(source, has_one_slot=True)
    nodes.settle()
    assert nodes.ended[0].why is not None
    assert nodes.files() == ["slot-0"] and slot.is_there()


# -- decoded


def lay_parities(nodes: FetchNodes, payloads: list[bytes], tolerates: int) -> None:
    """Every node has its rank's snapshot, and the parity that its rank keeps."""
    group = tuple(range(len(payloads)))
    slots = [
        seal(nodes.rooms[r].memory, JOB_DIR, r, STAMP, payloads[r], len(group), manifest=MANIFEST)
        for r in group
    ]
    sizes = {r: SnapshotSizes(len(payloads[r]), len(MANIFEST), BLOCK_BYTES) for r in group}
    for mine in group:
        contents = contents_of(sizes, group, tolerates, mine)
        text_bytes = len(contents.to_text())
        path = slot_path(PARITY, mine, 0)
        parity = Slot.create(nodes.rooms[mine].memory, path, contents.nbytes, text_bytes)
        parity.begin(JOB_HASH, mine, len(group), 0, STAMP)
        encoding = Encoding(parity, contents, mine, STAMP, lambda: None)
        for rank in encoding.ranks:
            for range_ in ranges_for(contents.stripes, sizes[rank], rank, mine):
                span = Span(rank, STAMP, *range_)
                place = encoding.place(rank, span)
                assert place is not None
                place[:] = bytes_of(slots[rank], range_)
                encoding.arrived(rank, span, 0)
        encoding.seal(1)


@given(
    sizes=st.lists(st.integers(1, 4 * BLOCK_BYTES), min_size=2, max_size=4),
    data=st.data(),
)
def test_a_lost_member_is_decoded_from_the_others(sizes: list[int], data: st.DataObject) -> None:
    tolerates = data.draw(st.integers(1, min(2, len(sizes) - 1)))
    group = tuple(range(len(sizes)))
    nodes = FetchNodes(len(sizes))
    payloads = [state(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    lay_parities(nodes, payloads, tolerates)
    others = data.draw(st.sets(st.sampled_from(group[1:]), max_size=tolerates - 1))
    for rank in {0, *others}:
        for name in (JOB_DIR / f"rank-{rank:05d}", PARITY / f"rank-{rank:05d}"):
            nodes.rooms[rank].memory.remove(name)
    nodes.open()
    members = tuple(GroupMember(r, r) for r in group if r not in {0, *others})
    nodes.begin(RestoreSource(0, (), group, tolerates, members[: len(group) - tolerates]))
    nodes.settle()
    [result] = nodes.ended
    assert result.why is None
    assert fetched(nodes) == payloads[0]


CHUNK = 256  # of these tests: steps are many
GROUP = tuple(range(4))
GROUP_SOURCE = RestoreSource(0, (), GROUP, 1, tuple(GroupMember(r, r) for r in GROUP[1:]))


def a_group(monkeypatch: pytest.MonkeyPatch) -> tuple[FetchNodes, bytes]:
    """Four nodes, the first of which has lost all; and what its rank's payload was."""
    for module in ("fetch", "step_sources"):
        monkeypatch.setattr(f"keepstep.runtime.replication.{module}.CHUNK_BYTES", CHUNK)
    nodes = FetchNodes(len(GROUP))
    payloads = [state(9 * BLOCK_BYTES + 13 * rank, rank) for rank in GROUP]
    lay_parities(nodes, payloads, 1)
    for root in (JOB_DIR, PARITY):
        nodes.here.memory.remove(root / "rank-00000")
    nodes.open()
    return nodes, payloads[0]


def blocks_into(nodes: FetchNodes, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By node, counted from now on: the bytes of blocks that reach it."""
    came = dict.fromkeys(nodes.rooms, 0)
    for node, room in nodes.rooms.items():

        def comes(
            giver: int, span: Span, data: bytes, node: int = node, room: ReplicationRoom = room
        ) -> bool:
            if span.part in (Part.KEPT, Part.PARITY, Part.SUM):
                came[node] += len(data)
            return ReplicationRoom.block_comes(room, giver, span, data)

        monkeypatch.setattr(room, "block_comes", comes)
    return came


def test_a_byte_comes_for_each_that_is_rebuilt_on_whatever_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, payload = a_group(monkeypatch)
    came = blocks_into(nodes, monkeypatch)
    nodes.begin(GROUP_SOURCE)
    nodes.settle()
    assert nodes.ended[0].why is None and fetched(nodes) == payload
    assert came[0] == len(payload) <= nodes.ended[0].nbytes < len(payload) + 5 * PAGE_BYTES
    assert sum(came.values()) <= 3 * len(payload), "as many as three pieces of each codeword"
    for node in GROUP[1:]:
        assert came[node] <= 0.8 * len(payload), "they take turns in adding up"


@pytest.mark.parametrize("apart", [[1], [2], [3], [1, 2], [1, 2, 3]])
def test_whose_sums_cannot_be_had_gives_its_pieces(
    apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links to the others are down, and the one to who rebuilds is not."""
    nodes, payload = a_group(monkeypatch)
    for node in apart:
        for other in {1, 2, 3} - {node}:
            nodes.rooms[node].net.away.add(other)
            nodes.rooms[other].net.away.add(node)
    came = blocks_into(nodes, monkeypatch)
    nodes.begin(GROUP_SOURCE)
    nodes.settle()
    assert nodes.ended[0].why is None and fetched(nodes) == payload
    assert len(payload) < came[0] <= nodes.ended[0].nbytes < came[0] + 5 * PAGE_BYTES


@pytest.mark.parametrize("pairs", [[(1, 2)], [(1, 2), (2, 3)], [(1, 2), (1, 3), (2, 3)]])
def test_sums_that_stay_away_do_not_hold_up_what_can_be_had_otherwise(
    pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages cross between these, and no block ever does: a tunnel takes no large packets."""
    nodes, payload = a_group(monkeypatch)
    for node, room in nodes.rooms.items():
        give = room.net.send_block

        def swallow(
            to: int, *block: Any, node: int = node, give: Callable[..., bool] = give
        ) -> bool:
            is_lost = (node, to) in pairs or (to, node) in pairs
            return True if is_lost else give(to, *block)

        monkeypatch.setattr(room.net, "send_block", swallow)
    nodes.begin(GROUP_SOURCE)
    nodes.settle()
    assert not nodes.ended
    whiles = 0
    while not nodes.ended:
        nodes.here.time.pass_ns(PATIENCE_NS)
        nodes.settle()
        whiles += 1
    assert nodes.ended[0].why is None and fetched(nodes) == payload
    assert whiles <= 2 * len(pairs) + 1, "who has not given a sum in time is not asked again"


def test_a_slow_sum_that_comes_before_the_pieces_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, payload = a_group(monkeypatch)
    held: list[Callable[[], None]] = []
    for node in GROUP[1:]:
        room = nodes.rooms[node]
        give = room.net.send_block

        def late(to: int, span: Span, source: memoryview, *more: Any, give: Any = give) -> bool:
            if to or span.part is Part.HEADER or span.part in (Part.TABLE, Part.MANIFEST):
                return bool(give(to, span, source, *more))
            data = bytes(source)
            held.append(lambda: give(to, span, memoryview(data), *more))
            return True

        monkeypatch.setattr(room.net, "send_block", late)
    nodes.begin(GROUP_SOURCE)
    nodes.settle()
    while not nodes.ended:
        nodes.here.time.pass_ns(PATIENCE_NS)
        nodes.settle()
        held.pop(0)()  # the oldest
        nodes.settle()
    assert nodes.ended[0].why is None and fetched(nodes) == payload
    asked = sum(len(each.ranges) for each in nodes.here.said(FetchRanges))
    assert asked <= 20, "pieces of a few steps alone were asked for: each time was twice as long"


@pytest.mark.parametrize("settled", range(12))
def test_a_sum_that_is_under_way_when_a_giver_dies_is_no_sum(
    settled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, payload = a_group(monkeypatch)
    fetch = nodes.begin(GROUP_SOURCE)
    for _ in range(settled):
        for room in nodes.rooms.values():
            room.settle()
    is_early = not nodes.ended
    for room in nodes.rooms.values():
        room.net.away.add(2)
    nodes.rooms[2].on_message = lambda asker, message: None
    for node in (0, 1, 3):
        nodes.sums[node].link_is_dead(2, "gone")
    fetch.link_is_dead(2, "gone")
    nodes.settle()
    [result] = nodes.ended
    if is_early:
        assert result.why is not None and result.is_away and nodes.files() == []
    else:
        assert result.why is None and fetched(nodes) == payload


def test_a_sum_that_is_wrong_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, _ = a_group(monkeypatch)
    give = nodes.rooms[2].net.send_block

    def give_wrong(node: int, span: Span, source: memoryview, *more: Any) -> bool:
        data = bytearray(source)
        data[0] ^= span.part is Part.SUM and node == 0
        return give(node, span, memoryview(data), *more)

    monkeypatch.setattr(nodes.rooms[2].net, "send_block", give_wrong)
    nodes.begin(GROUP_SOURCE)
    nodes.settle()
    [result] = nodes.ended
    assert result.why is not None and "checksum" in result.why
    assert nodes.files() == []
    assert nodes.doubts == {1, 2, 3}, "any of them may have given it"


def test_a_member_that_fails_ends_the_decoding() -> None:
    nodes = FetchNodes(3)
    lay_parities(nodes, [state(1000, seed) for seed in range(3)], 1)
    nodes.here.memory.remove(JOB_DIR / "rank-00000")
    nodes.open()
    members = (GroupMember(1, 1), GroupMember(2, 2))
    fetch = nodes.begin(RestoreSource(0, (), (0, 1, 2), 1, members))
    fetch.source_failed(2, "damaged")
    nodes.settle()
    [result] = nodes.ended
    assert result.why is not None
    assert nodes.files() == []


# -- where it goes


@given(
    stamps=st.lists(st.none() | st.builds(Stamp, st.integers(0, 9), st.just(2)), max_size=3),
    damaged=st.sets(st.integers(0, 2)),
)
def test_the_slot_that_is_worth_least_is_given_up(
    stamps: list[Stamp | None], damaged: set[int]
) -> None:
    memory = a_memory()
    worth = {}
    for index, stamp in enumerate(stamps):
        slot = seal(memory, JOB_DIR, 0, stamp or STAMP, b"x", index=index)
        is_damaged = index in damaged
        if stamp is None:
            slot.void()
        if is_damaged:
            flip(memory, slot.path, 2000)
        elif stamp is not None and stamp <= STAMP:
            worth[index] = stamp
    chosen = free_slot_path(memory, JOB_DIR, 0, STAMP)
    index = int(chosen.name.removeprefix("slot-"))
    assert index < max(2, len(stamps))
    if len(worth) == max(2, len(stamps)):
        assert worth[index] == min(worth.values())
    else:
        assert index not in worth


def test_of_what_all_go_back_behind_the_newest_is_given_up_first() -> None:
    """It is the one that not all ranks had; the other one may be wanted again."""
    memory = a_memory()
    for index, step in enumerate((STAMP.step + 1, STAMP.step + 2)):
        seal(memory, JOB_DIR, 0, Stamp(step, STAMP.epoch), b"x", index=index)
    assert free_slot_path(memory, JOB_DIR, 0, STAMP).name == "slot-1"


@given(nbytes=SIZES, at=st.integers(0, PAGE_BYTES - 1))
def test_a_damaged_slot_is_made_what_the_fetched_one_is(nbytes: int, at: int) -> None:
    memory, payload = a_memory(), state(nbytes)
    seal(memory, JOB_DIR, 0, STAMP, payload, index=1, manifest=MANIFEST).close()
    slot = seal(memory, JOB_DIR, 0, STAMP, payload, index=0, manifest=MANIFEST)
    flip(memory, slot.path, PAGE_BYTES + at % nbytes)
    with pytest.raises(DamageError):
        slot.verify_bytes()
    assert replace_bytes(memory, slot, slot_path(JOB_DIR, 0, 1)) is None
    slot.verify_bytes()
    assert payload_of(slot) == payload


def test_a_slot_that_is_too_small_stays_as_it_is() -> None:
    memory = a_memory()
    seal(memory, JOB_DIR, 0, STAMP, state(2 * PAGE_BYTES), index=1).close()
    slot = seal(memory, JOB_DIR, 0, STAMP, state(10))
    assert replace_bytes(memory, slot, slot_path(JOB_DIR, 0, 1)) is not None
    assert payload_of(slot) == state(10)
