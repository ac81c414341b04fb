"""Provider: asks the platform for a machine in place of a lost one, by a command of the user's.

A command is what all platforms have: `scontrol requeue`, `sbatch`, a cloud's own. Comes
in: what was lost. Goes out: the command's exit, told to whoever waits for it. A replacement
announces itself by joining the job like any other node.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import astuple

from keepstep.config.settings import INTERNAL
from keepstep.edge.os.said import LAST_BYTES
from keepstep.model.lost import LOST_VARIABLES, LostNode


def environ_of(lost: LostNode) -> dict[str, str]:
    """The user's, and what was lost. What keepstep's processes hand down to each other is of this
    node: `sbatch` would hand it on to the agent of another one."""
    told = zip(LOST_VARIABLES, map(str, astuple(lost)), strict=True)
    kept = {name: value for name, value in os.environ.items() if name not in INTERNAL}
    return {**kept, **dict(told)}


class CommandProvider:
    """Runs `command` by the shell with KEEPSTEP_LOST_NODE, KEEPSTEP_LOST_HOST, KEEPSTEP_LOST_JOB
    and KEEPSTEP_LOST_WHY set."""

    def __init__(self, command: str) -> None:
        self._command = command

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        threading.Thread(
            target=self._run, args=(environ_of(lost), then), name="keepstep-provider", daemon=True
        ).start()

    def _run(self, environ: dict[str, str], then: Callable[[str], None]) -> None:
        try:
            done = subprocess.run(
                self._command,
                shell=True,
                env=environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
        except OSError as error:
            then(f"`{self._command}` cannot be run: {error}")
            return
        said = done.stderr[-LAST_BYTES:].decode(errors="replace").strip()
        then(
            f"`{self._command}` exited with {done.returncode}"
            + (f": {said}" if done.returncode and said else "")
        )
