"""Keepers: how a process finds the keeper of its job, over the job directory's socket.

Connects to the one that lives; where none does, starts one and tries again. Never blocks the loop:
starting a process is done aside.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from keepstep.config import Settings
from keepstep.edge.net import boxes
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.processes import claim_job_dir, start_keeper
from keepstep.edge.os.threads import aside
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box, Hearer, MessageCodec

FIND_WITHIN_NS = 10 * S_NS
LOOK_AGAIN_NS = 10 * MS_NS
# Several processes may start one each: the lock in the job directory lets one live.
START_AGAIN_NS = 3 * S_NS
START_ERRORS = (KeepstepError, OSError, subprocess.SubprocessError)


class NodeKeepers:
    """See `ports.Keepers`. `codec`: of this process's part in what it and a keeper say."""

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        codec: MessageCodec,
        tell: boxes.Tell,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._codec = codec
        self._tell = tell

    def find(
        self,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        search = _Search(self, hearer, found, missing)
        self._loop.after(0, search.look)

    def connect(self, hearer: Hearer) -> Box | None:
        path = self._settings.job_dir / "keeper.sock"
        try:
            return boxes.connect(self._loop, path, self._codec, hearer, self._tell)
        except OSError:
            return None

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        self._loop.after(delay_ns, call)

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
        """Start a keeper; `then` hears None, or why it cannot be."""
        settings = self._settings

        def work() -> KeepstepError | None:
            try:
                claim_job_dir(settings.job_dir)
                start_keeper(settings)
            except KeepstepError as error:
                return error
            except (OSError, subprocess.SubprocessError) as error:
                return KeeperError(f"no keeper can be started: {error}")
            return None

        aside(self._loop.post, work, then)

    @property
    def in_vain(self) -> KeeperError:
        path = self._settings.job_dir / "keeper.sock"
        log = self._settings.journal_path.with_name("keeper.log")
        seconds = FIND_WITHIN_NS // S_NS
        return KeeperError(f"no keeper answered at {path} within {seconds} s; its log: {log}")


class _Search:
    """For one connection."""

    def __init__(
        self,
        keepers: NodeKeepers,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        self._keepers = keepers
        self._hearer = hearer
        self._found = found
        self._missing = missing
        self._deadline_ns = time.monotonic_ns() + FIND_WITHIN_NS
        self._started_ns: int | None = None

    def look(self) -> None:
        box = self._keepers.connect(self._hearer)
        now_ns = time.monotonic_ns()
        if box is not None:
            self._found(box)
        elif now_ns > self._deadline_ns:
            self._missing(self._keepers.in_vain)
        elif self._started_ns is None or now_ns - self._started_ns > START_AGAIN_NS:
            self._started_ns = now_ns
            self._keepers.start(self._started)
        else:
            self._keepers.after(LOOK_AGAIN_NS, self.look)

    def _started(self, error: KeepstepError | None) -> None:
        if error is not None:
            self._missing(error)
        else:
            self._keepers.after(LOOK_AGAIN_NS, self.look)
