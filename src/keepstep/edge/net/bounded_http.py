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
from socketserver import TCPServer, ThreadingMixIn
from typing import IO, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer, make_server

MAX_CONNECTIONS = 16
SILENCE_S = 10.0
MAX_LINE_BYTES = 65536


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

    def server_bind(self) -> None:
        """As WSGIServer's, which looks its host's name up: that may ask a name server."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

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


class _BoundedServer6(BoundedServer):
    address_family = socket.AF_INET6


class _Answer(ServerHandler):
    request_handler: WSGIRequestHandler  # whom it tells that it has ended

    def log_exception(self, exc_info: Any) -> None:
        """That a reader is gone, or takes nothing for a while, is its own affair."""
        if not issubclass(exc_info[0], OSError):
            super().log_exception(exc_info)


class _QuietHandler(WSGIRequestHandler):
    """An application finds both ends of the connection in its request: `REMOTE_PORT` and
    `LOCAL_ADDR`, beside what WSGI has."""

    timeout = SILENCE_S

    def get_environ(self) -> dict[str, Any]:
        ends = {
            "REMOTE_PORT": str(self.client_address[1]),
            "LOCAL_ADDR": str(self.request.getsockname()[0]),
        }
        return {**super().get_environ(), **ends}

    def handle(self) -> None:
        """One request, as WSGIRequestHandler does it, but for the errors that are told."""
        self.raw_requestline = self.rfile.readline(MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > MAX_LINE_BYTES:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
            return
        if not self.parse_request():
            return
        assert isinstance(self.server, BoundedServer)
        application = self.server.get_app()
        assert application is not None
        both = cast(IO[bytes], self.rfile), cast(IO[bytes], self.wfile)
        answer = _Answer(*both, self.get_stderr(), self.get_environ(), multithread=True)
        answer.request_handler = self
        answer.run(application)

    def parse_request(self) -> bool:
        assert isinstance(self.server, BoundedServer)
        self.server.has_asked(self.request)
        return super().parse_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no events of the job."""


def serve(application: Any, host: str, port: int) -> BoundedServer:
    """A server at that address (port 0 chooses one); `serve_forever` is the caller's to run. Raises
    OSError."""
    kind = _BoundedServer6 if ":" in host else BoundedServer
    server = make_server(host, port, application, kind, _QuietHandler)
    assert isinstance(server, BoundedServer)
    return server


def _hang_up(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
