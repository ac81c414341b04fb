"""Meeting: the memory that all agents share (`ports.KV` by its meaning), and who stands in for the
coordinator.

`SharedKV` keeps the words of `ports.KV`: a swap writes at one instant for everybody, a wait ends
when something is there. Its clients here do not block: what is found comes by a call. It may be
away for a while: questions wait, and what was asked takes effect late, in its order.

Not run here: TCPStore and etcd, and `core/recovery/leader_lease.py` with its lease, which has a
search in virtual time of its own (`tests/core/test_leadership.py`). What the coordinator decides
(`runtime/agent/coordinator.py`) is decided by `Overseer`, who sees everything, as late as a
coordinator would: that a node came to a round and does not answer, that nobody of a round is there
any more, that some ranks ended well and an agent that should say the same is gone. And what hang
detection (`core/detection/progress.py`) finds: that nobody gets on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keepstep.core.recovery.rendezvous import assign
from keepstep.model.rounds import Arrival, Verdict, arrival_from_text, verdict_from_text
from keepstep.model.units import MS_NS, S_NS
from keepstep.sim.protocol.world import Process, World

if TYPE_CHECKING:
    from keepstep.sim.protocol.job import Job

CALLED_OFF = "called off"
HANG_NS = 120 * S_NS
HANG = "no rank has got on for long"


class SharedKV:
    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.stream("kv")
        self.written: dict[str, str] = {}
        self._away_until_ns = 0
        self._last_ns = 0
        self._watchers: list[tuple[Process, list[str], Callable[[list[str]], None]]] = []
        self.on_write: Callable[[str, str], None] = _nobody

    def go_away(self, for_ns: int) -> None:
        self._away_until_ns = self._world.now_ns + for_ns

    def _when_ns(self) -> int:
        """When a question asked now is answered: all in one order."""
        at_ns = (
            max(self._world.now_ns, self._away_until_ns)
            + MS_NS // 2
            + self._random.randrange(2 * MS_NS)
        )
        self._last_ns = max(self._last_ns, at_ns)
        return self._last_ns

    def swap(self, process: Process, key: str, value: str, then: Callable[[str], None]) -> None:
        """`value`, if nothing was there; `then` hears what is there. It takes effect even if who
        asked has died by then."""
        self._world.at(self._when_ns(), None, self._swap, process, key, value, then)

    def _swap(self, process: Process, key: str, value: str, then: Callable[[str], None]) -> None:
        self.write(key, value)
        self._world.after(MS_NS // 2, process, then, self.written[key])

    def write(self, key: str, value: str) -> None:
        """At this instant."""
        if key in self.written:
            return
        self.written[key] = value
        self.on_write(key, value)
        for watcher in list(self._watchers):
            self._look(watcher)

    def read(
        self, process: Process, keys: Sequence[str], then: Callable[[list[str | None]], None]
    ) -> None:
        self._world.at(
            self._when_ns(), process, lambda: then([self.written.get(key) for key in keys])
        )

    def wait(
        self, process: Process, keys: Sequence[str], then: Callable[[list[str]], None]
    ) -> None:
        """`then` hears what is there once something is at all of these."""
        watcher = (process, list(keys), then)
        self._watchers.append(watcher)
        self._look(watcher)

    def _look(self, watcher: tuple[Process, list[str], Callable[[list[str]], None]]) -> None:
        process, keys, then = watcher
        if not process.alive:
            self._watchers.remove(watcher)
        elif all(key in self.written for key in keys):
            self._watchers.remove(watcher)
            self._world.at(self._when_ns(), process, then, [self.written[key] for key in keys])

    # -- rounds

    def verdict(self, number: int) -> Verdict | None:
        text = self.written.get(f"{number}/verdict")
        return verdict_from_text(text) if text else None

    def arrivals(self, number: int, nodes: int) -> list[Arrival]:
        texts = [self.written.get(f"{number}/seat/{place}") for place in range(nodes)]
        return [arrival_from_text(text) for text in texts if text]


class Overseer:
    """What the coordinator would find out and say, one lease after it could."""

    def __init__(self, job: Job, lease_ns: int) -> None:
        self._job, self._lease_ns = job, lease_ns
        self._since: dict[tuple[int, str], int] = {}
        job.world.after(S_NS, None, self._look)

    def _look(self) -> None:
        kv, nodes, now_ns = self._job.kv, self._job.plan.nodes, self._job.world.now_ns
        number = next(n for n in range(10**6) if kv.verdict(n) is None)
        why = self._judge(number, nodes)
        known = (number, why)
        self._since = {k: at for k, at in self._since.items() if k == known}
        if why == HANG or (
            why and now_ns - self._since.setdefault(known, now_ns) > 2 * self._lease_ns
        ):
            kv.write(f"{number}/verdict", Verdict("again", why).to_text())
            self._call_off(number, nodes)
        before = number - 1
        if before >= 0 and kv.verdict(before) is not None:
            self._call_off(before, nodes)
        self._job.world.after(self._lease_ns // 3, None, self._look)

    def _call_off(self, number: int, nodes: int) -> None:
        self._job.kv.write(f"{number}/full/0", "yes")
        for place in range(nodes):
            self._job.kv.write(f"{number}/ready/{place}", CALLED_OFF)

    def _judge(self, number: int, nodes: int) -> str:
        kv = self._job.kv
        arrivals = kv.arrivals(number, nodes)
        if len(arrivals) < nodes:
            return ""
        tokens = {agent.token for agent in self._job.agents() if agent.is_alive}
        here = [a.token in tokens for a in arrivals]
        if not any(here):
            return "no agent of the round is there any more"
        ready = [f"{number}/ready/{place}" in kv.written for place in range(nodes)]
        if not all(ready):
            late = [node for node, there in zip(assign(arrivals), ready, strict=True) if not there]
            return f"nodes {late} came and then did not answer"
        if self._job.world.now_ns - self._job.progress_ns > HANG_NS:
            self._job.progress_ns = self._job.world.now_ns
            self._job.hangs += 1
            return HANG
        well = [f"{number}/well/{place}" in kv.written for place in range(nodes)]
        if any(well) and not all(w or h for w, h in zip(well, here, strict=True)):
            return "the others' ranks ended well, and nobody can say it of a node that is gone"
        return ""


def _nobody(key: str, value: str) -> None:
    """Nobody wants to know."""
