"""Foreign launcher: starts ranks and knows nothing of keepstep, as torchrun does: when one fails,
all are killed and started again.

Waits until there are as many machines as the job has nodes. Does not tell ranks of each other's
failures: keepstep finds its own way there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.sim.protocol.job.nodes import SimNode
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.job.surroundings import Surroundings
from keepstep.sim.protocol.world.world import Process

LOOK_AGAIN_NS = 100_000_000
FIRST_PORT = 30_000


class ForeignLauncher:
    """`living`: the nodes whose machines live."""

    def __init__(self, around: Surroundings, living: Callable[[], Sequence[SimNode]]) -> None:
        self._around = around
        self._living = living
        self._random = around.world.stream("launcher")
        self._attempt = -1
        self._programs: list[Program] = []
        self.is_over = False

    def begin(self) -> None:
        self._around.world.after(0, None, self._start)

    def _start(self) -> None:
        """All ranks, once there are nodes enough."""
        around = self._around
        nodes = list(self._living())[: around.plan.nodes]
        if len(nodes) < around.plan.nodes:
            around.world.after(LOOK_AGAIN_NS, None, self._start)
            return
        self._attempt += 1
        self._programs = []
        host = nodes[0].machine.host
        port = FIRST_PORT + self._attempt
        here = around.plan.ranks_per_node
        for number, node in enumerate(nodes):
            for local in range(here):
                rank = number * here + local
                process = node.machine.start("rank", str(rank))
                if rank == 0:
                    around.meetings.open(process, host, port)
                environ = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(around.plan.world_size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(here),
                    "MASTER_ADDR": host,
                    "MASTER_PORT": str(port),
                    "KEEPSTEP_ATTEMPT": str(self._attempt),
                }
                self._add(node, process, environ)

    def _add(self, node: SimNode, process: Process, environ: dict[str, str]) -> None:
        program = node.new_program(process, environ)
        self._programs.append(program)
        delay_ns = self._around.plan.takes_ns("rank_start_ns", self._random)
        process.after(delay_ns, program.begin)
        attempt = self._attempt
        process.on_end.append(lambda: self._ended(attempt))

    def _ended(self, attempt: int) -> None:
        """A rank of this attempt."""
        delay_ns = self._around.plan.takes_ns("notice_ns", self._random)
        self._around.world.after(delay_ns, None, self._look, attempt)

    def _look(self, attempt: int) -> None:
        if attempt != self._attempt or self.is_over:
            return
        ended = [program for program in self._programs if not program.process.alive]
        if any(program.exit_code != 0 for program in ended):
            self._attempt += 1  # nothing more is heard of this one
            for program in self._programs:
                program.process.end("killed by its launcher")
            self._around.world.after(LOOK_AGAIN_NS, None, self._start)
        elif len(ended) == len(self._programs):
            self.is_over = True
