"""What nodes tell of the links between them, merged: each node speaks of its own alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.model.messages.preflight import LinkReading, LinkReadings
from keepstep.runtime.preflight import rounds


class Words:
    """A meeting in which everything has been said."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def say(self, name: str, word: Any) -> None:
        self.said[name] = word

    def hear(self, name: str, kind: type, within_s: float) -> Any:
        return self.said.get(name)


def test_of_links_that_are_not_the_speakers_or_lead_nowhere_nothing_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, present = Words(), [0, 1]

    def heard(_: Any, seats: Any, names: dict[int, str], kind: type, within_s: float) -> Any:
        return {node: words.said[name] for node, name in names.items()}, {}

    monkeypatch.setattr(rounds, "hear_living", heard)
    own = LinkReading(1, 0, (5,), (5,), (5,))
    lies = LinkReading(0, 1, (1,), (1,), (1,)), LinkReading(7, 9, (5,), (5,), (5,))
    words.say("s/of/1", LinkReadings(1, (own, LinkReading(1, 9), LinkReading(1, 1), *lies)))
    mine = LinkReading(0, 1, (6,), (6,), (6,))
    found = rounds.exchange(words, SimpleNamespace(node=0), present, "s", [mine], 1)  # type: ignore[arg-type]
    assert found == (mine, own)
    words.say("s/all", LinkReadings(0, (mine, own, *lies)))
    assert all({link.one, link.other} == {0, 1} for link in found)
