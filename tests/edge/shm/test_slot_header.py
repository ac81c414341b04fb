"""Slot header: other releases read it, so its bytes are where they were."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from keepstep.edge.shm.slot_header import FORMAT, LACKING_FORMAT, MAGIC, page_of, parse_page
from keepstep.model.shares import Share
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp

# up to the payload's capacity, twice; behind it the replicas' group and digest
HEADER = struct.Struct("<8sIIQ16s16sIIQqqQQIQQQqdQQQQ")


def header(share: Share | None, lacking: bytes) -> SlotHeader:
    who = (bytes(range(16)), bytes(range(16, 32)), 3, 4, 5, Stamp(6, 7))
    sizes = (8000, 900, 4096, 2, 10, 11)
    return SlotHeader(SlotState.SEALED, 2, *who, *sizes, 12, 0.5, share, lacking, 13, 14)


@pytest.mark.parametrize(
    ("share", "lacking", "said"),
    [
        (None, b"", None),
        (None, b"\x02", (0, -1, 1)),
        (Share(99, 2), b"\x02\x01", (99, 2, 2)),
        (Share(99, 2), b"", (99, 2, 0)),
    ],
)
def test_what_is_where_in_a_page(
    share: Share | None, lacking: bytes, said: tuple[int, int, int] | None
) -> None:
    found = header(share, lacking)
    page = page_of(found, 8192)
    assert parse_page(page, Path("slot")) == found
    magic, form, state, *rest = HEADER.unpack_from(page)
    assert (magic, form) == (MAGIC, FORMAT if said is None else LACKING_FORMAT)
    assert state == SlotState.SEALED and rest[-5:] == [0.5, 8192, 8192, 13, 14]
    behind = page[HEADER.size : HEADER.size + 16 + len(lacking)]
    expected = bytes(16) if said is None else struct.pack("<QiI", *said) + lacking
    assert behind == expected
