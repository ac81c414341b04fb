"""Processes: the ranks of a simulated node as `ports.RankProcesses`, and how they look from outside
as `ports.Probes`.

A rank's end is noticed a moment after it; a process that is stopped looks stopped. What ends at the
same instant is told together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from keepstep.model.diagnosis import GroupSample, ProcessSample, Stack
from keepstep.model.launch import RankAssignment, RankEnd
from keepstep.model.messages.agent_rank import BecomeRank, StandbyReady, ToProcess
from keepstep.model.step_work import FixedWork, Hindrance
from keepstep.model.units import MS_NS
from keepstep.ports import Box
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.world import Process

SIGKILL = 9

# Of a rank's number on the node and its environment: the program, not begun.
NewProgram = Callable[[Process, Mapping[str, str]], Program]
ConnectAgent = Callable[[Process, "Standby"], Box | None]


class Standby:
    """A process that waits to become a rank."""

    def __init__(self, process: Process, new_program: NewProgram) -> None:
        self.process = process
        self._new_program = new_program
        self.program: Program | None = None

    def hear(self, box: Box, message: ToProcess) -> None:
        if isinstance(message, BecomeRank):
            box.close()
            self.program = self._new_program(self.process, message.environ)
            self.program.begin()

    def gone(self, box: Box) -> None:
        if self.program is None:
            self.process.end("its agent has ended")


class SimRankProcesses:
    """See `ports.RankProcesses`. One agent's: its ranks outlive it. `ranks`: on this node.
    `start_ns`: until a program that was started begins. `notice_ns`: until an end is noticed."""

    may_stand_by = True

    def __init__(
        self,
        agent: Process,
        ranks: int,
        new_program: NewProgram,
        connect_agent: ConnectAgent,
        start_ns: Callable[[], int],
        notice_ns: Callable[[], int],
        on_kill: Callable[[Process], None],
    ) -> None:
        self._agent = agent
        self._ranks = ranks
        self._new_program = new_program
        self._connect_agent = connect_agent
        self._start_ns = start_ns
        self._notice_ns = notice_ns
        self._on_kill = on_kill
        self._told: Callable[[Sequence[RankEnd]], None] = _nobody
        self._living: dict[int, int] = {}
        self._programs: dict[int, Callable[[], Program | None]] = {}  # by process
        self._standby: Standby | None = None

    @property
    def living(self) -> Mapping[int, int]:
        return self._living

    @property
    def standby_pid(self) -> int | None:
        return None if self._standby is None else self._standby.process.pid

    def listen(self, ended: Callable[[Sequence[RankEnd]], None]) -> None:
        self._told = ended

    # -- starting

    def start(
        self, place: RankAssignment, ranks: Collection[int], environ: Mapping[str, str]
    ) -> dict[int, int]:
        self._agent.touch("start ranks")
        return {
            rank: self._start(rank, {**self.environ_of(rank, place), **environ})
            for rank in sorted(ranks)
        }

    def _start(self, rank: int, environ: Mapping[str, str]) -> int:
        process = self._agent.machine.start("rank", environ["RANK"], self._agent.pid)
        program = self._new_program(process, environ)
        pid = self._watch(rank, process, lambda: program)
        process.after(self._start_ns(), program.begin)
        return pid

    def start_standby(self) -> None:
        self._end_standby()
        process = self._agent.machine.start("standby", parent_pid=self._agent.pid)
        self._standby = standby = Standby(process, self._new_program)
        process.after(self._start_ns(), self._standby_is_ready, standby)

    def _standby_is_ready(self, standby: Standby) -> None:
        box = self._connect_agent(standby.process, standby)
        if box is None:
            standby.process.end("there is no agent")
        else:
            box.send(StandbyReady(standby.process.pid))

    def standby_becomes(self, rank: int) -> int:
        standby, self._standby = self._standby, None
        assert standby is not None
        return self._watch(rank, standby.process, lambda: standby.program)

    def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.process.end("nobody needs it any more")

    def environ_of(self, rank: int, place: RankAssignment) -> dict[str, str]:
        return {
            "RANK": str(place.first_rank + rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "KEEPSTEP_ATTEMPT": str(place.attempt),
            "KEEPSTEP_AGENT": str(self._agent.pid),
        }

    # -- ends

    def _watch(self, rank: int, process: Process, program: Callable[[], Program | None]) -> int:
        pid = process.pid
        self._living[rank] = pid
        self._programs[pid] = program
        if process.alive:
            process.on_end.append(lambda: self._notice_soon(rank, pid))
        else:
            self._notice_soon(rank, pid)
        return pid

    def _notice_soon(self, rank: int, pid: int) -> None:
        if self._agent.alive:
            self._agent.after(self._notice_ns(), self._notice, rank, pid)

    def _notice(self, rank: int, pid: int) -> None:
        """Whoever looks for one that has ended finds all that have."""
        if self._living.get(rank) == pid:
            ended = [r for r, p in sorted(self._living.items()) if self._process(p) is None]
            self._told([self._reap(each) for each in ended])

    def _reap(self, rank: int) -> RankEnd:
        pid = self._living.pop(rank)
        program = self._programs.pop(pid)()
        if program is None or program.exit_code is None:
            return RankEnd(rank, pid, -SIGKILL)
        return RankEnd(rank, pid, program.exit_code, program.report)

    def signal(self, signum: int) -> None:
        self._agent.touch("signal ranks")
        for pid in list(self._living.values()):
            program = self._programs[pid]()
            if program is not None:
                program.process.after(MS_NS, program.terminated, signum)

    def kill(self, ranks: Collection[int]) -> None:
        self._agent.touch("kill ranks")
        for rank in sorted(ranks):
            process = self._process(self._living.get(rank))
            if process is not None:
                self._on_kill(process)
                process.end("killed by its agent")

    def _process(self, pid: int | None) -> Process | None:
        """The living one with that number."""
        return None if pid is None else self._agent.machine.processes.get(pid)

    def end_orphans(self, agent_pids: Sequence[int], then: Callable[[list[int]], None]) -> None:
        self._agent.touch("end orphans")
        processes = self._agent.machine.processes
        ended = [pid for pid, process in processes.items() if process.parent_pid in agent_pids]
        for pid in ended:
            processes[pid].end("killed by the agent that has taken over")
        self._agent.after(self._notice_ns(), then, ended)

    def summary(self, ends: Sequence[tuple[int, int]]) -> str:
        return f"ranks failed: {ends}"

    def close(self, keep_errors: bool) -> None:
        self._end_standby()


class SimProbes:
    """See `ports.Probes`. A process uses its processor as often as it is called."""

    def __init__(self, observer: Process, waits: Callable[[Process], bool | None]) -> None:
        """waits: whether a rank's process is in a collective; None: nobody knows."""
        self._observer = observer
        self._waits = waits

    def process(self, pid: int) -> ProcessSample:
        process = self._find(pid)
        if process is None:
            return ProcessSample("gone", 0, 0)
        if process.is_stopped:
            return ProcessSample("stopped", process.cpu_ns, 1)
        return ProcessSample("asleep" if self._waits(process) else "running", process.cpu_ns, 1)

    def _find(self, pid: int) -> Process | None:
        return self._observer.machine.processes.get(pid)

    def group_of(self, pid: int) -> int | None:
        return None if self._find(pid) is None else pid

    def group(self, group: int) -> GroupSample:
        return GroupSample(self.process(group).cpu_ns, 0)

    def oom_counter(self, pid: int) -> Callable[[], int | None]:
        return lambda: 0

    def machine_oom_kills(self) -> int | None:
        return 0

    def hindrance(self, pid: int) -> Callable[[], Hindrance]:
        return Hindrance

    def fixed_work(self, pids: Mapping[int, int], within_ns: int) -> dict[int, FixedWork]:
        return {}  # processors are none of what is simulated

    def stacks(self, pids: Mapping[int, int], within_ns: int) -> dict[int, Stack]:
        found = {}
        for rank, pid in pids.items():
            process = self._find(pid)
            if process is not None:
                waits = self._waits(process)
                found[rank] = Stack(f"process {pid}", "collective" if waits else "compute", waits)
        return found

    def save_stacks(self, stacks: Mapping[int, Stack]) -> str:
        if self._observer.touch("save stacks"):
            raise OSError("no space left")
        return "/state/stacks"

    def recorder_dumps(self, pids: Mapping[int, int], newer_than_ns: int) -> dict[int, object]:
        return {}  # torch is none of what is simulated


def _nobody(ends: Sequence[RankEnd]) -> None:
    """Nobody listens yet."""
