"""A rough store: a directory that fails, hangs or stops its user where a test wants it.

`rough://<directory>` is a file system of fsspec's, in every process whose environment `environ`
gave: an installed package could bring one just so. What it does is in a file that the test writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

SAYS, ROOT = "ROUGH_STORE", Path(__file__).parents[2]


class RoughFileSystem(LocalFileSystem):  # type: ignore[misc]
    """See above."""

    protocol = "rough"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = os.fspath(path) if not isinstance(path, list) else path
        if isinstance(text, list):
            return [cls._strip_protocol(each) for each in text]
        return LocalFileSystem._strip_protocol(text.removeprefix("rough://"))

    def ls(self, path: Any, *args: Any, **options: Any) -> Any:
        _meet(f"ls {path}")
        return super().ls(path, *args, **options)

    def info(self, path: Any, **options: Any) -> Any:
        _meet(f"info {path}")
        return super().info(path, **options)

    def _open(self, path: Any, mode: str = "rb", *args: Any, **options: Any) -> Any:
        _meet(f"open-{mode} {path}")
        return super()._open(path, mode, *args, **options)


def _meet(what: str) -> None:
    """Do to who asks for that what the test has said."""
    says = Path(os.environ[SAYS])
    try:
        how, _, about = says.read_text().partition(":")
    except FileNotFoundError:
        return
    if about not in what:
        return
    with open(f"{says}.met", "a", encoding="utf-8") as met:
        met.write(f"{os.getpid()} {what}\n")
    if how == "fails":
        raise OSError(errno.ETIMEDOUT, "the store did not answer in time")
    if how == "hangs":
        with open(says) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    if how == "stops":
        says.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


class Roughness:
    """How the store below `room` behaves; smooth at first."""

    def __init__(self, room: Path) -> None:
        self.url = f"rough://{room / 'store'}"
        self.directory = room / "store"
        self._says, self._entry = room / "rough", room / "rough-1.dist-info"
        self._entry.mkdir()
        (self._entry / "METADATA").write_text("Metadata-Version: 2.1\nName: rough\nVersion: 1\n")
        (self._entry / "entry_points.txt").write_text(
            f"[fsspec.specs]\nrough = {__name__}:{RoughFileSystem.__name__}\n"
        )
        self.environ = {SAYS: str(self._says), "PYTHONPATH": f"{room}:{ROOT}"}
        self._held: Any = None

    def say(self, how: str, about: str) -> None:
        """how: `fails`, `hangs` until it is smooth, or `stops` the process that asks, once. about:
        a part of the operation and its path."""
        fresh = self._says.with_suffix(".new")
        fresh.write_text(f"{how}:{about}")
        if how == "hangs":
            self._held = open(fresh)  # noqa: SIM115
            fcntl.flock(self._held, fcntl.LOCK_EX)
        os.replace(fresh, self._says)

    def smooth(self) -> None:
        """Nothing is wrong any more; who hangs goes on."""
        self._says.unlink(missing_ok=True)
        if self._held is not None:
            self._held.close()
            self._held = None

    def met(self) -> list[tuple[int, str]]:
        """Who met with it, and over what."""
        path = Path(f"{self._says}.met")
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), what) for pid, _, what in (line.partition(" ") for line in lines)]
