"""The persister without a process: over any filesystem, killed between any two of its acts' pieces
and at any call of the filesystem, it leaves a whole checkpoint or none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from keepstep.core.recovery.removal_lease import LEASE_NS
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.store.draft import Draft
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.errors import StoreError
from keepstep.model.checkpoint import (
    CheckpointAttempt,
    CheckpointName,
    StoreListing,
    Timeline,
    Unfinished,
)
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.messages.persister import ActDone, ActName, CheckpointAct
from keepstep.model.removal import RemovalRecord
from keepstep.model.snapshot import Stamp
from keepstep.ports import Acts
from keepstep.runtime.persister.persister import Persister
from keepstep.runtime.persister.server import PersisterServer

RANKS = 2
PAYLOAD_BYTES = 1000
BLOCK_BYTES = 64
LAYOUT = lay_out([TensorSpec("w", "uint8", (PAYLOAD_BYTES,), PAYLOAD_BYTES)])
LIVES = itertools.count()
ACTS: tuple[ActName, ...] = ("survey", "part", "publish")


class Killed(BaseException):
    """The process ends here."""


class Disk(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A filesystem of its own. Its process is killed at the `dies_at`-th call that changes it."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.changes = 0
        self.dies_at = -1

    def _change(self) -> None:
        self.changes += 1
        if self.changes == self.dies_at:
            raise Killed

    def _open(self, path: str, mode: str = "rb", **how: Any) -> Any:
        if mode != "rb":
            self._change()
        return super()._open(path, mode, **how)

    def mv(self, *names: str, **how: Any) -> None:
        self._change()
        super().mv(*names, **how)

    def rm_file(self, path: str) -> None:
        self._change()
        super()._rm(path)

    def rmdir(self, path: str) -> None:
        self._change()
        super().rmdir(path)


class PlainFormat:
    """Every rank's payload is a file."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def already_there(self, attempt: CheckpointAttempt) -> bool:
        return self._store.intact_of(attempt.stamp, attempt.job) is not None

    def survey(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, slots: Sequence[Slot]
    ) -> list[bytes]:
        found = []
        for slot in slots:
            header, _ = slot.verify_bytes()
            found.append(bytes(slot.payload[: header.payload_bytes]))
        return found

    def write_part(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, values: list[bytes]
    ) -> int:
        names = [attempt.data_name(rank) for rank in attempt.ranks_of(node)]
        for name, data in zip(names, values, strict=True):
            with draft.open(name) as file:
                file.write(data)
        draft.read_back(names)
        return sum(map(len, values))

    def publish(self, draft: Draft, attempt: CheckpointAttempt) -> Manifest:
        stamp = attempt.stamp
        world = attempt.world_size
        about = attempt.name[1:]
        files = dict(draft.files)
        made = Manifest(attempt.job, stamp.step, world, {}, 1, {}, files, *about, attempt.timeline)
        draft.publish(made)
        return made


def payload(step: int, rank: int) -> bytes:
    return bytes((step + 7 * rank + at) % 251 for at in range(PAYLOAD_BYTES))


class Node:
    """A node whose ranks hold a step, its memory, and a store."""

    def __init__(self, job_dir: Path, keep: str = "latest:1") -> None:
        self.job_dir = job_dir
        self.keep = keep
        self.disk = Disk()
        self.number = 0
        self.now_ns = 0
        self.persister = self.start()

    def monotonic_ns(self) -> int:
        """As a clock."""
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def boot(self) -> str:
        return ""

    def start(self) -> Persister[Draft, list[bytes]]:
        """Another life of the persister."""
        self.persister = Persister(
            "j",
            self.job_dir,
            self.keep,
            MEMORY,
            self.store,
            PlainFormat(self.store),
            self,
            f"life {next(LIVES)}",
        )
        return self.persister

    @property
    def store(self) -> Store:
        return Store("/store", fs=self.disk, block_bytes=BLOCK_BYTES)

    def hold(self, step: int, epoch: int = 1) -> None:
        for rank in range(RANKS):
            path = slot_path(self.job_dir, rank, 0)
            path.parent.mkdir(parents=True, exist_ok=True)
            slot = Slot.create(MEMORY, path, PAYLOAD_BYTES, 4096)
            slot.begin(bytes(16), rank, RANKS, 1, Stamp(step, epoch))
            slot.payload[:PAYLOAD_BYTES] = payload(step, rank)
            manifest = json.dumps(LAYOUT.to_json()).encode()
            table = slot.write_table(PAYLOAD_BYTES, manifest)
            slot.seal(table, LAYOUT.hash(), 0.25, wall_ns=1)
            slot.close()

    def act(self, act: ActName, step: int) -> CheckpointAct:
        return CheckpointAct(act, 0, step, 1, self.number, (RANKS,))

    def attempt(self, step: int) -> list[ActDone]:
        """All acts of another attempt, until one fails."""
        self.number += 1
        answers: list[ActDone] = []
        for act in ACTS:
            answers.append(run_acts(self.persister.carry_out(self.act(act, step))))
            if not answers[-1].ok or answers[-1].there:
                break
        return answers

    def is_free(self, rank: int) -> bool:
        slot = Slot(MEMORY, slot_path(self.job_dir, rank, 0))
        free = slot.lock(exclusive=True)
        slot.close()
        return free

    def check(self, *steps: int) -> None:
        """Those are whole, and nothing is broken."""
        epochs = dict.fromkeys(steps, 1)
        has_led = self.store.removal_record() is not None
        assert self.store.look() == StoreListing(list(steps), epoch=int(has_led), epochs=epochs)
        for step in steps:
            manifest = self.store.verify(step)
            names = sorted(manifest.files)
            found = [b"".join(self.store.open(manifest, name).blocks()) for name in names]
            assert found == [payload(step, rank) for rank in range(RANKS)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "job")


def test_an_attempt_makes_a_checkpoint_of_several_blocks_and_the_rules_remove_the_old_one(
    node: Node,
) -> None:
    for step in (3, 4):
        node.hold(step)
        assert [answer.ok for answer in node.attempt(step)] == [True] * 3
        node.check(step)
        assert all(node.is_free(rank) for rank in range(RANKS))
    blocks = {len(sums.xxh3_64) for sums in node.store.read_manifest(4).files.values()}
    assert blocks == {-(-PAYLOAD_BYTES // BLOCK_BYTES)}
    assert node.attempt(4)[-1].there


def test_slots_are_held_from_the_survey_until_they_are_written(node: Node) -> None:
    node.hold(3)
    node.number = 1
    for act, is_free in (("survey", False), ("part", True), ("publish", True)):
        assert run_acts(node.persister.carry_out(node.act(act, 3))).ok  # type: ignore[arg-type]
        assert node.is_free(0) is is_free


@pytest.mark.parametrize("act", ["part", "publish"])
def test_an_act_without_its_survey_is_refused(node: Node, act: ActName) -> None:
    node.hold(3)
    assert not run_acts(node.persister.carry_out(node.act(act, 3))).ok
    assert run_acts(node.persister.carry_out(node.act("drop", 3))).ok
    node.check()


def test_a_full_store_is_an_answer_and_leaves_nothing(node: Node) -> None:
    node.hold(3)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    node.disk._open = full
    answers = node.attempt(3)
    assert not answers[-1].ok and "StoreError" in answers[-1].why
    assert all(node.is_free(rank) for rank in range(RANKS))
    del node.disk._open
    assert [answer.ok for answer in node.attempt(3)] == [True] * 3
    node.check(3)


def stuck(monkeypatch: pytest.MonkeyPatch, *directories: str) -> None:
    """What is in these cannot be removed: it is another user's, or open over NFS."""
    for name in ("remove", "remove_unpublished"):
        own = getattr(Store, name)

        def refuses(store: Store, which: CheckpointName, own: Any = own) -> None:
            if which.directory in directories:
                raise StoreError(f"removing {which}: expected it to succeed, found PermissionError")
            own(store, which)

        monkeypatch.setattr(Store, name, refuses)


def test_what_cannot_be_removed_hinders_no_checkpoint_and_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an attempt that was never published, for which all later ones would else fail."""
    unfinished = [CheckpointName(step, 0, 7) for step in (1, 2)]
    for name in unfinished:
        with node.store.draft(name).open("data") as file:
            file.write(b"half")
    stuck(monkeypatch, unfinished[0].directory)
    node.hold(3)
    answers = node.attempt(3)
    assert [answer.ok for answer in answers] == [True] * 3, answers[-1].why
    assert "left 1 unfinished checkpoint for later" in answers[-1].why
    assert "PermissionError" in answers[-1].why
    assert node.store.incomplete(CheckpointName(9, 9, 9)).names == [unfinished[0]]


def test_what_cannot_be_looked_at_hinders_no_checkpoint_and_is_told(node: Node) -> None:
    """It may be a published one of another user's, or on a disk that is not mounted."""
    closed, unfinished = (CheckpointName(step, 0, 7) for step in (1, 2))
    for name in (closed, unfinished):
        with node.store.draft(name).open("data") as file:
            file.write(b"half")
    info = node.disk.info

    def refuses(path: str, **how: Any) -> Any:
        if closed.directory in path:
            raise PermissionError(13, "Permission denied", path)
        return info(path, **how)

    node.disk.info = refuses
    node.hold(3)
    answers = node.attempt(3)
    assert [answer.ok for answer in answers] == [True] * 3, answers[-1].why
    assert "left 1 checkpoint that cannot be looked at" in answers[-1].why
    assert "Permission denied" in answers[-1].why
    del node.disk.info
    assert node.store.incomplete(CheckpointName(9, 9, 9)).names == [closed]


def test_what_is_published_while_it_is_being_removed_is_not_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a persister of yesterday, which was seen as one that never published."""
    node.keep = "latest:9"
    node.start()
    late = node.persister
    node.hold(3)
    node.number = 1
    for act in ACTS[:-1]:
        assert run_acts(late.carry_out(node.act(act, 3))).ok
    incomplete = Store.incomplete

    def then_it_publishes(store: Store, before: CheckpointName) -> Unfinished:
        found = incomplete(store, before)
        assert run_acts(late.carry_out(replace(node.act("publish", 3), attempt=1))).ok
        return found

    monkeypatch.setattr(Store, "incomplete", then_it_publishes)
    node.start()
    node.hold(4)
    assert [answer.ok for answer in node.attempt(4)] == [True] * 3
    node.check(4, 3)


def test_a_checkpoint_whose_older_one_cannot_be_removed_is_called_written(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 4):
        node.hold(step)
        if step == 4:
            stuck(monkeypatch, *(stored.name.directory for stored in node.store.published()))
        answers = node.attempt(step)
        assert [answer.ok for answer in answers] == [True] * 3, answers[-1].why
    assert "left 1 checkpoint for later: removing" in answers[-1].why
    assert [stored.step for stored in node.store.published()] == [4, 3]


def test_a_store_that_fails_once_it_is_published_takes_no_checkpoint_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.hold(3)
    published = Store.published

    def fails_afterwards(store: Store) -> tuple[Manifest, ...]:
        if store.exists(3):
            raise StoreError("listing: expected it to succeed, found TimeoutError")
        return published(store)

    monkeypatch.setattr(Store, "published", fails_afterwards)
    answers = node.attempt(3)
    assert [answer.ok for answer in answers] == [True] * 3
    assert "TimeoutError" in answers[-1].why
    assert node.store.intact(3) is not None


def _pieces(node: Node, step: int) -> int:
    return sum(1 for _ in _stepwise(node, step))


def _stepwise(node: Node, step: int) -> Iterator[None]:
    """An attempt, with a rest wherever the process may die."""
    node.number += 1
    for act in ACTS:
        yield
        yield from node.persister.carry_out(node.act(act, step))
    yield


def test_killed_between_any_two_pieces(tmp_path: Path) -> None:
    pieces = _pieces(_second_attempt(tmp_path / "whole"), 4)
    assert pieces > len(ACTS) + 1, "an act has pieces"
    for dies_at in range(pieces):
        node = _second_attempt(tmp_path / str(dies_at))
        acts = _stepwise(node, 4)
        for _ in range(dies_at + 1):
            next(acts)
        acts.close()
        _recovers(node)


def test_killed_at_any_change_of_the_store(tmp_path: Path) -> None:
    whole = _second_attempt(tmp_path / "whole")
    before = whole.disk.changes
    whole.attempt(4)
    changes = whole.disk.changes - before
    assert changes > 5
    for dies_at in range(1, changes + 1):
        node = _second_attempt(tmp_path / str(dies_at))
        node.disk.dies_at = node.disk.changes + dies_at
        with pytest.raises(Killed):
            node.attempt(4)
        _recovers(node)


def _second_attempt(job_dir: Path) -> Node:
    """One checkpoint is there, and another one may be written."""
    node = Node(job_dir)
    node.hold(3)
    node.attempt(3)
    node.hold(4)
    return node


def _recovers(node: Node) -> None:
    """What is there is whole, and another life of the persister writes what was not."""
    node.persister._release()  # what the kernel does with a dead process's locks
    found = node.store.look()
    usable, broken = found.usable, {**found.damaged, **found.unfinished}
    for step in usable:
        node.store.verify(step)
    # of a checkpoint that the rules remove, the manifest goes first
    assert set(broken) <= {3, 4} and (set(usable) & {3, 4})
    node.start()
    assert node.attempt(4)[-1].ok
    assert node.store.look().usable[0] == 4
    node.store.verify(4)


# -- who may remove


def steps_in(node: Node) -> list[int]:
    return [manifest.step for manifest in node.store.published()]


def keep_three_and_then_one(node: Node) -> None:
    """Steps 1 to 3 are stored and kept, and step 4 is held, behind which one is to be left."""
    node.keep = "latest:9"
    for step in (1, 2, 3):
        node.start()
        node.hold(step)
        assert node.attempt(step)[-1].ok
    node.keep = "latest:1"
    node.start()
    node.hold(4)


def until_it_removes(node: Node, step: int, epoch: int) -> Acts[ActDone]:
    """An attempt of `node.persister`, in front of its first removal."""
    node.number += 1
    stamp = {"step": step, "timeline": Timeline(epoch, -1)}
    acts = [replace(node.act(act, step), **stamp) for act in ACTS]  # type: ignore[arg-type]
    for act in acts[:-1]:
        assert run_acts(node.persister.carry_out(act)).ok
    publishing = node.persister.carry_out(acts[-1])
    next(publishing)  # published: what is not kept is removed next
    return publishing


def test_a_leader_that_wakes_after_its_successor_has_removed_removes_nothing(node: Node) -> None:
    """It knows what it wants to remove, and has not looked at the lease yet."""
    keep_three_and_then_one(node)
    sleeping = until_it_removes(node, 4, epoch=1)
    found = node.store.removal_record()
    assert found is not None and found.epoch == 1, "its own, told before it wrote anything"
    record = RemovalRecord(found.number + 1, 2, "its successor", is_held=False)
    assert node.store.put_removal_record(record)
    said = run_acts(sleeping)
    assert said.ok and "its successor removes in epoch 2, and this is epoch 1" in said.why
    assert steps_in(node) == [4, 3, 2, 1]


def test_a_leader_that_loses_the_lease_between_two_removals_stops(node: Node) -> None:
    keep_three_and_then_one(node)
    removing = until_it_removes(node, 4, epoch=1)
    next(removing)
    left = steps_in(node)
    assert len(left) == 3
    held = node.store.removal_record()
    assert held is not None and held.is_held
    node.now_ns += LEASE_NS  # it stands still, and another one has waited for that
    successor = RemovalRecord(held.number + 1, 2, "its successor", is_held=True)
    assert node.store.put_removal_record(successor)
    said = run_acts(removing)
    assert said.ok and "left 2 checkpoints for later" in said.why
    assert steps_in(node) == left and node.store.removal_record() == successor


def test_a_lease_that_is_not_looked_at_in_time_is_not_used(node: Node) -> None:
    """Nobody has taken it: it is renewed, before anything is removed under it."""
    keep_three_and_then_one(node)
    removing = until_it_removes(node, 4, epoch=1)
    next(removing)
    held = node.store.removal_record()
    node.now_ns += 2 * LEASE_NS
    next(removing)
    renewed = node.store.removal_record()
    assert held is not None and renewed is not None and renewed.number == held.number + 1
    assert run_acts(removing).ok and steps_in(node) == [4]
    given_back = node.store.removal_record()
    assert given_back is not None and not given_back.is_held
    assert [path for path in node.disk.ls("/store", detail=False) if "removals" in path] == [
        f"/store/keepstep-removals-{given_back.number:012d}.json"
    ]


def test_who_follows_one_that_died_removing_waits_for_its_lease(node: Node) -> None:
    node.hold(3)
    assert node.attempt(3)[-1].ok
    assert node.store.put_removal_record(RemovalRecord(5, 1, "a dead one", is_held=True))
    for step, left in ((4, [4, 3]), (5, [5, 4, 3])):
        node.hold(step)
        said = node.attempt(step)[-1]
        assert said.ok and "a dead one may still remove" in said.why
        assert steps_in(node) == left
    node.now_ns += LEASE_NS
    node.hold(6)
    assert node.attempt(6)[-1].ok and steps_in(node) == [6]


def test_what_was_never_published_is_removed_under_the_lease_too(node: Node) -> None:
    node.hold(3)
    node.number = 1
    left = node.store.draft(CheckpointName(2, 0, 1))
    with left.open("a") as file:
        file.write(b"half")
    assert node.store.put_removal_record(RemovalRecord(1, 9, "its successor", is_held=False))
    assert node.attempt(3)[-1].ok
    assert node.store.incomplete(CheckpointName(3, 1, 9)).names == [left.name]


def test_who_leads_next_leads_in_a_later_epoch_than_the_lease_tells(node: Node) -> None:
    """Else, where all checkpoints were removed by hand, it could remove nothing any more."""
    assert node.store.put_removal_record(RemovalRecord(1, 9, "its predecessor", is_held=False))
    assert node.store.look().epoch == 9


# -- the server


class FakeBox:
    """The keeper, as its persister sees it."""

    pid = 1

    def __init__(self) -> None:
        self.answers: list[ActDone] = []

    def send(self, message: Any, /) -> bool:
        self.answers.append(message)
        return True

    def poke(self, message: Any, /) -> None: ...

    def hear_rest(self) -> None: ...

    def close(self) -> None: ...

    def release(self) -> None: ...


class Later:
    """See `ports.Executor`: works when it is told to, a piece at a time."""

    def __init__(self) -> None:
        self.under_way: list[tuple[Acts[Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        raise AssertionError("an act has pieces")

    def act(self, acts: Acts[Any], then: Callable[[Any], None]) -> None:
        self.under_way.append((acts, then))

    def piece(self) -> None:
        acts, then = self.under_way[0]
        try:
            next(acts)
        except StopIteration as over:
            self.under_way.pop(0)
            then(over.value)

    def all(self) -> None:
        while self.under_way:
            assert len(self.under_way) == 1, "one act after the other"
            self.piece()


def test_acts_are_answered_one_after_the_other(node: Node) -> None:
    node.hold(3)
    node.number = 1
    later, box = Later(), FakeBox()
    server = PersisterServer(node.persister, later)
    for act in (*ACTS, "drop"):
        server.hear(box, node.act(act, 3))  # type: ignore[arg-type]
    assert box.answers == []
    later.all()
    assert [answer.ok for answer in box.answers] == [True] * 4 and not server.is_over
    node.check(3)


def test_without_its_keeper_it_gives_up_once_nothing_is_under_way(node: Node) -> None:
    node.hold(3)
    node.number = 1
    later, box = Later(), FakeBox()
    server = PersisterServer(node.persister, later)
    for act in ACTS:
        server.hear(box, node.act(act, 3))
    later.piece()
    later.piece()
    server.gone(box)
    assert not server.is_over, "an act is under way"
    later.all()
    assert server.is_over and len(box.answers) == 1
    assert all(node.is_free(rank) for rank in range(RANKS))
    node.check()


class Leader:
    """Who leads the writing of checkpoints in one epoch, over a store that others lead, too."""

    def __init__(self, node: Node, epoch: int, since: int, job: str = "j") -> None:
        self.node, self.timeline = node, Timeline(epoch, since)
        format_ = PlainFormat(node.store)
        self.persister = Persister(
            job, node.job_dir, node.keep, MEMORY, node.store, format_, node, f"of {job}"
        )

    def do(self, act: ActName, step: int, number: int) -> ActDone:
        epoch = self.timeline.epoch
        if act == "survey":
            self.node.hold(step, epoch)
        asked = CheckpointAct(act, 0, step, epoch, number, (RANKS,), self.timeline)
        return run_acts(self.persister.carry_out(asked))

    def write(self, step: int, number: int) -> None:
        for act in ACTS:
            assert self.do(act, step, number).ok

    @property
    def stored(self) -> list[tuple[int, int]]:
        return [(m.step, m.epoch) for m in self.node.store.list_checkpoints().checkpoints]


def test_a_leader_of_yesterday_removes_nothing_of_its_successor(node: Node) -> None:
    """It has not heard that another one leads, and its clock is ahead."""
    old, new = Leader(node, 1, -1), Leader(node, 2, 2)
    old.write(2, number=10)
    assert new.do("survey", 3, number=5).ok
    old.write(6, number=20)
    old.write(7, number=21)
    assert old.stored == [(7, 1), (6, 1), (2, 1)], "somebody leads in a later epoch"
    assert new.do("part", 3, number=5).ok and new.do("publish", 3, number=5).ok
    assert new.stored == [(3, 2)], "what the job went back behind is gone"
    answer = old.do("survey", 9, number=22)
    assert not answer.ok and "would not count: a later run of this job went on from" in answer.why
    assert new.stored == [(3, 2)] and node.store.intact(3) is not None
    new.write(4, number=6)
    assert new.stored == [(4, 2)] and len(node.store.published()) == 1


def test_a_step_that_is_computed_again_is_written_again(node: Node) -> None:
    node.keep = "latest:5"
    first, again = Leader(node, 1, -1), Leader(node, 2, 2)
    for step in (2, 4, 6):
        first.write(step, number=step)
    answer = again.do("survey", 4, number=9)
    assert answer.ok and not answer.there
    assert again.do("part", 4, number=9).ok and again.do("publish", 4, number=9).ok
    assert again.stored == [(4, 2), (2, 1)]
    assert again.do("survey", 4, number=10).there


def test_a_state_on_which_all_stand_is_not_written_again(node: Node) -> None:
    first = Leader(node, 1, -1)
    first.write(4, number=1)
    assert first.do("survey", 4, number=2).there


def test_checkpoints_of_another_job_are_never_removed(node: Node) -> None:
    Leader(node, 1, -1, job="other").write(3, number=1)
    own = Leader(node, 1, -1)
    for step in (4, 5):
        own.write(step, number=step)
    assert [(m.job, m.step) for m in node.store.published()] == [("j", 5), ("other", 3)]
