"""Seals: what a frame is closed with on its way, so that nobody changes, repeats or moves it, and,
where the links are encrypted, nobody reads it.

Each closes one direction of one connection, and adds `TAG_BYTES`. Where a frame stands is its
sequence number, and which of its parts it is: `HEAD`, `BODY`, `BLOCK`. No place is used twice, so
as a nonce it never repeats under one key.

The cipher itself is brought by whoever makes the connection (`coding/aes_gcm.py`).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from typing import Protocol

from keepstep.core.wire.macs import TAG_BYTES, Mac

HEAD, BODY, BLOCK = 0, 1, 2
_NONCE = struct.Struct("<IQ")  # part, sequence: the 12 bytes that AES-GCM takes


class Sealing(Protocol):
    """A block's bytes on their way out, which come piece by piece."""

    def update(self, data: memoryview, into: memoryview, /) -> None:
        """`into`: as long as `data`, and not the same memory."""

    def tag(self) -> bytes:
        """16 bytes, which go behind them. Once, at the end."""


class Unsealing(Protocol):
    """A block's bytes on their way in. What comes out is not to be believed before `proves`."""

    def update(self, data: memoryview, into: memoryview, /) -> None: ...

    def proves(self, tag: bytes, /) -> bool:
        """Whether that is the tag of what came. Once, at the end."""


class Cipher(Protocol):
    """Authenticated encryption under one key. `beside` is proven along, and does not go over."""

    def seal(self, nonce: bytes, data: bytes, beside: bytes, /) -> bytes: ...

    def unseal(self, nonce: bytes, sealed: bytes, beside: bytes, /) -> bytes | None:
        """None: it is not what was sealed."""

    def begin_sealing(self, nonce: bytes, beside: bytes, /) -> Sealing: ...

    def begin_unsealing(self, nonce: bytes, beside: bytes, /) -> Unsealing: ...


NewCipher = Callable[[bytes], Cipher]  # of a key of 32 bytes


class Seal(Protocol):
    """Of one direction."""

    def close(self, part: int, sequence: int, data: bytes, beside: bytes = b"") -> bytes:
        """What goes over for `data`, `TAG_BYTES` longer."""

    def open(self, part: int, sequence: int, sealed: bytes, beside: bytes = b"") -> bytes | None:
        """What was closed there; None when it was not."""


class Unopened:
    """Of a connection that is not open."""

    def close(self, part: int, sequence: int, data: bytes, beside: bytes = b"") -> bytes:
        """Never."""
        raise AssertionError("the connection is not open")

    open = close


class Signed:
    """Readable, with a MAC behind it. The place is not under the MAC: a head names it."""

    def __init__(self, mac: Mac) -> None:
        self._mac = mac

    def close(self, part: int, sequence: int, data: bytes, beside: bytes = b"") -> bytes:
        """See `Seal`."""
        return data + self._mac(beside + data)

    def open(self, part: int, sequence: int, sealed: bytes, beside: bytes = b"") -> bytes | None:
        """See `Seal`."""
        data = sealed[:-TAG_BYTES]
        is_right = hmac.compare_digest(self._mac(beside + data), sealed[-TAG_BYTES:])
        return data if is_right else None


class Encrypted:
    """Not readable, and closed for its place alone."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def close(self, part: int, sequence: int, data: bytes, beside: bytes = b"") -> bytes:
        """See `Seal`."""
        return self._cipher.seal(_NONCE.pack(part, sequence), data, beside)

    def open(self, part: int, sequence: int, sealed: bytes, beside: bytes = b"") -> bytes | None:
        """See `Seal`."""
        return self._cipher.unseal(_NONCE.pack(part, sequence), sealed, beside)

    def begin_block(self, sequence: int, header: bytes) -> Sealing:
        """The bytes of the block with that header, which goes over as frame `sequence`."""
        return self._cipher.begin_sealing(_NONCE.pack(BLOCK, sequence), header)

    def begin_arrival(self, sequence: int, header: bytes) -> Unsealing:
        """The same on the other side."""
        return self._cipher.begin_unsealing(_NONCE.pack(BLOCK, sequence), header)
