"""The MAC of a block against the whole of AES-GCM."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.gmac import NONCE_BYTES, gmac


@given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.lists(st.binary(), max_size=5),
)
def test_it_is_that_of_a_message_that_is_empty(
    key: bytes, number: int, pieces: list[bytes]
) -> None:
    mac = gmac(key)(number)
    for piece in pieces:
        mac.update(memoryview(piece))
    nonce = number.to_bytes(NONCE_BYTES, "little")
    assert mac.tag() == AESGCM(key).encrypt(nonce, b"", b"".join(pieces))
