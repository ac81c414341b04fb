"""The monitor over real processes that only publish their pages: who is stopped, deadlocked,
blocked or spinning is named, and nobody else.

The children train nothing: they publish a step every 20 ms until, at a step of their own, they do
what their fault says. Ticks are real time, so nothing here asserts that anything is fast.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.config import Settings, resolve
from keepstep.core.detection.deadlines import Deadlines, derive
from keepstep.edge.os.journal import FileJournal, read_journal
from keepstep.edge.probes import memory, stacks
from keepstep.edge.probes.node import NodeProbes
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.edge.torch.pickles.plain import load_plain
from keepstep.model.diagnosis import Diagnosis, Strength
from keepstep.model.units import S_NS
from keepstep.runtime.agent.evidence_board import EvidenceBoard
from keepstep.runtime.agent.monitor import Monitor
from keepstep.testing.cluster import wait_for
from tests.core.postmortem.recorded import a_call
from tests.runtime.fakes import FakeExecutor, FakeKV, FakeTime, Table

PATIENCE_S = 60.0
REDUCE = "nccl:all_reduce"
LIMITS = replace(derive(hang_after_s=4), busy_ns=8 * S_NS)

RANK = """
import os, select, sys, threading
from pathlib import Path
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.snapshot import Phase

job_dir, fault = Path(sys.argv[1]), sys.argv[4]
rank, world_size, at_step = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
page = StatusPage.own(MEMORY, job_dir, rank)
page.publish(rank=rank, world_size=world_size, pid=os.getpid(), epoch=1, phase=Phase.STARTING)

def lock():
    taken = threading.Lock()
    taken.acquire()
    taken.acquire()

def fifo():
    open(job_dir / "fifo").read()

def spin():
    while True:
        pass

def leave():
    os._exit(0)

for step in range(10**6):
    page.publish(phase=Phase.STEP, step=step, completed_step=step - 1)
    if step == at_step:
        {"lock": lock, "fifo": fifo, "spin": spin, "leave": leave}[fault]()
    select.select([], [], [], 0.02)
"""


class Looking:
    """A monitor, and who does its work and brings it what other nodes show, at every tick."""

    def __init__(self, settings: Settings, node: int = 0, deadlines: Deadlines = LIMITS) -> None:
        self._executor = FakeExecutor()
        self._time = FakeTime()
        self._monitor = Monitor(
            MEMORY,
            NodeProbes(settings.journal_path.parent, load_plain),
            self._executor,
            FileJournal(settings.journal_path, "agent"),
            settings.job_dir,
            deadlines,
            node,
        )
        self.forget = self._monitor.forget
        self.explain_exit = self._monitor.explain_exit

    def begin(self, pids: Mapping[int, int], table: Table | None = None) -> None:
        """table: where the nodes show each other what they see."""
        kv = None if table is None else FakeKV(self._time, table)
        board = None if kv is None else EvidenceBoard(lambda: kv, 0, nodes=2)
        self._monitor.begin(pids, time.monotonic_ns(), board)

    def tick(self) -> list[Diagnosis]:
        found = self._monitor.tick(time.monotonic_ns())
        self._executor.run()
        self._time.pass_ns()
        return found


class Ranks:
    """Processes, the monitor over them, and its journal."""

    def __init__(self, home: Path) -> None:
        self.settings: Settings = resolve(
            {"job": "watched", "arena_dir": home, "state_dir": home / "state"}, {}, "watched"
        )
        self.settings.job_dir.mkdir(parents=True)
        os.mkfifo(self.settings.job_dir / "fifo")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, *faults: str, first: int = 0, at_step: int = 30, cgroup: Path | None = None
    ) -> dict[int, int]:
        for rank, fault in enumerate(faults, first):
            # `sh` enters the cgroup and then becomes the rank.
            enter = f"echo $$ > {cgroup}/cgroup.procs && " if cgroup else ""
            world_size = max(first + len(faults), len(self.processes))
            arguments = [
                str(self.settings.job_dir),
                str(rank),
                str(world_size),
                fault,
                str(at_step if fault else -1),
            ]
            command = [
                "sh",
                "-c",
                f'{enter}exec "$@"',
                "sh",
                sys.executable,
                "-c",
                RANK,
                *arguments,
            ]
            self.processes[rank] = subprocess.Popen(command, start_new_session=True)
        return {rank: self.processes[rank].pid for rank in range(first, first + len(faults))}

    def monitor(self, node: int = 0, deadlines: Deadlines = LIMITS) -> Looking:
        return Looking(self.settings, node, deadlines)

    def reached(self, rank: int, step: int) -> None:
        pid = self.processes[rank].pid
        wait_for(
            lambda: (
                (s := read_status(MEMORY, self.settings.job_dir, rank))
                and s.pid == pid
                and s.step >= step
            ),
            lambda: "no step",
            PATIENCE_S,
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in read_journal(self.settings.journal_path)]

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    found.end()


def diagnoses(monitor: Looking) -> list[Diagnosis]:
    """The first that are told."""
    found: list[Diagnosis] = wait_for(monitor.tick, lambda: "no diagnosis", PATIENCE_S)
    return found


def told_within(monitor: Looking, seconds: float) -> list[Diagnosis]:
    """All that are told in that time."""
    until, found = time.monotonic() + seconds, []
    while time.monotonic() < until:
        found += monitor.tick()
        select.select([], [], [], 0.05)
    return found


def test_who_does_not_go_on_is_named_one_after_the_other(ranks: Ranks) -> None:
    """The one furthest behind first; when it has been replaced and its successor has caught up, the
    next."""
    faults = {
        0: ("lock", "deadlocked", "asleep", 30),
        1: ("fifo", "deadlocked", "asleep", 50),
        2: ("spin", "hang", "spinning", 70),
    }
    monitor = ranks.monitor()
    for rank, (fault, _, _, at_step) in faults.items():
        monitor.begin(ranks.start(fault, first=rank, at_step=at_step))
    monitor.begin(ranks.start("", first=3))
    for rank, (_, kind, state, at_step) in faults.items():
        (found,) = diagnoses(monitor)
        assert (found.kind, found.culprit, found.state, found.strength) == (
            kind,
            rank,
            state,
            Strength.ABSENCE,
        ), found.why
        assert f"has completed step {at_step - 1}, the others step" in found.why
        ranks.processes[rank].kill()
        assert monitor.explain_exit(rank, ranks.processes[rank].wait(), "") == found
        monitor.forget(rank)
        monitor.begin(ranks.start("", first=rank))
    assert "suspicion" in ranks.kinds()


def test_where_nobody_in_particular_hangs_the_job_does_and_that_is_told_once(ranks: Ranks) -> None:
    monitor = ranks.monitor()
    monitor.begin(ranks.start("lock", "lock"))
    (found,) = diagnoses(monitor)
    assert found.culprit is None, found.why
    assert told_within(monitor, 3) == [], "told twice"


def test_what_torchs_flight_recorder_has_dumped_is_in_the_verdict(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from outside the two are alike; by their dumps, one has not entered what the other waits
    in."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    monitor = ranks.monitor()
    monitor.begin(ranks.start("lock", "lock"))

    def both_stand() -> bool:
        assert monitor.tick() == []
        found = [read_status(MEMORY, ranks.settings.job_dir, rank) for rank in (0, 1)]
        return all(status is not None and status.step >= 30 for status in found)

    wait_for(both_stand, lambda: "no step", PATIENCE_S)
    calls = [a_call(0, 5, REDUCE, is_over=True), a_call(0, 6, REDUCE)]
    for rank, entries in ((0, calls), (1, calls[:1])):
        dumped = pickle.dumps({"pg_config": {}, "entries": entries}, 2)
        (tmp_path / f"trace_{rank}").write_bytes(dumped)
    (found,) = diagnoses(monitor)
    assert found.culprit is None and "rank 0 waits in all_reduce 6, which rank 1" in found.why
    assert "the last of rank 1 is all_reduce 5 at train.py:7" in found.why


def test_who_is_stopped_is_named_killed_and_replaced(ranks: Ranks) -> None:
    monitor = ranks.monitor()
    monitor.begin(ranks.start("", ""))
    ranks.reached(1, 20)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    (found,) = diagnoses(monitor)
    assert (found.kind, found.culprit, found.state, found.strength) == (
        "stopped",
        1,
        "stopped",
        Strength.FACT,
    )
    saved = sorted(ranks.settings.journal_path.parent.glob("stacks-1/*"))
    assert [path.name for path in saved] == ["rank-0.txt", "rank-1.txt"]
    text = saved[1].read_text()
    assert f"{ranks.processes[1].pid} T" in text
    assert "(<string>:" in text or stacks.find_py_spy() is None or "ermission" in text
    assert told_within(monitor, 3) == [], "told twice"

    ranks.processes[1].kill()
    ranks.processes[1].wait()
    assert monitor.explain_exit(1, -9, "") == found
    monitor.forget(1)
    monitor.begin(ranks.start("", first=1))
    ranks.reached(1, 20)
    assert monitor.tick() == []
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    assert [d.culprit for d in diagnoses(monitor)] == [0]


def test_healthy_ranks_are_left_alone_and_a_short_stop_is_forgiven(ranks: Ranks) -> None:
    monitor = ranks.monitor(deadlines=derive())
    monitor.begin(ranks.start("", ""))
    ranks.reached(1, 20)
    for _ in range(2):
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        assert told_within(monitor, 2) == []
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        status = read_status(MEMORY, ranks.settings.job_dir, 1)
        assert status is not None
        ranks.reached(1, status.step + 2)
        assert monitor.tick() == []
    assert "memory-removed" not in ranks.kinds()


def test_who_outlives_its_diagnosis_is_told_once_more(ranks: Ranks) -> None:
    monitor = ranks.monitor(deadlines=replace(LIMITS, kill_ns=S_NS))
    monitor.begin(ranks.start("", ""))
    ranks.reached(1, 20)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    (first,) = diagnoses(monitor)
    (second,) = diagnoses(monitor)
    assert (first.kind, second.kind, second.culprit, second.state) == (
        "stopped",
        "unkillable",
        1,
        "stopped",
    )
    assert first.why in second.why


def test_a_culprit_on_another_node_is_not_ours_to_kill(ranks: Ranks) -> None:
    """Rank 1 hangs on its node; rank 0 waits for it on another one, and looks just as stuck."""
    pids = ranks.start("lock", "fifo", at_step=30)
    board = Table()
    here, there = (ranks.monitor(node) for node in (0, 1))
    here.begin({0: pids[0]}, board)
    there.begin({1: pids[1]}, board)

    def have_both_got_stuck() -> bool:
        assert here.tick() == there.tick() == []
        pages = [read_status(MEMORY, ranks.settings.job_dir, rank) for rank in pids]
        return all(page is not None and page.step == 30 for page in pages)

    wait_for(have_both_got_stuck, lambda: "not stuck", PATIENCE_S)
    os.kill(pids[1], signal.SIGSTOP)

    def told() -> list[Diagnosis]:
        assert here.tick() == []
        return there.tick()

    (found,) = wait_for(told, lambda: "no diagnosis", PATIENCE_S)
    assert (found.kind, found.culprit, found.node) == ("stopped", 1, 1)

    def has_heard() -> bool:
        told()
        return any(
            e.kind == "suspicion" and e.why.endswith("on node 1")
            for e in read_journal(ranks.settings.journal_path)
        )

    wait_for(has_heard, lambda: str(ranks.kinds()), PATIENCE_S)


def test_without_the_other_nodes_only_facts_count(ranks: Ranks) -> None:
    pids = ranks.start("lock", "")
    monitor = ranks.monitor()
    monitor.begin({0: pids[0]}, Table())
    (found,) = diagnoses(monitor)
    assert (found.kind, found.scope, found.culprit) == (
        "hang",
        "job",
        None,
    ) and "1 rank is not heard of" in found.why


def test_a_page_of_an_earlier_life_says_nothing(ranks: Ranks) -> None:
    monitor = ranks.monitor()
    pids = ranks.start("lock", "")
    ranks.reached(0, 30)
    ranks.processes[0].kill()
    ranks.processes[0].wait()
    stranger = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    ranks.processes[2] = stranger
    monitor.begin({0: stranger.pid, 1: pids[1]})
    assert told_within(monitor, 6) == []


# -- exits


def test_leaving_with_code_0_too_early_is_no_success(ranks: Ranks) -> None:
    monitor = ranks.monitor()
    monitor.begin(ranks.start("", "leave"))
    wait_for(
        lambda: monitor.tick() or ranks.processes[1].poll() is not None,
        lambda: "lives",
        PATIENCE_S,
    )
    found = monitor.explain_exit(1, ranks.processes[1].wait(), "")
    assert found.kind == "premature-exit"
    assert (
        found.why
        == "rank 1 exited with code 0 in step 30 in phase step, before it was done, while 1 "
        "others run"
    )


def test_a_kill_from_outside_is_told_from_one_of_ours(ranks: Ranks) -> None:
    monitor = ranks.monitor()
    monitor.begin(ranks.start("", ""))
    ranks.reached(1, 5)
    monitor.tick()
    ranks.processes[1].kill()
    found = monitor.explain_exit(1, ranks.processes[1].wait(), "")
    assert (found.kind, found.culprit, found.state) == ("crash", 1, "SIGKILL (9)")
    assert monitor.explain_exit(0, 1, "RuntimeError: Connection closed by peer").culprit is None


@pytest.fixture
def small_cgroup(tmp_path: Path) -> Iterator[Path]:
    """A memory cgroup of 200 MiB below our own; needs to be root, and cgroups that may be written
    to."""
    counter = memory.find_counter(os.getpid())
    limit = {"memory.oom_control": "memory.limit_in_bytes", "memory.events": "memory.max"}.get(
        counter.name if counter else ""
    )
    if counter is None or limit is None:
        pytest.skip("no memory cgroup here")
    home = counter.parent / f"keepstep-test-{os.getpid()}"
    try:
        home.mkdir()
        (home / limit).write_text("200M")
    except OSError as error:
        if home.exists():
            home.rmdir()
        pytest.skip(f"cgroups are not ours to make: {error}")
    yield home
    wait_for(lambda: not (home / "cgroup.procs").read_text(), lambda: "still populated", PATIENCE_S)
    home.rmdir()


def test_who_ran_out_of_memory_did_not_just_get_killed(tmp_path: Path, small_cgroup: Path) -> None:
    settings = resolve(
        {"job": "watched", "arena_dir": tmp_path, "state_dir": tmp_path / "state"}, {}, "watched"
    )
    command = (
        f"echo $$ > {small_cgroup}/cgroup.procs && echo in && read go && exec {sys.executable} "
        "-c 'x = b\"x\" * (1 << 30)'"
    )
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    monitor = Looking(settings)
    monitor.begin({0: process.pid})
    process.stdin.write(b"go\n")
    process.stdin.close()
    code = process.wait()
    process.stdout.close()
    found = monitor.explain_exit(0, code, "")
    assert (code, found.kind, found.strength) == (-9, "oom", Strength.FACT), found.why
