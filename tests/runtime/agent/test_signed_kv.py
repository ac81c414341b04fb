"""A stranger who reaches the meeting point writes there whatever comes to mind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.model.units import S_NS
from keepstep.ports import KV
from keepstep.runtime.agent.signed_kv import SignedKV, WordSeal
from keepstep.sim.protocol.world.kv import KVPath, KVPlace
from keepstep.sim.protocol.world.timers import SimTimers
from tests.contracts.simulated import Time

KEY = "0/verdict"


class Town(Time):
    """A job with two agents, and a stranger with a client of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []
        self.older: list[str] = []
        self.newer: list[int] = []
        self._place = KVPlace(self.world, KVPath(unanswered=0.0), None)
        self._machines = 0
        self.stranger = self._client()
        self.first, self.second = self._agent("secret one"), self._agent("secret one")

    def _client(self) -> KV:
        self._machines += 1
        clients: list[KV] = []
        process = self.machine(self._machines).start("agent")
        self._place.open(process, clients.append, self.refused.append, self.refused.append)
        self.until(lambda: bool(clients))
        return clients[0]

    def _agent(self, secret: str, job: str = "t") -> SignedKV:
        timers = SimTimers(self.machine(100 + self._machines).start("agent"))
        return SignedKV(
            self._client(),
            secret,
            timers,
            self.refused.append,
            job,
            self.older.append,
            self.newer.append,
        )

    def ask(self, question: Callable[[Callable[[Any], None]], object]) -> Any:
        answers: list[Any] = []
        question(answers.append)
        self.until(lambda: bool(answers))
        return answers[0]

    def swap(self, kv: KV, expected: str | None, value: str) -> Any:
        return self.ask(lambda then: kv.swap(KEY, expected, value, then))

    def read(self, kv: KV) -> Any:
        return self.ask(lambda then: kv.read([KEY], then))


@pytest.fixture
def town() -> Town:
    return Town()


FORGED = [
    "stop",
    "0" * 32 + "stop",
    "x" * 100,
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_word_is_read_by_nobody_and_gives_way_to_a_true_one(
    town: Town, forged: str
) -> None:
    assert town.swap(town.stranger, None, forged) == forged
    assert town.read(town.first) == [None] and town.refused == [KEY]
    assert town.swap(town.first, None, "again") == "again"
    assert town.read(town.second) == ["again"]
    assert town.swap(town.second, None, "done") == "again", "the first true one stays"


@pytest.mark.parametrize("forged", [None, *FORGED])
def test_a_guard_holds_by_a_true_word_alone(town: Town, forged: str | None) -> None:
    """Whatever a stranger has written in the place of the verdict, and of the guard."""
    if forged is not None:
        assert town.swap(town.stranger, None, forged) == forged
        town.ask(lambda then: town.stranger.swap("coordinator", None, forged, then))

    def swap_while(guard: str, value: str) -> Any:
        asked = ("coordinator", guard)
        return town.ask(lambda then: town.first.swap_while(asked, KEY, None, value, then))

    assert swap_while(forged or "me", "again") is None
    assert town.read(town.second) == [None]
    town.ask(lambda then: town.second.swap("coordinator", None, "me", then))
    assert swap_while("you", "again") is None
    assert swap_while("me", "again") == "again"
    assert town.read(town.second) == ["again"]


def test_a_word_of_another_key_or_another_secret_is_none(town: Town) -> None:
    town.ask(lambda then: town.first.swap("1/verdict", None, "stop", then))
    [signed] = town.ask(lambda then: town.stranger.read(["1/verdict"], then))
    town.swap(town.stranger, None, signed)
    assert town.read(town.first) == [None]
    for other in (town._agent("another one"), town._agent("secret one", "another job")):
        assert town.swap(other, None, "stop") == "stop"
        assert town.read(town.first) == [None]


def test_a_word_of_an_older_epoch_is_none_and_gives_way(town: Town) -> None:
    """One that was said under the same key, in an earlier run."""
    town.first.epoch = 7
    town.swap(town.first, None, "stop")
    town.second.epoch = 8
    assert town.read(town.second) == [None] and town.older == [KEY] and town.refused == []
    assert town.swap(town.second, None, "again") == "again"
    assert town.read(town.second) == ["again"]


def test_a_word_of_a_newer_epoch_is_told_and_neither_heard_nor_written_over(town: Town) -> None:
    town.first.epoch, town.second.epoch = 7, 8
    town.swap(town.second, None, "again")
    heard: list[Any] = []
    town.first.read([KEY], heard.append)
    town.first.swap(KEY, None, "stop", heard.append)
    town.first.wait([KEY], None, heard.append)
    town.world.run(town.world.now_ns + 5 * S_NS)
    assert heard == [] and set(town.newer) == {8}
    assert town.read(town.second) == ["again"]


def test_only_the_opening_has_no_epoch(town: Town) -> None:
    """A word without one is none elsewhere, also with a MAC for that key."""
    town.first.epoch, town.second.epoch = 7, 8
    town.ask(lambda then: town.first.swap("opening", None, "the first", then))
    assert town.ask(lambda then: town.second.read(["opening"], then)) == ["the first"]
    bare = WordSeal("secret one", "t").sign(KEY, "stop")
    assert town.swap(town.stranger, None, bare) == bare
    assert town.read(town.first) == [None] and town.refused == [KEY]


def test_who_waits_hears_the_true_word_only(town: Town) -> None:
    heard: list[Any] = []
    town.first.wait([KEY], None, heard.append)
    town.swap(town.stranger, None, "stop")
    town.world.run(town.world.now_ns + 5 * S_NS)
    assert heard == [] and KEY in town.refused
    town.swap(town.second, None, "again")
    town.until(lambda: bool(heard))
    assert heard == [["again"]]


def test_a_wait_with_an_end_ends_though_a_stranger_keeps_talking(town: Town) -> None:
    town.swap(town.stranger, None, "stop")
    heard: list[Any] = []
    began_ns = town.world.now_ns
    town.first.wait([KEY], 3 * S_NS, heard.append)
    town.until(lambda: bool(heard))
    assert heard == [None] and town.world.now_ns - began_ns < 5 * S_NS


def test_a_cancelled_wait_is_silent_also_between_two_looks(town: Town) -> None:
    town.swap(town.stranger, None, "stop")
    heard: list[Any] = []
    wait = town.first.wait([KEY], None, heard.append)
    town.world.run(town.world.now_ns + S_NS // 2)
    wait.cancel()
    town.swap(town.second, None, "again")
    town.world.run(town.world.now_ns + 5 * S_NS)
    assert heard == []


@given(key=st.text(min_size=1, max_size=20), text=st.text(max_size=80))
def test_no_text_without_the_secret_is_ours(key: str, text: str) -> None:
    refused: list[str] = []
    kv = SignedKV(None, "secret", None, refused.append)  # type: ignore[arg-type]
    assert kv.opened(key, text) is None and refused == [key]
