"""The rhythm page: what the rank writes and what its keeper reads, in two maps of one file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.collective_profile_page import (
    RECORDS,
    CollectiveProfileReader,
    CollectiveProfileWriter,
    profile_path,
)
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.rhythm import NO_STEP, Gap, Pulse, StepSeen


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def ends(tmp_path: Path) -> tuple[Hand, CollectiveProfileWriter, CollectiveProfileReader]:
    clock = Hand()
    path = profile_path(tmp_path, 0)
    return (
        clock,
        CollectiveProfileWriter(MEMORY, path, clock, "eth0"),
        CollectiveProfileReader(MEMORY, path),
    )


def test_the_pulse_follows_the_collectives(tmp_path: Path) -> None:
    clock, writer, reader = ends(tmp_path)
    assert reader.interface == "eth0" and reader.pulse(clock.now_ns) == Pulse(NO_STEP, 0, 0, 0)
    seen = []
    for at_ns, act in [
        (10, lambda: writer.step(3)),
        (20, writer.began),
        (25, writer.began),  # while the first one is under way
        (30, writer.ended),
        (40, writer.ended),
        (50, lambda: writer.step(4)),
        (60, writer.began),
        (70, lambda: writer.step(NO_STEP)),
    ]:
        clock.now_ns = at_ns
        act()
        seen.append(reader.pulse(clock.now_ns))
    assert seen == [
        *(
            Pulse(3, 0, 0, 10),
            Pulse(3, 1, 1, 20),
            Pulse(3, 2, 2, 20),
            Pulse(3, 2, 1, 20),
            Pulse(3, 2, 0, 40),
        ),
        *(Pulse(4, 0, 0, 50), Pulse(4, 1, 1, 60), Pulse(NO_STEP, 0, 1, 70)),
    ]
    assert reader.steps() == [StepSeen(3, 10, 50, 2, (Gap(0, 10, 20), Gap(2, 40, 50)))]
    assert reader.steps() == []
    writer.ended(5)  # a lost peer ends more than there are
    assert reader.pulse(clock.now_ns) == Pulse(NO_STEP, 0, 0, 70)


def test_a_step_that_is_given_up_is_no_step(tmp_path: Path) -> None:
    clock, writer, reader = ends(tmp_path)
    for at_ns, step in enumerate([3, NO_STEP, 3, 4]):
        clock.now_ns = 10 * at_ns
        writer.step(step)
    assert [(s.step, s.began_ns, s.ended_ns) for s in reader.steps()] == [(3, 20, 30)]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 7),
)
def test_every_step_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[int, int]]], every: int
) -> None:
    clock, writer, reader = ends(tmp_path_factory.mktemp("page"))
    expected, found = [], []
    for number, parts in enumerate([*steps, []]):
        writer.step(number)
        if number % every == 0:
            found += reader.steps()
        began_ns, gaps = clock.now_ns, []
        for index, (idle_ns, busy_ns) in enumerate(parts):
            gaps.append(Gap(index, clock.now_ns, clock.now_ns + idle_ns))
            clock.now_ns += idle_ns
            writer.began()
            clock.now_ns += busy_ns
            writer.ended()
        expected.append(StepSeen(number, began_ns, clock.now_ns, len(parts), tuple(gaps)))
    writer.step(len(steps) + 1)
    assert found + reader.steps() == expected
    reader.close()
    writer.close()


def test_who_reads_too_slowly_reads_whole_steps_all_the_same(tmp_path: Path) -> None:
    clock, writer, reader = ends(tmp_path)
    for number in range(RECORDS):
        writer.step(number)
        for act in (writer.began, writer.ended):
            clock.now_ns += 5
            act()
        clock.now_ns += 5
    found = reader.steps()
    assert 2000 < len(found) < RECORDS and found[-1].step == RECORDS - 2
    assert all(s.collectives == 1 and len(s.gaps) == 2 and s.step_ns == 15 for s in found)


def test_another_life_of_the_rank_begins_the_page_anew(tmp_path: Path) -> None:
    clock, writer, reader = ends(tmp_path)
    for number in range(5):
        writer.step(number)
    assert len(reader.steps()) == 4
    again = CollectiveProfileWriter(MEMORY, profile_path(tmp_path, 0), clock)
    assert reader.is_there() and reader.pulse(clock.now_ns) == Pulse(NO_STEP, 0, 0, 0)
    assert reader.steps() == []
    again.step(7)
    again.step(8)
    assert [s.step for s in reader.steps()] == [7]
    profile_path(tmp_path, 0).unlink()
    assert not reader.is_there()


def test_what_is_no_such_page(tmp_path: Path) -> None:
    path = profile_path(tmp_path, 0)
    with pytest.raises(OSError):
        CollectiveProfileReader(MEMORY, path)
    path.parent.mkdir()
    path.write_bytes(b"x" * 500)
    with pytest.raises(
        ValueError, match="expected a collective profile page of format 2, found 500 bytes"
    ):
        CollectiveProfileReader(MEMORY, path)


def test_a_reader_never_sees_half_of_a_pulse(tmp_path: Path) -> None:
    """The writer keeps step == entered == since; in a torn one they would differ."""
    clock, writer, reader = ends(tmp_path)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            clock.now_ns = number
            writer.step(number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        # None while the writer is interrupted
        seen = [
            pulse
            for pulse in (reader.pulse(clock.now_ns) for _ in range(20_000))
            if pulse is not None
        ]
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 5000 and all(pulse.step in (NO_STEP, pulse.since_ns) for pulse in seen)
