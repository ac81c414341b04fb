"""Excerpts of failed runs, written in the formats of many launchers and libraries, each with the
class and the rank that were decided before anything read it. `first.txt` was written when the table
of patterns had not seen any of them, `second.txt` when it had been mended by the first; the others
later, by somebody who had seen none of it, each when it had been mended by the one before.

    ##### name | class | rank, or - for nobody in particular
    === path of a file
    its lines

A file whose name ends with `.gz` is packed.
"""

from __future__ import annotations

import gzip
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
        data, name_of = (lines.rstrip("\n") + "\n").encode(), path.strip()
        files[name_of] = gzip.compress(data) if name_of.endswith(".gz") else data
    return LogsOfCase(name, kind, None if rank == "-" else int(rank), files)
