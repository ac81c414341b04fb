"""Joining: from the beginning of a rank's process until it can ask where to resume.

    own the status page -> find the agent, if there is one -> find the keeper -> under a foreign
    launcher with several nodes: introduce the keepers to each other -> open the slots

Comes in: answers of ports. Goes out: a `Joined`, or why this process cannot be a rank.

Invariant: from when the page is owned and in its place, no keeper removes the job's memory because
it finds nobody (core/recovery/job_lifetime.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import IdentityError, KeepstepError
from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.rank.agent_client import AgentClient
from keepstep.runtime.rank.bootstrap import Bootstrap, NodeFacts
from keepstep.runtime.rank.keeper_client import KeeperClient
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

OWN_WITHIN_NS = 2 * S_NS  # a killed owner of the page takes a moment to be gone
OWN_AGAIN_NS = 10 * MS_NS


@dataclass(frozen=True, slots=True)
class Joined:
    """What a rank is made of. Whoever has it closes it."""

    page: StatusPage
    keeper: KeeperClient
    agent: AgentClient

    def release(self) -> None:
        """In a forked child: the parent alone has it."""
        self.keeper.release()
        self.agent.release()
        self.page.close()

    def close(self) -> None:
        self.keeper.close()
        self.agent.close()
        self.page.close()


class Joining:
    """One process's. `done` or `failed` is called once."""

    def __init__(
        self,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
        node: NodeFacts,
        done: Callable[[Joined], None],
        failed: Callable[[KeepstepError], None],
    ) -> None:
        self._world = world
        self._options = options
        self._who = who
        self._node = node
        self._done = done
        self._failed = failed
        self._agent = AgentClient(world.agents, who.rank, world.pid)
        self._keeper = KeeperClient(world, who.rank, who.world_size)

    def begin(self) -> None:
        self._own(self._find_keeper)

    def _own(self, then: Callable[[StatusPage], None]) -> None:
        world, who = self._world, self._who
        deadline_ns = world.clock.monotonic_ns() + OWN_WITHIN_NS

        def own() -> None:
            page = StatusPage.own(world.memory, self._options.job_dir, who.rank, world.clock)
            if page is not None:
                then(page)
            elif world.clock.monotonic_ns() < deadline_ns:
                world.timers.after(OWN_AGAIN_NS, own)
            else:
                self._fail(
                    IdentityError(
                        f"rank {who.rank} of job {who.job!r} is already running in another "
                        "process; wait for it to end, or give this run a name of its own (job=... "
                        "or KEEPSTEP_JOB)"
                    )
                )

        own()

    def _find_keeper(self, page: StatusPage) -> None:
        def found() -> None:
            if page.is_there():
                self._meet(page)
            else:  # the keeper before this one was about to end, and has removed it
                page.close()
                self._own(self._meet)

        def missing(error: KeepstepError) -> None:
            page.close()
            self._fail(error)

        self._agent.connect()
        self._keeper.connect(found, missing)

    def _meet(self, page: StatusPage) -> None:
        world, who = self._world, self._who
        joined = Joined(page, self._keeper, self._agent)

        def fail(error: KeepstepError) -> None:
            joined.close()
            self._failed(error)

        def done() -> None:
            self._done(joined)

        if who.has_many_nodes and not world.has_agent:
            Bootstrap(world, self._node, who, self._keeper, done, fail).run()
        else:
            done()

    def _fail(self, error: KeepstepError) -> None:
        """Without a page."""
        self._keeper.close()
        self._agent.close()
        self._failed(error)
