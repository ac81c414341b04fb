"""Nodes that meet, one by one, beside what earlier preflights and strangers have left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest

from keepstep.errors import ConfigError, MeetingError
from keepstep.model.messages.preflight import NodeReady, PreflightPlan, PreflightSeat
from keepstep.runtime.preflight import meeting as module
from keepstep.runtime.preflight.meeting import FleetSeats, PreflightMeeting


class SharedWords:
    """A `BlockingClient` of all that have the same memory."""

    hosted = False
    slice_s = 1.0

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self._changed = threading.Condition()

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        with self._changed:
            if self.words.get(key) == expected:
                self.words[key] = value
                self._changed.notify_all()
            return self.words.get(key)

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        raise NotImplementedError

    def read(self, keys: Sequence[str]) -> list[str | None]:
        with self._changed:
            return [self.words.get(key) for key in keys]

    def wait(self, keys: Sequence[str], within_s: float) -> list[str] | None:
        with self._changed:
            there = self._changed.wait_for(lambda: all(k in self.words for k in keys), within_s)
            return [self.words[key] for key in keys] if there else None

    def another(self) -> SharedWords:
        return self


LIVES = count()


def seat(life: str, nodes: int = 3) -> PreflightSeat:
    return PreflightSeat("host", "127.0.0.1", 1, "machine", "t" * 32, nodes, 1, life)


def meet(
    words: SharedWords,
    ranks: Sequence[int | None],
    secret: str | None = None,
    within_s: float = 10.0,
) -> list[FleetSeats]:
    def one(number: int) -> FleetSeats:
        mine = seat(f"life {next(LIVES)}", len(ranks))
        return PreflightMeeting(words, secret, "job").take_seat(mine, ranks[number], within_s)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, range(len(ranks))))


def test_every_node_has_a_seat_of_its_own_and_all_see_the_same() -> None:
    found = meet(SharedWords(), [None] * 5)
    assert sorted(each.node for each in found) == list(range(5))
    assert len({each.seats for each in found}) == 1


def test_who_wants_a_number_has_it() -> None:
    assert [each.node for each in meet(SharedWords(), [2, 0, 1])] == [2, 0, 1]


def test_a_second_preflight_at_the_same_place_is_another_attempt() -> None:
    words = SharedWords()
    meet(words, [None] * 3)
    assert {each.attempt for each in meet(words, [None] * 3)} == {1}


def test_a_seat_of_one_that_was_killed_costs_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONFIRM_WITHIN_S", 0.2)
    words = SharedWords()
    dead = PreflightMeeting(words, None, "job")
    assert dead._sit(seat("dead"), range(3)) == 0
    found = meet(words, [None] * 3)
    assert {each.attempt for each in found} == {1}
    assert "dead" not in {each.life for each in found[0].seats}


def test_who_is_missing_is_told() -> None:
    with pytest.raises(MeetingError, match="expected 3 nodes within 0.2 s, found 1: nobody came"):
        PreflightMeeting(SharedWords(), None, "job").take_seat(seat("alone"), None, 0.2)


def test_nodes_that_want_different_numbers_are_refused() -> None:
    words = SharedWords()
    PreflightMeeting(words, None, "job")._sit(replace(seat("a"), nodes=4), range(2))
    with pytest.raises(ConfigError, match="expected the same number on all nodes"):
        PreflightMeeting(words, None, "job").take_seat(seat("b", 2), None, 1.0)


STRANGE: list[Callable[[str], str]] = [
    lambda text: "no message",
    lambda text: text.replace("ready", "other"),
    lambda text: '{"kind": "ready", "node": -1}',
    lambda text: "\udcff\udc80",
    lambda text: "",
]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_no_word_is_as_if_nothing_was_there(strange: Callable[[str], str]) -> None:
    words = SharedWords()
    meeting = PreflightMeeting(words, None, "job")
    words.words["0/here"] = strange('{"kind":"ready","node":1}') or "x"
    assert meeting.hear("here", NodeReady, 0.05) is None
    assert meeting.say("here", NodeReady(1)) == NodeReady(1)
    assert meeting.hear("here", NodeReady, 0.05) == NodeReady(1)


def test_with_a_secret_only_signed_words_count() -> None:
    words = SharedWords()
    stranger, ours = PreflightMeeting(words, None, "job"), PreflightMeeting(words, "s", "job")
    other = PreflightMeeting(words, "s", "another job")
    stranger.say("here", NodeReady(7))
    assert ours.hear("here", NodeReady, 0.05) is None
    assert ours.say("here", NodeReady(1)) == NodeReady(1)
    assert ours.hear("here", NodeReady, 0.05) == NodeReady(1)
    assert stranger.hear("here", NodeReady, 0.05) is None
    assert other.hear("here", NodeReady, 0.05) is None
    words.words["0/moved"] = words.words["0/here"]  # said again in another place
    assert ours.hear("moved", NodeReady, 0.05) is None


def test_a_word_of_another_kind_is_not_taken_for_the_one() -> None:
    meeting = PreflightMeeting(SharedWords(), None, "job")
    meeting.say("plan", NodeReady(0))
    assert meeting.hear("plan", PreflightPlan, 0.05) is None


def test_the_first_word_stands() -> None:
    words = SharedWords()
    one, other = (PreflightMeeting(words, "s", "job") for _ in range(2))
    assert one.say("here", NodeReady(1)) == NodeReady(1)
    assert other.say("here", NodeReady(2)) == NodeReady(1)


def test_of_several_those_that_are_there_in_time() -> None:
    meeting = PreflightMeeting(SharedWords(), None, "job")
    meeting.say("a", NodeReady(1))
    found = meeting.hear_all({1: "a", 2: "b"}, NodeReady, 0.1)
    assert found == {1: NodeReady(1)}
