"""Light: what crosses the wire in a run that is to be fast.

The state machines are the same, and so are their frames. Without `checks` only a number crosses for
each message, by which the other side finds it: JSON is a third of the cost of the wire. A light
run, for a thousand ranks and more, does without MACs too, so that nothing may flip in its
frames; and its links ask less often whether the other side is alive.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.connection import KEEPERS_FORMAT, WireFormat
from keepstep.core.wire.health import LinkTimeouts
from keepstep.core.wire.macs import NO_TAG, TAG_BYTES, BlockMac, Mac
from keepstep.model.messages.peers import KeeperMessage
from keepstep.model.units import S_NS
from keepstep.model.wire import Refusal

LIGHT_WATCH_NS = S_NS
KEPT_MESSAGES = 1 << 16  # more than are ever under way


def light_timeouts(dead_ns: int) -> LinkTimeouts:
    """Of a link that is dead after `dead_ns`. Nobody is asked more often than that: of a thousand
    idle links more would be heard than of all snapshots."""
    usual = LinkTimeouts.within(dead_ns)
    return replace(usual, ping_ns=dead_ns, silence_ns=5 * dead_ns // 4)


def wire_format(checks: bool, signs: bool) -> WireFormat:
    """One that all keepers of a network share."""
    found = KEEPERS_FORMAT if checks else _messages_by_number()
    if not signs:
        return replace(found, new_mac=_unsigned)
    return replace(found, new_block_mac=_block_mac)


class _SmallBlocks:
    """See `RunningMac`: HMAC-SHA256, quick enough for blocks of some kilobytes."""

    def __init__(self, key: bytes, number: int) -> None:
        self._hmac = hmac.new(key, number.to_bytes(8, "little"), "sha256")

    def update(self, data: memoryview) -> None:
        self._hmac.update(data)

    def tag(self) -> bytes:
        return self._hmac.digest()[:TAG_BYTES]


def _block_mac(key: bytes) -> BlockMac:
    return lambda number: _SmallBlocks(key, number)


def _messages_by_number() -> WireFormat:
    kept: dict[int, KeeperMessage] = {}
    encoded = 0

    def encode(message: KeeperMessage) -> bytes:
        nonlocal encoded
        kept[encoded % KEPT_MESSAGES] = message
        encoded += 1
        return (encoded - 1).to_bytes(8, "little")

    def decode(body: bytes) -> KeeperMessage:
        number = int.from_bytes(body, "little")
        if not encoded - KEPT_MESSAGES <= number < encoded:
            raise NotAMessage(Refusal.MALFORMED, f"message {number} is not kept")
        return kept[number % KEPT_MESSAGES]

    return WireFormat(encode=encode, decode=decode)


def _unsigned(key: bytes) -> Mac:
    return lambda data: NO_TAG
