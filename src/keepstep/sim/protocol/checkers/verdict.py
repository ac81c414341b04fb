"""No action without a verdict, and every verdict and question answered.

An attempt is followed by another one only after its verdict, which is written once in each KV where
the agents meet, and which says that the job is done only when all ranks have done their last step;
who asks where to resume hears of it before all is over, unless it dies.

When the job has ended and all of its machines are gone, others that come begin another run.

And nobody gives up, but where something else took the machine's memory, the store was not there to
be looked at, or ranks in the middle of the job were offered a fresh start.

Not verified: that a verdict is right; how long an answer takes, beyond the end of the job.
"""

from __future__ import annotations

from keepstep.core.recovery.restarts import CODE_REFUSED
from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.events import Event
from keepstep.model.snapshot import Stamp
from keepstep.runtime.agent.meeting_record import CODEC, OPENING
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.machine import Machine

EXCUSES = ("takes a machine's memory", "the store does not answer")


class Verdicts(Checker):
    NAME = "verdicts"

    def __init__(self, job: SimJob, atlas: Atlas) -> None:
        super().__init__(job, atlas)
        self._judged: set[int] = set()  # attempts that have their verdict, in this KV
        self._again: set[int] = set()
        self._formed: set[int] = set()
        self._seated: dict[int, set[str]] = {}  # hosts, by attempt
        self._final: Verdict | None = None
        self._gave_up = False
        self._had_nothing = False  # to go back to, then
        self._was_refused = False  # a world of another size, for want of a checkpoint
        self._asking: set[Program] = set()

    def written(self, key: str, value: str) -> None:
        if key == OPENING:  # what is known of the job is written there again
            self._judged.clear()
            self._again.clear()
        number, _, what = key.partition("/")
        if what.startswith("seat/"):
            arrival: Arrival = CODEC.decode(value.encode())
            self._seated.setdefault(int(number), set()).add(arrival.host)
        if what != "verdict":
            return
        verdict: Verdict = CODEC.decode(value.encode())
        if int(number) in self._judged:
            self.violated(f"attempt {number} has another verdict now: {verdict.outcome}")
        self._judged.add(int(number))
        if verdict.outcome == "done" and not self.atlas.are_all_done:
            self.violated(f"attempt {number} is said to be done, and not all ranks are")
        # What was said in a KV that is lost is said again in the next, or nobody is left there who
        # knows it: the successor of an agent that was killed after the last word.
        is_forgotten = self.job.plan.hosts
        if (
            self._final is not None
            and not is_forgotten
            and not self._is_of_a_run_that_never_began(int(number), verdict)
        ):
            self.violated(
                f"attempt {number} has the verdict {verdict.outcome}, and the job had "
                f"{self._final.outcome}"
            )
        if verdict.outcome == "again":
            self._again.add(int(number))
        elif self._final is None:
            self._final = verdict

    def _is_of_another_run(self) -> bool:
        """The job has ended, well or because it was told to, and nobody of it is left: nodes that
        come after that begin it again."""
        living = {node.machine.host for node in self.job.nodes if node.machine.alive}
        took_part = {host for attempt in self._formed for host in self._seated[attempt]}
        is_over = self._final is not None and self._final.outcome in ("done", "stop")
        return is_over and not took_part & living

    def _is_of_a_run_that_never_began(self, attempt: int, verdict: Verdict) -> bool:
        """A node that first comes when the job has ended, well or because it was told to, waits for
        a new run. It is told to end before that one has begun."""
        is_over = self._final is not None and self._final.outcome in ("done", "stop")
        return is_over and verdict.outcome == "stop" and attempt not in self._formed

    def _could_be_said(self) -> bool:
        """Whether somebody of the newest attempt lived to say the last word. Who was told to end
        before it had a seat has no say, nor has anybody where the KV was away the whole time."""
        living = {node.machine.host for node in self.job.nodes if node.machine.alive}
        newest = max(self._seated, default=-1)
        if newest < 0:
            kv = self.job.around.kv
            return kv.world.now_ns >= kv.away_until_ns
        return bool(self._seated[newest] & living)

    def recorded(self, machine: Machine, event: Event) -> None:
        if event.kind != "attempt-formed" or not self.job.has_many_agents:
            return
        attempt = event.data["attempt"]
        if attempt not in self._formed and self._is_of_another_run():
            self._final = None
            self._again.add(attempt - 1)
        self._formed.add(attempt)
        if attempt and attempt - 1 not in self._again:
            self.violated(f"attempt {attempt} is formed, and the one before has no verdict")

    def joined(self, program: Program) -> None:
        self._asking.add(program)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        if program not in self._asking:
            self.violated(f"rank {program.who.rank} may go on, and did not ask")
        self._asking.discard(program)

    def agent_ended(self, machine: Machine, exit_code: int) -> None:
        if exit_code and not self._gave_up:
            self._gave_up, self._had_nothing = True, self._has_nothing()
        self._was_refused |= exit_code == CODE_REFUSED and bool(self.job.plan.min_nodes)

    def _has_nothing(self) -> bool:
        """States in doubt are left, and of those before a bit was flipped where nothing else was
        owed: nobody starts afresh for a doubt."""
        is_damaged = bool(self.atlas.damages) and self.atlas.surviving() is None
        return is_damaged and self.job.plan.doubts > 0

    @property
    def _has_lost_its_store(self) -> bool:
        """It may be another job's now: nothing of this one is stored there any more."""
        beside, disk = self.job.plan.beside, self.job.around.disk
        return beside in ("races", "adopts") or (beside == "another" and disk.has_lied)

    @property
    def _is_overtaken(self) -> bool:
        """Another run of the same job has gone on from the store behind it: what this one would
        store does not count any more."""
        return self.job.around.oracle.beside is not None

    def over(self) -> None:
        waiting = sorted(program.who.rank for program in self._asking if program.process.alive)
        if waiting:
            self.violated(f"all is over, and ranks {waiting} have not heard where to resume")
        # Where the KV is lost with its host each node ends by itself.
        has_kv = self.job.has_many_agents and not self.job.plan.hosts
        if self._final is None and has_kv and self._could_be_said():
            self.violated("all is over, and no verdict says so")
        # Whoever follows an agent that was killed after the last word finds nobody who knows it.
        is_done = self.job.plan.hosts and self._final is not None
        is_excused = (
            is_done
            or self._was_refused
            or self._had_nothing
            or self._has_lost_its_store
            or self._is_overtaken
            or any(e in fault for e in EXCUSES for fault in self.job.faults)
        )
        if self._gave_up and not is_excused and not self.job.was_told_to_end:
            self.violated("the job gave up")
