"""Wire: one end of a connection between two keepers, as a state machine over bytes (no socket, no
clock, in the manner of h11).

Comes in: the bytes that arrived, never more than `wanted` at once. Goes out: events, and the bytes
to send. A block's own bytes never pass through here: `BlockComing` says that they are next, the
owner receives them wherever it likes and tells their checksum.

A connection comes here once its knock was right (`knock.py`), or straight from who lets all in.
Before anything is believed, both sides prove the job's secret by HMAC-SHA256 (RFC 2104) over both
hellos: protocol, job, node, incarnation, role, link, channel, and a fresh nonce of each side. The
dialer proves first, so a stranger learns nothing made with the secret. Each direction then has a
key of its own; every frame head, message and block header carries a MAC (16 bytes of HMAC-SHA256)
and its place in the sequence, so that nothing can be altered, replayed, reordered or reflected.
Block bytes carry XXH3-64, which finds accidents, and where both sides can a MAC of their own, which
finds what was rewritten on purpose.

Where links are encrypted, an authenticated cipher takes the place of all these MACs (`seals.py`):
the same frames with tags of the same size, and one more behind a block's bytes. That is no matter
of agreement: each side says in its hello what it was told to do, and refuses another answer.

    greeting  magic, version                                   } records of one size whatever
    record    hello (who, what for, nonce) | proof | refusal   } the version, until both sides
                                                               } have proven themselves
    head      type, length, sequence, number, MAC              } frames; a signal is
    body      message (JSON) | block header, each with a MAC   } no more than a head
    raw       a block's bytes, and their tag if encrypted

Never allocates by a length the other side claims: before the proof all sizes are fixed, after it a
length is read only under a good MAC and refused beyond its bound. Whatever bytes come, `receive`
returns events and raises nothing.

A connection belongs to one thread until it is open; from then on one thread may receive while
another sends.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from keepstep.core.wire.codec import MAX_MESSAGE_BYTES, NotAMessage
from keepstep.core.wire.macs import (
    NO_TAG,
    TAG_BYTES,
    BlockMac,
    Mac,
    NewBlockMac,
    RunningMac,
    hkdf_sha256,
    hmac_sha256,
)
from keepstep.core.wire.messages import decode, encode
from keepstep.core.wire.seals import (
    BODY,
    HEAD,
    Encrypted,
    NewCipher,
    Seal,
    Sealing,
    Signed,
    Unopened,
    Unsealing,
)
from keepstep.model.messages.peers import KeeperMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import (
    MAX_BLOCK_BYTES,
    BlockComing,
    BlockDamaged,
    BlockHeader,
    BlockWhole,
    Dial,
    Identity,
    Opened,
    Part,
    Received,
    Refusal,
    Refused,
    Signal,
    Signalled,
    Span,
    WireEvent,
)

VERSION = 9
MAGIC = b"KEEPWIRE"
NONCE_BYTES = 32
MIN_SECRET_BYTES = 16

GREETING = struct.Struct("<8sH")
_HELLO = struct.Struct("<BBHQIQ16s32s2x")
_PROOF = struct.Struct("<B32s41x")
_REFUSAL = struct.Struct("<BH71x")
_RECORD_BYTES = _HELLO.size
assert _RECORD_BYTES == _PROOF.size == _REFUSAL.size
_IS_HELLO, _IS_PROOF, _IS_REFUSAL = 1, 2, 3
# flags of a hello
_DIALER, _RESUMING, _SIGNS_BLOCKS, _ENCRYPTS, _HAS_BUFFERS = 1, 2, 4, 8, 16

_HEAD = struct.Struct("<B3xIQQ")
_BLOCK = struct.Struct("<16sIBqQQQQ16s")
_MESSAGE_FRAME, _BLOCK_FRAME = 1, 2
_PARTS = {int(part): part for part in Part}
_SIGNALS = {int(signal): signal for signal in Signal}
_LONGEST = {_MESSAGE_FRAME: MAX_MESSAGE_BYTES, _BLOCK_FRAME: _BLOCK.size} | dict.fromkeys(Signal, 0)
_HEAD_SIZE = _HEAD.size
_HEAD_BYTES = _HEAD_SIZE + TAG_BYTES
_BLOCK_FRAME_BYTES = _HEAD_BYTES + _BLOCK.size + TAG_BYTES

Side = Literal["dialer", "acceptor"]
Admit = Callable[[Identity, Dial], Refused | None]


@dataclass(frozen=True, slots=True)
class WireFormat:
    """What messages and MACs are as bytes. Both sides must have the same. Keepers have the one that
    is written here; a large simulation may have a cheaper one. `new_block_mac`: a MAC for the bytes
    of blocks, which have one when both sides can; `needs_block_mac`: who cannot is refused.
    `new_cipher`: encrypts all of it, in place of the MACs; who has none is refused, and without it
    who has one. `has_buffers`: bytes may cross by registered memory, where the other side has
    buffers too (`records.py`)."""

    encode: Callable[[KeeperMessage], bytes] = encode
    decode: Callable[[bytes], KeeperMessage] = decode
    new_mac: Callable[[bytes], Mac] = hmac_sha256
    new_block_mac: NewBlockMac | None = None
    needs_block_mac: bool = False
    new_cipher: NewCipher | None = None
    has_buffers: bool = False


KEEPERS_FORMAT = WireFormat()


def greeted(rest: bytes) -> bytes:
    """With what each side says first."""
    return GREETING.pack(MAGIC, VERSION) + rest


def wrong_greeting(greeting: bytes) -> Refused | None:
    """What is wrong with what the other side says first."""
    magic, version = GREETING.unpack(greeting)
    if magic != MAGIC:
        return Refused(Refusal.STRANGER, f"expected {MAGIC!r} first, found {magic!r}")
    if version != VERSION:
        return Refused(Refusal.VERSION, f"expected version {VERSION}, found {version}")
    return None


def refusal_record(reason: Refusal) -> bytes:
    """Says to who has proven nothing yet why it is not listened to."""
    return greeted(_REFUSAL.pack(_IS_REFUSAL, reason))


class Connection:
    """One end. `dial` is what the dialing side wants; the accepting side leaves it None and learns
    it.

    `nonce`: 32 fresh random bytes. `admit` judges who the other side says it is, before its proof
    is looked at.
    """

    def __init__(
        self,
        me: Identity,
        secret: bytes,
        nonce: bytes,
        admit: Admit,
        dial: Dial | None = None,
        format: WireFormat = KEEPERS_FORMAT,
    ) -> None:
        assert len(secret) >= MIN_SECRET_BYTES, (
            f"a secret of {len(secret)} bytes, at least {MIN_SECRET_BYTES} needed"
        )
        assert len(nonce) == NONCE_BYTES and len(me.job_hash) == 16
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._admit = admit
        self._format = format
        self._side: Side = "dialer" if dial else "acceptor"
        self._dial = dial
        self._out = bytearray()
        self._buffer = bytearray()
        self._transcript = b""
        self._opened: Opened | None = None
        self._need = 0
        self._reader: Callable[[bytes], WireEvent | None] = self._on_nothing
        self._has_keys = False  # both sides have proven themselves
        self._in_seal: Seal = Unopened()
        self._out_seal: Seal = Unopened()
        # of the block whose header came, or was made, last; None: its bytes cross as they are
        self.unsealing: Unsealing | None = None
        self.sealing: Sealing | None = None
        # seals of records, ours and theirs; None: the connection has none
        self.beside: tuple[Seal, Seal] | None = None
        self._in_block_mac: BlockMac | None = None
        self._out_block_mac: BlockMac | None = None
        self._peer_signs_blocks = False
        self._peer_has_buffers = False
        self._sent = 0
        self._received = 0
        self._of_frame = 0  # bytes of the present frame that have been understood
        self._block: BlockHeader | None = None
        self.closed: Refused | None = None
        self._await(GREETING.size, self._on_greeting)
        if dial:
            self._mine = self._hello(dial)
            self._record(self._mine)

    # what comes in

    @property
    def wanted(self) -> int:
        """How many bytes complete the next piece; 0 while a block's bytes come, and when closed."""
        return self._need - len(self._buffer)

    @property
    def readable(self) -> int:
        """Where frames come: how many bytes may be taken before it is known what they are, `wanted`
        or more. Never one of a block's own, for those go elsewhere."""
        taken = len(self._buffer)
        return max(self._need - taken, _BLOCK_FRAME_BYTES - self._of_frame - taken)

    def receive(self, data: bytes | memoryview) -> WireEvent | None:
        """Take at most `wanted` bytes. Returns what they complete, if it is anything the owner
        should know."""
        assert 0 < len(data) <= self.wanted, f"{len(data)} bytes, {self.wanted} wanted"
        if not self._buffer and len(data) == self._need:
            return self._reader(bytes(data))
        self._buffer += data
        if len(self._buffer) < self._need:
            return None
        piece = bytes(self._buffer)
        self._buffer.clear()
        return self._reader(piece)

    def read(self, data: memoryview, at: int) -> tuple[WireEvent | None, int]:
        """Take bytes from `data[at:]` until they complete something that the owner should know, or
        there are none left. Returns that, and where the next ones begin."""
        end = len(data)
        while at < end and (need := self._need):
            if not self._buffer and need <= end - at:  # the usual case, and the quick way
                event = self._reader(bytes(data[at : at + need]))
                at += need
            else:
                taken = min(self.wanted, end - at)
                event = self.receive(data[at : at + taken])
                at += taken
            if event is not None:
                return event, at
        return None, end

    def begin_block_mac(self) -> RunningMac | None:
        """The MAC of the block that is coming, to be fed with its bytes; None: it has none."""
        return None if self._in_block_mac is None else self._in_block_mac(self._received - 1)

    def block_received(self, found: int, tag: bytes = NO_TAG) -> BlockWhole | BlockDamaged:
        """The block's bytes are in, with this checksum. `tag`: the MAC that they have, or when they
        were encrypted the tag that came behind them."""
        header = self._block
        self._block = None
        assert header is not None, "no block is coming"
        self._await(_HEAD_BYTES, self._on_head)
        if self.unsealing is None:
            is_proven = hmac.compare_digest(tag, header.tag)
        else:
            is_proven = self.unsealing.proves(tag)
        is_whole = is_proven and found == header.checksum
        return BlockWhole(header) if is_whole else BlockDamaged(header, found)

    # what goes out

    def take(self) -> bytes:
        """The handshake's bytes that are to be sent now."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def message(self, message: KeeperMessage, number: int = 0) -> bytes:
        """The bytes of a message. Raises NotAMessage when no peer would accept it."""
        return self._frame(_MESSAGE_FRAME, self._format.encode(message), number)

    def encoded(self, body: bytes, number: int) -> bytes:
        """The bytes of a message that was encoded before."""
        return self._frame(_MESSAGE_FRAME, body, number)

    def signal(self, signal: Signal, number: int) -> bytes:
        """The bytes of a signal."""
        return self._head_of(signal, 0, number)[1]

    def block(self, header: BlockHeader, source: memoryview) -> bytes:
        """The bytes that must directly precede the block's own, which are those of `source`, or
        when there is a `sealing` what that makes of them, and its tag."""
        s = header.span
        tag = NO_TAG
        if self._out_block_mac is not None:
            mac = self._out_block_mac(self._sent)
            mac.update(source)
            tag = mac.tag()
        assert 0 < s.length <= MAX_BLOCK_BYTES, f"a block of {s.length} bytes"
        body = _BLOCK.pack(
            self._me.job_hash,
            s.rank,
            s.part,
            s.stamp.step,
            s.stamp.epoch,
            s.offset,
            s.length,
            header.checksum,
            tag,
        )
        frame = self._frame(_BLOCK_FRAME, body, header.number)
        if isinstance(self._out_seal, Encrypted):
            self.sealing = self._out_seal.begin_block(self._sent - 1, body)
        return frame

    # the handshake

    def _hello(self, dial: Dial) -> bytes:
        flags = (_DIALER if self._side == "dialer" else 0) | (_RESUMING if dial.resuming else 0)
        flags |= _SIGNS_BLOCKS if self._format.new_block_mac is not None else 0
        flags |= _ENCRYPTS if self._encrypts else 0
        flags |= _HAS_BUFFERS if self._format.has_buffers else 0
        me = self._me
        return _HELLO.pack(
            _IS_HELLO,
            flags,
            dial.channel,
            dial.link,
            me.node,
            me.incarnation,
            me.job_hash,
            self._nonce,
        )

    def _record(self, record: bytes) -> None:
        self._out += greeted(record)

    def _on_greeting(self, piece: bytes) -> WireEvent | None:
        if wrong := wrong_greeting(piece):
            return self._refuse(wrong.reason, wrong.why)
        self._await(_RECORD_BYTES, self._on_record)
        return None

    def _on_record(self, piece: bytes) -> WireEvent | None:
        expected = _IS_PROOF if self._transcript else _IS_HELLO
        if piece[0] == _IS_REFUSAL:
            return self._on_refusal(piece)
        if piece[0] != expected:
            return self._refuse(Refusal.MALFORMED, f"expected record {expected}, found {piece[0]}")
        return self._on_proof(piece) if self._transcript else self._on_hello(piece)

    def _on_hello(self, piece: bytes) -> WireEvent | None:
        _, flags, channel, link, node, incarnation, job_hash, _nonce = _HELLO.unpack(piece)
        peer = Identity(job_hash, node, incarnation)
        asked = Dial(link, channel, bool(flags & _RESUMING))
        if bool(flags & _DIALER) == (self._side == "dialer"):
            return self._refuse(
                Refusal.MALFORMED,
                f"expected the other role, found another {self._side} (a connection to itself?)",
            )
        if job_hash != self._me.job_hash:
            return self._refuse(
                Refusal.WRONG_JOB,
                f"expected job {self._me.job_hash.hex()[:8]}, found {job_hash.hex()[:8]}",
            )
        if self._dial is not None and asked != self._dial:
            return self._refuse(
                Refusal.MALFORMED, f"asked for {self._dial}, was answered for {asked}"
            )
        if refused := self._admit(peer, asked):
            return self._refuse(refused.reason, refused.why)
        if bool(flags & _ENCRYPTS) != self._encrypts:
            return self._refuse(Refusal.ENCRYPTION, self._only_one_encrypts(f"node {node}"))
        self._peer_signs_blocks = bool(flags & _SIGNS_BLOCKS)
        self._peer_has_buffers = bool(flags & _HAS_BUFFERS)
        if self._format.needs_block_mac and not self._peer_signs_blocks:
            return self._refuse(
                Refusal.UNSIGNED,
                f"expected blocks under MACs (`block_mac` is on), and node {node} sends none: "
                "install keepstep[secure] there",
            )
        self._opened = Opened(peer, asked)
        if self._side == "acceptor":
            self._mine = self._hello(asked)
            self._record(self._mine)
            self._transcript = piece + self._mine
        else:
            self._transcript = self._mine + piece
            self._record(self._proof("dialer"))
        self._await(GREETING.size, self._on_greeting)
        return None

    def _proof(self, side: Side) -> bytes:
        return _PROOF.pack(_IS_PROOF, self._derive(f"{side} proves"))

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(
            self._secret, f"keepstep {VERSION} {purpose}\0".encode() + self._transcript, "sha256"
        )

    def _on_proof(self, piece: bytes) -> WireEvent | None:
        assert self._opened is not None
        other: Side = "acceptor" if self._side == "dialer" else "dialer"
        if not hmac.compare_digest(piece, self._proof(other)):
            return self._refuse(
                Refusal.WRONG_SECRET,
                f"node {self._opened.peer.node} does not prove the job's secret",
            )
        if self._side == "acceptor":
            self._record(self._proof("acceptor"))
        self._in_seal = self._new_seal(other)
        self._out_seal = self._new_seal(self._side)
        if self._format.has_buffers and self._peer_has_buffers:
            self.beside = (self._new_seal(self._side, " beside"), self._new_seal(other, " beside"))
        if self._format.new_block_mac is not None and self._peer_signs_blocks:
            new = self._format.new_block_mac
            self._in_block_mac = new(self._derive(f"{other} sends blocks"))
            self._out_block_mac = new(self._derive(f"{self._side} sends blocks"))
        self._has_keys = True
        self._await(_HEAD_BYTES, self._on_head)
        return self._opened

    def _new_seal(self, side: Side, beside: str = "") -> Seal:
        """Of what that side sends; `beside`: of the records about it."""
        new_cipher = self._format.new_cipher
        if new_cipher is None:
            return Signed(self._format.new_mac(self._derive(f"{side} sends{beside}")))
        purpose = f"keepstep {VERSION} {side} encrypts{beside}".encode()
        return Encrypted(new_cipher(hkdf_sha256(self._secret, self._transcript, purpose)))

    @property
    def _encrypts(self) -> bool:
        return self._format.new_cipher is not None

    def _only_one_encrypts(self, who: str) -> str:
        here, there = ("on", "off") if self._encrypts else ("off", "on")
        return (
            f"`encrypt` is {here} on this node and {there} on {who}: set it on every node or on "
            "none"
        )

    def _on_refusal(self, piece: bytes) -> Refused:
        code = _REFUSAL.unpack(piece)[1]
        known = code in set(Refusal)
        reason = Refusal(code) if known else Refusal.MALFORMED
        why = "it said so" if known else f"for an unknown reason ({code})"
        if reason is Refusal.ENCRYPTION:
            why = self._only_one_encrypts("the other one")
        self._await(0, self._on_nothing)
        self.closed = Refused(reason, why, by_peer=True)
        return self.closed

    # frames

    def _frame(self, kind: int, body: bytes, number: int) -> bytes:
        sequence = self._sent
        head, closed = self._head_of(kind, len(body), number)
        return closed + self._out_seal.close(BODY, sequence, body, head)

    def _head_of(self, kind: int, length: int, number: int) -> tuple[bytes, bytes]:
        """As it is, and closed."""
        head = _HEAD.pack(kind, length, self._sent, number)
        closed = self._out_seal.close(HEAD, self._sent, head)
        self._sent += 1
        return head, closed

    def _on_head(self, piece: bytes) -> WireEvent | None:
        head = self._in_seal.open(HEAD, self._received, piece)
        if head is None:
            return self._refuse(
                Refusal.DAMAGED, f"the head of frame {self._received} fails its MAC"
            )
        kind, length, sequence, number = _HEAD.unpack(head)
        if sequence != self._received:
            return self._refuse(
                Refusal.OUT_OF_ORDER, f"expected frame {self._received}, found frame {sequence}"
            )
        longest = _LONGEST.get(kind)
        if longest is None:
            return self._refuse(Refusal.UNKNOWN_KIND, f"a frame of type {kind}")
        if length > longest:
            return self._refuse(
                Refusal.OVERSIZED, f"a frame of {length} bytes, at most {longest} allowed"
            )
        self._received += 1
        if not longest:
            return Signalled(_SIGNALS[kind], number)
        self._head = head
        self._kind = kind
        self._number = number
        self._of_frame = _HEAD_BYTES
        self._need = length + TAG_BYTES
        self._reader = self._on_body
        return None

    def _on_body(self, piece: bytes) -> WireEvent | None:
        body = self._in_seal.open(BODY, self._received - 1, piece, self._head)
        if body is None:
            return self._refuse(
                Refusal.DAMAGED, f"the body of frame {self._received - 1} fails its MAC"
            )
        self._of_frame = 0
        self._need = _HEAD_BYTES
        self._reader = self._on_head
        return self._on_message(body) if self._kind == _MESSAGE_FRAME else self._on_block(body)

    def _on_message(self, body: bytes) -> WireEvent:
        try:
            return Received(self._format.decode(body), self._number)
        except NotAMessage as error:
            # It came whole from somebody who knows the secret, perhaps of another release: the next
            # frame may be fine.
            return Refused(error.reason, str(error), number=self._number)

    def _on_block(self, body: bytes) -> WireEvent:
        if len(body) != _BLOCK.size:
            return self._refuse(
                Refusal.MALFORMED, f"a block header of {len(body)} bytes, expected {_BLOCK.size}"
            )
        job_hash, rank, part, step, epoch, offset, length, checksum, tag = _BLOCK.unpack(body)
        if job_hash != self._me.job_hash:
            return self._refuse(
                Refusal.WRONG_JOB,
                f"expected a block of job {self._me.job_hash.hex()[:8]}, found "
                f"{job_hash.hex()[:8]}",
            )
        if part not in _PARTS:
            return self._refuse(Refusal.MALFORMED, f"a block of part {part}")
        if not 0 < length <= MAX_BLOCK_BYTES or offset + length >= 1 << 63:
            return self._refuse(
                Refusal.OVERSIZED,
                f"a block of {length} bytes at {offset}, 1 to {MAX_BLOCK_BYTES} allowed",
            )
        span = Span(rank, Stamp(step, epoch), _PARTS[part], offset, length)
        self._block = BlockHeader(span, checksum, self._number, tag)
        if isinstance(self._in_seal, Encrypted):
            self.unsealing = self._in_seal.begin_arrival(self._received - 1, body)
        self._await(0, self._on_nothing)
        return BlockComing(self._block)

    # all of it

    def _await(self, need: int, reader: Callable[[bytes], WireEvent | None]) -> None:
        self._need = need
        self._reader = reader

    def _on_nothing(self, piece: bytes) -> None:
        raise AssertionError(f"{len(piece)} bytes where none were wanted")

    def _refuse(self, reason: Refusal, why: str) -> Refused:
        """Listen to nothing any more; before the handshake is done, say why."""
        if not self._has_keys:
            self._out += refusal_record(reason)
        self._await(0, self._on_nothing)
        self.closed = Refused(reason, why)
        return self.closed
