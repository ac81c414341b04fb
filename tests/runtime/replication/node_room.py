"""A keeper's node for tests of the parts of replication: memory, an inbox and links to other such
nodes, whose loop a test turns by hand. Nothing waits, and nothing crosses but by `settle`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.coding.checksum import checksum
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import CopyOffer, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MIB, PAGE_BYTES
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.ports import BoxServer, Hearer, Memory
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.peer_inbox import FromPeer, LoopCall, PeerInbox
from keepstep.runtime.world import KeeperWorld
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import World
from tests.runtime.fakes import FakeExecutor, FakeJournal, FakeTime

JOB_DIR = Path("/memory/keepstep-j")
JOB_HASH = bytes(range(16))
BLOCK_BYTES = 512  # small snapshots have several blocks all the same
VERSION = 7


def a_memory(budget_bytes: int = 64 * MIB) -> SimMemory:
    """Of a machine of its own."""
    machine = Machine(World(1), 0, None, budget_bytes, BLOCK_BYTES)
    return SimMemory(machine.files, machine.start("keeper"))


def flip(memory: SimMemory, path: Path, at: int) -> None:
    """Turn one bit of a file."""
    file = memory.files.find(str(path))
    assert file is not None
    file.data[at] ^= 1


def seal(
    memory: Memory,
    root: Path,
    rank: int,
    stamp: Stamp,
    payload: bytes,
    world_size: int = 3,
    index: int = 0,
    manifest: bytes = b"{}",
) -> Slot:
    """A sealed slot."""
    slot = Slot.create(memory, slot_path(root, rank, index), len(payload), PAGE_BYTES)
    slot.begin(JOB_HASH, rank, world_size, 1, stamp)
    slot.payload[: len(payload)] = payload
    slot.seal(slot.write_table(len(payload), manifest), "00" * 16, 0.5, 1)
    return slot


def bytes_of(slot: Slot, range_: BlockRange) -> bytes:
    """What its owner sends for that range."""
    whole = slot.part(range_.part, slot.header())
    return bytes(whole[range_.offset : range_.offset + range_.length])


def payload_of(slot: Slot) -> bytes:
    """All of it that is in use."""
    return bytes(slot.part(Part.PAYLOAD, slot.header()))


def offer_of(slot: Slot, group: tuple[int, ...] = (), tolerates: int = 0) -> CopyOffer:
    """What its owner offers to a holder."""
    header = slot.header()
    return CopyOffer(
        mesh_version=VERSION,
        rank=header.rank,
        stamp=header.stamp,
        payload_bytes=header.payload_bytes,
        capacity_bytes=slot.capacity,
        manifest_bytes=header.manifest_bytes,
        manifest_capacity_bytes=slot.manifest_capacity,
        table_checksum=header.table_checksum,
        stripe_group=group,
        tolerates=tolerates,
        floor=None,
    )


class FakeLinks:
    """See `ports.Links`. Messages and blocks go to the inbox of the other room, if there is one.
    `cut`: nodes that cannot be reached."""

    address = ("127.0.0.1", 1)

    def __init__(self, node: int, rooms: dict[int, MeshRoom]) -> None:
        self._node = node
        self._rooms = rooms
        self.sent: list[tuple[int, MeshMessage]] = []
        self.cut: set[int] = set()

    def be(self, node: int, secret: bytes) -> None: ...

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None: ...

    def send(self, node: int, message: MeshMessage) -> bool:
        if node in self.cut:
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
        is_wanted = self._rooms[node].block(self._node, span, bytes(source))
        done(None if is_wanted else "nobody wants it")
        return True

    def is_open(self, node: int) -> bool:
        return node not in self.cut

    def counts(self) -> dict[str, int]:
        return {}

    def close(self, reason: str = "closing") -> None: ...


class LoopWorkers(FakeExecutor):
    """Their answers come as a thread's do: behind what the work itself has the loop do."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self._post = post

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        super().submit(work, lambda result: self._post(lambda: then(result)))


class MeshRoom:
    """One node of a mesh. `ranks`: how many each node has. `rooms`: of the other nodes."""

    def __init__(
        self,
        node: int = 0,
        ranks: tuple[int, ...] = (1, 1, 1),
        rooms: dict[int, MeshRoom] | None = None,
        memory: SimMemory | None = None,
    ) -> None:
        rooms = {} if rooms is None else rooms
        rooms[node] = self
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.workers = LoopWorkers(lambda call: self.inbox.put(LoopCall(call, VERSION)))
        self.memory = a_memory() if memory is None else memory
        self.links = FakeLinks(node, rooms)
        self.world = self._surroundings()
        members = tuple(Member(n, "127.0.0.1", 1, 1, count) for n, count in enumerate(ranks))
        self.mesh = Mesh(VERSION, node, members, "a secret of the tests")
        self.inbox = PeerInbox(self.world, JOB_HASH, ("127.0.0.1", 0), link_dead_s=3.0)
        self.mesh_links = MeshLinks(self.inbox, self.mesh)
        self.mesh_links.open([])
        self.held = HeldSnapshots(self.memory, self.workers, JOB_DIR)
        self.on_message: Callable[[int, MeshMessage], None] = lambda node, message: None

    def _surroundings(self) -> KeeperWorld:
        def never(path: Path, hearer: Hearer) -> BoxServer:
            raise AssertionError("no part of replication asks for this")

        return KeeperWorld(
            clock=self.time,
            timers=self.time,
            memory=self.memory,
            journal=self.journal,
            workers=self.workers,
            serve_boxes=never,
            open_links=lambda *about: self.links,
            wake=lambda: None,
            checkpoints=None,
            persisters=None,
            pid=1,
            uid=1,
        )

    def settle(self) -> bool:
        """What has come is heard, and the workers work, until nothing is left. Whether there was
        anything."""
        had_any = False
        while (events := self.inbox.take()) or self.workers.run():
            had_any = True
            for event in events:
                match event:
                    case LoopCall():
                        event.call()
                    case FromPeer():
                        self.on_message(event.node, event.message)
        return had_any

    def block(self, node: int, span: Span, data: bytes) -> bool:
        """A block comes from that node; whether anybody wants it."""
        place = self.inbox.place(node, span)
        if place is None:
            return False
        place[:] = data
        self.inbox.block(node, span, checksum(place))
        return True

    def give(self, node: int, slot: Slot, range_: BlockRange, data: bytes | None = None) -> bool:
        """That range of an owner's slot comes, or `data` in its stead; whether anybody wants it."""
        header = slot.header()
        span = Span(header.rank, header.stamp, *range_)
        return self.block(node, span, bytes_of(slot, range_) if data is None else data)

    def sent(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """All messages of that kind that went out, and to which node."""
        return [(node, message) for node, message in self.links.sent if isinstance(message, kind)]
