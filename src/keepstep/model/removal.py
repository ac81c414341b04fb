"""Removal: who may remove from a store, as a record there says. `core/recovery/removal_lease.py`
decides, `edge/store/removal_records.py` writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RemovalRecord:
    """Who may remove, in which epoch it leads; not `is_held`: it has given that back. `holder`: one
    life of a persister."""

    number: int
    epoch: int
    holder: str
    is_held: bool
