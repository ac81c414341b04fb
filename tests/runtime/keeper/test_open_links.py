"""Whether blocks have MACs, and links are encrypted, as the options say."""

from __future__ import annotations

import sys

import pytest

from keepstep.coding.aes_gcm import AesGcm
from keepstep.coding.gmac import gmac
from keepstep.core.wire.connection import KEEPERS_FORMAT
from keepstep.errors import KeeperError
from keepstep.runtime.keeper.open_links import wire_format


def test_the_option_says_whether_blocks_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire_format("off") == KEEPERS_FORMAT
    assert wire_format("auto").new_block_mac is gmac and not wire_format("auto").needs_block_mac
    assert wire_format("on").new_block_mac is gmac and wire_format("on").needs_block_mac
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert wire_format("auto").new_block_mac is None
    with pytest.raises(KeeperError, match=r"keepstep\[secure\]"):
        wire_format("on")


@pytest.mark.parametrize("block_mac", ["auto", "on", "off"])
def test_what_is_encrypted_is_so_whatever_blocks_have(
    block_mac: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wire_format(block_mac, encrypt=True).new_cipher is AesGcm
    assert wire_format(block_mac).new_cipher is None
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(KeeperError, match=r"^encrypt: expected .*keepstep\[secure\]"):
        wire_format(block_mac, encrypt=True)
