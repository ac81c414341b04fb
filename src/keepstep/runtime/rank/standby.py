"""Standby: a process that has imported torch and waits to become a rank,
`python -m keepstep.runtime.rank.standby`.

Importing takes seconds; becoming takes milliseconds. Comes in: a command line and an environment.
Goes out: the program, run as `python script.py` or `python -m module` would. Does nothing of its
own before that, and ends with its agent.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from keepstep.core.recovery.standby import program_of
from keepstep.core.wire.conversations import PROCESS_WITH_AGENT
from keepstep.edge.net.agents import NodeAgents
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.priority import in_idle_time
from keepstep.model.messages.agent_rank import BecomeRank, StandbyReady, ToProcess
from keepstep.ports import Box


def become(message: BecomeRank) -> None:
    """Be the program from now on; returns when it ends."""
    os.environ.update(message.environ)
    sys.argv = program_of(message.command[1:])
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


class Waiting:
    """For the agent's word; `is_over` when it has said it, or is gone."""

    def __init__(self) -> None:
        self.is_over = False
        self.order: BecomeRank | None = None

    def hear(self, box: Box, message: ToProcess) -> None:
        if isinstance(message, BecomeRank):
            self.order = message
            self.is_over = True

    def gone(self, box: Box) -> None:
        self.is_over = True


def wait_for_order() -> BecomeRank | None:
    """None when the agent has ended, and nobody needs this process."""
    loop, waiting = Loop(), Waiting()
    box = NodeAgents(loop, os.environ, PROCESS_WITH_AGENT, _untold).find(waiting)
    if box is None:
        return None
    box.send(StandbyReady(os.getpid()))
    loop.run(lambda: waiting.is_over)
    box.close()
    loop.close()
    return waiting.order


def _untold(kind: str, why: str) -> None:
    """This process has no journal: its agent has."""


def main() -> None:
    with in_idle_time():
        from keepstep.edge.torch.prewarm import warm_up
        from keepstep.runtime.rank import session

        assert session  # it is what the program imports next
        warm_up()
    order = wait_for_order()
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
