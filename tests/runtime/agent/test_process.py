"""Agent process: what cannot be is refused before anything begins, and an agent gets what was
configured."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import Config, resolve
from keepstep.core.detection.deadlines import derive
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.signals import Signals
from keepstep.errors import ConfigError
from keepstep.model.launch import Launch, Predecessor
from keepstep.runtime.agent import process
from keepstep.runtime.agent.supervisor import PREDECESSOR

LAUNCH = Launch((sys.executable, "-u", "train.py"), ("train.py",), ranks=2, job="j")


def config(home: Path, **options: object) -> Config:
    return Config(arena_dir=home, state_dir=home / "state", **options)  # type: ignore[arg-type]


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
