"""Beside: another run of keepstep that uses the same store, in a world of its own, with machines, a
network and a meeting point that nobody shares with it.

    another     a job of another name, which comes when the store has an owner
    races       the same, begun at the same time: whose the store is has not been decided
    adopts      a job of another name that takes the store over while its owner trains
    yesterday   the same job, which began before, has written some, and stands still in the middle
                of something; this one goes on from what it finds, and after a while that one goes
                on, too

One of yesterday that publishes late stands right before it lets a checkpoint exist, and does so in
the midst of what the other one's persister does with that attempt, which was never published.

Each is held some times in the middle of a call of the store, for as long as a machine may stand
still, and one that adopts loses a machine. What must hold is in `checkers/shared_store.py`.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.owner import OWNER
from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.observer import Observer
from keepstep.sim.protocol.job.plan import RunPlan
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.stepped import SteppedWorld
from keepstep.sim.protocol.world.world import YEAR_2026_NS, Process, World

LOOK_NS = 100 * MS_NS
BEFORE_NS = 300 * S_NS  # the run of yesterday has begun so long ago
MOST_CALLS = 60  # of the store, to the next at which it stands
MAX_HOLDS = 4
WAKES = 0.8  # so often what is of yesterday goes on
LATE = 0.5  # so often it has a checkpoint left to publish
MOST_LOOKS = 12  # of calls that are about that one


def other_plan(plan: RunPlan) -> RunPlan:
    """What the other run is to be."""
    calm = replace(
        plan,
        beside="",
        strangers=False,
        faults=0,
        launcher="agents",
        replaces=True,
        jumps=False,
        wires=replace(plan.wires, breaks=0.0),
    )
    match plan.beside:
        case "yesterday":
            return calm
        case "adopts":
            return replace(calm, job="adopter", adopts=True, steps=plan.steps + 8)
    return replace(
        calm,
        job="another",
        nodes=1,
        ranks_per_node=1,
        min_nodes=0,
        policy="none",
        racks=0,
        slots=0,
        interfaces=1,
        link_streams=None,
        hosts=False,
        replicas=0,
        astray=None,
    )


class Beside:
    """Of one run. `close` it."""

    def __init__(self, job: SimJob) -> None:
        self.job = job
        self.kind = job.plan.beside
        self._world = job.world
        self._random = self._world.stream("beside")
        plan = other_plan(job.plan)
        has_same = self.kind in ("adopts", "yesterday")
        world = World(-1 - self._world.seed)
        states = self._world.seed if has_same else None
        self.other = SimJob(plan, world, job.around.disk, states)
        if self.kind == "yesterday":  # and goes on from what the other one has stored, if it wakes
            self.other.around.oracle.beside = job.around.oracle
        world.began_wall_ns = YEAR_2026_NS
        self._stepped = SteppedWorld(world)
        self._behind_ns = 0  # by how much its time is behind
        self._holds = self._random.randrange(MAX_HOLDS)
        late = self._world.stream("late publisher")
        self._publishes_late = self.kind == "yesterday" and late.random() < LATE
        self._looks = late.randrange(1, MOST_LOOKS)  # until it does
        self.has_begun = False
        self.slept_ns = 0  # by its own time, since when it is of yesterday
        self.is_overtaken = self.kind == "yesterday"  # by the run that it is beside
        job.waits = self._is_awaited

    def close(self) -> None:
        self._stepped.close()

    def begin(self) -> None:
        """Before the run begins."""
        match self.kind:
            case "yesterday":
                self._run_yesterday()
            case "races":
                self._world.after(self._random.randrange(2 * S_NS), None, self._come)
            case _:
                self._look()

    def _is_awaited(self) -> bool:
        return self.kind == "adopts" and self.has_begun and not self.other.world.stopped

    # -- how it comes

    def _look(self) -> None:
        """Is the store somebody's?"""
        if any(path.endswith(f"/{OWNER}") for path in self.job.around.disk.files):
            most_ns = max(S_NS, self.job.plan.faults_until_ns - self._world.now_ns)
            self._world.after(self._random.randrange(most_ns), None, self._come)
        else:
            self._world.after(LOOK_NS, None, self._look)

    def _come(self) -> None:
        self.has_begun = True
        self._behind_ns = self._world.now_ns
        self.other.world.began_wall_ns = YEAR_2026_NS + self._behind_ns
        self.other.begin()
        self.other.look_for_its_end()
        self._hold_later()
        if self.kind == "adopts":
            lives_ns = self.other.plan.steps * self.other.plan.step_ns
            self.other.world.after(self._random.randrange(lives_ns), None, self._lose_machine)
        self._step()

    def _lose_machine(self) -> None:
        living = [node for node in self.other.living_nodes() if node.exit_code is None]
        if living:
            self.other.lose_machine(self._random.choice(living))

    def _run_yesterday(self) -> None:
        """Until it stands, somewhere behind its first checkpoint."""
        world = self.other.world
        world.began_wall_ns = YEAR_2026_NS - BEFORE_NS
        self.has_begun = True
        self.other.begin()
        self.other.look_for_its_end()
        while not (self._stepped.is_held or world.stopped) and world.now_ns < BEFORE_NS // 2:
            self._stepped.run(world.now_ns + LOOK_NS)
        self.slept_ns = world.now_ns
        self._forward()
        if self._publishes_late and self._stepped.is_held:
            self._world.on_call = self._called_beside
        elif self._random.random() < WAKES:
            at_ns = self._random.randrange(self.job.plan.faults_until_ns + 10 * S_NS)
            self._world.after(at_ns, None, self._go_on)

    # -- how it lives

    def persisted(self) -> None:
        """It has written one."""
        if self.kind != "yesterday" or self._behind_ns:
            return
        if self._publishes_late:
            self._stepped.hold_at(1, _publishes)
        else:
            self._stepped.hold_at(1 + self._random.randrange(MOST_CALLS))

    def _called_beside(self, process: Process, what: str) -> None:
        """By somebody of the run that it is beside."""
        attempt = self._stepped.held_at.rpartition("/")[0].rpartition(" ")[2]
        if process.role != "persister" or attempt not in what:
            return
        self._looks -= 1
        if not self._looks:
            self._world.on_call = None
            self._go_on()

    def _hold_later(self) -> None:
        if self._holds:
            self._holds -= 1
            self._stepped.hold_at(1 + self._random.randrange(MOST_CALLS))

    def _go_on(self) -> None:
        """Its own clocks have stood still; what time it is for people it hears at once."""
        world = self.other.world
        self._world.note(
            "beside", f"the other run goes on, at {world.now_ns / S_NS:.3f} s of its own"
        )
        self._behind_ns = self._world.now_ns - world.now_ns
        world.began_wall_ns = YEAR_2026_NS + self._behind_ns
        self._hold_later()
        self._step()

    def _step(self) -> None:
        world = self.other.world
        self._stepped.run(self._world.now_ns - self._behind_ns)
        self._forward()
        if self._stepped.is_held:
            self._world.note("beside", f"the other run stands: {world.trace.lines[-1].strip()}")
            stands_ns = int(self._random.uniform(0.01, 1.0) ** 2 * 60 * S_NS)
            self._world.after(stands_ns, None, self._go_on)
        elif not world.stopped and world.next_ns is not None:
            delay_ns = max(0, world.next_ns + self._behind_ns - self._world.now_ns)
            self._world.after(delay_ns, None, self._step)

    def _forward(self) -> None:
        """What is wrong there is wrong here."""
        if self.other.violations and not self.job.violations:
            for line in list(self.other.world.trace.lines)[-30:]:
                self._world.note("beside", line)
            self.job.violate("beside", self.other.violations[0])


def _publishes(call: str) -> bool:
    return call.startswith("put ") and call.endswith(f"/{MANIFEST}")


class BesideWatch(Observer):
    """Hears what the other run does."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind == "persisted":
            self._beside.persisted()
