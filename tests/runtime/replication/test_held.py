"""Held: what rests on a node for others is offered only where it can be used, and what is given up
is exactly what was meant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.errors import MemoryBudgetError
from keepstep.model.restore_sources import HeldParity, HeldSnapshot
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.runtime.replication.encode import ParityContents, SnapshotSizes, contents_of
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.sim.protocol.world.memory import SimMemory
from tests.runtime.fakes import FakeExecutor
from tests.runtime.replication.room import BLOCK_BYTES, JOB_DIR, JOB_HASH, a_memory, flip, seal

COPIES = JOB_DIR / "held"
PARITIES = JOB_DIR / "parity"
STAMP = Stamp(4, 1)
GROUP = (0, 1, 2)
SIZES = SnapshotSizes(1000, 2, BLOCK_BYTES)
STAMPS = st.builds(Stamp, st.integers(0, 4), st.integers(0, 2))
SHELVES = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 1)), st.tuples(STAMPS, st.sampled_from([3, 4]))
)


def contents(mine: int) -> ParityContents:
    return contents_of(dict.fromkeys(GROUP, SIZES), GROUP, 1, mine)


def seal_parity(
    memory: SimMemory, rank: int, stamp: Stamp, world_size: int = 3, index: int = 0
) -> Slot:
    known = contents(rank if rank in GROUP else 0)
    payload, text = bytes(known.nbytes), known.to_text()
    return seal(memory, PARITIES, rank, stamp, payload, world_size, index, text)


def held_in(memory: SimMemory) -> HeldSnapshots:
    return HeldSnapshots(memory, FakeExecutor(), JOB_DIR)


@given(copies=SHELVES, parities=SHELVES, world_size=st.sampled_from([3, 4, 5]))
def test_of_a_job_of_another_size_nothing_is_offered(
    copies: dict[tuple[int, int], tuple[Stamp, int]],
    parities: dict[tuple[int, int], tuple[Stamp, int]],
    world_size: int,
) -> None:
    memory = a_memory()
    for (rank, index), (stamp, of_size) in copies.items():
        seal(memory, COPIES, rank, stamp, b"x", of_size, index).close()
    for (rank, index), (stamp, of_size) in parities.items():
        seal_parity(memory, rank, stamp, of_size, index).close()
    held = held_in(memory)
    # of two slots with one stamp (never made by a keeper) the later one is known
    of_copies = {(rank, stamp): of for (rank, _), (stamp, of) in sorted(copies.items())}
    of_parities = {(rank, stamp): of for (rank, _), (stamp, of) in sorted(parities.items())}
    assert set(held.snapshots(world_size)) == {
        HeldSnapshot(rank, stamp) for (rank, stamp), of in of_copies.items() if of == world_size
    }
    assert set(held.coded(world_size)) == {
        HeldParity(rank, stamp, GROUP, 1)
        for (rank, stamp), of in of_parities.items()
        if of == world_size
    }


@given(at=st.integers(0, PAGE_BYTES - 1))
def test_what_has_a_damaged_header_is_not_offered(at: int) -> None:
    memory = a_memory()
    seal(memory, COPIES, 0, STAMP, b"x").close()
    seal(memory, COPIES, 1, STAMP, b"y").close()
    seal_parity(memory, 2, STAMP).close()
    held = held_in(memory)
    flip(memory, slot_path(COPIES, 0, 0), at)
    flip(memory, slot_path(PARITIES, 2, 0), at)
    assert held.snapshots(3) == [HeldSnapshot(1, STAMP)]
    assert held.coded(3) == []
    assert len(held.prove()) == 2
    assert held.prove() == []
    assert held.snapshots(3) == [HeldSnapshot(1, STAMP)]


def test_a_header_that_is_damaged_while_it_is_looked_through_is_not_offered() -> None:
    """Between finding what is sealed and reading of which job it is."""
    memory = a_memory()
    seal(memory, COPIES, 0, STAMP, b"x").close()
    seal(memory, COPIES, 1, STAMP, b"y").close()
    seal_parity(memory, 2, STAMP).close()
    held = held_in(memory)
    copies, parities = held.copies.sealed(), held.parities.sealed()
    held.copies.sealed = lambda: copies  # type: ignore[method-assign]
    held.parities.sealed = lambda: parities  # type: ignore[method-assign]
    flip(memory, slot_path(COPIES, 0, 0), 100)
    flip(memory, slot_path(PARITIES, 2, 0), 100)
    assert held.snapshots(3) == [HeldSnapshot(1, STAMP)]
    assert held.coded(3) == []


@given(copies=SHELVES, parities=SHELVES, back_to=st.none() | STAMPS)
def test_exactly_what_is_newer_is_forgotten(
    copies: dict[tuple[int, int], tuple[Stamp, int]],
    parities: dict[tuple[int, int], tuple[Stamp, int]],
    back_to: Stamp | None,
) -> None:
    memory = a_memory()
    for (rank, index), (stamp, _) in copies.items():
        seal(memory, COPIES, rank, stamp, b"x", index=index).close()
    for (rank, index), (stamp, _) in parities.items():
        seal_parity(memory, rank, stamp, index=index).close()
    held = held_in(memory)
    held.forget_newer(back_to)
    for shelf, before in ((held.copies, copies), (held.parities, parities)):
        kept = {(rank, stamp) for (rank, _), (stamp, _) in before.items()}
        kept = {(r, stamp) for r, stamp in kept if back_to is not None and stamp <= back_to}
        assert set(shelf.sealed()) == kept
        for slot in shelf.sealed().values():
            slot.verify_bytes()


def test_what_is_half_written_is_forgotten_too() -> None:
    memory = a_memory()
    slot = seal(memory, COPIES, 0, STAMP, b"x")
    slot.begin(JOB_HASH, 0, 3, 1, STAMP)
    held = held_in(memory)
    held.forget_newer(Stamp(9, 9))
    assert {view.state.name for view in held.copies.views(0)} == {"EMPTY"}


@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_only_what_is_kept_takes_memory(copies: set[int], parities: set[int]) -> None:
    memory = a_memory()
    for rank in range(4):
        seal(memory, COPIES, rank, STAMP, b"x").close()
        seal_parity(memory, rank, STAMP).close()
    held = held_in(memory)
    held.keep_only(copies, parities)
    assert memory.names(COPIES) == [f"rank-{rank:05d}" for rank in sorted(copies)]
    assert memory.names(PARITIES) == [f"rank-{rank:05d}" for rank in sorted(parities)]
    assert {rank for rank, _ in held.copies.sealed()} == copies


def test_the_group_of_a_parity_is_remembered_until_it_is_given_up() -> None:
    held = held_in(a_memory())
    held.remember(1, STAMP, contents(1))
    assert held.members_of(1, STAMP) == GROUP
    assert held.members_of(1, STAMP) == ()


def test_a_slot_is_made_by_a_worker_and_known_until_then() -> None:
    workers = FakeExecutor()
    held = HeldSnapshots(a_memory(), workers, JOB_DIR)
    made: list[Slot | MemoryBudgetError] = []
    held.make(held.copies, 2, lambda: held.copies.take(2, 0, 100, 100), made.append)
    assert held.is_making(held.copies, 2)
    assert not held.is_making(held.parities, 2)
    assert not made
    workers.run()
    assert not held.is_making(held.copies, 2)
    assert [type(one) for one in made] == [Slot]


@given(
    held=st.dictionaries(st.integers(0, 1), st.builds(Stamp, st.integers(0, 9), st.integers(1, 3))),
    to=st.none() | st.builds(Stamp, st.integers(0, 9), st.integers(1, 2)),
)
def test_what_comes_as_an_epoch_begins_stays(held: dict[int, Stamp], to: Stamp | None) -> None:
    """A node that heard the word earlier sends what it has of the new epoch, before it is heard
    here."""
    memory = a_memory()
    for index, stamp in held.items():
        seal(memory, COPIES, 0, stamp, b"x", index=index).close()
    coming = Slot.create(memory, slot_path(COPIES, 1, 0), 100, PAGE_BYTES)
    coming.begin(JOB_HASH, 1, 3, 1, Stamp(9, 2))  # what all go back to, under another placement
    coming.close()
    found = held_in(memory)
    found.forget_newer(to, before_epoch=3)
    kept = {s for s in held.values() if s.epoch == 3 or (to is not None and s <= to)}
    assert {stamp for _, stamp in found.copies.sealed()} == kept
    assert found.copies.views(1)[0].state is SlotState.WRITING
