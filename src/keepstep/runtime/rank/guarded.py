"""Guarded: work for snapshots, whose failures cost a snapshot and never reach the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from keepstep.ports import Acts

T = TypeVar("T")


@dataclass(frozen=True)
class FailedWork:
    """Work for a snapshot raised."""

    why: str


def guarded(acts: Acts[T]) -> Acts[T | FailedWork]:
    """The same work; what it raises costs a snapshot and is told, but never reaches the trainer.

    The one place in the package where everything is caught.
    """
    try:
        return (yield from acts)
    except Exception as error:  # noqa: BLE001
        return FailedWork(f"{type(error).__name__}: {error}")
