"""A node of a mesh for tests of its parts: simulated memory, a loop that a test turns by hand,
links that keep what they are given, and neighbours who say what a test has them say, or are such
nodes themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from keepstep.coding.checksum import checksum
from keepstep.config import Settings, job_dir_of, resolve
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.links import LinkCount
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import AddUp, CopyOffer, FetchRanges, MeshMessage, NoSum
from keepstep.model.shares import Share
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp
from keepstep.model.units import GIB, PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.ports import Memory, ServeBoxes
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.peer_inbox import FromPeer, LoopCall, PeerInbox
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import World
from tests.runtime.fakes import FakeExecutor, FakeJournal, FakeTime

VERSION = 7  # of the mesh
JOB_HASH = b"j" * 16
MANIFEST = b'{"of": "a test"}'
BLOCK_BYTES = 512
LINK_DEAD_S = 10.0
JOB_DIR = job_dir_of(Path("/memory"), "j")


@dataclass
class SentBlock:
    """A block that was handed to a link. `data`: as it was then; what crosses is what `source` has
    when the link comes to it."""

    node: int
    span: Span
    data: bytes
    checksum: int | None
    done: Callable[[str | None], None]
    source: memoryview


class FakeLinks:
    """See `ports.Links`. Takes everything, but for nodes in `away` and blocks while `takes` is 0.
    What is for one of the `rooms` reaches it; what is for others is kept."""

    address = ("127.0.0.1", 4242)

    def __init__(self, node: int, rooms: dict[int, ReplicationRoom]) -> None:
        self._node = node
        self._rooms = rooms
        self.identity: tuple[int, bytes] | None = None
        self.connected: list[tuple[int, tuple[str, int], int]] = []
        self.away: set[int] = set()
        self.takes = 10**9  # so many blocks more
        self.sent: list[tuple[int, Any]] = []
        self.blocks: list[SentBlock] = []
        self.counted: dict[tuple[int, int], LinkCount] = {}
        self.is_closed = False

    def be(self, node: int, secret: bytes, encrypt: bool = False) -> None:
        self.identity = (node, secret)

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        self.connected.append((node, address, incarnation))

    def send(self, node: int, message: MeshMessage) -> bool:
        if node in self.away:
            return False
        self.sent.append((node, message))
        if node in self._rooms:
            self._rooms[node].inbox.message(self._node, message)
        return True

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None = None,
    ) -> bool:
        if not self.takes or node in self.away:
            return False
        if node in self._rooms:
            is_wanted = self._rooms[node].block_comes(self._node, span, bytes(source))
            done(None if is_wanted else "nobody wants it")
            return True
        self.takes -= 1
        self.blocks.append(SentBlock(node, span, bytes(source), checksum, done, source))
        return True

    def is_open(self, node: int) -> bool:
        return node not in self.away

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        return self.counted

    def damaged(self) -> dict[int, int]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}

    def close(self, reason: str = "closing") -> None:
        self.is_closed = True


class LoopWorkers(FakeExecutor):
    """Their answers come as a thread's do: behind what the work itself has the loop do."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self._post = post

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        super().submit(work, lambda result: self._post(lambda: then(result)))


class FakeReplicationHost:
    """See `ReplicationHost`. Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pages: dict[int, RankStatus] = {}

    def status(self, rank: int) -> RankStatus | None:
        return self.pages.get(rank)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told: self.calls.append((name, *told))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@cache
def settings_with(redundancy: str) -> Settings:
    """Of a job in simulated memory."""
    config = {"job": "j", "arena_dir": "/memory", "state_dir": "/state", "redundancy": redundancy}
    return resolve(config, {"HOME": "/nowhere"}, "j")


def a_mesh(
    node: int = 0, nodes: int = 3, ranks: int | tuple[int, ...] = 1, version: int = VERSION
) -> Mesh:
    """Of as many ranks on every node, or of so many on each."""
    counts = (ranks,) * nodes if isinstance(ranks, int) else ranks
    members = tuple(
        Member(n, f"10.0.0.{n}", 9000 + n, 50 + n, count) for n, count in enumerate(counts)
    )
    return Mesh(version, node, members, "a secret of the tests")


def a_memory(budget_bytes: int = GIB, node: int = 0) -> SimMemory:
    """Of a machine of its own."""
    machine = Machine(World(1), node, None, budget_bytes, BLOCK_BYTES)
    return SimMemory(machine.files, machine.start("keeper"))


def flip(memory: SimMemory, path: Path, at: int) -> None:
    """Turn one bit of a file."""
    file = memory.files.find(str(path))
    assert file is not None
    file.data[at] ^= 1


def fill(
    slot: Slot,
    rank: int,
    stamp: Stamp,
    payload: bytes,
    world_size: int = 3,
    manifest: bytes = MANIFEST,
    share: Share | None = None,
) -> Slot:
    """Make the slot a snapshot."""
    slot.begin(JOB_HASH, rank, world_size, 0, stamp)
    slot.payload[: len(payload)] = payload
    slot.seal(slot.write_table(len(payload), manifest), "00" * 16, 0.5, 1, share)
    return slot


def seal(
    memory: Memory,
    root: Path,
    rank: int,
    stamp: Stamp,
    payload: bytes,
    world_size: int = 3,
    index: int = 0,
    manifest: bytes = MANIFEST,
) -> Slot:
    """A snapshot in a slot of its own, below `root`."""
    slot = Slot.create(memory, slot_path(root, rank, index), len(payload), PAGE_BYTES)
    return fill(slot, rank, stamp, payload, world_size, manifest)


def an_offer(slot: Slot, floor: Stamp | None = None, **changes: Any) -> CopyOffer:
    """The owner's, of what lies there."""
    header = slot.header()
    about: dict[str, Any] = {
        "mesh_version": VERSION,
        "rank": header.rank,
        "stamp": header.stamp,
        "payload_bytes": header.payload_bytes,
        "capacity_bytes": slot.capacity,
        "manifest_bytes": header.manifest_bytes,
        "manifest_capacity_bytes": slot.manifest_capacity,
        "table_checksum": header.table_checksum,
        "stripe_group": (),
        "tolerates": 0,
        "floor": floor,
    }
    return CopyOffer(**{**about, **changes})


def hear_asker(server: SnapshotServer, sums: RepairSums, asker: int, message: MeshMessage) -> None:
    """What who restores says to a node that gives, and that node's word about a sum."""
    match message:
        case FetchRanges():
            server.asked(asker, message.rank, message.stamp, message.ranges)
        case AddUp():
            sums.asked(asker, message)
        case NoSum():
            sums.unavailable(asker, message.number, message.why)


class ReplicationRoom:
    """One node, and everything that its many-nodes half touches. `ranks`: how many each node has.
    `rooms`: of all nodes that are there; the others are what a test says they are."""

    def __init__(
        self,
        node: int = 0,
        nodes: int = 3,
        ranks: int | tuple[int, ...] = 1,
        budget_bytes: int = GIB,
        redundancy: str = "copies:2",
        rooms: dict[int, ReplicationRoom] | None = None,
    ) -> None:
        rooms = {} if rooms is None else rooms
        rooms[node] = self
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.workers = LoopWorkers(self._post)
        self.net = FakeLinks(node, rooms)
        self.memory = a_memory(budget_bytes, node)
        self.files = self.memory.files
        self.settings = settings_with(redundancy)
        self.job_dir: Path = self.settings.job_dir
        self.world = KeeperWorld(
            clock=self.time,
            timers=self.time,
            memory=self.memory,
            journal=self.journal,
            workers=self.workers,
            aside=self.workers,
            serve_boxes=cast(ServeBoxes, None),
            open_links=lambda *about: self.net,
            wake=lambda: None,
            checkpoints=None,
            persisters=None,
            pid=1,
            uid=1000,
        )
        self.inbox = PeerInbox(self.world, JOB_HASH, self.net.address, LINK_DEAD_S)
        self.mesh = a_mesh(node, nodes, ranks)
        self.links = MeshLinks(self.inbox, self.mesh)
        self.held = HeldSnapshots(self.memory, self.workers, self.job_dir)
        self.to_self: list[Any] = []  # messages of this node to itself
        self.on_message: Callable[[int, MeshMessage], None] = lambda _, it: self.to_self.append(it)

    def _post(self, call: Callable[[], None]) -> None:
        self.inbox.put(LoopCall(call, self.inbox.mesh_version))

    def join(self) -> None:
        """For parts below a mesh's state, which does so itself."""
        self.links.open(range(len(self.mesh.members)))

    def settle(self) -> bool:
        """What has come is heard, and the workers work, until nothing is left. Whether there was
        anything."""
        had_any = False
        while (events := self.inbox.take()) or self.workers.run():
            had_any = True
            for event in events:
                match event:
                    case LoopCall(call):
                        call()
                    case FromPeer(node, message):
                        self.on_message(node, message)
        return had_any

    def seal(
        self, rank: int, stamp: Stamp, payload: bytes, index: int = 0, root: Path | None = None
    ) -> Slot:
        """A snapshot among that rank's own, or below another root."""
        size = self.mesh.world_size
        return seal(self.memory, root or self.job_dir, rank, stamp, payload, size, index)

    def said(self, kind: type[Any], node: int | None = None) -> list[Any]:
        """What was sent of that kind, to that node or to any."""
        return [m for n, m in self.net.sent if isinstance(m, kind) and node in (None, n)]

    def sent(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """As `said`, and to whom."""
        return [(n, m) for n, m in self.net.sent if isinstance(m, kind)]

    def block_comes(self, node: int, span: Span, data: bytes) -> bool:
        """A block from that node; False when nobody wants it."""
        place = self.inbox.place(node, span)
        if place is None:
            return False
        place[:] = data
        self.inbox.block(node, span, checksum(data))
        return True

    def give(self, node: int, slot: Slot, wanted: BlockRange, data: bytes | None = None) -> bool:
        """That range of an owner's slot comes, or `data` in its stead; whether anybody wants it."""
        header = slot.header()
        span = Span(header.rank, header.stamp, *wanted)
        return self.block_comes(node, span, bytes_of(slot, wanted) if data is None else data)

    def answer_fetches(self, source: Slot, silent: set[int] | None = None) -> list[int]:
        """All who are asked for parts of a snapshot give them, but for `silent`. Returns who was
        asked, in order."""
        asked: list[int] = []
        seen = 0
        while seen < len(self.net.sent):
            node, message = self.net.sent[seen]
            seen += 1
            if isinstance(message, FetchRanges):
                asked.append(node)
                if node not in (silent or ()):
                    for wanted in message.ranges:
                        self.give(node, source, wanted)
            self.settle()
        return asked


def bytes_of(slot: Slot, wanted: BlockRange) -> bytes:
    """What a sealed slot has there."""
    part, offset, length = wanted
    return bytes(slot.part(part, slot.header())[offset : offset + length])


def payload_of(slot: Slot) -> bytes:
    """All of it."""
    return bytes(slot.part(Part.PAYLOAD, slot.header()))


def a_page(rank: int, sealed: dict[int, Stamp], epoch: int = 1, ranks: int = 3) -> RankStatus:
    """What a rank tells that holds these stamps, by slot."""
    slots = tuple(SlotView(SlotState.SEALED, stamp) for stamp in sealed.values())
    last = max((stamp.step for stamp in sealed.values()), default=-1)
    return RankStatus(
        rank=rank,
        world_size=ranks,
        pid=1,
        incarnation=1,
        epoch=epoch,
        phase=Phase.STEP,
        step=last,
        completed_step=last,
        decided_step=last,
        captured_steps=0,
        skipped_steps=0,
        torn_steps=0,
        stall_ns_total=0,
        stall_ns_last=0,
        step_ns_last=0,
        copy_ns_last=0,
        seal_ns_last=0,
        payload_bytes=1000,
        updated_mono_ns=0,
        loss=0.0,
        slots=slots,
    )
