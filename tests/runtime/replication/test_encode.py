"""Encode: whatever the members' sizes, and in whatever order their pieces come, the parities give
back any members that are lost."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.checksum import checksum
from keepstep.coding.reed_solomon import rebuild, solve
from keepstep.core.redundancy.stripes import StripeRegion, decode_plan
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.runtime.replication.encode import (
    Encoding,
    SnapshotSizes,
    contents_from,
    contents_of,
    ranges_for,
)
from tests.runtime.replication.room import (
    BLOCK_BYTES,
    JOB_DIR,
    JOB_HASH,
    a_memory,
    bytes_of,
    payload_of,
    seal,
)

STAMP = Stamp(6, 1)
FIRST_RANK = 3  # ranks are no indices
SIZES = st.lists(st.integers(1, 4 * BLOCK_BYTES), min_size=2, max_size=5)
Sent = tuple[int, BlockRange]  # whose, and what of it


class StripeGroup:
    """Members with a sealed snapshot each."""

    def __init__(self, sizes: list[int], tolerates: int = 1) -> None:
        chance = random.Random(f"{sizes}")
        self.memory = a_memory()
        self.tolerates = tolerates
        self.members = tuple(range(FIRST_RANK, FIRST_RANK + len(sizes)))
        self.slots: dict[int, Slot] = {}
        for rank, nbytes in zip(self.members, sizes, strict=True):
            manifest = b"m" * chance.randrange(1, 100)
            payload = chance.randbytes(nbytes)
            self.slots[rank] = seal(self.memory, JOB_DIR, rank, STAMP, payload, manifest=manifest)
        self.sizes = {rank: self._sizes(slot) for rank, slot in self.slots.items()}

    def _sizes(self, slot: Slot) -> SnapshotSizes:
        header = slot.header()
        return SnapshotSizes(header.payload_bytes, header.manifest_bytes, BLOCK_BYTES)


class Keeping:
    """The parity that one member keeps."""

    def __init__(self, group: StripeGroup, mine: int) -> None:
        self.group = group
        self.contents = contents_of(group.sizes, group.members, group.tolerates, mine)
        text_bytes = len(self.contents.to_text())
        path = slot_path(JOB_DIR / "parity", mine, 0)
        self.slot = Slot.create(group.memory, path, self.contents.nbytes, text_bytes)
        self.slot.payload[:] = b"?" * len(self.slot.payload)  # of a parity before
        self.slot.begin(JOB_HASH, mine, len(group.members), 0, STAMP)
        self.wholes = 0
        self.encoding = Encoding(self.slot, self.contents, mine, STAMP, self._on_whole)

    def _on_whole(self) -> None:
        self.wholes += 1

    def awaited(self) -> list[Sent]:
        stripes, sizes = self.contents.stripes, self.group.sizes
        return [
            (rank, range_)
            for rank in self.encoding.ranks
            for range_ in ranges_for(stripes, sizes[rank], rank, self.encoding.mine)
        ]

    def take(self, sent: Sent, node: int = 0, data: bytes | None = None) -> bool:
        """Whether it is wanted."""
        rank, range_ = sent
        span = Span(rank, STAMP, *range_)
        place = self.encoding.place(node, span)
        if place is None:
            return False
        place[:] = bytes_of(self.group.slots[rank], range_) if data is None else data
        self.encoding.arrived(node, span, checksum(place))
        return True

    def take_all(self, chance: random.Random) -> None:
        sent = self.awaited()
        chance.shuffle(sent)
        for one in sent:
            assert self.take(one, node=chance.randrange(3))


def keep_all(group: StripeGroup, chance: random.Random) -> dict[int, Keeping]:
    """A sealed parity of every member."""
    parities = {mine: Keeping(group, mine) for mine in group.members}
    for keeping in parities.values():
        keeping.take_all(chance)
        keeping.encoding.seal(5)
    return parities


def decoded(
    group: StripeGroup, parities: dict[int, Keeping], lost: Collection[int], member: int
) -> bytes:
    """The payload of a lost member, from what the others have."""
    stripes = parities[member].contents.stripes
    found = bytearray(group.sizes[member].payload_bytes)
    for combine in decode_plan(stripes, lost, member):
        [target] = combine.targets
        if target.region is not StripeRegion.DATA:
            continue
        sources = []
        for piece in combine.sources:
            assert piece.member not in lost
            is_data = piece.region is StripeRegion.DATA
            slot = group.slots[piece.member] if is_data else parities[piece.member].slot
            sources.append(bytearray(payload_of(slot)[piece.start : piece.stop]))
        have = tuple(piece.position for piece in combine.sources)
        rows = solve(stripes.k, stripes.tolerates, have, (target.position,))
        rebuild(rows, sources, [memoryview(found)[target.start : target.stop]])
    return bytes(found)


@given(sizes=SIZES, data=st.data())
def test_any_lost_member_is_decoded(sizes: list[int], data: st.DataObject) -> None:
    tolerates = data.draw(st.integers(1, min(3, len(sizes) - 1)))
    chance = random.Random(data.draw(st.integers(0, 99)))
    group = StripeGroup(sizes, tolerates)
    parities = keep_all(group, chance)
    for lost in combinations(group.members, tolerates):
        for member in lost:
            assert decoded(group, parities, lost, member) == payload_of(group.slots[member])


@given(sizes=SIZES, seed=st.integers(0, 99))
def test_what_proves_the_others_lies_beside_a_parity(sizes: list[int], seed: int) -> None:
    group = StripeGroup(sizes)
    for mine, keeping in keep_all(group, random.Random(seed)).items():
        header, manifest = keeping.slot.verify_bytes()
        assert (header.rank, header.stamp, header.job_hash) == (mine, STAMP, JOB_HASH)
        contents = contents_from(manifest, BLOCK_BYTES)
        assert contents == keeping.contents
        assert set(contents.metas) == set(group.members) - {mine}
        for rank in contents.metas:
            owner = group.slots[rank]
            for part in (Part.HEADER, Part.TABLE, Part.MANIFEST):
                at, nbytes = contents.where(rank, part)
                expected = bytes(owner.part(part, owner.header()))
                assert payload_of(keeping.slot)[at : at + nbytes] == expected


@given(sizes=SIZES, seed=st.integers(0, 99))
def test_every_piece_is_added_once_however_often_it_comes(sizes: list[int], seed: int) -> None:
    group = StripeGroup(sizes)
    chance = random.Random(seed)
    keeping, once = Keeping(group, FIRST_RANK), Keeping(group, FIRST_RANK)
    once.take_all(chance)
    for sent in keeping.awaited():
        assert not keeping.wholes
        span = Span(sent[0], STAMP, *sent[1])
        assert keeping.take(sent)
        assert not keeping.take(sent)
        keeping.encoding.arrived(0, span, 0)
    assert (keeping.wholes, once.wholes) == (1, 1)
    nbytes = keeping.contents.nbytes
    assert bytes(keeping.slot.payload[:nbytes]) == bytes(once.slot.payload[:nbytes])


def test_what_is_not_of_the_group_has_no_place() -> None:
    group = StripeGroup([1000, 1000, 1000])
    keeping = Keeping(group, FIRST_RANK)
    rank, (part, offset, length) = keeping.awaited()[0]
    for sent in (
        (FIRST_RANK, BlockRange(Part.HEADER, 0, 4096)),  # its own needs no parity here
        (99, BlockRange(Part.HEADER, 0, 4096)),
        (rank, BlockRange(part, offset, length - 1)),
        (rank, BlockRange(part, offset + 1, length)),
    ):
        assert keeping.encoding.place(0, Span(sent[0], STAMP, *sent[1])) is None


def test_after_the_stop_nothing_is_added() -> None:
    group = StripeGroup([1000, 1000])
    keeping = Keeping(group, FIRST_RANK)
    sent = [one for one in keeping.awaited() if one[1].part is Part.PAYLOAD]
    keeping.encoding.stop()
    before = bytes(keeping.slot.payload)
    for one in sent:
        keeping.take(one)
    assert bytes(keeping.slot.payload) == before
    assert not keeping.wholes


@pytest.mark.parametrize("part", [Part.HEADER, Part.TABLE, Part.MANIFEST])
def test_a_bit_that_flipped_at_its_owner_leaves_no_parity(part: Part) -> None:
    group = StripeGroup([1000, 600, 700])
    keeping = Keeping(group, FIRST_RANK)
    flipped = next(one for one in keeping.awaited() if one[1].part is part)
    for sent in keeping.awaited():
        data = bytearray(bytes_of(group.slots[sent[0]], sent[1]))
        if sent == flipped:
            data[len(data) // 2] ^= 16
        keeping.take(sent, data=bytes(data))
    assert keeping.wholes == 1
    with pytest.raises(DamageError):
        keeping.encoding.seal(5)
    assert keeping.slot.header().state is SlotState.WRITING


@given(sizes=SIZES, data=st.data())
def test_a_bit_that_flips_in_a_parity_under_way_is_found(
    sizes: list[int], data: st.DataObject
) -> None:
    """By the next piece that is added there, at the end, or in the sealed parity by its table."""
    tolerates = data.draw(st.integers(1, min(3, len(sizes) - 1)))
    keeping = Keeping(StripeGroup(sizes, tolerates), FIRST_RANK)
    sent = keeping.awaited()
    data.draw(st.randoms()).shuffle(sent)
    flips_before = data.draw(st.integers(0, len(sent)))
    at = data.draw(st.integers(0, keeping.contents.stripes.parity_bytes - 1))
    for count, one in enumerate(sent):
        if count == flips_before:
            keeping.slot.payload[at] ^= 4
        keeping.take(one)
    if flips_before == len(sent):
        keeping.slot.payload[at] ^= 4
    right = keep_all(keeping.group, random.Random(1))[FIRST_RANK]
    try:
        keeping.encoding.seal(5)
        keeping.slot.verify_bytes()
    except DamageError:
        return
    assert payload_of(keeping.slot) == payload_of(right.slot), "it flipped where nothing was yet"


def test_a_slot_that_was_given_up_meanwhile_becomes_no_parity() -> None:
    keeping = Keeping(StripeGroup([1000, 1000]), FIRST_RANK)
    keeping.take_all(random.Random(1))
    keeping.slot.void()
    with pytest.raises(DamageError):
        keeping.encoding.seal(5)
    assert keeping.slot.header().state is SlotState.EMPTY
