"""`keepstep.testing.wrong_numbers` whose keeper is stopped as rank 0 stands behind a step."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from keepstep.runtime.rank.halting import Halting
from keepstep.testing.wrong_numbers import main

stand = Halting.stand


def stop_the_keeper(self: Halting, *given: Any) -> None:
    journal = Path(sys.argv[1]).parent / "state" / "j" / "journal.jsonl"
    keepers = [
        e
        for e in map(json.loads, journal.read_text().splitlines())
        if e["kind"] == "keeper-started"
    ]
    if len(keepers) == 1 and os.environ["RANK"] == "0":
        os.kill(keepers[0]["data"]["pid"], signal.SIGSTOP)
    stand(self, *given)


if __name__ == "__main__":
    Halting.stand = stop_the_keeper  # type: ignore[method-assign]
    main()
