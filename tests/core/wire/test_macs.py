"""MACs of frames."""

from __future__ import annotations

import hmac

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.macs import hmac_sha256


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=300))
def test_a_mac_is_half_of_hmac_sha256(key: bytes, data: bytes) -> None:
    assert hmac_sha256(key)(data) == hmac.digest(key, data, "sha256")[:16]
