"""Lines over pipes: messages whole and in order, however much of them the pipe takes at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep.edge.os.lines import MAX_LINE_BYTES, LineBox
from keepstep.edge.os.loop import Loop
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER, PERSISTER_WITH_KEEPER

WITHIN_S = 30
LONG = CheckpointAct("survey", 0, 3, 1, 5, tuple(range(20_000)))


class Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hear(self, box: Box, message: Any, /) -> None:
        self.heard.append(message)

    def gone(self, box: Box, /) -> None:
        self.heard.append("gone")


class Pair:
    """Both ends, on one loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        requests, self.to_persister = os.pipe2(os.O_CLOEXEC)
        from_persister, self.to_keeper = os.pipe2(os.O_CLOEXEC)
        self.refused: list[str] = []
        self.keeper = LineBox(
            self.loop, from_persister, self.to_persister, 1, KEEPER_WITH_PERSISTER, self._refuse
        )
        self.persister = LineBox(
            self.loop, requests, self.to_keeper, 2, PERSISTER_WITH_KEEPER, self._refuse
        )
        self.by_keeper = Ear()
        self.by_persister = Ear()
        self.keeper.begin(self.by_keeper)
        self.persister.begin(self.by_persister)

    def _refuse(self, box: LineBox, why: str) -> None:
        self.refused.append(why)

    def settle(self, ear: Ear, count: int) -> None:
        def complain() -> None:
            raise AssertionError(f"it does not come about: {len(ear.heard)} of {count} heard")

        timer = self.loop.after(WITHIN_S * S_NS, complain)
        self.loop.run(lambda: len(ear.heard) >= count)
        timer.cancel()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.keeper.close()
    made.persister.close()
    made.loop.close()


def test_what_the_pipe_does_not_take_yet_waits_and_sending_never_blocks(pair: Pair) -> None:
    assert all(pair.keeper.send(LONG) for _ in range(10))
    pair.settle(pair.by_persister, 10)
    assert pair.by_persister.heard == [LONG] * 10


def test_a_poke_behind_what_waits_is_lost(pair: Pair) -> None:
    for _ in range(10):
        pair.keeper.send(LONG)
    pair.keeper.poke(CheckpointAct("drop", 0, 3, 1, 5, (1,)))
    pair.keeper.close()
    pair.settle(pair.by_persister, 11)
    assert pair.by_persister.heard == [LONG] * 10 + ["gone"], "and the end is heard last"
    assert not pair.keeper.send(LONG)


def test_both_ways(pair: Pair) -> None:
    pair.keeper.send(CheckpointAct("drop", 0, 3, 1, 5, (1,)))
    pair.settle(pair.by_persister, 1)
    pair.persister.send(ActDone(True, "well\nin two lines"))
    pair.settle(pair.by_keeper, 1)
    assert pair.by_keeper.heard == [ActDone(True, "well\nin two lines")]


def test_a_line_that_is_no_message_is_counted_and_the_next_one_is_heard(pair: Pair) -> None:
    os.write(pair.to_persister, b"hello\n\n[1]\n")
    pair.keeper.send(LONG)
    pair.settle(pair.by_persister, 1)
    assert pair.by_persister.heard == [LONG]
    assert pair.persister.refused == 3 == len(pair.refused)


def test_what_has_come_can_be_heard_at_once(pair: Pair) -> None:
    pair.persister.send(ActDone(True, "one"))
    pair.persister.send(ActDone(True, "two"))
    pair.persister.close()
    pair.keeper.hear_rest()
    assert pair.by_keeper.heard == [ActDone(True, "one"), ActDone(True, "two"), "gone"]


def test_a_line_without_an_end_is_one(pair: Pair) -> None:
    for _ in range(MAX_LINE_BYTES // 4096 + 2):
        if pair.by_persister.heard:
            break
        os.write(pair.to_persister, b"x" * 4096)
        pair.persister.hear_rest()
    assert pair.by_persister.heard == ["gone"] and pair.persister.refused == 1
