"""Every reader has the newest document, by changes where that is shorter; nobody looks for
nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from keepstep.dashboard.delta import changed
from keepstep.dashboard.feed import KEPT_CHANGES, MAX_READERS, Feed

PATIENCE_S = 30


class Told:
    """A subject that shows what it was given last. `looks` counts; `rested` is set when nobody
    reads."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.looks = 0
        self.rested = threading.Event()
        self.news = threading.Event()
        self.fails = False

    def look(self) -> dict[str, Any]:
        self.looks += 1
        self.rested.clear()
        if self.fails:
            raise OSError("gone")
        return self.document

    def has_news(self) -> bool:
        if not self.news.is_set():
            return False
        self.news.clear()
        return True

    def rest(self) -> None:
        self.rested.set()


@pytest.fixture
def told() -> Told:
    return Told({"step": 0})


@pytest.fixture
def feed(told: Told) -> Iterator[Feed]:
    made = Feed(told, every_s=0.05, now_ms=lambda: 7)
    yield made
    made.close()


class Reader:
    """What a page makes of a stream."""

    def __init__(self, feed: Feed) -> None:
        self.stream = feed.read()
        self.document: dict[str, Any] = {}
        self.names: list[str] = []

    def hear(self) -> str:
        """The next event's name; its document is taken in. Empty at the end."""
        for message in self.stream:
            lines = message.decode().splitlines()
            assert message.endswith(b"\n\n")
            if not lines[0].startswith("event: "):
                continue
            name, data = (
                lines[0].removeprefix("event: "),
                json.loads(lines[1].removeprefix("data: ")),
            )
            self.names.append(name)
            if name == "whole":
                self.document = data["whole"]
            elif name == "change":
                self.document = changed(self.document, data["change"])
            return name
        return ""

    def until(self, step: int) -> None:
        while self.document.get("step") != step:
            assert self.hear()


def test_first_the_whole_then_changes(feed: Feed, told: Told) -> None:
    reader = Reader(feed)
    with closing(reader.stream):  # type: ignore[type-var]
        reader.until(0)
        told.document = {"step": 1, "ranks": {"0": {"done": 1}}}
        reader.until(1)
        told.document = {"step": 2, "ranks": {}}
        reader.until(2)
    assert reader.document == told.document
    assert reader.names[0] == "whole" and set(reader.names[1:]) == {"change"}


def test_one_that_falls_behind_gets_the_whole_again(feed: Feed, told: Told) -> None:
    slow, quick = Reader(feed), Reader(feed)
    with closing(slow.stream), closing(quick.stream):  # type: ignore[type-var]
        slow.until(0)
        for step in range(1, 2 * KEPT_CHANGES):
            told.document = {"step": step}
            quick.until(step)
        slow.until(2 * KEPT_CHANGES - 1)
    assert "whole" in slow.names[1:]


def test_nobody_looks_for_nobody(feed: Feed, told: Told) -> None:
    assert told.looks == 0
    reader = Reader(feed)
    reader.until(0)
    reader.stream.close()  # type: ignore[attr-defined]
    assert told.rested.wait(PATIENCE_S)
    looks = told.looks
    told.document = {"step": 5}
    again = Reader(feed)
    with closing(again.stream):  # type: ignore[type-var]
        again.hear()
    assert again.document == {"step": 5}, "what was seen before the rest is not told"
    assert told.looks > looks


def test_news_do_not_wait_for_their_time(told: Told) -> None:
    feed = Feed(told, every_s=1000.0)
    reader = Reader(feed)
    with closing(reader.stream):  # type: ignore[type-var]
        reader.until(0)
        told.document = {"step": 1}
        told.news.set()
        reader.until(1)
    feed.close()


def test_a_look_that_fails_ends_the_stream_and_the_next_reader_tries_again(
    feed: Feed, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    told.fails = True
    reader = Reader(feed)
    assert reader.hear() == "" and reader.document == {}
    told.fails = False
    again = Reader(feed)
    with closing(again.stream):  # type: ignore[type-var]
        again.until(0)


def test_readers_hear_that_it_is_over(told: Told) -> None:
    feed = Feed(told, every_s=0.05)
    reader = Reader(feed)
    reader.until(0)
    feed.close()
    while (name := reader.hear()) and name != "over":
        pass
    assert name == "over" and reader.hear() == ""
    late = Reader(feed)
    assert late.hear() in ("whole", "over"), "who comes afterwards does not wait"


def test_there_is_an_end_to_how_many_may_read(feed: Feed) -> None:
    readers = [Reader(feed) for _ in range(MAX_READERS)]
    for reader in readers:
        assert not feed.is_full()
        next(iter(reader.stream))
    assert feed.is_full()
    readers[0].stream.close()  # type: ignore[attr-defined]
    assert not feed.is_full()
    for reader in readers[1:]:
        reader.stream.close()  # type: ignore[attr-defined]
