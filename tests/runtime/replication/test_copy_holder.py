"""Copy holder: what is acknowledged is the owner's snapshot, byte by byte, and nothing else is
kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot
from keepstep.model.messages.peers import (
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyUnavailable,
    FetchRanges,
)
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.copy_holder import CopyHolder
from keepstep.runtime.replication.holder_replies import HolderReplies
from keepstep.runtime.replication.receive import copy_ranges_of
from keepstep.runtime.replication.slot_room import SlotRoom
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_DIR,
    JOB_HASH,
    ReplicationRoom,
    a_memory,
    an_offer,
    bytes_of,
    payload_of,
    seal,
)

STAMP, NEXT = Stamp(3, 1), Stamp(4, 1)
OWNER = 1  # rank and node
MANIFEST = b"m" * 700


def state(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Holding:
    """Node 0, which is offered copies of rank 1 on node 1."""

    def __init__(self, budget_bytes: int = 1 << 20) -> None:
        self.room = ReplicationRoom(budget_bytes=budget_bytes)
        self.room.join()
        replies = HolderReplies(self.room.links)
        slots = SlotRoom(self.room.held, replies, self.room.journal)
        self.holder = CopyHolder(
            self.room.world, self.room.links, self.room.held, slots, replies, JOB_HASH
        )

    def offer(self, owner: Slot) -> None:
        self.holder.offered(an_offer(owner))
        self.room.settle()

    def give_small_parts(self, owner: Slot, chance: random.Random) -> None:
        """What proves the payload, which an owner sends first."""
        parts = [range_ for range_ in everything(owner) if range_.part is not Part.PAYLOAD]
        chance.shuffle(parts)
        for range_ in parts:
            self.room.give(OWNER, owner, range_)
        self.room.settle()

    def asked(self) -> list[BlockRange]:
        return [r for _, message in self.room.sent(FetchRanges) for r in message.ranges]

    def copy(self, stamp: Stamp = STAMP) -> Slot | None:
        return self.room.held.copies.find(OWNER, stamp)


def everything(owner: Slot) -> list[BlockRange]:
    header = owner.header()
    return copy_ranges_of(header.payload_bytes, header.manifest_bytes, BLOCK_BYTES)


def an_owner(payload: bytes, stamp: Stamp = STAMP) -> Slot:
    return seal(a_memory(), JOB_DIR, OWNER, stamp, payload, manifest=MANIFEST)


@given(nbytes=st.integers(1, 6 * BLOCK_BYTES), seed=st.integers(0, 99))
def test_a_copy_is_acknowledged_once_it_is_whole(nbytes: int, seed: int) -> None:
    chance = random.Random(seed)
    here, owner = Holding(), an_owner(state(nbytes))
    here.offer(owner)
    assert [node for node, _ in here.room.sent(CopyAccepted)] == [OWNER]
    here.give_small_parts(owner, chance)
    asked = here.asked()
    assert sorted(asked) == [r for r in everything(owner) if r.part is Part.PAYLOAD]
    chance.shuffle(asked)
    for range_ in asked:
        assert not here.room.sent(CopyAcked)
        assert here.copy() is None
        assert here.room.give(OWNER, owner, range_)
        here.room.settle()
    [(node, acked)] = here.room.sent(CopyAcked)
    assert (node, acked.rank, acked.stamp) == (OWNER, OWNER, STAMP)
    copy = here.copy()
    assert copy is not None
    copy.verify_bytes()
    assert payload_of(copy) == payload_of(owner)
    assert not here.room.give(OWNER, owner, asked[0]), "nothing is expected any more"


@given(blocks=st.lists(st.booleans(), min_size=1, max_size=6))
def test_only_what_this_node_does_not_have_is_asked_for(blocks: list[bool]) -> None:
    here, payload = Holding(), state(BLOCK_BYTES * len(blocks))
    ours = b"".join(
        payload[at * BLOCK_BYTES :][:BLOCK_BYTES] if is_same else state(BLOCK_BYTES, at + 2)
        for at, is_same in enumerate(blocks)
    )
    seal(here.room.memory, JOB_DIR, 0, STAMP, ours).close()
    owner = an_owner(payload)
    here.offer(owner)
    here.give_small_parts(owner, random.Random(1))
    lacks = [at * BLOCK_BYTES for at, is_same in enumerate(blocks) if not is_same]
    assert here.asked() == [BlockRange(Part.PAYLOAD, at, BLOCK_BYTES) for at in lacks]
    for range_ in here.asked():
        here.room.give(OWNER, owner, range_)
    here.room.settle()
    copy = here.copy()
    assert copy is not None
    assert payload_of(copy) == payload
    assert len(here.room.sent(CopyAcked)) == 1


@given(blocks=st.lists(st.sampled_from(["same", "moved", "flipped", "new"]), max_size=6))
def test_what_has_not_changed_since_the_older_copy_is_not_asked_for(blocks: list[str]) -> None:
    """But a block of it in which a bit has flipped is."""
    here, before = Holding(), state(BLOCK_BYTES * (len(blocks) + 1))
    receive(here, an_owner(before))
    older = here.copy()
    assert older is not None
    asked = len(here.asked())
    now = bytearray(before)
    for at, kind in enumerate(blocks):
        place = slice(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES)
        if kind == "moved":
            now[place] = before[-BLOCK_BYTES:]
        elif kind == "new":
            now[place] = state(BLOCK_BYTES, at + 2)
        elif kind == "flipped":
            older.payload[at * BLOCK_BYTES + 3] ^= 1
    owner = an_owner(bytes(now), NEXT)
    here.offer(owner)
    here.give_small_parts(owner, random.Random(1))
    lacks = [at * BLOCK_BYTES for at, kind in enumerate(blocks) if kind in ("new", "flipped")]
    missing = here.asked()[asked:]
    assert missing == [BlockRange(Part.PAYLOAD, at, BLOCK_BYTES) for at in lacks]
    for range_ in missing:
        here.room.give(OWNER, owner, range_)
    here.room.settle()
    copy = here.copy(NEXT)
    assert copy is not None
    copy.verify_bytes()
    assert payload_of(copy) == bytes(now)


@given(data=st.data())
def test_what_does_not_prove_is_not_kept(data: st.DataObject) -> None:
    here, owner = Holding(), an_owner(state(3 * BLOCK_BYTES + 10))
    flipped = data.draw(st.sampled_from(everything(owner)))
    at = data.draw(st.integers(0, flipped.length - 1))

    def give(range_: BlockRange) -> None:
        sent = bytearray(bytes_of(owner, range_))
        if range_ == flipped:
            sent[at] ^= 1
        here.room.give(OWNER, owner, range_, bytes(sent))

    here.offer(owner)
    for range_ in everything(owner):
        if range_.part is not Part.PAYLOAD:
            give(range_)
    here.room.settle()
    for range_ in here.asked():
        give(range_)
    here.room.settle()
    assert not here.room.sent(CopyAcked)
    [(node, refused)] = here.room.sent(CopyUnavailable)
    assert (node, refused.rank, refused.stamp) == (OWNER, OWNER, STAMP)
    assert here.room.journal.kinds == ["copy-refused"]
    assert here.copy() is None


def receive(here: Holding, owner: Slot) -> None:
    """All of it."""
    here.offer(owner)
    here.give_small_parts(owner, random.Random(1))
    for range_ in here.asked():
        here.room.give(OWNER, owner, range_)
    here.room.settle()


def test_what_rests_here_already_is_acknowledged_at_once() -> None:
    here, owner = Holding(), an_owner(state(1000))
    receive(here, owner)
    here.offer(owner)
    assert len(here.room.sent(CopyAcked)) == 2
    assert len(here.room.sent(CopyAccepted)) == 1


def test_another_computation_of_the_same_stamp_takes_its_place() -> None:
    here = Holding()
    receive(here, an_owner(state(1000, seed=1)))
    other = an_owner(state(1000, seed=2))
    receive(here, other)
    copy = here.copy()
    assert copy is not None
    assert payload_of(copy) == payload_of(other)


def test_a_copy_taken_from_this_nodes_own_ranks_is_taken_again_after_it_was_damaged() -> None:
    """Nothing of it was asked for, and its owner's next offer was never answered."""
    here, payload = Holding(), state(1000)
    seal(here.room.memory, JOB_DIR, 0, STAMP, payload).close()
    owner = an_owner(payload)
    receive(here, owner)
    copy = here.copy()
    assert copy is not None
    copy.void()
    receive(here, owner)
    assert not here.asked()
    assert len(here.room.sent(CopyAcked)) == 2
    copy = here.copy()
    assert copy is not None
    assert payload_of(copy) == payload


def test_a_newer_offer_takes_the_place_of_what_is_on_its_way() -> None:
    here, old, new = Holding(), an_owner(state(1000)), an_owner(state(1000, 2), NEXT)
    here.offer(old)
    here.offer(new)
    assert not any(here.room.give(OWNER, old, range_) for range_ in everything(old))
    receive(here, new)
    assert (here.copy(STAMP) is None, here.copy(NEXT) is None) == (True, False)
    assert [message.stamp for _, message in here.room.sent(CopyAcked)] == [NEXT]


@pytest.mark.parametrize("how", ["mesh", "policy"])
def test_what_counts_no_more_is_never_acknowledged(how: str) -> None:
    here, owner = Holding(), an_owner(state(1000))
    here.offer(owner)
    last = everything(owner)[-1]
    for range_ in everything(owner)[:-1]:
        here.room.give(OWNER, owner, range_)
    if how == "mesh":
        here.holder.end()
    else:
        here.holder.keep_only([2])
    assert not here.room.give(OWNER, owner, last)
    here.room.settle()
    assert not here.room.sent(CopyAcked)
    assert here.copy() is None


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_slot_into_which_a_link_may_write_is_not_used_again(is_dead: bool) -> None:
    here, owner = Holding(), an_owner(state(1000))
    here.offer(owner)
    span = Span(OWNER, STAMP, *everything(owner)[0])
    assert here.room.inbox.place(OWNER, span) is not None
    if is_dead:
        here.holder.link_is_dead(OWNER)
    here.holder.end()
    there = here.room.memory.names(JOB_DIR / "held" / f"rank-{OWNER:05d}")
    assert there == (["slot-0"] if is_dead else [])


def test_where_there_is_no_memory_it_is_declined() -> None:
    here, owner = Holding(budget_bytes=BLOCK_BYTES), an_owner(state(1000))
    here.offer(owner)
    [(node, declined)] = here.room.sent(CopyDeclined)
    assert (node, declined.rank, declined.stamp) == (OWNER, OWNER, STAMP)
    assert not here.room.sent(CopyAccepted)
