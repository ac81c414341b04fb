"""What nobody can mean is found, whatever else the message says; what keepers do say passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.plausible import flaw_of_local, flaw_of_peer
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    HaltOrder,
    HaltWord,
    JoinVote,
    StateLoaded,
    TrainingPermitted,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    ActOrdered,
    Addend,
    AddUp,
    AllEnded,
    CheckpointAnswer,
    CheckpointAsked,
    CheckpointWord,
    CopyAcked,
    CopyOffer,
    HorizonWord,
    InventoryReport,
    MeshMessage,
    NodeReport,
    OfferWord,
    RankGone,
    RankJoined,
    RanksReport,
    RanksTrain,
    SeveralMessages,
    SharesWord,
    VoteBody,
    VoteWord,
)
from keepstep.model.restore_sources import (
    GroupMember,
    HeldParity,
    RestoreSource,
    SharedSources,
)
from keepstep.model.shares import RankRun, ShareClass
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import BlockRange, Part

MEMBERS = tuple(Member(node, "10.0.0.1", 1, 1, 2) for node in range(3))
MESH = Mesh(7, 1, MEMBERS, "s" * 16)  # ranks 0 to 5; 2 and 3 live here
STAMP = Stamp(3, 1)
PERMITTED = TrainingPermitted(1, 1, "memory", STAMP, 0, "")
OFFER = CopyOffer(7, 0, STAMP, 100, 4096, 10, 4096, 1, (0, 2, 4), 1, None)
WORD = HorizonWord(7, 1, "none", "", None, None, None, (), -1)
JOINED = RankJoined(0, 6, 1, (), None, None, 0, False)


@given(st.integers(0, 10), st.integers(1, 10))
def test_a_rank_of_this_node_and_world_and_no_other(rank: int, world_size: int) -> None:
    for message in (JoinVote(rank, world_size, 1, ()), Attach(rank, world_size)):
        assert (flaw_of_local(message, MESH) == "") == (world_size == 6 and rank in (2, 3))
        assert (flaw_of_local(message, None) == "") == (rank < world_size)


@pytest.mark.parametrize(
    ("mesh", "is_sound"),
    [
        (MESH, True),
        (replace(MESH, secret="short"), False),
        (replace(MESH, secret="\ud800" * 16), False),
        (replace(MESH, members=(replace(MEMBERS[0], host="a..b"), *MEMBERS[1:])), False),
        (replace(MESH, members=(replace(MEMBERS[0], host="node-0.example"), *MEMBERS[1:])), True),
    ],
)
def test_a_mesh_that_keepers_could_not_make_links_of(mesh: Mesh, is_sound: bool) -> None:
    assert (flaw_of_local(BeginMesh(mesh), None) == "") == is_sound


@pytest.mark.parametrize(
    "message",
    [
        WORD,
        AllEnded(7),
        SharesWord(7, 1, (ShareClass((RankRun(0, 3, 2),), 5),)),
        VoteWord(7, PERMITTED),
        VoteWord(7, VoteRefused("")),
        VoteWord(7, OfferWord(1, "fresh", STAMP, "", ())),
        CheckpointWord(7, ActOrdered("drop", STAMP, 1)),
        CheckpointWord(7, CheckpointAnswer(1, True, None, "")),
    ],
)
def test_what_only_the_leader_may_say(message: MeshMessage) -> None:
    assert flaw_of_peer(0, message, MESH) == ""
    assert flaw_of_peer(1, message, MESH) != "" != flaw_of_peer(2, message, MESH)


@pytest.mark.parametrize(
    "body", [JOINED, RankGone(0), StateLoaded(0, 1), replace(JOINED, rank=1, holds=(STAMP,))]
)
def test_a_node_speaks_for_its_own_ranks(body: VoteBody) -> None:
    assert flaw_of_peer(0, VoteWord(7, body), MESH) == ""
    assert flaw_of_peer(2, VoteWord(7, body), MESH) != ""


def test_ranks_halt_by_their_own_keeper_and_the_leader_orders() -> None:
    word = HaltWord(1, MESH.world_size, 1, 16, 1, "stands")
    nodes = [node for node in range(3) if flaw_of_peer(node, VoteWord(7, word), MESH) == ""]
    assert nodes == [MESH.node_of[1]]
    order = VoteWord(7, HaltOrder(1, 16, 1, "go"))
    assert flaw_of_peer(0, order, MESH) == "" != flaw_of_peer(1, order, MESH)
    assert flaw_of_local(replace(word, rank=MESH.world_size), MESH) != ""


def test_every_node_may_say_that_its_ranks_train() -> None:
    for node in range(3):
        assert flaw_of_peer(node, VoteWord(7, RanksTrain(PERMITTED)), MESH) == ""


@pytest.mark.parametrize("run", [RankRun(0, 7, 1), RankRun(0, 0, 1), RankRun(1, 4, 2)])
def test_replicas_that_are_no_ranks_of_this_job(run: RankRun) -> None:
    assert flaw_of_peer(0, SharesWord(7, 1, (ShareClass((run,), 5),)), MESH) != ""


def test_a_part_that_comes_from_nowhere() -> None:
    def offer(part: RestoreSource) -> VoteWord:
        shared = (SharedSources((RestoreSource(0, (0,)), part)),)
        return VoteWord(7, OfferWord(1, "memory", STAMP, "", (), False, shared))

    assert flaw_of_peer(0, offer(RestoreSource(1, (1,))), MESH) == ""
    assert flaw_of_peer(0, offer(RestoreSource(1, (3,))), MESH) != ""
    assert flaw_of_peer(0, offer(RestoreSource(1)), MESH) != ""


def test_a_rank_of_another_world_does_not_vote() -> None:
    assert flaw_of_peer(0, VoteWord(7, replace(JOINED, world_size=7)), MESH) != ""


def test_what_is_said_together_is_of_one_mesh() -> None:
    before, own, after = (CopyAcked(version, 1, Stamp(3, 1)) for version in (6, 7, 8))
    assert flaw_of_peer(1, SeveralMessages(7, (own, own)), MESH) == ""
    for other in (before, after):
        assert flaw_of_peer(1, SeveralMessages(7, (own, other)), MESH) != ""


def test_a_report_of_ranks_that_live_elsewhere() -> None:
    rows = tuple(RanksReport((rank,), (), None, -1, ()) for rank in range(2))
    report = NodeReport(7, 1, None, None, None, 1, 1, "", rows)
    assert flaw_of_peer(0, report, MESH) == "" != flaw_of_peer(1, report, MESH)


@pytest.mark.parametrize(
    ("change", "is_sound"),
    [
        ({}, True),
        ({"stripe_group": (), "tolerates": 0}, True),
        ({"rank": 5}, False),
        ({"payload_bytes": 5000}, False),
        ({"manifest_bytes": 5000}, False),
        ({"stripe_group": (2, 4)}, False),
        ({"stripe_group": (0, 0, 2)}, False),
        ({"stripe_group": (0, 4)}, False),
        ({"stripe_group": (0, 2, 3)}, False),
        ({"stripe_group": (0, 2, 9)}, False),
        ({"tolerates": 0}, False),
        ({"tolerates": 3}, False),
    ],
)
def test_an_offer(change: dict[str, object], is_sound: bool) -> None:
    offer = replace(OFFER, **change)  # type: ignore[arg-type]
    assert (flaw_of_peer(0, offer, MESH) == "") == is_sound
    assert flaw_of_peer(1, offer, MESH) != "", "this node's own"


@pytest.mark.parametrize(
    ("parity", "is_sound"),
    [
        (HeldParity(0, STAMP, (0, 2, 4), 1), True),
        (HeldParity(0, STAMP, (0, 7, 9), 1), True),  # of a larger world than this one
        (HeldParity(1, STAMP, (0, 2, 4), 1), False),
        (HeldParity(0, STAMP, (0, 0, 4), 1), False),
        (HeldParity(0, STAMP, (0, 2), 2), False),
        (HeldParity(0, STAMP, (0, 2), 0), False),
    ],
)
def test_a_parity_that_is_held(parity: HeldParity, is_sound: bool) -> None:
    assert (flaw_of_peer(2, InventoryReport(7, (), (parity,)), MESH) == "") == is_sound


TWO = (GroupMember(2, 1), GroupMember(4, 2))


@pytest.mark.parametrize(
    ("source", "is_sound"),
    [
        (RestoreSource(0, copies=(1, 2)), True),
        (RestoreSource(0, (), (0, 2, 4), 1, TWO), True),
        (RestoreSource(0), False),
        (RestoreSource(6, copies=(1,)), False),
        (RestoreSource(0, copies=(3,)), False),
        (RestoreSource(0, (), (0, 2, 4), 1, TWO[:1]), False),
        (RestoreSource(0, (), (0, 2, 4), 1, (*TWO, GroupMember(0, 0))), False),
        (RestoreSource(0, (), (0, 2, 4), 1, (TWO[0], GroupMember(3, 2))), False),
        (RestoreSource(0, (), (2, 4), 1, TWO), False),
    ],
)
def test_where_a_snapshot_is_fetched_from(source: RestoreSource, is_sound: bool) -> None:
    word = VoteWord(7, OfferWord(1, "memory", STAMP, "", (source,)))
    assert (flaw_of_peer(0, word, MESH) == "") == is_sound


def test_anybody_may_ask_for_a_checkpoint() -> None:
    assert flaw_of_peer(2, CheckpointWord(7, CheckpointAsked(1, None, "")), MESH) == ""


@pytest.mark.parametrize(
    ("addends", "is_sound"),
    [
        ([Addend(0, 0, BlockRange(Part.KEPT, 0, 64), 1)], True),
        ([Addend(2, 9, BlockRange(Part.PARITY, 8, 64), 255)] * 2, True),  # ranks may have moved
        ([], False),
        ([Addend(3, 0, BlockRange(Part.KEPT, 0, 64), 1)], False),
        ([Addend(0, 0, BlockRange(Part.KEPT, 0, 65), 1)], False),
        ([Addend(0, 0, BlockRange(Part.SUM, 0, 64), 1)], False),
        ([Addend(0, 0, BlockRange(Part.HEADER, 0, 64), 1)], False),
    ],
)
def test_what_can_be_added_up(addends: list[Addend], is_sound: bool) -> None:
    asked = AddUp(7, 1, STAMP, 64, tuple(addends))
    assert (flaw_of_peer(0, asked, MESH) == "") == is_sound
