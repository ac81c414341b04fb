"""Processes: starting the keeper so that it outlives whoever starts it, and finding a living one.

The keeper gets its own session (no Ctrl-C, no group kill reaches it), its own standard streams, and
is adopted by init: the intermediate process exits at once, so the trainer never has an unknown
child to wait for.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from keepstep.config import Settings
from keepstep.edge.net.unix_socket import Mailbox, OnRefused, ignore_refused
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.own_file import append_to_own, read_regular
from keepstep.edge.os.own_modules import found_from_anywhere, module_words
from keepstep.edge.os.said import LAST_BYTES, last_line
from keepstep.errors import KeeperError
from keepstep.model.launch import AGENT_SOCKET, RANK_OF
from keepstep.ports import MessageCodec

RAY_MARK = "KEEPSTEP_RAY_AGENT"  # in the environment of what a Ray actor has started
# By which an agent's processes are found, and find it.
RANK_MARKS = ("KEEPSTEP_AGENT", AGENT_SOCKET, RANK_OF, RAY_MARK)

KEEPER_MODULE = "keepstep.runtime.keeper.process"  # stands on a keeper's command line
_LAUNCH = (
    "import os,sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.executable, "
    "[sys.executable, *sys.argv[1:]])"
)


log = logging.getLogger("keepstep")


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
    started_at, silent_at = 0.0, _size_of(log_path)
    claim_job_dir(settings.job_dir)
    while True:
        try:
            return Mailbox.connect(socket_path, timeout_s, codec, on_refused)
        except OSError:
            pass
        now = time.monotonic()
        if now > deadline:
            said = _said_in(log_path, silent_at)
            last = f"; its last line: {said}" if said else ""
            raise KeeperError(
                f"no keeper answered at {socket_path} within {timeout_s:.0f} s{last}; its log: "
                f"{log_path}"
            )
        # several ranks may start one each: the lock in the job directory lets one live
        if now - started_at > 3.0:
            started_at = now
            claim_job_dir(settings.job_dir)
            start_keeper(settings)
        time.sleep(0.01)


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _said_in(path: Path, after: int) -> str:
    """The last line that was written there behind so many bytes; empty when none was, or it cannot
    be read."""
    try:
        if (size := _size_of(path)) <= after:
            return ""
        with open(read_regular(path), "rb") as file:
            file.seek(max(after, size - LAST_BYTES))
            return last_line(file.read(LAST_BYTES))
    except OSError:
        return ""


def _log_at(path: Path) -> int:
    """What a keeper says outside of its journal; nowhere where that cannot be written, be the disk
    full or something else in its place, since nothing depends on it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return append_to_own(path)
    except OSError as error:
        log.warning(
            "the keeper's log %s cannot be written (%s): what it says outside of the journal is "
            "lost [KS5225]",
            path,
            error,
        )
        return os.open(os.devnull, os.O_WRONLY)


def start_keeper(settings: Settings, teller: str = "") -> None:
    """Start a keeper of its own session. teller: as in `write_keeper_settings`. Raises OSError,
    subprocess.SubprocessError."""
    with os.fdopen(_log_at(settings.journal_path.with_name("keeper.log")), "ab") as log:
        subprocess.run(
            [
                sys.executable,
                "-c",
                _LAUNCH,
                *module_words(KEEPER_MODULE, settings.to_text(), teller),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            # It outlives the agent: what ends that one's processes must not take it for a rank.
            env={
                **found_from_anywhere(
                    {name: v for name, v in os.environ.items() if name not in RANK_MARKS}
                ),
                **settings.secret_env(),
            },
            check=True,
        )
