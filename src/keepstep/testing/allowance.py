"""Allowance: up to which step a job of unknown length may train.

Comes in, from whoever conducts the job: so many steps, and later more, and at last that there are
no more. Goes out, to each rank: whether the next step is one of them. A rank that has used up its
steps waits to be told more, so nobody has to be quick.

Invariant: all ranks end behind the same step, since none does a step that was not allowed and what
was allowed is never taken back.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

ASK_EVERY_S = 0.005


def allow(path: Path, steps: int, final: bool = False) -> None:
    """Steps 0 .. steps - 1; `final`: and no others, ever."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({"steps": steps, "final": final}))
    unfinished.rename(path)


class Allowance:
    """A rank's view; it looks at the file only when its steps are used up."""

    def __init__(self, path: Path) -> None:
        self._path, self._steps = path, 0

    def covers(self, step: int) -> bool:
        """Whether to do that step; False: the job ends before it."""
        while step >= self._steps:
            said = json.loads(self._path.read_text())
            self._steps = int(said["steps"])
            if step >= self._steps:
                if said["final"]:
                    return False
                time.sleep(ASK_EVERY_S)
        return True
