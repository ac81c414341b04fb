"""Keepers: where the keeper of a job answers, over the job directory's socket, and how one is
started.

A keeper that an earlier run has told something else (another store, say) is ended when it is found
for the first time: the next one adopts what it held. Never blocks the loop: starting a process is
done aside.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from keepstep.config import Settings
from keepstep.edge.net import boxes
from keepstep.edge.os.job_directory import claim_job_dir, is_own_job_dir
from keepstep.edge.os.keeper_settings import differences
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.processes import start_keeper
from keepstep.edge.os.threads import aside
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.units import S_NS
from keepstep.ports import Box, Hearer, MessageCodec


class KeeperSocket:
    """See `ports.KeeperDoor`. `codec`: of this process's part in what it and a keeper say."""

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
        self._has_met = False  # a keeper with these settings: what comes later is somebody else's
        self._ended: set[int] = set()

    def connect(self, hearer: Hearer) -> Box | None:
        if not is_own_job_dir(self._settings.job_dir):  # `start` makes it, or says what is wrong
            return None
        path = self._settings.job_dir / "keeper.sock"
        try:
            box = boxes.connect(self._loop, path, self._codec, hearer, self._tell)
        except OSError:
            return None
        if not self._has_met:
            others = differences(self._settings)
            if others:
                self._replace(box, others)
                return None
            self._has_met = True
        return box

    def _replace(self, box: Box, others: list[str]) -> None:
        """It was told something else, by an earlier run or another process. What it holds is in
        memory, and its successor adopts it."""
        if box.pid not in self._ended:
            self._ended.add(box.pid)
            self._tell(
                "keeper-replaced",
                f"the keeper (process {box.pid}) has other settings, and another one takes its "
                f"place: {'; '.join(others)}",
            )
        self.end(box)
        box.close()

    def end(self, box: Box) -> None:
        """The kernel has named the process, as one of this user's; while the connection is there
        nobody else has its number. One in another PID namespace has none here: 0."""
        if box.pid > 0:
            with suppress(ProcessLookupError):
                os.kill(box.pid, signal.SIGKILL)

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
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

    def in_vain(self, within_ns: int) -> KeeperError:
        path = self._settings.job_dir / "keeper.sock"
        log = self._settings.journal_path.with_name("keeper.log")
        return KeeperError(f"no keeper answered at {path} within {within_ns // S_NS} s; log: {log}")
