"""Sharing over nodes: whatever replicas on different nodes do, and however late they hear of each
other, a step that the leader takes for held can be put together for every rank, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.redundancy.share_classes import ShareClasses
from keepstep.core.resume.commit import Commit, RankFacts
from keepstep.core.resume.cut import holding_of
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import SharedMemory
from keepstep.edge.shm.slot import Slot, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.shm.whole import SHARED, whole
from keepstep.errors import DamageError
from keepstep.model.horizon import Horizon
from keepstep.model.shares import RankRun, rank_runs
from keepstep.model.snapshot import Stamp
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.commit_view import LeadersWord
from keepstep.runtime.rank.sharing import PAUSE_STEPS, shared_among, shares_over_nodes
from keepstep.runtime.rank.world import RankIdentity
from tests.runtime.fakes import RankRoom

BLOCK_BYTES = 4096
BLOCKS = 12
OWN_BYTES = 100  # behind the blocks: this rank's alone


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()


class RankOfNode:
    """The only rank of its node. `kind`: ranks of one kind are replicas; `astray`: a byte of it is
    another one from now on."""

    def __init__(self, home: Path, rank: int, ranks: int, kind: int = 0) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.rank, self.kind = home, rank, kind
        room = self.room = RankRoom(home, rank=rank, ranks=ranks, nodes=ranks)
        room.options = replace(room.options, share_replicas="job")
        room.who = replace(room.who, local_rank=0)
        room.world = replace(room.world, memory=MEMORY)
        self.job_dir = room.options.job_dir
        page = StatusPage.own(MEMORY, self.job_dir, rank)
        assert page is not None
        self.page = page
        self.word = HorizonPage(MEMORY, self.job_dir)
        self.word.write(Horizon(1))
        room.live.state = bytes(BLOCKS * BLOCK_BYTES + OWN_BYTES)
        view = LeadersWord(MEMORY, self.job_dir, has_classes=True)
        self.capture = Capture(
            room.world, room.options, room.who, page, view, lambda *_: None, lambda: None
        )
        page.publish(rank=rank, world_size=ranks, epoch=1)
        run_acts(self.capture.prove())
        self.step = -1
        self.astray: int | None = None

    def prepare(self) -> None:
        run_acts(self.capture.prepare())

    def resume(self, stamp: Stamp, replicas: tuple[RankRun, ...] | None) -> None:
        self.capture.forget_newer(stamp)
        self.page.publish(decided_step=stamp.step, completed_step=stamp.step)
        self.word.write(Horizon(1, inherited=stamp))
        run_acts(self.capture.resumed(stamp, replicas))
        self.prepare()
        self.step = stamp.step

    def state(self, step: int) -> bytes:
        words = (bytes([step % 251, block, self.kind, 1]) for block in range(BLOCKS))
        common = b"".join(word * (BLOCK_BYTES // 4) for word in words)
        found = bytearray(common + bytes([self.rank]) * OWN_BYTES)
        if self.astray is not None:
            found[self.astray] ^= 1
        return bytes(found)

    def boundary(self) -> None:
        self.room.background.run()
        self.room.time.pass_ns()
        self.step += 1
        self.room.live.state = self.state(self.step)
        self.capture.boundary(Stamp(self.step, 1), 0.0)
        self.room.trainer.run()

    @property
    def kept_bytes(self) -> int:
        page = self.page.read()
        assert page is not None
        return page.kept_bytes

    @property
    def is_shared(self) -> bool:
        page = self.page.read()
        assert page is not None
        return page.kept_bytes < page.payload_bytes

    def close(self) -> None:
        self.capture.close()
        self.page.close()
        self.word.close()


class Leading:
    """What the keeper that leads makes of pages, as they were when they were looked at."""

    def __init__(self, ranks: int) -> None:
        self.commit, self.classes = Commit(ranks, 1), ShareClasses(ranks)

    def hear(self, rank: RankOfNode) -> None:
        page = rank.page.read()
        assert page is not None
        own = holding_of(page)
        facts = [RankFacts(rank.rank, own, own.sealed)]
        self.commit.report(facts, self.commit.horizon)
        self.classes.look({r: fact.own for r, fact in self.commit.facts.items()})

    def tell(self, rank: RankOfNode) -> None:
        rank.word.write(self.commit.horizon)
        if self.classes.classes is not None:
            rank.word.write_classes(1, self.classes.classes, {rank.rank})


class Job:
    """One rank a node."""

    def __init__(self, home: Path, kinds: list[int]) -> None:
        self.home, self.kinds = home, kinds
        self.ranks = self._begin()
        self.leading = Leading(len(kinds))
        for rank in self.ranks:
            rank.prepare()

    def _begin(self) -> list[RankOfNode]:
        count = len(self.kinds)
        return [
            RankOfNode(self.home / f"node-{rank}", rank, count, kind)
            for rank, kind in enumerate(self.kinds)
        ]

    def together(self, steps: int) -> None:
        for _ in range(steps):
            for rank in self.ranks:
                rank.boundary()
            for rank in self.ranks:
                rank.room.settle()
                self.leading.hear(rank)
            for rank in self.ranks:
                self.leading.tell(rank)

    @property
    def held(self) -> frozenset[Stamp]:
        return self.leading.commit.held()

    def again(self, stamp: Stamp, replicas: tuple[int, ...] | None) -> None:
        """All are killed, and resume from there."""
        self.close()
        self.ranks = self._begin()
        self.leading = Leading(len(self.kinds))
        for rank in self.ranks:
            rank.resume(stamp, None if replicas is None else rank_runs(replicas))

    def bring_parts(self, rank: int) -> None:
        """As its keeper does: what ranks of other nodes keep."""
        root = self.ranks[rank].job_dir / SHARED
        shutil.rmtree(root, ignore_errors=True)
        for other in self.ranks:
            for number, path in enumerate(slot_paths(MEMORY, other.job_dir, other.rank)):
                if other.rank != rank:
                    target = slot_path(root, other.rank, number)
                    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    shutil.copyfile(path, target)

    def restored(self, rank: int, stamp: Stamp) -> bytes:
        """What that rank could load. Raises LookupError, DamageError."""
        for path in slot_paths(MEMORY, self.ranks[rank].job_dir, rank):
            with closing(Slot(MEMORY, path)) as slot:
                if slot.claims(stamp):
                    with whole(MEMORY, slot) as found:
                        _, layout = found.verify()
                        return bytes(found.payload[: layout.segments[0].end])
        raise LookupError(f"rank {rank} holds no {stamp}")

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture(params=[2, 4])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    found = Job(tmp_path, [0] * request.param)
    yield found
    found.close()


def test_each_keeps_its_part_within_one_block_and_all_can_be_put_together(job: Job) -> None:
    job.together(8)
    count = len(job.ranks)
    for rank in job.ranks:
        kept = rank.kept_bytes - OWN_BYTES
        assert abs(kept - BLOCKS * BLOCK_BYTES / count) <= BLOCK_BYTES
    assert Stamp(7, 1) in job.held
    for rank in job.ranks:
        with pytest.raises(LookupError, match="are with nobody"):
            job.restored(rank.rank, Stamp(7, 1))
        job.bring_parts(rank.rank)
        assert job.restored(rank.rank, Stamp(7, 1)) == rank.state(7)
    told = [event for rank in job.ranks for event in rank.room.journal.of("shared")]
    assert len(told) == 1 and f"1/{count}" in told[0].why


def test_no_step_is_lost_while_they_begin_to_share(job: Job) -> None:
    for step in range(10):
        job.together(1)
        assert Stamp(step, 1) in job.held


def test_ranks_of_two_kinds_are_two_classes(tmp_path: Path) -> None:
    """As HSDP's shards, whose replicas are on other nodes."""
    with closing(Job(tmp_path, [0, 1, 0, 1])) as job:
        job.together(8)
        for rank in job.ranks:
            assert abs(rank.kept_bytes - OWN_BYTES - BLOCKS * BLOCK_BYTES / 2) <= BLOCK_BYTES
            job.bring_parts(rank.rank)
            assert job.restored(rank.rank, Stamp(7, 1)) == rank.state(7)


def test_a_step_at_which_they_differ_counts_for_nobody_and_each_keeps_its_own(job: Job) -> None:
    job.together(8)
    job.ranks[-1].astray = 5 * BLOCK_BYTES + 77
    job.together(1)
    assert Stamp(8, 1) not in job.held and Stamp(7, 1) in job.held
    job.together(4)
    assert not any(rank.is_shared for rank in job.ranks)
    assert max(job.held) == Stamp(12, 1)
    assert job.restored(0, Stamp(12, 1)) == job.ranks[0].state(12)
    job.together(PAUSE_STEPS + 6)
    shares = [rank.is_shared for rank in job.ranks]
    assert shares == ([True, True, True, False] if len(shares) == 4 else [False, False])


def test_they_go_on_sharing_after_a_restart_at_once(job: Job) -> None:
    job.together(8)
    before = [rank.kept_bytes for rank in job.ranks]
    job.again(Stamp(7, 1), tuple(range(len(job.ranks))))
    for step in range(8, 14):
        job.together(1)
        assert Stamp(step, 1) in job.held
        assert [rank.kept_bytes for rank in job.ranks] == before


@pytest.mark.parametrize(
    "step, replicas",
    [
        pytest.param(7, (), id="they shared it, and share no more"),
        pytest.param(7, None, id="they shared it"),
        pytest.param(0, None, id="nobody shared it yet"),
    ],
)
def test_who_had_differed_keeps_all_of_its_own_for_a_while_after_a_restart(
    job: Job, step: int, replicas: tuple[int, ...] | None
) -> None:
    job.together(step + 1)
    job.again(Stamp(step, 1), replicas)
    job.together(PAUSE_STEPS)
    assert not any(rank.is_shared for rank in job.ranks)
    job.together(8)
    assert all(rank.is_shared for rank in job.ranks)


def test_another_leader_takes_the_classes_from_what_ranks_show(job: Job) -> None:
    job.together(8)
    job.leading = Leading(len(job.ranks))
    for step in range(8, 14):
        job.together(1)
        assert all(rank.is_shared for rank in job.ranks)
        assert Stamp(step, 1) in job.held


def test_a_rank_whose_state_takes_another_shape_ends_it_for_all(job: Job) -> None:
    job.together(8)
    job.ranks[0].room.live.own_blocks = frozenset({3})  # it is copied at the boundary now
    job.together(5)
    assert not any(rank.is_shared for rank in job.ranks)
    assert max(job.held) == Stamp(12, 1)


def test_a_flipped_byte_of_a_part_is_refused_by_who_leans_on_it(job: Job) -> None:
    job.together(8)
    job.bring_parts(1)
    for path in slot_paths(MEMORY, job.ranks[1].job_dir / SHARED, 0):
        with closing(Slot(MEMORY, path)) as slot:
            slot.payload[100] ^= 1
    with pytest.raises(DamageError, match="block 0"):
        job.restored(1, Stamp(7, 1))


def test_with_one_slot_or_one_node_nothing_is_shared_over_nodes(tmp_path: Path) -> None:
    options = replace(RankRoom(tmp_path).options, share_replicas="job")
    who = RankIdentity("j", 1, 3, 4, 2, 1)
    assert shares_over_nodes(options, who) and not shared_among(options, who)
    assert not shares_over_nodes(replace(options, slots=1), who)
    alone = RankIdentity("j", 1, 1, 2, 2, 1)
    assert not shares_over_nodes(options, alone) and shared_among(options, alone) == range(2)


ACTS = st.lists(
    st.tuples(st.sampled_from(["step", "hear", "tell", "astray", "back"]), st.integers(0, 2)),
    max_size=60,
)


@given(ACTS, st.sampled_from([[0, 0], [0, 0, 0]]))
@settings(max_examples=25, deadline=None)
def test_whatever_is_late_a_held_step_can_be_put_together(
    acts: list[tuple[str, int]], kinds: list[int]
) -> None:
    """Each of the leader's words reaches each node at a time of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as room:
        job = Job(Path(room), kinds)
        try:
            job.together(5)
            for act, which in acts:
                rank = job.ranks[which % len(job.ranks)]
                match act:
                    case "step" if rank.step == min(each.step for each in job.ranks):
                        rank.boundary()
                        rank.room.settle()
                    case "hear":
                        job.leading.hear(rank)
                    case "tell":
                        job.leading.tell(rank)
                    case "astray":
                        rank.astray = 3 * BLOCK_BYTES
                    case "back":
                        rank.astray = None
                _all_can_be_put_together(job)
        finally:
            job.close()


def _all_can_be_put_together(job: Job) -> None:
    """Of what is committed, since nobody may overwrite that."""
    stamp = job.leading.commit.horizon.committed
    if stamp is None:
        return
    for rank in job.ranks:
        job.bring_parts(rank.rank)
        found = job.restored(rank.rank, stamp)
        assert found in [_as_if(rank, stamp.step, is_astray) for is_astray in (True, False)]


def _as_if(rank: RankOfNode, step: int, is_astray: bool) -> bytes:
    before, rank.astray = rank.astray, 3 * BLOCK_BYTES if is_astray else None
    found = rank.state(step)
    rank.astray = before
    return found
