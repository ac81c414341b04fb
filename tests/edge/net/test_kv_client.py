"""Threads and connections of the KV client, over a backend in memory whose calls block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from keepstep.edge.net.kv_client import MAX_IDLE, GivenUp, open_kv
from keepstep.edge.os.loop import Loop
from keepstep.errors import ConfigError, MeetingError
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import KV

PATIENCE_S = 30.0


class Backend:
    """What the connections share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.written: dict[str, str] = {}
        self.connections = 0
        self.waiting = 0
        self.why_gone = ""
        self.slice_s = PATIENCE_S

    def put(self, key: str, value: str) -> None:
        with self.changed:
            self.written[key] = value
            self.changed.notify_all()

    def lose(self, why: str) -> None:
        with self.changed:
            self.why_gone = why
            self.changed.notify_all()

    def connect(self, given_up: GivenUp) -> Connected:
        return Connected(self)


class Connected:
    """See `BlockingClient`."""

    hosted = True

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.slice_s = backend.slice_s
        backend.connections += 1

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        if self._backend.why_gone:
            raise MeetingError(self._backend.why_gone)
        self._backend.put(key, value)
        return value

    def swap_while(
        self, guard: tuple[str, str], key: str, expected: str | None, value: str
    ) -> str | None:
        return self.swap(key, expected, value)

    def read(self, keys: Sequence[str]) -> list[str | None]:
        return [self._backend.written.get(key) for key in keys]

    def wait(self, keys: Sequence[str], within_s: float) -> list[str] | None:
        backend = self._backend
        with backend.changed:
            backend.waiting += 1
            backend.changed.notify_all()
            came = backend.changed.wait_for(
                lambda: set(keys) <= backend.written.keys() or backend.why_gone, within_s
            )
            backend.waiting -= 1
            backend.changed.notify_all()
            if backend.why_gone:
                raise MeetingError(backend.why_gone)
            return [backend.written[key] for key in keys] if came else None

    def another(self) -> Connected:
        return Connected(self._backend)


class Desk:
    """A client, and its loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.loop.after(int(PATIENCE_S) * S_NS, self._out_of_patience)
        self.backend = Backend()
        self.lost: list[str] = []

    @staticmethod
    def _out_of_patience() -> None:
        raise AssertionError("it does not come about")

    def open(self) -> KV:
        opened: list[KV] = []
        open_kv(self.loop, self.backend.connect, opened.append, self.fail, self.lost.append)
        self.loop.run(lambda: bool(opened))
        return opened[0]

    @staticmethod
    def fail(why: object) -> None:
        raise AssertionError(why)

    def until(self, holds: Callable[[], bool]) -> None:
        """A thread makes it so."""
        self._look()
        self.loop.run(holds)

    def _look(self) -> None:
        self.loop.after(MS_NS, self._look)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.loop.close()


def test_waits_one_after_the_other_need_one_connection_more(desk: Desk) -> None:
    kv = desk.open()
    assert kv.hosted
    heard: list[Any] = []
    for number in range(10):
        kv.wait([f"k{number}"], None, heard.append)
        desk.backend.put(f"k{number}", "x")
        desk.until(lambda number=number: len(heard) == number + 1)  # type: ignore[misc]
    assert desk.backend.connections == 2
    kv.close()


def test_waits_for_the_same_keys_share_a_connection(desk: Desk) -> None:
    kv = desk.open()
    heard: list[Any] = []
    for _ in range(5):
        kv.wait(["a", "b"], None, heard.append)
    desk.until(lambda: desk.backend.waiting == 1)
    desk.backend.put("a", "1")
    desk.backend.put("b", "2")
    desk.until(lambda: len(heard) == 5)
    assert heard == [["1", "2"]] * 5
    assert desk.backend.connections == 2
    kv.close()


def test_who_waits_again_finds_the_thread_that_still_waits(desk: Desk) -> None:
    kv = desk.open()
    heard: list[Any] = []
    for number in range(20):
        kv.wait(["k"], 0, heard.append)
        kv.wait(["k"], None, desk.fail).cancel()
        desk.until(lambda number=number: len(heard) > number)  # type: ignore[misc]
    assert heard == [None] * 20
    assert desk.backend.connections == 2
    kv.wait(["k"], None, heard.append)
    desk.backend.put("k", "x")
    desk.until(lambda: heard[-1] == ["x"])
    kv.close()


def test_a_wait_that_nobody_wants_any_more_ends_with_its_slice(desk: Desk) -> None:
    desk.backend.slice_s = 0.01
    kv = desk.open()
    wait = kv.wait(["never"], None, desk.fail)
    desk.until(lambda: desk.backend.waiting == 1)
    wait.cancel()
    heard: list[Any] = []
    kv.wait(["k"], None, heard.append)
    desk.backend.put("k", "x")
    desk.until(lambda: bool(heard) and desk.backend.waiting == 0)
    kv.wait(["never"], None, heard.append)
    desk.backend.put("never", "at last")
    desk.until(lambda: len(heard) == 2)
    assert heard == [["x"], ["at last"]]
    kv.close()


def test_few_connections_are_kept_when_many_have_waited(desk: Desk) -> None:
    before = set(threading.enumerate())
    kv = desk.open()
    heard: list[Any] = []
    count = MAX_IDLE + 5
    for number in range(count):
        kv.wait([f"k{number}"], None, heard.append)
    desk.until(lambda: desk.backend.waiting == count)
    for number in range(count):
        desk.backend.put(f"k{number}", "x")
    desk.until(lambda: len(heard) == count)
    desk.until(lambda: len(set(threading.enumerate()) - before) == 1 + MAX_IDLE)
    kv.close()
    desk.until(lambda: set(threading.enumerate()) <= before)


def test_a_thread_that_waits_ends_when_its_client_was_closed(desk: Desk) -> None:
    desk.backend.slice_s = 0.01
    before = set(threading.enumerate())
    kv = desk.open()
    kv.wait(["never"], None, desk.fail)
    desk.until(lambda: desk.backend.waiting == 1)
    kv.close()
    desk.until(lambda: set(threading.enumerate()) <= before)


def test_nothing_that_blocks_blocks_the_loop_or_another_wait(desk: Desk) -> None:
    kv = desk.open()
    heard: list[Any] = []
    with desk.backend.changed:  # whoever asks the backend now has to wait
        kv.swap("k", None, "x", heard.append)
        kv.wait(["k"], None, heard.append)
        desk.loop.after(MS_NS, lambda: heard.append("timer"))
        desk.loop.run(lambda: heard == ["timer"])
    desk.until(lambda: len(heard) == 3)
    assert sorted(map(str, heard)) == ["['x']", "timer", "x"]
    kv.close()


def test_of_several_that_lose_the_memory_one_tells(desk: Desk) -> None:
    kv = desk.open()
    for number in range(3):
        kv.wait([f"k{number}"], None, desk.fail)
    desk.until(lambda: desk.backend.waiting == 3)
    desk.backend.lose("no more")
    kv.swap("k", None, "x", desk.fail)
    desk.until(lambda: bool(desk.lost) and desk.backend.waiting == 0)
    heard: list[str] = []
    desk.loop.after(10 * MS_NS, lambda: heard.append("later"))
    desk.loop.run(lambda: bool(heard))
    assert desk.lost == ["no more [KS3200]"]


@pytest.mark.parametrize("error", [ConfigError("no such thing"), MeetingError("nobody there")])
def test_why_there_is_none_is_told(desk: Desk, error: Exception) -> None:
    told: list[str] = []

    def dial(given_up: GivenUp) -> Connected:
        raise error

    open_kv(desk.loop, dial, desk.fail, told.append, desk.fail)
    assert told == []
    desk.loop.run(lambda: bool(told))
    assert told == [str(error)]


def test_who_dials_learns_that_it_was_cancelled(desk: Desk) -> None:
    ended = threading.Event()

    def dial(given_up: GivenUp) -> Connected:
        while not given_up():
            pass
        ended.set()
        raise MeetingError("left")

    opening = open_kv(desk.loop, dial, desk.fail, desk.fail, desk.fail)
    opening.cancel()
    assert ended.wait(PATIENCE_S)
    heard: list[str] = []
    desk.loop.after(10 * MS_NS, lambda: heard.append("nothing came"))
    desk.loop.run(lambda: bool(heard))


def test_a_mistake_of_ours_on_a_thread_is_raised_by_the_loop(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # it tells stderr, too
    kv = desk.open()
    monkeypatch.setattr(Connected, "read", lambda self, keys: 1 // 0)
    kv.read(["k"], desk.fail)
    with pytest.raises(ZeroDivisionError):
        desk.until(lambda: False)
    monkeypatch.setattr(Connected, "wait", lambda self, keys, within_s: 1 // 0)
    kv.wait(["k"], None, desk.fail)
    with pytest.raises(ZeroDivisionError):
        desk.until(lambda: False)
    kv.close()
    desk.until(lambda: set(threading.enumerate()) <= before)


def test_nobody_swaps_a_value_for_itself_or_for_nothing(desk: Desk) -> None:
    kv = desk.open()
    for expected, value in (("a", "a"), (None, "")):
        with pytest.raises(AssertionError):
            kv.swap("k", expected, value, desk.fail)
    kv.close()
