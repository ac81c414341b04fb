"""A way between two ends on loopback that can be cut, and that can change what goes by."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from keepstep.model.units import KIB
from keepstep.model.wire import Address


class Proxy:
    """Forwards to `target`. `alter` sees every piece on its way and may change it; None ends the
    connection there. What goes to the target waits while `flows` is not set."""

    def __init__(self, target: Address) -> None:
        self.alter: Callable[[bytes], bytes | None] = lambda data: data
        self.flows = threading.Event()
        self.flows.set()
        self._kept: set[socket.socket] = set()  # not closed with their other half
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # nobody listens there at this moment
                    near.close()
                    continue
                self._socks.extend((near, far))
                for one, other, inwards in [(near, far, True), (far, near, False)]:
                    threading.Thread(
                        target=self._pump, args=(one, other, inwards), daemon=True
                    ).start()

    def _pump(self, one: socket.socket, other: socket.socket, inwards: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(64 * KIB)) and (out := self.alter(data)) is not None:
                if inwards:
                    self.flows.wait()
                other.sendall(out)
        for sock in (one, other):
            if sock not in self._kept:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def halve(self) -> None:
        """Whoever has dialled loses its connections; the target is not told."""
        pairs = list(zip(self._socks[::2], self._socks[1::2], strict=True))
        self._kept.update(far for _, far in pairs)
        for near, _ in pairs:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Cut what goes through; more may come."""
        while self._socks:
            sock = self._socks.pop()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flows.set()
        self.hang_up()
