"""Write: several nodes write one checkpoint; which node writes what, fails, dies or lies does not
change what is loaded."""

from __future__ import annotations

import copy
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from keepstep.edge.store.draft import Draft
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.parts import part_from_bytes, part_to_bytes
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.read import read_checkpoint
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import NodeValues, publish, survey, write_part
from keepstep.errors import DamageError, IdentityError, KeepstepError, LayoutError, StoreError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.layout import Shard
from keepstep.model.snapshot import Stamp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Tree = dict[str, Any]
STAMP = Stamp(5, 1)


def raw(value: Any) -> Any:
    """Everything that makes a tree what it is, comparable with ==."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, Mapping):
        return {key: raw(v) for key, v in value.items()}
    return [raw(v) for v in value] if isinstance(value, (list, tuple)) else value


def trained(seed: int) -> Tree:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(50, 70), torch.nn.BatchNorm1d(70), torch.nn.Linear(70, 31)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 50)).square().sum().backward()
        optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def replicated(tree: Tree, world_size: int) -> list[RankState]:
    """DistributedDataParallel: the same on every rank, but for random states, the sampler and
    BatchNorm's buffers."""
    states = []
    for rank in range(world_size):
        own = copy.deepcopy(tree)
        own["model"]["1.running_mean"] += rank
        states.append(
            RankState(
                rank,
                {**own, "rng": {"torch": torch.arange(rank, rank + 9)}, "sampler": {"at": rank}},
            )
        )
    return states


def sharded(tree: Tree, world_size: int, replicas: int = 1) -> list[RankState]:
    """FSDP2: rows in torch.chunk's sizes, 0-dim tensors whole on every rank. With replicas: HSDP,
    shard by shard."""
    states = [RankState(rank, {}) for rank in range(world_size)]
    groups = world_size // replicas

    def part(node: Any, state: RankState) -> Any:
        if isinstance(node, dict):
            return {key: part(v, state) for key, v in node.items()}
        if not isinstance(node, torch.Tensor) or node.dim() == 0:
            return copy.deepcopy(node)
        rows = -(-node.shape[0] // groups)
        start = min(rows * (state.rank % groups), node.shape[0])
        local = node[start : start + rows].clone()
        state.shards[id(local)] = Shard(tuple(node.shape), (start, *[0] * (node.dim() - 1)))
        return local

    for state in states:
        state.tree = part(tree, state)
    return states


class Nodes:
    """Several nodes' writing processes, all in this one: what each of them knows is its own ranks
    and the store."""

    def __init__(
        self,
        url: Path | str,
        ranks: Sequence[int],
        states: Sequence[RankState],
        number: int,
        stamp: Stamp = STAMP,
    ) -> None:
        self.attempt = CheckpointAttempt("job", stamp, number, tuple(ranks))
        self.states = [
            [states[rank] for rank in self.attempt.ranks_of(node)] for node in range(len(ranks))
        ]
        self.drafts: list[Draft] = []
        for _ in range(len(ranks)):
            store = Store(url)  # nobody shares more than the place
            self.drafts.append(store.draft(self.attempt.name))
        self.values: dict[int, NodeValues] = {}

    def survey(self, *nodes: int) -> None:
        for node in nodes or range(len(self.drafts)):
            self.values[node] = survey(self.drafts[node], self.attempt, node, self.states[node])

    def part(self, *nodes: int) -> None:
        for node in nodes or range(len(self.drafts)):
            write_part(
                self.drafts[node],
                self.attempt,
                node,
                self.values[node],
                {"loss": float(node)},
                {"of": node},
            )

    def publish(self) -> Manifest:
        return publish(self.drafts[0], self.attempt, 1)

    def all(self) -> Manifest:
        nodes = list(range(len(self.drafts)))
        random.Random(self.attempt.number).shuffle(nodes)
        self.survey(*nodes)
        self.part(*reversed(nodes))
        return self.publish()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def directory(place: Path, step: int = STAMP.step) -> Path:
    return Path(Store(place).url(step))


def blank(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.empty_like(tree)
    return {key: blank(v) for key, v in tree.items()} if isinstance(tree, dict) else tree


def whole(place: Path, tree: Tree) -> Any:
    """What one rank alone makes of it, of the names in `tree`."""
    store = Store(place)
    loaded = read_checkpoint(store, STAMP.step, 0, 1, blank(tree)).tree
    plain = blank(tree)
    torch_dcp.load(plain, checkpoint_id=store.url(STAMP.step))
    assert raw(plain) == raw(loaded), "PyTorch alone reads the same"
    return raw(loaded)


# ------------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 3), (1, 1, 1), (2, 1, 3)], ids=str)
def test_replicated_state_comes_back_to_every_rank_byte_for_byte(
    place: Path, ranks: tuple[int, ...]
) -> None:
    states = replicated(trained(1), sum(ranks))
    manifest = Nodes(place, ranks, states, 17).all()
    assert (manifest.job, manifest.world_size, manifest.metrics, manifest.fingerprint) == (
        "job",
        sum(ranks),
        {"loss": 0.0},
        {"of": 0},
    )
    for rank, state in enumerate(states):
        loaded = read_checkpoint(Store(place), STAMP.step, rank, sum(ranks), blank(state.tree))
        assert raw(loaded.tree) == raw(state.tree) and loaded.unmapped == ()
    assert whole(place, states[0].tree) == raw(states[0].tree)
    assert Store(place).intact(STAMP.step) == manifest


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 3), (1, 1, 1), (2, 1, 3)], ids=str)
def test_shards_come_back_whole_and_to_every_rank(place: Path, ranks: tuple[int, ...]) -> None:
    tree = trained(2)
    states = sharded(tree, sum(ranks))
    Nodes(place, ranks, states, 17).all()
    for rank in range(sum(ranks)):
        assert raw(
            read_checkpoint(Store(place), STAMP.step, rank, sum(ranks), blank(tree)).tree
        ) == raw(tree)
    assert whole(place, tree) == raw(tree)


def test_copies_of_a_shard_on_other_nodes_are_written_once(place: Path) -> None:
    """HSDP: each node has all shards, the nodes are replicas of each other."""
    tree = trained(3)
    tensor_bytes = sum(t.nbytes for t in tree["model"].values()) + sum(
        t.nbytes for s in tree["optimizer"]["state"].values() for t in s.values()
    )
    manifest = Nodes(place, (2, 2), sharded(tree, 4, replicas=2), 17).all()
    # what torch.save puts around each of about thirty tensors, each in two boxes
    overhead_bytes = 2000 * 30 * 2
    assert tensor_bytes < manifest.total_bytes < tensor_bytes + overhead_bytes
    assert whole(place, tree) == raw(tree)


def test_replicated_state_is_written_once_and_spread_over_the_nodes(place: Path) -> None:
    tree = {"model": {str(i): torch.randn(25_000) for i in range(9)}}
    files = (
        Nodes(place, (1, 1, 1), [RankState(rank, copy.deepcopy(tree)) for rank in range(3)], 17)
        .all()
        .files
    )
    assert [300_000 < files[f"__{rank}_17.distcp"].bytes < 320_000 for rank in range(3)] == [
        True
    ] * 3


@pytest.mark.parametrize("make", [replicated, sharded])
def test_it_does_not_matter_which_node_has_which_ranks(tmp_path: Path, make: Any) -> None:
    states = make(trained(4), 4)
    found = []
    for index, ranks in enumerate([(4,), (2, 2), (1, 3), (1, 2, 1), (1, 1, 1, 1)]):
        files = Nodes(tmp_path / str(index), ranks, states, 17).all().files
        # torch puts a random id into that
        found.append({name: sums for name, sums in files.items() if name != ".metadata"})
    assert all(files == found[0] for files in found) and len(found[0]) == 4


def test_a_rank_that_has_other_layers_writes_them_itself(place: Path) -> None:
    """Pipeline stages, one a node."""
    trees = [{"model": {f"layer{rank}": torch.full((3,), float(rank))}} for rank in range(3)]
    Nodes(place, (1, 1, 1), [RankState(rank, tree) for rank, tree in enumerate(trees)], 17).all()
    for rank, tree in enumerate(trees):
        assert raw(read_checkpoint(Store(place), STAMP.step, rank, 3, blank(tree)).tree) == raw(
            tree
        )


def test_nodes_meet_in_an_object_store_too() -> None:
    url = "memory://test_nodes_meet"
    states = replicated(trained(1), 3)
    died = Nodes(url, (1, 2), replicated(trained(2), 3), 16)
    died.survey()
    died.part()
    manifest = Nodes(url, (1, 2), states, 17).all()
    store = Store(url)
    assert store.intact(STAMP.step) == manifest
    for rank, state in enumerate(states):
        assert raw(read_checkpoint(store, STAMP.step, rank, 3, blank(state.tree)).tree) == raw(
            state.tree
        )
    store.remove(STAMP.step)


# ------------------------------------------------------------------------------- what is refused


def refused(nodes: Nodes, place: Path, error: type[KeepstepError], words: str) -> None:
    """Nothing is published, and after the leader's tidying nothing of the attempt is left."""
    with pytest.raises(error, match=words):
        nodes.publish()
    assert Store(place).list_checkpoints().checkpoints == ()
    nodes.drafts[0].abandon()
    assert not directory(place).exists() or not any(
        nodes.attempt.owns(path.name) for path in directory(place).iterdir()
    )


def ready(place: Path, number: int = 17, seed: int = 1) -> Nodes:
    """Two nodes that have said what they have."""
    nodes = Nodes(place, (1, 2), replicated(trained(seed), 3), number)
    nodes.survey()
    return nodes


def test_a_missing_part_is_refused(place: Path) -> None:
    nodes = ready(place)
    nodes.part(0)
    refused(
        nodes,
        place,
        StoreError,
        "part-00001-17.json: expected what a node says about this attempt, found no file",
    )


def test_a_missing_survey_is_refused_by_every_node(place: Path) -> None:
    nodes = Nodes(place, (1, 2), replicated(trained(1), 3), 17)
    nodes.survey(1)
    with pytest.raises(
        StoreError,
        match=r"survey-00000-17.json: expected what a node says about this attempt, found no file",
    ):
        nodes.part(1)


@pytest.mark.parametrize("name", ["part-00001-17.json", "survey-00000-17.json"])
def test_a_torn_part_or_survey_is_refused(place: Path, name: str) -> None:
    nodes = ready(place)
    nodes.part()
    path = directory(place) / name
    path.write_bytes(path.read_bytes()[:-20])
    refused(nodes, place, DamageError, rf"{name}: block 0: expected xxh3_64 \w+, found \w+")


@pytest.mark.parametrize(
    ("stamp", "number", "words"),
    [
        (STAMP, 16, "attempt 17, found 16"),
        (Stamp(5, 2), 17, "epoch 1, found 2"),
        (Stamp(4, 1), 17, "step 5, found 4"),
    ],
    ids=["attempt", "epoch", "step"],
)
def test_a_part_of_another_attempt_or_stamp_is_refused(
    place: Path, tmp_path: Path, stamp: Stamp, number: int, words: str
) -> None:
    other = Nodes(tmp_path / "elsewhere", (1, 2), replicated(trained(2), 3), number, stamp)
    other.survey()
    other.part()
    nodes = ready(place)
    nodes.part()
    shutil.copy(
        directory(tmp_path / "elsewhere", stamp.step) / f"part-00001-{number}.json",
        directory(place) / "part-00001-17.json",
    )
    refused(
        nodes,
        place,
        IdentityError,
        rf"part-00001-17.json: expected {words}: it belongs to another attempt",
    )


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_what_an_earlier_attempt_left_or_still_writes_is_never_mixed_in(
    place: Path, moment: str
) -> None:
    """The old attempt has other values at the same step: it died, or its node 1 is late and writes
    while the new one does."""
    old = ready(place, number=16, seed=2)
    if moment == "before":
        old.part()
    nodes = ready(place, number=17, seed=1)
    if moment == "between":
        old.survey()
        old.part()
    nodes.part()
    if moment == "after":
        old.survey()
        old.part()
    manifest = nodes.publish()
    assert {path.name for path in directory(place).iterdir()} == {*manifest.files, "keepstep.json"}
    for rank, states in enumerate(replicated(trained(1), 3)):
        assert raw(
            read_checkpoint(Store(place), STAMP.step, rank, 3, blank(states.tree)).tree
        ) == raw(states.tree)
    old.publish()
    assert Store(place).intact(STAMP.step) == manifest, "who was begun later counts"
    old.drafts[0].abandon()
    assert Store(place).intact(STAMP.step) == manifest


def test_a_file_that_has_gone_since_its_node_wrote_it_is_noticed(place: Path) -> None:
    nodes = ready(place)
    nodes.part()
    (directory(place) / "__2_17.distcp").unlink()
    refused(nodes, place, DamageError, r"__2_17.distcp: expected \d+ bytes, found no file")


def test_a_node_that_made_another_plan_is_noticed(place: Path) -> None:
    nodes = ready(place)
    nodes.part()
    path = directory(place) / nodes.attempt.part_name(1)
    part = part_from_bytes(path.read_bytes(), "here", nodes.attempt, 1)
    gone = part.items[3].name
    path.write_bytes(
        part_to_bytes(nodes.attempt, 1, replace(part, items=(*part.items[:3], *part.items[4:])))
    )
    refused(
        nodes,
        place,
        LayoutError,
        rf"values that the plan leaves to node 1, found \d+; they differ in {gone} of rank \d",
    )


def test_a_value_that_moved_since_its_survey_is_not_written(place: Path) -> None:
    nodes = ready(place)
    nodes.states[1][0].tree["rng"]["torch"][4] += 1
    with pytest.raises(
        DamageError,
        match=r"rng.torch of rank 1: expected the bytes of its survey \(\w{32}\), found others",
    ):
        nodes.part(1)
    nodes.part(0)
    refused(
        nodes,
        place,
        StoreError,
        "part-00001-17.json: expected what a node says about this attempt, found no file",
    )


def test_a_node_can_only_speak_for_its_own_ranks(place: Path) -> None:
    nodes = Nodes(place, (1, 2), replicated(trained(1), 3), 17)
    nodes.states[1].reverse()
    with pytest.raises(
        KeepstepError,
        match=r"node 1: expected the states of ranks \[1, 2\], found those of \[2, 1\]",
    ):
        nodes.survey(1)


@pytest.mark.parametrize("done", [1, 2, 3], ids=["surveyed", "written", "published"])
def test_flips_in_any_file_at_any_time_are_found_and_none_is_loaded(place: Path, done: int) -> None:
    rng = random.Random(done)
    states = [
        RankState(rank, {"model": {"w": torch.ones(300), "b": torch.zeros(7)}, "rank": rank})
        for rank in range(3)
    ]

    def advance(first: int, last: int) -> None:
        for act in (nodes.survey, nodes.part, nodes.publish)[first:last]:
            act()

    for turn in range(35):
        shutil.rmtree(place, ignore_errors=True)
        nodes = Nodes(place, (1, 2), states, 17)
        advance(0, done)
        files = sorted(directory(place).iterdir())
        path = files[turn % len(files)]
        damaged = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(damaged))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if path.suffix == ".json" and done < 3:
            with pytest.raises(DamageError, match=path.name):
                advance(done, 3)
            assert Store(place).list_checkpoints().checkpoints == ()
            continue
        advance(done, 3)
        assert Store(place).intact(STAMP.step) is None, f"bit {bit} of {path.name}"
        with pytest.raises(DamageError, match=path.name):
            for rank, state in enumerate(states):  # a rank reads only the files it needs
                read_checkpoint(Store(place), STAMP.step, rank, 3, blank(state.tree))


# ------------------------------------------------------------------------------- death

KILLED = """
import os, signal, sys
import torch
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import publish, survey, write_part
from keepstep.errors import KeepstepError
from keepstep.model.snapshot import Stamp

place = sys.argv[1]
ranks = (1, 2)

def attempt(number, victim, deaths, step=2):
    '''Both nodes' acts, each in a process of its own; `victim` is killed at its deaths-th write or
    read. Was it published?'''
    about = CheckpointAttempt("job", Stamp(step, 1), number, ranks)
    lead = Store(place)
    drafts = [lead.draft(about.name), Store(place).draft(about.name)]
    values = {}
    counts = [0, 0]

    def counted(node):
        def wrote(nbytes):
            counts[node] += 1
            if node == victim and counts[node] == deaths:
                os.kill(os.getpid(), signal.SIGKILL)
        return wrote

    for node in (0, 1):
        drafts[node].progress = counted(node)
    for act in ("survey", "part", "publish"):
        for node in (0, 1) if act != "publish" else (0,):
            states = [
                RankState(r, {"w": torch.full((50,), float(number)), "rank": r})
                for r in about.ranks_of(node)
            ]
            if act == "survey":
                values[node] = survey(drafts[node], about, node, states)
            elif act == "part":
                write_part(drafts[node], about, node, values[node], {}, {})
            else:
                publish(drafts[0], about, 1)
    return counts

assert attempt(1, None, 0, step=1)
totals = attempt(2, None, 0)
Store(place).remove(2)
number = 2
for victim, total in enumerate(totals):
    for deaths in range(1, total + 1):
        number += 1
        if not (child := os.fork()):
            attempt(number, victim, deaths)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        listing = Store(place).list_checkpoints()
        found = [m.step for m in listing.checkpoints]
        assert found == [1] and list(listing.broken) == [2], (victim, deaths, listing)
        assert Store(place).intact(1) is not None
number += 1
attempt(number, None, 0)
store = Store(place)
assert [m.step for m in store.list_checkpoints().checkpoints] == [2, 1]
assert store.intact(2) is not None
files = store.read_manifest(2).files
assert all(f == ".metadata" or f.endswith(f"_{number}.distcp") for f in files)
assert {p for p in os.listdir(store.url(2))} == {*store.read_manifest(2).files, "keepstep.json"}
print(*totals)
"""


@pytest.mark.timeout(150)
def test_a_kill_between_parts_and_in_the_middle_of_each_leaves_the_previous_checkpoint(
    place: Path,
) -> None:
    """SIGKILL at every write and every block read back of either node; each next try begins in what
    the last one left."""
    out = subprocess.run(
        [sys.executable, "-c", KILLED, str(place)], capture_output=True, text=True, timeout=140
    )
    assert out.returncode == 0, out.stderr[-3000:]
    leader, other = map(int, out.stdout.split())
    assert leader > other > 5
