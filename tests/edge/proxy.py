"""A way between two ends on loopback that can be cut, and that can change what goes by."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from keepstep.edge.net.tcp import Address
from keepstep.model.units import KIB


class Proxy:
    """Forwards to `target`. `alter` sees every piece on its way and may change it; None ends the
    connection there."""

    def __init__(self, target: Address) -> None:
        self.alter: Callable[[bytes], bytes | None] = lambda data: data
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
                for one, other in [(near, far), (far, near)]:
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(64 * KIB)) and (out := self.alter(data)) is not None:
                other.sendall(out)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

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
        self.hang_up()
