"""Stage: where a rank is between its beginning and its end. `rank.py` says what each one is."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    STARTING = auto()
    READY = auto()
    REGROUPING = auto()
    GOING_BACK = auto()
    ENDING = auto()
    OVER = auto()
    FAILED = auto()
