"""Keeper settings: what the keeper of a job directory was started with, for those who come later
with other settings.

A small file beside the keeper's lock. Only what a keeper and its persister act on is compared.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from keepstep.config import Settings
from keepstep.model.decoding import an_object, from_json

NAMES = (
    "store",
    "keep",
    "grace_s",
    "scrub_every_s",
    "redundancy",
    "link_dead_s",
    "interleave",
    "state_dir",
)


def write_keeper_settings(settings: Settings) -> None:
    """Whoever has the keeper's lock says what it acts on."""
    with contextlib.suppress(OSError):  # the disk is full: nobody will notice a difference
        _path(settings).write_text(json.dumps(_of(settings)))


def differences(settings: Settings) -> list[str]:
    """What the keeper was told otherwise, each with both values; nothing where it is not known."""
    try:
        found = an_object(from_json(_path(settings).read_text()))
    except (OSError, ValueError):
        return []
    wanted = _of(settings)
    return [
        f"{name}: expected {wanted[name]}, found {found[name]}"
        for name in NAMES
        if name in found and found[name] != wanted[name]
    ]


def _of(settings: Settings) -> dict[str, str]:
    return {name: str(getattr(settings, name)) for name in NAMES}


def _path(settings: Settings) -> Path:
    return settings.job_dir / "keeper.json"
