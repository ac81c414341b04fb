"""Standby: a process that has imported torch and waits to become a rank,
`python -m keepstep.runtime.rank.standby`.

Importing takes seconds; becoming takes milliseconds. Comes in: a command line and an environment.
Goes out: the program, run as `python script.py` or `python -m module` would. Before that it does
nothing of its own but call the functions that the option `prebuild` names, and it ends with its
agent.
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
from keepstep.model.launch import PREBUILD
from keepstep.model.messages.agent_rank import BecomeRank, StandbyReady, ToProcess
from keepstep.ports import Box


def become(message: BecomeRank) -> None:
    """Be the program from now on; returns when it ends."""
    os.environ.update(message.environ)
    sys.argv = program_of(message.command[1:])
    sys.path.insert(0, _first_place(sys.argv))
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
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


def wait_for_order(unbuilt: str = "") -> BecomeRank | None:
    """None when the agent has ended, and nobody needs this process. `unbuilt`: what could not be
    built ahead."""
    loop, waiting = Loop(), Waiting()
    box = NodeAgents(loop, os.environ, PROCESS_WITH_AGENT, _untold).find(waiting)
    if box is None:
        return None
    box.send(StandbyReady(os.getpid(), unbuilt))
    loop.run(lambda: waiting.is_over)
    box.close()
    loop.close()
    return waiting.order


def _untold(kind: str, why: str) -> None:
    """This process has no journal: its agent has."""


def _build_ahead(words: list[str]) -> str:
    """What the program will ask for, of which `words` is the command line: its modules are found as
    it finds them. Returns what could not be built, and why; the program will raise it again."""
    from keepstep.edge.torch.prebuilt import build_ahead

    targets = os.environ.get(PREBUILD, "").replace(",", " ").split()
    path, program = list(sys.path), program_of(words)
    if program:
        sys.path.insert(0, _first_place(program))
    unbuilt: list[str] = []

    def failed(target: str, error: BaseException) -> None:
        unbuilt.append(" ".join(f"{target} ({type(error).__name__}: {error})".split()))

    build_ahead(targets, failed)
    sys.path[:] = path
    return ", ".join(unbuilt)


def _first_place(program: list[str]) -> str:
    """Where Python looks for this program's modules first."""
    return os.getcwd() if program[0] == "-m" else str(Path(program[0]).resolve().parent)


def main() -> None:
    with in_idle_time():
        from keepstep.edge.torch.prewarm import warm_up
        from keepstep.runtime.rank import session

        assert session  # it is what the program imports next
        warm_up()
        unbuilt = _build_ahead(sys.argv[1:])
    order = wait_for_order(unbuilt)
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
