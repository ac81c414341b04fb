"""An agent says every few seconds that it looks, and nothing when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.shm.agent_beat_file import FILE, read_beat
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.agent_beat import EVERY_NS, SILENT_NS, AgentBeat, beat_from_text
from keepstep.model.units import S_NS
from keepstep.runtime.agent.beat import Beat
from tests.runtime.agent.test_agent import Node
from tests.runtime.fakes import AgentRoom, FakeTime


def test_it_says_so_every_few_seconds(tmp_path: Path) -> None:
    time = FakeTime()
    beat = Beat(time, MEMORY, tmp_path)
    said = []
    for _ in range(40):
        beat.tick(3)
        said.append(read_beat(MEMORY, tmp_path))
        time.pass_ns(S_NS // 2)
    ages = [time.monotonic_ns() - each.at_ns for each in said if each is not None]
    assert len(ages) == 40 and len(set(said)) == 4
    assert said[-1] == AgentBeat(1015 * S_NS, "b", 3)


def test_an_agent_says_so_while_it_lives_whatever_it_probes(tmp_path: Path) -> None:
    """`sick_parts` is off here: nobody else says anything."""
    node = Node(AgentRoom(tmp_path)).begin()
    job_dir, time = node.room.options.job_dir, node.room.time
    assert read_beat(MEMORY, job_dir) is None
    for _ in range(20):
        time.pass_ns(2 * S_NS)
        said = read_beat(MEMORY, job_dir)
        assert said is not None and time.monotonic_ns() - said.at_ns <= EVERY_NS + S_NS
        assert said.at_ns + SILENT_NS > time.monotonic_ns()
    for rank in (0, 1):
        node.end(rank, 0)
    last = read_beat(MEMORY, job_dir)
    time.pass_ns(60 * S_NS)
    assert node.outcome and read_beat(MEMORY, job_dir) == last, "its job is over"


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b'{"at_ns":"1","boot":"","node":0}', b"\xff", b'{"at_ns":1}']
)
def test_what_is_no_beat_is_none(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ValueError):
        beat_from_text(text)
    (tmp_path / FILE).write_bytes(text or b"x")
    assert read_beat(MEMORY, tmp_path) is None


def test_it_comes_back() -> None:
    beat = AgentBeat(5, "boot", 2)
    assert beat_from_text(beat.to_text()) == beat
