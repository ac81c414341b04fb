"""Reading files that are not there, and calls that take too long."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from keepstep.edge.doctor.host import (
    Host,
    TimedAnswer,
    addresses_of,
    is_clock_synchronised,
    output_of,
    pidfd_refusal,
    space_of,
    table_of,
    whole,
)


def test_paths_are_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "number").write_text(" 17\n")
    (tmp_path / "proc" / "words").write_bytes(b"a: 1\nb : 2 \xff\nnothing")
    host = Host(root=tmp_path)
    assert (host.text("/proc/number"), host.number("/proc/number")) == ("17", 17)
    assert host.number("/proc/words") is None and host.text("/proc/none") is None
    assert host.names("/proc") == ["number", "words"] and host.names("/none") == []
    assert table_of(host.text("/proc/words")) == {"a": "1", "b": "2 \N{REPLACEMENT CHARACTER}"}
    assert host.may("/proc/number", os.R_OK) and not host.may("/proc/none", os.R_OK)
    assert whole("x") is None and whole(None) is None


def test_the_calls_of_this_machine_answer(tmp_path: Path) -> None:
    assert 0 <= space_of(tmp_path).free_bytes <= space_of(tmp_path).total_bytes
    assert is_clock_synchronised() in (True, False, None)
    assert pidfd_refusal() == ""
    assert addresses_of("no-such-host.invalid") == ()
    assert output_of([sys.executable, "-c", "print(1)"], 60.0) == "1\n"


def test_a_program_that_fails_says_why_and_one_that_hangs_is_ended() -> None:
    with pytest.raises(OSError, match="broken driver"):
        output_of([sys.executable, "-c", "import sys; sys.exit('broken driver')"], 60.0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        output_of([sys.executable, "-c", "import signal; signal.pause()"], 0.1)
    with pytest.raises(FileNotFoundError):
        output_of(["/no/such/tool"], 1.0)


def test_an_answer_is_waited_for_no_longer_than_asked() -> None:
    held = threading.Event()

    def ask() -> tuple[str, ...]:
        held.wait(60)
        return ("10.0.0.7",)

    answer = TimedAnswer(ask)
    assert answer.get(0.01) == ((), None)
    held.set()
    addresses, took_s = answer.get(60.0)
    assert addresses == ("10.0.0.7",) and took_s is not None
