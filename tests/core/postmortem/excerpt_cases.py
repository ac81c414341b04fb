"""Excerpts of failed runs, written in the formats of many launchers and libraries, each with the
class and the rank that were decided before anything read it. `first.txt` was written when the table
of patterns had not seen any of them, `second.txt` when it had been mended by the first.

    ##### name | class | rank, or - for nobody in particular
    === path of a file
    its lines
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "excerpts"


@dataclass(frozen=True)
class LogsOfCase:
    name: str
    kind: str
    rank: int | None
    files: dict[str, bytes]


def cases(name: str) -> list[LogsOfCase]:
    return [_case(text) for text in (HERE / name).read_text().split("##### ")[1:]]


def _case(text: str) -> LogsOfCase:
    head, _, body = text.partition("\n")
    name, kind, rank = (word.strip() for word in head.split("|"))
    files = {}
    for part in ("\n" + body).split("\n=== ")[1:]:
        path, _, lines = part.partition("\n")
        files[path.strip()] = (lines.rstrip("\n") + "\n").encode()
    return LogsOfCase(name, kind, None if rank == "-" else int(rank), files)
