"""Compared state: what a word of `keepstep compare` names, and how it is opened.

    PATH              a slot's file, or a checkpoint's own directory in a store
    JOB[:RANK][@STEP] a rank's slot in memory; the newest unless a step is said
    STORE[@STEP]      a checkpoint of the store's newest run, or of the run whose directory is named

A name without a slash is a job when one of that name has memory. Goes out: a state that is readable
within `with`. A slot is locked meanwhile, so its rank writes into another one or skips a step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.cli.inspect import lock_slot
from keepstep.cli.job_choice import with_memory
from keepstep.config import resolve
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.slots import SlotRow, slot_rows
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store
from keepstep.errors import ConfigError, StoreError

if TYPE_CHECKING:  # torch takes a second, which no other command is to wait for
    from keepstep.edge.torch.comparison.saved import SavedState

OpenState = Callable[[], "AbstractContextManager[SavedState]"]

_NAMED = re.compile(r"(.+?)(?::(\d{1,9}))?(?:@(\d{1,12}))?", re.DOTALL)
_IN_STORE = re.compile(r"(.+?)(?:@(\d{1,12}))?", re.DOTALL)


def state_named(word: str, rank: int | None = None) -> OpenState:
    """The one state that is meant. `rank`: whose own values of a checkpoint count. Raises
    ConfigError, StoreError."""
    if Path(word).is_file():
        return lambda: _open_slot(Path(word))
    rows, step = _in_memory(word)
    if rows:
        row = _one(word, rows, step)
        return lambda: _open_slot(row.path)
    found = _IN_STORE.fullmatch(word)
    assert found is not None, "it matches everything"
    place, at = (word, None) if found[2] is None else (found[1], int(found[2]))
    store, checkpoints = _in_store(place)
    chosen = [m for m in checkpoints if at is None or m.step == at]
    if not chosen:
        steps = ", ".join(str(m.step) for m in checkpoints) or "none"
        raise ConfigError(f"{word}: expected one of the steps there ({steps})")
    return lambda: _open_checkpoint(store, chosen[0], rank)


def rank_named(word: str) -> int | None:
    """Whose state it is, where it is one rank's."""
    if Path(word).is_file():
        slot = Slot(MEMORY, Path(word))
        try:
            return slot.header().rank
        finally:
            slot.close()
    rows, step = _in_memory(word)
    return _one(word, rows, step).rank if rows else None


def history_named(word: str) -> list[list[OpenState]]:
    """All states there, the oldest first: of a job's memory for each rank its own. Raises
    ConfigError, StoreError."""
    rows, step = _in_memory(word)
    if step is not None or Path(word).is_file():
        raise ConfigError(f"{word}: expected a second state to compare with, or a whole history")
    if rows:
        ranks = sorted({row.rank for row in rows})
        return [[_opener(row) for row in rows if row.rank == rank] for rank in ranks]
    store, checkpoints = _in_store(word)
    return [[_checkpoint_opener(store, manifest) for manifest in reversed(checkpoints)]]


def _opener(row: SlotRow) -> OpenState:
    return lambda: _open_slot(row.path)


def _checkpoint_opener(store: Store, manifest: Manifest) -> OpenState:
    return lambda: _open_checkpoint(store, manifest, None)


# -- memory


def _in_memory(word: str) -> tuple[list[SlotRow], int | None]:
    """The sealed slots that are meant, the oldest first, and the step that is named. None where no
    job with memory has that name."""
    found = _NAMED.fullmatch(word)
    jobs = (
        [] if found is None or "/" in word else [j for j in with_memory(None) if j.name == found[1]]
    )
    if found is None or not jobs:
        return [], None
    rank, step = (None if part is None else int(part) for part in (found[2], found[3]))
    rows = [row for row in slot_rows(jobs[0].job_dir, Moment.now()) if row.state == "sealed"]
    rows = [row for row in rows if rank is None or row.rank == rank]
    if not rows:
        whose = "any rank" if rank is None else f"rank {rank}"
        raise ConfigError(f"{word}: expected a sealed slot of {whose}, found none on this node")
    return sorted(rows, key=lambda row: (row.epoch or 0, row.step or 0)), step


def _one(word: str, rows: list[SlotRow], step: int | None) -> SlotRow:
    ranks = sorted({row.rank for row in rows})
    if len(ranks) > 1:
        name = word.partition("@")[0]
        raise ConfigError(f"{word}: expected one rank, {name}:RANK, found ranks {ranks}")
    of_step = [row for row in rows if step is None or row.step == step]
    if not of_step:
        steps = ", ".join(str(row.step) for row in rows)
        raise ConfigError(f"{word}: expected one of the steps in memory ({steps})")
    return of_step[-1]


@contextmanager
def _open_slot(path: Path) -> Iterator[SavedState]:
    from keepstep.edge.torch.comparison.saved import slot_state

    try:
        slot = Slot(MEMORY, path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: expected the slot that was there, found none: its job has ended meanwhile"
        ) from error
    try:
        if not lock_slot(slot):
            raise ConfigError(f"{path}: expected a slot at rest, found one being written")
        try:
            payload = ProvenPayload(slot)
        except LookupError as error:
            raise ConfigError(str(error)) from error
        try:
            yield slot_state(payload)
        finally:
            payload.close()
    finally:
        slot.close()


# -- a store


def _in_store(place: str) -> tuple[Store, list[Manifest]]:
    """The store, and what is meant of it, the newest first."""
    secret = resolve(None, os.environ, default_job="any").secret
    signer = None if secret is None else Signer(secret)
    above, _, last = place.rstrip("/").rpartition("/")
    if last.startswith("step-"):
        store = Store(above or ".", signer=signer)
        found = [m for m in store.published() if m.name.directory == last]
        if not found:
            raise StoreError(f"{place}: expected a checkpoint, found none with a good manifest")
        return store, found
    store = Store(place, signer=signer)
    if store.is_nowhere():
        raise ConfigError(
            f"{place}: expected a slot, a job with memory or a store, found none of that name"
        )
    listing = store.follow().list_checkpoints()
    if not listing.checkpoints:
        why = "; ".join(listing.broken.values())
        raise StoreError(f"{place}: expected a checkpoint, found none{why and ': '}{why}")
    return store, list(listing.checkpoints)


@contextmanager
def _open_checkpoint(store: Store, manifest: Manifest, rank: int | None) -> Iterator[SavedState]:
    from keepstep.edge.torch.comparison.records import checkpoint_state

    yield checkpoint_state(store, manifest, rank)
