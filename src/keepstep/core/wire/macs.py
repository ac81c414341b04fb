"""MACs: what proves that bytes come from somebody who knows the job's secret, unaltered.

Frames carry half of an HMAC-SHA256 (RFC 2104). A block has millions of bytes, for which that is too
slow: its MAC is one that runs at memory speed, and its caller brings it (`coding/gmac.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Protocol

TAG_BYTES = 16
NO_TAG = bytes(TAG_BYTES)  # of a block without a MAC
_SHA256_BLOCK_BYTES = 64
_INNER_PAD = bytes(byte ^ 0x36 for byte in range(256))
_OUTER_PAD = bytes(byte ^ 0x5C for byte in range(256))

Mac = Callable[[bytes], bytes]


def hmac_sha256(key: bytes) -> Mac:
    """MACs of 16 bytes: the first half of HMAC-SHA256 under this key.

    As RFC 2104 has it, from two hashes that have taken the key already: `hmac.digest` takes it each
    time, which costs more than twice as much.
    """
    assert len(key) <= _SHA256_BLOCK_BYTES
    padded = key.ljust(_SHA256_BLOCK_BYTES, b"\0")
    inner = hashlib.sha256(padded.translate(_INNER_PAD))
    outer = hashlib.sha256(padded.translate(_OUTER_PAD))

    def tag(data: bytes) -> bytes:
        one = inner.copy()
        one.update(data)
        other = outer.copy()
        other.update(one.digest())
        return other.digest()[:TAG_BYTES]

    return tag


def hkdf_sha256(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes: HKDF (RFC 5869), whose output is no longer than one hash."""
    drawn = hmac.digest(salt, secret, "sha256")
    return hmac.digest(drawn, purpose + b"\1", "sha256")


class RunningMac(Protocol):
    """The MAC of bytes that come piece by piece."""

    def update(self, data: memoryview, /) -> None: ...

    def tag(self) -> bytes:
        """16 bytes. Once, at the end."""


# Begins the MAC of one block under a key; the number is never used twice under one.
BlockMac = Callable[[int], RunningMac]
NewBlockMac = Callable[[bytes], BlockMac]  # of a key of 32 bytes
