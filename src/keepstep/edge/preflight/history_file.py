"""History file: one small text in the state directory, replaced as a whole."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

NAME = "preflight.json"
MOST_BYTES = 1 << 20


def read_history(state_dir: Path) -> bytes:
    """What is there; nothing where there is none or it cannot be read."""
    try:
        with open(state_dir / NAME, "rb") as file:
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
        os.replace(path, state_dir / NAME)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise
