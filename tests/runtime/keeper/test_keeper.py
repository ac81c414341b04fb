"""The keeper's hearing: whatever it is sent, by whomever, it lives and answers."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER, KEEPER_WITH_NODE
from keepstep.core.wire.messages import KINDS, decode
from keepstep.edge.shm.slot import ranks_in
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    FromAgent,
    JobEnded,
    MemoryKept,
    RemoveMemory,
    StillWriting,
)
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    FromRank,
    Goodbye,
    JoinVote,
    NotUnderstood,
    Released,
    StateLoaded,
    StateOffered,
    TrainingPermitted,
)
from keepstep.model.messages.peers import MeshMessage, VoteWord
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.runtime.keeper.checkpoint_desk import CheckpointDesk
from keepstep.runtime.refused_messages import TOLD_EVERY
from keepstep.runtime.replication.mesh_state import MeshState
from keepstep.sim.protocol.world.boxes import LocalSockets
from keepstep.sim.protocol.world.memory import SimMemory
from tests.core.wire.drawn import ANY_JSON, messages
from tests.runtime.replication.room import seal
from tests.runtime.simulated import FakeBox, SimKeeper, Town

LOCAL = [
    kind
    for kind in {*get_args(FromRank), *get_args(FromAgent)}
    if kind not in (JobEnded, RemoveMemory)
]
LOCAL.sort(key=lambda kind: kind.__name__)
PEER = sorted(get_args(MeshMessage), key=lambda kind: kind.__name__)
NAMED = {
    "mesh_version": st.just(7),
    "policy": st.sampled_from(["none", "auto", "copies:2", "parity:2", "copies:9", "what"]),
    # what makes sense more often than chance would have it
    "world_size": st.sampled_from([6, 6, 6, 1]),
    "payload_bytes": st.integers(0, 5000),
    "manifest_bytes": st.integers(0, 500),
    "capacity_bytes": st.sampled_from([4096, 8192, 1 << 50]),
    "manifest_capacity_bytes": st.sampled_from([4096, 0]),
    "stripe_group": st.sampled_from([(), (), (0, 2), (2, 4), (0, 2, 4), (1, 3, 5), (0, 1)]),
    "tolerates": st.sampled_from([1, 1, 2, 0]),
}
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def in_a_mesh(nodes: int, node: int, **config: Any) -> SimKeeper:
    """The keeper of that node of a mesh."""
    town = Town()
    for _ in range(nodes):
        town.keeper(**config)
    town.begin_mesh(7, ranks=2)
    return town.keepers[node]


def test_a_message_with_a_body_that_is_none_kills_no_keeper() -> None:
    """It passed the schema of its day and raised a KeyError."""
    keeper = in_a_mesh(2, 0)
    for body in ({}, {"kind": "join"}, {"kind": "join", "rank": 0}):
        with pytest.raises(NotAMessage):
            decode(json.dumps({"kind": "vote", "mesh_version": 7, "body": body}).encode())
    assert keeper.answers()


@pytest.mark.parametrize("nodes", [1, 2])
def test_any_message_of_this_node(nodes: int) -> None:
    keeper = in_a_mesh(nodes, 0) if nodes > 1 else Town().keeper()
    drawn = st.one_of(*(messages(kind, small=4) for kind in LOCAL))
    boxes = [FakeBox(10), FakeBox(11)]

    @SLOW
    @given(drawn, st.sampled_from(boxes))
    def check(message: Any, box: FakeBox) -> None:
        keeper.hear(box, message)
        keeper.town.pass_time(1000)
        assert keeper.answers()

    check()


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("store", [None, "/store"])
def test_any_message_of_another_node(node: int, store: str | None) -> None:
    keeper = in_a_mesh(3, node, store=store)
    drawn = st.one_of(*(messages(kind, small=4, named=NAMED) for kind in PEER))
    inbox = keeper.keeper.inbox
    assert inbox is not None

    @SLOW
    @given(drawn, st.integers(0, 2))
    def check(message: Any, sender: int) -> None:
        inbox.message(sender, message)
        keeper.keeper.hear_peers()
        keeper.town.pass_time(1000)
        assert keeper.answers()

    check()


class Deaf:
    """Who sends and does not care for answers."""

    def hear(self, box: Box, message: Any, /) -> None:
        pass

    def gone(self, box: Box, /) -> None:
        pass


def test_any_json_object_and_any_bytes_at_the_box() -> None:
    """As it comes over a connection: decoded, or refused and answered."""
    keeper = in_a_mesh(2, 0)
    agent = keeper.machine.start("agent")
    sockets = LocalSockets(keeper.machine)
    path = keeper.settings.job_dir / "keeper.sock"
    sockets.listen(
        keeper.process, path, KEEPER_WITH_NODE, lambda box: keeper.run, keeper.keeper.refuse
    )
    there = sockets.connect(agent, path, AGENT_WITH_KEEPER, Deaf(), lambda kind, why: None)
    names = sorted({field.name for kind in LOCAL for field in fields(kind)})
    almost = st.dictionaries(st.sampled_from(names), ANY_JSON, max_size=4)
    kinds = st.sampled_from([kind.KIND for kind in LOCAL]) | ANY_JSON
    objects = st.tuples(almost, kinds).map(lambda said: json.dumps({**said[0], "kind": said[1]}))

    @SLOW
    @given(st.binary(min_size=1, max_size=200) | objects.map(str.encode))
    def check(packet: bytes) -> None:
        there.send_packet(packet)
        keeper.town.pass_time()
        assert keeper.answers()

    check()
    told = keeper.events("message-refused")
    assert told and len(told) == 1 + (told[-1].data["count"] - 1) // TOLD_EVERY


def test_any_json_object_and_any_bytes_of_another_keeper() -> None:
    keeper = in_a_mesh(2, 0)
    inbox = keeper.keeper.inbox
    assert inbox is not None
    names = sorted({field.name for kind in PEER for field in fields(kind)})
    almost = st.dictionaries(st.sampled_from(names), ANY_JSON, max_size=4)
    objects = st.tuples(almost, st.sampled_from(sorted(KINDS))).map(
        lambda said: json.dumps({**said[0], "mesh_version": 7, "kind": said[1]}).encode()
    )

    @SLOW
    @given(st.binary(max_size=200) | objects)
    def check(body: bytes) -> None:
        try:
            message = decode(body)
        except NotAMessage:
            return
        if isinstance(message, get_args(MeshMessage)):  # the link keeps its own
            inbox.message(1, message)
        keeper.keeper.hear_peers()
        assert keeper.answers()

    check()


def test_what_nobody_can_mean_is_answered_and_told_once() -> None:
    keeper, box = in_a_mesh(2, 0), FakeBox(10)
    for _ in range(TOLD_EVERY):
        keeper.hear(box, JoinVote(9, 4, 1, ()))
    assert all(isinstance(message, NotUnderstood) for message in box.heard)
    assert len(box.heard) == TOLD_EVERY and len(keeper.events("message-refused")) == 1
    keeper.hear(box, JoinVote(9, 4, 1, ()))
    assert len(keeper.events("message-refused")) == 2 and keeper.events("rank-joined") == []


def test_a_rank_of_a_job_of_one_node_starts_afresh_and_says_goodbye() -> None:
    keeper, box = Town().keeper(), FakeBox(10)
    keeper.hear(box, JoinVote(0, 1, 1, ()))
    offer = box.last(StateOffered)
    assert (offer.source, offer.step) == ("fresh", -1)
    keeper.hear(box, Goodbye(0, False, "it was tired"))
    assert box.last(Released) is not None
    [said] = keeper.events("rank-bye")
    assert (said.data["rank"], said.data["ok"]) == (0, False)


@pytest.mark.parametrize("says_bye", [True, False])
def test_a_rank_that_leaves_without_a_page_is_told_without_its_step(says_bye: bool) -> None:
    keeper, box = Town().keeper(), FakeBox(10)
    keeper.hear(box, JoinVote(0, 1, 1, ()))
    if says_bye:
        keeper.hear(box, Goodbye(0, True, "well"))
    keeper.keeper.gone(box)
    [left] = keeper.events("rank-left")
    assert (left.data["expected"], left.data["completed_step"]) == (says_bye, None)
    assert ("without goodbye" in left.why) != says_bye


def test_a_mesh_that_is_older_than_the_present_one_is_passed_over() -> None:
    keeper = in_a_mesh(2, 0)
    node = keeper.keeper.node
    assert node is not None
    for version, present in ((6, 7), (8, 8), (8, 8), (7, 8)):
        keeper.hear(keeper.agent, BeginMesh(replace(node.mesh, version=version)))
        assert node.mesh.version == present


def test_keepers_end_when_the_ranks_of_all_nodes_have_ended_well() -> None:
    town = in_a_mesh(2, 0).town
    for rank in range(4):
        assert all(keeper.process.alive for keeper in town.keepers)
        box, keeper = FakeBox(10 + rank), town.keepers[rank // 2]
        keeper.hear(box, JoinVote(rank, 4, 1, ()))
        keeper.hear(box, Goodbye(rank, True, "well"))
        town.pass_time()
    town.pass_time(60 * S_NS)
    assert not any(keeper.process.alive for keeper in town.keepers)


def test_a_rank_that_has_its_page_keeps_the_memory_before_it_says_a_word() -> None:
    """Its page went with what a killed life had left: no rank ever saw it again, and nothing was
    captured any more as soon as all slots were full."""
    town = Town()
    keeper, box = town.keeper(), FakeBox(10)
    keeper.hear(box, JoinVote(0, 1, 1, ()))
    rank = keeper.machine.start("rank 0")
    page = StatusPage.own(SimMemory(keeper.machine.files, rank), keeper.settings.job_dir, 0)
    assert page is not None
    keeper.keeper.gone(box)
    town.pass_time(5 * S_NS)
    assert keeper.process.alive and page.is_there()
    rank.end("killed")
    town.pass_time()
    assert not keeper.process.alive


def test_who_comes_while_the_last_checkpoint_is_written_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckpointDesk, "is_done", False)
    town = Town()
    keeper, box = town.keeper(), FakeBox(10)
    keeper.hear(box, JoinVote(0, 1, 1, ()))
    keeper.keeper.gone(box)
    town.pass_time(2 * S_NS)
    assert len(keeper.events("job-over")) == 1
    box = FakeBox(11)
    keeper.hear(box, JoinVote(0, 1, 1, ()))
    town.pass_time()
    monkeypatch.setattr(CheckpointDesk, "is_done", True)
    town.pass_time()
    assert keeper.process.alive and box.last(StateOffered) is not None
    keeper.keeper.gone(box)
    town.pass_time(2 * S_NS)
    assert len(keeper.events("job-over")) == 2 and not keeper.process.alive


def test_who_ends_a_job_hears_what_is_still_written_and_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CheckpointDesk, "is_done", False)
    keeper, agent = in_a_mesh(2, 0, store="/store"), FakeBox(5)
    keeper.hear(agent, AgentHere(5))
    keeper.hear(agent, JobEnded(False, "interrupted"))
    told = agent.last(StillWriting)
    assert told is not None and agent.last(MemoryKept) is None
    assert told.why.startswith("it writes the newest step to the store; the memory is kept for ")
    assert "start the job again with as many ranks as it was of to go on from it" in told.why


def test_votes_of_ranks_that_are_not_there_are_refused() -> None:
    """A rank that nobody has would count as one more that has loaded."""
    keeper = in_a_mesh(2, 0)
    inbox = keeper.keeper.inbox
    assert inbox is not None
    for rank in (0, 1, 4, 1000):
        inbox.message(1, VoteWord(7, StateLoaded(rank, 1)))
    keeper.keeper.hear_peers()
    assert keeper.events("message-refused")[0].data["count"] == 1 and keeper.answers()


@pytest.mark.parametrize("permitted", [None, TrainingPermitted(1, 1, "fresh", Stamp(-1, 1), 0, "")])
@pytest.mark.parametrize("is_mesh_first", [False, True])
def test_only_who_was_permitted_to_train_trains(
    monkeypatch: pytest.MonkeyPatch, permitted: TrainingPermitted | None, is_mesh_first: bool
) -> None:
    """A rank that is about to ask finds a new keeper, too: what its page tells is of a mesh before.
    Taken for training it let the keeper commit, and remove copies that a lost node needs."""
    town = Town()
    for _ in range(2):
        town.keeper()
    keeper = town.keepers[0]
    trained: list[MeshState] = []
    monkeypatch.setattr(MeshState, "trains", lambda state: trained.append(state))
    if is_mesh_first:
        town.begin_mesh(7)
    keeper.hear(FakeBox(20), Attach(0, 2, permitted))
    if not is_mesh_first:
        town.begin_mesh(7)
    assert bool(trained) == (permitted is not None)


def test_when_all_go_on_what_a_larger_world_left_is_removed_and_nothing_else() -> None:
    keeper, box = Town().keeper(), FakeBox(10)
    stamp, root = Stamp(3, 1), keeper.settings.job_dir
    for rank in range(3):
        seal(keeper.memory, root, rank, stamp, b"x", world_size=1).close()
    keeper.hear(box, JoinVote(0, 1, 1, (stamp,), None))
    keeper.town.pass_time()
    [offer] = [each for each in box.heard if isinstance(each, StateOffered)]
    assert ranks_in(keeper.memory, root) == [0, 1, 2], "not before all have proven theirs"
    keeper.hear(box, StateLoaded(0, offer.offer))
    keeper.town.pass_time()
    assert [each.stamp for each in box.heard if isinstance(each, TrainingPermitted)] == [stamp]
    assert ranks_in(keeper.memory, root) == [0]
