"""Knock: the first that crosses a connection between two keepers, before either side makes anything
for it: short, of one size, and under a key that only the job's keepers have.

    who is dialled   greeting, challenge (16 fresh random bytes)     } at once, neither waits
    who dials        greeting                                        } for the other
    who dials        MAC of the challenge

The key is drawn from the job's secret by HKDF (RFC 5869), for nothing else. A challenge is new for
each connection and forgotten with it, so that what was once right opens nothing again; a time would
need clocks that agree. What a stranger costs until then is a place at the door: a socket and two
short texts, no thread. What is right lets in to the handshake (`connection.py`), and proves no more
than that: who is there is said and proven there.

Comes in: bytes, never more than `wanted`. Goes out: bytes to send, and that it is right or what is
wrong. No socket, no clock.
"""

from __future__ import annotations

import hmac

from keepstep.core.wire.connection import MAGIC, VERSION, greeted, wrong_greeting
from keepstep.core.wire.macs import TAG_BYTES, hkdf_sha256
from keepstep.model.wire import Refusal, Refused

CHALLENGE_BYTES = 16

_GREETING = greeted(b"")
_OPENING_BYTES = len(_GREETING) + CHALLENGE_BYTES


def knock_key(secret: bytes) -> bytes:
    """Of all keepers that know this secret."""
    return hkdf_sha256(secret, MAGIC, f"keepstep {VERSION} knocks".encode())


def _answer(key: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, challenge, "sha256")[:TAG_BYTES]


class Knock:
    """As the side hears it that is dialled."""

    def __init__(self, key: bytes, challenge: bytes) -> None:
        """`challenge`: fresh random bytes."""
        assert len(challenge) == CHALLENGE_BYTES
        self._key, self._challenge = key, challenge
        self._heard = b""
        self._need = len(_GREETING)
        self.is_right = False

    @property
    def opening(self) -> bytes:
        """To be said at once."""
        return _GREETING + self._challenge

    @property
    def wanted(self) -> int:
        """How many bytes complete the next piece."""
        return self._need - len(self._heard)

    def receive(self, data: bytes) -> Refused | None:
        """Take at most `wanted` bytes; what is wrong with them, if anything is."""
        assert 0 < len(data) <= self.wanted
        self._heard += data
        if self.wanted:
            return None
        piece, self._heard = self._heard, b""
        if self._need == len(_GREETING):
            self._need = TAG_BYTES
            return wrong_greeting(piece)
        if not hmac.compare_digest(piece, _answer(self._key, self._challenge)):
            return Refused(Refusal.WRONG_SECRET, "the knock is not under this job's secret")
        self.is_right = True
        return None


class Knocker:
    """As the side does it that dials."""

    opening = _GREETING  # to be said at once

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._heard = b""

    @property
    def wanted(self) -> int:
        """How many bytes are missing until there is an answer."""
        return _OPENING_BYTES - len(self._heard)

    def receive(self, data: bytes) -> bytes | Refused | None:
        """Take at most `wanted` bytes; what to say to them, once all are there."""
        assert 0 < len(data) <= self.wanted
        had = len(self._heard)
        self._heard += data
        size = len(_GREETING)
        if had < size <= len(self._heard) and (wrong := wrong_greeting(self._heard[:size])):
            return wrong
        return None if self.wanted else _answer(self._key, self._heard[size:])
