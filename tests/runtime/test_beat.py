"""An agent, and a keeper, say every few seconds that they look, and nothing when they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.shm.beat_files import AGENT_FILE, KEEPER_FILE, read_agent_beat, read_keeper_beat
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.beats import (
    EVERY_NS,
    SILENT_NS,
    AgentBeat,
    KeeperBeat,
    agent_beat_from_text,
    beat_text,
    keeper_beat_from_text,
)
from keepstep.model.units import S_NS
from keepstep.runtime.beat import Beat
from keepstep.sim.protocol.world.memory import SimMemory
from tests.runtime.agent.test_agent import Node
from tests.runtime.fakes import AgentRoom, FakeTime
from tests.runtime.simulated import Town


def test_it_says_so_every_few_seconds(tmp_path: Path) -> None:
    time = FakeTime()
    beat = Beat(time, MEMORY, tmp_path, lambda at_ns, boot: AgentBeat(at_ns, boot, 3))
    said = []
    for _ in range(40):
        beat.tick()
        said.append(read_agent_beat(MEMORY, tmp_path))
        time.pass_ns(S_NS // 2)
    ages = [time.monotonic_ns() - each.at_ns for each in said if each is not None]
    assert len(ages) == 40 and len(set(said)) == 4
    assert said[-1] == AgentBeat(1015 * S_NS, "b", 3)


def test_an_agent_says_so_while_it_lives_whatever_it_probes(tmp_path: Path) -> None:
    """`sick_parts` is off here: nobody else says anything."""
    node = Node(AgentRoom(tmp_path)).begin()
    job_dir, time = node.room.options.job_dir, node.room.time
    assert read_agent_beat(MEMORY, job_dir) is None
    for _ in range(20):
        time.pass_ns(2 * S_NS)
        said = read_agent_beat(MEMORY, job_dir)
        assert said is not None and time.monotonic_ns() - said.at_ns <= EVERY_NS + S_NS
        assert said.at_ns + SILENT_NS > time.monotonic_ns()
    for rank in (0, 1):
        node.end(rank, 0)
    last = read_agent_beat(MEMORY, job_dir)
    time.pass_ns(60 * S_NS)
    assert node.outcome and read_agent_beat(MEMORY, job_dir) == last, "its job is over"


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b'{"at_ns":"1","boot":"","node":0}', b"\xff", b'{"at_ns":1}']
)
def test_what_is_no_beat_is_none(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ValueError):
        agent_beat_from_text(text)
    with pytest.raises(ValueError):
        keeper_beat_from_text(text)
    for name in (AGENT_FILE, KEEPER_FILE):
        (tmp_path / name).write_bytes(text or b"x")
    assert read_agent_beat(MEMORY, tmp_path) is None
    assert read_keeper_beat(MEMORY, tmp_path) is None


def test_it_comes_back() -> None:
    assert agent_beat_from_text(beat_text(AgentBeat(5, "boot", 2))) == AgentBeat(5, "boot", 2)
    assert keeper_beat_from_text(beat_text(KeeperBeat(5, "boot", 2))) == KeeperBeat(5, "boot", 2)


def test_a_keeper_says_so_while_it_looks_and_no_longer() -> None:
    town = Town()
    keeper = town.keeper()
    job_dir = keeper.settings.job_dir
    memory = SimMemory(keeper.machine.files, keeper.machine.start("onlooker"))
    for _ in range(20):
        town.pass_time(3 * S_NS)
        said = read_keeper_beat(memory, job_dir)
        assert said is not None and said.pid == 100
        assert keeper.machine.clock.monotonic_ns() - said.at_ns <= EVERY_NS + S_NS
    keeper.process.end("stopped: its loop makes no turn any more")
    last = read_keeper_beat(memory, job_dir)
    town.pass_time(30 * S_NS)
    assert read_keeper_beat(memory, job_dir) == last


def test_a_keeper_whose_directory_was_removed_says_nothing_into_another_one_s() -> None:
    town = Town()
    keeper = town.keeper()
    job_dir = keeper.settings.job_dir
    keeper.memory.remove(job_dir)
    keeper.memory.ensure(job_dir / "keeper.lock", 1)
    town.pass_time(30 * S_NS)
    assert keeper.memory.names(job_dir) == ["keeper.lock"]
