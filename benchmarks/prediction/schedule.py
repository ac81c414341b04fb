"""Schedule: what was done to a real job, and when in its course; and the hand that does it again to
a simulated one.

A strike comes where it came: so long after a rank had entered a phase of a step, after a
resumption, or after the strike before; steps are counted from the one that the job had last gone on
from. So the schedule keeps its sense when the simulated job goes back further than the real one
did, or less far.

Not modelled: a stopped process ends when the real one ended, whoever ended that; what a bit flips
in is always the payload; a full store is full for all who write; a node that is cut off from the
meeting point is so together with all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.prediction.measured_plan import Course
from benchmarks.prediction.pace import Aftermath
from keepstep.core.economics.journal_kinds import loss_of
from keepstep.edge.shm.slot import rank_dir
from keepstep.model.events import Event
from keepstep.model.mesh import Mesh
from keepstep.model.snapshot import Phase, SlotState, Stamp
from keepstep.model.units import MS_NS, PAGE_BYTES, S_NS
from keepstep.sim.protocol.faults.acts import Acts, header_of
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.nodes import SimNode
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import File

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


@dataclass(frozen=True, slots=True)
class Resumed:
    """All ranks of a simulated job went on, after so many strikes. `fetched`: a snapshot had come
    from another node before that."""

    strikes: int
    step: int
    source: str
    lost_steps: int
    fetched: bool


class Striker(Observer):
    """Does one strike after the other. It hears as an observer does, and strikes between two
    events. `resumptions`: the first start is one. `overdue`: strikes whose moment did not come."""

    def __init__(
        self, job: SimJob, course: Course, strikes: tuple[Strike, ...], settled: bool
    ) -> None:
        """course: of the job's plan. settled: all are to resume once more after the last one."""
        self._job = job
        self._world = job.world
        self._course = course
        self._strikes = strikes
        self._settled = settled
        self._hand = Hand(job)
        self._next = 0
        self._waits = False  # for the next one's moment
        self._awaits_resumption = True  # the first one, too
        self._base = -1
        self._struck_ns = 0
        # by rank and phase: the step in which it entered it last, and when
        self._entered: dict[tuple[int, Phase], tuple[int, int]] = {}
        self._fetched = False
        self.overdue = 0
        self.resumptions: list[Resumed] = []

    @property
    def _strike(self) -> Strike | None:
        return self._strikes[self._next] if self._next < len(self._strikes) else None

    # -- what is heard

    def formed(self, machine: Machine, mesh: Mesh) -> None:
        self._hand.machine_of[mesh.node] = machine.number

    def recorded(self, machine: Machine, event: Event) -> None:
        match event.kind:
            case "fetched":
                self._fetched = True
            case "persist-failed":
                self._job.around.disk.full = False
            case "resumed":
                data = event.data
                found = Resumed(
                    strikes=self._next,
                    step=data["step"],
                    source=data["source"],
                    lost_steps=loss_of(event)[1],
                    fetched=self._fetched,
                )
                self.resumptions.append(found)
                self._base = found.step
                self._fetched = False
                self._entered.clear()
                self._go_on()

    def _go_on(self) -> None:
        if self._awaits_resumption:
            self._awaits_resumption = False
            self._prepare()

    def announced(self, program: Program, phase: Phase, step: int) -> None:
        rank = program.who.rank
        self._entered[rank, phase] = (step, self._world.now_ns)
        self._look(rank, phase)

    def _look(self, rank: int, phase: Phase) -> None:
        strike = self._strike
        found = self._entered.get((rank, phase))
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
            self._strike_after(max(0, at_ns + strike.since_ns - self._world.now_ns))

    # -- when

    def _prepare(self) -> None:
        """The next one's turn has come, its moment has not."""
        strike = self._strike
        now_ns = self._world.now_ns
        if strike is None:
            self._world.after(SETTLES_NS, None, self._world.stop)
            return
        self._waits = True
        if strike.phase is None:
            since_ns = now_ns if strike.resumed else self._struck_ns
            self._strike_after(max(0, since_ns + strike.since_ns - now_ns))
        else:
            patience_ns = OVERDUE_NS if strike.resumed else 2 * strike.gap_ns
            self._world.after(patience_ns, None, self._too_late, self._next)
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
        self._world.after(delay_ns, None, self._do, self._next)

    def _do(self, number: int) -> None:
        strike = self._strikes[number]
        done = self._hand.carry_out(strike)
        if done is None:
            self._world.after(LOOK_NS, None, self._do, number)
            return
        self._job.struck(f"strike {number}: {done}")
        self._course.aftermath = strike.aftermath
        self._struck_ns = self._world.now_ns
        self._next += 1
        following = self._strike
        self._awaits_resumption = self._settled if following is None else following.resumed
        self._entered = {
            key: found for key, found in self._entered.items() if key[1] is not Phase.RESTORE
        }
        if self._awaits_resumption:
            self._world.after(OVERDUE_NS, None, self._too_late, self._next)
        else:
            self._prepare()


class Hand:
    """What strikes do. `machine_of`: by the nodes' numbers the machine that is that node."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._acts = Acts(job)
        self._random = job.world.stream("striker")
        self.machine_of: dict[int, int] = {}

    def carry_out(self, strike: Strike) -> str | None:
        """What was done, in words; None when it cannot be done yet."""
        match strike.kind:
            case "kill-node":
                return self._lose(strike)
            case "link-down":
                return self._cut(strike)
            case "etcd-restart":
                return self._acts.kv_away(strike.for_ns)
            case "full":
                self._job.around.disk.full = True
                return "the store is full"
            case "keeper-kill" | "agent-kill" as kind:
                return self._kill(kind.removesuffix("-kill"), strike)
            case _:
                return self._end(strike)

    def _lose(self, strike: Strike) -> str | None:
        nodes = self._nodes(strike)
        return "; ".join(self._acts.lose_machine(node) for node in nodes) or None

    def _cut(self, strike: Strike) -> str:
        """From all others and the meeting point."""
        here = [node.machine.number for node in self._nodes(strike)]
        all_here = [node.machine.number for node in self._job.living_nodes()]
        others = [number for number in all_here if number not in here]
        done = [self._acts.isolate(number, others, strike.for_ns) for number in here]
        return "; ".join([*done, self._acts.kv_away(strike.for_ns)])

    def _kill(self, role: str, strike: Strike) -> str | None:
        node = self._node(strike.rank // self._job.plan.ranks_per_node)
        if node is None:
            return None
        life = node.keeper if role == "keeper" else node.agent
        if life is None or not life.process.alive:
            return None
        return self._acts.kill(role, node.machine, life.process)

    def _end(self, strike: Strike) -> str | None:
        """Of a rank."""
        program = self._program(strike.rank)
        if program is None:
            return None
        match strike.kind:
            case "flip":
                flipped = self._flip(program)
                return flipped and f"{flipped}; {self._acts.kill_rank(program)}"
            case "stop":
                process = program.process
                self._job.world.after(strike.for_ns, None, process.end, "stopped, then killed")
                return self._acts.stop(f"rank {strike.rank}", process, strike.for_ns)
            case _:
                return self._acts.kill_rank(program)

    def _flip(self, program: Program) -> str | None:
        """A bit of the newest snapshot; what is being captured is sealed first."""
        machine = program.process.machine
        directory = rank_dir(self._job.around.settings.job_dir, program.who.rank)
        found: dict[Stamp, tuple[str, File]] = {}
        for path, file in machine.files.every_file():
            header = header_of(path, file) if path.startswith(f"{directory}/slot-") else None
            if header is not None and header.state is SlotState.WRITING:
                return None
            if header is not None and header.state is SlotState.SEALED:
                found[header.stamp] = (path, file)
        if not found:
            return "there was no snapshot to flip a bit of"
        path, file = found[max(found)]
        bit = 8 * (PAGE_BYTES + self._random.randrange(self._job.plan.nbytes))
        return self._acts.flip(machine, path, file, bit)

    # -- whom

    def _nodes(self, strike: Strike) -> list[SimNode]:
        found = [self._node(node) for node in strike.nodes]
        return [node for node in found if node is not None]

    def _node(self, node: int) -> SimNode | None:
        """The living machine that is this node."""
        number = self.machine_of.get(node, node)
        found = self._job.nodes[number]
        return found if found.machine.alive else None

    def _program(self, rank: int) -> Program | None:
        living = (p for p in self._job.around.programs.values() if p.process.alive)
        return next((program for program in living if program.who.rank == rank), None)
