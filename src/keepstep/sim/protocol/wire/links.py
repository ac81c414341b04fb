"""Links: `ports.Links` on the simulated network.

What is decided about links, and every byte that crosses them, is the product's (`core/wire/`); here
is what `edge/net/` does with threads and sockets: connections are dialled and accepted, what
arrives is handed in, what is handed out is sent, and time passes. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from keepstep.coding.checksum import checksum, running_checksum
from keepstep.core.wire.connection import NONCE_BYTES
from keepstep.core.wire.endpoint import Endpoint
from keepstep.core.wire.link import PeerLink
from keepstep.core.wire.link_table import Entropy, LinkTable
from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import Gate, Hashing, LinkOptions
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import MeshMessage, SeveralMessages
from keepstep.model.units import S_NS
from keepstep.model.wire import Address, Flow, Identity, Span
from keepstep.ports import Receiver
from keepstep.sim.protocol.wire.network import Network
from keepstep.sim.protocol.wire.pipe import Piece, SimSocket
from keepstep.sim.protocol.wire.porch import Knocking, SimPorch
from keepstep.sim.protocol.world.world import Process

HANDSHAKE_NS = 5 * S_NS

Done = Callable[[str | None], None]


class SimLinks:
    """A keeper's."""

    def __init__(
        self,
        network: Network,
        process: Process,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
        gate: Gate | None = None,
        streams: StreamLimits | None = None,
    ) -> None:
        """`gate`: says when blocks may go; without one they always may. `streams`: as many as help,
        unless given."""
        self.network = network
        self.process = process
        self.machine = process.machine.number
        others = [(host, 0) for host in process.machine.hosts if host != address[0]]
        self.addresses = [network.reserve(process, each) for each in (address, *others)]
        self.address = self.addresses[0]
        self._job_hash = job_hash
        self._incarnation = incarnation
        self._receiver = _Ear(network, self, receiver)
        self._options = LinkOptions(
            hashing=Hashing(checksum, running_checksum),
            timeouts=network.timeouts(dead_ns),
            queue_bytes=network.wires.queue_bytes,
            format=network.format,
            gate=gate,
            streams=streams or StreamLimits(),
        )
        self._who: tuple[int, bytes] | None = None
        self._peers: SimPeers | None = None
        process.on_end.append(self._process_ended)

    @property
    def who(self) -> tuple[int, bytes] | None:
        """Its number, and the secret of those it talks to."""
        return self._who

    def be(self, node: int, secret: bytes, encrypt: bool = False) -> None:
        assert not encrypt, "nobody listens in a simulated network"
        if self._who == (node, secret) and self._peers is not None:
            self._peers.table.begin_mesh()
            return
        if self._peers is not None:
            self._peers.close("another number")
        self._who = (node, secret)
        me = Identity(self._job_hash, node, self._incarnation)
        self._peers = SimPeers(
            self.network, self.process, self.addresses, me, secret, self._receiver, self._options
        )
        for address in self.addresses:
            self.network.doors[address] = self._peers

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        assert self._peers is not None, "which node this is comes first"
        self._peers.connect(node, address, incarnation)

    def send(self, node: int, message: MeshMessage) -> bool:
        is_broken = self.process.touch("send", message.KIND)
        if self._peers is None:
            return False
        if is_broken:
            self._peers.reset(node)
        is_taken = self._peers.table.send(node, message)
        on_send = self.network.on_send
        if is_taken and on_send is not None:
            for one in each_of(message):
                on_send(self, node, one)
        return is_taken

    def send_block(
        self, node: int, span: Span, source: memoryview, done: Done, checksum: int | None = None
    ) -> bool:
        is_broken = self.process.touch("send block")
        if self._peers is None:
            return False
        if is_broken:
            self._peers.reset(node)
        return self._peers.table.send_block(node, span, source, done, checksum)

    def is_open(self, node: int) -> bool:
        return self._peers is not None and self._peers.table.is_open(node)

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        return self._peers.table.sent_counts() if self._peers is not None else {}

    def damaged(self) -> dict[int, int]:
        return self._peers.table.counts.damaged() if self._peers is not None else {}

    def counts(self) -> dict[str, int]:
        return self._peers.table.counts.snapshot() if self._peers is not None else {}

    def close(self, reason: str = "closing") -> None:
        if self._peers is not None:
            self._peers.close(reason)
        self._release()

    def _release(self) -> None:
        for address in self.addresses:
            self.network.release(address)

    def _process_ended(self) -> None:
        """The kernel closes what was open: the others see that, where they can."""
        self._release()
        if self._peers is not None:
            self._peers.process_ended()


class _Ear:
    """What comes to a keeper, for whoever listens in. See `ports.Receiver`."""

    def __init__(self, network: Network, links: SimLinks, receiver: Receiver) -> None:
        self._network = network
        self._links = links
        self.place = receiver.place
        self.block = receiver.block
        self.writable = receiver.writable
        self.dead = receiver.dead
        self._receiver = receiver

    def up(self, node: int) -> None:
        self._network.on_link(self._links, node)
        self._receiver.up(node)

    def message(self, node: int, message: MeshMessage) -> None:
        on_hear = self._network.on_hear
        if on_hear is not None:
            for one in each_of(message):
                on_hear(self._links, node, one)
        self._receiver.message(node, message)


def each_of(message: MeshMessage) -> tuple[MeshMessage, ...]:
    """What was said in one."""
    return message.messages if isinstance(message, SeveralMessages) else (message,)


class SimPeers:
    """The links of a keeper under one number: listens, dials, and asks its table what time asks
    for. `Shell` to the table."""

    def __init__(
        self,
        network: Network,
        process: Process,
        addresses: Sequence[Address],
        me: Identity,
        secret: bytes,
        receiver: Receiver,
        options: LinkOptions,
    ) -> None:
        self.process = process
        self.addresses = addresses
        self._network = network
        self._unacked_ns = options.timeouts.silence_ns
        self.carriers: dict[SimCarrier, None] = {}  # in the order in which they were made
        self._woken: list[SimCarrier] = []
        self._is_ticking = False
        self._is_closed = False
        self._chance = network.random
        self.table = LinkTable(
            me=me,
            secret=secret,
            receiver=receiver,
            shell=self,
            options=options,
            entropy=Entropy(lambda: self._chance.randbytes(NONCE_BYTES), network.world.now_ns),
            new_lock=threading.Lock,  # for which nobody waits; cheaper than none that is Python
        )
        self._porch = SimPorch(process, self.table.new_door(), self.table.neighbours, self._let_in)
        self._knocking: dict[Knocking, None] = {}

    def connect(self, node: int, address: tuple[str, int], incarnation: int) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self.process.after(self._network.random.randrange(self._network.watch_ns), self._tick)
        self.table.connect(node, address, incarnation, self._network.world.now_ns)

    def _tick(self) -> None:
        if self._is_closed:
            return
        now_ns = self._network.world.now_ns
        due_ns = self.table.tick(now_ns)
        watch_ns = self._network.watch_ns
        looks = max(1, -(-(due_ns - now_ns) // watch_ns))
        self.process.after(looks * watch_ns, self._tick)
        self.pump()

    def wake(self, carrier: SimCarrier) -> None:
        """It has something to send: soon, together with all others that have."""
        if not self._woken:
            self.process.after(0, self.pump)
        self._woken.append(carrier)

    def pump(self) -> None:
        woken = self._woken
        self._woken = []
        for carrier in woken:
            if carrier.is_woken:
                carrier.pump()

    def reset(self, node: int) -> None:
        """The connection that carries messages to that node breaks."""
        for carrier in list(self.carriers):
            link = carrier.endpoint.link
            if link is not None and link.node == node and carrier.endpoint.index == 0:
                carrier.socket.pipe.cut("reset")

    def close(self, reason: str) -> None:
        self._is_closed = True
        for caller in list(self._porch.callers):
            caller.go()
        links = self.table.say_bye(reason)
        for carrier in list(self.carriers):
            carrier.pump()
        self.table.leave(links, reason)

    def process_ended(self) -> None:
        sockets = [carrier.socket for carrier in self.carriers]
        sockets += [caller.socket for caller in self._porch.callers]
        sockets += [knocking.socket for knocking in self._knocking]
        for socket in sockets:
            if self.process.machine.alive:
                socket.close()
            else:
                socket.vanish()

    # for the table: see `Shell`

    def dial(self, link: PeerLink, index: int) -> None:
        delay_ns = link.redial_ns(index)
        if delay_ns is not None:
            self.process.after(delay_ns, self._dial_now, link, index)

    def changed(self) -> None:
        """Nobody waits for that here."""

    def _dial_now(self, link: PeerLink, index: int) -> None:
        if link.ended is None:
            road = link.road(index)
            self._network.dial(
                self.process,
                road.target,
                self._unacked_ns,
                lambda found: self._dialled(link, index, found),
                road.source,
            )

    def _dialled(self, link: PeerLink, index: int, found: SimSocket | str) -> None:
        if isinstance(found, str):
            self._not_dialled(link, index, found)
        elif self._network.wires.knocks:
            self._knock(link, index, found)
        else:
            self._talk(link, index, found)

    def _not_dialled(self, link: PeerLink, index: int, why: str, is_stranger: bool = False) -> None:
        self.table.unreachable(link, index, why, self._network.world.now_ns, is_stranger)
        self.dial(link, index)

    def _knock(self, link: PeerLink, index: int, socket: SimSocket) -> None:
        def knocked(why: str | None) -> None:
            del self._knocking[knocking]
            if why is None:
                self._talk(link, index, socket)
            else:
                self._not_dialled(link, index, why, is_stranger=True)

        knocking = Knocking(socket, self.table.knocker(), knocked)
        self._knocking[knocking] = None
        knocking.begin()

    def _talk(self, link: PeerLink, index: int, socket: SimSocket) -> None:
        carrier = SimCarrier(self, socket, lambda: self.dial(link, index))
        carrier.carry(self.table.dialled(link, index, carrier))

    def accept(self, socket: SimSocket) -> None:
        if not self._network.wires.knocks:
            self._let_in(socket)
        elif self._is_closed:
            socket.close()
        else:
            self._chance = socket.chance
            knock = self.table.knock()
            self._chance = self._network.random
            self._porch.receive(socket, knock)

    def _let_in(self, socket: SimSocket, behind: bytes = b"") -> None:
        """`behind`: what came directly behind the knock."""
        self._network.on_let_in(socket)
        carrier = SimCarrier(self, socket, _nobody_waits)
        self._chance = socket.chance  # what a stranger brings about is drawn for the stranger
        endpoint = self.table.accepted(carrier, socket.pipe.hosts[0])
        self._chance = self._network.random
        carrier.carry(endpoint)
        if behind:
            carrier.arrived([behind])


class SimCarrier:
    """Moves the bytes of one connection. `Transport` to its endpoint, `User` to its socket.
    `then` is called when it is over."""

    __slots__ = (
        "_is_paused",
        "_is_receiving",
        "_peers",
        "_then",
        "_world",
        "endpoint",
        "is_woken",
        "socket",
    )

    endpoint: Endpoint

    def __init__(self, peers: SimPeers, socket: SimSocket, then: Callable[[], None]) -> None:
        self.socket = socket
        self.is_woken = False  # there may be something to send
        self._peers = peers
        self._then = then
        self._world = peers.process.world
        self._is_receiving = False
        self._is_paused = False  # because the gate wants to be asked again later
        socket.user = self

    def carry(self, endpoint: Endpoint) -> None:
        """From now on until it is over."""
        self.endpoint = endpoint
        self._peers.carriers[self] = None
        self._peers.process.after(HANDSHAKE_NS, self._handshake_over)
        if not self.socket.is_open:
            endpoint.cut("closed during the handshake")
        elif endpoint.closing is not None:
            self.close()
        self.pump()

    def _handshake_over(self) -> None:
        if not self.endpoint.is_proven:
            self.endpoint.cut(f"no handshake within {HANDSHAKE_NS // S_NS} s")

    # for the endpoint

    def wake(self) -> None:
        if not self.is_woken:
            self.is_woken = True
            if not self._is_receiving:
                self._peers.wake(self)

    def close(self) -> None:
        self.socket.close()
        self._peers.process.after(0, self._lost)

    def flow(self, node: int) -> Flow:
        return Flow(node, 0, 0)

    def sent_counts(self) -> LinkCount:
        return LinkCount()  # nobody counts

    # for the socket

    def arrived(self, pieces: list[Piece]) -> None:
        endpoint = self.endpoint
        now_ns = self._world.now_ns
        self._is_receiving = True
        for piece in pieces:
            end = len(piece)
            at = 0
            while at < end and endpoint.closing is None:
                buffer = endpoint.get_buffer()
                nbytes = len(buffer)
                if nbytes >= end - at:
                    nbytes = end - at
                    buffer[:nbytes] = piece[at:] if at else piece
                else:
                    buffer[:] = piece[at : at + nbytes]
                at += nbytes
                endpoint.buffer_updated(nbytes, now_ns)
        self._is_receiving = False
        if self.is_woken or endpoint.closing is not None:
            self.pump()

    def ended(self, why: str) -> None:
        self.endpoint.cut(why)

    # what is sent

    def pump(self) -> None:
        """Send all there is."""
        self.is_woken = False
        endpoint = self.endpoint
        while pieces := endpoint.next_pieces():
            self.socket.send(pieces)
        pause_ns = endpoint.pause_ns
        if pause_ns is not None and not self._is_paused:
            self._is_paused = True
            self._peers.process.after(pause_ns, self._pause_over)
        if endpoint.closing is not None and self.socket.is_open:
            self.close()  # what is said last is sent

    def _pause_over(self) -> None:
        """The gate may let blocks go now."""
        self._is_paused = False
        if self in self._peers.carriers:
            self.pump()

    def _lost(self) -> None:
        if self in self._peers.carriers:
            del self._peers.carriers[self]
            self.endpoint.lost("closed", self._world.now_ns)
            self._then()


def _nobody_waits() -> None:
    """For the end of an accepted connection."""
