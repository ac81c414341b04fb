"""Kubernetes provider: another pod in place of a lost node's.

Comes in: what was lost. Goes out: one sentence, from a child process that speaks with the API
server (`runtime/agent/pod_replacing.py`). An API server that hangs hinders nobody.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

from keepstep.edge.os.own_modules import module_words
from keepstep.edge.os.provider import environ_of
from keepstep.edge.os.said import last_line
from keepstep.model.lost import LostNode

WITHIN_S = 600.0  # the child gives up before


class KubernetesProvider:
    """See `ports.NodeProvider`. may_force: a pod whose machine does not answer is deleted at last
    without its word."""

    def __init__(self, may_force: bool = False) -> None:
        self._may_force = may_force

    def replace(self, lost: LostNode, then: Callable[[str], None]) -> None:
        threading.Thread(
            target=self._run, args=(lost, then), name="keepstep-provider", daemon=True
        ).start()

    def _run(self, lost: LostNode, then: Callable[[str], None]) -> None:
        force = ["--force"] if self._may_force else []
        try:
            done = subprocess.run(
                [sys.executable, *module_words("keepstep.runtime.agent.pod_replacing", *force)],
                env=environ_of(lost),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=WITHIN_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            then(f"Kubernetes could not be asked: {error}")
            return
        if done.returncode == 0:
            then(last_line(done.stdout))
        else:
            then(f"Kubernetes could not be asked: {last_line(done.stderr)}")
