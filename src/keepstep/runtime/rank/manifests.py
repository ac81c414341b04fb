"""Manifests: a layout as it is written into a slot, with the blocks that replicas may share.

Comes in: the layout of a state, and which blocks of its payload stand still between updates. Goes
out: JSON, and back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from keepstep.edge.shm.slot_header import MOST_BLOCKS
from keepstep.model.decoding import a_count, a_list, an_object, decoding, from_json
from keepstep.model.layout import Layout
from keepstep.model.shares import runs_of


@dataclass(frozen=True)
class SlotManifest:
    """`still`: blocks that may be shared; None where nobody shares."""

    layout: Layout
    still: frozenset[int] | None
    layout_hash: str
    text: bytes


class SlotManifests:
    """One rank's. It rarely changes, and writing it out costs as much as a gather."""

    def __init__(self) -> None:
        self._newest: SlotManifest | None = None

    def of(self, layout: Layout, still: frozenset[int] | None) -> SlotManifest:
        known = self._newest
        if known is None or known.layout != layout or known.still != still:
            plain = layout.to_json()
            if still is not None:
                plain["still"] = runs_of(still)
            text = json.dumps(plain, separators=(",", ":")).encode()
            known = self._newest = SlotManifest(layout, still, layout.hash(), text)
        return known


def still_in(text: bytes, where: str) -> frozenset[int]:
    """The blocks that a manifest says may be shared. Raises DamageError, naming `where` it is."""
    with decoding(f"{where}: blocks"):
        found: set[int] = set()
        for run in map(a_list, a_list(an_object(from_json(text)).get("still", []))):
            first, count = map(a_count, run)
            if first + count > MOST_BLOCKS:
                raise ValueError(f"expected at most {MOST_BLOCKS} blocks, found {first + count}")
            found.update(range(first, first + count))
    return frozenset(found)
