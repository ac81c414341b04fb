"""Persister watch: finds a persister that stands still, as on a store that hangs, or that never
comes to an end, as with one that trickles; and gives it up.

Comes in: whether anybody waits for the persister, how long it has computed, the clock. Goes out: a
word to the operator, and then the persister's end: who waits hears why, the ranks have their slots
back, and the next act starts another one. How long it is given is learnt from the acts that have
succeeded (`core/resume/patience.py`).

A persister at work computes: it hashes what it reads and writes. One that waits for a dead mount or
a silent server does not, however long that takes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from keepstep.core.resume.patience import WritePatience
from keepstep.model.events import WARNING
from keepstep.model.messages.persister import ActName
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Clock, Journal
from keepstep.runtime.keeper.persister_client import PersisterClient

COMPUTES_NS = 10 * MS_NS  # the kernel counts in such pieces; less is waiting and looking
TOLD_NS = 15 * S_NS


@dataclass
class _Act:
    """What a persister is at. `answered`, `succeeded`: how many acts had been before it; `seen_ns`:
    when it was last seen to compute, and `computed_ns` what it had by then; `standstill_ns`: the
    longest time that it has not."""

    name: ActName
    pid: int | None
    answered: int
    succeeded: int
    computed_ns: int
    began_ns: int
    seen_ns: int
    standstill_ns: int = 0
    is_told: bool = False


class PersisterWatch:
    """Over one keeper's persister."""

    def __init__(self, persister: PersisterClient, clock: Clock, journal: Journal) -> None:
        self._persister, self._clock, self._journal = persister, clock, journal
        self._patience: dict[ActName, WritePatience] = defaultdict(WritePatience)
        self._act: _Act | None = None  # None while nobody waits for it

    def look(self) -> None:
        """From time to time."""
        client, act, now_ns = self._persister, self._act, self._clock.monotonic_ns()
        if act is not None and client.answered > act.answered:
            if client.succeeded - act.succeeded == client.answered - act.answered:
                stood_ns = max(act.standstill_ns, now_ns - act.seen_ns)
                self._patience[act.name].learn(stood_ns, now_ns - act.began_ns)
            act = None
        name = client.awaited
        if name is None:
            self._act = None
        elif act is None or client.pid != act.pid:
            self._act = self._begun(name, now_ns)
        else:
            self._judge(act, now_ns)

    def _begun(self, name: ActName, now_ns: int) -> _Act:
        client = self._persister
        answered, succeeded = client.answered, client.succeeded
        return _Act(name, client.pid, answered, succeeded, client.computed_ns, now_ns, now_ns)

    def _judge(self, act: _Act, now_ns: int) -> None:
        patience, computed_ns = self._patience[act.name], self._persister.computed_ns
        stood_ns, in_all_ns = now_ns - act.seen_ns, now_ns - act.began_ns
        if computed_ns - act.computed_ns >= COMPUTES_NS:
            act.standstill_ns = max(act.standstill_ns, stood_ns)
            act.computed_ns, act.seen_ns, act.is_told = computed_ns, now_ns, False
            stood_ns = 0
        if stood_ns >= patience.most_standstill_ns:
            self._give_up(f"stood still for {stood_ns // S_NS} s and is given up: the store hangs")
        elif in_all_ns >= patience.most_write_ns:
            before = f" on what took {patience.write_ns // S_NS} s at most" * bool(
                patience.write_ns
            )
            self._give_up(f"has worked for {in_all_ns // S_NS} s{before} and is given up: too slow")
        elif stood_ns >= TOLD_NS and not act.is_told:
            act.is_told = True
            self._tell(
                f"has stood still for {stood_ns // S_NS} s: the store does not answer. After "
                f"{patience.most_standstill_ns // S_NS} s it is given up"
            )

    def _tell(self, why: str) -> None:
        pid = self._persister.pid
        self._journal.record("persister-stuck", f"the persister (process {pid}) {why}", WARNING)

    def _give_up(self, why: str) -> None:
        self._tell(why)
        self._act = None
        self._persister.abandon(why)
