"""Slot locks: a slot that is pinned stands still until the last has let go, and what is kept mapped
holds no memory that has lost its name."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.snapshot import Stamp
from keepstep.runtime.slot_locks import OwnSlots
from tests.runtime.replication.room import JOB_DIR, a_memory, seal

STAMP, NEXT = Stamp(3, 1), Stamp(4, 1)


def is_free(slot: Slot) -> bool:
    """Whether its rank could write there now."""
    found = slot.lock(exclusive=True)
    if found:
        slot.unlock()
    return found


@given(st.lists(st.booleans(), max_size=12))
def test_a_slot_stands_still_until_the_last_has_let_go(turns: list[bool]) -> None:
    memory = a_memory()
    slot = seal(memory, JOB_DIR, 0, STAMP, b"one")
    slots = OwnSlots(memory, JOB_DIR)
    pinned: list[Slot] = []
    for is_pin in turns:
        if is_pin:
            found = slots.pin(STAMP, 0)
            assert found is not None
            pinned.append(found)
        elif pinned:
            slots.unpin(pinned.pop())
        assert is_free(slot) is not bool(pinned)


def test_only_what_is_sealed_under_that_stamp_is_pinned() -> None:
    memory = a_memory()
    slot = seal(memory, JOB_DIR, 0, STAMP, b"one")
    slots = OwnSlots(memory, JOB_DIR)
    assert slots.pin(NEXT, 0) is None
    assert slots.pin(STAMP, 1) is None
    assert slot.lock(exclusive=True)
    assert slots.pin(STAMP, 0) is None, "its rank writes there"
    slot.unlock()
    found = slots.pin(STAMP, 0)
    assert found is not None
    slots.unpin(found)
    slot.void()
    assert slots.pin(STAMP, 0) is None
    assert is_free(slot)


def test_a_slot_that_was_made_anew_is_found_where_the_old_one_was() -> None:
    memory = a_memory()
    seal(memory, JOB_DIR, 0, STAMP, b"one").close()
    slots = OwnSlots(memory, JOB_DIR)
    old = slots.pin(STAMP, 0)
    assert old is not None
    fresh = Slot.create(memory, slot_path(JOB_DIR, 0, 0), 5000, 100)
    assert slots.pin(STAMP, 0) is None
    slots.unpin(old)
    fresh.close()
    seal(memory, JOB_DIR, 0, NEXT, b"two").close()
    found = slots.pin(NEXT, 0)
    assert found is not None
    assert bytes(found.payload[:3]) == b"two"


def test_what_has_lost_its_name_is_not_kept(tmp_path: Path) -> None:
    seal(MEMORY, tmp_path, 0, STAMP, b"one").close()
    slots = OwnSlots(MEMORY, tmp_path)

    def mapped() -> bool:
        return str(slot_path(tmp_path, 0, 0)) in Path("/proc/self/maps").read_text()

    for is_pinned in (False, True):
        found = slots.pin(STAMP, 0)
        assert found is not None
        if not is_pinned:
            slots.unpin(found)
        assert mapped()
        MEMORY.remove(slot_path(tmp_path, 0, 0))
        slots.drop_gone()
        assert mapped() is is_pinned
        if is_pinned:
            slots.unpin(found)
            assert not mapped()
        else:
            seal(MEMORY, tmp_path, 0, STAMP, b"one").close()
