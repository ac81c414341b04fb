"""What `RankProcesses` promise: each rank's end is told once, with its process and how it ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import pytest

from keepstep.edge.os.threads import LoopExecutor
from keepstep.edge.torch.ranks import TorchRankProcesses
from keepstep.model.launch import RANK_OF, ErrorReport, Launch, RankAssignment, RankEnd
from keepstep.model.units import MS_NS
from keepstep.ports import RankProcesses
from keepstep.sim.protocol.job.processes import SimRankProcesses
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.world import Process
from tests.contracts.real import PatientLoop
from tests.contracts.simulated import Time

RANKS = 2
PLACE = RankAssignment(
    attempt=1, node=1, nodes=2, first_rank=2, world_size=4, master_addr="10.0.0.1", master_port=99
)
ON_SIGTERM = 3
PROGRAM = f"""
import os, pathlib, signal, sys, time

def asked(*_):
    os._exit({ON_SIGTERM})

signal.signal(signal.SIGTERM, asked)
me = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
(me.parent / f"begun-{{me.name}}-{{os.getpid()}}").touch()
while not me.exists():
    time.sleep(0.01)
code = int(me.read_text())
me.unlink()
sys.exit(code)
"""


class Node(Protocol):
    """One node's ranks, and what their programs do."""

    processes: RankProcesses
    agent_pid: int
    told: list[RankEnd]

    def until(self, holds: Callable[[], bool]) -> None: ...

    def begun(self, pid: int) -> bool:
        """Whether the program of that process is at work."""

    def finish(self, rank: int, code: int) -> None:
        """The program of that rank, by its number on the node, ends itself."""

    def close(self) -> None: ...


class RealNode(PatientLoop):
    agent_pid = 4_000_001  # no process has such a number

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self._room = tmp_path
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        command = (sys.executable, str(program), str(tmp_path))
        environ = {
            RANK_OF: str(tmp_path),
            "KEEPSTEP_AGENT": str(self.agent_pid),
        }
        self.processes: RankProcesses = TorchRankProcesses(
            self.loop,
            LoopExecutor(self.loop.post),
            Launch(command=command, argv=command[1:], ranks=RANKS),
            "contract",
            environ,
        )
        self.told: list[RankEnd] = []
        self.processes.listen(self.told.extend)
        self._look_again()

    def _look_again(self) -> None:
        """Files appear without a word."""
        self.loop.after(10 * MS_NS, self._look_again)

    def begun(self, pid: int) -> bool:
        return any(self._room.glob(f"begun-*-{pid}"))

    def finish(self, rank: int, code: int) -> None:
        written = self._room / "written"
        written.write_text(str(code))
        written.rename(self._room / str(PLACE.first_rank + rank))

    def close(self) -> None:
        self.processes.kill(range(RANKS))
        self.until(lambda: not self.processes.living)
        self.processes.close(keep_errors=False)
        super().close()


class Scripted:
    """A program that ends when it is told to."""

    report = ErrorReport()

    def __init__(self, process: Process, environ: Mapping[str, str]) -> None:
        self.process = process
        self.rank = int(environ["RANK"])
        self.exit_code: int | None = None
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def terminated(self, signum: int) -> None:
        self.finish(ON_SIGTERM)

    def finish(self, code: int) -> None:
        self.exit_code = code
        self.process.end("it is done")


class SimNode(Time):
    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        agent = self.machine(0).start("agent")
        self.agent_pid = agent.pid
        self._programs: dict[int, Scripted] = {}
        self.processes: RankProcesses = SimRankProcesses(
            agent,
            RANKS,
            self._new_program,
            connect_agent=lambda process, standby: None,
            start_ns=lambda: 20 * MS_NS,
            notice_ns=lambda: 2 * MS_NS,
            on_kill=lambda process: None,
        )
        self.told: list[RankEnd] = []
        self.processes.listen(self.told.extend)

    def _new_program(self, process: Process, environ: Mapping[str, str]) -> Program:
        self._programs[process.pid] = program = Scripted(process, environ)
        return cast("Program", program)

    def begun(self, pid: int) -> bool:
        return self._programs[pid].has_begun

    def finish(self, rank: int, code: int) -> None:
        self._programs[self.processes.living[rank]].finish(code)

    def close(self) -> None:
        self.processes.close(keep_errors=False)


NODES: dict[str, Callable[[Path], Node]] = {"real": RealNode, "simulated": SimNode}


@pytest.fixture(params=NODES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = NODES[request.param](tmp_path)
    yield made
    made.close()


def begin(node: Node, ranks: Collection[int] = range(RANKS)) -> dict[int, int]:
    pids = node.processes.start(PLACE, ranks, {})
    node.until(lambda: all(node.begun(pid) for pid in pids.values()))
    return pids


def ends(told: Sequence[RankEnd]) -> dict[int, tuple[int, int]]:
    assert len({end.rank for end in told}) == len(told), "told twice"
    return {end.rank: (end.pid, end.code) for end in told}


def test_who_is_started_lives_until_its_end_is_told(node: Node) -> None:
    pids = begin(node)
    assert node.processes.living == pids and sorted(pids) == [0, 1]
    assert node.told == []
    node.finish(1, 0)
    node.until(lambda: bool(node.told))
    assert ends(node.told) == {1: (pids[1], 0)}
    assert node.processes.living == {0: pids[0]}


@pytest.mark.parametrize("code", [0, 1, 7])
def test_an_exit_code_is_told(node: Node, code: int) -> None:
    pids = begin(node)
    node.finish(0, code)
    node.until(lambda: bool(node.told))
    assert ends(node.told) == {0: (pids[0], code)}


def test_who_is_killed_is_told_once_however_often_it_is(node: Node) -> None:
    pids = begin(node)
    node.processes.kill([0])
    node.processes.kill([0, 1])
    node.until(lambda: len(node.told) == RANKS)
    node.processes.kill([0, 1])  # nobody is left
    assert ends(node.told) == {rank: (pid, -signal.SIGKILL) for rank, pid in pids.items()}
    assert not node.processes.living


def test_a_signal_reaches_all_who_live(node: Node) -> None:
    pids = begin(node)
    node.finish(0, 0)
    node.until(lambda: len(node.told) == 1)
    node.processes.signal(signal.SIGTERM)
    node.until(lambda: len(node.told) == RANKS)
    assert ends(node.told) == {0: (pids[0], 0), 1: (pids[1], ON_SIGTERM)}


def test_another_process_takes_the_place_of_one_that_ended(node: Node) -> None:
    first = begin(node)
    node.processes.kill([1])
    node.until(lambda: bool(node.told))
    second = begin(node, [1])
    assert second[1] != first[1]
    assert node.processes.living == {0: first[0], 1: second[1]}
    node.finish(1, 5)
    node.until(lambda: len(node.told) == 2)
    assert [(end.pid, end.code) for end in node.told] == [
        (first[1], -signal.SIGKILL),
        (second[1], 5),
    ]


def test_a_process_that_stands_by_is_no_rank_before_it_becomes_one(node: Node) -> None:
    assert node.processes.may_stand_by and node.processes.standby_pid is None
    node.processes.start_standby()
    pid = node.processes.standby_pid
    assert pid is not None and not node.processes.living
    assert node.processes.standby_becomes(1) == pid
    assert node.processes.living == {1: pid} and node.processes.standby_pid is None
    node.processes.kill([1])
    node.until(lambda: bool(node.told))
    assert ends(node.told) == {1: (pid, -signal.SIGKILL)}


def test_what_a_dead_agent_had_started_is_ended_and_nothing_else(node: Node) -> None:
    pids = begin(node)
    gone: list[list[int]] = []
    node.processes.end_orphans([node.agent_pid + 1], gone.append)
    node.until(lambda: bool(gone))
    assert gone == [[]] and node.processes.living == pids
    node.processes.end_orphans([node.agent_pid], gone.append)
    node.until(lambda: len(gone) == 2 and len(node.told) == RANKS)
    assert sorted(gone[1]) == sorted(pids.values())
    assert {end.code for end in node.told} == {-signal.SIGKILL}


def test_a_rank_knows_its_place(node: Node) -> None:
    environ = node.processes.environ_of(1, PLACE)
    assert {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "99",
        "KEEPSTEP_ATTEMPT": "1",
        "KEEPSTEP_AGENT": str(node.agent_pid),
    }.items() <= environ.items()
