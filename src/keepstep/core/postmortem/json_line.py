"""A line of a log that is JSON: what it says, as the plain lines that a logger would have written.

Comes in: one line as text. Goes out: its lines, with time, level and rank at their heads, or none
where it is no such record. Docker keeps what a container prints this way, and programs with a
structured logger write nothing else.

Names of fields differ; those here are of Docker, Python's JSON loggers, structlog, Cloud Logging
and Elastic. A record that was cut is none: what it quotes might be anything.
"""

from __future__ import annotations

from keepstep.model.decoding import from_json

MOST_LINES = 200
WORDS = ("log", "message", "msg", "event", "text")
ERRORS = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stack", "error")
TIMES = ("time", "ts", "timestamp", "@timestamp", "asctime", "t")
LEVELS = ("level", "levelname", "severity", "lvl", "log_level")
RANKS = ("rank", "global_rank")


def plain_lines(text: str) -> list[str]:
    """What the record says, an error's lines last; empty: it is no record."""
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return []
    try:
        record = from_json(text)
    except ValueError:
        return []
    if not isinstance(record, dict):
        return []
    words = _first(record, WORDS)
    error = _first(record, ERRORS)
    if not words and not error:
        return []
    head = _head(record)
    return [head + line for line in [*words.splitlines(), *error.splitlines()][:MOST_LINES]]


def rank_of(text: str) -> str:
    """As the record tells its rank: what other records of the same rank have, too. Or empty."""
    for name in RANKS:
        for mark in (f'"{name}": ', f'"{name}":'):
            begin = text.find(mark)
            if begin >= 0:
                return text[begin : text.find(",", begin) + 1] or text[begin:]
    return ""


def _head(record: dict[str, object]) -> str:
    parts = [_first(record, TIMES)]
    if level := _first(record, LEVELS).upper():
        parts.append(level)
    rank = next((record[name] for name in RANKS if isinstance(record.get(name), int)), None)
    if rank is not None:
        parts.append(f"[rank{rank}]:")
    return "".join(f"{part} " for part in parts if part)


def _first(record: dict[str, object], names: tuple[str, ...]) -> str:
    return next((v for name in names if isinstance(v := record.get(name), str) and v), "")
