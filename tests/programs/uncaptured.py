"""`keepstep.testing.wrong_numbers` in which some steps, UNCAPTURED, are never captured."""

from __future__ import annotations

import os

from keepstep.runtime.rank import capture
from keepstep.testing.wrong_numbers import main

LEFT = {int(step) for step in os.environ["UNCAPTURED"].split(",")}


def is_due(step: int, period_steps: int) -> bool:
    return step not in LEFT


if __name__ == "__main__":
    capture.is_due = is_due
    main()
