"""What every `Journal` does: each event is written whole, in order, as it was told."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.edge.os.journal import FileJournal, read_journal
from keepstep.model.events import INFO, WARNING, Event
from keepstep.ports import Journal
from keepstep.sim.protocol.world.machine import SimJournal
from tests.contracts import simulated

Read = Callable[[], list[Event]]
NewJournal = Callable[[str], Journal]

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8).filter(
    lambda name: name not in ("self", "level")
)
events = st.tuples(
    st.integers(0, 1), st.text(max_size=10), st.text(max_size=60), st.dictionaries(names, plain)
)


class OfFiles:
    """One file, each `who` a descriptor of its own, as processes have."""

    def __init__(self, place: Path) -> None:
        self._path = place / "journal.jsonl"
        self._open: list[FileJournal] = []

    def journal(self, who: str) -> Journal:
        self._open.append(FileJournal(self._path, who))
        return self._open[-1]

    def read(self) -> list[Event]:
        return list(read_journal(self._path))

    def close(self) -> None:
        for journal in self._open:
            journal.close()
        self._path.unlink(missing_ok=True)


class OfMachine:
    """The events of a simulated machine."""

    def __init__(self, place: Path) -> None:
        self._machine = simulated.Time().machine(0)
        self._heard: list[Event] = []

    def journal(self, who: str) -> Journal:
        return SimJournal(self._machine, who, lambda _, event: self._heard.append(event))

    def read(self) -> list[Event]:
        assert self._heard == self._machine.events
        return self._heard

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(params=[OfFiles, OfMachine])
def world(request: pytest.FixtureRequest) -> type[OfFiles] | type[OfMachine]:
    kind: type[OfFiles] | type[OfMachine] = request.param
    return kind


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@given(st.lists(events, max_size=12))
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_what_two_writers_tell_is_read_whole_and_in_order(
    world: type[OfFiles] | type[OfMachine],
    tmp_path: Path,
    told: list[tuple[int, str, str, dict[str, object]]],
) -> None:
    kept = world(tmp_path)
    writers = [kept.journal("keeper"), kept.journal("rank 3")]
    for writer, kind, why, data in told:
        writers[writer].record(kind, why, level=WARNING if writer else INFO, **data)
    found = [(event.who, event.kind, event.why, event.data) for event in kept.read()]
    kept.close()
    assert found == [(("keeper", "rank 3")[w], kind, why, data) for w, kind, why, data in told]


def test_an_event_says_when_by_both_clocks(
    world: type[OfFiles] | type[OfMachine], tmp_path: Path
) -> None:
    kept = world(tmp_path)
    journal = kept.journal("keeper")
    for number in range(5):
        journal.record("kind", "why", number=number)
    found = kept.read()
    kept.close()
    assert [event.data["number"] for event in found] == list(range(5))
    for earlier, later in itertools.pairwise(found):
        assert earlier.mono_ns <= later.mono_ns and earlier.wall_ns <= later.wall_ns


def test_the_level_is_for_the_log_and_no_part_of_the_event(
    world: type[OfFiles] | type[OfMachine], tmp_path: Path
) -> None:
    kept = world(tmp_path)
    journal = kept.journal("agent")
    journal.record("quiet", "a")
    journal.record("loud", "b", WARNING, rank=1)
    found = [(event.kind, event.data) for event in kept.read()]
    kept.close()
    assert found == [("quiet", {}), ("loud", {"rank": 1})]
