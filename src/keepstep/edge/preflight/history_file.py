"""History file: one small text in the state directory, replaced as a whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from keepstep.edge.os.own_file import read_regular

NAME = "preflight.json"
MOST_BYTES = 1 << 20


def history_path(state_dir: Path) -> Path:
    return state_dir / NAME


def read_history(state_dir: Path) -> bytes:
    """What is there; nothing where there is none, it cannot be read or is not this user's: others
    may write to a shared state directory."""
    try:
        with open(read_regular(history_path(state_dir), os.geteuid()), "rb") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return b""


def write_history(state_dir: Path, text: bytes) -> None:
    """Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    fd, path = tempfile.mkstemp(prefix=f".{NAME}-", dir=state_dir)
    try:
        with open(fd, "wb") as file:
            file.write(text)
        os.replace(path, history_path(state_dir))
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise
