"""Strangers: who reaches keepers' ports, reads the wire and does not know the job's secret.

`Strangers` come to keepers' ports, over wires of their own (`Network.aside`), from a machine that
is none of the job's. What they say: nothing, from more connections than there are places at the
door; anything; what was heard on the wire, as it was or changed; what the keeper itself says, back
to it; a handshake of the product's own (`Connection`) in the name of a node that is expected, with
another secret, also behind a knock with that. Where there are knocks none of them gets as far as a
handshake. Nothing of the job may go another way by it, at any time (`checkers/unmoved.py`). So
what is drawn here is drawn from streams of its own, and nothing is written into the trace.

A `Squatter` has the address of a machine that was lost, and answers there in any of these ways. An
`WireRepeater` says what it has read once more, in the middle of the connection that it was said on.
These two cost time, as a node that hangs and a wire that flips bits do; they are judged as all
other faults are.

What none of them does: cut or change what others send, reach the KV, a store, or anything within a
node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from keepstep.core.wire.connection import MAGIC, MIN_SECRET_BYTES, NONCE_BYTES, VERSION, Connection
from keepstep.core.wire.knock import Knocker, knock_key
from keepstep.model.units import KIB, MS_NS, S_NS
from keepstep.model.wire import MAX_AT_DOOR, Address, Dial, Identity
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.wire.links import SimPeers
from keepstep.sim.protocol.wire.pipe import Piece, SimSocket
from keepstep.sim.protocol.world.machine import Machine

NUMBER = 1 << 15  # of their machine: the job has none like it
INTERFACES = 4
MAX_VISITS = 24
MAX_TIMES = 6  # that who says nothing comes back
LAST_NS = 20 * S_NS  # after the last fault
READ_CONNECTIONS = 24
READ_BYTES = 16 * KIB  # of each connection
AFTER_LINK = 22  # bytes of a greeting and its hello, to the end of the link's number
WRONG_SECRET = b"what a stranger guesses, at most"
assert len(WRONG_SECRET) >= MIN_SECRET_BYTES

Words = Iterator[bytes]
Kind = Callable[["Strangers", Identity, bytearray], Words]


class Strangers:
    """Of one run. They come some times, each time to one keeper."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        world = job.world
        self._random = world.stream("strangers")
        self._network = job.around.network.aside(world.stream("strangers' wires"))
        self._machine = Machine(world, NUMBER, None, 0, interfaces=INTERFACES)
        self._process = self._machine.start("stranger")
        self._read: dict[SimSocket, list[bytes]] = {}
        job.around.network.taps.append(self._listen)
        if job.plan.wires.knocks:
            job.around.network.on_let_in = self._is_let_in
        until_ns = job.plan.faults_until_ns + LAST_NS
        for _ in range(self._random.randrange(2, MAX_VISITS)):
            world.after(self._random.randrange(until_ns), None, self._come)

    def _is_let_in(self, socket: SimSocket) -> None:
        if socket.other.process is self._process:
            self._job.violate("strangers stay outside", "one of them is heard behind the porch")

    def _listen(self, socket: SimSocket, pieces: Sequence[Piece]) -> None:
        """To what is sent from that end."""
        read = self._read.get(socket)
        if read is None:
            if len(self._read) == READ_CONNECTIONS:
                del self._read[next(iter(self._read))]
            read = self._read[socket] = []
        if sum(map(len, read)) < READ_BYTES:
            read += map(bytes, pieces)

    def _come(self) -> None:
        chance = self._random
        kind = chance.choice(KINDS)
        doors = [
            (at, door)
            for at, door in self._network.doors.items()
            if isinstance(door, SimPeers)
            and door.process.alive
            # nobody dials node 0
            and (door.table.me.node or kind is _silent)
        ]
        if not doors:
            return
        address, door = chance.choice(doors)
        crowd = chance.choice((3, MAX_AT_DOOR + 6)) if kind is _silent else chance.choice((1, 3))
        echoes = chance.random() < 0.1
        for _ in range(crowd):
            heard = bytearray()
            words = kind(self, door.table.me, heard)
            visit = Visit(words, heard, echoes, chance.randrange(4) * MS_NS)
            self._dial(address, visit, MAX_TIMES if kind is _silent else 1)

    def _dial(self, address: Address, visit: Visit, times: int) -> None:
        """And again each time that it is turned out, so that the door stays full for a while."""
        if times:
            visit.then = lambda: self._dial(address, visit, times - 1)
            source = self._random.choice(self._machine.hosts)
            self._network.dial(self._process, address, S_NS, visit.begin, source)

    # -- for what is said

    @property
    def random(self) -> Random:
        return self._random

    def read(self) -> list[bytes]:
        """All that one end of some connection has sent, as far as it was read."""
        return list(self._random.choice(list(self._read.values()))) if self._read else []

    def life_of(self, node: int) -> int:
        """The newest of those that listen."""
        doors = self._network.doors.values()
        mine = [door.table.me for door in doors if isinstance(door, SimPeers)]
        return max((me.incarnation for me in mine if me.node == node), default=0)


class Squatter:
    """Listens where a lost machine's keeper has listened. `Listener` to the network."""

    def __init__(self, job: SimJob, chance: Random) -> None:
        self._job, self._random = job, chance
        self.process = Machine(job.world, NUMBER, None, 0).start("squatter")
        self._read: list[bytes] = []
        job.on_lost = self._lost
        job.around.network.taps.append(self._listen)

    def _listen(self, socket: SimSocket, pieces: Sequence[Piece]) -> None:
        """To what ends say that were dialled: it could be answered."""
        if socket is socket.pipe.ends[1] and len(self._read) < READ_CONNECTIONS:
            self._read += map(bytes, pieces)

    def _lost(self, machine: Machine, addresses: list[Address]) -> None:
        for address in addresses:
            self._job.around.network.take(address, self)
            self._job.world.note("nemesis", f"a stranger has the address {address[0]}")

    def accept(self, socket: SimSocket) -> None:
        """See `Listener`."""
        if socket.other.machine == NUMBER:
            return  # another stranger: what the job is answered does not hang on who else comes
        chance = self._random
        words: Words = iter(())
        match chance.randrange(4):
            case 0:
                words = iter(list(self._read))
            case 1:
                words = iter([chance.randbytes(chance.choice((1, 86, 300)))])
            case 2:
                words = iter([socket.pipe.hosts[0].encode() * 30])
        Visit(words, bytearray(), chance.random() < 0.2, MS_NS).begin(socket)


class WireRepeater:
    """Says some of what it reads once more, where it was said, soon after."""

    def __init__(self, job: SimJob, chance: Random) -> None:
        self._job, self._random = job, chance
        self._left = 0
        job.around.network.taps.append(self._listen)
        for _ in range(chance.randrange(1, 5)):
            at_ns = chance.randrange(max(1, job.plan.faults_until_ns))
            job.world.after(at_ns, None, self._begin)

    def _begin(self) -> None:
        self._left += 1

    def _listen(self, socket: SimSocket, pieces: Sequence[Piece]) -> None:
        frames = [piece for piece in pieces if isinstance(piece, bytes)]
        if self._left and frames and self._random.random() < 0.2:
            self._left -= 1
            again = self._random.choice(frames)
            delay_ns = self._random.choice((0, self._random.randrange(S_NS)))
            self._job.world.after(delay_ns, None, self._say_again, socket, again)

    def _say_again(self, socket: SimSocket, frame: bytes) -> None:
        if socket.is_open:
            socket.inject(frame)
            self._job.struck(f"somebody says again what machine {socket.machine} has said")


class Visit:
    """One connection. `heard`: all that the keeper says is put there. `echoes`: it is said back to
    it. `pause_ns`: between the words; 0: each waits for an answer, but for the first."""

    def __init__(self, words: Words, heard: bytearray, echoes: bool, pause_ns: int) -> None:
        self._words, self._heard, self._echoes = words, heard, echoes
        self._pause_ns = pause_ns
        self._socket: SimSocket | None = None
        self.then: Callable[[], None] = lambda: None  # once it is over

    def begin(self, found: SimSocket | str) -> None:
        """It is there, or why it is not."""
        if isinstance(found, SimSocket):
            self._socket = found
            found.user = self
            found.arrive()  # what came before there was anybody
            self._say_next()

    def arrived(self, pieces: list[Piece]) -> None:
        """See `User`."""
        said = b"".join(pieces)
        self._heard += said
        if self._socket is not None and self._echoes:
            self._socket.send([said])
        elif not self._pause_ns:
            self._say_next()

    def ended(self, why: str) -> None:
        """See `User`."""
        self.then()

    def _say_next(self) -> None:
        socket = self._socket
        if socket is None or not socket.is_open:
            return
        word = next(self._words, None)
        if word is None:
            return
        socket.send([word])
        if self._pause_ns:
            socket.process.after(self._pause_ns, self._say_next)


def _silent(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    return iter(())


def _garbage(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """Also behind what begins as it should."""
    chance = strangers.random
    greeting = MAGIC + VERSION.to_bytes(2, "little")
    for first in (chance.choice((b"", greeting, greeting + b"\x01")), b"", b""):
        yield first + chance.randbytes(chance.choice((1, 75, 300, 4 * KIB)))


def _replay(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """What one end of a connection has said, from its first word on."""
    return iter(strangers.read())


def _changed(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """The same, with some of its bits changed, some of it left out or said twice."""
    chance = strangers.random
    for piece in strangers.read():
        changed = bytearray(piece)
        if changed and chance.random() < 0.5:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            yield bytes(changed)


def _later(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """What a node that dials has said, as if for a link that it has made since."""
    read = strangers.read()
    hello = bytearray(read[0] if read else b"")
    if len(hello) >= AFTER_LINK:
        link = int.from_bytes(hello[AFTER_LINK - 8 : AFTER_LINK], "little")
        later = min(link + strangers.random.randrange(1, S_NS), (1 << 64) - 1)
        hello[AFTER_LINK - 8 : AFTER_LINK] = later.to_bytes(8, "little")
    yield bytes(hello)
    yield from read[1:]


def _impostor(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """In the name of a node that dials there, of this life of it or a later one."""
    chance = strangers.random
    node = chance.randrange(max(1, door.node))
    me = Identity(door.job_hash, node, strangers.life_of(node) + chance.choice((0, 1, 1)))
    dial = Dial(chance.randrange(1 << 62), chance.choice((0, 0, 1, 99)), chance.random() < 0.3)
    nonce = chance.randbytes(NONCE_BYTES)
    wire = Connection(me, WRONG_SECRET, nonce, lambda peer, asked: None, dial)
    while word := wire.take():
        yield word
        while heard and wire.wanted:
            taken = bytes(heard[: wire.wanted])
            del heard[: len(taken)]
            wire.receive(taken)
    yield from _garbage(strangers, door, heard)


def _knocks(strangers: Strangers, door: Identity, heard: bytearray) -> Words:
    """As it is done, with another secret; and goes on as if that had been right."""
    knocker = Knocker(knock_key(WRONG_SECRET))
    yield knocker.opening
    answer = knocker.receive(bytes(heard[: knocker.wanted])) if heard else None
    if isinstance(answer, bytes):
        del heard[:]
        yield answer
    yield from _impostor(strangers, door, heard)


KINDS = (_silent, _silent, _garbage, _replay, _changed, _later, _impostor, _impostor, _knocks)
