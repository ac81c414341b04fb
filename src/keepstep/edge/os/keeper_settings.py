"""Keeper settings: what the keeper of a job directory was started with, and by whom, for those who
come later with other settings.

A small file beside the keeper's lock. Only what a keeper and its persister act on is compared. Of
the secret stands there what tells whether it is the same, in a directory that only this user reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

from keepstep.config import Settings
from keepstep.edge.os.process_stat import process_stat
from keepstep.model.decoding import a_count, a_text, an_object, from_json

NAMES = (
    "store",
    "keep",
    "grace_s",
    "scrub_every_s",
    "redundancy",
    "link_dead_s",
    "link_streams",
    "interleave",
    "copy_dscp",
    "block_mac",
    "transport",
    "adopt",
    "state_dir",
)
TELLER = "told_by"


class Teller(NamedTuple):
    """A process that has started a keeper, and so told it its settings. `began`: when, in the
    kernel's ticks, since a process's number may be another's later."""

    rank: int
    pid: int
    began: int

    @staticmethod
    def here(rank: int) -> Teller:
        pid = os.getpid()
        return Teller(rank, pid, _began(pid) or 0)

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @staticmethod
    def from_text(text: str) -> Teller:
        """Raises ValueError, KeyError."""
        found = an_object(from_json(text))
        return Teller(a_count(found["rank"]), a_count(found["pid"]), a_count(found["began"]))

    @property
    def lives(self) -> bool:
        return _began(self.pid) == self.began


def write_keeper_settings(settings: Settings, teller: str = "") -> None:
    """Whoever has the keeper's lock says what it acts on. teller: the rank that has started it,
    as text; empty when that was none."""
    with (
        contextlib.suppress(OSError),  # the disk is full: nobody will notice a difference
        open(_path(settings), "w", opener=partial(os.open, mode=0o600)) as file,
    ):
        file.write(json.dumps({**_of(settings), TELLER: teller}))


def differences(settings: Settings) -> list[str]:
    """What the keeper was told otherwise, each with both values; nothing where it is not known."""
    found, wanted = _read(settings), _of(settings)
    names = [name for name in wanted if name in found and found[name] != wanted[name]]
    return [
        f"{name}: expected {wanted[name]}, found {found[name]}"
        if name != "secret"
        else "secret: expected one, found another or none"
        if settings.secret is not None
        else "secret: expected none, found one"
        for name in names
    ]


def teller_of(settings: Settings) -> Teller | None:
    """The rank that has started the keeper, if it lives; None too when nobody knows."""
    try:
        teller = Teller.from_text(a_text(_read(settings).get(TELLER)))
    except (ValueError, KeyError):
        return None
    return teller if teller.lives else None


def _read(settings: Settings) -> dict[str, object]:
    try:
        return an_object(from_json(_path(settings).read_text()))
    except (OSError, ValueError):
        return {}


def _of(settings: Settings) -> dict[str, str]:
    secret = "" if settings.secret is None else settings.secret
    told = hashlib.sha256(b"keepstep keeper settings" + secret.encode()).hexdigest()
    return {**{name: str(getattr(settings, name)) for name in NAMES}, "secret": told}


def _path(settings: Settings) -> Path:
    return settings.job_dir / "keeper.json"


def _began(pid: int) -> int | None:
    """None for a process that has ended, waited for or not."""
    stat = process_stat(pid)
    return None if stat is None or stat.has_ended else stat.began
