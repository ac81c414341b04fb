"""The budget: a count that fits, or an error with the numbers and the fix."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.memory_budget import (
    CHEAP_RATIO,
    HEADROOM_RATIO,
    SMALL_BLOCKS,
    held_slots,
    plan,
)
from keepstep.errors import MemoryBudgetError
from keepstep.model.topology import Auto, Copies, NoRedundancy, Parity, ReedSolomon
from keepstep.model.units import GIB, MIB

sizes = st.integers(1, 64 * GIB)


@given(
    slot_bytes=st.integers(4096, 8 * GIB),
    ranks=st.integers(1, 8),
    free=sizes,
    available=sizes,
    wanted=st.sampled_from([0, 2, 3, 8]),
    store=st.booleans(),
)
def test_what_is_planned_fits_and_is_at_least_two(
    slot_bytes: int, ranks: int, free: int, available: int, wanted: int, store: bool
) -> None:
    usable = min(free, available) * (1 - HEADROOM_RATIO)
    try:
        made = plan(slot_bytes, ranks, free, available, wanted, store, "/dev/shm")
    except MemoryBudgetError:
        assert (wanted or 2) * ranks * slot_bytes > int(usable)
    else:
        assert made.total_bytes == made.slots * ranks * slot_bytes <= usable
        assert made.slots == made.most == wanted if wanted else 2 <= made.slots <= made.most
        assert made.most * ranks * slot_bytes <= usable


def most(slot_bytes: int, has_store: bool = False, many_nodes: bool = False) -> tuple[int, int]:
    """(slots to begin with, and at most) of one rank where 1 GiB is free."""
    found = plan(slot_bytes, 1, GIB, GIB, 0, has_store, "/dev/shm", many_nodes=many_nodes)
    return found.slots, found.most


def test_two_to_begin_with_and_a_third_where_it_is_cheap() -> None:
    each = int(CHEAP_RATIO * GIB / 4.5)
    assert most(each) == (2, 3)
    assert most(each, many_nodes=True) == (2, 4)
    assert most(3 * each) == (2, 2)


def test_all_at_once_where_they_are_small() -> None:
    block = 4 * MIB
    assert most(SMALL_BLOCKS * block // 3) == (3, 3)
    assert most(SMALL_BLOCKS * block // 3 + 1) == (2, 3)


def test_a_store_asks_for_one_more_and_does_without_when_memory_is_short() -> None:
    assert most(100 * MIB, has_store=True) == (2, 3)
    assert most(400 * MIB, has_store=True) == (2, 2)


def test_how_many_there_may_be_is_said() -> None:
    assert (
        "up to 3 when captures find none free"
        in plan(100 * MIB, 1, 4 * GIB, 4 * GIB, 0, False, "/dev/shm").why
    )


def test_what_was_asked_for_is_not_lowered() -> None:
    with pytest.raises(MemoryBudgetError, match="4 slots x 1 rank x 400.0 MiB = 1.6 GiB needed"):
        plan(400 * MIB, 1, GIB, GIB, 4, True, "/dev/shm")


def test_the_usual_container_is_told_the_numbers_and_the_fix() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(500 * MIB, 2, 64 * MIB, 100 * GIB, 0, False, "/dev/shm")
    message = str(caught.value)
    for part in (
        "2 slots x 2 ranks x 500.0 MiB = 2.0 GiB",
        "/dev/shm has 64.0 MiB free",
        "memory available: 100.0 GiB",
        "5% kept free",
        "arena_dir",
    ):
        assert part in message
    advised = re.search(r"--shm-size=(\d+)m", message)
    assert (
        advised
        and plan(500 * MIB, 2, int(advised[1]) * MIB, 100 * GIB, 0, False, "/dev/shm").slots == 2
    ), "following the advice helps"


def test_short_memory_is_named_apart_from_a_small_filesystem() -> None:
    with pytest.raises(MemoryBudgetError, match="memory is short"):
        plan(500 * MIB, 1, 100 * GIB, 600 * MIB, 0, False, "/dev/shm")


def test_what_is_held_for_other_nodes_is_counted() -> None:
    assert [
        held_slots(p) for p in (Copies(3), Parity(5), ReedSolomon(4, 2), Auto(), NoRedundancy())
    ] == [4.0, 0.5, 1.0, 0.0, 0.0]
    alone = plan(GIB, 1, 5 * GIB, 5 * GIB, 2, False, "/dev/shm")
    assert alone.total_bytes == 2 * GIB
    together = plan(GIB, 1, 5 * GIB, 5 * GIB, 2, False, "/dev/shm", held=2.0)
    assert "2.0 GiB held for other nodes" in together.why
    with pytest.raises(MemoryBudgetError, match=r"4\.0 GiB held for other nodes"):
        plan(GIB, 1, 5 * GIB, 5 * GIB, 2, False, "/dev/shm", held=4.0)


@given(slot_bytes=st.integers(4096, 8 * GIB), ranks=st.integers(1, 8), free=sizes)
def test_what_is_there_already_fits_when_others_have_taken_the_rest(
    slot_bytes: int, ranks: int, free: int
) -> None:
    there = 2 * ranks * slot_bytes
    assert plan(slot_bytes, ranks, 0, free, 2, False, "/dev/shm", there_bytes=there).slots == 2
    assert plan(slot_bytes, ranks, free, 0, 0, True, "/dev/shm", there_bytes=there).slots >= 2


def test_what_a_restore_needs_besides_the_slots_is_counted() -> None:
    """Of the machine's memory; it does not lie in the arena."""
    fits = plan(GIB, 2, 16 * GIB, 8 * GIB, 2, False, "/dev/shm", restoring_bytes=GIB)
    assert "and 2.0 GiB while all restore" in fits.why
    with pytest.raises(MemoryBudgetError, match="memory is short"):
        plan(GIB, 2, 16 * GIB, 8 * GIB, 2, False, "/dev/shm", restoring_bytes=2 * GIB)
    plan(GIB, 2, 5 * GIB, 16 * GIB, 2, False, "/dev/shm", restoring_bytes=5 * GIB)


def test_a_few_random_states_are_not_worth_a_word() -> None:
    assert (
        "restore"
        not in plan(GIB, 1, 16 * GIB, 8 * GIB, 2, False, "/dev/shm", 0, False, 0, MIB, 5000).why
    )
