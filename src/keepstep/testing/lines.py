"""Lines: a file of JSON lines that only grows, told by one process and followed by others.

Each line goes out in one write, so writers do not interleave; a reader takes whole lines, once
each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from keepstep.edge.os.tail import Tail


def append(path: Path, data: dict[str, Any]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, (json.dumps(data) + "\n").encode())
    finally:
        os.close(fd)


class Lines:
    """What is added between two looks."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)

    def new(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._tail.new()]
