"""Link table: a keeper's links to the keepers of other nodes.

Comes in: with whom to be linked, where and since which incarnation; connections that are proven or
lost; the time. Goes out: calls of the `Receiver`, and of the `Shell`, which moves bytes. Decides
who dials (of two nodes the one with the lower number, so that there is never more than one link
between them), who is let in, which link an accepted connection belongs to and what it replaces,
when a link ends, and that the receiver hears of each link's beginning and end once.

No thread, socket, clock or chance of its own. Safe to call from several threads, if the locks it is
given are locks. Two things are never done with one of its locks held: the receiver is not called,
and a shell's `dial` and `changed` are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from keepstep.core.wire.connection import Admit, Connection, refusal_record
from keepstep.core.wire.door import Door
from keepstep.core.wire.endpoint import Endpoint, Transport
from keepstep.core.wire.knock import CHALLENGE_BYTES, Knock, Knocker, knock_key
from keepstep.core.wire.link import Ended, PeerLink
from keepstep.core.wire.traffic import Counts, Done, LinkOptions, Lock, Outgoing, Traffic
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import KeeperMessage, LinkGoodbye, LinkStreams
from keepstep.model.wire import (
    MAX_AT_DOOR,
    MAX_STREAMS,
    Address,
    Cut,
    Dead,
    Dial,
    Identity,
    Opened,
    Refusal,
    Refused,
    Span,
)

if TYPE_CHECKING:
    from keepstep.ports import Receiver

# Said by the peer, dialling again changes nothing. Said so often in a row, because a refusal proves
# nothing: a damaged hello gets one too.
_FINAL = {Refusal.OLD_INCARNATION, Refusal.FORGOTTEN}
FINAL_TIMES = 3
BUSY = Refused(Refusal.BUSY, f"{MAX_AT_DOOR} connections are unproven, and another one has come")


class Shell(Protocol):
    """Who makes connections and moves their bytes."""

    @property
    def addresses(self) -> Sequence[Address]:
        """Where this keeper is reached; the first is the one that others are told."""

    def dial(self, link: PeerLink, index: int) -> None:
        """Keep that channel connected: dial `link.road(index)`, and when the connection is over
        again, each time after `link.redial_ns(index)`, until that is None."""

    def changed(self) -> None:
        """A link has ended or is over, or one that is leaving may be flushed."""


@dataclass(frozen=True, slots=True)
class Entropy:
    """What has to be new each time. `nonce`: 32 random bytes. `first_link`: larger than the number
    of any link that an earlier life of this keeper has made."""

    nonce: Callable[[], bytes]
    first_link: int


class LinkTable:
    """See above. `close` ends all of it; a table that was closed makes no links."""

    def __init__(
        self,
        me: Identity,
        secret: bytes,
        receiver: Receiver,
        shell: Shell,
        options: LinkOptions,
        entropy: Entropy,
        new_lock: Callable[[], Lock],
    ) -> None:
        self.me = me
        self._secret = secret
        self._knock_key = knock_key(secret)
        self._receiver = receiver
        self._shell = shell
        self._options = options
        self._entropy = entropy
        self._door: Door[Endpoint] = Door(MAX_AT_DOOR)
        self._new_lock = new_lock
        self._lock = new_lock()
        self.counts = Counts(new_lock())
        self._link_ids = itertools.count(entropy.first_link)
        self._links: dict[int, PeerLink] = {}
        self._ending: dict[int, PeerLink] = {}  # the newest that has ended and is not over
        self._expected: set[int] = set()
        # the oldest incarnation, and link of it, that is still listened to; it only grows, until
        # another mesh says who has that number
        self._least: dict[int, tuple[int, int]] = {}
        self._addresses: dict[int, Address] = {}  # where each was last said to be
        self._lives: dict[int, set[int]] = {}  # that are known to have that number
        self._gone: dict[int, set[int]] = {}  # that had it, and may not have heard who has it now
        self._unsaid: set[int] = set()  # of whom another mesh has said nothing yet
        # what was sent last, and as bytes: the leader says the same to all
        self._encoded: tuple[KeeperMessage | None, bytes] = None, b""
        self._is_closed = False

    # what the keeper wants

    def begin_mesh(self) -> None:
        """From now on another mesh says who has which number: a later life that has come by itself
        counts no more than what is said of it first."""
        with self._lock:
            self._unsaid |= self._least.keys()

    def connect(
        self, node: int, address: Address, incarnation: int, now_ns: int
    ) -> PeerLink | None:
        """Be linked with that node, in this life of it or a later one: dial it, or wait to be
        dialled.

        A link with an older life ends, without a `dead`: who says this knows. One with this life
        stays, and is dialled at the new address when it breaks. So this may be said again at any
        time. After `dead` the side that dials must say it again. Returns the link that ends by it.
        """
        assert node != self.me.node
        with self._lock:
            older = self._outdated(node, address, incarnation)
            self._expected.add(node)
        if older is not None:
            link, why = older
            self._end(link, Ended(why, tell=False, is_loss=True))
        with self._lock:
            known = self._links.get(node)
            if known is not None:
                known.address = address
            is_new = known is None and not self._is_closed
            if is_new:
                known = self._new_link(node, address, self._least[node][0], now_ns)
                if known.dials:
                    known.id = next(self._link_ids)
        if is_new and known is not None and known.dials:
            self._dial(known)
        return older[0] if older is not None else None

    def _dial(self, link: PeerLink) -> None:
        """Once an older link with that node is over."""
        if not link.wait_for_older(lambda: self._dial(link)):
            self._shell.dial(link, 0)

    def _outdated(
        self, node: int, address: Address, incarnation: int
    ) -> tuple[PeerLink, str] | None:
        """The link that this address and incarnation of a node replace, and why."""
        known = self._addresses.get(node)
        self._addresses[node] = address
        has_moved = known not in (None, address)
        gone, lives = self._gone.setdefault(node, set()), self._lives.setdefault(node, set())
        if has_moved:
            gone |= lives
            lives.clear()
        gone.discard(incarnation)
        lives.add(incarnation)
        # Whoever asks for the link knows who has that number now. Whose clock says that it began
        # before would be refused for ever, by incarnations alone.
        is_another = incarnation < self._least_of(node)[0] and (has_moved or node in self._unsaid)
        self._unsaid.discard(node)
        if is_another:
            del self._least[node]
        self._least[node] = max((incarnation, 0), self._least_of(node))
        link = self._links.get(node)
        if link is None:
            return None
        if is_another:
            return link, f"node {node} is now another machine, or a life that began before"
        return (link, self._fenced(link, incarnation)) if link.incarnation < incarnation else None

    def _least_of(self, node: int) -> tuple[int, int]:
        return self._least.get(node, (0, 0))

    def _fenced(self, link: PeerLink, incarnation: int) -> str:
        return f"fenced: incarnation {link.incarnation} is older than {incarnation}"

    def fence(self, node: int, incarnation: int) -> PeerLink | None:
        """Listen to no life of that node before this one; a link with one, or made to wait for one,
        is ended and told as `dead`. Returns that link."""
        with self._lock:
            self._least[node] = max((incarnation, 0), self._least_of(node))
            link = self._links.get(node)
        if link is None or link.incarnation >= incarnation:
            return None
        self._end(link, Ended(self._fenced(link, incarnation), tell=True, is_loss=True))
        return link

    def say_bye(self, reason: str, node: int | None = None) -> list[PeerLink]:
        """Tell that node, or all, that its link is to end, and expect it no more; or, of all: make
        no links any more. The links: once each `is_flushed`, or after a while, call `leave`."""
        with self._lock:
            if node is None:
                self._is_closed = True
                links = list(self._links.values())
            else:
                self._expected.discard(node)
                links = [self._links[node]] if node in self._links else []
        goodbye = LinkGoodbye(reason)
        for link in links:
            link.is_leaving = True
            link.send(self._encode(goodbye))
        return links

    def leave(self, links: list[PeerLink], reason: str) -> None:
        """End them. No `dead` is told."""
        for link in links:
            self._end(link, Ended(reason, tell=False, is_loss=False))

    def send(self, node: int, message: KeeperMessage) -> bool:
        """False when it was not taken: no link, or its queue is full (`writable` will say when
        not). Raises NotAMessage."""
        link = self._links.get(node)
        return link is not None and link.send(self._encode(message))

    def _encode(self, message: KeeperMessage) -> bytes:
        """Once for all links that it goes to, one after the other. Raises NotAMessage."""
        known, body = self._encoded
        if known is not message:
            body = self._options.format.encode(message)
            self._encoded = message, body
        return body

    def send_block(
        self, node: int, span: Span, source: memoryview, done: Done, checksum: int | None = None
    ) -> bool:
        """Send `source` from where it lies; it must stand still until `done`. False when it was not
        taken, as for `send`.

        `checksum`: what the bytes should have, if that is known (a slot's table): then they are not
            read here to find out.
        """
        assert source.nbytes == span.length and source.format == "B", (
            f"{source.nbytes} bytes of format {source.format} for {span}"
        )
        link = self._links.get(node)
        return link is not None and link.send_block(Outgoing(span, source, done, checksum))

    def is_open(self, node: int) -> bool:
        """Is a connection there now, since `up` was told? False while a link is away, which may
        pass."""
        link = self._links.get(node)
        return link is not None and link.is_open

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        """By node and stream: what has been sent over the connections there are."""
        with self._lock:
            links = list(self._links.values())
        return {
            (link.node, index): count
            for link in links
            for index, count in link.sent_counts().items()
        }

    @property
    def is_quiet(self) -> bool:
        """There is no link, and none that has ended is still carried."""
        return not self._links and not self._ending

    # time

    def tick(self, now_ns: int) -> int:
        """Ping, cut, end: what the links' health asks for. When to ask again, at the latest."""
        with self._lock:
            links = list(self._links.values())
        due_ns = now_ns + self._options.timeouts.ping_ns
        for link in links:
            if link.due_ns <= now_ns:
                self._look(link, now_ns)
            due_ns = min(due_ns, link.due_ns)
        return due_ns

    def _look(self, link: PeerLink, now_ns: int) -> None:
        match link.look(now_ns):
            case Dead(why):
                self._end(link, Ended(why, tell=True, is_loss=True))
            case Cut(why):
                if link.cut_messages(why):
                    self.counts.add("silences")
        if link.dials:
            link.leave_detours(now_ns)

    # connections: the side that dials

    def knocker(self) -> Knocker:
        """What is said first on a connection that was dialled."""
        return Knocker(self._knock_key)

    def dialled(self, link: PeerLink, index: int, transport: Transport) -> Endpoint:
        """Here is a connection for that channel, on which nothing has been said."""
        assert link.id is not None
        wire = self._connection(self._admit_for(link), Dial(link.id, index, link.is_up))
        endpoint = Endpoint(self, transport, wire, self._new_lock(), link, index)
        if link.ended is not None:
            endpoint.cut(link.ended.why)
        return endpoint

    def unreachable(
        self, link: PeerLink, index: int, why: str, now_ns: int, is_stranger: bool = False
    ) -> None:
        """There is none: nobody answers, or somebody says that nobody listens. `is_stranger`: who
        answers there is not known to be that node."""
        link.unreachable(index, why, False, now_ns, is_stranger)
        self._progress(link)

    def _admit_for(self, link: PeerLink) -> Admit:
        def admit(peer: Identity, asked: Dial) -> Refused | None:
            if link.ended is not None:
                return Refused(Refusal.FORGOTTEN, link.ended.why)
            if peer.node != link.node:
                return Refused(
                    Refusal.NOT_EXPECTED, f"expected node {link.node}, found node {peer.node}"
                )
            if link.peer is not None and peer != link.peer:
                return Refused(
                    Refusal.NOT_EXPECTED,
                    f"the link is with incarnation {link.peer.incarnation}, found "
                    f"{peer.incarnation}",
                )
            with self._lock:
                return self._too_old(peer)

        return admit

    # the side that is dialled

    def accepted(self, transport: Transport, source: str) -> Endpoint:
        """Somebody has connected, and said nothing but the right knock. `source`: their address,
        without the port."""
        connection = self._connection(self._admit, None)
        endpoint = Endpoint(self, transport, connection, self._new_lock())
        with self._lock:
            neighbours = self._neighbours() if self._door.is_full else frozenset()
            leaver = self._door.enter(endpoint, source, neighbours)
        if leaver is not None and leaver.cut(BUSY.why):
            self.counts.refused(BUSY)
        return endpoint

    def knock(self) -> Knock:
        """What somebody who has connected has to say first; then they are `accepted`."""
        return Knock(self._knock_key, self._entropy.nonce()[:CHALLENGE_BYTES])

    def new_door(self) -> Door[Any]:
        """For those who have not knocked yet."""
        return Door(MAX_AT_DOOR)

    def refusal_record(self, reason: Refusal) -> bytes:
        """What is said to one of them who is not listened to."""
        return refusal_record(reason)

    def neighbours(self) -> frozenset[str]:
        """The addresses at which nodes of the mesh are said to be."""
        with self._lock:
            return self._neighbours()

    def _neighbours(self) -> frozenset[str]:
        """With the lock held."""
        return frozenset(self._addresses[node][0] for node in self._expected)

    def _admit(self, peer: Identity, asked: Dial) -> Refused | None:
        """Is this somebody we would talk to, if they prove it?"""
        with self._lock:
            if peer.node >= self.me.node:
                return Refused(
                    Refusal.NOT_EXPECTED, f"node {peer.node} is dialled from here, not from there"
                )
            if refused := self._too_old(peer):
                return refused
            link = self._links.get(peer.node)
            if asked.channel > 2 * MAX_STREAMS:
                return Refused(
                    Refusal.NOT_EXPECTED,
                    f"channel {asked.channel}, there are {1 + 2 * MAX_STREAMS}",
                )
            if not (link is not None and link.is_with(peer, asked)) and self._is_over(peer, asked):
                return Refused(
                    Refusal.FORGOTTEN, f"link {asked.link:x} with node {peer.node} is over"
                )
        return None

    def _too_old(self, peer: Identity) -> Refused | None:
        if peer.node not in self._expected:
            return Refused(Refusal.NOT_EXPECTED, f"node {peer.node} is not expected")
        if peer.incarnation in self._gone.get(peer.node, ()):
            return Refused(Refusal.OLD_INCARNATION, f"node {peer.node} is another machine now")
        least = self._least[peer.node][0]
        if peer.incarnation < least:
            return Refused(
                Refusal.OLD_INCARNATION,
                f"expected incarnation {least} of node {peer.node} or later, found "
                f"{peer.incarnation}",
            )
        return None

    def _is_over(self, peer: Identity, asked: Dial) -> bool:
        """Can this not be a new link? A connection of an ended one may have been under way for
        long: it does not replace a later one."""
        return (
            bool(asked.channel)
            or asked.resuming
            or (peer.incarnation, asked.link) < self._least_of(peer.node)
        )

    # both: see `endpoint.Owner`

    def _connection(self, admit: Admit, dial: Dial | None) -> Connection:
        return Connection(
            self.me, self._secret, self._entropy.nonce(), admit, dial, self._options.format
        )

    def proven(self, endpoint: Endpoint, met: Opened, now_ns: int) -> None:
        self._leave_door(endpoint)
        if endpoint.link is None:
            endpoint.index = met.dial.channel
            endpoint.link = self._link_for(met, now_ns)
        else:
            endpoint.link.peer = met.peer
        if endpoint.link is None:
            endpoint.cut(f"link {met.dial.link:x} with node {met.peer.node} is over")
        else:
            self._attach(endpoint.link, endpoint, now_ns)

    def _leave_door(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._door.leave(endpoint)

    def _link_for(self, met: Opened, now_ns: int) -> PeerLink | None:
        """The link that an accepted connection belongs to: the present one with that node, or a new
        one, which ends the present one. None when it belongs to one that is over."""
        peer = met.peer
        while True:
            with self._lock:
                if self._is_closed or self._too_old(peer) is not None:
                    return None
                link = self._links.get(peer.node)
                if link is not None and link.is_with(peer, met.dial):
                    return link
                if self._is_over(peer, met.dial):
                    return None
                if link is None:
                    link = self._new_link(peer.node, None, peer.incarnation, now_ns)
                if link.id is None:  # it waits to be dialled
                    link.id = met.dial.link
                    link.peer = peer
                    self._least[peer.node] = (peer.incarnation, met.dial.link)
                    self._lives[peer.node].add(peer.incarnation)
                    return link
            why = f"replaced by a new link with incarnation {peer.incarnation} of node {peer.node}"
            self._end(link, Ended(why, tell=True, is_loss=True))

    def _attach(self, link: PeerLink, endpoint: Endpoint, now_ns: int) -> None:
        """Have the link carry its channel over that connection, as soon as that can be."""
        if link.wait_for_older(lambda: self._attach(link, endpoint, now_ns)):
            return
        if link.take(endpoint) and link.begin(endpoint, now_ns):
            self._open_streams(link)

    def _open_streams(self, link: PeerLink) -> None:
        """Those that are wanted and not there yet: dialled, or the side that dials is told."""
        said = link.to_say()
        if said is not None:
            link.send(self._options.format.encode(said))
        if link.dials:
            for index in link.undialled():
                self._shell.dial(link, index)

    def _heard_of_streams(self, link: PeerLink, said: LinkStreams) -> None:
        link.heard_of_streams(said)
        self._open_streams(link)

    def refused(self, endpoint: Endpoint, refused: Refused) -> None:
        self.counts.refused(refused)

    def lost(self, endpoint: Endpoint, why: str, now_ns: int) -> None:
        self._leave_door(endpoint)
        link = endpoint.link
        if link is None:
            if endpoint.met is None and endpoint.refusal is None:
                self.counts.add("handshakes broken")
            return
        if endpoint.met is None:
            refused = endpoint.refusal
            is_final = refused is not None and refused.by_peer and refused.reason in _FINAL
            is_stranger = refused is not None and not is_final
            finals = link.unreachable(endpoint.index, why, is_final, now_ns, is_stranger)
            if finals == FINAL_TIMES:
                self._end(link, Ended(why, tell=True, is_loss=True))
        else:
            parked = link.lose(endpoint, why, now_ns)
            if parked is not None:
                self._attach(link, parked, now_ns)
        if link.ended is not None:
            self._finish(link)
        self._progress(link)

    # a link's life

    def _new_link(self, node: int, address: Address | None, wanted: int, now_ns: int) -> PeerLink:
        """With the lock held."""

        def said_bye(reason: str) -> None:
            why = f"node {node} said goodbye: {reason}"
            self._end(link, Ended(why, tell=True, is_loss=False))

        traffic = Traffic(
            node=node,
            dials=self.me.node < node,
            options=self._options,
            receiver=self._receiver,
            counts=self.counts,
            lock=self._new_lock(),
            now_ns=now_ns,
            said_bye=said_bye,
            told_streams=lambda said: self._heard_of_streams(link, said),
            more_streams=lambda: self._open_streams(link),
        )
        before = self._ending.get(node)
        link = PeerLink(traffic, address, wanted, before, self._shell.addresses)
        self._links[node] = link
        return link

    def _end(self, link: PeerLink, ended: Ended) -> None:
        with self._lock:
            if self._links.get(link.node) is link:
                del self._links[link.node]
                self._ending[link.node] = link
        if link.end(ended):
            self._finish(link)
            self._shell.changed()

    def _finish(self, link: PeerLink) -> None:
        """A link that has ended is over as soon as nothing carries it; one link with a node after
        the other."""
        if link.wait_for_older(lambda: self._finish(link)):
            return
        calls = link.finish()
        if calls is None:
            return
        with self._lock:
            if self._ending.get(link.node) is link:
                del self._ending[link.node]
        for call in calls:
            call()
        self._shell.changed()

    def _progress(self, link: PeerLink) -> None:
        if link.is_leaving:
            self._shell.changed()
