"""Events at made-up times, and what a person sees of a renderable."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType

from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS

WALL_NS = 1_700_000_000 * S_NS


def at(ms: int, who: str, kind: str, why: str, **data: Any) -> Event:
    """An event so many milliseconds after the first."""
    return Event(WALL_NS + ms * MS_NS, ms * MS_NS, who, kind, why, data)


def shown(what: RenderableType, width: int = 100) -> str:
    """What a person sees of it."""
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
