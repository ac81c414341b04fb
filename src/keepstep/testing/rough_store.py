"""Rough store: an object store of this machine that refuses, is slow, hangs or fails when told to.

Comes in: requests of `rough_filesystem.py` over TCP, and how to behave to them. Goes out: answers,
late, half or none; who met with trouble. What it stores lies as plain files below a directory, so
that whoever started it reads it as an ordinary store. It has what a bucket has: objects that appear
whole, a conditional put, directories only where something lies in them; and no renaming.

Invariant: an object is there whole or not at all, however its request ends.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from keepstep.edge.store.store import Store
from keepstep.errors import DamageError
from keepstep.model.units import MS_NS, S_NS
from keepstep.testing.rough_filesystem import ASKER, CREATE, SOURCE, RoughFileSystem

# refuses: connections. slow: every answer waits. hangs: accepts, and answers when it heals. flaky:
# some requests fail. fails: all do. stops: the process that asks is stopped, once.
Behaviour = Literal["refuses", "slow", "hangs", "flaky", "fails", "stops"]
# What becomes of a request. lost: it is done, and the answer never comes; torn: half of it does.
Fate = Literal["done", "failed", "cut", "lost", "torn"]

BEHAVIOURS: Mapping[str, Behaviour] = {
    "store-refuses": "refuses",
    "store-slow": "slow",
    "store-hangs": "hangs",
    "store-flaky": "flaky",
}
BUCKET = "/checkpoints"  # the URL's path
INCOMING = ".incoming"  # what is not whole yet; nobody is shown it
SLOW_NS = 150 * MS_NS
# A checkpoint takes some 25 requests: few get through, and each of them is the one that fails.
FLAKY_RATIO = 0.1
FLAKY: tuple[Fate, ...] = ("failed", "cut", "lost", "torn")


class RoughStore:
    """Serves `directory` until it is closed; smooth at first. `host`: the address it listens at.
    `seed`: of the requests that fail while it is flaky."""

    def __init__(self, directory: Path, host: str = "127.0.0.1", seed: int = 0) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        self._behaviour: tuple[Behaviour, tuple[str, ...]] | None = None
        self._is_once = False  # the next request ends it
        self._healed = threading.Event()
        self._met: list[tuple[int, str]] = []
        # Bound and never listening: nobody else gets the port while connections are refused.
        self._seat = socket.socket()
        self._seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._seat.bind((host, 0))
        self._address: tuple[str, int] = (host, self._seat.getsockname()[1])
        self._server: _StoreServer | None = None
        self._listen()

    def __enter__(self) -> RoughStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """As `--store` takes it, in a process that has the variables of `environ`."""
        host, port = self._address
        return f"{RoughFileSystem.protocol}://{host}:{port}{BUCKET}"

    def environ(self, room: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables with which a process finds the filesystem of `url`, as it would that of an
        installed package; what it takes is written below `room`."""
        package = room / "rough-filesystem"
        entry = package / "rough-1.dist-info"
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: rough\nVersion: 1\n")
        found_at = f"{RoughFileSystem.__module__}:{RoughFileSystem.__name__}"
        (entry / "entry_points.txt").write_text(
            f"[fsspec.specs]\n{RoughFileSystem.protocol} = {found_at}\n"
        )
        paths = [str(package), inherited.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    # -- how it behaves

    def behave(self, how: Behaviour, *about: str, once: bool = False) -> None:
        """To the requests with all of `about` in them (a method and a path: `PUT
        /checkpoints/...`), until it heals; to all connections when it refuses. `once`: to the first
        of them alone, as it is anyway when it stops who asks."""
        with self._lock:
            self._behaviour, self._is_once = (how, about), once or how == "stops"
            self._healed.clear()
        if how == "refuses":
            self._deafen()

    def heal(self) -> None:
        """Nothing is wrong any more; who waits is answered. Raises OSError when it cannot listen
        again."""
        with self._lock:
            self._behaviour = None
            self._healed.set()
        if self._server is None:
            self._listen()

    def met(self) -> list[tuple[int, str]]:
        """The requests that met with trouble so far: whose (process), and what. Refused ones never
        come here."""
        with self._lock:
            return list(self._met)

    @contextmanager
    def still(self) -> Iterator[Path]:
        """Where everything lies; nothing in it changes meanwhile."""
        with self._disk:
            yield self.directory

    def close(self) -> None:
        """Nobody is answered any more."""
        with self._lock:
            self._behaviour = "refuses", ()
            self._healed.set()
        self._deafen()
        self._seat.close()

    def _listen(self) -> None:
        self._server = _StoreServer(self._address, self)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _deafen(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    # -- requests

    def meet(self, pid: int, what: str) -> Fate:
        """Let a request meet with what is wrong; what is to become of it then."""
        with self._lock:
            how, about = self._behaviour or ("", ())
            if not how or not all(part in what for part in about):
                return "done"
            fate: Fate = "done"
            if how == "flaky" and self._rng.random() < FLAKY_RATIO:
                fate = self._rng.choice(FLAKY)
            if how == "flaky" and fate == "done":
                return fate
            self._met.append((pid, what))
            if self._is_once:
                self._behaviour = None
        if how == "stops":
            os.kill(pid, signal.SIGSTOP)
        if how in ("slow", "hangs"):
            self._healed.wait(SLOW_NS / S_NS if how == "slow" else None)
            with self._lock:  # it was closed meanwhile
                how = "refuses" if self._behaviour == ("refuses", ()) else how
        return {"fails": "failed", "refuses": "cut"}.get(how, fate)  # type: ignore[return-value]

    def _place(self, path: str) -> Path:
        """Raises FileNotFoundError for what is not in the bucket."""
        below = path.removeprefix(BUCKET).strip("/")
        if not f"{path}/".startswith(f"{BUCKET}/") or {"..", INCOMING} & set(below.split("/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.directory / below

    def info(self, path: str) -> dict[str, Any]:
        """Of an object or a directory. Raises FileNotFoundError."""
        place = self._place(path)
        if place.is_dir():
            return {"name": path, "type": "directory", "size": 0}
        return {"name": path, "type": "file", "size": place.stat().st_size}

    def list(self, path: str) -> list[dict[str, Any]]:
        """What is in a directory; an object is all that is in itself. Raises FileNotFoundError."""
        place = self._place(path)
        if not place.is_dir():
            return [self.info(path)]
        names = sorted(entry.name for entry in place.iterdir() if entry.name != INCOMING)
        return [self.info(f"{path.rstrip('/')}/{name}") for name in names]

    def get(self, path: str, first: int, last: int | None) -> bytes:
        """The bytes from `first` to `last`, both included. Raises OSError."""
        with open(self._place(path), "rb") as file:
            file.seek(first)
            return file.read() if last is None else file.read(last + 1 - first)

    def put(self, path: str, raw: bytes, creates: bool) -> None:
        """`creates`: in place of nothing. Raises OSError, FileExistsError."""
        place = self._place(path)
        aside = self.directory / INCOMING / uuid.uuid4().hex
        aside.parent.mkdir(exist_ok=True)
        try:
            aside.write_bytes(raw)
            place.parent.mkdir(parents=True, exist_ok=True)
            if creates:
                os.link(aside, place)
            else:
                os.replace(aside, place)
        finally:
            aside.unlink(missing_ok=True)

    def copy(self, source: str, path: str) -> None:
        """In place of what is there. Raises OSError."""
        self.put(path, self.get(source, 0, None), creates=False)

    def delete(self, path: str) -> None:
        """What is not there is fine. Raises OSError."""
        place = self._place(path)
        if not place.is_dir():
            place.unlink(missing_ok=True)
        with suppress(OSError):  # the first that is not empty
            while place.parent != self.directory:
                place = place.parent
                place.rmdir()


class _StoreServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # who hangs does so for longer
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], store: RoughStore) -> None:
        self.store = store
        super().__init__(address, _StoreRequest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked is gone: it was killed, and that is what drills are for."""


class _StoreRequest(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: a connection each."""

    server: _StoreServer

    def do_INFO(self) -> None:
        self._answer(lambda path: _json(self.server.store.info(path)))

    def do_LIST(self) -> None:
        self._answer(lambda path: _json(self.server.store.list(path)))

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        first, last = found.groups() if found else ("0", "")
        self._answer(
            lambda path: self.server.store.get(path, int(first), int(last) if last else None)
        )

    def do_PUT(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if len(raw) < int(self.headers["Content-Length"]):
            return  # its writer is gone in the middle
        self._answer(partial(self.server.store.put, raw=raw, creates=CREATE in self.headers))

    def do_DELETE(self) -> None:
        self._answer(self.server.store.delete)

    def do_COPY(self) -> None:
        self._answer(partial(self.server.store.copy, unquote(self.headers[SOURCE])))

    def _answer(self, do: Callable[[str], bytes | None]) -> None:
        path = unquote(urlsplit(self.path).path)
        store = self.server.store
        fate = store.meet(int(self.headers.get(ASKER, "0")), f"{self.command} {path}")
        if fate == "cut":
            return
        if fate == "failed":
            self._send(503, b"")
            return
        try:
            with store.still():
                status, body = 200, do(path) or b""
        except OSError as error:
            status, body = STATUS.get(error.errno or 0, 500), b""
        if fate != "lost":
            self._send(status, body, torn=fate == "torn")

    def _send(self, status: int, body: bytes, torn: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + torn))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if torn else body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def half_checkpoints(directory: Path) -> list[str]:
    """Of all checkpoints that a job would take from that store, what is wrong with those that are
    not whole. Raises StoreError."""
    store = Store(directory).follow()
    listing = store.list_checkpoints()
    wrong = [listing.broken[step] for step in sorted(listing.damaged)]
    for manifest in store.published():
        try:
            store.verify(manifest.name)
        except DamageError as error:
            wrong.append(str(error))
    return wrong


# What an error of the disk is in HTTP.
STATUS = {
    **{errno.ENOENT: 404, errno.ENOTDIR: 404, errno.EISDIR: 404},
    **{errno.EEXIST: 412, errno.ENOSPC: 507, errno.EDQUOT: 507},
}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
