"""Persister process: the real world of a persister: `python -m keepstep.runtime.persister.process
<settings as JSON>`.

A child of the keeper, at low priority. One act a line on standard input, one answer a line on
standard output (`model/messages/persister.py`); a line that is no act is answered, too. Ends when
its standard input ends, so it never outlives the keeper for long.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from keepstep.config import settings_from_text
from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import FROM_PERSISTER, TO_PERSISTER
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.format import DcpFormat
from keepstep.model.messages.persister import ActDone
from keepstep.runtime.persister.persister import Persister


def main() -> None:
    """Until standard input ends."""
    settings = settings_from_text(sys.argv[1])
    assert settings.store is not None
    os.nice(10)
    import torch

    torch.set_num_threads(1)
    store = Store(settings.store)
    persister = Persister(
        settings.job, settings.job_dir, settings.keep, MEMORY, store, DcpFormat(store)
    )
    with suppress(BrokenPipeError):  # the keeper died, and nobody hears the answer
        for line in sys.stdin.buffer:
            try:
                done = persister.act(TO_PERSISTER.decode(line))
            except NotAMessage as error:
                done = ActDone(False, f"not understood: {error}")
            sys.stdout.buffer.write(FROM_PERSISTER.encode(done) + b"\n")
            sys.stdout.buffer.flush()
    persister.give_up()


if __name__ == "__main__":
    main()
