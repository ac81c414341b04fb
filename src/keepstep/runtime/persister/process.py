"""Persister process: the real world of a persister: `python -m keepstep.runtime.persister.process
<settings as JSON>`.

A child of the keeper, which gives it its place among what computes. One act a line on standard
input, one answer a line on standard output (`model/messages/persister.py`); a line that is no
message is answered, too. Ends when its standard input ends, so it never outlives the keeper for
long.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import NoReturn

from keepstep.config import settings_from_text
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.lines import LineBox
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.threads import LoopExecutor
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.store.job_store import open_job_store
from keepstep.edge.torch.dcp.format import DcpFormat
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.runtime.persister.conversation import PERSISTER_WITH_KEEPER
from keepstep.runtime.persister.persister import Persister
from keepstep.runtime.persister.server import PersisterServer


def main() -> NoReturn:
    """Until standard input ends."""
    settings = settings_from_text(sys.argv[1], os.environ)
    import torch

    torch.set_num_threads(1)
    store = open_job_store(settings)
    persister = Persister(
        settings.job,
        settings.job_dir,
        settings.keep,
        MEMORY,
        store,
        DcpFormat(store, CLOCK),
        CLOCK,
        f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})",
    )
    loop = Loop()
    server = PersisterServer(persister, LoopExecutor(loop.post))
    requests, answers = sys.stdin.fileno(), sys.stdout.fileno()
    keeper = LineBox(loop, requests, answers, os.getppid(), PERSISTER_WITH_KEEPER, _refuse)
    keeper.begin(server)
    loop.run(lambda: server.is_over)
    # What was asked is done and answered. To take torch apart needs a minute and more where the
    # machine is busy, and this process gives way to all others.
    sys.stderr.flush()
    os._exit(0)


def _refuse(keeper: LineBox, why: str) -> None:
    print(
        f"the keeper (process {keeper.pid}) sent an invalid message: {why}",
        file=sys.stderr,
    )
    keeper.send(NotUnderstood(why))


if __name__ == "__main__":
    main()
