"""The account of time sums up: the parts of `core/economics/goodput.py`, of what the journals say,
are never negative and are together the whole.

Not verified: that each part is what it says (`tests/core/economics/test_goodput.py` does that).
"""

from __future__ import annotations

from keepstep.core.economics.goodput import account
from keepstep.sim.protocol.checkers.checker import Checker


class AccountSumsUp(Checker):
    NAME = "account"

    def over(self) -> None:
        events = sorted(
            (e for node in self.job.nodes for e in node.machine.events), key=lambda e: e.wall_ns
        )
        found = account(events)
        parts = found.parts()
        if min(parts.values()) < 0 or sum(parts.values()) != found.wall_ns:
            self.violated(
                f"{parts} sum up to {sum(parts.values())}, and the whole is {found.wall_ns}"
            )
