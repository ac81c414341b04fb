"""Nemesis: what goes wrong in a run, drawn from its seed.

By hierarchy: a bit, a process, a link, a machine, a rack, the store, the meeting point, a clock,
memory; alone, or one more within the moments in which the job recovers from the one before. After
`Plan.faults_until_ns` it heals what can be healed and does nothing more: from then on the job has
to come to its end.

What it never does: hang a process, reorder what a machine's memory has been told, forge a word,
lose what the meeting point has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from keepstep.edge.shm.slot import parse_page
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState
from keepstep.model.units import PAGE_BYTES, S_NS
from keepstep.sim.protocol.job.job import Job
from keepstep.sim.protocol.site import Site

AGAIN = 0.35  # how often something else goes wrong while all recover
SOON_NS = 3 * S_NS


class Nemesis:
    def __init__(self, job: Job) -> None:
        self._job, self._world = job, job.world
        self._random = self._world.stream("nemesis")
        self._blocked: list[tuple[int, int]] = []
        self._stalled: list[tuple[int, int]] = []
        self._over = False
        plan = job.plan
        for _ in range(plan.faults):
            self._world.after(
                self._random.randrange(max(1, plan.faults_until_ns)), None, self._strike
            )
        self._world.after(plan.faults_until_ns, None, self._heal)

    def _kinds(self) -> list[tuple[int, Callable[[], str | None]]]:
        """With weights. None: there is nothing to do that to."""
        many = self._job.plan.nodes > 1
        kinds: list[tuple[int, Callable[[], str | None]]] = [
            *(
                (8, self._kill_rank),
                (4, self._kill_rank_torn),
                (4, self._kill_keeper),
                (4, self._kill_keeper_within),
            ),
            *(
                (3, self._kill_agent),
                (4, self._kill_all_ranks),
                (4, self._flip_at_rest),
                (1, self._eat_memory),
            ),
        ]
        if self._job.plan.jumps:
            kinds.append((2, self._jump_clock))
        if many:
            kinds += [
                *(
                    (8, self._lose_machine),
                    (4, self._cut),
                    (2, self._isolate),
                    (3, self._one_way),
                    (3, self._clog),
                    (2, self._flap),
                ),
                *((2, self._flip_on_the_wire), (1, self._meeting_away)),
                *((2, self._half_open), (2, self._stall)),
            ]
        if self._job.plan.racks:
            kinds.append((2, self._lose_rack))
        if self._job.plan.store:
            kinds += [
                (2, self._store_slow),
                (1, self._store_full),
                (1, self._store_away),
                (2, self._store_torn),
                (2, self._store_lies),
            ]
        return kinds

    def _strike(self) -> None:
        if self._over:
            return
        kinds = self._kinds()
        (strike,) = self._random.choices([k for _, k in kinds], [w for w, _ in kinds])
        what = strike()
        if what is None:
            return
        self._job.faults.append(what)
        self._world.note("nemesis", what)
        self._job.watch.struck(what)
        if self._random.random() < AGAIN:
            self._world.after(self._random.randrange(SOON_NS), None, self._strike)

    def _heal(self) -> None:
        self._over = True
        self._world.note("nemesis", "heals everything")
        self._job.network.unblock(self._blocked)
        self._blocked = []
        for path in self._stalled:
            self._job.network.unstall(path)
        self._stalled = []
        self._job.network.flips = 0.0
        store = self._job.store
        store.slow, store.full, store.away, store.torn, store.lying = 1, False, False, 0.0, False
        for site in self._job.sites:
            site.machine.files.eaten_bytes = 0

    # -- whom

    def _site(self) -> Site:
        return self._random.choice(self._job.living_sites())

    def _for_ns(self, most_s: float) -> int:
        return int(self._random.uniform(0.05, most_s) * S_NS)

    def _dead_s(self) -> float:
        return self._job.plan.link_dead_s

    # -- processes

    def _kill_rank(self) -> str | None:
        ranks = [r for s in self._job.living_sites() for r in s.ranks.values() if r.process.alive]
        if not ranks:
            return None
        rank = self._random.choice(ranks)
        rank.process.end("killed")
        return f"killed rank {rank.rank}"

    def _kill_rank_torn(self) -> str | None:
        ranks = [
            r
            for s in self._job.living_sites()
            for r in s.ranks.values()
            if r.process.alive and r.trains
        ]
        if not ranks:
            return None
        rank = self._random.choice(ranks)
        rank.dies_torn = True
        return f"rank {rank.rank} is to be killed within a page"

    def _kill_all_ranks(self) -> str | None:
        for site in self._job.living_sites():
            for rank in list(site.ranks.values()):
                rank.process.end("killed with all others")
        return "killed all ranks"

    def _kill_keeper(self) -> str | None:
        site = self._site()
        if site.keeper is None or not site.keeper.process.alive:
            return None
        site.keeper.process.end("killed")
        return f"killed the keeper of machine {site.machine.number}"

    def _kill_keeper_within(self) -> str | None:
        site = self._site()
        if site.keeper is None or not site.keeper.process.alive:
            return None
        site.keeper.process.dies_at_call = 1 + self._random.randrange(200)
        return f"the keeper of machine {site.machine.number} is to be killed at a call of a port"

    def _kill_agent(self) -> str | None:
        site = self._site()
        if site.agent is None or not site.agent.process.alive or site.agent.done:
            return None
        site.agent.process.end("killed")
        return f"killed the agent of machine {site.machine.number}"

    # -- machines

    def _lose_machine(self) -> str | None:
        site = self._site()
        if site.agent is not None and site.agent.done:
            return None  # the job is over there: nobody would miss it
        self._job.lose_machine(site)
        return f"lost machine {site.machine.number}"

    def _lose_rack(self) -> str | None:
        rack = self._site().machine.rack
        if any(a.done for a in self._job.agents()):
            return None
        lost = [s for s in self._job.living_sites() if s.machine.rack == rack]
        for site in lost:
            self._job.lose_machine(site)
        return f"lost {rack}: machines {[s.machine.number for s in lost]}"

    def _jump_clock(self) -> str | None:
        site = self._site()
        site.machine.clock.wall_error_ns += int(self._random.uniform(-100, 100) * S_NS)
        return f"the wall clock of machine {site.machine.number} jumps"

    def _eat_memory(self) -> str | None:
        files = self._site().machine.files
        files.eaten_bytes = max(
            0, files.budget_bytes - files.used_bytes - self._random.randrange(8, 64) * PAGE_BYTES
        )
        self._world.after(self._for_ns(5.0), None, self._give_memory_back, files)
        return "something else takes a machine's memory"

    def _give_memory_back(self, files: object) -> None:
        files.eaten_bytes = 0  # type: ignore[attr-defined]

    def _flip_at_rest(self) -> str | None:
        site = self._site()
        slots = [(path, file) for path, file in site.machine.files.every_file() if "/slot-" in path]
        if not slots:
            return None
        path, file = self._random.choice(slots)
        try:
            header = parse_page(bytes(file.data[:PAGE_BYTES]), site.settings.job_dir)
        except DamageError:
            return None
        bit = self._random.randrange(8 * self._random.choice((PAGE_BYTES, len(file.data))))
        file.data[bit // 8] ^= 1 << (bit % 8)
        if header.state is SlotState.SEALED:
            self._job.atlas.damaged.add((site.machine.number, header.rank, header.stamp))
        return f"flipped bit {bit} of {path} on machine {site.machine.number}"

    # -- the network

    def _block(self, paths: Iterable[tuple[int, int]], for_ns: int) -> None:
        paths = list(paths)
        self._job.network.block(paths)
        self._blocked += paths
        self._world.after(for_ns, None, self._unblock, paths)

    def _unblock(self, paths: list[tuple[int, int]]) -> None:
        if not self._over:
            self._job.network.unblock(paths)
            for path in paths:
                self._blocked.remove(path)

    def _pair(self) -> tuple[int, int] | None:
        sites = self._job.living_sites()
        if len(sites) < 2:
            return None
        a, b = self._random.sample(sites, 2)
        return a.machine.number, b.machine.number

    def _cut(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        a, b = pair
        for_ns = self._for_ns(2.5 * self._dead_s())
        self._block([(a, b), (b, a)], for_ns)
        return f"cut machines {a} and {b} off for {for_ns / S_NS:.3f} s"

    def _one_way(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        for_ns = self._for_ns(2.5 * self._dead_s())
        self._block([pair], for_ns)
        return f"nothing gets from machine {pair[0]} to {pair[1]} for {for_ns / S_NS:.3f} s"

    def _isolate(self) -> str | None:
        here = self._site().machine.number
        others = [s.machine.number for s in self._job.living_sites() if s.machine.number != here]
        for_ns = self._for_ns(2.5 * self._dead_s())
        self._block([path for other in others for path in ((here, other), (other, here))], for_ns)
        return f"nothing gets to or from machine {here} for {for_ns / S_NS:.3f} s"

    def _clog(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        for_ns = self._for_ns(0.3 * self._dead_s())
        self._block([pair], for_ns)
        return f"what goes from machine {pair[0]} to {pair[1]} is {for_ns / S_NS:.3f} s late"

    def _flap(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        a, b = pair
        at_ns = 0
        for _ in range(self._random.randrange(2, 6)):
            at_ns += self._for_ns(1.0)
            self._world.after(at_ns, None, self._flap_once, a, b)
        return f"the link of machines {a} and {b} flaps"

    def _flap_once(self, a: int, b: int) -> None:
        if not self._over:
            for pipe in list(self._job.network.connections):
                if (a, b) in pipe.paths:
                    pipe.cut("reset")

    def _half_open(self) -> str | None:
        """What comes of it: the end that has lost it dials again, while the other still has it."""
        pipes = list(self._job.network.connections)
        if not pipes:
            return None
        end = self._random.choice(self._random.choice(pipes).ends)
        end.break_off("connection reset by somebody between")
        return f"machine {end.machine} alone loses a connection with machine {end.other.machine}"

    def _stall(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        for_ns = self._for_ns(1.5 * self._dead_s())
        self._job.network.stall(pair)
        self._stalled.append(pair)
        self._world.after(for_ns, None, self._unstall, pair)
        return (
            f"nothing is read of what machine {pair[0]} sends to {pair[1]} for "
            f"{for_ns / S_NS:.3f} s"
        )

    def _unstall(self, pair: tuple[int, int]) -> None:
        if not self._over:
            self._job.network.unstall(pair)
            self._stalled.remove(pair)

    def _flip_on_the_wire(self) -> str | None:
        self._job.network.flips = self._random.choice((0.01, 0.05))
        self._world.after(self._for_ns(5.0), None, self._wire_is_good)
        return f"of all that is sent {self._job.network.flips:.0%} arrives damaged"

    def _wire_is_good(self) -> None:
        self._job.network.flips = 0.0

    def _meeting_away(self) -> str | None:
        for_ns = self._for_ns(5.0)
        self._job.kv.go_away(for_ns)
        return f"the meeting point is away for {for_ns / S_NS:.3f} s"

    # -- the store

    def _store(self, name: str, value: object, usual: object, what: str) -> str:
        setattr(self._job.store, name, value)
        self._world.after(self._for_ns(8.0), None, setattr, self._job.store, name, usual)
        return what

    def _store_slow(self) -> str | None:
        return self._store("slow", 30, 1, "the store is slow")

    def _store_full(self) -> str | None:
        return self._store("full", True, False, "the store is full")

    def _store_away(self) -> str | None:
        return self._store("away", True, False, "the store does not answer")

    def _store_torn(self) -> str | None:
        return self._store("torn", 0.5, 0.0, "the persister is killed while it writes")

    def _store_lies(self) -> str | None:
        return self._store("lying", True, False, "the store says that it has written, and lies")
