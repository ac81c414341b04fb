"""Link probe: one pair of nodes, measured over one connection, in both directions.

    who dials                          who listens
    token of the other, 32 letters ->
    8 bytes, so many times         ->  the same back           round trips
    size, so many bytes            ->  1 byte when all is there   bytes there
    size                           ->  so many bytes           bytes back
    8 bytes, so many times         ->  its wall clock, ns         how far its clock is ahead
    0                              ->  (ends)

Comes in: addresses, a deadline. Goes out: samples. Every word has a bound and every wait ends at
the deadline; who connects without the token is dropped. What is sent means nothing and is kept
nowhere.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.edge.net.tcp import TcpOptions, dial, listen
from keepstep.model.bounds import U63
from keepstep.model.messages.preflight import ClockGap
from keepstep.model.units import KIB, MIB, MS_NS, S_NS

TOKEN_LETTERS = 32
MOST_BYTES = 256 * MIB  # of one burst
CHUNK = bytes(256 * KIB)
_SIZE = struct.Struct("!BQ")
PING, THERE, BACK, END, CLOCK = range(5)
PINGS_A_SAMPLE = 8
CLOCK_READINGS = 16


@dataclass(frozen=True, slots=True)
class ProbeEffort:
    """How much is measured. `samples`: none measures the clock alone. `burst_s`: how long a burst
    is to last; `most_bytes`: its bound."""

    samples: int = 5
    burst_s: float = 0.05
    least_bytes: int = 128 * KIB
    most_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class LinkSamples:
    """Bytes a second to the other and from it, ns of the fastest round trip of each sample, how far
    the other's wall clock is ahead (None: it does not tell)."""

    there: tuple[int, ...]
    back: tuple[int, ...]
    round_trips: tuple[int, ...]
    clock: ClockGap | None


class ProbeDoor:
    """Where this node answers, from now on until it is closed."""

    def __init__(self, host: str, token: str, patience_s: float = 60.0) -> None:
        """patience_s: a connection on which nothing comes for so long is given up. Raises
        OSError."""
        self._token, self._patience_s = token.encode(), patience_s
        self._socket = listen((host, 0), TcpOptions())
        self.port = int(self._socket.getsockname()[1])
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5.0)

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ConnectionError, struct.error):
            peer.settimeout(self._patience_s)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hmac.compare_digest(_take(peer, TOKEN_LETTERS), self._token):
                while self._answer_one(peer):
                    pass

    def _answer_one(self, peer: socket.socket) -> bool:
        word, size = _SIZE.unpack(_take(peer, _SIZE.size))
        if word == PING:
            peer.sendall(_SIZE.pack(PING, size))
        elif word == THERE and size <= MOST_BYTES:
            _drop(peer, size)
            peer.sendall(b"!")
        elif word == BACK and size <= MOST_BYTES:
            _send(peer, size)
        elif word == CLOCK:
            peer.sendall(_SIZE.pack(CLOCK, time.time_ns()))
        else:
            return False
        return True


def probe(
    address: tuple[str, int], source_host: str, token: str, within_s: float, effort: ProbeEffort
) -> LinkSamples:
    """Measure the link to a door. Raises OSError, TimeoutError among them."""
    until_s = time.monotonic() + within_s
    with dial(address, source_host, TcpOptions(), within_s) as peer:
        peer.sendall(token.encode())

        def hurry() -> None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"not measured within {within_s:g} s")
            peer.settimeout(left_s)

        trips = [_round_trip_ns(peer, hurry) for _ in range(effort.samples)]
        speeds = {word: _bursts(peer, word, effort, hurry) for word in (THERE, BACK)}
        try:
            clock = _read_clock(peer, hurry)
            peer.sendall(_SIZE.pack(END, 0))
        except OSError:  # what was measured before is measured
            clock = None
        return LinkSamples(speeds[THERE], speeds[BACK], tuple(trips), clock)


def _round_trip_ns(peer: socket.socket, hurry: Callable[[], None]) -> int:
    """The fastest of some: what a busy scheduler adds is no property of the link."""
    best = 1 << 62
    for turn in range(PINGS_A_SAMPLE):
        hurry()
        begun_ns = time.perf_counter_ns()
        peer.sendall(_SIZE.pack(PING, turn))
        _take(peer, _SIZE.size)
        best = min(best, time.perf_counter_ns() - begun_ns)
    return max(1, best)


def _read_clock(peer: socket.socket, hurry: Callable[[], None]) -> ClockGap:
    """By the fastest of some round trips: the other's clock was read at some moment of it, so its
    middle is wrong by at most half of it (Cristian, 1989)."""
    best: ClockGap | None = None
    for _ in range(CLOCK_READINGS):
        hurry()
        begun_ns, here_ns = time.perf_counter_ns(), time.time_ns()  # what is between is counted
        peer.sendall(_SIZE.pack(CLOCK, 0))
        _, there_ns = _SIZE.unpack(_take(peer, _SIZE.size))
        half_ns = (time.perf_counter_ns() - begun_ns) // 2 + 1
        if best is None or half_ns < best.within_ns:
            best = ClockGap(min(there_ns, U63) - here_ns - half_ns, half_ns)
    assert best is not None
    return best


def _bursts(
    peer: socket.socket, word: int, effort: ProbeEffort, hurry: Callable[[], None]
) -> tuple[int, ...]:
    """Each as long as the one before says that `burst_s` takes; the first one only says so."""
    size, found = effort.least_bytes, []
    for _ in range(effort.samples + 1 if effort.samples else 0):
        hurry()
        begun_ns = time.perf_counter_ns()
        peer.sendall(_SIZE.pack(word, size))
        if word == THERE:
            _send(peer, size)
            _take(peer, 1)
        else:
            _drop(peer, size)
        took_ns = max(MS_NS // 1000, time.perf_counter_ns() - begun_ns)
        found.append(size * S_NS // took_ns)
        wanted = round(found[-1] * effort.burst_s)
        size = min(max(wanted, effort.least_bytes), effort.most_bytes, MOST_BYTES)
    return tuple(found[1:])


def _send(peer: socket.socket, size: int) -> None:
    while size > 0:
        peer.sendall(CHUNK[:size] if size < len(CHUNK) else CHUNK)
        size -= len(CHUNK)


def _drop(peer: socket.socket, size: int) -> None:
    buffer = bytearray(len(CHUNK))
    view = memoryview(buffer)
    while size > 0:
        got = peer.recv_into(view[: min(size, len(buffer))])
        if got == 0:
            raise ConnectionError("the other end has closed the connection")
        size -= got


def _take(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        data += more
    return data
