"""Acts: what may go wrong in a run, one method each.

Comes in: to whom or what it happens, and for how long. Goes out: what was done, in words, for the
trace and for those who judge. The nemesis draws these and a story names them; nothing is decided
here, and nothing is drawn.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from keepstep.edge.shm.slot_header import parse_page
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotHeader, SlotState
from keepstep.model.units import PAGE_BYTES, S_NS, human_ns
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.nodes import KeeperLife, SimNode
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.pipe import SimSocket
from keepstep.sim.protocol.world.filesystem import AWAY
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.memory import File
from keepstep.sim.protocol.world.world import Process

Way = tuple[int, int]  # from one machine to another


class Acts:
    """In one run. What ends by itself after a while may be ended before that: see `heal`."""

    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._world = job.world
        self._network = job.around.network
        self._blocked: list[Way] = []
        self._stalled: list[Way] = []
        self._unplugged: list[str] = []
        self._stopped: list[Process] = []
        self._is_over = False

    def heal(self) -> None:
        """Every path carries again, every process continues; nothing more is cut."""
        self._is_over = True
        self._network.unblock(self._blocked)
        self._blocked = []
        for path in self._stalled:
            self._network.unstall(path)
        self._stalled = []
        for host in self._unplugged:
            self._network.plug_in(host)
        self._unplugged = []
        for process in self._stopped:
            process.cont()

    # -- processes

    def kill_rank(self, program: Program) -> str:
        program.process.end("killed")
        return f"killed rank {program.who.rank}"

    def kill_rank_at_call(self, program: Program, call: int) -> str:
        """At the `call`-th port call from now on."""
        program.process.dies_at_call = call
        return f"rank {program.who.rank} is to be killed at a call of a port"

    def break_connections(self) -> str:
        """Of the ranks to each other: as their transports find it when nobody has said in time
        why. Where nobody is expected to say it, the transport's error ends the program."""
        why = "a connection to a peer broke"
        for program in list(self._job.around.programs.values()):
            if program.groups.expects_notice:
                program.process.after(0, program.groups.lose, f"{why}, and nobody said why")
            else:
                program.process.end(why)
        return "the connections between the ranks break"

    def kill_all_ranks(self) -> str:
        for program in list(self._job.around.programs.values()):
            program.process.end("killed with all others")
        return "killed all ranks"

    def kill(self, role: str, machine: Machine, process: Process) -> str:
        """The keeper or the agent of that machine."""
        process.end("killed")
        return f"killed the {role} of machine {machine.number}"

    def kill_at_call(self, role: str, machine: Machine, process: Process, call: int) -> str:
        """At the `call`-th port call from now on."""
        process.dies_at_call = call
        return f"the {role} of machine {machine.number} is to be killed at a call of a port"

    def stop(self, what: str, process: Process, for_ns: int) -> str:
        process.stop()
        self._stopped.append(process)
        self._world.after(for_ns, None, process.cont)
        return f"stopped {what} for a while"

    def signal_agent(self, node: SimNode, signum: int) -> str:
        assert node.agent is not None
        self._job.was_told_to_end = True
        node.agent.signal(signum)
        return f"signal {signum} to the agent of machine {node.machine.number}"

    # -- machines

    def preempt_keeper(self, machine: Machine, life: KeeperLife) -> str:
        """The platform's SIGTERM, which is to take the machine away and then does not."""
        life.process.after(0, life.run.preempted)
        return f"SIGTERM to the keeper of machine {machine.number}"

    def preempt_ranks(self) -> str:
        """The platform's SIGTERM to all of them."""
        for program in list(self._job.around.programs.values()):
            program.process.after(0, program.terminated, signal.SIGTERM)
        return "SIGTERM to all ranks"

    def lose_machine(self, node: SimNode) -> str:
        self._job.lose_machine(node)
        return f"lost machine {node.machine.number}"

    def lose_machine_at_call(self, node: SimNode, agent: Process, call: int) -> str:
        """At the `call`-th port call of its agent from now on."""

        def ended() -> None:
            if agent.dies_at_call == 0 and node.machine.alive and not self._is_over:
                self._job.struck(self.lose_machine(node))

        agent.dies_at_call = call
        agent.on_end.append(ended)
        return f"machine {node.machine.number} is to be lost at a call of its agent"

    def jump_clock(self, machine: Machine, by_ns: int) -> str:
        machine.clock.wall_error_ns += by_ns
        return f"the wall clock of machine {machine.number} jumps"

    def eat_memory(self, machine: Machine, left_bytes: int, for_ns: int) -> str:
        """So much is left of it."""
        files = machine.files
        files.eaten_bytes = max(0, files.budget_bytes - files.used_bytes - left_bytes)
        self._world.after(for_ns, None, setattr, files, "eaten_bytes", 0)
        return "something else takes a machine's memory"

    def flip(self, machine: Machine, path: str, file: File, bit: int) -> str:
        """Of a snapshot, a copy or a parity, sealed or on its way."""
        header = header_of(path, file)
        file.data[bit // 8] ^= 1 << (bit % 8)
        if header is not None and header.state is not SlotState.EMPTY:
            self._job.around.observers.damaged(machine, header.rank, header.stamp)
        return f"flipped bit {bit} of {path} on machine {machine.number}"

    # -- the network

    def cut(self, a: int, b: int, for_ns: int) -> str:
        """Both ways, as all that is between two machines."""
        self._block([(a, b), (b, a)], for_ns)
        return f"cut machines {a} and {b} off for {for_ns / S_NS:.3f} s"

    def cut_one_way(self, source: int, target: int, for_ns: int) -> str:
        self._block([(source, target)], for_ns)
        return f"nothing gets from machine {source} to {target} for {for_ns / S_NS:.3f} s"

    def clog(self, source: int, target: int, for_ns: int) -> str:
        """So short that nobody gives a connection up."""
        self._block([(source, target)], for_ns)
        return f"what goes from machine {source} to {target} is {for_ns / S_NS:.3f} s late"

    def isolate(self, here: int, others: Iterable[int], for_ns: int) -> str:
        self._block([path for other in others for path in ((here, other), (other, here))], for_ns)
        return f"nothing gets to or from machine {here} for {for_ns / S_NS:.3f} s"

    def _block(self, paths: list[Way], for_ns: int) -> None:
        self._network.block(paths)
        self._blocked += paths
        self._world.after(for_ns, None, self._unblock, paths)

    def _unblock(self, paths: list[Way]) -> None:
        if not self._is_over:
            self._network.unblock(paths)
            for path in paths:
                self._blocked.remove(path)

    def flap(self, a: int, b: int, after_ns: Iterable[int]) -> str:
        """Their connections break at each of these times from now, and may be made again."""
        for delay_ns in after_ns:
            self._world.after(delay_ns, None, self._flap_once, a, b)
        return f"the link of machines {a} and {b} flaps"

    def _flap_once(self, a: int, b: int) -> None:
        if not self._is_over:
            for pipe in list(self._network.connections):
                if (a, b) in pipe.paths:
                    pipe.cut("reset")

    def half_open(self, end: SimSocket) -> str:
        """What comes of it: the end that has lost it dials again, while the other still has it."""
        end.break_off("connection reset by somebody between")
        return f"machine {end.machine} alone loses a connection with machine {end.other.machine}"

    def stall(self, source: int, target: int, for_ns: int) -> str:
        path = (source, target)
        self._network.stall(path)
        self._stalled.append(path)
        self._world.after(for_ns, None, self._unstall, path)
        return (
            f"nothing is read of what machine {source} sends to {target} for {for_ns / S_NS:.3f} s"
        )

    def _unstall(self, path: Way) -> None:
        if not self._is_over:
            self._network.unstall(path)
            self._stalled.remove(path)

    def unplug(self, host: str, for_ns: int) -> str:
        """One of the network interfaces of a machine; the others stay."""
        self._network.unplug(host)
        self._unplugged.append(host)
        self._world.after(for_ns, None, self._plug_in, host)
        return f"the interface with {host} carries nothing for {for_ns / S_NS:.3f} s"

    def _plug_in(self, host: str) -> None:
        if not self._is_over:
            self._unplugged.remove(host)
            if host not in self._unplugged:
                self._network.plug_in(host)

    def flip_on_the_wire(self, part: float) -> str:
        """Until `good_wire`."""
        self._network.flips = part
        return f"of all that is sent {part:.0%} arrives damaged"

    def good_wire(self) -> None:
        self._network.flips = 0.0

    def kv_away(self, for_ns: int) -> str:
        self._job.around.kv.go_away(for_ns)
        return f"the agents' shared memory is away for {for_ns / S_NS:.3f} s"

    # -- the store

    def store_slow(self, most_ns: int, for_ns: int) -> str:
        """Each call takes up to `most_ns`."""
        self._disk_is("slow_ns", most_ns, 0, for_ns)
        return f"each call of the store takes up to {human_ns(most_ns)} for {for_ns / S_NS:.3f} s"

    def store_full(self, for_ns: int) -> str:
        self._disk_is("full", True, False, for_ns)
        return f"the store is full for {for_ns / S_NS:.3f} s"

    def store_away(self, part: float, for_ns: int) -> str:
        """For this part of all calls."""
        self._disk_is("away", part, 0.0, for_ns)
        how_often = "" if part == 1 else f" now and then ({part:.0%} of all calls)"
        return f"{AWAY}{how_often} for {for_ns / S_NS:.3f} s"

    def store_lies(self, for_ns: int) -> str:
        self._disk_is("lying", True, False, for_ns)
        return f"what is written into the store lies there differently, for {for_ns / S_NS:.3f} s"

    def store_falls_behind(self, for_ns: int) -> str:
        self._disk_is("is_behind", True, False, for_ns)
        return f"lists of the store show what is there now, for {for_ns / S_NS:.3f} s"

    def _disk_is(self, name: str, value: object, healthy: object, for_ns: int) -> None:
        disk = self._job.around.disk
        setattr(disk, name, value)
        self._world.after(for_ns, None, setattr, disk, name, healthy)

    def kill_persister(self, persister: Process) -> str:
        persister.end("killed")
        return f"killed {persister.name}"

    def kill_persister_at_call(self, persister: Process, call: int) -> str:
        """At the `call`-th port call from now on."""
        persister.dies_at_call = call
        return f"{persister.name} is to be killed at a call of a port"


def header_of(path: str, file: File) -> SlotHeader | None:
    """Of the slot that this file is; None when its header is damaged."""
    try:
        return parse_page(bytes(file.data[:PAGE_BYTES]), Path(path))
    except DamageError:
        return None
