"""Ports: what the runtime asks of the world, as Protocols of few methods. `edge/` has the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from keepstep.model.lost import LostNode


class KV(Protocol):
    """A small memory that all nodes of a job share. `edge/torch/kv_embedded.py` is one agent's own, `edge/kv_etcd.py` nobody's.

    `swap` is all that writes, and it writes at one instant for everybody: seats and verdicts are swapped against nothing, so that the
    first writer wins; who coordinates is swapped against what was read. Nobody writes a value, in one key, that was there before: a
    `swap` that was not answered may be asked again, and may take effect late, and does no harm. No value is empty.

    A client is for one thread. Everything raises MeetingError when the memory is gone; what passes (a restart, an election) is waited out.
    """

    def swap(self, key: str, expected: str | None, value: str) -> str | None:
        """What is there now: `value`, if `expected` was there (None: nothing)."""

    def read(self, keys: Sequence[str]) -> list[str | None]:
        """What is there, as of some instant after the question."""

    def wait(self, keys: Sequence[str], within_s: float | None) -> list[str] | None:
        """What is there once something is at all of these; None when that was not so in time."""

    def another(self) -> KV:
        """A client for another thread."""


class NodeProvider(Protocol):
    """Who can give a machine in place of a lost one. `edge/provider.py` asks the platform by a command."""

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        """Ask for it, without waiting; `then` hears, from any thread, what became of that. The replacement joins the job by itself."""
