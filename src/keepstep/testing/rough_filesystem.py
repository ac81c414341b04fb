"""Rough filesystem: `rough://HOST:PORT/PATH`, a rough store (`rough_store.py`) as fsspec has it.

Comes in: what fsspec asks of a filesystem. Goes out: one request over a connection of its own for
each thing asked, and OSError where it is not answered. Asks nothing a second time: what a library
would hide by that is the drill's to show.
"""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from fsspec.spec import AbstractFileSystem

ASKER = "X-Asker"  # the process that asks
CREATE = "If-None-Match"
SOURCE = "X-Source"
TIMEOUT_S = 60.0  # as the libraries of real stores wait
ERRORS = {404: errno.ENOENT, 412: errno.EEXIST, 507: errno.ENOSPC}


class RoughFileSystem(AbstractFileSystem):
    """fsspec says what each method does. All raise OSError."""

    protocol: ClassVar[str] = "rough"
    root_marker = "/"

    def __init__(self, host: str, port: int, **options: Any) -> None:
        super().__init__(host=host, port=port, **options)
        self._host, self._port = host, port

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        if text.startswith(f"{cls.protocol}://"):
            text = urlsplit(text).path
        return text.rstrip("/") or cls.root_marker

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        parts = urlsplit(path)
        return {"host": parts.hostname, "port": parts.port}

    def unstrip_protocol(self, name: str) -> str:
        path = self._strip_protocol(name)
        return f"{self.protocol}://{self._host}:{self._port}{path}"

    def info(self, path: str, **options: Any) -> Any:
        return json.loads(self._ask("INFO", path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        entries = json.loads(self._ask("LIST", path))
        return entries if detail else [entry["name"] for entry in entries]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        first = start or 0
        assert first >= 0 and (end is None or end >= 0)
        if end is not None and end <= first:
            return b""
        last = "" if end is None else str(end - 1)
        return self._ask("GET", path, {"Range": f"bytes={first}-{last}"})

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._ask("PUT", path, {CREATE: "*"} if mode == "create" else {}, bytes(value))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._ask("COPY", path2, {SOURCE: quote(self._strip_protocol(path1))})

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A bucket has directories where something lies in them."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """See `makedirs`."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        assert mode == "wb", mode
        return _Upload(self, path)

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        """The answer's body."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        about = {ASKER: str(os.getpid()), "Content-Length": str(len(body)), **(headers or {})}
        try:
            connection.request(method, quote(self._strip_protocol(path)), body, about)
            answer = connection.getresponse()
            status, raw = answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionResetError(errno.ECONNRESET, f"half an answer: {error!r}") from error
        finally:
            connection.close()
        if status == 200:
            return raw
        code = ERRORS.get(status, errno.EIO)
        words = os.strerror(code) if status in ERRORS else f"the store answered {status}"
        raise OSError(code, words, path)


class _Upload(io.BytesIO):
    """An object being written; it is sent when it is closed."""

    def __init__(self, filesystem: RoughFileSystem, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path

    def close(self) -> None:
        if self.closed:
            return
        raw = self.getvalue()
        super().close()
        self._filesystem.pipe_file(self._path, raw)
