"""Rendezvous: what the agents of a job write where they meet, and the stores that their ranks meet
at.

Moves arrivals, marks and verdicts of rounds over a KV; decides nothing. Each key is written once
and never changes: the first writer wins and everybody else is told what it wrote. Nothing there is
secret from who can reach it, unless the job has a secret of its own.

Invariant: a seat, a mark and a verdict of a round are the same for all who read them, for ever.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from keepstep.edge.os.machine import address_towards
from keepstep.edge.torch.tcp_store import Endpoint, first_line, host_store
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.rounds import NOBODY, Arrival, Verdict, arrival_from_text, verdict_from_text
from keepstep.ports import BlockingKV

CALLED_OFF = "called off"


class Rendezvous:
    """One client of the meeting point. Everything raises MeetingError when that is gone."""

    def __init__(self, kv: BlockingKV) -> None:
        self._kv = kv

    def another(self) -> Rendezvous:
        """A client for another thread."""
        return Rendezvous(self._kv.another())

    def opening(self, proposal: str) -> str:
        """What all rounds have in common: the first that was proposed."""
        return self._put("opening", proposal)

    def seat(self, number: int, place: int, arrival: Arrival) -> Arrival:
        """Who has this place in round `number`: `arrival`, if it was vacant."""
        return arrival_from_text(self._put(f"{number}/seat/{place}", arrival.to_text()))

    def seats(self, number: int, places: int) -> list[Arrival | None]:
        """The arrivals in order; None where nobody has come yet."""
        texts = self._kv.read([f"{number}/seat/{place}" for place in range(places)])
        return [arrival_from_text(text) if text else None for text in texts]

    def close(self, number: int, places: int) -> None:
        """Nobody takes a place in round `number` any more that is not taken by now."""
        for place in range(places):
            self.seat(number, place, NOBODY)
        self.mark(number, "full")

    def mark(self, number: int, what: str, place: int = 0, text: str = "yes") -> str:
        """What is marked from now on: `text`, if it was not marked before."""
        return self._put(f"{number}/{what}/{place}", text)

    def marks(self, number: int, what: str, places: Sequence[int] = (0,)) -> list[str | None]:
        """The texts of these marks; None where there is none yet."""
        return self._kv.read([f"{number}/{what}/{place}" for place in places])

    def wait_for_marks(
        self, number: int, what: str, places: Sequence[int] = (0,), within_s: float | None = None
    ) -> list[str] | None:
        """The texts of all these marks; None when they did not come in time."""
        return self._kv.wait([f"{number}/{what}/{place}" for place in places], within_s)

    def call_off(self, number: int, places: int) -> None:
        """Nobody waits any more for this round to be full and ready; to be said after its
        verdict."""
        self.mark(number, "full")
        for place in range(places):
            self.mark(number, "ready", place, CALLED_OFF)

    def say(self, number: int, verdict: Verdict) -> Verdict:
        """The verdict about the round: this one, if it is the first."""
        return verdict_from_text(self._put(f"{number}/verdict", verdict.to_text()))

    def verdict(self, number: int) -> Verdict | None:
        text = self._kv.read([f"{number}/verdict"])[0]
        return verdict_from_text(text) if text else None

    def wait_for_verdict(self, number: int) -> Verdict:
        texts = self._kv.wait([f"{number}/verdict"], None)
        assert texts is not None
        return verdict_from_text(texts[0])

    def _put(self, name: str, text: str) -> str:
        there = self._kv.swap(name, None, text)
        assert there is not None
        return there


def open_store(host: str, port: int) -> TCPStore:
    """A fresh store for the ranks to meet at; port 0: a free one. Raises MeetingError."""
    try:
        return host_store((host, port))
    except DistError as error:
        raise MeetingError(
            f"expected to be able to make a place for the ranks to meet at {host}:{port}, "
            f"found {first_line(error)}"
        ) from error


def local_address(endpoint: Endpoint) -> str:
    """The address under which this machine reaches the endpoint, and is probably reached itself.
    Raises ConfigError."""
    host = endpoint[0]
    try:
        address = address_towards(host)
    except OSError as error:
        raise ConfigError(
            f"--rdzv-endpoint: expected a reachable host, found {host!r} ({error})"
        ) from error
    if ipaddress.ip_address(address).is_loopback and not _names_loopback(host):
        raise ConfigError(
            f"host: expected this machine's address for other nodes, found that {host!r} "
            f"means {address} here: set --host"
        )
    return address


def _names_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
