"""Schedule: what was done to a real job, and when in its course; and the hand that does it again to
a simulated one.

A strike comes where it came: so long after a rank had entered a phase of a step, after a
resumption, or after the strike before; steps are counted from the one that the job had last gone on
from. So the schedule keeps its sense when the simulated job goes back further than the real one
did, or less far.

Not modelled: a stopped process is one that is dead and not yet missed; what a bit flips in is
always the payload; a full store is full for all who write; a node that is cut off from the meeting
point is so together with all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.sim.protocol.site import Site
from keepstep.sim.protocol.trainer import Rank

from benchmarks.prediction.pace import Aftermath
from keepstep.edge.shm.slot import parse_page, rank_dir
from keepstep.errors import DamageError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, SlotState, Stamp
from keepstep.model.units import MS_NS, PAGE_BYTES, S_NS
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.observer import Checker
from keepstep.sim.protocol.world.machine import Machine

OVERDUE_NS = 60 * S_NS  # a moment that does not come: then now
SETTLES_NS = 5 * S_NS
LOOK_NS = MS_NS


@dataclass(frozen=True, slots=True)
class Strike:
    """`phase`: of the rank; in `step`, counted from the last resumption (None: in whichever),
    `since_ns` after it was entered. Without one: since the strike before or, if all have `resumed`
    meanwhile, since then. `for_ns`: a rank stays stopped, a link or the meeting point away.
    `gap_ns`: since the strike before. `aftermath`: of this one."""

    kind: str
    rank: int
    nodes: tuple[int, ...]
    resumed: bool
    phase: Phase | None
    step: int | None
    since_ns: int
    for_ns: int = 0
    gap_ns: int = 0
    aftermath: Aftermath = field(default_factory=Aftermath)


class Striker(Checker):
    """Does one after the other. `resumptions`: after how many strikes all resumed, the step, the
    source, the steps lost, whether anything was fetched."""

    name = "striker"

    def __init__(self, job: SimJob, strikes: tuple[Strike, ...], settled: bool) -> None:
        """`settled`: all are to resume once more after the last one."""
        super().__init__(job)
        self._strikes, self._settled = strikes, settled
        self._random = job.world.stream("striker")
        self._next = 0
        self._waits = False  # for the next one's moment
        self._awaits_resumption = True  # the first one, too
        self._base, self._struck_ns = -1, 0
        # by rank and phase: the step in which it entered it last, and when
        self._entered: dict[tuple[int, Phase], tuple[int, int]] = {}
        self._fetched = False
        self.overdue = 0
        self.resumptions: list[tuple[int, int, str, int, bool]] = []
        job.on_phase = self._announced

    @property
    def _strike(self) -> Strike | None:
        return self._strikes[self._next] if self._next < len(self._strikes) else None

    # -- what is heard

    def journal(self, machine: Machine, event: Event) -> None:
        if event.kind == "fetched":
            self._fetched = True
        elif event.kind == "persist-failed":
            self.job.store.full = False
        elif event.kind == "resumed":
            data = event.data
            self.resumptions.append(
                (self._next, data["step"], data["source"], data["lost_steps"], self._fetched)
            )
            self._base, self._fetched = data["step"], False
            self._entered.clear()
            self._go_on()

    def _go_on(self) -> None:
        if self._awaits_resumption:
            self._awaits_resumption = False
            self._prepare()

    def _announced(self, rank: int, phase: Phase, step: int) -> None:
        self._entered[rank, phase] = (step, self.job.world.now_ns)
        self._look(rank, phase)

    def _look(self, rank: int, phase: Phase) -> None:
        strike, found = self._strike, self._entered.get((rank, phase))
        if (
            strike is None
            or found is None
            or not self._waits
            or self._awaits_resumption
            or (rank, phase) != (strike.rank, strike.phase)
        ):
            return
        step, at_ns = found
        if strike.step is None or step >= self._base + strike.step:
            self._strike_after(max(0, at_ns + strike.since_ns - self.job.world.now_ns))

    # -- when

    def _prepare(self) -> None:
        """The next one's turn has come, its moment has not."""
        strike, now_ns = self._strike, self.job.world.now_ns
        if strike is None:
            self.job.world.after(SETTLES_NS, None, self.job.world.stop)
            return
        self._waits = True
        if strike.phase is None:
            since_ns = now_ns if strike.resumed else self._struck_ns
            self._strike_after(max(0, since_ns + strike.since_ns - now_ns))
        else:
            patience_ns = OVERDUE_NS if strike.resumed else 2 * strike.gap_ns
            self.job.world.after(patience_ns, None, self._too_late, self._next)
            self._look(strike.rank, strike.phase)

    def _too_late(self, number: int) -> None:
        if number != self._next:
            return
        if self._awaits_resumption:
            self.overdue += 1
            self._go_on()
        elif self._waits:
            self.overdue += 1
            self._strike_after(0)

    def _strike_after(self, delay_ns: int) -> None:
        self._waits = False
        self.job.world.after(delay_ns, None, self._do, self._next)

    def _do(self, number: int) -> None:
        strike = self._strikes[number]
        if not self._carry_out(strike):
            self.job.world.after(LOOK_NS, None, self._do, number)
            return
        self.job.aftermath = strike.aftermath
        what = (
            f"strike {number}: {strike.kind} of "
            f"{f'nodes {strike.nodes}' if strike.nodes else f'rank {strike.rank}'}"
        )
        self.job.faults.append(what)
        self.job.world.note("striker", what)
        self._struck_ns = self.job.world.now_ns
        self._next += 1
        following = self._strike
        self._awaits_resumption = self._settled if following is None else following.resumed
        self._entered = {
            key: found for key, found in self._entered.items() if key[1] is not Phase.RESTORE
        }
        if self._awaits_resumption:
            self.job.world.after(OVERDUE_NS, None, self._too_late, self._next)
        else:
            self._prepare()

    # -- what. False: it cannot be done yet

    def _carry_out(self, strike: Strike) -> bool:
        job = self.job
        if strike.kind == "kill-node":
            sites = [self._node(node) for node in strike.nodes]
            for site in sites:
                if site is not None:
                    job.lose_machine(site)
            return any(sites)
        if strike.kind == "link-down":
            return self._cut(strike)
        if strike.kind == "etcd-restart":
            job.kv.go_away(strike.for_ns)
            return True
        if strike.kind == "full":
            job.store.full = True
            return True
        site, rank = self._rank(strike.rank)
        if strike.kind in ("keeper-kill", "agent-kill"):
            site = self._node(strike.rank // job.plan.ranks_per_node)
            return site is not None and (
                self._kill_keeper(site) if strike.kind == "keeper-kill" else self._kill_agent(site)
            )
        return rank is not None and site is not None and self._end(strike, site, rank)

    def _end(self, strike: Strike, site: Site, rank: Rank) -> bool:
        if strike.kind == "flip" and not self._flip(site, rank):
            return False
        if strike.kind == "stop":
            rank.process.alive = False
            self.job.world.after(strike.for_ns, None, self._end_stopped, rank)
        else:
            rank.process.end(f"struck: {strike.kind}")
        return True

    def _end_stopped(self, rank: Rank) -> None:
        if rank.site.machine.alive and not rank.process.why_ended:
            rank.process.alive = True
            rank.process.end("struck: stopped, then killed")

    def _kill_keeper(self, site: Site) -> bool:
        if site.keeper is None or not site.keeper.process.alive:
            return False
        site.keeper.process.end("struck: keeper-kill")
        return True

    def _kill_agent(self, site: Site) -> bool:
        if site.agent is None or not site.agent.process.alive:
            return False
        site.agent.process.end("struck: agent-kill")
        return True

    def _flip(self, site: Site, rank: Rank) -> bool:
        """A bit of the newest snapshot; what is being captured is sealed first."""
        found: dict[Stamp, bytearray] = {}
        root = str(rank_dir(site.settings.job_dir, rank.rank))
        for path, file in site.machine.files.every_file():
            if path.startswith(f"{root}/slot-"):
                try:
                    header = parse_page(bytes(file.data[:PAGE_BYTES]), site.settings.job_dir)
                except DamageError:
                    continue
                if header.state is SlotState.WRITING:
                    return False
                if header.state is SlotState.SEALED:
                    found[header.stamp] = file.data
        if found:
            stamp = max(found)
            found[stamp][PAGE_BYTES + self._random.randrange(self.job.plan.nbytes)] ^= 1
            self.job.atlas.damaged.add((site.machine.number, rank.rank, stamp))
        return True

    def _cut(self, strike: Strike) -> bool:
        here = [
            site.machine.number for node in strike.nodes if (site := self._node(node)) is not None
        ]
        others = [
            site.machine.number
            for site in self.job.living_sites()
            if site.machine.number not in here
        ]
        paths = [path for a in here for b in others for path in ((a, b), (b, a))]
        self.job.network.block(paths)
        self.job.world.after(strike.for_ns, None, self.job.network.unblock, paths)
        self.job.kv.go_away(strike.for_ns)
        return True

    # -- whom

    def _node(self, node: int) -> Site | None:
        return next(
            (s for s in self.job.living_sites() if s.agent is not None and s.agent.node == node),
            None,
        )

    def _rank(self, number: int) -> tuple[Site | None, Rank | None]:
        found = (
            (s, s.ranks[number])
            for s in self.job.living_sites()
            if number in s.ranks and s.ranks[number].process.alive
        )
        return next(found, (None, None))
