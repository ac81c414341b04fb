"""Checkpoint desk: whoever asks for a checkpoint is answered once, whatever becomes of the act, of
the persister, or of the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.cut import Holding
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.checkpoint import Timeline
from keepstep.model.mesh import LEADER, Member, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.messages.peers import ActOrdered, CheckpointAnswer, CheckpointAsked
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.snapshot import Stamp
from keepstep.ports import ChildConnection, Hearer
from keepstep.runtime.keeper.checkpoint_desk import LAST_ANSWER_NS, CheckpointDesk
from keepstep.runtime.keeper.checkpointing import Checkpointing
from keepstep.runtime.keeper.persister_client import PersisterClient
from tests.runtime.fakes import FakeBox, FakeJournal, FakeTime
from tests.runtime.replication.room import JOB_DIR, a_memory, seal

STAMP = Stamp(7, 1)
HELD = Holding(frozenset({STAMP}), None, STAMP.step)
ACTS = ("survey", "part", "publish")


class ActBox(FakeBox):
    """See `ports.ChildConnection`."""

    computed_ns = 0

    def hurry(self, is_urgent: bool, /) -> bool:
        return True


class ActPersisters:
    """See `ports.Persisters`. Every act waits in `box.sent` until the test answers it."""

    def __init__(self) -> None:
        self.box = ActBox()
        self.answered = 0

    def start(self, hearer: Hearer) -> ChildConnection:
        self.box = ActBox(hearer=hearer)
        self.answered = 0
        return self.box

    def answer(self, failing: str | None = None) -> bool:
        """All that it was asked, in order; whether there was anything."""
        had_any = self.answered < len(self.box.sent)
        while self.answered < len(self.box.sent):
            act: CheckpointAct = self.box.sent[self.answered]
            self.answered += 1
            self.box.says(ActDone(act.act != failing, f"{act.act} of {act.attempt}"))
        return had_any


class FakeParts:
    """See `SnapshotParts`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[str | None], None]]] = []
        self.given_back: list[int] = []

    def bring_to_store(
        self, stamp: Stamp, attempt: int, then: Callable[[str | None], None]
    ) -> None:
        self.waiting.append((attempt, then))

    def give_back(self, attempt: int) -> None:
        self.waiting = [each for each in self.waiting if each[0] != attempt]
        self.given_back.append(attempt)

    def come(self, why: str | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for _, then in waiting:
            then(why)


class DeskNode:
    """One keeper's desk. See `CheckpointNodes`; its words wait in `Desks.posted`."""

    def __init__(self, desks: Desks, node: int, has_store: bool) -> None:
        self.node = node
        self._desks = desks
        self.memory = a_memory()
        self.persisters = ActPersisters()
        seal(self.memory, JOB_DIR, node, STAMP, b"state").close()
        client = PersisterClient(self.persisters) if has_store else None
        checkpointing = Checkpointing(JOB_DIR, self.memory, desks.time, FakeJournal(), client)
        self.desk = CheckpointDesk(checkpointing, desks.time, has_store)
        self.parts: FakeParts | None = None

    @property
    def mesh(self) -> Mesh:
        members = tuple(Member(node, "127.0.0.1", 1, 1, 1) for node in range(len(self._desks.all)))
        return Mesh(self._desks.version, self.node, members, "a secret of the tests")

    def send_checkpoint(self, node: int, body: Any) -> None:
        self._desks.posted.append((self.node, node, body))


class Desks:
    """Nodes with a desk each, in a mesh if there are several."""

    def __init__(self, nodes: int = 2, has_store: bool = True) -> None:
        self.time = FakeTime()
        self.version = 1
        self.posted: list[tuple[int, int, Any]] = []
        self.all: list[DeskNode] = []
        self.all += [DeskNode(self, node, has_store) for node in range(nodes)]
        if nodes > 1:
            self.begin_mesh()

    def begin_mesh(self) -> None:
        for node in self.all:
            node.desk.join_mesh(node)

    def carry(self) -> bool:
        posted, self.posted = self.posted, []
        for sender, node, body in posted:
            self.all[node].desk.receive(sender, body)
        return bool(posted)

    def settle(self, failing: str | None = None, failing_on: int = 0) -> None:
        """All that can happen does."""
        is_going = True
        while is_going:
            is_going = self.carry()
            self.all[LEADER].desk.advance([HELD] * len(self.all), len(self.all), True)
            for node in self.all:
                is_going |= node.persisters.answer(failing if node.node == failing_on else None)
            is_going |= bool(self.posted)


def answers(box: FakeBox) -> list[tuple[int, bool, int | None]]:
    done: list[CheckpointDone] = box.of(CheckpointDone)
    return [(one.ticket, one.ok, one.step) for one in done]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("failing", [None, *ACTS])
def test_who_asked_is_answered_once(nodes: int, failing: str | None) -> None:
    desks = Desks(nodes)
    boxes = [FakeBox() for _ in desks.all]
    for node, box in zip(desks.all, boxes, strict=True):
        node.desk.ask(box, None, "asked", ticket=10 + node.node)
    desks.settle(failing)
    assert [answers(box) for box in boxes] == [
        [(10 + node, failing is None, STAMP.step)] for node in range(nodes)
    ]
    assert all(node.desk.is_done and not node.desk.pending for node in desks.all)


@given(
    deeds=st.lists(
        st.tuples(
            st.sampled_from(["ask", "carry", "work", "die", "gone", "mesh"]), st.integers(0, 1)
        ),
        max_size=25,
    ),
    failing=st.sampled_from([None, *ACTS]),
)
def test_nobody_is_answered_twice_and_nobody_forgotten(
    deeds: list[tuple[str, int]], failing: str | None
) -> None:
    desks = Desks(2)
    boxes = [FakeBox(), FakeBox()]
    asked: list[list[int]] = [[], []]
    for number, (deed, at) in enumerate(deeds):
        node = desks.all[at]
        match deed:
            case "ask":
                asked[at].append(number)
                node.desk.ask(boxes[at], None, "asked", number)
            case "carry":
                desks.carry()
                desks.all[LEADER].desk.advance([HELD] * 2, 2, True)
            case "work":
                node.persisters.answer(failing)
            case "die":
                if node.persisters.box.hearer is not None and node.persisters.box.is_open:
                    node.persisters.box.dies()
            case "gone":  # to each other, with all that is on its way
                desks.posted.clear()
                desks.all[0].desk.node_gone(1, "gone")
                desks.all[1].desk.node_gone(0, "gone")
            case "mesh":
                desks.version += 1
                desks.begin_mesh()
        for box, tickets in zip(boxes, asked, strict=True):
            heard = [ticket for ticket, _, _ in answers(box)]
            assert len(set(heard)) == len(heard)
            assert set(heard) <= set(tickets)
    desks.settle()
    for box, tickets in zip(boxes, asked, strict=True):
        assert sorted(ticket for ticket, _, _ in answers(box)) == tickets


def test_the_leader_writes_what_another_node_asks_for() -> None:
    desks = Desks(2)
    desks.all[1].desk.ask(FakeBox(), 7, "asked", 3)
    [(sender, node, body)] = desks.posted
    assert (sender, node, type(body), body.step) == (1, LEADER, CheckpointAsked, 7)
    desks.carry()
    desks.all[LEADER].desk.advance([HELD] * 2, 2, True)
    [(sender, node, body)] = desks.posted
    assert (sender, node, type(body), body.act) == (LEADER, 1, ActOrdered, "survey")
    assert body.is_urgent, "whoever has no more steps waits"
    desks.settle()
    desks.all[1].desk.ask(FakeBox(), 7, "every step", 4, steps_follow=True)
    desks.settle()


def test_while_the_leader_is_gone_a_request_fails_at_once() -> None:
    desks = Desks(2)
    desk, box = desks.all[1].desk, FakeBox()
    desk.node_gone(LEADER, "lost")
    desk.ask(box, None, "asked", 1)
    assert answers(box) == [(1, False, None)]
    desk.leader_is_back()
    desk.ask(box, None, "asked", 2)
    desks.settle()
    assert answers(box)[1:] == [(2, True, STAMP.step)]


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    desks = Desks(2)
    desk, box = desks.all[1].desk, FakeBox()
    desk.ask(box, None, "asked", 1)
    [(_, _, asked)] = desks.posted
    answer = CheckpointAnswer(asked.ticket, True, 7, "done")
    desk.receive(LEADER, CheckpointAnswer(asked.ticket + 1, True, 7, "done"))
    assert answers(box) == []
    desk.receive(LEADER, answer)
    desk.receive(LEADER, answer)
    assert answers(box) == [(1, True, 7)]


@pytest.mark.parametrize("at", [0, 1])
def test_what_an_asker_that_is_gone_wanted_is_still_done(at: int) -> None:
    desks = Desks(2)
    desk, box = desks.all[at].desk, FakeBox()
    desk.ask(box, None, "asked", 1)
    desk.forget(box)
    desks.settle()
    assert answers(box) == []
    acts = [act.act for act in desks.all[LEADER].persisters.box.sent]
    assert acts == list(ACTS)


def test_without_a_store_the_answer_is_no_on_every_node() -> None:
    desks = Desks(2, has_store=False)
    for node in desks.all:
        box = FakeBox()
        node.desk.ask(box, None, "asked", 1)
        assert answers(box) == [(1, False, None)]


def test_at_the_end_a_node_waits_for_the_last_answer_but_not_for_ever() -> None:
    desks = Desks(2)
    desk = desks.all[1].desk
    assert desk.is_done
    desk.want_newest("the end")
    desks.time.pass_ns(LAST_ANSWER_NS - 1)
    assert not desk.is_done
    desks.time.pass_ns(1)
    assert desk.is_done


def test_what_the_store_has_already_is_not_written_again() -> None:
    desks = Desks(1)
    desk, box = desks.all[0].desk, FakeBox()
    desk.goes_on(Timeline(9, STAMP.step), from_store=True)
    desk.ask(box, None, "asked", 1)
    desks.settle()
    assert answers(box) == [(1, True, STAMP.step)]
    assert not desks.all[0].persisters.box.sent


def with_parts() -> tuple[Desks, list[FakeParts], FakeBox]:
    """A checkpoint is asked for, and every node waits for what others keep for its ranks."""
    desks, box = Desks(2), FakeBox()
    every = [FakeParts() for _ in desks.all]
    for node, parts in zip(desks.all, every, strict=True):
        node.parts = parts
    desks.begin_mesh()
    desks.all[LEADER].desk.ask(box, None, "asked", ticket=1)
    desks.settle()
    assert not answers(box) and all(len(parts.waiting) == 1 for parts in every)
    return desks, every, box


def test_no_node_surveys_before_its_parts_are_here_and_they_are_given_back() -> None:
    desks, every, box = with_parts()
    assert not any(parts.given_back for parts in every)
    for parts in every:
        parts.come()
    desks.settle()
    assert answers(box) == [(1, True, STAMP.step)]
    assert all(parts.given_back for parts in every)


def test_a_part_that_cannot_be_had_ends_the_attempt_and_the_next_step_is_tried() -> None:
    desks, every, box = with_parts()
    every[1].come("it is gone")
    desks.settle()
    assert not answers(box), "a newer step may do"
    assert not every[LEADER].waiting and every[LEADER].given_back


def test_a_mesh_that_ends_leaves_nobody_waiting_for_parts() -> None:
    desks, every, box = with_parts()
    desks.begin_mesh()
    assert answers(box) == [(1, False, STAMP.step)]
    assert not any(parts.waiting for parts in every)
    slot = Slot(desks.all[1].memory, slot_path(JOB_DIR, 1, 0))
    assert slot.lock(exclusive=True), "its rank may write there again"
