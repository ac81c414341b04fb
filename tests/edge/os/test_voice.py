"""What an agent shows of what it keeps in the journal."""

from __future__ import annotations

import logging

import pytest

from keepstep.edge.os.voice import log, speak_of_job

RESTART = [
    ("diagnosis", logging.INFO),
    ("rank-exited", logging.WARNING),
    ("anew", logging.WARNING),
    ("rank-respawned", logging.INFO),
    ("ranks-restarted", logging.INFO),
]


def shown(
    monkeypatch: pytest.MonkeyPatch, how_much: str, events: list[tuple[str, int]]
) -> list[str]:
    # as in a process of its own, without the handlers of the tests' runner
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    speak_of_job(how_much)
    (handler,) = log.handlers
    records = [
        logging.LogRecord("keepstep", level, "", 0, kind, (), None) for kind, level in events
    ]
    for record in records:
        record.keepstep_kind = record.msg
    return [record.msg for record in records if handler.filter(record)]


def test_a_restart_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "info", RESTART) == ["anew"]
    assert shown(monkeypatch, "debug", RESTART) == [kind for kind, _ in RESTART]
    stayed = [("plan", logging.WARNING), *RESTART[3:], ("recovered", logging.WARNING)]
    assert shown(monkeypatch, "info", stayed) == ["plan", "recovered"]
    awaiting = [("nodes-awaited", logging.WARNING), ("anew", logging.INFO)]
    assert shown(monkeypatch, "info", awaiting) == ["nodes-awaited"]


def test_who_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = [("diagnosis", logging.WARNING)]
    assert shown(monkeypatch, "info", hangs) == ["diagnosis"]


def test_what_others_have_written_changes_no_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store's error, say: whoever answers there chooses its words."""
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    speak_of_job("info")
    log.error("the store says \x1b]0;mine\x07\x1b[2J")
    told = capsys.readouterr().err
    assert "the store says ?]0;mine??[2J" in told and "\x1b" not in told
