"""Nemesis: what goes wrong in a run, drawn from its seed.

By hierarchy: a bit, a process, a link, a machine, a rack, the store, the agents' shared memory, a
clock, memory; alone, or one more within the moments in which the job recovers from the one before.
In some runs connections get stuck and break all along (`Wires.breaks`); that is not counted here.
In some with a store its lists fall behind once, and all memory is lost meanwhile. In some a
stranger has the addresses of lost machines, or says again what was said (`strangers.py`), or
writes where the agents meet (`meeting_stranger.py`).
After `Plan.faults_until_ns` it heals what can be healed and does nothing more: from then on the job
has to come to its end.

What it never does: hang a thread of a process that otherwise goes on, reorder what a machine's
memory has been told, lose what the agents' shared memory has written but with the
agent that has it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import accumulate
from random import Random

from keepstep.model.snapshot import SlotState
from keepstep.model.units import MS_NS, PAGE_BYTES, S_NS
from keepstep.sim.protocol.faults.acts import Acts, header_of
from keepstep.sim.protocol.faults.meeting_stranger import MeetingStranger
from keepstep.sim.protocol.faults.strangers import Squatter, WireRepeater
from keepstep.sim.protocol.job.job import SimJob
from keepstep.sim.protocol.job.nodes import SimNode
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.world.world import Process

AGAIN = 0.35  # how often something else goes wrong while all recover
BREAKS = 0.1  # in so many runs the connections between the ranks break once
LOST_WHILE_THEY_MEET = 0.25  # in so many runs machines are lost while agents meet, at each strike
FALLS_BEHIND = 0.25  # in so many runs with a store its lists fall behind once
TAKES_ADDRESSES = 0.1  # in so many runs a stranger has the addresses of lost machines
INJECTS = 0.1  # in so many what was said is said again by somebody between
WRITES = 0.4  # in so many of those whose agents sign somebody else writes where they meet
ALL_LOST = 0.7  # and all machines are lost meanwhile
SOON_NS = 3 * S_NS


class Nemesis:
    def __init__(self, job: SimJob) -> None:
        self._job = job
        self._world = job.world
        self._network = job.around.network
        self._disk = job.around.disk
        self._random = self._world.stream("nemesis")
        self._acts = Acts(job)
        self._over = False
        plan = job.plan
        meetings = self._world.stream("meetings")
        is_one = job.has_many_agents and meetings.random() < LOST_WHILE_THEY_MEET
        self._meetings = meetings if is_one else None
        for _ in range(plan.faults):
            at_ns = self._random.randrange(max(1, plan.faults_until_ns))
            self._world.after(at_ns, None, self._strike)
        breaks = self._world.stream("connections")
        if plan.faults and plan.world_size > 1 and breaks.random() < BREAKS:
            at_ns = breaks.randrange(max(1, plan.faults_until_ns))
            self._world.after(at_ns, None, self._break_connections)
        behind = self._world.stream("lists")
        if plan.faults and plan.store and behind.random() < FALLS_BEHIND:
            at_ns = behind.randrange(max(1, plan.faults_until_ns))
            self._world.after(at_ns, None, self._store_falls_behind, behind)
        self._let_strangers_in()
        self._world.after(plan.faults_until_ns, None, self._heal)

    def _let_strangers_in(self) -> None:
        """To what a lost machine has left, into connections, and where the agents meet."""
        plan, chance = self._job.plan, self._world.stream("between them")
        takes, injects = chance.random() < TAKES_ADDRESSES, chance.random() < INJECTS
        if plan.faults and plan.nodes > 1 and not plan.wires.light:
            if takes:
                Squatter(self._job, chance)
            if injects:
                WireRepeater(self._job, self._world.stream("said again"))
        writes = self._world.stream("written by strangers")
        if plan.faults and plan.signs and writes.random() < WRITES:
            MeetingStranger(self._job, writes)

    def _kinds(self) -> list[tuple[float, Callable[[], str | None]]]:
        """With weights. None: there is nothing to do that to."""
        plan = self._job.plan
        kinds: list[tuple[float, Callable[[], str | None]]] = [
            (8, self._kill_rank),
            (6, self._kill_rank_within),
            (4, self._kill_keeper),
            (4, self._kill_keeper_within),
            (4, self._kill_all_ranks),
            (4, self._flip_at_rest),
            (2, self._stop_rank),
            (1, self._stop_keeper),
            (1, self._preempt_keeper),
            (1, self._preempt_ranks),
            (1, self._eat_memory),
        ]
        if plan.launcher == "agents":
            kinds += [(3, self._kill_agent), (4, self._kill_agent_within)]
            kinds += [(1, self._stop_agent), (0.3, self._signal_agent)]
        if plan.jumps:
            kinds.append((2, self._jump_clock))
        if plan.nodes > 1:
            kinds += [
                (8, self._lose_machine),
                (4, self._cut),
                (2, self._isolate),
                (3, self._one_way),
                (3, self._clog),
                (3, self._stall),
                (2, self._half_open),
                (2, self._flap),
                (2, self._flip_on_the_wire),
                (4, self._flip_in_copy),
                (1, self._kv_away),
            ]
        if plan.interfaces > 1:
            kinds.append((8, self._unplug))
        if plan.racks:
            kinds.append((2, self._lose_rack))
        if plan.store:
            kinds += [
                (2, self._store_slow),
                (1, self._store_full),
                (1, self._store_away),
                (2, self._kill_persister_within),
                (2, self._store_lies),
                (2, self._kill_persister),
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
        self._job.struck(what)
        if self._random.random() < AGAIN:
            self._world.after(self._random.randrange(SOON_NS), None, self._strike)
        if self._meetings is not None:
            self._lose_machine_within(self._meetings)

    def _heal(self) -> None:
        self._over = True
        self._world.note("nemesis", "heals everything")
        self._acts.heal()
        self._network.flips = self._network.breaks = 0.0
        self._disk.heal()
        for node in self._job.nodes:
            node.machine.files.eaten_bytes = 0

    # -- whom

    def _node(self) -> SimNode:
        return self._random.choice(self._job.living_nodes())

    def _for_ns(self, most_s: float) -> int:
        return int(self._random.uniform(0.05, most_s) * S_NS)

    def _dead_s(self) -> float:
        return self._job.plan.link_dead_s

    def _program(self) -> Program | None:
        programs = [p for p in self._job.around.programs.values() if p.process.alive]
        return self._random.choice(programs) if programs else None

    # -- processes

    def _kill_rank(self) -> str | None:
        program = self._program()
        if program is None:
            return None
        return self._acts.kill_rank(program)

    def _kill_rank_within(self) -> str | None:
        program = self._program()
        if program is None:
            return None
        return self._acts.kill_rank_at_call(program, 1 + self._random.randrange(200))

    def _break_connections(self) -> None:
        self._job.struck(self._acts.break_connections())

    def _kill_all_ranks(self) -> str | None:
        return self._acts.kill_all_ranks()

    def _kill_keeper(self) -> str | None:
        node = self._node()
        if node.keeper is None or not node.keeper.process.alive:
            return None
        return self._acts.kill("keeper", node.machine, node.keeper.process)

    def _kill_keeper_within(self) -> str | None:
        node = self._node()
        if node.keeper is None or not node.keeper.process.alive:
            return None
        call = 1 + self._random.randrange(200)
        return self._acts.kill_at_call("keeper", node.machine, node.keeper.process, call)

    def _kill_agent(self) -> str | None:
        node = self._node()
        if node.agent is None or not node.agent.process.alive:
            return None
        return self._acts.kill("agent", node.machine, node.agent.process)

    def _kill_agent_within(self) -> str | None:
        node = self._node()
        if node.agent is None or not node.agent.process.alive:
            return None
        call = 1 + self._random.randrange(60)
        return self._acts.kill_at_call("agent", node.machine, node.agent.process, call)

    def _stop_rank(self) -> str | None:
        program = self._program()
        if program is None:
            return None
        return self._acts.stop(f"rank {program.who.rank}", program.process, self._for_ns(8.0))

    def _stop_keeper(self) -> str | None:
        node = self._node()
        if node.keeper is None or not node.keeper.process.alive:
            return None
        what = f"the keeper of machine {node.machine.number}"
        return self._acts.stop(what, node.keeper.process, self._for_ns(2.5 * self._dead_s()))

    def _stop_agent(self) -> str | None:
        node = self._node()
        if node.agent is None or not node.agent.process.alive:
            return None
        what = f"the agent of machine {node.machine.number}"
        return self._acts.stop(what, node.agent.process, self._for_ns(4 * self._dead_s()))

    def _signal_agent(self) -> str | None:
        """The job ends by it."""
        node = self._node()
        if node.agent is None or not node.agent.process.alive or self._job.is_latecomer(node):
            return None
        return self._acts.signal_agent(node, signal.SIGTERM)

    def _preempt_keeper(self) -> str | None:
        node = self._node()
        if node.keeper is None or not node.keeper.process.alive:
            return None
        return self._acts.preempt_keeper(node.machine, node.keeper)

    def _preempt_ranks(self) -> str | None:
        return self._acts.preempt_ranks()

    # -- machines

    def _lose_machine(self) -> str | None:
        node = self._node()
        if self._has_ended(node):
            return None  # the job is over there: nobody would miss it
        return self._acts.lose_machine(node)

    def _lose_machine_within(self, chance: Random) -> None:
        """At one of the next calls of its agent, which meets the others, after what has just gone
        wrong."""
        node = chance.choice(self._job.living_nodes())
        call = 1 + chance.randrange(80)
        if node.agent is not None and node.agent.process.alive and not self._has_ended(node):
            self._job.struck(self._acts.lose_machine_at_call(node, node.agent.process, call))

    def _has_ended(self, node: SimNode) -> bool:
        """Whether keepstep has, or is about to."""
        launcher = self._job.launcher
        if launcher is not None:
            return launcher.is_over
        return node.exit_code is not None or (
            node.agent is not None and node.agent.last_word is not None
        )

    def _lose_rack(self) -> str | None:
        rack = self._node().machine.rack
        if any(self._has_ended(node) for node in self._job.living_nodes()):
            return None
        lost = [node for node in self._job.living_nodes() if node.machine.rack == rack]
        for node in lost:
            self._acts.lose_machine(node)
        return f"lost {rack}: machines {[node.machine.number for node in lost]}"

    def _jump_clock(self) -> str | None:
        machine = self._node().machine
        return self._acts.jump_clock(machine, int(self._random.uniform(-100, 100) * S_NS))

    def _eat_memory(self) -> str | None:
        machine = self._node().machine
        left_bytes = self._random.randrange(8, 64) * PAGE_BYTES
        return self._acts.eat_memory(machine, left_bytes, self._for_ns(5.0))

    def _flip_at_rest(self) -> str | None:
        machine = self._node().machine
        slots = [(path, file) for path, file in machine.files.every_file() if "/slot-" in path]
        if not slots:
            return None
        path, file = self._random.choice(slots)
        header = header_of(path, file)
        if header is None:
            return None
        bit = self._random.randrange(8 * self._random.choice((PAGE_BYTES, len(file.data))))
        return self._acts.flip(machine, path, file, bit)

    def _flip_in_copy(self) -> str | None:
        """In what a holder keeps: most bytes of a small slot are not used."""
        machine = self._node().machine
        copies = [
            (path, file, header.payload_bytes)
            for path, file in machine.files.every_file()
            if "/held/" in path
            and (header := header_of(path, file)) is not None
            and header.state is SlotState.SEALED
        ]
        if not copies:
            return None
        path, file, nbytes = self._random.choice(copies)
        bit = 8 * PAGE_BYTES + self._random.randrange(8 * nbytes)
        return self._acts.flip(machine, path, file, bit)

    # -- the network

    def _pair(self) -> tuple[int, int] | None:
        nodes = self._job.living_nodes()
        if len(nodes) < 2:
            return None
        a, b = self._random.sample(nodes, 2)
        return a.machine.number, b.machine.number

    def _cut(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        return self._acts.cut(pair[0], pair[1], self._for_ns(2.5 * self._dead_s()))

    def _one_way(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        return self._acts.cut_one_way(pair[0], pair[1], self._for_ns(2.5 * self._dead_s()))

    def _isolate(self) -> str | None:
        here = self._node().machine.number
        others = [s.machine.number for s in self._job.living_nodes() if s.machine.number != here]
        return self._acts.isolate(here, others, self._for_ns(2.5 * self._dead_s()))

    def _clog(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        return self._acts.clog(pair[0], pair[1], self._for_ns(0.3 * self._dead_s()))

    def _flap(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        lasts_ns = [self._for_ns(1.0) for _ in range(self._random.randrange(2, 6))]
        return self._acts.flap(pair[0], pair[1], accumulate(lasts_ns))

    def _unplug(self) -> str | None:
        host = self._random.choice(self._node().machine.hosts)
        return self._acts.unplug(host, self._for_ns(5 * self._dead_s()))

    def _half_open(self) -> str | None:
        pipes = list(self._network.connections)
        if not pipes:
            return None
        end = self._random.choice(self._random.choice(pipes).ends)
        return self._acts.half_open(end)

    def _stall(self) -> str | None:
        pair = self._pair()
        if pair is None:
            return None
        return self._acts.stall(pair[0], pair[1], self._for_ns(1.5 * self._dead_s()))

    def _flip_on_the_wire(self) -> str | None:
        what = self._acts.flip_on_the_wire(self._random.choice((0.01, 0.05)))
        self._world.after(self._for_ns(5.0), None, self._acts.good_wire)
        return what

    def _kv_away(self) -> str | None:
        return self._acts.kv_away(self._for_ns(5.0))

    # -- the store

    def _store_slow(self) -> str | None:
        most_ns = self._random.choice((MS_NS * 100, S_NS))
        return self._acts.store_slow(most_ns, self._for_ns(10.0))

    def _store_full(self) -> str | None:
        return self._acts.store_full(self._for_ns(10.0))

    def _store_away(self) -> str | None:
        part = self._random.choice((1.0, 1.0, 0.05))
        return self._acts.store_away(part, self._for_ns(10.0))

    def _store_lies(self) -> str | None:
        return self._acts.store_lies(self._for_ns(10.0))

    def _store_falls_behind(self, chance: Random) -> None:
        """Who looks then goes on from what it sees; that is all there is without memory."""
        for_ns = int(chance.uniform(3.0, 30.0) * S_NS)
        self._job.struck(self._acts.store_falls_behind(for_ns))
        if chance.random() < ALL_LOST:
            self._world.after(chance.randrange(for_ns), None, self._lose_all_machines)

    def _lose_all_machines(self) -> None:
        lost = self._job.living_nodes()
        if self._over or any(self._has_ended(node) for node in lost):
            return
        for node in lost:
            self._acts.lose_machine(node)
        self._job.struck(f"lost all machines: {[node.machine.number for node in lost]}")

    def _persister(self) -> Process | None:
        found = [
            process
            for node in self._job.living_nodes()
            for process in node.machine.processes.values()
            if process.role == "persister"
        ]
        return self._random.choice(found) if found else None

    def _kill_persister(self) -> str | None:
        persister = self._persister()
        if persister is None:
            return None
        return self._acts.kill_persister(persister)

    def _kill_persister_within(self) -> str | None:
        persister = self._persister()
        if persister is None:
            return None
        return self._acts.kill_persister_at_call(persister, 1 + self._random.randrange(100))
