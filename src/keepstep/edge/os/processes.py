"""Processes: starting the keeper so that it outlives whoever starts it, and finding a living one.

The keeper gets its own session (no Ctrl-C, no group kill reaches it), its own standard streams, and
is adopted by init: the intermediate process exits at once, so the trainer never has an unknown
child to wait for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from keepstep.config import Settings
from keepstep.edge.net.unix_socket import Mailbox, OnRefused, ignore_refused
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.errors import KeeperError
from keepstep.model.launch import AGENT_SOCKET
from keepstep.ports import MessageCodec

RANK_MARKS = ("KEEPSTEP_AGENT", AGENT_SOCKET)  # by which an agent's processes are found

KEEPER_MODULE = "keepstep.runtime.keeper.process"  # stands on a keeper's command line
_LAUNCH = (
    "import os,sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)


def ensure_keeper(
    settings: Settings,
    codec: MessageCodec,
    timeout_s: float = 10.0,
    on_refused: OnRefused = ignore_refused,
) -> Mailbox:
    """A connection to the job's keeper, starting one if none lives. `codec`: of the conversation
    with it. Raises KeeperError, IdentityError."""
    socket_path = settings.job_dir / "keeper.sock"
    deadline = time.monotonic() + timeout_s
    log_path = settings.journal_path.with_name("keeper.log")
    started_at = 0.0
    claim_job_dir(settings.job_dir)
    while True:
        try:
            return Mailbox.connect(socket_path, timeout_s, codec, on_refused)
        except OSError:
            pass
        now = time.monotonic()
        if now > deadline:
            raise KeeperError(
                f"no keeper answered at {socket_path} within {timeout_s:.0f} s; its log: {log_path}"
            )
        # several ranks may start one each: the lock in the job directory lets one live
        if now - started_at > 3.0:
            started_at = now
            claim_job_dir(settings.job_dir)
            start_keeper(settings)
        time.sleep(0.01)


def start_keeper(settings: Settings) -> None:
    """Start a keeper of its own session. Raises OSError, subprocess.SubprocessError."""
    log_path = settings.journal_path.with_name("keeper.log")
    log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(log_path, "ab", opener=_for_owner_alone) as log:
        subprocess.run(
            [
                sys.executable,
                "-c",
                _LAUNCH,
                "-m",
                KEEPER_MODULE,
                settings.to_text(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            # It outlives the agent: what ends that one's processes must not take it for a rank.
            env={
                **{name: v for name, v in os.environ.items() if name not in RANK_MARKS},
                **settings.secret_env(),
            },
            check=True,
        )


def _for_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
