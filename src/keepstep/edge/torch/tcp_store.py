"""Embedded KV: `ports.KV` over a TCPStore that is hosted by one of the agents that use it.

Moves keys and values. The one on whose machine the endpoint lies hosts the store, unless somebody
does already. When it is lost so is every key: its successor, or whoever's machine has the name
then, hosts the next store, empty, and the agents say again what they know
(`runtime/agent/meeting.py`). Nothing is written to a disk, and nothing is secret from who can reach
the endpoint.

What torch's TCPStore does was tried out (2.13). An operation that waits blocks every other one of
the same client: each thread has a client of its own (`edge/net/kv_client.py`). A wait that runs out
prints to stderr: waits are long and end by a key. A wait for no keys never ends. A lost connection
is an error at once, but a machine that vanishes without a word blocks whoever asks it: only threads
ask, and the agent's loop never does. Both ends of a new connection look up each other's name, and
the store answers nobody meanwhile: with a bad name server that takes seconds, so connections are
used again.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import DistError, DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from keepstep.edge.net.kv_client import GivenUp, open_kv
from keepstep.edge.os.loop import Loop
from keepstep.edge.torch.first_line import first_line
from keepstep.errors import MeetingError
from keepstep.model.units import S_NS
from keepstep.ports import KV, Timer

MEET_WITHIN_S = 60.0
TELL_AFTER_S = 10.0  # nodes that are started together are here by then
ANOTHER_WITHIN_S = 10.0  # it has been met already
ANOTHER_TRIES = 3  # while it answers: a name server that does not may take longer than that
RETRY_S = 0.2
LONG_S = 3600.0  # a wait that runs out is only begun again
VACANT = ""

Endpoint = tuple[str, int]
T = TypeVar("T")


class TcpStoreClient:
    """See `BlockingClient`. `prefix` keeps the jobs of one store apart; `hosted` when this process
    is the host, for as long as it keeps this."""

    slice_s = LONG_S

    def __init__(
        self, endpoint: Endpoint, prefix: str, store: TCPStore, hosted: bool = False
    ) -> None:
        self._endpoint, self._prefix, self._store, self.hosted = endpoint, prefix, store, hosted

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        assert value and expected != value
        before = VACANT if expected is None else expected
        with self._reached():
            swapped = self._store.compare_set(
                self._prefix + key,
                before.encode("utf-8", "surrogateescape"),  # type: ignore[arg-type]
                value,
            )
            now = swapped.decode("utf-8", "surrogateescape")
        # it answers with what was expected when nothing is there
        return None if now == before else now

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        there, now = self.read([guard[0], key])
        return self.swap(key, expected, value) if there == guard[1] else now

    def read(self, keys: Sequence[str]) -> list[str | None]:
        with self._reached():
            return [
                self._get(key) if self._store.check([self._prefix + key]) else None for key in keys
            ]

    def wait(self, keys: Sequence[str], within_s: float | None) -> list[str] | None:
        with self._reached():
            while True:
                try:
                    self._store.wait(
                        [self._prefix + key for key in keys],
                        timedelta(seconds=LONG_S if within_s is None else within_s),
                    )
                except DistStoreError:
                    if within_s is not None:
                        return None
                else:
                    return [self._get(key) for key in keys]

    def another(self) -> TcpStoreClient:
        why = "it refuses connections"
        for _ in range(ANOTHER_TRIES):
            if not _answers(self._endpoint):  # torch would try for as long as it may
                break
            try:
                store = join_store(self._endpoint, ANOTHER_WITHIN_S)
            except DistError as error:
                why = first_line(error)
            else:
                return TcpStoreClient(self._endpoint, self._prefix, store)
        raise MeetingError(f"the meeting point {in_words(self._endpoint)} is gone ({why})")

    def _get(self, key: str) -> str:
        return self._store.get(self._prefix + key).decode("utf-8", "surrogateescape")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise MeetingError(
                f"the meeting point {in_words(self._endpoint)} is gone ({first_line(error)})"
            ) from error


def open_embedded(
    loop: Loop,
    endpoint: Endpoint,
    prefix: str,
    opened: Callable[[KV], None],
    failed: Callable[[str], None],
    lost: Callable[[str], None],
    within_s: float = MEET_WITHIN_S,
    tell: Callable[[str], None] = lambda _: None,
) -> Timer:
    """See `ports.OpenKV`: the store at the endpoint, hosted here from now on if nobody did and this
    is its machine. It fails when there is none within `within_s` seconds. The loop calls `tell`
    once where it is waited for: torch waits for an answer as long as who has taken the connection
    keeps it, and says nothing."""
    why = (
        f"waiting for the meeting point at {in_words(endpoint)}: nothing has answered there for "
        f"{TELL_AFTER_S:g} s; look whether an agent of this job, or a TCPStore, has that port"
    )
    telling = loop.after(round(TELL_AFTER_S * S_NS), lambda: tell(why))

    def now(then: Callable[[T], None], what: T) -> None:
        telling.cancel()
        then(what)

    opening = open_kv(
        loop,
        lambda given_up: meet_embedded(endpoint, prefix, within_s, given_up),
        partial(now, opened),
        partial(now, failed),
        lost,
    )
    return _Opening(telling, opening)


class _Opening:
    """See `ports.Timer`: all of these together."""

    def __init__(self, *timers: Timer) -> None:
        self._timers = timers

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()


def meet_embedded(
    endpoint: Endpoint,
    prefix: str,
    within_s: float = MEET_WITHIN_S,
    given_up: GivenUp = lambda: False,
) -> TcpStoreClient:
    """The same for a thread, which it blocks. Raises MeetingError."""
    local = is_local(endpoint[0])
    deadline = time.monotonic() + within_s
    while not given_up():
        try:
            if _answers(endpoint):
                return TcpStoreClient(
                    endpoint, prefix, join_store(endpoint, deadline - time.monotonic())
                )
            if local and (store := _host(endpoint)):
                return TcpStoreClient(endpoint, prefix, store, hosted=True)
        except DistError as error:
            raise MeetingError(
                f"--rdzv-endpoint: expected a TCPStore at {in_words(endpoint)}, found "
                f"{first_line(error)}"
            ) from error
        if time.monotonic() > deadline:
            raise MeetingError(
                "--rdzv-endpoint: expected the other nodes' meeting point at "
                f"{in_words(endpoint)}, found nobody there within "
                f"{within_s:.0f} s; the agent on that machine, or whoever has made the "
                "store, must be reachable from here"
            )
        time.sleep(RETRY_S)
    raise MeetingError(f"left before {in_words(endpoint)} was found")


def host_store(endpoint: Endpoint) -> TCPStore:
    """A fresh store of this process; port 0: a free one. Raises OSError, torch's DistError.

    At an address it listens there alone. At a name it listens everywhere: what a machine calls
    itself may be loopback to it, and something else to others.
    """
    host, port = endpoint
    host_here = partial(
        TCPStore, host, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    if not _is_address(host):
        return host_here(port=port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        port = listening.getsockname()[1]
        fd = listening.detach()  # the store's from now on
    try:
        return host_here(port=port, master_listen_fd=fd)
    except NotImplementedError:  # torch 2.6: only the older of its two servers takes a socket
        return host_here(port=port, master_listen_fd=fd, use_libuv=False)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether the name is one of this machine's addresses. Unknown names are nobody's (yet)."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.bind(where)
            return True
    return False


def in_words(endpoint: Endpoint) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"


def _answers(endpoint: Endpoint) -> bool:
    """Asked before torch asks, which tells stderr of every refusal."""
    try:
        socket.create_connection(endpoint, timeout=5).close()
    except OSError:
        return False
    return True


def join_store(endpoint: Endpoint, within_s: float) -> TCPStore:
    """A client of somebody's store. Raises torch's DistError."""
    return TCPStore(
        *endpoint,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=max(1.0, within_s)),
    )


def _host(endpoint: Endpoint) -> TCPStore | None:
    try:
        return host_store(endpoint)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None  # another agent of this machine was quicker
        raise MeetingError(
            f"--rdzv-endpoint: expected to listen at {in_words(endpoint)}, found {error.strerror}"
        ) from error
    except DistNetworkError as error:
        if f"code: -{errno.EADDRINUSE}" in str(error):
            return None
        raise
