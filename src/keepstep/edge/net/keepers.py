"""Keepers: where the keeper of a job answers, over the job directory's socket, and how one is
started.

A keeper that was told something else (another store, say) by an earlier run, or by an agent that
does not know what the program says in code, is ended when it is found: the next one adopts what it
held. One that another rank has told something else, which lives, is that rank's: their program says
different things on different ranks, and whoever comes later hears so instead of a keeper. Never
blocks the loop: starting a process is done aside.
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
from keepstep.edge.os.keeper_settings import Teller, differences, teller_of
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.processes import start_keeper
from keepstep.edge.os.threads import aside
from keepstep.errors import ConfigError, KeeperError, KeepstepError
from keepstep.model.units import S_NS
from keepstep.ports import Box, Hearer, MessageCodec


class KeeperSocket:
    """See `ports.KeeperDoor`. `codec`: of this process's part in what it and a keeper say. `rank`:
    that is here; None in an agent."""

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        codec: MessageCodec,
        tell: boxes.Tell,
        rank: int | None = None,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._codec = codec
        self._tell = tell
        self._here = None if rank is None else Teller.here(rank)
        self._has_met = False  # a keeper with these settings: what comes later is somebody else's
        self._conflict: ConfigError | None = None
        self._ended: set[int] = set()

    def connect(self, hearer: Hearer) -> Box | None:
        if not is_own_job_dir(self._settings.job_dir):  # `start` makes it, or says what is wrong
            return None
        path = self._settings.job_dir / "keeper.sock"
        try:
            box = boxes.connect(self._loop, path, self._codec, hearer, self._tell)
        except OSError:
            return None
        others = self._told_otherwise()
        if others:
            self._replace(box, others)
            return None
        if self._conflict is not None:
            box.close()
            return None
        self._has_met = True
        return box

    def _told_otherwise(self) -> list[str]:
        """In what, where a keeper with these settings is to take its place. One that a living rank
        has told is nobody else's to end: two would do so for ever."""
        self._conflict = None
        if self._has_met and self._here is None:
            return []  # code wins over flags: what ranks tell a keeper, no agent knows better
        others = differences(self._settings)
        teller = teller_of(self._settings) if others else None
        if teller is None or teller == self._here:
            return others
        if self._here is not None and not self._has_met:
            self._conflict = ConfigError(
                f"ranks {teller.rank} and {self._here.rank} of job {self._settings.job} are told "
                f"different things. Expected on rank {self._here.rank}, found on rank "
                f"{teller.rank} (process {teller.pid}): {'; '.join(others)}. Set the same on each"
            )
        return []

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
        settings, conflict = self._settings, self._conflict
        teller = "" if self._here is None else self._here.to_text()

        def work() -> KeepstepError | None:
            if conflict is not None:
                return conflict
            try:
                claim_job_dir(settings.job_dir)
                start_keeper(settings, teller)
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
