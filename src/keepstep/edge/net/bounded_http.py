"""Bounded HTTP: a WSGI application served so that strangers cannot use up the process that does it.

Each request has a thread, of which there are few: when one more comes, the oldest connection that
has not asked anything is closed, so that silent ones cannot keep others out, nor push out who is
being answered. Whoever says nothing for a while is hung up on.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

MAX_CONNECTIONS = 16
SILENCE_S = 10.0


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves at most MAX_CONNECTIONS at once."""

    daemon_threads = True
    block_on_close = False
    # A burst of strangers is taken in at once and hung up on; in a short queue a reader would wait
    # for seconds behind them.
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._open: OrderedDict[socket.socket, bool] = OrderedDict()  # whether it has asked
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = False
            oldest = self._one_too_many()
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def has_asked(self, request: Any) -> None:
        """The first line of a question has come from there."""
        with self._lock:
            if request in self._open:
                self._open[request] = True

    def _one_too_many(self) -> socket.socket | None:
        if len(self._open) <= MAX_CONNECTIONS:
            return None
        silent = (request for request, has_asked in self._open.items() if not has_asked)
        oldest = next(silent, next(iter(self._open)))
        del self._open[oldest]
        return oldest

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the reader's own affair."""

    def close(self) -> None:
        """Take no more, and hang up on everybody."""
        self.shutdown()
        self.server_close()
        with self._lock:
            left = list(self._open)
        for request in left:
            _hang_up(request)


class _QuietHandler(WSGIRequestHandler):
    timeout = SILENCE_S

    def parse_request(self) -> bool:
        assert isinstance(self.server, BoundedServer)
        self.server.has_asked(self.request)
        return super().parse_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events of the job."""


def serve(application: Any, host: str, port: int) -> BoundedServer:
    """A server at that address (port 0 chooses one); `serve_forever` is the caller's to run. Raises
    OSError."""
    server = make_server(host, port, application, BoundedServer, _QuietHandler)
    assert isinstance(server, BoundedServer)
    return server


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
