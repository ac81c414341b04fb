"""Scrubber: every flipped byte is found, told once, and mended where others have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.messages.keeper_rank import SlotDamaged
from keepstep.model.snapshot import RankStatus, SlotState, SlotView, Stamp
from keepstep.model.units import PAGE_BYTES, S_NS
from keepstep.runtime.keeper.scrubber import Scrubber, scrub, void_damaged
from keepstep.runtime.keeper_world import KeeperWorld
from tests.runtime.fakes import FakeExecutor, FakeJournal, FakeTime
from tests.runtime.replication.room import BLOCK_BYTES, JOB_DIR, JOB_HASH, a_memory, flip, seal

STAMP = Stamp(5, 1)
PAYLOAD = bytes(range(256)) * (2 * BLOCK_BYTES // 256) + b"tail"
TABLE_AT = 2 * PAGE_BYTES  # behind header and payload, which is less than a page
USED = [
    *range(PAGE_BYTES + len(PAYLOAD)),
    *range(TABLE_AT, TABLE_AT + 3 * 8),
    *range(TABLE_AT + PAGE_BYTES, TABLE_AT + PAGE_BYTES + 2),  # the manifest
]
EVERY_S = 60.0
ROOTS = (JOB_DIR, JOB_DIR / "held", JOB_DIR / "parity")


@dataclass
class FakeMeshState:
    """As much of a `MeshState` as scrubbing needs. `mending`: what it was asked to mend."""

    own_ranks: range = range(2)
    damaged: list[Path] = field(default_factory=list)
    compared: int = 0
    mending: list[tuple[int, int, Stamp, Callable[[str | None], None]]] = field(
        default_factory=list
    )

    @property
    def recovery(self) -> Any:
        return SimpleNamespace(mend=lambda *about: self.mending.append(about))

    def damaged_at_rest(self, path: Path, why: str) -> None:
        self.damaged.append(path)

    def compare(self) -> None:
        self.compared += 1


class ScrubbedNode:
    """See `ScrubHost`. Every root has sealed slots of ranks 0 and 1."""

    def __init__(self, every_s: float = EVERY_S, state: FakeMeshState | None = None) -> None:
        self.memory = a_memory()
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.workers = FakeExecutor()
        self.mesh_state: Any = state
        self.told: list[tuple[int, Any]] = []
        self.views = [SlotView(SlotState.SEALED, STAMP)]
        for root in ROOTS:
            for rank in (0, 1):
                seal(self.memory, root, rank, STAMP, PAYLOAD).close()
        world: Any = SimpleNamespace(
            clock=self.time, memory=self.memory, journal=self.journal, workers=self.workers
        )
        self.scrubber = Scrubber(JOB_DIR, every_s, self._as_world(world), self)

    def _as_world(self, world: Any) -> KeeperWorld:
        return world  # type: ignore[no-any-return]

    def status(self, rank: int) -> RankStatus | None:
        page: Any = SimpleNamespace(slots=tuple(self.views))
        return page  # type: ignore[no-any-return]

    def tell(self, rank: int, message: Any) -> None:
        self.told.append((rank, message))

    def pass_s(self, seconds: float) -> bool:
        """Whether anything was looked at."""
        self.time.now_ns += round(seconds * S_NS)
        self.scrubber.tick()
        return self.workers.run()


@given(
    flipped=st.dictionaries(
        st.tuples(st.sampled_from(ROOTS), st.integers(0, 1)), st.sampled_from(USED)
    )
)
def test_every_flipped_byte_is_found_and_nothing_else(
    flipped: dict[tuple[Path, int], int],
) -> None:
    memory = ScrubbedNode().memory
    for (root, rank), at in flipped.items():
        flip(memory, slot_path(root, rank, 0), at)
    found = scrub(memory, JOB_DIR)
    assert sorted(slot.path for slot in found) == sorted(slot_path(*who, 0) for who in flipped)
    for slot in found:
        is_own = slot.path.parent.parent == JOB_DIR
        assert slot.rank == (int(slot.path.parent.name[-5:]) if is_own else None)
        assert slot.index == 0


def test_what_holds_nothing_or_is_being_written_is_no_damage() -> None:
    memory = a_memory()
    seal(memory, JOB_DIR, 0, STAMP, PAYLOAD).void()
    seal(memory, JOB_DIR, 1, STAMP, PAYLOAD).begin(JOB_HASH, 1, 2, 1, STAMP)
    assert scrub(memory, JOB_DIR) == []


def test_the_rank_of_a_damaged_slot_is_told_once_each_time() -> None:
    node = ScrubbedNode()
    flip(node.memory, slot_path(JOB_DIR, 1, 0), PAGE_BYTES + 7)
    assert node.pass_s(EVERY_S)
    [(rank, message)] = node.told
    assert (rank, type(message), message.slot) == (1, SlotDamaged, 0)
    assert node.journal.kinds == ["damaged", "not-mended"]
    assert not node.pass_s(EVERY_S / 2)
    assert len(node.told) == 1


def test_the_next_begins_when_it_is_time_and_the_last_is_done() -> None:
    node = ScrubbedNode()
    assert not node.pass_s(EVERY_S - 1)
    node.time.now_ns += S_NS
    node.scrubber.tick()
    node.time.now_ns += round(EVERY_S * S_NS)
    node.scrubber.tick()
    asked = 0
    while node.workers.run():
        asked += 1
    assert asked == 1
    assert node.pass_s(0)
    assert not node.pass_s(0)


def test_never_is_never() -> None:
    node = ScrubbedNode(every_s=0)
    assert not node.pass_s(10**6)


@pytest.mark.parametrize("every_s", [0, EVERY_S])
def test_soon_is_at_the_next_tick(every_s: float) -> None:
    node = ScrubbedNode(every_s=every_s)
    node.scrubber.soon()
    assert node.pass_s(0)
    assert not node.pass_s(0)


@pytest.mark.parametrize("root", ROOTS[1:])
def test_what_is_held_for_others_is_given_up(root: Path) -> None:
    state = FakeMeshState()
    node = ScrubbedNode(state=state)
    path = slot_path(root, 0, 0)
    flip(node.memory, path, PAGE_BYTES)
    node.pass_s(EVERY_S)
    assert (state.damaged, state.compared, node.told) == ([path], 0, [])


def test_when_all_is_well_holders_are_asked_to_compare() -> None:
    state = FakeMeshState()
    node = ScrubbedNode(state=state)
    node.pass_s(EVERY_S)
    assert (state.damaged, state.compared, state.mending) == ([], 1, [])


@pytest.mark.parametrize("failed", [None, "nobody has it"])
def test_a_rank_hears_only_of_what_others_cannot_mend(failed: str | None) -> None:
    state = FakeMeshState()
    node = ScrubbedNode(state=state)
    flip(node.memory, slot_path(JOB_DIR, 1, 0), PAGE_BYTES)
    node.pass_s(EVERY_S)
    [(rank, index, stamp, then)] = state.mending
    assert (rank, index, stamp, node.told) == (1, 0, STAMP, [])
    then(failed)
    assert [rank for rank, _ in node.told] == ([] if failed is None else [1])
    assert node.journal.kinds == ["damaged", "mended" if failed is None else "not-mended"]


@pytest.mark.parametrize(
    "views", [[], [SlotView(SlotState.WRITING, STAMP)], [SlotView(SlotState.EMPTY, Stamp(-1, 0))]]
)
def test_what_nobody_knows_is_not_mended(views: list[SlotView]) -> None:
    state = FakeMeshState()
    node = ScrubbedNode(state=state)
    node.views = views
    flip(node.memory, slot_path(JOB_DIR, 0, 0), 3)
    node.pass_s(EVERY_S)
    assert not state.mending
    assert [rank for rank, _ in node.told] == [0]


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_rank_left_here_that_lives_elsewhere_now_is_given_up(is_read: bool) -> None:
    """Nobody else looks at it any more, and it is offered to where the rank lives."""
    state = FakeMeshState(own_ranks=range(1))
    node = ScrubbedNode(state=state)
    path = slot_path(JOB_DIR, 1, 0)
    flip(node.memory, path, PAGE_BYTES + 7)
    reader = Slot(node.memory, path)
    if is_read:
        assert reader.lock(exclusive=False)
    node.pass_s(EVERY_S)
    while node.workers.run():
        pass
    assert (state.mending, node.told) == ([], [])
    assert node.journal.kinds == (["damaged"] if is_read else ["damaged", "not-mended"])
    assert (reader.header().state is SlotState.SEALED) == is_read


def test_what_proves_again_is_not_given_up() -> None:
    node = ScrubbedNode()
    assert not void_damaged(node.memory, slot_path(JOB_DIR, 0, 0))
    assert not void_damaged(node.memory, slot_path(JOB_DIR, 0, 1)), "there is none"
    assert scrub(node.memory, JOB_DIR) == []
    assert Slot(node.memory, slot_path(JOB_DIR, 0, 0)).header().state is SlotState.SEALED
