"""Meeting: where the nodes of a preflight find each other and exchange what they have measured.

Comes in: a client of the memory that the nodes of a job share, the job's secret if it has one. Goes
out: this node's number, everybody's words. Each call blocks, and ends in time.

Where a preflight was killed half-way its words are still there. So nodes take their seats in an
attempt, and when all seats are taken each says that it is there; an attempt in which one does not
is left for the next one. With a secret only signed words count, as at the meeting of a job
(`runtime/agent/signed_kv.py`); every word is decoded field by field, and what is no message is as
if nothing was there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.edge.net.kv_client import BlockingClient
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.messages.preflight import (
    LinkReadings,
    NodeReadings,
    NodeReady,
    PreflightPlan,
    PreflightSeat,
    RingPlace,
    SilentNodes,
)
from keepstep.model.units import MIB
from keepstep.runtime.agent.signed_kv import WordSeal

CONFIRM_WITHIN_S = 15.0
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.3
MOST_ATTEMPTS = 1000

WORDS: Codec[Any] = Codec(
    (
        PreflightSeat,
        PreflightPlan,
        NodeReadings,
        LinkReadings,
        RingPlace,
        NodeReady,
        SilentNodes,
    ),
    max_bytes=8 * MIB,
)

Word = TypeVar("Word")


@dataclass(frozen=True, slots=True)
class FleetSeats:
    """Who takes part. `node`: this one's number."""

    attempt: int
    node: int
    seats: tuple[PreflightSeat, ...]


class PreflightMeeting:
    """One node's part in it."""

    def __init__(self, client: BlockingClient, secret: str | None, job: str) -> None:
        self._client = client
        self._seal = None if secret is None else WordSeal(secret, f"preflight/{job}")
        self._attempt = 0

    def take_seat(self, mine: PreflightSeat, node_rank: int | None, within_s: float) -> FleetSeats:
        """Wait until all nodes are there. Raises MeetingError when they are not in time,
        ConfigError when somebody wants another number of nodes."""
        until_s = time.monotonic() + within_s
        places = range(mine.nodes) if node_rank is None else [node_rank]
        for attempt in range(MOST_ATTEMPTS):
            self._attempt = attempt
            node = self._sit(mine, places)
            if node is None:
                continue
            keys = {place: f"seat/{place}" for place in range(mine.nodes)}
            seats = self.hear_all(keys, PreflightSeat, until_s - time.monotonic())
            if len(seats) < mine.nodes:
                missing = [place for place in keys if place not in seats]
                raise MeetingError(
                    f"preflight: expected {mine.nodes} nodes within {within_s:g} s, found "
                    f"{len(seats)}: nobody came as {', '.join(map(str, missing[:8]))}"
                )
            self._check(seats)
            self.say(f"here/{node}", NodeReady(node))
            here = {place: f"here/{place}" for place in keys}
            if len(self.hear_all(here, NodeReady, CONFIRM_WITHIN_S)) == mine.nodes:
                return FleetSeats(attempt, node, tuple(seats[place] for place in keys))
        raise MeetingError("preflight: every attempt at the meeting point is taken: use --job")

    def _sit(self, mine: PreflightSeat, places: Iterable[int]) -> int | None:
        """The first free place; None: there is none in this attempt."""
        for place in places:
            there = self.say(f"seat/{place}", mine)
            if there == mine:
                return place
        return None

    def _check(self, seats: Mapping[int, PreflightSeat]) -> None:
        wanted = {seat.nodes: place for place, seat in seats.items()}
        if len(wanted) > 1:
            found = ", ".join(f"{count} on node {place}" for count, place in wanted.items())
            raise ConfigError(f"--nnodes: expected the same number on all nodes, found {found}")

    def say(self, name: str, word: Any) -> Any:
        """Write it down, unless there is something of ours already; what is there now."""
        key = self._key(name)
        value = WORDS.encode(word).decode()
        text = value if self._seal is None else self._seal.sign(key, value)
        there = self._client.swap(key, None, text)
        while there is not None and there != text and self._opened(key, there) is None:
            there = self._client.swap(key, there, text)  # a stranger's
        return None if there is None else self._opened(key, there)

    def hear(self, name: str, kind: type[Word], within_s: float) -> Word | None:
        """What stands there, as soon as something does; None: nothing did in time."""
        return self.hear_all({0: name}, kind, within_s).get(0)

    def hear_all(
        self, names: Mapping[int, str], kind: type[Word], within_s: float
    ) -> dict[int, Word]:
        """The same for several, by node; without those that have nothing to say in time."""
        until_s = time.monotonic() + within_s
        awaited = {node: self._key(name) for node, name in names.items()}
        found: dict[int, Word] = {}
        pause_s = SHORTEST_LOOK_S
        while True:
            found |= self._read(awaited, kind)
            awaited = {node: key for node, key in awaited.items() if node not in found}
            left_s = until_s - time.monotonic()
            if not awaited or left_s <= 0:
                return found
            # Looked for, not waited for: torch tells stderr of each wait that runs out, and a
            # stranger's word would end every one.
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)

    def _read(self, keys: Mapping[int, str], kind: type[Word]) -> dict[int, Word]:
        texts = self._client.read(list(keys.values()))
        found = {}
        for (node, key), text in zip(keys.items(), texts, strict=True):
            word = None if text is None else self._opened(key, text)
            if isinstance(word, kind):
                found[node] = word
        return found

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _opened(self, key: str, text: str) -> Any:
        """The word that stands there, None: it is none of ours."""
        value = text if self._seal is None else self._seal.opened(key, text)
        if value is None:
            return None
        try:
            return WORDS.decode(value.encode("utf-8", "surrogateescape"))
        except NotAMessage:
            return None
