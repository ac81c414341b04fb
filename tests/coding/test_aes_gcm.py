"""AES-GCM piece by piece against the whole of it."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from keepstep.coding.aes_gcm import AesGcm

KEYS = st.binary(min_size=32, max_size=32)
NONCES = st.binary(min_size=12, max_size=12)
PIECES = st.lists(st.binary(min_size=1, max_size=100), max_size=5)


def crossed(pieces: list[bytes], update: object) -> bytes:
    out = b""
    for piece in pieces:
        into = bytearray(len(piece))
        update(memoryview(piece), memoryview(into))  # type: ignore[operator]
        out += into
    return out


@given(KEYS, NONCES, st.binary(), PIECES)
def test_pieces_are_sealed_as_the_whole_is(
    key: bytes, nonce: bytes, beside: bytes, pieces: list[bytes]
) -> None:
    expected = AESGCM(key).encrypt(nonce, b"".join(pieces), beside)
    cipher = AesGcm(key)
    assert cipher.seal(nonce, b"".join(pieces), beside) == expected
    sealing = cipher.begin_sealing(nonce, beside)
    assert crossed(pieces, sealing.update) + sealing.tag() == expected


@given(KEYS, NONCES, st.binary(), PIECES, st.lists(st.integers(1, 50)))
def test_what_was_sealed_comes_back_however_it_is_cut(
    key: bytes, nonce: bytes, beside: bytes, pieces: list[bytes], sizes: list[int]
) -> None:
    cipher, data = AesGcm(key), b"".join(pieces)
    sealed = cipher.seal(nonce, data, beside)
    assert cipher.unseal(nonce, sealed, beside) == data
    body, at, cut = sealed[:-16], 0, []
    for size in [*sizes, len(body) + 1]:
        cut.append(body[at : at + size])
        at += size
    unsealing = cipher.begin_unsealing(nonce, beside)
    assert crossed([piece for piece in cut if piece], unsealing.update) == data
    assert unsealing.proves(sealed[-16:])


@given(KEYS, NONCES, st.binary(min_size=1), st.binary(max_size=99), st.data())
def test_a_bit_that_changes_anywhere_is_found(
    key: bytes, nonce: bytes, beside: bytes, data: bytes, draw: st.DataObject
) -> None:
    cipher = AesGcm(key)
    parts = [bytearray(nonce), bytearray(cipher.seal(nonce, data, beside)), bytearray(beside)]
    part = draw.draw(st.sampled_from(parts))
    part[draw.draw(st.integers(0, len(part) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    changed_nonce, sealed, changed_beside = map(bytes, parts)
    assert cipher.unseal(changed_nonce, sealed, changed_beside) is None
    unsealing = cipher.begin_unsealing(changed_nonce, changed_beside)
    if sealed[:-16]:
        crossed([sealed[:-16]], unsealing.update)
    assert not unsealing.proves(sealed[-16:])
