"""Bootstrap: ranks that have heard the same make the same mesh, or all say the same about what
cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError, KeepstepError
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import BeginMesh, CannotListen, Listen, Listening
from keepstep.model.messages.ranks import NodeKeeper
from keepstep.model.units import MS_NS
from keepstep.runtime.rank.bootstrap import Bootstrap, NodeFacts, mesh_of
from keepstep.runtime.rank.keeper_client import KeeperClient
from tests.runtime.fakes import RankRoom

SECRET = "s" * 16


def told(
    node: int,
    rank: int,
    version: int = 7,
    job: str = "t",
    rack: str | None = None,
    own_secret: bool = False,
    encrypts: bool = False,
    redundancy: str = "auto",
) -> NodeKeeper:
    return NodeKeeper(
        job=job,
        host=f"10.0.0.{node}",
        port=4000,
        incarnation=100 + node,
        rack=rack,
        own_secret=own_secret,
        fresh_secret="" if own_secret else f"fresh secret of rank {rank}",
        encrypts=encrypts,
        mesh_version=version,
        redundancy=redundancy,
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_all_ranks_make_the_same_mesh(ranks_of: list[int], data: st.DataObject) -> None:
    at = [node for node, ranks in enumerate(ranks_of) for _ in range(ranks)]
    versions = data.draw(st.lists(st.integers(0, 1 << 50), min_size=len(at), max_size=len(at)))
    said = [told(node, rank, versions[rank]) for rank, node in enumerate(at)]
    for rank, node in enumerate(at):
        mesh = mesh_of(said, rank, None)
        assert mesh.node == node and rank in mesh.ranks_of(node)
        assert [(m.host, m.incarnation, m.ranks) for m in mesh.members] == [
            (f"10.0.0.{n}", 100 + n, r) for n, r in enumerate(ranks_of)
        ]
        assert (mesh.version, mesh.secret) == (max(versions), "fresh secret of rank 0")


def test_keepers_of_one_machine_are_two_nodes() -> None:
    said = [replace(told(0, 0), host="127.0.0.1", port=port) for port in (4000, 4001)]
    assert [m.port for m in mesh_of(said, 0, None).members] == [4000, 4001]


def test_a_secret_of_ones_own_is_used_and_never_told() -> None:
    said = [told(0, 0, own_secret=True), told(1, 1, own_secret=True)]
    assert all(SECRET not in str(one) for one in said)
    assert mesh_of(said, 1, SECRET).secret == SECRET


@pytest.mark.parametrize("encrypts", [True, False])
def test_the_mesh_says_whether_its_keepers_encrypt(encrypts: bool) -> None:
    said = [told(node, node, own_secret=True, encrypts=encrypts) for node in range(2)]
    assert all(mesh_of(said, rank, SECRET).encrypt is encrypts for rank in range(2))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([told(0, 0), told(1, 1), told(0, 2)], r"ranks of a node in a row .*--distribution=block"),
        (
            [told(0, 0, redundancy="none"), told(1, 1, redundancy="copies:2")],
            r"redundancy: expected one on all nodes, found none for rank 0 and copies:2 for rank 1",
        ),
        ([told(0, 0), told(1, 1, job="u")], r"job: expected one name on all nodes, found t and u"),
        (
            [told(0, 0, own_secret=True), told(1, 1)],
            r"secret: expected one for all .* found one for rank 0, none for 1",
        ),
        (
            [told(0, 0), told(1, 1, encrypts=True)],
            r"encrypt: expected one for all .* found one for rank 1, none for 0",
        ),
        (
            [told(0, 0), told(1, 1, rack="r")],
            r"rack: expected one for all .* found one for rank 1, none for 0",
        ),
    ],
)
def test_what_cannot_be_is_told_alike_on_every_rank(said: list[NodeKeeper], why: str) -> None:
    errors = set()
    for rank in range(len(said)):
        with pytest.raises(ConfigError, match=why) as caught:
            mesh_of(said, rank, SECRET if said[rank].own_secret else None)
        errors.add(str(caught.value))
    assert len(errors) == 1


# -- one step after the other, on all ranks


FACTS = NodeFacts(
    host=None,
    rack=None,
    secret=None,
    encrypt=False,
    meeting_host="10.0.0.1",
    has_process_group=True,
    address_towards=lambda host: "127.0.1.1",
    fresh_secret="fresh",
)


class Ranks:
    """One rank a node. `exchange` gives everybody what all have gathered."""

    def __init__(self, home: Path, *facts: NodeFacts) -> None:
        self.done: list[int] = []
        self.errors: dict[int, KeepstepError] = {}
        self.rooms: list[RankRoom] = []
        for rank, node in enumerate(facts):
            (home / str(rank)).mkdir()
            count = len(facts)
            room = RankRoom(home / str(rank), has_agent=False, rank=rank, ranks=count, nodes=count)
            keeper = KeeperClient(room.world, rank, count)
            keeper.connect(_nothing, _raise)
            self.rooms.append(room)
            failed = self._failed(rank)
            bootstrap = Bootstrap(room.world, node, room.who, keeper, self._done(rank), failed)
            bootstrap.run()

    def _done(self, rank: int) -> Callable[[], None]:
        return lambda: self.done.append(rank)

    def _failed(self, rank: int) -> Callable[[KeepstepError], None]:
        return lambda error: self.errors.update({rank: error})

    def exchange(self) -> None:
        asked = [room.groups.gathering.pop() for room in self.rooms]
        for _, then in asked:
            then([mine for mine, _ in asked])

    def listen(self) -> list[Listen]:
        """Every keeper is asked, and listens at what it was asked for."""
        found = []
        for rank, room in enumerate(self.rooms):
            [asked] = room.keepers.box.of(Listen)
            found.append(asked)
            room.keepers.box.says(Listening(asked.host, 4000 + rank, 100 + rank, -1))
        return found


def _nothing() -> None:
    """Found."""


def _raise(error: KeepstepError) -> None:
    raise error


def test_the_keepers_learn_of_each_other(tmp_path: Path) -> None:
    """The first one's machine knows its own name as loopback: it is asked for its way to another
    one."""
    first = replace(FACTS, address_towards={"10.0.0.1": "127.0.1.1", "10.0.0.2": "10.0.0.1"}.get)  # type: ignore[arg-type]
    second = replace(FACTS, address_towards=lambda host: "10.0.0.2", fresh_secret="another")
    ranks = Ranks(tmp_path, first, second)
    ranks.exchange()
    assert [asked.host for asked in ranks.listen()] == ["10.0.0.1", "10.0.0.2"]
    ranks.exchange()
    assert ranks.done == [0, 1] and ranks.errors == {}
    meshes: list[Mesh] = [room.keepers.box.of(BeginMesh)[0].mesh for room in ranks.rooms]
    assert [mesh.node for mesh in meshes] == [0, 1]
    assert meshes[0].members == meshes[1].members and meshes[0].secret == meshes[1].secret
    assert meshes[0].version == ranks.rooms[0].time.wall_ns() // MS_NS


def test_a_mesh_is_newer_than_any_that_a_keeper_has_lived(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, replace(FACTS, host="10.0.0.1"))
    ranks.exchange()
    ranks.rooms[0].keepers.box.says(Listening("10.0.0.1", 4000, 1, 1 << 50))
    ranks.exchange()
    assert ranks.rooms[0].keepers.box.of(BeginMesh)[0].mesh.version == (1 << 50) + 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (replace(FACTS, has_process_group=False), "init_process_group"),
        (replace(FACTS, meeting_host=""), "found neither"),
        (replace(FACTS, host="10.0.0.1"), "cannot listen at 10.0.0.1: taken"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, facts: NodeFacts, why: str) -> None:
    ranks = Ranks(tmp_path, facts)
    if not ranks.errors:
        ranks.exchange()
        ranks.rooms[0].keepers.box.says(CannotListen("taken"))
    assert why in str(ranks.errors[0]) and ranks.done == []


def test_a_rank_of_another_release_is_told_as_such(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, FACTS)
    _, then = ranks.rooms[0].groups.gathering.pop()
    then([b"something else"])
    assert "another release" in str(ranks.errors[0])


@pytest.mark.parametrize("unsigned", ["", "it is not signed"])
def test_each_node_says_once_that_its_blocks_are_not_signed(tmp_path: Path, unsigned: str) -> None:
    ranks = Ranks(tmp_path, *[replace(FACTS, host="10.0.0.1", unsigned_blocks=unsigned)] * 2)
    ranks.exchange()
    ranks.listen()
    ranks.exchange()
    told = [event.why for room in ranks.rooms for event in room.journal.of("blocks-unsigned")]
    assert ranks.errors == {} and told == [unsigned] * (2 if unsigned else 0)
