"""The process that runs the probes: a probe that hangs, dies or lies costs nobody anything, and is
unknown within two seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.doctor.host import Host
from keepstep.edge.os.loop import Loop
from keepstep.edge.parts.probe import PartLook, Probe, Targets
from keepstep.edge.parts.prober import (
    ALL,
    Prober,
    cursors_from_text,
    cursors_to_text,
    is_wanted,
    targets_from_text,
    targets_to_text,
)
from keepstep.edge.parts.prober_process import ChildProber
from keepstep.model.parts import BEAT, PROBES, ClockReading, ProbeAnswer, answer_from_line
from keepstep.model.units import S_NS

WITHIN_NS = 2 * S_NS
GOOD = ClockReading(1, 1, 0)


def hangs(host: Host, targets: Targets, cursor: int) -> PartLook:
    signal.sigwait(set())
    raise AssertionError


def well(host: Host, targets: Targets, cursor: int) -> PartLook:
    return PartLook((GOOD,), cursor=cursor + 1)


def dies(host: Host, targets: Targets, cursor: int) -> PartLook:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def raises(host: Host, targets: Targets, cursor: int) -> PartLook:
    raise KeyError("what no probe should")


def fails(host: Host, targets: Targets, cursor: int) -> PartLook:
    raise OSError(5, "Input/output error")


class Enough(Exception):
    pass


def answers(
    probes: Mapping[str, Probe],
    targets: Targets,
    are_enough: Callable[[list[ProbeAnswer]], bool],
    host: Host | None = None,
    cursors: Mapping[str, int] | None = None,
) -> list[ProbeAnswer]:
    """What a prober says until that is enough."""
    found: list[ProbeAnswer] = []

    def say(line: str) -> None:
        found.append(answer_from_line(line))
        if are_enough(found):
            raise Enough

    reads, writes = os.pipe()
    try:
        with pytest.raises(Enough):
            Prober(probes, host or Host(), targets, reads, say, cursors).run()
    finally:
        os.close(reads)
        os.close(writes)
    return found


def of(probe: str, found: list[ProbeAnswer]) -> list[ProbeAnswer]:
    return [answer for answer in found if answer.probe == probe]


@pytest.fixture
def targets(tmp_path: Path) -> Targets:
    return Targets(tmp_path, tmp_path, os.getpid())


def test_a_probe_that_hangs_is_blind_in_time_and_holds_up_nobody(targets: Targets) -> None:
    began_ns = time.monotonic_ns()
    probes = {"nic": hangs, "clock": well}
    found = answers(probes, targets, lambda said: bool(of("nic", said)))
    [answer] = of("nic", found)
    assert answer.blind == "no answer within 1.5 s" and answer.readings == ()
    assert answer.took_ns < WITHIN_NS
    [other] = of("clock", found)
    assert other.readings == (GOOD,) and not other.blind
    assert other.at_ns - began_ns < WITHIN_NS // 2


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (dies, "its process ended with -9"),
        (raises, "its process ended with 1"),
        (fails, "[Errno 5] Input/output error"),
    ],
)
def test_a_probe_that_fails_is_blind(probe: Probe, why: str, targets: Targets) -> None:
    found = answers({"nic": probe}, targets, lambda said: bool(of("nic", said)))
    assert of("nic", found)[0].blind == why


def test_a_probe_reads_on_where_its_last_good_look_ended(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(host: Host, targets: Targets, cursor: int) -> PartLook:
        return PartLook((ClockReading(cursor + 1, 1, 0),), cursor=cursor + 1)

    monkeypatch.setitem(PROBES, "nic", replace(PROBES["nic"], every_ns=1))  # type: ignore[arg-type]
    found = answers({"nic": counts}, targets, lambda said: len(of("nic", said)) >= 4)
    walls = [answer.readings[0].wall_ns for answer in of("nic", found)]  # type: ignore[union-attr]
    assert walls == [0, 1, 2, 3]


def test_lines_of_the_kernel_between_two_probers_are_read_by_the_second(tmp_path: Path) -> None:
    log = tmp_path / "dev/kmsg"
    log.parent.mkdir()
    lines = [
        f"4,{number},{number},-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n" for number in range(9)
    ]
    log.write_text("".join(lines[:5]))
    targets = Targets(tmp_path, tmp_path, os.getpid())
    host = Host(root=tmp_path)

    def one(cursors: Mapping[str, int]) -> ProbeAnswer:
        given = cursors_from_text(cursors_to_text(cursors))
        probes = {"kernel": ALL["kernel"]}
        found = answers(probes, targets, lambda said: bool(of("kernel", said)), host, given)
        return of("kernel", found)[0]

    first = one({})
    assert (first.readings, first.cursor) == ((), 4)
    log.write_text("".join(lines[:7]))
    second = one({"kernel": first.cursor})
    assert len(second.readings) == 2 and second.cursor == 6
    log.write_text("".join(lines[:3]))  # a cursor of another log hides nothing for long
    assert one({"kernel": 1 << 62}).cursor == 2


@pytest.mark.parametrize("text", ['{"kernel":-2}', '{"kernel":1.5}', '{"tea":1}', "[]", "no"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # not JSON, or another one
        cursors_from_text(text)


def test_the_prober_ends_with_whoever_started_it(targets: Targets) -> None:
    reads, writes = os.pipe()
    os.close(writes)
    said: list[str] = []
    Prober({"nic": hangs}, Host(), targets, reads, said.append).run()
    os.close(reads)
    assert [answer_from_line(line).probe for line in said] == [BEAT]


def test_probes_without_their_hardware_are_not_run(tmp_path: Path, targets: Targets) -> None:
    def wanted(host: Host, targets: Targets) -> set[str]:
        return {name for name in ALL if is_wanted(name, host, targets)}

    bare = Host(root=tmp_path)
    assert set(ALL) - wanted(bare, targets) == {"nvml", "amd"}
    played = Targets(tmp_path, tmp_path, 1, tmp_path)
    assert set(ALL) - wanted(bare, played) == {"nvml", "amd"}
    (tmp_path / "nvml.jsonl").touch()
    assert set(ALL) - wanted(bare, played) == {"amd"}
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.touch()
    assert set(ALL) - wanted(bare, targets) == {"amd"}


def test_targets_cross_a_command_line(tmp_path: Path) -> None:
    for traces in (None, tmp_path / "t"):
        targets = Targets(tmp_path / "a", tmp_path / "b", 7, traces)
        assert targets_from_text(targets_to_text(targets)) == targets


def test_every_probe_is_known_by_its_period() -> None:
    assert set(ALL) == set(PROBES)


def test_a_real_prober_answers_and_is_ended(targets: Targets) -> None:
    """As an agent runs it: every probe that needs no hardware answers, and stopping it leaves no
    process behind."""
    loop, said, ends = Loop(), [], []  # type: ignore[var-annotated]
    prober = ChildProber(loop, targets)
    prober.start(lambda line: said.append(answer_from_line(line)), ends.append, {})
    pid = prober.pid
    wanted = {name for name, kind in PROBES.items() if not kind.needs}
    gives_up = loop.after(30 * S_NS, lambda: ends.append("late"))
    loop.run(lambda: bool(ends) or wanted <= {answer.probe for answer in said})
    gives_up.cancel()
    assert ends == []
    blind = {answer.probe: answer.blind for answer in said if answer.blind}
    assert set(blind) <= {"kernel"}  # not everybody may read it
    assert prober.stop() == -9
    assert pid is not None and not Path(f"/proc/{pid}").exists()
    prober.start(lambda line: None, ends.append, {})
    assert prober.pid is not None
    os.kill(prober.pid, signal.SIGKILL)
    loop.run(lambda: bool(ends))
    assert ends == ["the process that runs the probes ended with -9"]
    loop.close()
