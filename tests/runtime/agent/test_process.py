"""Agent process: what cannot be is refused before anything begins, and an agent gets what was
configured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.codes import BY_NUMBER
from keepstep.config import Config, resolve
from keepstep.core.detection.deadlines import derive
from keepstep.edge.os.journal import FileJournal, read_journal
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.signals import Signals
from keepstep.errors import ConfigError, IdentityError
from keepstep.model.events import INFO, WARNING
from keepstep.model.launch import RANK_OF, Launch, Predecessor
from keepstep.ports import Box
from keepstep.runtime.agent import process
from keepstep.runtime.agent.supervisor import PREDECESSOR, REPORT
from keepstep.runtime.refused_messages import TOLD_EVERY
from tests.runtime.fakes import FakeJournal

NONSENSE = """
import socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(sys.argv[1])
for _ in range(2 * int(sys.argv[2]) + 1):
    peer.send(b"nonsense")
"""
LAUNCH = Launch((sys.executable, "-u", "train.py"), ("train.py",), ranks=2, job="j")


def config(home: Path, **options: object) -> Config:
    return Config(arena_dir=home, state_dir=home / "state", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_on_several_nodes_says_that_its_blocks_are_not_signed(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    journal = FakeJournal()
    settings = resolve(config(tmp_path), {}, "j")
    process.tell_unsigned(replace(LAUNCH, nodes=nodes), settings, journal)
    told = [
        (event.kind, level) for event, level in zip(journal.events, journal.levels, strict=True)
    ]
    assert told == [("blocks-unsigned", WARNING)] * (nodes - 1)


def test_fewer_nodes_need_a_store(tmp_path: Path) -> None:
    launch = replace(LAUNCH, nodes=3, min_nodes=2, endpoint=("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="--nnodes 2:3: expected a store"):
        process.supervise(launch, config(tmp_path), {})
    assert list(tmp_path.iterdir()) == [], "nothing has begun"


def test_fewer_nodes_must_be_enough_for_what_memory_is_to_survive(tmp_path: Path) -> None:
    launch = replace(LAUNCH, nodes=3, min_nodes=2, endpoint=("127.0.0.1", 1))
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    store.mkdir()
    with pytest.raises(ConfigError, match="--nnodes 2:3: redundancy copies:3: expected at least 3"):
        process.supervise(launch, config(home, store=str(store), redundancy="copies:3"), {})
    assert list(home.iterdir()) == [], "nothing has begun"


def test_output_that_goes_nowhere_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--redirects, --tee"):
        process.supervise(replace(LAUNCH, redirects="9"), config(tmp_path), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_shells_nohup_stays_respected(is_ignored: bool) -> None:
    agent: Any = None  # no signal comes
    kinds = (signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in kinds}
    loop = Loop()
    signals = Signals(loop)
    try:
        for signum in kinds:
            signal.signal(signum, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
            process._hear(signals, signum, agent)
        passed_over = [signum for signum in kinds if signal.getsignal(signum) == signal.SIG_IGN]
        assert passed_over == [signal.SIGHUP] * is_ignored
    finally:
        signals.close()
        loop.close()
        for signum in kinds:
            signal.signal(signum, before[signum])


def test_rules_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep"):
        process.supervise(LAUNCH, config(tmp_path, keep="newest:3"), {})


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^store: expected a directory"):
        process.supervise(LAUNCH, config(tmp_path, store="/proc/nope"), {})


STARTED: tuple[str, dict[str, object]] = ("job-started", {"pid": 12})  # by the agent before


@pytest.mark.parametrize(
    ("follows", "nodes", "over", "begins"),
    [
        (True, 1, [STARTED, ("job-over", {"ok": True})], False),
        (True, 1, [("job-started", {"pid": 11}), ("job-over", {"ok": True})], True),
        (True, 1, [("job-over", {"ok": True})], True),
        (True, 1, [STARTED, ("job-over", {"ok": True}), ("resumed", {})], True),
        (True, 1, [STARTED, ("job-over", {"ok": False})], True),
        (True, 1, [], True),
        (True, 2, [STARTED, ("job-over", {"ok": True})], True),
        (False, 1, [STARTED, ("job-over", {"ok": True})], True),
    ],
)
def test_only_who_follows_an_agent_whose_ranks_had_ended_well_has_nothing_to_do(
    follows: bool,
    nodes: int,
    over: list[tuple[str, dict[str, object]]],
    begins: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several nodes the others know. Who starts a job that is over wants another run of it. What
    the journal tells of another run, whose first word was the last that could be written, is
    nothing."""
    launch = replace(LAUNCH, nodes=nodes, min_nodes=nodes, endpoint=("127.0.0.1", 1))
    settings = resolve(config(tmp_path), {}, "j")
    with closing(FileJournal(settings.journal_path, "keeper")) as journal:
        for kind, data in over:
            journal.record(kind, "why", INFO, **data)
    monkeypatch.setattr(process, "_run", lambda *_: 7)
    with open(tmp_path / "report", "w+b") as report:
        environ = {REPORT: str(report.fileno())} | ({PREDECESSOR: "12:3:15"} if follows else {})
        assert process.supervise(launch, config(tmp_path), environ) == (7 if begins else 0)
        report.seek(0)
        said = report.read()
    ended = [e.data for e in read_journal(settings.journal_path) if e.kind == "job-ended"]
    assert ended == ([] if begins else [{"ok": True}])
    assert said[8:] == (b"" if begins else bytes(8)), "the supervisor ends with 0, too"


OVER: tuple[str, dict[str, object]] = ("job-over", {"ok": True})
ENDED: tuple[str, dict[str, object]] = ("job-ended", {"ok": True})
JOINED: tuple[str, dict[str, object]] = ("rank-joined", {})  # the process that is left


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ([STARTED, JOINED, OVER], True),
        ([STARTED, JOINED, OVER, ENDED], True),  # by the agent that came too late
        ([STARTED, JOINED, ENDED, OVER], False),  # ranks were waited for: it is something else
        ([STARTED, JOINED, ("job-over", {"ok": False})], False),
        ([STARTED, JOINED, OVER, ("job-started", {"pid": 13})], False),
        ([STARTED, JOINED], False),
        ([STARTED, OVER], False),  # what stood by to become a rank, say
    ],
)
def test_a_start_does_not_end_what_is_still_at_work_after_a_good_end(
    told: list[tuple[str, dict[str, object]]],
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An export, say. Of ranks that train on there must not be two lives."""
    settings = resolve(config(tmp_path), {}, "j")
    monkeypatch.setattr(process, "_run", lambda *_: 7)
    marks = {RANK_OF: str(settings.job_dir)}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **marks}) as left:
        with closing(FileJournal(settings.journal_path, "keeper")) as journal:
            for kind, data in told:
                found = {"pid": left.pid} if kind == "rank-joined" else dict(data)
                journal.record(kind, "why", INFO, **found)
        try:
            if refused:
                with pytest.raises(IdentityError, match=f"ended well.*kill {left.pid}") as error:
                    process.supervise(LAUNCH, config(tmp_path), {})
                assert error.value.code is BY_NUMBER["KS2104"]
                assert left.poll() is None and not settings.job_dir.exists()
            else:
                assert process.supervise(LAUNCH, config(tmp_path), {}) == 7
                assert left.wait(20) == -signal.SIGKILL
        finally:
            left.kill()
    kind = "left-ranks-ended"
    said = [event.why for event in read_journal(settings.journal_path) if event.kind == kind]
    assert len(said) == (not refused) and not any("start from memory" in why for why in said)


@pytest.mark.skipif(os.geteuid() != 0, reason="making another user's file needs root")
def test_another_users_journal_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = resolve(config(tmp_path), {}, "j")
    with closing(FileJournal(settings.journal_path, "keeper")) as journal:
        journal.record("job-started", "why", pid=12)
        journal.record("job-over", "why", ok=True)
    os.chown(settings.journal_path, 65534, 65534)
    monkeypatch.setattr(process, "_run", lambda *_: 7)
    assert process.supervise(LAUNCH, config(tmp_path), {PREDECESSOR: "12:3:15"}) == 7


def test_an_agent_gets_what_was_configured(tmp_path: Path) -> None:
    environ = {PREDECESSOR: "12:3:15", "CUDA_VISIBLE_DEVICES": ""}
    asked = config(tmp_path, budget="crash=2", host="h", rack="r", link_dead_s=3.0, secret="s" * 16)
    settings = resolve(asked, {}, "j")
    found = process._options(LAUNCH, settings, environ)
    assert (found.job, found.job_dir, found.has_store) == ("j", settings.job_dir, False)
    assert (found.budget, found.host, found.rack, found.secret) == ("crash=2", "h", "r", "s" * 16)
    assert found.predecessor == Predecessor((12,), 3, 15)
    assert found.deadlines == derive(settings.hang_after_s, None)
    several = replace(LAUNCH, nodes=2, endpoint=("127.0.0.1", 1))
    assert process._options(several, settings, {}).deadlines.link_dead_ns == 3_000_000_000


class Deaf:
    def hear(self, box: Box, message: Any, /) -> None: ...

    def gone(self, box: Box, /) -> None:
        self.is_over = True

    is_over = False


def test_who_sends_the_agent_nonsense_does_not_fill_its_journal(tmp_path: Path) -> None:
    journal, path, deaf = FakeJournal(), tmp_path / "agent.sock", Deaf()
    with closing(Loop()) as loop, closing(process._serve(loop, journal, path, deaf)):
        peer = subprocess.Popen([sys.executable, "-c", NONSENSE, str(path), str(TOLD_EVERY)])
        loop.run(lambda: deaf.is_over)
        assert peer.wait(20) == 0
    told = [event.data["count"] for event in journal.events if event.kind == "message-refused"]
    assert told == [1, TOLD_EVERY + 1, 2 * TOLD_EVERY + 1]
