"""What an agent makes of its probes: a file that is never better than the truth, a journal that
tells what changed, and a prober that is brought back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from keepstep.core.detection.slowed_part import slowed_cpu
from keepstep.core.parts.judgement import as_of
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.parts_file import read_parts
from keepstep.model.parts import (
    BEAT,
    PROBES,
    PartPolicy,
    PlaceReading,
    PressureReading,
    ProbeAnswer,
)
from keepstep.model.restarts import PartSick
from keepstep.model.units import S_NS
from keepstep.runtime.agent.parts_watch import BEGIN_AFTER_NS, LONGEST_PAUSE_NS, PartsWatch
from tests.core.parts.test_judgement import good
from tests.core.parts.test_kernel_log import TABLE
from tests.runtime.fakes import FakeJournal, FakeTime

TICK_NS = S_NS // 2
UNKNOWN_WITHIN_NS = 30 * S_NS
NO_HARDWARE = tuple(name for name, kind in PROBES.items() if not kind.needs)


class FakeProber:
    def __init__(self) -> None:
        self.starts = 0
        self.cursors: dict[str, int] = {}  # as it was started with
        self.heard: Callable[[bytes], None] | None = None
        self.ended: Callable[[str], None] | None = None
        self.refuses = False

    @property
    def pid(self) -> int | None:
        return None if self.heard is None else 4711

    def start(
        self,
        heard: Callable[[bytes], None],
        ended: Callable[[str], None],
        cursors: Mapping[str, int],
    ) -> None:
        self.starts += 1
        self.cursors = dict(cursors)
        if self.refuses:
            raise OSError(11, "Resource temporarily unavailable")
        self.heard, self.ended = heard, ended

    def stop(self) -> int | None:
        self.heard = self.ended = None
        return None


class Node:
    def __init__(
        self, home: Path, policy: PartPolicy = PartPolicy.WARN, canary_every_ns: int = 0
    ) -> None:
        self.home, self.time = home, FakeTime()
        self.journal, self.prober = FakeJournal(), FakeProber()
        self.sick: list[PartSick] = []
        self.is_stopped = False  # as by SIGSTOP
        self.is_hot = False
        policies = dict.fromkeys(("gpu", "nic", "disk", "clock"), policy)
        self.watch = PartsWatch(
            *(self.prober, self.time, MEMORY, self.journal, home, policies, TABLE, canary_every_ns)
        )

    def run(self, for_ns: int) -> None:
        """Ticks, and what a prober that is well says meanwhile."""
        until_ns = self.time.monotonic_ns() + for_ns
        while self.time.monotonic_ns() < until_ns:
            self.time.pass_ns(TICK_NS)
            now_ns = self.time.monotonic_ns()
            if self.prober.heard is not None and not self.is_stopped and now_ns % S_NS == 0:
                self.say(ProbeAnswer(BEAT, now_ns, 0, ""))
                for probe in NO_HARDWARE:
                    answer = good(probe, now_ns)
                    if probe == "pressure" and self.is_hot:
                        heat = now_ns // S_NS  # once a second
                        reading = PressureReading(0, 0.5, now_ns // 10**8, 0, heat)
                        answer = replace(answer, readings=(reading,))
                    self.say(answer)
            self.sick += self.watch.tick()

    def say(self, answer: ProbeAnswer) -> None:
        assert self.prober.heard is not None
        self.prober.heard(answer.to_line().encode().rstrip())

    def healths(self) -> set[str]:
        report = read_parts(MEMORY, self.home)
        assert report is not None
        now = as_of(report, self.time.monotonic_ns(), self.time.boot())
        return {part.health for part in now.parts}


def test_nothing_is_started_while_the_ranks_begin(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(BEGIN_AFTER_NS - S_NS)
    assert node.prober.starts == 0 and read_parts(MEMORY, tmp_path) is None
    node.run(2 * S_NS)
    assert node.prober.starts == 1


def test_a_healthy_machine_is_in_the_file_and_not_in_the_journal(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(300 * S_NS)
    assert node.healths() == {"ok"} and node.journal.kinds == []


def test_a_stopped_prober_makes_all_unknown_within_30_s_and_is_replaced(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(60 * S_NS)
    node.is_stopped = True
    for _ in range(UNKNOWN_WITHIN_NS // S_NS):
        node.run(S_NS)
        if node.healths() == {"unknown"}:
            break
    assert node.healths() == {"unknown"}
    node.is_stopped = False
    node.run(20 * S_NS)
    assert node.prober.starts == 2 and node.healths() == {"ok"}
    assert node.journal.kinds[:1] == ["probes-lost"]


def test_a_judge_that_goes_blind_is_told_once_it_misses_its_canary(tmp_path: Path) -> None:
    node = Node(tmp_path, canary_every_ns=60 * S_NS)
    node.run(90 * S_NS)
    witness = node.watch._judgement._witnesses["clock"]
    [clock] = witness.found.values()
    witness.judge.add = lambda readings, at_ns: [clock]  # type: ignore[method-assign]
    node.run(61 * S_NS)
    assert node.healths() == {"ok", "unknown"}
    node.run(30 * S_NS)
    [told] = node.journal.of("part-unknown")
    assert told.data["part"] == "clock" and "sickness that was planted" in told.why


def test_a_killed_prober_is_replaced_ever_more_slowly(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.is_stopped = True
    node.run(BEGIN_AFTER_NS)
    starts = []
    for _ in range(5000):
        if node.prober.ended is not None:
            starts.append(node.time.monotonic_ns())
            ended = node.prober.ended
            node.prober.stop()
            ended("the process that runs the probes ended with -9")
        node.run(TICK_NS)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[0] <= 2 * S_NS
    assert all(later >= earlier for earlier, later in itertools.pairwise(pauses))
    assert max(pauses) <= LONGEST_PAUSE_NS + S_NS
    assert node.healths() == {"unknown"}


def test_a_machine_without_processes_is_unknown(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prober.refuses = True
    node.run(60 * S_NS)
    assert node.healths() == {"unknown"}
    assert "Resource temporarily unavailable" in node.journal.of("probes-lost")[0].why


def test_a_stopped_agent_is_no_witness_either(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(60 * S_NS)
    node.time.pass_ns(UNKNOWN_WITHIN_NS)  # and no tick
    assert node.healths() == {"unknown"}


def test_a_blind_probe_is_told_when_that_lasts(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(60 * S_NS)
    node.is_stopped = True
    for _ in range(30):
        now_ns = node.time.monotonic_ns()
        node.say(ProbeAnswer(BEAT, now_ns, 0, ""))
        node.say(ProbeAnswer("nic", now_ns, 0, "no answer within 1.5 s"))
        node.run(S_NS)
    assert "part-unknown" in node.journal.kinds
    told = node.journal.of("part-unknown")[0]
    assert told.data["part"] == "nic eth0" and "no answer within 1.5 s" in told.why


def test_a_sick_part_is_told_and_acted_upon_once(tmp_path: Path) -> None:
    for policy in PartPolicy:
        node = Node(tmp_path / policy.name, policy)
        node.run(60 * S_NS)
        now_ns = node.time.monotonic_ns()
        broken = PlaceReading("/data", 1, "Input/output error", False, None, None)
        node.is_stopped = True
        for _ in range(5):
            node.say(ProbeAnswer("disk", now_ns, 0, "", (broken,)))
            node.run(S_NS)
        [told] = node.journal.of("part-sick")
        assert "Input/output error" in told.why and told.data["part"] == "disk /data"
        assert told.data["policy"] == policy.name.lower()
        acted = [event.policy for event in node.sick]
        assert acted == ([] if policy is PartPolicy.WARN else [policy])
        node.is_stopped = False
        node.run(5 * S_NS)
        assert node.journal.kinds[-1] == "part-well"


def test_processors_that_are_slowed_down_are_known_while_somebody_sees_them(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    node.run(BEGIN_AFTER_NS + 30 * S_NS)
    assert slowed_cpu(node.watch.parts) is None
    node.is_hot = True
    node.run(30 * S_NS)
    found = slowed_cpu(node.watch.parts)
    assert found is not None and found.part == "cpu" and "for their heat" in found.why
    node.is_stopped = True
    node.run(20 * S_NS)
    assert slowed_cpu(node.watch.parts) is None, "nobody has seen them lately"


def test_what_is_no_answer_is_refused_and_told(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(60 * S_NS)
    assert node.prober.heard is not None
    node.prober.heard(b"not an answer")
    assert node.journal.kinds == ["message-refused"]
    node.run(5 * S_NS)
    assert node.healths() == {"ok"}


def test_the_end_of_the_job_ends_the_prober(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(60 * S_NS)
    node.watch.close()
    assert node.prober.pid is None
    node.run(60 * S_NS)
    assert node.prober.starts == 1


def test_the_next_prober_reads_on_where_the_last_one_ended(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.run(BEGIN_AFTER_NS + S_NS)
    assert node.prober.cursors == {}
    now_ns = node.time.monotonic_ns()
    node.say(ProbeAnswer("kernel", now_ns, 0, "", (), 4711))
    node.say(ProbeAnswer("kernel", now_ns, 0, "no answer within 1.5 s"))
    assert node.prober.heard is not None
    node.prober.heard(
        b'{"probe":"kernel","at_ns":1,"took_ns":0,"blind":"","readings":[],"cursor":-2}'
    )
    assert node.prober.ended is not None
    node.prober.ended("the process that runs the probes ended with -9")
    node.run(5 * S_NS)
    assert node.prober.starts == 2 and node.prober.cursors == {"kernel": 4711}
