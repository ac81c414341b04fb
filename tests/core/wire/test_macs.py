"""MACs of frames, and how keys are drawn."""

from __future__ import annotations

import hmac

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.macs import hkdf_sha256, hmac_sha256


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=300))
def test_a_mac_is_half_of_hmac_sha256(key: bytes, data: bytes) -> None:
    assert hmac_sha256(key)(data) == hmac.digest(key, data, "sha256")[:16]


@given(st.binary(min_size=1), st.binary(), st.binary())
def test_a_key_is_drawn_by_hkdf(secret: bytes, salt: bytes, purpose: bytes) -> None:
    expected = HKDF(algorithm=SHA256(), length=32, salt=salt, info=purpose).derive(secret)
    assert hkdf_sha256(secret, salt, purpose) == expected
