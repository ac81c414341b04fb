"""Job: a whole simulated cluster with a job on it, and how a run of it ends.

Comes in: a plan and a seed. Goes out: an `Outcome`: what was violated, what was done, and a digest
of everything that happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.config import Settings, resolve
from keepstep.errors import MemoryBudgetError
from keepstep.model.snapshot import Phase
from keepstep.model.units import S_NS
from keepstep.runtime.job_name import job_hash
from keepstep.sim.protocol.agents import Agent
from keepstep.sim.protocol.atlas import Atlas
from keepstep.sim.protocol.machine import UID, Machine
from keepstep.sim.protocol.meeting import Overseer, SharedKV
from keepstep.sim.protocol.network import Network
from keepstep.sim.protocol.oracle import Oracle
from keepstep.sim.protocol.pace import Aftermath
from keepstep.sim.protocol.paced import PacedGang, PacedRank
from keepstep.sim.protocol.plan import Plan
from keepstep.sim.protocol.site import Site
from keepstep.sim.protocol.store import SharedStore
from keepstep.sim.protocol.trainer import Gang, Rank
from keepstep.sim.protocol.watching import Checker, Watch
from keepstep.sim.protocol.world import World

NAME = "simulated"
NewChecker = Callable[["Job"], Checker]


@dataclass(frozen=True)
class Outcome:
    """`wrong`: what was violated, None when nothing was. `port_calls`: of all keepers."""

    seed: int
    wrong: str | None
    digest: int
    virtual_ns: int
    events: int
    faults: int
    port_calls: int
    lost_steps: int
    trace: Sequence[str]


class Job:
    """`violations` ends the run as soon as there is one."""

    def __init__(self, plan: Plan, world: World, checkers: Sequence[NewChecker] = ()) -> None:
        self.plan, self.world = plan, world
        self.world_size = plan.world_size
        self.job_hash = job_hash(NAME, UID)
        self.network = Network(world, plan.wires)
        self.kv = SharedKV(world)
        self.store = SharedStore(world, plan.store_act_ns)
        self.oracle = Oracle(world.seed, plan.world_size, plan.nbytes)
        self.chance = world.stream("job")
        self.sites: list[Site] = []
        self.violations: list[str] = []
        self.faults: list[str] = []
        self.first_round = 1_767_225_600_000
        self.lost_steps = 0
        # of a fresh start in the middle of the job: `core/recovery/restarts.py` takes them for
        # failures of the program
        self.refusals = 0
        self.progress_ns = 0  # when a rank has last got on
        self.hangs = 0  # times that nobody did for long
        self.aftermath = Aftermath()  # of the last failure, where that was measured
        # rank, phase, step; told by ranks with a pace
        self.on_phase: Callable[[int, Phase, int], None] = _nobody
        self._gangs: dict[int, Gang] = {}
        self._tokens = 0
        self.atlas = Atlas(self)
        self.watch = Watch([self.atlas, *(new(self) for new in checkers)])
        self.network.on_send = self.watch.said
        self.kv.on_write = self.watch.written
        self.settings = self._settings()
        for node in range(plan.nodes):
            self.add_machine(
                f"rack {node % plan.racks}" if plan.racks else None,
                self.chance.randrange(plan.start_ns),
            )
        Overseer(self, round(plan.link_dead_s * S_NS))

    def _settings(self) -> Settings:
        plan = self.plan
        config = {
            **{
                "job": NAME,
                "store": "/store" if plan.store else None,
                "persist_every_steps": plan.persist_every_steps,
            },
            **{
                "keep": "latest:2",
                "slots": plan.slots,
                "arena_dir": "/memory",
                "grace_s": plan.grace_s,
                "state_dir": "/state",
            },
            **{
                "scrub_every_s": plan.scrub_every_s,
                "redundancy": plan.policy,
                "link_dead_s": plan.link_dead_s,
            },
        }
        return resolve(config, {"HOME": "/nowhere"}, NAME)

    def add_machine(self, rack: str | None, delay_ns: int) -> Site:
        machine = Machine(self.world, len(self.sites), rack, self.plan.budget_bytes)
        site = Site(self, machine, self.settings)
        self.sites.append(site)
        self.world.after(delay_ns, None, site.start_agent)
        return site

    def lose_machine(self, site: Site) -> None:
        """With all that is on it; another one comes after a while."""
        machine = site.machine
        self.network.lose(machine.number)
        machine.lose("its machine is lost")
        self.add_machine(machine.rack, self.takes_ns("replace_ns", self.plan.replace_ns))

    def agents(self) -> list[Agent]:
        return [site.agent for site in self.sites if site.agent is not None]

    def flipped(self, machine: int) -> bool:
        """Whether a bit was flipped in something that rests there, ever."""
        return any(number == machine for number, _, _ in self.atlas.damaged)

    def living_sites(self) -> list[Site]:
        return [site for site in self.sites if site.machine.alive]

    def next_token(self) -> int:
        self._tokens += 1
        return self._tokens

    def gang(self, attempt: int) -> Gang:
        if attempt not in self._gangs:
            pace = self.plan.pace
            self._gangs[attempt] = (
                Gang(self, attempt) if pace is None else PacedGang(self, attempt, pace)
            )
        return self._gangs[attempt]

    def new_rank(self, site: Site, rank: int, gang: Gang, newcomer: bool, delay_ns: int) -> Rank:
        new = Rank if self.plan.pace is None else PacedRank
        return new(site, rank, gang, newcomer, self.takes_ns("rank_start_ns", delay_ns))

    def takes_ns(self, what: str, usual_ns: int) -> int:
        """As long as it took in the job that set the pace, if there is one: after this failure,
        else after any."""
        pace = self.plan.pace
        measured: tuple[int, ...] = (
            () if pace is None else getattr(self.aftermath, what) or getattr(pace.failures, what)
        )
        return self.chance.choice(measured) if measured else usual_ns

    def violate(self, property_: str, what: str) -> None:
        self.violations.append(f"{property_}: {what}")
        self.world.note("checker", f"VIOLATED {property_}: {what}")
        self.world.stop()

    @property
    def is_over(self) -> bool:
        """All agents have ended, and nothing of ours lives any more."""
        return all(
            s.agent is not None and s.agent.done and not s.machine.processes
            for s in self.living_sites()
        )

    def _look(self) -> None:
        if self.is_over:
            self.world.stop()
        else:
            self.world.after(S_NS, None, self._look)

    def run(self) -> Outcome:
        self.world.after(S_NS, None, self._look)
        self.world.run(self.plan.limit_ns)
        if not self.violations:
            for crash in self.world.crashes:
                if isinstance(crash.error, MemoryBudgetError):
                    continue  # not even a page can be had: who ends so is started again
                self.violations.append(f"no crash: {crash}")
        if not self.violations and not self.is_over:
            self.violations.append(
                f"liveness: the job has not ended after {self.world.now_ns / S_NS:.0f} s"
            )
        if not self.violations:
            self.watch.over()
        wrong = "; ".join(self.violations) or None
        world = self.world
        return Outcome(
            *(
                world.seed,
                wrong,
                world.trace.digest,
                world.now_ns,
                world.events,
                len(self.faults),
                world.calls,
            ),
            *(self.lost_steps, tuple(world.trace.lines)),
        )


def _nobody(rank: int, phase: Phase, step: int) -> None:
    """Nobody wants to know."""
