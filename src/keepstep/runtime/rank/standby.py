"""Standby: a process that has imported torch and waits to become a rank, `python -m
keepstep.runtime.rank.standby`.

Importing takes seconds; becoming takes milliseconds. Comes in: a command line and an environment.
Goes out: the program, run as `python script.py` or `python -m module` would. Does nothing of its
own before that, and ends with its agent.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.core.wire.conversations import PROCESS_WITH_AGENT
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.model.messages.agent_rank import BecomeRank, StandbyReady
from keepstep.runtime.rank.agent_client import CONNECT_S, SOCKET


def can_become(command: tuple[str, ...]) -> bool:
    """Whether the command is a Python program that this interpreter can take over."""
    entry, *words = command
    interpreter = entry == sys.executable
    return interpreter and bool(_program(words))


def _program(words: list[str]) -> list[str]:
    """What follows the interpreter's own `-u`, which a standby process has as well; nothing when
    there are other options."""
    rest = words[1:] if words[:1] == ["-u"] else words
    if rest[:1] == ["-m"]:
        return rest if len(rest) > 1 else []
    return rest if rest and not rest[0].startswith("-") else []


def become(order: BecomeRank) -> None:
    os.environ.update(order.environ)
    sys.argv = _program(list(order.command[1:]))
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


@contextmanager
def in_idle_time() -> Iterator[None]:
    """The trainers come first. Only where this process may take its place among them again
    afterwards, which takes privilege."""
    may_return = os.geteuid() == 0
    if may_return:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        yield
    finally:
        if may_return:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    with in_idle_time():
        from keepstep.edge.torch.prewarm import warm_up
        from keepstep.runtime.rank import session

        assert session  # it is what the program imports next
        warm_up()
    try:
        box = Mailbox.connect(Path(os.environ[SOCKET]), CONNECT_S, PROCESS_WITH_AGENT)
    except OSError:
        return  # the job has ended meanwhile
    box.send(StandbyReady(os.getpid()))
    message = box.recv()
    box.close()
    if isinstance(message, BecomeRank):  # else the agent has ended: nobody needs this process
        become(message)


if __name__ == "__main__":
    main()
