"""What keepers exchange: every kind is documented, and the largest reports fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.wire.codec import MAX_ITEMS, NotAMessage
from keepstep.core.wire.messages import KINDS, decode, encode
from keepstep.model.messages.peers import InventoryReport, NodeReport, RanksReport
from keepstep.model.restore_sources import HeldSnapshot
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Refusal

PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_every_kind_is_in_the_protocol() -> None:
    text = PROTOCOL.read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []


def held(count: int) -> tuple[HeldSnapshot, ...]:
    return tuple(HeldSnapshot(rank, Stamp(1_000_000 + rank, 3)) for rank in range(count))


def test_a_full_inventory_fits() -> None:
    full = InventoryReport(1, held(MAX_ITEMS), ())
    assert decode(encode(full)) == full
    with pytest.raises(NotAMessage) as caught:
        encode(InventoryReport(1, held(MAX_ITEMS + 1), ()))
    assert caught.value.reason is Refusal.MALFORMED


def test_a_report_of_more_ranks_than_a_node_has_fits() -> None:
    stamps = tuple(Stamp(10**9 + step, 100) for step in range(8))
    ranks = tuple(
        RanksReport((10**6 + rank,), stamps, stamps[-1], 10**9, stamps[:4]) for rank in range(256)
    )
    report = NodeReport(1, 1, None, None, None, 1 << 40, 1 << 40, "", ranks)
    assert decode(encode(report)) == report
