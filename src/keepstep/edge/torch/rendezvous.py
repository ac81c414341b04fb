"""Rendezvous: where the agents of a job meet, a TCPStore at the endpoint they were all given.

Moves arrivals, marks and verdicts of rounds; decides nothing. Keys are written once and never change: `compare_set` against nothing lets
the first writer win and tells everybody else what it wrote. The one on whose machine the endpoint lies hosts the store, unless somebody
does already. Whoever hosts it is a single point of failure: any other node may die at any time; when the host is lost the ranks run on,
but no further round can be formed. Nothing on the store is secret from who can reach the endpoint, unless the job has a secret of its own.

What torch's TCPStore does was tried out (2.13). An operation that waits blocks every other one of the same client: each thread has a
client of its own. A wait that runs out prints to stderr: waits are long and end by a mark. A lost connection is an error at once, but a
machine that vanishes without a word blocks whoever asks it: the agent's loop never does.

Invariant: a seat, a mark and a verdict of a round are the same for all who read them, for ever.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch.distributed import DistError, DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from keepstep.edge.machine import address_towards
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.rounds import Arrival, Verdict, arrival_from_text, verdict_from_text

MEET_WITHIN_S = 60.0
ANOTHER_WITHIN_S = 10.0  # it has been met already
RETRY_S = 0.2
LONG_S = 3600.0  # a wait that runs out is only begun again
VACANT = ""

Endpoint = tuple[str, int]


class Rendezvous:
    """One client of the meeting point. Everything raises MeetingError when that is gone."""

    def __init__(self, endpoint: Endpoint, job: str, store: TCPStore) -> None:
        self._endpoint, self._job, self._store = endpoint, job, store

    def another(self) -> Rendezvous:
        """A client for another thread."""
        with self._reached():
            return Rendezvous(self._endpoint, self._job, _client(self._endpoint, ANOTHER_WITHIN_S))

    def opening(self, proposal: str) -> str:
        """What all rounds have in common: the first that was proposed."""
        return self._put("opening", proposal)

    def seat(self, number: int, place: int, arrival: Arrival) -> Arrival:
        """Who has this place in round `number`: `arrival`, if it was vacant."""
        return arrival_from_text(self._put(f"{number}/seat/{place}", arrival.to_text()))

    def seated(self, number: int, places: int) -> list[Arrival]:
        """The arrivals of a full round, in order."""
        with self._reached():
            return [arrival_from_text(self._store.get(self._key(f"{number}/seat/{place}")).decode()) for place in range(places)]

    def seats_taken(self, number: int, places: int) -> list[int]:
        with self._reached():
            return [place for place in range(places) if self._store.check([self._key(f"{number}/seat/{place}")])]

    def mark(self, number: int, what: str, place: int = 0, text: str = "yes") -> str:
        """What is marked from now on: `text`, if it was not marked before."""
        return self._put(f"{number}/{what}/{place}", text)

    def marked(self, number: int, what: str, places: Sequence[int]) -> bool:
        with self._reached():
            return bool(self._store.check([self._key(f"{number}/{what}/{place}") for place in places]))

    def wait_for_marks(self, number: int, what: str, places: Sequence[int] = (0,), within_s: float | None = None) -> list[str] | None:
        """The texts of all these marks; None when they did not come in time."""
        return self._wait([f"{number}/{what}/{place}" for place in places], within_s)

    def say(self, number: int, verdict: Verdict) -> Verdict:
        """The verdict about the round: this one, if it is the first."""
        return verdict_from_text(self._put(f"{number}/verdict", verdict.to_text()))

    def verdict(self, number: int) -> Verdict | None:
        key = self._key(f"{number}/verdict")
        with self._reached():
            return verdict_from_text(self._store.get(key).decode()) if self._store.check([key]) else None

    def wait_for_verdict(self, number: int) -> Verdict:
        texts = self._wait([f"{number}/verdict"], None)
        assert texts is not None
        return verdict_from_text(texts[0])

    def _key(self, name: str) -> str:
        return f"keepstep/{self._job}/{name}"

    def _put(self, name: str, text: str) -> str:
        with self._reached():
            return str(self._store.compare_set(self._key(name), VACANT, text).decode())

    def _wait(self, names: Sequence[str], within_s: float | None) -> list[str] | None:
        keys = [self._key(name) for name in names]
        with self._reached():
            while True:
                try:
                    self._store.wait(keys, timedelta(seconds=LONG_S if within_s is None else within_s))
                except DistStoreError:
                    if within_s is not None:
                        return None
                else:
                    return [self._store.get(key).decode() for key in keys]

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise MeetingError(f"the meeting point {in_words(self._endpoint)} is gone ({_first_line(error)})") from error


def meet(
    endpoint: Endpoint, job: str, within_s: float = MEET_WITHIN_S, given_up: Callable[[], bool] = lambda: False
) -> tuple[Rendezvous, TCPStore | None]:
    """A client of the meeting point, and its store if it is hosted here from now on. Raises MeetingError, ConfigError."""
    local = is_local(endpoint[0])
    deadline = time.monotonic() + within_s
    while not given_up():
        try:
            if _answers(endpoint):
                return Rendezvous(endpoint, job, _client(endpoint, deadline - time.monotonic())), None
            if local and (store := _host(endpoint)):
                return Rendezvous(endpoint, job, store), store
        except DistError as error:
            raise MeetingError(f"--rdzv-endpoint: expected a TCPStore at {in_words(endpoint)}, found {_first_line(error)}") from error
        if time.monotonic() > deadline:
            raise MeetingError(
                f"--rdzv-endpoint: expected the other nodes' meeting point at {in_words(endpoint)}, found nobody there within "
                f"{within_s:.0f} s; the agent on that machine, or whoever has made the store, must be reachable from here"
            )
        time.sleep(RETRY_S)
    raise MeetingError(f"left before {in_words(endpoint)} was found")


def open_store(host: str, port: int) -> TCPStore:
    """A fresh store for the ranks to meet at; port 0: a free one. Raises MeetingError."""
    try:
        return _master((host, port))
    except DistError as error:
        raise MeetingError(
            f"expected to be able to make a place for the ranks to meet at {host}:{port}, found {_first_line(error)}"
        ) from error


def local_address(endpoint: Endpoint) -> str:
    """The address under which this machine reaches the endpoint, and is probably reached itself. Raises ConfigError."""
    host = endpoint[0]
    try:
        address = address_towards(host)
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint: expected a reachable host, found {host!r} ({error})") from error
    if ipaddress.ip_address(address).is_loopback and not _names_loopback(host):
        raise ConfigError(f"host: expected this machine's address for other nodes, found that {host!r} means {address} here: set --host")
    return address


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


def _names_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _answers(endpoint: Endpoint) -> bool:
    """Asked before torch asks, which tells stderr of every refusal."""
    try:
        socket.create_connection(endpoint, timeout=5).close()
    except OSError:
        return False
    return True


def _client(endpoint: Endpoint, within_s: float) -> TCPStore:
    return TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(1.0, within_s)))


def _master(endpoint: Endpoint) -> TCPStore:
    return TCPStore(*endpoint, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _host(endpoint: Endpoint) -> TCPStore | None:
    try:
        return _master(endpoint)
    except DistNetworkError as error:
        if f"code: -{errno.EADDRINUSE}" in str(error):
            return None  # another agent of this machine was quicker
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
