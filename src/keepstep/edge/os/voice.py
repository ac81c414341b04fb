"""Voice: what a person sees of keepstep on stderr, beside what the journal keeps.

Comes in: how much is asked for (`log`, KEEPSTEP_LOG). Goes out: a handler of the logger "keepstep".
A program that has set up Python's logging by itself decides alone: nothing is added there.
"""

from __future__ import annotations

import logging
import sys

from keepstep.model.decoding import on_a_screen

LEVELS = {
    "quiet": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
# Kinds of event that a person wants to know of in a training that goes well: three lines; and what
# it does when it is told to end, or takes long to.
SPOKEN = {"protected", "goes-on", "summary", "preempted", "persist-awaited"}
# Steps of a recovery: what has happened and what is done about it is one warning, at once (`plan`
# where ranks stay in their process, else `anew`; or, when there is neither, `job-ended`), and
# `recovered` says when those that stayed train on.
REPEATED = {"rank-exited", "diagnosis", "anew", "rank-respawned", "ranks-restarted"}

log = logging.getLogger("keepstep")


class _Spoken(logging.Filter):
    """Lets through what is worth a line of a training's output. `speaks`: this rank does so for
    all; any rank tells what is wrong."""

    def __init__(self, speaks: bool) -> None:
        super().__init__()
        self._speaks = speaks

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, "keepstep_kind", None)
        return record.levelno >= logging.WARNING or (self._speaks and kind in SPOKEN)


def speak_of_training(how_much: str, speaks: bool) -> None:
    """In a trainer. `how_much`: one of LEVELS; with `debug` every event of this process is shown.
    `speaks`: this rank tells what all ranks have in common."""
    handler = _begin(how_much, "keepstep: %(message)s")
    if handler is not None and how_much != "debug":
        handler.addFilter(_Spoken(speaks))


def _is_news(record: logging.LogRecord) -> bool:
    kind = getattr(record, "keepstep_kind", None)
    return kind not in REPEATED or (record.levelno >= logging.WARNING and kind != "rank-exited")


def speak_of_job(how_much: str) -> None:
    """In an agent, whose output is its own: every event; but one line of a restart, unless all is
    asked for."""
    handler = _begin(how_much, "%(asctime)s keepstep %(message)s")
    if handler is not None and how_much != "debug":
        handler.addFilter(_is_news)


def _begin(how_much: str, form: str) -> logging.Handler | None:
    """The handler, or None where the program has its own."""
    if log.hasHandlers() and not any(isinstance(h, _Handler) for h in log.handlers):
        return None
    for old in [h for h in log.handlers if isinstance(h, _Handler)]:
        log.removeHandler(old)
    handler = _Handler()
    handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(LEVELS[how_much])
    return handler


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, on whatever stderr is at the time of each line."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return on_a_screen(super().format(record))
