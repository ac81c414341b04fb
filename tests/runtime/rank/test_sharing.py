"""Sharing: whatever replicas do, and in whatever order they are seen, a step that all pages call
common can be put together for every rank, bit for bit; a step at which they differ is nobody's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.resume.cut import cut, holding_of
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import SharedMemory, resident_bytes
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import Stamp
from keepstep.runtime.rank.capture import OBJECTS_SLACK_BYTES, Capture
from keepstep.runtime.rank.commit_view import PagesOfOneNode
from keepstep.runtime.rank.sharing import PAUSE_STEPS, shared_among
from keepstep.runtime.rank.world import RankIdentity
from tests.runtime.fakes import RankRoom

BLOCK_BYTES = 4096
BLOCKS = 12
OWN_BYTES = 100  # behind the blocks: this rank's alone


class SmallBlocks(SharedMemory):
    block_bytes = BLOCK_BYTES


MEMORY = SmallBlocks()


class Replica:
    """A rank whose state after a step is, but for its end, what that of all others is. `astray`: a
    byte of it is another one from now on; `on_device`: what is shared never leaves one."""

    def __init__(
        self,
        home: Path,
        rank: int,
        ranks: int,
        options: str = "node",
        digests: int = 0,
        on_device: bool = False,
    ) -> None:
        self.rank = rank
        room = self.room = RankRoom(home, rank=rank, ranks=ranks)
        room.options = replace(
            room.options, share_replicas=options, digest_every_steps=digests, on_difference="tell"
        )
        # what is the same begins and ends within a block
        span = (BLOCK_BYTES // 2, (BLOCKS - 1) * BLOCK_BYTES)
        room.live.shared = Replicas(tuple(range(ranks)), 7, (0,), (span,), True, "one tensor")
        room.live.is_on_device = on_device
        room.world = replace(room.world, memory=MEMORY)
        page = StatusPage.own(MEMORY, room.options.job_dir, rank)
        assert page is not None
        self.page = page
        self.view = PagesOfOneNode(MEMORY, room.options.job_dir, ranks)
        room.live.state = bytes(BLOCKS * BLOCK_BYTES + OWN_BYTES)
        self.capture = Capture(
            room.world, room.options, room.who, page, self.view, lambda *_: None, lambda: None
        )
        page.publish(rank=rank, world_size=ranks, epoch=1)
        self.held = run_acts(self.capture.prove())
        self.step = -1
        self.astray: int | None = None

    def prepare(self) -> Replica:
        run_acts(self.capture.prepare())
        return self

    def resume(self, stamp: Stamp) -> None:
        """As all do from memory: what is newer is forgotten."""
        self.capture.forget_newer(stamp)
        self.page.publish(decided_step=stamp.step, completed_step=stamp.step)
        run_acts(self.capture.resumed(stamp))
        self.prepare()
        self.step = stamp.step

    def state(self, step: int) -> bytes:
        common = b"".join(
            bytes([step % 251, block]) * (BLOCK_BYTES // 2) for block in range(BLOCKS)
        )
        found = bytearray(common + bytes([self.rank]) * OWN_BYTES)
        if self.astray is not None:
            found[self.astray] ^= 1
        return bytes(found)

    def boundary(self) -> None:
        """What was being copied has been: the fence in front of the update."""
        self.room.background.run()
        self.room.time.pass_ns()
        self.step += 1
        self.room.live.state = self.state(self.step)
        self.capture.boundary(Stamp(self.step, 1), 0.0)
        self.room.trainer.run()

    def settle(self) -> None:
        self.room.settle()

    @property
    def kinds(self) -> list[str]:
        return self.room.journal.kinds

    @property
    def kept_bytes(self) -> int:
        """In memory, of all slots."""
        paths = slot_paths(MEMORY, self.room.options.job_dir, self.rank)
        return sum(MEMORY.size(path) for path in paths)

    def close(self) -> None:
        self.capture.close()
        self.page.close()


class Node:
    """All replicas of it, which have seen each other's pages."""

    def __init__(self, home: Path, ranks: int, digests: int = 0, on_device: bool = False) -> None:
        self.home, self.ranks, self.on_device = home, ranks, on_device
        self.replicas = [
            Replica(home, rank, ranks, digests=digests, on_device=on_device).prepare()
            for rank in range(ranks)
        ]

    def together(self, steps: int) -> None:
        for _ in range(steps):
            for replica in self.replicas:
                replica.boundary()
            for replica in self.replicas:
                replica.settle()

    @property
    def common(self) -> Stamp | None:
        """By the pages as they are."""
        pages = [replica.page.read() for replica in self.replicas]
        return cut([holding_of(page) for page in pages if page is not None], self.ranks)

    def restored(self, rank: int, stamp: Stamp) -> bytes:
        """What that rank could load. Raises LookupError, DamageError."""
        job_dir = self.replicas[rank].room.options.job_dir
        for path in slot_paths(MEMORY, job_dir, rank):
            with closing(Slot(MEMORY, path)) as slot:
                if not slot.claims(stamp):
                    continue
                with whole(MEMORY, slot) as found:
                    _, layout = found.verify()
                    return bytes(found.payload[: layout.segments[0].end])
        raise LookupError(f"rank {rank} holds no {stamp}")

    def again(self, stamp: Stamp) -> None:
        """All are killed, and resume from there."""
        self.close()
        self.replicas = [
            Replica(self.home, rank, self.ranks, on_device=self.on_device)
            for rank in range(self.ranks)
        ]
        for replica in self.replicas:
            replica.resume(stamp)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()


@pytest.fixture(
    params=[(2, False), (4, False), (2, True), (4, True)],
    ids=["2", "4", "2 on a device", "4 on a device"],
)
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    ranks, on_device = request.param
    found = Node(tmp_path, ranks, on_device=on_device)
    yield found
    found.close()


def is_shared(replica: Replica) -> bool:
    page = replica.page.read()
    assert page is not None
    return page.kept_bytes < page.payload_bytes


def test_reft_1_replicas_find_each_other_and_keep_their_part_within_one_block(node: Node) -> None:
    node.together(8)
    alone = 3 * (BLOCKS * BLOCK_BYTES)
    for replica in node.replicas:
        assert is_shared(replica), replica.kinds
        saved = alone - alone // node.ranks
        described = 3 * (OBJECTS_SLACK_BYTES + 6 * 4096)  # and tail, of each slot
        assert replica.kept_bytes <= alone - saved + described
        page = replica.page.read()
        assert page is not None
        kept = page.kept_bytes - OWN_BYTES
        assert abs(kept - BLOCKS * BLOCK_BYTES / node.ranks) <= BLOCK_BYTES
    assert node.replicas[0].kinds.count("shared") == 1
    assert "1/" in node.replicas[0].room.journal.of("shared")[0].why
    stamp = node.common
    assert stamp == Stamp(7, 1)
    for replica in node.replicas:
        assert node.restored(replica.rank, stamp) == replica.state(7)


def test_no_step_is_lost_while_they_begin_to_share(node: Node) -> None:
    for step in range(8):
        node.together(1)
        assert node.common == Stamp(step, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_others_keep_is_compared_as_well_and_alarms_nobody(tmp_path: Path, ranks: int) -> None:
    """A tensor begins in a block that some ranks leave to others."""
    with closing(Node(tmp_path, ranks, digests=1)) as node:
        node.together(8)
        assert all(map(is_shared, node.replicas))
        assert all("replicas-differ" not in replica.kinds for replica in node.replicas)
        assert node.replicas[0].kinds.count("replicas-agree") == 1
        node.replicas[-1].astray = 3 * BLOCK_BYTES
        node.together(2)
        [told] = [e for r in node.replicas for e in r.room.journal.of("replicas-differ")]
        assert "in blocks of state (1 of 1 tensor)" in told.why and told.data["step"] == 8


def test_ranks_that_share_what_is_on_a_device_compare_digests_and_alarm_nobody(
    tmp_path: Path,
) -> None:
    """A table has the checksum of what a rank keeps, and the digest of what it leaves to others:
    nobody takes that for a difference."""
    with closing(Node(tmp_path, 2, digests=1, on_device=True)) as node:
        node.together(8)
        assert all(map(is_shared, node.replicas))
        assert all("replicas-differ" not in replica.kinds for replica in node.replicas)


def test_memory_that_was_given_up_is_given_up(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    before = resident_bytes(tmp_path)
    node.together(8)
    given_up = before - resident_bytes(tmp_path)
    assert given_up >= 0.95 * 2 * 3 * BLOCKS * BLOCK_BYTES / 2, "of 3 slots of 2 ranks one half"
    node.close()


def test_a_planted_difference_is_told_by_name_and_the_step_counts_for_nobody(node: Node) -> None:
    node.together(8)
    node.replicas[1].astray = 5 * BLOCK_BYTES + 77
    node.together(1)
    assert node.common == Stamp(7, 1), "step 8 is sealed by all, and held by nobody"
    for replica in node.replicas:
        assert node.restored(replica.rank, Stamp(7, 1))[:9] == replica.state(7)[:9]
    with pytest.raises(LookupError, match="are with nobody"):
        for rank in range(node.ranks):
            node.restored(rank, Stamp(8, 1))
    node.together(4)
    told = [event for r in node.replicas for event in r.room.journal.of("not-shared")]
    assert {event.data.get("step") for event in told} == {8}
    in_what = "nobody can say in what" if node.on_device else "rank 1 differs from rank 0 in blocks"
    assert any(in_what in event.why for event in told), [e.why for e in told]
    assert node.common == Stamp(12, 1), "each keeps all of its own"
    assert not any(map(is_shared, node.replicas))
    for replica in node.replicas:
        assert node.restored(replica.rank, Stamp(12, 1)) == replica.state(12)
    node.together(PAUSE_STEPS + 4)
    shares = [is_shared(replica) for replica in node.replicas]
    assert shares == ([True, False, True, True] if node.ranks == 4 else [False, False])


def test_all_go_on_sharing_after_a_restart_and_never_need_the_memory_for_all(node: Node) -> None:
    node.together(8)
    before = [replica.kept_bytes for replica in node.replicas]
    node.again(Stamp(7, 1))
    assert [replica.kept_bytes for replica in node.replicas] == before
    for step in range(8, 12):
        node.together(1)
        assert node.common == Stamp(step, 1)
        assert [replica.kept_bytes for replica in node.replicas] == before
    assert all(map(is_shared, node.replicas))


def test_a_replica_that_differs_in_every_life_takes_the_last_steps_once(node: Node) -> None:
    """It did so again behind each restart, where all shared at once: a job that ends within a step
    or two of what it resumes from would never have its last one (seed 930019)."""
    node.together(8)
    for life in range(2):
        node.replicas[1].astray = 5 * BLOCK_BYTES + 77
        node.together(1)
        assert node.common == Stamp(7 + life, 1), "step 8 is nobody's once"
        if life == 0:
            node.again(Stamp(7, 1))
    [told] = node.replicas[0].room.journal.of("not-shared")
    assert "of step 8 is with nobody" in told.why


def test_reft_7_one_flipped_byte_of_a_share_is_refused_by_all_who_lean_on_it(node: Node) -> None:
    node.together(8)
    stamp, keeper = Stamp(7, 1), node.replicas[0]
    for path in slot_paths(MEMORY, keeper.room.options.job_dir, 0):
        with closing(Slot(MEMORY, path)) as slot:
            if slot.claims(stamp):
                assert 0 not in slot.lacking()
                slot.payload[100] ^= 1
    for rank in range(node.ranks):
        with pytest.raises(DamageError, match="block 0"):
            node.restored(rank, stamp)


def test_a_lost_share_is_missed_and_never_made_up(node: Node) -> None:
    node.together(8)
    job_dir = node.replicas[0].room.options.job_dir
    MEMORY.remove(job_dir / "rank-00000")
    with pytest.raises(LookupError, match="are with nobody"):
        node.restored(1, Stamp(7, 1))


def test_a_state_of_another_shape_is_kept_whole_and_compared_anew(node: Node) -> None:
    node.together(8)
    node.replicas[0].room.live.own_blocks = frozenset({3})  # it is copied at the boundary now
    node.together(4)
    assert "no longer stand still" in node.replicas[0].room.journal.of("not-shared")[0].why
    assert node.common is not None and node.common.step >= 10
    for replica in node.replicas:
        stamp = node.common
        assert node.restored(replica.rank, stamp) == replica.state(stamp.step)
    node.together(2 * PAUSE_STEPS)
    assert all(map(is_shared, node.replicas)), "but for what only one copies at the boundary"


def test_a_plan_is_given_up_by_all_before_another_one_is_made(node: Node) -> None:
    """Else what some leave to others by the one has another digest in the other, and a step at
    which nothing differs would be nobody's."""
    node.together(8)
    first, *others = node.replicas
    first.room.live.own_blocks = frozenset({3})
    for _ in range(3):  # it has looked anew before the others see that it has given up
        first.boundary()
        first.settle()
    page = first.page.read()
    assert page is not None and page.share_plan == 0
    for replica in others:
        for _ in range(3):
            replica.boundary()
            replica.settle()
    for _ in range(3 * PAUSE_STEPS):
        node.together(1)
        for replica in node.replicas:
            sealed = replica.page.read()
            assert sealed is not None and node.common is not None
            newest = max(holding_of(sealed).sealed)
            assert node.common.step >= newest.step - 1
    assert all(map(is_shared, node.replicas))
    told = [event.why for r in node.replicas for event in r.room.journal.of("not-shared")]
    assert not any("differs" in why or "is not shared" in why for why in told), told


def test_ranks_that_are_no_replicas_say_so_once(tmp_path: Path) -> None:
    node = Node(tmp_path, 2)
    for replica in node.replicas:
        replica.room.live.own_blocks = frozenset(range(BLOCKS))
    node.together(3 * PAUSE_STEPS)
    for replica in node.replicas:
        assert not is_shared(replica)
        [told] = replica.room.journal.of("not-shared")
        assert "has nothing to share: no block of 4" in told.why and "lazy=False" in told.why
    assert node.common == Stamp(3 * PAUSE_STEPS - 1, 1)
    node.close()


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    replicas = [Replica(tmp_path, rank, 2, "off").prepare() for rank in range(2)]
    for _ in range(8):
        for replica in replicas:
            replica.boundary()
            replica.settle()
    assert not any(is_shared(replica) for replica in replicas)
    for replica in replicas:
        replica.close()


HAPPENS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step", "step", "step", "seal", "aside", "astray", "healed", "torn", "killed"]
        ),
        st.integers(0, 2),
    ),
    max_size=70,
)


@settings(max_examples=80, deadline=None)
@given(ranks=st.integers(2, 3), on_device=st.booleans(), story=HAPPENS)
def test_whatever_happens_what_all_pages_call_common_can_be_put_together(
    tmp_path_factory: pytest.TempPathFactory,
    ranks: int,
    on_device: bool,
    story: list[tuple[str, int]],
) -> None:
    node = Node(tmp_path_factory.mktemp("n"), ranks, on_device=on_device)
    was: dict[tuple[int, int], bytes] = {}  # by rank and step
    newest = -1
    node.together(5)
    for replica in node.replicas:
        was.update({(replica.rank, step): replica.state(step) for step in range(5)})
    for what, number in story:
        replica = node.replicas[number % ranks]
        if what == "step":
            replica.room.live.moves = ()
            replica.boundary()
            was[replica.rank, replica.step] = replica.state(replica.step)
        elif what == "torn":
            replica.room.live.moves = ("state",)
            replica.boundary()
            replica.room.live.moves = ()
        elif what == "seal":
            replica.room.background.run()
            replica.room.time.pass_ns()
        elif what == "aside":
            replica.room.aside.run()
        elif what == "astray":
            replica.astray = 3 * BLOCK_BYTES + number
        elif what == "healed":
            replica.astray = None
        elif node.common is not None:
            stamp = node.common
            node.again(stamp)
            newest = stamp.step
        stamp = node.common
        assert stamp is not None and stamp.step >= newest, (
            "there is always a cut, and it never goes back"
        )
        newest = stamp.step
        for other in node.replicas:
            assert node.restored(other.rank, stamp) == was[other.rank, stamp.step]
    for replica in node.replicas:
        replica.astray = None
    node.close()


def test_with_several_nodes_those_of_a_node_share(tmp_path: Path) -> None:
    options = replace(RankRoom(tmp_path).options, share_replicas="node")
    of_four = RankIdentity("j", 1, 3, 4, 2, local_rank=1)
    assert shared_among(options, of_four) == range(2, 4)
    assert shared_among(options, RankIdentity("j", 1, 3, 4, 4)) == range(4)
    assert not shared_among(replace(options, share_replicas="off"), of_four)
    assert not shared_among(replace(options, slots=1), of_four), "others would lean on what goes"
    assert not shared_among(options, replace(of_four, local_rank=None)), "whose neighbour it is"
    assert not shared_among(options, RankIdentity("j", 1, 3, 4, 1, local_rank=0))
