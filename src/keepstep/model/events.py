"""Events: what happened and why, one line of the journal each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

# How loud an event is in the log, as `logging` counts.
INFO, WARNING, ERROR = 20, 30, 40


@dataclass(frozen=True, slots=True)
class Event:
    """One fact or decision.

    `wall_ns` places it among other machines' events, `mono_ns` measures (CLOCK_MONOTONIC, one
    machine). `who` is `rank 3`, `keeper`, `persister`, `agent` or `drill`; `kind` is a stable word
    tools may match; `why` is the sentence people read; `data` holds the numbers in it.
    """

    wall_ns: int
    mono_ns: int
    who: str
    kind: str
    why: str
    data: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), default=str) + "\n"


def event_from_line(line: str) -> Event:
    """The inverse of `to_line`. Raises ValueError on a torn or foreign line."""
    try:
        return Event(**json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
