"""The account of time sums up: the parts of `core/economics/goodput.py`, of what the keepers'
journals say, are never negative and are together the whole.

Not verified: that each part is what it says (`tests/core/test_account.py` does that); the journals
of ranks and agents, which are not run here.
"""

from __future__ import annotations

from keepstep.core.economics.goodput import account
from keepstep.sim.protocol.job.observer import Checker


class AccountSumsUp(Checker):
    name = "account"

    def over(self) -> None:
        events = sorted(
            (e for site in self.job.sites for e in site.machine.events), key=lambda e: e.wall_ns
        )
        found = account(events)
        parts = found.parts()
        if min(parts.values()) < 0 or sum(parts.values()) != found.wall_ns:
            self.violated(
                f"{parts} sum up to {sum(parts.values())}, and the whole is {found.wall_ns}"
            )
