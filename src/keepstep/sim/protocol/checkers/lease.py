"""One coordinator at a time: an agent takes the register over only when the lease in it has run
out, and always with a new term.

A coordinator may order until 0.9 of its lease have passed since it asked for the renewal that took
effect; so nobody else takes the register earlier than that after the last renewal was written. An
order is the newest term's.

Not verified: an order that was given in time and written late, because the agents' shared memory
did not answer meanwhile.
"""

from __future__ import annotations

from keepstep.core.recovery.leader_lease import Lease
from keepstep.model.events import Event
from keepstep.model.units import S_NS
from keepstep.runtime.agent.meeting_record import CODEC, LEADER, OPENING
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.world.machine import Machine

TRUSTED = 0.9  # of the lease: so long a coordinator relies on it


class OneCoordinator(Checker):
    NAME = "one coordinator"
    _lease: Lease | None = None
    _written_ns = 0

    def written(self, key: str, value: str) -> None:
        if key == OPENING:  # a KV that knows nothing of the one before
            self._lease = None
        if key != LEADER:
            return
        lease: Lease = CODEC.decode(value.encode())
        before, self._lease = self._lease, lease
        since_ns = self.job.world.now_ns - self._written_ns
        self._written_ns = self.job.world.now_ns
        if before is None:
            return
        if lease.holder == before.holder:
            if lease.term != before.term:
                self.violated(f"{lease.name} renews term {before.term} as term {lease.term}")
        elif lease.term <= before.term:
            self.violated(f"{lease.name} takes over term {before.term} with term {lease.term}")
        elif since_ns < TRUSTED * self.job.plan.link_dead_s * S_NS:
            self.violated(
                f"{lease.name} takes over {since_ns / S_NS:.3f} s after {before.name} had renewed "
                f"a lease of {self.job.plan.link_dead_s} s"
            )

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind != "attempt-wanted" or "term" not in event.data or self._lease is None:
            return
        term = event.data["term"]
        was_away = any("shared memory is away" in fault for fault in self.job.faults)
        if term < self._lease.term and not was_away:
            self.violated(f"an order of term {term} is given in term {self._lease.term}")
