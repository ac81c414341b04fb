"""Keepers: where the keeper of a job answers, over the job directory's socket, and how one is
started.

Never blocks the loop: starting a process is done aside.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from keepstep.config import Settings
from keepstep.edge.net import boxes
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.processes import claim_job_dir, start_keeper
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

    def connect(self, hearer: Hearer) -> Box | None:
        path = self._settings.job_dir / "keeper.sock"
        try:
            return boxes.connect(self._loop, path, self._codec, hearer, self._tell)
        except OSError:
            return None

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
