"""Job lifetime: how long the keeper keeps a job's memory, and when it ends.

Comes in: who is connected, what they said last, the time. Goes out: at most one `Finish` with its
reason. Never removes anything while a rank or the agent is connected and has not said that the job
is over, nor under a rank that is about to come: it owns its page already. Whatever way a job ends
but well, its memory may be all there is of it: it stays for `grace_ns` after the last of them is
gone, so that the job can be started again, and never longer (a keeper without this rule pins
model-sized memory for ever). Only a job that ended well, and a person who says so, remove it at
once.

With several nodes, ranks that ended well here are not enough: another node's may fail in their last
moments, and what they would resume from rests here. So the memory stays until all nodes' ranks
ended well, or for the grace time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from keepstep.model.units import S_NS, every, human_ns

EMPTY_NS = 1 * S_NS  # who comes back at once finds the same keeper
FIRST_NS = 10 * S_NS  # however short the grace: whoever started the keeper needs a moment to say so


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: write the newest step to the store if there is one, remove the memory,
    go."""

    ok: bool
    why: str


@dataclass
class JobLifetime:
    """One keeper's."""

    grace_ns: int
    alone_since_ns: int
    world_size: int | None = None  # of the ranks here
    ranks: set[int] = field(default_factory=set)
    agent: bool = False
    goodbyes: dict[int, tuple[bool, str]] = field(default_factory=dict)
    finish: Finish | None = None
    met: bool = False  # anybody, ever
    # unknown until a mesh begins, which it never does in a job of one node
    nodes: int | None = None
    all_nodes_ended: bool = False  # well; so the leading keeper says

    def mesh_began(self, nodes: int, ranks_here: Collection[int]) -> None:
        """Before its ranks come. Only a keeper that came in the middle may have met them before it
        was told of their mesh."""
        kept = ranks_here if self.nodes is None else ()
        self.goodbyes = {rank: said for rank, said in self.goodbyes.items() if rank in kept}
        self.nodes, self.all_nodes_ended, self.world_size = nodes, False, len(ranks_here)

    def rank_came(self, rank: int, world_size: int) -> None:
        """A rank has connected; `world_size`: of the ranks here."""
        if world_size != self.world_size:
            # another job's worth of ranks: what the old ones said counts no more
            self.goodbyes.clear()
        self.world_size, self.met = world_size, True
        self.ranks.add(rank)
        self.goodbyes.pop(rank, None)

    def rank_said_bye(self, rank: int, ok: bool, why: str) -> None:
        """A rank ends, well or with an error."""
        self.goodbyes[rank] = (ok, why)

    def rank_left(self, rank: int, now_ns: int) -> None:
        """Its process is gone."""
        self.ranks.discard(rank)
        self._mark_alone(now_ns)

    def agent_came(self) -> None:
        """An agent has connected."""
        self.agent, self.met = True, True

    def agent_left(self, now_ns: int) -> None:
        """Its process is gone."""
        self.agent = False
        self._mark_alone(now_ns)

    def agent_said_end(self, ok: bool, why: str, holds_snapshots: bool = False) -> bool:
        """The agent says that the job is over. False when the memory is kept for the grace time."""
        if holds_snapshots and not ok:
            return False
        self.finish = Finish(ok, why)
        return True

    def memory_unwanted(self, why: str) -> None:
        """A person wants the memory gone."""
        self.finish = Finish(False, why)

    def _mark_alone(self, now_ns: int) -> None:
        if not self.ranks and not self.agent:
            self.alone_since_ns = now_ns

    @property
    def ended_here(self) -> bool:
        """All ranks of this node said that they ended well."""
        said = self.goodbyes.values()
        return (
            self.world_size is not None
            and len(said) == self.world_size
            and all(ok for ok, _ in said)
        )

    def decide(
        self,
        now_ns: int,
        holds_snapshots: bool = True,
        is_entered: Callable[[], bool] = lambda: False,
    ) -> Finish | None:
        """What follows from all that was said so far. `is_entered`: whether a living process owns
        a rank's page; asked only when all have been gone for long enough."""
        if self.finish or self.agent:
            return self.finish
        nodes = self.nodes or 1
        if self.ended_here and (nodes == 1 or self.all_nodes_ended):
            others = f" of this node, and those of {nodes - 1} more," if nodes > 1 else ""
            return Finish(True, f"{every(self.world_size or 0, 'rank')}{others} ended well")
        if self.ranks:
            return None
        why = self._alone_for_long(now_ns, holds_snapshots)
        return None if why is None or is_entered() else Finish(False, why)

    def _alone_for_long(self, now_ns: int, holds_snapshots: bool) -> str | None:
        alone_ns = now_ns - self.alone_since_ns
        if self.met and not holds_snapshots and alone_ns > EMPTY_NS:
            return "agent and ranks are gone, and there is no snapshot to keep"
        grace_ns = self.grace_ns if self.met else max(self.grace_ns, FIRST_NS)
        if alone_ns > grace_ns:
            return (
                f"agent and ranks have been gone for {human_ns(alone_ns)}, longer than the "
                f"grace time of {human_ns(grace_ns)}"
            )
        return None
